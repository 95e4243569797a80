"""Which method learns more at an equal cost? GRPO, CPPO, GRESO, dynamic sampling, DPPO, PPS on the testbed.

    python experiments/compare.py          # `make compare`: 3 seeds of the six, 18 runs, at most an hour
    python experiments/compare.py --full   # also learning rates, 5 seeds, and eight relatives: 4 CPU hours

docs/experiments.md says what is asked and how it is measured. What a run measured is kept in
experiments/results, and a run that is kept is not run again: interrupt at any time, start again on any
machine, and it goes on with the first run that is missing. A method runs at the learning rate that its runs
on the validation split have chosen; without those, as in a part of the comparison, at that of the config.
experiments/redraw.py computes the same numbers, and draws the figures, from what is kept alone.
"""

import argparse
import json
import signal
from pathlib import Path
from statistics import mean

from measures import COSTS, area_and_end, cpu_share, curve, difference, holm, least
from rates import best_rates, rate_table, spelled, tune, validated
from stored import RECIPE, RESULTS, Record, Run, keep, records
from testbed import table
from tqdm import tqdm

import config

PROMPTS = "prune.prompts={kind: bernoulli, drop_prob: 0.5}"
COMPLETIONS = "prune.completions={kind: bernoulli, drop_prob: 0.5}"
LISTED = ("prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 2}",  # as DPPO's listing drops
          "prune.completions={kind: bottom, drop_prob: 0.5}", "loss.count=kept")
# Methods on the testbed: the settings that make GRPO another method. `testbed.py` has three of them.
SIX = {
    "grpo": (),
    "cppo": ("prune.completions={kind: topk, keep: 2}", "loss.count=kept"),
    "greso": ("prune.prompts={kind: greso}", "rollout.until=informative"),
    "dynamic-sampling": ("rollout.until=informative",),
    "dppo": (PROMPTS, COMPLETIONS),
    "pps": ("prune.completions={kind: pps, keep: 2, scope: batch}",),
}
# Their relatives: the one whose learning rate they have, and settings.
OTHERS = {
    "cppo-released": ("cppo", ("prune.completions={kind: topk, keep: 2, scope: batch}", "loss.per=token",
                               "loss.count=kept")),
    # 3,400 tokens are half of what GRPO trains on in its first steps, each completion with its prompt
    "dppo-listed": ("dppo", (*LISTED, "rollout.until=full", "pack.window=32", "pack.budget=3400")),
    "dppo-completions": ("dppo", (COMPLETIONS,)),
    "dppo-prompts": ("dppo", (PROMPTS,)),
    "pps-cost": ("pps", ("prune.completions={kind: pps, keep: 2, scope: batch, by_cost: true}",)),
    "pps-prompts": ("pps", ("prune.prompts={kind: pps, share: 0.5}",)),
    "pods": ("cppo", ("prune.completions={kind: pods, keep: 2}", "loss.count=kept")),
    "nat": ("grpo", ("prune.tokens={kind: prefix, whole: 0.5}",)),
}
EVALUATED = "eval.every=15"
GRID, TUNING_SEEDS = ("2.5e-5", "5e-5", "1e-4", "2e-4"), (100, 101)
GRIDS = dict.fromkeys(SIX, GRID)
SEEDS, SOME_SEEDS = range(5), range(3)
PHASES = ("rollout", "reward", "score", "update", "sync", "step", "eval")
Arms = dict[str, dict[int, Record]]  # arm -> seed -> what its run has measured


def arm(name: str, rate: str, seed: int) -> Run:
    """Make a run of the comparison."""
    family, settings = OTHERS[name] if name in OTHERS else (name, SIX[name])
    return Run(name, (*settings, EVALUATED), rate, seed, family)


def rates_of_six(results: Path) -> dict[str, str]:
    """Name the rate of each of the six: the chosen one, or the config's."""
    shipped = spelled(config.load(RECIPE).optim.lr)
    return {name: rate or shipped for name, rate in best_rates(results, GRIDS, TUNING_SEEDS).items()}


def parts(results: Path) -> dict[str, Arms]:
    """Sort what is kept: the six and their relatives at their rates, and the runs that chose these."""
    rate_of = rates_of_six(results)
    found: dict[str, Arms] = {"six": {name: {} for name in SIX}, "others": {}, "validation": {}}
    found["others"] = {name: {} for name in ("grpo", *OTHERS)}
    for record in records(results):
        name, family, rate, seed, split = (record.about[key] for key in
                                           ("arm", "family", "rate", "seed", "split"))
        if family in SIX and split == "validation":
            found["validation"].setdefault(f"{name}, {rate}", {})[seed] = record
        elif family in SIX and rate == rate_of[family]:
            for part in ("six", "others"):
                if name in found[part] and seed in SEEDS:
                    found[part][name][seed] = record
    for part, arms in found.items():
        found[part] = {name: by_seed for name, by_seed in arms.items() if by_seed}
    return {part: arms for part, arms in found.items() if arms}


def compared(arms: Arms) -> dict:
    """Compute the areas and ends of arms at each cost, and their differences to GRPO, paired by seed.

    Returns {cost: {"budget", "arms": {arm: {"area" and "end": {"mean", "runs", "difference", "low", "high",
    "p" (Holm's over the arms of this column)}}}}}. GRPO has no difference, nor has an arm with fewer than two
    seeds. Intervals are at 1 - 0.05 / (arms less GRPO).
    """
    curves, numbers = {}, {}
    for name, by_seed in arms.items():
        curves[name] = {seed: curve(record) for seed, record in by_seed.items()}
    for cost in COSTS:
        budget = least([of for by_seed in curves.values() for of in by_seed.values()], cost)
        values = {name: {seed: area_and_end(of, cost, budget) for seed, of in by_seed.items()}
                  for name, by_seed in curves.items()}
        figures = {name: {} for name in values}
        for place, figure in enumerate(("area", "end")):
            for name, cell in column(values, place, len(values) - 1).items():
                figures[name][figure] = cell
        numbers[cost] = {"budget": budget, "arms": figures}
    return numbers


def column(values: dict[str, dict[int, tuple[float, float]]], place: int,
           comparisons: int) -> dict[str, dict]:
    """Compute one figure at one cost: each arm's mean, and its difference to GRPO."""
    cells, gaps = {}, {}
    for name, by_seed in values.items():
        cells[name] = {"mean": mean(value[place] for value in by_seed.values()), "runs": len(by_seed)}
        shared = sorted(by_seed.keys() & values.get("grpo", {}).keys())
        if name != "grpo" and len(shared) > 1:
            gaps[name] = difference([by_seed[seed][place] for seed in shared],
                                    [values["grpo"][seed][place] for seed in shared], comparisons)
    corrected = holm([gap.p for gap in gaps.values()])
    for (name, gap), p in zip(gaps.items(), corrected, strict=True):
        cells[name] |= {"difference": gap.mean, "low": gap.low, "high": gap.high, "p": p}
    return cells


def cell(figures: dict) -> str:
    text = f"{figures['mean']:.2f}"
    if "difference" not in figures:
        return text
    return f"{text} ({figures['difference']:+.2f} [{figures['low']:+.2f}, {figures['high']:+.2f}], " \
           f"p {figures['p']:.3f})"


def comparison_table(numbers: dict, figure: str) -> list[str]:
    """Tabulate one figure at the four costs: the mean, the difference to GRPO, its interval, Holm's p."""
    head = [f"{of['budget']:,.0f} {cost}" for cost, of in numbers.items()]
    rows = []
    for name, figures in next(iter(numbers.values()))["arms"].items():
        cells = [cell(of["arms"][name][figure]) for of in numbers.values()]
        rows.append([name, str(figures[figure]["runs"]), *cells])
    return table([f"{figure}, %", "runs", *head], rows)


def cost_table(arms: Arms) -> list[str]:
    """Tabulate what a whole run has spent, and its CPU seconds by phase, means over the seeds."""
    rows, tokens = [], list(COSTS)[:3]
    for name, by_seed in arms.items():
        runs = list(by_seed.values())
        spent = [f"{mean(curve(run).spent[cost][-1] for run in runs):,.0f}" for cost in tokens]
        seconds = [f"{mean(phase_seconds(run, phase) for run in runs):.1f}" for phase in PHASES]
        rows.append([name, *spent, *seconds, f"{mean(run.about['cpu_seconds'] for run in runs):.0f}"])
    return table(["method", *tokens, *(f"{phase} s" for phase in PHASES), "whole run, CPU s"], rows)


def phase_seconds(run: Record, phase: str) -> float:
    return sum(line.get(f"time/{phase}", 0.0) for line in run.lines) * cpu_share(run)


def report(results: Path) -> None:
    """Print the tables of all that is kept, and write down for redraw.py which runs they are of."""
    found = parts(results)
    files = {part: {name: [record.file for record in by_seed.values()] for name, by_seed in arms.items()}
             for part, arms in found.items()}
    (results / "parts.json").write_text(json.dumps(files, indent=1) + "\n")
    numbers = {part: compared(arms) for part, arms in found.items()}
    print(*rate_table(validated(results), best_rates(results, GRIDS, TUNING_SEEDS)), "", sep="\n")
    for part in ("six", "others"):
        if part in numbers:
            print(f"The {part} at equal cost, and the difference to GRPO\n")
            for figure in ("area", "end"):
                print(*comparison_table(numbers[part], figure), "", sep="\n")
            print(*cost_table(found[part]), "", sep="\n")
    print(json.dumps({"bench": "compare", "rates": rates_of_six(results)} | numbers))


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--full", action="store_true", help="learning rates, 5 seeds, and the relatives")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = args.results.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run under way ends as well
    with tqdm(unit="run") as bar:
        if args.full:
            tune(arm, GRIDS, TUNING_SEEDS, results, bar)
        rate_of = rates_of_six(results)
        for seed in SEEDS if args.full else SOME_SEEDS:
            for name in SIX:
                keep(arm(name, rate_of[name], seed), results, bar)
        for seed in SEEDS if args.full else ():
            for name, (family, _) in OTHERS.items():
                keep(arm(name, rate_of[family], seed), results, bar)
    report(results)


if __name__ == "__main__":
    main()
