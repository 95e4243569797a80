"""The table of claims: of what is kept it is that of RESULTS.md, and its parts by hand."""

import json
import math

import claims
import compare
import compare_flight
import kept_runs
import numpy as np
import pytest
from conftest import ROOT
from test_compare import make, section


def test_results_quotes_verdicts_that_the_command_prints_of_what_is_kept(capsys):
    claims.report(kept_runs.RESULTS)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 5 + 4 + 2 + 2 + 2 * 4 + 2 + 6 + 4 + 1 + 12
    table = section("The papers' claims, one by one").replace("**", "").splitlines()
    quoted = [line.strip("| ").split(" | ")[1:] for line in table if line.startswith("| ")][2:]
    told = [row[1:] for row in rows if row[3] != "cannot tell" and not row[0].startswith(("cppo-", "..."))]
    assert quoted == told


def test_seconds_to_a_level_and_speed_by_hand(tmp_path):
    second_E, accuracy_E = np.array([0.0, 10.0, 20.0]), np.array([40.0, 50.0, 45.0])
    assert claims.seconds_to(45, second_E, accuracy_E) == 5
    assert claims.seconds_to(39, second_E, accuracy_E) == 0
    assert claims.seconds_to(51, second_E, accuracy_E) == math.inf
    results = tmp_path / "results.jsonl.xz"
    for name, gain in (("slow", 0.2), ("fast", 0.4)):
        for seed in range(3):
            make(results, kept_runs.Run(name, (), "1e-4", seed), gain)
    arms = compare.kept_arms(dict.fromkeys(("slow", "fast", "absent"), "1e-4"), range(3), results)
    assert list(arms) == ["slow", "fast"]
    ratio, low, high, above = claims.speed_up(arms["slow"], arms["fast"], 50.0)
    assert low <= ratio <= high and 1.5 < ratio < 2.5 and above == 3
    assert claims.speed_up(arms["slow"], arms["fast"], 70.0)[0] == math.inf


def test_an_interval_decides_only_where_it_leaves_out_the_bound():
    assert [claims.verdict(*ends) for ends in ((1, 2), (-2, -1), (-1, 1))] == ["holds", "does not", "cannot tell"]
    assert claims.agreed("holds", 3, 3) == "holds" and claims.agreed("holds", 2, 3) == "cannot tell"
    assert claims.agreed("does not", 0, 3) == "does not" and claims.agreed("does not", 1, 3) == "cannot tell"
    assert claims.verdict(-1.5, 1, -2) == "holds" and claims.verdict(-3, -2.5, -2) == "does not"


def test_a_correlation_by_hand_and_a_verdict_that_two_arms_carry_is_none():
    r, low, high = claims.correlation([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 0, 3, 2, 1])
    assert (r, low, high) == pytest.approx((-0.78571, -0.96676, -0.07996), abs=1e-5)
    names = [*claims.PRUNED]
    few = {name: 0.01 if name in claims.FEWER_PROMPTS else 1 + 0.1 * i for i, name in enumerate(names)}
    carried = {name: [50.0 if name in claims.FEWER_PROMPTS else 40 + i % 2] for i, name in enumerate(names)}
    every, _ = claims.of_errors(few, carried)
    assert every[2].startswith("correlation -0.9") and every[3] == "cannot tell"
    errors = claims.gradient_errors(kept_runs.RESULTS)
    assert len(errors) == 14 and sum(not claims.is_biased(name) for name in errors) == 7


def test_the_comparison_of_groups_in_flight_by_hand(tmp_path, capsys):
    results = tmp_path / "results.jsonl.xz"
    arms = {"grpo": 0.1, "flight-2": 0.2, "stages": 0.15}
    for seed in range(2):
        for name, gain in arms.items():
            make(results, compare_flight.run_of(name, seed), gain)
    compare_flight.report(results)
    printed = capsys.readouterr().out
    areas = json.loads(printed.splitlines()[-1])["areas"]
    assert {*areas["seconds"]["arms"]} == {*arms} and {*areas["steps"]["arms"]} == {"grpo", "flight-2"}
    means = {name: of["area"]["mean"] for name, of in areas["generated tokens"]["arms"].items()}
    assert means["flight-2"] > means["stages"] > means["grpo"]


def test_results_quotes_differences_that_the_comparison_of_groups_in_flight_prints(capsys):
    compare_flight.report(ROOT / "experiments" / "flight.jsonl.xz")
    printed = capsys.readouterr().out
    table = [line for line in section("Groups that go on: what they learn").splitlines() if line.startswith("| ")]
    quoted = [cell for line in table for cell in line.split(" | ") if "[" in cell]
    assert len(quoted) == 7 * 3 + 2 and not [cell for cell in quoted if cell not in printed]


def test_every_arm_of_groups_in_flight_is_a_run_that_there_can_be():
    for name in compare_flight.ARMS:
        settings = compare_flight.run_of(name, 0).plain_settings()
        offered = settings["steps"] * settings["rollout.prompts_per_step"]
        assert offered == 135 * 16 and settings["steps"] * settings["update.minibatches"] == 135
