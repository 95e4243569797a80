"""Two rewards. Each is None if it cannot judge; if both are, the completion is left out of its group."""

import re

EQUATION = re.compile(r"(\d+) ([-+]) (\d+) = (\d+)\.")


def sound(text: str) -> float | None:
    """Return the share of true equations; None without equations."""
    holds = [int(a) + int(sign + b) == int(total) for a, sign, b, total in EQUATION.findall(text)]
    return sum(holds) / len(holds) if holds else None


def right(text: str, row: dict) -> float | None:
    """Tell whether the last line is the row's result; None if the row has none."""
    return None if row["result"] is None else float(text.endswith(f"#### {row['result']}"))
