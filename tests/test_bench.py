"""The benches run: on this machine with tiny models, where their figures mean nothing."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT


def lines(*command: str) -> list[str]:
    process = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.slow
def test_the_gpu_bench_runs_every_part_and_says_when_there_is_no_device():
    printed = lines("bench/gpu.py", "--shapes", "1M")
    result = json.loads(printed[-1])
    assert [row["backend"] for row in result["attention"]][0] == "sdpa"
    assert result["rollout"][0]["rate"] > 0
    keeps = {(row["capacity"], row["keep"], row["recompute"]): row["tokens"] for row in result["update"]}
    assert keeps[256, 16, False] > keeps[1024, 16, False] == keeps[1024, 16, True]  # in short rows prompts come again
    assert keeps[1024, 16, False] > 2 * keeps[1024, 4, False]
    assert all(row["flop_s"] > 0 for row in result["update"])
    assert ("NO CUDA DEVICE" in printed[0]) == (result["device"] == "CPU")
