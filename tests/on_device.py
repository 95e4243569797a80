"""Run a program on a device that computes and does not exist: the host's memory by another name (device.cpp).

    python tests/on_device.py train --config cppo_toy.yaml --set steps=1
    torchrun --nproc_per_node 2 tests/on_device.py --swap update.py OLD NEW train --config cppo_toy.yaml

Our files are read with this device's name in place of cuda. It refuses what a GPU refuses: tensors of both sides in one
op, and other numbers than halves where a kernel takes those. Fresh memory is NaN. At its end the first rank prints as
JSON how often the host waited or copied, and the dtypes of products, by lines of ours.
"""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.machinery
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as td
import torch.nn.functional as F
from torch import Tensor
from torch.utils import cpp_extension

ROOT, NAME, GIB = Path(__file__).parent.parent, "gpux", 2**30
SEEN: Counter[tuple[str, str, str]] = Counter()  # (what, more, line of ours)
LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
LIBRARY = torch.library.Library("aten", "IMPL")  # forgets its ops when it is collected
THREAD = ThreadPoolExecutor(1)
HALVES = torch.bfloat16, torch.float16
unheard = False  # what stands in for a kernel or for NCCL is not the run's


def ours(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)


def build() -> Path:
    """Compile the device for this torch, once: half a minute."""
    source = Path(__file__).with_name("device.cpp")
    mark = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    library = Path(sys.prefix) / f"device-{mark}.so"
    if not library.exists():
        whole = library.with_suffix(f".{os.getpid()}")
        options = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w"]
        includes = [f"-I{folder}" for folder in cpp_extension.include_paths()]
        libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
        subprocess.run(["g++", *options, *includes, source, "-o", whole, *libraries, "-ltorch", "-ltorch_cpu", "-lc10"],
                       check=True)
        whole.rename(library)
    return library


@LISTENER
def listen(what: bytes, more: bytes) -> None:
    if not unheard:
        frame, place = sys._getframe(), "elsewhere"
        while frame and place == "elsewhere":
            path = Path(frame.f_code.co_filename)
            if ours(path) and path != Path(__file__):
                place = f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
            frame = frame.f_back
        SEEN[what.decode(), more.decode(), place] += 1


@contextlib.contextmanager
def in_the_device():
    global unheard
    before, unheard = unheard, True
    yield
    unheard = before


def open_device() -> None:
    library = ctypes.CDLL(str(build()))
    torch.utils.rename_privateuse1_backend(NAME)
    module = MagicMock()  # streams, events and all else that a device has: everything is done at once
    module.is_available.return_value = module.is_initialized.return_value = True
    module._is_in_bad_fork.return_value = module.is_current_stream_capturing.return_value = False
    module.current_device.return_value = 0
    module.device_count.return_value = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    module.get_device_name.return_value = "NVIDIA H100 80GB HBM3"
    module.get_amp_supported_dtype.return_value = [torch.bfloat16]
    module.mem_get_info = lambda *device: (8 * GIB - library.device_bytes(), 8 * GIB)
    module.get_rng_state = lambda *device: torch.get_rng_state()
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    library.device_bytes.restype = ctypes.c_int64
    library.device_open(listen)
    for name, kernel in KERNELS.items():
        LIBRARY.impl(name, kernel, "PrivateUse1")
    td.Backend.register_backend("both", Both, devices=["cpu", NAME])


# ---- kernels that the host lacks

def require(fine: bool, *given: object) -> None:
    if not fine:
        raise RuntimeError(f"a GPU's kernel does not take {given}")


def product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    require(left.dtype == right.dtype and left.dtype in HALVES and out_dtype == torch.float32, left.dtype, right.dtype)
    with in_the_device():
        return left.float() @ right.float()


def product_onto(onto: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, beta=1, alpha=1) -> Tensor:
    require(onto.dtype in (out_dtype, left.dtype), onto.dtype)
    return beta * onto.float() + alpha * product(left, right, out_dtype)


def product_out(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(product(left, right, out_dtype))


def product_onto_out(onto: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, beta=1, alpha=1,
                     out: Tensor) -> Tensor:
    return out.copy_(product_onto(onto, left, right, out_dtype, beta=beta, alpha=alpha))


def attend(q_HTE: Tensor, k_HTE: Tensor, v_HTE: Tensor, starts_q: list[int], starts_k: list[int], causal: bool,
           scale: float | None, left: int) -> Tensor:
    """Attend on the host, in float32, segment by segment."""
    pieces = []
    for (a, b), (c, d) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        ahead = torch.arange(d - c) - (d - c) - torch.arange(b - a)[:, None] + (b - a)  # a key's place less a query's
        seen = (ahead <= 0 if causal else ahead < d) & ((ahead >= -left) | (left < 0))
        pieces.append(F.scaled_dot_product_attention(q_HTE[:, a:b], k_HTE[:, c:d], v_HTE[:, c:d], seen, scale=scale,
                                                     enable_gqa=True))
    return torch.cat(pieces, 1)


def to_host(tensors: tuple[Tensor, ...], starts: tuple[Tensor, Tensor], most: tuple[int, int]) -> tuple[list, list]:
    """Check what a kernel takes; return it as `attend` does."""
    for x in tensors:
        require(x.dtype in HALVES and x.device.type == NAME and x.stride(-1) == 1, x.dtype, x.device, x.stride())
    for start, longest in zip(starts, most, strict=True):
        require(start.dtype == torch.int32 and start.device.type == NAME, start.dtype, start.device)
        require(start.diff().max() <= longest, longest)
    return [x.detach().cpu().float().transpose(0, 1) for x in tensors], [start.tolist() for start in starts]


def attention(q, k, v, starts_q, starts_k, most_q, most_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
              window_size_left=-1, window_size_right=-1, **given) -> tuple:
    require(not dropout_p and not any(x is not None for x in given.values()), given)
    with in_the_device():
        inputs, starts = to_host((q, k, v), (starts_q, starts_k), (most_q, most_k))
        out = attend(*inputs, *starts, is_causal or window_size_right == 0, scale, window_size_left).transpose(0, 1)
        unused = torch.zeros(q.shape[1], len(q), device=q.device)
        return out.to(q), unused, torch.zeros(2, dtype=torch.uint64, device=q.device), unused, unused


def attention_backward(grad, q, k, v, out, logsumexp, starts_q, starts_k, most_q, most_k, dropout_p, is_causal,
                       rng_state, unused, *, scale=None, window_size_left=-1, window_size_right=-1) -> tuple:
    with in_the_device():
        (grad_HTE, *inputs), starts = to_host((grad.contiguous(), q, k, v), (starts_q, starts_k), (most_q, most_k))

        def gradients() -> tuple[Tensor, ...]:
            given = [x.requires_grad_() for x in inputs]
            out = attend(*given, *starts, is_causal or window_size_right == 0, scale, window_size_left)
            return torch.autograd.grad(out, given, grad_HTE)

        made = THREAD.submit(gradients).result()  # below autograd this thread records nothing
        return tuple(x.transpose(0, 1).to(q) for x in made)


KERNELS = {"mm.dtype": product, "mm.dtype_out": product_out, "addmm.dtype": product_onto,
           "addmm.dtype_out": product_onto_out, "_flash_attention_forward": attention,
           "_flash_attention_backward": attention_backward}


# ---- what stands in for NCCL

class Both(td.ProcessGroup):
    """gloo for both sides: what lies on the device is sent by the host."""

    def __init__(self, store: td.Store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self.gloo = td.ProcessGroupGloo(store, rank, size, timeout)

    def call(self, name: str, outs: object, *given: object) -> td.Work:
        """Call gloo with the host's copies of tensors; copy those that it changes back."""
        def host(x):
            return x.detach().cpu() if isinstance(x, Tensor) else [*map(host, x)] if isinstance(x, list) else x

        def back(x, made) -> None:
            if isinstance(x, Tensor):
                x.detach().copy_(made)
            elif isinstance(x, list):
                for one, its in zip(x, made, strict=True):
                    back(one, its)

        with in_the_device():
            copies = host(outs)
            getattr(self.gloo, name)(copies, *map(host, given)).wait()
            back(outs, copies)
        done = torch.futures.Future()
        done.set_result(outs)
        return torch._C._distributed_c10d._create_work_from_future(done)

    def barrier(self, opts: td.BarrierOptions) -> td.Work:
        return self.gloo.barrier(opts)

    def getBackendName(self) -> str:
        return "both"

    @property
    def group_name(self) -> str:
        return td.distributed_c10d._world.pg_names[self]

    pg_name = group_name


def passed_on(name: str) -> Callable:
    return lambda self, outs, *given: self.call(name, outs, *given)


def one_by_one(name: str) -> Callable:
    return lambda self, outs, ins, options: [self.call(name, *pair) for pair in zip(outs, ins, strict=True)][-1]


for name in ("allreduce", "broadcast", "allgather", "gather", "scatter"):
    setattr(Both, name, passed_on(name))
Both.all_gather_single, Both.reduce_scatter_single = map(passed_on, ("_allgather_base", "_reduce_scatter_base"))
Both.allgather_into_tensor_coalesced = one_by_one("_allgather_base")  # functional collectives have these names
Both.reduce_scatter_tensor_coalesced = one_by_one("_reduce_scatter_base")


# ---- our files, with the device's name

class Renamed(importlib.machinery.SourceFileLoader):
    """Reads a file of ours as if its author had written the device's name; `swapped` puts a fault into one."""

    swapped: dict[Path, tuple[str, str]] = {}

    def path_stats(self, path):
        raise OSError  # so compiled code of before is not taken

    def source_to_code(self, data, path, **given):
        text, old, new = bytes(data).decode(), *self.swapped.get(Path(path), ("", ""))
        assert not old or text.count(old) == 1, (path, old)
        text = text.replace(old, new) if old else text
        text = text.replace('"cpu:gloo,cuda:nccl"', '"both"').replace('"cuda"', f'"{NAME}"')
        return super().source_to_code(text.replace("torch.cuda", f"torch.{NAME}"), path, **given)


def find_ours(folder: str) -> importlib.machinery.FileFinder:
    if not ours(Path(folder)):
        raise ImportError
    return importlib.machinery.FileFinder(folder, (Renamed, [".py"]))


def main() -> int:
    words = sys.argv[1:]
    while words[0] == "--swap":
        Renamed.swapped[ROOT / words[1]] = words[2], words[3]
        words = words[4:]
    open_device()
    sys.path_hooks.insert(0, find_ours)
    sys.path_importer_cache.clear()
    sys.path.insert(0, str(ROOT))
    sys.argv = [f"{words[0]}.py", *words[1:]]
    try:
        return importlib.import_module(words[0]).main()
    finally:
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps([[*key, count] for key, count in SEEN.most_common()]))


if __name__ == "__main__":
    sys.exit(main())
