"""Choose the device, its kernels and the engine, and measure the memory of this machine."""

import importlib.metadata
import os
import resource
import shutil
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from config import Config, ConfigError
from infra import dist
from infra.tokenizer import Tokenizer
from infra.weights import Shape, read_shape
from records import EngineSpec, frozen

DRIVER = Path("/proc/driver/nvidia/version")
WRONG_BUILD = f"torch {torch.__version__} is a build without CUDA: pip install -r requirements/gpu.txt"
OLD_DRIVER = (f"torch {torch.__version__} needs a driver for CUDA {torch.version.cuda} (13: 580 or newer; "
              "nvidia-smi shows it): update the driver")
USABLE_SHARE = 0.9  # of the memory free when a run begins; the CUDA context and odd sizes take some
VLLM_VERSION = "0.32.0"  # the tests run this version; the API changes from one to the next
Parts = dict[str, float]  # bytes by name


def find_device(wanted: str) -> torch.device:
    """Return this process's device. auto takes CUDA if the machine has a device for every process, so that
    all ranks decide alike.

    Raises ConfigError if CUDA was asked for and is missing, or is there and does not start.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if os.environ.keys().isdisjoint(allocator):
        # Rows differ in size, and fixed segments would fragment over hours.
        os.environ[allocator[0]] = "expandable_segments:True"
    if torch.cuda.device_count() < local_processes():
        if wanted == "cuda":
            raise ConfigError(f"device=cuda: {why_no_cuda() or 'this machine shows no CUDA device'}; set "
                              "device=cpu (or auto)")
        return torch.device("cpu")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        raise ConfigError(f"CUDA does not start: {error}; {OLD_DRIVER}; or set device=cpu") from error
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def local_processes() -> int:
    """Return how many processes of the run share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def why_no_cuda() -> str:
    """Say why the GPUs of a machine cannot be used; "" if they can, are hidden, or are absent."""
    devices, processes = torch.cuda.device_count(), local_processes()
    if 0 < devices < processes:
        return f"the machine has {devices} CUDA devices to {processes} processes; start fewer"
    if devices or not DRIVER.is_file() or os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return ""
    return f"there is a GPU, but {WRONG_BUILD if torch.version.cuda is None else OLD_DRIVER}"


def list_backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """List the keys of model.BACKENDS that run on this device, the fastest first. torch's kernel and
    flash-attn's are the same; both need half precision."""
    return ["varlen", "sdpa"] if device.type == "cuda" and dtype == torch.bfloat16 else ["sdpa"]


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the key of model.BACKENDS for a setting of model.attention. Raises ConfigError if the one asked
    for cannot run."""
    able = list_backends(device, dtype)
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


# ---- an engine that fits

@frozen
class Machine:
    """The hardware of a rank."""

    device: torch.device
    free: float          # bytes before anything is loaded, on the rank with least; on a CPU a rank's share
    ranks: int
    no_vllm: str = ""    # why vLLM cannot sample here; empty if it can
    no_cuda: str = ""    # why torch does not use the machine's GPU; empty if it does, or there is none

    @staticmethod
    def here(device: torch.device) -> "Machine":
        """Describe this machine. Collective: all ranks come to the same."""
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_processes()
        lacking = next(filter(None, dist.gather([why_no_vllm(device)])), "")
        return Machine(device, -dist.max_over_ranks(-free), dist.world_size(), lacking, why_no_cuda())

    def against_vllm(self, dtype: torch.dtype) -> str:
        """Say why `auto` takes the embedded engine for numbers of this kind; "" if it takes vLLM."""
        # To TF32, while the trainer's are not rounded.
        return self.no_vllm or f"vLLM's kernels round the factors of {dtype} products" * (dtype.itemsize > 2)

    def engines(self, dtype: torch.dtype) -> list[str]:
        """List the rollout engines that can run here, the fastest first."""
        return ["torch"] if self.against_vllm(dtype) else ["vllm", "torch"]


def why_no_vllm(device: torch.device) -> str:
    if device.type != "cuda":
        return "vLLM is chosen on CUDA alone"
    try:
        version = importlib.metadata.version("vllm").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version == VLLM_VERSION:
        return why_no_compiler()
    return (f"vllm {VLLM_VERSION}, the version that is tested, is not installed, but {version}; "
            "pip install -r requirements/gpu.txt")


def why_no_compiler() -> str:
    """Say what Triton lacks, which needs the system's compiler and Python's headers; "" if nothing."""
    compilers = os.environ.get("CC", "gcc clang").split()
    if not any(map(shutil.which, compilers)):
        return f"vLLM's kernels need a C compiler ({' or '.join(compilers)}): apt-get install gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "vLLM's kernels need Python's headers (Python.h): apt-get install python3-dev"
    return ""


def engine_spec(cfg: Config, device: torch.device, tokenizer: Tokenizer, longest: int) -> EngineSpec:
    """Describe an engine for sequences of so many tokens, which is awake all the time."""
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if cfg.model.dtype == "auto" else getattr(torch, cfg.model.dtype)
    return EngineSpec(
        tokenizer.folder,
        dtype,
        device,
        choose_backend(cfg.model.attention, device, dtype),
        tokenizer.eos_ids,
        cfg.rollout.slots,
        longest,
        cfg.rollout.tensor_parallel,
        cfg.rollout.cache_gib,
        tokenizer.stops,
        quantization=cfg.rollout.quantization)


def used_bytes(device: torch.device) -> float:
    """Return the bytes that this rank has taken; torch gives nothing back, so this is a peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fit_engine(wanted: str, spec: EngineSpec) -> tuple[str, EngineSpec]:
    """Choose the engine of an evaluation, and slots that fit, as `resolve_auto` for training. Collective."""
    machine, shape = Machine.here(spec.device), read_shape(spec.folder)
    kind = machine.engines(spec.dtype)[0] if wanted == "auto" else wanted
    spread = spec.tensor_parallel if kind == "vllm" else 0

    def needed(slots):
        return sum(engine_parts(
            shape, spec.dtype.itemsize, slots, spec.max_len, spread, spec.cache_gib).values())

    slots = largest_that_fits(range(1, spec.slots + 1), USABLE_SHARE * machine.free, needed) or 1
    if (wanted, spec.slots) != (kind, slots):
        dist.say(f"chosen here: rollout.engine={kind}, rollout.slots={slots}")
    if machine.no_cuda:
        dist.say(f"on the CPU: {machine.no_cuda}")
    return kind, replace(spec, slots=slots)


def largest_that_fits(sizes: Sequence[int], room: float, needed: Callable[[int], float]) -> int:
    """Return the largest of ascending sizes that there is room for, in bytes; 0 if there is none."""
    fitting = bisect_right(sizes, room, key=needed)
    return sizes[fitting - 1] if fitting else 0


def engine_parts(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int,
                 cache_gib: float | None = None) -> Parts:
    """Count an engine's weights, its cache and what it draws from. tensor_parallel=0 is the embedded one."""
    # Logits and log-probs in float32; probabilities and their sums in float64.
    return {
        "engine's weights": parameters(shape) * element // max(1, tensor_parallel),
        "KV cache": cache_bytes(shape, element, slots, max_len, tensor_parallel, cache_gib),
        "what tokens are drawn from": 24 * slots * shape.vocab_size,
    }


def cache_bytes(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int,
                cache_gib: float | None = None) -> int:
    """Count one rank's KV cache, which has a given size, or room for every slot at full length.

    vLLM has blocks of up to 128 tokens, and one block more. The embedded engine (tensor_parallel=0) has each
    prompt once, here as many as slots, and the layer that is being multiplied once more in float32. Raises
    ConfigError if the model's heads cannot be spread over so many ranks.
    """
    if tensor_parallel and tensor_parallel not in (able := spreads(shape)):
        raise ConfigError(f"rollout.tensor_parallel={tensor_parallel} does not divide this model, which has "
                          f"{shape.heads} heads, {shape.kv_heads} of keys: it can be {able}")
    if cache_gib:
        return int(cache_gib * 2**30)
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * element
    if not tensor_parallel:
        return slots * max_len * (token + token * 4 // element // shape.layers)
    blocks = slots * -(-max_len // 128) + 1
    return blocks * 128 * token * max(1, shape.kv_heads // tensor_parallel) // shape.kv_heads


def spreads(shape: Shape) -> list[int]:
    """List the numbers of ranks over which vLLM can spread a model: whole heads, of keys alike or copied."""
    inner, keys = shape.intermediate_size, shape.kv_heads
    return [ranks for ranks in range(1, shape.heads + 1)
            if not (shape.heads % ranks or inner % ranks or max(ranks, keys) % min(ranks, keys))]


def parameters(shape: Shape) -> int:
    """Count the weights of a decoder of this shape."""
    return table_weights(shape) + shape.layers * block_weights(shape)


def table_weights(shape: Shape) -> int:
    """Count the weights of embedding and head."""
    return shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)


def block_weights(shape: Shape) -> int:
    """Count the weights of one block's linear layers; norms and biases are less than a thousandth."""
    heads = shape.heads + shape.kv_heads
    return shape.hidden_size * (2 * heads * shape.head_dim + 3 * shape.intermediate_size)
