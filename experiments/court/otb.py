"""Compute the optimal token baseline, OTB (arXiv:2602.07078): one baseline for every token.

    B_t = sum_j r_j W_jt / sum_j W_jt,    W_jt = sum_{s <= t} w_js,   j over the completions of the prompt

W stands for the squared norm of the gradient of the tokens up to t. The paper's w is 1 - 2 p + sum_v p_v^2,
which needs all probabilities; here w = (1 - p)^2, of the sampled token alone, from the engine's log-probs.

As released the sum is over all completions, the own one included, so that the gradient is smaller and biased
(own=True). Ours: leave the own one out. Then B_t depends on no token that it is used for, except by t <= own
length, and with loss.normalize=sum the gradient is unbiased. W stays as it is behind a completion's end.

The loop has one advantage for a completion, and for a token only a critic's. So OTB is measured
(experiments/measure_otb.py) and not trained with.
"""

import torch
from torch import Tensor

LEAST = 1e-4  # of w: a token that the engine was sure of counts a little


def energy(logp_GL: Tensor, length_G: Tensor) -> Tensor:
    """Add up (1 - p)^2 over the tokens so far, [G, L]; behind a completion's end it stays as it is."""
    inside_GL = torch.arange(logp_GL.shape[1]) < length_G[:, None]
    one_GL = (1 - logp_GL.exp()).square().clamp(min=LEAST) * inside_GL
    return one_GL.cumsum(dim=1)


def token_advantage(reward_G: Tensor, energy_GL: Tensor, own: bool) -> Tensor:
    """Subtract the baseline of each token, [G, L]."""
    worth_GL = reward_G[:, None] * energy_GL
    sum_GL, weight_GL = worth_GL.sum(dim=0).expand_as(worth_GL), energy_GL.sum(dim=0).expand_as(worth_GL)
    if not own:
        sum_GL, weight_GL = sum_GL - worth_GL, weight_GL - energy_GL
    return reward_G[:, None] - sum_GL / weight_GL


def padded(logp: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Lay completions over one another, [G, L], and count their tokens, [G]."""
    length_G = torch.tensor([len(of) for of in logp])
    logp_GL = torch.zeros(len(logp), int(length_G.max()), dtype=torch.float64)
    for row, of in zip(logp_GL, logp, strict=True):
        row[:len(of)] = torch.tensor(of, dtype=torch.float64)
    return logp_GL, length_G
