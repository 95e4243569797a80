"""Weights, trust region and KL against the formulas of the papers, by autograd in float64."""

import itertools

import pytest
import torch

from loss import clip, engine_weight, k3, token_weight
from prune import Pruned, keep_all, keep_largest

LEN_NG = torch.tensor([[10, 300, 20, 5], [7, 7, 1, 64]])
ADV_NG = torch.tensor([[1.5, -0.2, 0.1, -1.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_weights_times_lengths_sum_to_one(keep):
    """per=token and per=sequence are means, over all or over the kept; per=constant is not a mean."""
    prunings = keep_all(ADV_NG), keep_largest(ADV_NG, keep, "group")
    for pruned, per in itertools.product(prunings, ("token", "sequence")):
        total = (token_weight(LEN_NG, pruned, per, "kept", 64, 2) * LEN_NG).sum()
        torch.testing.assert_close(total.item(), 1.0)
    whole = token_weight(LEN_NG, keep_all(ADV_NG), "sequence", "all", 64, 2)
    torch.testing.assert_close((whole * LEN_NG).sum(dim=1), torch.full((2,), 0.5, dtype=torch.float64))


def test_weights_by_hand():
    """Kept: lengths 10 and 5 of the first group, 7 and 7 of the second."""
    pruned = keep_largest(ADV_NG, 2, "group")
    cases = {("token", "kept"): [1 / 29] * 4, ("token", "all"): [1 / 414] * 4,
             ("sequence", "kept"): [1 / (4 * n) for n in (10, 5, 7, 7)],
             ("sequence", "all"): [1 / (8 * n) for n in (10, 5, 7, 7)],
             ("constant", "kept"): [1 / (4 * 64)] * 4, ("constant", "all"): [1 / (8 * 64)] * 4}
    for (per, count), expected in cases.items():
        weight_NG = token_weight(LEN_NG, pruned, per, count, max_len=64, offered=2)
        torch.testing.assert_close(weight_NG[pruned.keep_NG], torch.tensor(expected, dtype=torch.float64))
        assert not weight_NG[~pruned.keep_NG].any()


def test_a_pruning_weight_multiplies_the_token_weight():
    weight_NG = torch.tensor([[4.0, 0.0]], dtype=torch.float64)
    pruned = Pruned(weight_NG > 0, weight_NG, weight_NG)
    assert token_weight(torch.tensor([[2, 5]]), pruned, "sequence", "all", 9, 1).tolist() == [[1.0, 0.0]]


def test_a_minibatch_that_keeps_nothing_weighs_nothing():
    nothing = Pruned(torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 4), torch.zeros(2, 4))
    for per, count in itertools.product(("token", "sequence", "constant"), ("all", "kept")):
        assert token_weight(LEN_NG, nothing, per, count, 64, 2).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.28, 3.0)])
def test_clip_has_the_gradient_of_the_textbook_surrogate(low, high, dual):
    """min(r A, clamp(r) A), for A < 0 bounded below by dual x A; ratios on both sides of every bound, both signs."""
    ratio_C = torch.tensor([0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 2.9, 3.1], dtype=torch.float64).repeat(3)
    adv_C = torch.tensor([1.7, -0.6, 0.0], dtype=torch.float64).repeat_interleave(10)
    old_C = torch.linspace(-3, -0.1, 30, dtype=torch.float64)
    logp_C = (old_C + ratio_C.log()).requires_grad_()

    r_C = (logp_C - old_C).exp()
    textbook_C = torch.minimum(r_C * adv_C, r_C.clamp(1 - low, 1 + high) * adv_C)
    if dual is not None:
        textbook_C = torch.where(adv_C < 0, torch.maximum(textbook_C, dual * adv_C), textbook_C)
    expected, = torch.autograd.grad(-textbook_C.sum(), logp_C)

    f_C = clip(logp_C, old_C, adv_C, low, high, dual)
    assert not f_C.requires_grad
    ours, = torch.autograd.grad(-(f_C * adv_C * logp_C).sum(), logp_C)
    torch.testing.assert_close(ours, expected)
    assert (f_C[adv_C != 0] == 0).any() and (f_C == 1).any()


def test_k3_is_an_unbiased_estimate_of_the_kl_and_never_negative():
    """Sum over all tokens of p * k3 = KL(p, q), exactly."""
    generator = torch.Generator().manual_seed(0)
    logp, logq = torch.randn(2, 50, dtype=torch.float64, generator=generator).log_softmax(-1)
    torch.testing.assert_close((logp.exp() * k3(logp, logq)).sum(), (logp.exp() * (logp - logq)).sum())
    assert (k3(logp, logq) >= 0).all() and (k3(logp, logp) == 0).all()


def test_the_engines_weight_by_hand():
    """Completions of 2, 3 and 1 tokens, with ratios pi_old / pi_engine chosen."""
    ratio_C = torch.tensor([2.0, 0.5, 1.2, 1.2, 1.2, 0.7], dtype=torch.float64)
    engine_C = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0, -1.5], dtype=torch.float64)
    old_C, segment_C = (engine_C + ratio_C.log()).requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 2])
    for cap, mask_ratio, expected in (
            (None, None, [1, 1, 1, 1, 1, 1]),
            (1.5, None, [1.5, 0.5, 1.2, 1.2, 1.2, 0.7]),
            (None, 1.1, [1, 1, 0, 0, 0, 0]),         # geometric means 1, 1.2 and 0.7
            (None, 1.3, [1, 1, 1, 1, 1, 0]),
            (1.1, 1.3, [1.1, 0.5, 1.1, 1.1, 1.1, 0])):
        weight_C = engine_weight(old_C, engine_C, segment_C, cap, mask_ratio)
        assert weight_C.tolist() == pytest.approx(expected) and not weight_C.requires_grad
