"""The toy task and model: reproducible, disjoint, solvable, small."""

import json
import re

import pytest
from conftest import ROOT, TOY
from problems import problem, splits, write

import data
from infra.weights import read_shape
from model import load_model
from verify.grade import grade


def test_the_shipped_problems_are_those_of_the_generator(tmp_path):
    write(tmp_path)
    for name, count in (("train.jsonl", 4000), ("test.jsonl", 500)):
        assert (tmp_path / name).read_text() == (ROOT / "toy" / name).read_text()
        assert len(data.load_problems(str(ROOT / "toy" / name))) == count


def test_train_and_test_share_neither_arithmetic_nor_text():
    train, test = splits()
    assert not train.keys() & test.keys()
    assert not {line["question"] for line in train.values()} & {line["question"] for line in test.values()}


def test_every_solution_is_right_and_scores_as_correct():
    """The numbers of the question lead to the answer, and every line of the solution is true arithmetic."""
    for numbers, line in splits()[1].items():
        assert [abs(n) for n in numbers] == [int(n) for n in re.findall(r"\d+", line["question"])]
        assert sum(numbers) == int(line["answer"])
        for left, sign, right, total in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", line["solution"]):
            assert int(left) + int(sign + right) == int(total)
        assert grade([(line["answer"], line["solution"])])[0]["verdict"] == "right"


def test_the_shipped_model_is_small_and_takes_4096_positions():
    files = [TOY / name for name in ("config.json", "tokenizer.json", "model.safetensors")]
    assert sum(path.stat().st_size for path in files) < 6e6
    assert read_shape(TOY).max_positions == 4096
    assert json.loads((TOY / "config.json").read_text())["model_type"] == "qwen2"
    import torch
    parameters = sum(p.numel() for p in load_model(TOY, torch.float32, torch.device("cpu")).parameters())
    assert 0.5e6 < parameters < 1.5e6


@pytest.mark.parametrize("seed", range(3))
def test_problems_have_two_or_three_steps_below_100(seed):
    import random
    rng = random.Random(seed)
    for _ in range(200):
        _, (start, *steps) = problem(rng)
        totals = [start + sum(steps[:i]) for i in range(len(steps) + 1)]
        assert len(steps) in (2, 3) and all(1 <= total <= 99 for total in totals)
