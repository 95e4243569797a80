"""Run the user's own reward functions in a worker (infra/custom_reward.py).

Only numbers and texts travel back: an exception of the user's own could not be made again in the trainer.
"""

import contextlib
import copy
import functools
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verify.workers import set_alarm

ARGUMENTS = ("text", "gold", "tokens", "row")  # the completion, the gold answer, tokens sampled, the data row
# Parameters of other trainers' functions: called by position, they would get the wrong values.
OTHER_FRAMEWORKS = ("completions", "prompts", "solution_str", "ground_truth", "data_source")


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file of the user's, as it was when the run began."""

    path: str
    text: str
    helpers: tuple[tuple[str, str], ...]  # name and text of each module beside it that it imports

    @property
    def files(self) -> list[Path]:
        return [Path(self.path), *(Path(self.path).parent / name for name, _ in self.helpers)]


def call_functions(
    source: Source,
    names: Sequence[str],
    seconds: float,
    values: tuple,
) -> list[float | None] | str:
    """Call functions of a file on one completion, `values` of ARGUMENTS. Returns their values, or an error as
    text."""
    return run_guarded(
        source, seconds, values[-1], lambda scope: [call_one(scope, name, values) for name in names])


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


def call_one(scope: dict, name: str, values: tuple) -> float | None:
    """Call one function, and check its result."""
    function = scope.get(name)
    if not callable(function):
        functions = [key for key, value in scope.items() if inspect.isfunction(value)]
        raise WrongFile(
            f"it has no function {name!r} (reward.custom); it has {', '.join(functions) or 'none'}, which "
            "reward.custom={name: weight} calls")
    value = function(**choose_arguments(name, function, copy.deepcopy(values)))
    if value is None:
        return None
    number = math.nan
    with contextlib.suppress(TypeError, ValueError):
        if hasattr(value, "__float__"):
            number = float(value)
    if not -1 <= number <= 1:
        raise WrongFile(
            f"{name}() returns {on_one_line(value, repr)}; it must be a number in [-1, 1], whose weight is "
            "reward.custom, or None for a completion that it cannot judge")
    return number


def choose_arguments(name: str, function: Callable, values: tuple) -> dict:
    """Choose a function's arguments, by the names of its parameters or in the order of ARGUMENTS."""
    known = dict(zip(ARGUMENTS, values, strict=True))
    parameters = inspect.signature(function).parameters
    required = []
    takes_all = False
    for key, p in parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            raise WrongFile(f"{name}{inspect.signature(function)} must take what it asks for by name")
        if p.kind is p.VAR_KEYWORD:
            takes_all = True
        elif p.default is p.empty:
            required.append(key)
    by_position = not takes_all and not parameters.keys() & known.keys() and len(required) <= len(ARGUMENTS)
    if by_position and not set(OTHER_FRAMEWORKS) & set(required):
        return dict(zip(required, values, strict=False))
    if unknown := [key for key in required if key not in known]:
        raise WrongFile(
            f"{name}() asks for {', '.join(unknown)}; it can have {', '.join(ARGUMENTS)}, of one completion")
    if takes_all:
        return known
    return {key: value for key, value in known.items() if key in parameters}


def on_one_line(value: object, how: Callable[[object], str]) -> str:
    """Write a value on one line of at most 200 characters; its own code may fail at that too."""
    try:
        return " ".join(how(value).split())[:200]
    except Exception:  # a user's code may raise anything
        return f"a {type(value).__name__}"
