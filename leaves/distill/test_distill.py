"""Distillation: a teacher's advantages, the draws before and after it has read, and what a run keeps of it."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TOY, attend_alone, gradients, make_groups, steps_of, toy_config, weights, write_tiny
from outcomes import ADV_NG, EXACT, Step, combs, distance, mean_of, outcomes
from test_invariance import on_ranks, trained_unchecked
from test_objectives import TEACHER, Case, learner_on
from torch import Tensor

import config
import data
import replay
import train
import update
from leaves.distill import join as distill
from pack import Minibatch
from prune import Candidates, inclusion, keep_all, thin
from records import Group, Pruned, Sample
from settings.kinds import Pps
from settings.loader import ConfigError

FIRST = Pps(keep=2, scope="batch", size="nats", by_cost=True)
SHORT = ["eval.max_new_tokens=8", "rollout.max_new_tokens=24", f"teacher.path={TEACHER}"]


def by_training(folder: Path, out: Path) -> dict[str, Tensor]:
    return Case("opd", folder, out).by_training()


def test_on_one_rank_and_on_two_the_gradient_is_the_formulas(tiny, tmp_path):
    expected = Case("opd", tiny, tmp_path / "run").by_formula()
    for ranks in (1, 2):
        for ours in on_ranks(ranks, tmp_path, by_training, tiny, tmp_path / "run"):
            for key, grad in expected.items():
                torch.testing.assert_close(ours[key], grad, rtol=0, atol=1e-12 * float(grad.abs().max()), msg=key)


def test_over_all_tokens_of_a_state_the_mean_is_the_gradient_of_the_kl_to_the_teacher(tiny, tmp_path):
    """KL(student, teacher) by autograd over the vocabulary, and each token as a completion of its own, by its chance."""
    cfg = toy_config(tmp_path / "run", f"model.path={tiny}", f"teacher.path={TEACHER}", "teacher.keep=null",
                     "loss.trust.kind=none", "pack.capacity=4096", name="opd_toy.yaml")
    learner = learner_on(tiny, cfg)
    ids, every_V = torch.tensor([5, 9, 7]), torch.arange(477)
    teacher = learner.before_update[0].__self__.model
    own_V, given_V = (model(ids, torch.arange(3), attend_alone, torch.full_like(every_V, 2), every_V, 1.0)
                      for model in (learner.policy, teacher))
    (own_V.exp() * (own_V - given_V)).sum().backward()
    expected = gradients(learner.policy)
    learner.policy.zero_grad()
    chance_V = own_V.detach().exp()
    samples = tuple(Sample([i], [nats], True) for i, nats in enumerate(own_V.tolist()))
    group = Group(make_groups([[1]], [3])[0].prompt, samples)
    group = replace(group, prompt=replace(group.prompt, ids=tuple(ids.tolist())))
    one_NG = torch.ones(1, len(samples), dtype=torch.float64)
    weighed = Minibatch([group], one_NG.bool(), one_NG, chance_V[None], one_NG)
    update.add_gradients(learner, weighed, update.prepare_rows(learner, weighed, learner.rows(weighed), False), True)
    for key, grad in gradients(learner.policy).items():
        torch.testing.assert_close(grad, expected[key], rtol=0, atol=1e-12 * float(expected[key].abs().max()), msg=key)


class Twice(Step):
    """A step whose teacher reads the survivors of a first draw, and draws those that the student passes of them."""

    def __init__(self, folder, out, *settings: str):
        super().__init__(folder, out, "advantage={kind: distill, reward: 0.5}", f"teacher.path={TEACHER}", *settings)
        for group in self.groups:  # as if sampled by a student that is sure of some tokens and not of others
            for sample in group.samples:
                sample.logp[:] = type(sample.logp)("d", [-0.05 * (1 + 7 * (i % 3)) for i in sample.ids])

    def both(self, monkeypatch) -> Iterator[tuple[float, Pruned, Pruned]]:
        """Every outcome of both draws."""
        candidates = Candidates(ADV_NG.abs() + 1, self.groups, self.cfg.loss.normalize, False, 0)
        for chance, first in outcomes(candidates, FIRST):
            asked = []
            with monkeypatch.context() as patch:
                patch.setattr(distill, "pps", lambda size_NG, *given, to=asked: to.append((size_NG, *given)) or thin(
                    (size_NG > 0).double(), size_NG > 0))
                self.gradient(first)
            (size_NG, order_K, keep, scope, _), = asked
            assert scope == "batch" and ((size_NG > 0) == first.keep_NG).all()
            prob_K = inclusion(size_NG.flatten(), keep * len(size_NG))
            for part, keep_K in combs(prob_K, order_K):
                assert keep_K.sum() == 2 or part < 1e-12
                yield chance * part, first, thin(prob_K.view_as(size_NG), keep_K.view_as(size_NG))


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_over_both_draws_the_mean_is_the_full_gradient_and_neither_weight_may_be_forgotten(normalize, tiny, tmp_path,
                                                                                          monkeypatch):
    """With a clip, a KL, and rewards beside the teacher."""
    setting = f"loss.normalize={normalize}"
    full = Twice(tiny, tmp_path / "full", setting).gradient(keep_all(ADV_NG))
    step = Twice(tiny, tmp_path / "run", setting, "teacher.keep=1")
    drawn = list(step.both(monkeypatch))
    assert len(drawn) > 20

    def unweighted(pruned: Pruned) -> Pruned:
        return replace(pruned, weight_NG=pruned.keep_NG.double())

    def gradient(first: Pruned, second: Pruned) -> Tensor:
        monkeypatch.setattr(distill, "pps", lambda *given: second)
        return step.gradient(first)

    assert distance(mean_of(drawn, gradient), full) < EXACT
    assert distance(mean_of(drawn, lambda first, second: gradient(unweighted(first), second)), full) > 0.01
    assert distance(mean_of(drawn, lambda first, second: gradient(first, unweighted(second))), full) > 0.01


def test_a_teacher_of_other_tokens_is_refused_by_the_first_and_one_of_a_padded_vocabulary_is_not(tmp_path):
    student, other = data.Tokenizer(TOY), write_tiny(tmp_path / "other", vocab_size=512)
    distill.require_same_tokens(student, other)
    cfg = toy_config(tmp_path / "run", f"model.path={other}", *SHORT, name="opd_toy.yaml")
    with pytest.raises(ConfigError, match="has 477 embeddings and must have the student's 512, padding included"):
        train.train(cfg)  # a student that may sample padding, which the teacher has not
    student.rust.add_tokens(["<think>"])
    with pytest.raises(ConfigError, match=r"token 477, '<think>', is none there; take a teacher of the student's"):
        distill.require_same_tokens(student, other)
    file = json.loads((other / "tokenizer.json").read_text())
    file["model"]["vocab"] |= {"#": 6, "$": 5}
    (other / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=r"teacher.path=.*other needs .* token 5, '#', is 6 there"):
        distill.require_same_tokens(data.Tokenizer(TOY), other)


@pytest.mark.slow
def test_a_run_draws_twice_logs_what_its_teacher_read_goes_on_and_is_replayed(tmp_path, monkeypatch, capsys):
    settings = ["steps=3", "checkpoint.every=1", "checkpoint.keep=all", "rollout.prompts_per_step=6", *SHORT]
    cfg, folder = toy_config(tmp_path / "run", *settings, name="opd_toy.yaml"), tmp_path / "run"
    whole = trained_unchecked(cfg)
    for line in steps_of(folder):
        assert line["prune/kept"] == 2 * 6 and min(line["teacher/kl"], line["time/teacher"], line["prune/error"]) > 0
        assert line["teacher/error"] > 0
        assert 0 < line["train/tokens"] < line["teacher/tokens"] and 0.05 < line["teacher/share"] < 0.5
    (folder / "checkpoints" / "latest").write_text("step_000001")
    again = weights(train.train(cfg, resume="always"))
    assert all(p.equal(whole[name]) for name, p in again.items())
    replay.replay(folder, 2, [], draws=0)
    assert "the same bit for bit" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"teacher.path \(weights\)"):
        train.train(config.with_value(cfg, "teacher.path", str(write_tiny(tmp_path / "moved"))), resume="always")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [
    ("flight_toy.yaml", ["loss.old_logp=engine"]), ("calculator_toy.yaml", []), ("lora_toy.yaml", ["prune.completions.kind=none"]),
    ("opd_toy.yaml", ["prune.prompts={kind: pps, share: 0.5}", "prune.tokens.kind=prefix", "loss.normalize=sequence",
                      "data.limit=8", "steps=3"]),
    ("opd_toy.yaml", ["update={epochs: 2, minibatches: 2, redraw: true}", "loss.kl=0.1", "teacher={keep: null, error: 0.5}"])])
def test_it_goes_with_groups_under_way_tools_adapters_and_other_draws(name, settings, tmp_path):
    cfg = toy_config(tmp_path / "run", "advantage={kind: distill}", *SHORT, *settings, name=name)
    trained_unchecked(cfg)
    lines = [line for line in steps_of(tmp_path / "run") if line["prune/kept"]]
    assert lines and all(line["teacher/tokens"] > 0 and line["train/grad_norm"] > 0 for line in lines)


def test_what_a_teacher_takes_is_counted_and_what_it_cannot_go_with_is_refused(command, capsys):
    for name, setting, said in (
            ("opd", "teacher.keep=3", "teacher.keep=3 must be at most 2, the completions per group that the"),
            ("opd", "prune.completions={kind: topk, keep: 2}", "prune.completions.kind=topk must be none or pps"),
            ("grpo", "advantage.kind=distill", "teacher.path=None must be the folder or hub name of a model"),
            ("grpo", f"teacher.path={TEACHER}", "advantage.kind=group_norm must be distill with teacher")):
        with pytest.raises(ConfigError, match=said):
            config.load(f"{name}_toy.yaml", [setting])
    assert command(train, "--config", "opd_math.yaml", "--fit", "--memory", "79", "--gpus", "8") == 0
    assert re.search(r"\nteacher +7.63 +7.63\n", capsys.readouterr().out)  # 32.8 billion weights of 2 bytes on 8 ranks
