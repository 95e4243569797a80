"""The gold answers of public data sets and the labelled cases, if they lie in shared/data beside the repository."""

import json
import random
from fractions import Fraction

import pytest
from respelling import ROOT, verdict

from verify import answer
from verify import grade as grading
from verify.number import number
from verify.spelling import normalise

SHARED = ROOT.parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data sets in {SHARED}")


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHARED / f"{name}.jsonl").read_text().split("\n") if line]


def test_the_labelled_cases():
    cases = lines("grader_cases")
    grades = grading.grade([(case["gold"], case["completion"]) for case in cases])
    rights = [graded["verdict"] == "right" for graded in grades]
    wrong = [case for case, right in zip(cases, rights, strict=True) if case["correct"] != right]
    assert len(cases) == 412 and len(wrong) <= 4
    assert sum(not case["correct"] for case in wrong) <= 2


@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test", "math_train", "math_test4500", "math500"])
def test_every_gold_solution_is_right(name):
    """But for rows that box several different things, and the two whose box is empty in the source."""
    rows = lines(name)
    grades = grading.grade([(row["answer"], row["solution"]) for row in rows])
    exceptions = [row for row, graded in zip(rows, grades, strict=True) if graded["verdict"] != "right"]
    assert all(row.get("all_boxed") or row.get("answer_raw") == "" for row in exceptions), exceptions
    assert len(exceptions) == {"math_train": 12, "math_test4500": 7}.get(name, 0)


def test_every_gold_answer_is_right_and_nearly_all_can_be_read():
    names = ("gsm8k_test", "math_train", "math_test4500", "aime24", "aime25", "amc23", "minerva_math", "olympiadbench")
    golds = [row["answer"] for name in names for row in lines(name)]
    assert all(verdict(gold, gold) == "right" for gold in golds)
    assert len(grading.unreadable(golds)) <= 5


def test_different_golds_are_different():
    """10,000 random pairs; equal are only those that are one value in two spellings."""
    golds = sorted({row["answer"] for name in ("gsm8k_test", "math_train", "math_test4500", "minerva_math",
                                               "olympiadbench") for row in lines(name)})
    rng = random.Random(1)
    pairs = [rng.sample(golds, 2) for _ in range(10_000)]
    for a, b in pairs:
        grading.begin_verdict(a, b)
    same = [(a, b) for a, b in pairs if verdict(a, b) == "right"]
    assert all(value(a) == value(b) is not None for a, b in same), same
    assert len(same) < 20


def value(text: str) -> Fraction | None:
    found = number(answer.strip_wrapping(normalise(text))[0])
    return None if found is None else found[0]
