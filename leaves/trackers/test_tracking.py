"""What is kept of a run as text, and what reaches Weights & Biases, read back from the records of the real package."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import wandb
from conftest import ROOT, toy_config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

import config
import train
from infra import runfolder
from leaves.trackers import join, trackers
from settings.loader import ConfigError

SHORT = ["rollout.max_new_tokens=16", "eval.max_new_tokens=8", "log.to=[wandb]"]
BLOCK = 32768


def records(path: Path) -> Iterator:
    """The records of a .wandb file: LevelDB's log format behind a head of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while BLOCK - at % BLOCK < 7 or at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no head fits, so the block ends in zeros
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        piece = data[at + 7:at + 7 + length]
        whole = piece if kind in (1, 2) else whole + piece  # full, first, middle, last
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
        at += 7 + length


def recorded(folder: Path) -> list[Path]:
    """The records of a run on disk, the oldest first."""
    wandb.teardown()  # as at the end of a process: until then some of a record may be in memory
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def history(path: Path) -> list[dict]:
    """Every call of run.log, without what wandb adds."""
    lines = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            lines.append({key: json.loads(x) for key, x in values.items() if not key.startswith("_")})
    return lines


def exit_code(path: Path) -> int:
    return next(r.exit.exit_code for r in records(path) if r.WhichOneof("record_type") == "exit")


def by_step(lines: list[dict]) -> dict[int, dict]:
    """The values of each step, the later of two."""
    merged: dict[int, dict] = {}
    for line in lines:
        values = {key: value for key, value in line.items() if not key.startswith("completions")}
        merged.setdefault(line["step"], {}).update(values)
    return merged


def same_as_metrics(folder: Path) -> bool:
    sent = [line for path in recorded(folder) for line in history(path)]
    return by_step(sent) == by_step(runfolder.read_log(folder / "metrics.jsonl"))


@pytest.fixture
def offline(monkeypatch):
    """wandb as without a network, by its own setting."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()


def test_metrics_config_and_completions_are_recorded(offline, tmp_path):
    cfg = toy_config(tmp_path / "run", *SHORT)
    train.train(cfg)
    path, = recorded(tmp_path / "run")
    assert same_as_metrics(tmp_path / "run") and exit_code(path) == 0
    of_kind = {record.WhichOneof("record_type"): record for record in records(path)}
    run = of_kind["run"].run
    assert (run.project, run.display_name, run.resumed) == ("winnow", "run", False)
    ran_on = json.loads((tmp_path / "run" / "env.json").read_text())
    assert run.run_id == ran_on["tracked"]
    sent = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != "_wandb"}
    assert sent == config.flatten(cfg) | ran_on["chosen"]
    metric = of_kind["metric"].metric
    assert (metric.glob_name, metric.step_metric) == ("*", "step")
    shown = [line for line in history(path) if "completions.path" in line]
    assert [line["step"] for line in shown] == [1, 2]
    table = json.loads((path.parent / "files" / shown[1]["completions.path"]).read_text())
    lines = [line for line in runfolder.read_log(tmp_path / "run" / "samples.jsonl") if line["step"] == 2]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(rows) == 2 * cfg.rollout.group_size and [row["id"] for row in rows[::8]] == [x["id"] for x in lines]
    for row, completion in zip(rows, (c for line in lines for c in line["completions"]), strict=True):
        assert {key: row[key] for key in trackers.COLUMNS} == {key: completion[key] for key in trackers.COLUMNS}


@pytest.mark.slow
def test_a_run_that_failed_and_goes_on_is_one_run_and_the_later_of_two_values_counts(offline, tmp_path, monkeypatch):
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
    train.train(cfg, resume="always")
    first, second = recorded(tmp_path / "run")
    assert (exit_code(first), exit_code(second)) == (1, 0)
    assert by_step(history(first))[2] != by_step(history(second))[2]  # seconds differ
    assert same_as_metrics(tmp_path / "run")
    assert runfolder.state_of(tmp_path / "run") == {"state": "finished"}


DYING = """
import os, sys, train
save, log_step = train.Checkpoints.save, train.runfolder.RunLog.step
def save_whole(checkpoints, *given):
    save(checkpoints, *given)
    checkpoints.wait()
train.Checkpoints.save = save_whole
def die(log, step, *given):
    log_step(log, step, *given)
    if step == 2:
        os._exit(9)
train.runfolder.RunLog.step = die
sys.exit(train.main())
"""


@pytest.mark.slow
def test_a_run_that_died_and_goes_on_is_one_run_with_all_its_steps(offline, tmp_path):
    """wandb writes its record now and then, so of a process that is gone at once it may hold nothing."""
    cfg = toy_config(tmp_path / "run", "checkpoint.every=1", *SHORT)
    (tmp_path / "test.yaml").write_text(config.dump(cfg))
    command = [sys.executable, "-c", DYING, "--config", str(tmp_path / "test.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 9 and runfolder.state_of(tmp_path / "run") == {"state": "died"}
    train.train(cfg, resume="always")
    first, second = recorded(tmp_path / "run")
    name = json.loads((tmp_path / "run" / "env.json").read_text())["tracked"]
    assert first.name == second.name == f"run-{name}.wandb"
    assert same_as_metrics(tmp_path / "run")


@pytest.mark.parametrize("missing", [pytest.param("network", marks=pytest.mark.slow), "login"])
def test_a_run_goes_on_without_network_or_login_and_says_it_once(missing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "LONGEST_WAIT", 0.5)
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
    assert len(warnings) == 1 and reason in warnings[0] and "`wandb sync` sends it later" in warnings[0], warnings
    assert [line["step"] for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 2]
    assert same_as_metrics(tmp_path / "run") and runfolder.state_of(tmp_path / "run") == {"state": "finished"}


def test_what_fails_in_a_run_is_said_once(offline, tmp_path, monkeypatch, capsys):
    def fail(*given, **named):
        raise failures.pop()

    failures = [TimeoutError("late"), ConnectionResetError("gone"), wandb.Error("refused\nat length")]
    for name in ("log", "finish"):
        monkeypatch.setattr(wandb.Run, name, fail)
    tracker = trackers.Trackers(toy_config(tmp_path / "run", *SHORT), tmp_path, "1a2b3c4d")
    for _ in range(2):
        tracker.log({"step": 1})
    tracker.finish({"state": "finished"})
    said = capsys.readouterr().err
    assert said.startswith(f"wandb: refused; its record of the run stays in {tmp_path}/wandb, and `wandb sync`")
    assert said.count("\n") == 1 and not failures


def test_what_cannot_even_be_recorded_is_not_promised(offline, tmp_path, capsys):
    tracker = trackers.Trackers(toy_config(tmp_path / "run", *SHORT, "log.project=a/b:c"), tmp_path, "1a2b3c4d")
    tracker.log({"step": 1})
    tracker.finish({"state": "finished"})
    said = capsys.readouterr().err
    assert "Invalid project name" in said and said.endswith("; nothing of the run is recorded there\n"), said
    assert not list(tmp_path.glob("wandb/*/*.wandb"))


TRACKED = """
import sys
from dataclasses import replace
import config, train
cfg = config.load(sys.argv[1])
train.checks.before_run = lambda cfg, ready: ready
train.train(replace(cfg, steps=1))
train.train(cfg, resume="always")
"""


def test_tensorboard_has_every_step_once_when_the_run_goes_on_too(tmp_path):
    """Read back by its own reader."""
    cfg = toy_config(tmp_path / "run", *SHORT[:2], "log.to=[tensorboard]", "checkpoint.every=1")
    (tmp_path / "test.yaml").write_text(config.dump(cfg))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", TRACKED, str(tmp_path / "test.yaml")], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")
    expected = {(line["step"], key): value for line in lines for key, value in line.items()
                if isinstance(value, int | float) and key != "step"}
    texts = runfolder.read_log(tmp_path / "run" / "samples.jsonl")

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    kept = [(event.step, key, event.value) for key in events.Tags()["scalars"] for event in events.Scalars(key)]
    assert {(step, key) for step, key, _ in kept} == expected.keys() and len(kept) == len(expected)
    assert all(value == np.float32(expected[step, key]) for step, key, value in kept)
    shown = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("completions/0/text_summary")]
    assert all(f"text: {line['completions'][0]['text']}" in text for line, text in zip(texts[::2], shown, strict=True))


def test_a_missing_package_is_said_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="log.to: wandb cannot be imported .*; pip install -r requirements/trackers"):
        train.train(toy_config(tmp_path / "run", *SHORT))
    assert not (tmp_path / "run").exists()
    assert join.decide(toy_config(tmp_path / "run", "log.to=null"), None) is None
