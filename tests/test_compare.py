"""The comparison's bookkeeping and numbers, on made results; redraw.py computes the same from these alone."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from tqdm import tqdm

sys.path.append(str(ROOT / "experiments"))  # behind the root: some of its files have names of ours

import compare  # noqa: E402
import measures  # noqa: E402
import rates  # noqa: E402
import stored  # noqa: E402
from stored import Record, Run  # noqa: E402

SCRIPT = ROOT / "experiments" / "redraw.py"


def make(results: Path, run: Run, gain: float, tokens: int = 4000) -> None:
    """Write down a run of 30 steps that gains so much, as `keep` does."""
    draw = np.random.default_rng([run.seed, round(100 * gain), tokens])
    lines = []
    for step in range(31):
        if step:
            lines.append({"step": step, "rollout/tokens": 4000 + int(draw.integers(500)), "train/tokens": tokens,
                          "time/step": 1 + draw.random(), "time/rollout": 0.5})
        if step % 15 == 0:
            lines.append({"step": step, "accuracy": round(0.4 + gain * step / 30 + 0.02 * draw.random(), 6)})
    about = {"arm": run.arm, "family": run.family, "rate": run.rate, "seed": run.seed, "split": run.split,
             "settings": stored.plain_settings(run) | {"steps": 30}, "cpu_seconds": 40.0, "wall_seconds": 50.0}
    stored.write([about, *lines], stored.path_of(run, results))


@pytest.fixture
def results(tmp_path) -> Path:
    """Results of a comparison that is nearly done: the rate of grpo is the grid's second, relatives lack a seed."""
    for name in compare.SIX:
        for rate in compare.GRID:
            for seed in compare.TUNING_SEEDS:
                better = 0.05 if (name, rate) == ("grpo", "5e-5") or (name != "grpo" and rate == "1e-4") else 0.0
                run = replace(compare.arm(name, rate, seed), data=rates.VALIDATION)
                make(tmp_path, run, 0.1 + better)
    for i, name in enumerate((*compare.SIX, *compare.OTHERS)):
        family = compare.OTHERS[name][0] if name in compare.OTHERS else name
        for seed in range(5 if name in compare.SIX else 2):
            for rate in ("5e-5", "1e-4"):
                right = (rate == "5e-5") == (family == "grpo")
                gain = 0.1 + 0.01 * i if right else 0.5
                make(tmp_path, compare.arm(name, rate, seed), gain, tokens=4000 - 200 * i)
    make(tmp_path, Run("another", (), "1e-4", 0), 0.9)  # of another experiment
    return tmp_path


def test_the_script_of_60_lines_computes_every_number_that_the_comparison_prints(results, tmp_path, capsys):
    compare.report(results)
    printed = capsys.readouterr().out.splitlines()
    numbers = json.loads(printed[-1])
    again = subprocess.run([sys.executable, str(SCRIPT), str(results), str(tmp_path)], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    redrawn = {line["part"]: line for line in map(json.loads, again.stdout.splitlines())}
    compared = 0
    for part in ("six", "others", "validation"):
        for cost, of in numbers[part].items():
            for kind in ("area", "end"):
                column = redrawn[part][f"{kind}, {cost}"]
                assert column.pop("budget") == pytest.approx(of["budget"])
                assert column.keys() == of["arms"].keys()
                for name, cell in column.items():
                    figures = [of["arms"][name][kind].get(key) for key in ("mean", "difference", "low", "high", "p")]
                    assert cell == pytest.approx([x for x in figures if x is not None], abs=1e-7), (part, cost, name)
                    compared += len(cell)
    assert compared > 8 * (5 * 6 - 4 + 5 * 9 - 4)
    arms = compare.parts(results)
    for part in ("six", "others"):
        assert (tmp_path / f"compare_{part}.png").stat().st_size > 10_000
        rows = [line.split(" | ") for line in compare.cost_table(arms[part])[2:]]
        for name, of in redrawn[part]["spent"].items():
            row, = (row for row in rows if row[0] == f"| {name}")
            spent = {key: np.mean([run.get(key, 0.0) for run in of]) for key in of[0]}
            assert row[2:4] == [f"{spent['rollout/tokens']:,.0f}", f"{spent['train/tokens']:,.0f}"]
            assert row[4] == f"{spent['time/rollout']:.1f}" and row[9] == f"{spent['time/step']:.1f}"
    assert len([line for line in printed if line.startswith("| nat |")]) == 3  # area, end and cost


def test_the_script_imports_nothing_of_ours_and_has_60_lines():
    text = SCRIPT.read_text()
    names = {alias.name.split(".")[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)
             for alias in node.names}
    names |= {node.module.split(".")[0] for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names | {"numpy", "matplotlib"}
    assert len(text.splitlines()) <= 60


def test_numbers_of_the_comparison_by_hand(results):
    arms = compare.parts(results)["six"]
    assert list(arms) == list(compare.SIX) and set(arms["cppo"]) == set(range(5))
    for name, rate in (("grpo", "5e-5"), ("cppo", "1e-4")):
        assert {of.about["rate"] for of in arms[name].values()} == {rate}
    numbers = compare.compared(arms)
    assert numbers["steps"]["budget"] == 30
    assert numbers["trained tokens"]["budget"] == min(30 * (4000 - 200 * i) for i in range(6))
    seconds = [sum(line.get("time/step", 0) for line in of.lines) * 40 / 50
               for by_seed in arms.values() for of in by_seed.values()]
    assert numbers["seconds"]["budget"] == pytest.approx(min(seconds))
    accuracy = [[line["accuracy"] * 100 for line in of.lines if "accuracy" in line] for of in arms["cppo"].values()]
    cell = numbers["steps"]["arms"]["cppo"]
    assert cell["area"]["mean"] == pytest.approx(np.mean([(a + 2 * b + c) / 4 for a, b, c in accuracy]))
    assert cell["end"]["mean"] == pytest.approx(np.mean([0.25 * b + 0.75 * c for _, b, c in accuracy]))


def test_students_law_and_holms_correction():
    for df, t in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228)):
        assert measures.chance(t, df) == pytest.approx(0.05, abs=5e-5)
        assert measures.quantile(0.05, df) == pytest.approx(t, abs=5e-4)
    assert measures.quantile(0.01, 4) == pytest.approx(4.604, abs=5e-4)
    assert measures.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert measures.holm([0.5, 0.9]) == [1.0, 1.0]
    gap = measures.difference([3.0, 5.0, 4.0], [1.0, 2.0, 3.0], comparisons=1)
    assert (gap.mean, gap.high - gap.mean) == pytest.approx((2.0, 4.3027 * 1 / 3 ** 0.5), abs=1e-3)


def test_a_rate_is_chosen_once_all_runs_are_there_and_the_grid_grows_at_its_end(tmp_path, monkeypatch):
    tried = []

    def train(run: Run, results: Path, bar: tqdm) -> None:
        tried.append((run.rate, run.seed))
        make(results, run, float(run.rate) * 100)  # the higher the better

    monkeypatch.setattr(rates, "keep", train)
    monkeypatch.setattr(rates, "write_validation", lambda: None)
    best = rates.tune(compare.arm, {"pps": ("1e-4", "2e-4")}, (100, 101), tmp_path, tqdm(disable=True))
    assert tried == [("1e-4", 100), ("2e-4", 100), ("1e-4", 101), ("2e-4", 101), ("4e-4", 100), ("4e-4", 101),
                     ("8e-4", 100), ("8e-4", 101)]
    assert best == {"pps": "8e-4"}
    areas = rates.validated(tmp_path)
    assert "an end of what was tried" in rates.rate_table(areas, best)[2]
    assert rates.best_rate({"1e-4": [50.0, 52.0], "2e-4": [60.0]}, 2, 2) is None
    assert rates.is_inside("1e-4", {"5e-5": [], "1e-4": [], "2e-4": []})
    assert rates.beyond("5e-5", {"5e-5": [], "1e-4": []}) == "2.5e-5"


@pytest.mark.parametrize("full", [False, True])
def test_seeds_go_round_the_six_first_and_a_part_is_18_runs(tmp_path, monkeypatch, full):
    made = []

    def train(run: Run, results: Path, bar: tqdm) -> None:
        made.append((run.split, run.arm, run.rate, run.seed))
        make(results, run, 0.2 if run.rate == "5e-5" else 0.1)

    for module in (compare, rates):
        monkeypatch.setattr(module, "keep", train)
    monkeypatch.setattr(rates, "write_validation", lambda: None)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--results", str(tmp_path), *(["--full"] if full else [])])
    compare.main()
    tuning = [run for run in made if run[0] == "validation"]
    assert len(tuning) == (48 if full else 0) and made[:len(tuning)] == tuning
    rest, rate = made[len(tuning):], "5e-5" if full else "1e-4"
    six = [("test", name, rate, seed) for seed in range(5 if full else 3) for name in compare.SIX]
    others = [("test", name, rate, seed) for seed in range(5 if full else 0) for name in compare.OTHERS]
    assert rest == six + others


def fake_training(folder: Path, name: str, *settings: str) -> Path:
    folder.mkdir(parents=True)
    lines = [{"step": 0, "eval/hard_test/accuracy": 0.4, "eval/hard_test/lenient": 0.5, "time/eval": 1.0},
             {"step": 1, "rollout/tokens": 7, "time/step": 1 / 3, "train/loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "finished").write_text("3.5")
    ran_on = {"commit": "0" * 40, "diff": "", "device": "cpu, 1 threads", "python": "3", "libraries": {"torch": "2"}}
    (folder / "env.json").write_text(json.dumps(ran_on))
    return folder


def test_a_run_that_is_kept_is_not_run_again_and_its_folder_goes(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(stored, "train_once", lambda *given: trained.append(given) or fake_training(*given))
    monkeypatch.setattr(stored, "ROOT", tmp_path)
    run, bar = compare.arm("cppo", "1e-4", 0), tqdm(disable=True)
    for _ in range(2):
        stored.keep(run, tmp_path, bar)
    assert len(trained) == 1 and not (tmp_path / "runs" / "measured" / run.name).exists()
    record, = stored.records(tmp_path)
    assert record.lines == [{"step": 0, "time/eval": 1.0, "accuracy": 0.4},
                            {"step": 1, "rollout/tokens": 7, "time/step": 0.333333}]
    about = record.about
    assert (about["commit"], about["cpu_seconds"], about["settings"]["optim.lr"]) == ("0" * 40, 3.5, 1e-4)
    assert about["date"] and about["machine"] and about["config"] == "grpo_hard.yaml"
    written = stored.path_of(run, tmp_path).read_bytes()
    stored.write([about, *record.lines], stored.path_of(run, tmp_path))
    assert stored.path_of(run, tmp_path).read_bytes() == written
    # A setting that did not exist then does not count; one with another value does.
    older = dict(about, settings={key: value for key, value in about["settings"].items() if key != "loss.entropy"})
    stored.write([older, *record.lines], stored.path_of(run, tmp_path))
    stored.keep(run, tmp_path, bar)
    assert len(trained) == 1
    stored.write([dict(about, settings=about["settings"] | {"steps": 7}), *record.lines], stored.path_of(run, tmp_path))
    stored.keep(run, tmp_path, bar)
    assert len(trained) == 2


def test_the_validation_split_shares_no_problem_with_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "ROOT", tmp_path)
    rates.write_validation()
    rows = [json.loads(line) for line in (tmp_path / rates.VALIDATION).read_text().splitlines()]
    questions = {row["question"] for row in rows}
    assert len(questions) == 600 and {row["level"] for row in rows} == set(range(1, 7))
    for name in ("train", "test"):
        lines = (ROOT / "toy" / f"hard_{name}.jsonl").read_text().splitlines()
        assert questions.isdisjoint(json.loads(line)["question"] for line in lines)


def is_as_kept(run: Run, record: Record) -> bool:
    """Whether a run, on the split of a record, is the one whose results this is."""
    data = rates.VALIDATION if record.about["split"] == "validation" else None
    run = replace(run, data=data)
    return stored.path_of(run, stored.RESULTS).name == record.file and stored.is_kept(run, stored.RESULTS)


def test_what_is_kept_in_the_repository_is_what_the_arms_of_today_would_run():
    """A result whose settings have changed would be run again, and until then the tables would be of another arm."""
    for record in stored.records(stored.RESULTS):
        about = record.about
        if about["arm"] in compare.SIX or about["arm"] in compare.OTHERS:
            run = compare.arm(about["arm"], about["rate"], about["seed"])
            assert is_as_kept(run, record), record.file


@pytest.mark.slow
def test_a_real_run_of_two_steps_is_kept(tmp_path):
    run = Run("pps", (*compare.SIX["pps"], "steps=2", "eval.every=2", "eval.limit=6"), "1e-4", 0, "pps")
    stored.keep(run, tmp_path, tqdm(disable=True))
    record, = stored.records(tmp_path)
    assert isinstance(record, Record) and [line["step"] for line in record.lines] == [0, 1, 2, 2]
    assert all(line["train/tokens"] < line["rollout/tokens"] / 2 for line in record.lines[1:3])
    assert stored.path_of(run, tmp_path).stat().st_size < 4000
    spent = measures.curve(record).spent
    assert spent["steps"].tolist() == [0, 2] and spent["seconds"][1] > 0
