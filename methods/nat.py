"""Train on the tokens of a completion before a random cut: NAT (arXiv:2603.06619) by prefix cutting.

What lies behind the cut is in no row, so it saves the forward pass too, and under causal attention the
log-probs before it are what they were. A token is kept with a known probability and weighs its inverse under
the denominators of whole completions (Horvitz-Thompson), so the mean over all cuts is the full gradient of
every loss that is a sum over tokens. The abstract has all this; the law of the cut is ours.

Dimension key:  N groups in one step,  G completions per group,  L tokens of one completion.
"""

from dataclasses import replace

import torch
from torch import Tensor

from methods import kinds
from records import Group

Tokens = list[list[Tensor]]  # of each completion, [N][G]: the weights of those tokens that are trained on


def kept_prob(length: int, whole: float, least: int) -> Tensor:
    """Compute the probability of each token that it is before the cut, [L], never below `whole`.

    With probability `whole` the completion is kept whole, else cut behind its least-th, its next, ... or its
    last token, each as likely. Of 4 tokens with least 2 and whole 0.4 are kept 1 1 0.8 0.6.
    """
    least = min(least, length)
    behind_L = torch.arange(length, 0, -1, dtype=torch.float64)  # cuts that keep a token
    return whole + (1 - whole) * (behind_L / (length - least + 1)).clamp(max=1)


def draw_cuts(groups: list[Group], settings: kinds.Tokens, seed: int) -> Tokens | None:
    """Draw a cut of every completion; returns the weights of the tokens before it, or None without cuts."""
    if settings.kind == "none" or not groups:
        return None
    shape, generator = (len(groups), len(groups[0].samples)), torch.Generator().manual_seed(seed)
    point_NG = torch.rand(shape, dtype=torch.float64, generator=generator).tolist()
    return [[weights(sample.length, settings.whole, settings.least, point)
             for sample, point in zip(group.samples, point_G, strict=True)]
            for group, point_G in zip(groups, point_NG, strict=True)]


def weights(length: int, whole: float, least: int, point: float) -> Tensor:
    """Weigh the tokens whose probability is above a point of [0, 1). If that is uniform, this is the law."""
    prob_L = kept_prob(length, whole, least)
    return 1 / prob_L[prob_L > point]


def shortened(groups: list[Group], tokens: Tokens) -> list[Group]:
    """Cut the completions off behind the tokens that are trained on."""
    return [replace(group, samples=tuple(
        replace(sample, ids=sample.ids[:len(weight_C)], logp=sample.logp[:len(weight_C)])
        for sample, weight_C in zip(group.samples, weight_GC, strict=True)))
        for group, weight_GC in zip(groups, tokens, strict=True)]
