"""A long run takes no more memory at its end than at its beginning, and leaves nothing behind.

    python tests/soak.py [--steps 1000] [--every 10] [--verifications 10000]

A small toy run with a checkpoint every so many steps, and then verifications by algebra, of which every 100th
loses its worker to a SIGKILL, in turn while that is idle and while it is at work. Resident memory (of the workers too),
open files, threads and what this process has put into /dev/shm are read after every step and every 100 verifications:
the median of the last fifth may be at most 5% above that of the second fifth (the first makes the buffers), and of all
but memory no more at all. Of checkpoints only what the settings keep may be left.
"""

import argparse
import gc
import os
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from survive import family
from tqdm import tqdm

import config
import train
from infra import dist, runfolder
from verify import grade as grading

SETTINGS = ["rollout.group_size=8", "rollout.prompts_per_step=4", "pack.capacity=512", "loss.kl=0.05",
            "eval.every=100", "checkpoint.keep=2"]
AT_ONCE = 100  # verifications of which one loses its worker


def resident() -> int:
    """Bytes of this process and all below it."""
    pages = 0
    for pid in family(os.getpid()):
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except FileNotFoundError:  # it has just ended
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


class Measured:
    """What was read off this process, time after time."""

    def __init__(self):
        self.sizes: list[int] = []
        self.handles: list[int] = []
        self.shared: set[str] = set()  # names in /dev/shm that were ever mapped here; others have theirs

    def read(self) -> None:
        gc.collect()  # a pool of workers that was lost is a circle
        self.sizes.append(resident())
        self.shared |= set(re.findall(r"/dev/shm/([^ \n]+)", Path("/proc/self/maps").read_text()))
        left = self.shared & set(os.listdir("/dev/shm"))
        self.handles.append(len(os.listdir("/proc/self/fd")) + len(left) + threading.active_count())

    def verdict(self, what: str) -> bool:
        """Print how the last fifth compares with the second, and tell whether it may."""
        fifth = len(self.sizes) // 5
        (early, late), handles = ([median(part) for part in (kind[fifth:2 * fifth], kind[-fifth:])]
                                  for kind in (self.sizes, self.handles))
        print(f"{what}: {early / 2**20:.1f} MiB in the second fifth, {late / 2**20:.1f} in the last "
              f"({late / early - 1:+.1%}); open files, threads and semaphores "
              f"{handles[0]:.0f} and {handles[1]:.0f}", flush=True)
        return late <= 1.05 * early and handles[1] <= handles[0]


def steps(count: int, every: int) -> bool:
    """Train, and tell whether nothing has grown."""
    measured, log_step = Measured(), runfolder.RunLog.step

    def watched(log, *given) -> None:
        log_step(log, *given)
        measured.read()

    runfolder.RunLog.step = watched
    grading.grade([("a+1", r"\boxed{1+a}")])  # else the workers start with the first answer that needs algebra
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run"
        more = [f"steps={count}", f"out={out}", f"checkpoint.every={every}"]
        train.train(config.load("dppo_toy.yaml", [*SETTINGS, *more]))
        left = sorted(path.name for path in (out / "checkpoints").iterdir())
    dist.close()
    print(f"kept {', '.join(left)}")
    flat = measured.verdict(f"{count} steps, {count // every} checkpoints")
    return flat and left == ["latest", *(f"step_{step:06d}" for step in (count - every, count))]


def kill_a_worker() -> bool:
    """SIGKILL to one process that verifies, if there is one: those that the fork server has forked."""
    workers = [pid for child in family(os.getpid())[1:] for pid in family(child)[1:]]
    for pid in workers[:1]:
        os.kill(pid, signal.SIGKILL)
    return bool(workers)


def verifications(count: int) -> bool:
    """Verify, and tell whether nothing has grown and only what lost its worker was not right."""
    measured, killed, right = Measured(), 0, 0
    for first in tqdm(range(0, count, AT_ONCE), "verifications", unit=f"{AT_ONCE}"):
        pairs = [(rf"\sqrt{{{i}}}", rf"\boxed{{{i}^{{1/2}}}}") for i in range(first + 2, first + 2 + AT_ONCE)]
        begun = [grading.begin_verdict(gold, text[7:-1]) for gold, text in pairs] if first // AT_ONCE % 2 else []
        killed += kill_a_worker()
        right += sum(graded["verdict"] == "right" for graded in grading.grade(pairs))
        del begun
        measured.read()
    print(f"{killed} workers killed, {right} of {count} right")
    return measured.verdict(f"{count} verifications") and count - right <= killed > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--verifications", type=int, default=10_000)
    args = parser.parse_args()
    fine = [steps(args.steps, args.every) if args.steps else True, verifications(args.verifications)]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
