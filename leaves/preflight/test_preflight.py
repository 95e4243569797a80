"""The preflight passes what is right, and each of its checks sees the fault it is there for."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import TOY, load, refuses, toy_config, unshared, weights, write_tiny
from test_data import edit

import learner
import train
from infra.checks import Ready
from infra.choices import resolve_auto
from infra.lines import read_log
from learner import Learner
from leaves.lora import join as lora
from leaves.preflight import join as preflight
from policy import Weights
from records import Problem
from rollout import TorchEngine
from settings import leaves

NAMES = ["engine's log-probs", "ratio is 1 before the update", "ends of an answer", "chat template opens the answer",
         "verifier accepts the gold", "good answers are rewarded"]
SHORT = ["rollout.max_new_tokens=24", "eval.max_new_tokens=8"]


def short_config(tmp_path, model, *settings):
    return toy_config(tmp_path / "run", f"model.path={model}", "rollout.temperature=0.7", "model.dtype=float32", *SHORT,
                      *settings)


def failing(cfg) -> list[str]:
    task = train.load_task(cfg)
    cfg = resolve_auto(cfg, task.source)
    models = train.load_models(cfg, task, leaves.through("weights", cfg, Weights()))
    checks = preflight.before_run(cfg, Ready(cfg, *models, task)).checks
    assert [c.name for c in checks] == NAMES
    return [c.name for c in checks if not c.passed]


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Runs have their checks here."""


@pytest.mark.parametrize(("kind", "settings"), [("llama", []), ("qwen2", ["model.lora.rank=2"])])
def test_all_is_well_with_a_right_model_and_the_policy_is_left_as_it_was(kind, settings, tmp_path, monkeypatch):
    folder, set_up, seen = write_tiny(tmp_path / "model", model_type=kind), train.load_models, []
    cfg = short_config(tmp_path, folder, *settings)
    monkeypatch.setattr(train, "load_models", lambda *given: seen.append(set_up(*given)) or seen[-1])
    assert failing(cfg) == []
    (trainer, engine), = seen
    policy, engines = weights(trainer.policy), weights(engine.model)
    for name, p in load(folder).named_parameters():
        assert torch.equal(p, policy[name]) and torch.equal(p, engines[name])
    assert all(p.grad is None for p in trainer.policy.parameters())
    assert not any(p.any() for name, p in policy.items() if name.endswith("lora_B"))


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
        late, self.late = getattr(self, "late", load(TOY)), load(TOY)
        self.late.load_state_dict(weights(policy))
        super().sync(late)


@pytest.mark.slow
def test_an_engine_one_update_behind_is_seen_by_the_preflight_and_by_the_metric(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "start_engine", lambda kind, spec: Stale(load(TOY, spec.dtype), spec))
    cfg = short_config(tmp_path, TOY)  # a model that learns, so that its weights move
    assert failing(cfg) == ["engine's log-probs"]
    refuses("engine's log-probs.*\n.*left stale by a sync", train.train, cfg)
    assert not (tmp_path / "run").exists()  # a run that never began leaves nothing to clear away
    monkeypatch.setattr(train.checks, "before_run", lambda cfg, ready: ready)
    train.train(cfg)
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    first, later = [line["mismatch/logp_abs_mean"] for line in lines if "mismatch/logp_abs_mean" in line]
    assert first < 1e-5 and later > 1e-3


SDPA, LOG_PROBS, GENERATE = learner.BACKENDS["sdpa"], Learner.log_probs, TorchEngine.generate
FAULTS = {  # every key of a row up to a token's own place, whichever sequence it belongs to
    "attention": (learner, "BACKENDS", {"sdpa": lambda segments: SDPA(unshared([sum(segments.queries)]))}),
    "gradient": (Learner, "log_probs", lambda self, model, row: LOG_PROBS(self, model, row) + (
        0.01 if torch.is_grad_enabled() else 0.0)),
    "temperature": (TorchEngine, "generate", lambda self, asked, temperature, progress: GENERATE(self, asked, 1.0)),
    # although an adapter adds nothing yet
    "adapter": (lora.Adapted, "merged", lambda layer: [("weight", layer.weight), ("bias", layer.bias)][
        :1 + (layer.bias is not None)])}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_engine_or_trainer_is_seen(fault, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    expected = "ratio is 1 before the update" if fault == "gradient" else "engine's log-probs"
    assert failing(short_config(tmp_path, tiny, *["model.lora.rank=2"] * (fault == "adapter"))) == [expected]


def test_a_first_problem_that_is_left_out_is_not_compared_with_the_prompt_of_another(tmp_path):
    questions = {"long": "One and " * 60, "a": "1?"}
    rows = [{"id": name, "question": question, "answer": "1"} for name, question in questions.items()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = toy_config(
        tmp_path / "run", f"data.train={tmp_path / 'train.jsonl'}", "data.eval=null", "data.drop_longer=true")
    task = train.load_task(cfg)
    assert [p.id for p in task.problems] == [p.id for p in task.prompts] == ["a"]


@pytest.mark.slow
def test_a_template_that_closes_answers_with_another_token_or_does_not_open_them_is_seen(tmp_path):
    folder = write_tiny(tmp_path / "model")

    def checked(*settings) -> tuple[bool, bool]:
        tokenizer = train.load_task(toy_config(tmp_path / "run", f"model.path={folder}", *settings)).tokenizer
        return preflight.check_ends(tokenizer, 477).passed, preflight.check_template(tokenizer, None).passed

    for name in ("config.json", "generation_config.json"):
        edit(folder, name, eos_token_id=0)
    edit(folder, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert checked() == (False, True)
    edit(folder, "generation_config.json", eos_token_id=[0, 2])
    assert checked() == (True, True)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    edit(folder, "tokenizer.json", added_tokens=[*added, added[-1] | {"id": 477, "content": "<|beyond|>"}])
    assert checked("rollout.stop=['<|beyond|>']") == (False, True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings["chat_template"].partition("{% if add_generation_prompt")[0]
    edit(folder, "tokenizer_config.json", chat_template=template)
    assert checked() == (True, False)


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
    folder = write_tiny(tmp_path / "model")
    replaced = {"type": "Replace", "pattern": {"String": "i"}, "content": "j"}
    for normalizer, passes in ((replaced, False), (None, True)):
        edit(folder, "tokenizer.json", normalizer=normalizer)
        cfg, task = task_of(tmp_path, format=1)
        assert preflight.check_rewards(cfg.reward, task).passed == passes


def test_a_reward_that_no_completion_can_get_is_named(tmp_path):
    write_tiny(tmp_path / "model")
    cfg, task = task_of(tmp_path, accuracy=1, wrong=-1, boxed=0.1, format=1, tag_exact=1, tag_number=1)
    assert preflight.check_rewards(cfg.reward, task).figures == "no component out of reach"
    words = [replace(problem, answer="Paris") for problem in task.problems[:3]]
    failed = preflight.check_rewards(cfg.reward, replace(task, problems=words))
    assert not failed.passed and failed.figures == "tag_number out of reach"


@pytest.mark.slow
def test_a_run_without_any_signal_says_so_once(tmp_path, capsys):
    train.train(toy_config(tmp_path / "run", "steps=8", "rollout.max_new_tokens=2", "data.eval=null"))
    said = capsys.readouterr().err
    assert said.count("no group of the last 5 steps has different rewards, and 100% of these completions are tru") == 1
