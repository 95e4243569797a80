"""The arguments that vLLM gets from us for a GPU: held by a stand-in, and given to vLLM's own configuration code."""

import importlib
import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import PUBLISHED, TOY, ask, toy_config
from test_device import GIB, gpu

import config
import eval as evaluation
import rollout_vllm
import train
from config import ConfigError
from infra import device as hardware
from infra import dist, results, runfolder
from policy import Weights
from records import EngineSpec
from rollout import TorchEngine
from rollout_vllm import VLLMEngine

CUDA = torch.device("cuda", 0)


class Recorder:
    """Stands in for vLLM's LLM: records the arguments, and what is called."""

    def __init__(self, **given):
        self.given, self.calls = given, []
        core = SimpleNamespace(_finalizer=SimpleNamespace(detach=lambda: None))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake up {tags[0]}")

    def collective_rpc(self, method: str, kwargs: dict) -> None:
        self.calls.append(method)
        for _ in kwargs["weights_iterator"]:
            pass

    def apply_model(self, function: Callable) -> None:
        self.calls.append("load")
        function(SimpleNamespace(load_weights=list))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


@pytest.fixture
def recorded(monkeypatch):
    """Make an engine on a GPU of eight ranks, or another."""
    monkeypatch.setattr(rollout_vllm, "import_vllm", lambda device: (Recorder, None))
    monkeypatch.setattr(rollout_vllm, "undisturbed", nullcontext)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))

    def make(ranks: int = 8, **changes) -> VLLMEngine:
        monkeypatch.setattr(dist, "world_size", lambda: ranks)
        given = {"folder": TOY, "dtype": torch.bfloat16, "device": CUDA, "backend": "varlen",
                 "eos_ids": frozenset([2]), "slots": 128, "max_len": 512}
        return VLLMEngine(EngineSpec(**given | changes))

    return make


def test_engines_over_several_gpus_share_no_memory_that_expandable_segments_refuse(recorded, monkeypatch):
    """Custom all-reduce exports buffers by cudaIpcGetMemHandle; the process then exits (vllm-project/vllm#42609)."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    hardware.find_device("cuda")
    assert "expandable_segments:True" in os.environ["PYTORCH_ALLOC_CONF"]
    given = recorded(tensor_parallel=4).llm.given
    assert given["disable_custom_all_reduce"] is True
    assert given["compilation_config"] == {"pass_config": {"fuse_allreduce_rms": False}}
    assert not {"disable_custom_all_reduce", "compilation_config"} & recorded().llm.given.keys()


@pytest.mark.vllm
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nccl_alone_adds_up_what_the_ranks_of_an_engine_hold(ranks, monkeypatch):
    """In vLLM's own list of kernels, each of which says that it can; and behind its own kernel where that is let."""
    vllms = importlib.import_module("vllm.distributed.device_communicators.cuda_communicator")
    for name in ("custom_all_reduce.CustomAllreduce", "flashinfer_all_reduce.FlashInferAllReduce",
                 "flashinfer_pcie_ipc_all_reduce.FlashInferPcieIpcAllReduce", "pynccl.PyNcclCommunicator",
                 "symm_mem.SymmMemCommunicator"):
        monkeypatch.setattr(f"{vllms.__package__}.{name}", Mock(return_value=Mock(disabled=False)))
    monkeypatch.setattr(vllms, "current_platform", Mock(**{"is_rocm.return_value": False}))
    made = {"world_size": ranks, "use_all2all": False, "unique_name": "tp:0"}
    made |= dict.fromkeys(("cpu_group", "device_group", "device"))
    monkeypatch.setattr(vllms.DeviceCommunicatorBase, "__init__", lambda self, *a, **k: self.__dict__.update(made))
    for custom, kernels in ((False, "['PYNCCL']"), (True, "['CUSTOM', 'PYNCCL']")):
        said = Mock()
        monkeypatch.setattr(vllms.logger, "info_once", said)
        monkeypatch.setattr("vllm.distributed.parallel_state._ENABLE_CUSTOM_ALL_REDUCE", custom)
        with rollout_vllm.undisturbed():
            vllms.CudaCommunicator(None, unique_name="tp:0")
        assert said.call_args.args[1] == kernels


@pytest.mark.parametrize(("sleeps", "quantization", "load"), [
    (True, "none", "load"), (False, "none", "load"), (False, "fp8", "reload_weights")])
def test_an_engine_that_never_sleeps_is_never_told_to(sleeps, quantization, load, recorded):
    """Nor to wake up, which vLLM refuses without its sleep mode. Both want a sync before they sample. vLLM's own reload
    is for weights that it quantizes."""
    engine = recorded(sleeps=sleeps, quantization=quantization)
    assert engine.llm.given["enable_sleep_mode"] == sleeps
    engine.device = torch.device("cpu")
    policy = Weights().policy(str(TOY), TOY, torch.float32)
    engine.sync(policy)
    assert not engine.asleep
    engine.sleep()
    with pytest.raises(RuntimeError, match="no weights; sync it first"):
        engine.generate(ask([(1,)], [0], 1), 1.0)
    engine.sync(policy)
    sync = ["wake up weights", load, "wake up kv_cache", "reset"]
    asleep = ["sleep 2", *sync, "sleep 2", *sync]
    assert engine.llm.calls == (asleep if sleeps else [load, "reset"] * 2)


def test_the_most_memory_in_use_is_seen_before_each_sleep_and_each_sync(recorded, monkeypatch):
    """Between the two the device gives the engine's memory up, which torch does not know."""
    engine, policy = recorded(sleeps=True), Weights().policy(str(TOY), TOY, torch.float32)
    free = iter([30, 12, 41])  # GiB: before a sync, after a rollout, after an update
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free) * GIB, 80 * GIB))
    monkeypatch.setattr(dist, "gather_full", lambda tensor, device, dtype: tensor)
    engine.sync(policy)
    engine.sleep()
    engine.sync(policy)
    assert engine.peak_bytes == 68 * GIB


@pytest.mark.parametrize("error", [
    RuntimeError("Failed to find C compiler."), RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"),
    ValueError("No available memory for the cache blocks"), subprocess.CalledProcessError(1, ["gcc", "main.c"])])
def test_a_start_that_fails_is_one_line(error, recorded, monkeypatch):
    def fail(**given):
        raise error

    monkeypatch.setattr(rollout_vllm, "import_vllm", lambda device: (fail, None))
    with pytest.raises(ConfigError, match="rollout.engine=vllm cannot start with slots=128") as raised:
        recorded()
    assert str(error)[:20] in str(raised.value)


@pytest.mark.slow
def test_the_engine_sleeps_before_the_export_and_the_run_is_finished_after_it(tmp_path, monkeypatch):
    """The export gathers weights in float32, after the last evaluation."""
    seen = []
    for name in ("sleep", "sync"):
        true = getattr(TorchEngine, name)
        monkeypatch.setattr(TorchEngine, name, lambda *given, name=name, true=true: seen.append(name) or true(*given))
    monkeypatch.setattr(Weights, "export", lambda *given: seen.append(
        f"export, {runfolder.state_of(tmp_path / 'run')['state']}"))
    train.train(toy_config(tmp_path / "run", "steps=1", "eval.every=0"))
    assert seen[-2:] == ["sleep", "export, running"] and seen.count("sync") == 2
    assert runfolder.state_of(tmp_path / "run") == {"state": "finished"}


def plan(name: str, ranks: int) -> EngineSpec:
    """The engine of a published config on so many GPUs of 80 GB, as train.py starts it."""
    from leaves.fit import fit
    asked = config.load(name, ["rollout.engine=vllm"])
    cfg = fit.try_on(asked, fit.find_shape(asked.model.path), gpu(79, ranks)).cfg
    taken = []
    learner = SimpleNamespace(dtype=torch.bfloat16, backend="varlen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "check_positions", lambda *given: None)
        patch.setattr(train, "find_device", lambda wanted: CUDA)
        patch.setattr(train.dist, "init", lambda device: CUDA)
        patch.setattr(train, "build_learner", lambda *given: learner)
        patch.setattr(train, "start_engine", lambda kind, spec: taken.append(spec))
        tokenizer = SimpleNamespace(folder=TOY, eos_ids=frozenset([2]), stops=None)
        train.load_models(cfg, SimpleNamespace(source=TOY, tokenizer=tokenizer), Weights())
    return taken[0]


ALWAYS = {"load_format": "dummy", "skip_tokenizer_init": True, "generation_config": "vllm", "dtype": "bfloat16",
          "distributed_executor_backend": "external_launcher", "logprobs_mode": "processed_logprobs",
          "hf_overrides": {"head_dtype": "float32"}, "gpu_memory_utilization": 0.01, "max_num_batched_tokens": 8192}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_config_asks_vllm_for_this(name, recorded):
    ranks = 32 if "32B" in config.load(name).model.path else 8
    cfg, spec = config.load(name), plan(name, ranks)
    given = recorded(ranks, **{key: getattr(spec, key) for key in EngineSpec.__dataclass_fields__}).llm.given
    assert {key: given[key] for key in ALWAYS} == ALWAYS
    assert given["tensor_parallel_size"] == cfg.rollout.tensor_parallel
    assert given.get("disable_custom_all_reduce", False) == (cfg.rollout.tensor_parallel > 1)
    assert given["max_num_seqs"] == spec.slots <= cfg.rollout.slots
    assert given["enable_sleep_mode"] == spec.sleeps
    new = max(cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    assert given["max_model_len"] == (cfg.own_longest or cfg.data.max_prompt_tokens + new)
    known = ALWAYS.keys() | {"model", "max_num_seqs", "max_model_len", "tensor_parallel_size", "kv_cache_memory_bytes",
                             "enable_sleep_mode", "disable_custom_all_reduce", "compilation_config"}
    assert given.keys() <= known


def test_an_evaluation_has_its_own_engine_of_the_same_kind(monkeypatch):
    """eval.py on a run's config samples as the run did; the head of a result says so."""
    cfg = config.load("cppo_toy.yaml", ["rollout.engine=vllm", "rollout.quantization=fp8"])
    tokenizer = evaluation.Tokenizer(TOY, cfg.data)
    spec = hardware.engine_spec(cfg, torch.device("cpu"), tokenizer, 10)
    assert spec.quantization == "fp8" and not spec.sleeps
    named = {name: results.describe_result(replace(cfg, rollout=replace(cfg.rollout, quantization=name)),
                                              0, spec, tokenizer, []) for name in ("fp8", "none")}
    assert (named["fp8"]["engine"], named["none"]["engine"]) == ("vllm fp8", "vllm")
