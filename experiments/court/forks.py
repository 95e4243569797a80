"""Train on the fifth of the tokens with the highest entropy (arXiv:2506.01939, "80/20").

The entropy is that of the policy before the update, over the vocabulary. The fifth is a row's, and rows hold
the completions that have a gradient: in the kept runs two thirds of a step's tokens. Denominators stay those
of all tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from config import Loss
from records import Row

SHARE = 0.2  # of the tokens that keep their gradient
ENTROPY = True  # `weigh` gets entropies


def weigh(rows: Sequence[Row], logp: Sequence[Tensor], entropy: Sequence[Tensor], loss: Loss) -> list[Tensor]:
    """Weigh each token 1 or 0, [C] of each row."""
    return [highest(entropy_C.detach(), SHARE) for entropy_C in entropy]


def highest(entropy_C: Tensor, share: float) -> Tensor:
    """Mark the share of the largest numbers by 1, at least one, and others by 0."""
    count = max(1, round(share * len(entropy_C)))
    marked_C = torch.zeros_like(entropy_C)
    marked_C[entropy_C.topk(count).indices] = 1
    return marked_C
