"""What a person types and sees: the command lines of the programs, and texts without control characters.

Torch takes seconds to import, so nothing here needs it: a program reads its command line before its other
imports, and `--help`, a wrong word and a mistake in a run's config end it at once.
"""

import argparse
import math
import re
import sys
from contextlib import redirect_stderr
from typing import IO, Any

import config
from settings.loader import ConfigError
from settings.paths import user_path

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|(?<!^)\r(?!$)")
MOVES = re.compile(r"(\n|\x1b\[A)*")  # of a bar within another one
CARDS = {"4090": 23.5, "L40S": 44.0, "A100": 79.0, "H100": 79.0, "H200": 139.0}  # GiB free on an empty one


def new_parser(text: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_settings(parser: argparse.ArgumentParser, help: str = "change one setting") -> None:
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help=help)


def add_config(parser: argparse.ArgumentParser, note: str) -> None:
    parser.add_argument("--config", nargs="+", action="extend", metavar="NAME.yaml",
        help=f"a yaml file, or the name of one in configs/; of several the later ones win. {note}")


def of_train(text: str | None) -> argparse.Namespace:
    """Read the command line of train.py, whose docstring is `text`."""
    parser = new_parser(text)
    add = parser.add_argument
    add_config(parser, "toy.yaml last: at toy size. `out` is runs/NAME or runs/NAME1_NAME2 unless set")
    add_settings(parser)
    add("--settings", nargs="?", const="", metavar="SECTION",
        help="describe the settings of a section, or all settings, and stop")
    add("--resume", nargs="?", choices=["never", "always", "auto"], default="never", const="always",
        help="go on from the newest checkpoint; auto: or begin where there is none")
    add("--check", action="store_true",
        help="try all that a run needs, print it and stop; status 2 when something fails")
    add("--show", action="store_true", help="print all settings of the run, and stop")
    add("--fit", action="store_true",
        help="say whether the run fits, and what would make it fit; status 2 if it does not")
    add("--memory", type=gibibytes, metavar="GIB", help="--fit: that is free on each GPU")
    add("--gpus", type=count, metavar="N", help="--fit: how many")
    add("--card", choices=CARDS, help="--fit: which GPU")
    args = parser.parse_args()
    if not args.config and args.settings is None:
        parser.error("the following arguments are required: --config")
    return args


def of_eval(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    add = parser.add_argument
    add("--model", nargs="+", default=[],
        help="Hugging Face folders, checkpoints, patterns of these, or a hub name")
    add("--data", help="sets separated by commas (data.eval)")
    add("--data-dir", help="folder with the files of named sets (data.dir)")
    add_config(parser, "The config of a run, or eval/*.yaml; without it eval/default.yaml")
    add("--suite", help="frozen sets, prompts and sampling: configs/eval/suite_NAME.yaml")
    add_settings(parser)
    add("--k", type=counts, help="of pass@k and majority@k, separated by commas (1,2,4,...,eval.n)")
    add("--seed", type=int, default=0, help="of the samples, at a temperature above 0")
    add("--out", type=user_path, help="JSON with settings, scores and responses; of several models a folder")
    add("--rescore", type=user_path, help="a result: grade its responses again")
    add("--also", choices=["math-verify"], help="its verdicts too, and where they differ from ours")
    add("--compare", type=user_path, nargs=2, help="two results on the same problems")
    return parser.parse_args()


def of_replay(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    add = parser.add_argument
    add("run", type=user_path, metavar="RUN_DIR", help="a run folder")
    add("--step", type=int, required=True, metavar="K", help="as the logs count them, from 1")
    add_settings(parser, "another pruning: prune.completions.*, prune.tokens.*, prune.truncated, "
                         "loss.denominator")
    add("--draws", type=int, default=200, metavar="D",
        help="how often a pruning is drawn again (200; 0: not)")
    return parser.parse_args()


def of_report(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="run folders, or patterns of them")
    add("--out", type=user_path, help="a folder; the run's own for one run, else runs/report")
    add("--level", type=float, metavar="PERCENT",
        help="the accuracy to be reached; the reward where no set has an accuracy")
    add("--watch", type=count, nargs="?", const=10, metavar="SECONDS",
        help="go on while a run does: write the page again every so many seconds")
    add("--card", action="store_true", help="write the card of the run's model instead")
    add("--push-to-hub", metavar="NAME",
        help="upload export and card instead, as a private model of the hub: USER/NAME")
    return parser.parse_args()


def of_chat(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    add = parser.add_argument
    add("target", help="a run folder, a Hugging Face folder, a checkpoint or a hub name")
    add_config(parser, "Without it the run's own")
    add_settings(parser)
    return parser.parse_args()


def refuse_early(args: argparse.Namespace) -> None:
    """End with status 2 for a mistake in the config."""
    try:
        if args.config:
            config.load(args.config, args.set)
    except ConfigError as error:
        with redirect_stderr(Plain(sys.stderr)):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def gibibytes(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be a finite number above 0")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def counts(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def print_progress(text: str) -> None:
    """Print a line of progress unless stderr is a terminal, which shows a bar."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


class Plain:
    """A stream in which control characters are written out, since texts of data and models may hold any; but
    for those that move a progress bar."""

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if not MOVES.fullmatch(text):
            text = CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
        return self.stream.write(text)
