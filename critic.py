"""The critic's steps on one rollout: targets, rows of its own, epochs of mini-batches.

It learns from completions that are done, from all of their tokens and whatever the policy is trained on: pruning of
completions does not touch them, and with rollout.window they were sampled over several steps (T-PPO, arXiv:2506.15050,
as reported).

Dimension key:  N groups per step,  G completions per group,  C completion tokens of one packed row,  B rows of one
mini-batch on this rank.
"""

from dataclasses import replace

import torch
from torch import Tensor

import dist
import metrics
from advantage import gae
from config import Config, Optim
from loss import value_loss
from pack import Row
from sample import Elsewhere, Group, Rolled, Sample, lengths, pending
from update import Learner, descend, laid_out, learning_rate


def optim(cfg: Config) -> Optim:
    """Settings of the critic's optimizer: a rate of its own, constant after a warm-up, and the rest as in `optim`."""
    return replace(cfg.optim, lr=cfg.critic.lr, warmup_steps=cfg.critic.warmup_steps, schedule="constant")


def fit(learner: Learner, rolled: Rolled, step: int, clock: metrics.Clock) -> dict[str, float]:
    """All optimizer steps of the critic on one rollout: half the mean squared error over the tokens of a mini-batch.

    None where fewer than critic.min_samples completions are done. The explained variance, 1 - Var(R - V) / Var(R) over
    tokens, is of the values before a mini-batch was learnt from, and of rewards whatever the target is. Raises
    NotFinite.
    """
    cfg, critic, optimizer = learner.cfg, learner.critic, learner.critic_optimizer
    groups = [Group(group.prompt, tuple(map(from_its_start, group.samples)), group.owners) for group in rolled.groups]
    done_NG = ~pending(groups, rolled.reward_NG.shape[1])
    count, sums, norms = int(done_NG.sum()), metrics.ValueSums(), []
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, optim(cfg), cfg.steps)
    if count < cfg.critic.min_samples:
        return sums.metrics(norms, optimizer.param_groups[0]["lr"])
    with clock.phase("pack"):
        batches = [rows_of(learner, groups, keep_NG, rolled.reward_NG) for keep_NG in split(done_NG, cfg, step)]
    with clock.phase("score"):
        targets = [[target(learner, row) for row in rows] for rows in batches]
    with clock.phase("critic"):
        for epoch in range(cfg.critic.epochs):
            for rows, target_B in zip(batches, targets, strict=True):
                for row, target_C in zip(rows, target_B, strict=True):
                    value_C, _ = learner.values(row)
                    loss = value_loss(value_C, target_C, row.weight_C)
                    loss.backward()
                    sums.add(loss.detach(), value_C.detach(), row.reward_S[row.segment_C], row.weight_C > 0,
                             first_pass=epoch == 0)
                norms.append(descend(critic, optimizer, cfg.optim.clip_norm, sums.sums["loss"], "critic's ", step,
                                     rolled))
    return sums.metrics(norms, optimizer.param_groups[0]["lr"])


def from_its_start(sample: Sample | Elsewhere) -> Sample | Elsewhere:
    """A completion that is done as one whose tokens are all to be learnt from."""
    begun = isinstance(sample, Sample) and sample.start and not sample.pending
    return replace(sample, start=0) if begun else sample


def split(done_NG: Tensor, cfg: Config, step: int) -> list[Tensor]:
    """bool [N, G] of each mini-batch: a seeded split of the completions that are done, none of them empty."""
    done_K = done_NG.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(dist.seed_for(cfg.seed, step, "critic"))
    shuffled_K = done_K[torch.randperm(len(done_K), generator=generator)]
    parts = [part_K for part_K in shuffled_K.tensor_split(cfg.critic.minibatches) if len(part_K)]
    return [torch.zeros(done_NG.numel(), dtype=torch.bool).index_fill(0, part_K, True).view_as(done_NG)
            for part_K in parts]


def rows_of(learner: Learner, groups: list[Group], keep_NG: Tensor, reward_NG: Tensor) -> list[Row]:
    """This rank's rows of one mini-batch; every token weighs one over their number."""
    tokens = (lengths(groups, keep_NG.shape[1]) * keep_NG).sum()
    weight_NG = keep_NG.to(reward_NG.dtype) / tokens
    none_NG = torch.zeros_like(reward_NG)
    return laid_out(learner, groups, keep_NG, none_NG, weight_NG, reward_NG, none_NG)


@torch.no_grad()
def target(learner: Learner, row: Row) -> Tensor:
    """[C] the lambda-return of each token: the reward itself at advantage.lam_critic=1 (Monte Carlo)."""
    lam, reward_C = learner.cfg.advantage.lam_critic, row.reward_S[row.segment_C]
    if lam == 1:
        return reward_C
    value_C, _ = learner.values(row)
    reward_S = row.reward_S.to(value_C)
    return value_C + gae(value_C, reward_S, row.segment_C, torch.full_like(reward_S, lam))
