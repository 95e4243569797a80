"""Completions that share their prompt in a row have the gradient of completions that each have it alone.

In float64, to 1e-10 of each weight's largest gradient, for every objective. The gradient without sharing is of the same
completions, one in each row: such a row is a prompt and a completion and nothing else. That it is the textbook's, by
passes of prompt and completion through the model outside of all rows, is what test_objectives.py says.
"""

from dataclasses import replace

import pytest
import torch
from conftest import make_groups, nudge
from test_invariance import Gradient, on_ranks
from test_objectives import OBJECTIVES, Case, gradient_of, learner_on

import learner
from config import Pack
from pack import Minibatch, Plan
from records import Pruned

# Prompts of 1 token and of many, completions of 1 token and of many.
SHAPE = {"lengths": [[3, 25, 1, 2], [4, 1, 7, 8]], "prompts": [1, 12]}
# Both groups in a row, and rows that hold less than either, which have 32 tokens each.
CUTS = {"whole": Pack(1000), "split": Pack(26), "split, window": Pack(28, window=2)}


def alone(minibatch: Minibatch, *given) -> list[list[Plan]]:
    """In place of pack.pack on one rank: a row for every completion."""
    return [[Plan([tuple(member)]) for member in minibatch.keep_NG.nonzero().tolist()]]


def gradient(case: Case, pack: Pack) -> Gradient:
    """Of the second pass over the case's completions, by the functions of the training step."""
    policy = case.learner.policy
    nudge(policy, 0.02)
    grads, _ = gradient_of(replace(case.learner, pack=pack), case.batch, moved=0.03)
    policy.zero_grad()
    nudge(policy, -0.05)  # to where it was, up to rounding
    return grads


def gradient_alone(case: Case, monkeypatch) -> Gradient:
    with monkeypatch.context() as patch:
        patch.setattr(learner, "pack", alone)
        return gradient(case, Pack(1000))


def assert_equal(ours: Gradient, expected: Gradient, what: str) -> None:
    for key, grad in expected.items():
        size = float(grad.abs().max())
        assert size > 1e-8
        torch.testing.assert_close(ours[key], grad, rtol=0, atol=1e-10 * size, msg=f"{what}: {key}")


@pytest.mark.parametrize(("name", "settings"), [
    ("dapo", "loss.kl=0.1 model.checkpoint_blocks=all"), ("gspo", "loss.mask_ratio=1.1"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("grpo", "model.logp_chunk=3 rollout.temperature=0.7"), ("tppo", "loss.kl=0.1 loss.denominator=kept"),
        ("vapo", "loss.kl=0.1 loss.likelihood=0.2 loss.tis_cap=1.05")))])
def test_gradients_with_shared_prompts_are_those_without_also_where_completions_were_pruned(name, settings, tiny,
                                                                                            tmp_path, monkeypatch):
    """Some completions are dropped, and the others weighted."""
    case = Case(name, tiny, tmp_path / "run", *settings.split(), **SHAPE)
    weight_NG = torch.tensor([[1.0, 2.0, 0.0, 1.0], [4.0, 0.0, 1.0, 0.5]], dtype=torch.float64)
    case.batch = replace(case.batch, pruned=Pruned(weight_NG > 0, weight_NG, torch.ones_like(weight_NG)))
    expected = gradient_alone(case, monkeypatch)
    for cut in ("whole", "split, window"):
        assert_equal(gradient(case, CUTS[cut]), expected, cut)


def by_cut(folder, out, names: tuple[str, ...]) -> dict[tuple[str, str], Gradient]:
    cases = {name: Case(name, folder, out, **SHAPE) for name in names}
    return {(name, cut): gradient(case, CUTS[cut]) for name, case in cases.items() for cut in ("whole", "split")}


@pytest.mark.parametrize(("ranks", "names"), [
    (2, ("dapo", "tppo")), pytest.param(3, tuple(OBJECTIVES), marks=pytest.mark.slow)])
def test_so_are_they_on_many_ranks(ranks, names, tiny, tmp_path, monkeypatch):
    expected = {name: gradient_alone(Case(name, tiny, tmp_path / "one", **SHAPE), monkeypatch) for name in names}
    for mine in on_ranks(ranks, tmp_path, by_cut, tiny, tmp_path / "many", names):
        for (name, cut), grads in mine.items():
            assert_equal(grads, expected[name], f"{name}, {cut}")


def test_a_token_of_one_completion_changes_nothing_in_another(tiny, tmp_path):
    """Nor does one of another group: log-probs in a row, bit for bit, of all but the completion that was changed."""
    trained = learner_on(tiny, Case("grpo", tiny, tmp_path / "run").cfg)
    groups = make_groups(SHAPE["lengths"], SHAPE["prompts"])
    ones_NG = torch.ones(2, 4, dtype=torch.float64)
    row, = trained.rows(Minibatch(groups, ones_NG.bool(), ones_NG, ones_NG, ones_NG))
    with torch.no_grad():
        before_C = trained.log_probs(trained.policy, row)
        for segment, last in enumerate((row.segments.start_2S[0, 1:] - 2).tolist()):
            if (row.segment_C == segment).sum() > 1:  # the last token but one, which the last is predicted from
                ids_T = row.ids_T.index_fill(0, torch.tensor(last), int(row.ids_T[last] + 1) % 400)
                after_C = trained.log_probs(trained.policy, replace(row, ids_T=ids_T))
                assert (after_C != before_C).nonzero()[:, 0].tolist() == [
                    int((row.segment_C <= segment).sum()) - 1]
