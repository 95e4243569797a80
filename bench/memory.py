"""What does training need at its peak? Bytes of the loss, dense and chunked, and of whole models.

    python bench/memory.py [--measure 10M 50M]

First the loss over a vocabulary of 151,936, forward and backward: log-probs from all logits at once, as `log_softmax`
gives them, against the model's, which holds those of one chunk. The width is 64, so that a CPU has done in minutes; one
line has that of Qwen2.5-0.5B, where the head's gradient counts too, and few tokens, on which chunks do not depend.
Dense, 16,384 tokens do not fit here, so that line is extended from the two sizes before it, and marked so.

Then the peak of a training step by model and tokens per row, by the count of `peak_bytes`, and for the models of
--measure beside what one step took here, in float32. Each measurement runs in a process of its own, whose peak resident
memory above that before the work is taken.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from shapes import SHAPES, random_model, write_config
from tqdm import tqdm

import dist
from config import Optim
from model import ChunkedLogProb, Shape, empty_model, read_shape, sdpa_padded
from train import adam

GIB, VOCAB, SEQUENCE, CHUNK = 2**30, 151_936, 1024, 1024


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def loss(width: int, tokens: int, chunk: int | None) -> None:
    hidden_CD = torch.randn(tokens, width, requires_grad=True)
    head_VD = torch.randn(VOCAB, width, requires_grad=True)
    target_C = torch.randint(VOCAB, (tokens,))
    if chunk is None:
        logp_C = (hidden_CD @ head_VD.T).log_softmax(-1).gather(1, target_C[:, None])[:, 0]
    else:
        logp_C = ChunkedLogProb.apply(hidden_CD, head_VD, target_C, 1.0, chunk)
    logp_C.mean().backward()


def step(shape: str, tokens: int, recompute: bool) -> None:
    """One training step on a row of sequences of SEQUENCE tokens, as train.py makes it."""
    dist.init("cpu")
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(write_config(shape, Path(folder)), torch.float32, torch.device("cpu"))
    dist.shard(model, model.layers, torch.device("cpu"), torch.float32)
    model.checkpoint_blocks = recompute
    optimizer = adam(model, Optim(lr=1e-4))
    ids_T, position_T = torch.randint(model.shape.vocab_size, (tokens,)), torch.arange(tokens) % SEQUENCE
    attend = sdpa_padded(torch.arange(0, tokens + 1, SEQUENCE), SEQUENCE)
    for _ in range(2):
        model(ids_T, position_T, attend, torch.arange(tokens), ids_T, 1.0, CHUNK).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def peak_bytes(shape: Shape, parameters: int, tokens: int, ranks: int, recompute: bool, element: int) -> int:
    """Of a training step on one rank, all tokens of the row completion tokens; `element` bytes a computed number.

    state     weights, gradients and two moments in float32, spread over the ranks
    gathered  the embedding (and head), one block, and the gradients of both, in the computation's dtype and as float32
    blocks    what backward needs of each block, and one block's gradients; with `recompute` the input of each alone,
              and all of one
    loss      logits of a chunk, as float32, and again as their gradient
    """
    root = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    block = (parameters - root) // shape.layers
    state = 16 * parameters // ranks
    gathered = (root + block) * (2 * element + 4)
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # What autograd keeps of a block, per token: of each norm its input and two stages; queries, keys and values as they
    # are and padded; what attention gives, likewise; four products of the MLP.
    inside = 6 * shape.hidden_size + 2 * heads + 2 * shape.heads * shape.head_dim + 4 * shape.intermediate_size
    kept = shape.layers * shape.hidden_size + 2 * inside if recompute else (shape.layers + 1) * inside
    return state + gathered + tokens * kept * element + 2 * CHUNK * shape.vocab_size * 4


def apart(function, *arguments) -> int:
    """Peak bytes of one call, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, function, *arguments).result()


def measured(function, *arguments) -> int:
    torch.set_num_threads(1)
    step("1M", SEQUENCE, True)  # what any run loads
    before = resident()
    function(*arguments)
    return resident() - before


def losses() -> dict[str, int]:
    """Bytes by way and tokens; those of the last dense line are extended, not measured."""
    found = {}
    for width, tokens, chunk in tqdm([(64, 2048, None), (64, 4096, None), (64, 16384, 1024), (64, 16384, 4096),
                                      (896, 2048, 1024)], "loss"):
        way = f"width {width}, " + ("dense" if chunk is None else f"chunks of {chunk}")
        found[way, tokens] = apart(loss, width, tokens, chunk)
    small, large = found["width 64, dense", 2048], found["width 64, dense", 4096]
    most = large + (large - small) * (16384 - 4096) // 2048
    found["width 64, dense, extended linearly", 16384] = most
    print(f"{'loss at a vocabulary of ' + format(VOCAB, ','):<40} {'tokens':>7} {'GiB':>6} {'of dense':>9}")
    for (how, tokens), size in found.items():
        share = f"1 / {most / size:.1f}" if "chunks" in how else ""
        print(f"{how:<40} {tokens:>7,} {size / GIB:>6.2f} {share:>9}")
    return {f"{how} {tokens}": size for (how, tokens), size in found.items()}


def models(names: list[str]) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shapes = {}
        for name in SHAPES:
            source = write_config(name, Path(folder))
            shapes[name] = read_shape(source), sum(p.numel() for p in empty_model(source, torch.float32).parameters())
    print(f"\n{'float32, 1 rank':<16} {'tokens':>7} {'recompute':>10} {'computed':>9} {'measured':>9} {'ratio':>6}")
    for name in names:
        for tokens in (2048, 8192):
            for recompute in (False, True):
                computed = peak_bytes(*shapes[name], tokens, 1, recompute, 4)
                real = apart(step, name, tokens, recompute)
                rows.append({"shape": name, "tokens": tokens, "recompute": recompute, "computed": computed,
                             "measured": real})
                print(f"{name:<16} {tokens:>7,} {recompute!s:>10} {computed / GIB:>9.2f} {real / GIB:>9.2f} "
                      f"{computed / real:>6.2f}")
    print(f"\n{'bfloat16, GiB on each rank, computed':<40} " + " ".join(f"{t:>8,}" for t in (4096, 16384, 65536)))
    for name in ("0.5B", "1.5B", "7B"):
        for ranks in (1, 8):
            for recompute in (False, True):
                cells = [peak_bytes(*shapes[name], tokens, ranks, recompute, 2) / GIB
                         for tokens in (4096, 16384, 65536)]
                label = f"{name}, {ranks} rank{'s' * (ranks > 1)}{', recomputed' * recompute}"
                print(f"{label:<40} " + " ".join(f"{cell:>8.1f}" for cell in cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", default=["10M", "50M"], choices=SHAPES)
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory goes back at once: bytes in use, not the heap's holes
    print(json.dumps({"bench": "memory", "loss": losses(), "models": models(args.measure)}))


if __name__ == "__main__":
    main()
