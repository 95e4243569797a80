"""Read paths as people write them: with ~, relative to the current folder or the repository, as patterns."""

import glob
import os
import re
from pathlib import Path

from settings.loader import SHORT, ConfigError

REPOSITORY = Path(__file__).parents[1]


def user_path(text: str | Path) -> Path:
    """Write out the ~ that a path begins with, which a shell does not do inside --set or a config. Raises
    ConfigError for a path that cannot be."""
    if re.search("[\0\ud800-\udfff]", str(text)):
        raise ConfigError(f"{SHORT.repr(str(text))} can be no path: it has a NUL, or half a character")
    return Path(os.path.expanduser(text))


def find_path(text: str | Path) -> Path:
    """Find a path from the current folder or, if nothing is there, from the repository.

    So the shipped configs, which name toy/model, can be used from any folder.
    """
    path = user_path(text)
    return path if path.exists() or not (REPOSITORY / path).exists() else REPOSITORY / path


def matching(text: str, option: str) -> list[Path]:
    """List the paths that a pattern matches, which a shell has not expanded; a path without one is itself.

    Raises ConfigError if nothing matches.
    """
    path = user_path(text)
    if path.exists() or not glob.has_magic(text):
        return [path]
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not matches:
        raise ConfigError(f"{option} {text} matches nothing in {Path.cwd()}; write a pattern of folders that "
                          "are there, or their paths")
    return matches


def short_names(paths: list[Path]) -> list[str]:
    """Name paths by what lies below the folder that holds all of them: runs/a/hf and runs/b/hf are "a_hf" and
    "b_hf"."""
    whole = [path.resolve() for path in paths]
    folder = os.path.commonpath([path.parent for path in whole])
    return ["_".join(path.relative_to(folder).parts) for path in whole]
