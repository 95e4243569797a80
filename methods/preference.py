"""Prefer the better completions of a group to the worse: DPO and its relatives in the online loop.

A completion counts by its log-ratio, log(pi / pi_ref) of all its tokens together. The losses below are means
over the groups offered, and their gradient is -sum_i A_i grad log pi(o_i) with an A_i that depends on all
log-ratios of the group. So `compare_pairs` finds these by a pass without gradient before each optimizer step;
the loss is the usual weighted sum, with f = 1 and loss.normalize=sum.

    preference        mean over pairs of  -w log sigma(beta margin) - beta eta log pi(chosen); the margin is
                      the difference of the log-ratios: DPO (arXiv:2305.18290) with w = 1 and eta = 0, RPO
                      (arXiv:2405.16436) with eta = advantage.likelihood, MADPO (arXiv:2510.05342) with
                      w = `madpo_weight`
    group_preference  -log sigma(beta / G sum_i A_i log-ratio_i) / beta, A_i the reward minus the mean of
                      the group: DGPO (arXiv:2510.08425), made for diffusion models and carried over by us

Dimension key:  N groups,  G completions per group (GG: chosen, rejected),
C completion tokens of one packed row,  S completions in it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from advantage import group_weight, mark_pairs, preference_advantage
from infra import dist
from loss import segment_sum
from records import Metrics, PreparedRow


@torch.no_grad()
def compare_pairs(
    learner: Any,
    minibatch: Any,
    prepared: list[PreparedRow],
) -> tuple[list[PreparedRow], Metrics]:
    """Replace the advantages in the rows of a mini-batch by the ones at the current policy.

    Collective. Returns the rows, and sums over its pairs, the same on every rank.
    """
    settings = learner.advantage
    reward_NG = minibatch.reward_NG
    ratio_NG = log_ratios(learner, prepared, reward_NG)
    if settings.kind == "preference":
        adv_NG = preference_advantage(ratio_NG, reward_NG, settings)
        chosen_NGG = mark_pairs(reward_NG, settings.pairs)
    else:
        adv_NG = group_weight(ratio_NG, minibatch.adv_NG, settings.beta) * minibatch.adv_NG
        chosen_NGG = mark_pairs(reward_NG, "all")
    compared = []
    for given in prepared:
        adv_S = torch.stack([adv_NG[n, g] for n, g in given.row.members]).to(given.adv_C)
        compared.append(replace(given, adv_C=adv_S[given.row.segment_C]))
    margin_NGG = ratio_NG[:, :, None] - ratio_NG[:, None, :]
    margin = margin_NGG[chosen_NGG]
    sums = {"pairs": len(margin), "margin": margin.sum().item(), "right": (margin > 0).sum().item()}
    return compared, sums


def log_ratios(learner: Any, prepared: list[PreparedRow], reward_NG: Tensor) -> Tensor:
    """Compute log(pi / pi_ref) of whole completions in nats, [N, G], from the rows of all ranks; 0 for
    completions in no row."""
    mine_NG = torch.zeros_like(reward_NG)
    for given in prepared:
        row = given.row
        gap_C = learner.log_probs(learner.policy, row) - given.ref_logp_C
        if row.counts:
            n_S, g_S = torch.tensor(row.members).T
            mine_NG[n_S, g_S] = segment_sum(gap_C.double(), row.segment_C).cpu()
    return torch.stack(dist.gather([mine_NG])).sum(dim=0)


def pair_metrics(steps: list[Metrics]) -> Metrics:
    """Compute means over the pairs of all optimizer steps; empty without pairs."""
    pairs = sum(sums["pairs"] for sums in steps)
    if not pairs:
        return {}
    return {
        "preference/margin": sum(sums["margin"] for sums in steps) / pairs,
        "preference/accuracy": sum(sums["right"] for sums in steps) / pairs,
    }
