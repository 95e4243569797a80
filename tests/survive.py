"""Is a run that dies and resumes, again and again, the same run?

    python tests/survive.py [--kills 20] [--ranks 1 2] [--seed 0] [--set model.lora.rank=4]

A small run is done in one go, and then once more with `kill -9` on all of its processes at random moments, every other
time in the middle of a save, until it comes to its end. Parameters, moments, the memory of prompts, decisions.jsonl and
metrics.jsonl without its times must be the same, byte for byte.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tqdm import tqdm

import config
from infra import checkpoint, dist, runfolder
from learner import adam
from methods import lora
from model import empty_model

ROOT = Path(__file__).parent.parent
SETTINGS = ["rollout.group_size=8", "rollout.prompts_per_step=4", "data.limit=10", "checkpoint.every=1",
            "checkpoint.keep=2", "eval.every=8", "update.minibatches=2", "loss.kl=0.05", "pack.capacity=512"]


def start(out: Path, ranks: int, steps: int, more: list[str], stderr: int = subprocess.DEVNULL) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = [word for setting in (*SETTINGS, *more, f"steps={steps}", f"out={out}") for word in ("--set", setting)]
    command = [*(launch if ranks > 1 else [sys.executable]), "train.py", "--config", "dppo_toy.yaml", *words]
    return subprocess.Popen([*command, "--resume", "auto"], cwd=ROOT, text=True, stdout=subprocess.DEVNULL,
                            stderr=stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})


def finish(out: Path, ranks: int, steps: int, more: list[str]) -> None:
    process = start(out, ranks, steps, more, subprocess.PIPE)
    errors = process.communicate()[1]
    assert process.returncode == 0, errors


def family(pid: int) -> list[int]:
    """A process and all below it: torchrun gives each of its workers a session of its own."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in below for p in family(int(child)))]


def size_of(path: Path) -> int:
    """The bytes in a file; 0 where there is none: a run that died before its first checkpoint begins its logs anew."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def kill(process: subprocess.Popen, out: Path, seconds: float, in_a_save: bool) -> bool:
    """kill -9 when so much time has passed since the first step of this process was logged, or at the next save from
    then on. Returns whether the run was still going."""
    log, wait = out / "metrics.jsonl", None
    size = size_of(log)
    while process.poll() is None:
        if wait is None and size_of(log) > size:
            wait = monotonic() + seconds
        saving = any((out / "checkpoints").glob("*.unfinished")) if (out / "checkpoints").is_dir() else False
        if wait is not None and monotonic() > wait and (saving or not in_a_save):
            for pid in family(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()
            return True
    return False


def record(out: Path) -> tuple:
    """All that must be the same."""
    step = (out / "checkpoints" / "latest").read_text()
    cfg = config.load(out / "config.yaml")
    model = empty_model(ROOT / "toy" / "model", torch.float32)
    lora.adapt(model, cfg.model.lora, torch.float32)
    model.to_empty(device="cpu")
    state = checkpoint.tensors(model, adam(model, cfg.optim))
    checkpoint.load_tensors(out / "checkpoints" / step / "policy", state)
    extra = torch.load(out / "checkpoints" / step / "extra.pt", weights_only=True)
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
               for line in runfolder.read(out / "metrics.jsonl")]
    bits = [t.numpy().tobytes() for part in state.values() for t in part.values()]
    return (step, bits, repr(extra["history"]), json.dumps(metrics),
            (out / "decisions.jsonl").read_bytes(), (out / "samples.jsonl").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    args = parser.parse_args()
    rng, steps = random.Random(args.seed), 8 * args.kills
    dist.init("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in args.ranks:
            whole, cut = Path(temporary) / f"whole{ranks}", Path(temporary) / f"cut{ranks}"
            finish(whole, ranks, steps, args.set)
            killed = in_saves = 0
            for attempt in tqdm(range(args.kills), f"{ranks} ranks", unit="kill"):
                in_a_save = attempt % 2 == 1
                if not kill(start(cut, ranks, steps, args.set), cut, rng.uniform(0, 1.0), in_a_save):
                    break
                killed += 1
                in_saves += any((cut / "checkpoints").glob("*.unfinished"))
            assert killed == args.kills, "the run came to its end before all kills"
            finish(cut, ranks, steps, args.set)
            same = [a == b for a, b in zip(record(whole), record(cut), strict=True)]
            names = ("step", "parameters and moments", "history", "metrics", "decisions", "samples")
            print(f"{ranks} ranks, killed {killed} times, {in_saves} of them in a save: "
                  + ", ".join(f"{name} {'same' if ok else 'DIFFER'}" for name, ok in zip(names, same, strict=True)))
            assert all(same)


if __name__ == "__main__":
    main()
