"""Choose the settings that a config leaves to `auto`: measure the machine's memory, and compare it with the
bytes that preflight/counts.py counts."""

import importlib
import importlib.metadata
import os
import resource
import shutil
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from config import Config, ConfigError, Model, flatten, with_value
from infra import dist
from infra.weights import Shape, read_shape
from model import BLOCK_CALLS
from preflight.counts import (
    engine_parts,
    phases,
    planned_share,
    rollout_parts,
    row_range,
    sequences_asked,
    update_bytes,
)
from records import EngineSpec, Metrics, frozen
from rollout_vllm import VLLM_VERSION

DRIVER = Path("/proc/driver/nvidia/version")
WRONG_BUILD = f"torch {torch.__version__} is a build without CUDA: pip install -r requirements/gpu.txt"
OLD_DRIVER = (f"torch {torch.__version__} needs a driver for CUDA {torch.version.cuda} (13: 580 or newer; "
              "nvidia-smi shows it): update the driver")
USABLE_SHARE = 0.9  # of the memory free when a run begins; the CUDA context and odd sizes take some
OVERCOUNT = 1.3  # the count is at most so many times an update's bytes (tests/test_fake_gpu.py)
ENOUGH_TOKENS = 4096  # tokens of a row; with fewer, launches and gathers cost more than recomputing blocks
PRODUCTS = ("avx512_bf16", "amx_bf16")  # features of a CPU that multiplies bfloat16 faster than float32
ROW_STEP = 256    # tokens; rows grow in steps of it
REQUESTED = "asked for"  # key of a checkpoint: the config's slots, if fewer were chosen


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
            free = total_bytes(device) / local_processes()
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


def find_device(wanted: str) -> torch.device:
    """Return this process's device. auto takes CUDA if the machine has a device for every process, so that
    all ranks decide alike.

    Raises ConfigError if CUDA was asked for and is missing, or is there and does not start.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in os.environ for name in allocator):
        # Rows differ in size, and fixed segments would fragment over hours.
        os.environ[allocator[0]] = "expandable_segments:True"
    devices, processes = torch.cuda.device_count(), local_processes()
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


def local_processes() -> int:
    """Return how many processes of the run share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def why_no_cuda() -> str:
    """Say why a machine with a GPU does not compute on it; "" if it has none, or it is hidden."""
    devices, processes = torch.cuda.device_count(), local_processes()
    if 0 < devices < processes:
        return f"the machine has {devices} CUDA devices to {processes} processes; start fewer"
    if not DRIVER.is_file() or os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return ""
    return f"there is a GPU, but {WRONG_BUILD if torch.version.cuda is None else OLD_DRIVER}"


# ---- choices of `auto`

def resolve_auto(cfg: Config, source: Path, saved: dict | None = None) -> Config:
    """Choose the settings that a config leaves to `auto` on this machine, and print them. Collective.

    Args:    source  folder of the model
             saved   the flat config of the checkpoint that the run goes on from: its choices are taken again
    """
    device = dist.init(find_device(cfg.device))
    shape, machine = read_shape(source), Machine.here(device)
    decided, remarks = choose_settings(cfg, shape, machine, saved or {})
    needed = update_bytes(decided, shape, machine.ranks)
    if cfg.pack.capacity == "auto" and needed > OVERCOUNT * machine.free:  # for one sequence, and by far
        raise ConfigError(
            f"pack.capacity=auto has no room for a row of one sequence ({decided.pack.capacity} tokens): an "
            f"update is counted to need {needed / 2**30:.1f} GiB on a rank, and {machine.free / 2**30:.1f} "
            "are free; train an adapter (model.lora.rank) or on more ranks, set optim.offload=true (CUDA), "
            "or lower rollout.max_new_tokens or data.max_prompt_tokens; train.py --fit tells what helps")
    named = [f"{key}={value}" for key, value in list_choices(cfg, decided).items()]
    if named:
        remarks = [f"chosen here: {', '.join(named)}", *remarks]
    for line in remarks:
        dist.say(line)
    return decided


def list_choices(cfg: Config, decided: Config) -> dict:
    """Return the settings that `choose_settings` has changed, flat."""
    before, after = flatten(cfg), flatten(decided)
    return {key: value for key, value in after.items() if value != before[key]}


def choose_settings(cfg: Config, shape: Shape, machine: Machine, saved: dict) -> tuple[Config, list[str]]:
    """Replace every `auto` by a value, and slots by fewer if memory asks for it; returns remarks too.

    `saved` choices are taken again if they can run here, so that a resumed run stays the same run.
    """
    def pick(key: str, able: list) -> str:
        wanted = flatten(cfg)[key]
        if wanted != "auto":
            return wanted
        return saved[key] if saved.get(key) in able else able[0]

    device = machine.device
    name = pick("model.dtype", ["bfloat16", "float32"] if device.type == "cuda" else ["float32", "bfloat16"])
    dtype = getattr(torch, name)
    attention = choose_backend(pick("model.attention", list_backends(device, dtype)), device, dtype)
    engine = pick("rollout.engine", ["torch"] if cfg.rollout.drafts else machine.engines(dtype))
    here = replace(cfg, device=device.type, model=replace(cfg.model, dtype=name, attention=attention))
    here = with_value(here, "rollout.engine", engine)
    slots = min(cfg.rollout.slots, sequences_asked(here, machine.ranks))
    if saved.get(REQUESTED, {}).get("rollout.slots", cfg.rollout.slots) == cfg.rollout.slots:
        slots = saved.get("rollout.slots", slots)
    here = choose_sleep(with_value(here, "rollout.slots", slots), shape, machine, saved)
    room = USABLE_SHARE * machine.free
    needed = partial(rollout_parts, here, shape, machine.ranks)
    most = slots_that_fit(slots, room, lambda count: sum(needed(count).values()))
    here = with_value(here, "rollout.slots", most)
    return here, list(explain_choice(cfg, here, shape, machine, saved))


def choose_sleep(cfg: Config, shape: Shape, machine: Machine, saved: dict) -> Config:
    """Choose rollout.sleep, and with it the rows.

    vLLM stays awake if it fits beside an update that hardly takes longer for it: one of a single row, or of
    rows that are long enough and recompute no more. The embedded engine's memory is free once it has sampled.
    """
    wanted, before = cfg.rollout.sleep, saved.get("rollout.sleep", "always" if saved else "auto")
    asleep, awake = (choose_rows(with_value(cfg, "rollout.sleep", sleep), shape, machine, saved)
                     for sleep in ("always", "never"))
    if cfg.rollout.engine != "vllm" or wanted == "always" or (wanted == "auto" and before == "always"):
        return asleep
    if wanted == "never":
        return awake
    room = USABLE_SHARE * machine.free * (OVERCOUNT if before == "never" else 1)  # rows may be measured ones
    needed = max(sum(parts.values()) for parts in phases(awake, shape, machine.ranks).values())
    rows, how = awake.pack.capacity, awake.model.checkpoint_blocks
    one_row = rows >= planned_share(cfg, machine.ranks) and how != "all"
    alike = rows >= min(asleep.pack.capacity, ENOUGH_TOKENS) and how == asleep.model.checkpoint_blocks
    return awake if needed <= room and (one_row or alike) else asleep


def explain_choice(cfg: Config, here: Config, shape: Shape, machine: Machine, saved: dict) -> Iterator[str]:
    """Say why a choice is not the expected one."""
    slots, free = here.rollout.slots, machine.free / 2**30
    if slots < min(cfg.rollout.slots, sequences_asked(here, machine.ranks)):
        why = "as before" if slots == saved.get("rollout.slots") else f"{free:.1f} GiB have no room for more"
        yield f"rollout.slots={slots}, not {cfg.rollout.slots}: {why}"
    needed = update_bytes(here, shape, machine.ranks) / 2**30
    if needed > free:
        yield (f"an update is counted to need {needed:.1f} GiB on a rank, and {free:.1f} are free: train an "
               "adapter (model.lora.rank) or on more ranks, lower pack.capacity or set optim.offload=true "
               "(CUDA)")
    if machine.no_cuda and cfg.device == "auto":
        yield f"device=cpu: {machine.no_cuda}"
    if machine.device.type == "cuda" and cfg.rollout.engine == "auto" and machine.no_vllm:
        yield f"rollout.engine=torch, the embedded one: {machine.no_vllm}"
    was = [f"{key}={saved[key]}" for key, value in list_choices(cfg, here).items()
           if key not in ("device", "rollout.sleep") and saved.get(key, value) != value]
    if was:
        yield f"from here on not the same run bit for bit: {', '.join(was)} before, which cannot run here"


def fit_engine(wanted: str, spec: EngineSpec) -> tuple[str, EngineSpec]:
    """Choose the engine of an evaluation, and slots that fit, as `resolve_auto` for training. Collective.

    Raises ConfigError for options of vLLM's if the embedded engine samples.
    """
    machine, shape = Machine.here(spec.device), read_shape(spec.folder)
    kind = machine.engines(spec.dtype)[0] if wanted == "auto" else wanted
    if kind == "torch" and (spec.tensor_parallel > 1 or spec.cache_gib):
        raise ConfigError("rollout.tensor_parallel and rollout.cache_gib are vLLM's, and the embedded engine "
                          "samples here; leave them out, or set rollout.engine=vllm")
    spread = spec.tensor_parallel if kind == "vllm" else 0

    def needed(slots: int) -> float:
        parts = engine_parts(shape, spec.dtype.itemsize, slots, spec.max_len, spread, spec.cache_gib)
        return sum(parts.values())

    slots = slots_that_fit(spec.slots, USABLE_SHARE * machine.free, needed)
    if (wanted, spec.slots) != (kind, slots):
        dist.say(f"chosen here: rollout.engine={kind}, rollout.slots={slots}")
    if machine.no_cuda:
        dist.say(f"on the CPU: {machine.no_cuda}")
    return kind, replace(spec, slots=slots)


def settings_to_save(cfg: Config, asked: Config) -> dict:
    """List the settings for a checkpoint, and the slots asked for, as memory may have room for fewer."""
    return flatten(cfg) | {REQUESTED: {"rollout.slots": asked.rollout.slots}}


def with_rows(cfg: Config, how: str, capacity: int) -> Config:
    return with_value(with_value(cfg, "model.checkpoint_blocks", how), "pack.capacity", capacity)


def choose_rows(cfg: Config, shape: Shape, machine: Machine, saved: dict) -> Config:
    """Choose pack.capacity and model.checkpoint_blocks, if they are `auto`.

    Rows are as long as memory has room for, and blocks recomputed as little as leaves rows that are long
    enough. A run that goes on takes both again.
    """
    room, capacity, before = USABLE_SHARE * machine.free, cfg.pack.capacity, saved.get("pack.capacity")
    ways, how_before = list(BLOCK_CALLS), saved.get("model.checkpoint_blocks")
    if cfg.model.checkpoint_blocks != "auto":
        ways = [cfg.model.checkpoint_blocks]

    def needed(how: str, tokens: int) -> int:
        return update_bytes(with_rows(cfg, how, tokens), shape, machine.ranks)

    if capacity != "auto":
        fitting = [how for how in ways if needed(how, capacity) <= room] or ways[-1:]
        return with_rows(cfg, how_before if how_before in fitting else fitting[0], capacity)
    # A measured row may be longer than the count allows.
    if before and how_before in ways and needed(how_before, before) <= OVERCOUNT * room:
        return with_rows(cfg, how_before, before)
    least, most = row_range(cfg, machine.ranks)
    if machine.device.type == "cpu":  # longer rows gain nothing there, and memory is not ours alone
        most = max(least, min(most, ENOUGH_TOKENS))
    chosen, longest = ways[-1], 0
    for how in ways:  # from no recomputation to all
        tokens = longest_row(least, most, room, partial(needed, how))
        if tokens >= min(ENOUGH_TOKENS, most):
            return with_rows(cfg, how, tokens)
        if tokens >= longest:
            chosen, longest = how, tokens
    return with_rows(cfg, chosen, longest or least)


def longest_row(least: int, most: int, room: float, needed: Callable[[int], float]) -> int:
    """Return the longest capacity that there is room for, in bytes; 0 if there is none."""
    sizes = [*range(least, most, ROW_STEP), most]
    fitting = bisect_right(sizes, room, key=needed)
    return sizes[fitting - 1] if fitting else 0


def list_backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """List the keys of model.BACKENDS that run on this device, the fastest first. torch's kernel and
    flash-attn's are the same; both need half precision."""
    half = dtype == torch.bfloat16
    return ["varlen", "sdpa"] if device.type == "cuda" and half else ["sdpa"]


def rounds_products(settings: Model, device: torch.device) -> bool:
    """Tell whether model.products is bfloat16. Raises ConfigError where that is no faster."""
    able = torch.cpu.get_capabilities()
    if settings.products and (device.type != "cpu" or not any(able.get(name) for name in PRODUCTS)):
        raise ConfigError(f"model.products={settings.products} is for CPUs with one of "
                          f"{', '.join(PRODUCTS)}, and this device, {device.type}, is none; leave it out"
                          + ", and set model.dtype=bfloat16" * (device.type == "cuda"))
    return settings.products is not None


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


def slots_that_fit(wanted: int, room: float, needed: Callable[[int], float]) -> int:
    """Return the most slots up to `wanted` that there is room for, in bytes; at least one."""
    return max(1, bisect_right(range(1, wanted + 1), room, key=needed))


# ---- measured

def used_bytes(device: torch.device) -> float:
    """Return the bytes that this rank has taken; torch gives nothing back, so this is a peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def metrics(device: torch.device, engine: object) -> Metrics:
    """Measure the most memory of a GPU, or else of a process, that was in use so far. Collective."""
    held = max(used_bytes(device), getattr(engine, "peak_bytes", 0))
    return {"memory/peak_gib": dist.max_over_ranks(held) / 2**30}


def fullest(bytes_here: float, device: torch.device) -> float:
    """Return the bytes of the fullest rank, or of all ranks of a CPU machine, which share its memory.
    Collective."""
    ranks = 1 if device.type == "cuda" else local_processes()
    return ranks * dist.max_over_ranks(bytes_here)


def total_bytes(device: torch.device) -> float:
    """Return the bytes of the smallest GPU, or of the smallest machine's memory. Collective."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return -dist.max_over_ranks(-total)
