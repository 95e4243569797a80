"""The toy tasks and models: reproducible, disjoint, solvable, small."""

import json
import re

import calculator
import guess
import hard
import lookup
import pytest
import secret_sums
import talk
from conftest import ROOT, TOY
from problems import write
from test_invariance import trained_unchecked

import config
import data
from infra.weights import read_shape
from model import load_model


@pytest.mark.slow
def test_the_shipped_problems_are_those_of_the_generators(tmp_path):
    write(tmp_path)
    hard.write(tmp_path)
    talk.write(tmp_path)
    counts = {"train": 4000, "test": 500, "hard_train": 480, "hard_test": 600, "secret_train": 500, "secret_test": 500,
              "lookup_train": 480, "lookup_test": 240, "guess_train": 480, "guess_test": 240}
    for name, count in ((f"{stem}.jsonl", count) for stem, count in counts.items()):
        assert (tmp_path / name).read_text() == (ROOT / "toy" / name).read_text()
        columns = {"answer": None} if name.startswith("guess") else None
        assert len(data.load_problems(str(ROOT / "toy" / name), None, False, columns, False)) == count


@pytest.mark.parametrize("folder", [TOY, TOY.with_name("hard_model"), TOY.with_name("talk_model")],
                         ids=["toy", "hard", "talk"])
def test_the_shipped_models_are_small_and_take_4096_positions(folder):
    files = [folder / name for name in ("config.json", "tokenizer.json", "model.safetensors")]
    assert sum(path.stat().st_size for path in files) < 6e6
    assert read_shape(folder).max_positions == 4096
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    import torch
    parameters = sum(p.numel() for p in load_model(folder, torch.float32, torch.device("cpu")).parameters())
    assert 0.5e6 < parameters < 1.5e6


# ---- tasks with an environment

def test_sums_are_written_behind_an_equals_sign():
    assert calculator.reply("Ada starts with 5. 5 + 17 =", {}) == " 22" and calculator.reply("5 - 7 =", {}) == " -2"
    assert secret_sums.reply("5 + 17 =", {}) == " 25"
    assert calculator.reply("5 + 17 = 22.", {}) is None and calculator.reply("#### 5", {}) is None


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "toy" / f"{name}.jsonl").read_text().splitlines()]


def test_the_rows_lead_to_their_answers_through_their_environments():
    for row in read("lookup_test"):
        start = re.search(r"(\d+)\.$", row["question"])[1]
        first = lookup.reply(f"{start}?", row)
        second = lookup.reply(f"{start}?{first} {first.strip(' .')}?", row)
        assert second == f" {row['answer']}." and lookup.reply("100?", row) == " 0."
    solved = {row["question"]: row["solution"] for row in read("train") + read("test")}
    for row in read("secret_test"):
        text = ""
        for left, sign, right in talk.STEP.findall(solved[row["question"]]):
            total = text.rpartition("=")[2].strip() or left
            text += f" {total} {sign} {right} ="
            text += secret_sums.reply(text, row)
        assert text.rpartition(" ")[2] == row["answer"]


def test_guesses_get_hints_and_few_are_worth_more():
    row = {"number": 3}
    assert [guess.reply(f"{n}?", row) for n in (1, 3, 8)] == [" higher.", " yes.", " lower."]
    assert guess.reply("#### 3", row) is None
    texts = ["3? yes.", "4? lower. 3? yes.", "1? 2? 4? 5? 6? 3?", "3", "4? yes."]
    assert [guess.quick(text, row) for text in texts] == pytest.approx([1, 0.8, 0, 0, 0])
    assert [guess.found(text, row) for text in texts] == [1, 1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator", "secret_sums", "lookup", "guess"])
def test_a_task_with_an_environment_trains(name, tmp_path):
    trained_unchecked(config.load(f"{name}_toy.yaml", [
        f"out={tmp_path / 'run'}", "steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.limit=2"]))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("environment/calls", 0) for line in lines) > 0
