"""Read the Python files that a user gives, and say how calls of them were ended."""

import functools
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from infra.terminal import to_stderr
from infra.user_worker import Source, load_ahead
from settings.loader import ConfigError, frozen
from verify.workers import MEMORY, TIME, Limits, OverLimit, call

MOST = 64  # calls at a time: while one waits, others compute
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
        imports = " ".join(re.findall(r"\b(?:import|from)\b[^(\n]*(?:\([^)]*\))?", unread.pop()))
        for name in sorted(set(re.findall(r"\w+", imports))):
            for file in (*folder.glob(f"{name}.py"), *sorted(folder.glob(f"{name}/**/*.py"))):
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


@frozen
class UserFile:
    """A file of the user's, as it was when the run began, and how its functions are called."""

    setting: str
    source: Source
    seconds: float  # of computing, and of waiting, for a call
    gib: float
    workers: int = MOST

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.setting}={self.source.path}: {what}")

    def call(self, function: Callable, *given: object) -> Future:
        """Call a function, with the file, in a worker of its own."""
        limits = Limits(int(self.gib * 2**30), self.workers, self.seconds,
                        (load_ahead, self.source, function), once=True)
        return call(function, self.source, *given, limits=limits)

    def checked(self, value: Any, where: str = "") -> Any:
        """Return the value of a call. Raises ConfigError for an error, which is a text."""
        if isinstance(value, str):
            raise self.error(value + where)
        return value

    def first_value(self, call: Future, where: str = "") -> Any:
        """Wait for a call before the run. Raises ConfigError for an error and if it has to be ended."""
        try:
            return self.checked(call.result(), where)
        except OverLimit as error:
            raise self.error(f"before the run, a call {self.describe_end(error)}{where}") from None

    def report_once(self, ended: OverLimit, row_id: str, then: str) -> str:
        """Say how a call was ended, and on stderr too, the first time for each file and reason."""
        how = self.describe_end(ended)
        if (self.source.path, str(ended)) not in REPORTED:
            REPORTED.add((self.source.path, str(ended)))
            to_stderr(f"{self.setting}={self.source.path}: a call {how} (row {row_id}); {then}")
        return how

    def describe_end(self, ended: OverLimit) -> str:
        """Say how a call was ended, and which setting allows it more."""
        names, reason = self.setting.removesuffix("file"), str(ended)  # environment. or reward.custom_
        if reason == TIME:
            return (f"took more than {self.seconds:g} s of computing or of waiting ({names}seconds), and was "
                    "ended")
        if reason == MEMORY:
            return f"asked for more than {self.gib:g} GiB of memory ({names}gib)"
        return f"ended its process by {reason}"
