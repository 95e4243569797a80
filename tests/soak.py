"""Does a long run hold on to more and more?

    python tests/soak.py [--steps 2000] [--ranks 2] [--config calculator_toy.yaml] [--set a.b=c]

A small run with a tool saves every 20 steps, keeps two checkpoints and writes to wandb offline. At each tenth
of its steps, and after its end, a line says what it holds: memory (PSS) of the ranks and of all else that it has
started, processes, threads, open files, temporary and shared files, and its folder without the logs, which grow by a
line a step. Exits with 1 if all of the last three are more than the three before them by over a tenth, or if anything
but the folder is left at the end. Run it alone: shared files of other programs count too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from survive import ROOT, steps_logged

GROW = {"metrics.jsonl", "samples.jsonl", "decisions.jsonl", "wandb"}
SETTINGS = ["rollout.group_size=4", "rollout.prompts_per_step=4", "rollout.max_new_tokens=32", "checkpoint.every=20",
            "checkpoint.keep=2", "eval.every=500", "eval.limit=16", "log.to=[wandb]", "data.limit=64"]
COLUMNS = ("step", "s", "ranks MiB", "others MiB", "processes", "threads", "files", "temporary", "shared", "folder MiB")


def held(pid: int, out: Path, temporary: Path, shared: set[str]) -> list[float]:
    """What a run holds now, as in COLUMNS from the third on; memory that several share is divided among them."""
    memory, counts = Counter(), Counter()
    with suppress(psutil.NoSuchProcess):  # it has ended
        started = psutil.Process(pid)
        for member in (started, *started.children(recursive=True)):
            with suppress(psutil.NoSuchProcess), member.oneshot():
                is_rank = "train.py" in member.cmdline()[1:3]
                memory[is_rank] += member.memory_full_info().pss / 2**20
                counts += {"processes": 1, "threads": member.num_threads(), "files": member.num_fds()}
    lasting = [path for path in out.rglob("*") if path.is_file() and not GROW & {path.name, *path.parts}]
    return [memory[True], memory[False], *(counts[name] for name in ("processes", "threads", "files")),
            sum(len(names) for *_, names in os.walk(temporary)), len({*os.listdir("/dev/shm")} - shared),
            sum(path.stat().st_size for path in lasting) / 2**20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", default="calculator_toy.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change one setting")
    args = parser.parse_args()
    shared, start, rows = {*os.listdir("/dev/shm")}, perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        out, temporary, said = (Path(folder) / name for name in ("run", "tmp", "said"))
        temporary.mkdir()
        sets = [*SETTINGS, *args.set, f"steps={args.steps}", f"out={out}"]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
        process = subprocess.Popen(
            [sys.executable, *launch * (args.ranks > 1), "train.py", "--config", args.config,
             *(word for text in sets for word in ("--set", text))], cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=said.open("w"),
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "WANDB_MODE": "offline"})

        def show(step: int) -> None:
            rows.append(held(process.pid, out, temporary, shared))
            print("".join(f"{x:>12.0f}" for x in (step, perf_counter() - start, *rows[-1])), flush=True)

        print("".join(f"{name:>12}" for name in COLUMNS))
        while process.poll() is None:
            step = max(steps_logged(out), default=0)
            if 10 * step > len(rows) * args.steps:
                show(step)
            sleep(1)
        show(max(steps_logged(out), default=0))
        if process.returncode:
            print(said.read_text())
            return 1
    earlier, later = map(max, zip(*rows[-7:-4], strict=True)), map(min, zip(*rows[-4:-1], strict=True))
    grown = [name for name, old, new in zip(COLUMNS[2:], earlier, later, strict=True) if new > 1.1 * old]
    left = [name for name, end in zip(COLUMNS[2:-1], rows[-1], strict=False) if end]
    print(f"grown: {', '.join(grown) or 'nothing'}; left at the end: {', '.join(left) or 'nothing'}")
    return int(bool(grown or left))


if __name__ == "__main__":
    sys.exit(main())
