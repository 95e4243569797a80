"""Write the data of the examples, always the same: 384 rows each, which 12 steps of 32 go through once.

    python examples/make_data.py
"""

import json
import random
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "toy"))

from problems import distinct  # noqa: E402

ROWS = 384


def expressions(problems: list[dict]) -> list[dict]:
    """Return the conditions on the expressions of a completion: tests of `values`, a list."""
    rows = []
    for problem in problems:
        steps = [int(total) for total in re.findall(r"= (\d+)", problem["solution"])]
        tests = ["len(values) >= 2", f"values[0] == {steps[0]}", f"values[-1] == {steps[-1]}"]
        rows.append({"question": problem["question"], "tests": tests})
    return rows


def sentences(problems: list[dict]) -> list[dict]:
    """Questions alone: the form of the completion is all that counts."""
    return [{"question": problem["question"]} for problem in problems]


def dialogue(problems: list[dict]) -> list[dict]:
    """Two examples as turns of a conversation, then a request that many numbers fulfil."""
    rng, rows = random.Random(0), []
    for problem in problems:
        item = re.search(r"How many (\w+)", problem["question"])[1]
        messages = [{"role": "system", "content": "Name a number above both."}]
        for _ in range(3):
            pair = rng.sample(range(5, 80), 2)
            messages.append({"role": "user", "content": f"{pair[0]} and {pair[1]} {item}."})
            messages.append({"role": "assistant", "content": f"#### {rng.randint(max(pair) + 1, 99)}"})
        rows.append({"question": messages[:-1], "above": max(pair)})
    return rows


def two_rewards(problems: list[dict]) -> list[dict]:
    """Make problems; every second one has a known result."""
    return [{"question": problem["question"], "result": int(problem["answer"]) if i % 2 else None}
            for i, problem in enumerate(problems)]


def main() -> None:
    for seed, make in enumerate((expressions, sentences, dialogue, two_rewards)):
        rows = make(list(distinct(ROWS, seed=100 + seed, taboo=frozenset()).values()))
        lines = [json.dumps({"id": f"{make.__name__}/{i}"} | row) + "\n" for i, row in enumerate(rows)]
        (HERE / f"{make.__name__}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
