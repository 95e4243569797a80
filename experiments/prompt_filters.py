"""Does estimating a prompt's difficulty pay? DEPO against the prompt's own history, GRESO, DPPO and none.

    python experiments/prompt_filters.py [--out runs/prompt_filters]      # goes on where it was interrupted

GRPO on the hard toy task (configs/grpo_hard.yaml), 3 seeds, with one filter of prompts each; completions are
not pruned. GRESO's and DEPO's filters draw other prompts for those they leave out, so their steps roll out as
many as plain GRPO's; DPPO's do not, so it takes more steps. Held-out accuracy, 2 answers to each of 600
problems, is given at equal numbers of prompts rolled out, between evaluations on a straight line.

Precision and recall say whether a filter finds informative groups, those with right and wrong answers. At the
checkpoints of CHECKED every training problem is answered 8 times, a group of its own: its label is whether
that group is informative. A filter's decision is the chance of a rollout at the problem's first turn after
the checkpoint. precision = sum(chance x label) / sum(chance), recall = sum(chance x label) / sum(label), over
the problems that come up again. A filter that keeps everything has the base rate and a recall of 1.
"""

import argparse
import json
from itertools import accumulate
from pathlib import Path
from statistics import mean

import numpy as np
from testbed import answered, table
from tqdm import tqdm
from training import ROOT, accuracies, train_once

from infra import runfolder
from page.evaluations import count_right
from verify.statistics import half_width

# Arms on the hard toy task: GRPO's config, and the filter of its prompts. The warm-up is one epoch; DEPO's
# rate was chosen by the cross entropy of its estimates in a plain GRPO run of seed 2 (docs/experiments.md).
ARMS = {
    "none": [],
    "depo": ["prune.prompts={kind: depo, warmup_steps: 30, lr: 1e-2}"],
    "depo, explore 0.2": ["prune.prompts={kind: depo, warmup_steps: 30, lr: 1e-2, explore: 0.2}"],
    "history": ["prune.prompts={kind: depo, estimate: history, warmup_steps: 30}"],
    "history, explore 0.2": ["prune.prompts={kind: depo, estimate: history, warmup_steps: 30, explore: 0.2}"],
    "greso": ["prune.prompts={kind: greso}"],
    "dppo": ["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "steps=180"],
}
SEEDS = (3, 4, 5)
CHECKED = (45, 90)    # steps
GROUP = 8             # rollout.group_size, and answers to each problem there


def rolled_out(folder: Path) -> list[int]:
    """Count the prompts that a run has rolled out, after each step, from 0."""
    lines = [line for line in runfolder.read_log(folder / "metrics.jsonl") if "rollout/prompts" in line]
    return [0, *accumulate(line["rollout/prompts"] for line in lines)]


def curve(folder: Path, counts: list[int]) -> list[float]:
    """Read a run's held-out accuracy at these numbers of prompts rolled out."""
    prompts = rolled_out(folder)
    lines = runfolder.read_log(folder / "metrics.jsonl")
    evaluated = [prompts[line["step"]] for line in lines if "eval/hard_test/accuracy" in line]
    return np.interp(counts, evaluated, accuracies(folder, "hard_test")).tolist()


def labels(folder: Path, step: int) -> dict[str, bool]:
    """Tell of every training problem whether a group of its own, at this checkpoint, is informative."""
    result = answered(folder / "checkpoints" / f"step_{step:06d}", folder / f"answers_{step:06d}.json", GROUP)
    return {problem["id"]: 0 < count_right(problem) < GROUP for problem in result["problems"]}


def chances(folder: Path, step: int) -> dict[str, float]:
    """Return the chance of a rollout of each problem at its first turn after a step."""
    first: dict[str, float] = {}
    for line in runfolder.read_log(folder / "decisions.jsonl"):
        for prompt in line["prompts"] if line["step"] > step else ():
            first.setdefault(prompt["id"], prompt["prob"])
    return first


def precision_and_recall(folder: Path, step: int) -> tuple[float, float, float]:
    """Compute the precision and recall of a run's filter after a step, and the share that it keeps."""
    label, chance = labels(folder, step), chances(folder, step)
    both = sum(prob * label[name] for name, prob in chance.items())
    kept, informative = sum(chance.values()), sum(label[name] for name in chance)
    return both / kept, both / informative, kept / len(chance)


def with_interval(values: list[float]) -> str:
    return f"{mean(values):.1%} ± {half_width(np.array(values)):.1%}"


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "prompt_filters")
    out = parser.parse_args().out.resolve()
    common = ["eval.n=2", "checkpoint.keep=all"]
    folders: dict[str, list[Path]] = {arm: [] for arm in ARMS}
    for seed, arm in tqdm([(seed, arm) for seed in SEEDS for arm in ARMS], unit="run"):
        name = arm.replace(", ", "-").replace(" ", "-")
        folders[arm].append(train_once(out / f"{name}-seed{seed}", "grpo_hard.yaml", *common, *ARMS[arm],
                                       f"seed={seed}"))
    total = min(rolled_out(folder)[-1] for several in folders.values() for folder in several)
    counts = [total * i // 3 for i in range(4)]
    figures = {arm: {"accuracy": [curve(folder, counts) for folder in several],
                     "filter": [[precision_and_recall(of, step) for step in CHECKED] for of in several]}
               for arm, several in tqdm(folders.items(), "labels")}
    rows = [[arm, *(with_interval([run[i] for run in of["accuracy"]]) for i in range(len(counts)))]
            for arm, of in figures.items()]
    print(*table(["filter", *(f"{count:,} prompts" for count in counts)], rows), "", sep="\n")
    head = [f"{what}, step {step}" for step in CHECKED for what in ("precision", "recall", "kept")]
    rows = [[arm, *(with_interval([run[i][k] for run in of["filter"]])
                    for i in range(len(CHECKED)) for k in range(3))] for arm, of in figures.items()]
    print(*table(["filter", *head], rows), "", sep="\n")
    print(json.dumps({"bench": "prompt_filters", "prompts": counts, "arms": figures}))


if __name__ == "__main__":
    main()
