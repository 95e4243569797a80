"""The whole of a step on one CUDA device, on real shapes with random weights. On the CPU: the same, on a tiny shape.

    python bench/gpu.py                       # 0.5B and 1.5B, in bfloat16
    python bench/gpu.py --shapes 0.5B

Four tables per shape: the attention backends against each other, forward and backward of one packed row; rollout by the
embedded engine; the sync of weights into it, and into vLLM where that is installed; and the update by row length and by
completions kept of 16. MFU counts 6 FLOP per parameter and token that passes it (the head: scored tokens only) and
the causal attention, recomputation apart, against the device's dense bfloat16 peak.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from shapes import random_model, write_config

import config
import dist
import metrics
import update
from model import BACKENDS, Decoder, Shape, choose_backend, read_shape
from prune import keep_largest
from rollout import start_engine
from sample import Batch, Group, Prompt, Sample

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16 FLOP/s by part of the device's name
TIMINGS = 5


def timed(device: torch.device, work, times: int = TIMINGS) -> list[float]:
    """Seconds of each repetition, sorted; the first, which also warms up, is left out."""
    seconds = []
    for _ in range(times + 1):
        begun = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begun)
    return sorted(seconds[1:])


def spread(seconds: list[float]) -> str:
    return f"{median(seconds):>9.4f} {seconds[0]:>9.4f} - {seconds[-1]:<9.4f}"


def flop(shape: Shape, parameters: int, lengths: list[int], scored: int) -> float:
    """Of forward and backward over sequences of these lengths, `scored` of whose tokens are projected to logits."""
    attention = 12 * shape.layers * shape.heads * shape.head_dim * sum(n * n / 2 for n in lengths)
    head = shape.vocab_size * shape.hidden_size
    blocks = parameters - head * (1 if shape.tied else 2)
    return 6 * blocks * sum(lengths) + 6 * head * scored + attention


def attention(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> list[dict]:
    """One layer's attention over a row of sequences of unequal length, and how far the backends are apart."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = [max(2, tokens // 64 * (i % 7 + 1)) for i in range(16)]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    q, k, v = (torch.randn(sum(lengths), heads, shape.head_dim, device=device, dtype=dtype, generator=generator)
               .requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    found, rows = {}, []
    print(f"\nattention, {sum(lengths):,} tokens in 16 sequences of up to {max(lengths):,}\n"
          f"{'backend':<9} {'seconds':>9} {'min - max':>21} {'largest difference':>19}")
    for backend in BACKENDS:
        try:
            choose_backend(backend, device, dtype)
        except config.ConfigError as error:
            print(f"{backend:<9} {error}")
            continue
        attend = BACKENDS[backend](offsets, max(lengths))

        def work(attend=attend, backend=backend):
            out = attend(0, q, k, v)
            found[backend] = [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

        seconds = timed(device, work)
        pairs = zip(found[backend], found["sdpa"], strict=True)
        apart = max(float((a - b).detach().float().abs().max()) for a, b in pairs)
        rows.append({"backend": backend, "seconds": seconds, "largest_difference": apart})
        print(f"{backend:<9} {spread(seconds)} {apart:>18.1e}")
    return rows


def rollout_and_sync(folder: Path, policy: Decoder, device: torch.device, dtype: torch.dtype, new: int) -> list[dict]:
    prompts = [tuple(range(3, 103)) for _ in range(256 if device.type == "cuda" else 8)]
    rows = []
    print(f"\nrollout of {len(prompts)} x {new} tokens, and sync of the weights\n"
          f"{'engine':<7} {'tokens/s':>9} {'sync s':>9} {'min - max':>21} {'GiB':>6}")
    for kind in ("torch", "vllm"):
        if kind == "vllm" and importlib.util.find_spec("vllm") is None:
            print("vllm    not installed here")
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine = start_engine(kind, folder, dtype, device, choose_backend("auto", device, dtype), frozenset(),
                              len(prompts), 100 + new)
        seconds = timed(device, lambda engine=engine: engine.sync(policy))
        rates = [len(prompts) * new / s for s in timed(
            device, lambda engine=engine: engine.generate(prompts, list(range(len(prompts))), new, 1.0), times=2)]
        gib = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
        rows.append({"engine": kind, "rate": median(rates), "sync": seconds, "gib": gib})
        print(f"{kind:<7} {median(rates):>9,.0f} {spread(seconds)} {gib:>6.1f}", flush=True)
        engine.sleep()
    return rows


def make_groups(count: int, longest: int, vocab: int) -> list[Group]:
    """Groups of 16 completions of unequal length, the longest of them `longest` tokens, behind prompts of 100."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for n in range(count):
        lengths = torch.randint(longest // 20, longest + 1, (16,), generator=generator).tolist()
        samples = tuple(Sample(tuple(torch.randint(3, vocab, (length,), generator=generator).tolist()),
                               (-1.0,) * length, True) for length in lengths)
        groups.append(Group(Prompt(str(n), tuple(range(3, 103)), "1"), samples))
    return groups


def updates(policy: Decoder, device: torch.device, dtype: torch.dtype, peak: float | None) -> list[dict]:
    cuda = device.type == "cuda"
    count, longest, sizes = (8, 1024, (2048, 8192, 32768)) if cuda else (2, 60, (256, 1024))
    groups = make_groups(count, longest, min(400, policy.shape.vocab_size))
    adv_NG = torch.randn(count, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    parameters, rows = sum(p.numel() for p in policy.parameters()), []
    print(f"\nupdate on {count} x 16 completions of up to {longest} tokens, AdamW included\n"
          f"{'capacity':>8} {'keep':>5} {'blocks':>10} {'tokens':>8} {'rows':>5} {'seconds':>9} {'min - max':>21} "
          f"{'tokens/s':>9} {'MFU' if peak else 'TFLOP/s':>8} {'GiB':>6}")
    for capacity, keep, again in [(c, 16, False) for c in sizes] + [(sizes[-1], 16, True)] + [
            (sizes[-1], k, False) for k in (8, 4, 2)]:
        cfg = config.load("grpo_gsm8k.yaml", [
            f"pack.capacity={capacity}", f"rollout.prompts_per_step={count}", "update.epochs=1", "loss.kl=0",
            "data.max_prompt_tokens=100", f"rollout.max_new_tokens={longest}", "optim.warmup_steps=0"])
        learner = update.Learner(cfg, device, dtype, choose_backend("auto", device, dtype), policy, None, optimizer)
        policy.checkpoint_blocks = again
        batch = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, keep_largest(adv_NG, keep, "group"), list(range(count)),
                      count, seed=0)
        measured: dict = {}

        def work(learner=learner, batch=batch, measured=measured):
            measured |= update.update(learner, batch, 0, metrics.Clock())

        row = {"capacity": capacity, "keep": keep, "recompute": again}
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            seconds = timed(device, work, times=3)
        except torch.OutOfMemoryError:
            print(f"{capacity:>8} {keep:>5} out of memory")
            rows.append(row | {"seconds": None})
            break  # in the middle of a pass, so the policy cannot be used again
        kept = [100 + len(groups[n].samples[g].ids) for n, g in batch.pruned.keep_NG.nonzero().tolist()]
        speed = flop(policy.shape, parameters, kept, measured["train/tokens"]) / median(seconds)
        gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
        row |= {"tokens": measured["pack/tokens"], "rows": measured["pack/rows"], "seconds": seconds, "flop_s": speed,
                "mfu": speed / peak if peak else None, "gib": gib}
        rows.append(row)
        print(f"{capacity:>8} {keep:>5} {'recomputed' if again else 'kept':>10} {row['tokens']:>8,} {row['rows']:>5} "
              f"{spread(seconds)} {row['tokens'] / median(seconds):>9,.0f} "
              f"{f'{speed / peak:.1%}' if peak else f'{speed / 1e12:.3f}':>8} {gib:>6.1f}", flush=True)
    policy.checkpoint_blocks = False
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="of bench/shapes.py, separated by commas (CUDA: 0.5B,1.5B; CPU: 1M)")
    args = parser.parse_args()
    device = dist.init("auto")
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    peak = next((speed for part, speed in PEAK.items() if part in name), None)
    print(f"{name}, torch {torch.__version__}, {dtype}" + ("" if cuda else ": NO CUDA DEVICE, so this only shows that "
                                                           "the bench runs; its figures say nothing about a GPU"))
    sizes = (args.shapes or ("0.5B,1.5B" if cuda else "1M")).split(",")
    if len(sizes) > 1:  # each in a process of its own: memory is its own, and vLLM starts once per process
        dist.close()
        sys.exit(max(subprocess.run([sys.executable, __file__, "--shapes", size]).returncode for size in sizes))
    size, = sizes
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(size, Path(temporary))
        shape, policy = read_shape(folder), random_model(folder, torch.float32, device)
        dist.shard(policy, policy.layers, device, dtype)
        print(f"\n== {size}: {sum(p.numel() for p in policy.parameters()) / 1e6:,.0f}M parameters")
        result = {"shape": size, "attention": attention(shape, device, dtype, 16384 if cuda else 256),
                  "rollout": rollout_and_sync(folder, policy, device, dtype, 256 if cuda else 16),
                  "update": updates(policy, device, dtype, peak)}
    print(json.dumps({"bench": "gpu", "device": name, "torch": torch.__version__} | result))
    dist.close()


if __name__ == "__main__":
    main()
