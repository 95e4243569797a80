"""Weights, trust region and KL against the formulas of the papers, by autograd in float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import loss
from config import Loss
from loss import binary_kl, clamp, clip, k3, likelihood_weight, token_weight, total_variation
from prune import keep_all, keep_largest
from records import LogProbs, PreparedRow, Pruned
from settings.kinds import BinaryKl, Clamp, Clip, TotalVariation

LEN_NG = torch.tensor([[10, 300, 20, 5], [7, 7, 1, 64]])
ADV_NG = torch.tensor([[1.5, -0.2, 0.1, -1.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


def test_weights_by_hand():
    """Kept: lengths 10 and 5 of the first group, 7 and 7 of the second."""
    pruned = keep_largest(ADV_NG, 2, "group")
    cases = {("token", "kept"): [1 / 29] * 4, ("token", "all"): [1 / 414] * 4,
             ("sequence", "kept"): [1 / (4 * n) for n in (10, 5, 7, 7)],
             ("sequence", "all"): [1 / (8 * n) for n in (10, 5, 7, 7)],
             ("constant", "kept"): [1 / (4 * 64)] * 4, ("constant", "all"): [1 / (8 * 64)] * 4,
             ("sum", "kept"): [1 / 4] * 4, ("sum", "all"): [1 / 8] * 4}
    for (normalize, count), expected in cases.items():
        weight_NG = token_weight(LEN_NG, pruned, normalize, count, max_len=64, offered=2)
        torch.testing.assert_close(weight_NG[pruned.keep_NG], torch.tensor(expected, dtype=torch.float64))
        assert not weight_NG[~pruned.keep_NG].any()


def test_a_minibatch_that_keeps_nothing_weighs_nothing():
    nothing = Pruned(torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 4), torch.zeros(2, 4))
    for normalize, count in itertools.product(("token", "sequence", "constant"), ("all", "kept")):
        assert token_weight(LEN_NG, nothing, normalize, count, 64, 2).tolist() == [[0.0] * 4] * 2


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

    f_C = clip(LogProbs(logp_C, old_C, adv_C, torch.arange(30)), Clip(low=low, high=high, dual=dual))
    assert not f_C.requires_grad
    ours, = torch.autograd.grad(-(f_C * adv_C * logp_C).sum(), logp_C)
    torch.testing.assert_close(ours, expected)
    assert (f_C[adv_C != 0] == 0).any() and (f_C == 1).any()


def test_k3_is_an_unbiased_estimate_of_the_kl_and_never_negative():
    """Sum over all tokens of p * k3 = KL(p, q), exactly."""
    logp, logq = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    torch.testing.assert_close((logp.exp() * k3(logp, logq)).sum(), (logp.exp() * (logp - logq)).sum())
    assert (k3(logp, logq) >= 0).all() and (k3(logp, logp) == 0).all()


def test_the_corrected_kl_has_the_gradient_of_the_kl_over_samples_of_any_policy():
    """Over all tokens, by autograd: the gradient of KL(p, ref), which k3 alone does not have."""
    generator = torch.Generator().manual_seed(0)
    old_V, ref_V = torch.randn(2, 50, dtype=torch.float64, generator=generator).log_softmax(-1)
    for moved in (0.0, 0.5):
        logits_V = (old_V + moved * torch.randn(50, dtype=torch.float64, generator=generator)).requires_grad_()
        logp_V = logits_V.log_softmax(-1)
        expected, = torch.autograd.grad((logp_V.exp() * (logp_V - ref_V)).sum(), logits_V, retain_graph=True)

        def kl(logp_C: torch.Tensor, corrected: bool) -> torch.Tensor:
            """The KL's term of a row in which every token stands once, weighted by p_old."""
            none_C, weight_C = torch.zeros(50, dtype=torch.float64), old_V.exp()
            row = SimpleNamespace(weight_C=weight_C, likelihood_C=None, bonus_C=None, segment_C=torch.arange(50))
            settings = Loss(kl=1.0, kl_corrected=corrected)
            return loss.row_loss(logp_C, PreparedRow(row, none_C, ref_V, old_V), none_C, settings).loss

        ours, = torch.autograd.grad(kl(logp_V, True), logits_V, retain_graph=True)
        torch.testing.assert_close(ours, expected)
        plain, = torch.autograd.grad(kl(logp_V, False), logits_V, retain_graph=True)
        assert (plain - expected).norm() > 0.1 * expected.norm()
        free_V = logp_V.detach().requires_grad_()
        each, = torch.autograd.grad(kl(free_V, True), free_V)
        torch.testing.assert_close(each, (free_V.exp() * (free_V - ref_V)).detach())


def test_the_likelihood_of_what_is_correct_is_a_mean_over_its_tokens():
    """0.1 over the tokens of the correct (300, 20 and 7), those pruned in or out of the denominator; 0 for none."""
    correct_NG = torch.tensor([[False, True, True, False], [True, False, False, False]])
    none_NG = torch.zeros_like(correct_NG)
    whole = likelihood_weight(LEN_NG, keep_all(ADV_NG), correct_NG, 0.1, "all")
    torch.testing.assert_close(whole, 0.1 / 327 * correct_NG.double())
    keep_NG = torch.tensor([[True, True, False, True], [True] * 4])
    pruned = Pruned(keep_NG, 2 * keep_NG.double(), keep_NG.double())
    kept_NG = correct_NG & keep_NG
    torch.testing.assert_close(likelihood_weight(LEN_NG, pruned, correct_NG, 0.1, "all"), 0.2 / 327 * kept_NG.double())
    torch.testing.assert_close(likelihood_weight(LEN_NG, pruned, correct_NG, 0.1, "kept"), 0.2 / 307 * kept_NG.double())
    assert not likelihood_weight(LEN_NG, pruned, none_NG, 0.1, "all").any()


def logps(ratios: list[float], old: list[float], adv: list[float], lengths: list[int]) -> LogProbs:
    """Tokens of these ratios and old probabilities."""
    old_C = torch.tensor(old, dtype=torch.float64).log()
    logp_C = old_C + torch.tensor(ratios, dtype=torch.float64).log()
    return LogProbs(logp_C, old_C, torch.tensor(adv, dtype=torch.float64),
                    torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))


def test_clamp_stops_no_token_and_without_a_bound_is_the_ratio():
    ratios = [0.1, 0.9, 1.1, 5.0]
    moved = logps(ratios, [0.15] * 4, [1, -1, 1, -1], [4])
    assert clamp(moved, Clamp(low=0.2, high=0.2)).tolist() == pytest.approx([0.8, 0.9, 1.1, 1.2])
    assert clamp(moved, Clamp(low=1.0, high=1e9)).tolist() == pytest.approx(ratios)


def test_total_variation_keeps_a_rare_token_that_doubles_and_drops_a_frequent_one():
    """0.01 -> 0.02 is kept, 0.80 -> 0.96 is dropped though PPO's clip lets it through; so is what falls under A < 0;
    a move against the advantage is never stopped, and the ratio is held at the cap."""
    ratios, old = [2, 1.2, 1.2, 0.75, 0.75, 30], [0.01, 0.8, 0.8, 0.8, 0.8, 1e-4]
    adv = [1, 1, -1, -1, 1, 1]
    f_C = total_variation(logps(ratios, old, adv, [6]), TotalVariation(divergence=0.15))
    assert f_C.tolist() == pytest.approx([2, 0, 1.2, 0, 0.75, 20])
    both = TotalVariation(divergence=0.15, sides="both", cap=1e4)  # IPO: the other direction is stopped too
    assert total_variation(logps(ratios, old, adv, [6]), both).tolist() == pytest.approx([2, 0, 0, 0, 0, 30])
    assert clip(logps(ratios, old, adv, [6]), Clip(low=0.2, high=0.21))[1] > 0


def test_binary_kl_by_hand():
    """0.5 -> 0.6 has 0.0204 nats, 0.8 -> 0.96 has 0.1731; one that is certain now, and was not, infinitely many."""
    m = logps([1.2, 1.2, 1.2, 1.0, 2.0, 1.2], [0.5, 0.8, 0.8, 1.0, 0.5, 0.5], [1, 1, -1, 1, 1, 1], [6])
    assert binary_kl(m, BinaryKl(divergence=0.05)).tolist() == pytest.approx([1.2, 0, 1.2, 1, 0, 1.2])
    assert binary_kl(m, BinaryKl(divergence=0.0203))[0] == 0 and binary_kl(m, BinaryKl(divergence=0.0205))[0] > 0


def test_binary_kl_stops_no_token_for_its_rounding():
    """The same logits as an engine and a trainer round them in float32: p is 1 by one of them and not by the other."""
    logits_CV = 6 * torch.randn(4000, 50, generator=torch.Generator().manual_seed(0))
    top_C1 = logits_CV.argmax(dim=1, keepdim=True)
    old_C = logits_CV.log_softmax(dim=1).gather(1, top_C1)[:, 0]
    logp_C = logits_CV.gather(1, top_C1)[:, 0] - logits_CV.logsumexp(dim=1)
    assert ((logp_C.exp() == 1) & (old_C.exp() < 1)).any()
    same = LogProbs(logp_C, old_C, torch.ones_like(old_C), torch.zeros(len(old_C), dtype=torch.long))
    assert (binary_kl(same, BinaryKl(divergence=0.05)) > 0).all()
