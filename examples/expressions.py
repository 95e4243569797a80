"""The expressions of a completion, "27 + 38 = 65.", are computed and must pass the tests of the row.

The text of a model is run in this process, a child of the trainer that may be killed: "9**9**9" ends it after
reward.custom_seconds, and huge numbers meet reward.custom_gib. It can hold numbers and signs alone. A test of
the data is read and never run: "values[0] == 61" or "len(values) >= 2".
"""

import re

TEST = re.compile(r"(?:len\(values\)|values\[(-?\d)\]) (==|>=) (-?\d+)")


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
    place, sign, number = TEST.fullmatch(test).groups()
    if place and not -len(values) <= int(place) < len(values):
        return False  # there are fewer values than the test asks for
    found = values[int(place)] if place else len(values)
    return found == int(number) or sign == ">=" and found is not None and found > int(number)
