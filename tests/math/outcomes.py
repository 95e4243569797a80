"""Every outcome of a draw, and the gradient of the training step that it leads to: what the proofs of unbiasedness
share. A pruner of yours that claims to be unbiased and can be enumerated joins `outcomes`."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import as_batch, gradients, make_groups, nudge, parts_of, toy_config
from torch import Tensor

import prune
import update
from advantage import group_norm
from collect import Selection, choose
from metrics import PassSums
from records import Batch, PromptDraw, Pruned, Rolled

LENGTHS = [[3, 9, 5, 2], [4, 1, 7, 8]]
REWARD_NG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.5, 1.0]], dtype=torch.float64)
ADV_NG = group_norm(REWARD_NG, 1, 1e-4)
EXACT = 1e-12  # a bias below it is rounding
PRUNERS = dict(prune.COMPLETIONS)  # tests replace them by one outcome
Outcomes = Iterator[tuple[float, Pruned]]  # with their probabilities


class Step:
    """The second pass over one rollout: the policy has moved, so clips are active and the KL is not 0."""

    def __init__(self, folder, out, *settings: str):
        self.cfg = toy_config(out, f"model.path={folder}", "prune.completions.kind=none", "loss.kl=0.2",
                              "loss.denominator=all", *settings)
        self.parts = parts_of(self.cfg, folder)
        self.learner = self.parts.learner
        self.groups = make_groups(LENGTHS, [5, 3])
        nudge(self.learner.policy, 0.03)
        for model, _ in self.learner.roles.values():
            nudge(model, 0.3)

    def gradient(self, pruned: Pruned, adv_NG: Tensor = ADV_NG) -> Tensor:
        return self.gradient_of(as_batch(self.groups, adv_NG, pruned), [0, 1])

    def gradient_of(self, batch: Batch, places: list[int]) -> Tensor:
        """Of the mini-batch of these places. The reference is the policy before the update, too."""
        learner, sums = self.learner, PassSums(self.learner.pack)
        learner.policy.zero_grad()
        weighed = update.make_minibatch(learner, batch, places)
        prepared = update.prepare_rows(learner, weighed, learner.rows(weighed), extra_pass=False)
        prepared = [replace(scored, old_logp_C=scored.ref_logp_C) for scored in prepared]
        for passed in update.add_gradients(learner, weighed, prepared, unmoved=False):
            sums.add(*passed, first_pass=True)
        stopped = sums.metrics(1)["train/clipped"]
        assert batch.pruned.keep_NG.sum() < 8 or 0 < stopped < 1 or self.cfg.loss.trust.kind == "none"
        return torch.cat([grad.flatten() for grad in gradients(learner.policy).values()])


def distance(ours: Tensor, full: Tensor) -> float:
    """|difference| / |full gradient|."""
    return ((ours - full).norm() / full.norm()).item()


def mean_of(outcomes: list[tuple], gradient: Callable) -> Tensor:
    """The expected gradient over outcomes whose probabilities add up to 1."""
    assert sum(chance for chance, *_ in outcomes) == pytest.approx(1, abs=1e-12)
    return sum(chance * gradient(*outcome) for chance, *outcome in outcomes)


def masks(prob_NG: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Every outcome of independent draws."""
    for bits in itertools.product([True, False], repeat=prob_NG.numel()):
        keep_NG = torch.tensor(bits, dtype=torch.bool).view_as(prob_NG)
        chance = torch.where(keep_NG, prob_NG, 1 - prob_NG).prod().item()
        if chance:
            yield chance, keep_NG


def combs(prob_K: Tensor, order_K: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Every outcome of systematic sampling: between the starts at which it changes."""
    draws = sorted({0.0, 1.0, *(prob_K[order_K][prob_K[order_K] < 1].cumsum(0) % 1).tolist()})
    for a, b in itertools.pairwise(draws):
        yield b - a, prune.systematic(prob_K, order_K, (a + b) / 2)


def outcomes(candidates: prune.Candidates, settings: Any, order: int | None = None) -> Outcomes:
    """Every outcome of the unbiased pruner of these settings; `order` seeds another order than that of `pps`."""
    if settings.kind == "none":
        yield 1.0, prune.keep_all(candidates.adv_NG)
        return
    prob_NG = PRUNERS[settings.kind](candidates, settings).prob_NG
    if settings.kind == "bernoulli":
        yield from ((chance, prune.thin(prob_NG, keep_NG)) for chance, keep_NG in masks(prob_NG))
        return
    prob = prob_NG if settings.keep and settings.scope == "group" else prob_NG.flatten()[None]
    count = prob[0].sum().round()
    order_NG = prune.similar_order(candidates)
    if order is not None:
        order_NG = order_NG[torch.randperm(len(order_NG), generator=torch.Generator().manual_seed(order))]
        order_NG = order_NG[(order_NG // prob.shape[1]).argsort(stable=True)]
    draws = [list(combs(row, of_row % len(row))) for row, of_row in zip(prob, order_NG.view(prob.shape), strict=True)]
    for drawn in itertools.product(*draws):
        keep, chance = torch.stack([keep_K for _, keep_K in drawn]), math.prod(chance for chance, _ in drawn)
        assert (keep.sum(dim=1) == count).all() or chance < 1e-12
        if chance > 1e-14:
            yield chance, prune.thin(prob_NG, keep.view_as(prob_NG))


def by_both(step: Step, prob_N: list[float], compare: Callable, monkeypatch) -> Iterator[tuple[float, Batch]]:
    """Every outcome of drawing prompts and completions, as a Batch; what depends on the draw is computed anew."""
    selection, kind = Selection.of(step.cfg), step.cfg.prune.completions.kind
    for bits in itertools.product([True, False], repeat=len(prob_N)):
        draws = [PromptDraw(group.prompt, 3, prob, kept / prob)
                 for group, prob, kept in zip(step.groups, prob_N, bits, strict=True)]
        chance = math.prod(draw.prob if draw.kept else 1 - draw.prob for draw in draws)
        rewards, adv_NG = compare(step, REWARD_NG, bits)
        rolled = Rolled() + Rolled(draws, list(itertools.compress(step.groups, bits)), rewards, adv_NG)
        offers = []
        with monkeypatch.context() as patch:
            patch.setitem(prune.COMPLETIONS, kind,
                          lambda given, _, seen=offers: seen.append(given) or prune.keep_all(given.adv_NG))
            nothing = choose(rolled, selection, seed=0)
        if not any(bits):
            yield chance, nothing
            continue
        for part, pruned in outcomes(offers[0], step.cfg.prune.completions):
            monkeypatch.setitem(prune.COMPLETIONS, kind, lambda candidates, _, pruned=pruned: pruned)
            yield chance * part, choose(rolled, selection, seed=0)


def bias_of_both(step: Step, batches: Iterator[tuple[float, Batch]], full: Batch, places: list[int],
                 change: Callable = lambda batch: batch) -> float:
    """Bias of the gradient of these places relative to the full batch's."""
    drawn = list(batches)
    assert any(not batch.groups for _, batch in drawn) and {batch.offered for _, batch in drawn} == {2}
    return distance(mean_of(drawn, lambda batch: step.gradient_of(change(batch), places)),
                    step.gradient_of(full, places))
