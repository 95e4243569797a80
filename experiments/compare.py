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

from tqdm import tqdm
from training import ROOT, on_seeds, tune

import report

METHODS = {
    "grpo": ["grpo_toy.yaml"],
    "cppo": ["cppo_toy.yaml"],
    "greso": ["greso_toy.yaml"],
    "dynamic-sampling": ["grpo_toy.yaml", "rollout.until=informative"],
    "dppo": ["dppo_toy.yaml"],
    "pps": ["pps_toy.yaml"],
}
RATES, SEEDS = ("5e-5", "1e-4", "2e-4"), range(5)
STEPS = 20
COMMON = [f"steps={STEPS}", "eval.every=1", "data.limit=160", "checkpoint.every=0"]


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "compare")
    out = parser.parse_args().out.resolve()
    bar = tqdm(total=len(METHODS) * (len(RATES) + len(SEEDS)), unit="run")
    scores = tune(out, METHODS, dict.fromkeys(METHODS, RATES), COMMON, bar)
    best = {method: max(by_rate, key=by_rate.get) for method, by_rate in scores.items()}
    print("\nmean validation accuracy by learning rate")
    for method, by_rate in scores.items():
        marks = {rate: "*" if rate == best[method] else " " for rate in by_rate}
        cells = [f"{rate} {value:6.1%}{marks[rate]}" for rate, value in by_rate.items()]
        print(f"{method:<17}" + "  ".join(cells))
    folders = sum(on_seeds(out, METHODS, best, SEEDS, COMMON, bar).values(), [])
    bar.close()
    page = report.write_report(folders, out / "report")
    print(page.with_suffix(".md").read_text(), page, sep="\n")
    print(json.dumps({"bench": "compare", "scores": scores, "rates": best, "steps": STEPS,
                      "seeds": len(SEEDS)}))


if __name__ == "__main__":
    main()
