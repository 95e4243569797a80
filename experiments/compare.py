"""Which method learns more at an equal cost? GRPO, CPPO, GRESO, dynamic sampling, DPPO, PPS on the testbed.

    python experiments/compare.py          # `make compare`: 3 seeds of the six, 18 runs, at most an hour
    python experiments/compare.py --full   # also learning rates, 5 seeds, controls, relatives: 5 CPU hours

docs/experiments.md says what is asked and how it is measured. What a run measured is kept (kept_runs), and a
run that is kept is not run again: interrupt at any time, start again on any machine, and it goes on with the
first run that is missing. A method runs at the learning rate that its runs on the validation split have
chosen; without those, as in a part of the comparison, at that of the config.
"""

import math
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import mean

import kept_runs
from kept_runs import LAST, LEAST_EVALUATIONS, RECIPE, RESULTS, ROOT, Record, Run, area_of, curve, keep, least
from toy_tasks import write
from tqdm import tqdm

import config
from infra.lines import phase_seconds
from leaves.page.runs import COSTS, format_value

PROMPTS = "prune.prompts={kind: bernoulli, drop_prob: 0.5}"
COMPLETIONS = "prune.completions={kind: bernoulli, drop_prob: 0.5}"
# Methods on the testbed: the settings that make GRPO another method.
SIX = {
    "grpo": (),
    "cppo": ("prune.completions={kind: topk, keep: 2}", "loss.denominator=kept"),
    "greso": ("prune.prompts={kind: greso}", "rollout.until=informative"),
    "dynamic-sampling": ("rollout.until=informative",),
    "dppo": (PROMPTS, COMPLETIONS),
    "pps": ("prune.completions={kind: pps, keep: 2, scope: batch, by_cost: true}",),
}
# Controls of the papers' claims (RESULTS.md): CPPO's choice among all completions of a step, Dynamic Pruning
# as listed without a refill, and GRPO on as many completions as CPPO keeps.
CONTROLS = {
    "topk-step": ("prune.completions={kind: topk, keep: 2, scope: batch}", "loss.denominator=kept"),
    "dppo-biased": ("prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 2}",
                    "prune.completions={kind: bottom, drop_prob: 0.5}", "loss.denominator=kept"),
    "grpo-4-prompts": ("rollout.prompts_per_step=4",),
}
TUNED = SIX | CONTROLS  # each at the rate that its own runs on the validation split have chosen
# Relatives of the six: the one whose learning rate they have, and settings.
OTHERS = {
    "cppo-released": ("cppo", ("prune.completions={kind: topk, keep: 2, scope: batch}",
                               "loss.normalize=token", "loss.denominator=kept")),
    # 3,400 tokens are half of what GRPO trains on in its first steps, each completion with its prompt
    "dppo-listed": ("dppo", ("prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 2}",
                             "prune.completions={kind: bottom, drop_prob: 0.5}", "loss.denominator=kept",
                             "rollout.until=full", "pack.window=32", "pack.budget=3400")),
    "dppo-completions": ("dppo", (COMPLETIONS,)),
    "dppo-prompts": ("dppo", (PROMPTS,)),
    "pps-keep1-of-8": ("pps", ("prune.completions={kind: pps, keep: 1, scope: batch, by_cost: true}",)),
    "pps-prompts": ("pps", ("prune.prompts={kind: pps, share: 0.5}",)),
    "pods": ("cppo", ("prune.completions={kind: pods, keep: 2}", "loss.denominator=kept")),
    "nat": ("grpo", ("prune.tokens={kind: prefix, whole: 0.5}",)),
}
EVALUATED = "eval.every=15"
# The first 15 steps of the six are evaluated every 3 steps too: some spend all of a small budget there.
AGAIN = (15, 3)
GRID, TUNING_SEEDS = ("2.5e-5", "5e-5", "1e-4", "2e-4"), (100, 101)
VALIDATION = "runs/hard_validation.jsonl"  # made anew, always the same
SEEDS, SOME_SEEDS = range(5), range(3)
PHASES = ("rollout", "reward", "score", "update", "sync", "step", "eval")
TOKENS = list(COSTS)[:3]
# Kept runs of the relatives counted, and timed, completions of advantage 0 as trained; the six do not.
COMPARABLE = list(COSTS)[:2]
Arms = dict[str, dict[int, Record]]  # arm -> seed -> what its run has measured
Areas = dict[str, list[float]]       # learning rate -> the area of each run


def arm(name: str, rate: str, seed: int, data: str | None = None) -> Run:
    """Make a run of the comparison; with `data`, one to choose a rate by."""
    family, settings = OTHERS[name] if name in OTHERS else (name, TUNED[name])
    again = AGAIN if name in SIX and not data else None
    return Run(name, (*settings, EVALUATED), rate, seed, family, data, again=again)


def kept_arms(rate_of: dict[str, str], seeds: range, results: Path) -> Arms:
    """Read the runs of arms at their rates on the test problems, as many as are kept."""
    kept, arms = kept_runs.read(results), {}
    for name, rate in rate_of.items():
        runs = {seed: Run(name, (), rate, seed) for seed in seeds}
        by_seed = {seed: kept[run.name] for seed, run in runs.items() if run.name in kept}
        if by_seed:
            arms[name] = by_seed
    return arms


# ---- learning rates

def tune(results: Path, bar: tqdm) -> None:
    """Run the six and the controls at every rate of the grid, on seeds that are not used again."""
    write("hard", ROOT, only=VALIDATION)
    for seed, name, rate in product(TUNING_SEEDS, TUNED, GRID):
        keep(arm(name, rate, seed, VALIDATION), results, bar)


def validated(results: Path) -> dict[str, Areas]:
    """Read the areas over steps of the runs on the validation split that are kept, {arm: {rate: [seed]}};
    -inf if a run was not finite."""
    areas: dict[str, Areas] = {}
    for record in kept_runs.read(results).values():
        about = record.about
        if about.get("split") == "validation":
            area = -math.inf
            if about.get("finite", True):
                area = area_of(curve(record), "steps", about["settings"]["steps"])
            areas.setdefault(about["arm"], {}).setdefault(about["rate"], []).append(area)
    return areas


def best_rate(areas: Areas, seeds: int) -> str | None:
    """Choose the rate of the largest mean area, once a grid of them has all its seeds; None before."""
    whole = {rate: mean(of) for rate, of in areas.items() if len(of) == seeds}
    return max(whole, key=whole.get) if len(whole) >= len(GRID) else None


def chosen_rates(results: Path) -> dict[str, str]:
    """Name the rate of each of the six and of the controls: the chosen one, or the config's."""
    shipped, areas = format_value(config.load(RECIPE).optim.lr), validated(results)
    return {name: best_rate(areas.get(name, {}), len(TUNING_SEEDS)) or shipped for name in TUNED}


def tell_area(rate: str, areas: list[float]) -> str:
    return f"{rate}: {mean(areas):.2f}".replace("-inf", "not finite")


def rate_table(areas: dict[str, Areas], best: dict[str, str]) -> list[str]:
    """Tabulate the areas on the validation split, and mark the best of each arm."""
    rows = []
    for name, rate in best.items():
        tried = sorted(areas.get(name, {}), key=float)
        cells = [tell_area(at, areas[name][at]) + " *" * (at == rate) for at in tried]
        where = "inside" if rate in tried[1:-1] else "an end of what was tried"
        rows.append([name, ", ".join(cells), where if tried else "not known yet"])
    return kept_runs.table(["method", "learning rate: area on the validation split", "the best is"], rows)


# ---- at equal cost

def compared(arms: Arms, costs: Iterable[str], comparisons: int) -> dict:
    """Compute the areas and ends of arms at these costs, and their differences to GRPO, paired by seed.

    Returns {cost: {"budget", "arms": {arm: {"runs", "evaluations" (within the budget), "area" and "end":
    {"mean", "difference", "low", "high", "p" (Holm's over the arms of this column)}}}}}. An arm with fewer
    than LEAST_EVALUATIONS has no area and no end; GRPO has no difference, nor has an arm with fewer than two
    seeds. Intervals are at 1 - 0.05 / comparisons.
    """
    numbers = {}
    curves = {name: {seed: curve(record) for seed, record in by_seed.items()}
              for name, by_seed in arms.items()}
    for cost in costs:
        budget = least([of for by_seed in curves.values() for of in by_seed.values()], cost)
        figures = {name: {"runs": len(of), "evaluations": kept_runs.evaluations(of.values(), cost, budget)}
                   for name, of in curves.items()}
        measured = [name for name in arms if figures[name]["evaluations"] >= LEAST_EVALUATIONS]
        for figure, begin in (("area", 0.0), ("end", LAST)):
            values = {name: {seed: area_of(of, cost, budget, begin) for seed, of in curves[name].items()}
                      for name in measured}
            for name, cell in column(values, comparisons).items():
                figures[name][figure] = cell
        numbers[cost] = {"budget": budget, "arms": figures}
    return numbers


def column(values: dict[str, dict[int, float]], comparisons: int) -> dict[str, dict]:
    """Compute one figure at one cost: each arm's mean, and its difference to GRPO."""
    cells = {name: {"mean": mean(by_seed.values())} for name, by_seed in values.items()}
    gaps, grpo = {}, values.get("grpo", {})
    for name, by_seed in values.items():
        shared = sorted(by_seed.keys() & grpo.keys())
        if name != "grpo" and len(shared) > 1:
            these, those = [by_seed[seed] for seed in shared], [grpo[seed] for seed in shared]
            gaps[name] = kept_runs.difference(these, those, comparisons)
    corrected = kept_runs.holm([gap.p for gap in gaps.values()])
    for (name, gap), p in zip(gaps.items(), corrected, strict=True):
        cells[name] |= {"difference": gap.mean, "low": gap.low, "high": gap.high, "p": p}
    return cells


def cell(of_arm: dict, figure: str) -> str:
    """Write a figure with its difference to GRPO, and how many evaluations it rests on."""
    figures = of_arm.get(figure, {})
    text = f"{figures['mean']:.2f}" if figures else "-"
    if "difference" in figures:
        interval = f"[{figures['low']:+.2f}, {figures['high']:+.2f}]"
        text += f" ({figures['difference']:+.2f} {interval}, p {figures['p']:.3f})"
    return f"{text}, {of_arm['evaluations']}"


def comparison_table(numbers: dict, figure: str) -> list[str]:
    """Tabulate one figure at each cost: the mean, the difference to GRPO, its interval, Holm's p, and the
    evaluations of the arm within the budget."""
    head = [f"{of['budget']:,.0f} {cost}" for cost, of in numbers.items()]
    first, rows = next(iter(numbers.values())), []
    for name, figures in first["arms"].items():
        cells = [cell(of["arms"][name], figure) if name in of["arms"] else "" for of in numbers.values()]
        rows.append([name, str(figures["runs"]), *cells])
    return kept_runs.table([f"{figure}, %, and evaluations", "runs", *head], rows)


def cost_table(arms: Arms) -> list[str]:
    """Tabulate what a whole run has spent, and its CPU seconds by phase, means over the seeds."""
    rows = []
    for name, by_seed in arms.items():
        runs = list(by_seed.values())
        spent = [f"{mean(curve(run).spent[cost][-1] for run in runs):,.0f}" for cost in TOKENS]
        seconds = [(phase_seconds(run.lines), kept_runs.cpu_share(run)) for run in runs]
        spent += [f"{mean(of.get(phase, 0.0) * share for of, share in seconds):.1f}" for phase in PHASES]
        rows.append([name, *spent, f"{mean(run.about['cpu_seconds'] for run in runs):.0f}"])
    return kept_runs.table(["method", *TOKENS, *(f"{phase} s" for phase in PHASES), "whole run, CPU s"], rows)


def report(results: Path) -> None:
    """Print the tables of all that is kept."""
    rate_of = chosen_rates(results)
    of_six = {name: rate_of[name] for name in SIX}
    of_others = {"grpo": rate_of["grpo"]} | {name: rate_of[family] for name, (family, _) in OTHERS.items()}
    parts = {"six": (of_six, COSTS), "others": (of_others, COMPARABLE)}
    printed = {"rates": rate_of}
    print(*rate_table(validated(results), rate_of), "", sep="\n")
    for part, (rates, costs) in parts.items():
        arms = kept_arms(rates, SEEDS, results)
        if not arms:
            continue
        printed[part] = compared(arms, costs, len(arms) - 1)
        print(f"The {part} at equal cost, and the difference to GRPO\n")
        for figure in ("area", "end"):
            print(*comparison_table(printed[part], figure), "", sep="\n")
        if part == "six":
            print(*cost_table(arms), "", sep="\n")
    kept_runs.print_json("compare", **printed)


def main() -> int:
    options = kept_runs.parser(__doc__)
    options.add_argument("--full", action="store_true", help="learning rates, 5 seeds, and the relatives")
    full = options.parse_args().full
    return kept_runs.experiment_status(lambda: experiment(full, RESULTS))


def experiment(full: bool, results: Path) -> None:
    """Make the runs that are missing, and print the tables."""
    with tqdm(unit="run") as bar:
        if full:
            tune(results, bar)
        rate_of = chosen_rates(results)
        for seed, name in product(SEEDS, TUNED) if full else product(SOME_SEEDS, SIX):
            keep(arm(name, rate_of[name], seed), results, bar)
        for seed, name in product(SEEDS, OTHERS) if full else ():
            keep(arm(name, rate_of[OTHERS[name][0]], seed), results, bar)
    report(results)


if __name__ == "__main__":
    sys.exit(main())
