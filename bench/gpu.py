"""How fast is each stage of a step on one CUDA device, on real shapes with random weights? On the CPU: the
same on a tiny shape.

    python bench/gpu.py                       # 0.5B and 1.5B, in bfloat16
    python bench/gpu.py --shapes 0.5B

Four tables per shape: the attention backends against each other, forward and backward of one packed row;
rollout by the embedded engine; the sync of weights into it, and into vLLM where that is installed; and the
update by row length and by completions kept of 16. MFU counts 6 FLOP per parameter and token that passes it
(the head: scored tokens only) and the causal attention, recomputation apart, against the device's dense
bfloat16 peak.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from shapes import engine_spec, random_model, write_config

import config
from config import Pack
from infra import dist
from infra.weights import Shape, read_shape
from learner import Learner
from memory import choose_backend, find_device
from metrics import Clock
from model import BACKENDS, Decoder
from prune import keep_largest
from records import Batch, EngineSpec, Group, Prompt, Sample, Segments
from rollout import start_engine
from update import minibatch, update

# Dense bfloat16 FLOP/s by a word of the device's name
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
TIMINGS, PROMPT = 5, 100


def timed(device: torch.device, work: Callable[[], object], times: int = TIMINGS) -> list[float]:
    """Measure the seconds of each repetition, sorted; the first, which also warms up, is left out."""
    seconds = []
    for _ in range(times + 1):
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return sorted(seconds[1:])


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else math.nan


def spread(seconds: list[float]) -> str:
    return f"{median(seconds):>9.4f} {seconds[0]:>9.4f} - {seconds[-1]:<9.4f}"


def flop(policy: Decoder, rows: list[Segments], scored: int) -> float:
    """Count the FLOP of forward and backward over rows, with `scored` tokens projected to logits."""
    shape = policy.shape
    segments = [pair for row in rows for pair in zip(row.queries, row.keys, strict=True)]
    met = sum(queries * (2 * keys - queries) / 2 for queries, keys in segments)
    attention = 12 * shape.layers * shape.heads * shape.head_dim * met
    head = shape.vocab_size * shape.hidden_size
    blocks = sum(p.numel() for p in policy.parameters()) - head * (1 if shape.tied else 2)
    return 6 * blocks * sum(queries for queries, _ in segments) + 6 * head * scored + attention


def attention(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> list[dict]:
    """Time one layer's attention over a row of sequences of unequal length, and compare the backends."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = [max(2, tokens // 64 * (i % 7 + 1)) for i in range(16)]
    segments = Segments.plain(lengths, device)

    def drawn(heads: int) -> torch.Tensor:
        x = torch.randn(sum(lengths), heads, shape.head_dim, device=device, dtype=dtype, generator=generator)
        return x.requires_grad_()

    q, k, v = drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads)
    results, rows = {}, []
    print(f"\nattention, {sum(lengths):,} tokens in 16 sequences of up to {max(lengths):,}\n"
          f"{'backend':<9} {'seconds':>9} {'min - max':>21} {'largest difference':>19}")
    for backend in BACKENDS:
        try:
            choose_backend(backend, device, dtype)
        except config.ConfigError as error:
            print(f"{backend:<9} {error}")
            continue
        attend = BACKENDS[backend](segments)

        def work(attend=attend, backend=backend) -> None:
            out = attend(0, q, k, v)
            results[backend] = [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

        seconds = timed(device, work)
        pairs = zip(results[backend], results["sdpa"], strict=True)
        difference = max(float((a - b).detach().float().abs().max()) for a, b in pairs)
        rows.append({"backend": backend, "seconds": seconds, "largest_difference": difference})
        print(f"{backend:<9} {spread(seconds)} {difference:>18.1e}")
    return rows


def rollout_and_sync(policy: Decoder, spec: EngineSpec, new: int) -> list[dict]:
    """Time the engines in turn: `new` tokens in each decoding slot, and the sync of weights."""
    prompts = [tuple(range(3, 3 + PROMPT)) for _ in range(spec.slots)]
    rows = []
    print(f"\nrollout of {len(prompts)} x {new} tokens, and sync of the weights\n"
          f"{'engine':<7} {'tokens/s':>9} {'sync s':>9} {'min - max':>21} {'GiB':>6}")
    for kind in ("torch", "vllm"):
        if kind == "vllm" and importlib.util.find_spec("vllm") is None:
            print("vllm    not installed here")
            continue
        forget_peak(spec.device)
        engine = start_engine(kind, spec)

        def generate(engine=engine) -> None:
            engine.generate(prompts, list(range(len(prompts))), new, 1.0)

        seconds = timed(spec.device, lambda engine=engine: engine.sync(policy))
        rate = median(len(prompts) * new / s for s in timed(spec.device, generate, times=2))
        gib = peak_gib(spec.device)
        rows.append({"engine": kind, "rate": rate, "sync": seconds, "gib": gib})
        print(f"{kind:<7} {rate:>9,.0f} {spread(seconds)} {gib:>6.1f}", flush=True)
        engine.sleep()
    return rows


def make_groups(count: int, longest: int, vocab: int) -> list[Group]:
    """Make groups of 16 completions of unequal length, at most `longest` tokens, behind prompts of 100."""
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int) -> Sample:
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        return Sample(ids, (-1.0,) * length, True)

    groups = []
    for n in range(count):
        lengths = torch.randint(longest // 20, longest + 1, (16,), generator=generator).tolist()
        prompt = Prompt(str(n), tuple(range(3, 3 + PROMPT)), "1")
        groups.append(Group(prompt, tuple(drawn(length) for length in lengths)))
    return groups


def make_learner(policy: Decoder, device: torch.device, dtype: torch.dtype, longest: int) -> Learner:
    """Make GRPO's learner of GSM8K without a reference, with one pass over each rollout."""
    cfg = config.load("grpo_gsm8k.yaml", [
        "update.epochs=1", "loss.kl=0", "optim.warmup_steps=0",
        f"data.max_prompt_tokens={PROMPT}", f"rollout.max_new_tokens={longest}"])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    return Learner(
        device=device,
        dtype=dtype,
        backend=choose_backend("auto", device, dtype),
        policy=policy,
        reference=None,
        optimizer=optimizer,
        loss=cfg.loss,
        update=cfg.update,
        optim=cfg.optim,
        pack=cfg.pack,
        temperature=cfg.rollout.temperature,
        max_new_tokens=longest,
        seed=cfg.seed,
        steps=cfg.steps,
    )


def updates(learner: Learner, groups: list[Group], sizes: tuple[int, ...], peak: float | None) -> list[dict]:
    """Time the update by capacity, with recomputation, and by completions kept of 16."""
    adv_NG = torch.randn(len(groups), 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    print(f"\nupdate on {len(groups)} x 16 completions of up to {learner.max_new_tokens} tokens, "
          "AdamW included\n"
          f"{'capacity':>8} {'keep':>5} {'blocks':>10} {'tokens':>8} {'rows':>5} {'seconds':>9} "
          f"{'min - max':>21} {'tokens/s':>9} {'MFU' if peak else 'TFLOP/s':>8} {'GiB':>6}")
    largest, places, rows = sizes[-1], list(range(len(groups))), []
    ways = [(size, 16, False) for size in sizes]
    ways += [(largest, 16, True)]
    ways += [(largest, keep, False) for keep in (8, 4, 2)]
    for capacity, keep, again in ways:
        pruned = keep_largest(adv_NG, keep, "group")
        batch = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, pruned, places, len(groups), seed=0)
        learner.policy.checkpoint_blocks = again
        row = {"capacity": capacity, "keep": keep, "recompute": again}
        try:
            rows.append(row | one_update(replace(learner, pack=Pack(capacity)), batch, peak))
        except torch.OutOfMemoryError:
            print(f"{capacity:>8} {keep:>5} out of memory")
            rows.append(row | {"seconds": None})
            break  # in the middle of a pass, so the policy cannot be used again
    learner.policy.checkpoint_blocks = False
    return rows


def one_update(learner: Learner, batch: Batch, peak: float | None) -> dict:
    """Time an update, and print its line."""
    measured: dict = {}

    def work() -> None:
        measured.update(update(learner, batch, 0, Clock()))

    forget_peak(learner.device)
    seconds = timed(learner.device, work, times=3)
    keep_NG = batch.pruned.keep_NG
    rows = [row.segments for row in learner.rows(minibatch(learner, batch, batch.places))]
    speed = flop(learner.policy, rows, measured["train/tokens"]) / median(seconds)
    row = {
        "tokens": measured["pack/tokens"],
        "rows": measured["pack/rows"],
        "seconds": seconds,
        "flop_s": speed,
        "mfu": speed / peak if peak else None,
        "gib": peak_gib(learner.device),
    }
    blocks = "recomputed" if learner.policy.checkpoint_blocks else "kept"
    rate = f"{speed / peak:.1%}" if peak else f"{speed / 1e12:.3f}"
    print(f"{learner.pack.capacity:>8} {int(keep_NG[0].sum()):>5} {blocks:>10} {row['tokens']:>8,} "
          f"{row['rows']:>5} {spread(seconds)} {row['tokens'] / median(seconds):>9,.0f} "
          f"{rate:>8} {row['gib']:>6.1f}", flush=True)
    return row


def measure(size: str, device: torch.device, dtype: torch.dtype, peak: float | None) -> dict:
    """Measure and print all tables of one shape."""
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(size, Path(temporary))
        shape, policy = read_shape(folder), random_model(folder, torch.float32, device)
        dist.shard(policy, policy.layers, device, dtype)
        print(f"\n== {size}: {sum(p.numel() for p in policy.parameters()) / 1e6:,.0f}M parameters")
        row_tokens, slots, new = (16384, 256, 256) if cuda else (256, 8, 16)
        compared = attention(shape, device, dtype, row_tokens)
        engines = rollout_and_sync(policy, engine_spec(folder, device, slots, PROMPT + new), new)
    count, longest, sizes = (8, 1024, (2048, 8192, 32768)) if cuda else (2, 60, (256, 1024))
    groups = make_groups(count, longest, min(400, shape.vocab_size))
    updated = updates(make_learner(policy, device, dtype, longest), groups, sizes, peak)
    return {"shape": size, "attention": compared, "rollout": engines, "update": updated}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="of bench/shapes.py, separated by commas (CUDA: 0.5B,1.5B; CPU: 1M)")
    args = parser.parse_args()
    device = dist.init(find_device("auto"))
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    peak = next((speed for word, speed in PEAK.items() if word in name), None)
    warning = ": NO CUDA DEVICE, so this only shows that the bench runs; its figures say nothing about a GPU"
    print(f"{name}, torch {torch.__version__}, {dtype}{'' if cuda else warning}")
    sizes = (args.shapes or ("0.5B,1.5B" if cuda else "1M")).split(",")
    if len(sizes) > 1:  # each in a process of its own: memory is its own, and vLLM starts once per process
        dist.close()
        commands = [[sys.executable, __file__, "--shapes", size] for size in sizes]
        sys.exit(max(subprocess.run(command).returncode for command in commands))
    result = measure(sizes[0], device, dtype, peak)
    print(json.dumps({"bench": "gpu", "device": name, "torch": torch.__version__} | result))
    dist.close()


if __name__ == "__main__":
    main()
