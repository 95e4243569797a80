"""Compute the loss as a weighted sum over tokens: token weights, trust regions, the KL to a reference.

Every objective has the gradient  - sum_t  w_t * f_t * A_t * grad logp_t  (+ the KL's): token weight w, trust
region f, advantage A. So a trust region returns f, as a constant. For the surrogate that every reader knows,

    - sum_t w_t min(r_t A_t, clamp(r_t, 1 - low, 1 + high) A_t),    r_t = pi / pi_old,

f is r if the minimum is r A, and 0 if the clamp has stopped the gradient: grad r = r grad logp. The
surrogates live in the tests that compare gradients. Pure functions: `row_loss` puts the terms together, and
the functions of one term each follow it.

Dimension key:  N groups in one mini-batch,  G completions per group,  S completions in one packed row,
C tokens of these completions.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from config import Loss
from records import LogProbs, PreparedRow, Pruned, Row, frozen
from settings import kinds


@frozen
class RowLoss:
    """The loss of one row, and the terms that it was computed from."""

    loss: Tensor
    factor_C: Tensor         # multiplies all terms of a token (`weigh`); ones without
    f_C: Tensor              # of the trust region
    k3_C: Tensor | None      # None without a KL
    logp_C: Tensor           # of the policy in this pass, in nats


def row_loss(logp_C: Tensor, prepared: PreparedRow, adv_C: Tensor, loss: Loss,
             entropy_C: Tensor | None = None) -> RowLoss:
    """Compute one row's term of the loss, with w_t from `token_weight` and the entropies H:

        sum_t  - w_t f_t A_t logp_t  + kl w_t k3_t  - likelihood_t logp_t  - bonus_t H_t

    A term that the config does not ask for is left out. `factor_C` multiplies all terms of a token.
    loss.old_logp=engine: the ratio is to the policy that drew each token, and tis_cap bounds it.
    loss.kl_corrected: k3 times the ratio r. Its gradient is r (logp - ref) grad logp: over samples of the old
    policy the mean is the KL's gradient.
    """
    row, factor_C = prepared.row, prepared.factor_C
    old_C = row.sampled_logp_C if loss.old_logp == "engine" else prepared.old_logp_C
    if factor_C is None:
        factor_C = torch.ones_like(logp_C.detach())
    f_C = TRUST[loss.trust.kind](LogProbs(logp_C, old_C, adv_C, row.segment_C), loss.trust)
    if loss.tis_cap and loss.old_logp == "engine":
        f_C = f_C.clamp(max=loss.tis_cap)
    weight_C = row.weight_C * factor_C
    pull_C = weight_C * f_C * adv_C  # coefficients of logp
    if row.likelihood_C is not None:
        pull_C = pull_C + row.likelihood_C * factor_C
    total = -(pull_C * logp_C).sum()
    if row.bonus_C is not None:
        total = total - (row.bonus_C * factor_C * entropy_C).sum()
    k3_C = None
    if loss.kl:
        k3_C = k3(logp_C, prepared.ref_logp_C)
        ratio_C = (logp_C - old_C).exp() if loss.kl_corrected else 1
        total = total + loss.kl * (weight_C * ratio_C * k3_C).sum()
        k3_C = k3_C.detach()
    return RowLoss(total, factor_C, f_C, k3_C, logp_C.detach())


def token_weight(len_NG: Tensor, pruned: Pruned, normalize: str, denominator: str, max_len: int,
                 offered: int) -> Tensor:
    """Compute the weight of every token of each completion, [N, G]; the loss is then a plain weighted SUM.

    normalize    "token"    every token counts the same             (DAPO, arXiv:2503.14476)
                 "sequence" every completion counts the same        (GRPO, arXiv:2402.03300)
                 "constant" divide by max_len, not by real length   (Dr. GRPO, arXiv:2503.20783)
                 "sum"      a completion's tokens add up            (A*-PO, arXiv:2505.20686)
    denominator  "all"      count all candidates: unbiased pruning keeps the full-batch objective
                 "kept"     count the survivors: CPPO (arXiv:2503.22342), 1/k is a mean over survivors
    offered      prompts of this mini-batch, with the prompts skipped before rollout
    Weights are computed from the whole mini-batch, so cutting it into rows or ranks cannot change the
    gradient. Two prompts of two completions, of 1, 3, 2 and 2 tokens, all kept: "token" weighs each token
    1/8, "sequence" 1/4, 1/12, 1/8, 1/8. A completion without a reward has length 0 and counts nowhere.
    """
    kept_NG = pruned.keep_NG.to(len_NG.dtype)
    items = kept_NG.sum() if denominator == "kept" else offered * len_NG.shape[1] - (len_NG == 0).sum()
    tokens = (kept_NG * len_NG).sum() if denominator == "kept" else len_NG.sum()
    # Pruning may leave a mini-batch with nothing: its weights are 0, not 0/0.
    items, tokens = items.clamp(min=1), tokens.clamp(min=1)
    denominators = {"token": tokens, "sequence": len_NG.clamp(min=1) * items, "constant": max_len * items,
                    "sum": items}
    return pruned.weight_NG / denominators[normalize]


def likelihood_weight(len_NG: Tensor, pruned: Pruned, correct_NG: Tensor, mu: float,
                      denominator: str) -> Tensor:
    """Compute the token weight in VAPO's second term (arXiv:2504.05118, eq. 9-10), [N, G]: mu times the mean
    of -log pi over the tokens of all correct completions; 0 if none is correct.
    """
    counted_NG = correct_NG & pruned.keep_NG if denominator == "kept" else correct_NG
    return mu * pruned.weight_NG * correct_NG / (counted_NG * len_NG).sum().clamp(min=1)


def clip(logps: LogProbs, settings: kinds.Clip | kinds.ClipSequence) -> Tensor:
    """Compute PPO's clip (arXiv:1707.06347) as the factor f: the ratio, or 0 if the clip stops the gradient.

    settings.low, high  region [1 - low, 1 + high]; equal in GRPO, high > low in DAPO (clip-higher)
    settings.dual       bound on the ratio of a negative advantage, or none (dual clip, arXiv:1912.09729)
    Returns: f_C, without gradient. -f * adv * logp has the gradient of -min(ratio adv, clamp(ratio) adv).
    """
    adv_C, ratio_C = logps.adv_C, (logps.logp_C - logps.old_logp_C).detach().exp()
    stopped_C = (adv_C > 0) & (ratio_C > 1 + settings.high) | (adv_C < 0) & (ratio_C < 1 - settings.low)
    if settings.dual is not None:
        stopped_C |= (adv_C < 0) & (ratio_C > settings.dual)
    return torch.where(stopped_C, 0.0, ratio_C)


def clip_sequence(logps: LogProbs, settings: kinds.ClipSequence) -> Tensor:
    """Clip by the geometric mean of a completion's token ratios: GSPO (arXiv:2507.18071).

    With loss.normalize=sequence this is the gradient of mean_i min(s_i A_i, clamp(s_i) A_i).
    """
    gap_C = segment_mean(logps.logp_C - logps.old_logp_C, logps.segment_C)[logps.segment_C]
    return clip(replace(logps, logp_C=gap_C, old_logp_C=torch.zeros_like(gap_C)), settings)


def clamp(logps: LogProbs, settings: kinds.Clamp) -> Tensor:
    """Clamp the ratio to [1 - low, 1 + high], stop no gradient: CISPO (arXiv:2506.13585). low 1: no bound."""
    ratio_C = (logps.logp_C - logps.old_logp_C).detach().exp()
    return ratio_C.clamp(1 - settings.low, 1 + settings.high)


PROB_EPSILON = 1e-8  # added to 1 - p, as by the authors: in float32 a likely token's p may be rounded to 1


def total_variation(logps: LogProbs, settings: kinds.TotalVariation) -> Tensor:
    """Bound how far a token's probability moves, as Divergence PPO (arXiv:2602.04879) does by binary masks.

    Returns min(ratio, cap), or 0 if the probability has moved by more than `divergence`: in the advantage's
    direction, or with sides=both in either (IPO, the default of prime-rl). A rare token's probability may
    double, a frequent token's may not.
    """
    moved_C = logps.logp_C.detach().exp() - logps.old_logp_C.exp()
    moved_C = moved_C.abs() if settings.sides == "both" else moved_C * logps.adv_C.sign()
    return cap_ratio(logps, moved_C > settings.divergence, settings.cap)


def binary_kl(logps: LogProbs, settings: kinds.BinaryKl) -> Tensor:
    """Do as `total_variation`, with the binary KL(old, new) in nats in its place."""
    new_C, old_C = logps.logp_C.detach().exp(), logps.old_logp_C.exp()
    others_C = (1 - old_C) * ((1 - old_C + PROB_EPSILON) / (1 - new_C + PROB_EPSILON)).log()
    kl_C = old_C * (logps.old_logp_C - logps.logp_C.detach()) + others_C
    return cap_ratio(logps, (kl_C > settings.divergence) & ((new_C - old_C) * logps.adv_C > 0), settings.cap)


def cap_ratio(logps: LogProbs, stopped_C: Tensor, cap: float) -> Tensor:
    return torch.where(stopped_C, 0.0, (logps.logp_C - logps.old_logp_C).detach().exp().clamp(max=cap))


# loss.trust.kind -> f, of the log-probs and of that section of the config
TRUST = {
    "clip": clip,
    "clip_sequence": clip_sequence,
    "clamp": clamp,
    "total_variation": total_variation,
    "binary_kl": binary_kl,
    "none": lambda logps, settings: torch.ones_like(logps.adv_C),
}


def k3(logp_C: Tensor, ref_logp_C: Tensor) -> Tensor:
    """Estimate KL(policy, reference) of each token in nats: e^d - d - 1 >= 0 with d = ref - logp.

    Unbiased in value under samples of the policy; its gradient is GRPO's (arXiv:2402.03300, eq. 4).
    It has no upper bound; verl's low_var_kl is cut at 10.
    """
    d_C = ref_logp_C - logp_C
    return d_C.exp() - d_C - 1


def needs_extra_pass(loss: Loss) -> bool:
    """Tell whether several mini-batches need a pass before the update that computes their log-probs.

    One mini-batch needs none: its first pass itself runs under the policy before the update.
    """
    reads_old_logp = loss.trust.kind != "none" or loss.kl_corrected or has_token_weights(loss)
    return loss.old_logp == "recompute" and reads_old_logp


def has_token_weights(loss: Loss) -> bool:
    """Tell whether `weigh` has something to do."""
    return loss.old_logp == "recompute" and (loss.tis_cap is not None or loss.mask_ratio is not None)


def weigh(rows: Sequence[Row], logp: Sequence[Tensor], entropy: Sequence[Tensor | None], loss: Loss,
          ) -> list[Tensor]:
    """Weigh tokens by the policy before the update, if `has_token_weights`: the place for your own.

    Args:    rows           of this rank, of one mini-batch
             logp, entropy  of each row's tokens in nats, [C]; no entropy unless loss.entropy asks for it
    Returns: a factor of each row's tokens, [C]. It multiplies a token's whole term, the KL included, under
    unchanged denominators. One mini-batch alone has no pass before the update, so rows come one at a time.
    """
    return [engine_weight(logp_C, row.sampled_logp_C, row.segment_C, loss.tis_cap, loss.mask_ratio)
            for row, logp_C in zip(rows, logp, strict=True)]


def engine_weight(old_logp_C: Tensor, engine_logp_C: Tensor, segment_C: Tensor, cap: float | None,
                  mask_ratio: float | None) -> Tensor:
    """Compute importance weights for tokens from an engine that samples a slightly different policy.

    Args:    old_logp_C, engine_logp_C  log-probs in nats of the trainer before the update and of the engine
             segment_C   which completion each token belongs to: 0, 1, ...
             cap         truncated importance sampling: min(pi_old / pi_engine, cap) per token; none: 1
             mask_ratio  0 for a completion if its geometric mean of pi_old / pi_engine is outside
                         [1 / mask_ratio, mask_ratio]; none: no completion
    Returns: w_C, without gradient. A ratio per token does not correct for the tokens before it, and the cap
    cuts large ratios: less variance for some bias.
    """
    gap_C = (old_logp_C - engine_logp_C).detach()
    weight_C = torch.ones_like(gap_C) if cap is None else gap_C.exp().clamp(max=cap)
    if mask_ratio is None:
        return weight_C
    ratio_S = segment_mean(gap_C, segment_C).exp()
    return weight_C * ((ratio_S <= mask_ratio) & (ratio_S * mask_ratio >= 1))[segment_C]


def segment_sum(x_C: Tensor, segment_C: Tensor) -> Tensor:
    """Sum x over the tokens of each completion, [S]."""
    count = int(segment_C.max()) + 1
    return x_C.new_zeros(count).index_add(0, segment_C, x_C)


def segment_mean(x_C: Tensor, segment_C: Tensor) -> Tensor:
    return segment_sum(x_C, segment_C) / segment_C.bincount().clamp(min=1)
