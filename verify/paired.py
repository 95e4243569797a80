"""Compare two models by their answers to the same problems, and methods by runs of several seeds.

Dimension key:  N problems.
"""

import numpy as np

RESAMPLES = 10_000    # of the problems, for the interval of a difference
# Student's t at 97.5% for 1 to 10 degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def half_width(values: np.ndarray) -> np.ndarray:
    """Compute half of Student's 95% interval of the mean over the first axis; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    t = T95[min(len(values) - 1, len(T95)) - 1]
    return t * values.std(axis=0, ddof=1) / len(values) ** 0.5


def paired_interval(difference_N: np.ndarray) -> tuple[float, float]:
    """Compute the 95% interval of a mean difference, by a bootstrap over problems with a fixed seed."""
    draw, N = np.random.default_rng(0), len(difference_N)
    means = [difference_N[draw.integers(0, N, N)].mean() for _ in range(RESAMPLES)]
    return tuple(np.percentile(means, (2.5, 97.5)).tolist())


def holm(p_values: list[float]) -> list[float]:
    """Correct p-values of one family by Holm's step-down method."""
    order = np.argsort(p_values, kind="stable")
    steps = np.take(p_values, order) * np.arange(len(order), 0, -1)
    return np.maximum.accumulate(steps).clip(max=1)[order.argsort()].tolist()
