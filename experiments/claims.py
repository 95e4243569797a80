"""Do the papers' claims hold on the testbed? Those that can be tested at this size, one by one.

    python experiments/claims.py            # after compare.py --full; about four CPU hours
    python experiments/claims.py --report   # the table alone, of what is kept

docs/experiments.md has each claim, its source, and what would refute it. The bookkeeping is that of the
comparison: interrupt at any time, start again, and it goes on with the first run that is missing.
"""

import argparse
import json
import math
import signal
from pathlib import Path
from statistics import mean

import numpy as np
import redraw_errors
from claim_runs import (
    ALLOCATED,
    CONTROLS,
    DAPO,
    GRIDS,
    GROUPS,
    PRETRAINED,
    PRUNED,
    TUNING_SEEDS,
    VAPO,
    run_all,
)
from compare import SEEDS, SOME_SEEDS, Arms, cost_table, parts, rates_of_six
from measures import Difference, area, area_and_end, curve, difference, least
from rates import best_rates, rate_table, validated
from stored import RESULTS, Record, read, records
from testbed import table
from tqdm import tqdm

MARGIN = 2.0     # points: what "does not fall" may fall, and what "needs" must lose without
RESAMPLES = 2000
BySeed = dict[int, Record]


def kept_arms(results: Path, rate_of: dict[str, str | None], seeds: range) -> Arms:
    """Read the runs on the test problems of arms at these rates; an arm that lacks a seed is left out."""
    arms: Arms = {name: {} for name in rate_of}
    for record in records(results):
        name, rate, seed, split = (record.about[key] for key in ("arm", "rate", "seed", "split"))
        if split == "test" and seed in seeds and rate_of.get(name) == rate:
            arms[name][seed] = record
    return {name: by_seed for name, by_seed in arms.items() if len(by_seed) == len(seeds)}


def of_pairs(arms: Arms) -> Arms:
    """Leave out arms of which there is one seed alone: no difference has an interval then."""
    return {name: by_seed for name, by_seed in arms.items() if len(by_seed) > 1}


def gap(these: BySeed, those: BySeed, cost: str, comparisons: int) -> Difference:
    """Compare the areas of two arms at a cost, paired by seed; B is the least that a run spent."""
    shared = sorted(these.keys() & those.keys())
    pairs = [(curve(these[seed]), curve(those[seed])) for seed in shared]
    budget = least([of for pair in pairs for of in pair], cost)
    values = [[area_and_end(of, cost, budget)[0] for of in pair] for pair in pairs]
    return difference(*map(list, zip(*values, strict=True)), comparisons)


def seconds_and_accuracy(by_seed: BySeed, seeds: list[int]) -> np.ndarray:
    """Stack runs' seconds and accuracies at each evaluation, [seeds, 2, E]."""
    curves = [curve(by_seed[seed]) for seed in seeds]
    return np.array([[of.spent["seconds"], of.accuracy_E] for of in curves])


def seconds_to(level: float, second_E: np.ndarray, accuracy_E: np.ndarray) -> float:
    """Read off when a curve of straight lines first comes to a level; infinity where it never does."""
    above_E = np.flatnonzero(accuracy_E >= level)
    if not len(above_E):
        return math.inf
    i = int(above_E[0])
    if i == 0:
        return float(second_E[0])
    share = (level - accuracy_E[i - 1]) / (accuracy_E[i] - accuracy_E[i - 1])
    return float(second_E[i - 1] + share * (second_E[i] - second_E[i - 1]))


def level_of(grpo: BySeed) -> float:
    """Compute the level of equal accuracy: three quarters of the way from GRPO's start to its end."""
    curves = [curve(record) for record in grpo.values()]
    start = mean(float(of.accuracy_E[0]) for of in curves)
    end = mean(area_and_end(of, "steps", float(of.spent["steps"][-1]))[1] for of in curves)
    return start + 0.75 * (end - start)


def speed_up(slow: BySeed, fast: BySeed, level: float) -> tuple[float, float, float, int]:
    """Compare two arms' seconds to a level: the ratio on mean curves, its interval by a bootstrap over seeds,
    and how many seeds alone have one above 1."""
    seeds = sorted(slow.keys() & fast.keys())
    both = [seconds_and_accuracy(arm, seeds) for arm in (slow, fast)]

    def ratio(of: np.ndarray) -> float:
        of_slow, of_fast = (seconds_to(level, *runs[of].mean(axis=0)) for runs in both)
        return of_slow / of_fast

    draw, every = np.random.default_rng(0), np.arange(len(seeds))
    drawn = [ratio(draw.choice(every, len(every))) for _ in range(RESAMPLES)]
    drawn = np.nan_to_num(drawn, nan=1.0, posinf=1e9)  # nan: neither comes there
    low, high = np.percentile(drawn, (2.5, 97.5))
    return ratio(every), float(low), float(high), sum(ratio(every[i:i + 1]) > 1 for i in every)


def verdict(low: float, high: float, bound: float = 0.0) -> str:
    """Say whether an interval lies above a bound."""
    return "holds" if low > bound else "does not" if high < bound else "cannot tell"


def agreed(here: str, above: int, seeds: int) -> str:
    """Let a verdict stand only where every seed alone says so; `above` of them are above the bound."""
    return here if above == {"holds": seeds, "does not": 0}.get(here) else "cannot tell"


def points(of: Difference) -> str:
    return f"{of.mean:+.2f} points [{of.low:+.2f}, {of.high:+.2f}]"


def row(claim: str, test: str, of: Difference, bound: float = 0.0) -> list[str]:
    return [claim, test, points(of), verdict(of.low, of.high, bound)]


def of_speed(six: Arms) -> list[list[str]]:
    """Compare DPPO, GRESO and CPPO by the seconds that they take to GRPO's level."""
    if not six.keys() >= {"grpo", "dppo", "greso", "cppo"}:
        return []
    rows, level = [], level_of(six["grpo"])
    pairs = [("grpo", "dppo"), ("grpo", "greso"), ("grpo", "cppo"), ("greso", "dppo"), ("cppo", "dppo")]
    for slow, fast in pairs:
        ratio, low, high, above = speed_up(six[slow], six[fast], level)
        seeds = len(six[slow].keys() & six[fast].keys())
        here = agreed(verdict(low, high, 1.0), above, seeds)
        rows.append([f"{fast} is faster than {slow} at equal accuracy", f"seconds to {level:.1f}%",
                     f"{ratio:.2f} times [{low:.2f}, {high:.2f}], above 1 in {above} of {seeds} seeds",
                     here])
    return rows


def of_bias(arms: Arms) -> list[list[str]]:
    """Compare what is unbiased with what is biased, at equal steps."""
    pairs = {("dppo", "dppo-listed"): ", which refills too",
             ("dppo", "dppo-biased"): ", which trains on half as many tokens",
             ("pps", "cppo"): ", which keeps 2 of each group", ("pps", "topk-step"): ""}
    return [row("bias costs accuracy", f"{unbiased} less {biased}{but}, area over steps",
                gap(arms[unbiased], arms[biased], "steps", len(pairs)))
            for (unbiased, biased), but in pairs.items() if arms.keys() >= {unbiased, biased}]


def of_small_steps(arms: Arms) -> list[list[str]]:
    """Compare what trains on 32 of 128 completions with GRPO on 32 of 32, at equal trained tokens."""
    return [row("pruning is more than small steps", f"{name} less grpo-4-prompts, area over trained tokens",
                gap(arms[name], arms["grpo-4-prompts"], "trained tokens", 2))
            for name in ("cppo", "pps") if arms.keys() >= {name, "grpo-4-prompts"}]


def of_greso(six: Arms) -> list[list[str]]:
    return [row("GRESO saves rollouts at equal accuracy", f"greso less {name}, area over generated tokens",
                gap(six["greso"], six[name], "generated tokens", 2))
            for name in ("dynamic-sampling", "grpo") if six.keys() >= {"greso", name}]


def of_allocation(arms: Arms) -> list[list[str]]:
    """Compare CPPO with dynamic allocation with GRPO, by seconds of a whole run and by ends."""
    base, rows = arms.get("groups-of-16"), []
    for name in [name for name in arms if name != "groups-of-16"] if base else ():
        by_seed = arms[name]
        ratio = difference(log_seconds(base), log_seconds(by_seed), len(ALLOCATED) - 1)
        low, middle, high = (math.exp(x) for x in (ratio.low, ratio.mean, ratio.high))
        rows.append([f"{name} is faster than GRPO on as many prompts", "seconds of all steps",
                     f"{middle:.2f} times [{low:.2f}, {high:.2f}]", verdict(low, high, 1.0)])
        fall = end_gap(by_seed, base, len(ALLOCATED) - 1)
        rows.append(row("... and accuracy does not fall", f"ends, against {-MARGIN:.0f}", fall, -MARGIN))
    return rows


def log_seconds(by_seed: BySeed) -> list[float]:
    return [math.log(curve(by_seed[seed]).spent["seconds"][-1]) for seed in SEEDS]


def end_gap(these: BySeed, those: BySeed, comparisons: int) -> Difference:
    """Compare ends by shares of a run: arms that take other numbers of steps for as many prompts."""
    ends = []
    for by_seed in (these, those):
        curves = [curve(by_seed[seed]) for seed in SEEDS]
        ends.append([area_and_end(of, "steps", of.spent["steps"][-1])[1] for of in curves])
    return difference(*ends, comparisons)


def of_groups(at_rate: Arms) -> list[list[str]]:
    """Compare each size of a group with the one before it."""
    if "grpo" not in at_rate:
        return []
    return [row("more completions a prompt teach more", f"{large} less {small}, area over {cost}",
                gap(at_rate[large], at_rate[small], cost, 6))
            for cost in ("steps", "generated tokens")
            for small, large in (("group-2", "group-4"), ("group-4", "grpo"), ("grpo", "group-16"))
            if at_rate.keys() >= {small, large}]


def of_dapo(at_rate: Arms) -> list[list[str]]:
    return [row("DAPO needs each of its techniques", f"dapo less {name}, area over steps",
                gap(at_rate["dapo"], at_rate[name], "steps", 4))
            for name in DAPO if name != "dapo" and at_rate.keys() >= {"dapo", name}]


def of_vapo(at_rate: Arms) -> list[list[str]]:
    """Compare VAPO with and without value pretraining, over the steps in which the policy learns."""
    if not at_rate.keys() >= VAPO.keys():
        return []
    areas = []
    for name, first in (("vapo", PRETRAINED), ("vapo-without-pretraining", 0)):
        curves = [curve(at_rate[name][seed]) for seed in SEEDS]
        areas.append([area(of.spent["steps"], of.accuracy_E, first, of.spent["steps"][-1]) for of in curves])
    return [row("VAPO needs value pretraining", "with less without, area over the policy's steps",
                difference(*areas, 1), MARGIN)]


def of_errors(pruned: Arms, results: Path) -> list[list[str]]:
    """Correlate the pruned gradient's error with the area, and write down of which runs, for a figure."""
    path = results / "gradient_errors.jsonl.gz"
    if not path.is_file():
        return []
    lines = [line for line in read(path).lines if line["when"] == "early"]
    early = {(line["arm"], line["budget"]): line["errors"] for line in lines}
    drawn = {}
    for name, (_, pruner, budget) in PRUNED.items():
        errors = early[pruner, budget]
        if name in pruned and None not in errors:
            drawn[name] = {"error": mean(errors), "biased": pruner.startswith(("topk", "pods")),
                           "files": [record.file for record in pruned[name].values()]}
    if len(drawn) < 4:  # of which a correlation says nothing
        return []
    (results / "errors.json").write_text(json.dumps(drawn, indent=1) + "\n")
    rows = []
    for which, arms in (("", drawn), (" that are unbiased", redraw_errors.unbiased(drawn))):
        r, low, high = redraw_errors.correlation(*redraw_errors.points(results, arms))
        rows.append(["a smaller error of the gradient teaches more",
                     f"log of the error and area over steps, {len(arms)} arms{which}",
                     f"correlation {r:+.2f} [{low:+.2f}, {high:+.2f}]", verdict(-high, -low)])
    return rows


def report(results: Path) -> None:
    """Print the rates that CPPO with allocation was given, the table of claims, and what the arms spent."""
    found, rate_of = parts(results), rates_of_six(results)
    six, others = (of_pairs(found.get(part, {})) for part in ("six", "others"))
    rate_allocated = best_rates(results, GRIDS, TUNING_SEEDS)
    allocated = kept_arms(results, rate_allocated, SEEDS)
    controls = kept_arms(results, {name: rate_of[family] for name, (family, _) in CONTROLS.items()}, SEEDS)
    at_rate = kept_arms(results, dict.fromkeys(("grpo", *GROUPS, *DAPO, *VAPO), rate_of["grpo"]), SEEDS)
    pruned = kept_arms(results, dict.fromkeys(PRUNED, rate_of["grpo"]), SOME_SEEDS)
    rows = [*of_speed(six), *of_bias(others | six | controls), *of_small_steps(six | controls),
            *of_greso(six), *of_allocation(allocated), *of_errors(pruned, results), *of_groups(at_rate),
            *of_dapo(at_rate), *of_vapo(at_rate)]
    print(*rate_table(validated(results), rate_allocated), "", sep="\n")
    print(*table(["claim", "test", "result", "here"], rows), "", sep="\n")
    print(*cost_table(allocated | controls | at_rate), "", sep="\n")
    print(json.dumps({"bench": "claims", "rows": rows}))


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = args.results.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run under way ends as well
    if not args.report:
        with tqdm(unit="run") as bar:
            run_all(results, bar)
    report(results)


if __name__ == "__main__":
    main()
