"""What reaches Weights & Biases, by the calls of the real package."""

import json
import sys
from pathlib import Path

import pytest
import wandb
from conftest import toy_config

import config
import train
from infra import runfolder
from leaves.trackers import join

SHORT = ["rollout.max_new_tokens=16", "eval.max_new_tokens=8", "log.to=[wandb]"]


@pytest.fixture
def calls(monkeypatch):
    """Every call of wandb, which records it on disk as without a network."""
    made: list[tuple[str, tuple, dict]] = []

    def note(home, name: str, skipped: int):
        real = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *given, **named: made.append(
            (name, given[skipped:], named)) or real(*given, **named))

    note(wandb, "init", 0)
    for name in ("define_metric", "log", "finish"):
        note(wandb.Run, name, 1)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield made
    wandb.teardown()


def same_as_metrics(calls: list, folder: Path) -> bool:
    """Whether each step has the values that were logged, the later of two."""
    merged: list[dict] = [{}, {}]
    for steps, lines in zip(merged, ([given[0] for name, given, _ in calls if name == "log"],
                                     runfolder.read_log(folder / "metrics.jsonl")), strict=True):
        for line in lines:
            steps.setdefault(line["step"], {}).update(line)
    return merged[0] == merged[1]


@pytest.mark.slow
def test_metrics_and_config_are_recorded(calls, tmp_path):
    cfg = toy_config(tmp_path / "run", *SHORT)
    train.train(cfg)
    (_, _, init), metric, *_, end = calls
    assert (init["project"], init["name"], init["id"]) == ("winnow", "run", join.name_run(tmp_path / "run"))
    assert init["config"] == config.flatten(cfg) | json.loads((tmp_path / "run" / "env.json").read_text())["chosen"]
    assert metric == ("define_metric", ("*",), {"step_metric": "step"}) and end == ("finish", (0,), {})
    assert same_as_metrics(calls, tmp_path / "run")
    assert len(list(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))) == 1
    (tmp_path / "run").rename(tmp_path / "copy")
    assert join.name_run(tmp_path / "copy") != init["id"]


@pytest.mark.slow
def test_a_run_that_failed_and_goes_on_is_one_run_and_all_is_sent_again(calls, tmp_path, monkeypatch):
    cfg, log_step = toy_config(tmp_path / "run", "checkpoint.every=1", *SHORT), runfolder.RunLog.step

    def fail(log, step, metrics):
        log_step(log, step, metrics)
        if step == 2:
            raise RuntimeError("a cable\nwas pulled")

    with monkeypatch.context() as patch:
        patch.setattr(runfolder.RunLog, "step", fail)
        with pytest.raises(RuntimeError):
            train.train(cfg)
    assert runfolder.state_of(tmp_path / "run") == {"state": "failed", "error": "RuntimeError: a cable"}
    assert calls[-1] == ("finish", (1,), {})
    (_, _, first), calls[:] = calls[0], []
    train.train(cfg, resume="always")
    assert first["id"] == calls[0][2]["id"] and calls[-1] == ("finish", (0,), {})
    assert same_as_metrics(calls, tmp_path / "run")
    assert runfolder.state_of(tmp_path / "run") == {"state": "finished"}


@pytest.mark.slow
@pytest.mark.parametrize("missing", [pytest.param("network", marks=pytest.mark.slow), "login"])
def test_a_run_goes_on_without_network_or_login_and_says_it_once(missing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(join, "LONGEST_WAIT", 0.5)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if missing == "network":
        monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    try:
        train.train(toy_config(tmp_path / "run", *SHORT))
    finally:
        wandb.teardown()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    reason = {"network": "Failed to get resume status", "login": "No API key configured"}[missing]
    assert len(warnings) == 1 and reason in warnings[0] and "WANDB_MODE=offline" in warnings[0], warnings
    assert [line["step"] for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 2]
    assert runfolder.state_of(tmp_path / "run") == {"state": "finished"}


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_what_fails_in_a_run_is_said_once(failing, calls, tmp_path, monkeypatch, capsys):
    def fail(*given, **named):
        raise wandb.Error("refused\nat length")

    monkeypatch.setattr(*((wandb, "init") if failing == "init" else (wandb.Run, failing)), fail)
    (tmp_path / "env.json").write_text("{}")
    tracker = join.Tracker(toy_config(tmp_path / "run", *SHORT), tmp_path)
    for _ in range(2):
        tracker.log({"step": 1})
    for _ in range(2):
        tracker.finish({"state": "finished"})
    said = capsys.readouterr().err
    assert said.startswith("wandb gets no more of this run: refused at length; with WANDB_MODE=offline") and said.count("\n") == 1


def test_without_the_package_a_run_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    join.Tracker(toy_config(tmp_path / "run", *SHORT), tmp_path).finish({})
    assert capsys.readouterr().err.startswith("wandb gets no more of this run: import of wandb halted")
