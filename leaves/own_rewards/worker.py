"""Run the user's own reward functions in a worker."""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Sequence

from infra.user_worker import Source, WrongFile, on_one_line, run_guarded

# What the policy has said last, the gold answer, tokens sampled, the data row, and all turns of the
# conversation as texts: the policy's, by turns with those of an environment.
ARGUMENTS = ("text", "gold", "tokens", "row", "turns")


def call_functions(source: Source, seconds: float, names: Sequence[str],
                   values: tuple) -> list[float | None] | str:
    """Call functions of a file on one completion, `values` of ARGUMENTS. Returns their values, or an error as
    text."""
    row = values[ARGUMENTS.index("row")]
    return run_guarded(source, seconds, row, lambda scope: [call_one(scope, name, values) for name in names])


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
    """Choose a function's arguments by the names of its parameters."""
    known = dict(zip(ARGUMENTS, values, strict=True))
    signature = inspect.signature(function)
    required, takes_all = [], False
    for key, p in signature.parameters.items():
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            raise WrongFile(f"{name}{signature} must take what it asks for by name")
        takes_all = takes_all or p.kind is p.VAR_KEYWORD
        if key not in known and p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            required.append(key)
    if required:
        raise WrongFile(
            f"{name}() asks for {', '.join(required)}; it can have {', '.join(ARGUMENTS)}, of one completion")
    return {key: value for key, value in known.items() if takes_all or key in signature.parameters}
