"""Do the papers' claims hold on the testbed? Those that can be tested at this size, one by one.

    python experiments/claims.py           # the tables, of what is kept

docs/experiments.md has each claim, its source, and what would refute it. The runs beside those of
compare.py were made by claim_runs.py at commit b0008e7; results.jsonl.xz has the settings of each.
"""

import math
from itertools import chain
from pathlib import Path
from statistics import mean

import numpy as np
from compare import (
    BEFORE,
    CONTROLS,
    OTHERS,
    SEEDS,
    SIX,
    SOME_SEEDS,
    Arms,
    best_rate,
    chosen_rates,
    cost_table,
    kept_arms,
    rate_table,
    validated,
)
from kept_runs import (
    LAST,
    LEAST_EVALUATIONS,
    RESULTS,
    Curve,
    Difference,
    Record,
    area_gap,
    area_of,
    curve,
    difference,
    evaluations,
    print_json,
    read,
    table,
)
from scipy.stats import pearsonr

MARGIN = 2.0     # points: what "does not fall" may fall, and what "needs" must lose without
RESAMPLES = 2000
PRETRAINED = 15  # steps of VAPO's critic alone
# Groups of 16, as many prompts in all: CPPO prunes 50, 75, 87.5 and 93.75%.
ALLOCATED = ("groups-of-16", "cppo-50", "cppo-75", "cppo-87", "cppo-94")
GROUPS = ("group-2", "group-4", "group-16")
DAPO = ("dapo", "dapo-without-clip-higher", "dapo-without-sampling", "dapo-without-token-mean",
        "dapo-without-length")
VAPO = ("vapo", "vapo-without-pretraining")
# Arms at GRPO's rate whose gradient's error is kept: the row and budget of bench/prune.py at fada074.
PRUNED = {
    "cppo": ("topk, group, kept mean", 0.25),
    "pps-norm": ("pps norm, batch", 0.25),
    "pps-norm-cost": ("pps norm, batch, by cost", 0.25),
    "pods": ("pods, kept mean", 0.25),
    "pps-prompts": ("prompts, pps", 0.5),
    "nat": ("cuts alone", 0.75),
    "cppo-keep1": ("topk, group, kept mean", 0.125),
    "cppo-keep4": ("topk, group, kept mean", 0.5),
    "topk-all-keep1": ("topk, batch, full batch", 0.125),
    "topk-all-keep2": ("topk, batch, full batch", 0.25),
    "pps-keep1": ("pps norm, batch", 0.125),
    "pps-adv": ("pps |A|, group", 0.25),
    "pods-keep4": ("pods, kept mean", 0.5),
    "pps-prompts-quarter": ("prompts, pps", 0.25),
}
FEWER_PROMPTS = ("pps-prompts", "pps-prompts-quarter")  # arms that also roll out fewer prompts
# Claims of areas: cost, rows in the family, and which arm less which other, with what else sets these apart.
# What one of the six is less GRPO is asked once, at the budget of compare.py's table, though the families of
# SURPRISE and SAVED were written down with such a row.
BIAS = ("bias costs accuracy", "steps", 4, {
    ("dppo", "dppo-listed"): ", which refills too",
    ("dppo", "dppo-biased"): ", which trains on half as many tokens",
    (BEFORE, "cppo"): ", which keeps 2 of each group",
    (BEFORE, "topk-step"): "",
})
SMALL_STEPS = ("pruning is more than small steps", "trained tokens", 2, {
    ("cppo", "grpo-4-prompts"): "",
    (BEFORE, "grpo-4-prompts"): "",
})
SURPRISE = {("pps", BEFORE): "", ("pps", "cppo"): ""}
HARDER = {("pps-keep1-of-8", other): "" for other in ("pps-norm-keep1-of-8", "cppo", "grpo")}
BETTER = [("PPS by surprise teaches more", cost, 3, pairs)
          for pairs in (SURPRISE, HARDER) for cost in ("trained tokens", "seconds")]
SAVED = ("GRESO saves rollouts at equal accuracy", "generated tokens", 2, {
    ("greso", "dynamic-sampling"): "",
})
SIZES = {("group-4", "group-2"): "", ("grpo", "group-4"): "", ("group-16", "grpo"): ""}
MORE = "more completions a prompt teach more"
BY_STEPS, BY_TOKENS = ((MORE, cost, 6, SIZES) for cost in ("steps", "generated tokens"))
NEEDED = ("DAPO needs each of its techniques", "steps", 4, {("dapo", name): "" for name in DAPO[1:]})
BySeed = dict[int, Record]
Rows = list[list[str]]


def verdict(low: float, high: float, bound: float = 0.0) -> str:
    """Say whether an interval lies above a bound."""
    return "holds" if low > bound else "does not" if high < bound else "cannot tell"


def judge(of: Difference | None, bound: float = 0.0) -> str:
    """Say whether a difference lies above a bound; None is one that nobody has measured."""
    return verdict(of.low, of.high, bound) if of else "not measured"


def row(claim: str, test: str, of: Difference | None, counts: str, bound: float = 0.0) -> list[str]:
    """Judge a difference of areas or ends, which rests on so many evaluations of each arm."""
    points = f"{of.mean:+.2f} points [{of.low:+.2f}, {of.high:+.2f}]" if of else "-"
    return [claim, test, points, counts, judge(of, bound)]


def of_areas(arms: Arms, claim: str, cost: str, comparisons: int, pairs: dict[tuple[str, str], str]) -> Rows:
    """Compare the areas of pairs of arms."""
    rows = []
    for (name, other), but in pairs.items():
        of = area_gap(arms[name], arms[other], cost, comparisons)
        test = f"{name} less {other}{but}, area over {cost}"
        rows.append(row(claim, test, of.difference, of.counts))
    return rows


# ---- speed at equal accuracy

def seconds_to(level: float, second_E: np.ndarray, accuracy_E: np.ndarray) -> float:
    """Read off when a curve of straight lines first comes to a level; infinity where it never does."""
    above_E = np.flatnonzero(accuracy_E >= level)
    if not len(above_E):
        return math.inf
    line = slice(max(0, above_E[0] - 1), above_E[0] + 1)  # that crosses it
    return float(np.interp(level, accuracy_E[line], second_E[line]))


def evaluations_to(level: float, of: Curve) -> int:
    """Count a curve's evaluations, the one at the start apart, up to the first at a level; all if none is."""
    return next((i for i, accuracy in enumerate(of.accuracy_E) if accuracy >= level), len(of.accuracy_E) - 1)


def level_of(grpo: BySeed) -> float:
    """Compute the level of equal accuracy: three quarters of the way from GRPO's start to its end."""
    start = mean(float(curve(record).accuracy_E[0]) for record in grpo.values())
    return start + 0.75 * (mean(ends(grpo)) - start)


def areas_of(by_seed: BySeed, begin: float = 0.0) -> list[float]:
    """Compute each run's area, its mean accuracy over its own steps from a share `begin` of them on."""
    curves = [curve(record) for record in by_seed.values()]
    return [area_of(of, "steps", float(of.spent["steps"][-1]), begin) for of in curves]


def ends(by_seed: BySeed) -> list[float]:
    """Read the end of each run: the mean accuracy over the last quarter of its own steps."""
    return areas_of(by_seed, LAST)


def own_counts(*arms: BySeed) -> str:
    """Count the evaluations of each arm, of the run with the fewest."""
    counts = [evaluations([curve(record) for record in arm.values()], "steps", math.inf) for arm in arms]
    return " and ".join(map(str, counts))


def speed_up(slow: BySeed, fast: BySeed, level: float) -> tuple[float, float, float, int]:
    """Compare two arms' seconds to a level: the ratio on mean curves, its interval by a bootstrap over seeds,
    and how many seeds alone have one above 1."""
    both = []
    for by_seed in (slow, fast):
        curves = [curve(by_seed[seed]) for seed in sorted(by_seed)]
        both.append(np.array([[of.spent["seconds"], of.accuracy_E] for of in curves]))

    def ratio(of: np.ndarray) -> float:
        of_slow, of_fast = (seconds_to(level, *runs[of].mean(axis=0)) for runs in both)
        return of_slow / of_fast

    draw, every = np.random.default_rng(0), np.arange(len(slow))
    drawn = [ratio(draw.choice(every, len(every))) for _ in range(RESAMPLES)]
    drawn = np.nan_to_num(drawn, nan=1.0, posinf=1e9)  # nan: neither comes there
    low, high = np.percentile(drawn, (2.5, 97.5))
    above = sum(ratio(every[i:i + 1]) > 1 for i in every)
    return ratio(every), float(low), float(high), above


def agreed(here: str, above: int, seeds: int) -> str:
    """Let a verdict stand only where every seed alone says so; `above` of them are above the bound."""
    return here if above == {"holds": seeds, "does not": 0}.get(here) else "cannot tell"


def of_speed(six: Arms) -> Rows:
    """Compare DPPO, GRESO and CPPO by the seconds that they take to GRPO's level."""
    rows, level, seeds = [], level_of(six["grpo"]), len(SEEDS)
    pairs = [("grpo", "dppo"), ("grpo", "greso"), ("grpo", "cppo"), ("greso", "dppo"), ("cppo", "dppo")]
    for slow, fast in pairs:
        claim, test = f"{fast} is faster than {slow} at equal accuracy", f"seconds to {level:.1f}%"
        counts = [min(evaluations_to(level, curve(record)) for record in six[name].values())
                  for name in (slow, fast)]
        result, here = "-", "not measured"
        if min(counts) >= LEAST_EVALUATIONS:
            ratio, low, high, above = speed_up(six[slow], six[fast], level)
            result = f"{ratio:.2f} times [{low:.2f}, {high:.2f}], above 1 in {above} of {seeds} seeds"
            here = agreed(verdict(low, high, 1.0), above, seeds)
        rows.append([claim, test, result, " and ".join(map(str, counts)), here])
    return rows


# ---- what has a measure of its own

def of_allocation(arms: Arms) -> Rows:
    """Compare CPPO with dynamic allocation with GRPO, by seconds of a whole run and by ends."""
    base, *others = ALLOCATED
    rows = []
    for name in others:
        ratio = difference(log_seconds(arms[base]), log_seconds(arms[name]), len(others))
        low, middle, high = (math.exp(x) for x in (ratio.low, ratio.mean, ratio.high))
        rows.append([f"{name} is faster than GRPO on as many prompts", "seconds of all steps",
                     f"{middle:.2f} times [{low:.2f}, {high:.2f}]", "", verdict(low, high, 1.0)])
        fall = difference(ends(arms[name]), ends(arms[base]), len(others))
        rows.append(row("... and accuracy does not fall", f"ends, against {-MARGIN:.0f}", fall,
                        own_counts(arms[name], arms[base]), -MARGIN))
    return rows


def log_seconds(by_seed: BySeed) -> list[float]:
    return [math.log(curve(by_seed[seed]).spent["seconds"][-1]) for seed in SEEDS]


def of_vapo(arms: Arms) -> Rows:
    """Compare VAPO with and without value pretraining, over the steps in which the policy learns."""
    both = [arms[name] for name in VAPO]
    steps = [by_seed[0].about["settings"]["steps"] for by_seed in both]
    areas = [areas_of(by_seed, first / count)
             for by_seed, first, count in zip(both, (PRETRAINED, 0), steps, strict=True)]
    return [row("VAPO needs value pretraining", "with less without, area over the policy's steps",
                difference(*areas, 1), own_counts(*both), MARGIN)]


def gradient_errors(results: Path) -> dict[str, float]:
    """Read the mean squared error of each arm's gradient after 20 steps, over the full gradient's square."""
    lines = [line for line in read(results)["gradient_errors"].lines if line["when"] == "early"]
    early = {(line["arm"], line["budget"]): line["errors"] for line in lines}
    return {name: mean(early[place]) for name, place in PRUNED.items()}


def is_biased(name: str) -> bool:
    return PRUNED[name][0].startswith(("topk", "pods"))


def of_errors(errors: dict[str, float], areas: dict[str, list[float]], count: int) -> Rows:
    """Correlate the pruned gradient's error with the area of `count` evaluations. A verdict must hold without
    FEWER_PROMPTS too."""
    rows = []
    unbiased = [name for name in errors if not is_biased(name)]
    for which, names in (("", list(errors)), (" that are unbiased", unbiased)):
        others = [name for name in names if name not in FEWER_PROMPTS]
        left_out = f"without the {len(names) - len(others)} that roll out fewer prompts"
        told, verdicts = [], set()
        for chosen in (names, others):
            found = pearsonr([math.log10(errors[name]) for name in chosen],
                             [mean(areas[name]) for name in chosen])
            low, high = found.confidence_interval()  # Fisher's, at 95%
            told.append(f"{found.statistic:+.2f} [{low:+.2f}, {high:+.2f}]")
            verdicts.add(verdict(-high, -low))
        rows.append(["a smaller error of the gradient teaches more",
                     f"log of the error and area over steps, {len(names)} arms{which}",
                     f"correlation {told[0]}; {left_out} {told[1]}", str(count),
                     verdicts.pop() if len(verdicts) == 1 else "cannot tell"])
    return rows


def report(results: Path) -> None:
    """Print the rates that CPPO with allocation was given, the table of claims, and what the arms spent."""
    rate_of, areas = chosen_rates(results), validated(results)
    rates = {name: best_rate(areas[name], 1) for name in ALLOCATED}
    others = {name: rate_of[family] for name, (family, _) in OTHERS.items()}
    others["pps-norm-keep1-of-8"] = rate_of[BEFORE]
    allocated = kept_arms(rates, SEEDS, results)
    controls = kept_arms({name: rate_of[name] for name in CONTROLS}, SEEDS, results)
    at_rate = kept_arms(dict.fromkeys(("grpo", *GROUPS, *DAPO, *VAPO), rate_of["grpo"]), SEEDS, results)
    pruned = kept_arms(dict.fromkeys(PRUNED, rate_of["grpo"]), SOME_SEEDS, results)
    six = kept_arms({name: rate_of[name] for name in (*SIX, BEFORE)}, SEEDS, results)
    arms = kept_arms(others, SEEDS, results) | six | controls
    errors = gradient_errors(results)
    learnt = {name: areas_of(pruned[name]) for name in errors}
    fewest = min(int(own_counts(by_seed)) for by_seed in pruned.values())
    rows = [*of_speed(six), *of_areas(arms, *BIAS), *of_areas(arms, *SMALL_STEPS), *of_areas(arms, *SAVED),
            *of_allocation(allocated), *of_errors(errors, learnt, fewest), *of_areas(at_rate, *BY_STEPS),
            *of_areas(at_rate, *BY_TOKENS), *of_areas(at_rate, *NEEDED), *of_vapo(at_rate),
            *chain.from_iterable(of_areas(arms, *claim) for claim in BETTER)]
    print(*rate_table(areas, rates), "", sep="\n")
    print(*table(["claim", "test", "result", "evaluations", "here"], rows), "", sep="\n")
    print(*cost_table(controls), "", sep="\n")
    points = {name: {"error": errors[name], "area": mean(learnt[name])} for name in errors}
    print_json("claims", rows=rows, errors=points)


if __name__ == "__main__":
    report(RESULTS)
