"""The critic's gradient: of completions with a reward alone, whatever shares a row with them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import as_rolled, gradients, nudge, others_slow
from outcomes import ADV_NG, REWARD_NG
from test_invariance import Gradient, assert_same, change, in_other_ways, objective, on_ranks, rolled
from test_objectives import CORRECT_NG, Case, critic_of, learner_on
from test_shared import CUTS, SHAPE, alone, assert_equal
from test_unbiased import Padded, padded

import config
import learner as learner_module
from config import Pack
from infra import dist
from leaves.critic import join as critic
from leaves.windows.join import Piece

__all__ = ["rolled"]


def test_a_critic_learns_from_those_with_a_reward_alone(tiny, tmp_path):
    step = Padded(tiny, tmp_path / "run", "advantage={kind: gae}", "critic.lr=1e-4")
    rolled = as_rolled(step.groups, padded(REWARD_NG), padded(ADV_NG))
    parts = critic.split_minibatches(critic_of(step.learner), step.learner, rolled, 0)
    times_NG = sum(part.keep_NG.int() for part in parts)
    assert torch.equal(times_NG == 1, ~padded(REWARD_NG).isnan())


def gradient_of_case(folder, out, lam: float, pack: Pack) -> Gradient:
    """Of the critic's loss on completions that have ended, all but one."""
    case = Case("vapo", folder, out, f"advantage.lam_critic={lam}", "critic.minibatches=1", **SHAPE)
    trained = replace(case.learner, pack=pack)
    of_critic, samples = critic_of(trained), list(case.groups[1].samples)
    samples[2] = Piece(replace(samples[2], finished=False), pending=True)
    groups = [case.groups[0], replace(case.groups[1], samples=tuple(samples))]
    minibatch, = critic.split_minibatches(of_critic, trained, as_rolled(groups, CORRECT_NG), step=0)
    for row in trained.rows(minibatch):
        target_C = critic.critic_target(of_critic, trained, row, critic.rewards_of(minibatch, row))
        critic.add_value_gradient(of_critic, trained, row, target_C)
    return gradients(of_critic.model)


@pytest.mark.slow
@pytest.mark.parametrize("lam", [1, 0.9])
def test_with_shared_prompts_it_is_the_one_without(lam, tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "pack", alone)
        expected = gradient_of_case(tiny, tmp_path / "run", lam, Pack(1000))
    for cut in ("whole", "split"):
        assert_equal(gradient_of_case(tiny, tmp_path / "run", lam, CUTS[cut]), expected, cut)
    others = on_ranks(2, tmp_path, gradient_of_case, tiny, tmp_path / "run", lam, Pack(1000)) if lam == 1 else []
    for other in others:
        assert_equal(other, expected, "two ranks")


def critics_gradient(cfg: config.Config, groups: list, adv_NG: torch.Tensor) -> tuple[float, Gradient]:
    """Of the critic's loss on what is done."""
    learner, total = learner_on(Path(cfg.model.path), cfg), 0.0
    of_critic = critic_of(learner)
    nudge(of_critic.model, 0.1)
    minibatch, = critic.split_minibatches(of_critic, learner, as_rolled(groups, adv_NG), step=0)
    for row in learner.rows(minibatch):
        target_C = critic.critic_target(of_critic, learner, row, critic.rewards_of(minibatch, row))
        loss, _ = critic.add_value_gradient(of_critic, learner, row, target_C)
        total += loss.item()
    return dist.sum_over_ranks({"loss": total})["loss"], gradients(of_critic.model)


@pytest.mark.slow
@pytest.mark.parametrize("how", others_slow([["advantage.lam_critic=1"], ["advantage.lam_critic=0.9"],
                                             ["model.lora.rank=2"]], ["advantage.lam_critic=0.9"]))
def test_the_critics_gradient_does_not_depend_on_the_cut_or_the_order(how, rolled, tiny, tmp_path):
    cfg = objective("vapo", tmp_path / "run", f"model.path={tiny}", "critic.minibatches=1", *how)
    alone = critics_gradient(cfg, *rolled)
    for other in in_other_ways(critics_gradient, cfg, *rolled):
        assert_same(alone, other, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "all"])
def test_compiled_passes_have_the_same_gradient_of_the_critic(how, rolled, tiny, tmp_path):
    cfg = objective("vapo", tmp_path / "run", f"model.path={tiny}", "critic.minibatches=1", "pack.capacity=176",
                    f"model.checkpoint_blocks={how}")
    fused = change(cfg, "model.compile=true")
    assert_same(critics_gradient(cfg, *rolled), critics_gradient(fused, *rolled), rtol=1e-10)
