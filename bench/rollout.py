"""Tokens per second of TorchEngine, vLLM and transformers' generate, and what a weight sync costs.

    python bench/rollout.py [--shapes 1M,10M]    # and transformers, vLLM where they are installed
    .venv-vllm/bin/python bench/rollout.py       # after `make test-vllm`

Every engine answers the same prompts (16 of them, 16 times each) with exactly 64 tokens, sampled at
temperature 1 in float32 on the CPU and bfloat16 on CUDA. Each runs in a process of its own, in turns, so that
memory is its own and a drift of the machine meets all; the first generation of a process is not timed. Memory
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
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import resident
from shapes import engine_spec, random_model, write_config

from infra import dist
from records import EngineSpec
from rollout import start_engine

ROUNDS, TIMINGS, PROMPTS, COPIES, NEW, GIB = 3, 2, 16, 16, 64, 2**30
ENGINES = {"torch": None, "vllm": "vllm", "transformers": "transformers"}  # and the package each needs


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 80, (PROMPTS,), generator=generator).tolist()
    drawn = [tuple(torch.randint(3, 400, (n,), generator=generator).tolist()) for n in lengths]
    return [prompt for prompt in drawn for _ in range(COPIES)]


def generate(kind: str, shape: str) -> dict:
    """Measure, in a process of its own, the seconds of each timed generation, and memory in GiB."""
    device, asked = dist.init("auto"), prompts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(shape, Path(temporary))
        spec = engine_spec(folder, device, len(asked), max(map(len, asked)) + NEW)
        answer = by_transformers(spec, asked) if kind == "transformers" else by_engine(kind, spec, asked)
        seconds = []
        for turn in range(TIMINGS + 1):
            start = perf_counter()
            assert answer(turn) == len(asked) * NEW
            seconds.append(perf_counter() - start)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"seconds": seconds[1:], "gib": (total - free) / GIB}
    return {"seconds": seconds[1:], "gib": resident.peak() / GIB}


def by_engine(kind: str, spec: EngineSpec, asked: list[tuple[int, ...]]) -> Callable[[int], int]:
    """Make a function that answers all prompts by one of Winnow's engines and returns the tokens' number."""
    engine = start_engine(kind, spec)
    engine.sync(random_model(spec.folder, spec.dtype, spec.device))

    def answer(turn: int) -> int:
        seeds = [turn * len(asked) + i for i in range(len(asked))]
        return sum(len(s.ids) for s in engine.generate(asked, seeds, NEW, 1.0))

    return answer


def by_transformers(spec: EngineSpec, asked: list[tuple[int, ...]]) -> Callable[[int], int]:
    import transformers

    transformers.logging.set_verbosity_error()
    shape = transformers.AutoConfig.from_pretrained(spec.folder)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=spec.dtype).to(spec.device).eval()
    longest = max(map(len, asked))
    ids = torch.tensor([(0,) * (longest - len(p)) + p for p in asked], device=spec.device)
    mask = torch.tensor([(0,) * (longest - len(p)) + (1,) * len(p) for p in asked], device=spec.device)

    def answer(turn: int) -> int:
        torch.manual_seed(turn)
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
        return out[:, longest:].numel()

    return answer


def sync(kind: str, sharded: bool) -> dict:
    """Measure, in a process of its own, the seconds of a few syncs and their largest extra memory in GiB."""
    device = dist.init("auto")
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


def generations(shape: str, kinds: list[str]) -> list[dict]:
    """Measure tokens per second of each engine, in turns."""
    tokens = PROMPTS * COPIES * NEW
    runs = [{kind: child("generate", kind, shape) for kind in kinds} for _ in range(ROUNDS)]
    rows = []
    for kind in kinds:
        rates = sorted(tokens / s for run in runs for s in run[kind]["seconds"])
        row = {"shape": shape, "engine": kind, "rate": median(rates), "min": rates[0], "max": rates[-1],
               "gib": max(run[kind]["gib"] for run in runs)}
        rows.append(row)
        print(f"{shape:<6} {kind:<14} {row['rate']:>9,.0f} {row['min']:>8,.0f} - {row['max']:<6,.0f} "
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
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, kind, how = args.child
        measured = generate(kind, how) if what == "generate" else sync(kind, how == "FSDP2")
        if dist.rank() == 0:
            print(json.dumps(measured))
        dist.close()
        return
    installed = [kind for kind, package in ENGINES.items()
             if package is None or importlib.util.find_spec(package)]
    tokens = PROMPTS * COPIES * NEW
    print(f"{tokens:,} tokens; not installed here: {', '.join(set(ENGINES) - set(installed)) or 'none'}")
    print(f"{'shape':<6} {'engine':<14} {'tokens/s':>9} {'min - max':>17} {'GiB':>6}")
    rates = [row for shape in args.shapes.split(",") for row in generations(shape, installed)]
    print(f"\n{'sync of 0.5B':<14} {'policy':<7} {'seconds':>8} {'min - max':>14} {'extra GiB':>10} "
          f"{'largest tensor':>15}")
    synced = [row for kind in installed if kind != "transformers" for row in syncs(kind)]
    print(json.dumps({"bench": "rollout", "tokens": tokens, "generate": rates, "sync": synced}))


if __name__ == "__main__":
    main()
