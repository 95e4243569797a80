"""Tables that compare runs: a score at equal cost, the cost of a run.

Methods differ in cost, so scores are read at the budget of steps, tokens or seconds that every finished run
has reached, between two evaluations on a straight line. That takes three evaluations of each run within the
budget, the one at the start apart. From three runs of a row on a mean has its 95% interval by Student's t.
A row of one run has the interval of the evaluation itself before and at the end. "-" is a figure that one of
the runs does not have.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from infra.figures import format_score
from infra.lines import phase_seconds
from leaves.page.runs import ABSENT, COSTS, Groups, LoggedRun, format_value
from leaves.page.summary import score_cell, scores_of

# Student's t at 97.5% for 1 to 10 degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
LEAST_RUNS = 3         # an interval needs so many runs
LEAST_EVALUATIONS = 3  # and a score at a budget so many evaluations within it
AT_BUDGET = ("at the budget that every run reached "
             f"(95% intervals from {LEAST_RUNS} runs on; -: less than {LEAST_EVALUATIONS} evaluations)")
Table = list[list[str]]  # rows of cells, the head first
Columns = dict[str, Callable[[LoggedRun], float]]  # head -> figure of a run; nan: it has none


def make_tables(groups: Groups) -> dict[str, Table]:
    """Tabulate the settings that differ and, of finished runs, scores and costs."""
    tables = {"What differs": settings_table(groups)} if len(groups) > 1 else {}
    finished = keep_runs(groups, lambda run: run.finished)
    for score in scores_of([line for group in finished.values() for run in group for line in run.evals]):
        evaluated = keep_runs(finished, lambda run, score=score: len(run.series(score)[0]) > 0)
        tables[f"{score} {AT_BUDGET}"] = score_table(evaluated, score)
    return tables | ({"Cost of a whole run": cost_table(finished)} if finished else {})


def keep_runs(groups: Groups, fits: Callable[[LoggedRun], bool]) -> Groups:
    """Keep the runs that fit, and the rows that still have a run."""
    kept = {label: [run for run in group if fits(run)] for label, group in groups.items()}
    return {label: group for label, group in kept.items() if group}


def tabulate(groups: Groups, columns: Columns, score: str = "") -> Table:
    """Tabulate means over the runs of a row; of a score they are written as such."""
    rows = [[label, str(len(group)), *(format_mean([read(run) for run in group], score)
                                       for read in columns.values())] for label, group in groups.items()]
    return [["run", "runs", *columns], *rows]


def settings_table(groups: Groups) -> Table:
    """Tabulate the settings that differ between rows."""
    every = [group[0].compared for group in groups.values()]
    keys = dict.fromkeys(key for settings in every for key in settings)
    keys = [key for key in keys if len({repr(settings.get(key, ABSENT)) for settings in every}) > 1]
    rows = [["run", "seeds", *keys]]
    for (label, group), own in zip(groups.items(), every, strict=True):
        seeds = ", ".join(str(run.settings.get("seed", 0)) for run in group)
        rows.append([label, seeds, *(format_value(own.get(key, ABSENT)) for key in keys)])
    return rows


def score_table(groups: Groups, score: str) -> Table:
    """Tabulate a score before, at the budget that every run reached, and at the end."""
    columns = {"before": lambda run: run.series(score)[1][0]}
    for kind in COSTS:
        budget = min(run.series(score, kind=kind)[0][-1] for group in groups.values() for run in group)
        columns[f"{format_amount(budget)} {kind}"] = partial(value_within, score, kind, budget)
    table = tabulate(groups, columns | {"at its end": lambda run: run.series(score)[1][-1]}, score)
    for row, group in zip(table[1:], groups.values(), strict=True):
        if len(group) == 1:  # the interval of the evaluation itself
            cells = [score_cell(line, score) for line in group[0].evals if line.get(score) is not None]
            row[2], row[-1] = cells[0], cells[-1]
    return table


def cost_table(groups: Groups) -> Table:
    """Tabulate steps, tokens, and seconds by phase, of a whole run."""
    phases = phase_seconds([line for group in groups.values() for run in group for line in run.lines])
    return tabulate(groups, {
        **{kind: lambda run, kind=kind: run.spent(kind, run.steps_done) for kind in list(COSTS)[:3]},
        **{f"{phase} s": lambda run, phase=phase: phase_seconds(run.lines)[phase] for phase in phases}})


def value_within(score: str, kind: str, budget: float, run: LoggedRun) -> float:
    """Read a score at a budget; nan if too few evaluations lie within it."""
    spent_E, value_E = run.series(score, kind=kind)
    enough = evaluations_within(spent_E, budget) >= LEAST_EVALUATIONS
    return np.interp(budget, spent_E, value_E) if enough else np.nan


def evaluations_within(spent_E: np.ndarray, budget: float) -> int:
    """Count a run's evaluations within a budget, the one at the start apart."""
    return int(((spent_E > spent_E[0]) & (spent_E <= budget)).sum())


# ---- cells

def format_amount(value: float) -> str:
    """Write a number in few characters: 9.8, 126.1k, 1.3M, 2.5e-05."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def half_width(values: np.ndarray) -> np.ndarray:
    """Compute half of Student's 95% interval of the mean over the first axis; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    return T95[min(len(values) - 1, len(T95)) - 1] * values.std(axis=0, ddof=1) / len(values) ** 0.5


def mean_interval(value_R: np.ndarray, score: str = "") -> tuple[np.ndarray, ...]:
    """Compute the mean over runs and, from LEAST_RUNS on, the ends of its interval, where possible: equal
    scores say nothing of it."""
    middle = value_R.mean(axis=0)
    if len(value_R) < LEAST_RUNS or score and not np.ptp(value_R):
        return (middle,)
    low, high = (0, 1) if score.endswith("accuracy") else (-np.inf if score else 0, np.inf)
    half = half_width(value_R)
    return middle, np.clip(middle - half, low, high), np.clip(middle + half, low, high)


def format_mean(values: list[float], score: str = "") -> str:
    """Write the mean over runs of a score or a cost with its interval."""
    middle, *ends = (format_score(x, score) if score else format_amount(x)
                     for x in mean_interval(np.array(values), score))
    return "-" if "nan" in middle else f"{middle} [{', '.join(ends)}]" if ends else middle
