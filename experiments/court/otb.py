"""Compute the optimal token baseline, OTB (arXiv:2602.07078): one baseline for every token.

    B_t = sum_j r_j W_jt / sum_j W_jt,    W_jt = sum_{s <= t} w_js,   j over the completions of the prompt

W stands for the squared norm of the gradient of the tokens up to t. The paper's w is 1 - 2 p + sum_v p_v^2,
which needs all probabilities; here w = (1 - p)^2, of the sampled token alone, from the engine's log-probs.

As released the sum is over all completions, the own one included, so that the gradient is smaller and biased
(own=True). Ours: leave the own one out. Then B_t depends on no token that it is used for, except by t <= own
length, and with loss.normalize=sum the gradient is unbiased. W stays as it is behind a completion's end.

Trained with, the place for token weights (loss.weigh) turns leave-one-out's advantages into these.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from collect import Sampler
from config import Config, ConfigError, Loss
from history import PromptHistory
from records import Row

LEAST = 1e-4  # of w: a token that the engine was sure of counts a little


def energy(logp_GL: Tensor, length_G: Tensor) -> Tensor:
    """Add up (1 - p)^2 over the tokens so far, [G, L]; behind a completion's end it stays as it is."""
    inside_GL = torch.arange(logp_GL.shape[1], device=logp_GL.device) < length_G[:, None]
    one_GL = (1 - logp_GL.exp()).square().clamp(min=LEAST) * inside_GL
    return one_GL.cumsum(dim=1)


def token_advantage(reward_G: Tensor, energy_GL: Tensor, own: bool) -> Tensor:
    """Subtract the baseline of each token, [G, L]."""
    worth_GL = reward_G[:, None] * energy_GL
    sum_GL, weight_GL = worth_GL.sum(dim=0).expand_as(worth_GL), energy_GL.sum(dim=0).expand_as(worth_GL)
    if not own:
        sum_GL, weight_GL = sum_GL - worth_GL, weight_GL - energy_GL
    return reward_G[:, None] - sum_GL / weight_GL


def padded(logp: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Lay the log-probs of completions over one another, [G, L], and count their tokens, [G]."""
    length_G = torch.tensor([len(logp_L) for logp_L in logp], device=logp[0].device)
    return pad_sequence([logp_L.double() for logp_L in logp], batch_first=True), length_G


def wrap(cfg: Config, history: PromptHistory, sampler: Sampler) -> tuple[PromptHistory, Sampler]:
    """Replace neither. Raises ConfigError for settings under which a row does not tell the rewards."""
    if (cfg.advantage.kind, cfg.prune.completions.kind) != ("leave_one_out", "none"):
        raise ConfigError("otb needs advantage.kind=leave_one_out and prune.completions.kind=none")
    return history, sampler


def weigh(rows: Sequence[Row], logp: Sequence[Tensor], entropy: Sequence[None], loss: Loss,
          own: bool = False) -> list[Tensor]:
    """Compute each token's factor, [C] of each row: its reward less its baseline, over the completion's
    advantage, which the loss multiplies by it."""
    return [factors(row, own) for row in rows]


def factors(row: Row, own: bool) -> Tensor:
    """Compute the factors of a row's tokens, [C]. Raises ConfigError for a row with a part of a group."""
    factor_C = torch.ones_like(row.adv_C)
    if not row.counts:
        return factor_C
    members = defaultdict(list)
    for s, (n, g) in enumerate(row.members):
        members[n].append((g, s))
    for of_group in members.values():
        places = [(row.segment_C == s).nonzero()[:, 0] for _, s in of_group]
        G = len(places)
        first_G = torch.stack([row.adv_C[place[0]] for place in places]).double()
        if sorted(g for g, _ in of_group) != list(range(G)) or abs(first_G.sum()) > 1e-5:
            raise ConfigError("otb needs one process and a pack.capacity that holds a step: a row has a part "
                              "of a group")
        reward_G = first_G * (G - 1) / G  # less the group's mean, which a baseline takes out anyway
        logp_GL, length_G = padded([row.sampled_logp_C[place] for place in places])
        adv_GL = token_advantage(reward_G, energy(logp_GL, length_G), own)
        for place, adv_L, adv in zip(places, adv_GL, first_G, strict=True):
            factor_C[place] = (adv_L[:len(place)] / adv).to(factor_C.dtype)
    return factor_C
