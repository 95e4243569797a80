"""Tokens per second of TorchEngine, vLLM and transformers' generate, and what a weight sync costs.

    python bench/rollout.py [--shapes 1M,10M]    # and transformers, vLLM where they are installed
    .venv-vllm/bin/python bench/rollout.py       # after `make test-vllm`

Every engine answers the same prompts, 16 times each, sampled at temperature 1 in float32 on the CPU and
bfloat16 on CUDA, with 64 and with 256 slots. Lengths are given: fixed, 64 tokens in every slot; or tailed,
three samples a slot, one after another, of exponentially drawn lengths (64 tokens in the mean, 256 at most;
not for transformers, which takes one limit for all). Each engine runs in a process of its own, in turns, so
that memory is its own and a drift of the machine meets all; the first generation of each kind is not timed.
Tokens are counted by the second and by the CPU second, which other work on the machine disturbs less. Memory
is the process's peak (CUDA: the device's in use). The sync is that of a Qwen2.5-0.5B-shaped policy, whole on
one rank and sharded by FSDP2 over two; extra memory is rank 0's peak during the sync above what was in use
before it.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import resident
from shapes import engine_spec, random_model, write_config

from infra import dist
from preflight.memory import find_device
from records import EngineSpec
from rollout import start_engine

ROUNDS, TIMINGS, COPIES, NEW, GIB = 3, 2, 16, 64, 2**30
SLOTS, LENGTHS = (64, 256), ("fixed", "tailed")
Answer = Callable[[list[tuple[int, ...]], list[int], int], int]  # prompts, lengths, turn: tokens made
ENGINES = {"torch": None, "vllm": "vllm", "transformers": "transformers"}  # and the package each needs


def requests(slots: int, lengths: str) -> tuple[list[tuple[int, ...]], list[int]]:
    """Draw prompts, each COPIES times, and the number of tokens that each completion gets."""
    count = slots if lengths == "fixed" else 3 * slots
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(20, 80, (count // COPIES,), generator=generator).tolist()
    drawn = [tuple(torch.randint(3, 400, (n,), generator=generator).tolist()) for n in sizes]
    tokens = np.random.default_rng(0).exponential(NEW, count).astype(int) + 1
    limits = [NEW] * count if lengths == "fixed" else tokens.clip(max=4 * NEW).tolist()
    return [prompt for prompt in drawn for _ in range(COPIES)], limits


def generate(kind: str, shape: str, slots: int) -> dict:
    """Measure, in a process of its own, (seconds, CPU seconds) of generations, and memory in GiB."""
    device, measured = dist.init(find_device("auto")), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(shape, Path(temporary))
        longest = max(len(prompt) + limit for lengths in LENGTHS
                      for prompt, limit in zip(*requests(slots, lengths), strict=True))
        answer = START.get(kind, by_engine)(kind, engine_spec(folder, device, slots, longest))
        for lengths in LENGTHS[:1] if kind == "transformers" else LENGTHS:
            asked, limits = requests(slots, lengths)
            seconds = []
            for turn in range(TIMINGS + 1):
                start = perf_counter(), process_time()
                assert answer(asked, limits, turn) == sum(limits)
                seconds.append((perf_counter() - start[0], process_time() - start[1]))
            measured[lengths] = seconds[1:]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"seconds": measured, "gib": (total - free) / GIB}
    return {"seconds": measured, "gib": resident.peak() / GIB}


def by_engine(kind: str, spec: EngineSpec) -> Answer:
    """Make a function that answers all prompts by one of Winnow's engines and returns the tokens' number."""
    engine = start_engine(kind, spec)
    engine.sync(random_model(spec.folder, spec.dtype, spec.device))

    def answer(asked: list[tuple[int, ...]], limits: list[int], turn: int) -> int:
        seeds = [turn * len(asked) + i for i in range(len(asked))]
        return sum(len(s.ids) for s in engine.generate(asked, seeds, limits, 1.0))

    return answer


def by_transformers(kind: str, spec: EngineSpec) -> Answer:
    """Make a function that answers all prompts by transformers' generate, with the first limit for all."""
    import transformers

    transformers.logging.set_verbosity_error()
    shape = transformers.AutoConfig.from_pretrained(spec.folder)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=spec.dtype).to(spec.device).eval()

    def answer(asked: list[tuple[int, ...]], limits: list[int], turn: int) -> int:
        longest = max(map(len, asked))
        ids = torch.tensor([(0,) * (longest - len(p)) + p for p in asked], device=spec.device)
        mask = torch.tensor([(0,) * (longest - len(p)) + (1,) * len(p) for p in asked], device=spec.device)
        torch.manual_seed(turn)
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=limits[0], min_new_tokens=limits[0], eos_token_id=None, pad_token_id=0)
        return out[:, longest:].numel()

    return answer


START = {"transformers": by_transformers}  # the other engines are Winnow's


def sync(kind: str, sharded: bool) -> dict:
    """Measure, in a process of its own, the seconds of a few syncs and their largest extra memory in GiB."""
    device = dist.init(find_device("auto"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config("0.5B", Path(temporary))
        policy = random_model(folder, torch.float32, device)
        engine = start_engine(kind, engine_spec(folder, device, 4, 256))
        largest = max(p.numel() for p in policy.parameters()) * 4 / GIB
        if sharded:
            dist.shard(policy, policy.layers, device, torch.float32)
        engine.sync(policy)
        measured = [one_sync(engine, policy, device) for _ in range(TIMINGS)]
    return {"seconds": [seconds for seconds, _ in measured],
            "extra": max(extra for _, extra in measured) / GIB, "largest": largest}


def one_sync(engine, policy, device: torch.device) -> tuple[float, int]:
    """Measure (seconds, bytes at the peak above those before) of a sync."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        resident.forget_peak()
    before = torch.cuda.memory_allocated(device) if cuda else resident.resident()
    start = perf_counter()
    engine.sync(policy)
    if cuda:
        torch.cuda.synchronize()
    seconds = perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) if cuda else resident.peak()
    return seconds, peak - before


def child(*arguments: str, ranks: int = 1) -> dict:
    """Run this script with these arguments in processes of its own, and return what it measures."""
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks)]
    launcher = torchrun if ranks > 1 else [sys.executable]
    command = [*launcher, __file__, "--child", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    if process.returncode:
        sys.exit(f"{arguments} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def generations(shape: str, slots: int, kinds: list[str]) -> list[dict]:
    """Measure tokens per second of each engine, in turns."""
    runs = [{kind: child("generate", kind, shape, str(slots)) for kind in kinds} for _ in range(ROUNDS)]
    rows = []
    for lengths in LENGTHS:
        tokens = sum(requests(slots, lengths)[1])
        for kind in (kind for kind in kinds if lengths in runs[0][kind]["seconds"]):
            seconds = [pair for run in runs for pair in run[kind]["seconds"][lengths]]
            rates, by_cpu = (sorted(tokens / s for s in clock) for clock in zip(*seconds, strict=True))
            row = {"shape": shape, "slots": slots, "lengths": lengths, "engine": kind, "tokens": tokens,
                   "rate": median(rates), "min": rates[0], "max": rates[-1], "rate_cpu": median(by_cpu),
                   "min_cpu": by_cpu[0], "max_cpu": by_cpu[-1], "gib": max(run[kind]["gib"] for run in runs)}
            rows.append(row)
            print(f"{shape:<6} {slots:>5} {lengths:<8} {kind:<14} {row['rate']:>9,.0f} {rates[0]:>8,.0f} - "
                  f"{rates[-1]:<8,.0f} {row['rate_cpu']:>9,.0f} {by_cpu[0]:>8,.0f} - {by_cpu[-1]:<8,.0f} "
                  f"{row['gib']:>6.2f}", flush=True)
    return rows


def syncs(kind: str) -> list[dict]:
    """Measure a sync from a policy on one rank, and from a sharded one."""
    rows = []
    for how, ranks in (("plain", 1), ("FSDP2", 2)):
        measured = child("sync", kind, how, ranks=ranks)
        seconds = sorted(measured["seconds"])
        rows.append({"engine": kind, "policy": how} | measured)
        print(f"{kind:<14} {how:<7} {median(seconds):>8.3f} {seconds[0]:>6.3f} - {seconds[-1]:.3f} "
              f"{measured['extra']:>10.2f} {measured['largest']:>15.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1M,10M", help="of bench/shapes.py, separated by commas")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _, kind, how, *slots = args.child  # slots: it generates; none: it syncs
        measured = generate(kind, how, *map(int, slots)) if slots else sync(kind, how == "FSDP2")
        if dist.rank() == 0:
            print(json.dumps(measured))
        dist.close()
        return
    installed = [kind for kind, package in ENGINES.items()
             if package is None or importlib.util.find_spec(package)]
    print(f"not installed here: {', '.join(set(ENGINES) - set(installed)) or 'none'}")
    print(f"{'shape':<6} {'slots':>5} {'lengths':<8} {'engine':<14} {'tokens/s':>9} {'min - max':>19} "
          f"{'by CPU s':>9} {'min - max':>19} {'GiB':>6}")
    rates = [row for shape in args.shapes.split(",") for slots in SLOTS
             for row in generations(shape, slots, installed)]
    print(f"\n{'sync of 0.5B':<14} {'policy':<7} {'seconds':>8} {'min - max':>14} {'extra GiB':>10} "
          f"{'largest tensor':>15}")
    synced = [row for kind in installed if kind != "transformers" for row in syncs(kind)]
    print(json.dumps({"bench": "rollout", "generate": rates, "sync": synced}))


if __name__ == "__main__":
    main()
