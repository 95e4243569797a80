"""Call torch.distributed, which no other file but checkpoint.py does. One process per GPU (gloo on the CPU),
the same path at world size 1."""

import hashlib
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from settings.loader import ConfigError

rank = td.get_rank
world_size = td.get_world_size
barrier = td.barrier


def init(device: torch.device | str) -> torch.device:
    """Join the process group (torchrun's, or a group of one); returns the device (device.find_device).

    Raises ConfigError if restarted workers would not find each other.
    """
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "OMP_NUM_THREADS" not in os.environ:
        # As torchrun does, and vLLM. Spinning OpenMP threads are 2 to 10 times slower beside other work.
        torch.set_num_threads(1)
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        # pytorch #135712: the store still has the addresses of the workers before the restart.
        raise ConfigError("torchrun --max-restarts keeps one store over all restarts, in which restarted "
                          "workers find dead ones; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
                          "environment")
    if not td.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        single = {}
        if "RANK" not in os.environ:  # no torchrun
            single = {"store": td.HashStore(), "rank": 0, "world_size": 1}
        td.init_process_group(backend, timeout=timedelta(minutes=30), **single)
    return chosen


def close() -> None:
    if td.is_initialized():
        td.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Tell whether an error of a collective means that another rank has ended."""
    return isinstance(error, td.DistError) or "gloo" in str(error)


def is_first() -> bool:
    """Tell whether this is rank 0, which prints and writes for all."""
    return rank() == 0


def say(text: str) -> None:
    """Print a line on rank 0 alone."""
    if is_first():
        print(text, flush=True)


def local_slice(items: list) -> list:
    """Return this rank's items: the rank-th of world_size contiguous slices, equal up to one item."""
    start, end = (len(items) * place // world_size() for place in (rank(), rank() + 1))
    return items[start:end]


def gather(items: list, group: td.ProcessGroup | None = None) -> list:
    """Undo `local_slice`: return every rank's items, in rank order, on every rank."""
    lists = [None] * world_size()
    td.all_gather_object(lists, items, group)
    return [item for rank_items in lists for item in rank_items]


def on_first(function: Callable, *given: object) -> Any:
    """Call a function on rank 0 alone, and return its result on every rank. Collective."""
    result, = gather([function(*given)] if is_first() else [])
    return result


def shard(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device, dtype: torch.dtype,
          offload: bool) -> None:
    """Spread the weights over the ranks (FSDP2); a block's are gathered, in `dtype`, only while it computes.

    Gradients are summed over the ranks, in the weights' own dtype: the loss is a sum, so nothing is divided.
    Every rank must make the same passes. `offload` keeps weights, gradients and the optimizer's state in the
    host's memory.
    """
    mesh = init_device_mesh(device.type, (world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype_of_trained(model))
    place = CPUOffloadPolicy() if offload and device.type == "cuda" else OffloadPolicy()
    for module in (*blocks, model):
        # Nothing stays gathered: no later pass computes with weights from before an optimizer step.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=place)
        if world_size() > 1:  # alone the factor is 1, and setting it costs a division of every gradient
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the factor alone crashes on gloo


def dtype_of_trained(model: nn.Module) -> torch.dtype:
    """Return the dtype of the trained weights; frozen ones may have another."""
    return next(p.dtype for p in model.parameters() if p.requires_grad)


def gather_full(
    tensor: Tensor,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None
) -> Tensor:
    """Gather a sharded tensor from all ranks, which must all call this. Shards are cast and moved first: 16
    bits are half the bytes to send, and GPUs send faster."""
    mine = local_shard(tensor).to(device=device, dtype=dtype)
    return shard_like(tensor, mine).full_tensor() if isinstance(tensor, DTensor) else mine


def shard_like(tensor: Tensor, mine: Tensor) -> Tensor:
    """Make a sharded tensor of every rank's shard, `mine` on this one, laid out as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return mine
    return DTensor.from_local(mine, tensor.device_mesh, tensor.placements, run_check=False,
                              shape=tensor.shape, stride=tensor.stride())


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Undo `gather_full`: shard a tensor as `like` is. Every rank has all of it, so nothing is sent."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def sum_over_ranks(sums: dict[str, Tensor | float]) -> dict[str, float]:
    """Add up every rank's sums, those on a device after one copy. Means are computed from the result, never
    before."""
    there = {name: value.double() for name, value in sums.items() if isinstance(value, Tensor)}
    copied = zip(there, torch.stack([*there.values()]).cpu().tolist(), strict=True) if there else ()
    total = torch.tensor([*(sums | dict(copied)).values()], dtype=torch.float64)
    td.all_reduce(total)
    return dict(zip(sums, total.tolist(), strict=True))


def max_over_ranks(value: float) -> float:
    highest = torch.tensor(value, dtype=torch.float64)
    td.all_reduce(highest, td.ReduceOp.MAX)
    return highest.item()


def seed_for(seed: int, *where: int | str) -> int:
    """Derive a seed for one use of randomness, e.g. seed_for(cfg.seed, epoch, prompt_id, "rollout").

    A pure function of its arguments, so a resumed run needs no saved state and cannot be off by one draw.
    """
    text = "/".join(map(str, (seed, *where)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
