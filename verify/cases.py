"""Judge the verifier on labelled cases: how often it is right, and where it is not."""

from collections import Counter
from pathlib import Path

from config import ConfigError
from settings import SHORT, parse_json

CASE = {"gold": str, "completion": str, "correct": bool}


def read_cases(path: Path) -> list[dict]:
    """Read labelled completions. Raises ConfigError with the line of a malformed one."""
    if not path.is_file():
        raise ConfigError(f"--cases: file {path} not found")
    cases = []
    for i, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            cases.append(read_case(line, f"{path}:{i}"))
    if not cases:
        raise ConfigError(f"{path} holds no cases")
    return cases


def read_case(line: bytes, place: str) -> dict:
    case = parse_json(line, place, "each line must be one case")
    for key, kind in CASE.items():
        if not isinstance(case, dict) or not isinstance(case.get(key), kind):
            raise ConfigError(f"{place}: a case needs {key!r}, a {kind.__name__}")
    if not isinstance(case.get("category", ""), str):
        raise ConfigError(f"{place}: the category of a case must be a text, not "
                          f"{SHORT.repr(case['category'])}")
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


def shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[:width // 2]} ... {text[-width // 2:]}"
