"""Put eval.py and all of ours that it can import into one file: python -m infra.archive eval.pyz

Where the libraries of requirements.txt that it needs are installed, `python eval.pyz` then does in any folder
what `python eval.py` does here (infra/unpack.py).
"""

import sys
from modulefinder import ModuleFinder
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import config
from settings.leaves import LEAVES, settings_of
from settings.loader import read_layers
from settings.paths import REPOSITORY

# Beside all that is imported by name: the verifier is known by the hash of all its files (results.py), and
# configs by the settings of all leaves.
WHOLE = ("verify/*.py", "leaves/*/settings.py", "leaves/own_rewards/calls.py", "infra/*.yaml",
         "settings/*.yaml", "leaves/lora/*.json", "LICENSE")
HOOKS = {"tokenizer", "task", "weights", "engine", "head"}  # of leaves, which an evaluation goes through


def list_files() -> list[Path]:
    """List the files of the archive."""
    files = {path for pattern in WHOLE for path in REPOSITORY.glob(pattern)}
    for path in REPOSITORY.glob("configs/eval/*.yaml"):
        files |= {path, *read_layers(path, config.CONFIGS)}  # and its bases
    joins = [REPOSITORY / f"leaves/{leaf}/join.py"
             for leaf in LEAVES if HOOKS.intersection(settings_of(leaf).HOOKS)]
    finder = ModuleFinder([str(REPOSITORY)])
    for path in [REPOSITORY / "eval.py", *joins, *files]:
        if path.suffix == ".py":
            finder.import_hook(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    return sorted(files | {Path(module.__file__) for module in finder.modules.values() if module.__file__})


def build(archive: Path) -> None:
    """Write the archive. The same files make the same bytes."""
    files = list_files()
    with ZipFile(archive, "w") as zipped:
        for path in files:
            zipped.writestr(ZipInfo(str(path.relative_to(REPOSITORY))), path.read_bytes(), ZIP_DEFLATED)
        zipped.writestr(ZipInfo("__main__.py"), (REPOSITORY / "infra/unpack.py").read_bytes(), ZIP_DEFLATED)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
