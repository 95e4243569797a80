"""What does the error of a pruned gradient cost, and does a draw by an error pay? On the testbeds.

    python experiments/law.py        # 175 runs; what is kept is not run again (kept_runs)

The law: PPS that keeps 2 to 8 of 8 at four rates on the long sums, and GRPO with 3 and 4 prompts a step; the
same under SGD at one rate. At equal seconds: what an error of 0.1 keeps against all, 2 of 8 and CPPO, on both
testbeds.
"""

import sys
from itertools import chain, product
from pathlib import Path

import numpy as np
from kept_runs import Record, Run, area_gap, curve, experiment_status, keep_all, parser, read, table
from try_method import find_method, load, plug_in

RESULTS = Path(__file__).with_name("law.jsonl.xz")
RATES, SEEDS, WHOLE = ("5e-5", "1e-4", "2e-4", "2.5e-5"), range(5), "keep 8"
PPS = "prune.completions={{kind: pps, {}, by_cost: true}}".format
ARMS = {f"keep {count}": (PPS(f"keep: {count}, scope: batch"),) for count in (8, 5, 4, 3, 2)} | {
    f"{n} prompts": (f"rollout.prompts_per_step={n}",) for n in (3, 4)} | {
    f"sgd, keep {count}": (PPS(f"keep: {count}, scope: batch"), "optim={kind: sgd, clip_norm: 1000}")
    for count in (8, 3, 2)} | {
    "error 0.1": (PPS("error: 0.1"),),
    "cppo": ("prune.completions={kind: topk, keep: 2}", "loss.denominator=kept")}
LONG = "long sums"
HARD = ("grpo_hard.yaml", "eval.every=15")
TESTBEDS = {LONG: (str(RESULTS.with_name("long_sums.yaml")), "eval.n=1", "eval.every=6"), "hard toy": HARD,
            "4 epochs": (*HARD, "update.epochs=4")}
# Rates that the validation split chose (court.py, compare.py); by an error GRPO's; with 4 epochs one for all.
AT_SECONDS = {LONG: {WHOLE: "5e-5", "error 0.1": "5e-5", "keep 2": "5e-5", "cppo": "1e-4"},
              "hard toy": {WHOLE: "1e-4", "error 0.1": "1e-4", "keep 2": "5e-5", "cppo": "5e-5"},
              "4 epochs": dict.fromkeys((WHOLE, "error 0.1", "keep 2", "cppo"), "5e-5")}
THE_LAW = [(rate, name) for rate, name in product(RATES, [*ARMS][:7])
           if rate == RATES[0] or name.startswith("keep")]
THE_LAW += [("0.1", name) for name in ARMS if name.startswith("sgd")]


def run_of(rate: str, name: str, seed: int, testbed: str = LONG) -> Run:
    recipe, *more = TESTBEDS[testbed]
    arm = name if testbed == LONG else f"{name} of {testbed}"
    return Run(arm, (*ARMS[name], *more), rate, seed, recipe=recipe, method="sgd" * name.startswith("sgd"))


def runs() -> list[Run]:
    """List all runs, each once."""
    pairs = [(rate, name, testbed) for testbed, arms in AT_SECONDS.items() for name, rate in arms.items()]
    places = (product(SEEDS, pairs), product(SEEDS, [(*place, LONG) for place in THE_LAW]))
    return [run_of(rate, name, seed, bed) for seed, (rate, name, bed) in dict.fromkeys(chain(*places))]


def worth(these: list[Record], those: list[Record], cost: str) -> float:
    """Compute what those had spent at the last accuracy of these, over what these spent, of mean curves;
    infinity if they never were as good."""
    (x_E, y_E), (spent_E, reached_E) = (
        np.mean([(run.spent[cost], run.accuracy_E) for run in map(curve, records)], axis=0)
        for records in (these, those))
    return np.interp(y_E[-1], np.maximum.accumulate(reached_E), spent_E, right=np.inf) / x_E[-1]


def mean_error(records: list[Record]) -> float:
    """Average the predicted error of the draws over steps; nan without one."""
    lines = [line for record in records for line in record.lines if "prune/kept" in line]
    return np.mean([line.get("prune/error", np.nan) for line in lines])


def worths(pairs: list[tuple[Record, Record]]) -> list[str]:
    """Write what steps and seconds are `worth`, with bootstrap intervals over seeds."""
    cells, drawn = [], np.random.default_rng(0).integers(0, len(pairs), (1000, len(pairs)))
    for cost in ("steps", "seconds"):
        first, *others = [worth(*zip(*(pairs[i] for i in some), strict=True), cost)
                          for some in (range(len(pairs)), *drawn)]
        ends = np.percentile(others, (2.5, 97.5), method="nearest")
        cells.append("{:.2f} [{:.2f}, {:.2f}]".format(first, *ends))
    return cells


def law_rows(kept: dict[str, Record]) -> list[list[str]]:
    """Tabulate each arm's error, and what its steps are worth in steps of another arm: of keeping all at the
    same rate; of fewer prompts in those of keep 2; and of both at the rates of their best mean accuracy."""
    rows = []
    of_place = {place: [kept.get(run_of(*place, seed).name) for seed in SEEDS] for place in THE_LAW}
    best = {name: max(RATES, key=lambda rate, name=name: np.mean(
        [curve(one).accuracy_E for one in of_place[rate, name] if one] or 0)) for name in [*ARMS][:5]}
    compared = [(place, (place[0], WHOLE if place[0] in RATES else f"sgd, {WHOLE}")) for place in THE_LAW]
    compared += [((RATES[0], f"{count} prompts"), (RATES[0], "keep 2")) for count in (3, 4)]
    compared += [((best[name], name), (best[WHOLE], WHOLE)) for name in best]
    for place, other in compared:
        pairs = [pair for pair in zip(of_place[place], of_place[other], strict=True) if None not in pair]
        if len(pairs) < 2:
            continue
        error = mean_error([one for one, _ in pairs])
        last = np.mean([curve(one).accuracy_E[-1] for one, _ in pairs])
        figures = len(pairs), error, (1 + error) ** -0.5, 1 / (1 + error), last
        rows.append([*place, *(f"{x:.3g}" for x in figures), " ".join(other), *worths(pairs)])
    return rows


def seconds_rows(kept: dict[str, Record]) -> list[list[str]]:
    """Compare areas over CPU seconds with that of keeping all, on each testbed."""
    rows = []
    for testbed, arms in AT_SECONDS.items():
        names = {name: {seed: run_of(rate, name, seed, testbed).name for seed in SEEDS}
                 for name, rate in arms.items()}
        of_arm = {name: {seed: kept[run] for seed, run in by_seed.items() if run in kept}
                  for name, by_seed in names.items()}
        rows += [[testbed, name, arms[name], str(len(by_seed)), f"{mean_error([*by_seed.values()]):.2f}",
                  str(area_gap(by_seed, of_arm[WHOLE], "seconds", len(arms) - 1)),
                  *worths([(record, of_arm[WHOLE][seed]) for seed, record in by_seed.items()])]
                 for name, by_seed in of_arm.items() if len(by_seed) > 1]  # keep 8 ran first
    return rows


def experiment() -> None:
    plug_in(load(find_method("sgd")))
    keep_all(runs(), RESULTS)
    kept = read(RESULTS)
    law = "rate, arm, runs, e, (1 + e)^-1/2, (1 + e)^-1, last %, beside, worth in steps, in seconds"
    print(*table(law.split(", "), law_rows(kept)), "", sep="\n")
    equal = "testbed, arm, rate, runs, e, area over seconds, worth in steps, in seconds".split(", ")
    print(*table(equal, seconds_rows(kept)), sep="\n")


if __name__ == "__main__":
    parser(__doc__).parse_args()
    sys.exit(experiment_status(experiment))
