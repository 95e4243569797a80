"""Make word problems in English of one and two steps, five levels, with wordings of their own.

| level | steps |
|---|---|
| 1 | one, + or - 2 to 5, up to 25 |
| 2 | one, + or - 6 to 20, up to 50 |
| 3 | one, a product of 2 to 12 and 2 to 15 |
| 4 | two, each + or - 2 to 5, up to 25 |
| 5 | two, a product of 2 to 6 and 2 to 10, and then + or - 2 to 5 |

The same seed makes the same problems. No two problems, of one set or two, have the same arithmetic,
even in other words. A question is a list of messages: two solved examples as turns, and the problem.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

NAMES = "Amir Bella Chen Dora Emil Fay Greta Hamid Iris Jamal Kira Lars Maya Nils Olga Pavel".split()
ITEMS = "apples balls buttons cakes candles cups flowers keys lemons nuts pencils plates ribbons".split()
HOLDERS = "bag basket box crate drawer jar shelf tray".split()
STARTS = ("{name} has {n} {items}.", "{name} starts with {n} {items}.",
          "In the morning {name} has {n} {items}.")
FILLS = ("{name} has {k} {holders} with {n} {items} each.",
         "{name} fills {k} {holders} with {n} {items} each.",
         "{name} owns {k} {holders}, and each {holder} holds {n} {items}.")
GAINS = ("{name} buys {n} more {items}.", "{other} gives {name} {n} more {items}.",
         "Then {name} finds {n} more {items}.")
LOSSES = ("{name} gives {n} {items} to {other}.", "{name} loses {n} {items}.",
          "Then {name} sells {n} {items}.")
NOW = ("How many {items} does {name} have now?", "How many {items} does {name} have in the end?")
LEFT = ("How many {items} does {name} have left?", "How many {items} are left?")
TOTALS = ("How many {items} does {name} have in all?", "How many {items} does {name} have altogether?")
# (question, solution) of the turns before each problem.
EXAMPLES = (
    ("Rosa has 4 pens. Rosa buys 3 more pens. How many pens does Rosa have now?",
     r"4 + 3 = 7, so \boxed{7}."),
    ("Rosa has 9 pens. Rosa loses 3 pens. How many pens does Rosa have left?",
     r"9 - 3 = 6, so \boxed{6}."),
)
SMALL, LARGE = range(2, 6), range(6, 21)  # changes; so no problem of one step is in two levels
SIZES = {"train": 72, "validation": 16, "test": 60}  # problems of each level


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a problem computes: a start, or a product of `groups` and `start`, and signed changes to it."""

    start: int
    groups: int = 1
    changes: tuple[int, ...] = ()

    @property
    def answer(self) -> int:
        return self.groups * self.start + sum(self.changes)


def draw(level: int, rng: random.Random) -> Arithmetic:
    """Draw the arithmetic of a level. No number in it is below 2, and no result on the way is below 1."""
    if level == 3:
        return Arithmetic(rng.randint(2, 15), rng.randint(2, 12))
    if level == 5:
        each, groups = rng.randint(2, 10), rng.randint(2, 6)
        return Arithmetic(each, groups, (change(each * groups, SMALL, 65, rng),))
    sizes, most = (LARGE, 50) if level == 2 else (SMALL, 25)
    total = start = rng.randint(3, most - 2)
    changes = []
    for _ in range(2 if level == 4 else 1):
        changes.append(change(total, sizes, most, rng))
        total += changes[-1]
    return Arithmetic(start, changes=tuple(changes))


def change(total: int, sizes: range, most: int, rng: random.Random) -> int:
    """Draw a change of one of `sizes` that leaves 1 to `most`; + and - are as likely where both can be."""
    losses = [-size for size in sizes if total - size >= 1]
    gains = [size for size in sizes if total + size <= most]
    return rng.choice(rng.choice([signed for signed in (losses, gains) if signed]))


def worded(arithmetic: Arithmetic, rng: random.Random) -> str:
    """Write a problem in words."""
    name, other = rng.sample(NAMES, 2)
    holder = rng.choice(HOLDERS)
    plural = {"box": "boxes", "shelf": "shelves"}.get(holder, f"{holder}s")
    words = {"name": name, "other": other, "items": rng.choice(ITEMS), "holder": holder, "holders": plural}
    first = STARTS if arithmetic.groups == 1 else FILLS
    sentences = [rng.choice(first).format(n=arithmetic.start, k=arithmetic.groups, **words)]
    for signed in arithmetic.changes:
        sentences.append(rng.choice(GAINS if signed > 0 else LOSSES).format(n=abs(signed), **words))
    last = TOTALS if not arithmetic.changes else NOW if arithmetic.changes[-1] > 0 else LEFT
    return " ".join([*sentences, rng.choice(last).format(**words)])


def as_messages(question: str) -> list[dict[str, str]]:
    """Put the examples before a question, as turns of a conversation."""
    turns = [(role, text) for example in EXAMPLES
             for role, text in zip(("user", "assistant"), example, strict=True)]
    return [{"role": role, "content": text} for role, text in (*turns, ("user", question))]


def make(seed: int = 0) -> dict[str, list[dict]]:
    """Make the rows of all sets; levels take turns, so that a set's first rows have every level."""
    rng = random.Random(seed)
    taken: set[Arithmetic] = set()
    sets: dict[str, list[dict]] = {}
    for name, size in SIZES.items():
        sets[name] = []
        for i in range(size):
            for level in range(1, 6):
                while (arithmetic := draw(level, rng)) in taken:
                    pass
                taken.add(arithmetic)
                sets[name].append({"id": f"{name}/{level}/{i}", "level": level,
                                   "question": as_messages(worded(arithmetic, rng)),
                                   "answer": str(arithmetic.answer)})
    return sets


def write(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in make().items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
