"""Which method learns faster on the toy? GRPO, CPPO, GRESO, dynamic sampling, DPPO and PPS on equal terms.

    python experiments/compare.py [--out runs/compare]      # `make compare`; goes on where it was interrupted

There are 160 training problems, so that prompts come up again and their history is of use. Each method first
picks its learning rate from one grid: a run of a seed that is not used again, evaluated on 500 other training
problems; the mean accuracy over the run's evaluations decides. Then every method runs at that rate on each of
the seeds, evaluated on the test problems, round by round, so that a machine that slows down slows all
methods. report.py makes the page and its tables.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from tqdm import tqdm
from training import ROOT, train_once

import report
from infra import runfolder

METHODS = {
    "grpo": ["grpo_toy.yaml"],
    "cppo": ["cppo_toy.yaml"],
    "greso": ["greso_toy.yaml"],
    "dynamic-sampling": ["grpo_toy.yaml", "rollout.until=informative"],
    "dppo": ["dppo_toy.yaml"],
    "pps": ["pps_toy.yaml"],
}
RATES, TUNING_SEED, SEEDS = ("5e-5", "1e-4", "2e-4"), 100, range(5)
STEPS = 20
COMMON = [f"steps={STEPS}", "eval.every=1", "data.limit=160", "checkpoint.every=0"]


def mean_accuracy(folder: Path, name: str) -> float:
    """Average the accuracy over the evaluations of a run."""
    lines = runfolder.read(folder / "metrics.jsonl")
    return mean(line[f"eval/{name}/accuracy"] for line in lines if f"eval/{name}/accuracy" in line)


def tune(out: Path, bar: tqdm) -> dict[str, dict[str, float]]:
    """Run every method at every learning rate. Returns {method: {rate: score}}."""
    validation = out / "validation.jsonl"
    lines = (ROOT / "toy" / "train.jsonl").read_text().splitlines(keepends=True)
    validation.write_text("".join(lines[-500:]))
    scores: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    for rate in RATES:
        for method in METHODS:
            bar.set_description(f"{method}, rate {rate}")
            folder = train_once(
                out / "rates" / f"{method}-{rate}", *METHODS[method], *COMMON, f"optim.lr={rate}",
                f"seed={TUNING_SEED}", f"data.eval={validation}")
            scores[method][rate] = mean_accuracy(folder, "validation")
            bar.update()
    return scores


def compare(out: Path, best: dict[str, str], bar: tqdm) -> list[Path]:
    """Run every method at its learning rate on every seed. Returns the run folders, method by method."""
    folders: dict[str, list[Path]] = {method: [] for method in METHODS}
    for seed in SEEDS:
        for method in METHODS:
            bar.set_description(f"{method}, seed {seed}")
            folders[method].append(train_once(
                out / f"{method}-seed{seed}", *METHODS[method], *COMMON, f"optim.lr={best[method]}",
                f"seed={seed}"))
            bar.update()
    return sum(folders.values(), [])


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "compare")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(METHODS) * (len(RATES) + len(SEEDS)), unit="run")
    scores = tune(out, bar)
    best = {method: max(by_rate, key=by_rate.get) for method, by_rate in scores.items()}
    print("\nmean validation accuracy by learning rate")
    for method, by_rate in scores.items():
        marks = {rate: "*" if rate == best[method] else " " for rate in by_rate}
        cells = [f"{rate} {value:6.1%}{marks[rate]}" for rate, value in by_rate.items()]
        print(f"{method:<17}" + "  ".join(cells))
    folders = compare(out, best, bar)
    bar.close()
    page = report.write_report(folders, out / "report")
    print(page.with_suffix(".md").read_text(), page, sep="\n")
    print(json.dumps({"bench": "compare", "scores": scores, "rates": best, "steps": STEPS,
                      "seeds": len(SEEDS)}))


if __name__ == "__main__":
    main()
