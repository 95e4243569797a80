"""What does the error of a pruned gradient cost? PPS that keeps 2 to 8 of 8, at four rates, on the long sums.

    python experiments/law.py        # 110 runs; what is kept is not run again (kept_runs)
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
from kept_runs import Record, Run, curve, experiment_status, keep, parser, read, table
from tqdm import tqdm

RESULTS = Path(__file__).with_name("law.jsonl.xz")
RATES, SEEDS, WHOLE = ("5e-5", "1e-4", "2e-4", "2.5e-5"), range(5), "keep 8"
ARMS = {f"keep {count}": (f"prune.completions={{kind: pps, keep: {count}, scope: batch, by_cost: true}}",)
        for count in (8, 5, 4, 3, 2)} | {f"{n} prompts": (f"rollout.prompts_per_step={n}",) for n in (3, 4)}
PLACES = [place for place in product(RATES, ARMS) if place[0] == RATES[0] or "keep" in place[1]]


def run_of(rate: str, name: str, seed: int) -> Run:
    return Run(name, ARMS[name], rate, seed, recipe=str(RESULTS.with_name("long_sums.yaml")))


def worth(these: list[Record], those: list[Record], cost: str) -> float:
    """Compute what those had spent at the last accuracy of these, over what these spent, of mean curves."""
    (x_E, y_E), (spent_E, reached_E) = (
        np.mean([(run.spent[cost], run.accuracy_E) for run in map(curve, records)], axis=0)
        for records in (these, those))
    return np.interp(y_E[-1], np.maximum.accumulate(reached_E), spent_E) / x_E[-1]


def report() -> None:
    """Tabulate each arm's error, and what its steps are worth in steps of keeping all at the same rate."""
    kept, rows, rng = read(RESULTS), [], np.random.default_rng(0)
    runs = {place: [kept.get(run_of(*place, seed).name) for seed in SEEDS] for place in PLACES}
    for (rate, name), records in runs.items():
        pairs = [pair for pair in zip(records, runs[rate, WHOLE], strict=True) if None not in pair]
        if len(pairs) < 2:
            continue
        lines = [line for one, _ in pairs for line in one.lines if "prune/kept" in line]
        error = np.mean([line.get("prune/error", 0.0) for line in lines])
        last = np.mean([curve(one).accuracy_E[-1] for one, _ in pairs])
        rows.append([rate, name, *(f"{number:.3g}" for number in (
            len(pairs), error, (1 + error) ** -0.5, 1 / (1 + error), last))])
        for cost in ("steps", "seconds"):
            seeds = [range(len(pairs)), *rng.integers(0, len(pairs), (1000, len(pairs)))]
            first, *others = [worth(*zip(*(pairs[i] for i in some), strict=True), cost) for some in seeds]
            rows[-1].append("{:.2f} [{:.2f}, {:.2f}]".format(first, *np.percentile(others, (2.5, 97.5))))
    head = "rate, arm, runs, e, (1 + e)^-1/2, (1 + e)^-1, last %, worth in steps, in seconds".split(", ")
    print(*table(head, rows), sep="\n")


def experiment() -> None:
    with tqdm(total=len(PLACES) * len(SEEDS), unit="run") as bar:
        for seed, place in product(SEEDS, PLACES):
            keep(run_of(*place, seed), RESULTS, bar)
    report()


if __name__ == "__main__":
    parser(__doc__).parse_args()
    sys.exit(experiment_status(experiment))
