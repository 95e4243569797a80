"""Intervals, and that evaluation alone and inside training give the same numbers."""

import json
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TOY, toy_config

import data
import dist
import eval as evaluation
import runfolder
import train
from config import ConfigError
from rollout import TorchEngine
from sample import Prompt, Sample


@pytest.mark.parametrize(("correct", "count", "low", "high"), [
    (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (1, 1319, 0.000134, 0.004280)])
def test_wilson_by_the_published_table(correct, count, low, high):
    """Values of the closed form; the first rows stand in Brown, Cai and DasGupta (2001)."""
    assert evaluation.wilson(correct, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.7])
def test_wilson_covers_the_truth_at_its_rate(share):
    """Exact coverage over all outcomes of 200 draws, at most 3 points off 95%."""
    def chance(k: int) -> float:
        n = torch.tensor(200.0, dtype=torch.float64)
        return torch.distributions.Binomial(n, torch.tensor(share, dtype=torch.float64)).log_prob(
            torch.tensor(float(k), dtype=torch.float64)).exp().item()
    intervals = [evaluation.wilson(k, 200) for k in range(201)]
    covered = sum(chance(k) for k, (low, high) in enumerate(intervals) if low <= share <= high)
    assert 0.92 < covered < 0.98


def test_training_and_the_command_give_identical_numbers(tmp_path):
    """The exported model, evaluated by eval.py, repeats the closing evaluation of the run that made it."""
    cfg = toy_config(tmp_path / "run", "model.dtype=float32", "steps=1")
    rows = (ROOT / "toy" / "test.jsonl").read_text().splitlines(keepends=True)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(random.Random(0).sample(rows, 40)))
    train.train(train.config.build(train.Config, train.config.merge(
        train.config.yaml.safe_load(train.config.dump(cfg)), {"data": {"eval": str(held_out)}})))
    last = runfolder.read(tmp_path / "run" / "metrics.jsonl")[-1]
    command = [sys.executable, "eval.py", "--model", str(tmp_path / "run" / "hf"), "--data", str(held_out),
               "--max-new-tokens", str(cfg.eval.max_new_tokens), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())["results"]["held_out"]
    for key in ("accuracy", "low", "high", "length", "truncated"):
        assert result[key] == last[f"eval/held_out/{key}"]
    assert len(result["responses"]) == 40
    assert result["accuracy"] == sum(r["correct"] for r in result["responses"]) / 40
    assert f"{result['accuracy']:.1%}" in done.stdout


def test_scores_count_what_the_engine_wrote():
    tokenizer, texts, asked = data.Tokenizer(TOY), ["#### 1", "#### 2 2 2", "#### 1"], []

    class Scribe:
        def generate(self, prompts, seeds, *rest):
            asked.extend(seeds)
            return [Sample(x, (-1.0,) * len(x), i % 3 > 0) for i, x in enumerate(tokenizer.encode(texts))]

    prompts = [Prompt(str(i), (5,), "1") for i in range(3)]
    result = evaluation.evaluate(Scribe(), tokenizer, prompts, 7)
    lengths = [len(x) for x in tokenizer.encode(texts)]
    scores = [result[key] for key in ("accuracy", "truncated", "length")]
    assert scores == pytest.approx([2 / 3, 1 / 3, sum(lengths) / 3])
    evaluation.evaluate(Scribe(), tokenizer, prompts, 7, seed=1)
    assert len(set(asked)) == 6  # a seed for each problem and run


def test_the_command_passes_its_arguments_on(tmp_path, monkeypatch):
    asked, generate = [], TorchEngine.generate

    def spy(self, prompts, seeds, *rest):
        asked.append((data.Tokenizer(TOY).decode(prompts[0]), rest[:3], self.slots, seeds))
        return generate(self, prompts, seeds, *rest)

    monkeypatch.setattr(TorchEngine, "generate", spy)
    monkeypatch.setattr(dist, "close", lambda: None)  # the suite's own group
    (tmp_path / "few.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    for seed in "12":
        monkeypatch.setattr(sys, "argv", [
            "eval.py", "--model", str(TOY), "--data", str(tmp_path / "few.jsonl"), "--system-prompt", "Zebra.",
            "--temperature", "0.7", "--top-p", "0.9", "--seed", seed, "--slots", "3", "--max-new-tokens", "5"])
        evaluation.main()
    assert all("Zebra." in text and rest == (5, 0.7, 0.9) and slots == 3 for text, rest, slots, _ in asked)
    assert asked[0][3] != asked[1][3]


def test_all_ranks_take_the_same_kind_of_device(monkeypatch):
    """Two processes on a machine with one GPU: none takes it, and asking for it is an error on both."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert dist.init("auto").type == "cpu"
        with pytest.raises(ConfigError, match="device=cuda, but this machine shows 1 CUDA devices to 2 processes"):
            dist.init("cuda")


@pytest.mark.parametrize(("changes", "message"), [
    (["--model", "nowhere/at all"], "model.path='nowhere/at all' is neither a folder nor a model that the hub gives"),
    (["--max-new-tokens", "5000"], "the prompts and --max-new-tokens allow sequences of 50"),
    (["--out", "nowhere/x.json"], "--out: folder nowhere not found"),
    (["--top-p", "0"], "--top-p must be in (0, 1]"),
    (["--data", "toy/test.jsonl,toy/test.jsonl"], "evaluation set 'test' is named twice"),
    (["--device", "cuda"], "device=cuda, but this machine shows"),
])
def test_bad_input_is_one_line_and_status_2(changes, message):
    if "cuda" in changes and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    command = [sys.executable, "eval.py", "--model", str(TOY), "--data", "toy/test.jsonl", *changes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
