"""An entropy bonus (loss.entropy): the entropy of the distribution that each token was drawn from.

It comes from the same logits as the token's log-prob, a chunk of them at a time: ChunkedLogProb (model.py)
takes the two functions here in place of its own. The bonus is a mean over all tokens of a mini-batch,
whatever loss.per is, as in TRL and in the releases of A*-PO and GRESO.

Dimension key:  C tokens with a target,  V vocabulary,  2: log-prob and entropy.
"""

import torch
from torch import Tensor

from model import logits_gradient


def with_entropy(logits_CV: Tensor, target_C: Tensor) -> Tensor:
    """Compute log softmax(logits)[target] and the entropy of softmax(logits), in nats, [C, 2]."""
    logp_CV = logits_CV.log_softmax(dim=-1)
    entropy_C = -(logp_CV.exp().mul_(logp_CV)).sum(dim=-1)
    return torch.stack([logp_CV.gather(1, target_C[:, None])[:, 0], entropy_C], dim=1)


def gradient(logits_CV: Tensor, target_C: Tensor, out_C2: Tensor, scale_C2: Tensor) -> Tensor:
    """Compute the gradient of both, each times its scale, [C, V]; overwrites the logits. That of the entropy
    H = -sum p log p is -p (log p + H).
    """
    (logp_C, entropy_C), (of_logp_C, of_entropy_C) = out_C2.unbind(dim=1), scale_C2.unbind(dim=1)
    total_CV = logits_gradient(logits_CV, target_C, logp_C, of_logp_C)
    logp_CV = logits_CV.sub_(logits_CV.logsumexp(dim=-1, keepdim=True))
    p_CV = logp_CV.exp()
    return total_CV.sub_(p_CV.mul_(logp_CV.add_(entropy_C[:, None])).mul_(of_entropy_C[:, None]))


ELEMENTWISE = with_entropy, gradient  # of model.Decoder
