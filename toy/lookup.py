"""A table that only the environment sees: it leads from number to number."""

import re


def reply(text: str, row: dict) -> str | None:
    """Answer "41?" by " 17." if the row's table leads from 41 to 17, and by " 0." if it has no 41."""
    asked = re.search(r"(\d+)\?$", text)
    return asked and f" {row['next'].get(asked[1], 0)}."
