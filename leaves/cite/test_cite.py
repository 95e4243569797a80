"""Results are graded again, compared and cited."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, TOY, write_tiny
from test_eval import run as run
from test_eval import written

import config
import eval as evaluation
from infra import figures, results
from leaves.cite import compare, rescore
from settings.loader import ConfigError


def test_math_verifys_verdicts_stand_beside_ours(tmp_path):
    """It reads the argument of a logarithm over the sign of multiplication."""
    problems = [{"id": str(i), "gold": gold, "question": "q", "level": None, "subject": None, "responses": [{
        "id": str(i), "k": 0, "text": rf"\boxed{{{text}}}", "tokens": 1, "finished": True}]}
        for i, (gold, text) in enumerate([("5", "5"), (r"\ln 6", r"\ln 2 \cdot 3"), ("6", "7")])]
    for problem in problems:
        problem["responses"][0] |= evaluation.grade([(problem["gold"], problem["responses"][0]["text"])])[0]
    result = {"few": figures.summarise(problems)}
    both = rescore.add_math_verify(result)
    assert "math_verify" not in result["few"] and both["few"]["math_verify"] == 2 / 3
    head, row, *differ = figures.results_table(both).splitlines()
    assert head.endswith("math-verify") and row.endswith("66.7%") and row.split()[3] == "33.3%"
    assert len(differ) == 1
    assert differ[0].startswith(r"few 1: '\\ln 2 \\cdot 3' for '\\ln 6' is wrong; math-verify reads ")
    assert "math-verify" not in figures.results_table(result)


def test_two_results_are_compared_problem_by_problem(tmp_path):
    """Eight got better and one worse: a difference of 7 of 20, p = 20/512."""
    first = written(tmp_path / "a.json", *["wrong"] * 8, *["right"] * 12)
    second = written(tmp_path / "b.json", *["right"] * 19, "wrong")
    lines = compare.comparison_table(*(results.read_result(Path(p)) for p in (first, second))).splitlines()
    cells = lines[1].replace("[", " ").replace(",", "").replace("]", "").split()
    name, count, a, b, difference, low, high, p = cells
    assert (name, count, a, b, difference) == ("few", "20", "60.0%", "95.0%", "+35.0%")
    assert float(p) == pytest.approx(20 / 512, abs=1e-4) and 0 < float(low[:-1]) < 35 < float(high[:-1])
    with pytest.raises(ConfigError, match="few holds other problems in the two results"):
        compare.comparison_table(results.read_result(Path(first)), results.read_result(
            Path(written(tmp_path / "c.json", "right", other="x"))))


def test_what_a_verifier_judges_anew_is_judged_by_rescore(tmp_path):
    result = json.loads(Path(written(tmp_path / "few.json", "wrong", "wrong", "wrong")).read_text())
    for problem in result["results"]["few"]["problems"]:
        problem["responses"][0] |= {"text": rf"\boxed{{{problem['gold']}}}"}
    again = rescore.rescore(result)
    assert again["results"]["few"]["accuracy"] == 1 and again["head"]["sets"] == result["head"]["sets"]


def test_a_suite_is_frozen_cited_and_compared(tmp_path, run, capsys, monkeypatch):
    """Two models on generated sums, of short answers here: a citable line and a row of LaTeX for each, and their paired
    difference."""
    other, load = write_tiny(tmp_path / "other_model"), config.load
    monkeypatch.setattr(config, "load", lambda name, sets: load(name, [*sets, "eval.max_new_tokens=8"]))
    assert run("--suite", "sums", "--model", str(TOY), str(other)) == 0
    said = capsys.readouterr().out
    assert "sums-2026: 300 problems x 1 answers show a difference of two models from about 8 points on" in said
    cited = re.findall(r"sums-2026 [\d.]+% \[.*\] avg@1, suite sums (\w{12}), model (\S+) (\w{12})", said)
    assert [model for _, model, _ in cited] == [str(TOY), str(other)] and cited[0][0] == cited[1][0]
    assert cited[0][2] != cited[1][2] and "other\\_model & " in said
    assert re.search(r"sums-2026 +\S*other_model less \S+model: -?\+?[\d.]+% \[.*\], p = ", said)
    for more in (["--data", "gsm8k"], ["--set", "eval.temperature=1"], ["--config", "grpo_toy.yaml"]):
        assert run("--suite", "sums", "--model", str(TOY), *more) == 2
        assert "--suite sums is frozen: leave out --data and --config" in capsys.readouterr().err


def test_answers_without_a_reward_are_no_part_of_its_mean():
    """A problem of which none has one is left out."""
    def problem(i: int, *rewards: float | None) -> dict:
        responses = [{"tokens": 1, "finished": True, "reward": reward} for reward in rewards]
        return {"id": str(i), "level": f"{i}", "responses": responses}

    problems = [problem(0, 1.0, None), problem(1, None, None), problem(2, 0.0, 0.5)]
    result = figures.summarise(problems, bounds=(0, 1))
    assert result["reward"] == pytest.approx((1 + 0.25) / 2) and result["count"] == 3
    assert compare.reward_row("few", result, result).split()[:5] == ["few", "reward", "2", "0.625", "0.625"]
    others = figures.summarise([problem(0, None), problem(1, 1.0), problem(2, None)], bounds=(0, 1))
    assert compare.reward_row("few", result, others) == ""
    assert [(level, x["reward"], x["count"]) for level, x in result["groups"]["level"].items()] == [
        ("0", 1, 1), ("2", 0.25, 1)]
    head = {"sets": {"few": {"data": ""}}}
    other = figures.summarise([problem(0, 0.5, 0.5), problem(1, 1.0, 1.0), problem(2, 0.0, 0.0)], bounds=(0, 1))
    row = compare.comparison_table({"head": head, "results": {"few": result}},
                                   {"head": head, "results": {"few": other}}).splitlines()[1]
    assert row.split()[:6] == ["few", "reward", "2", "0.625", "0.500", "-0.375"]
    assert "reward" not in figures.summarise([problem(1, None, None)], bounds=(0, 1))


@pytest.mark.parametrize(("words", "message"), [
    (["--rescore", "no.json"], "result file no.json not found"),
    (["--rescore", "toy/model/config.json"], "toy/model/config.json is not a result of eval.py --out"),
    (["--compare", "README.md", "README.md"], "README.md: not valid JSON"),
])
def test_bad_input_is_one_line_and_status_2(words, message, monkeypatch, run, capsys):
    monkeypatch.chdir(ROOT)
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") and said.count("\n") == 1
