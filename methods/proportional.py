"""Draw items with probability in proportion to their size: completions in `pps` of prune.py, prompts by
`rollout_prob`.

Dimension key:  K items of which some are drawn.
"""

import torch
from torch import Tensor

DUST = 1e-12  # a size below so much of the largest is what rounding leaves, and counts as 0


def inclusion(size_K: Tensor, count: float) -> Tensor:
    """Compute probabilities [K] in proportion to size, at most 1 each, that add up to `count`.

    An item whose probability would pass 1 gets 1, largest first, and the others divide the places left in
    proportion to their size. With at most `count` sizes above 0, each of those gets 1; DUST counts as 0. To
    keep 2 of the sizes 4 2 1 1: the first would get 2 x 4/8 = 1 and is certain, the others divide 1 place:
    1 1/2 1/4 1/4.
    """
    sorted_K, order_K = size_K.double().sort(descending=True, stable=True)
    sorted_K = sorted_K * (sorted_K >= DUST * sorted_K[:1])
    tail_K = sorted_K.flip(0).cumsum(0).flip(0)  # this size and all smaller ones
    places_K = count - torch.arange(len(size_K), dtype=torch.float64)
    certain = int((places_K * sorted_K >= tail_K).logical_and(places_K > 0).cumprod(0).sum())
    prob_K = (sorted_K > 0).double()
    if certain < count and certain < len(size_K) and tail_K[certain] > 0:
        prob_K[certain:] = places_K[certain] * sorted_K[certain:] / tail_K[certain]
    return torch.zeros_like(prob_K).scatter_(0, order_K, prob_K)


def systematic(prob_K: Tensor, order_K: Tensor, start: float) -> Tensor:
    """Draw items by systematic sampling, bool [K]: they lie end to end in this order, each as long as its
    probability, and those are kept in which one of the points start, start + 1, ... lies (start in [0, 1)).

    Over a uniform start each item is kept with exactly its probability, and always as many are kept as the
    probabilities add up to. Probabilities 1/2 1/2 3/4 1/4 in that order end at 1/2 1 7/4 2: start 0.6 has its
    points at 0.6 and 1.6 and keeps the second and third item, start 0.2 the first and third.
    """
    chance_K = order_K[prob_K[order_K] < 1]
    ends = prob_K[chance_K].cumsum(0)
    if len(ends):
        ends[-1] = ends[-1].round()  # an integer but for rounding
    points = (ends - start).ceil()  # how many lie before each end
    keep_K = prob_K >= 1
    keep_K[chance_K] = points.diff(prepend=points.new_zeros(1)) > 0
    return keep_K


def rollout_prob(size_K: Tensor, share: float, floor: float) -> Tensor:
    """Compute each prompt's probability of a rollout, [K], in proportion to its size, the mean |A| of its
    newest group: with 0/1 rewards over their deviation that is 2 sqrt(p (1 - p)), p the share of right ones.

    Of the prompts that were rolled out before, `share` are expected to be again; one that never was is
    certain. A size counts as at least `floor` times their mean, so that a prompt that showed nothing the last
    time comes back, and no weight is above (1 + floor) / (share floor).
    """
    seen_K, prob_K = ~size_K.isnan(), torch.ones_like(size_K, dtype=torch.float64)
    if not seen_K.any():
        return prob_K
    size_S = size_K[seen_K]
    floored_S = size_S.clamp(min=floor * size_S.mean()) if size_S.any() else torch.ones_like(size_S)
    prob_K[seen_K] = inclusion(floored_S, share * len(size_S))
    return prob_K
