"""The proof that pruning with known probabilities keeps the gradient, and the size of the bias of what does not.

Over all outcomes of the masks, the mean of the real loss's gradient, weighted by the outcomes' probabilities, is the
full batch's: with clipping and KL active, completions of unequal length, and the code of the training step.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import as_batch, as_rewards, as_rolled, gradients, make_groups, needed, others_slow
from outcomes import ADV_NG, EXACT, LENGTHS, REWARD_NG, Step, bias_of_both, by_both, distance, mean_of, outcomes
from test_objectives import TEACHER, compare
from torch import Tensor
from torch.nn import Module

import config
import update
from advantage import group_norm
from collect import Selection, choose
from config import ConfigError
from metrics import Clock
from prune import COMPLETIONS, Candidates, below_mean, drop_bottom, keep_all, keep_largest, thin
from records import Batch, Group, Pruned, Rewards, lengths
from settings import kinds, leaves
from settings.kinds import Bernoulli, Pps
from settings.loader import choices, hints

HALF = Bernoulli(drop_prob=0.7)


def candidates(normalize: str) -> Candidates:
    return Candidates(ADV_NG, make_groups(LENGTHS, [5, 3]), normalize, False, 0)


@pytest.mark.parametrize(("pruning", "normalize", "order", "settings"), [
    (HALF, "sequence", None, []), (Pps(keep=2), "token", 1, []),
    (Pps(keep=2, scope="batch", size="adv"), "constant", 0, []),
    (Pps(keep=2, scope="batch", by_cost=True), "token", None, []),
    (Pps(keep=2, scope="batch", by_cost=True), "token", 2, []),
    (Pps(error=0.3, by_cost=True), "sequence", None, []), (Bernoulli(error=0.5), "token", None, []),
    (HALF, "token", None, ["advantage={kind: gae, alpha: 1}", "critic.lr=1e-4", "loss.likelihood=0.1",
                           "loss.trust.high=0.28"]),
    (HALF, "sequence", None, ["loss={trust: {kind: clip_sequence, low: 0.01, high: 0.01}}"]),
    (HALF, "constant", None, ["loss={kl_corrected: true, entropy: 0.3}"])])
def test_the_mean_over_all_outcomes_is_the_full_gradient(pruning, normalize, order, settings, tiny, tmp_path):
    """Whatever the advantage: probabilities may come from rewards alone, before a critic's values are known."""
    step = Step(tiny, tmp_path / "run", f"loss.normalize={normalize}", *settings)
    mean = mean_of(list(outcomes(candidates(normalize), pruning, order)), step.gradient)
    assert distance(mean, step.gradient(keep_all(ADV_NG))) < EXACT


def padded(x_NG: Tensor) -> Tensor:
    """With two more completions in each group that have none."""
    wide_NG = torch.full((2, 6), torch.nan, dtype=torch.float64)
    wide_NG[0, [0, 1, 3, 5]], wide_NG[1, 1:5] = x_NG
    return wide_NG


class Padded(Step):
    """The same groups, each with two completions more, of other lengths, that have no reward."""

    def __init__(self, folder, out, *settings: str):
        super().__init__(folder, out, *settings)
        (a, b), (x, y) = self.groups, make_groups([[6, 2], [3, 11]], [5, 3], seed=1)
        self.groups = [Group(a.prompt, (*a.samples[:2], x.samples[0], a.samples[2], x.samples[1], a.samples[3])),
                       Group(b.prompt, (y.samples[0], *b.samples, y.samples[1]))]


KINDS = choices(hints(config.with_leaves(leaves.LEAVES))["advantage"])
MORE = {"gae": ["critic.lr=1e-4"], "preference": ["advantage.likelihood=0.3"], "distill": [f"teacher.path={TEACHER}"]}


def is_paired(kind: str) -> bool:
    return kind.endswith("preference")


def by_kind(kind: str) -> list[str]:
    """Settings that compare completions by this kind."""
    alone = ["loss.trust.kind=none", "loss.normalize=sum"] if is_paired(kind) else []
    return [f"advantage={needed(KINDS[kind])}", *alone, *MORE.get(kind, [])]


def compared(step: Step, reward_NG: Tensor, rolled_out: tuple[bool, ...] = (True, True)) -> tuple[Rewards, Tensor]:
    """Rewards and advantages of the prompts rolled out, of components here and there, and of one of weight 0."""
    second_NG = torch.stack([reward_NG[0] / 2, torch.full_like(reward_NG[1], torch.nan)])
    components = {"first": reward_NG[list(rolled_out)], "second": second_NG[list(rolled_out)]}
    components["third"] = torch.ones_like(components["first"])
    rewards = as_rewards(components, {"first": 1.0, "second": 2.0, "third": 0.0})
    return rewards, compare(step.parts, list(itertools.compress(step.groups, rolled_out)), rewards)


FAST = ("group_norm", "decoupled", "gae", "preference")  # the others: make test-long


@pytest.mark.parametrize(("kind", "normalize"), [("group_norm", "constant"), ("group_norm", "token"), *(
    pytest.param(kind, "sequence", marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS)])
def test_a_completion_without_a_reward_is_as_if_it_were_not_there(kind, normalize, tiny, tmp_path):
    """Its group's advantages, the denominators, and the gradient are those of a group without it."""
    settings = [f"loss.normalize={normalize}", *by_kind(kind)]
    without, step = Step(tiny, tmp_path / "a", *settings), Padded(tiny, tmp_path / "b", *settings)
    (_, adv_NG), (_, wide_NG) = compared(without, REWARD_NG), compared(step, padded(REWARD_NG))
    torch.testing.assert_close(wide_NG, padded(adv_NG), equal_nan=True, rtol=1e-12, atol=1e-12)
    full, wide = without.gradient(keep_all(adv_NG), adv_NG), step.gradient(keep_all(wide_NG), wide_NG)
    assert distance(wide, full) < EXACT


@pytest.mark.parametrize(("settings", "normalize"), [
    (HALF, "token"), (Pps(keep=2), "sequence"), (Pps(keep=2, scope="batch"), "constant")])
def test_over_all_outcomes_the_mean_is_the_full_gradient_of_those_with_a_reward(settings, normalize, tiny, tmp_path):
    step, wide_NG = Padded(tiny, tmp_path / "b", f"loss.normalize={normalize}"), padded(ADV_NG)
    drawn = list(outcomes(Candidates(wide_NG, step.groups, normalize, False, 0), settings))
    assert not any((pruned.keep_NG | (pruned.prob_NG > 0))[wide_NG.isnan()].any() for _, pruned in drawn)
    full = Step(tiny, tmp_path / "a", f"loss.normalize={normalize}").gradient(keep_all(ADV_NG))
    assert distance(mean_of(drawn, lambda pruned: step.gradient(pruned, wide_NG)), full) < EXACT


def test_choosing_leaves_them_out_whatever_a_pruner_says(tiny, tmp_path, monkeypatch):
    step = Padded(tiny, tmp_path / "run", "prune.completions={kind: topk, keep: 2}")
    rolled = as_rolled(step.groups, padded(REWARD_NG), padded(ADV_NG))
    all_NG = torch.ones(2, 6, dtype=torch.float64)
    monkeypatch.setitem(COMPLETIONS, "topk", lambda candidates, settings: Pruned(all_NG.bool(), all_NG, all_NG))
    pruned = choose(rolled, Selection.of(step.cfg), seed=0).pruned
    assert not (pruned.keep_NG & rolled.adv_NG.isnan()).any() and not pruned.weight_NG[~pruned.keep_NG].any()


class Cut(Padded):
    """The same, and the two completions more have rewards, but were cut."""

    def __init__(self, folder, out, *settings: str):
        super().__init__(folder, out, *settings, "prune.truncated=true")
        none_NG = padded(REWARD_NG).isnan().tolist()
        self.groups = [Group(group.prompt, tuple(replace(s, finished=not cut) for s, cut in zip(
            group.samples, cut_G, strict=True))) for group, cut_G in zip(self.groups, none_NG, strict=True)]
        self.rolled = as_rolled(self.groups, padded(REWARD_NG).nan_to_num(nan=0.5), padded(ADV_NG).nan_to_num(nan=9.0))

    def choose(self, seed: int = 0) -> Batch:
        return choose(self.rolled, Selection.of(self.cfg), seed)


@pytest.mark.parametrize("normalize", ["sequence", "constant", "token"])
def test_truncated_completions_are_as_if_they_were_not_there(normalize, tiny, tmp_path):
    """In no denominator either: the gradient is that of groups without them, and token weights add up to 1."""
    setting = f"loss.normalize={normalize}"
    without, step = Step(tiny, tmp_path / "a", setting), Cut(tiny, tmp_path / "b", setting)
    assert distance(step.gradient_of(step.choose(), [0, 1]), without.gradient(keep_all(ADV_NG))) < EXACT
    weighed = update.make_minibatch(step.learner, step.choose(), [0, 1])
    total = (weighed.weight_NG * lengths(step.groups, 6)).sum().item()
    assert normalize == "constant" or total == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("pruning", ["{kind: pps, keep: 2}", "{kind: pps, keep: 2, scope: batch}",
                                     "{kind: topk, keep: 2}", "{kind: bottom, drop_prob: 0.5}"])
def test_truncated_completions_take_no_place_of_others(pruning, tiny, tmp_path):
    """They are no candidates of the draw, whatever their size, and have probability 0."""
    step = Cut(tiny, tmp_path / "run", f"prune.completions={pruning}")
    for seed in range(10):
        pruned = step.choose(seed).pruned
        assert not (pruned.keep_NG | (pruned.prob_NG > 0))[padded(ADV_NG).isnan()].any()
        assert pruned.keep_NG.sum() == 4 and ("batch" in pruning or pruned.keep_NG.sum(dim=1).tolist() == [2, 2])


def test_prompts_that_are_skipped_need_a_reward_of_every_completion(tiny, tmp_path):
    """How many of a skipped prompt's completions would have none is not known."""
    step = Padded(tiny, tmp_path / "run", PROMPTS)
    with pytest.raises(ConfigError, match="prune.prompts.kind=bernoulli needs a reward .* one of q0 has none: "):
        choose(as_rolled(step.groups, padded(REWARD_NG), padded(ADV_NG)), Selection.of(step.cfg), seed=0)


PROMPTS, COMPLETIONS_TOO = "prune.prompts={kind: bernoulli, drop_prob: 0.6}", "{kind: bernoulli, drop_prob: 0.7}"
BY_SURPRISE = "{kind: pps, keep: 2, scope: batch, by_cost: true}"


def at_both(folder, out, *settings: str, completions: str = COMPLETIONS_TOO) -> Step:
    return Step(folder, out, f"prune.completions={completions}", *settings)


def both_levels(step: Step, monkeypatch, places: list[int], change=lambda batch: batch) -> float:
    """Bias over all draws of the two prompts, of probability 0.4 and 0.7, and of their completions."""
    rewards, adv_NG = compared(step, REWARD_NG)
    full = replace(as_batch(step.groups, adv_NG, keep_all(adv_NG)), reward_NG=rewards.total_NG)
    return bias_of_both(step, by_both(step, [0.4, 0.7], compared, monkeypatch), full, places, change)


@pytest.mark.parametrize(("normalize", "places", "prompts", "completions"), [
    ("constant", [0], PROMPTS, COMPLETIONS_TOO), ("sequence", [1], PROMPTS, COMPLETIONS_TOO),
    ("sequence", [0, 1], "prune.prompts={kind: pps, share: 0.5}", BY_SURPRISE)])
def test_at_both_levels_together_the_mean_is_the_full_gradient(normalize, places, prompts, completions, tiny, tmp_path,
                                                               monkeypatch):
    """Of a mini-batch, and of a whole step by PPS, whose sizes have the weights of prompts."""
    step = at_both(tiny, tmp_path / "run", f"loss.normalize={normalize}", prompts, completions=completions)
    assert both_levels(step, monkeypatch, places) < EXACT


@pytest.mark.parametrize("kind", others_slow(KINDS, *FAST))
def test_at_both_levels_the_mean_is_the_full_gradient_whatever_compares_completions(kind, tiny, tmp_path, monkeypatch):
    """Or the two do not go together, and that is a config error. Pairs go with pruning of prompts alone."""
    try:
        step = at_both(tiny, tmp_path / "run", PROMPTS, *by_kind(kind))
    except ConfigError as error:
        assert "must be none" in str(error) and f"with advantage.kind={kind}" in str(error)
        if not is_paired(kind):
            return
        step = Step(tiny, tmp_path / "run", PROMPTS, *by_kind(kind))
    assert both_levels(step, monkeypatch, [0, 1]) < EXACT


class TwoEpochs:
    """Real updates of two epochs, the first by a step against the gradient."""

    def __init__(self, step: Step, monkeypatch):
        self.learner, self.gradients = step.learner, []
        self.weights = [*step.learner.policy.parameters()]
        self.start = [p.detach().clone() for p in self.weights]
        monkeypatch.setattr(update, "optimizer_step", self.move)

    def move(self, policy: Module, *_) -> float:
        self.gradients.append(torch.cat([grad.flatten() for grad in gradients(policy).values()]))
        for p in self.weights:
            p.data.sub_(p.grad, alpha=0.05)
        policy.zero_grad()
        return 1.0

    def second(self, first: Batch, *again: Batch) -> Tensor:
        """The gradient of the second epoch, which may have a draw of its own."""
        for p, start in zip(self.weights, self.start, strict=True):
            p.data.copy_(start)
        self.stopped = update.update(self.learner, first, 0, Clock(), again)["train/clipped"]
        return self.gradients.pop()

    def bias(self, draws: list[tuple[float, Batch]], full: Batch) -> tuple[Tensor, Tensor]:
        """Chances times the error of the second epoch's mean gradient, with a draw of its own and with the first's."""
        own = same = 0.0
        for chance, first in draws:
            exact = self.second(first, full)
            assert 0 < self.stopped < 1
            own += chance * sum(other * (self.second(first, again) - exact) for other, again in draws)
            same += chance * (self.second(first, first) - exact)
        return own, same


def test_an_epoch_with_a_draw_of_its_own_is_unbiased_at_its_weights_and_one_that_reuses_a_draw_is_not(
        tiny, tmp_path, monkeypatch):
    """The expected gradient is, at any first draw, that of all completions of the prompts that were rolled out."""
    step = at_both(tiny, tmp_path / "run", "update={epochs: 2, redraw: true}", "loss.trust={low: 0.01, high: 0.01}",
                   PROMPTS, completions=BY_SURPRISE)
    by_prompts: dict[tuple, list] = {}
    for chance, batch in by_both(step, [0.4, 0.7], compared, monkeypatch):
        if batch.groups:
            by_prompts.setdefault(tuple(batch.places), []).append((chance, batch))
    own = same = 0.0
    epochs = TwoEpochs(step, monkeypatch)
    for draws in by_prompts.values():
        total, (_, batch) = sum(chance for chance, _ in draws), draws[0]
        every = keep_all(batch.adv_NG)
        weight_N1 = torch.tensor([[draw.weight] for draw in batch.draws], dtype=torch.float64)
        full = replace(batch, pruned=replace(every, weight_NG=every.weight_NG * weight_N1))
        of_own, of_same = epochs.bias([(chance / total, batch) for chance, batch in draws], full)
        own, same = own + total * of_own, same + total * of_same
    usual = epochs.second(full)
    assert distance(epochs.second(full, full), usual) < EXACT  # its old log-probs are those before the first epoch
    assert own.norm() / usual.norm() < EXACT and same.norm() / usual.norm() > 1e-3


def unweighted(batch: Batch) -> Batch:
    keep_NG = batch.pruned.keep_NG
    return replace(batch, pruned=thin(torch.where(keep_NG, below_mean(batch.adv_NG, 0.7), 1.0), keep_NG))


def require_bias(bias: float, arm: str) -> None:
    """How large it is stands in the output of `pytest -s`."""
    print(f"\n{arm}: bias {bias:.2f} of the full gradient")
    assert bias > 0.01


def over_the_kept(batch: Batch) -> Batch:
    return replace(batch, places=list(range(len(batch.groups))), offered=len(batch.groups))


@pytest.mark.parametrize("change", [unweighted, over_the_kept])
def test_the_same_sees_the_bias_of_prompts(change, tiny, tmp_path, monkeypatch):
    """Prompts without weights, and 1/(1-P) over the prompts that were kept."""
    if change is over_the_kept:
        true = Step.gradient_of
        monkeypatch.setattr(Step, "gradient_of", lambda self, batch, _: true(self, batch, list(range(batch.offered))))
    require_bias(both_levels(at_both(tiny, tmp_path / "run", PROMPTS), monkeypatch, [0, 1], change), change.__name__)


def test_the_same_sees_the_bias_of_a_scale_over_the_prompts_rolled_out(tiny, tmp_path, monkeypatch):
    """GDPO's deviation, had the config error not stopped it."""
    step = at_both(tiny, tmp_path / "run", *by_kind("decoupled"))
    step.cfg = replace(step.cfg, prune=replace(step.cfg.prune, prompts=kinds.BernoulliPrompts(drop_prob=0.6)))
    require_bias(both_levels(step, monkeypatch, [0, 1]), "a scale over the prompts rolled out")


def without_weights() -> list[tuple]:
    return [(chance, Pruned(p.keep_NG, p.keep_NG.double(), p.prob_NG)) for chance, p in outcomes(candidates(""), HALF)]


def renormalised() -> list[tuple]:
    """Advantages of what survives, computed anew from it: a single survivor has none."""
    arms = []
    for chance, pruned in outcomes(candidates(""), HALF):
        adv_NG = torch.zeros_like(ADV_NG)
        for n, keep_G in enumerate(pruned.keep_NG):
            if keep_G.sum() > 1:
                adv_NG[n, keep_G] = group_norm(REWARD_NG[n, keep_G][None], 1, 1e-4)[0]
        arms.append((chance, pruned, adv_NG))
    return arms


BIASED = {
    "topk": (lambda: [(1.0, keep_largest(ADV_NG, 2, "group"))], "sequence", "kept"),
    "topk over the full batch": (lambda: [(1.0, keep_largest(ADV_NG, 2, "group"))], "sequence", "all"),
    "bottom fraction": (lambda: [(1.0, drop_bottom(ADV_NG, 0.5))], "sequence", "kept"),
    "no weights": (without_weights, "sequence", "all"),
    "no weights, mean over the kept": (without_weights, "sequence", "kept"),
    "1/(1-P) over the kept mean": (lambda: list(outcomes(candidates(""), HALF)), "sequence", "kept"),
    "token mean over survivors": (lambda: list(outcomes(candidates(""), HALF)), "token", "kept"),
    "advantages normalised after pruning": (renormalised, "sequence", "all")}


@pytest.mark.parametrize("arm", others_slow(BIASED, "topk", "bottom fraction", "no weights"))
def test_the_same_sees_the_bias_of_every_biased_arm(arm, tiny, tmp_path):
    draws, normalize, count = BIASED[arm]
    step = Step(tiny, tmp_path / "run", f"loss.normalize={normalize}", f"loss.denominator={count}")
    full = Step(tiny, tmp_path / "run", f"loss.normalize={normalize}").gradient(keep_all(ADV_NG))
    require_bias(distance(mean_of(draws(), step.gradient), full), f"{arm}, {normalize}, count {count}")
