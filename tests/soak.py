"""A long run takes no more memory at its end than at its beginning, and leaves nothing behind.

    python tests/soak.py [--steps 300] [--every 10]

A small toy run with a checkpoint every so many steps. Resident memory is read after every step: the median of the last
fifth may be at most 5% above that of the second fifth (the first makes the buffers). Of checkpoints, threads and open
files only what the settings keep may be left.
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import config
import train
from infra import dist, runfolder

SETTINGS = ["rollout.group_size=8", "rollout.prompts_per_step=4", "pack.capacity=512", "loss.kl=0.05",
            "eval.every=100", "checkpoint.keep=2"]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10)
    args = parser.parse_args()
    sizes, open_files, log_step = [], [], runfolder.Log.step

    def watched(log, *given) -> None:
        log_step(log, *given)
        sizes.append(resident())
        open_files.append(len(os.listdir("/proc/self/fd")) + threading.active_count())

    runfolder.Log.step = watched
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run"
        train.train(config.load("dppo_toy.yaml", [*SETTINGS, f"steps={args.steps}", f"out={out}",
                                                  f"checkpoint.every={args.every}"]))
        left = sorted(path.name for path in (out / "checkpoints").iterdir())
    dist.close()
    fifth = args.steps // 5
    early, late = (median(part) / 2**20 for part in (sizes[fifth:2 * fifth], sizes[-fifth:]))
    kept = [f"step_{step:06d}" for step in (args.steps - args.every, args.steps)]
    handles = [median(part) for part in (open_files[fifth:2 * fifth], open_files[-fifth:])]
    print(f"{args.steps} steps, {args.steps // args.every} checkpoints: {early:.1f} MiB in the second fifth, "
          f"{late:.1f} in the last ({late / early - 1:+.1%}); open files and threads {handles[0]:.0f} and "
          f"{handles[1]:.0f}; kept {', '.join(left)}")
    return 0 if late <= 1.05 * early and handles[1] <= handles[0] and left == ["latest", *kept] else 1


if __name__ == "__main__":
    sys.exit(main())
