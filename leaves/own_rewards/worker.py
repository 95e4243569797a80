"""Run the user's own reward functions in a worker."""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Sequence

from infra.user_worker import Source, WrongFile, on_one_line, run_guarded


def call_functions(source: Source, names: Sequence[str], known: dict) -> list[float | None] | str:
    """Call functions of a file on one completion. They may ask for all that is `known` of it. Returns their
    values, or an error as text."""
    return run_guarded(source, known["row"], lambda scope: [call_one(scope, name, known) for name in names])


def call_one(scope: dict, name: str, known: dict) -> float | None:
    """Call one function, and check its result."""
    function = scope.get(name)
    if not callable(function):
        functions = [key for key, value in scope.items() if inspect.isfunction(value)]
        raise WrongFile(
            f"it has no function {name!r} (reward.custom); it has {', '.join(functions) or 'none'}, which "
            "reward.custom={name: weight} calls, beside those of the config's base")
    value = function(**choose_arguments(name, function, copy.deepcopy(known)))
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


def choose_arguments(name: str, function: Callable, known: dict) -> dict:
    """Choose a function's arguments by the names of its parameters."""
    signature = inspect.signature(function)
    chosen, missing = {}, []
    for key, p in signature.parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            raise WrongFile(f"{name}{signature} must take what it asks for by name")
        if p.kind is p.VAR_KEYWORD:  # the last one
            chosen = known
        elif key in known:
            chosen[key] = known[key]
        elif p.default is p.empty:
            missing.append(key)
    if missing:
        raise WrongFile(
            f"{name}() asks for {', '.join(missing)}; it can have {', '.join(known)}, of one completion")
    return chosen
