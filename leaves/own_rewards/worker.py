"""Run the user's own reward functions in a worker."""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Sequence

from infra.user_worker import Source, WrongFile, on_one_line, run_guarded

ARGUMENTS = ("text", "gold", "tokens", "row")  # the completion, the gold answer, tokens sampled, the data row
# Parameters of other trainers' functions: called by position, they would get the wrong values.
OTHER_FRAMEWORKS = ("completions", "prompts", "solution_str", "ground_truth", "data_source")


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
