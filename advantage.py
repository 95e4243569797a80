"""Advantage estimators: rewards in, advantages out. Pure functions; this file imports only torch.

Dimension key:  N prompts (groups) in one step,  G completions per prompt.
"""

import torch
from torch import Tensor


def group_norm(reward_NG: Tensor, correction: int, eps: float) -> Tensor:
    """GRPO (arXiv:2402.03300): the reward standardised within its group, (r - mean) / (std + eps).

    correction 0 is the paper's population deviation, 1 the sample deviation of the released codes.
    A group whose rewards are all equal carries no signal and gets exactly 0. Equality is tested instead of
    std > 0 because the mean of equal floats can be off by one ulp.
    """
    centred_NG = reward_NG - reward_NG.mean(dim=1, keepdim=True)
    std_N1 = (centred_NG.square().sum(dim=1, keepdim=True) / (reward_NG.shape[1] - correction)).sqrt()
    flat_N1 = (reward_NG == reward_NG[:, :1]).all(dim=1, keepdim=True)
    return torch.where(flat_N1, 0.0, centred_NG / (std_N1 + eps))
