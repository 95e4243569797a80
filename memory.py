"""Decide what fits: count the bytes of an update and of a rollout, measure those of the machine, and choose
what a config leaves to `auto`.
"""

import importlib
import importlib.metadata
import os
import resource
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from config import Config, ConfigError, Gae, flatten
from infra import dist
from infra.weights import Shape, read_shape
from model import CALLS
from records import EngineSpec

VLLM_VERSION = "0.32.0"  # the one that the tests run; the API changes from one to the next
DRIVER = Path("/proc/driver/nvidia/version")
WRONG_BUILD = f"torch {torch.__version__} is a build without CUDA: pip install -r requirements-gpu.txt"
OLD_DRIVER = (f"torch {torch.__version__} needs a driver for CUDA {torch.version.cuda} (13: 580 or newer; "
              "nvidia-smi shows it): update the driver")
FILLED = 0.9  # of the memory that is free when a run begins; the CUDA context and odd sizes take some


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank has to run on."""

    device: torch.device
    free: float          # bytes before anything is loaded, on the rank that has least; of a CPU its share
    ranks: int
    no_vllm: str = ""    # why vLLM cannot sample here; empty where it can
    no_cuda: str = ""    # why torch does not use a GPU that is there; empty where it does, or none is

    @staticmethod
    def here(device: torch.device) -> "Machine":
        """Describe this machine. Collective: all ranks come to the same."""
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = total_bytes(device) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        lacking = why_no_vllm(device)
        if dist.max_over_ranks(bool(lacking)):
            lacking = lacking or "another rank's machine does not have it"
        idle = "" if device.type == "cuda" else why_no_cuda()
        return Machine(device, -dist.max_over_ranks(-free), dist.world_size(), lacking, idle)

    def engines(self, dtype: torch.dtype) -> list[str]:
        """List the rollout engines that can run here, the fastest first."""
        return ["torch"] if self.no_vllm or dtype == torch.float64 else ["vllm", "torch"]


def why_no_vllm(device: torch.device) -> str:
    if device.type != "cuda":
        return "vLLM is chosen on CUDA alone"
    try:
        version = importlib.metadata.version("vllm").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return "" if version == VLLM_VERSION else (
        f"vllm {VLLM_VERSION}, the version that is tested, is not installed, but {version}; "
        "pip install -r requirements-gpu.txt")


def find_device(wanted: str) -> torch.device:
    """Return this process's device. auto takes CUDA where the machine has a device for every process, so that
    all ranks decide alike.

    Raises ConfigError for CUDA that was asked for and is missing, or is there and does not start.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in os.environ for name in allocator):
        # Rows differ in size, and fixed segments would fragment over hours.
        os.environ[allocator[0]] = "expandable_segments:True"
    devices, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if wanted == "cuda" and devices < processes:
        why = why_no_cuda() if devices == 0 else ""
        raise ConfigError(f"device=cuda, but this machine shows {devices} CUDA devices to {processes} "
                          f"processes{why and '; '}{why}; set device=cpu (or auto), or start fewer processes")
    if devices < processes:
        return torch.device("cpu")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        raise ConfigError(f"CUDA does not start: {error}; {OLD_DRIVER}; or set device=cpu") from error
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def why_no_cuda() -> str:
    """Say why a machine with a GPU does not compute on it; empty where it has none, or it is hidden."""
    devices, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < devices < processes:
        return f"the machine has {devices} CUDA devices to {processes} processes; start fewer"
    if not DRIVER.is_file() or os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return ""
    return f"there is a GPU, but {WRONG_BUILD if torch.version.cuda is None else OLD_DRIVER}"


# ---- what `auto` chooses

def decide(cfg: Config, source: Path, saved: dict | None = None) -> Config:
    """Choose on this machine what a config leaves to `auto`, and say it. Collective.

    Args:    source  folder of the model
             saved   the flat config of the checkpoint that the run goes on from: its choices are taken again
    """
    device = dist.init(find_device(cfg.device))
    decided, remarks = choose_settings(cfg, read_shape(source), Machine.here(device), saved or {})
    if dist.rank() == 0:
        named = [f"{key}={value}" for key, value in choices(cfg, decided).items()]
        lines = [f"chosen here: {', '.join(named)}"] * bool(named) + remarks
        print("".join(f"{line}\n" for line in lines), end="", flush=True)
    return decided


def choices(cfg: Config, decided: Config) -> dict:
    """Return the settings that `choose_settings` has changed, flat."""
    before, after = flatten(cfg), flatten(decided)
    return {key: value for key, value in after.items() if value != before[key]}


def choose_settings(cfg: Config, shape: Shape, machine: Machine, saved: dict) -> tuple[Config, list[str]]:
    """Replace every `auto` by a value, and slots by fewer where memory asks for it; returns remarks too.

    What was `saved` is taken again where it can run here, so that a run that goes on stays the same run.
    """
    def pick(key: str, able: list) -> str:
        wanted = flatten(cfg)[key]
        return wanted if wanted != "auto" else saved[key] if saved.get(key) in able else able[0]

    device, room = machine.device, FILLED * machine.free
    name = pick("model.dtype", ["bfloat16", "float32"] if device.type == "cuda" else ["float32", "bfloat16"])
    dtype = getattr(torch, name)
    attention = choose_backend(pick("model.attention", backends(device, dtype)), device, dtype)
    here = replace(cfg, device=device.type,
                   model=replace(cfg.model, dtype=name, attention=attention),
                   rollout=replace(cfg.rollout, engine=pick("rollout.engine", machine.engines(dtype))))
    fitting = [how for how in CALLS
               if update_bytes(with_recompute(here, how), shape, machine.ranks) <= room]
    here = with_recompute(here, pick("model.checkpoint_blocks", fitting or ["all"]))
    wanted = cfg.rollout.slots
    most = slots_that_fit(wanted, room, partial(rollout_bytes, here, shape, machine.ranks))
    slots = min(most, saved.get("rollout.slots", wanted))
    here = replace(here, rollout=replace(here.rollout, slots=slots))
    return here, list(remarks(cfg, here, shape, machine, saved))


def remarks(cfg: Config, here: Config, shape: Shape, machine: Machine, saved: dict) -> Iterator[str]:
    """Say why a choice is not what somebody expects."""
    slots, free = here.rollout.slots, machine.free / 2**30
    if slots < cfg.rollout.slots:
        why = "as before" if slots == saved.get("rollout.slots") else f"{free:.1f} GiB have no room for more"
        yield f"rollout.slots={slots}, not {cfg.rollout.slots}: {why}"
    needed = update_bytes(here, shape, machine.ranks) / 2**30
    if needed > free:
        yield (f"an update is counted to need {needed:.1f} GiB on a rank, and {free:.1f} are free: train on "
               "more ranks, lower pack.capacity or set optim.offload=true (CUDA)")
    if machine.no_cuda and cfg.device == "auto":
        yield f"device=cpu: {machine.no_cuda}"
    if machine.device.type == "cuda" and cfg.rollout.engine == "auto" and machine.no_vllm:
        yield f"rollout.engine=torch, the embedded one: {machine.no_vllm}"
    was = [f"{key}={saved[key]}" for key, value in choices(cfg, here).items()
           if key != "device" and saved.get(key, value) != value]
    if was:
        yield f"from here on not the same run bit for bit: {', '.join(was)} before, which cannot run here"


def fit_engine(wanted: str, spec: EngineSpec) -> tuple[str, EngineSpec]:
    """Choose the engine of an evaluation, and slots that fit, as `decide` does for training. Collective.

    Raises ConfigError for options of vLLM's where the embedded engine samples.
    """
    machine, shape = Machine.here(spec.device), read_shape(spec.folder)
    kind = machine.engines(spec.dtype)[0] if wanted == "auto" else wanted
    if kind == "torch" and (spec.tensor_parallel > 1 or spec.cache_gib):
        raise ConfigError("--tensor-parallel and --cache-gib are vLLM's, and the embedded engine samples "
                          "here; leave them out, or name --engine vllm")
    spread = spec.tensor_parallel if kind == "vllm" else 0
    slots = slots_that_fit(spec.slots, FILLED * machine.free, lambda slots: engine_bytes(
        shape, spec.dtype.itemsize, slots, spec.max_len, spread, spec.cache_gib))
    if dist.rank() == 0 and (wanted, spec.slots) != (kind, slots):
        print(f"chosen here: --engine {kind} --slots {slots}", flush=True)
    if dist.rank() == 0 and machine.no_cuda:
        print(f"on the CPU: {machine.no_cuda}", flush=True)
    return kind, replace(spec, slots=slots)


def with_recompute(cfg: Config, how: str) -> Config:
    return replace(cfg, model=replace(cfg.model, checkpoint_blocks=how))


def backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """List the keys of model.BACKENDS that run on this device, the fastest first. torch's kernel and
    flash-attn's are the same; both need half precision."""
    halves = dtype in (torch.bfloat16, torch.float16)
    return ["varlen", "sdpa"] if device.type == "cuda" and halves else ["sdpa"]


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the key of model.BACKENDS for a setting of model.attention. Raises ConfigError where what was
    asked for cannot run."""
    able = backends(device, dtype)
    if wanted == "auto":
        return able[0]
    if wanted != "sdpa" and able == ["sdpa"]:
        raise ConfigError(f"model.attention={wanted} cannot run on {device.type} in {dtype}; "
                          "use auto or sdpa")
    if wanted == "flash":
        try:
            importlib.import_module("flash_attn").flash_attn_varlen_func  # noqa: B018
        except (ImportError, AttributeError) as error:  # also a build for another torch, or a bare folder
            raise ConfigError(f"model.attention=flash, but flash-attn cannot be imported ({error}); "
                              "use auto, which takes the same kernel from torch") from error
    return wanted


# ---- counted from shapes

@dataclass(frozen=True, slots=True)
class Pass:
    """What the memory of a forward and backward pass of one row depends on."""

    shape: Shape
    tokens: int            # of the row
    keys: int              # that its segments attend to; those of a prompt count once per completion
    element: int           # bytes of a computed number
    recomputed: str = "none"  # model.checkpoint_blocks
    chunk: int = 1024      # model.logp_chunk
    fused: bool = False    # CUDA's kernels: a norm keeps its input alone, and attention pads nothing


def parameters(shape: Shape) -> int:
    """Count the weights of a decoder of this shape."""
    D, query, key = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    biases = (query + 2 * key) * shape.qkv_bias + D * shape.out_bias
    norms = 2 * D + 2 * shape.head_dim * shape.qk_norm
    block = 2 * D * query + 2 * D * key + 3 * D * shape.intermediate_size + biases + norms
    return shape.vocab_size * D * (1 if shape.tied else 2) + shape.layers * block + D


def pass_bytes(given: Pass) -> int:
    """Count the peak of a forward and backward pass beside weights, their gradients and moments, in bytes.

    Counted: what backward needs of each block; embedding and head, and the gradient of one, in the dtype that
    is computed in; and the larger of two that are never there together: the head's gradient in float32 with a
    chunk's logits, their softmax, and that again as it is multiplied; or a block with its gradients, and what
    it computes again. tests/test_fake_gpu.py holds it to what a traced update has alive.
    """
    shape, element = given.shape, given.element
    table = shape.vocab_size * shape.hidden_size
    root = table * (1 if shape.tied else 2)
    kept, whole = block_bytes(given), block_bytes(replace(given, recomputed="none"))
    head = 4 * table + given.chunk * shape.vocab_size * (8 + element)
    block = (parameters(shape) - root) // shape.layers * (2 * element + 4) + whole // 2 + whole - kept
    return element * (root + table) + shape.layers * kept + max(head, block)


def block_bytes(given: Pass) -> int:
    """Count what is kept of one block for backward."""
    shape = given.shape
    D, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if given.recomputed == "all":  # its input
        per_token, per_key = D, 0
    elif given.recomputed == "selective":  # its input and what products and attention give
        per_token, per_key = 3 * D + 2 * query + 2 * key + 2 * inner, 0
    elif given.fused:  # of each norm input and output; queries, keys, values, what attention gives; the MLP
        per_token, per_key = 4 * D + 2 * query + 4 * inner, 2 * key
    else:  # norms have two stages more; queries, keys, values and what attention gives, also padded
        per_token, per_key = 6 * D + 4 * query + 4 * inner, 4 * key
    return (given.tokens * per_token + given.keys * per_key) * given.element


def planned_lengths(cfg: Config) -> tuple[int, int]:
    """Return the tokens of prompts and completions for which memory is planned: prompts as long as they may
    be, and completions a quarter as long as they may be."""
    return cfg.data.max_prompt_tokens, -(-cfg.rollout.max_new_tokens // 4)


def row_of(cfg: Config) -> tuple[int, int]:
    """Return the tokens of a full row of whole groups, and the keys that its segments attend to."""
    (prompt, completion), G, tokens = planned_lengths(cfg), cfg.rollout.group_size, cfg.pack.capacity
    return tokens, tokens * G * (prompt + completion) // (prompt + G * completion)


def held_bytes(cfg: Config, shape: Shape, ranks: int) -> int:
    """Count the weights and moments that lie on one rank between passes, float32 over all ranks."""
    models = 2 if isinstance(cfg.advantage, Gae) else 1
    reference = 1 if cfg.loss.kl or getattr(cfg.advantage, "residual", None) else 0
    offloaded = cfg.optim.offload and cfg.device == "cuda"
    return 0 if offloaded else (12 * models + 4 * reference) * parameters(shape) // ranks


def update_bytes(cfg: Config, shape: Shape, ranks: int) -> int:
    """Count the peak of an update on one rank, in bytes, of a config in which nothing is `auto`."""
    gradients = 0 if cfg.optim.offload and cfg.device == "cuda" else 4 * parameters(shape) // ranks
    # torch.compile computes what is cheap again by itself: assumed, until a GPU has shown how much.
    how = "selective" if cfg.model.compile and cfg.model.checkpoint_blocks == "none" else (
        cfg.model.checkpoint_blocks)
    element, fused = getattr(torch, cfg.model.dtype).itemsize, cfg.model.attention != "sdpa"
    given = Pass(shape, *row_of(cfg), element, how, cfg.model.logp_chunk, fused)
    return held_bytes(cfg, shape, ranks) + gradients + pass_bytes(given)


def rollout_bytes(cfg: Config, shape: Shape, ranks: int, slots: int) -> int:
    """Count the bytes in use on one rank while the engine samples in so many slots at full length."""
    roll, element = cfg.rollout, getattr(torch, cfg.model.dtype).itemsize
    spread = roll.tensor_parallel if roll.engine == "vllm" else 0
    return held_bytes(cfg, shape, ranks) + engine_bytes(
        shape, element, slots, longest(cfg), spread, roll.cache_gib)


def longest(cfg: Config) -> int:
    """Return the tokens of the longest sequence that the engine samples."""
    new = max(cfg.rollout.window or cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    return cfg.data.max_prompt_tokens + new


def engine_bytes(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int,
                 cache_gib: float | None = None) -> int:
    """Count an engine's weights and what it samples with; tensor_parallel=0 is the embedded one."""
    weights = parameters(shape) * element // max(1, tensor_parallel)
    return weights + sampling_bytes(shape, element, slots, max_len, tensor_parallel, cache_gib)


def sampling_bytes(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int,
                   cache_gib: float | None = None) -> int:
    """Count an engine's cache, of a given size or with room for every slot, and what it draws from."""
    cache = (int(cache_gib * 2**30) if cache_gib else
             cache_bytes(shape, element, slots, max_len, tensor_parallel))
    # Logits and log-probs in float32; probabilities and their sums in float64.
    return cache + 24 * slots * shape.vocab_size


def cache_bytes(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int) -> int:
    """Count one rank's KV cache with room for every slot at full length.

    vLLM has blocks of up to 128 tokens, and one block more. The embedded engine (tensor_parallel=0) has each
    prompt once, here as many as slots, and one layer in float32 beside, as it is multiplied.
    """
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * element
    if not tensor_parallel:
        return slots * max_len * (token + token * 4 // element // shape.layers)
    blocks = slots * -(-max_len // 128) + 1
    return blocks * 128 * token * max(1, shape.kv_heads // tensor_parallel) // shape.kv_heads


def slots_that_fit(wanted: int, room: float, bytes_of: Callable[[int], int]) -> int:
    """Return the most slots up to `wanted` that there is room for, in bytes; at least one."""
    return max(1, bisect_right(range(1, wanted + 1), room, key=bytes_of))


# ---- measured

def in_use(device: torch.device) -> float:
    """Return the bytes that this rank has taken; torch gives nothing back, so this is a peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return most_resident()


def most_resident() -> int:
    """Return the most bytes of the machine's memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def metrics(device: torch.device) -> dict[str, float]:
    """Measure the most that a rank has held so far: tensors on a GPU, else all of its memory. Collective."""
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else most_resident()
    return {"memory/peak_gib": dist.max_over_ranks(held) / 2**30}


def fullest(bytes_here: float, device: torch.device) -> float:
    """Return the bytes of the fullest rank, or of all ranks of a CPU machine, which share its memory.
    Collective."""
    ranks = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ranks * dist.max_over_ranks(bytes_here)


def total_bytes(device: torch.device) -> float:
    """Return the bytes of the smallest GPU, or of the smallest machine's memory. Collective."""
    cuda = device.type == "cuda"
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return -dist.max_over_ranks(-(torch.cuda.mem_get_info(device)[1] if cuda else host))
