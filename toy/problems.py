"""Make the toy task: word problems of two or three steps of plus and minus, below 100, with worked solutions.

    python toy/problems.py      # writes toy/train.jsonl (4,000) and toy/test.jsonl (500), always the same

Train and test share no arithmetic: the numbers and signs of a test problem occur in no training problem,
with any words, and pre-training (toy/pretrain.py) avoids them too.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
Arithmetic = tuple[int, ...]  # the start and the signed steps
Lines = dict[Arithmetic, dict]  # data lines
NAMES = "Ada Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kim Leo Mia Noah Ola Pia".split()
ITEMS = "apples books cards coins cookies eggs marbles pens shells stamps stickers stones".split()
STARTS = [
    "{name} has {n} {items}.",
    "{name} starts the day with {n} {items}.",
    "There are {n} {items} in the box of {name}.",
    "At first {name} owns {n} {items}.",
]
GAINS = [
    "{name} buys {n} more.",
    "{name} finds {n} more at home.",
    "{other} brings {n} more.",
    "Then {name} gets {n} more from {other}.",
    "After lunch {n} more come in.",
]
LOSSES = [
    "{name} gives {n} to {other}.",
    "{name} loses {n} on the way.",
    "{name} sells {n} of them.",
    "Then {other} takes {n} away.",
    "After lunch {n} are gone.",
]
QUESTIONS = [
    "How many {items} does {name} have now?",
    "How many {items} are left?",
    "How many {items} are there in the end?",
]


def problem(rng: random.Random) -> tuple[dict, Arithmetic]:
    """Make one problem: its data line without an id, and its arithmetic."""
    name, other = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    total = rng.randint(5, 60)
    numbers = [total]
    text = [rng.choice(STARTS).format(name=name, n=total, items=items)]
    worked = [f"{name} starts with {total} {items}."]
    for _ in range(rng.choice([2, 3])):
        steps = [n for n in range(-40, 41) if abs(n) >= 2 and 1 <= total + n <= 99]
        step = rng.choice(steps)
        sentences, sign = (GAINS, "+") if step > 0 else (LOSSES, "-")
        sentence = rng.choice(sentences)
        text.append(sentence.format(name=name, other=other, n=abs(step)))
        worked.append(f"{total} {sign} {abs(step)} = {total + step}.")
        total += step
        numbers.append(step)
    text.append(rng.choice(QUESTIONS).format(name=name, items=items))
    solution = f"{' '.join(worked)}\n#### {total}"
    line = {"question": " ".join(text), "answer": str(total), "solution": solution}
    return line, tuple(numbers)


def problems(seed: int, taboo: frozenset[Arithmetic]) -> Iterator[tuple[dict, Arithmetic]]:
    """Yield an endless stream of problems; none has an arithmetic of `taboo`."""
    rng = random.Random(seed)
    while True:
        line, numbers = problem(rng)
        if numbers not in taboo:
            yield line, numbers


def distinct(count: int, seed: int, taboo: frozenset[Arithmetic]) -> Lines:
    """Make `count` problems, no two with the same arithmetic."""
    lines = {}
    stream = problems(seed, taboo)
    while len(lines) < count:
        line, numbers = next(stream)
        lines.setdefault(numbers, line)
    return lines


def splits() -> tuple[Lines, Lines]:
    """Make (train, test), each from the arithmetic to the data line."""
    test = distinct(500, seed=1, taboo=frozenset())
    return distinct(4000, seed=2, taboo=frozenset(test)), test


def write(folder: Path) -> None:
    for part, lines in zip(("train", "test"), splits(), strict=True):
        write_lines(folder / f"{part}.jsonl", f"toy/{part}", lines.values())


def write_lines(path: Path, prefix: str, lines: Iterable[dict]) -> None:
    """Write data lines, with ids that count on from `prefix`."""
    rows = [{"id": f"{prefix}/{i}", **line} for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(HERE)
