"""An update at real shapes on a device that does not exist (fake_gpu.py): what it waits for, launches and computes.

The limits are what is there today: lower one when the code gets better, raise one in a commit that says for what.
"""

import json
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest
from conftest import ROOT

FEW = ("--shape", "0.5B", "--layers", "2")
CASES = {
    "1.5B": ("--shape", "1.5B", "--layers", "4"),
    "7B": ("--shape", "7B", "--layers", "2"),
    "one_rank": (*FEW, "--ranks", "1", "--set", "update.epochs=2", "--set", "update.minibatches=3"),
    "offload": (*FEW, "--set", "optim.offload=true"),
    "recompute": (*FEW, "--set", "model.checkpoint_blocks=all"),
    "selective": (*FEW, "--set", "model.checkpoint_blocks=selective"),
    "entropy": (*FEW, "--set", "loss.entropy=0.001"),
    "lora": (*FEW, "--set", "model.lora.rank=16"),
    "lora_7B": ("--shape", "7B", "--layers", "2", "--set", "model.lora.rank=32"),
    "lora_one_rank": (*FEW, "--ranks", "1", "--set", "model.lora.rank=16", "--set", "model.checkpoint_blocks=all"),
    "lora_selective": (*FEW, "--set", "model.lora.rank=16", "--set", "model.checkpoint_blocks=selective")}
FAMILIES = {name: ("--shape", name, "--layers", "8") for name in ("gemma", "olmo", "glm")}  # of infra/families.yaml
WAITS = {  # of a row, each of which is an optimizer step here. A copy that does not say non_blocking waits too.
    ("sync", "descend"): 2, ("sync", "metrics of the step"): 1, ("to host", "metrics of the step"): 1,
    ("to device", "pack"): 16, ("to device", "reference"): 1, ("to device", "forward"): 1}
KERNELS = {  # of one layer in a row, of the head in a chunk of logits
    "layer, forward": 26, "layer, backward": 44, "layer, recomputed": 24, "head, forward": 4, "head, backward": 12}
# And for each of 7 layers with an adapter: two products, each with two more in backward where one of the weight was.
OF_ADAPTERS = {"layer, forward": 14, "layer, backward": 39, "layer, recomputed": 14}
OF_ENTROPY = {"head, forward": 4.1, "head, backward": 9.2}


@cache
def figures(*options: str) -> dict:
    """Trace in a process of its own. A mismatch of devices, shapes or dtypes in an op ends it."""
    process = subprocess.run([sys.executable, "tests/fake_gpu.py", *options], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def excess(row: dict, allowed: dict = WAITS) -> list[str]:
    """List the lines of each phase in which the host waits more often than is allowed, FSDP2's own copies apart."""
    waits = [wait for wait in row["waits"] if wait[2] != "fsdp"]
    counts = Counter((what, phase) for what, phase, _, count in waits for _ in range(count))
    return [f"{what}, {phase}: {count} x {line}" for what, phase, line, count in waits
            if counts[what, phase] > allowed.get((what, phase), 0) * row["passes"]]


@pytest.mark.slow
def test_a_sync_in_the_loss_is_seen():
    line, = excess(figures(*FEW, "--spoil"))
    assert line.startswith("sync, loss: 1 x fake_gpu.py") and "terms.loss.item()" in line


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_update_waits_launches_and_computes_no_more_than_it_did(case):
    row = figures(*CASES[case])
    norm = {("to device", "descend"): 1} if case == "offload" else {}  # which the host's gradients have
    assert excess(row, WAITS | norm) == []  # nothing in forward, loss, backward or a row's metrics asks for a value
    assert (row["log_probs"], row["products"]) == (["torch.float32 on fakegpu"], ["flop in torch.bfloat16"])
    assert row["unlike"] == []  # gradients have their weights' dtype, device, shape, and shape of the shard
    more = OF_ADAPTERS if "lora" in case else OF_ENTROPY if case == "entropy" else {}
    assert {name: count for name, count in row["kernels"].items() if count > KERNELS[name] + more.get(name, 0)} == {}
    # The bench counts 6 FLOP a number, which vectors do not have. Besides, backward computes the head's logits again,
    # and layers if that is asked for.
    assert row["flop"] == pytest.approx(row["formula"], rel=0.001)
    assert 0 <= row["again"]["head"] < 1.01
    assert 0 < row["again"]["layers"] <= 1 if case in ("recompute", "lora_one_rank") else row["again"]["layers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [*(case for case in CASES if case != "offload"), *FAMILIES])
def test_the_peak_is_what_memory_py_counts_or_a_little_less(case):
    """Of tensors that are alive: fragments and the driver's own apart."""
    row = figures(*(CASES | FAMILIES)[case])
    assert 1.0 <= row["counted"] / row["peak"] <= 1.3
