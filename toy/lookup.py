"""A table that only the environment sees: who is whose friend, and how many coins each has."""

import re

ASKED = re.compile(r"(friend|coins) of (\w+)\?$")


def reply(text: str, row: dict) -> str | None:
    """Answer "friend of Ada?" by " Ben." and "coins of Ben?" by " 7."; 0 for who is not in the table."""
    found = ASKED.search(text)
    return found and f" {row[found[1]].get(found[2], 0)}."
