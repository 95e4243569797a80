"""Grade the responses of a result again (eval.py --rescore), and by math-verify alone (--also)."""

from pathlib import Path
from statistics import fmean

from infra.figures import Results
from infra.lines import write_json
from infra.results import require_place, summarise_file, summarise_result, verifier_version
from verify.compare_math_verify import judge_by_math_verify
from verify.grade import grade


def rescore_file(path: Path, sizes: list[int] | None, out: Path | None) -> dict:
    """Grade the responses of a file again by the present verifier, and write the result to `out` if that is
    given. Rewards stay as they are."""
    require_place(out)
    result = summarise_file(path, sizes)
    for old in result["results"].values():
        answered = graded(old)
        verdicts = grade([(problem["gold"], response["text"]) for problem, response in answered])
        for (_, response), verdict in zip(answered, verdicts, strict=True):
            response |= verdict
    result["head"]["verifier"] = verifier_version()
    result = summarise_result(result, sizes)
    if out:
        write_json(out, result)
    return result


def graded(result: dict) -> list[tuple[dict, dict]]:
    """List problem and response, of a set whose responses are graded."""
    answered = [(problem, response) for problem in result["problems"] for response in problem["responses"]]
    return answered if "verdict" in answered[0][1] else []


def math_verify_lines(results: Results) -> list[str]:
    """Write each graded set's accuracy by math-verify, and the answers that it judges otherwise."""
    lines = []
    for name, result in results.items():
        if not (answered := graded(result)):
            continue
        judged = judge_by_math_verify([(problem["gold"], response["text"]) for problem, response in answered])
        lines.append(f"{name} by math-verify: {fmean(right for right, _ in judged):.1%}")
        for (problem, response), (right, read) in zip(answered, judged, strict=True):
            if right != (response["verdict"] == "right"):
                lines.append(f"{name} {problem['id']}: {response['answer']!r} for {problem['gold']!r} is "
                             f"{response['verdict']}; math-verify reads {read}, "
                             f"{'right' if right else 'wrong'}")
    return lines
