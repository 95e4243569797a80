"""What goes by rewards: PODS against brute force over all subsets, RAGEN-2's share of variance against a hand
computation."""

import math
from itertools import combinations, product
from statistics import pvariance

import pytest
import torch
from conftest import as_rolled, make_groups, toy_config

import config
from advantage import group_norm
from collect import Selection, choose
from config import ConfigError
from prune import max_variance, most_variance

NAN = math.nan


def kept(mask_NG: torch.Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in mask_NG]


def test_no_subset_of_as_many_has_more_variance():
    """Graded rewards, 0/1 rewards with their ties, and completions without a reward."""
    generator = torch.Generator().manual_seed(0)
    graded_NG = torch.randn(30, 7, dtype=torch.float64, generator=generator)
    for reward_NG, keep in product((graded_NG, (graded_NG > 0.3).double(), graded_NG.round()), range(1, 8)):
        with_holes_NG = reward_NG.masked_fill(torch.rand(30, 7, generator=generator) < 0.2, NAN)
        for reward_G, kept_G in zip(with_holes_NG, max_variance(with_holes_NG, keep), strict=True):
            scored = reward_G[~reward_G.isnan()].tolist()
            count = min(keep, len(scored))
            assert kept_G.sum() == count and not kept_G[reward_G.isnan()].any()
            best = max(map(pvariance, combinations(scored, count))) if count else 0.0
            assert not count or pvariance(reward_G[kept_G].tolist()) == pytest.approx(best, abs=1e-12)


def test_of_equal_variances_the_first_as_released_and_of_equal_rewards_the_earlier():
    right_and_wrong = torch.tensor([[0.0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert kept(max_variance(right_and_wrong, 4)) == [[1, 2, 3, 5], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(max_variance(right_and_wrong, 3)) == [[1, 2, 5], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("compare", "expected"), [
    ("kept", [[1.5, -0.5, -0.5, -0.5], [0.75 ** 0.5] * 2 + [-(0.75 ** 0.5)] * 2]),
    ("all", [[7 / 8 / 0.125 ** 0.5] + [-1 / 8 / 0.125 ** 0.5] * 3,
             [3 / 8 / (15 / 56) ** 0.5] * 2 + [-5 / 8 / (15 / 56) ** 0.5] * 2])])
def test_advantages_are_among_what_is_kept_or_among_all(compare, expected, tmp_path):
    """1 and 5 right of 8, of which 4 are kept; the others' advantages stay as they were."""
    cfg = toy_config(tmp_path / "run", f"prune.completions={{kind: pods, keep: 4, compare: {compare}}}",
                     "advantage.eps=1e-12", name="grpo_toy.yaml")
    reward_NG = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.float64)
    groups, before_NG = make_groups([[2] * 8] * 2, [1, 1]), group_norm(reward_NG, 1, 0.0)
    batch = choose(as_rolled(groups, reward_NG, before_NG), Selection.of(cfg), seed=0)
    keep_NG = batch.pruned.keep_NG
    for adv_G, keep_G, right_first in zip(batch.adv_NG, keep_NG, expected, strict=True):
        assert sorted(adv_G[keep_G].tolist(), reverse=True) == pytest.approx(right_first)
    assert torch.equal(batch.adv_NG[~keep_NG], before_NG[~keep_NG])
    assert torch.equal(batch.pruned.weight_NG, keep_NG.double())


def test_the_groups_of_the_largest_variances_by_hand():
    """Sample variances 1/3, 1/4, 0, 1/4, of a group with a hole 1/3: 7/6 in all. 0.9 of it less 0.01 is 1.04, for which
    four are needed; half of it less 0.01 is 0.57 and 0.3 of it 0.34, for which two are."""
    reward_NG = torch.tensor([[0.0, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, NAN]]).double()
    marked = {share: kept(most_variance(reward_NG, share, 0.01)) for share in (0.9, 0.7, 0.5, 0.3, 0.1)}
    whole = [0, 1, 2, 3]
    assert marked == {0.9: [whole, whole, [], whole, whole], 0.7: [whole, whole, [], [], whole],
                      0.5: [whole, [], [], [], whole], 0.3: [whole, [], [], [], whole], 0.1: [whole, [], [], [], []]}
    assert kept(most_variance(reward_NG, 1.0, 0.0)) == marked[0.9]     # a flat group never
    assert kept(most_variance(reward_NG[2:3], 0.9, 0.0)) == [[]]
    assert kept(most_variance(reward_NG[[1]], 0.9, 0.3)) == [[]]       # a step of hardly any variance
    assert not most_variance(torch.full((2, 3), 0.1).double(), 1.0, 0.0).any()  # of equal rewards, but for rounding


@pytest.mark.parametrize("kind", ["gae", "decoupled", "soft_value"])
def test_only_advantages_of_a_group_alone_can_be_those_of_a_part_of_it(kind):
    settings = [f"advantage={{kind: {kind}}}", *(["critic.lr=1e-4"] if kind == "gae" else [])]
    with pytest.raises(ConfigError, match="advantage.kind=.* must be group_norm, centred or leave_one_out with "
                                          "prune.completions.compare=kept: only these compare a group with itself"):
        config.load(["pods_gsm8k.yaml", "toy.yaml"], settings)
    assert config.load(["pods_gsm8k.yaml", "toy.yaml"], [*settings, "prune.completions.compare=all"])
