"""Compare two models by their answers to the same problems.

Dimension key:  N problems.
"""

import math

import numpy as np

RESAMPLES = 10_000    # of the problems, for the interval of a difference


def mcnemar(only_first: int, only_second: int) -> float:
    """Compute the p-value of McNemar's exact test: the chance of so uneven a split if both are as good."""
    count = only_first + only_second
    tail = sum(math.comb(count, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2 ** count)


def paired_interval(difference_N: np.ndarray) -> tuple[float, float]:
    """Compute the 95% interval of a mean difference, by a bootstrap over problems with a fixed seed."""
    draw, N = np.random.default_rng(0), len(difference_N)
    means = [difference_N[draw.integers(0, N, N)].mean() for _ in range(RESAMPLES)]
    return tuple(np.percentile(means, (2.5, 97.5)).tolist())


def sign_flip(difference_N: np.ndarray) -> float:
    """Compute the p-value of a mean difference by flipping signs, with a fixed seed: under equal models each
    problem's difference is as likely as its negative."""
    draw = np.random.default_rng(0)
    signs = draw.integers(0, 2, (RESAMPLES, len(difference_N))) * 2 - 1
    means = np.abs(signs @ difference_N)
    return float((1 + (means >= abs(difference_N.sum()) - 1e-9).sum()) / (1 + RESAMPLES))


def holm(p_values: list[float]) -> list[float]:
    """Correct p-values of one family by Holm's step-down method."""
    corrected, largest, count = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, i in enumerate(sorted(range(count), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (count - rank) * p_values[i]))
        corrected[i] = largest
    return corrected
