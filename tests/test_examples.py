"""The examples: their data are what the script makes, each trains for three steps, and the notebook runs as stored."""

import json
import math
import re
import runpy

import nbformat
import pytest
from conftest import ROOT, others_slow, steps_of
from nbclient import NotebookClient

import config
import train

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
    steps = steps_of(tmp_path / "run")
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


PATH = ROOT / "examples" / "winnow.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output["text"] for cell in notebook.cells for output in cell.get("outputs", ())
                   if output.output_type == "stream" and output.name == "stdout")


def pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))


def numbers(text: str, label: str) -> list[float]:
    return [float(number) for number in re.search(rf"^{label} +\[(.*)]$", text, re.MULTILINE)[1].split(",")]


def test_the_stored_notebook_has_run_and_names_no_machine():
    stored = nbformat.read(PATH, 4)
    assert pictures(stored) == 2 and all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    assert not re.search(r"/(home|root|tmp|work|Users)/", PATH.read_text())


@pytest.mark.slow
def test_every_cell_runs_and_prunes_as_the_page_says():
    notebook = nbformat.read(PATH, 4)
    stored = printed(notebook)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    text = printed(notebook)
    assert pictures(notebook) == 2

    advantages = [abs(float(found)) for found in re.findall(r"^reward \d  advantage +(-?[\d.]+)", text, re.MULTILINE)]
    kept = numbers(text, "CPPO")
    assert len(advantages) == len(kept) == 8 and sorted(kept) == [0] * 5 + [1] * 3
    smallest = min(adv for adv, weight in zip(advantages, kept, strict=True) if weight)
    assert smallest >= max(adv for adv, weight in zip(advantages, kept, strict=True) if not weight)
    assert set(numbers(text, "unbiased")) <= {0, 1, 3.33}
    assert all(abs(mean - 1) < 0.2 for mean in numbers(text, "mean weights"))  # 2,000 draws: 6 deviations
    assert float(re.search(r"gradient norm ([\d.]+)$", text, re.MULTILINE)[1]) > 0
    before, after = (float(x) for x in re.findall(r"([\d.]+)%", text.splitlines()[-1]))
    assert after > before + 20
    for label in ("CPPO", "unbiased", "mean weights"):  # the stored page shows what it is made of
        assert len(numbers(stored, label)) == 8


TOOL, = runpy.run_path(str(ROOT / "examples" / "calculator.py"))["tools"]()


@pytest.mark.parametrize(("text", "value"), [
    ("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("1,234 / 2", "617"), ("-7 - -2", "-5"), ("2 ** 9", "512"),
    ("0.1 + 0.2", "0.3"), ("10 / 4", "2.5"), ("1e3 * 3", "3000")])
def test_arithmetic_is_computed(text, value):
    assert TOOL(text) == value


@pytest.mark.parametrize("text", [
    "__import__('os')", "x + 1", "2 ** 99", "9 ** 9 ** 9", "1e15 * 1e15", "True + 1", "'a' * 9", "[1]", "1; 2",
    "1 if 1 else 2", "(9 ** 9) ** 9", "2 ** -1", "abs(1)", "1 < 2", "1 / 0", "9" * 5000, "(" * 5000, ""])
def test_anything_else_is_an_error_at_once(text):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError)):
        TOOL(text)
