"""The table of claims, on made results, and the arms that it compares."""

import ast
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT
from test_compare import is_as_kept, make
from tqdm import tqdm

import config

sys.path.append(str(ROOT / "experiments"))  # behind the root: some of its files have names of ours

import claim_runs  # noqa: E402
import claims  # noqa: E402
import compare  # noqa: E402
import rates  # noqa: E402
import redraw_errors  # noqa: E402
import stored  # noqa: E402

SCRIPT = ROOT / "experiments" / "redraw_errors.py"


@pytest.fixture
def results(tmp_path):
    """Results of all runs at the config's rate; what keeps more completions learns more."""
    for name in (*compare.SIX, *compare.OTHERS):
        for seed in compare.SEEDS:
            make(tmp_path, compare.arm(name, "1e-4", seed), 0.25 if name == "grpo" else 0.15)
    for i, name in enumerate(claim_runs.ALLOCATED):
        for rate in claim_runs.GRIDS[name]:
            run = replace(claim_runs.allocated(name, rate, 100), data=rates.VALIDATION)
            make(tmp_path, run, 0.3 if rate == "2e-4" else 0.1)
        for seed in compare.SEEDS:
            make(tmp_path, claim_runs.allocated(name, "2e-4", seed), 0.2 - 0.02 * i)
    for name in claim_runs.CONTROLS:
        for seed in compare.SEEDS:
            make(tmp_path, claim_runs.control(name, dict.fromkeys(compare.SIX, "1e-4"), seed), 0.1)
    for i, name in enumerate(claim_runs.AT_GRPOS_RATE):
        for seed in compare.SEEDS:
            make(tmp_path, claim_runs.at_grpos_rate(name, "1e-4", seed), 0.05 + 0.01 * i)
    errors = [{"when": "early", "arm": pruner, "budget": budget, "errors": [1 / (i + 1), 1 / (i + 2)]}
              for i, (_, pruner, budget) in enumerate(claim_runs.PRUNED.values())]
    errors[3]["errors"] = [0.1, None]  # not every rollout can be pruned so far
    stored.write([{}, *errors], tmp_path / "gradient_errors.jsonl.gz")
    return tmp_path


def test_every_claim_gets_its_rows(results, capsys):
    claims.report(results)
    *table, line = capsys.readouterr().out.splitlines()
    rows = json.loads(line)["rows"]
    count = {name: sum(row[0].startswith(name) for row in rows)
             for name in ("dppo is", "greso is", "cppo is", "bias", "GRESO", "cppo-", "... and", "a smaller",
                          "pruning is", "more completions", "DAPO", "VAPO")}
    assert count == {"dppo is": 3, "greso is": 1, "cppo is": 1, "bias": 4, "GRESO": 2, "cppo-": 4, "... and": 4,
                     "a smaller": 2, "pruning is": 2, "more completions": 6, "DAPO": 4, "VAPO": 1}
    spent = [*claim_runs.ALLOCATED, *claim_runs.CONTROLS, "grpo", *claim_runs.GROUPS, *claim_runs.DAPO,
             *claim_runs.VAPO]
    assert len([row for row in table if row.startswith("| ")]) == 7 + len(rows) + 2 + len(spent) + 2
    assert [row.split(" | ")[0][2:] for row in table[-len(spent) - 1:-1]] == spent  # behind it an empty line
    falls = [row[3] for row in rows if row[0].startswith("... and")]
    assert falls[0] != "does not" and falls[-1] == "does not"
    assert {row[3] for row in rows} <= {"holds", "does not", "cannot tell"}
    assert "13 arms" in next(row[1] for row in rows if row[0].startswith("a smaller"))


def test_seconds_to_a_level_and_speed_by_hand(tmp_path):
    second_E, accuracy_E = np.array([0.0, 10.0, 20.0]), np.array([40.0, 50.0, 45.0])
    assert claims.seconds_to(45, second_E, accuracy_E) == 5
    assert claims.seconds_to(39, second_E, accuracy_E) == 0
    assert claims.seconds_to(51, second_E, accuracy_E) == math.inf
    for name, gain in (("slow", 0.2), ("fast", 0.4)):
        for seed in range(3):
            make(tmp_path, stored.Run(name, (), "1e-4", seed), gain)
    arms = claims.kept_arms(tmp_path, {"slow": "1e-4", "fast": "1e-4", "absent": "1e-4"}, range(3))
    assert list(arms) == ["slow", "fast"]
    assert not claims.kept_arms(tmp_path, {"slow": "1e-4"}, range(4))  # a seed is not there
    ratio, low, high, above = claims.speed_up(arms["slow"], arms["fast"], 50.0)
    assert low <= ratio <= high and 1.5 < ratio < 2.5 and above == 3
    assert claims.speed_up(arms["slow"], arms["fast"], 70.0)[0] == math.inf


def test_an_interval_decides_only_where_it_leaves_out_the_bound():
    assert [claims.verdict(*ends) for ends in ((1, 2), (-2, -1), (-1, 1))] == ["holds", "does not", "cannot tell"]
    assert claims.agreed("holds", 3, 3) == "holds" and claims.agreed("holds", 2, 3) == "cannot tell"
    assert claims.agreed("does not", 0, 3) == "does not" and claims.agreed("does not", 1, 3) == "cannot tell"
    assert claims.verdict(-1.5, 1, -2) == "holds" and claims.verdict(-3, -2.5, -2) == "does not"


def test_the_arms_are_those_of_the_claims():
    assert len(claim_runs.PRUNED) == 14
    whole = set(claim_runs.DAPO["dapo"])
    for name, settings in claim_runs.DAPO.items():
        assert set(settings) <= whole, name
        assert (len(whole - set(settings)) > 0) == (name != "dapo")
    for name, (prompts, kept) in claim_runs.ALLOCATED.items():
        cfg = config.load(stored.RECIPE, claim_runs.allocated(name, "1e-4", 0).all_settings)
        assert cfg.steps * prompts == claim_runs.PROMPTS and prompts * kept == 128
        assert cfg.steps // cfg.eval.every == claim_runs.EVALUATIONS
    for name in (*claim_runs.PRUNED, *claim_runs.AT_GRPOS_RATE):
        assert stored.plain_settings(claim_runs.at_grpos_rate(name, "1e-4", 0))["optim.lr"] == 1e-4
    names = [*compare.SIX, *compare.OTHERS, *claim_runs.CONTROLS, *claim_runs.ALLOCATED, *claim_runs.AT_GRPOS_RATE]
    assert len(names) == len(set(names))  # a name is a file's


def test_what_is_kept_in_the_repository_is_what_the_arms_of_today_would_run():
    for record in stored.records(stored.RESULTS):
        name, rate, seed = (record.about[key] for key in ("arm", "rate", "seed"))
        if name in claim_runs.ALLOCATED:
            assert is_as_kept(claim_runs.allocated(name, rate, seed), record), record.file
        elif name in claim_runs.CONTROLS:
            assert is_as_kept(claim_runs.control(name, dict.fromkeys(compare.SIX, rate), seed), record), record.file
        else:
            run = claim_runs.at_grpos_rate(name, rate, seed)  # or of the comparison, whose test has the others
            assert name in (*compare.SIX, *compare.OTHERS) or is_as_kept(run, record), record.file


def test_the_runs_come_in_the_order_of_the_claims(tmp_path, monkeypatch):
    made = []

    def train(run, results, bar):
        if not stored.path_of(run, results).exists():
            made.append(run.arm)
            make(results, run, 0.3 if run.rate == "2e-4" else 0.1)

    for module in (claim_runs, rates):
        monkeypatch.setattr(module, "keep", train)
    monkeypatch.setattr(rates, "write_validation", lambda: None)
    monkeypatch.setattr(claim_runs, "keep_errors", lambda results: made.append("errors"))
    claim_runs.run_all(tmp_path, tqdm(disable=True))
    firsts = [made.index(name) for name in ("groups-of-16", "topk-step", "errors", "grpo", "pps-keep1", "group-2",
                                            "dapo", "vapo")]
    assert firsts == sorted(firsts)
    assert len(made) == 5 * 4 + 5 * 5 + 5 * 3 + 1 + 3 * (1 + 14) + 5 * (3 + 5 + 2)


def test_the_figure_of_errors_is_drawn_from_what_is_kept(results, tmp_path):
    claims.report(results)
    assert {alias for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.ImportFrom)
            for alias in [node.module]} == {"pathlib", "redraw"}
    figure = tmp_path / "errors.png"
    drawn = subprocess.run([sys.executable, str(SCRIPT), str(results), str(figure)], capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr
    assert figure.stat().st_size > 10_000
    r, low, high = json.loads(drawn.stdout)["correlation"]
    assert low <= r <= high and len(json.loads(drawn.stdout)["arms"]) == 13
    error, areas = np.array([0.0, 1.0, 2.0, 3.0]), np.array([[3.0, 3.1], [2.0, 2.1], [1.0, 1.1], [0.0, 0.1]])
    r, low, high = redraw_errors.correlation(error, areas)
    assert r == pytest.approx(-1) and low == pytest.approx(-1, abs=1e-3) and high < -0.98
