"""Shrink each prompt's mean reward towards the mean of the step's other prompts, as a baseline.

After arXiv:2511.03710 (its baseline of two levels of leaving out). For completion j of prompt i, with N
prompts, G completions, group means m_k and sample variances s2_k:

    b_ij = (1 - lam_i) m_i without j + lam_i mean_{k != i} m_k,    lam_i = (N - 1) / N  v_i / (v_i + t_i)
    v_i = mean_{k != i} s2_k / G                the noise of a group's mean
    t_i = mean_{k != i} (m_k - mean of these)^2  the spread of the groups' means, noise included

No part of b_ij depends on completion j, so with loss.normalize=sum the gradient is unbiased. Ours: a
completion without a reward, nan, counts nowhere, and a step of one prompt is not shrunk.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from advantage import leave_one_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrinkage:
    """Shrinkage baselines (arXiv:2511.03710): the reward less a mean shrunk towards the other prompts'."""
    kind: Literal["shrinkage"] = "shrinkage"


def shrinkage(reward_NG: Tensor) -> Tensor:
    """Subtract the shrunk mean of the others, [N, G]."""
    own_NG = leave_one_out(reward_NG)  # r - (m_i without j)
    lam_N1, target_N1 = amount(reward_NG)
    return (1 - lam_N1) * own_NG + lam_N1 * (reward_NG - target_N1)


def amount(reward_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Compute lam and the mean of the other prompts' means, each [N, 1]."""
    count_N = (~reward_NG.isnan()).sum(dim=1)
    known_N = count_N > 0
    mean_N = reward_NG.nanmean(dim=1).nan_to_num()
    square_N = (reward_NG - mean_N[:, None]).square().nansum(dim=1)
    noise_N = square_N / (count_N * (count_N - 1)).clamp(min=1)
    others_NN = known_N.double() - torch.diag(known_N.double())  # row i: the prompts but i
    others_N = others_NN.sum(dim=1)
    many_N = others_N.clamp(min=1)
    target_N = others_NN @ mean_N / many_N
    spread_N = (others_NN * (mean_N[None] - target_N[:, None]).square()).sum(dim=1) / many_N
    v_N = others_NN @ noise_N / many_N
    lam_N = others_N / (others_N + 1) * v_N / (v_N + spread_N).clamp(min=1e-12)
    return lam_N[:, None], target_N[:, None]


ADVANTAGES = {Shrinkage: lambda rewards, settings: shrinkage(rewards.total_NG)}
