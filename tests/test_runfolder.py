"""The lock of a run folder: it names who holds it, and is free when that process is gone, however it went."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import config
from config import ConfigError
from infra import runfolder

HOLDER = """
import os, sys, time
from pathlib import Path
from infra import runfolder

log = runfolder.Log(Path(sys.argv[1]))
log.lock()
if os.fork():  # the parent holds the lock, and its child lives on
    time.sleep(0.2)
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def hold(folder) -> subprocess.Popen:
    """Start a process that has locked the folder and then forked a worker."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == f"{process.pid}\n"
    return process


def test_a_lock_names_its_holder_and_ends_with_it_though_its_workers_live(tmp_path):
    process = hold(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"{tmp_path} is in use by process {process.pid} on .*; wait"):
            runfolder.Log(tmp_path).lock()
        process.kill()
        process.wait()
        runfolder.Log(tmp_path).lock()
    finally:
        os.killpg(process.pid, 9)  # the worker


def test_one_process_may_lock_a_folder_again(tmp_path):
    """A run that failed in this process may be resumed in it, while its traceback still holds the old log."""
    first, second = runfolder.Log(tmp_path), runfolder.Log(tmp_path)
    first.lock()
    second.lock()
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_lock_is_named(number, tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = f"lies where files cannot be locked .{os.strerror(number)}.; set `out` to another file system"
    with pytest.raises(ConfigError, match=said):
        runfolder.Log(tmp_path).lock()


def test_a_setting_that_only_one_of_two_configs_has_is_absent_in_the_other(monkeypatch):
    """The kinds of a section have different settings. `out` may differ: a folder can be moved."""
    monkeypatch.setattr(config, "flatten", lambda settings: settings)
    there, now = {"kind": "topk", "keep": 4, "out": "x"}, {"kind": "none", "explore": 0.1, "out": "y"}
    assert runfolder.changed_settings(there, now) == [
        "kind ('topk' there, 'none' now)", "explore (absent there, 0.1 now)", "keep (4 there, absent now)"]
