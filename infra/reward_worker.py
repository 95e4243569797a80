"""Run the user's own reward functions in a worker (infra/custom_reward.py).

Only numbers and texts travel back: an exception of the user's own could not be made again in the trainer.
"""

import copy
import functools
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from verify.grade import allow

KNOWN = ("text", "gold", "tokens", "row")  # the completion, the gold answer, tokens sampled, the data row
# What other trainers' functions ask for: called by position, they would be given something else.
FOREIGN = ("completions", "prompts", "solution_str", "ground_truth", "data_source")
HERE = Path(__file__).parent.parent


def call_functions(path: str, source: str, names: Sequence[str], seconds: float, values: tuple,
                   ) -> list[float | None] | str:
    """Call functions of a file on one completion, `values` of KNOWN. Returns theirs, or what is wrong."""
    process = os.getpid()
    try:
        scope = load_once(path, source)
        allow(seconds)  # else a worker that has just loaded the file would have less than others
        return [call_one(scope, name, values) for name in names]
    except MemoryError:
        raise
    except WrongReward as error:
        return str(error)
    except BaseException as error:  # SystemExit too: a user's code may raise anything
        return f"it raises {type(error).__name__}{place_of(error, path)}: {on_one_line(error, str)}" + (
            missing_column(error, values[-1]))
    finally:
        if os.getpid() != process:  # the function has forked: its child must not answer too
            os._exit(0)


def place_of(error: BaseException, path: str) -> str:
    """Name the innermost line of the user's, in the file itself or in a helper beside it."""
    folder = Path(path).resolve().parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename == path or Path(frame.filename).resolve().parent == folder]
    if not frames:
        return ""
    beside = "" if frames[-1].filename == path else f" of {Path(frames[-1].filename).name}"
    return f" in line {frames[-1].lineno}{beside}"


def missing_column(error: BaseException, row: dict) -> str:
    """Name the columns of the row after a KeyError for one that it does not have."""
    if isinstance(error, KeyError) and row and error.args and error.args[0] not in row:
        return f"; the row has {', '.join(map(str, row))}"
    return ""


class WrongReward(Exception):
    """A function is missing, asks for what there is not, or returns what is no reward."""


@functools.cache
def load_once(path: str, source: str) -> dict:
    """Run the file as a module, with its folder first on sys.path. Modules of ours make room there for files
    of the same name: no worker needs them any more."""
    folder = Path(path).resolve().parent
    for name, module in list(sys.modules.items()):
        ours = Path(getattr(module, "__file__", None) or "/").parent == HERE
        if ours and folder != HERE and (folder / f"{name}.py").is_file():
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    module = ModuleType(Path(path).stem)
    module.__file__ = path
    sys.modules[module.__name__] = module  # where dataclasses look for it
    exec(compile(source, path, "exec"), module.__dict__)
    return module.__dict__


def call_one(scope: dict, name: str, values: tuple) -> float | None:
    """Call one function, and check what it returns."""
    function = scope.get(name)
    if not callable(function):
        functions = [key for key, value in scope.items() if inspect.isfunction(value)]
        raise WrongReward(f"it has no function {name!r} (reward.custom); it has "
                          f"{', '.join(functions) or 'none'}, which reward.custom={{name: weight}} calls")
    value = function(**arguments_of(name, function, copy.deepcopy(values)))
    if value is None:
        return None
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not -1 <= number <= 1:
        raise WrongReward(f"{name}() returns {on_one_line(value, repr)}; it must be a number in [-1, 1], "
                          "whose weight is reward.custom, or None for a completion that it cannot judge")
    return number


def arguments_of(name: str, function: Callable, values: tuple) -> dict:
    """Choose what a function gets, by the names of its parameters or in the order of KNOWN."""
    known = dict(zip(KNOWN, values, strict=True))
    parameters = inspect.signature(function).parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) for p in parameters.values()):
        raise WrongReward(f"{name}{inspect.signature(function)} must take what it asks for by name")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    required = [key for key, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    by_position = not takes_all and not parameters.keys() & known.keys() and len(required) <= len(KNOWN)
    if by_position and not set(FOREIGN) & set(required):
        return dict(zip(required, values, strict=False))
    if unknown := [key for key in required if key not in known]:
        raise WrongReward(f"{name}() asks for {', '.join(unknown)}; it can have {', '.join(KNOWN)}, of one "
                          "completion")
    return known if takes_all else {key: value for key, value in known.items() if key in parameters}


def on_one_line(value: object, how: Callable[[object], str]) -> str:
    """Write a value on one line of at most 200 characters; its own code may fail at that too."""
    try:
        return " ".join(how(value).split())[:200]
    except Exception:  # a user's code may raise anything
        return f"a {type(value).__name__}"
