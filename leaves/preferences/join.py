"""Prefer the better completions of a group to the worse: DPO and its relatives in the online loop.

A completion counts by its log-ratio, log(pi / pi_ref) of all its tokens together. The losses below are means
over the groups offered, and their gradient is -sum_i A_i grad log pi(o_i) with an A_i that depends on all
log-ratios of the group. So `Pairs.compare` finds these by a pass without gradient before each optimizer step;
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

from advantage import centred
from infra import dist
from leaves.preferences.settings import GroupPreference, Preference
from loss import segment_sum
from records import Group, Metrics, PreparedRow, Rewards


def parts(cfg: Any, run: Any) -> Any:
    """Give a run advantages that are computed anew before each optimizer step."""
    pairs = Pairs()
    learner = replace(run.learner, before_step=(*run.learner.before_step, pairs.compare))
    return replace(run, learner=learner, advantage=initial_advantage,
                   after_update=(*run.after_update, pairs.metrics))


def initial_advantage(groups: list[Group], rewards: Rewards, settings: Preference | GroupPreference,
                      ) -> Tensor:
    """Compute the advantages at the initial policy, [N, G]: pruning reads them."""
    if settings.kind == "group_preference":
        return centred(rewards.total_NG)
    return preference_advantage(torch.zeros_like(rewards.total_NG), rewards.total_NG, settings)


class Pairs:
    """Compute the advantages of an update's mini-batches, and count their pairs."""

    def __init__(self):
        self.count = self.margin = self.right = 0

    @torch.no_grad()
    def compare(self, learner: Any, minibatch: Any, prepared: list[PreparedRow]) -> list[PreparedRow]:
        """Replace the advantages in a mini-batch's rows by the ones at the current policy. Collective."""
        settings, reward_NG = learner.advantage, minibatch.reward_NG
        ratio_NG = log_ratios(learner, prepared, reward_NG)
        if settings.kind == "preference":
            adv_NG = preference_advantage(ratio_NG, reward_NG, settings)
        else:
            adv_NG = group_weight(ratio_NG, minibatch.adv_NG, settings.beta) * minibatch.adv_NG
        margin = (ratio_NG[:, :, None] - ratio_NG[:, None, :])[mark_pairs(reward_NG)]
        self.count += len(margin)
        self.margin += margin.sum().item()
        self.right += (margin > 0).sum().item()
        return [replace(given, adv_C=given.row.of_members(adv_NG)[given.row.segment_C]) for given in prepared]

    def metrics(self, *_: object) -> Metrics:
        """Compute means over the pairs of all optimizer steps of an update, and begin anew; empty without
        pairs."""
        measured = {}
        if self.count:
            measured = {"preference/margin": self.margin / self.count,
                        "preference/accuracy": self.right / self.count}
        self.__init__()
        return measured


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
    return sum(dist.gather([mine_NG]))


def mark_pairs(reward_NG: Tensor) -> Tensor:
    """Mark the pairs (chosen, rejected) of each group, bool [N, G, G]: every two of different rewards; nan,
    without a reward, is in none."""
    return reward_NG[:, :, None] > reward_NG[:, None, :]


def madpo_weight(gap_NGG: Tensor, settings: Preference) -> Tensor:
    """Weigh pairs by the difference h >= 0 of their rewards: MADPO's sigma(c h) / sigma(h), as released.

    c falls from nearly c_max at h = 0, by way of 1 at `gap`, to c_min, so pairs of a small difference weigh
    more than 1 and others less. With 0/1 rewards every pair has the same weight.
    """
    c_min, c_max = settings.c_min, settings.c_max
    rise_NGG = (settings.steepness * (gap_NGG - settings.gap)).exp()
    c_NGG = c_min + (c_max - c_min) / (1 + (c_max - 1) / (1 - c_min) * rise_NGG)
    return (c_NGG * gap_NGG).sigmoid() / gap_NGG.sigmoid()


def preference_advantage(ratio_NG: Tensor, reward_NG: Tensor, settings: Preference) -> Tensor:
    """Compute A, [N, G], at these log-ratios; nan without a reward, and 0 in a group without pairs.

    A group's weight is its number of completions with a reward, as under loss.normalize=sum.
    """
    scored_NG = ~reward_NG.isnan()
    share_NGG = mark_pairs(reward_NG).to(ratio_NG.dtype)
    share_NGG = share_NGG / share_NGG.sum(dim=(1, 2), keepdim=True).clamp(min=1)
    behind_NGG = ratio_NG[:, None, :] - ratio_NG[:, :, None]
    pull_NGG = settings.beta * (settings.beta * behind_NGG).sigmoid()
    if settings.gap:
        gap_NGG = (reward_NG[:, :, None] - reward_NG[:, None, :]).nan_to_num().clamp(min=0)
        pull_NGG = pull_NGG * madpo_weight(gap_NGG, settings)
    pull_NGG = share_NGG * pull_NGG
    adv_NG = pull_NGG.sum(dim=2) - pull_NGG.sum(dim=1)
    adv_NG = adv_NG + settings.beta * settings.likelihood * share_NGG.sum(dim=2)
    return (scored_NG.sum(dim=1, keepdim=True) * adv_NG).masked_fill(~scored_NG, torch.nan)


def group_weight(ratio_NG: Tensor, adv_NG: Tensor, beta: float) -> Tensor:
    """Compute DGPO's weight of each group, sigma(-(beta / G) sum_i A_i log-ratio_i), [N, 1]: 1/2 at the
    reference, and less the further the policy tells the group's better completions from its worse."""
    count_N1 = (~adv_NG.isnan()).to(adv_NG.dtype).sum(dim=1, keepdim=True).clamp(min=1)
    return (-beta / count_N1 * (adv_NG * ratio_NG).nansum(dim=1, keepdim=True)).sigmoid()
