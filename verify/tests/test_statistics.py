"""Rates and their intervals: by hand, by enumeration and by simulation."""

import itertools

import numpy as np
import pytest

from verify import statistics


def answers(right: int, n: int) -> list[float]:
    return [1.0] * right + [0.0] * (n - right)


@pytest.mark.parametrize(("correct", "count", "low", "high"), [
    (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (1, 1319, 0.000134, 0.004280)])
def test_wilson_by_the_published_table(correct, count, low, high):
    """Values of the closed form; the first rows stand in Brown, Cai and DasGupta (2001)."""
    assert statistics.wilson(answers(correct, count)) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("count", "a", "b", "least"), [  # the last: hardly any of few problems is solved
    (30, 0.4, 1.2, 0.93), (500, 2.0, 1.0, 0.93), (40, 5.0, 5.0, 0.93), (8, 2.0, 2.0, 0.93), (30, 0.05, 0.6, 0.9)])
def test_intervals_of_several_answers_cover_the_truth_at_their_rate(count, a, b, least):
    """Problems of Beta-distributed difficulty, 16 answers each: taken to be independent they would cover 40 to 80%."""
    draw = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(3000):
        mean_N = draw.binomial(16, draw.beta(a, b, count)) / 16
        low, high = statistics.wilson(mean_N, 16)
        covered += low <= a / (a + b) <= high
        low, high = statistics.wilson(answers(round(mean_N.sum() * 16), count * 16))
        naive += low <= a / (a + b) <= high
    assert least < covered / 3000 < 0.975 and naive / 3000 < 0.85, covered / 3000


@pytest.mark.parametrize("n", [1, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(answers(right, n), k))
            share = sum(map(any, subsets)) / len(subsets)
            assert statistics.pass_at(k, right, n) == pytest.approx(share, abs=1e-12)


def voted(*given: str, gold: str = "7") -> list[str | None]:
    verdicts = ["right" if answer == gold else "wrong" for answer in given]
    return [statistics.vote({"answer": answer or None, "verdict": verdict})
            for answer, verdict in zip(given, verdicts, strict=True)]


@pytest.mark.parametrize(("given", "value"), [
    (["7", "7", "8"], 1), (["7", "8", "8"], 0), (["7", "8"], 0.5), (["7", "8", "9"], 1 / 3),
    (["8", "8.0", "7"], 0), (["", "", "7"], 1), (["", " "], 0), (["x", "$x$", "7"], 0),
    (["right", "right", "7"], 0)])
def test_majority_is_that_of_all_or_of_blocks(given, value):
    assert statistics.majority(voted(*given)) == pytest.approx(value)
    assert statistics.majority_at(2, voted("7", "7", "8", "7", "8", "8", "7")) == pytest.approx((1 + 0.5 + 0) / 3)


def beta(draw: np.random.Generator, count: int, a: float, b: float, scores: int) -> np.ndarray:
    """Means of `scores` rewards of a problem; 0: of infinitely many."""
    mean_N = draw.beta(a, b, count)
    return draw.binomial(scores, mean_N) / scores if scores else mean_N


@pytest.mark.parametrize(("count", "a", "b", "scores"), [
    (100, 0.4, 1.2, 0), (40, 5.0, 5.0, 0), (20, 2.0, 2.0, 0), (500, 0.5, 4.0, 4), (30, 2.0, 1.0, 1)])
def test_intervals_of_a_reward_cover_the_truth_at_their_rate_and_are_no_wider(count, a, b, scores):
    """A simulation of rewards between -1 and 2, one a problem or the mean of some that are -1 or 2."""
    draw, truth = np.random.default_rng(0), -1 + 3 * a / (a + b)
    covered, widths = 0, []
    for _ in range(3000):
        reward_N = -1 + 3 * beta(draw, count, a, b, scores)
        low, high = statistics.bounded_interval(reward_N, -1, 2)
        covered += low <= truth <= high
        widths.append((high - low) / (2 * 2.228 * reward_N.std(ddof=1) / count ** 0.5))  # Student's, 10 degrees
        assert -1 <= low <= high <= 2
    assert 0.925 < covered / 3000 < 0.975 and 0.8 < np.mean(widths) < 1.1


def test_rewards_that_are_all_equal_are_not_certain():
    low, high = statistics.bounded_interval([0.1 + 0.2] * 20 + [0.3] * 20, 0, 1)
    assert low < 0.2 < 0.4 < high
    assert statistics.bounded_interval([2.0] * 40, 0, 2)[1] == 2
