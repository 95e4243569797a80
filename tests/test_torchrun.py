"""What dies under torchrun: a worker takes others down or is restarted, a machine comes back, and the run is the same.

A step is awaited by what a run prints, never by the clock.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from conftest import ROOT, toy_config
from survive import family, record

import config
from config import ConfigError
from infra import dist

STEPS = 25  # a run says something of every fifth


def launch(out, *options: str, resume: tuple[str, ...] = (), adapter: str = "null") -> subprocess.Popen:
    """A small run under torchrun; `adapter` is model.lora.rank."""
    path = out.parent / "test.yaml"
    path.write_text(config.dump(toy_config(out, f"steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=2",
                                           "model.dtype=float32", "prune.prompts={kind: bernoulli, drop_prob: 0.5}",
                                           "data.limit=10", f"model.lora.rank={adapter}", name="dppo_toy.yaml")))
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *options, "train.py", "--config", str(path),
                             *resume], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def wait_for(process: subprocess.Popen, text: str) -> None:
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    raise AssertionError("".join(seen))


def workers(process: subprocess.Popen) -> list[int]:
    """By rank."""
    return family(process.pid)[1:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], tuple]:
    """The same run, undisturbed."""
    @functools.cache
    def run(adapter: str) -> tuple:
        out = tmp_path_factory.mktemp("whole") / "run"
        assert launch(out, "--standalone", "--nproc_per_node=2", adapter=adapter).wait() == 0
        return record(out)

    return run


@pytest.mark.slow
def test_a_worker_that_dies_takes_the_others_down_and_is_named(tmp_path):
    process = launch(tmp_path / "run", "--standalone", "--nproc_per_node=2")
    wait_for(process, "step 1:")
    os.kill(workers(process)[1], signal.SIGKILL)
    said = process.communicate()[1]
    assert process.returncode == 1
    of_rank = said.partition("failed (exitcode")[0]  # torchrun itself ends in a traceback
    assert "rank 0 has lost another one: mend what that says; --resume auto" in of_rank and "Traceback" not in of_rank
    cause = said.partition("Root Cause")[2]
    assert "rank      : 1" in cause and "SIGKILL" in cause


def test_restarts_want_a_store_of_their_own(monkeypatch):
    """Else the restarted ranks read the addresses of the dead ones, and one of them waits forever."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    dist.init("cpu")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"):
        dist.init("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["null", "3"])
def test_a_worker_that_dies_is_restarted_and_resumes_by_itself(adapter, tmp_path, whole):
    process = launch(tmp_path / "run", "--standalone", "--nproc_per_node=2", "--max-restarts=1",
                     resume=("--resume", "auto"), adapter=adapter)
    wait_for(process, "step 10:")
    os.kill(workers(process)[1], signal.SIGKILL)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert record(tmp_path / "run") == whole(adapter)


@pytest.mark.slow
def test_two_agents_train_as_one_and_the_one_that_comes_back_goes_on(tmp_path, whole):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test", "--max-restarts=3",
               f"--rdzv_endpoint=localhost:{port}")
    host = launch(tmp_path / "run", *options, "--rdzv_conf=is_host=1", resume=("--resume", "auto"))
    guest = launch(tmp_path / "run", *options, "--rdzv_conf=is_host=0", resume=("--resume", "auto"))
    wait_for(host, "step 10:")
    for pid in family(guest.pid):
        os.kill(pid, signal.SIGKILL)
    guest.wait()
    again = launch(tmp_path / "run", *options, "--rdzv_conf=is_host=0", resume=("--resume", "auto"))
    said = [process.communicate()[1] for process in (host, again)]
    assert (host.returncode, again.returncode) == (0, 0), "".join(said)
    assert record(tmp_path / "run") == whole("null")
