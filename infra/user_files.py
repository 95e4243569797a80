"""Read the Python files that a user gives, and say how calls of them were ended."""

import ast
import contextlib
import functools
import sys
from pathlib import Path

from infra.user_worker import Source
from settings.loader import ConfigError
from verify.workers import MEMORY, PATIENCE, TIME, Limits

REPORTED: set[tuple[str, str]] = set()  # files and reasons that `report_once` has reported


@functools.cache
def read_file(path: str, setting: str) -> Source:
    """Read a user's file, and the modules and packages beside it that it imports, and those that they import.

    It is read once: later changes during a run are not seen.
    """
    text = read_text(path, setting)
    folder, helpers = Path(path).resolve().parent, {}
    unread = [text]
    while unread:
        imports: list[str] = []
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # loading the file reports it
            for node in ast.walk(ast.parse(unread.pop())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    imports += [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        for name in {name.partition(".")[0] for name in imports} - {""}:
            package = [*(folder / name).glob("**/*.py")] if (folder / name / "__init__.py").is_file() else []
            for file in filter(Path.is_file, [folder / f"{name}.py", *sorted(package)]):
                key = str(file.relative_to(folder))
                if key not in helpers:
                    helpers[key] = read_text(str(file), setting)
                    unread.append(helpers[key])
    return Source(path, text, tuple(helpers.items()))


def read_text(path: str, setting: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={path} cannot be read: {error}") from None


def report_once(file: str, limits: Limits, reason: str, row_id: str, then: str) -> None:
    """Say on stderr that a call was ended, the first time for each file and reason."""
    if (file, reason) not in REPORTED:
        REPORTED.add((file, reason))
        how = describe_end(limits, reason)
        print(f"{file}: a call {how} (row {row_id}); {then}", file=sys.stderr, flush=True)


def describe_end(limits: Limits, reason: str) -> str:
    """Say how a call was ended, and which setting allows it more."""
    if reason == TIME:
        return (
            f"took more than {limits.seconds:g} s of computing or {PATIENCE} times that by the clock "
            f"({limits.settings[0]}), and was ended")
    if reason == MEMORY:
        return f"asked for more than {limits.size / 2**30:g} GiB of memory ({limits.settings[1]})"
    return f"ended its process by {reason}"
