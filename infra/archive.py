"""Put eval.py and all of ours that it can import into one file: python -m infra.archive eval.pyz

Where the libraries of requirements.txt that it needs are installed, `python eval.pyz` then does in any folder
what `python eval.py` does here (infra/unpack.py).
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import config
from settings.leaves import LEAVES, settings_of
from settings.loader import read_layers
from settings.paths import REPOSITORY

# Beside what is imported by name: the verifier is known by the hash of all its files (results.py), configs by
# the settings of all leaves.
WHOLE = ("verify/*.py", "leaves/*/settings.py", "leaves/own_rewards/calls.py", "infra/families.yaml",
         "configs/eval/*.yaml", "LICENSE")
HOOKS = {"tokenizer", "task", "weights", "engine", "head"}  # of leaves, which an evaluation goes through


def imports_of(path: Path) -> Iterator[Path]:
    """Yield the files of ours that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            place = REPOSITORY / name.replace(".", "/")
            packages = [folder / "__init__.py" for folder in (place, *place.parents)]
            modules = [place.with_suffix(".py"), place.parent.with_suffix(".py")]
            yield from (file for file in (*modules, *packages) if file.is_file())


def list_files() -> list[Path]:
    """List the files of the archive."""
    files = {path for pattern in WHOLE for path in REPOSITORY.glob(pattern)}
    for path in [path for path in files if path.suffix == ".yaml" and path.parent.name == "eval"]:
        files |= set(read_layers(path, config.CONFIGS))  # its bases
    joins = [REPOSITORY / f"leaves/{leaf}/join.py" for leaf in LEAVES if HOOKS & {*settings_of(leaf).HOOKS}]
    unread = [REPOSITORY / "eval.py", *joins, *(path for path in files if path.suffix == ".py")]
    while unread:
        path = unread.pop()
        files.add(path)
        unread += set(imports_of(path)) - files
    return sorted(files)


def build(archive: Path) -> None:
    """Write the archive. The same files make the same bytes."""
    with ZipFile(archive, "w", ZIP_DEFLATED) as zipped:
        for path in list_files():
            zipped.writestr(ZipInfo(str(path.relative_to(REPOSITORY))), path.read_bytes(), ZIP_DEFLATED)
        start = REPOSITORY / "infra" / "unpack.py"
        zipped.writestr(ZipInfo("__main__.py"), start.read_bytes(), ZIP_DEFLATED)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
