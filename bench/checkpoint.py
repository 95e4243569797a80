"""How long does training stand still for a checkpoint, and how long does one take to load?

    python bench/checkpoint.py [--shape 50M] [--ranks 2] [--rounds 5]

A model of random weights with Adam's moments on gloo ranks of this machine. Each round saves three ways in
turn: `torch.save` of the gathered state by rank 0, torch.distributed.checkpoint while everything waits, and
Winnow's Checkpoints, which goes on with passes through the model (in place of a rollout, weights unchanged),
then with training steps. Lost in all is how much longer the passes and steps took than the same work without
a save, standing still included: where ranks share their cores with the threads that write, as on two cores,
no save is free. Then it loads on the same and on other numbers of ranks. Medians over the rounds, of the
slowest rank.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed.checkpoint as dcp
from shapes import write_config

from config import Optim
from infra import checkpoint, dist
from infra.checkpoint import Checkpoints, Role, find
from learner import adam
from model import Decoder, empty_model, sdpa_padded
from records import Segments

CPU, TOKENS, PASSES, STEPS = torch.device("cpu"), 256, 4, 4
# Key in the JSON line -> row of the table
WAYS = {
    "torch.save": "torch.save by rank 0, training waits",
    "waiting": "torch.distributed.checkpoint, training waits",
    "still": "in the background: training stands still",
    "lost": "in the background: lost in all",
}


def in_training(folder: str) -> tuple[Decoder, torch.optim.Optimizer]:
    """Make a sharded model of random weights, and its optimizer."""
    model = empty_model(Path(folder), torch.float32)
    dist.shard(model, model.layers, CPU, torch.float32)
    model.to_empty(device=CPU)
    with torch.no_grad():
        for p in model.parameters():
            dist.local(p).fill_(1.0) if p.ndim == 1 else dist.local(p).normal_(std=0.02)
    return model, adam(model, Optim(lr=1e-4))


def work(model: Decoder, optimizer: torch.optim.Optimizer, passes: int, steps: int) -> None:
    position_T, ids_T = torch.arange(TOKENS), torch.arange(TOKENS) % 100
    for i in range(passes + steps):
        attend = sdpa_padded(Segments.plain([TOKENS]))
        (-model(ids_T, position_T, attend, position_T, ids_T, 1.0).mean()).backward()
        if i >= passes:
            optimizer.step()
        optimizer.zero_grad()


def timed(function: Callable[[], object]) -> float:
    """Measure the seconds of the slowest rank."""
    dist.barrier()
    start = perf_counter()
    function()
    return dist.max_over_ranks(perf_counter() - start)


def plainly(path: Path, role: Role) -> None:
    """Gather the state of all ranks and save it in one file."""
    full_state = {
        kind: {name: dist.full(t) for name, t in tensors.items()}
        for kind, tensors in checkpoint.tensors(*role).items()
    }
    if dist.rank() == 0:
        torch.save(full_state, path)
        checkpoint.flush(path)


def save(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Save some rounds on one of the ranks; rank 0 writes saved.json."""
    join(rank, ranks, folder)
    role, out = in_training(folder), Path(folder) / "checkpoints"
    work(*role, passes=1, steps=1)
    checkpoints = Checkpoints(out, 1, {"policy": role}, CPU)
    by_way: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(rounds + 1):
        measured = save_each_way(role, checkpoints, step)
        if step > 0:  # the first makes the buffers
            for way, seconds in measured.items():
                by_way[way].append(seconds)
    newest, _ = find(out)
    if rank == 0:
        sizes = {
            "torch.save": (out / "plain.pt").stat().st_size,
            "Checkpoints": sum(size for size, _ in checkpoint.read_list(newest).values()),
        }
        parameters = sum(p.numel() for p in role[0].parameters())
        saved = {"seconds": by_way, "bytes": sizes, "parameters": parameters}
        (Path(folder) / "saved.json").write_text(json.dumps(saved))
    dist.close()


def save_each_way(role: Role, checkpoints: Checkpoints, step: int) -> dict[str, float]:
    """Measure the seconds that training loses to a save, for each way to save."""
    out = checkpoints.folder
    waiting_at = out / f"waiting_{step}"
    out.mkdir(exist_ok=True)
    plain = timed(lambda: plainly(out / "plain.pt", role))
    waiting = timed(lambda: dcp.save(checkpoint.tensors(*role), checkpoint_id=waiting_at))
    if dist.rank() == 0:
        shutil.rmtree(waiting_at)
    without_save = timed(lambda: work(*role, PASSES, STEPS))

    def in_the_background() -> None:
        checkpoints.reach(step, {})
        checkpoints.save()
        work(*role, PASSES, 0)
        checkpoints.wait_for_copies()
        work(*role, 0, STEPS)

    during_save = timed(in_the_background)
    standing_still = dist.max_over_ranks(checkpoints.metrics()["time/checkpoint"])
    written = timed(checkpoints.wait)
    lost = during_save + written - without_save
    return {"torch.save": plain, "waiting": waiting, "still": standing_still, "lost": lost}


def load(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Load some rounds on one of the ranks; rank 0 writes loaded<ranks>.json."""
    join(rank, ranks, folder)
    checkpoints = Checkpoints(Path(folder) / "checkpoints", 1, {"policy": in_training(folder)}, CPU)
    seconds = [timed(lambda: checkpoints.load(find(checkpoints.folder)[0])) for _ in range(rounds)]
    if rank == 0:
        (Path(folder) / f"loaded{ranks}.json").write_text(json.dumps(seconds))
    dist.close()


def join(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)


def line(name: str, seconds: list[float]) -> str:
    return f"{name:<44} {median(seconds):>8.3f} {min(seconds):>8.3f} - {max(seconds):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="50M", help="of bench/shapes.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_config(args.shape, Path(folder))
        torch.multiprocessing.spawn(save, args=(args.ranks, folder, args.rounds), nprocs=args.ranks)
        saved = json.loads((Path(folder) / "saved.json").read_text())
        os.remove(Path(folder) / f"store{args.ranks}")
        loaded = {}
        for ranks in (args.ranks, 1, args.ranks + 1):
            torch.multiprocessing.spawn(load, args=(ranks, folder, args.rounds), nprocs=ranks)
            loaded[ranks] = json.loads((Path(folder) / f"loaded{ranks}.json").read_text())
    seconds, sizes = saved["seconds"], saved["bytes"]
    millions = saved["parameters"] / 1e6
    print(f"{millions:.1f}M parameters with Adam on {args.ranks} ranks, {args.rounds} rounds")
    print(f"{'seconds':<44} {'median':>8} {'min - max':>16}")
    for way, name in WAYS.items():
        print(line(name, seconds[way]))
    for ranks, values in loaded.items():
        print(line(f"load on {ranks} rank{'s' * (ranks > 1)}", values))
    ratio = median(a / b for a, b in zip(seconds["still"], seconds["waiting"], strict=True))
    print(f"stands still for {ratio:.2%} of a save that is waited for; "
          f"on disk {sizes['Checkpoints'] / 1e6:.1f} MB, by torch.save {sizes['torch.save'] / 1e6:.1f} MB")
    about = {"bench": "checkpoint", "shape": args.shape, "ranks": args.ranks}
    print(json.dumps(about | saved | {"load": loaded}))


if __name__ == "__main__":
    main()
