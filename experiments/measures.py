"""Read learning curves off at equal cost, and compare them seed by seed.

Dimension key:  E evaluations of a run,  P runs in pairs.
"""

import math
from dataclasses import dataclass

import numpy as np
from stored import Record

# What is spent -> the metric of a step that adds to it; a step itself counts 1.
COSTS = {"steps": None, "generated tokens": "rollout/tokens", "trained tokens": "train/tokens",
         "seconds": "time/step"}
LAST = 0.75  # the end of a curve is what lies behind this share of the cost


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out accuracy in percent at each evaluation, and what was spent of each cost until then."""

    spent: dict[str, np.ndarray]
    accuracy_E: np.ndarray


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean of paired differences with its interval, and the chance of one as large by chance alone."""

    mean: float
    low: float
    high: float
    p: float


def cpu_share(record: Record) -> float:
    """Return CPU seconds over wall seconds, of a whole run."""
    return record.about["cpu_seconds"] / record.about["wall_seconds"]


def curve(record: Record) -> Curve:
    """Read a run's curve. Seconds are those of its steps on the wall, times the share of CPU seconds."""
    evaluated = [(line["step"], line["accuracy"]) for line in record.lines if "accuracy" in line]
    steps = [line for line in record.lines if "accuracy" not in line]
    spent = {}
    for cost, key in COSTS.items():
        of_steps = [1 if key is None else line.get(key, 0) for line in steps]
        total = np.cumsum([0, *of_steps]) * (cpu_share(record) if cost == "seconds" else 1)
        spent[cost] = np.array([total[step] for step, _ in evaluated], dtype=float)
    return Curve(spent, 100 * np.array([accuracy for _, accuracy in evaluated]))


def area(x_E: np.ndarray, y_E: np.ndarray, low: float, high: float) -> float:
    """Average a curve of straight lines between two places.

    area([0, 2], [10, 30], 0, 1) = 15, the mean of 10 and 20.
    """
    inside_E = (x_E > low) & (x_E < high)
    x = np.array([low, *x_E[inside_E], high])
    return float(np.trapezoid(np.interp(x, x_E, y_E), x) / (high - low))


def area_and_end(of: Curve, cost: str, budget: float) -> tuple[float, float]:
    """Average a curve over all of a budget, and over its last quarter."""
    x_E = of.spent[cost]
    return area(x_E, of.accuracy_E, 0, budget), area(x_E, of.accuracy_E, LAST * budget, budget)


def least(curves: list[Curve], cost: str) -> float:
    """Find the most that every one of these runs has spent."""
    return min(float(of.spent[cost][-1]) for of in curves)


def chance(t: float, df: int) -> float:
    """Compute the chance of |T| >= t under Student's distribution, by its finite sum in theta = atan(t / sqrt
    df). chance(2.776, 4) = 0.050."""
    theta = math.atan(t / df ** 0.5)
    cos, sin = math.cos(theta), math.sin(theta)
    term, total = (1.0 if df % 2 == 0 else cos), 0.0
    for k in range(df % 2, df - 1, 2):  # powers of the cosine that the next term has more than the first
        total += term
        term *= cos * cos * (k + 1) / (k + 2)
    inside = sin * total if df % 2 == 0 else 2 / math.pi * (theta + sin * total)
    return max(0.0, 1 - inside)


def quantile(p: float, df: int) -> float:
    """Find the t that |T| reaches with chance p, by bisection. quantile(0.05, 4) = 2.776."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle, df) > p else (low, middle)
    return low


def difference(these_P: list[float], those_P: list[float], comparisons: int) -> Difference:
    """Compare two or more pairs; the interval is Student's at 1 - 0.05 / comparisons."""
    gap_P = np.array(these_P) - np.array(those_P)
    error, df = gap_P.std(ddof=1) / len(gap_P) ** 0.5, len(gap_P) - 1
    middle, half = float(gap_P.mean()), float(quantile(0.05 / comparisons, df) * error)
    return Difference(middle, middle - half, middle + half, chance(abs(middle) / max(error, 1e-12), df))


def holm(p: list[float]) -> list[float]:
    """Correct p-values for their number. holm([0.01, 0.04, 0.03]) = [0.03, 0.06, 0.06]."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected
