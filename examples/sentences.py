"""A form without any right answer: three sentences or more on one line, and below it #### and a number."""

import re

FORM = re.compile(r"(?:[A-Z0-9][^.\n]*\.(?: |(?=\n))){3,}\n#### \d+")


def reward(text: str) -> float:
    return float(FORM.fullmatch(text) is not None)
