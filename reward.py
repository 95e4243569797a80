"""Rewards: named components of a completion's text, summed by weight (`reward.<component>` in the config).

Verification goes from cheap to costly: equal texts, equal numbers, then math-verify in a process of its own, which the
kernel kills when it takes longer than VERIFY_SECONDS. So no text can hang or crash the trainer, nor outlive it.
"""

import functools
import logging
import multiprocessing
import re
import signal
from fractions import Fraction

from pebble import ProcessExpired, ProcessPool

VERIFY_SECONDS = 5.0
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)")
BRACES = re.compile(r"\\boxed\s*\{|\\boxed\s+(?P<bare>[^\s{}$\\.,]+)|\\.|[{}]", re.DOTALL)
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# CPPO's pattern. MULTILINE lets text after a closing line through, as in the released code.
THINK_FORMAT = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL | re.MULTILINE)


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces nested, escaped ones apart, or of \boxed 7; else None."""
    open_at, found = [], (-1, None)  # a brace's start of content if it is a box's, else -1
    for mark in BRACES.finditer(text):
        if mark[0] == "}":
            start = open_at.pop() if open_at else -1
            if start > found[0]:
                found = start, text[start:mark.start()]
        elif mark["bare"]:
            found = mark.start(), mark["bare"]
        elif mark[0][-1] == "{" and mark[0] != "\\{":
            open_at.append(mark.end() if len(mark[0]) > 1 else -1)
    return found[1]


def last_tag(text: str) -> str | None:
    """Content of the last <answer>...</answer>."""
    tags = ANSWER_TAG.findall(text)
    return tags[-1].strip() if tags else None


def extract(text: str) -> str | None:
    r"""The final answer a completion marks: its last \boxed{}, else what stands behind "####", else its answer tag."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    return last_tag(text)


def normalise(answer: str) -> str:
    """Spelling that never changes the value: outer $, a final full stop, text wrappers, spaces but between digits.

    Thousands commas go only where the whole answer is one number: (1,234) is a pair.
    """
    answer = answer.strip().strip("$").strip().removesuffix(".")
    answer = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", answer)
    answer = answer.replace("\\$", "").replace("\\!", "").replace("\\left", "").replace("\\right", "")
    answer = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        answer = answer.replace(",", "")
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", answer)


def to_number(answer: str) -> Fraction | None:
    r"""The value of a plain decimal, a/b or \frac{a}{b}; None for anything else. Never evaluates an expression."""
    match = re.fullmatch(r"(-?)\$?(?:\\frac\{(-?\d+)\}\{(\d+)\}|(-?\d+)/(\d+)|([-+]?\d*\.?\d+|[-+]?\d+\.))", answer)
    if match is None or len(answer) > 100:
        return None
    sign, top, bottom, over, under, decimal = match.groups()
    if decimal is None and int(bottom or under) == 0:
        return None
    value = Fraction(decimal) if decimal else Fraction(int(top or over), int(bottom or under))
    return -value if sign else value


def accuracy_one(answer: str | None, gold: str) -> bool | None:
    """Whether the answers are equal, or None where only math-verify can tell."""
    if answer is None or not answer.strip():
        return False
    left, right = normalise(answer), normalise(gold)
    if left == right:
        return True
    a, b = to_number(left), to_number(right)
    return None if a is None or b is None else a == b


def load_math_verify() -> None:
    """Import at the worker's start, so that these seconds are not counted as verification."""
    import math_verify

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is meant for the trainer, which ends its step first
    # It warns at every call that its own time-outs are off.
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)


def run_math_verify(gold: str, answer: str, seconds: float) -> bool:
    from math_verify import parse, verify

    # math-verify's own time-outs raise in Python, which a long integer power never returns to. An alarm without a
    # handler ends the process at once, also when the trainer has died and nobody is left to kill it.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
        return bool(verify(*parsed, timeout_seconds=None))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@functools.cache
def verifiers() -> ProcessPool:
    return ProcessPool(max_workers=1, initializer=load_math_verify, context=multiprocessing.get_context("spawn"))


@functools.lru_cache(maxsize=100_000)
def verify_slowly(gold: str, answer: str) -> bool:
    """math-verify's judgement; a time-out or a crash of its process counts as wrong."""
    try:
        return verifiers().schedule(run_math_verify, args=[gold, answer, VERIFY_SECONDS]).result()
    except ProcessExpired:
        return False


def accuracy(text: str, gold: str) -> float:
    """1 if the marked final answer equals the gold one, else 0."""
    answer = extract(text)
    known = accuracy_one(answer, gold)
    return float(verify_slowly(gold, answer) if known is None else known)


def think_format(text: str, gold: str) -> float:
    """1 for <think>...</think>, a new line, <answer>...</answer>, as CPPO (arXiv:2503.22342) asks for."""
    return float(THINK_FORMAT.match(text) is not None)


def tag_exact(text: str, gold: str) -> float:
    """1 if the last answer tag holds the gold answer to the letter, commas aside (CPPO's GSM8K reward)."""
    answer = last_tag(text)
    return float(answer is not None and answer.replace(",", "") == gold.replace(",", ""))


def tag_number(text: str, gold: str) -> float:
    """1 if the last answer tag and the gold answer each hold exactly one number, and the same (CPPO's GSM8K reward)."""
    numbers = [NUMBER.findall(x.replace(",", "")) for x in (last_tag(text) or "", gold)]
    return float(all(len(found) == 1 for found in numbers) and float(numbers[0][0]) == float(numbers[1][0]))


def soft_overlong(tokens: int, longest: int, cache: int) -> float:
    """DAPO's punishment of length (arXiv:2503.14476, eq. 13): 0 up to longest - cache tokens, then falling to -1."""
    return min(max((longest - cache - tokens) / cache, -1.0), 0.0)


TEXT = {"accuracy": accuracy, "format": think_format, "tag_exact": tag_exact, "tag_number": tag_number}
LENGTH = {"overlong": soft_overlong}
COMPONENTS = TEXT | LENGTH


def score(text: str, gold: str, tokens: int, weights: dict[str, float], longest: int,
          cache: int | None) -> dict[str, float]:
    """Each of these components, unweighted, of a completion of so many tokens; `longest` are allowed."""
    return {name: TEXT[name](text, gold) if name in TEXT else LENGTH[name](tokens, longest, cache) for name in weights}


def span(weights: dict[str, float]) -> tuple[float, float]:
    """The least and the most that a reward can be: components of the text are in [0, 1], of the length in [-1, 0]."""
    ends = [(-weight, 0.0) if name in LENGTH else (0.0, weight) for name, weight in weights.items()]
    return sum(map(min, ends)), sum(map(max, ends))
