"""A job of examples/slurm.sh or examples/skypilot.yaml is stopped, killed and requeued; a worker or a machine of
torchrun dies and comes back: each is the same run.

Stand-ins for Slurm's commands start torchrun with two gloo ranks on this machine. A step is awaited by what a run logs.
"""

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, refuses, toy_config
from survive import family, finish, record, steps_logged

import config
from infra import dist

STEPS = 12
SETTINGS = [f"steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=2"]
COMMANDS = {
    "srun": """cpus=1  # of a task, whatever the job has
               if [ "$1" = --cpus-per-task ]; then cpus=$2; shift 2; fi
               echo "$cpus" > "$FOLDER/cpus"; echo $$ > "$FOLDER/step"; exec "$@" """,
    "scancel": '[ "$1 $2" = "--signal=TERM 7" ] && kill -TERM "$(cat "$FOLDER/step")"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$FOLDER/requeued"; fi'}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a job."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text("")
    return os.environ | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}", "FOLDER": str(tmp_path),
        "VENV": str(venv.parent), "OMP_NUM_THREADS": "1", "PORT": str(free_port()), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_ON_NODE": "96", "SLURM_SUBMIT_DIR": str(ROOT)}


def job(out: Path, cluster: dict, more: list[str]) -> subprocess.Popen:
    settings = [word for setting in (*more, *SETTINGS, f"out={out}") for word in ("--set", setting)]
    return subprocess.Popen(["bash", "examples/slurm.sh", "--config", "dppo_toy.yaml", *settings],
                            cwd=ROOT, env=cluster, stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen, out: Path, step: int) -> None:
    """Its line comes every fifth step and at a stop; the log has all."""
    for line in process.stderr:
        if max(steps_logged(out), default=0) >= step:
            return
        assert "Traceback" not in line
    raise AssertionError(f"it has ended before step {step}")


@pytest.mark.slow
def test_a_job_is_stopped_in_time_killed_and_requeued_and_is_the_same_run(cluster, tmp_path):
    small = ["rollout.group_size=8", "rollout.prompts_per_step=4", "data.limit=10", "eval.limit=16",
             "pack.capacity=512"]
    out, whole = tmp_path / "cut", tmp_path / "whole"
    done = job(whole, cluster, small)
    assert done.communicate() and done.returncode == 0

    stopped = job(out, cluster, small)
    wait_for_step(stopped, out, 3)
    stopped.send_signal(signal.SIGUSR1)  # as Slurm, 15 minutes before the end
    assert "interrupted; --resume auto goes on from the newest checkpoint" in stopped.communicate()[1]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert (tmp_path / "cpus").read_text() == "96\n"
    stopped_at = max(steps_logged(out))
    assert 3 <= stopped_at < STEPS

    killed = job(out, cluster | {"SLURM_RESTART_COUNT": "1"}, small)
    wait_for_step(killed, out, stopped_at + 1)
    for pid in family(killed.pid)[::-1]:  # as a node that fails
        os.kill(pid, signal.SIGKILL)
    killed.communicate()
    assert max(steps_logged(out)) < STEPS

    last = job(out, cluster | {"SLURM_RESTART_COUNT": "2"}, small)
    last.communicate()
    assert last.returncode == 0 and (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert record(out) == record(whole)


@pytest.mark.slow
def test_the_command_of_the_cloud_runs_and_goes_on(cluster, tmp_path):
    task = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text())
    assert task["file_mounts"]["/runs"]["mode"] == "MOUNT" and task["envs"]["OUT"].startswith("/runs/")
    finish(tmp_path / "run", 2, 2, ["checkpoint.every=1"])
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("steps: 2\n", "steps: 3\n"))
    sky = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "2",
           "SKYPILOT_NODE_IPS": "127.0.0.1", "CONFIG": str(config), "OUT": str(tmp_path / "run")}
    done = subprocess.run(["bash", "-c", task["run"]], cwd=ROOT, env=cluster | sky, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(steps_logged(tmp_path / "run")) == 3


def linted(name: str, *words: object, text: str = "") -> None:
    """A linter says nothing, if it is installed."""
    program = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run([program or pytest.skip(f"no {name}"), *words], input=text, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_the_image_is_described_soundly():
    linted("hadolint", ROOT / "Dockerfile")
    copied = [name for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")
              for name in line.split()[2:-1]]
    assert "requirements" in copied and all((ROOT / name).exists() for name in copied)


def test_the_shells_scripts_are_sound():
    asked = re.findall(r"^#SBATCH (\S+)", (ROOT / "examples" / "slurm.sh").read_text(), re.MULTILINE)
    assert {"--exclusive", "--mem=0"} <= {*asked}
    task = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text())
    for text in ((ROOT / "examples" / "slurm.sh").read_text(), f"#!/bin/bash\n{task['run']}"):
        linted("shellcheck", "-e", "SC1091", "-", text=text)


def launch(out, *options: str, resume: tuple[str, ...] = (), adapter: str = "null") -> subprocess.Popen:
    """A small run under torchrun; `adapter` is model.lora.rank."""
    path = out.parent / "test.yaml"
    path.write_text(config.dump(toy_config(out, "steps=25", "checkpoint.every=1", "checkpoint.keep=2",
                                           "model.dtype=float32", "prune.prompts={kind: bernoulli, drop_prob: 0.5}",
                                           "data.limit=10", f"model.lora.rank={adapter}", name="dppo_toy.yaml")))
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *options, "train.py", "--config", str(path),
                             *resume], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


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
    wait_for_step(process, tmp_path / "run", 1)
    os.kill(family(process.pid)[2], signal.SIGKILL)  # of rank 1
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
    refuses("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment", dist.init, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["null", "3"])
def test_a_worker_that_dies_is_restarted_and_resumes_by_itself(adapter, tmp_path, whole):
    process = launch(tmp_path / "run", "--standalone", "--nproc_per_node=2", "--max-restarts=1",
                     resume=("--resume", "auto"), adapter=adapter)
    wait_for_step(process, tmp_path / "run", 10)
    os.kill(family(process.pid)[2], signal.SIGKILL)  # of rank 1
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert record(tmp_path / "run") == whole(adapter)


@pytest.mark.slow
def test_two_agents_train_as_one_and_the_one_that_comes_back_goes_on(tmp_path, whole):
    options = ("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test", "--max-restarts=3",
               f"--rdzv_endpoint=localhost:{free_port()}")
    host = launch(tmp_path / "run", *options, "--rdzv_conf=is_host=1", resume=("--resume", "auto"))
    guest = launch(tmp_path / "run", *options, "--rdzv_conf=is_host=0", resume=("--resume", "auto"))
    wait_for_step(host, tmp_path / "run", 10)
    for pid in family(guest.pid):
        os.kill(pid, signal.SIGKILL)
    guest.wait()
    again = launch(tmp_path / "run", *options, "--rdzv_conf=is_host=0", resume=("--resume", "auto"))
    said = [process.communicate()[1] for process in (host, again)]
    assert (host.returncode, again.returncode) == (0, 0), "".join(said)
    assert record(tmp_path / "run") == whole("null")
