"""Tables that compare runs: a score at equal cost, the cost of a score, the cost of a run.

A score is the accuracy on a set in percent, or the mean reward there. A table is a head and rows of texts; a
page shows it as markdown or as HTML.
"""

from collections.abc import Callable
from statistics import mean

import numpy as np

from leaves.page.runs import (
    ABSENT,
    COSTS,
    Groups,
    LoggedRun,
    Reading,
    cost_to_reach,
    differing_settings,
    format_value,
    reaches,
    score_at,
)
from leaves.page.summary import Score, phase_seconds
from records import frozen
from verify.statistics import half_width

LEAST_RUNS = 3         # an interval needs so many runs
UNKNOWN, NEVER = "not known", "not reached"
OUTSIDE_STEP = ("step", "start", "eval", "checkpoint")  # phases that are no part of a step's seconds


@frozen
class ReportTable:
    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def make_tables(groups: Groups, scores: list[Score], level: float | None) -> list[ReportTable]:
    """Make all tables of the finished runs. `level` is an accuracy in percent, or a reward where no set has
    an accuracy; None: nine tenths of the best gain."""
    finished = keep_runs(groups, lambda run: run.finished)
    made = [settings_table(groups)] if len(groups) > 1 else []
    percent = any(score.percent for score in scores)
    for score in scores:
        if evaluated := keep_runs(finished, lambda run, score=score: len(run.held_out(score)[0]) > 0):
            made += [score_table(evaluated, score), halfway_table(evaluated, score),
                     reach_table(evaluated, score, level if score.percent == percent else None)]
    return [*made, cost_table(finished)] if finished else made


def keep_runs(groups: Groups, fits: Callable[[LoggedRun], bool]) -> Groups:
    """Keep the runs that fit, and the rows that still have a run."""
    kept = {label: [run for run in group if fits(run)] for label, group in groups.items()}
    return {label: group for label, group in kept.items() if group}


def settings_table(groups: Groups) -> ReportTable:
    """Tabulate the settings that differ between rows."""
    keys = differing_settings([group[0] for group in groups.values()])
    rows = []
    for label, group in groups.items():
        settings, seeds = group[0].settings, ", ".join(str(run.seed) for run in group)
        values = [format_value(settings[key]) if key in settings else ABSENT for key in keys]
        rows.append([label, seeds, *values])
    return ReportTable("What differs", ["run", "seeds", *keys], rows)


def title_of(score: Score) -> str:
    return f"{score.name}: {score.kind}{' in %' * score.percent}"


def score_table(groups: Groups, score: Score) -> ReportTable:
    """Tabulate the score before, at the end, and at the budget that every run reached."""
    columns, cells = read_at_budgets(groups, score, 1.0)
    rows = []
    for label, group in groups.items():
        ends = [format_mean([run.held_out(score)[1][i] for run in group], *score.bounds, score.text)
                for i in (0, -1)]
        rows.append([label, str(len(group)), ends[0], *cells[label], ends[1]])
    return ReportTable(f"{title_of(score)}, at the budget that every run reached",
                 ["run", "runs", "before", *columns, "at its end"], rows)


def halfway_table(groups: Groups, score: Score) -> ReportTable:
    """Tabulate the score at half of that budget."""
    columns, cells = read_at_budgets(groups, score, 0.5)
    return ReportTable(f"{title_of(score)}, at half of that budget", ["run", *columns],
                 [[label, *cells[label]] for label in groups])


def read_at_budgets(groups: Groups, score: Score, share: float) -> tuple[list[str], dict[str, list[str]]]:
    """Read the score at a share of the budget that every run reached: a column for each kind of cost."""
    runs = sum(groups.values(), [])
    columns, cells = [], {label: [] for label in groups}
    for kind in COSTS:
        budget = share * min(run.spent(kind, run.held_out(score)[0])[-1] for run in runs)
        columns.append(f"{format_amount(budget)} {kind}")
        for label, group in groups.items():
            read = [score_at(run, score, kind, budget) for run in group]
            cells[label].append(format_reading(read, score.text, *score.bounds))
    return columns, cells


def reach_table(groups: Groups, score: Score, level: float | None) -> ReportTable:
    """Tabulate the cost to reach a score: the level, or nine tenths of the best row's gain."""
    before = mean(run.held_out(score)[1][0] for group in groups.values() for run in group)
    best = max(mean(run.held_out(score)[1][-1] for run in group) for group in groups.values())
    asked = before + 0.9 * (best - before) if level is None else level
    goal = f"{asked:.1f}%" if score.percent else f"a reward of {asked:.3f}"
    title, head = f"{score.name}: cost to reach {goal}", ["run", *COSTS]
    chance, points = first_interval(groups, score), " points" * score.percent
    if level is None and asked < before + chance:
        return ReportTable(title, head, [], f"The best row gains {score.text(best - before)}{points}, and "
                           f"one evaluation is known to ±{score.text(chance)}: no level tells these runs "
                           "apart (--level sets one).")
    rows = []
    for label, group in groups.items():
        able = [run for run in group if reaches(run, score, asked)]
        cells = [NEVER] * len(COSTS)
        if 0 < len(able) < len(group):
            cells = [f"reached by {len(able)} of {len(group)}"] * len(COSTS)
        elif able:
            cells = []
            for kind in COSTS:
                costs = [cost_to_reach(run, score, kind, asked) for run in able]
                cells.append(format_reading(costs, format_amount))
        rows.append([label, *cells])
    return ReportTable(title, head, rows)


def first_interval(groups: Groups, score: Score) -> float:
    """Return half the widest 95% interval of a first evaluation; 0 where none was logged."""
    widths = [0.0]
    for run in sum(groups.values(), []):
        _, low_E, high_E = run.intervals(score)
        widths += list((high_E - low_E)[:1] / 2)
    return max(widths)


def cost_table(groups: Groups) -> ReportTable:
    """Tabulate steps, tokens, and seconds by phase, of a whole run."""
    runs = sum(groups.values(), [])
    phases = list(dict.fromkeys(phase for run in runs for phase in seconds_by_phase(run)))
    head = ["run", "steps", "generated tokens", "trained tokens", *(f"{phase} s" for phase in phases)]
    rows = []
    for label, group in groups.items():
        row = [label]
        for kind in ("steps", "generated tokens", "trained tokens"):
            totals = [float(run.spent(kind, np.array([run.steps_done]))[0]) for run in group]
            row.append(format_mean(totals, 0, form=format_amount))
        for phase in phases:
            row.append(format_mean([seconds_by_phase(run).get(phase, 0.0) for run in group], 0))
        rows.append(row)
    return ReportTable("Cost of a whole run", head, rows)


def seconds_by_phase(run: LoggedRun) -> dict[str, float]:
    """Add up the seconds of each phase; `other` is the time of a step outside its phases."""
    spent = phase_seconds(run.lines)
    inside = sum(s for phase, s in spent.items() if phase not in OUTSIDE_STEP)
    phases = spent | {"other": spent.get("step", 0.0) - inside}
    return {phase: s for phase, s in phases.items() if s >= 0.05}  # a phase that shows as 0.0 gets no column


# ---- cells

def format_amount(value: float, digits: int = 3) -> str:
    """Write a number in few characters: 9.8, 126k, 1.3M, 2.5e-4."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.{digits}g}{letter}"
    return format_value(float(f"{value:.{digits}g}")) if 0 < abs(value) < 1e-3 else f"{value:.{digits}g}"


def format_mean(values: list[float], low: float = -np.inf, high: float = np.inf,
                form: Callable[[float], str] = "{:.1f}".format) -> str:
    """Write a mean; from 3 runs on with its 95% interval by Student's t, within [low, high]."""
    middle = mean(values)
    if len(values) < LEAST_RUNS:
        return form(middle)
    half = float(half_width(np.array(values)))
    return f"{form(middle)} [{form(max(low, middle - half))}, {form(min(high, middle + half))}]"


def format_reading(readings: list[Reading | None], form: Callable[[float], str], low: float = 0,
                   high: float = np.inf) -> str:
    """Write the mean over the runs, or the two ends that it lies between, or that it is not known."""
    if None in readings:
        return UNKNOWN
    ends = [mean(r.low for r in readings), mean(r.high for r in readings)]
    if all(r.low == r.high for r in readings):
        return format_mean([r.low for r in readings], low, high, form)
    return f"{form(ends[0])} to {form(ends[1])}"
