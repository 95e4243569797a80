"""Multiply the ratios of all tokens so far, and clip by place: CTPO (arXiv:2605.07331).

    R_t = prod_{s <= t} r_s,  within [exp(-low sqrt t), exp(high sqrt t)],  t = 1, 2, ... in the completion

R corrects what was sampled before a token, which a token's own ratio r_t does not; what is sampled behind it
stays uncorrected. The surrogate is PPO's with R in place of r and a dual clip at exp(most sqrt t). Its
gradient flows through r_t alone, and the bounds' defaults are those of the authors' code.
"""

import torch
from torch import Tensor

from records import LogProbs
from settings.loader import Positive, kind


@kind("cumulative")
class Cumulative:
    """Clip the product of the ratios so far within bounds that grow with the root of the place."""
    low: Positive = 0.025   # in nats, as all three
    high: Positive = 0.05
    most: Positive = 0.05   # upper bound where the advantage is negative


def cumulative(logps: LogProbs, settings: Cumulative) -> Tensor:
    """Compute f, [C]: R, or 0 where a bound stops the gradient."""
    segment_C, gap_C = logps.segment_C, (logps.logp_C - logps.old_logp_C).detach()
    begin_S = torch.searchsorted(segment_C, torch.arange(int(segment_C[-1]) + 1, device=segment_C.device))
    before_C = (gap_C.cumsum(0) - gap_C)[begin_S][segment_C]
    gap_C = gap_C.cumsum(0) - before_C
    root_C = (torch.arange(len(gap_C), device=gap_C.device) - begin_S[segment_C] + 1).sqrt()
    high_C, low_C = gap_C > settings.high * root_C, gap_C < -settings.low * root_C
    stopped_C = (logps.adv_C > 0) & high_C
    stopped_C |= (logps.adv_C < 0) & (low_C | (gap_C > settings.most * root_C))
    return torch.where(stopped_C, 0.0, gap_C.exp())


TRUST = {Cumulative: cumulative}
