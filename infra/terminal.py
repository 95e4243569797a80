"""What a person types and sees: parsers of command lines, and texts without control characters.

Torch takes seconds to import, so nothing here needs it: a program reads its command line before its other
imports, and `--help`, a wrong word and a mistake in a run's config end it at once.
"""

import argparse
import re
import shlex
import sys
from itertools import pairwise
from typing import IO, Any

from settings.paths import user_path

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
                     r"|(?<!^)\r(?!$)")
MOVES = re.compile(r"(\n|\x1b\[A)*")  # of a bar within another one


def new_parser(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.register("type", int, not_negative)
    return parser


def add_settings(parser: argparse.ArgumentParser, help: str = "change one setting") -> None:
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help=help)
    refuse = parser.error

    def explain(message):
        """End with how the words that there is no place for are written as settings."""
        words = message.partition("unrecognized arguments: ")[2]
        if re.match(r"[^-\s]\S*\.ya?ml", words):
            refuse(f"{message}; a config is named by --config {words}")
        if words and not re.match(r"-|[\w.]+=", words):  # --set steps 5
            before = [word for word, after in pairwise(sys.argv[1:]) if after and words.startswith(after)]
            words = " ".join([*before[:1], words])
            if re.match(r"[\w.]+=", words):
                refuse(f"{message}; a setting with spaces needs quotes: --set {shlex.quote(words)}")
        sets = re.sub(r"-*([A-Za-z][\w.-]*)(?: = |[ =])(\S+)", r"--set \1=\2", words)
        refuse(f"{message}; a setting is changed by {sets}" if "--set " in sets else message)

    parser.error = explain


def add_config(parser: argparse.ArgumentParser, note: str) -> None:
    parser.add_argument("--config", nargs="+", action="extend", metavar="NAME.yaml",
        help=f"a yaml file, or the name of one in configs/; of several the later ones win. {note}")


def of_eval(text: str | None) -> argparse.Namespace:
    parser = new_parser(text)
    add = parser.add_argument
    add("--model", nargs="+", default=[],
        help="Hugging Face folders, checkpoints, patterns of these, or a hub name")
    add_config(parser, "The config of a run, or eval/*.yaml; without it eval/default.yaml")
    add_settings(parser)
    add("--data", dest="set", action="append", type="data.eval={}".format,
        help="sets separated by commas: --set data.eval=SET")
    add("--data-dir", dest="set", action="append", type="data.dir={}".format, metavar="DIR",
        help="folder with the files of named sets: --set data.dir=DIR")
    add("--seed", type=int, default=0, help="of the samples, at a temperature above 0")
    add("--out", type=user_path, help="JSON with settings, scores and responses; of several models a folder")
    return parser.parse_args()


def not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {number}")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def name_unread(overrides: list[str]) -> None:
    """Print which settings an evaluation does not go by, though a rule may read them."""
    for text in overrides:
        if re.match(r"(optim|prune|loss|advantage|update|checkpoint|steps|data\.(train|limit)|rollout\."
                    r"(temperature|group_size|until|max_new_tokens))\b", text):
            to_stderr(f"--set {text} is of training: an evaluation goes by eval.temperature, "
                      "eval.max_new_tokens and eval.limit")


def print_progress(text: str) -> None:
    """Print a line of progress unless stderr is a terminal, which shows a bar."""
    if not sys.stderr.isatty():
        to_stderr(text)


def to_stderr(text: str) -> None:
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
