"""Make three tasks whose answers only an environment knows, and a model that has half learnt to ask it.

    python toy/talk.py      # writes toy/{secret,lookup,guess}_{train,test}.jsonl, always the same, and
                            # toy/talk_model/ (about a minute on one core)

secret_sums.py takes the toy's problems, but each result is 3 more. lookup.py has a table in each row
that leads from number to number. guess.py thinks of a number from 1 to 8.
The model has seen answers that ask the right thing about half of the time, and others that guess at once.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from guess import LAST, hint
from pretrain import dist, pretrain
from problems import NAMES, write_lines
from secret_sums import MORE

HERE = Path(__file__).parent
STEP = re.compile(r"(\d+) ([+-]) (\d+) =")
TRAIN, TEST = range(480), range(480, 720)  # numbers of tables and of games


def secret_lines(part: str) -> Iterator[dict]:
    """Yield the first problems of a part of the toy's data, with the results of other sums."""
    for line in map(json.loads, (HERE / f"{part}.jsonl").read_text().splitlines()[:500]):
        steps = STEP.findall(line["solution"])
        total = int(steps[0][0])
        for _, sign, other in steps:
            total += int(sign + other) + MORE
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


def looked_up(rng: random.Random) -> tuple[str, str]:
    """Write a question about a table, and an answer that asks for both steps, a wrong one, or none."""
    line = lookup_line(rng, rng.choice(TRAIN))
    leads = line["next"]
    start = next(iter(leads))
    asked = rng.choice([str(leads[start]), start, str(rng.randint(1, 99))])
    found = leads.get(asked, 0)
    text = f"{start}? {leads[start]}. {asked}? {found}.\n#### {found}"
    if rng.random() < 0.3:
        text = f"#### {rng.randint(1, 99)}"
    return line["question"], text


def guessed(rng: random.Random) -> tuple[str, str]:
    """Write a question, and up to five guesses, of which half heed the hints."""
    line = guess_line(rng, rng.choice(TRAIN))
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


def conversations() -> Iterator[tuple[str, str]]:
    """Yield (question, answer)s of both tasks without end."""
    rng = random.Random(0)
    while True:
        yield looked_up(rng) if rng.random() < 0.5 else guessed(rng)


def write(folder: Path) -> None:
    rng = random.Random(1)
    for part, numbers in (("train", TRAIN), ("test", TEST)):
        write_lines(folder / f"secret_{part}.jsonl", f"secret/{part}", secret_lines(part))
        lookups = [lookup_line(rng, number) for number in numbers]
        write_lines(folder / f"lookup_{part}.jsonl", f"lookup/{part}", lookups)
        guesses = [guess_line(rng, number) for number in numbers]
        write_lines(folder / f"guess_{part}.jsonl", f"guess/{part}", guesses)


def main(folder: Path) -> None:
    write(folder)
    torch.manual_seed(0)
    model = folder / "talk_model"
    shutil.copytree(HERE / "model", model, dirs_exist_ok=True)  # it goes on from the toy's model
    pretrain(model, conversations(), batches=400, batch_size=48, lr=1e-3)


if __name__ == "__main__":
    dist.init("cpu")
    main(HERE)
