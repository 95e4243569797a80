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
import sys
from pathlib import Path
from statistics import mean

from measures import COSTS, Curve, area_and_end, curve, difference, holm, least
from stored import RECIPE, RESULTS, ROOT, Run, keep, records
from testbed import table
from tqdm import tqdm

import config

sys.path.append(str(ROOT / "toy"))

import hard  # noqa: E402

PROMPTS = "prune.prompts={kind: bernoulli, drop_prob: 0.5}"
COMPLETIONS = "prune.completions={kind: bernoulli, drop_prob: 0.5}"
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
    "dppo-listed": ("dppo", ("prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 2}",
                             "prune.completions={kind: bottom, drop_prob: 0.5}", "rollout.until=full",
                             "pack.window=32", "pack.budget=3400", "loss.count=kept")),
    "dppo-completions": ("dppo", (COMPLETIONS,)),
    "dppo-prompts": ("dppo", (PROMPTS,)),
    "pps-cost": ("pps", ("prune.completions={kind: pps, keep: 2, scope: batch, by_cost: true}",)),
    "pps-prompts": ("pps", ("prune.prompts={kind: pps, share: 0.5}",)),
    "pods": ("cppo", ("prune.completions={kind: pods, keep: 2}", "loss.count=kept")),
    "nat": ("grpo", ("prune.tokens={kind: prefix, whole: 0.5}",)),
}
EVALUATED = "eval.every=15"
GRID, FACTOR, EXTENSIONS = ("2.5e-5", "5e-5", "1e-4", "2e-4"), 2, 2
TUNING_SEEDS = (100, 101)
SEEDS, SOME_SEEDS = range(5), range(3)
VALIDATION = "runs/hard_validation.jsonl"  # made anew by `write_validation`, always the same
Areas = dict[str, list[float]]  # learning rate -> the area of each tuning run


def arm(name: str, rate: str, seed: int, data: str | None = None) -> Run:
    """Make a run of the comparison."""
    family, settings = OTHERS[name] if name in OTHERS else (name, SIX[name])
    return Run(name, (*settings, EVALUATED), rate, seed, family, data)


def write_validation() -> None:
    """Write 600 problems that are none of training, test, or (above level 1) pre-training."""
    train, test = hard.splits()
    seen = {numbers for line, numbers in hard.pretraining() if line["level"] > 1}
    lines = hard.distinct(600, seed=4, taboo=seen | train.keys() | test.keys())
    rows = [{"id": f"hard/validation/{i}", **line} for i, line in enumerate(lines.values())]
    path = ROOT / VALIDATION
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- learning rates

def validated(results: Path) -> dict[str, Areas]:
    """Read the areas over steps of the tuning runs that are kept, {family: {rate: [seed]}}."""
    found: dict[str, Areas] = {}
    for record in records(results):
        about = record.about
        if about["split"] == "validation" and about["family"] in SIX:
            of, total = curve(record), about["settings"]["steps"]
            areas = found.setdefault(about["family"], {}).setdefault(about["rate"], [])
            areas.append(area_and_end(of, "steps", total)[0])
    return found


def best_rate(areas: Areas) -> str | None:
    """Choose a rate, once every one of the grid has all of its seeds; None before."""
    whole = {rate: mean(of) for rate, of in areas.items() if len(of) == len(TUNING_SEEDS)}
    return max(whole, key=whole.get) if len(whole) >= len(GRID) else None


def is_inside(rate: str, areas: Areas) -> bool:
    return min(map(float, areas)) < float(rate) < max(map(float, areas))


def beyond(rate: str, areas: Areas) -> str:
    """Name the rate next to the best, an end of what was tried, outside."""
    factor = FACTOR if float(rate) == max(map(float, areas)) else 1 / FACTOR
    return f"{float(rate) * factor:.3g}"


def tune(results: Path, bar: tqdm) -> None:
    """Run every one of the six at each rate of the grid, and beyond it where the best is an end of it."""
    write_validation()
    for seed in TUNING_SEEDS:
        for name in SIX:
            for rate in GRID:
                kept(arm(name, rate, seed, VALIDATION), results, bar)
    for name in SIX:
        for _ in range(EXTENSIONS):
            areas = validated(results)[name]
            best = best_rate(areas)
            if not is_inside(best, areas):
                for seed in TUNING_SEEDS:
                    kept(arm(name, beyond(best, areas), seed, VALIDATION), results, bar)


def kept(run: Run, results: Path, bar: tqdm) -> None:
    bar.set_description(run.name)
    keep(run, results)
    bar.update()


def rates(results: Path) -> dict[str, str]:
    """Name the rate of each of the six: the chosen one, or the config's."""
    shipped = f"{config.load(RECIPE).optim.lr:.0e}".replace("e-0", "e-")
    found = validated(results)
    return {name: best_rate(found.get(name, {})) or shipped for name in SIX}


def rate_table(results: Path) -> list[str]:
    """Tabulate the areas on the validation split, and mark the best of each method."""
    rows = []
    for name, areas in validated(results).items():
        best = best_rate(areas)
        cells = [f"{rate}: {mean(of):.2f}{' *' if rate == best else ''}"
                 for rate, of in sorted(areas.items(), key=lambda item: float(item[0]))]
        where = "not known yet"
        if best is not None:
            where = "inside" if is_inside(best, areas) else "an end of the grid"
        rows.append([name, ", ".join(cells), where])
    return table(["method", "learning rate: area on the validation split", "the best is"], rows)


# ---- the comparison

def curves(results: Path, names: list[str], seeds: range) -> dict[str, dict[int, Curve]]:
    """Read the curves of arms at their families' rates, {arm: {seed: curve}}, of the runs there are."""
    chosen, found = rates(results), {name: {} for name in names}
    for record in records(results):
        about = record.about
        if (about["arm"] in found and about["split"] == "test" and about["seed"] in seeds
                and about["rate"] == chosen[about["family"]]):
            found[about["arm"]][about["seed"]] = curve(record)
    return {name: of for name, of in found.items() if of}


def compared(found: dict[str, dict[int, Curve]], family: int) -> dict:
    """Compute the areas and ends of arms at each cost, and their differences to GRPO, paired by seed.

    Returns {cost: {"budget", "arms": {arm: {"area" and "end": {"mean", "runs", "difference", "low", "high",
    "p" (Holm's over the arms of this column)}}}}}. GRPO has no difference, nor has an arm with fewer than two
    seeds. Intervals are at 1 - 0.05 / family.
    """
    numbers = {}
    for cost in COSTS:
        budget = least([of for by_seed in found.values() for of in by_seed.values()], cost)
        values = {name: {seed: area_and_end(of, cost, budget) for seed, of in by_seed.items()}
                  for name, by_seed in found.items()}
        arms = {name: {} for name in values}
        for place, figure in enumerate(("area", "end")):
            for name, cell in column(values, place, family).items():
                arms[name][figure] = cell
        numbers[cost] = {"budget": budget, "arms": arms}
    return numbers


def column(values: dict[str, dict[int, tuple[float, float]]], place: int, family: int) -> dict[str, dict]:
    """Compute one figure at one cost: each arm's mean, and its difference to GRPO."""
    cells, gaps = {}, {}
    for name, by_seed in values.items():
        cells[name] = {"mean": mean(value[place] for value in by_seed.values()), "runs": len(by_seed)}
        shared = sorted(by_seed.keys() & values.get("grpo", {}).keys())
        if name != "grpo" and len(shared) > 1:
            gaps[name] = difference([by_seed[seed][place] for seed in shared],
                                    [values["grpo"][seed][place] for seed in shared], family)
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


def cost_table(results: Path, names: list[str], seeds: range) -> list[str]:
    """Tabulate what a whole run has spent, and its CPU seconds by phase, means over the seeds."""
    chosen, rows = rates(results), []
    phases = ("rollout", "reward", "score", "update", "sync", "step", "eval")
    for name in names:
        of_arm = [record for record in records(results) if record.about["arm"] == name
                  and record.about["split"] == "test" and record.about["seed"] in seeds
                  and record.about["rate"] == chosen[record.about["family"]]]
        if of_arm:
            spent = [f"{mean(curve(r).spent[cost][-1] for r in of_arm):,.0f}" for cost in list(COSTS)[:3]]
            seconds = [f"{mean(phase_seconds(r.lines, phase) * cpu_share(r.about) for r in of_arm):.1f}"
                       for phase in phases]
            whole = f"{mean(r.about['cpu_seconds'] for r in of_arm):.0f}"
            rows.append([name, *spent, *seconds, whole])
    return table(["method", *list(COSTS)[:3], *(f"{phase} s" for phase in phases), "whole run, CPU s"], rows)


def phase_seconds(lines: list[dict], phase: str) -> float:
    return sum(line.get(f"time/{phase}", 0.0) for line in lines)


def cpu_share(about: dict) -> float:
    return about["cpu_seconds"] / about["wall_seconds"]


def summed_up(results: Path) -> dict:
    """Compute every number of the comparison from what is kept: rates, the six, and their relatives."""
    parts = {"six": (curves(results, list(SIX), SEEDS), len(SIX) - 1),
             "others": (curves(results, ["grpo", *OTHERS], SOME_SEEDS), len(OTHERS))}
    numbers = {part: compared(found, family) for part, (found, family) in parts.items() if found}
    return {"rates": rates(results)} | numbers


def report(results: Path) -> None:
    numbers = summed_up(results)
    print(*rate_table(results), "", sep="\n")
    for part in [part for part in numbers if part != "rates"]:
        print(f"The {part} at equal cost, and the difference to GRPO\n")
        for figure in ("area", "end"):
            print(*comparison_table(numbers[part], figure), "", sep="\n")
    print(*cost_table(results, [*SIX, *OTHERS], SOME_SEEDS), "", sep="\n")
    print(json.dumps({"bench": "compare"} | numbers))


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--full", action="store_true", help="learning rates, 5 seeds, and the relatives")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = args.results.resolve()
    with tqdm(unit="run") as bar:
        if args.full:
            tune(results, bar)
        chosen = rates(results)
        for seed in SEEDS if args.full else SOME_SEEDS:
            for name in SIX:
                kept(arm(name, chosen[name], seed), results, bar)
        for seed in SOME_SEEDS if args.full else ():
            for name, (family, _) in OTHERS.items():
                kept(arm(name, chosen[family], seed), results, bar)
    report(results)


if __name__ == "__main__":
    main()
