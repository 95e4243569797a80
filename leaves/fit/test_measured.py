"""Memory is measured before a run, and what it has no room for is said."""

from dataclasses import replace

import pytest
import torch
from conftest import toy_config
from test_objectives import critic_of, learner_on

import train
from infra import checks
from infra.choices import resolve_auto
from learner import Learner
from leaves.fit import counts, measured, memory
from policy import Weights
from settings.loader import ConfigError


def test_a_row_that_does_not_fit_is_seen(tmp_path, monkeypatch):
    asked, log_probs = toy_config(tmp_path / "run", "model.dtype=float32"), Learner.log_probs
    task = train.load_task(asked)
    cfg = resolve_auto(asked, task.source)
    ready = checks.Ready(cfg, *train.load_models(cfg, task, Weights()), task)
    fits, = measured.before_run(asked, ready).checks
    assert fits.passed and fits.name == "memory"

    def full(self, model, row):
        if len(row.ids_T) > cfg.pack.capacity / 2 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return log_probs(self, model, row)

    monkeypatch.setattr(Learner, "log_probs", full)
    with pytest.raises(ConfigError, match="out of memory on a full row of 1024 tokens; for the update lower"):
        measured.before_run(asked, ready)
    GiB, check = 2**30, measured.check_memory
    assert check(GiB, GiB, GiB, GiB).passed
    assert not check(2 * GiB, 0, GiB, 0).passed and not check(0, 2 * GiB, GiB, 0).passed
    assert "update 1.0 (counted 4.0 a rank), rollout 2.0 of 3.0 GiB" in check(GiB, 2 * GiB, 3 * GiB, 4 * GiB).figures


def test_what_torch_still_holds_of_an_update_is_not_counted_beside_the_cache(tiny, tmp_path, monkeypatch):
    cfg = resolve_auto(toy_config(tmp_path / "run"), tiny)
    trainer, held = learner_on(tiny, cfg), {"cpu": 100.0, "cuda": 100.0}
    monkeypatch.setattr(measured, "used_bytes", lambda device: held[device.type])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.update(cuda=10.0))
    on_cpu, on_cuda = (measured.peak_of_rollout(cfg, replace(trainer, device=torch.device(kind)))
                       for kind in ("cpu", "cuda"))
    assert on_cpu - on_cuda == 90 and on_cuda > 10
    assert measured.peak_of_rollout(replace(cfg, rollout=replace(cfg.rollout, engine="vllm")), trainer) == 100


def test_rows_left_to_auto_grow_on_cuda_by_what_the_count_was_over(tiny, tmp_path, monkeypatch, capsys):
    """And by no more than it ever was. A row of the counted capacity is measured; those that are named stay."""
    asked = toy_config(tmp_path / "run", "pack.capacity=auto", "rollout.prompts_per_step=64")
    cfg = resolve_auto(asked, tiny)
    trainer, first = replace(learner_on(tiny, cfg), device=torch.device("cuda")), cfg.pack.capacity

    def counted(tokens: int) -> float:
        longer = measured.with_rows(cfg, cfg.model.checkpoint_blocks, tokens)
        held = counts.held_parts(longer, trainer.policy.shape, 1)
        return counts.update_bytes(longer, trainer.policy.shape, 1) - sum(held.values())

    room = 2 * counted(first)
    monkeypatch.setattr(measured, "used_bytes", lambda device: 1000)
    monkeypatch.setattr(measured, "total_bytes", lambda device: (room + 1000) / measured.USABLE_SHARE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for over, allowed in ((1.2, 1.2), (10, memory.OVERCOUNT)):
        monkeypatch.setattr(measured, "peak_of_update", lambda *given, over=over: 1000 + counted(first) / over)
        again, grown = measured.lengthen_rows(asked, cfg, trainer)
        longer = again.pack.capacity
        assert grown.pack.capacity == longer > first == trainer.pack.capacity
        assert counted(longer) <= room * allowed < counted(longer + memory.ROW_STEP)
        assert f"measured here: pack.capacity={longer}\n" in capsys.readouterr().out
    assert measured.lengthen_rows(cfg, cfg, trainer)[0] is cfg
    assert measured.lengthen_rows(asked, cfg, replace(trainer, device=torch.device("cpu")))[0] is cfg


def test_a_full_row_leaves_no_gradient_in_the_policy_or_the_critic(tiny, tmp_path):
    cfg = resolve_auto(toy_config(tmp_path / "run", name="ppo_gsm8k.yaml toy.yaml"), tiny)
    trainer = learner_on(tiny, cfg)
    assert measured.peak_of_update(cfg, trainer) > 0
    for model in (trainer.policy, critic_of(trainer).model):
        assert all(p.grad is None for p in model.parameters())
