"""The command lines of the programs that look at a run, read before their other imports (terminal.py)."""

import argparse

from infra.terminal import add_config, add_settings, count, new_parser
from settings.paths import user_path


def of_replay(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    add = parser.add_argument
    add("run", type=user_path, metavar="RUN_DIR", help="a run folder")
    add("--step", type=count, required=True, metavar="K", help="as the logs count them, from 1")
    add_settings(
        parser, "another pruning: prune.completions.*, prune.tokens.*, prune.truncated, loss.denominator")
    add("--draws", type=int, default=200, metavar="D",
        help="how often a pruning is drawn again (200; 0: not)")
    return parser.parse_args()


def of_report(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="run folders, or patterns of them")
    add("--out", type=user_path, help="a folder; the run's own for one run, else runs/report")
    add("--seconds", type=pairs, default={}, metavar="PHASE=SECONDS,...",
        help="of a step on another machine, by phase: rollout=8,update=0.6")
    return parser.parse_args()


def pairs(text: str) -> dict[str, float]:
    """Read names with their numbers, a=1,b=2."""
    given = [part.split("=") for part in text.split(",")]
    try:
        return {name: float(number) for (name, number), _ in zip(given, dict(given), strict=True)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be names with numbers, each once: a=1,b=2") from None


def of_chat(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    parser.add_argument("target", help="a run folder, a Hugging Face folder, a checkpoint or a hub name")
    add_config(parser, "Without it the run's own")
    add_settings(parser)
    return parser.parse_args()
