"""Grade the responses of a result again (eval.py --rescore), and by math-verify alone (--also)."""

from copy import deepcopy
from pathlib import Path

from infra.figures import Results
from infra.lines import write_json
from infra.results import require_place, summarise_file, summarise_result, verifier_version
from verify.compare_math_verify import judge_by_math_verify
from verify.grade import grade
from verify.statistics import mean


def rescore_file(path: Path, sizes: list[int] | None, out: Path | None) -> dict:
    """Grade the responses of a file again, and write the result to `out` if that is given."""
    require_place(out)
    result = rescore(summarise_file(path, sizes), sizes)
    if out:
        write_json(out, result)
    return result


def rescore(result: dict, sizes: list[int] | None = None) -> dict:
    """Grade the responses of a result again by the present verifier. Rewards stay as they are."""
    result = deepcopy(result)
    for old in result["results"].values():
        responses = [(p["gold"], response) for p in old["problems"] for response in p["responses"]]
        if "verdict" in responses[0][1]:
            for (_, response), found in zip(responses, grade([(gold, r["text"]) for gold, r in responses]),
                                            strict=True):
                response |= found
    result["head"]["verifier"] = verifier_version()
    return summarise_result(result, sizes)


def add_math_verify(results: Results) -> Results:
    """Add math-verify's verdict to every response of a graded set, and the accuracy by it to the set."""
    results = deepcopy(results)
    for result in results.values():
        responses = [(p["gold"], response) for p in result["problems"] for response in p["responses"]]
        if "verdict" not in responses[0][1]:
            continue
        judged = judge_by_math_verify([(gold, response["text"]) for gold, response in responses])
        for (_, response), (right, read) in zip(responses, judged, strict=True):
            response["math_verify"] = {"right": right, "read": read}
        result["math_verify"] = mean(right for right, _ in judged)
    return results
