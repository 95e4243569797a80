"""Grade by math-verify itself, called as its documentation says, to compare with published figures."""

from verify.grade import ALGEBRA
from verify.workers import OverLimit, call


def judge_by_math_verify(pairs: list[tuple[str, str]]) -> list[tuple[bool, str]]:
    """Judge pairs of a gold answer and a completion: whether it is right, and how math-verify reads both.

    The workers' limit (VERIFY_SECONDS) replaces its time-outs. A completion that it does not finish is wrong.
    """
    calls = [call(parse_and_verify, gold, text, limits=ALGEBRA) for gold, text in pairs]
    verdicts = []
    for future in calls:
        try:
            verdicts.append(future.result())
        except OverLimit as error:
            verdicts.append((False, str(error)))
    return verdicts


def parse_and_verify(gold: str, text: str) -> tuple[bool, str]:
    """Judge one pair, in a worker."""
    from math_verify import parse, verify

    gold_read, answer_read = parse(f"${gold}$", parsing_timeout=None), parse(text, parsing_timeout=None)
    texts = [str(x[0]) if x else "nothing" for x in (answer_read, gold_read)]
    return bool(verify(gold_read, answer_read, timeout_seconds=None)), " for ".join(texts)
