"""A machine has a device, kernels and engines; what a run takes of them, and what is said if one is missing."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import TOY, refuses
from test_invariance import on_ranks

import config
import metrics
from infra import choices, dist
from infra import device as hardware
from infra.device import Machine
from infra.weights import read_shape
from records import EngineSpec
from settings.loader import ConfigError

GIB, CPU, CUDA = 2**30, torch.device("cpu"), torch.device("cuda")
SMALL = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "layers": 2, "heads": 2, "kv_heads": 1,
         "head_dim": 2, "tied": False, "qkv_bias": False, "out_bias": False}


def small(**changes):
    return replace(read_shape(TOY), **SMALL | changes)


def gpu(gib: float = 79, ranks: int = 1, no_vllm: str = "") -> Machine:
    return Machine(CUDA, gib * GIB, ranks, no_vllm)


def kernels(name: str, machine: Machine, *settings: str, saved: dict | None = None) -> choices.Choice:
    return choices.choose_kernels(config.load(f"{name}.yaml", [*settings]), machine, small(), saved or {})


def test_the_caches_of_both_engines_are_counted_by_hand():
    """A token is 2 x 2 x 2 numbers of 4 bytes, and 129 tokens are two blocks of vLLM's."""
    one, two, weights = small(), small(kv_heads=2), hardware.parameters(small())
    assert weights == 2 * 10 * 4 + 2 * (2 * 4 * 6 + 3 * 4 * 6)
    for shape, element, length, parallel, expected in (
            (one, 4, 129, 1, (3 * 2 + 1) * 128 * 32), (one, 4, 128, 1, (3 + 1) * 128 * 32),
            (two, 4, 128, 2, (3 + 1) * 128 * 32), (one, 4, 128, 2, (3 + 1) * 128 * 32),  # a head each; both have it
            (one, 2, 129, 0, 3 * 129 * (16 + 16))):  # a layer in float32 too
        assert hardware.cache_bytes(shape, element, 3, length, parallel) == expected
    assert sum(hardware.engine_parts(one, 2, 3, 129, 0).values()) == weights * 2 + 3 * 129 * 32 + 24 * 3 * 10
    given = sum(hardware.engine_parts(one, 2, 3, 129, 2, cache_gib=1000 / GIB).values())
    assert given == weights + 1000 + 24 * 3 * 10


def test_a_gpu_gets_halves_its_kernel_and_vllm_and_a_cpu_none_of_them():
    """What is named is never changed."""
    def taken(choice) -> tuple:
        cfg = choice.cfg
        return cfg.device, cfg.model.dtype, cfg.model.attention, cfg.rollout.engine

    assert taken(kernels("cppo_gsm8k", gpu())) == ("cuda", "bfloat16", "varlen", "vllm")
    on_cpu = taken(kernels("cppo_gsm8k", Machine(CPU, 9 * GIB, 1, "none on a CPU")))
    assert on_cpu == ("cpu", "float32", "sdpa", "torch")
    for dtype in ("float32", "float64"):
        exact = kernels("cppo_gsm8k", gpu(), f"model.dtype={dtype}")
        assert taken(exact)[2:] == ("sdpa", "torch")
        assert exact.remarks[0].endswith(f"vLLM's kernels round the factors of torch.{dtype} products")
    named = ["model.dtype=float32", "model.attention=sdpa", "rollout.engine=torch"]
    saved = {"model.dtype": "bfloat16", "rollout.engine": "vllm"}
    assert taken(kernels("cppo_gsm8k", gpu(), *named, saved=saved)) == ("cuda", "float32", "sdpa", "torch")


def test_without_vllm_the_embedded_engine_samples_and_a_line_says_what_to_install():
    machine = gpu(no_vllm="vllm is not there; pip install it")
    choice = kernels("cppo_gsm8k", machine)
    assert choice.cfg.rollout.engine == "torch"
    assert choice.remarks == ("rollout.engine=torch, the embedded one: vllm is not there; pip install it",)
    assert kernels("cppo_gsm8k", machine, "rollout.engine=torch").remarks == ()


@pytest.mark.parametrize(("name", "settings", "ranks", "slots"), [
    ("cppo_math", [], 8, 63),                                       # MATH-500; a step has 96
    ("cppo_math", ["rollout.tensor_parallel=4"], 8, 250),           # the same, and four ranks to an engine
    ("cppo_math", ["data.eval=null"], 8, 12), ("cppo_math", ["eval.limit=40"], 8, 12),
    ("cppo_math", ["data.eval=null", "rollout.prompts_per_step=8"], 8, 16),
    ("cppo_math", ["data.eval=mine.jsonl"], 8, 256),                # its length is not known
    ("cppo_math", ["data.eval=math500,gsm8k"], 16, 83),
    ("cppo_math", ["eval.n=2", "eval.temperature=1"], 16, 63),
    ("optpo_gsm8k", ["data.eval=null"], 8, 32),                     # N x G; then 4 more of each that is not decided
    ("optpo_gsm8k", ["data.eval=null", "labels.chunk=20", "rollout.group_size=16"], 8, 40)])
def test_an_engine_has_no_more_slots_than_a_step_or_an_evaluation_asks_it_for(name, settings, ranks, slots):
    assert kernels(name, gpu(ranks=ranks), "rollout.tensor_parallel=1", *settings).cfg.rollout.slots == slots


def test_rows_are_no_longer_than_a_ranks_part_of_a_mini_batch():
    """One prompt of 512 tokens and 16 completions of 1,024; a row must hold one of each."""
    def most(name: str, *settings: str, ranks: int = 1) -> int:
        return choices.row_range(config.load(f"{name}.yaml", [*settings]), ranks)[1]

    assert [most("cppo_gsm8k", "rollout.prompts_per_step=1", ranks=ranks) for ranks in (1, 8)] == [
        1536 + 16896, 1536 + 2112]
    assert most("cppo_gsm8k", "rollout.prompts_per_step=2", "update.minibatches=2") == 1536 + 16896
    full = config.load("dppo_listed_math.yaml", ["rollout.max_rounds=3"])
    of_round = full.rollout.prompts_per_step * full.rollout.group_size * full.rollout.max_new_tokens
    assert choices.row_range(full, 1)[1] > 3 * of_round // full.update.minibatches


@pytest.mark.parametrize(("machine", "how"), [(gpu(), "all"), (Machine(CPU, GIB, 1), "none")])
def test_without_a_count_of_memory_the_engine_sleeps_and_rows_are_of_moderate_length(machine, how):
    def chosen(**saved) -> tuple:
        cfg = choices.choose_simply(kernels("cppo_gsm8k", machine, saved=saved))
        return cfg.rollout.sleep, cfg.model.checkpoint_blocks, cfg.pack.capacity

    assert chosen() == ("always", how, 4096)
    assert chosen(**{"rollout.sleep": "never", "pack.capacity": 9000}) == ("never", how, 9000)


def machine_on_ranks() -> tuple[float, int, bool]:
    """Of two ranks the second has less memory, and no vLLM."""
    rank = dist.rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1000.0 - rank, 2000))
        patch.setattr(hardware, "why_no_vllm", lambda device: "it is not there" * rank)
        machine = Machine.here(CUDA)
    return machine.free, machine.ranks, bool(machine.no_vllm)


def test_all_ranks_choose_by_the_one_that_has_least(tmp_path):
    assert on_ranks(2, tmp_path, machine_on_ranks) == [(999.0, 2, True)] * 2


def test_only_the_tested_vllm_counts(monkeypatch):
    for version, fine in (("0.32.0", True), ("0.32.0+cu130", True), ("0.33.0", False), (None, False)):
        def installed(name, version=version):
            if version is None:
                raise hardware.importlib.metadata.PackageNotFoundError(name)
            return version
        monkeypatch.setattr(hardware.importlib.metadata, "version", installed)
        monkeypatch.setattr(hardware, "why_no_compiler", lambda: "")
        assert (hardware.why_no_vllm(CUDA) == "") == fine
        assert fine or "requirements/gpu.txt" in hardware.why_no_vllm(CUDA)
        assert hardware.why_no_vllm(CPU)


def test_vllm_is_not_chosen_without_a_c_compiler_and_pythons_headers(monkeypatch, tmp_path):
    """Triton compiles a launcher with both; a slim image has neither."""
    monkeypatch.setattr(hardware.importlib.metadata, "version", lambda name: "0.32.0")
    headers = tmp_path / "include"
    headers.mkdir()
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: str(headers))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "need a C compiler (gcc or clang)" in hardware.why_no_vllm(CUDA)
    for name in ("gcc", "mycc"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert "need Python's headers (Python.h)" in hardware.why_no_vllm(CUDA)
    (headers / "Python.h").write_text("")
    assert hardware.why_no_vllm(CUDA) == ""
    for compiler, fine in (("mycc", True), ("othercc", False)):
        monkeypatch.setenv("CC", compiler)
        assert (hardware.why_no_vllm(CUDA) == "") == fine


def test_an_evaluation_gets_an_engine_and_slots_that_fit(monkeypatch, capsys):
    monkeypatch.setattr(Machine, "here", staticmethod(lambda device: Machine(device, 4 * GIB, 1, "none on a CPU")))
    spec = EngineSpec(TOY, torch.float32, CPU, "sdpa", frozenset(), slots=10**6, max_len=100)
    kind, fitted = hardware.fit_engine("auto", spec)
    assert kind == "torch" and 1 < fitted.slots < 10**6
    assert f"rollout.engine=torch, rollout.slots={fitted.slots}" in capsys.readouterr().out
    assert hardware.fit_engine("torch", replace(spec, slots=8)) == ("torch", replace(spec, slots=8))
    assert capsys.readouterr().out == ""


@pytest.fixture
def seen(monkeypatch):
    """Describe a machine to find_device: CUDA devices that torch shows, a driver's file, torch's CUDA, its start."""
    def describe(devices: int, driver: bool, built: str | None, start=lambda: None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(hardware, "DRIVER", SimpleNamespace(is_file=lambda: driver))
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "init", start)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    return describe


def said_on_cpu() -> list[str]:
    machine = Machine.here(hardware.find_device("auto"))
    assert machine.device == CPU
    return [*kernels("cppo_toy", machine).remarks]


def test_a_gpu_that_torch_cannot_use_is_named_with_the_reason(seen, monkeypatch):
    seen(0, driver=True, built=None)
    line, = said_on_cpu()
    assert line.startswith("device=cpu: there is a GPU, but torch ") and "is a build without CUDA" in line
    refuses("device=cuda: there is a GPU, but .* is a build", hardware.find_device, "cuda")
    seen(0, driver=True, built="13.0")
    line, = said_on_cpu()
    assert "580 or newer" in line
    for hidden, lines in (("", 0), ("-1", 0), ("0", 1)):  # the last as schedulers set it
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert len(said_on_cpu()) == lines
    seen(0, driver=False, built=None)
    assert said_on_cpu() == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    seen(4, driver=True, built="13.0")
    assert said_on_cpu() == ["device=cpu: the machine has 4 CUDA devices to 8 processes; start fewer"]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    too_old = Mock(side_effect=RuntimeError("The NVIDIA driver on your system is too old (found version 12020)."))
    seen(1, driver=True, built="13.0", start=too_old)
    for wanted in ("auto", "cuda"):
        refuses(r"too old \(found version 12020\).*580 or newer.*device=cpu", hardware.find_device, wanted)
    assert hardware.find_device("cpu") == CPU


@pytest.mark.parametrize(("device", "gib"), [(CPU, 3.0), (CUDA, 60.0)])
def test_the_peak_is_that_of_the_fullest_rank(device, gib, monkeypatch):
    """Resident memory, which Linux counts in KiB; on a GPU the device's, since torch counts what sleeps as well."""
    monkeypatch.setattr(hardware.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2 * 2**20))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 127 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(dist, "max_over_ranks", lambda held: 1.5 * held)  # another rank's
    slept = SimpleNamespace(peak_bytes=40 * GIB if device == CUDA else 0)
    assert metrics.memory_metrics(device, slept) == {"memory/peak_gib": pytest.approx(gib)}
    held = 45 if device == CUDA else gib
    assert metrics.memory_metrics(device, object()) == {"memory/peak_gib": pytest.approx(held)}


def test_flash_attention_is_asked_for_by_a_real_import(tmp_path, monkeypatch):
    """A bare folder of that name, as FlashAttention 4 is laid out, is no flash-attn."""
    assert hardware.choose_backend("auto", CUDA, torch.bfloat16) == "varlen"
    for device, dtype in ((CUDA, torch.float32), (CPU, torch.bfloat16)):
        assert hardware.choose_backend("auto", device, dtype) == "sdpa"
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="model.attention=flash, but flash-attn cannot be imported"):
        hardware.choose_backend("flash", CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match="model.attention=varlen cannot run on cuda in torch.float32"):
        hardware.choose_backend("varlen", CUDA, torch.float32)
    sys.modules.pop("flash_attn", None)
