"""Trace an update on a device that does not exist, at real shapes: on torch's CPU wheel, in seconds.

    python tests/fake_gpu.py --shape 1.5B
    python tests/fake_gpu.py --shape 7B --ranks 1 --set model.checkpoint_blocks=all --set optim.offload=true

The host's tensors are real and the device's are fake: they have shape, dtype and device but no values. So every op's
rules are checked, and the host cannot get a value unseen. The learner, the batch and `update.update` are those of a
run, in bfloat16, on the first rank of a process group that sends nothing. Each rank gets one row of 16,380 tokens.
Traces of one layer and of all differ by layers alone, which gives the backward pass of one layer. Prints JSON. It is a
process of its own, because nothing can take back the device and the group.

A kernel is an op on the device that is no view; norms and SiLU are one as on CUDA, and logsumexp is four.

Dimension key:  N groups per step,  G completions per group,  C completion tokens of one packed row.
"""

import argparse
import inspect
import json
import linecache
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent / "bench"))  # behind the root: one of its files has a name of ours

import shapes
from conftest import ROOT, as_batch, make_groups

import config
import learner
import loss
import policy as policy_file
import update
from infra import dist
from metrics import Clock, PassSums
from model import Block, ChunkedLogProb, Decoder
from prune import keep_all
from records import Row
from settings import leaves

DEVICE = "fakegpu"
# And else grpo_gsm8k.yaml's, a KL among them.
SETTINGS = ["model.dtype=bfloat16", "model.attention=varlen", "model.checkpoint_blocks=none", "update.epochs=1",
            "pack.capacity=16384"]
PROMPT, COMPLETIONS, GROUPS = 180, range(270, 391, 8), 3  # tokens, and groups to a row of at most 16,384
OURS = {str(path): path.name for pattern in ("*.py", "*/*.py") for path in ROOT.glob(pattern)}
# The first of these that is being called names the phase of an op; backward is one of its own.
PHASES = {inspect.unwrap(function).__code__: name for function, name in (
    (learner.Learner.rows, "pack"), (update.prepare_rows, "reference"), (learner.Learner.outputs, "forward"),
    (update.add_gradient, "loss"), (PassSums.add, "metrics"), (learner.optimizer_step, "descend"),
    (PassSums.metrics, "metrics of the step"))}
PART_OF = {Block.forward.__code__: "layers", ChunkedLogProb.forward.__code__: "head"}
FUSED = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")  # one op on CUDA, elsewhere many
LARGE = 2**27  # bytes of a result
VALUES_ASKED_FOR = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
LIBRARY = torch.library.Library("aten", "IMPL")  # forgets its ops when it is collected


def open_device(ranks: int) -> None:
    """Make the device known to torch, and open a process group that sends nothing."""
    module = MagicMock()  # streams, events and all else that a device has: nothing happens there
    module.is_available.return_value = module.is_initialized.return_value = True
    module._is_in_bad_fork.return_value = False
    module.current_device.return_value, module.device_count.return_value = 0, ranks
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=module)
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device) is a copy which the trace sees
    for name in FUSED:
        LIBRARY.impl(name, lambda *args: None, "PrivateUse1")  # never called: with a kernel they are not taken apart
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def tensors(tree) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from tensors(branch)


def work_of(func, args: tuple, out) -> Counter:
    """Count kernels, bytes and FLOP of one op; attention's FLOP are for one pair of a query and a key that meet."""
    name, given = func._schema.name.split("::")[1], list(tensors(args))
    if func.is_view or name == "_unsafe_view" or name.startswith(("empty", "new_empty")):
        return Counter()
    if func.namespace == "torch_attn":  # queries [T, H, E] or their gradient are its first argument
        return Counter(kernels=1, pair_flop=(8 if "backward" in name else 4) * given[0].shape[1:].numel())
    if func._overloadpacket in flop_registry:
        flop = flop_registry[func._overloadpacket](*given, out_val=out)
        return Counter({"kernels": 1, "flop": flop, f"flop in {given[-1].dtype}": flop})
    return Counter(kernels=4 if name == "logsumexp" else 1)


def where() -> tuple[str, str, str]:
    """Tell the phase, the part ("rest": autograd's own functions) and the source line of the op that is dispatched."""
    part, line, codes, frame = None, None, set(), sys._getframe(2)
    while frame:
        code, number, frame = frame.f_code, frame.f_lineno, frame.f_back
        codes.add(code)
        part = part or ("fsdp" if "_fully_shard" in code.co_filename else PART_OF.get(code))
        if line is None and code.co_filename in OURS:
            line = f"{OURS[code.co_filename]}:{number} {linecache.getline(code.co_filename, number).strip()}"
    if torch._C._current_graph_task_id() != -1:
        if line is None:
            return "backward", part or "rest", part or torch._C._current_autograd_node().name()
        return "backward", {"layers": "recomputed", None: "head"}.get(part, part), line
    phase = next((name for code, name in PHASES.items() if code in codes), "update")
    return phase, part or "rest", "fsdp" if part == "fsdp" else line


class Device(TorchDispatchMode):
    """Run on fake tensors what concerns the device, and count it."""

    def __init__(self):
        super().__init__()
        self.fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self.work: defaultdict[tuple[str, str], Counter] = defaultdict(Counter)  # of each phase and part
        self.waits: Counter[tuple[str, str, str]] = Counter()  # (sync, to host or to device; phase; source line)
        self.held = WeakIdKeyDictionary(ref_type=WeakIdRef)  # storages that are alive on the device
        self.peak = 0  # most bytes of these

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if DTensor in types:
            return NotImplemented  # it comes back with its shard
        given = [*tensors(args), *tensors([*kwargs.values()])]
        wanted = torch.device(kwargs.get("device") or "cpu").type
        made = wanted == DEVICE or "device" in kwargs and wanted == "cpu" and any(x.is_meta for x in given)
        if not made and not any(isinstance(x, fake_tensor.FakeTensor) for x in given):
            return func(*args, **kwargs)
        name, (phase, part, line) = func._schema.name, where()
        copies, sizeable = "copy" in name, {x.device.type for x in given if x.dim()}
        assert copies or len(sizeable - {"meta"}) < 2, f"{func} takes tensors of host and device: {line}"
        asked = "index_put" in name and args[2].numel() > 1 and any(x.dtype is torch.bool for x in tensors(args[1]))
        try:
            out = self.run(func, args, kwargs)
        except VALUES_ASKED_FOR:
            out, asked = self.run_on_ones(func, args, kwargs), True
        before, after = ({x.device.type for x in side} for side in (given, tensors(out)))
        if DEVICE in before | after:
            work = work_of(func, args, out)
            self.work[phase, part] += work
            made = [x for x in tensors(out) if x.device.type == DEVICE]
            self.held |= {x.untyped_storage(): True for x in made}
            # After every op it would take minutes.
            if phase in ("forward", "backward") and ("flop" in work or sum(x.nbytes for x in made) >= LARGE):
                self.peak = max(self.peak, sum(storage.nbytes() for storage in self.held))
            self.waits["sync", phase, line] += asked
            if copies and len(before | after) > 1:
                self.waits["to device" if DEVICE in after else "to host", phase, line] += 1
        return out

    def run(self, func, args: tuple, kwargs: dict):
        """Run an op on shapes alone. The host's tensors that it takes lose their values."""
        if any(type(x) is Tensor and x.device.type == "cpu" for x in tensors(args)):
            args = tree_map_only(Tensor, lambda x: self.fake.from_tensor(x) if type(x) is Tensor else x, args)
        with self.fake:
            return func(*args, **kwargs)

    def run_on_ones(self, func, args: tuple, kwargs: dict):
        """Run an op for whose result the host has to know values: as if they were all 1."""
        args = tree_map_only(Tensor, lambda x: torch.ones(x.shape, dtype=x.dtype), args)
        out = func(*args, **kwargs)
        with self.fake:
            return tree_map_only(Tensor, lambda x: self.fake.from_tensor(x).to(DEVICE), out)


@dataclass
class Trace:
    """What one update did."""

    device: Device
    policy: Decoder | None = None
    rows: list[Row] = field(default_factory=list)    # of each pass
    log_probs: set[str] = field(default_factory=set)  # what they were in
    unlike: list[str] = field(default_factory=list)  # parameters whose gradient has other traits

    def mean(self, name: str, *places: tuple[str, str]) -> float:
        """Add up the work of these phases and parts, and divide it by the passes."""
        return sum(self.device.work[place][name] for place in places) / len(self.rows)


def traits(x: Tensor | None) -> tuple | None:
    if x is None:
        return None
    mine = dist.local_shard(x)
    return isinstance(x, DTensor), x.shape, x.dtype, mine.shape, mine.device


def require_sync(policy: Decoder) -> None:
    """An engine gets every weight whole and in halves, adapters merged. What that takes is no part of an update."""
    whole = {name: tuple(p.shape) for name, p in policy.named_hf_tensors(merged=False)}
    synced = ((name, dist.gather_full(t, None, torch.bfloat16)) for name, t in policy.named_hf_tensors())
    assert all((t.dtype, tuple(t.shape)) == (torch.bfloat16, whole.pop(name)) for name, t in synced) and not whole


def trace_update(folder: Path, cfg: config.Config, spoil: bool) -> Trace:
    """Trace one update. `spoil` puts a sync into the loss."""
    from leaves.lora import join as lora
    count, trace, fully_shard = GROUPS * dist.world_size(), Trace(Device()), dist.fully_shard
    groups = make_groups([[*COMPLETIONS]] * count, [PROMPT] * count)
    adv_NG = torch.randn(count, len(COMPLETIONS), dtype=torch.float64)

    def row_loss(logp_C, prepared, *given):
        trace.rows.append(prepared.row)
        trace.log_probs.add(f"{logp_C.dtype} on {logp_C.device.type}")
        terms = loss.row_loss(logp_C, prepared, *given)
        return replace(terms, loss=terms.loss * terms.loss.item()) if spoil else terms

    def descend(model, *given):
        trace.unlike += [name for name, p in model.named_parameters()
                         if traits(p.grad) != (traits(p) if p.requires_grad else None)]
        return learner.optimizer_step(model, *given)

    def offloaded(module, **given):  # dist.shard offloads from CUDA only, and here no memory can be pinned
        return fully_shard(module, **given | {"offload_policy": CPUOffloadPolicy(pin_memory=False)})

    given = leaves.through("weights", cfg, policy_file.Weights())
    with (trace.device, patch.object(lora.Adapters, "fill"), patch.object(policy_file, "load_weights"),
          patch.object(update, "row_loss", row_loss),
          patch.object(update, "optimizer_step", descend),
          patch.object(dist, "fully_shard", offloaded if cfg.optim.offload else fully_shard)):
        built = learner.build_learner(cfg, folder, torch.device(DEVICE, 0), given)
        trace.policy = built.policy
        update.update(built, as_batch(groups, adv_NG, keep_all(adv_NG)), 0, Clock())
        require_sync(built.policy)
    return trace


PHASES[require_sync.__code__] = "sync"


def figures(cfg: config.Config, one: Trace, whole: Trace) -> dict:
    """Compute what is printed and the tests read, for one row, from traces of one layer and of all."""
    from leaves.fit import counts
    rows, policy, layers, autograd = whole.rows, whole.policy, whole.policy.shape.layers, ("backward", "rest")
    scored = sum(len(row.target_C) for row in rows) / len(rows)
    chunks = sum(-(-len(row.target_C) // policy.logp_chunk) for row in rows) / len(rows)
    pairs = [pair for row in rows for pair in zip(row.segments.queries, row.segments.keys, strict=True)]
    met = sum(queries * (2 * keys - queries) / 2 for queries, keys in pairs) / len(rows)

    def flop(*places: tuple[str, str]) -> float:
        return whole.mean("flop", *places) + met * whole.mean("pair_flop", *places)

    def work(name: str) -> dict[str, float]:
        more = whole.mean(name, autograd) - one.mean(name, autograd)
        return {"layer, forward": whole.mean(name, ("forward", "layers")) / layers,
                "layer, backward": more / (layers - 1),
                "layer, recomputed": whole.mean(name, ("backward", "recomputed")) / layers,
                "head, forward": whole.mean(name, ("forward", "head")) / chunks,
                "head, backward": whole.mean(name, ("backward", "head")) / chunks}

    head, head_backward, of_layers = flop(("forward", "head")), flop(("backward", "head")), flop(("forward", "layers"))
    gradients = head * (2 if policy.head_VD.requires_grad else 1)  # of the head: one product, and one for its own
    products = {name for place, work in whole.device.work.items() for name in work
                if name.startswith("flop in ") and place[0] != "sync"}
    row = counts.row_parts(cfg, policy.shape, len(rows[0].ids_T), len(rows[0].segments.key_K))
    return {
        "layers": layers, "ranks": dist.world_size(), "passes": len(rows), "tokens": len(rows[0].ids_T),
        "waits": [[*place, count] for place, count in whole.device.waits.items() if count and place[1] != "sync"],
        "log_probs": [*whole.log_probs], "unlike": whole.unlike, "products": sorted(products),
        "kernels": work("kernels"),
        # What the head's backward pass has more than its gradients is its forward pass again.
        "flop": of_layers + flop(autograd) + head + min(head_backward, gradients),
        "formula": shapes.flop(policy, [row.segments for row in rows], scored * len(rows)) / len(rows),
        "peak": whole.device.peak,
        "counted": sum((counts.phases(cfg, policy.shape, dist.world_size())["update"] | row).values()),
        "again": {"head": (head_backward - gradients) / head, "layers": flop(("backward", "recomputed")) / of_layers}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5B", choices=shapes.SHAPES, help="of bench/shapes.py (default: 1.5B)")
    parser.add_argument("--layers", type=int, help="in place of the shape's; at least 2")
    parser.add_argument("--ranks", type=int, default=8, help="of which this is the first (default: 8)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as train.py takes it")
    parser.add_argument("--spoil", action="store_true", help="ask for the value of each row's loss: a sync")
    args = parser.parse_args()
    open_device(args.ranks)
    cfg = config.load("grpo_gsm8k.yaml", [f"rollout.prompts_per_step={GROUPS * args.ranks}", *SETTINGS, *args.set])
    traces, sizes = [], shapes.SHAPES[args.shape]
    for layers in (1, args.layers or sizes[2]):
        shapes.SHAPES[args.shape] = (*sizes[:2], layers, *sizes[3:])
        with tempfile.TemporaryDirectory() as folder:
            traces.append(trace_update(shapes.write_config(args.shape, Path(folder)), cfg, args.spoil))
    print(json.dumps({"shape": args.shape} | figures(cfg, *traces), indent=1))


if __name__ == "__main__":
    main()
