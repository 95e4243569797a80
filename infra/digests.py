"""Hash files and compare what identifies them, and read and write files.json, which lists them:
{"files": {"policy/__0_0.distcp": [bytes, sha256], ...}, "sha256": of this table}.

A file that is not listed does not count: file managers and NFS leave some.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from settings.loader import SHORT

Files = dict[str, list]      # of files.json: name -> [bytes, sha256]
LIST = "files.json"  # of a checkpoint or an export, with the digest of every file


def writing_rank(name: str) -> int:
    """Return the rank that writes a file; rank 0 writes those without a rank in their name."""
    match = re.search(r"__(\d+)_\d+\.distcp$", name)
    return int(match[1]) if match else 0


def list_files(step: Path, rank: int) -> Files:
    """Return size and digest of the files that a rank has written."""
    return {str(path.relative_to(step)): size_and_hash(path) for path in sorted(step.rglob("*"))
            if path.is_file() and path != step / LIST and writing_rank(path.name) == rank}


def format_list(files: Files) -> str:
    return json.dumps({"files": files, "sha256": sha256(files)})


def read_list(step: Path) -> Files:
    """Read files.json; {} if it is missing or damaged."""
    path = step / LIST
    text = path.read_text(errors="replace") if path.is_file() else ""
    try:
        files = json.loads(text)["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return files if text == format_list(files) else {}


def find_changed(step: Path, names: Iterable[str]) -> str:
    """Name a file of a checkpoint, or of an export, that is missing or not as it was written; "" for none."""
    files = read_list(step)
    if not files:
        return "files.json, which lists the files, is missing or damaged"
    for name in names:
        try:
            found = size_and_hash(step / name)
        except OSError as error:  # of a disk that is going, too
            return f"{name} cannot be read: {error}"
        if found != files[name]:
            return (f"{name} is not as it was written: it has {found[0]} of {files[name][0]} bytes and "
                    "another sha256 than files.json says")
    return ""


def sha256(*values: object) -> str:
    """Hash values as JSON; other types are hashed as their str()."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def size_and_hash(path: Path) -> list:
    """Return the bytes of a file, and its digest, as files.json has them."""
    return [path.stat().st_size, hash_file(path)]


def hash_file(path: Path) -> str:
    """Hash the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: list[Path]) -> str:
    """Hash the names and contents of files, in threads, since one hash keeps one core busy."""
    with ThreadPoolExecutor() as threads:
        hashes = list(threads.map(hash_file, paths))
    return sha256([(path.name, content) for path, content in zip(paths, hashes, strict=True)])


def differences(old: object, new: object, path: str = "") -> Iterator[str]:
    """Yield each difference of two heads, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*new, *old)):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path} was {SHORT.repr(old)} and is {SHORT.repr(new)}"
