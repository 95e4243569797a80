"""Train on the completions of a group whose rewards vary most: PODS (arXiv:2504.13818).

Dimension key:  N groups in one step,  G completions per group.
"""

from dataclasses import replace

import torch
from torch import Tensor

from records import Rewards

SLACK, TINY = 1 + 1e-9, 1e-12  # equal variances are not larger, however they are rounded


def max_variance(reward_NG: Tensor, keep: int) -> Tensor:
    """Mark the `keep` completions of each group whose rewards have the largest variance, bool [N, G]. Biased.

    One such set is of the i highest and the keep - i lowest rewards, for some i, so keep + 1 are tried. As
    released, the highest alone come first, then i = 0, 1, ..., and the first of equals wins. Among equal
    rewards the earlier completions count as higher. One without a reward, nan, is no candidate.
    """
    kept_NG = torch.zeros_like(reward_NG, dtype=torch.bool)
    for kept_G, reward_G in zip(kept_NG, reward_NG, strict=True):
        order = reward_G.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        order = order[:int((~reward_G.isnan()).sum())].tolist()
        m, best, largest = min(keep, len(order)), [], -1.0
        for i in (m, *range(m)) if m else ():
            ends = order[:i] + order[len(order) - m + i:]
            if (variance := reward_G[ends].var(correction=0).item()) > largest * SLACK + TINY:
                best, largest = ends, variance
        kept_G[best] = True
    return kept_NG


def among_kept(rewards: Rewards, groups: list[int], keep_NG: Tensor) -> Rewards:
    """Leave only what is kept of these groups a reward: advantages are then those of groups that have no
    others, as in the release."""
    components = {name: x_NG[groups].masked_fill(~keep_NG, torch.nan)
                  for name, x_NG in rewards.components.items()}
    return replace(rewards, components=components)
