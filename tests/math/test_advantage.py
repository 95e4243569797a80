"""Advantage estimators: closed forms, recursions, limits, and exact zeros where a group says nothing."""

import itertools
from statistics import mean, variance

import pytest
import torch
from conftest import as_rewards

from advantage import ESTIMATORS, advantage, centred, decoupled, flat_groups, group_norm, leave_one_out, shrinkage
from records import Rewards
from settings.kinds import Centred


@pytest.mark.parametrize("right", range(1, 16))
def test_binary_rewards_have_the_closed_form(right):
    """A = sqrt((1-p)/p) for the right and -sqrt(p/(1-p)) for the wrong answers (population deviation, eps 0)."""
    reward_NG = torch.tensor([[1.0] * right + [0.0] * (16 - right)], dtype=torch.float64)
    p = torch.tensor(right / 16, dtype=torch.float64)
    expected = torch.where(reward_NG == 1, ((1 - p) / p) ** 0.5, -((p / (1 - p)) ** 0.5))
    torch.testing.assert_close(group_norm(reward_NG, correction=0, eps=0.0), expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_zero(value):
    """0.1 and 1/3 are such that the mean of equal float32 numbers is off by an ulp."""
    reward_NG = torch.full((1, 7), value)
    for adv_NG in (group_norm(reward_NG, correction=1, eps=0.0), centred(reward_NG), leave_one_out(reward_NG)):
        assert (adv_NG == 0).all()


def test_groups_do_not_mix_and_scale_does_not_matter():
    reward_NG = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    adv_NG = group_norm(reward_NG, 1, 0.0)
    scaled_NG = reward_NG * torch.tensor([[1.0], [5.0], [0.1]]) + torch.tensor([[0.0], [-3.0], [9.0]])
    torch.testing.assert_close(group_norm(scaled_NG, 1, 0.0), adv_NG)
    torch.testing.assert_close(adv_NG.sum(dim=1), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(adv_NG.std(dim=1), torch.ones(3, dtype=torch.float64))


def test_advantages_by_hand():
    """The largest of 16 that the released codes give; eps, which is added to the deviation; a group of one."""
    assert group_norm(torch.eye(16, dtype=torch.float64)[:1], correction=1, eps=0.0)[0, 0] == pytest.approx(3.75)
    assert group_norm(torch.tensor([[1.0, 0.0]]), correction=0, eps=0.5).tolist() == [[0.5, -0.5]]
    assert group_norm(torch.tensor([[1.0], [0.0]]), 1, 1e-4).tolist() == [[0], [0]]
    reward_NG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])
    assert centred(reward_NG).tolist() == [[0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0]]
    torch.testing.assert_close(leave_one_out(reward_NG)[0], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


def rewards(parts: dict[str, list[list[float]]], weights: dict[str, float]) -> Rewards:
    return as_rewards({name: torch.tensor(part, dtype=torch.float64) for name, part in parts.items()}, weights)


def shrunk_baseline(reward_NG: torch.Tensor, n: int, i: int) -> float:
    """arXiv:2511.03710 as it is written, without completion i of prompt n: by loops."""
    groups = [group.tolist() for group in reward_NG]
    others = groups[:n] + groups[n + 1:]
    rest = groups[n][:i] + groups[n][i + 1:]
    N, G = len(groups), len(groups[n])
    v = mean(variance(group) for group in others) / G
    means = [mean(group) for group in others]
    t = mean((m - mean(means)) ** 2 for m in means)
    lam = (N - 1) / N * v / (v + t)
    return (1 - lam) * mean(rest) + lam * mean(means)


def test_shrinkage_is_the_papers_baseline_and_reads_no_reward_of_its_own():
    reward_NG = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    adv_NG = shrinkage(reward_NG)
    for n, i in itertools.product(range(4), range(5)):
        assert (reward_NG - adv_NG)[n, i].item() == pytest.approx(shrunk_baseline(reward_NG, n, i))
        other_NG = reward_NG.clone()
        other_NG[n, i] += 3
        assert (other_NG - shrinkage(other_NG))[n, i].item() == pytest.approx((reward_NG - adv_NG)[n, i].item())
    flat = torch.tensor([[1.0, 1], [0, 1], [0, 0]], dtype=torch.float64)
    assert shrinkage(flat)[0, 0] > 0 > shrinkage(flat)[2, 0]
    torch.testing.assert_close(shrinkage(flat[1:2]), leave_one_out(flat[1:2]))  # one prompt alone
    assert not shrinkage(torch.ones(3, 2, dtype=torch.float64)).any()


def test_rewards_that_only_the_rounding_of_their_sum_tells_apart_are_equal():
    """0.1 + 0.2 and 0.3: of two components of one completion, and of one of another."""
    parts = {"a": [[1, 0, 1, 0]], "b": [[1, 0, 1, 0]], "c": [[0, 1, 0, 1]]}
    total_NG = rewards(parts, {"a": 0.1, "b": 0.2, "c": 0.3}).total_NG
    near_NG = torch.tensor([[1, 1 + 1e-12]], dtype=torch.float64)
    assert flat_groups(total_NG).all() and flat_groups(near_NG).all() and not group_norm(total_NG, 1, 1e-4).any()
    assert rewards({"a": [[1, 1 - 1e-9]]}, {"a": 0.1}).total_NG.unique().numel() == 2


@pytest.mark.parametrize("correction", [0, 1])
def test_decoupled_tells_rewards_apart_that_have_the_same_sum(correction):
    """Right and long, or wrong and short: one reward, two advantages. One component alone is the z-score, scaled."""
    parts = {"accuracy": [[1, 0, 0, 0], [1, 1, 0, 0]], "overlong": [[-1, 0, 0, -1], [0, 0, 0, 0]]}
    both = rewards(parts, {"accuracy": 1.0, "overlong": 1.0})
    assert both.total_NG[0, 0] == both.total_NG[0, 1]
    adv_NG = decoupled(both, correction, 1e-12)
    assert adv_NG[0, 0] > adv_NG[0, 1] + 0.1
    assert adv_NG.std(correction=correction).item() == pytest.approx(1)
    torch.testing.assert_close(adv_NG.sum(dim=1), torch.zeros(2, dtype=torch.float64))
    alone = decoupled(rewards({"accuracy": parts["accuracy"]}, {"accuracy": 3.0}), correction, 1e-12)
    z_NG = group_norm(torch.tensor(parts["accuracy"], dtype=torch.float64), correction, 1e-12)
    torch.testing.assert_close(alone / z_NG, torch.full_like(z_NG, float(1 / z_NG.std(correction=correction))))
    assert not decoupled(rewards({"accuracy": [[1, 1], [0, 0]]}, {"accuracy": 1.0}), correction, 1e-4).any()


@pytest.mark.parametrize(("estimate", "said"), [
    (lambda reward_NG: reward_NG.mean(dim=1), r"torch.Size\(\[1\]\), and must return a tensor \[1, 3\]"),
    (lambda x_NG: [1, 0], "<class 'list'>, and "), (lambda x_NG: x_NG - x_NG.mean(), "nan for a completion that has ")])
def test_an_estimator_of_another_shape_or_one_that_takes_no_account_of_missing_rewards_is_named(estimate, said,
                                                                                               monkeypatch):
    """A mean of one's own over nan is nan for the whole group, which nobody would train on."""
    rewards = as_rewards({"a": torch.tensor([[1.0, torch.nan, 0.0]])}, {"a": 1.0})
    monkeypatch.setitem(ESTIMATORS, "centred", lambda rewards, settings: estimate(rewards.total_NG))
    with pytest.raises(ValueError, match=f"advantage.kind=centred returns {said}"):
        advantage(rewards, Centred())
