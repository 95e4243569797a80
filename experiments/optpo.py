"""How far does a model learn from its own votes? OptPO with labels hidden, on the toy and the hard toy task.

    python experiments/optpo.py [--out runs/optpo] [--seeds 1]      # goes on where it was interrupted

Arms: OptPO's sequential test; as many completions of every prompt as it may take (M, `fixed`); and, as a
bound, the labels of the data. On the hard task the problems are those of two levels at a time, so that the
model begins at about a third or a tenth of right answers. Wrong labels and completions are of the metrics
votes/label_accuracy and votes/completions, which read the data's answers; training does not.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from testbed import table
from tqdm import tqdm
from training import ROOT, cpu_seconds, train_once

import config
from infra import runfolder

FIXED = "labels.threshold=1e30"  # a lead that is never reached
GOLD = ["labels={kind: gold}"]
# task -> its config, its settings, and the levels of its problems
TASKS = {"toy": ("optpo_toy.yaml", ["steps=20", "eval.every=10"], None),
         "levels 3 and 4": ("optpo_hard.yaml", [], (3, 4)),
         "levels 4 and 5": ("optpo_hard.yaml", [], (4, 5))}
ARMS = {"votes": [], "fixed": [FIXED], "gold": GOLD}
PARTS = 4  # of a run, whose means are told


def of_levels(out: Path, name: str, levels: tuple[int, ...]) -> Path:
    """Write the problems of some levels to a file of their own."""
    path = out / f"{Path(name).stem}_{''.join(map(str, levels))}.jsonl"
    lines = (ROOT / name).read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["level"] in levels))
    return path


def train(out: Path, task: str, arm: str, seed: int) -> Path:
    name, settings, levels = TASKS[task]
    out.mkdir(parents=True, exist_ok=True)
    data = config.load(name).data
    if levels:
        files = {key: of_levels(out, of, levels) for key, of in (("train", data.train), ("eval", data.eval))}
        settings = [*settings, *(f"data.{key}={path}" for key, path in files.items())]
    return train_once(out / f"{task.replace(' ', '_')}-{arm}-seed{seed}", name, *settings, *ARMS[arm],
                      f"seed={seed}")


def by_parts(lines: list[dict], key: str) -> list[float]:
    """Average a metric over each of PARTS equal parts of a run."""
    values = [line[key] for line in lines if key in line]
    return [mean(values[i * len(values) // PARTS:(i + 1) * len(values) // PARTS]) for i in range(PARTS)]


def row(task: str, arm: str, seed: int, folder: Path) -> list[str]:
    """Write a run's row: held-out accuracy, then completions, wrong labels and accuracy in training."""
    lines = runfolder.read_log(folder / "metrics.jsonl")
    evaluations = [line for line in lines if "time/eval" in line]
    cells = []
    for line in (evaluations[0], evaluations[-1]):
        accuracy, low, high = (next(line[key] for key in line if key.endswith(end))
                               for end in ("/accuracy", "/low", "/high"))
        cells.append(f"{accuracy:.1%} [{low:.1%}, {high:.1%}]")
    voted = arm != "gold"
    used = " ".join(f"{x:.1f}" for x in by_parts(lines, "votes/completions")) if voted else "-"
    wrong = " ".join(f"{1 - x:.0%}" for x in by_parts(lines, "votes/label_accuracy")) if voted else "-"
    true = " ".join(f"{x:.0%}" for x in by_parts(lines, "votes/accuracy" if voted else "reward/accuracy"))
    return [task, arm, str(seed), *cells, used, wrong, true, f"{cpu_seconds(folder):.0f}"]


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "optpo")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    runs = [(task, arm, seed) for seed in range(args.seeds) for task in TASKS for arm in ARMS]
    rows = [row(*run, train(args.out.resolve(), *run)) for run in tqdm(runs, unit="run")]
    print(*table(["task", "labels", "seed", "held-out accuracy, before", "after", "completions a prompt",
                  "wrong labels", "right in training", "CPU seconds"], sorted(rows)), "", sep="\n")
    print(json.dumps({"bench": "optpo", "rows": sorted(rows)}))


if __name__ == "__main__":
    main()
