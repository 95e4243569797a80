"""Run the files that a user gives in a worker.

Only numbers and texts travel back: an exception of the user's own could not be made again in the trainer.
"""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verify.workers import set_alarm


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file of the user's, as it was when the run began."""

    path: str
    text: str
    helpers: tuple[tuple[str, str], ...]  # name and text of each module beside it that it imports

    @property
    def files(self) -> list[Path]:
        return [Path(self.path), *(Path(self.path).parent / name for name, _ in self.helpers)]


def run_guarded(source: Source, seconds: float, row: dict, work: Callable[[dict], Any]) -> Any:
    """Load a file, and do some work with its names for a row. Returns the result, or an error as text."""
    process = os.getpid()
    try:
        scope = load_once(source)
        set_alarm(seconds)  # else a worker that has just loaded the file would have less than others
        return work(scope)
    except MemoryError:
        raise
    except WrongFile as error:
        return str(error)
    except BaseException as error:  # SystemExit too: a user's code may raise anything
        place, text = name_place(error, source.path), on_one_line(error, str)
        return f"it raises {type(error).__name__}{place}: {text}{name_columns(error, row)}"
    finally:
        if os.getpid() != process:  # the function has forked: its child must not answer too
            os._exit(0)


def name_place(error: BaseException, path: str) -> str:
    """Name the innermost line of the user's code, in the file itself or in a helper beside it."""
    folder = Path(path).resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == path:
            return f" in line {frame.lineno}"
        file = Path(frame.filename)
        if file.resolve().parent == folder:
            return f" in line {frame.lineno} of {file.name}"
    return ""


def name_columns(error: BaseException, row: dict) -> str:
    """Name the columns of the row after a KeyError for one that it does not have."""
    if isinstance(error, KeyError) and row and error.args and error.args[0] not in row:
        return f"; the row has {', '.join(map(str, row))}"
    return ""


class WrongFile(Exception):
    """A function is missing, asks for an unknown argument, or returns another value than it must."""


@functools.cache
def load_once(source: Source) -> dict:
    """Run the file as a module, with its folder first on sys.path. Modules with the names of its helpers, of
    Winnow or of another user's file, are unloaded: no worker needs them any more."""
    folder = Path(source.path).resolve().parent
    for name, text in source.helpers:
        if not (folder / name).is_file() or (folder / name).read_text() != text:
            raise WrongFile(f"{name}, which it imports, has changed since the run began; restore it")
    helpers = {Path(name).parts[0].removesuffix(".py") for name, _ in source.helpers}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if name.partition(".")[0] in helpers - sys.stdlib_module_names and folder not in file.parents:
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    module = ModuleType(Path(source.path).stem)
    module.__file__ = source.path
    sys.modules[module.__name__] = module  # dataclasses look for it there
    exec(compile(source.text, source.path, "exec"), module.__dict__)
    return module.__dict__


def on_one_line(value: object, how: Callable[[object], str]) -> str:
    """Write a value on one line of at most 200 characters; its own code may fail at that too."""
    try:
        return " ".join(how(value).split())[:200]
    except Exception:  # a user's code may raise anything
        return f"a {type(value).__name__}"
