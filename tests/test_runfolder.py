"""The lock of a run folder: it names who holds it, and is free when that process is gone, however it went. And
what a run prints: plain lines in a log file, bars at a terminal.
"""

import errno
import fcntl
import os
import pty
import re
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from weakref import WeakSet

import pytest
from conftest import refuses, toy_config
from tqdm import tqdm

import config
import train
from config import ConfigError
from infra import runfolder


@contextmanager
def held(folder) -> Iterator[int]:
    """A process that has locked the folder and then forked a worker; both end here at the latest."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        log = runfolder.RunLog(folder)
        log.lock()
        if os.fork():  # the parent holds the lock, and its child lives on
            os.write(theirs, b"locked")
        time.sleep(60)
        os._exit(0)
    assert os.read(ours, 6) == b"locked"
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, 9)
        os.close(ours)
        os.close(theirs)


def test_a_lock_names_its_holder_and_ends_with_it_though_its_workers_live(tmp_path):
    with held(tmp_path) as pid:
        refuses(f"{tmp_path} is in use by process {pid} on .*; wait", runfolder.RunLog(tmp_path).lock)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        first, again = runfolder.RunLog(tmp_path), runfolder.RunLog(tmp_path)
        first.lock()
        again.lock()  # by a run of this process that goes on, while a traceback still holds the old log
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_look_at_a_run_tells_how_it_stands_and_changes_nothing(tmp_path):
    """Also in the process that runs it, and in a folder that a machine which went down has left."""
    assert runfolder.state_of(tmp_path) == {"state": "died"} and not list(tmp_path.iterdir())
    log = runfolder.RunLog(tmp_path)
    log.lock()
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert runfolder.state_of(tmp_path) == runfolder.state_of(tmp_path) == {"state": "running"}
    with (tmp_path / "lock").open() as file, pytest.raises(BlockingIOError):  # it is held still
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    log.unlock()
    assert runfolder.state_of(tmp_path) == {"state": "died"}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_run_may_begin_while_somebody_looks_at_its_folder(tmp_path, monkeypatch):
    """Whoever looks holds the lock for an instant: here until the first attempt to take it has failed."""
    (tmp_path / "lock").touch()
    true, looking = fcntl.flock, (tmp_path / "lock").open()
    true(looking, fcntl.LOCK_SH)

    def attempt(*given):
        try:
            return true(*given)
        finally:
            looking.close()

    monkeypatch.setattr(fcntl, "flock", attempt)
    runfolder.RunLog(tmp_path).lock()
    assert looking.closed


@pytest.mark.parametrize(("error", "state"), [
    (None, {"state": "finished"}), (KeyboardInterrupt(), {"state": "stopped"}),
    (ConfigError("no room\nleft"), {"state": "failed", "error": "ConfigError: no room"}),
    (SystemExit(3), {"state": "failed", "error": "SystemExit: 3"})], ids=str)
def test_a_run_writes_down_how_it_ends_and_tells_its_watchers(error, state, tmp_path):
    """One that was stopped keeps others out until its process has ended: it may be writing a checkpoint."""
    log, told = runfolder.RunLog(tmp_path), []
    log.watchers.append(SimpleNamespace(finish=told.append))
    log.write("metrics.jsonl", {"step": 1})
    log.lock()
    with pytest.raises(type(error)) if error else nullcontext(), log.running(toy_config(tmp_path / "run")):
        assert runfolder.state_of(tmp_path) == {"state": "running"}
        if error:
            raise error
    with runfolder.RunLog(None).running(None):  # of another rank, which writes nothing
        pass
    assert runfolder.read_log(tmp_path / "state.json") == [state] == told
    assert runfolder.is_locked(tmp_path) == isinstance(error, KeyboardInterrupt)
    log.unlock()
    assert runfolder.state_of(tmp_path) == state


def test_a_full_disk_is_told_by_its_own_error_also_where_the_end_cannot_be_written(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runfolder, "rewrite_log", full)
    log = runfolder.RunLog(tmp_path)
    log.lock()
    with pytest.raises(ConfigError, match="no room"), log.running(toy_config(tmp_path / "run")):
        raise ConfigError("no room")
    assert not runfolder.is_locked(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_lock_is_named(number, tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = f"lies where files cannot be locked .{os.strerror(number)}.; set `out` to another file system"
    refuses(said, runfolder.RunLog(tmp_path).lock)


def test_a_setting_that_only_one_of_two_configs_has_is_absent_in_the_other(monkeypatch):
    """The kinds of a section have different settings. `out` may differ: a folder can be moved."""
    monkeypatch.setattr(config, "flatten", lambda settings: settings)
    there, now = {"kind": "topk", "keep": 4, "out": "x"}, {"kind": "none", "explore": 0.1, "out": "y"}
    assert list(runfolder.changed_settings(there, now).values()) == [
        "kind ('topk' there, 'none' now)", "explore (absent there, 0.1 now)", "keep (4 there, absent now)"]


@pytest.mark.slow
def test_a_log_file_gets_one_plain_line_per_step(tmp_path, capfd):
    train.train(toy_config(tmp_path / "run", "steps=3", "rollout.max_new_tokens=8", "eval.max_new_tokens=8"))
    out, err = capfd.readouterr()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out + err)  # control characters but the end of a line
    steps = [line for line in err.splitlines() if re.match(r"step \d+/3: ", line)]
    assert [line.split(":")[0] for line in steps] == ["step 1/3", "step 2/3", "step 3/3"]
    assert all(re.search(r": reward [\d.]+, length [\d.]+, kept \d+/32, [\d.]+ s, \d:\d\d:\d\d left$", line)
               for line in steps)
    first = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["time/start"] > 0 < first["time/eval"]
    assert re.search(r"^seconds  start [\d.]+  eval [\d.]+  rollout ", out, re.MULTILINE)
    assert f"/eval.py --config {tmp_path}/run/config.yaml --model {tmp_path}/run/hf\n" in out


def test_a_terminal_gets_a_bar_and_no_lines(tmp_path, monkeypatch):
    """Through a pseudo-terminal, since tqdm and `print_progress` ask the stream itself."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    monkeypatch.setattr(tqdm, "_instances", WeakSet())  # bars of other tests would take the first line
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        for _ in runfolder.RunLog(tmp_path).steps(0, 2):
            runfolder.print_progress("a line")
    shown = ""
    while "training: 100%" not in shown:  # a busy kernel hands it over in pieces, and raises OSError behind the last
        shown += os.read(ours, 10_000).decode()
    assert "\r" in shown and "a line" not in shown
