"""What does training need at its peak? Bytes of the loss, dense and chunked, and of whole models.

    python bench/memory.py [--measure 10M 50M]
    python bench/memory.py --configs    # what the shipped configs choose and need on GPUs of 24 to 141 GB

First the loss over a vocabulary of 151,936, forward and backward: log-probs from all logits at once, as
`log_softmax` gives them, against the model's, which holds those of one chunk. The width is 64, so that a CPU
takes minutes; one line has that of Qwen2.5-0.5B, where the head's gradient counts too, and few tokens, on
which chunks do not depend. Dense, 16,384 tokens do not fit here, so that line is extrapolated from the two
sizes before it, and says so.

Then the peak of a training step by model and tokens per row, as preflight/memory counts it (`pass_bytes`, beside
weights, gradients and moments), and for the models of --measure beside the bytes that a step took here, in
float32. Each measurement runs in a process of its own, and is its peak resident memory above that before the
work.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from resident import peak
from shapes import CARDS, SHAPES, draw_weights, shape_of, write_config
from tqdm import tqdm

import config
from config import Config, Lora, Model, Optim
from infra import dist
from learner import make_optimizers, spread
from model import CALLS, ChunkedLogProb, empty_model, log_prob, logits_gradient, sdpa_padded
from preflight import fit
from preflight.counts import Pass, parameters, pass_bytes
from preflight.memory import Machine
from records import Segments

FREE = {gigabytes: fit.CARDS[card].gib for gigabytes, card in CARDS.items()}  # GB of a GPU -> free GiB
CPU, GIB, VOCAB, SEQUENCE, CHUNK = torch.device("cpu"), 2**30, 151_936, 1024, 1024


def loss(width: int, tokens: int, chunk: int | None) -> None:
    hidden_CD = torch.randn(tokens, width, requires_grad=True)
    head_VD = torch.randn(VOCAB, width, requires_grad=True)
    target_C = torch.randint(VOCAB, (tokens,))
    if chunk is None:
        logp_C = (hidden_CD @ head_VD.T).log_softmax(-1).gather(1, target_C[:, None])[:, 0]
    else:
        passes = log_prob, logits_gradient
        logp_C = ChunkedLogProb.apply(hidden_CD, head_VD, target_C, 1.0, chunk, passes)
    logp_C.mean().backward()


def step(shape: str, tokens: int, recomputed: str, rank: int | None = None) -> None:
    """Take two training steps on a row of sequences of SEQUENCE tokens, as train.py does."""
    dist.init("cpu")
    settings = Model("", checkpoint_blocks=recomputed, logp_chunk=CHUNK, lora=Lora(rank))
    with tempfile.TemporaryDirectory() as folder:
        model = empty_model(write_config(shape, Path(folder)), torch.float32)
    spread(model, model, settings, False, CPU, torch.float32)
    draw_weights(model)
    optimizer = make_optimizers(model, Optim(lr=1e-4))[0]
    ids_T = torch.randint(model.shape.vocab_size, (tokens,))
    place_T = torch.arange(tokens)
    attend = sdpa_padded(Segments.plain([SEQUENCE] * (tokens // SEQUENCE)))
    for _ in range(2):
        logp_C = model(ids_T, place_T % SEQUENCE, attend, place_T, ids_T, 1.0)
        logp_C.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_own_process(function: Callable, *arguments) -> int:
    """Measure the peak bytes of one call in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, function, *arguments).result()


def measured(function: Callable, *arguments) -> int:
    torch.set_num_threads(1)
    step("1M", SEQUENCE, "all")  # what any run loads
    before = peak()
    function(*arguments)
    return peak() - before


def losses() -> dict[str, int]:
    """Measure bytes by way and tokens; those of the last dense line are extrapolated, not measured."""
    sizes = {}
    for width, tokens, chunk in tqdm([(64, 2048, None), (64, 4096, None), (64, 16384, 1024),
                                      (64, 16384, 4096), (896, 2048, 1024)], "loss"):
        way = f"width {width}, " + ("dense" if chunk is None else f"chunks of {chunk}")
        sizes[way, tokens] = in_own_process(loss, width, tokens, chunk)
    small, large = sizes["width 64, dense", 2048], sizes["width 64, dense", 4096]
    dense = large + (large - small) * (16384 - 4096) // 2048
    sizes["width 64, dense, extended linearly", 16384] = dense
    print(f"{'loss at a vocabulary of ' + format(VOCAB, ','):<40} {'tokens':>7} {'GiB':>6} {'of dense':>9}")
    for (way, tokens), size in sizes.items():
        saving = f"1 / {dense / size:.1f}" if "chunks" in way else ""
        print(f"{way:<40} {tokens:>7,} {size / GIB:>6.2f} {saving:>9}", flush=True)
    return {f"{way} {tokens}": size for (way, tokens), size in sizes.items()}


def counted_and_measured(name: str, tokens: int, recomputed: str, rank: int | None) -> dict:
    """Compare the peak of a step in float32 on one rank, as `--fit` counts it and as measured here."""
    adapter = [] if rank is None else [f"model.lora.rank={rank}"]
    cfg = config.load("grpo_toy.yaml", [
        f"pack.capacity={tokens}", "model.dtype=float32", "model.attention=sdpa", f"model.logp_chunk={CHUNK}",
        f"model.checkpoint_blocks={recomputed}", *adapter])
    alone = replace(cfg, rollout=replace(cfg.rollout, group_size=1))  # sequences that share no prompt
    computed = sum(fit.try_on(alone, shape_of(name), Machine(CPU, 1e15, 1, "")).phases["update"].values())
    real = in_own_process(step, name, tokens, recomputed, rank)
    label = f"{name}{f', LoRA {rank}' if rank else ''}"
    print(f"{label:<16} {tokens:>7,} {recomputed:>10} {computed / GIB:>9.2f} {real / GIB:>9.2f} "
          f"{computed / real:>6.2f}", flush=True)
    return {"shape": name, "lora": rank, "tokens": tokens, "recompute": recomputed, "computed": computed,
            "measured": real}


def print_counts(name: str, ranks: int, recomputed: str) -> None:
    """Print a line of GiB in bfloat16 with CUDA's kernels."""
    shape = shape_of(name)
    cells = [(16 * parameters(shape) // ranks
              + pass_bytes(Pass(shape, tokens, tokens, 2, recomputed, CHUNK, fused=True))) / GIB
             for tokens in (4096, 16384, 65536)]
    label = f"{name}, {ranks} rank{'s' * (ranks > 1)}, recomputed: {recomputed}"
    print(f"{label:<40} " + " ".join(f"{cell:>8.1f}" for cell in cells))


def models(names: list[str]) -> list[dict]:
    print(f"\n{'float32, 1 rank':<16} {'tokens':>7} {'recompute':>10} {'computed':>9} {'measured':>9} "
          f"{'ratio':>6}")
    rows = []
    for name in names:
        for tokens in (2048, 8192):
            rows += [counted_and_measured(name, tokens, recompute, rank)
                     for rank in (None, 8) for recompute in CALLS]
    header = " ".join(f"{tokens:>8,}" for tokens in (4096, 16384, 65536))
    print(f"\n{'bfloat16, GiB on each rank, computed':<40} {header}")
    for name in ("0.5B", "1.5B", "7B"):
        for ranks in (1, 8):
            for recompute in CALLS:
                print_counts(name, ranks, recompute)
    return rows


def chosen_on(name: str, gib: float, ranks: int) -> tuple[Config, dict[str, float], bool]:
    """Choose what a shipped config leaves to auto on so many GPUs, count its GiB on each, and tell if it
    fits."""
    cfg = config.load(name)
    found = fit.try_on(cfg, shape_of(cfg.model.path), Machine(torch.device("cuda"), gib * GIB, ranks))
    return found.cfg, {phase: sum(parts.values()) / GIB for phase, parts in found.phases.items()}, found.fits


def fits_line(name: str) -> str:
    """Say on how many GPUs a shipped config fits, with the GiB of each; its head has this line. They are of
    80 GB; or for an adapter one, of 24 GB where it fits."""
    adapter = config.load(name).model.lora.rank is not None
    size, said = (24 if adapter and chosen_on(name, FREE[24], 1)[2] else 80), []
    for ranks in (1, 8, 16, 32, 64):
        cfg, peaks, fits = chosen_on(name, FREE[size], ranks)
        how = {"none": "", "selective": ", blocks recomputed in part", "all": ", blocks recomputed"}
        if fits:
            fewer = f", {cfg.rollout.slots} slots" * (cfg.rollout.slots < config.load(name).rollout.slots)
            rows = f", rows of {cfg.pack.capacity:,} tokens" * (config.load(name).pack.capacity == "auto")
            more = rows + fewer + how[cfg.model.checkpoint_blocks]
            said.append(f"{ranks} with {max(peaks.values()):.0f} GiB{more}")
        elif ranks <= 8:
            said.append(f"not {ranks}")
        if fits and (ranks >= 8 or adapter):
            break
    return f"# {size} GB GPUs (bench/memory.py --configs): {'; '.join(said)}."


def configs() -> list[dict]:
    """Print what is chosen for every config of published size, and its peaks in GiB on each GPU."""
    rows = []
    print(f"{'config':<24} {'GPUs':>10} {'engine':>7} {'slots':>5} {'row':>7} {'recomputed':>10} "
          f"{'update':>7} {'rollout':>7} fits")
    paths = (path for path in config.CONFIGS.glob("*.yaml") if not path.stem.endswith(("_toy", "_hard")))
    for name in sorted(path.name for path in paths):
        for ranks, size in ((1, 24), (1, 80), (8, 80), (1, 141)):
            cfg, peaks, fits = chosen_on(name, FREE[size], ranks)
            label = f"{ranks} x {size} GB"
            rows.append({"config": name, "gpus": label, "fits": fits, **peaks})
            print(f"{name:<24} {label:>10} {cfg.rollout.engine:>7} {cfg.rollout.slots:>5} "
                  f"{cfg.pack.capacity:>7,} {cfg.model.checkpoint_blocks:>10} "
                  f"{peaks['update']:>7.1f} {peaks['rollout']:>7.1f} {'yes' if fits else 'no'}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", default=["10M", "50M"], choices=SHAPES)
    parser.add_argument("--configs", action="store_true", help="only what the shipped configs need on GPUs")
    args = parser.parse_args()
    if args.configs:
        print(json.dumps({"bench": "memory", "configs": configs()}))
        return
    # Freed memory goes back at once: bytes in use, not the heap's holes.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    print(json.dumps({"bench": "memory", "loss": losses(), "models": models(args.measure)}))


if __name__ == "__main__":
    main()
