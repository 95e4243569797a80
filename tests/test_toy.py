"""The toy tasks and models: reproducible, disjoint, solvable, small."""

import json
import random
import re
import shutil
from itertools import islice

import calculator
import compare
import guess
import lookup
import pytest
import secret_sums
import torch
import toy_models
import toy_tasks
from conftest import ROOT, TOY, others_slow, steps_of
from test_invariance import trained_unchecked

import config
import data
from infra.weights import read_shape
from model import load_model
from verify.grade import grade

COUNTS = {"toy": {"toy/train": 4000, "toy/test": 500},
          "hard": {"toy/hard_train": 480, "toy/hard_test": 600, "runs/hard_validation": 600},
          "talk": {"toy/secret_train": 500, "toy/secret_test": 500, "toy/lookup_train": 480, "toy/lookup_test": 240,
                   "toy/guess_train": 480, "toy/guess_test": 240},
          "long_sums": {f"experiments/long_sums/{part}": count
                        for part, count in {"train": 240, "validation": 500, "test": 500}.items()}}


@pytest.mark.parametrize("name", others_slow(COUNTS, "long_sums"))
def test_the_shipped_problems_are_those_of_the_generators(name, tmp_path):
    toy_tasks.write(name, tmp_path)
    assert {*tmp_path.rglob("*.jsonl")} == {tmp_path / f"{stem}.jsonl" for stem in COUNTS[name]}
    for stem, count in COUNTS[name].items():
        made, shipped = (root / f"{stem}.jsonl" for root in (tmp_path, ROOT))
        assert stem.startswith("runs") or made.read_text() == shipped.read_text()
        columns = {"answer": None} if "guess" in stem else None
        assert len(data.load_problems(str(made), None, False, columns, False)) == count


@pytest.mark.slow
def test_the_parts_of_a_task_share_no_problem():
    for name, task in toy_tasks.TASKS.items():
        parts = [lines.keys() for lines in toy_tasks.splits(name).values()]
        assert len(set().union(*parts)) == sum(map(len, parts)) == sum(number for number, _ in task.files.values())
    assert {line["level"] for line in toy_tasks.splits("hard")[compare.VALIDATION].values()} == {*range(1, 7)}
    questions = {line["question"] for lines in toy_tasks.splits("long_sums").values() for line in lines.values()}
    assert questions.isdisjoint(question for question, _ in islice(toy_tasks.long_sums_texts(), 5000))


def test_long_answers_add_one_by_one_and_what_they_take_back_is_wrong():
    rng = random.Random(0)
    made = [toy_tasks.long_sum(rng, 18, toy_tasks.WRONG) for _ in range(50)]
    assert len({len(line["solution"]) for line, _ in made}) > 10
    for line, (start, step, level) in made:
        *rows, answer = line["solution"].splitlines()
        kept, doubted = ([row for row in rows if row.endswith("!") == wrong] for wrong in (False, True))
        totals = [(start + i * step) % 100 for i in range(level + 1)]
        assert kept == [f"{i}:{totals[i - 1]}+{step}={totals[i]}" for i in range(1, level + 1)]
        assert answer == f"#### {totals[-1]}" == f"#### {line['answer']}"
        assert doubted and not {row.rstrip("!") for row in doubted} & {*kept}
        assert grade([(line["answer"], line["solution"])])[0]["verdict"] == "right"


@pytest.mark.slow
def test_the_tokenizer_and_the_shape_are_those_of_the_script(tmp_path):
    toy_models.build_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (TOY / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", toy_models.MODELS)
def test_a_model_begins_to_learn(name, tmp_path, monkeypatch):
    """Two batches, of which the first is for the learning rate to rise."""
    shutil.copytree(TOY, tmp_path / "toy" / "model")
    monkeypatch.setattr(toy_models, "ROOT", tmp_path)
    recipe = toy_models.MODELS[name]._replace(stop=2, batch_size=4)
    toy_models.train(recipe)
    assert read_shape(tmp_path / recipe.folder).layers == recipe.layers


@pytest.mark.parametrize("name", sorted(toy_models.MODELS.keys() - {"teacher"}))
def test_the_shipped_models_are_small_and_take_4096_positions(name):
    folder = ROOT / toy_models.MODELS[name].folder
    files = [folder / name for name in ("config.json", "tokenizer.json", "model.safetensors")]
    assert sum(path.stat().st_size for path in files) < 6e6
    assert read_shape(folder).max_positions == 4096
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    parameters = sum(p.numel() for p in load_model(folder, torch.float32, torch.device("cpu")).parameters())
    assert 0.4e6 < parameters < 1.5e6


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
        for left, sign, right in toy_tasks.STEP.findall(solved[row["question"]]):
            total = text.rpartition("=")[2].strip() or left
            text += f" {total} {sign} {right} ="
            text += secret_sums.reply(text, row)
        assert text.rpartition(" ")[2] == row["answer"]


def test_guesses_get_hints_and_few_are_worth_more():
    row = {"number": 3}
    assert [guess.reply(f"{n}?", row) for n in (1, 3, 8)] == [" higher.", " yes.", " lower."]
    assert guess.reply("#### 3", row) is None
    texts = ["3? yes.", "4? lower. 3? yes.", "1? 2? 4? 5? 6? 3?", "3", "4? yes."]
    assert [guess.quick((text,), row) for text in texts] == pytest.approx([1, 0.8, 0, 0, 0])
    assert [guess.found((text,), row) for text in texts] == [1, 1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator", "secret_sums", "lookup", "guess"])
def test_a_task_with_an_environment_trains(name, tmp_path):
    trained_unchecked(config.load(f"{name}_toy.yaml", [
        f"out={tmp_path / 'run'}", "steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.limit=2"]))
    assert max(line.get("environment/calls", 0) for line in steps_of(tmp_path / "run")) > 0
