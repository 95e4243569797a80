"""Pruning: which completions are trained on, and at what weight. Pure functions; this file imports only torch.

Dimension key:  N groups in one step,  G completions per group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pruned:
    keep_NG: Tensor     # bool
    weight_NG: Tensor   # 0 where not kept


def keep_all(adv_NG: Tensor) -> Pruned:
    return Pruned(torch.ones_like(adv_NG, dtype=torch.bool), torch.ones_like(adv_NG))


def keep_largest(adv_NG: Tensor, keep: int, scope: str) -> Pruned:
    """CPPO (arXiv:2503.22342): keep the completions with the largest |advantage|.

    scope   "group"  `keep` of every group, as the paper's eq. 8-10 have it
            "batch"  `keep` x N of the whole step, as the released code has it: groups whose rewards are all equal
                     are dropped whole, and groups with a rare outcome keep more
    Biased on purpose: survivors keep weight 1. Ties keep the earlier completion, on every device.
    """
    rows = adv_NG.abs() if scope == "group" else adv_NG.abs().flatten()[None]
    count = keep if scope == "group" else keep * len(adv_NG)
    if not 1 <= keep <= adv_NG.shape[1]:
        raise ValueError(f"prune.completions.keep={keep} must be in 1..{adv_NG.shape[1]} (rollout.group_size); "
                         "to train on all set prune.completions.kind=none")
    order = rows.argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order[:, :count], True).view_as(adv_NG)
    return Pruned(kept, kept.to(adv_NG.dtype))


# prune.completions.kind -> function of the advantages and that section of the config
COMPLETIONS = {
    "none": lambda adv_NG, settings: keep_all(adv_NG),
    "topk": lambda adv_NG, settings: keep_largest(adv_NG, settings.keep, settings.scope),
}
