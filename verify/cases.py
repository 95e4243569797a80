"""Measure the verifier on labelled cases: how often it is right, and which cases it gets wrong."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter

from verify.errors import VerifyError
from verify.grade import VERIFY_SECONDS, grade

CASE = {"gold": str, "completion": str, "correct": bool, "category": str}
# How files of other programs write the end of a sequence: here are texts, and no ids of tokens.
END = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|eom_id|end_of_text)\|>|<｜[^｜\n]{1,40}｜>|"
                 r"</s>|<eos>|<end_of_turn>")


def grade_cases(path: Path) -> int:
    """Grade labelled completions, and print how often the verifier is right. Returns the exit status."""
    try:
        cases = read_cases(path)
    except VerifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    start = perf_counter()
    grades = grade([(case["gold"], END.split(case["completion"], maxsplit=1)[0]) for case in cases])
    seconds = perf_counter() - start
    counts = count_outcomes(cases, grades)
    print(f"{'category':<24} {'cases':>6} {'accuracy':>9} {'false positives':>16} {'false negatives':>16}")
    for name, outcomes in counts:
        fraction_right = (outcomes["true positive"] + outcomes["true negative"]) / outcomes.total()
        print(f"{name:<24} {outcomes.total():>6} {fraction_right:>9.1%} {outcomes['false positive']:>16} "
              f"{outcomes['false negative']:>16}")
    killed = sum(graded["verdict"] == "timed_out" for graded in grades)
    print(f"{len(cases)} cases in {seconds:.1f} s; {killed} took more than {VERIFY_SECONDS:g} s: wrong too")
    return 0


def read_cases(path: Path) -> list[dict]:
    """Read labelled completions. Raises VerifyError with the line of a malformed one."""
    if not path.is_file():
        raise VerifyError(f"--cases: file {path} not found")
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    cases = [read_case(line, f"{path}:{i}") for i, line in lines if line.strip()]
    if not cases:
        raise VerifyError(f"{path} holds no cases")
    return cases


def read_case(line: bytes, place: str) -> dict:
    """Read one line of a file of cases; its category is "all" if it names none. Raises VerifyError."""
    try:
        case = json.loads(line)
        json.dumps(case, ensure_ascii=False).encode()  # raises for half a character
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 and numbers of 5,000 digits too
        raise VerifyError(f"{place}: not valid JSON ({error}); each line must be one case") from None
    case = {"category": "all"} | case if isinstance(case, dict) else {}
    for key, kind in CASE.items():
        value = case.get(key)
        if not isinstance(value, kind):
            raise VerifyError(f"{place}: the {key!r} of a case must be a {kind.__name__}, not "
                              f"{shorten(repr(value), 200)}")
    return case


def count_outcomes(cases: list[dict], grades: list[dict]) -> list[tuple[str, Counter]]:
    """Count true and false positives and negatives by category and, last, in total; print each false one."""
    counts = {}
    for case, graded in zip(cases, grades, strict=True):
        right = graded["verdict"] == "right"
        outcome = ("true " if case["correct"] == right else "false ") + ("positive" if right else "negative")
        counts.setdefault(case["category"], Counter())[outcome] += 1
        if case["correct"] != right:
            print(f"{outcome}: {case['category']}: gold {shorten(case['gold'])!r}, answer "
                  f"{shorten(graded['answer'] or '')!r}, judged {graded['verdict']}")
    return [*counts.items(), ("total", sum(counts.values(), Counter()))]


def shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[:width // 2]} ... {text[-width // 2:]}"
