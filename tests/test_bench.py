"""Every bench runs one round, with sizes so small that its figures mean nothing; that of a GPU without one."""

import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import common
import gpu
import gpu_parts
import grade
import numpy as np
import peers
import plan
import pytest
import shapes
import step
import torch
import try_method
from conftest import ROOT

import config
from advantage import flat_groups
from config import ConfigError
from infra import device as hardware
from infra import dist
from infra.lines import append, read_log
from leaves.fit.counts import find_shape


@pytest.mark.slow
def test_the_gpu_bench_does_every_part_and_says_when_there_is_no_device(tmp_path):
    out = tmp_path / "results.jsonl"
    printed = run_program("bench/gpu.py", "--out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rows = {name: {line.get("way"): line for line in lines if line["part"] == name} for name in gpu.PARTS}
    assert all(rows.values()), "every part has left a line"
    assert ("NO CUDA DEVICE" in printed) == (not rows["machine"][""]["cuda"])
    assert 0 < rows["kernels"]["head"]["error of gradients"] < 0.02 and 0 < rows["kernels"]["sdpa"]["error"] < 0.02
    assert len(rows["check"]) == 6 and all(row["passed"] for row in rows["check"].values())
    updates = rows["updates"]
    assert len(updates) == len(gpu_parts.UPDATES) and all(row["TFLOP/s"] > 0 for row in updates.values())
    whole, some = updates["keep 16, recompute none"], updates["keep 4, recompute none"]
    assert whole["tokens"] > 2 * some["tokens"]
    assert whole["GiB counted"] > updates["keep 16, recompute selective"]["GiB counted"]
    assert whole["GiB counted"] > updates["keep 16, recompute none, LoRA of rank 32"]["GiB counted"]
    assert updates["keep 16, recompute none, compiled"]["first s"] > 10 * whole["seconds"][0]
    steps = rows["step"]
    assert list(steps) == ["grpo_toy", "cppo_toy", "pps_gsm8k_toy", "lora_toy"]
    assert steps["grpo_toy"]["kept"] == 4 * steps["cppo_toy"]["kept"] == 4 * steps["pps_gsm8k_toy"]["kept"]
    phases = [f"{name} s" for name in ("rollout", "reward", "update", "sync", "step")]
    assert min(row[phase] for row in steps.values() for phase in phases) > 0
    assert min(rows["rollout"]["sleep and sync"]["sync s"]) > 0
    assert min(rows["rollout"][f"{gpu_parts.OF_CPU.slots[1]} sequences"]["sampled tokens/s"]) > 0
    # As tests/test_repo.py asks of a section of RESULTS.md
    assert re.search(r"^Command: `python bench/gpu\.py .+`  \nCommit: \w{7}\b.*\. Date: 2\d{3}-\d\d-\d\d\. "
                     r"Machine: .+\.$", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_way_that_runs_out_of_memory_ends_alone(tmp_path, capsys):
    bench = gpu_parts.Bench("updates", "1M", tmp_path / "out.jsonl", torch.device("cpu"), tmp_path)
    exhausted = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines"))
    lacking = Mock(side_effect=ConfigError("flash-attn cannot be imported"))
    gpu_parts.each(bench, {"small": lambda: {"seconds": [1.0, 3.0]}, "large": exhausted, "flash": lacking,
                           "next": lambda: {"seconds": [2.0]}})
    way = {"part": "updates", "shape": "1M"}
    assert read_log(bench.out) == [
        way | {"way": "small", "seconds": [1.0, 3.0]},
        way | {"way": "large", "failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."},
        way | {"way": "flash", "skipped": "flash-attn cannot be imported"}, way | {"way": "next", "seconds": [2.0]}]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("program", "reason"), [
    ("print('fine')", ""), ("import sys; print('why', file=sys.stderr); sys.exit(3)", "exit code 3: why"),
    ("raise ValueError('of what\\nkind')", "exit code 1: kind"),
    ("import os; os.kill(os.getpid(), 9)", "signal 9: ")])
def test_a_part_that_ends_badly_says_how(program, reason):
    assert gpu.supervise([sys.executable, "-c", program], 60) == reason


def test_a_part_that_hangs_is_stopped_with_its_processes(tmp_path):
    program = (f"import subprocess, time; sleeping = subprocess.Popen(['sleep', '1000'])\n"
               f"open({str(tmp_path / 'pid')!r}, 'w').write(str(sleeping.pid)); time.sleep(1000)")
    assert gpu.supervise([sys.executable, "-c", program], 2) == "stopped after 2 s"
    command, end = Path(f"/proc/{(tmp_path / 'pid').read_text()}/cmdline"), time.monotonic() + 10
    while command.exists() and command.read_bytes():  # of a process that nobody has buried it is empty
        assert time.monotonic() < end


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """The commands of parts, of which none runs; two of them leave a line, and one ends badly."""
    given: list[list[str]] = []

    def supervise(command: list[str], seconds: float) -> str:
        given.append(command)
        part, shape, out = command[3], command[5], Path(command[7])
        if part == "machine":
            append(out, {"part": part, "shape": "", "way": "", "device": "NVIDIA H200", "cuda": True,
                         "details": "139.8 GiB", "commit": "abcdef0 of 2026-11-22"})
        if part in ("updates", "step"):
            append(out, {"part": part, "shape": shape, "way": "16", "MFU": 0.478, "tokens": 65536, "GiB": None})
        time.sleep(0.02 if part == "step" else 0)
        return "signal 9: Killed" if part == "updates" or "torch.distributed.run" in command else ""

    monkeypatch.setattr(gpu, "supervise", supervise)
    return given


def test_the_bench_goes_on_past_a_part_that_fails_and_ends_in_time(commands, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PARTS", {name: part for name, part in gpu.PARTS.items()
                                       if name in ("machine", "updates", "step", "vllm_check")} | {
        "absent": gpu.Part("what needs a package", 9, "", "", needs="no_such_package")})
    out = tmp_path / "new" / "results.jsonl"
    given = Namespace(shapes=None, parts=["updates", "step", "absent"], out=out)
    assert gpu.bench(given) == 1
    assert [(command[3], command[5]) for command in commands] == [
        ("machine", ""), ("updates", "0.5B"), ("updates", "1.5B"), ("step", "0.5B"), ("step", "1.5B")]
    printed = capsys.readouterr().out
    assert "| shape | way | MFU | tokens |\n| --- | --- | --- | --- |\n| 0.5B | 16 | 0.478 |" in printed
    assert "Failed:\n\n- updates 0.5B: signal 9: Killed\n- updates 1.5B: signal 9: Killed\n" in printed
    assert "- absent 0.5B: no_such_package is not installed\n" in printed and "NO CUDA" not in printed
    verdicts = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:5]
    assert [[cell.strip() for cell in line] for line in verdicts] == [
        ["updates", "FAILED", "lower pack.capacity"], ["step", "passed", gpu.PARTS["step"].passed],
        ["absent", "not reached", "no_such_package is not installed"]]
    monkeypatch.setattr(gpu, "SECONDS", 5.01)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--parts", "step"])
    assert gpu.bench(Namespace(shapes="7B,7B", parts=["step"], out=out)) == 0
    printed = capsys.readouterr().out
    assert "- step 7B: no time was left; --parts step has it to itself\n" in printed and "updates" not in printed
    assert "Command: `python bench/gpu.py --parts step`  \n" in printed
    monkeypatch.setattr(gpu, "supervise", lambda *given: "exit code 1: CUDA does not start")
    assert gpu.bench(given) == 1 and capsys.readouterr().err == "error: exit code 1: CUDA does not start\n"


def test_a_part_on_two_ranks_runs_under_torchrun_where_there_are_two_gpus(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: True)
    out = tmp_path / "out.jsonl"
    assert gpu.attempt("vllm_ranks", "", out, 60, 1) == {"skipped": "it needs 2 GPUs"} and not commands
    assert gpu.attempt("vllm_tensor_parallel", "", out, 60, 2) == {"failed": "signal 9: Killed"}
    for command in commands:
        assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        assert command[6:8] == [gpu.__file__, "--part"]
    assert {name.removeprefix("vllm_") for name in gpu.PARTS} == gpu_parts.FUNCTIONS.keys()
    commands.clear()
    for shapes_asked in (None, "3B"):  # an engine's milliseconds: at two sizes of their own
        gpu.bench(Namespace(shapes=shapes_asked, parts=["vllm_rollout"], out=out))
    assert [command[5] for command in commands] == ["", "1.5B", "7B", "", "3B"]


def test_a_sync_is_predicted_by_what_it_copies():
    """10 bytes a weight, and 0.14 s to sleep and wake up."""
    small_one, larger = (shapes.predict_sync(shapes.shape_of(name), "NVIDIA H100") for name in ("1.5B", "7B"))
    weights = hardware.parameters(shapes.shape_of("7B"))
    assert larger == pytest.approx(0.14 + 10 * weights / (0.85 * 3.35e12)) and 0.14 < small_one < larger < 0.18
    assert shapes.predict_sync(shapes.shape_of("7B"), "NVIDIA L4") is None


def test_speed_is_told_over_the_devices_peak_and_sizes_follow_its_memory(tmp_path, monkeypatch):
    bench = gpu_parts.Bench("vllm_step", "1.5B", tmp_path, torch.device("cuda"), tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert bench.speed(989e12, 2.0) == {"MFU": 0.5, "TFLOP/s": 494.5}
    for gb, sizes in ((150, gpu_parts.LARGE), (85, gpu_parts.BELOW_100_GB)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, gb=gb: (0, gb * 1e9))
        assert bench.sizes == sizes


def test_a_table_has_the_columns_that_some_row_has_and_lists_as_their_median_and_range():
    rows = [{"part": "check", "shape": "", "way": "a", "seconds": [3.0, 1.0, 2.0], "passed": True, "GiB": None},
            {"part": "check", "shape": "", "way": "|b|", "failed": "why", "tokens": 12345, "rate": 54321.4}]
    assert common.table(rows, left_out=("part", "failed")).splitlines() == [
        "| way | seconds | passed | tokens | rate |", "| --- | --- | --- | --- | --- |",
        "| a | 2 (1 - 3) | yes |  |  |", "| \\|b\\| |  |  | 12,345 | 54,321 |"]


def run_program(name: str, *given: str, env=os.environ) -> str:
    """Run a program in a process of its own; returns what it prints."""
    done = subprocess.run([sys.executable, name, *given], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_line(name: str, *given: str) -> dict:
    """What a bench has measured."""
    printed = run_program(f"bench/{name}.py", *given)
    measured = json.loads(printed.splitlines()[-1])
    assert measured["bench"] == name and "\n| --" in printed
    return measured


def test_a_plan_adds_up_token_steps_and_prunes_what_is_dear():
    """A token step of a 7B model reads 15.2 GB of weights at 2.85 TB/s, and vLLM takes 2.5 ms."""
    shape = find_shape(config.load("cppo_math.yaml").model.path)
    alone = plan.decode_seconds(shape, 350, np.array([10.0]), 1, 0)
    assert alone == pytest.approx(10 * (15.2e9 / 2.85e12 + 2.5e-3), rel=0.01)
    assert alone < plan.decode_seconds(shape, 350, np.array([10.0, 5]), 1, 0) < 1.02 * alone
    assert plan.decode_seconds(shape, 350, np.array([10.0]), 1, 2) == pytest.approx(alone / 2, rel=0.02)
    measured = last_line("plan", "--shares", "0.1=0.5")
    rows = sorted(measured["pruned"], key=lambda row: row["update's and teacher's share"])
    assert rows[0]["error 0.1"] < rows[-1]["error 0.1"] and len(measured["ways"]) == 4 * len(rows)


@pytest.fixture
def few(monkeypatch):
    """Steps of two prompts and short completions."""
    load = config.load
    less = ["rollout.prompts_per_step=2", "rollout.max_new_tokens=24", "data.limit=4", "data.eval=null"]
    monkeypatch.setattr(config, "load", lambda name, sets: load(name, [*sets, *less]))


@pytest.mark.slow
def test_the_bench_of_a_step_has_less_to_do_where_less_is_kept(few, capsys):
    whole, some = step.steps(rounds=1, keeps=(16, 4))
    assert whole["tokens"] > 2 * some["tokens"] and whole["update of unpruned"] == [1.0]
    assert all(whole[f"{name} s"] > 0 for name in ("rollout", "reward", "pack", "update", "sync", "step"))
    assert capsys.readouterr().out.count("\n| ") == 4


def test_the_bench_of_packing_sees_idle_ranks():
    """16 completions keep 16 of 64 ranks busy at most."""
    assert 0.5 < step.utilisation("cppo_gsm8k", seed=0) < 1 and step.utilisation("cppo_gsm8k, 64 ranks", seed=0) < 0.25


@pytest.mark.slow
def test_the_bench_of_rollouts_measures_each_engine():
    measured = last_line("step", "--parts", "rollout", "--rounds", "1", "--shapes", "1M", "--slots", "32", "--halves")
    for engine in ("torch", "torch, bfloat16"):
        rates = {row["lengths"]: min(row["tokens/s"]) for row in measured["rollout"] if row["engine"] == engine}
        assert rates.keys() == {"fixed", "tailed"} and min(rates.values()) > 0


@pytest.mark.slow
def test_the_bench_of_ranks_takes_steps_on_each_number_of_them():
    rows = last_line("step", "--parts", "ranks", "--rounds", "1")["ranks"]
    assert [row["ranks"] for row in rows] == [1, 2, 4] and rows[0]["of one rank's"] == [1.0]


@pytest.mark.slow
def test_the_bench_of_the_verifier_asks_both_verifiers_and_survives():
    rows = grade.speed("common", rounds=1, count=14)
    assert [row["verifier"] for row in rows] == ["winnow", "math-verify"] and min(rows[0]["answers/s"]) > 0
    assert grade.hostile(2)["texts"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("task", "more"), [("toy", []), ("opd", [f"teacher.path={ROOT}/toy/hard_model"])])
def test_the_bench_of_pruners_has_a_smaller_error_where_more_is_kept(task, more, monkeypatch, capsys):
    bench, load = try_method.load(ROOT / "bench" / "prune.py"), config.load
    monkeypatch.setattr(config, "load", lambda name, sets=(): load(name, [*sets, "rollout.prompts_per_step=2", *more]))
    some = {"topk, group, kept mean", "pps surprise", "pps oracle", "prompts, pps", "pps known", "pps nats"}
    small = {"DRAWS": 2, "ROLLOUTS": 2, "SKETCH": 2**18, "TASKS": {task: (bench.TASKS[task][0], {"early": 1})}}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    for table in ("ARMS", "ARMS_TAUGHT"):
        monkeypatch.setattr(bench, table, {name: arm for name, arm in getattr(bench, table).items() if name in some})
    monkeypatch.setattr(dist, "close", lambda: None)  # the suite's own group
    monkeypatch.setattr(sys, "argv", ["prune.py", "--task", task])
    bench.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert len(results) == 4 * 5 + 1 and {line["when"] for line in results} == {"early"}
    measured = [error for line in results[:-1] for error in line["errors"] if error is not None]
    assert measured and min(measured) >= 0


@pytest.mark.slow
def test_the_bench_beside_trl_takes_steps_in_turns(few, tmp_path, monkeypatch, capsys):
    """With TRL's side replaced by one that takes twice as long as Winnow would."""
    class Twice(peers.Winnow):
        def __init__(self, regime, task):
            super().__init__(regime, "grpo", task)
            self.label = "TRL GRPO 16/16"

        def step(self):
            return {name: 2 * value for name, value in super().step().items()}

    monkeypatch.setattr(peers, "Peer", Twice)
    monkeypatch.setattr(peers, "WARM", 0)
    trl, ours = peers.compare(peers.Regime("flat", ROOT / "toy" / "model", 2, False, 1, tmp_path), ["cppo4"], rounds=1)
    assert trl["TRL / this"] == [1.0] and ours["tokens"] < trl["tokens"]
    assert min(ours["update s"], trl["update s"]) > 0
    assert "flat: 2 x 16 completions" in capsys.readouterr().out
    assert flat_groups(step.drawn_rewards(2, 16, flat=1)).tolist() == [True, False]


@pytest.mark.peers
def test_the_bench_beside_trl_runs_a_round():
    result, = last_line("peers", "--regimes", "flat", "--arms", "cppo4", "--rounds", "1")["results"].values()
    assert [row["length"] for row in result] == [64, 64]


@pytest.mark.slow
def test_the_hour_on_a_gpu_runs_through_on_a_cpu(tmp_path):
    printed = run_program("experiments/gpu_hour.py", "--tiny", "--out", str(tmp_path))
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:]
    assert [cells[0] for cells in rows] == ["GRPO", "CPPO", "PPS", "PPS by surprise"]
    trained = [int(cells[3].replace(",", "")) for cells in rows]
    assert trained[0] > max(trained[1:]) and min(trained) > 0 and (tmp_path / "report" / "report.html").is_file()
