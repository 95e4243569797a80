"""Prefer the better completions of a group to the worse: DPO and its kin in the online loop.

A completion counts by its log-ratio, log(pi / pi_ref) of all its tokens together. The losses below are means
over the groups offered, and their gradient is -sum_i A_i grad log pi(o_i) with an A_i that depends on all
log-ratios of the group. So a pass without gradient finds these before every optimizer step (`compare`), and
the loss is the usual weighted sum, with f = 1 and loss.per=sum.

    preference        mean over pairs of  -w log sigma(beta margin) - eta log pi(chosen), with the difference
                      of the log-ratios as margin: DPO (arXiv:2305.18290) with w = 1 and eta = 0, RPO
                      (arXiv:2405.16436) with eta = advantage.likelihood, MADPO (arXiv:2510.05342) with
                      w = `adaptive_weight`
    group_preference  -log sigma(beta / G sum_i A_i log-ratio_i) / beta, A_i the reward less the group's mean:
                      DGPO (arXiv:2510.08425), made for diffusion models and carried over by us

Dimension key:  N groups,  G completions per group (written twice where it is chosen, rejected),
C completion tokens of one packed row,  S completions in it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from advantage import chosen_of, group_weight, of_pairs
from infra import dist
from loss import segment_sum
from records import PreparedRow


@torch.no_grad()
def compare(learner: Any, minibatch: Any, prepared: list[PreparedRow],
            ) -> tuple[list[PreparedRow], dict[str, float]]:
    """Put the advantages at the policy of the moment in place of those in the rows of a mini-batch.

    Collective. Returns the rows, and sums over its pairs, the same on every rank.
    """
    settings, reward_NG = learner.advantage, minibatch.reward_NG
    ratio_NG = log_ratios(learner, prepared, reward_NG)
    if settings.kind == "preference":
        adv_NG = of_pairs(ratio_NG, reward_NG, settings)
        chosen_NGG = chosen_of(reward_NG, settings.pairs)
    else:
        adv_NG = group_weight(ratio_NG, minibatch.adv_NG, settings.beta) * minibatch.adv_NG
        chosen_NGG = chosen_of(reward_NG, "all")
    compared = [replace(given, adv_C=over_tokens(adv_NG, given)) for given in prepared]
    margin = (ratio_NG[:, :, None] - ratio_NG[:, None, :])[chosen_NGG]
    return compared, {"pairs": len(margin), "margin": margin.sum().item(), "right": (margin > 0).sum().item()}


def log_ratios(learner: Any, prepared: list[PreparedRow], reward_NG: Tensor) -> Tensor:
    """Compute log(pi / pi_ref) of whole completions in nats, [N, G], from the rows of all ranks; 0 for those
    in no row."""
    mine_NG = torch.zeros_like(reward_NG)
    for given in prepared:
        row = given.row
        gap_C = learner.log_probs(learner.policy, row) - given.ref_logp_C
        if row.counts:
            n_S, g_S = torch.tensor(row.members).T
            mine_NG[n_S, g_S] = segment_sum(gap_C.double(), row.segment_C).cpu()
    return torch.stack(dist.gather_rows(mine_NG)).sum(dim=0)


def over_tokens(adv_NG: Tensor, given: PreparedRow) -> Tensor:
    """Lay advantages out over the tokens of a row, [C]."""
    adv_S = torch.stack([adv_NG[n, g] for n, g in given.row.members])
    return adv_S.to(given.adv_C)[given.row.segment_C]


def pair_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Compute means over the pairs of all optimizer steps; nothing where there are none."""
    total = {name: sum(sums[name] for sums in steps) for name in ("pairs", "margin", "right")}
    if not total["pairs"]:
        return {}
    return {"preference/margin": total["margin"] / total["pairs"],
            "preference/accuracy": total["right"] / total["pairs"]}
