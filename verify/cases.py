"""Measure the verifier on labelled cases: how often it is right, and which cases it gets wrong.

Their gold answers are graded against themselves too, in every spelling that changes no value.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from verify.errors import VerifyError
from verify.grade import grade

# Ways to write an answer that change no value.
SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": lambda gold: gold,
    "between spaces": lambda gold: f" {gold} ",
    "in dollars": lambda gold: f"${gold}$",
    "in round delimiters": lambda gold: rf"\({gold}\)",
    "in braces": lambda gold: f"{{{gold}}}",
    "with a full stop": lambda gold: f"{gold}.",
    "in display style": lambda gold: rf"\displaystyle {gold}",
    "with large fractions": lambda gold: gold.replace("\\frac", "\\dfrac"),
    "with a printed minus": lambda gold: gold.replace("-", "−"),
    "with large brackets": lambda gold: re.sub(r"(?<!\\left)(?<!\\)\(([^()]*)\)", r"\\left(\1\\right)", gold),
}
CASE = {"gold": str, "completion": str, "correct": bool}


def read_cases(path: Path) -> list[dict]:
    """Read labelled completions. Raises VerifyError with the line of a malformed one."""
    if not path.is_file():
        raise VerifyError(f"--cases: file {path} not found")
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    cases = [read_case(line, f"{path}:{i}") for i, line in lines if line.strip()]
    if not cases:
        raise VerifyError(f"{path} holds no cases")
    return cases


def read_case(line: bytes, place: str) -> dict:
    """Read one line of a file of cases. Raises VerifyError."""
    try:
        case = json.loads(line)
        json.dumps(case, ensure_ascii=False).encode()  # raises for half a character
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 and numbers of 5,000 digits too
        raise VerifyError(f"{place}: not valid JSON ({error}); each line must be one case") from None
    for key, kind in CASE.items():
        if not isinstance(case, dict) or not isinstance(case.get(key), kind):
            raise VerifyError(f"{place}: a case needs {key!r}, a {kind.__name__}")
    category = case.get("category", "")
    if not isinstance(category, str):
        shown = shorten(repr(category), 200)
        raise VerifyError(f"{place}: the category of a case must be a text, not {shown}")
    return case


def count_outcomes(cases: list[dict], grades: list[dict]) -> list[tuple[str, Counter]]:
    """Count true and false positives and negatives by category and, last, in total; print each false one."""
    counts: dict[str, Counter] = {}
    for case, graded in zip(cases, grades, strict=True):
        right = graded["verdict"] == "right"
        outcome = ("true " if case["correct"] == right else "false ") + ("positive" if right else "negative")
        counts.setdefault(case.get("category", "all"), Counter())[outcome] += 1
        if case["correct"] != right:
            print(f"{outcome}: {case.get('category', '')}: gold {shorten(case['gold'])!r}, answer "
                  f"{shorten(graded['answer'] or '')!r}, judged {graded['verdict']}")
    return [*counts.items(), ("total", sum(counts.values(), Counter()))]


def respell_golds(golds: list[str]) -> list[tuple[str, str, str]]:
    """List every spelling of every gold answer, as (gold answer, name of the spelling, completion)."""
    return [(gold, way, rf"\boxed{{{spell(gold)}}}")
            for gold in dict.fromkeys(golds) for way, spell in SPELLINGS.items()]


def check_golds(golds: list[str]) -> str:
    """Grade each gold answer against itself in every spelling. Return the share that is right, and others."""
    rewritten = respell_golds(golds)
    grades = grade([(gold, text) for gold, _, text in rewritten])
    judged = zip(rewritten, grades, strict=True)
    refused = [f"not {shorten(gold)!r} {way}" for (gold, way, _), x in judged if x["verdict"] != "right"]
    share = f"{1 - len(refused) / len(rewritten):.1%} of {len(rewritten)}"
    head = f"gold answers, each in {len(SPELLINGS)} ways, that are right against themselves: {share}"
    return "\n".join([head, *refused])


def shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[:width // 2]} ... {text[-width // 2:]}"
