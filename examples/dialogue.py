"""The rows are conversations with two examples in them; any number above both of the last request will do."""

import re


def reward(text: str, row: dict) -> float:
    number = re.fullmatch(r"#### (\d{1,2})", text)
    return float(number is not None and int(number[1]) > row["above"])
