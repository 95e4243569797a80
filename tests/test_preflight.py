"""The preflight passes what is right, and each of its checks sees the fault it is there for."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TOY, load, toy_config, weights, write_tiny

import data
import preflight
import train
import update
from config import ConfigError
from rollout import TorchEngine
from sample import Problem

NAMES = ["engine follows a sync", "engine's log-probs", "ratio is 1 before the update", "packed equals alone",
         "distinct samples", "ends of an answer", "chat template opens the answer", "verifier accepts the gold",
         "memory"]


def failing(cfg) -> list[str]:
    checks = train.check(cfg)
    assert [c.name for c in checks] == NAMES
    return [c.name for c in checks if not c.passed]


@pytest.fixture
def cfg(tmp_path):
    return toy_config(tmp_path / "run", "rollout.temperature=0.7", "model.dtype=float32")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_all_is_well_with_a_right_model_and_the_policy_is_left_as_it_was(kind, tmp_path, monkeypatch):
    folder, set_up, seen = write_tiny(tmp_path / "model", model_type=kind), train.set_up, []
    cfg = toy_config(tmp_path / "run", f"model.path={folder}", "model.dtype=float32")
    monkeypatch.setattr(train, "set_up", lambda *given: seen.append(set_up(*given)) or seen[-1])
    assert failing(cfg) == []
    (learner, engine), = seen
    policy, engines = weights(learner.policy), weights(engine.model)
    for name, p in load(folder).named_parameters():
        assert torch.equal(p, policy[name]) and torch.equal(p, engines[name])
    assert all(p.grad is None for p in learner.policy.parameters())


class Stale(TorchEngine):
    """An engine one update behind: each sync brings the weights of the sync before."""

    def sync(self, policy):
        late, self.late = getattr(self, "late", load(TOY)), load(TOY)
        self.late.load_state_dict(weights(policy))
        super().sync(late)


def stale_engine(kind, folder, dtype, device, backend, eos_ids, slots, *rest):
    return Stale(load(folder, dtype), device, eos_ids, slots, backend)


def test_an_engine_one_update_behind_is_seen_by_the_preflight_and_by_the_metric(cfg, monkeypatch):
    monkeypatch.setattr(train, "start_engine", stale_engine)
    assert failing(cfg) == ["engine follows a sync", "engine's log-probs"]
    with pytest.raises(ConfigError, match="engine follows a sync.*\n.*other weights than it was given"):
        train.train(cfg)
    assert not (ROOT / cfg.out).exists()  # a run that never began leaves nothing to clear away
    monkeypatch.setattr(preflight, "run", lambda learner, engine, *rest: engine.sync(learner.policy) or [])
    train.train(replace(cfg, steps=3))
    lines = [json.loads(line) for line in (ROOT / cfg.out / "metrics.jsonl").read_text().splitlines()]
    first, *later = [line["mismatch/logp_abs_mean"] for line in lines if "mismatch/logp_abs_mean" in line]
    assert first < 1e-5 and min(later) > 1e-3


def test_seeds_that_are_not_used_are_seen(cfg, monkeypatch):
    monkeypatch.setattr(data, "sample_seed", lambda *where: 7)
    assert failing(cfg) == ["distinct samples"]


@pytest.mark.parametrize(("probability", "equal", "passed"),
                         [(0.3, 1, True), (0.1, 8, False), (0.9, 8, True), (1e-7, 1, False), (1e-7, 0, True)])
def test_likely_samples_may_repeat(probability, equal, passed):
    """8 prompts, two seeds each, of which `equal` give the same sample of this probability."""
    pairs = [(preflight.Sample((1,), (math.log(probability),), True),
              preflight.Sample((1 if n < equal else 2,), (-1.0,), True)) for n in range(8)]
    groups = [preflight.Group(preflight.Prompt(str(n), (1,), ""), pair) for n, pair in enumerate(pairs)]
    assert preflight.distinct(groups).passed == passed


def test_attention_across_sequences_is_seen(cfg, monkeypatch):
    """Every key of the row up to a token's own place, whichever sequence it belongs to."""
    def leaking(offsets, max_len):
        whole = torch.tensor([0, int(offsets[-1])], device=offsets.device)
        return train_backend(whole, int(whole[-1]))

    train_backend = update.BACKENDS["sdpa"]
    monkeypatch.setattr(update, "BACKENDS", {"sdpa": leaking})
    assert "packed equals alone" in failing(cfg)


def test_a_pass_with_gradient_that_differs_is_seen(cfg, monkeypatch):
    log_probs = update.Learner.log_probs
    monkeypatch.setattr(update.Learner, "log_probs", lambda self, model, row: log_probs(self, model, row) + (
        0.01 if torch.is_grad_enabled() else 0.0))
    assert failing(cfg) == ["ratio is 1 before the update"]


def test_temperature_is_part_of_the_comparison(cfg, monkeypatch):
    generate = TorchEngine.generate
    monkeypatch.setattr(TorchEngine, "generate", lambda self, prompts, seeds, new, temperature: generate(
        self, prompts, seeds, new, 1.0))
    assert failing(cfg) == ["engine follows a sync", "engine's log-probs"]


def edit(folder, name, **changes):
    raw = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**raw, **changes}))


def test_a_template_that_closes_answers_with_another_token_is_seen(tmp_path):
    folder = write_tiny(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        edit(folder, name, eos_token_id=0)
    edit(folder, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert failing(toy_config(tmp_path / "run", f"model.path={folder}")) == ["ends of an answer"]
    edit(folder, "generation_config.json", eos_token_id=[0, 2])
    assert failing(toy_config(tmp_path / "run", f"model.path={folder}")) == []
    edit(folder, "generation_config.json", eos_token_id=[0, 2, 477])  # beyond the vocabulary
    assert failing(toy_config(tmp_path / "run", f"model.path={folder}")) == ["ends of an answer"]


def test_a_template_that_does_not_open_the_answer_is_seen(tmp_path):
    folder = write_tiny(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"].partition("{% if add_generation_prompt")[0]
    edit(folder, "tokenizer_config.json", chat_template=template)
    assert failing(toy_config(tmp_path / "run", f"model.path={folder}")) == ["chat template opens the answer"]


def test_the_verifier_is_tried_on_solutions_or_on_boxed_answers():
    right = [Problem("a", "q", "7", "so 3 + 4 = 7\n#### 7"), Problem("b", "q", r"\frac{1}{2}", "no mark")]
    wrong = Problem("c", "q", "8", "so 3 + 4 = 7\n#### 7")
    assert preflight.verifier(right).found == "2 of 2 gold solutions" and preflight.verifier(right).passed
    assert preflight.verifier([*right, wrong]).found == "2 of 3 gold solutions; not c"
    assert not preflight.verifier([*right, wrong]).passed


def test_a_row_that_does_not_fit_is_seen(cfg, monkeypatch):
    log_probs = update.Learner.log_probs

    def full(self, model, row):
        if len(row.ids_T) == cfg.pack.capacity and torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return log_probs(self, model, row)

    monkeypatch.setattr(update.Learner, "log_probs", full)
    with pytest.raises(ConfigError, match="out of memory on a full row of 1024 tokens; for the update lower"):
        failing(cfg)
    GiB = 2**30
    assert preflight.memory(GiB, GiB, GiB).passed
    assert not preflight.memory(2 * GiB, 0, GiB).passed and not preflight.memory(0, 2 * GiB, GiB).passed


def test_the_policys_longest_probe_spans_several_blocks_of_a_prefix_cache():
    tokenizer = data.Tokenizer(TOY)
    prompts = data.to_prompts(data.load_problems(str(ROOT / "toy" / "train.jsonl")), tokenizer, None, 128)
    assert [len(p.ids) for p in preflight.probe_prompts(prompts, 300)][-1] == 300
    assert len(preflight.probe_prompts(prompts, 4096)[-1].ids) == 512
