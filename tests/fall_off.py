"""Let leaves fall off a copy of Winnow: their folders, their lines in the table, and the configs that choose them.

    python tests/fall_off.py                    # every leaf alone, and all together
    python tests/fall_off.py --random 3         # three drawn at random, and all together
    python tests/fall_off.py votes --tests tests/test_loop.py

Without them the programs must be imported, `ruff` must find nothing, the tests given must pass, less those that ask for
what is gone (tests/fallen.py), and two steps of grpo, cppo and dppo must be the same bit for bit, in metrics.jsonl and
decisions.jsonl.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from test_recipes import copy_repository  # noqa: E402

import config  # noqa: E402
from settings import leaves  # noqa: E402

SMALL = ["steps=2", "data.limit=8", "data.eval=null", "rollout.group_size=8", "rollout.prompts_per_step=4",
         "rollout.max_new_tokens=40", "pack.capacity=1024", "optim.warmup_steps=0"]
PROGRAM = """import config, train
for name in ("grpo", "cppo", "dppo"):
    train.train(config.load(f"{name}_toy.yaml", [f"out={name}", *%r]))
"""


def copy_without(gone: list[str], folder: Path) -> None:
    """Copy the files that git tracks, without some leaves."""
    copy_repository(folder)
    for path in files_of(gone):
        (folder / path.relative_to(ROOT)).unlink(missing_ok=True)
    table = folder / "settings" / "leaves.py"
    text = table.read_text()
    for leaf in gone:
        shutil.rmtree(folder / "leaves" / leaf)
        text, lines = re.subn(rf'\n    "{leaf}": .*', "", text)
        assert lines == 1, leaf
    table.write_text(text)


def files_of(gone: list[str]) -> set[Path]:
    """List the configs, of other leaves too, that choose one of these, and the program of the page's leaf."""
    paths = {path for folder in config.CONFIGS for path in folder.glob("*.yaml") if path.stem != "toy"}
    return {path for path in paths
            if any(leaves.LEAVES[leaf] and leaf in gone for leaf in leaves.chosen(config.load(path)))} | (
                {ROOT / "report.py"} if "page" in gone else set())


def run(folder: Path, *command: str, **environment: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:200]} in {folder}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def lines_of_runs(folder: Path) -> list[dict]:
    """Train, and return the lines of all runs without their times, and without what the page's leaf measures."""
    (folder / "three_runs.py").write_text(PROGRAM % SMALL)
    run(folder, sys.executable, "three_runs.py")
    lines = []
    for name in ("grpo", "cppo", "dppo"):
        for file in ("metrics.jsonl", "decisions.jsonl"):
            lines += map(json.loads, (folder / name / file).read_text().splitlines())
    left_out = ("time/", "memory/", "prune/share")
    return [{key: value for key, value in line.items() if not key.startswith(left_out)} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("leaf", nargs="*", help="the leaves to let fall off together")
    parser.add_argument("--random", type=int, default=len(leaves.LEAVES), help="so many leaves, one at a time")
    parser.add_argument("--tests", nargs="*", default=[], help="tests that must pass without them")
    args = parser.parse_args()
    names = list(leaves.LEAVES)
    alone = random.sample(names, args.random)
    cases = [args.leaf] if args.leaf else [*([name] for name in alone), names]
    with tempfile.TemporaryDirectory() as temporary:
        expected = None
        for number, gone in enumerate([[], *cases]):
            folder = Path(temporary) / str(number)
            copy_without(gone, folder)
            run(folder, "git", "init", "-q")  # tests ask git for the files that there are
            run(folder, "git", "add", "--all")
            programs = "train, eval, replay, chat, learner, reward" + ", report" * ("page" not in gone)
            run(folder, sys.executable, "-c", f"import {programs}")
            run(folder, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
            lines = lines_of_runs(folder)
            expected = expected or lines
            if lines != expected:
                sys.exit(f"without {', '.join(gone)} the runs are others")
            if gone and args.tests:
                # What errors name: settings and kinds of these leaves; their configs and files.
                names = {re.split("[=.]", choice)[-1] for leaf in gone for choice in leaves.LEAVES[leaf]}
                files = {name for path in files_of(gone)
                         for name in (path.name, path.stem, re.sub("_.*", "_*", path.stem))}
                files |= {path.name for leaf in gone for path in (ROOT / "leaves" / leaf).glob("*.py")}
                given = json.dumps({"leaves": gone, "names": sorted(names), "files": sorted(files)})
                run(folder, sys.executable, "-m", "pytest", "-n", "2", "-p", "fallen", *args.tests, GONE=given,
                    PYTHONPATH="tests")
            print(f"without {', '.join(gone) or 'nothing'}: the same", flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
