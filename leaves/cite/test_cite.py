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


def test_two_results_are_compared_problem_by_problem(tmp_path):
    """Eight got better and one worse: a difference of 7 of 20, and McNemar's exact p of 20/512."""
    first = written(tmp_path / "a.json", *["wrong"] * 8, *["right"] * 12)
    second = written(tmp_path / "b.json", *["right"] * 19, "wrong")
    a, b = (results.read_result(Path(path)) for path in (first, second))
    assert re.search(r"few +a less a +20 .* \+0.0% \[\+0.0%, \+0.0%\] +1$", compare.comparison_table([("a", a)] * 2))
    row = re.sub(r"[\[\],]", " ", compare.comparison_table([("a", a), ("b", b)]).splitlines()[1]).split()
    assert row[:8] == ["few", "b", "less", "a", "20", "60.0%", "95.0%", "+35.0%"]
    low, high, p = (float(cell.rstrip("%")) for cell in row[8:])
    assert p == pytest.approx(20 / 512, abs=5e-3) and 0 < low < 35 < high
    other = results.read_result(Path(written(tmp_path / "c.json", "right", other="x")))
    with pytest.raises(ConfigError, match="few holds other problems in the two results"):
        compare.comparison_table([("a", a), ("other", other)])


def test_what_a_verifier_judges_anew_is_judged_by_rescore(tmp_path):
    path = Path(written(tmp_path / "few.json", "wrong", "wrong", "wrong"))
    result = json.loads(path.read_text())
    for problem in result["results"]["few"]["problems"]:
        problem["responses"][0] |= {"text": rf"\boxed{{{problem['gold']}}}"}
    path.write_text(json.dumps(result))
    again = rescore.rescore_file(path, None, None)
    assert again["results"]["few"]["accuracy"] == 1 and again["head"]["sets"] == result["head"]["sets"]


@pytest.mark.slow
def test_a_suite_is_frozen_cited_and_compared(tmp_path, run, capsys, monkeypatch):
    """Two models on generated sums, of short answers here: a citable line for each, and their paired difference."""
    other, load = write_tiny(tmp_path / "other_model"), config.load
    monkeypatch.setattr(config, "load", lambda name, sets: load(name, [*sets, "eval.max_new_tokens=8"]))
    assert run("--suite", "sums", "--model", str(TOY), str(other)) == 0
    said = capsys.readouterr().out
    cited = re.findall(r"sums-2026 [\d.]+% \[.*\] avg@1, suite sums (\w{12}), model (\S+) (\w{12})", said)
    assert [model for _, model, _ in cited] == [str(TOY), str(other)] and cited[0][0] == cited[1][0]
    assert cited[0][2] != cited[1][2]
    assert re.search(r"sums-2026 +\S*other_model less \S+model +300 +[\d.]+% +[\d.]+% +[-+][\d.]+% \[.*\] +[\d.]+", said)
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
    others = figures.summarise([problem(0, None), problem(1, 1.0), problem(2, None)], bounds=(0, 1))
    assert not len(compare.gaps(result, others, "reward"))
    assert [(level, x["reward"], x["count"]) for level, x in result["groups"]["level"].items()] == [
        ("0", 1, 1), ("2", 0.25, 1)]
    head = {"sets": {"few": {"data": ""}}}
    other = figures.summarise([problem(0, 0.5, 0.5), problem(1, 1.0, 1.0), problem(2, 0.0, 0.0)], bounds=(0, 1))
    row = compare.comparison_table([(name, {"head": head, "results": {"few": r}}) for name, r in
                                    (("a", result), ("b", other))]).splitlines()[1]
    assert row.split()[4:10] == ["2", "reward", "0.625", "reward", "0.500", "-0.375"]
    assert "reward" not in figures.summarise([problem(1, None, None)], bounds=(0, 1))


@pytest.mark.parametrize(("words", "message"), [
    (["--rescore", "no.json"], "result file no.json not found"),
    (["--rescore", "toy/model/config.json"], "toy/model/config.json is not a result of eval.py --out"),
    (["--compare", "README.md", "README.md"], "README.md: not valid JSON"),
])
def test_bad_input_is_one_line_and_status_2(words, message, monkeypatch, refused):
    monkeypatch.chdir(ROOT)
    assert refused(evaluation, *words).startswith(f"error: {message}")
