"""Compute rates and their intervals from verdicts.

Dimension key:  N problems,  n or K answers to each.
"""

import math
from collections.abc import Iterable
from statistics import fmean, multimode

import numpy as np

from verify.number import LONGEST, number
from verify.spelling import normalise

RIGHT = "\n"          # a vote for the gold answer, which no spelling is


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
    winners = multimode(filter(None, votes))
    return (RIGHT in winners) / len(winners) if winners else 0.0


def majority_at(k: int, votes: list[str | None]) -> float:
    """Average `majority` over the blocks of k votes."""
    return fmean(majority(votes[i:i + k]) for i in range(0, len(votes) - k + 1, k))
