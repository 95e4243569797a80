"""Update the policy on one rollout: make weights and rows once, then run epochs of mini-batches.

The functions stand in the order in which `update` needs them. The loss of a row is `loss.row_loss`.

Dimension key:  N groups per step,  G completions per group,  C completion tokens of one packed row.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from infra import dist
from learner import Learner, NotFinite, learning_rate, optimizer_step, out_of_memory
from loss import RowLoss, likelihood_weight, needs_extra_pass, row_loss, segment_sum, token_weight, weigh
from metrics import Clock, PassSums
from pack import Minibatch
from prune import cut_completions
from records import Batch, Metrics, PreparedRow, Pruned, Row, lengths


def update(learner: Learner, batch: Batch, step: int, clock: Clock, redrawn: Sequence[Batch] = ()) -> Metrics:
    """Take all optimizer steps of the policy on one rollout, and none before step learner.first.

    `redrawn` are the batches of the later epochs, where each epoch has a draw of its own (update.redraw).
    A mini-batch without any gradient takes no Adam step. That changes Adam's path and not the gradient:
    its mean over the draws stays the full batch's. Raises NotFinite.
    """
    first, settings = learner.first, learner.update
    if step < first:
        return {}
    with clock.phase("pack"):
        parts = [list(range(batch.offered))]  # the prompts of each optimizer step, by their places
        if settings.minibatches > 1:
            parts = split_prompts(learner.seed, step, batch.offered, settings.minibatches)
        minibatches = [make_minibatch(learner, drawn, part) for drawn in (batch, *redrawn) for part in parts]
        rows = [learner.rows(minibatch) for minibatch in minibatches]
    with clock.phase("score"):
        extra, prepared = len(minibatches) > 1 and needs_extra_pass(learner.loss), []
        for minibatch, own_rows in zip(minibatches, rows, strict=True):
            later = len(parts) > 1 or len(prepared) > 0  # an optimizer step may lie before its own pass
            prepared.append(prepare_rows(learner, minibatch, own_rows, extra and later))
    rate = learning_rate(step - first, learner.optim, learner.steps - first)
    sums, norms, rates = PassSums(learner.pack, learner.policy.quadratic), [], []
    not_finite = partial(NotFinite, step=step + 1, records=batch)
    with clock.phase("update"):
        for taken in range(settings.epochs * len(parts)):  # optimizer steps so far
            i = taken % len(minibatches)  # with one draw for all epochs they meet the same mini-batches
            passed = add_gradients(learner, minibatches[i], prepared[i], unmoved=not taken)
            prepared[i] = [row for row, _ in passed]
            for row, terms in passed:
                sums.add(row, terms, first_pass=taken < len(parts))
            share = effective_share(passed) if settings.rate_by_ess else 1.0
            rates.append(rate * share ** 0.5)
            norm = optimizer_step(learner.policy, learner.optimizers, rates[-1], learner.optim.clip_norm,
                                  sums.sums["loss"], not_finite)
            norms.append(norm)
    measured = sums.metrics(len(norms))
    return measured | {"train/grad_norm": sum(norms) / len(norms), "train/lr": sum(rates) / len(rates)}


def split_prompts(seed: int, step: int, offered: int, count: int) -> list[list[int]]:
    """Deal the prompts offered to the optimizer steps of an epoch: a seeded draw, the same in every epoch.

    Prompts skipped take part, so that a mini-batch varies in its groups and not in its denominator.
    """
    generator = torch.Generator().manual_seed(dist.seed_for(seed, step, "minibatch"))
    shuffled = torch.randperm(offered, generator=generator)
    return [sorted(places.tolist()) for places in shuffled.tensor_split(count)]


def make_minibatch(learner: Learner, batch: Batch, places: list[int]) -> Minibatch:
    """Weigh the completions of the prompts offered at these places by the mini-batch's own denominator."""
    here = set(places)
    members = [n for n, place in enumerate(batch.places) if place in here]
    groups, drawn, loss = [batch.groups[n] for n in members], batch.pruned, learner.loss
    pruned = Pruned(drawn.keep_NG[members], drawn.weight_NG[members], drawn.prob_NG[members])
    len_NG = lengths(groups, batch.adv_NG.shape[1]) * ~batch.reward_NG[members].isnan()
    weight_NG = token_weight(
        len_NG, pruned, loss.normalize, loss.denominator, learner.max_new_tokens, len(places))
    likelihood_NG = bonus_NG = tokens = None
    if loss.likelihood:
        correct_NG = batch.correct_NG[members]
        likelihood_NG = likelihood_weight(len_NG, pruned, correct_NG, loss.likelihood, loss.denominator)
    if loss.entropy:
        mean_NG = token_weight(len_NG, pruned, "token", loss.denominator, learner.max_new_tokens, len(places))
        bonus_NG = loss.entropy * mean_NG
    if batch.tokens:
        tokens = [batch.tokens[n] for n in members]
        groups = cut_completions(groups, tokens)  # the denominators above are of whole completions
    return Minibatch(
        groups,
        batch.trained_NG[members],
        batch.adv_NG[members],
        weight_NG,
        batch.reward_NG[members],
        likelihood_NG,
        bonus_NG,
        tokens,
        dist.seed_for(batch.seed, *places[:1], "minibatch")
    )


@torch.no_grad()
def prepare_rows(learner: Learner, minibatch: Minibatch, rows: list[Row], extra_pass: bool,
                 ) -> list[PreparedRow]:
    """Run a mini-batch's rows through the reference and, in an `extra_pass`, the policy before the update;
    `loss.weigh` may weigh tokens by its log-probs, and a leaf change what it has prepared."""
    prepared, entropy = [], []
    for row in rows:
        ref_logp_C = learner.log_probs(learner.reference, row) if learner.reference else None
        old_logp_C, entropy_C = learner.outputs(learner.policy, row) if extra_pass else (None, None)
        prepared.append(PreparedRow(row, row.adv_C, ref_logp_C, old_logp_C))
        entropy.append(entropy_C)
    if extra_pass and learner.weighs_tokens:
        factors = weigh(rows, [given.old_logp_C for given in prepared], entropy, learner.loss)
        prepared = [replace(given, factor_C=factor_C)
                    for given, factor_C in zip(prepared, factors, strict=True)]
    for change in learner.before_update:
        prepared = change(learner, minibatch, prepared)
    return prepared


def add_gradients(learner: Learner, minibatch: Minibatch, prepared: list[PreparedRow], unmoved: bool,
                  ) -> list[tuple[PreparedRow, RowLoss]]:
    """Add the gradient of one mini-batch to the policy's; training and replay.py compute it here alone.

    Returns each row with its loss. Raises ConfigError if memory runs out.
    """
    for change in learner.before_step:
        prepared = change(learner, minibatch, prepared)
    try:
        return [add_gradient(learner, given, unmoved) for given in prepared]
    except torch.OutOfMemoryError as error:
        raise out_of_memory([given.row for given in prepared], learner.longest, error) from None


def add_gradient(learner: Learner, prepared: PreparedRow, unmoved: bool) -> tuple[PreparedRow, RowLoss]:
    """Add a row's gradient to the policy's.

    Before the first optimizer step on a rollout (`unmoved`), this pass also gives the old log-probs.
    """
    row = prepared.row
    logp_C, entropy_C = learner.outputs(learner.policy, row)
    if prepared.old_logp_C is None and unmoved:
        prepared = replace(prepared, old_logp_C=logp_C.detach())
        if learner.weighs_tokens:
            factor_C, = weigh([row], [logp_C.detach()], [entropy_C], learner.loss)
            prepared = replace(prepared, factor_C=factor_C)
    adv_C = prepared.adv_C
    for change in learner.in_pass:
        adv_C = change(logp_C.detach(), prepared, adv_C)
    terms = row_loss(logp_C, prepared, adv_C, learner.loss, entropy_C)
    terms.loss.backward()
    return prepared, replace(terms, loss=terms.loss.detach())


def effective_share(passed: list[tuple[PreparedRow, RowLoss]]) -> float:
    """Compute ESS / n = (sum w)^2 / (n sum w^2) of a step's n completions: VCPO (arXiv:2602.17616).

    w is a completion's probability under the policy over that under the policies that drew it. Collective.
    """
    nats = []
    for given, terms in passed:
        row = given.row
        if row.counts:
            nats += segment_sum(terms.logp_C - row.sampled_logp_C, row.segment_C).tolist()
    # Over the largest w, which changes no share: the w of a long completion may be beyond any float.
    highest = dist.max_over_ranks(max(nats, default=-math.inf))
    ratios = [math.exp(gap - highest) for gap in nats]
    sums = {"count": len(ratios), "first": sum(ratios), "second": sum(ratio ** 2 for ratio in ratios)}
    total = dist.sum_over_ranks(sums)
    return total["first"] ** 2 / (total["count"] * total["second"]) if total["count"] else 1.0
