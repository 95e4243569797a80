"""Make the court's testbed: add a number 4 to 18 times, modulo 100, with second thoughts.

    python experiments/long_sums.py    # writes into experiments/long_sums/ the problems of train.jsonl (240),
                                       # validation.jsonl and test.jsonl (500 each), always the same, and
                                       # model/ (9 minutes on one core)

"17+8x6" asks for 65. An answer has a line for each sum, "1:17+8=25", "2:25+8=33", and then "#### 65". In
pre-training a quarter of the lines are wrong, end with "!" and are tried again: "2:25+8=34!". So the answers
to one problem differ in length, with a tail, and a model that sees that a line is wrong can mend it.
The model has two layers, and pre-training ends early. Reinforcement learning can learn to add, to see what
is wrong, and to doubt no more than it must. The level is the number of sums. No problem of train, validation
or test is in another of them, or in pre-training.
"""

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

TOY = Path(__file__).parent.parent / "toy"
sys.path.append(str(TOY))

from pretrain import dist, pretrain, write_json  # noqa: E402
from problems import Arithmetic, Lines, write_lines  # noqa: E402

LEVELS = (4, 6, 8, 12, 18)
WRONG = 0.25                     # of the lines in pre-training
SLIPS = (-10, -2, -1, 1, 2, 10)  # by which they are wrong
BATCHES, BATCH_SIZE = 800, 48    # of pre-training


def problem(rng: random.Random, level: int, wrong: float = 0.0) -> tuple[dict, Arithmetic]:
    """Make one problem: its data line without an id, with a solution in which this share of the lines is
    wrong, is marked so, and is tried again; and the start, what is added, and how often."""
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


def splits() -> dict[str, Lines]:
    """Make train, validation and test, with as many problems of each level."""
    taboo: set[Arithmetic] = set()
    made = {}
    for seed, (name, count) in enumerate({"train": 240, "validation": 500, "test": 500}.items()):
        rng, lines = random.Random(seed), {}
        while len(lines) < count:
            line, numbers = problem(rng, LEVELS[len(lines) % len(LEVELS)])
            if numbers not in taboo:
                taboo.add(numbers)
                lines[numbers] = line
        made[name] = lines
    return made


def pretraining() -> Iterator[dict]:
    """Yield the problems of pre-training, without end."""
    rng = random.Random(3)
    taboo = set().union(*splits().values())
    while True:
        line, numbers = problem(rng, rng.choice(LEVELS), WRONG)
        if numbers not in taboo:
            yield line


def write(folder: Path) -> None:
    for name, lines in splits().items():
        write_lines(folder / f"{name}.jsonl", f"long_sums/{name}", lines.values())


def main(folder: Path) -> None:
    write(folder)
    torch.manual_seed(0)
    model = folder / "model"
    shutil.copytree(TOY / "model", model, dirs_exist_ok=True)  # the toy's tokenizer and width
    shape = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", shape | {"num_hidden_layers": 2})
    (model / "model.safetensors").unlink(missing_ok=True)
    texts = ((line["question"], line["solution"]) for line in pretraining())
    pretrain(model, texts, batches=1000, batch_size=BATCH_SIZE, lr=4e-3, stop=BATCHES)


if __name__ == "__main__":
    dist.init("cpu")
    main(Path(__file__).with_suffix(""))
