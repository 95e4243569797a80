"""Does the toy learn with LoRA as with all weights? CPPO at rank 1, 8 and 64, and without an adapter.

    python experiments/lora.py [--out runs/lora] [--steps 40]   # goes on where it was interrupted

Each arm first picks its learning rate from a grid, by the mean accuracy over the evaluations of a run of a
seed that is not used again, on 500 training problems that it is not trained on. Then it runs at that rate on
three seeds, evaluated on the test problems, round by round, so that a machine that slows down slows all arms.
"""

import argparse
import json
from pathlib import Path

from tqdm import tqdm
from training import ROOT, accuracies, on_seeds, tune

from infra import runfolder

ALL = "all weights"
ARMS = {ALL: ["cppo_toy.yaml"]}
ARMS |= {f"rank {rank}": ["lora_toy.yaml", f"model.lora.rank={rank}"] for rank in (1, 8, 64)}
RATES = dict.fromkeys(ARMS, ("5e-4", "1e-3", "2e-3")) | {ALL: ("5e-5", "1e-4", "2e-4")}
SEEDS = range(3)
COMMON = ["eval.every=5", "checkpoint.every=0", "data.limit=3500"]


def row(folder: Path) -> dict[str, float]:
    """Read off a run: accuracy before and after, seconds of its steps, bytes of its checkpoint."""
    lines = [line for line in runfolder.read_log(folder / "metrics.jsonl") if "time/step" in line]
    step, = (folder / "checkpoints").glob("step_*")
    scores = accuracies(folder, "test")
    return {"before": scores[0], "after": scores[-1], "seconds": sum(line["time/step"] for line in lines),
            "update": sum(line["time/update"] for line in lines),
            "bytes": sum(path.stat().st_size for path in step.rglob("*") if path.is_file())}


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "lora")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    out, common = args.out.resolve(), [*COMMON, f"steps={args.steps}"]
    bar = tqdm(total=sum(map(len, RATES.values())) + len(ARMS) * len(SEEDS), unit="run")
    scores = tune(out, ARMS, RATES, common, bar)
    best = {arm: max(by_rate, key=by_rate.get) for arm, by_rate in scores.items()}
    folders = on_seeds(out, ARMS, best, SEEDS, common, bar)
    bar.close()
    rows = {arm: [row(folder) for folder in of_arm] for arm, of_arm in folders.items()}
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
