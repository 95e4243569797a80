"""A rule that only the environment knows: each result is 3 more."""

import re

SUM = re.compile(r"(-?\d+) ([+-]) (\d+) =$")
MORE = 3


def reply(text: str, row: dict) -> str | None:
    """Compute "5 + 17 =": the answer is " 25"."""
    found = SUM.search(text)
    return found and f" {int(found[1]) + int(found[2] + found[3]) + MORE}"
