"""Make the hard toy task: chains of 1 to 6 sums below 100, and a model that rarely solves the long ones.

    python toy/hard.py      # writes toy/hard_train.jsonl (480) and toy/hard_test.jsonl (600), always the
                            # same, and toy/hard_model/ (about 2 minutes on one core)

"58+7-9" asks for 56. The number of sums is the level of a problem. Pre-training has seen many short chains
and few long ones, and ends early; so reinforcement learning begins with problems that are nearly always
solved and others that nearly never are, and answers are 13 to 52 tokens long. Train, test and pre-training
share no problem, except at level 1: pre-training has seen most of its few problems.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from pretrain import dist, pretrain
from problems import Arithmetic, Lines, write_lines

HERE = Path(__file__).parent
LEVELS = range(1, 7)
SHARES = (30, 25, 20, 12, 8, 5)  # per cent of each level in pre-training
BATCHES, BATCH_SIZE = 600, 48    # of pre-training


def problem(rng: random.Random, level: int) -> tuple[dict, Arithmetic]:
    """Make one problem: its data line without an id, and its arithmetic, the start and the signed steps."""
    total = rng.randint(1, 99)
    numbers = [total]
    worked = []
    for _ in range(level):
        steps = [n for n in range(-9, 10) if n and 1 <= total + n <= 99]
        step = rng.choice(steps)
        worked.append(f"{total}{step:+d}={total + step}\n")
        total += step
        numbers.append(step)
    question = str(numbers[0]) + "".join(f"{n:+d}" for n in numbers[1:])
    solution = f"{''.join(worked)}#### {total}"
    line = {"question": question, "answer": str(total), "level": level, "solution": solution}
    return line, tuple(numbers)


def pretraining() -> Iterator[tuple[dict, Arithmetic]]:
    """Yield the problems of pre-training."""
    rng = random.Random(3)
    for _ in range(BATCHES * BATCH_SIZE):
        yield problem(rng, rng.choices(LEVELS, SHARES)[0])


def distinct(count: int, seed: int, taboo: set[Arithmetic]) -> Lines:
    """Make `count` problems, as many of each level, no two the same and none of `taboo`."""
    rng = random.Random(seed)
    lines = {}
    while len(lines) < count:
        level = LEVELS[len(lines) % len(LEVELS)]
        line, numbers = problem(rng, level)
        while numbers in lines or numbers in taboo:
            line, numbers = problem(rng, level)
        lines[numbers] = line
    return lines


def splits() -> tuple[Lines, Lines]:
    """Make (train, test), each from the arithmetic to the data line."""
    seen = {numbers for line, numbers in pretraining() if line["level"] > 1}
    test = distinct(600, seed=1, taboo=seen)
    return distinct(480, seed=2, taboo=seen | test.keys()), test


def write(folder: Path) -> None:
    for part, lines in zip(("train", "test"), splits(), strict=True):
        write_lines(folder / f"hard_{part}.jsonl", f"hard/{part}", lines.values())


def main(folder: Path) -> None:
    write(folder)
    torch.manual_seed(0)
    model = folder / "hard_model"
    shutil.copytree(HERE / "model", model, dirs_exist_ok=True)  # the toy's tokenizer and shape
    (model / "model.safetensors").unlink(missing_ok=True)
    texts = ((line["question"], line["solution"]) for line, _ in pretraining())
    pretrain(model, texts, batches=1000, batch_size=BATCH_SIZE, lr=3e-3, stop=BATCHES)


if __name__ == "__main__":
    dist.init("cpu")
    main(HERE)
