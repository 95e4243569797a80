"""Statistics, files that are resumed and graded again, the same numbers alone and inside training."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import survive
from conftest import ROOT, TOY, toy_config

import config
import data
import eval as evaluation
import train
from data import load_problems
from infra import figures, results, runfolder
from infra.digests import differences
from records import Problem, Prompt, Sample
from rollout import TorchEngine


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def held_out(path, count: int) -> str:
    rows = (ROOT / "toy" / "test.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(random.Random(0).sample(rows, count)))
    return str(path)


@pytest.fixture
def run(command):
    return partial(command, evaluation)


@pytest.mark.slow
def test_training_and_the_command_give_identical_numbers(tmp_path, run, capsys):
    """The exported model, evaluated with the run's config by eval.py, repeats the run's last evaluation."""
    data_file = held_out(tmp_path / "held_out.jsonl", 10)
    prompt = "Only the number."
    train.train(toy_config(tmp_path / "run", "model.dtype=float32", "steps=1", f"data.eval={data_file}",
                           f"data.system_prompt={prompt}", "eval.n=4", "eval.temperature=0.8", "eval.top_p=0.9",
                           "eval.max_new_tokens=24"))
    last = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")[-1]
    folder, out = tmp_path / "run", tmp_path / "out.json"
    assert run("--model", folder / "hf", "--config", folder / "config.yaml", "--out", out) == 0
    result = json.loads(out.read_text())
    assert result["head"]["system_prompt"] == prompt
    result = result["results"]["held_out"]
    numbers = result | {"pass": result["pass"]["4"], "majority": result["majority"]["4"]}
    for key in ("accuracy", "low", "high", "lenient", "length", "truncated", "unparsed", "pass", "majority"):
        assert numbers[key] == last[f"eval/held_out/{key}"]
    assert f"{result['accuracy']:.1%}" in capsys.readouterr().out


def written(path, *rights: str, other: str = "") -> str:
    """A result in which each problem's first answer is right or not."""
    problems = [{"id": str(i), "gold": "1", "responses": [{
        "id": str(i), "k": 0, "text": "", "answer": "1", "tokens": 1, "finished": True, "verdict": right,
        "lenient": True, "last_number": True}]} for i, right in enumerate(rights)]
    path.write_text(json.dumps({"head": {"sets": {"few": {"data": other, "count": len(rights)}}},
                                "results": {"few": figures.summarise(problems)}}))
    return str(path)


def test_heads_are_compared_key_by_key():
    old, new = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 2, "d": 4}, "e": ["x"] * 1000}
    expected = ["b.d was 3 and is 4", "e was None and is [" + "'x', " * 6 + "...]", "a was 1 and is None"]
    assert list(differences(old, new)) == expected


@pytest.mark.slow
def test_an_evaluation_goes_on_on_another_number_of_ranks_after_kill_9(tmp_path):
    """On one rank, and killed on two and continued on one: one file, but for rounding."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "2"]
    data_file = held_out(tmp_path / "few.jsonl", 60)

    def command(name: str) -> list[str]:
        more = sets("eval.n=4", "eval.temperature=1", "rollout.slots=8", "eval.max_new_tokens=24")
        return ["eval.py", "--model", str(TOY), "--data", data_file, *more, "--out", str(tmp_path / name)]

    def text(name: str) -> list[str]:
        found = json.loads((tmp_path / name).read_text())["results"]["few"]
        return [r["text"] for p in found["problems"] for r in p["responses"]]

    assert subprocess.run([sys.executable, *command("one")], cwd=ROOT, capture_output=True).returncode == 0
    begun = subprocess.Popen([*torchrun, *command("cut")], cwd=ROOT, stderr=subprocess.DEVNULL)
    partial = tmp_path / "cut.partial"
    while not (partial.is_file() and partial.read_text().count("\n") > 70):
        with pytest.raises(subprocess.TimeoutExpired):
            begun.wait(0.02)
    for pid in survive.family(begun.pid):
        os.kill(pid, signal.SIGKILL)
    begun.wait()
    assert 64 <= partial.read_text().count("\n") - 1 < 240
    other = [*torchrun, *command("cut"), "--seed", "1"]
    refused = subprocess.run(other, cwd=ROOT, capture_output=True, text=True)
    assert "cut.partial holds responses that were made with other settings: sampling.seed was 0" in refused.stderr
    assert refused.returncode and "Timeout" not in refused.stderr
    assert subprocess.run([sys.executable, *command("cut")], cwd=ROOT, capture_output=True).returncode == 0
    assert text("cut") == text("one")


def test_the_verifiers_version_is_that_of_its_code(tmp_path, monkeypatch):
    """Another text or another name of a file of verify/ is another version."""
    copy = tmp_path / "verify"
    shutil.copytree(ROOT / "verify", copy, ignore=shutil.ignore_patterns("__pycache__"))
    true = results.verifier_version()
    monkeypatch.setattr(results.verify, "__file__", str(copy / "__init__.py"))
    assert results.verifier_version() == true
    (copy / "extract.py").write_text((copy / "extract.py").read_text() + "MARKS = 1\n")
    edited = results.verifier_version()
    (copy / "extract.py").rename(copy / "find.py")
    assert len({true, edited, results.verifier_version()}) == 3


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_to_the_same_file(tmp_path, monkeypatch, run, capsys):
    """Killed in its third chunk of five, with a line half written; there is no room for the slots that are set."""
    monkeypatch.setattr(evaluation, "ROUNDS_BETWEEN_WRITES", 1)
    monkeypatch.setattr(evaluation, "fit_engine", lambda name, spec: ("torch", evaluation.replace(spec, slots=4)))
    data_file, generate, calls = held_out(tmp_path / "few.jsonl", 10), TorchEngine.generate, []

    def dies(self, prompts, *rest):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise RuntimeError
        return generate(self, prompts, *rest)

    def evaluate(name: str, *more: str) -> int:
        return run("--model", TOY, "--data", data_file, "--out", tmp_path / name, *more,
                   *sets("eval.n=2", "rollout.slots=8", "eval.temperature=1"))

    evaluate("whole.json")
    monkeypatch.setattr(TorchEngine, "generate", dies)
    with pytest.raises(RuntimeError):
        evaluate("cut.json")
    partial = tmp_path / "cut.json.partial"
    partial.write_text(partial.read_text() + '{"set": "few", "resp')
    assert evaluate("cut.json", "--seed", "1") == 2
    assert "holds responses that were made with other settings: sampling.seed was 0" in capsys.readouterr().err
    calls.clear()
    calls.extend([0] * 3)
    evaluate("cut.json")
    assert sum(calls) == 12 and not partial.exists()
    assert (tmp_path / "cut.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    evaluate("cut.json")
    assert sum(calls) == 12
    assert evaluate("cut.json", *sets("eval.top_p=0.5", "optim.lr=1")) == 2
    note, _, said = capsys.readouterr().err.partition("cut.json holds responses that were made with other settings")
    assert "--set optim.lr=1 is of training: " in note and said.startswith(": sampling.top_p was 1.0 and is 0.5")


def test_scores_count_what_the_engine_wrote():
    tokenizer, texts, asked = data.Tokenizer(TOY), ["#### 1", "#### 2 2 2", "#### 1"], []

    class Scribe:
        def generate(self, requests, *rest):
            asked.extend((request.seed, request.limit, *rest[:2]) for request in requests)
            return [Sample(x, (-1.0,) * len(x), i % 3 > 0) for i, x in enumerate(tokenizer.encode(texts))]

    problems = [Problem(str(i), "q", "1") for i in range(3)]
    few = evaluation.EvalSet("few", problems, [Prompt(p.id, (5,), p.answer) for p in problems])
    result = evaluation.evaluate(Scribe(), tokenizer, few, config.Eval(7))
    lengths = [len(x) for x in tokenizer.encode(texts)]
    scores = [result[key] for key in ("accuracy", "truncated", "length")]
    assert scores == pytest.approx([2 / 3, 1 / 3, sum(lengths) / 3])
    evaluation.evaluate(Scribe(), tokenizer, few, config.Eval(7, temperature=0.7, top_p=0.9), seed=1)
    assert len({seed for seed, *_ in asked}) == 6  # a seed for each problem and run
    assert [settings for _, *settings in asked] == [[7, 0.0, 1.0]] * 3 + [[7, 0.7, 0.9]] * 3


@pytest.mark.parametrize(("name", "expected"), [
    ("cppo_gsm8k", ("gsm8k", 1, 0.0, 1.0, 1024, "<answer> answer here </answer>")),
    ("cppo_math", ("math500", 1, 0.0, 1.0, 1024, "I hope it is correct'")),
    ("cppo_amc_aime", ("amc23,aime24", 4, 0.6, 0.95, 3072, "I hope it is correct'")),
    ("dapo", ("aime24", 32, 1.0, 0.7, 20480, "within \\boxed{}."))])
def test_papers_evaluate_as_their_configs_say(name, expected):
    cfg = config.load(f"eval/{name}.yaml", ["eval.limit=7"])
    found = cfg.data.eval, cfg.eval.n, cfg.eval.temperature, cfg.eval.top_p, cfg.eval.max_new_tokens
    assert found == expected[:5] and expected[5] in cfg.data.system_prompt
    assert cfg.reward.accuracy and cfg.data.max_prompt_tokens >= 512 and cfg.eval.limit == 7


@pytest.mark.parametrize(("changes", "message"), [
    (["--model", "nowhere/at all"], "model.path=nowhere/at all is no folder (looked for in "),
    (sets("eval.max_new_tokens=5000"), "the prompts and eval.max_new_tokens (or "),
    (sets("eval.nn=4"), "unknown key 'eval.nn'. Did you mean 'eval.n'?"),
    (["--config", "eval/none.yaml"], "config 'eval/none.yaml' not found"),
    (["--data", "gsm9k"], "data set 'gsm9k' is not known"), (["--data", "no.jsonl"], "data file no.jsonl not found"),
    (["--out", "nowhere/x.json"], "--out: folder nowhere not found"),
    (["--out", "toy"], "--out toy is a folder; name a file in it for the result"),
    (["--config", "eval/default.yaml", "--data", ""], "--data must be given: sets separated by commas"),
    (["--data", "toy/test.jsonl,toy/test.jsonl"], "evaluation set 'test' is named twice")])
def test_bad_input_is_one_line_and_status_2(changes, message, monkeypatch, refused):
    monkeypatch.chdir(ROOT)
    assert refused(evaluation, "--model", TOY, "--data", "toy/test.jsonl", *changes).startswith(f"error: {message}")


def test_gpqa_is_asked_by_letters(tmp_path):
    rows = [{"Record ID": f"r{i}", "Question": f"Why {i}? ", "Correct Answer": "yes", "Incorrect Answer 1": "no",
             "Incorrect Answer 2": "maybe", "Incorrect Answer 3": " never", "Explanation": "So.",
             "High-level domain": "Physics"} for i in range(40)]
    (tmp_path / "gpqa_diamond.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_problems("gpqa_diamond", str(tmp_path))
    assert Counter(p.answer for p in problems).keys() == set("ABCD") and problems[0].subject == "Physics"
    for problem in problems:
        question, _, *choices = problem.question.split("\n")
        assert f"{problem.answer}) yes" in choices and [c[:3] for c in choices] == ["A) ", "B) ", "C) ", "D) "]
    assert problems == load_problems("gpqa_diamond", str(tmp_path))
    assert data.with_letters(damaged := rows[0] | {"Incorrect Answer 3": None}) is damaged  # so that it will be refused
