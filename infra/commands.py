"""The command line of train.py, which is read before its other imports, as terminal.py says."""

import argparse
import math
import sys
from contextlib import redirect_stderr

import config
from infra.terminal import Plain, add_config, add_settings, count, new_parser, to_stderr
from settings.loader import ConfigError


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
    args = parser.parse_args()
    if not args.config and args.settings is None:
        parser.error("the following arguments are required: --config")
    return args


def refuse_early(args: argparse.Namespace) -> None:
    """End with status 2 for a mistake in the config."""
    try:
        if args.config:
            config.load(args.config, args.set)
    except (ConfigError, ModuleNotFoundError) as error:  # the latter: of a leaf that is gone
        with redirect_stderr(Plain(sys.stderr)):
            to_stderr(f"error: {error}")
        sys.exit(2)


def gibibytes(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be a finite number above 0")
    return number
