"""Do four tasks with an environment learn, and what would the same runs learn without one?

    python experiments/environment_tasks.py OUT [--seeds 3] [--steps N] [--tasks calculator,guess]

Each task is a toy config (leaves/environment), trained with its environment and without it. Runs that are
finished in the folder OUT are not made again. Printed are scores on held-out problems: before training, and
after it the mean over seeds with its 95% interval (Student's t), each seed's score, and CPU seconds of a run,
its start and evaluations included. The score is accuracy, greedy; for guess it is the mean reward, sampled.
"""

import argparse
from pathlib import Path
from statistics import mean, median, stdev

from kept_runs import cpu_seconds, quantile, table, train_once
from tqdm import tqdm

from infra.lines import read_log

TASKS = ["calculator", "secret_sums", "lookup", "guess"]
WITHOUT = ("environment={file: null, max_context: null, turns: 8}", "rollout.stop=null")


def train(out: Path, task: str, seed: int, alone: bool, steps: int | None) -> Path:
    """Make one run, or find it finished."""
    settings = [f"seed={seed}", "eval.every=0", *([f"steps={steps}"] if steps else [])]
    if alone:
        settings += WITHOUT
    return train_once(out / f"{task}-{seed}{'-alone' * alone}", f"{task}_toy.yaml", *settings)


def scores(folder: Path) -> list[float]:
    """Read the score of each evaluation of a run: accuracy, or else the mean reward."""
    found = []
    for line in read_log(folder / "metrics.jsonl"):
        for key, value in line.items():
            if key.startswith("eval/") and key.endswith(("/accuracy", "/reward")):
                found.append(value)
    return found


def row(task: str, alone: bool, folders: list[Path]) -> list[str]:
    """Write one line of the table."""
    percent = 1 if task == "guess" else 100
    of_seeds = [[percent * value for value in scores(folder)] for folder in folders]
    before, after = of_seeds[0][0], [values[-1] for values in of_seeds]
    half = quantile(0.05, len(after) - 1) * stdev(after) / len(after) ** 0.5 if len(after) > 1 else 0.0
    form = "{:.3f}" if task == "guess" else "{:.1f}%"
    shown = [form.format(value) for value in (before, mean(after), half, *after)]
    seconds = [cpu_seconds(folder) for folder in folders]
    return [task, "no" if alone else "yes", shown[0], f"{shown[1]} ± {shown[2]}", ", ".join(shown[3:]),
            f"{median(seconds):.0f} ({min(seconds):.0f} - {max(seconds):.0f})"]


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of each config's own")
    parser.add_argument("--tasks", default=",".join(TASKS))
    args = parser.parse_args()
    arms = [(task, alone) for task in args.tasks.split(",") for alone in (False, True)]
    rows = []
    with tqdm(total=len(arms) * args.seeds, unit="run") as bar:
        for task, alone in arms:
            folders = []
            for seed in range(args.seeds):
                folders.append(train(args.out, task, seed, alone, args.steps))
                bar.update()
            rows.append(row(task, alone, folders))
    head = ["task", "environment", "before", "after, mean", "after, each seed", "CPU seconds"]
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
