"""Soft Adaptive Policy Optimization, SAPO (arXiv:2511.20347): a sigmoid of the ratio in place of a clip.

The surrogate of a token is 4 / tau sigmoid(tau (r - 1)) A, with a tau for each sign of A. At r = 1 its
gradient is the policy gradient. Beside r A, that of no clip, it fades on both sides of r = 1, by 4 s (1 - s)
with s the sigmoid, the faster the larger tau is, and is nowhere 0.
"""

import torch
from torch import Tensor

from records import LogProbs
from settings.loader import Positive, kind


@kind("soft_gate")
class SoftGate:
    """Let the gradient fade, beside that without a clip, as the ratio leaves 1."""
    tau_right: Positive = 1.0   # of positive advantages, as the authors have it
    tau_wrong: Positive = 1.05  # of negative ones


def soft_gate(logps: LogProbs, settings: SoftGate) -> Tensor:
    """Compute f, [C]: the derivative of the surrogate by log pi, over A: 4 s (1 - s) r, s the sigmoid."""
    ratio_C = (logps.logp_C - logps.old_logp_C).detach().exp()
    tau_C = torch.full_like(ratio_C, settings.tau_wrong)
    tau_C = tau_C.masked_fill(logps.adv_C > 0, settings.tau_right)
    gate_C = torch.sigmoid(tau_C * (ratio_C - 1))
    return 4 * gate_C * (1 - gate_C) * ratio_C


TRUST = {SoftGate: soft_gate}
