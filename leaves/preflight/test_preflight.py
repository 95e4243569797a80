"""The preflight passes what is right, and each of its checks sees the fault it is there for."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TOY, load, toy_config, weights, write_tiny

import learner
import train
from infra.choices import resolve_auto
from learner import Learner
from leaves.lora import join as lora
from leaves.preflight import checks as preflight
from policy import Weights
from records import Group, Problem, Prompt, Sample, Segments
from rollout import TorchEngine
from settings import leaves
from settings.loader import ConfigError

NAMES = ["engine follows a sync", "engine's log-probs", "ratio is 1 before the update", "packed equals alone",
         "distinct samples", "ends of an answer", "chat template opens the answer", "whole prompts are sampled from",
         "verifier accepts the gold", "good answers are rewarded"]


SHORT = ["rollout.max_new_tokens=24", "eval.max_new_tokens=8"]


def failing(cfg) -> list[str]:
    task = train.load_task(cfg)
    cfg = resolve_auto(cfg, task.source)
    checks = preflight.run_checks(cfg, *train.load_models(cfg, task, leaves.through("weights", cfg, Weights())), task)
    assert [c.name for c in checks] == NAMES
    return [c.name for c in checks if not c.passed]


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Runs have their checks here."""


@pytest.fixture
def cfg(tiny, tmp_path):
    return toy_config(tmp_path / "run", f"model.path={tiny}", "rollout.temperature=0.7", "model.dtype=float32",
                      "rollout.max_new_tokens=24", "eval.max_new_tokens=8")


@pytest.mark.parametrize(("kind", "settings"), [("llama", []), ("qwen2", ["model.lora.rank=2"])])
def test_all_is_well_with_a_right_model_and_the_policy_is_left_as_it_was(kind, settings, tmp_path, monkeypatch):
    folder, set_up, seen = write_tiny(tmp_path / "model", model_type=kind), train.load_models, []
    cfg = toy_config(tmp_path / "run", f"model.path={folder}", "model.dtype=float32", *settings)
    monkeypatch.setattr(train, "load_models", lambda *given: seen.append(set_up(*given)) or seen[-1])
    assert failing(cfg) == []
    (trainer, engine), = seen
    policy, engines = weights(trainer.policy), weights(engine.model)
    for name, p in load(folder).named_parameters():
        assert torch.equal(p, policy[name]) and torch.equal(p, engines[name])
    assert all(p.grad is None for p in trainer.policy.parameters())
    assert not any(p.any() for name, p in policy.items() if name.endswith("lora_B"))


def test_an_adapter_that_no_engine_gets_is_seen(tiny, tmp_path, monkeypatch):
    """Although it adds nothing yet."""
    monkeypatch.setattr(lora.Adapted, "merged", lambda layer: [("weight", layer.weight), ("bias", layer.bias)][
        :1 + (layer.bias is not None)])
    cfg = toy_config(tmp_path / "run", f"model.path={tiny}", "model.dtype=float32", "rollout.max_new_tokens=24",
                     "eval.max_new_tokens=8", "model.lora.rank=2")
    assert failing(cfg) == ["engine follows a sync"]


@pytest.mark.slow
def test_a_run_does_not_depend_on_its_preflight(tmp_path, monkeypatch):
    with_it = weights(train.train(toy_config(tmp_path / "with", "steps=1", *SHORT)))
    monkeypatch.setattr(train.checks, "before_run", lambda cfg, ready: ready)
    without = weights(train.train(toy_config(tmp_path / "without", "steps=1", *SHORT)))
    assert all(torch.equal(without[name], p) for name, p in with_it.items())
    assert any(not torch.equal(p, with_it[name]) for name, p in load(TOY, torch.float64).named_parameters())


class Stale(TorchEngine):
    """An engine one update behind: each sync brings the weights of the sync before."""

    def sync(self, policy):
        late, self.late = getattr(self, "late", load(self.folder)), load(self.folder)
        self.late.load_state_dict(weights(policy))
        super().sync(late)


def stale_engine(kind, spec):
    Stale.folder = spec.folder
    return Stale(load(spec.folder, spec.dtype), spec)


def test_an_engine_one_update_behind_is_seen_by_the_preflight_and_by_the_metric(cfg, monkeypatch):
    monkeypatch.setattr(train, "start_engine", stale_engine)
    cfg = replace(cfg, model=replace(cfg.model, path=str(TOY)))  # one that learns, so that its weights move
    assert failing(cfg) == ["engine follows a sync", "engine's log-probs"]
    with pytest.raises(ConfigError, match="engine follows a sync.*\n.*other weights than it was given"):
        train.train(cfg)
    assert not (ROOT / cfg.out).exists()  # a run that never began leaves nothing to clear away
    monkeypatch.setattr(train.checks, "before_run", lambda cfg, ready: ready)
    train.train(replace(cfg, steps=3))
    lines = [json.loads(line) for line in (ROOT / cfg.out / "metrics.jsonl").read_text().splitlines()]
    first, *later = [line["mismatch/logp_abs_mean"] for line in lines if "mismatch/logp_abs_mean" in line]
    assert first < 1e-5 and min(later) > 1e-3


def test_seeds_that_are_not_used_are_seen(cfg, monkeypatch):
    monkeypatch.setattr(preflight, "sample_seed", lambda *where: 7)
    assert failing(cfg) == ["distinct samples"]


@pytest.mark.parametrize(("probability", "equal", "passed"),
                         [(0.3, 1, True), (0.1, 8, False), (0.9, 8, True), (1e-7, 1, False), (1e-7, 0, True)])
def test_likely_samples_may_repeat(probability, equal, passed):
    """8 prompts, two seeds each, of which `equal` give the same sample of this probability."""
    pairs = [(Sample((1,), (math.log(probability),), True),
              Sample((1 if n < equal else 2,), (-1.0,), True)) for n in range(8)]
    groups = [Group(Prompt(str(n), (1,), ""), pair) for n, pair in enumerate(pairs)]
    assert preflight.check_seeds(groups).passed == passed


def test_attention_across_sequences_is_seen(cfg, monkeypatch):
    """Every key of the row up to a token's own place, whichever sequence it belongs to."""
    def leaking(segments):
        return train_backend(Segments.plain([sum(segments.queries)]))

    train_backend = learner.BACKENDS["sdpa"]
    monkeypatch.setattr(learner, "BACKENDS", {"sdpa": leaking})
    assert "packed equals alone" in failing(cfg)


def test_a_pass_with_gradient_that_differs_is_seen(cfg, monkeypatch):
    log_probs = Learner.log_probs
    monkeypatch.setattr(Learner, "log_probs", lambda self, model, row: log_probs(self, model, row) + (
        0.01 if torch.is_grad_enabled() else 0.0))
    assert failing(cfg) == ["ratio is 1 before the update"]


def test_temperature_is_part_of_the_comparison(cfg, monkeypatch):
    generate = TorchEngine.generate
    monkeypatch.setattr(TorchEngine, "generate", lambda self, requests, temperature: generate(self, requests, 1.0))
    assert failing(cfg) == ["engine follows a sync", "engine's log-probs"]


def edit(folder, name, **changes):
    raw = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**raw, **changes}))


def test_a_first_problem_that_is_left_out_is_not_compared_with_the_prompt_of_another(tmp_path):
    questions = {"long": "One and " * 60, "a": "1?"}
    rows = [{"id": name, "question": question, "answer": "1"} for name, question in questions.items()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = toy_config(
        tmp_path / "run", f"data.train={tmp_path / 'train.jsonl'}", "data.eval=null", "data.drop_longer=true")
    task = train.load_task(cfg)
    assert [p.id for p in task.problems] == [p.id for p in task.prompts] == ["a"]
    assert preflight.check_prompts(task, None).passed


@pytest.mark.slow
def test_a_template_that_closes_answers_with_another_token_is_seen(tmp_path):
    folder = write_tiny(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        edit(folder, name, eos_token_id=0)
    edit(folder, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert failing(toy_config(tmp_path / "run", f"model.path={folder}")) == ["ends of an answer"]
    edit(folder, "generation_config.json", eos_token_id=[0, 2])
    assert failing(toy_config(tmp_path / "run", f"model.path={folder}")) == []
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder, "tokenizer.json", added_tokens=[*added, added[-1] | {"id": 477, "content": "<|beyond|>"}])
    beyond = toy_config(tmp_path / "run", f"model.path={folder}", "rollout.stop=['<|beyond|>']")
    assert failing(beyond) == ["ends of an answer"]


def test_a_template_that_does_not_open_the_answer_is_seen(tmp_path):
    folder = write_tiny(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"].partition("{% if add_generation_prompt")[0]
    edit(folder, "tokenizer_config.json", chat_template=template)
    assert failing(toy_config(tmp_path / "run", f"model.path={folder}")) == ["chat template opens the answer"]


def test_the_verifier_is_tried_on_solutions_or_on_boxed_answers():
    right = [Problem("a", "q", "7", "so 3 + 4 = 7\n#### 7"), Problem("b", "q", r"\frac{1}{2}", "no mark")]
    wrong = Problem("c", "q", "8", "so 3 + 4 = 7\n#### 7")
    assert preflight.check_verifier(right).figures == "2 of 2 gold solutions" and preflight.check_verifier(right).passed
    assert preflight.check_verifier([*right, wrong]).figures == "2 of 3 gold solutions; not c"
    assert not preflight.check_verifier([*right, wrong]).passed


def task_of(folder, **reward) -> tuple:
    cfg = toy_config(folder / "run", f"model.path={folder / 'model'}", *(f"reward.{k}={v}" for k, v in reward.items()))
    return cfg, train.load_task(cfg)


def test_a_tokenizer_that_changes_text_fails_both_ways(tmp_path):
    """Prompts are not what the template wrote, and completions not what the model wrote."""
    write_tiny(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Replace", "pattern": {
        "String": "i"}, "content": "j"}}))
    cfg, task = task_of(tmp_path)
    assert not preflight.check_prompts(task, None).passed and not preflight.check_rewards(cfg.reward, task).passed
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": None}))
    cfg, task = task_of(tmp_path)
    assert preflight.check_prompts(task, None).passed and preflight.check_rewards(cfg.reward, task).passed
    assert preflight.compare_with_transformers(cfg, task)[0].passed


def test_a_reward_that_no_completion_can_get_is_named(tmp_path):
    write_tiny(tmp_path / "model")
    cfg, task = task_of(tmp_path, accuracy=1, wrong=-1, boxed=0.1, format=1, tag_exact=1, tag_number=1)
    assert preflight.check_rewards(cfg.reward, task).figures == "no component out of reach"
    words = [replace(problem, answer="Paris") for problem in task.problems[:3]]
    failed = preflight.check_rewards(cfg.reward, replace(task, problems=words))
    assert not failed.passed and failed.figures == "tag_number out of reach"


def test_prompts_that_transformers_makes_otherwise_are_named(tmp_path):
    write_tiny(tmp_path / "model")
    cfg, task = task_of(tmp_path)
    other = replace(task.prompts[0], ids=task.prompts[0].ids[1:])
    checked, = preflight.compare_with_transformers(cfg, replace(task, prompts=[other]))
    assert not checked.passed and checked.figures.endswith("there, 49 here")
    plain = toy_config(tmp_path / "run", "data.prompt=Q: {question}")
    assert preflight.compare_with_transformers(plain, train.load_task(plain)) == []


@pytest.mark.slow
def test_a_run_without_any_signal_says_so_once(tmp_path, capsys):
    train.train(toy_config(tmp_path / "run", "steps=8", "rollout.max_new_tokens=2", "data.eval=null"))
    said = capsys.readouterr().err
    assert said.count("no group of the last 5 steps has different rewards, and 100% of these completions are tru") == 1
