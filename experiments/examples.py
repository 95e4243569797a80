"""Do the examples learn? Train each on three seeds, and print its reward in the first and the last steps.

    python experiments/examples.py [--out runs/examples]      # goes on where it was interrupted

No row comes up twice in a run, so the reward of a step is that on rows the policy was never trained on; in
the first step it is the initial policy's. Intervals are Student's, over the means of prompts. An example has
learnt where the lower bound of the last steps is above the upper bound of the first, on every seed.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

import numpy as np
from tqdm import tqdm
from training import ROOT, train_once

from infra import runfolder
from verify.statistics import half_width

EXAMPLES = ("expressions", "sentences", "dialogue", "two_rewards")
SEEDS = range(3)
LAST = 3  # steps that the reward after training is taken from


def interval(rewards: list[float]) -> tuple[float, float, float]:
    """Compute the mean and its 95% interval."""
    half = float(half_width(np.array(rewards)[:, None])[0])
    return mean(rewards) - half, mean(rewards), mean(rewards) + half


def before_and_after(folder: Path) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Read the rewards of prompts in the first step and in the last ones, from samples.jsonl."""
    lines = runfolder.read_log(folder / "samples.jsonl")
    last = lines[-1]["step"]
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        of_group = [c["reward"] for c in line["completions"] if c["reward"] is not None]
        if of_group and (line["step"] == 1 or line["step"] > last - LAST):
            rewards[line["step"] == 1].append(mean(of_group))
    return interval(rewards[True]), interval(rewards[False])


def row(name: str, seed: int, folder: Path) -> str:
    """Write one line of the table."""
    before, after = before_and_after(folder)
    seconds = sum(line.get("time/step", 0.0) for line in runfolder.read_log(folder / "metrics.jsonl"))
    cells = [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for low, middle, high in (before, after)]
    learnt = "yes" if after[0] > before[2] else "no"
    return f"| {name} | {seed} | {cells[0]} | {cells[1]} | {learnt} | {seconds:.0f} |"


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "examples")
    out = parser.parse_args().out.resolve()
    rows = []
    for name, seed in tqdm([(name, seed) for name in EXAMPLES for seed in SEEDS], unit="run"):
        folder = train_once(out / f"{name}-seed{seed}", f"examples/{name}.yaml", f"seed={seed}")
        rows.append(row(name, seed, folder))
    print("| example | seed | reward before | reward after | learnt | seconds |")
    print("|---|---|---|---|---|---|", *rows, sep="\n")
    learnt = sum("| yes |" in line for line in rows)
    print(json.dumps({"bench": "examples", "learnt": learnt, "of": len(rows)}))


if __name__ == "__main__":
    main()
