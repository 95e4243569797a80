"""The expressions of a completion, "27 + 38 = 65.", are computed and must pass the tests of the row.

The text of a model is run in this process, a child of the trainer that may be killed: "9**9**9" ends it after
reward.custom_seconds, and huge numbers meet reward.custom_gib. It can call only the names given here.
"""

import re


def reward(text: str, row: dict) -> float:
    """The share of the row's tests that the values of the expressions pass."""
    values = [value(code) for code in re.findall(r"([-+*/() \d]*\d) =", text)]
    return sum(passes(test, values) for test in row["tests"]) / len(row["tests"])


def value(code: str) -> float | None:
    try:
        return eval(code, {"__builtins__": {}})
    except (SyntaxError, ArithmeticError, TypeError):  # it is no expression, or has no value
        return None


def passes(test: str, values: list) -> bool:
    try:
        return bool(eval(test, {"__builtins__": {}, "len": len}, {"values": values}))
    except IndexError:  # there are fewer values than the test asks for
        return False
