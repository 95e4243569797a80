"""Decide whether an answer is right: `grade` returns "right", "wrong", "unparsed" or "timed_out".

Cheap comparisons come first: the caller's process compares spelling, structure and numbers (answer.py). A
worker process compares expressions (algebra.py); it is ended after VERIFY_SECONDS of computing and gets no
more than VERIFY_BYTES. So no text can hang or crash the trainer, and no worker outlives it.
"""

import functools
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace

from verify.answer import answers_equal, is_readable
from verify.errors import VerifyError
from verify.extract import extract, last_number, last_tag
from verify.number import number, same_numbers
from verify.workers import WORKERS, Limits, OverLimit, call

VERIFY_SECONDS = 3.0     # of computing: a busy machine changes no reward
VERIFY_BYTES = 2 << 30   # of memory beyond a new worker's, for a number of billions of digits
FIRST_SECONDS = 0.1      # of computing for the first try of an answer; nearly all take less
SHARED_SECONDS = 15.0    # for all second tries of a batch, or FIRST_SECONDS an answer if that is more
SHOWN_IDS = 10               # ids that a warning names


# ---- one answer

class NeedsAlgebra(Exception):
    """Spelling, structure and numbers do not tell whether two expressions are equal."""


def leave_to_algebra(gold: str, answer: str) -> bool:
    raise NeedsAlgebra


@functools.lru_cache(20_000)
def begin_verdict(gold: str, answer: str | None, seconds: float = VERIFY_SECONDS) -> str | Future:
    """Compare an answer with the gold one. Return the verdict if cheap, else the call that computes it."""
    if answer is None or not answer.strip():
        return "unparsed"
    try:
        return "right" if answers_equal(gold, answer, leave_to_algebra) else "wrong"
    except NeedsAlgebra:
        return call(compare_by_algebra, gold, answer, limits=replace(ALGEBRA, seconds=seconds))
    except Exception:  # an unforeseen text must not end a run of days
        return "unparsed"


def compare_by_algebra(gold: str, answer: str) -> str:
    """Return the verdict on an answer, in a worker: expressions are equal if their values are."""
    from verify.algebra import compare_expressions

    failures = []

    def compare_or_note(a, b):
        try:
            return compare_expressions(a, b)
        except MemoryError:
            raise
        except Exception as error:  # math-verify and sympy raise many kinds on text that is no mathematics
            failures.append(error)
            return False

    if answers_equal(gold, answer, compare_or_note):
        return "right"
    return "unparsed" if failures else "wrong"


# The first comparison takes as long as fifty others: it is made before there are workers.
ALGEBRA = Limits(VERIFY_BYTES, WORKERS, VERIFY_SECONDS,
                 (compare_by_algebra, r"\frac{x+1}{2}; |x|<1", "0.5x+0.5; (-1,1)"), "verify.algebra")


def finish_verdict(verdict: str | Future) -> str | bool:
    """Wait for a verdict, and return it; "timed_out" or "unparsed" for one that no worker lives to give."""
    if isinstance(verdict, str):
        return verdict
    try:
        return verdict.result()
    except OverLimit:
        return "timed_out"
    except VerifyError:
        raise
    except Exception:  # as in begin_verdict
        return "unparsed"


def last_number_equal(gold: str, text: str) -> bool:
    """Grade leniently, as CPPO does: tell whether the text, or the last number in it, is the gold answer.

    If the text has an answer tag, only the content of the tag counts.
    """
    tag, written = last_tag(text), last_number(text)
    if (text if tag is None else tag).strip() == gold:
        return True
    return bool(written and same_numbers(gold, written))


# ---- many answers

def grade(pairs: list[tuple[str, str]]) -> list[dict]:
    """Grade pairs of a gold answer and a completion; the workers take them in parallel.

    A grade holds the `answer` that the completion marks (None: it marks none) and its `verdict`: "right",
    "wrong", "unparsed" (no answer, or one that cannot be read) or "timed_out": answers that take long share
    seconds that grow with the number of answers. `last_number` tells whether
    the last number is right, and `lenient` whether that or the answer is.
    """
    asked = [(gold, extract(text)) for gold, text in pairs]
    verdicts = judge(asked, FIRST_SECONDS)
    slow = {pair for pair in asked if verdicts[pair] == "timed_out"}
    share = min(VERIFY_SECONDS, max(SHARED_SECONDS, FIRST_SECONDS * len(asked)) / max(1, len(slow)))
    if share > FIRST_SECONDS:
        verdicts |= judge(slow, share)
    grades = []
    for (gold, text), (_, answer) in zip(pairs, asked, strict=True):
        verdict = verdicts[gold, answer]
        last_right = last_number_equal(gold, text)
        grades.append({"answer": answer, "verdict": verdict, "last_number": last_right,
                       "lenient": last_right or verdict == "right"})
    return grades


def judge(pairs: Iterable[tuple[str, str | None]], seconds: float) -> dict[tuple, str]:
    """Return the verdict on each answer that takes at most so many seconds, else "timed_out"."""
    begun = {pair: begin_verdict(*pair, seconds) for pair in pairs}
    return {pair: finish_verdict(verdict) for pair, verdict in begun.items()}


def unreadable(golds: Iterable[str]) -> set[str]:
    """Return the gold answers that the verifier cannot read; only the same spelling is right for them."""
    calls = {gold: call(is_readable, gold, algebra_can_read, limits=ALGEBRA)
             for gold in set(golds) if number(gold) is None}
    return {gold for gold, future in calls.items() if finish_verdict(future) is not True}


def algebra_can_read(expression: str) -> bool:
    """Tell, in a worker, whether an expression can be parsed."""
    from verify.algebra import read_formula

    try:
        read_formula(expression)
        return True
    except Exception:  # as in compare_by_algebra
        return False


def name_unreadable(name: str, golds: dict[str, str], needed: bool) -> None:
    """Warn of the gold answers {id: answer} of the data set `name` that the verifier cannot read. Raises
    VerifyError if they are `needed` and it can read none."""
    unread = unreadable(golds.values())
    ids = [i for i, gold in golds.items() if gold in unread]
    if ids and needed and len(ids) == len(golds):
        raise VerifyError(f"{name}: none of the {len(golds)} gold answers can be read, for example "
                          f"{golds[ids[0]][:200]!r} of {ids[0]}")
    if ids:
        shown = ", ".join(ids[:SHOWN_IDS]) + (" ..." if len(ids) > SHOWN_IDS else "")
        print(f"{name}: {len(ids)} of {len(golds)} gold answers cannot be read, and only the same spelling "
              f"counts as right: {shown}", file=sys.stderr)

