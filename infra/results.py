"""Store evaluations on disk: responses as they come, and the result once it is complete.

    results.json            {"head": ..., "results": {set: its summary}}, written by eval.py
    results.json.partial    a line with the head, then the responses so far; gone when the result is written

The head holds the settings that identify a result. Responses that were made with other settings are never
mixed in.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from infra import dist
from infra.lines import DAMAGED, append, blame_file, mend_log
from settings.loader import SHORT, ConfigError, parse_json
from settings.paths import matching, short_names

Results = dict[str, dict]  # the summary of each set, or the result of each model


class Store:
    """Keep the responses of an evaluation as they come. Rank 0 writes them; all ranks know them.

    Raises ConfigError if the responses in the file were made with other settings.
    """

    def __init__(self, out: Path, head: dict, chunk: int):
        self.path = out.with_name(f"{out.name}.partial")
        self.chunk = chunk  # responses between two writes
        # The response of a torn last line is sampled again.
        stored, *lines = dist.on_first(mend_log, self.path, head)
        require_same_head(self.path, stored, head)
        self.responses: dict[str, dict[tuple[str, int], dict]] = {}
        with blame_file(self.path):
            for line in lines:
                response = line["response"]
                self.responses_of(line["set"])[response["id"], response["k"]] = response

    def responses_of(self, name: str) -> dict[tuple[str, int], dict]:
        """Return the responses of a set, by id of the problem and number of the answer."""
        return self.responses.setdefault(name, {})

    def keep(self, name: str, responses: list[dict]) -> None:
        """Append new responses of a set to the file."""
        if dist.rank() == 0:
            append(self.path, *({"set": name, "response": response} for response in responses))

    def remove(self) -> None:
        self.path.unlink()


def require_place(out: Path | None) -> None:
    """Raise ConfigError if no result can be written."""
    if out and not out.parent.is_dir():
        raise ConfigError(f"--out: folder {out.parent} not found; create it first")
    if out and out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it for the result")


def list_models(models: list[str], out: Path | None) -> list[tuple[str, Path | None]]:
    """List every model that paths and patterns name, with the file of its result.

    The file is `out` itself for one model; several have a file each in the folder `out`. Raises ConfigError.
    """
    named = [path for text in models for path in matching(text, "--model")]
    paths = list(dict.fromkeys(named))
    if len(paths) == 1 or not out:
        require_place(out)
        return [(str(path), out) for path in paths]
    if out.is_file() or out.suffix == ".json":
        raise ConfigError(f"--out {out} must be a folder for the results of {len(paths)} models")
    if not out.is_dir():
        require_place(out)
        out.mkdir()
    return [(str(path), out / f"{name}.json") for path, name in zip(paths, short_names(paths), strict=True)]


def require_same_head(path: Path, old: dict, new: dict) -> None:
    """Raise ConfigError if the responses of a file were made with other settings."""
    difference = next(differences(old, json.loads(json.dumps(new))), None)
    if difference:
        raise ConfigError(f"{path} holds responses that were made with other settings: {difference}; "
                          "give another --out, remove it to begin again, or --rescore it if only the "
                          "verifier differs")


def differences(old: object, new: object, path: str = "") -> Iterator[str]:
    """Yield each difference of two heads, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*new, *old)):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path} was {old!r} and is {new!r}"


def read_result(path: Path) -> dict:
    """Read a result. Raises ConfigError if there is none, or if it is damaged."""
    if not path.is_file():
        raise ConfigError(f"result file {path} not found")
    result = parse_json(path.read_bytes(), path, DAMAGED)
    with blame_file(path):
        if not isinstance(result, dict) or "sets" not in (result.get("head") or ()):
            raise ConfigError(f"{path} is not a result of eval.py --out; {DAMAGED}")
        if not result["results"].keys() <= result["head"]["sets"].keys():
            raise ConfigError(f"{path}: its head does not name its sets; {DAMAGED}")
        for name, summary in result["results"].items():
            require_alike(f"{path}: {name}", summary["problems"], result["head"]["sets"][name]["count"])
    return result


def require_alike(place: str, problems: list[dict], count: int) -> None:
    """Raise ConfigError unless all problems are there, with as many responses each, judged alike."""
    if len(problems) != count:
        raise ConfigError(f"{place} has {len(problems)} problems and its head {SHORT.repr(count)}; {DAMAGED}")
    counts, judged = set(), set()
    for problem in problems:
        counts.add(len(problem["responses"]))
        for response in problem["responses"]:
            judged.add(("verdict" in response, "reward" in response))
            texts = [response["text"], problem["gold"] if "verdict" in response else ""]
            if not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"{place}: text and gold of {problem['id']} must be texts; {DAMAGED}")
    if len(counts) != 1 or len(judged) != 1:
        raise ConfigError(f"{place}: all problems must have as many responses, judged alike; {DAMAGED}")
