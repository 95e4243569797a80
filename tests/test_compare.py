"""The comparisons' bookkeeping, numbers and verdicts, on made results and on those that are kept."""

import itertools
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import compare
import compare_opd
import kept_runs
import law
import numpy as np
import pytest
import torch
from conftest import ROOT
from kept_runs import Record, Run
from tqdm import tqdm

import config
from infra import dist, runfolder


def make(results: Path, run: Run, gain: float, tokens: int = 4000, every: int = 5) -> None:
    """Write down a run of 30 steps that gains so much, as `keep` does."""
    draw = np.random.default_rng([run.seed, round(100 * gain), tokens])
    lines = []
    for step in range(31):
        if step:
            lines.append({"step": step, "rollout/tokens": 4000 + int(draw.integers(500)), "train/tokens": tokens,
                          "time/step": 1 + draw.random(), "time/rollout": 0.5})
        if step % every == 0:
            accuracy = round(0.4 + gain * step / 30 + 0.02 * draw.random(), 6)
            lines.append({"step": step, "eval/hard_test/accuracy": accuracy})
    about = {"arm": run.arm, "family": run.family, "rate": run.rate, "seed": run.seed, "split": run.split,
             "settings": run.plain_settings() | {"steps": 30}, "cpu_seconds": 40.0, "wall_seconds": 50.0}
    kept_runs.append(run.name, Record(about, lines), results)


def section(heading: str) -> str:
    """A section of RESULTS.md."""
    return (ROOT / "RESULTS.md").read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]


def test_results_quotes_tables_that_the_command_prints_of_what_is_kept(capsys):
    compare.report(kept_runs.RESULTS)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(printed) == 2 + 9 + 5 * 2 + 3 * 6 + 2 * 9
    assert not [line for line in printed if re.search(r"\), [012] \|", line)]  # a difference by two evaluations
    text = section("Six methods on the testbed, at equal cost")
    quoted = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(quoted) == 2 + 6 and not set(quoted) - set(printed)


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.jsonl.xz")), ids=lambda path: path.name)
def test_a_kept_run_has_each_of_its_steps_once_and_in_order(path):
    for name, record in kept_runs.read(path).items():
        trained = [line["step"] for line in record.lines if "rollout/tokens" in line]
        if "settings" in record.about:
            assert trained == list(range(1, record.about["settings"]["steps"] + 1)), name


def test_areas_and_ends_by_hand(tmp_path):
    """Of evaluations at 0, 10, 20 and 30 steps; what else the table has is quoted in RESULTS.md."""
    results = tmp_path / "results.jsonl.xz"
    for name, gain in (("grpo", 0.1), ("cppo", 0.11)):
        for seed in range(2):
            make(results, compare.arm(name, "1e-4", seed), gain, every=10)
    arms = compare.kept_arms(dict.fromkeys(("grpo", "cppo"), "1e-4"), compare.SEEDS, results)
    figures = compare.compared(arms, ("steps",), 1)["steps"]["arms"]
    for name, by_seed in arms.items():
        accuracy = [[100 * line["eval/hard_test/accuracy"] for line in of.lines if kept_runs.is_evaluation(line)]
                    for of in by_seed.values()]
        areas = [(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in accuracy]
        ends = [0.375 * c + 0.625 * d for *_, c, d in accuracy]
        assert figures[name]["area"]["mean"] == pytest.approx(np.mean(areas)) and figures[name]["evaluations"] == 3
        assert figures[name]["end"]["mean"] == pytest.approx(np.mean(ends))


def test_a_comparison_that_rests_on_a_straight_line_is_none(tmp_path):
    """Both arms have three evaluations in 30 steps; within the tokens that the thrifty one trains on, GRPO has two."""
    results, arms = tmp_path / "results.jsonl.xz", {}
    for name, tokens in (("grpo", 4000), ("thrifty", 3000)):
        for seed in range(2):
            make(results, Run(name, (), "1e-4", seed), 0.2, tokens, every=10)
    arms = compare.kept_arms(dict.fromkeys(("grpo", "thrifty"), "1e-4"), range(2), results)
    both = arms["thrifty"], arms["grpo"]
    gap = kept_runs.area_gap(*both, "trained tokens", 1)
    assert (gap.evaluations, gap.difference, str(gap)) == ((3, 2), None, "-, 3 and 2")
    numbers = compare.compared(arms, ("steps", "trained tokens"), 1)
    of_grpo, of_thrifty = numbers["trained tokens"]["arms"].values()
    assert "area" not in of_grpo and "difference" not in of_thrifty["area"]
    assert " | -, 2 |" in compare.comparison_table(numbers, "area")[2]
    with pytest.raises(ValueError, match="2 evaluations within 90,000 trained tokens; a comparison needs 3"):
        kept_runs.area_of(kept_runs.curve(arms["grpo"][0]), "trained tokens", 90_000)
    assert "difference" in numbers["steps"]["arms"]["thrifty"]["area"]
    assert kept_runs.area_gap(*both, "steps", 1).difference


def test_a_difference_an_area_and_verdicts_by_hand():
    p = kept_runs.difference([2.0, 4.0], [0.0, 0.0], comparisons=1).p
    assert p == pytest.approx(2 * math.atan(1 / 3) / math.pi)  # one degree: Cauchy's law
    gap = kept_runs.difference([3.0, 5.0, 4.0], [1.0, 2.0, 3.0], comparisons=1)
    assert (gap.mean, gap.high - gap.mean) == pytest.approx((2.0, 4.3027 * 1 / 3 ** 0.5), abs=1e-3)
    assert kept_runs.area(np.array([0.0, 2.0]), np.array([10.0, 30.0]), 0, 1) == 15
    told = [kept_runs.judge(kept_runs.Difference(0.0, *ends, 1.0), bound) for *ends, bound in (
        (1, 2, 0), (-2, -1, 0), (-1, 1, 0), (-1.5, 1, -2), (-3, -2.5, -2))]
    assert told == ["holds", "does not", "cannot tell", "holds", "does not"] and kept_runs.judge(None) == "not measured"


@pytest.mark.parametrize("full", [False, True])
def test_rates_come_first_and_then_seed_by_seed_the_six_of_which_a_part_is_18_runs(tmp_path, monkeypatch, full):
    made, results = [], tmp_path / "results.jsonl.xz"

    def train(run: Run, results: Path, bar: tqdm) -> None:
        made.append((run.split, run.arm, run.rate, run.seed))
        if run.split == "validation":  # all that the next runs depend on
            make(results, run, 0.2 if run.rate == "5e-5" else 0.1)

    monkeypatch.setattr(compare, "keep", train)
    monkeypatch.setattr(compare, "write", lambda *given, only: None)
    compare.experiment(full, results)
    tuning = [run for run in made if run[0] == "validation"]
    assert len(tuning) == (8 * 9 if full else 0) and made[:len(tuning)] == tuning
    rest, rate = made[len(tuning):], "5e-5" if full else "1e-4"
    first = compare.TUNED if full else compare.SIX
    six = [("test", name, rate, seed) for seed in range(5 if full else 3) for name in first]
    assert rest == six + [("test", name, rate, seed) for seed in range(5 if full else 0) for name in compare.OTHERS]


def test_a_rate_is_chosen_once_all_of_its_runs_are_there():
    areas = {"2.5e-5": [40.0, 41.0], "5e-5": [50.0, 52.0], "1e-4": [40.0, 61.0], "2e-4": [90.0]}
    assert compare.best_rate(areas, 2) is None
    assert compare.best_rate(areas | {"2e-4": [45.0, 47.0]}, 2) == "5e-5"
    table = compare.rate_table({"a": areas, "b": {"5e-5": [1.0], "1e-4": [2.0]}}, {"a": "5e-5", "b": "1e-4", "c": "1"})
    assert [row.split(" | ")[-1] for row in table[2:]] == ["inside |", "an end of what was tried |", "not known yet |"]


CHANGED = ""  # the part of a diff that is not of results


def fake_training(folder: Path, name: str, *settings: str) -> Path:
    folder.mkdir(parents=True)
    lines = [{"step": 0, "eval/hard_test/accuracy": 0.4, "eval/hard_test/lenient": 0.5, "time/eval": 1.0},
             {"step": 1, "rollout/tokens": 7, "time/step": 1 / 3, "train/loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "finished").write_text("3.5")
    diff = "diff --git a/experiments/results.jsonl.xz b/experiments/results.jsonl.xz\n"
    ran_on = runfolder.describe_environment(torch.device("cpu"), diff + CHANGED)
    (folder / "env.json").write_text(json.dumps(ran_on | {"commit": "0" * 40}))
    return folder


def test_a_run_that_is_kept_is_not_run_again_and_its_folder_goes(tmp_path, monkeypatch):
    trained, results = [], tmp_path / "results.jsonl.xz"
    monkeypatch.setattr(kept_runs, "train_once", lambda *given, method: trained.append(given) or fake_training(*given))
    monkeypatch.setattr(kept_runs, "children_seconds", itertools.count(1.0, 3.5).__next__)
    monkeypatch.setattr(kept_runs, "ROOT", tmp_path)
    make(results, compare.arm("grpo", "1e-4", 0), 0.1)
    before = results.read_bytes()
    run, bar = compare.arm("topk-step", "1e-4", 0), tqdm(disable=True)
    for _ in range(2):
        kept_runs.keep(run, results, bar)
    assert len(trained) == 1 and not (tmp_path / "runs" / "measured" / run.name).exists()
    assert results.read_bytes().startswith(before) and len(kept_runs.read(results)) == 2
    record = kept_runs.read(results)[run.name]
    assert record.lines == [{"step": 0, "eval/hard_test/accuracy": 0.4, "time/eval": 1.0},
                            {"step": 1, "rollout/tokens": 7, "time/step": 0.333333}]
    about = record.about
    assert (about["commit"], about["cpu_seconds"], about["settings"]["optim.lr"]) == ("0" * 40, 3.5, 1e-4)
    assert about["date"] and about["machine"] and about["config"] == "grpo_hard.yaml"
    # A setting that did not exist then does not count; one with another value does, and the newer run stands.
    older = dict(about, settings={key: value for key, value in about["settings"].items() if key != "loss.entropy"})
    kept_runs.append(run.name, Record(older, record.lines), results)
    kept_runs.keep(run, results, bar)
    assert len(trained) == 1
    kept_runs.append(run.name, Record(about | {"settings": about["settings"] | {"steps": 7}}, record.lines), results)
    kept_runs.keep(run, results, bar)
    again = kept_runs.read(results)[run.name].about
    assert len(trained) == 2 and again == about | {"wall_seconds": again["wall_seconds"]}
    monkeypatch.setattr(sys.modules[__name__], "CHANGED", "diff --git a/train.py b/train.py\n")
    kept_runs.keep(compare.arm("dppo-biased", "1e-4", 0), results, bar)
    assert kept_runs.read(results)["dppo-biased-1e-4-test-seed0"].about["commit"] == "0" * 40 + " with changes"


def test_first_steps_of_a_kept_run_are_evaluated_more_often_if_they_come_out_as_they_are_kept(tmp_path, monkeypatch):
    results, asked = tmp_path / "results.jsonl.xz", []
    run = Run("grpo", ("steps=30",), "1e-4", 0, again=(10, 5))
    make(results, run, 0.2, every=10)
    lines = [line for line in kept_runs.read(results)[run.name].lines if line["step"] <= 10]
    lines.insert(6, {"step": 5, "eval/hard_test/accuracy": 0.5})

    def train_once(folder: Path, *given: str, method: str) -> None:
        asked.append(given[-2:])
        log = fake_training(folder, *given) / "metrics.jsonl"
        slower = [line | {"time/step": 9.0} if "time/step" in line else line for line in lines]
        log.write_text("".join(json.dumps(line) + "\n" for line in slower))

    monkeypatch.setattr(kept_runs, "train_once", train_once)
    monkeypatch.setattr(kept_runs, "ROOT", tmp_path)
    for _ in range(2):  # the second time they are there
        kept_runs.keep(run, results, tqdm(disable=True))
    record = kept_runs.read(results)[run.name]
    assert asked == [("steps=10", "eval.every=5")] and record.about["evaluated_again"]["steps"] == [5]
    assert [line["step"] for line in record.lines if kept_runs.is_evaluation(line)] == [0, 5, 10, 20, 30]
    assert record.lines[6] == lines[6] and kept_runs.curve(record).spent["seconds"][-1] < 60  # of the first time
    lines[3] = lines[3] | {"train/tokens": 7}
    with pytest.raises(RuntimeError, match="otherwise than it is kept: step 3 has train/tokens=7, and had 4000"):
        kept_runs.keep(replace(run, again=(10, 2)), results, tqdm(disable=True))


def test_a_run_that_is_not_finite_is_kept_on_the_validation_split_alone(tmp_path, monkeypatch):
    def train_once(folder: Path, *given: str, method: str) -> None:
        trained.append(fake_training(folder, *given))
        for name in written:
            (folder / name).touch()
        raise RuntimeError("the loss in step 1 is not finite")

    trained, written, results, bar = [], [], tmp_path / "results.jsonl.xz", tqdm(disable=True)
    monkeypatch.setattr(kept_runs, "train_once", train_once)
    monkeypatch.setattr(kept_runs, "ROOT", tmp_path)
    test = compare.arm("topk-step", "1e-4", 0)
    validation = replace(test, data=compare.VALIDATION)
    with pytest.raises(RuntimeError, match="not finite"):
        kept_runs.keep(validation, results, bar)  # for another reason: no file says so
    written.append("not_finite_step_000001.pt")
    with pytest.raises(RuntimeError, match="not finite"):
        kept_runs.keep(test, results, bar)
    assert not kept_runs.read(results)
    for _ in range(2):
        kept_runs.keep(validation, results, bar)
    assert len(trained) == 3 and kept_runs.read(results)[validation.name].about["finite"] is False
    assert compare.validated(results) == {"topk-step": {"1e-4": [-math.inf]}}
    assert "1e-4: not finite" in compare.rate_table(compare.validated(results), {"topk-step": "5e-5"})[2]


def test_a_run_of_other_settings_that_is_worth_something_is_not_deleted(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.yaml").write_text(config.dump(config.load(kept_runs.RECIPE, [f"out={out}"])))
    (out / "finished").write_text("1.0")
    assert kept_runs.train_once(out, kept_runs.RECIPE) == out
    for resume in (False, True):
        with pytest.raises(config.ConfigError, match="run is a run of other settings: move it"):
            kept_runs.train_once(out, kept_runs.RECIPE, "steps=3", resume=resume)
        (out / "finished").unlink(missing_ok=True)
    assert (out / "config.yaml").is_file()


def test_sigterm_ends_an_experiment_as_ctrl_c_does(capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert kept_runs.experiment_status(lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.init("cpu")  # which the end of a program has closed
    assert capsys.readouterr().err == "interrupted; the same command goes on from there\n"


def test_a_write_that_fails_leaves_the_results_as_they_were(tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl.xz"
    make(results, compare.arm("grpo", "1e-4", 0), 0.1)
    before = results.read_bytes()
    monkeypatch.setattr(kept_runs.os, "replace", lambda *paths: 1 / 0)  # the process ends here
    with pytest.raises(ZeroDivisionError):
        make(results, compare.arm("grpo", "1e-4", 1), 0.1)
    assert results.read_bytes() == before and len(kept_runs.read(results)) == 1


def test_what_is_kept_in_the_repository_is_what_the_arms_of_today_would_run():
    """A result whose settings have changed would be run again, and until then the tables would be of another arm."""
    records = kept_runs.read(kept_runs.RESULTS)
    of_six = {name: record.about for name, record in records.items() if record.about.get("family") in compare.SIX}
    assert len(of_six) >= 6 * 8 + 6 * 5 + 8 * 5
    for name, about in of_six.items():
        data = compare.VALIDATION if about["split"] == "validation" else None
        run = compare.arm(about["arm"], about["rate"], about["seed"], data)
        assert run.name == name and kept_runs.is_kept(run, kept_runs.RESULTS), name


def test_every_arm_of_distillation_and_of_the_law_is_a_run_that_there_can_be():
    assert len({str(compare_opd.run_of(name, 0).plain_settings()) for name in compare_opd.ARMS}) == 17
    first = [run for run in law.runs() if run.seed == 0 and not run.method]  # those of a method are not plugged in
    assert len({str(run.plain_settings()) for run in first}) == len(first) == len(law.runs()) / 5 - 3 == 32


def test_what_a_step_is_worth_by_hand():
    """They end at 30 after 10 steps, where the others were after 4: between 20 after 2 and 40 after 6."""
    these, those = (Record({"cpu_seconds": 1, "wall_seconds": 1, "settings": {}}, [
        {"step": step, "eval/x/accuracy": accuracy} for step, accuracy in curve])
        for curve in ([(0, 0.1), (5, 0.2), (10, 0.3)], [(0, 0.1), (2, 0.2), (6, 0.4)]))
    assert law.worth([these] * 2, [those] * 2, "steps") == pytest.approx(0.4)


def test_holm_by_hand():
    assert kept_runs.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and kept_runs.holm([]) == []
