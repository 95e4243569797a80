"""Bound how far a token's probability may move: Divergence PPO (arXiv:2602.04879), its two binary masks.

They are trust regions of loss.TRUST: each returns the factor f of every token, without gradient.

Dimension key:  C completion tokens in one packed row.
"""

import torch
from torch import Tensor

from records import Move

GUARD = 1e-8  # added to 1 - p, as by the authors: in float32 the p of a likely token may be rounded to 1


def total_variation(move: Move, divergence: float, cap: float) -> Tensor:
    """Return min(ratio, cap), or 0 where a token's probability has moved by more than `divergence` in the
    advantage's direction. The probability of a rare token may double, that of a frequent one may not.
    """
    new_C, old_C = move.logp_C.detach().exp(), move.old_logp_C.exp()
    return capped(move, (new_C - old_C) * move.adv_C.sign() > divergence, cap)


def binary_kl(move: Move, divergence: float, cap: float) -> Tensor:
    """Do as `total_variation`, with the binary KL(old, new) in nats in its place."""
    new_C, old_C = move.logp_C.detach().exp(), move.old_logp_C.exp()
    others_C = (1 - old_C) * ((1 - old_C + GUARD) / (1 - new_C + GUARD)).log()
    kl_C = old_C * (move.old_logp_C - move.logp_C.detach()) + others_C
    return capped(move, (kl_C > divergence) & ((new_C - old_C) * move.adv_C > 0), cap)


def capped(move: Move, stopped_C: Tensor, cap: float) -> Tensor:
    return torch.where(stopped_C, 0.0, (move.logp_C - move.old_logp_C).detach().exp().clamp(max=cap))
