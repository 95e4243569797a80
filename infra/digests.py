"""Tell whether files are what they were: what a run began with, and a checkpoint's, by the list beside them.

    files.json   {"files": {"policy/__0_0.distcp": [bytes, sha256], ...}, "sha256": of this table}

A file that is not listed does not count: file managers and NFS leave some.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import ConfigError
from infra import dist
from records import Prompt

Files = dict[str, list]  # name -> [bytes, sha256]


def sha256(*values: object) -> str:
    """Hash values that json can write, and cells that it cannot as texts."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def contents(path: Path) -> str:
    """Hash what is in a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: list[Path]) -> str:
    """Hash the names and contents of files, of all at once: a hash keeps one core busy."""
    with ThreadPoolExecutor() as threads:
        hashes = list(threads.map(contents, paths))
    return sha256([(path.name, content) for path, content in zip(paths, hashes, strict=True)])


# ---- what a run began with

def inputs_of(model: Path, prompts: list[Prompt], sets: dict[str, list[Prompt]]) -> dict[str, str]:
    """Identify by setting what the steps of a run depend on beside its settings and the weights."""
    named = {"data.train": prompts} | {f"data.eval ({name})": asked for name, asked in sets.items()}
    texts = sorted(path for path in model.iterdir() if path.suffix in (".json", ".jinja"))
    inputs = {"model.path": f"json and jinja files of sha256 {hash_files(texts)[:16]}"}
    for setting, asked in named.items():
        digest = sha256([(prompt.id, prompt.ids, prompt.answer, prompt.row) for prompt in asked])
        inputs[setting] = f"{len(asked)} prompts of sha256 {digest[:16]}"
    return inputs


def require_same(step: Path, began: dict[str, str], here: dict[str, str]) -> None:
    """Raise ConfigError where a checkpoint was trained on other weights, data or tokenizers than these."""
    for setting, found in here.items():
        if began.get(setting) != found:
            raise ConfigError(f"{step} was trained with {began.get(setting, 'nothing')} at {setting}, where "
                              f"there are now {found}; bring the former back, or begin another run with "
                              "--set out=...")


# ---- the files of a checkpoint

def writer_of(name: str) -> int:
    """Return the rank that writes a file: its number is in the name of what all ranks have one of."""
    match = re.search(r"__(\d+)_\d+\.distcp$", name)
    return int(match[1]) if match else 0


def of_rank(step: Path, rank: int) -> Files:
    """Return size and digest of the files that a rank has written."""
    names = [str(path.relative_to(step)) for path in sorted(step.rglob("*")) if path.is_file()]
    return {name: [(step / name).stat().st_size, contents(step / name)]
            for name in names if writer_of(name) == rank}


def listing(files: Files) -> str:
    return json.dumps({"files": files, "sha256": sha256(files)})


def listed(step: Path) -> Files:
    """Read files.json; {} where it is missing or not as it was written."""
    path = step / "files.json"
    text = path.read_text(errors="replace") if path.is_file() else ""
    try:
        files = json.loads(text)["files"]
    except (ValueError, KeyError, TypeError):
        return {}
    return files if text == listing(files) else {}


def cut_off(step: Path) -> str:
    """Say which file of a checkpoint is missing or has another size, "" where none is. Nothing is hashed."""
    files = listed(step)
    for name, (size, _) in files.items():
        found = (step / name).stat().st_size if (step / name).is_file() else "no"
        if found != size:
            return f"{name} has {found} bytes of {size}"
    return "" if files else "files.json, which lists the files, is missing or damaged"


def changed(step: Path, names: Iterable[str]) -> str:
    """Say which of these files is not as it was written, "" where none is."""
    files = listed(step)
    for name in names:
        try:
            if contents(step / name) != files[name][1]:
                return f"{name} is not as it was written: its sha256 is not the one in files.json"
        except OSError as error:  # of a disk that is going
            return f"{name} cannot be read: {error}"
    return ""


def damage(step: Path, part: str = "") -> str:
    """Say what of a checkpoint, or of its files whose name begins so, is not as it was written; "" where all
    is. Each rank reads its part, the files that it wrote where ranks are as many. Collective."""
    missing, = dist.gather([cut_off(step)] if dist.rank() == 0 else [])
    mine = [name for name in listed(step)
            if name.startswith(part) and writer_of(name) % dist.world_size() == dist.rank()]
    return missing or next(filter(None, dist.gather([changed(step, mine)])), "")
