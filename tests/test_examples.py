"""The examples: their data are what the script makes, their configs load, and each trains for three steps."""

import json
import math
import re
import runpy

import pytest
from conftest import ROOT, others_slow

import config
import train
from infra import runfolder

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.jsonl"))


def functions(name: str) -> dict:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_in_no_row_an_answer(name):
    folder = ROOT / "examples"
    assert sum(len((folder / f"{name}.{kind}").read_text().splitlines()) for kind in ("py", "yaml")) <= 60
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == 384 and not any("answer" in row for row in rows)


def test_expressions_are_computed_and_hostile_ones_count_for_nothing():
    reward = functions("expressions")["reward"]
    row = {"tests": ["len(values) >= 2", "values[0] == 65", "values[-1] == 56"]}
    assert reward("Kim starts with 27. 27 + 38 = 65. 65 - 9 = 56.\n#### 56", row) == 1
    assert reward("27 + 38 = 65.", row) == pytest.approx(1 / 3)
    assert all(functions("expressions")["TEST"].fullmatch(test) for line in
               (ROOT / "examples" / "expressions.jsonl").read_text().splitlines() for test in json.loads(line)["tests"])
    with pytest.raises(AttributeError):  # data is not run
        reward("27 + 38 = 65.", {"tests": ["().__class__.__base__.__subclasses__()"]})
    assert reward("1 / 0 = 3. 2 2 = 4. 65 = 1", row) == pytest.approx(1 / 3) and reward("#### 56", row) == 0


def test_the_form_of_sentences():
    reward = functions("sentences")["reward"]
    assert reward("Kim has 27. 27 + 38 = 65. 65 - 9 = 56.\n#### 56") == 1
    for text in ("#### 56", "Kim has 27. 65 - 9 = 56.\n#### 56", "Kim has 27. 27 + 38 = 65. 65 - 9 = 56. #### 56",
                 "A. B. C.\n#### 56\nmore", "a. b. c.\n#### 1"):
        assert reward(text) == 0, text


def test_a_number_above_both_and_two_rewards_of_which_either_may_be_none():
    reward, both = functions("dialogue")["reward"], functions("two_rewards")
    assert [reward(text, {"above": 40}) for text in ("#### 41", "#### 40", "41", "#### 410")] == [1, 0, 0, 0]
    assert both["sound"]("1 + 1 = 2. 2 - 1 = 3.\n#### 3") == 0.5 and both["sound"]("#### 3") is None
    assert [both["right"](text, {"result": result}) for text, result in (
        ("#### 3", 3), ("#### 13", 3), ("#### 3", None))] == [1, 0, None]


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(EXAMPLES, "two_rewards"))
def test_an_example_trains_for_two_steps(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # its paths are relative to it
    train.train(config.load(f"examples/{name}.yaml", [
        f"out={tmp_path / 'run'}", "steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.limit=2",
        "eval.max_new_tokens=16", "rollout.max_new_tokens=48"]))
    steps = [line for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl") if "rollout/tokens" in line]
    assert len(steps) == 2 and all(math.isfinite(step["train/loss"]) for step in steps)
    assert all(0 <= step["reward/mean"] <= 1.5 and step["reward/died"] == 0 for step in steps)
    assert any(step["rollout/unscored"] for step in steps) == (name == "two_rewards")
    assert "NaN" not in (tmp_path / "run" / "samples.jsonl").read_text()  # which is no JSON
    assert (tmp_path / "run" / "custom_reward.py").read_text() == (ROOT / "examples" / f"{name}.py").read_text()


def test_rows_to_evaluate_on_are_tried_before_the_run_too(monkeypatch):
    """Those of the toy have no column of the name that the reward reads."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(config.ConfigError, match="it raises KeyError in line 16: 'tests'"):
        train.load_task(config.load("examples/expressions.yaml", ["data.eval=toy/test.jsonl"]))


def test_the_page_has_every_command():
    text = (ROOT / "examples" / "README.md").read_text()
    assert set(re.findall(r"--config examples/(\w+)\.yaml", text)) == set(EXAMPLES)
