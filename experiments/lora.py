"""Does the toy learn with LoRA as with all weights? CPPO at rank 1, 8 and 64, and without an adapter.

    python experiments/lora.py [--out runs/lora] [--steps 40]   # goes on where it was interrupted

Each arm first picks its learning rate from a grid, by the mean accuracy over the evaluations of a run of a
seed that is not used again, on 500 training problems that it is not trained on. Then it runs at that rate on
three seeds, evaluated on the test problems, round by round, so that a machine that slows down slows all arms.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from tqdm import tqdm
from training import ROOT, train_once

from infra import runfolder

ARMS = {"all weights": ["cppo_toy.yaml"]}
ARMS |= {f"rank {rank}": ["lora_toy.yaml", f"model.lora.rank={rank}"] for rank in (1, 8, 64)}
OF_ALL, OF_ADAPTERS = ("5e-5", "1e-4", "2e-4"), ("5e-4", "1e-3", "2e-3")  # learning rates
TUNING_SEED, SEEDS = 100, range(3)


def trained(out: Path, arm: str, steps: int, rate: str, *settings: str) -> Path:
    name, *changes = ARMS[arm]
    return train_once(out, name, *changes, f"steps={steps}", f"optim.lr={rate}", "eval.every=5",
                      "checkpoint.every=0", *settings)


def accuracies(folder: Path) -> list[float]:
    """Return the accuracy of each evaluation of a run."""
    lines = runfolder.read(folder / "metrics.jsonl")
    return [line[key] for line in lines for key in line if key.endswith("/accuracy") and "eval/" in key]


def row(folder: Path) -> dict[str, float]:
    """Read off a run: accuracy before and after, seconds of its steps, bytes of its checkpoint."""
    lines = [line for line in runfolder.read(folder / "metrics.jsonl") if "time/step" in line]
    step, = (folder / "checkpoints").glob("step_*")
    scores = accuracies(folder)
    return {"before": scores[0], "after": scores[-1], "seconds": sum(line["time/step"] for line in lines),
            "update": sum(line["time/update"] for line in lines),
            "bytes": sum(path.stat().st_size for path in step.rglob("*") if path.is_file())}


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "lora")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    validation = out / "validation.jsonl"
    problems = (ROOT / "toy" / "train.jsonl").read_text().splitlines(keepends=True)
    validation.write_text("".join(problems[-500:]))
    scores: dict[str, dict[str, float]] = {arm: {} for arm in ARMS}
    bar = tqdm(total=len(ARMS) * (3 + len(SEEDS)), unit="run")
    for arm in ARMS:
        for rate in OF_ALL if arm == "all weights" else OF_ADAPTERS:
            folder = trained(out / f"{arm}-{rate}".replace(" ", "-"), arm, args.steps, rate,
                             f"seed={TUNING_SEED}", f"data.eval={validation}")
            scores[arm][rate] = mean(accuracies(folder))
            bar.update()
    best = {arm: max(by_rate, key=by_rate.get) for arm, by_rate in scores.items()}
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in SEEDS:
        for arm in ARMS:
            folder = trained(out / f"{arm}-seed{seed}".replace(" ", "-"), arm, args.steps, best[arm],
                             f"seed={seed}")
            rows[arm].append(row(folder))
            bar.update()
    bar.close()
    show(rows, best)
    print(json.dumps({"bench": "lora", "scores": scores, "rates": best, "steps": args.steps, "rows": rows}))


def show(rows: dict[str, list[dict[str, float]]], best: dict[str, str]) -> None:
    print("| | rate | before | after | seconds | of which update | checkpoint, bytes |\n" + "|---" * 7 + "|")
    for arm, runs in rows.items():
        after = ", ".join(f"{run['after']:.1%}" for run in runs)
        seconds, update = ([run[key] for run in runs] for key in ("seconds", "update"))
        print(f"| {arm} | {best[arm]} | {runs[0]['before']:.1%} | {after} | {min(seconds):.0f} - "
              f"{max(seconds):.0f} | {min(update):.0f} - {max(update):.0f} | {runs[0]['bytes']:,} |")


if __name__ == "__main__":
    main()
