"""Update the policy on one rollout: make weights and rows once, then run epochs of mini-batches.

Dimension key:  N groups per step,  G completions per group,  C completion tokens of one packed row.
"""

from dataclasses import replace
from functools import partial

import torch

from infra import dist
from learner import Learner, NotFinite, descend, learning_rate, naming_a_shorter_row
from loss import RowLoss, likelihood_weight, needs_old, row_loss, token_weight
from loss import residual as residual_of
from methods import critic, preference
from metrics import Clock, PassSums
from pack import Minibatch
from prune import shortened
from records import Batch, PreparedRow, Pruned, Row, lengths
from settings import kinds


def update(learner: Learner, batch: Batch, step: int, clock: Clock) -> dict[str, float]:
    """Take all optimizer steps of the policy on one rollout, and none before step learner.first.

    A mini-batch without any gradient takes no Adam step. That changes Adam's path and not the gradient, whose
    mean over the draws stays the full batch's. Raises NotFinite.
    """
    first, settings = learner.first, learner.update
    if step < first:
        return {}
    with clock.phase("pack"):
        batches = [minibatch(learner, batch, places)
                   for places in split_prompts(learner.seed, step, batch.offered, settings.minibatches)]
        packed = [learner.rows(weighed) for weighed in batches]
    with clock.phase("score"):
        # One batch needs no extra pass: its first pass itself runs under the policy before the update.
        extra = len(batches) > 1 and learner.loss.old_logp == "recompute" and needs_old(learner.loss)
        prepared = [[prepare_row(learner, row, extra) for row in rows] for rows in packed]
    rate = learning_rate(step - first, learner.optim, learner.steps - first)
    learner.optimizer.param_groups[0]["lr"] = rate
    sums, norms, pairs = PassSums(learner.pack, learner.policy.quadratic), [], []
    not_finite = partial(NotFinite, step=step + 1, records=batch)
    with clock.phase("update"):
        for epoch in range(settings.epochs):
            for i, weighed in enumerate(batches):
                if kinds.is_preference(learner.advantage):
                    prepared[i], compared = preference.compare(learner, weighed, prepared[i])
                    pairs.append(compared)
                with naming_a_shorter_row(learner, packed[i]):
                    passed = [add_gradient(learner, row, unmoved=not norms) for row in prepared[i]]
                prepared[i] = [row for row, _ in passed]
                for row, terms in passed:
                    sums.add(row, terms, first_pass=epoch == 0)
                norms.append(descend(learner.policy, learner.optimizer, learner.optim.clip_norm,
                                     sums.sums["loss"], not_finite))
    measured = sums.metrics(len(norms)) | preference.metrics(pairs)
    return measured | {"train/grad_norm": sum(norms) / len(norms), "train/lr": rate}


def split_prompts(seed: int, step: int, offered: int, count: int) -> list[list[int]]:
    """Deal the prompts offered to the optimizer steps of an epoch: a seeded draw, the same in every epoch.

    Prompts skipped take part, so that a mini-batch varies in its groups and not in its denominator.
    """
    generator = torch.Generator().manual_seed(dist.seed_for(seed, step, "minibatch"))
    shuffled = torch.randperm(offered, generator=generator)
    return [sorted(places.tolist()) for places in shuffled.tensor_split(count)]


def minibatch(learner: Learner, batch: Batch, places: list[int]) -> Minibatch:
    """Weigh the completions of the prompts offered at these places by the mini-batch's own denominator."""
    group_at = {place: n for n, place in enumerate(batch.places)}
    members = [group_at[place] for place in places if place in group_at]
    groups, of_step, loss = [batch.groups[n] for n in members], batch.pruned, learner.loss
    pruned = Pruned(of_step.keep_NG[members], of_step.weight_NG[members], of_step.prob_NG[members])
    len_NG = lengths(groups, batch.adv_NG.shape[1]) * ~batch.reward_NG[members].isnan()
    weight_NG = token_weight(len_NG, pruned, loss.per, loss.count, learner.max_new_tokens, len(places))
    correct_NG = batch.correct_NG[members]
    likelihood_NG = likelihood_weight(len_NG, pruned, correct_NG, loss.likelihood, loss.count)
    mean_NG = token_weight(len_NG, pruned, "token", loss.count, learner.max_new_tokens, len(places))
    tokens = [batch.tokens[n] for n in members] if batch.tokens else None
    groups = shortened(groups, tokens) if tokens else groups  # the denominators are those of the whole
    return Minibatch(groups, pruned.keep_NG, batch.adv_NG[members], weight_NG, likelihood_NG,
                     loss.entropy * mean_NG, batch.reward_NG[members], tokens)


@torch.no_grad()
def prepare_row(learner: Learner, row: Row, extra_pass: bool) -> PreparedRow:
    """Run a row through the reference, a critic and, in an `extra_pass`, the policy before the update."""
    return PreparedRow(
        row, adv_C=critic.advantages(learner, row) if learner.critic else row.adv_C,
        ref_logp_C=learner.log_probs(learner.reference, row) if learner.reference else None,
        old_logp_C=learner.log_probs(learner.policy, row) if extra_pass else None)


def add_gradient(learner: Learner, prepared: PreparedRow, unmoved: bool) -> tuple[PreparedRow, RowLoss]:
    """Add a row's gradient to the policy's.

    While the policy is unmoved since the rollout, this pass computes the log-probs before the update.
    """
    logp_C, entropy_C = learner.outputs(learner.policy, prepared.row)
    if prepared.old_logp_C is None and unmoved:
        prepared = replace(prepared, old_logp_C=logp_C.detach())
    adv_C, residual = prepared.adv_C, getattr(learner.advantage, "residual", None)
    if residual:
        adv_C = residual_of(logp_C, prepared.ref_logp_C, adv_C, prepared.row.segment_C, residual)
    terms = row_loss(logp_C, prepared, adv_C, learner.loss, entropy_C)
    terms.loss.backward()
    return prepared, replace(terms, loss=terms.loss.detach())
