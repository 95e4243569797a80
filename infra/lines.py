"""Read and write the files of a run so that what was whole stays whole, whatever dies: JSON lines."""

import json
from collections.abc import Callable
from pathlib import Path

from config import ConfigError


def read(path: Path, require: Callable[[dict, str], None] | None = None) -> list[dict]:
    """Read the lines of a log; [] where there is none. Each has what its reader must `require`
    (infra/formats.py).

    What a dying process or machine has torn at the end is left out: a last line without its end, and lines
    behind the last whole one. Raises ConfigError for a broken line that whole ones follow.
    """
    lines: list[dict] = []
    broken = 0
    written = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(written, start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and broken:
            raise ConfigError(f"{path}:{broken} is no JSON object, though lines behind it are: the file was "
                              "damaged; bring it back, or remove that line and do without what it held")
        if isinstance(found, dict):
            if require:
                require(found, f"{path}:{number}")
            lines.append(found)
        else:
            broken = broken or number
    return lines


def append(path: Path, *lines: dict) -> None:
    """Append lines to a log. Raises ConfigError where its folder is gone."""
    try:
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is gone, though a run was writing there: it was removed or "
                          "renamed; begin again, or bring it back and go on with --resume") from None


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(f"{path.name}.unfinished")
    fresh.write_text(text)
    fresh.replace(path)


def rewrite(path: Path, lines: list[dict]) -> None:
    """Replace a log at once."""
    replace(path, "".join(json.dumps(line) + "\n" for line in lines))


def mended(path: Path) -> list[dict]:
    """Read a log, and cut off a torn last line so that it can be appended to."""
    lines = read(path)
    rewrite(path, lines)
    return lines
