"""Prompts in proportion to what their last group showed: the probabilities, and what is drawn by them."""

import math

import pytest
import torch
from conftest import as_rolled, make_groups

import config
from advantage import group_norm
from config import ConfigError
from history import PromptHistory
from prune import proportional_prob
from settings.kinds import ProportionalPrompts

NAN = math.nan


def test_the_size_of_a_prompt_is_2_sqrt_p_1_minus_p(tmp_path):
    """1, 4, 0 and 2 right of 8, by the population's deviation; a fifth prompt has not come up yet."""
    reward_NG = torch.tensor([[float(g < right) for g in range(8)] for right in (1, 4, 0, 2)], dtype=torch.float64)
    groups = make_groups([[2] * 8] * 5, [1] * 5)
    history = PromptHistory([group.prompt for group in groups], ProportionalPrompts(share=0.5), 0, middle=0.5)
    history.record(as_rolled(groups[:4], reward_NG, group_norm(reward_NG, 0, 0.0)))
    size_K = history.remembered([*range(5)]).size_K
    assert size_K[:4].tolist() == pytest.approx([2 * (p * (1 - p)) ** 0.5 for p in (1 / 8, 1 / 2, 0, 1 / 4)])
    assert proportional_prob(size_K, 0.5, 0.1).tolist()[4] == 1


def test_probabilities_by_hand():
    """Sizes 1 1 2 0 and 4 of a new one: the mean of the four is 1, so the fourth counts as 0.1, and 2 of them are
    expected: 2 x 2 / 4.1 is below 1."""
    assert proportional_prob(torch.tensor([1.0, 1, NAN, 2, 0]).double(), 0.5, 0.1).tolist() == pytest.approx(
        [2 / 4.1, 2 / 4.1, 1, 4 / 4.1, 0.2 / 4.1])
    assert proportional_prob(torch.tensor([NAN, NAN]), 0.5, 0.1).tolist() == [1, 1]
    assert proportional_prob(torch.zeros(4), 0.5, 0.1).tolist() == [0.5] * 4   # nothing tells them apart
    assert proportional_prob(torch.tensor([3.0]), 0.25, 0.1).tolist() == [0.25]
    # All sizes below the mean, 11/3, count as it: 9 + 22/3 in all.
    assert proportional_prob(torch.tensor([9.0, 1, 1]).double(), 0.5, 1.0).tolist() == pytest.approx(
        [1.5 * 9 / (49 / 3), *[1.5 * (11 / 3) / (49 / 3)] * 2])


def test_as_many_are_expected_as_the_share_says_and_no_weight_is_too_large():
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        K, share, floor = 1 + trial % 9, 0.1 + 0.9 * (trial % 7) / 7, (0.05, 0.3, 1.0)[trial % 3]
        size_K = torch.rand(K, generator=generator).double() ** 6 * (torch.rand(K, generator=generator) > 0.4)
        size_K[torch.rand(K, generator=generator) < 0.2] = NAN
        prob_K, seen_K = proportional_prob(size_K, share, floor), ~size_K.isnan()
        assert (prob_K[~seen_K] == 1).all() and (prob_K <= 1).all()
        assert prob_K[seen_K].sum().item() == pytest.approx(share * int(seen_K.sum()), abs=1e-9)
        assert (1 / prob_K).max() <= (1 + floor) / (share * floor) * (1 + 1e-9) or not seen_K.any()
        order_K = size_K[seen_K].argsort()
        assert (prob_K[seen_K][order_K].diff() >= -1e-12).all()


def test_what_the_seed_draws_has_these_probabilities_and_weights():
    """z-test over 2,000 epochs of the history's own draw, whose probabilities are those of the sizes; half of four."""
    groups = make_groups([[2, 3]] * 4, [1] * 4)
    adv_NG = torch.tensor([[0.1, -0.1], [1.0, -1.0], [0.0, 0.0], [0.5, -0.5]], dtype=torch.float64)
    prompts, value_N = [group.prompt for group in groups], torch.tensor([3.0, -1.0, 2.0, 0.7])
    history = PromptHistory(prompts, ProportionalPrompts(share=0.5), seed=7, middle=0.0)
    assert all(draw.kept and draw.prob == 1 for draw in history.draw(4))
    history.record(as_rolled(groups, adv_NG, adv_NG))
    prob_K = proportional_prob(adv_NG.abs().mean(dim=1), 0.5, 0.1)
    places, estimates, counts = {prompt.id: n for n, prompt in enumerate(prompts)}, [], []
    for _ in range(2000):
        draws = history.draw(4)
        assert all(draw.prob == pytest.approx(prob_K[places[draw.prompt.id]].item()) for draw in draws)
        estimates.append(sum(draw.weight * value_N[places[draw.prompt.id]] for draw in draws))
        counts.append(sum(draw.kept for draw in draws))
    estimate = torch.tensor(estimates)
    assert abs((estimate.mean() - value_N.sum()) / (estimate.std() / 2000 ** 0.5)) < 4
    assert sum(counts) / 2000 == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(("settings", "why"), [
    (["loss.normalize=token"], "loss.normalize=token must be sequence, constant or sum with prune.prompts.kind=pps"),
    (["loss.denominator=kept"], "loss.denominator=kept must be all with prune.prompts.kind=pps"),
    (["rollout.until=informative"], "rollout.until=informative must be offered or full with prune.prompts.kind=pps")])
def test_what_would_make_it_biased_is_an_error(settings, why):
    with pytest.raises(ConfigError, match=why):
        config.load(["prompt_pps_gsm8k.yaml", "toy.yaml"], ["prune.completions.kind=none", *settings])
