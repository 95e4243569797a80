"""Which method learns faster on the toy? GRPO, CPPO, GRESO, dynamic sampling, DPPO and PPS on equal terms.

    python bench/compare.py [--out runs/compare]      # `make compare`; goes on where it was interrupted

160 training problems, so that prompts come up again and a memory of them can tell something. Each method first picks
its learning rate from one grid: a run of a seed that is not used again, evaluated on 500 other training problems; the
mean accuracy over the run's evaluations decides. Then every method runs that rate on each of the seeds, evaluated on
the test problems, round by round, so that a machine that slows down slows all methods. report.py makes the page.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from training import ROOT, run

import report
import runfolder

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


def score(folder: Path, name: str) -> float:
    """Mean accuracy over the evaluations of a run."""
    return mean(line[f"eval/{name}/accuracy"] for line in runfolder.read(folder / "metrics.jsonl")
                if f"eval/{name}/accuracy" in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "compare")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    validation = out / "validation.jsonl"
    validation.write_text("".join((ROOT / "toy" / "train.jsonl").read_text().splitlines(keepends=True)[-500:]))
    bar = tqdm(total=len(METHODS) * (len(RATES) + len(SEEDS)), unit="run")
    scores: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    for rate in RATES:
        for method in METHODS:
            bar.set_description(f"{method}, rate {rate}")
            folder = run(out / "rates" / f"{method}-{rate}", *METHODS[method], *COMMON, f"optim.lr={rate}",
                         f"seed={TUNING_SEED}", f"data.eval={validation}")
            scores[method][rate] = score(folder, "validation")
            bar.update()
    best = {method: max(by_rate, key=by_rate.get) for method, by_rate in scores.items()}
    print("\nmean validation accuracy by learning rate\n" + "\n".join(
        f"{method:<17}" + "  ".join(f"{rate} {value:6.1%}" + ("*" if rate == best[method] else " ")
                                    for rate, value in by_rate.items()) for method, by_rate in scores.items()))
    folders = {method: [] for method in METHODS}
    for seed in SEEDS:
        for method in METHODS:
            bar.set_description(f"{method}, seed {seed}")
            folders[method].append(run(out / f"{method}-seed{seed}", *METHODS[method], *COMMON,
                                       f"optim.lr={best[method]}", f"seed={seed}"))
            bar.update()
    bar.close()
    print(report.report([folder for runs in folders.values() for folder in runs], out / "report"))
    print(json.dumps({"bench": "compare", "scores": scores, "rates": best, "steps": STEPS, "seeds": len(SEEDS)}))


if __name__ == "__main__":
    main()
