"""Grade the responses of a result again (eval.py --rescore)."""

from pathlib import Path

from infra.lines import write_json
from infra.results import require_place, summarise_file, summarise_result, verifier_version
from verify.grade import grade


def rescore_file(path: Path, sizes: list[int] | None, out: Path | None) -> dict:
    """Grade the responses of a file again by the present verifier, and write the result to `out` if that is
    given. Rewards stay as they are."""
    require_place(out)
    result = summarise_file(path, sizes)
    for old in result["results"].values():
        answered = [(problem["gold"], response) for problem in old["problems"]
                    for response in problem["responses"] if "verdict" in response]
        verdicts = grade([(gold, response["text"]) for gold, response in answered])
        for (_, response), verdict in zip(answered, verdicts, strict=True):
            response |= verdict
    result["head"]["verifier"] = verifier_version()
    result = summarise_result(result, sizes)
    if out:
        write_json(out, result)
    return result
