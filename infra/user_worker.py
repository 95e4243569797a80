"""Run the files that a user gives in a worker.

Only numbers and texts travel back: an exception of the user's own could not be made again in the trainer.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file of the user's, as it was when the run began."""

    path: str
    text: str
    helpers: tuple[tuple[str, str], ...]  # name and text of each module beside it that it imports

    @property
    def files(self) -> list[Path]:
        return [Path(self.path), *(Path(self.path).parent / name for name, _ in self.helpers)]


LOADED: dict[Source, dict | str] = {}  # the names of a file, or why it could not be loaded


def load_ahead(source: Source, *functions: Callable) -> None:
    """Load a file in the host; each call is a fork of that. What is called is loaded before, so that
    no module beside the file takes the place of one of ours."""
    try:
        LOADED[source] = load(source)
        if threading.active_count() > 1:
            raise WrongFile("it starts threads when it is loaded, which no call would have; start them in "
                            "the function")
    except MemoryError:
        raise
    except BaseException as error:  # SystemExit too: a user's code may raise anything
        LOADED[source] = describe_error(error, source, {})


def run_guarded(source: Source, row: dict, work: Callable[[dict], Any]) -> Any:
    """Do some work with the names of a file for a row. Returns the result, or an error as text; ends if the
    work does."""
    if isinstance(scope := LOADED[source], str):
        return scope
    try:
        return work(scope)
    except MemoryError:
        raise
    except (SystemExit, KeyboardInterrupt):  # of a text that the function has executed, perhaps
        os._exit(1)
    except BaseException as error:  # as above
        return describe_error(error, source, row)


def describe_error(error: BaseException, source: Source, row: dict) -> str:
    if isinstance(error, WrongFile):
        return str(error)
    place, text = name_place(error, source.path), on_one_line(error, str)
    if isinstance(error, KeyError) and row and error.args and error.args[0] not in row:
        text += f"; the row has {', '.join(map(str, row))}"  # and not this column
    return f"it raises {type(error).__name__}{place}: {text}"


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


class WrongFile(Exception):
    """A function is missing, asks for an unknown argument, or returns another value than it must."""


def load(source: Source) -> dict:
    """Run the file as a module, with its folder first on sys.path."""
    folder = Path(source.path).resolve().parent
    for name, text in source.helpers:
        if not (folder / name).is_file() or (folder / name).read_text() != text:
            raise WrongFile(f"{name}, which it imports, has changed since the run began; restore it")
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
    except BaseException:  # a user's code may raise anything
        return f"a {type(value).__name__}"
