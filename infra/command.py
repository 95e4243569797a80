"""The command `winnow` of an installed package."""

import os
import sys
from pathlib import Path

PROGRAMS = ("train", "eval", "report", "replay", "chat", "learner")


def main() -> None:
    """Run a program: winnow train --config cppo_toy.yaml is python train.py --config cppo_toy.yaml."""
    program, *given = sys.argv[1:] or [""]
    if program not in PROGRAMS:
        sys.exit(f"winnow: {program!r} is none of {', '.join(PROGRAMS)}; winnow train --help lists options")
    os.execv(sys.executable, [sys.executable, str(Path(__file__).parents[1] / f"{program}.py"), *given])
