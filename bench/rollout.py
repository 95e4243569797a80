"""Tokens per second of TorchEngine, vLLM and transformers' generate, and what a weight sync costs.

    python bench/rollout.py              # vLLM where it is installed (`.venv-vllm` after `make test-vllm`)

Every engine answers the same prompts (16 of them, 16 times each) with exactly 64 tokens, sampled at temperature 1 in
float32 on the CPU and bfloat16 on CUDA. Each runs in a process of its own, in turns, so that memory is its own and a
drift of the machine meets all; the first generation of a process is not timed. Memory is the process's peak (CUDA: the
device's in use). The sync is that of a Qwen2.5-0.5B-shaped policy, whole on one rank and sharded by FSDP2 over two;
extra memory is rank 0's peak during the sync above what was in use before it.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from shapes import random_model, write_config

import dist
from model import choose_backend
from rollout import start_engine

ROUNDS, TIMINGS, PROMPTS, COPIES, NEW = 3, 2, 16, 16, 64
ENGINES = {"torch": None, "vllm": "vllm", "transformers": "transformers"}  # and the package each needs


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 80, (PROMPTS,), generator=generator).tolist()
    return [tuple(torch.randint(3, 400, (n,), generator=generator).tolist()) for n in lengths for _ in range(COPIES)]


def peak(device: torch.device) -> float:
    """GiB: of this process so far, or in use on the device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**30
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def in_use(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 2**20


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def generate(kind: str, shape: str) -> dict:
    """In a process of its own: seconds of each timed generation, and memory."""
    device = dist.init("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wanted = prompts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(shape, Path(temporary))
        if kind == "transformers":
            answer = by_transformers(folder, dtype, device, wanted)
        else:
            engine = start_engine(kind, folder, dtype, device, choose_backend("auto", device, dtype), frozenset(),
                                  len(wanted), max(map(len, wanted)) + NEW)
            engine.sync(random_model(folder, dtype, device))

            def answer(turn: int) -> int:
                seeds = [turn * len(wanted) + i for i in range(len(wanted))]
                return sum(len(s.ids) for s in engine.generate(wanted, seeds, NEW, 1.0))

        seconds = []
        for turn in range(TIMINGS + 1):
            begun = perf_counter()
            assert answer(turn) == len(wanted) * NEW
            seconds.append(perf_counter() - begun)
    return {"seconds": seconds[1:], "gib": peak(device)}


def by_transformers(folder: Path, dtype: torch.dtype, device: torch.device, wanted: list[tuple[int, ...]]):
    import transformers

    transformers.logging.set_verbosity_error()
    shape = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype).to(device).eval()
    longest = max(map(len, wanted))
    ids = torch.tensor([(0,) * (longest - len(p)) + p for p in wanted], device=device)
    mask = torch.tensor([(0,) * (longest - len(p)) + (1,) * len(p) for p in wanted], device=device)

    def answer(turn: int) -> int:
        torch.manual_seed(turn)
        out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                             max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
        return out[:, longest:].numel()

    return answer


def sync(kind: str, sharded: bool) -> dict:
    """In a process of its own: seconds of a few syncs, and the largest extra memory of one."""
    device = dist.init("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config("0.5B", Path(temporary))
        policy = random_model(folder, torch.float32, device)
        engine = start_engine(kind, folder, dtype, device, choose_backend("auto", device, dtype), frozenset(), 4, 256)
        largest = max(p.numel() for p in policy.parameters()) * 4 / 2**30
        if sharded:
            dist.shard(policy, policy.layers, device, torch.float32)
        engine.sync(policy)
        seconds, extra = [], []
        for _ in range(TIMINGS):
            rest = in_use(device)
            forget_peak(device)
            begun = perf_counter()
            engine.sync(policy)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(perf_counter() - begun)
            top = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else peak(device)
            extra.append(top - rest)
    return {"seconds": seconds, "extra": max(extra), "largest": largest}


def child(*arguments: str, ranks: int = 1) -> dict:
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks)]
    launcher = torchrun if ranks > 1 else [sys.executable]
    done = subprocess.run([*launcher, __file__, *arguments], capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{arguments} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1M,10M", help="of bench/shapes.py, separated by commas")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, *rest = args.child
        found = generate(*rest) if what == "generate" else sync(rest[0], rest[1] == "FSDP2")
        if dist.rank() == 0:
            print(json.dumps(found))
        dist.close()
        return
    there = [kind for kind, package in ENGINES.items() if package is None or importlib.util.find_spec(package)]
    tokens = PROMPTS * COPIES * NEW
    results: dict[str, list] = {"generate": [], "sync": []}
    print(f"{tokens:,} tokens; not installed here: {', '.join(set(ENGINES) - set(there)) or 'none'}")
    print(f"{'shape':<6} {'engine':<14} {'tokens/s':>9} {'min - max':>17} {'GiB':>6}")
    for shape in args.shapes.split(","):
        runs = [{kind: child("--child", "generate", kind, shape) for kind in there} for _ in range(ROUNDS)]
        for kind in there:
            rates = sorted(tokens / s for run in runs for s in run[kind]["seconds"])
            row = {"shape": shape, "engine": kind, "rate": median(rates), "min": rates[0], "max": rates[-1],
                   "gib": max(run[kind]["gib"] for run in runs)}
            results["generate"].append(row)
            print(f"{shape:<6} {kind:<14} {row['rate']:>9,.0f} {row['min']:>8,.0f} - {row['max']:<6,.0f} "
                  f"{row['gib']:>6.2f}", flush=True)
    print(f"\n{'sync of 0.5B':<14} {'policy':<7} {'seconds':>8} {'min - max':>14} {'extra GiB':>10} "
          f"{'largest tensor':>15}")
    for kind in (kind for kind in there if kind != "transformers"):
        for how in ("plain", "FSDP2"):
            found = child("--child", "sync", kind, how, ranks=1 if how == "plain" else 2)
            s = sorted(found["seconds"])
            results["sync"].append({"engine": kind, "policy": how} | found)
            print(f"{kind:<14} {how:<7} {median(s):>8.3f} {s[0]:>6.3f} - {s[-1]:.3f} {found['extra']:>10.2f} "
                  f"{found['largest']:>15.2f}", flush=True)
    print(json.dumps({"bench": "rollout", "tokens": tokens} | results))


if __name__ == "__main__":
    main()
