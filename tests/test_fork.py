"""What a fork relies on: a frozen role, part of the weights in an optimizer, a rate for every group, logged rewards."""

import pytest
import torch
from conftest import load, toy_config
from torch import nn

import config
import train
from infra import runfolder
from infra.checkpoint import Checkpoints, tensors
from learner import optimizer_step
from reward import COMPONENTS


def test_a_model_that_is_frozen_as_a_whole_is_saved_whole_and_one_without_weights_is_an_error(tiny, tmp_path):
    frozen = load(tiny).requires_grad_(False)
    saved = {name: p.clone() for name, p in frozen.named_parameters()}
    checkpoints = Checkpoints(tmp_path, 1, {"policy": (frozen, ())}, torch.device("cpu"))
    checkpoints.reach(1, {})
    checkpoints.save()
    checkpoints.wait()
    with torch.no_grad():
        for p in frozen.parameters():
            p.zero_()
    checkpoints.load(tmp_path / "step_000001")
    assert saved and all(torch.equal(p, saved[name]) for name, p in frozen.named_parameters())
    with pytest.raises(ValueError, match="cannot hold a Module, which has no weights"):
        tensors(nn.Module())


def test_a_weight_of_no_optimizer_keeps_no_gradient():
    """It would add up over the steps, and count in the norm that gradients are clipped by."""
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer_step(model, [torch.optim.SGD([model.weight])], 0.1, 1.0, 0.0, lambda what: AssertionError(what))
    assert model.bias.grad is None


def test_every_group_of_parameters_of_every_optimizer_steps_at_the_rate():
    model = nn.Linear(3, 2, dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    groups = [{"params": [model.weight], "lr_scale": 0.5}]
    optimizers = [torch.optim.SGD(groups, lr=9.0), torch.optim.SGD([model.bias], lr=9.0)]
    optimizer_step(model, optimizers, 0.1, 100.0, 0.0, lambda what: AssertionError(what))
    torch.testing.assert_close(before["weight"] - model.weight, torch.full((2, 3), 0.05, dtype=torch.float64))
    torch.testing.assert_close(before["bias"] - model.bias, torch.full((2,), 0.1, dtype=torch.float64))


def test_a_reward_of_weight_0_is_logged_and_adds_nothing(tmp_path):
    (tmp_path / "own.py").write_text("def brief(tokens):\n    return -tokens / 1000\n\ndef one():\n    return 1\n")
    cfg = toy_config(tmp_path / "run", "steps=1", "data.eval=null", "rollout.max_new_tokens=8",
                     f"reward.custom_file={tmp_path / 'own.py'}", "reward.custom={brief: 0}", "reward.boxed=0")
    assert cfg.reward.weights == {"accuracy": 1}
    train.train(cfg)
    line = next(line for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line)
    assert line["reward/brief"] < 0 and line["reward/boxed"] == 0 and "reward/format" not in line
    assert line["reward/mean"] == line["reward/accuracy"]


def test_every_component_that_has_a_weight_is_measured():
    assert set(config.Reward(**dict.fromkeys(COMPONENTS, 0.5)).components) == set(COMPONENTS)
