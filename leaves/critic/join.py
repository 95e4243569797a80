"""Train a critic for PPO, VAPO and T-PPO (advantage.kind=gae): its model, its advantages, and its steps.

It learns from all tokens of the completions that have ended, also if the policy is trained on fewer: pruning
does not drop any of them, and in T-PPO (arXiv:2506.15050, as reported) they were sampled over several steps.

Dimension key:  N groups per step,  G completions per group,  C completion tokens of one packed row, from
S completions,  K completions that have ended.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from advantage import group_norm
from infra import dist
from infra.weights import read_shape
from learner import (
    Learner,
    NotFinite,
    learning_rate,
    make_optimizers,
    optimizer_step,
    out_of_memory,
    shard_empty,
)
from leaves.critic.gae import adaptive_lambda, gae
from leaves.critic.settings import Critic, Gae
from metrics import Clock
from model import BACKENDS, Attend, Decoder, at_least_float32
from pack import Minibatch
from records import Group, Metrics, PreparedRow, Rolled, Row, frozen, lengths, pending
from reward import reward_range
from settings.kinds import Optim


class ValueModel(nn.Module):
    """The value V(s_t) in units of the reward: a copy of the policy's backbone with a scalar head.

    The head starts at 0, so every value is at first the middle of the rewards' range (inferred: VAPO,
    arXiv:2504.05118, starts from a reward model).
    """

    def __init__(self, backbone: Decoder, middle: float):
        super().__init__()
        self.middle, self.backbone = middle, backbone
        self.value = nn.Linear(backbone.shape.hidden_size, 1)

    def forward(self, ids_T: Tensor, position_T: Tensor, attend: Attend, predict_C: Tensor) -> Tensor:
        """Compute values of the states after the tokens at predict_C, [C]."""
        hidden_CD = self.backbone.hidden(ids_T, position_T, attend)[predict_C]
        return self.middle + self.value(at_least_float32(hidden_CD))[:, 0]


@frozen
class CriticLearner:
    """The value model in training, and its settings."""

    model: ValueModel            # sharded over the ranks
    optimizers: Sequence[torch.optim.Optimizer]
    settings: Critic
    advantage: Gae
    optim: Optim                 # as the policy's, with a rate of its own, constant after a warm-up

    def values(self, learner: Learner, row: Row) -> tuple[Tensor, Tensor]:
        """Compute values of the states before completion tokens, [C], and behind each completion, [S]."""
        last_S = row.segments.start_2S[0, 1:].long() - 1
        attend = BACKENDS[learner.backend](row.segments)
        value = self.model(row.ids_T, row.position_T, attend, torch.cat([row.predict_C, last_S]))
        return value.split([len(row.predict_C), len(last_S)])


def parts(cfg: Any, run: Any) -> Any:
    """Load a critic on the model's backbone, spread over the ranks, and set it beside the policy."""
    if cfg.advantage.kind != "gae":
        return run
    learner, source = run.learner, run.task.source
    middle = sum(reward_range(cfg.reward.weights)) / 2
    wide = torch.promote_types(learner.dtype, torch.float32)
    with torch.device("meta"):
        backbone = Decoder(replace(read_shape(source), tied=True))  # tied: without a language head of its own
        model = ValueModel(backbone, middle).to(wide)
    if learner.dtype != wide:  # not rounded as the backbone is
        dist.shard(model.value, (), learner.device, wide, cfg.optim.offload)
    run.weights.adapt(backbone, learner.dtype)
    shard_empty(model, backbone, cfg.model, cfg.optim.offload, learner.device, learner.dtype)
    run.weights.fill(backbone, source)
    for p in model.value.parameters():
        nn.init.zeros_(p)
    own = cfg.critic
    optim = replace(cfg.optim, lr=own.lr, warmup_steps=own.warmup_steps, schedule="constant")
    critic = CriticLearner(model, make_optimizers(model, optim), own, cfg.advantage, optim)
    learner = replace(
        learner,
        first=own.pretrain_steps,
        roles=learner.roles | {"critic": (model, critic.optimizers)},
        before_update=(*learner.before_update, partial(set_advantages, critic)))
    return replace(
        run,
        learner=learner,
        # Pruning reads these, [N, G]; the loss takes the critic's of every token.
        advantage=lambda groups, rewards, settings: group_norm(rewards.total_NG, correction=1, eps=1e-4),
        after_update=(*run.after_update, partial(fit_values, critic)))


@torch.no_grad()
def set_advantages(critic: CriticLearner, learner: Learner, minibatch: Minibatch, prepared: list[PreparedRow],
                   ) -> list[PreparedRow]:
    """Put `gae` by the critic's values before its update into a mini-batch's rows."""
    settings, changed = critic.advantage, []
    for given in prepared:
        row = given.row
        value_C, after_S = critic.values(learner, row)
        last_S = row.segment_C.bincount().cumsum(0) - 1  # place of each completion's last token
        cut_S = value_C[last_S] if settings.bootstrap == "prev" else after_S
        samples = [minibatch.groups[n].samples[g] for n, g in row.members]
        goes_on_S = torch.tensor([sample.pending for sample in samples], device=value_C.device)
        end_S = torch.where(goes_on_S, cut_S, row.of_members(minibatch.reward_NG).to(cut_S))
        lam_S = torch.full_like(end_S, settings.lam)
        if settings.alpha:
            lam_S = adaptive_lambda(end_S.new_tensor([sample.own for sample in samples]), settings.alpha)
        changed.append(replace(given, adv_C=gae(value_C, end_S, row.segment_C, lam_S)))
    return changed


def fit_values(critic: CriticLearner, learner: Learner, rolled: Rolled, step: int, clock: Clock) -> Metrics:
    """Take all optimizer steps of the critic on one rollout: half the mean squared error over tokens.

    Takes no step if no completion has ended. The explained variance, 1 - Var(R - V) / Var(R) over tokens,
    uses the values before a mini-batch was learnt from, and the rewards, also if the target is another.
    Raises NotFinite.
    """
    sums = dict.fromkeys(("loss", "tokens", "reward", "reward_squared", "error", "error_squared"), 0.0)
    norms = []
    rate = learning_rate(step, critic.optim, learner.steps)
    with clock.phase("pack"):
        packed = [[(row, row.of_members(minibatch.reward_NG)) for row in learner.rows(minibatch)]
                  for minibatch in split_minibatches(critic, learner, rolled, step)]
    with clock.phase("score"):
        batches = [[(*given, critic_target(critic, learner, *given)) for given in batch] for batch in packed]
    with clock.phase("critic"):
        for epoch in range(critic.settings.epochs):
            for batch in batches:
                try:
                    for row, reward_S, target_C in batch:
                        loss, value_C = add_value_gradient(critic, learner, row, target_C)
                        sums["loss"] += loss
                        if epoch == 0 and row.counts:  # not one that only keeps the rank in step
                            reward_C = reward_S[row.segment_C].double()
                            error_C = reward_C - value_C.double()
                            sums["tokens"] += len(reward_C)
                            for name, x_C in (("reward", reward_C), ("error", error_C)):
                                sums[name] += x_C.sum()
                                sums[f"{name}_squared"] += x_C.square().sum()
                except torch.OutOfMemoryError as error:
                    raise out_of_memory([row for row, *_ in batch], learner.longest, error) from None
                norms.append(optimizer_step(
                    critic.model, critic.optimizers, rate, critic.optim.clip_norm, sums["loss"],
                    lambda what: NotFinite(f"critic's {what}", step + 1, rolled)))
    return {"critic/lr": rate} | value_metrics(sums, norms)


def split_minibatches(critic: CriticLearner, learner: Learner, rolled: Rolled, step: int) -> list[Minibatch]:
    """Split the ended completions with a reward by a seeded draw. A token weighs as much as its prompt, over
    the sum of all: prompts that are kept make up for the skipped ones as they do for the policy.
    """
    groups = [Group(group.prompt, tuple(sample.whole for sample in group.samples)) for group in rolled.groups]
    reward_NG = rolled.rewards.total_NG
    G = reward_NG.shape[1]
    ended_NG = ~pending(groups, G) & ~reward_NG.isnan()
    len_NG = lengths(groups, G)
    weight_N1 = torch.tensor([[draw.weight] for draw in rolled.kept], dtype=torch.float64)
    ended_K = ended_NG.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(dist.seed_for(learner.seed, step, "critic"))
    shuffled_K = ended_K[torch.randperm(len(ended_K), generator=generator)]
    minibatches = []
    for members_K in filter(len, shuffled_K.tensor_split(critic.settings.minibatches)):
        keep_NG = torch.zeros_like(ended_NG)
        keep_NG.view(-1)[members_K] = True
        weight_NG = keep_NG * weight_N1
        weight_NG = weight_NG / (len_NG * weight_NG).sum()
        minibatches.append(Minibatch(groups, keep_NG, torch.zeros_like(reward_NG), weight_NG, reward_NG))
    return minibatches


@torch.no_grad()
def critic_target(critic: CriticLearner, learner: Learner, row: Row, reward_S: Tensor) -> Tensor:
    """Compute the lambda-return of each token, [C]: the reward at advantage.lam_critic=1 (Monte Carlo)."""
    lam = critic.advantage.lam_critic
    if lam == 1:
        return reward_S[row.segment_C]
    value_C, _ = critic.values(learner, row)
    reward_S = reward_S.to(value_C)
    return value_C + gae(value_C, reward_S, row.segment_C, torch.full_like(reward_S, lam))


def add_value_gradient(critic: CriticLearner, learner: Learner, row: Row, target_C: Tensor,
                       ) -> tuple[Tensor, Tensor]:
    """Add a row's gradient to the critic's, of half the weighted sum of squared errors; returns this loss and
    the values, [C]."""
    value_C, _ = critic.values(learner, row)
    loss = (row.weight_C * (value_C - target_C).square()).sum() / 2
    loss.backward()
    return loss.detach(), value_C.detach()


def value_metrics(sums: dict[str, Tensor | float], norms: list[float]) -> Metrics:
    """Compute means over all ranks. Collective. Without tokens or variance, metrics that need them are
    absent."""
    total = dist.sum_over_ranks(sums)
    tokens = total["tokens"]
    metrics = {"critic/tokens": int(tokens)}
    if not norms:
        return metrics
    reward, error, square = (total[name] / tokens for name in ("reward", "error", "reward_squared"))
    variance = square - reward ** 2
    metrics |= {"critic/loss": total["loss"] / len(norms), "critic/grad_norm": sum(norms) / len(norms),
                "critic/value": reward - error}
    if variance > 1e-12 * square:  # equal rewards vary by rounding alone
        unexplained = total["error_squared"] / tokens - error ** 2
        metrics["critic/explained_variance"] = 1 - unexplained / variance
    return metrics
