"""Tables that compare runs: a score at equal cost, the cost of a score, the cost of a run.

A score is the accuracy on a set in percent, or the mean reward there. A table is a head and rows of texts; a
page shows it as markdown or as HTML.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import numpy as np

from page.runs import (
    ABSENT,
    SPENT,
    Groups,
    LoggedRun,
    Reading,
    differing,
    reaches,
    score_at,
    short,
    to_reach,
)
from page.summary import Score, phase_seconds
from verify.statistics import half_width

LEAST = 3         # runs from which on an interval is told
UNKNOWN, NEVER = "not known", "not reached"
OUTSIDE = ("step", "start", "eval", "checkpoint")  # phases that are no part of a step's seconds


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def tables(groups: Groups, scores: list[Score], level: float | None) -> list[Table]:
    """Make all tables of the finished runs. `level` is an accuracy in percent, or a reward where no set has
    an accuracy; None: nine tenths of the best gain."""
    finished = having(groups, lambda run: run.finished)
    made = [settings_table(groups)] if len(groups) > 1 else []
    percent = any(score.percent for score in scores)
    for score in scores:
        if evaluated := having(finished, lambda run, score=score: len(run.held_out(score)[0]) > 0):
            made += [score_table(evaluated, score), halfway_table(evaluated, score),
                     reach_table(evaluated, score, level if score.percent == percent else None)]
    return [*made, cost_table(finished)] if finished else made


def having(groups: Groups, fits: Callable[[LoggedRun], bool]) -> Groups:
    """Keep the runs that fit, and the rows that have one."""
    kept = {label: [run for run in group if fits(run)] for label, group in groups.items()}
    return {label: group for label, group in kept.items() if group}


def settings_table(groups: Groups) -> Table:
    """Tabulate the settings in which the rows differ."""
    keys = differing([group[0] for group in groups.values()])
    rows = []
    for label, group in groups.items():
        settings, seeds = group[0].settings, ", ".join(str(run.seed) for run in group)
        rows.append([label, seeds, *(short(settings[key]) if key in settings else ABSENT for key in keys)])
    return Table("What differs", ["run", "seeds", *keys], rows)


def titled(score: Score) -> str:
    return f"{score.name}: {score.kind}{' in %' * score.percent}"


def score_table(groups: Groups, score: Score) -> Table:
    """Tabulate the score before, at the end, and when all of the least that a run spent was spent."""
    columns, cells = at_budgets(groups, score, 1.0)
    bounds = (0, 100) if score.percent else (-np.inf, np.inf)
    rows = []
    for label, group in groups.items():
        ends = [with_interval([run.held_out(score)[1][i] for run in group], *bounds, score.text)
                for i in (0, -1)]
        rows.append([label, str(len(group)), ends[0], *cells[label], ends[1]])
    return Table(f"{titled(score)}, at the least that a run spent",
                 ["run", "runs", "before", *columns, "at its end"], rows)


def halfway_table(groups: Groups, score: Score) -> Table:
    """Tabulate the score when half of that was spent."""
    columns, cells = at_budgets(groups, score, 0.5)
    return Table(f"{titled(score)}, at half of that", ["run", *columns],
                 [[label, *cells[label]] for label in groups])


def at_budgets(groups: Groups, score: Score, share: float) -> tuple[list[str], dict[str, list[str]]]:
    """Read the score off at a share of what the run that spent least of each kind spent: a column each."""
    runs = sum(groups.values(), [])
    columns, cells = [], {label: [] for label in groups}
    bounds = (0, 100) if score.percent else (-np.inf, np.inf)
    for kind in SPENT:
        budget = share * min(run.spent(kind, run.held_out(score)[0])[-1] for run in runs)
        columns.append(f"{amount(budget)} {kind}")
        for label, group in groups.items():
            read = [score_at(run, score, kind, budget) for run in group]
            cells[label].append(reading(read, score.text, *bounds))
    return columns, cells


def reach_table(groups: Groups, score: Score, level: float | None) -> Table:
    """Tabulate what was spent to come to a score: the level, or nine tenths of the best row's gain."""
    before = mean(run.held_out(score)[1][0] for group in groups.values() for run in group)
    best = max(mean(run.held_out(score)[1][-1] for run in group) for group in groups.values())
    asked = before + 0.9 * (best - before) if level is None else level
    goal = f"{asked:.1f}%" if score.percent else f"a reward of {asked:.3f}"
    title, head = f"{score.name}: spent to reach {goal}", ["run", *SPENT]
    chance, points = noise(groups, score), " points" * score.percent
    if level is None and asked < before + chance:
        return Table(title, head, [], f"The best row gains {score.text(best - before)}{points}, and one "
                     f"evaluation is known to ±{score.text(chance)}: no level tells these runs apart "
                     "(--level sets one).")
    rows = []
    for label, group in groups.items():
        able = [run for run in group if reaches(run, score, asked)]
        cells = [NEVER] * len(SPENT)
        if 0 < len(able) < len(group):
            cells = [f"reached by {len(able)} of {len(group)}"] * len(SPENT)
        elif able:
            cells = [reading([to_reach(run, score, kind, asked) for run in able], amount) for kind in SPENT]
        rows.append([label, *cells])
    return Table(title, head, rows)


def noise(groups: Groups, score: Score) -> float:
    """Return half the widest 95% interval of a first evaluation; 0 where none was logged."""
    widths = [0.0]
    for run in sum(groups.values(), []):
        _, low_E, high_E = run.intervals(score)
        widths += list((high_E - low_E)[:1] / 2)
    return max(widths)


def cost_table(groups: Groups) -> Table:
    """Tabulate steps, tokens, and seconds by phase, of a whole run."""
    runs = sum(groups.values(), [])
    phases = list(dict.fromkeys(phase for run in runs for phase in seconds(run)))
    head = ["run", "steps", "generated tokens", "trained tokens", *(f"{phase} s" for phase in phases)]
    rows = []
    for label, group in groups.items():
        row = [label]
        for kind in ("steps", "generated tokens", "trained tokens"):
            totals = [float(run.spent(kind, np.array([run.steps_done]))[0]) for run in group]
            row.append(with_interval(totals, 0, form=amount))
        for phase in phases:
            row.append(with_interval([seconds(run).get(phase, 0.0) for run in group], 0))
        rows.append(row)
    return Table("Cost of a whole run", head, rows)


def seconds(run: LoggedRun) -> dict[str, float]:
    """Add up the seconds of each phase; `other` is what a step spends outside of its phases."""
    spent = phase_seconds(run.lines)
    inside = sum(s for phase, s in spent.items() if phase not in OUTSIDE)
    phases = spent | {"other": spent.get("step", 0.0) - inside}
    return {phase: s for phase, s in phases.items() if s >= 0.05}  # what shows as 0.0 needs no column


# ---- cells

def amount(value: float, digits: int = 3) -> str:
    """Write a number in few characters: 9.8, 126k, 1.3M, 2.5e-4."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.{digits}g}{letter}"
    return short(float(f"{value:.{digits}g}")) if 0 < abs(value) < 1e-3 else f"{value:.{digits}g}"


def with_interval(values: list[float], low: float = -np.inf, high: float = np.inf,
                  form: Callable[[float], str] = "{:.1f}".format) -> str:
    """Write a mean; from 3 runs on with its 95% interval by Student's t, cut to what is possible."""
    middle = mean(values)
    if len(values) < LEAST:
        return form(middle)
    half = float(half_width(np.array(values)))
    return f"{form(middle)} [{form(max(low, middle - half))}, {form(min(high, middle + half))}]"


def reading(readings: list[Reading | None], form: Callable[[float], str], low: float = 0,
            high: float = np.inf) -> str:
    """Write the mean of what was read off each run, the ends it lies between, or that it is not known."""
    if None in readings:
        return UNKNOWN
    ends = [mean(r.low for r in readings), mean(r.high for r in readings)]
    if all(r.low == r.high for r in readings):
        return with_interval([r.low for r in readings], low, high, form)
    return f"{form(ends[0])} to {form(ends[1])}"
