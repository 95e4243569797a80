"""The update on one rollout: token weights and rows made once, then epochs of mini-batches, forward, backward, step.

Dimension key:  N groups per step,  G completions per group,  C completion tokens of one packed row, which are those of
S completions,  B rows of one mini-batch on this rank.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import dist
import metrics
from advantage import adaptive_lambda, gae
from config import Config, Optim
from exchange import fetch
from loss import TRUST, Move, engine_weight, k3, likelihood_weight, residual, token_weight
from model import BACKENDS, Critic, Decoder
from pack import Row, build, pack
from prune import Pruned
from sample import Batch, Group, Rolled, lengths


class NotFinite(Exception):
    """A loss or a gradient that is no finite number, before the optimizer step that it would have spoilt."""

    def __init__(self, what: str, step: int, records: Batch | Rolled):
        super().__init__(f"{what} in step {step} is not finite")
        self.step, self.records = step, records


@dataclass(frozen=True, slots=True)
class Learner:
    """What an update works with: the model in training and how packed rows pass through it."""

    cfg: Config
    device: torch.device
    dtype: torch.dtype          # of the computation; the weights are float32 (float64 where that is asked for)
    backend: str                # a key of model.BACKENDS
    policy: Decoder             # sharded over the ranks, as the moments in the optimizer are
    reference: Decoder | None   # frozen copy of the initial policy, where the loss needs one; sharded too
    optimizer: torch.optim.Optimizer
    critic: Critic | None = None  # with advantage.kind=gae; sharded too
    critic_optimizer: torch.optim.Optimizer | None = None

    def log_probs(self, model: Decoder, row: Row) -> Tensor:
        """[C] log-probs in nats of the row's completion tokens."""
        attend = BACKENDS[self.backend](row.offsets, row.max_len)
        return model(row.ids_T, row.position_T, attend, row.predict_C, row.target_C, self.cfg.rollout.temperature,
                     self.cfg.model.logp_chunk)

    def values(self, row: Row) -> tuple[Tensor, Tensor]:
        """[C] the critic's values of the states before the row's completion tokens, and [S] behind the last of each
        completion."""
        attend = BACKENDS[self.backend](row.offsets, row.max_len)
        place = torch.cat([row.predict_C, row.offsets[1:] - 1])
        return self.critic(row.ids_T, row.position_T, attend, place).split([len(row.predict_C), len(row.length_S)])


def update(learner: Learner, batch: Batch, step: int, clock: metrics.Clock, begun: int = 0) -> dict[str, float]:
    """All optimizer steps of the policy on one rollout. Masks, weights and rows are made once and serve every epoch.

    The learning rate counts steps from `begun`, the first in which the policy learns. Raises NotFinite.
    A mini-batch without any gradient changes nothing: neither momentum nor weight decay is applied then. That is Adam's
    path, not the gradient, whose mean over the draws stays the full batch's.
    """
    cfg, policy, optimizer = learner.cfg, learner.policy, learner.optimizer
    with clock.phase("pack"):
        batches = [pack_batch(learner, batch, slots) for slots in minibatches(step, cfg, batch.offered)]
    with clock.phase("score"):
        ref = [score_rows(learner, learner.reference, rows) for rows in batches]
        adv = [advantages(learner, rows) for rows in batches]
        # With one batch its first pass itself runs under the policy before the update, so no extra pass is needed.
        extra = len(batches) > 1 and cfg.loss.old_logp == "recompute" and needs_old(cfg)
        before = [score_rows(learner, policy if extra else None, rows) for rows in batches]
    sums, norms = metrics.PassSums(policy.quadratic), []
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step - begun, cfg.optim, cfg.steps - begun)
    with clock.phase("update"):
        for epoch in range(cfg.update.epochs):
            for rows, before_B, ref_B, adv_B in zip(batches, before, ref, adv, strict=True):
                accumulate(learner, rows, before_B, ref_B, adv_B, sums, first_pass=epoch == 0, unmoved=not norms)
                norms.append(descend(policy, optimizer, cfg.optim.clip_norm, sums.sums["loss"], "", step, batch))
    return sums.metrics(cfg.pack.capacity, len(norms)) | {
        "train/grad_norm": sum(norms) / len(norms), "train/lr": optimizer.param_groups[0]["lr"]}


def descend(model: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float, loss: Tensor | float,
            whose: str, step: int, records: Batch | Rolled) -> float:
    """One optimizer step on the gradient that has come together; returns its norm before clipping.

    Collective. Raises NotFinite on every rank before a step that would spoil the model.
    """
    norm = dist.full(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)).item()
    finite = math.isfinite(float(loss))
    if dist.max_over_ranks(not finite) or not math.isfinite(norm):
        raise NotFinite(f"the {whose}gradient" if finite else f"the {whose}loss", step + 1, records)
    if norm > 0:
        optimizer.step()
    optimizer.zero_grad()
    return norm


@torch.no_grad()
def advantages(learner: Learner, rows: list[Row]) -> list[Tensor]:
    """[C] of each row: as the rows have them, or from a critic's values before its update (advantage.gae)."""
    if learner.critic is None:
        return [row.adv_C for row in rows]
    adv, found = learner.cfg.advantage, []
    for row in rows:
        value_C, after_S = learner.values(row)
        last_S = segment_ends(row.segment_C)
        cut_S = value_C[last_S] if adv.bootstrap == "prev" else after_S
        end_S = torch.where(row.pending_S, cut_S, row.reward_S.to(cut_S))
        lam_S = (torch.full_like(end_S, adv.lam) if adv.alpha is None
                 else adaptive_lambda(row.length_S.to(end_S), adv.alpha, adv.lam_min))
        found.append(gae(value_C, end_S, row.segment_C, lam_S))
    return found


def segment_ends(segment_C: Tensor) -> Tensor:
    """[S] place of each completion's last token."""
    return segment_C.bincount().cumsum(0) - 1


@torch.no_grad()
def score_rows(learner: Learner, model: Decoder | None, rows: list[Row]) -> list[Tensor | None]:
    """Log-probs of the rows under a model, without gradient; nothing for no model."""
    return [None if model is None else learner.log_probs(model, row) for row in rows]


def accumulate(learner: Learner, rows: list[Row], before_B: list[Tensor | None], ref_B: list[Tensor | None],
               adv_B: list[Tensor], sums: metrics.PassSums, first_pass: bool, unmoved: bool) -> None:
    """Add the gradient of this rank's rows to the policy's.

    While the policy is unmoved since the rollout, this pass gives the log-probs before the update to rows without.
    """
    for i, row in enumerate(rows):
        logp_C = learner.log_probs(learner.policy, row)
        if before_B[i] is None and unmoved:
            before_B[i] = logp_C.detach()
        loss, *parts = row_loss(logp_C, before_B[i], ref_B[i], adv_B[i], row, learner.cfg)
        loss.backward()
        sums.add(row, loss.detach(), before_B[i], *parts, first_pass)


def row_loss(logp_C: Tensor, before_C: Tensor | None, ref_C: Tensor | None, adv_C: Tensor, row: Row, cfg: Config,
             ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The row's part of the loss: -w f A logp - likelihood logp, plus w beta k3. Also returns, for the metrics, the
    engine's part of w, f, and k3 (or none)."""
    old_C = row.sampled_logp_C if cfg.loss.old_logp == "engine" else before_C
    corrected = needs_old(cfg) and (cfg.loss.tis_cap or cfg.loss.mask_ratio)
    correction_C = engine_weight(old_C, row.sampled_logp_C, row.segment_C, cfg.loss.tis_cap, cfg.loss.mask_ratio
                                 ) if corrected else torch.ones_like(logp_C.detach())
    if cfg.loss.residual:
        adv_C = residual(logp_C, ref_C, adv_C, row.segment_C, cfg.loss.residual)
    f_C = TRUST[cfg.loss.trust](Move(logp_C, old_C, adv_C, row.segment_C), cfg.loss)
    weight_C = row.weight_C * correction_C
    loss = -((weight_C * f_C * adv_C + row.likelihood_C * correction_C) * logp_C).sum()
    if not cfg.loss.kl:
        return loss, correction_C, f_C, None
    k3_C = k3(logp_C, ref_C)
    return loss + cfg.loss.kl * (weight_C * k3_C).sum(), correction_C, f_C, k3_C.detach()


def needs_old(cfg: Config) -> bool:
    """Whether the loss takes a ratio to the policy before the update, or to the engine."""
    return cfg.loss.trust != "none" or cfg.loss.tis_cap is not None or cfg.loss.mask_ratio is not None


def minibatches(step: int, cfg: Config, offered: int) -> list[list[int]]:
    """Which of the prompts offered each optimizer step of an epoch is for: a seeded split, the same in every epoch.

    Prompts skipped take part, so that the number of groups of a mini-batch varies and its denominator does not.
    """
    generator = torch.Generator().manual_seed(dist.seed_for(cfg.seed, step, "minibatch"))
    shuffled = torch.randperm(offered, generator=generator)
    return [sorted(part.tolist()) for part in shuffled.tensor_split(cfg.update.minibatches)]


def pack_batch(learner: Learner, batch: Batch, slots: list[int]) -> list[Row]:
    """This rank's rows of one mini-batch, on the device. The weights' denominator is the mini-batch's own."""
    cfg, pruned = learner.cfg, batch.pruned
    place = {slot: n for n, slot in enumerate(batch.slots)}
    members = [place[slot] for slot in slots if slot in place]
    groups, adv_NG = [batch.groups[n] for n in members], batch.adv_NG[members]
    part = Pruned(pruned.keep_NG[members], pruned.weight_NG[members], pruned.prob_NG[members])
    len_NG = lengths(groups, adv_NG.shape[1])
    weight_NG = token_weight(len_NG, part, cfg.loss.per, cfg.loss.count, cfg.rollout.max_new_tokens, len(slots))
    likely_NG = likelihood_weight(len_NG, part, batch.correct_NG[members], cfg.loss.likelihood, cfg.loss.count)
    return laid_out(learner, groups, part.keep_NG, adv_NG, weight_NG, batch.reward_NG[members], likely_NG)


def laid_out(learner: Learner, groups: list[Group], keep_NG: Tensor, adv_NG: Tensor, weight_NG: Tensor,
             reward_NG: Tensor, likelihood_NG: Tensor) -> list[Row]:
    """This rank's rows, on the device: the completions kept are packed, dealt and built."""
    cfg, dtype = learner.cfg, learner.policy.embed_tokens.weight.dtype
    hands = pack(groups, keep_NG, cfg.pack.capacity, cfg.pack.window, dist.world_size(), learner.policy.quadratic)
    groups = fetch(groups, [[member for plan in hand for member in plan.members] for hand in hands])
    return [build(groups, adv_NG, weight_NG, plan, reward_NG, likelihood_NG).to(learner.device, dtype)
            for plan in hands[dist.rank()]]


def learning_rate(step: int, opt: Optim, steps: int) -> float:
    """A pure function of the step: linear warm-up, then constant or a cosine to 0 at `steps`."""
    if step < opt.warmup_steps:
        return opt.lr * (step + 1) / opt.warmup_steps
    if opt.schedule == "constant":
        return opt.lr
    done = (step - opt.warmup_steps) / max(1, steps - opt.warmup_steps)
    return opt.lr * (1 + math.cos(math.pi * done)) / 2
