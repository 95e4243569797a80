"""The loss as a weighted sum over tokens: what each token weighs, how far the policy may move, how far it may drift.

Every objective has the gradient  - sum_t  w_t * f_t * A_t * grad logp_t  (+ the KL's): token weight w, trust region f,
advantage A. So a trust region returns f, as a constant, and the textbook surrogates live in the tests that compare
gradients. Pure functions.

Dimension key:  N groups in one mini-batch,  G completions per group,  C completion tokens in one packed row.
"""

import torch
from torch import Tensor

from prune import Pruned


def token_weight(len_NG: Tensor, pruned: Pruned, per: str, count: str, max_len: int, offered: int) -> Tensor:
    """Weight of every token of each completion, [N, G]; the loss is then a plain weighted SUM.

    per     "token"    every token counts the same             (DAPO, arXiv:2503.14476)
            "sequence" every completion counts the same        (GRPO, arXiv:2402.03300)
            "constant" divide by max_len, not by real length   (Dr. GRPO, arXiv:2503.20783)
    count   "all"      divide by what was offered: unbiased pruning keeps the full-batch objective
            "kept"     divide by what survived: CPPO (arXiv:2503.22342), whose 1/k is a mean over survivors
    offered prompts of this mini-batch, those skipped before rollout included
    Computed from the whole mini-batch, so cutting it into rows or ranks cannot change the gradient.
    """
    kept_NG = pruned.keep_NG.to(len_NG.dtype)
    items = kept_NG.sum() if count == "kept" else torch.tensor(offered * len_NG.shape[1])
    tokens = (kept_NG * len_NG).sum() if count == "kept" else len_NG.sum()
    # Pruning may leave a mini-batch with nothing: its weights are 0, not 0/0.
    items, tokens = items.clamp(min=1), tokens.clamp(min=1)
    return pruned.weight_NG / {"token": tokens, "sequence": len_NG * items, "constant": max_len * items}[per]


def clip(logp_C: Tensor, old_logp_C: Tensor, adv_C: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """PPO's clipped trust region (arXiv:1707.06347) as the factor f: the ratio, or 0 where the clip stops the gradient.

    Args:    logp_C, old_logp_C  log-probs in nats under the current policy and the one before the update
             low, high           region [1 - low, 1 + high]; equal in GRPO, high > low in DAPO (clip-higher)
             dual                bound on the ratio of a negative advantage (dual clip, arXiv:1912.09729), or none
    Returns: f_C, without gradient. -f * adv * logp has the gradient of -min(ratio adv, clamp(ratio) adv).
    """
    ratio_C = (logp_C - old_logp_C).detach().exp()
    stopped_C = (adv_C > 0) & (ratio_C > 1 + high) | (adv_C < 0) & (ratio_C < 1 - low)
    if dual is not None:
        stopped_C |= (adv_C < 0) & (ratio_C > dual)
    return torch.where(stopped_C, 0.0, ratio_C)


def engine_weight(old_logp_C: Tensor, engine_logp_C: Tensor, segment_C: Tensor, cap: float | None,
                  mask_ratio: float | None) -> Tensor:
    """Importance weight of tokens that the engine drew from a policy slightly other than the trainer's.

    Args:    old_logp_C, engine_logp_C  log-probs in nats of the trainer before the update and of the engine
             segment_C   which completion each token belongs to: 0, 1, ...
             cap         truncated importance sampling: min(pi_old / pi_engine, cap) per token; none: 1
             mask_ratio  0 for a completion whose geometric mean of pi_old / pi_engine is outside
                         [1 / mask_ratio, mask_ratio]; none: no completion
    Returns: w_C, without gradient. It multiplies the whole term, the KL included, under unchanged denominators.
    The per-token ratio leaves the tokens before it uncorrected, and the cap its tail: less variance for some bias.
    """
    gap_C = (old_logp_C - engine_logp_C).detach()
    weight_C = torch.ones_like(gap_C) if cap is None else gap_C.exp().clamp(max=cap)
    if mask_ratio is None:
        return weight_C
    count_S = segment_C.bincount()
    sum_S = torch.zeros_like(count_S, dtype=gap_C.dtype).index_add(0, segment_C, gap_C)
    ratio_S = (sum_S / count_S.clamp(min=1)).exp()
    return weight_C * ((ratio_S <= mask_ratio) & (ratio_S * mask_ratio >= 1))[segment_C]


def k3(logp_C: Tensor, ref_logp_C: Tensor) -> Tensor:
    """Per-token estimate of KL(policy, reference) in nats, never negative: e^d - d - 1 with d = ref - logp.

    Unbiased in value under samples of the policy; its gradient is the one GRPO (arXiv:2402.03300, eq. 4) takes.
    """
    d_C = ref_logp_C - logp_C
    return d_C.exp() - d_C - 1
