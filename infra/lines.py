"""Read and write the JSON lines of a run. Complete lines survive a crash of process or machine."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from settings.loader import SHORT, ConfigError, in_short

DAMAGED = "the file was damaged; bring it back, or do without it"


class LogLine(dict):
    """An object in a log, which knows its place: a missing key is an error that names file and line."""

    def __init__(self, place: str, found: dict):
        super().__init__(found)
        self.place = place

    def __missing__(self, key: str) -> None:
        raise ConfigError(f"{self.place}: {key!r} is missing; {DAMAGED}")


@contextmanager
def blame_file(place: Path | str) -> Iterator[None]:
    """Turn any error from the content of a damaged or hand-edited file into one clear ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{place} holds a value that no run writes ({type(error).__name__}: "
                          f"{in_short(error)}); {DAMAGED}") from error


def read_log(path: Path) -> list[LogLine]:
    """Read the lines of a log; [] if there is no log.

    Lines that a crash has torn at the end are left out: a last line without its end, and lines behind the
    last whole one. Raises ConfigError for a broken line that whole ones follow.
    """
    lines, broken = [], None
    written = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, text in enumerate(written, 1):
        place = f"{path}:{number}"
        try:
            line = json.loads(text, object_hook=partial(LogLine, place))
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, LogLine):
            broken = broken or place
        elif broken:
            raise ConfigError(f"{broken} is no JSON object, though lines behind it are: the file was "
                              "damaged; bring it back, or remove that line and do without what it held")
        else:
            lines.append(line)
    return lines


def read_metrics(path: Path) -> list[LogLine]:
    """Read metrics.jsonl. Raises ConfigError for a value that is neither a number nor null."""
    lines = read_log(path)
    for line in lines:
        for key, value in {"step": line["step"], **line}.items():
            kinds = int if key == "step" else (int, float, type(None))
            if not isinstance(value, kinds) or isinstance(value, int) and abs(value) >= 2**63:
                raise ConfigError(f"{line.place}: {key!r} is {SHORT.repr(value)} and must be a number, or a "
                                  f"whole one for a step; {DAMAGED}")
    return lines


def phase_seconds(lines: list[dict]) -> dict[str, float]:
    """Add up the seconds of each phase over the lines of a metrics log, in the order of the phases there."""
    seconds = Counter()
    for line in lines:
        for key, value in line.items():
            if key.startswith("time/"):
                seconds[key.removeprefix("time/")] += value or 0.0
    return seconds


def is_evaluation(line: dict) -> bool:
    """Tell a line of metrics.jsonl about an evaluation from one about a step."""
    return any(key.startswith("eval/") for key in line)


def to_lines(objects: Iterable[dict]) -> str:
    return "".join(json.dumps(line) + "\n" for line in objects)


def append(path: Path, *lines: dict) -> None:
    """Append lines to a log."""
    with path.open("a") as file:
        file.write(to_lines(lines))


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(f"{path.name}.unfinished")
    fresh.write_text(text, encoding="utf-8")
    flush(fresh)
    fresh.replace(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Write a file through to the disk: a rename must not get there before the file that it names."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_json(path: Path, value: dict) -> None:
    """Write an object over several lines, whole or not at all."""
    replace(path, json.dumps(value, indent=1) + "\n")


def rewrite_log(path: Path, lines: list[dict]) -> None:
    """Replace a log at once."""
    replace(path, to_lines(lines))


def mend_log(path: Path, *first: dict) -> list[dict]:
    """Read a log, or begin it; cut off a torn last line so that it can be appended to."""
    lines = read_log(path) or [*first]
    rewrite_log(path, lines)
    return lines
