"""Make the problems of the toy, of the testbed and of the court, always the same (toy_models.py writes them).

toy        Word problems of two or three steps of plus and minus, below 100. Train and test share no
           arithmetic: numbers and signs of a test problem occur in no training problem, with any words.
hard       Chains of 1 to 6 sums below 100: "58+7-9" asks for 56. The number of sums is the level.
long_sums  A number is added 4 to 18 times, modulo 100: "17+8x6" asks for 65. An answer has a line for each
           sum, "1:17+8=25", "2:25+8=33", and then "#### 65". The level is the number of sums.
talk       Three tasks whose answers only an environment knows. secret_sums.py takes the toy's problems, but
           each result is 3 more. lookup.py has a table in each row that leads from number to number.
           guess.py thinks of a number from 1 to 8.

No problem of one part of a task is in another, or in pre-training, but for level 1 of hard: pre-training has
seen most of its few problems.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "toy"))

from guess import LAST, hint  # noqa: E402
from secret_sums import MORE  # noqa: E402

Arithmetic = tuple[int, ...]  # the numbers of a problem, which no two problems of a task share
Made = tuple[dict, Arithmetic]  # a data line without an id
Lines = dict[Arithmetic, dict]
NAMES = "Ada Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Noah Ola Pia".split()
ITEMS = "apples books cards coins cookies eggs marbles pens shells stamps stickers stones".split()
STARTS = ["{name} has {n} {items}.", "{name} starts the day with {n} {items}.",
          "There are {n} {items} in the box of {name}.", "At first {name} owns {n} {items}."]
GAINS = ["{name} buys {n} more.", "{name} finds {n} more at home.", "{other} brings {n} more.",
         "Then {name} gets {n} more from {other}.", "After lunch {n} more come in."]
LOSSES = ["{name} gives {n} to {other}.", "{name} loses {n} on the way.", "{name} sells {n} of them.",
          "Then {other} takes {n} away.", "After lunch {n} are gone."]
QUESTIONS = ["How many {items} does {name} have now?", "How many {items} are left?",
             "How many {items} are there in the end?"]
HARD_SHARES = (30, 25, 20, 12, 8, 5)  # per cent of each level of hard in pre-training
HARD_SEEN = 600 * 48                  # problems of hard in pre-training
WRONG = 0.25                     # of the lines of long_sums in pre-training
SLIPS = (-10, -2, -1, 1, 2, 10)  # by which they are wrong
STEP = re.compile(r"(\d+) ([+-]) (\d+) =")
TALKS = {"train": range(480), "test": range(480, 720)}  # numbers of tables and of games


# ---- arithmetic

def word_problem(rng: random.Random, lengths: Sequence[int]) -> Made:
    """Make a problem of the toy, of a number of steps that is drawn from `lengths`."""
    name, other = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    total = rng.randint(5, 60)
    numbers = [total]
    text = [rng.choice(STARTS).format(name=name, n=total, items=items)]
    worked = [f"{name} starts with {total} {items}."]
    for _ in range(rng.choice(lengths)):
        step = rng.choice([n for n in range(-40, 41) if abs(n) >= 2 and 1 <= total + n <= 99])
        sentences, sign = (GAINS, "+") if step > 0 else (LOSSES, "-")
        text.append(rng.choice(sentences).format(name=name, other=other, n=abs(step)))
        worked.append(f"{total} {sign} {abs(step)} = {total + step}.")
        total += step
        numbers.append(step)
    text.append(rng.choice(QUESTIONS).format(name=name, items=items))
    solution = f"{' '.join(worked)}\n#### {total}"
    return {"question": " ".join(text), "answer": str(total), "solution": solution}, tuple(numbers)


def chain(rng: random.Random, level: int) -> Made:
    """Make a problem of hard."""
    total = rng.randint(1, 99)
    numbers, worked = [total], []
    for _ in range(level):
        step = rng.choice([n for n in range(-9, 10) if n and 1 <= total + n <= 99])
        worked.append(f"{total}{step:+d}={total + step}\n")
        total += step
        numbers.append(step)
    question = str(numbers[0]) + "".join(f"{n:+d}" for n in numbers[1:])
    solution = f"{''.join(worked)}#### {total}"
    return {"question": question, "answer": str(total), "level": level, "solution": solution}, tuple(numbers)


def long_sum(rng: random.Random, level: int, wrong: float = 0.0) -> Made:
    """Make a problem of long_sums. A share of the lines of its solution is `wrong`: such a line ends with
    "!", as "2:25+8=34!" does, and is tried again."""
    start, step = rng.randint(1, 99), rng.randint(2, 9)
    tried = []
    for i in range(1, level + 1):
        total = (start + i * step) % 100
        line = f"{i}:{(total - step) % 100}+{step}="
        while rng.random() < wrong:
            tried.append(f"{line}{(total + rng.choice(SLIPS)) % 100}!")
        tried.append(f"{line}{total}")
    solution = "\n".join([*tried, f"#### {total}"])
    question = f"{start}+{step}x{level}"
    line = {"question": question, "answer": str(total), "level": level, "solution": solution}
    return line, (start, step, level)


class Task(NamedTuple):
    make: Callable[[random.Random, Any], Made]  # from one of the levels
    levels: Sequence
    files: dict[str, tuple[int, int]]           # how many problems a file has, and its seed


TASKS = {
    "toy": Task(word_problem, ((2, 3),), {"toy/test.jsonl": (500, 1), "toy/train.jsonl": (4000, 2)}),
    "hard": Task(chain, range(1, 7), {
        "toy/hard_test.jsonl": (600, 1), "toy/hard_train.jsonl": (480, 2),
        "runs/hard_validation.jsonl": (600, 4)}),  # for compare.py
    "long_sums": Task(long_sum, (4, 6, 8, 12, 18), {
        f"experiments/long_sums/{part}.jsonl": (number, seed)
        for seed, (part, number) in enumerate({"train": 240, "validation": 500, "test": 500}.items())}),
}


def splits(name: str) -> dict[str, Lines]:
    """Make the problems of each file, as many of each level."""
    task, made = TASKS[name], {}
    taken = {numbers for line, numbers in hard_seen() if line["level"] > 1} if name == "hard" else set()
    for file, (number, seed) in task.files.items():
        rng, lines = random.Random(seed), {}
        while len(lines) < number:
            line, numbers = task.make(rng, task.levels[len(lines) % len(task.levels)])
            if numbers not in taken:
                lines.setdefault(numbers, line)
        taken |= lines.keys()
        made[file] = lines
    return made


# ---- tasks with an environment

def secret_lines(part: str) -> Iterator[dict]:
    """Yield the first problems of a part of the toy's data, with the results of other sums."""
    for line in map(json.loads, (ROOT / f"toy/{part}.jsonl").read_text().splitlines()[:500]):
        steps = STEP.findall(line["solution"])
        total = int(steps[0][0]) + sum(int(sign + other) + MORE for _, sign, other in steps)
        if total >= 0:
            yield {"question": line["question"], "answer": str(total)}


def lookup_line(rng: random.Random, number: int) -> dict:
    """Make a table of six numbers in a ring, and ask for two steps through it."""
    ring = rng.sample(range(1, 100), 6)
    leads = dict(zip(map(str, ring), [*ring[1:], ring[0]], strict=True))
    question = f"Table {number}: two steps from {ring[0]}."
    return {"question": question, "answer": str(ring[2]), "next": leads}


def guess_line(rng: random.Random, number: int) -> dict:
    question = f"Game {number}: {rng.choice(NAMES)} thinks of a number from 1 to {LAST}."
    return {"question": question, "number": rng.randint(1, LAST)}


# ---- files

def write(name: str, root: Path, only: str = "") -> None:
    """Write the files of a task below `root`, or those that have `only` in their names."""
    if name == "talk":
        rng = random.Random(1)
        for part, numbers in TALKS.items():
            write_lines(root / f"toy/secret_{part}.jsonl", "secret", secret_lines(part))
            for task, make in (("lookup", lookup_line), ("guess", guess_line)):
                lines = [make(rng, number) for number in numbers]
                write_lines(root / f"toy/{task}_{part}.jsonl", task, lines)
        return
    for file, lines in splits(name).items():
        if only in file:
            write_lines(root / file, name, lines.values())


def write_lines(path: Path, task: str, lines: Iterable[dict]) -> None:
    """Write data lines, with ids that count on."""
    part = path.stem.rpartition("_")[2]
    rows = [{"id": f"{task}/{part}/{i}", **line} for i, line in enumerate(lines)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- pre-training: (question, answer)s

def toy_texts() -> Iterator[tuple[str, str]]:
    """A third of the answers are worked, two thirds are guesses, and no problem is one of the test."""
    problems, rng, taken = random.Random(3), random.Random(0), splits("toy")["toy/test.jsonl"]
    while True:
        line, numbers = word_problem(problems, (2, 3))
        if numbers not in taken:
            worked = rng.random() < 1 / 3
            yield line["question"], line["solution"] if worked else f"#### {line['answer']}"


def hard_seen() -> Iterator[Made]:
    """Yield the problems of pre-training: many short chains and few long ones."""
    rng = random.Random(3)
    for _ in range(HARD_SEEN):
        yield chain(rng, rng.choices(TASKS["hard"].levels, HARD_SHARES)[0])


def hard_texts() -> Iterator[tuple[str, str]]:
    return ((line["question"], line["solution"]) for line, _ in hard_seen())


def teacher_texts() -> Iterator[tuple[str, str]]:
    """Problems of hard, equally many of each level, that no file of it has, but for level 1."""
    rng, taken = random.Random(5), set().union(*splits("hard").values())
    while True:
        line, numbers = chain(rng, rng.choice(TASKS["hard"].levels))
        if numbers not in taken or line["level"] == 1:
            yield line["question"], line["solution"]


def long_sums_texts() -> Iterator[tuple[str, str]]:
    """A quarter of the lines are wrong, so the answers to a problem differ in length, with a tail, and a
    model that sees that a line is wrong can mend it."""
    rng, taken = random.Random(3), set().union(*splits("long_sums").values())
    while True:
        line, numbers = long_sum(rng, rng.choice(TASKS["long_sums"].levels), WRONG)
        if numbers not in taken:
            yield line["question"], line["solution"]


def looked_up(rng: random.Random) -> tuple[str, str]:
    """Write a question about a table, and an answer that asks for both steps, a wrong one, or none."""
    line = lookup_line(rng, rng.choice(TALKS["train"]))
    leads = line["next"]
    start = next(iter(leads))
    asked = rng.choice([str(leads[start]), start, str(rng.randint(1, 99))])
    reached = leads.get(asked, 0)
    text = f"{start}? {leads[start]}. {asked}? {reached}.\n#### {reached}"
    if rng.random() < 0.3:
        text = f"#### {rng.randint(1, 99)}"
    return line["question"], text


def guessed(rng: random.Random) -> tuple[str, str]:
    """Write a question, and up to five guesses, of which half heed the hints."""
    line = guess_line(rng, rng.choice(TALKS["train"]))
    low, high, text = 1, LAST, ""
    for _ in range(5):
        number = rng.randint(low, high) if rng.random() < 0.5 else rng.randint(1, LAST)
        said = hint(number, line["number"])
        text += f"{number}? {said}. "
        if said == "yes":
            break
        low = max(low, number + 1) if said == "higher" else low
        high = min(high, number - 1) if said == "lower" else high
        low, high = min(low, line["number"]), max(high, line["number"])
    return line["question"], f"{text[:-1]}\n#### {number}"


def talk_texts() -> Iterator[tuple[str, str]]:
    """Answers of lookup and guess that ask the right thing about half of the time, and others that do not."""
    rng = random.Random(0)
    return (looked_up(rng) if rng.random() < 0.5 else guessed(rng) for _ in count())
