"""Two rewards. Each is None where it cannot judge; where both are, a completion is left out of its group."""

import re

EQUATION = re.compile(r"(\d+) ([-+]) (\d+) = (\d+)\.")


def sound(text: str) -> float | None:
    """The share of equations that hold; None where there is none."""
    holds = [int(a) + int(sign + b) == int(total) for a, sign, b, total in EQUATION.findall(text)]
    return sum(holds) / len(holds) if holds else None


def right(text: str, row: dict) -> float | None:
    """Whether the last line is the row's result; None where the row has none."""
    return None if row["result"] is None else float(text.endswith(f"#### {row['result']}"))
