"""1 for the right number in a box, 0.5 for it as the last number of the text, else 0.

A reward for the box alone was learnt at once, and unlearnt computing.
"""

import re

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def reward(text: str, gold: str) -> float:
    gold = plain(gold)
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if boxes and plain(boxes[-1]) == gold:
        return 1.0
    numbers = NUMBER.findall(text)
    return 0.5 if numbers and plain(numbers[-1]) == gold else 0.0


def plain(number: str) -> str:
    """Write 1,200 and 1200.0 as 1200."""
    return re.sub(r"\.0+$", "", number.strip().replace(",", ""))
