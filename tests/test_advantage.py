"""The group z-score: its closed forms, and exact zeros where a group says nothing."""

import pytest
import torch

from advantage import group_norm


@pytest.mark.parametrize("right", range(1, 16))
def test_binary_rewards_have_the_closed_form(right):
    """A = sqrt((1-p)/p) for the right and -sqrt(p/(1-p)) for the wrong answers (population deviation, eps 0)."""
    reward_NG = torch.tensor([[1.0] * right + [0.0] * (16 - right)], dtype=torch.float64)
    p = torch.tensor(right / 16, dtype=torch.float64)
    expected = torch.where(reward_NG == 1, ((1 - p) / p) ** 0.5, -((p / (1 - p)) ** 0.5))
    torch.testing.assert_close(group_norm(reward_NG, correction=0, eps=0.0), expected)


def test_one_outlier_of_sixteen_has_the_largest_advantage_of_the_released_codes():
    reward_NG = torch.eye(16, dtype=torch.float64)[:1]
    assert group_norm(reward_NG, correction=1, eps=0.0)[0, 0].item() == pytest.approx(3.75)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_zero(value):
    """0.1 and 1/3 are such that the mean of equal float32 numbers is off by an ulp."""
    assert (group_norm(torch.full((1, 7), value), correction=1, eps=0.0) == 0).all()


def test_eps_is_added_to_the_deviation():
    assert group_norm(torch.tensor([[1.0, 0.0]]), correction=0, eps=0.5).tolist() == [[0.5, -0.5]]


def test_groups_do_not_mix_and_scale_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    reward_NG = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    adv_NG = group_norm(reward_NG, 1, 0.0)
    scaled_NG = reward_NG * torch.tensor([[1.0], [5.0], [0.1]]) + torch.tensor([[0.0], [-3.0], [9.0]])
    torch.testing.assert_close(group_norm(scaled_NG, 1, 0.0), adv_NG)
    torch.testing.assert_close(adv_NG.sum(dim=1), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(adv_NG.std(dim=1), torch.ones(3, dtype=torch.float64))
