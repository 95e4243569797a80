"""A calculator: it writes the result of the sum that a turn ends with."""

import re

SUM = re.compile(r"(-?\d+) ([+-]) (\d+) =$")


def reply(text: str, row: dict) -> str | None:
    """Compute "5 + 17 =": the answer is " 22". Anything else ends the completion."""
    found = SUM.search(text)
    return found and f" {int(found[1]) + int(found[2] + found[3])}"
