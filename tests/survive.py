"""Is a run that dies and resumes, again and again, the same run?

    python tests/survive.py [--kills 20] [--ranks 1 2] [--seed 0] [--signals] [--config dppo_toy.yaml]
                            [--set model.lora.rank=4]

A small run is done in one go, and then once more with `kill -9` on all of its processes at random moments, every other
time in the middle of a save, until it comes to its end. With --signals it gets SIGHUP, SIGTERM, SIGINT or SIGKILL, sent
to one rank, to the process that was started (torchrun, on several ranks) or to all of them, at random moments or in the
middle of a save, of an evaluation or of the export. Parameters, moments, the memory of prompts, decisions.jsonl,
metrics.jsonl without its times and the export must be the same, byte for byte. One that is asked to stop ends by itself
within PATIENCE seconds, and says nothing like a traceback.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import IO

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tqdm import tqdm

import config
from infra import checkpoint, dist, runfolder
from learner import make_optimizers
from model import empty_model
from policy import Weights
from settings import leaves

ROOT = Path(__file__).parent.parent
SETTINGS = ["rollout.group_size=8", "rollout.prompts_per_step=4", "data.limit=10", "checkpoint.every=1",
            "checkpoint.keep=2", "eval.every=2", "eval.limit=64", "update.minibatches=2", "loss.kl=0.05",
            "pack.capacity=512"]
PATIENCE = 60
SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
TARGETS = ("rank", "parent", "all")


def start(out: Path, ranks: int, steps: int, more: list[str], name: str = "dppo_toy.yaml",
          stderr: int | IO = subprocess.DEVNULL) -> subprocess.Popen:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = [word for setting in (*SETTINGS, *more, f"steps={steps}", f"out={out}") for word in ("--set", setting)]
    command = [*(launch if ranks > 1 else [sys.executable]), "train.py", "--config", name, *words]
    return subprocess.Popen([*command, "--resume", "auto"], cwd=ROOT, text=True, stdout=subprocess.DEVNULL,
                            stderr=stderr, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"})


def finish(out: Path, ranks: int, steps: int, more: list[str], name: str = "dppo_toy.yaml") -> None:
    process = start(out, ranks, steps, more, name, subprocess.PIPE)
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


def steps_logged(out: Path) -> list[int]:
    """The steps in metrics.jsonl, twice where one was evaluated too."""
    return [line["step"] for line in runfolder.read_log(out / "metrics.jsonl")]


def is_in(phase: str, out: Path, started: float) -> bool:
    """Whether a run that started then is in this phase, as its folder tells."""
    logged = steps_logged(out)
    if phase == "save":
        return any((out / "checkpoints").glob("*.unfinished"))
    if phase == "evaluation":  # the step has its line, and the evaluation not yet
        return bool(logged) and logged[-1] % 2 == 0 and logged.count(logged[-1]) == 1 + (logged[-1] == 0)
    if phase == "export":
        with suppress(FileNotFoundError):
            return (out / "hf.unfinished").stat().st_ctime > started
        return False
    return True


def planned(attempt: int, kills: int, signals: bool, rng: random.Random) -> tuple[str, int, str]:
    """Choose phase, signal and target. The export comes last, and is only cut off by SIGKILL: others let it end."""
    if not signals:
        return ("any", "save")[attempt % 2], signal.SIGKILL, "all"
    if attempt >= kills * 5 // 6:
        return "export", signal.SIGKILL, rng.choice(("rank", "all"))
    return ("any", "save", "any", "evaluation", "evaluation")[attempt % 5], rng.choice(SIGNALS), rng.choice(TARGETS)


def interrupt(process: subprocess.Popen, out: Path, phase: str, number: int, target: str, seconds: float) -> bool:
    """Send a signal at a moment of this process, or at the next such phase; return whether the run was still going."""
    size, wait, started = size_of(out / "metrics.jsonl"), None, time()
    while process.poll() is None:
        if wait is None and (size_of(out / "metrics.jsonl") != size or phase == "export"):
            wait = monotonic() + (0 if phase == "export" else seconds)
        if wait is not None and monotonic() > wait and is_in(phase, out, started):
            pids = family(process.pid)
            workers = [pid for pid in pids if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            chosen = {"rank": workers[-1:], "parent": pids[:1], "all": pids}[target]
            if number == signal.SIGKILL and target == "parent":
                chosen = pids  # workers outlive a torchrun that is killed, and keep others out (docs/running.md)
            for pid in chosen:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            return True
        sleep(0.002)  # a loop without a pause would take the CPU of a rank
    return False


def record(out: Path) -> tuple:
    """All that must be the same."""
    step = (out / "checkpoints" / "latest").read_text()
    cfg = config.load(out / "config.yaml")
    model = empty_model(ROOT / cfg.model.path, torch.float32)
    leaves.through("weights", cfg, Weights()).adapt(model, torch.float32)
    model.to_empty(device="cpu")
    state = checkpoint.tensors(model, make_optimizers(model, cfg.optim))
    checkpoint.load_tensors(out / "checkpoints" / step / "policy", state)
    extra = torch.load(out / "checkpoints" / step / "extra.pt", weights_only=True)
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
               for line in runfolder.read_log(out / "metrics.jsonl")]
    bits = [t.numpy().tobytes() for part in state.values() for t in part.values()]
    exported = (out / "hf" / "model.safetensors").read_bytes()
    return (step, bits, repr(extra["history"]), json.dumps(metrics),
            (out / "decisions.jsonl").read_bytes(), (out / "samples.jsonl").read_bytes(), exported)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", action="store_true", help="other signals too, to other processes")
    parser.add_argument("--config", default="dppo_toy.yaml", help="a config of configs/")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    args = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would go on, as they should
    rng, steps = random.Random(args.seed), 6 * args.kills
    more = [*["checkpoint.every=3"] * args.signals, *args.set]
    dist.init("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in args.ranks:
            whole, cut = Path(temporary) / f"whole{ranks}", Path(temporary) / f"cut{ranks}"
            finish(whole, ranks, steps, more, args.config)
            done = Counter()
            for attempt in tqdm(range(args.kills), f"{ranks} ranks", unit="kill"):
                phase, number, target = planned(attempt, args.kills, args.signals, rng)
                with (Path(temporary) / "said").open("w+") as said:
                    process = start(cut, ranks, steps, more, args.config, said)
                    if not interrupt(process, cut, phase, number, target, rng.uniform(0, 1.0)):
                        break
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(PATIENCE)
                    if hung := process.poll() is None:
                        process.send_signal(signal.SIGABRT)  # so that it says where it hangs
                    status = process.wait()
                    said.seek(0)
                    text = said.read()
                assert not hung, f"{signal.Signals(number).name} to {target} in {phase}: {text}"
                assert ranks > 1 or status in (130, -signal.SIGKILL) and "Traceback" not in text, (status, text)
                done[f"{signal.Signals(number).name} to {target if ranks > 1 else 'it'} in {phase}"] += 1
            assert done.total() == args.kills, f"the run came to its end after {done.total()} of all kills"
            finish(cut, ranks, steps, more, args.config)
            same = [a == b for a, b in zip(record(whole), record(cut), strict=True)]
            names = ("step", "parameters and moments", "history", "metrics", "decisions", "samples", "export")
            print("\n".join(f"{count:>4} {what}" for what, count in sorted(done.items())))
            print(f"{ranks} ranks, {done.total()} times: " + ", ".join(
                f"{name} {'same' if ok else 'DIFFER'}" for name, ok in zip(names, same, strict=True)), flush=True)
            assert all(same)


if __name__ == "__main__":
    main()
