"""Estimate generalised advantages (arXiv:1506.02438) of completions from a critic's values: pure functions.

Dimension key:  C completion tokens of one packed row, from  S completions.
"""

import torch
from torch import Tensor


def discounted_sum(delta_C: Tensor, lam_C: Tensor, segment_C: Tensor) -> Tensor:
    """Add up lam^k delta_{t+k} over the rest of each segment, in log2(C) vector steps.

    The sum of the next m terms, plus lam^m times the sum that begins m later, is the sum of the next 2m. With
    lam 1/2, delta 0 0 0 8 in one segment: sums of 1 term 0 0 0 8, of 2 terms 0 0 4 8, of 4 terms 1 2 4 8.
    """
    total_C = delta_C
    m = 1
    while m < len(delta_C):
        same_segment = segment_C[m:] == segment_C[:-m]
        later = torch.where(same_segment, lam_C[:-m] ** m * total_C[m:], 0.0)
        total_C = torch.cat([total_C[:-m] + later, total_C[-m:]])
        m *= 2
    return total_C


def gae(value_C: Tensor, end_S: Tensor, segment_C: Tensor, lam_S: Tensor) -> Tensor:
    """Estimate generalised advantages (arXiv:1506.02438) without discount for completions that may be cut,
    [C]: sum_k lam^k (r_{t+k} + V(s_{t+k+1}) - V(s_{t+k})), and only a last token has a reward.

    Args:    value_C    V(s_t), of the state before each token
             end_S      the reward of a completion that has ended, else the value of the state after its last
                        token. T-PPO's EGAE (arXiv:2506.15050, eq. 6 as it is reported) takes
                        V(s_l) := V(s_{l-1})
             segment_C  the completion of each token: 0, 1, ...
             lam_S      of each completion, in [0, 1]. At 1 an ended one has A = R - V(s_t): Monte Carlo
    Advantages are in units of the reward. A + V(s_t) is the lambda-return. Four tokens of values 0 0 1 1
    that earn 1: steps 0 1 0 0, so A = 1/2 1 0 0 at lambda 1/2, and R - V = 1 1 0 0 at lambda 1.
    """
    changes_C = segment_C[1:] != segment_C[:-1]
    last_C = torch.cat([changes_C, changes_C.new_ones(1)])
    next_C = torch.where(last_C, end_S[segment_C], value_C.roll(-1))
    return discounted_sum(next_C - value_C, lam_S[segment_C], segment_C)


def adaptive_lambda(length_S: Tensor, alpha: float) -> Tensor:
    """Compute VAPO's lambda by length, 1 - 1 / (alpha l), [S]: lambda^t then sums to alpha l tokens
    (arXiv:2504.05118, eq. 4-5).

    A reward reaches the first token of any response with weight exp(-1 / alpha). Up to 1 / alpha tokens the
    formula is not positive, and we take 0. A response that goes on counts its length so far (inferred).
    """
    return (1 - 1 / (alpha * length_S)).clamp(min=0)
