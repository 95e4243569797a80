"""Train on the groups that hold most of a step's reward variance: RAGEN-2's filter by signal-to-noise ratio
(arXiv:2604.06268).

Dimension key:  N groups in one step,  G completions per group.
"""

import torch
from torch import Tensor


def most_variance(reward_NG: Tensor, share: float, slack: float) -> Tensor:
    """Mark all completions of the fewest groups that hold `share` of the variances' sum, less `slack`, bool
    [N, G]: the largest variances first, of equal ones the earlier group. Biased.

    Variances are of samples (correction 1), over the completions that have a reward. A step whose sum is no
    larger than slack / share keeps nothing, and a group without variance is never kept.
    """
    count_N = (~reward_NG.isnan()).sum(dim=1)
    apart_NG = reward_NG - reward_NG.nanmean(dim=1, keepdim=True)
    variance_N = apart_NG.square().nansum(dim=1) / (count_N - 1).clamp(min=1)
    variance_N = variance_N.round(decimals=12)  # equal ones are equal, and those of equal rewards are 0
    sorted_N, order_N = variance_N.sort(descending=True, stable=True)
    target = share * sorted_N.sum() - slack
    before_N = sorted_N.cumsum(0) - sorted_N  # of all larger ones: for a flat group of all there are
    kept_N = before_N < target * (1 - 1e-9)
    return torch.zeros_like(kept_N).scatter_(0, order_N, kept_N)[:, None].expand_as(reward_NG)
