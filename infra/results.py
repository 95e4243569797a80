"""Store evaluations on disk: responses in portions, and the result once it is complete (eval.py --out).

    results.json            {"head": ..., "results": {set: its summary}}, written by eval.py
    results.json.partial    a line with the head, then the responses so far; gone when the result is written

The head holds the settings that identify a result. Responses that were made with other settings are never
mixed in.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import verify
from config import Config, Reward
from infra import dist
from infra.digests import differences, hash_files, sha256
from infra.figures import summarise
from infra.lines import DAMAGED, append, blame_file, mend_log, write_json
from infra.terminal import to_stderr
from infra.tokenizer import Tokenizer
from infra.user_files import read_file
from records import EngineSpec
from settings import leaves
from settings.loader import SHORT, ConfigError, parse_json
from settings.paths import short_names, user_path

SAMPLING = ("max_new_tokens", "n", "temperature", "top_p")  # of the settings of `eval`
GRADED_BY = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy", "mpmath")


class Store:
    """Keep the responses of an evaluation. Rank 0 writes them; all ranks know them.

    Raises ConfigError if the responses in the file were made with other settings.
    """

    def __init__(self, out: Path, head: dict, chunk: int):
        self.out, self.path = out, out.with_name(f"{out.name}.partial")
        self.chunk = chunk  # responses between two writes
        # The response of a torn last line is sampled again.
        stored, *lines = dist.on_first(mend_log, self.path, head)
        require_same_head(self.path, stored, head)
        # Of a set, by id of the problem and number of the answer.
        self.responses: dict[str, dict[tuple[str, int], dict]] = defaultdict(dict)
        with blame_file(self.path):
            for line in lines:
                response = line["response"]
                self.responses[line["set"]][response["id"], response["k"]] = response

    def keep(self, name: str, responses: list[dict]) -> None:
        """Append new responses of a set to the file."""
        if dist.is_first():
            append(self.path, *({"set": name, "response": response} for response in responses))

    def finish(self, result: dict) -> None:
        """Write the result in place of the responses."""
        if dist.is_first():
            write_json(self.out, result)
            self.path.unlink()


def require_place(out: Path) -> None:
    """Raise ConfigError if no result can be written."""
    if not out.parent.is_dir():
        raise ConfigError(f"--out: folder {out.parent} not found; create it first")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it for the result")


def place_results(models: list[Path], out: Path) -> list[Path]:
    """Name the file of each model's result: `out` itself for one, and for several a file each in the folder
    `out`. Raises ConfigError if none can be written."""
    if len(models) == 1:
        require_place(out)
        return [out]
    if out.is_file() or out.suffix == ".json":
        raise ConfigError(f"--out {out} must be a folder for the results of {len(models)} models")
    if not out.is_dir():
        require_place(out)
        out.mkdir()
    return [out / f"{name}.json" for name in short_names(models)]


# ---- what identifies a result

def verifier_version() -> str:
    """Identify the verifier: its files, and the libraries that read and compute formulas for it."""
    code = hash_files(sorted(Path(verify.__file__).parent.glob("*.py")))
    libraries = [f"{name} {version(name)}" for name in GRADED_BY]
    return " ".join([code[:16], *libraries])


def describe_result(cfg: Config, seed: int, spec: EngineSpec, tokenizer: Tokenizer, sets: Iterable[Any],
                    ) -> dict:
    """Collect the settings and hashes that identify a result: model, data, prompts, sampling, verifier.

    A model is identified by the hash of its weights, configuration and tokenizer. `sets` are records of
    eval.py; the samples have `seed`.
    """
    kinds = (".safetensors", ".json", ".jinja")
    files = [path for path in sorted(spec.folder.iterdir()) if path.suffix in kinds and path.is_file()]
    files += sorted((user_path(cfg.model.path) / "policy").glob("*"))  # of a checkpoint
    return {
        "model": {"path": cfg.model.path, "files": hash_files(files)},
        "template": sha256(tokenizer.source),
        "system_prompt": cfg.data.system_prompt,
        "engine": f"{cfg.rollout.engine} {cfg.rollout.quantization}".removesuffix(" none"),
        "dtype": str(spec.dtype),
        "sampling": {name: getattr(cfg.eval, name) for name in SAMPLING} | {"seed": seed},
        "verifier": verifier_version(),
        "stop": cfg.rollout.stop,
        "reward": reward_head(cfg.reward),
        "sets": {s.name: identify_set(s) for s in sets},
    } | leaves.through("head", cfg, {})


def reward_head(reward: Reward) -> dict | None:
    """Identify the reward that answers are scored with; None if only accuracy is measured."""
    if reward.accuracy:
        return None
    files = None
    if reward.functions:
        files = hash_files(read_file(reward.custom_file, "reward.custom_file").files)
    return reward.weights | {"overlong_tokens": reward.overlong_tokens, "custom_file": files}


def identify_set(held_out: Any) -> dict:
    """Identify a set by its problems and prompts, and by all columns if a reward may read them."""
    data = [(p.id, p.question, p.answer, *p.messages, *[p.row] * bool(held_out.reward))
            for p in held_out.problems]
    return {"count": len(data), "data": sha256(data),
            "prompts": sha256([prompt.ids for prompt in held_out.prompts])}


def require_same_head(path: Path, old: dict, new: dict) -> None:
    """Raise ConfigError if the responses of a file were made with other settings."""
    difference = next(differences(old, json.loads(json.dumps(new))), None)
    if difference:
        raise ConfigError(f"{path} holds responses that were made with other settings: {difference}; "
                          "give another --out, or remove it to begin again")


# ---- reading results

def read_finished(out: Path, head: dict) -> dict | None:
    """Read a result that is complete, and summarise it anew; None without one. Collective.

    Raises ConfigError if it was made with other settings.
    """
    stored = dist.on_first(lambda: read_result(out) if out.is_file() else None)
    if stored:
        require_same_head(out, stored["head"], head)
        to_stderr(f"{out} is complete; nothing is sampled again")
        with blame_file(out):
            return {"head": head, "results": {
                name: summarise(old["problems"], old.get("reward_range"))
                for name, old in stored["results"].items()}}
    return None


def read_result(path: Path) -> dict:
    """Read a result. Raises ConfigError if it is damaged."""
    result = parse_json(path.read_bytes(), path, DAMAGED)
    with blame_file(path):
        if not isinstance(result, dict) or "sets" not in (result.get("head") or ()):
            raise ConfigError(f"{path} is not a result of eval.py --out; {DAMAGED}")
        for name, summary in result["results"].items():
            problems, count = summary["problems"], result["head"]["sets"].get(name, {}).get("count")
            if len(problems) != count:
                raise ConfigError(f"{path}: {name} has {len(problems)} problems and its head "
                                  f"{SHORT.repr(count)}; {DAMAGED}")
            alike = {(len(p["responses"]), "verdict" in r, "reward" in r, type(r["text"]), type(p["gold"]))
                     for p in problems for r in p["responses"] or [{"text": ""}]}
            if len(alike) != 1:
                raise ConfigError(f"{path}: all problems of {name} must have as many responses, judged "
                                  f"alike, and texts; {DAMAGED}")
    return result
