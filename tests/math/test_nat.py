"""NAT by prefix cutting: over all cuts, jointly with the draw of completions, the mean is the full batch's gradient, of
the code of the training step, with clipping and KL active."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from conftest import as_rolled, make_groups, steps_of, toy_config
from outcomes import EXACT, Outcomes, Step, distance, mean_of, outcomes
from torch import Tensor

import collect
import update
from advantage import group_norm
from collect import Selection, choose
from infra import runfolder
from prune import COMPLETIONS, Candidates, CutWeights, cut_weights, keep_all, keep_largest, prefix_prob
from records import Batch, Pruned
from settings import kinds
from train import train

LENGTHS = [[3, 1, 4], [2, 5, 1]]
REWARD_NG = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.5]], dtype=torch.float64)
ADV_NG = group_norm(REWARD_NG, 1, 1e-4)
WHOLE, LEAST = 0.3, 2


def cuts(length: int) -> list[tuple[float, Tensor]]:
    """Every cut of a completion with its probability: `WHOLE` for none, else behind one of the tokens from the least
    on, each as likely. The point between the probabilities of two tokens cuts between them."""
    prob_L, least = prefix_prob(length, WHOLE, LEAST), min(LEAST, length)
    ends = [*prob_L.tolist(), 0.0]
    drawn = []
    for tokens in range(least, length + 1):
        chance = (1 - WHOLE) / (length - least + 1) + WHOLE * (tokens == length)
        assert ends[tokens - 1] - ends[tokens] == pytest.approx(chance, abs=1e-15)
        weight_C = cut_weights(length, WHOLE, LEAST, (ends[tokens - 1] + ends[tokens]) / 2)
        assert len(weight_C) == tokens and weight_C.max() <= 1 / WHOLE
        drawn.append((chance, weight_C))
    return drawn


class Short(Step):
    """Few tokens, so that all cuts can be gone through."""

    def __init__(self, folder, out, *settings: str):
        super().__init__(folder, out, "loss.trust={kind: clip, low: 0.02, high: 0.02}", *settings,
                         f"prune.tokens={{kind: prefix, whole: {WHOLE}, least: {LEAST}}}")
        self.groups, self.rows = make_groups(LENGTHS, [5, 3]), []

    def choose(self, pruned: Pruned, tokens: CutWeights | None, monkeypatch) -> Batch:
        """What a step chooses when the draws come out so."""
        monkeypatch.setitem(COMPLETIONS, self.cfg.prune.completions.kind, lambda candidates, settings: pruned)
        monkeypatch.setattr(collect, "draw_cuts", lambda groups, settings, seed: tokens)
        return choose(as_rolled(self.groups, REWARD_NG, ADV_NG), Selection.of(self.cfg), seed=0)

    def outcomes(self, draws: Outcomes, monkeypatch) -> Iterator[tuple[float, Batch]]:
        """Every outcome of both levels; what is dropped is not cut."""
        for chance, pruned in draws:
            of_each = [cuts(length) if kept else [(1.0, cut_weights(length, WHOLE, LEAST, 0.0))]
                       for length, kept in zip(sum(LENGTHS, []), pruned.keep_NG.flatten(), strict=True)]
            for drawn in itertools.product(*of_each):
                tokens = [weight_C for _, weight_C in drawn]
                yield (chance * math.prod(part for part, _ in drawn),
                       self.choose(pruned, [tokens[:3], tokens[3:]], monkeypatch))


def bias(step: Short, draws, monkeypatch, places=(0, 1), full=None, change=lambda batch: batch) -> float:
    """|mean gradient - gradient of whole completions| / |the latter|."""
    mean = mean_of(list(step.outcomes(draws, monkeypatch)), lambda batch: step.gradient_of(change(batch), list(places)))
    return distance(mean, step.gradient_of(step.choose(full or keep_all(ADV_NG), None, monkeypatch), list(places)))


ALL, PPS = kinds.KeepAll(), kinds.Pps(keep=2, size="adv")


@pytest.mark.parametrize(("draw", "settings"), [
    (ALL, ["loss.normalize=token"]), (PPS, ["loss.normalize=token"]), (replace(PPS, keep=1, scope="batch"), []),
    (PPS, ["advantage.kind=leave_one_out", "loss.trust={kind: total_variation, divergence: 0.001}",
           "loss.likelihood=0.1"]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (ALL, []), (ALL, ["loss.normalize=constant"]),
        (PPS, ["advantage.kind=centred", "loss.trust={kind: clamp, low: 0.02, high: 0.02}", "loss.tis_cap=2"])))])
def test_over_all_cuts_and_all_draws_the_mean_is_the_full_gradient(draw, settings, tiny, tmp_path, monkeypatch):
    """The denominators are those of whole completions. Losses of single tokens differ, there in a mini-batch."""
    step = Short(tiny, tmp_path / "run", f"prune.completions={json.dumps(asdict(draw))}", *settings)
    places = [0] if len(settings) > 1 else [0, 1]
    candidates = Candidates(ADV_NG, make_groups(LENGTHS, [2, 3]), "sequence", False, 0)
    assert bias(step, outcomes(candidates, draw), monkeypatch, places) < EXACT


@pytest.mark.parametrize("normalize", ["sequence", "token"])
def test_under_a_biased_pruner_the_mean_is_that_pruners_gradient(normalize, tiny, tmp_path, monkeypatch):
    """CPPO's: what is kept is counted whole."""
    kept, pruning = keep_largest(ADV_NG, 2, "group"), "prune.completions={kind: topk, keep: 2}"
    step = Short(tiny, tmp_path / "run", f"loss.normalize={normalize}", "loss.denominator=kept", pruning)
    assert bias(step, iter([(1.0, kept)]), monkeypatch, full=kept) < EXACT


def test_the_same_sees_tokens_without_weights(tiny, tmp_path, monkeypatch):
    def unweighted(batch: Batch) -> Batch:
        ones = [[torch.ones_like(weight_C) for weight_C in weights_G] for weights_G in batch.tokens]
        return replace(batch, tokens=ones)

    step = Short(tiny, tmp_path / "run")
    assert bias(step, iter([(1.0, keep_all(ADV_NG))]), monkeypatch, change=unweighted) > 0.05


def test_what_is_cut_off_is_in_no_row(tiny, tmp_path, monkeypatch):
    """Nor in the forward pass: a row has the prompt and the tokens before the cut, and their weights."""
    step = Short(tiny, tmp_path / "run")
    tokens = [[cut_weights(length, WHOLE, LEAST, point) for length, point in zip(row, points, strict=True)]
              for row, points in zip(LENGTHS, [[0.9, 0.9, 0.6], [0.0, 0.7, 0.0]], strict=True)]
    assert [list(map(len, row)) for row in tokens] == [[2, 1, 3], [2, 3, 1]]
    batch = step.choose(keep_all(ADV_NG), tokens, monkeypatch)
    row, = step.learner.rows(update.make_minibatch(step.learner, batch, [0, 1]))
    cut = [[sample.ids[:len(weight_C)].tolist() for sample, weight_C in zip(group.samples, weights_G, strict=True)]
           for group, weights_G in zip(step.groups, tokens, strict=True)]
    ids = [[*group.prompt.ids, *itertools.chain(*answers)] for group, answers in zip(step.groups, cut, strict=True)]
    assert row.ids_T.tolist() in (ids[0] + ids[1], ids[1] + ids[0])
    at = {member: row.segment_C == s for s, member in enumerate(row.members)}
    for n, g in itertools.product(range(2), range(3)):
        torch.testing.assert_close(row.weight_C[at[n, g]], tokens[n][g] / (6 * LENGTHS[n][g]))
        assert row.target_C[at[n, g]].tolist() == cut[n][g]


def test_what_the_seed_draws_has_these_probabilities_whoever_is_kept(tmp_path):
    """z-tests over 500 steps: how often each token of a kept completion is before the cut, and a projection of the
    weights of tokens and completions together, for which the two draws must not go together."""
    cfg = toy_config(tmp_path / "run", "prune.tokens={kind: prefix, whole: 0.2}", "loss.denominator=all",
                     "prune.completions={kind: bernoulli, drop_prob: 0.7}")
    groups = make_groups([[6] * 8, [3] * 8], [1, 1])
    reward_NG = torch.tensor([[1.0] + [0.0] * 7, [0.0] * 6 + [1.0] * 2], dtype=torch.float64)
    rolled = as_rolled(groups, reward_NG, group_norm(reward_NG, 1, 1e-4))
    value_NG = torch.rand(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens_C, kept, estimates = torch.zeros(6), 0, []
    for seed in range(500):
        batch = choose(rolled, Selection.of(cfg), seed)
        kept += int(batch.pruned.keep_NG[0].sum())
        for g in batch.pruned.keep_NG[0].nonzero()[:, 0].tolist():
            tokens_C[:len(batch.tokens[0][g])] += 1
        thinned_NG = torch.tensor([[weight_C.sum() for weight_C in row] for row in batch.tokens])
        estimates.append((batch.pruned.weight_NG * value_NG * thinned_NG).sum())
    prob_C = prefix_prob(6, 0.2, 1)
    assert ((tokens_C / kept - prob_C).abs() <= 4.5 * (prob_C * (1 - prob_C) / kept).sqrt() + 1e-12).all()
    estimate = torch.stack(estimates)
    z = (estimate.mean() - (value_NG * torch.tensor([[6.0], [3.0]])).sum()) / (estimate.std() / 500 ** 0.5)
    assert abs(z) < 4


def test_a_run_trains_on_the_tokens_that_its_decisions_name(tmp_path):
    cfg = toy_config(tmp_path / "run", "steps=1", "data.eval=null", name="nat_gsm8k.yaml toy.yaml")
    train(cfg)
    decided = runfolder.read_log(tmp_path / "run" / "decisions.jsonl")
    for line, of_step in zip(decided, steps_of(tmp_path / "run"), strict=True):
        tokens = sum(sum(prompt["completion_tokens"]) for prompt in line["prompts"])
        assert of_step["train/tokens"] == tokens < of_step["rollout/tokens"]
