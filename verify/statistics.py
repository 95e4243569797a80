"""Compute rates and their intervals from verdicts, and compare two models.

Dimension key:  N problems,  n or K answers to each.
"""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from verify.number import LONGEST, number
from verify.spelling import normalise

# Student's t at 97.5% for 1 to 10 degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
RESAMPLES = 10_000    # of the problems, for the interval of a difference
SPREAD, SHARED = 0.4, 0.75  # of accuracies over problems: deviation, and correlation of two models
RIGHT = "\n"          # a vote for the gold answer, which no spelling is


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def wilson(value_N: Iterable[float], n: float = 1) -> tuple[float, float]:
    """Compute Wilson's score interval (95%) of the mean share of right answers, n per problem.

    The spread of the shares gives the number of independent answers that they are worth, at most N x n.
    Because the spread is estimated, z becomes Student's quantile (the first terms of its expansion). With
    n = 1 this is Wilson's own interval.
    """
    value_N = np.asarray(value_N, dtype=np.float64)
    N, fraction = len(value_N), value_N.mean()
    spread = value_N.var(ddof=1) if n > 1 and N > 1 else 0.0
    count = min(N * fraction * (1 - fraction) / spread, N * n) if spread > 0 else N
    z = 1.96
    z *= 1 + (z * z + 1) / (4 * (N - 1)) if n > 1 and N > 1 else 1
    centre = (fraction + z * z / count / 2) / (1 + z * z / count)
    half = z * math.sqrt(fraction * (1 - fraction) / count + (z / count) ** 2 / 4) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def bounded_interval(value_N: Iterable[float], least: float, greatest: float) -> tuple[float, float]:
    """Compute a 95% interval of the mean of values in [least, greatest], such as rewards, one per problem.

    The values are scaled to [0, 1] and get Wilson's interval, at the number of 0/1 draws that would have the
    same standard error. Unlike Student's, it stays within the bounds and has a width even if all values are
    equal.
    """
    place_N = np.clip((np.asarray(value_N) - least) / (greatest - least), 0, 1)
    ends = wilson(place_N, math.inf if np.ptp(place_N) > 1e-9 else 1)
    return tuple(least + (greatest - least) * end for end in ends)


def half_width(values: np.ndarray) -> np.ndarray:
    """Compute half of Student's 95% interval of the mean over the first axis; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    t = T95[min(len(values) - 1, len(T95)) - 1]
    return t * values.std(axis=0, ddof=1) / len(values) ** 0.5


def pass_at(k: int, right: int, n: int) -> float:
    """Estimate, without bias, the chance that one of k answers is right (arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def vote(response: dict) -> str | None:
    """Reduce a response to the answer it votes for, None for no answer.

    All right answers vote for the same. Wrong ones do only if their number or normalised spelling is equal,
    so a wrong answer in several spellings may split its votes.
    """
    return RIGHT if response["verdict"] == "right" else reduce_spelling(response["answer"])


def reduce_spelling(answer: str | None) -> str | None:
    """Reduce an answer to its number or its normalised spelling; None for no answer."""
    spelled = normalise((answer or "")[:LONGEST])
    return str((number(spelled) or [spelled])[0]) or None


def majority(votes: list[str | None]) -> float:
    """Return 1 if the most frequent answer is right, else 0; on a tie the share of the tied that is right."""
    counts = Counter(filter(None, votes))
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return (RIGHT in winners) / len(winners) if winners else 0.0


def majority_at(k: int, votes: list[str | None]) -> float:
    """Average `majority` over the blocks of k votes."""
    return mean(majority(votes[i:i + k]) for i in range(0, len(votes) - k + 1, k))


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


def detectable(count: int, n: int) -> float:
    """Compute the difference of two models that N problems show with a power of 80% at 5%, n answers each.

    The accuracies of problems are taken to spread by SPREAD around 1/2 and to go together by SHARED, as those
    of similar models do; the n answers add p (1 - p) / n.
    """
    variance = 2 * SPREAD ** 2 * (1 - SHARED) + 2 * (0.25 - SPREAD ** 2) / n
    return 2.8 * math.sqrt(variance / count)
