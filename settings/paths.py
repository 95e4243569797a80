"""Read paths as people write them: with ~, relative to the current folder or the repository, as patterns."""

import glob
import os
import re
from pathlib import Path

from settings.loader import SHORT, ConfigError

REPOSITORY = Path(__file__).parents[1]
PLACES = [REPOSITORY]  # to look up paths in behind the current folder; config.load adds its files' folders


def user_path(text: str | Path) -> Path:
    """Write out the ~ that a path begins with, which a shell does not do inside --set or a config. Raises
    ConfigError for a path that cannot be."""
    if re.search("[\0\ud800-\udfff]", str(text)):
        raise ConfigError(f"{SHORT.repr(str(text))} can be no path: it has a NUL, or half a character")
    return Path(os.path.expanduser(text))


def find_path(text: str | Path) -> Path:
    """Find a path, or a pattern, from the current folder, else beside the config or its bases, else from the
    repository.

    So the shipped configs, which name toy/model, can be used from any folder; and a reward.py beside a config
    is not taken for ours.
    """
    path = user_path(text)
    places = (place / path for place in (Path(), *PLACES))
    return next((it for it in places if os.path.exists(it) or glob.glob(str(it), recursive=True)), path)


def searched() -> str:
    """Name the folders in which a path is looked up."""
    return f"looked for in {', '.join(map(str, dict.fromkeys((Path.cwd(), *PLACES))))}"


def settle(names: str | list[str]) -> str:
    """Join names by commas, and write out where paths are found: names with a point or a slash."""
    joined = names if isinstance(names, str) else ",".join(names)
    return re.sub(r"[^,]*[./][^,]*", lambda name: str(find_path(name[0])), joined)


def matching(text: str, option: str) -> list[Path]:
    """List the paths that a pattern matches, which a shell has not expanded; a path without one is itself.

    Raises ConfigError if nothing matches.
    """
    path = find_path(text)
    if path.exists() or not glob.has_magic(text):
        return [path]
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not matches:
        raise ConfigError(f"{option} {text} matches nothing ({searched()}); write a pattern of what is "
                          "there, or its path")
    return matches


def short_names(paths: list[Path]) -> list[str]:
    """Name paths by what lies below the folder that holds all of them: runs/a/hf and runs/b/hf are "a_hf" and
    "b_hf"."""
    whole = [path.resolve() for path in paths]
    folder = os.path.commonpath([path.parent for path in whole])
    return ["_".join(path.relative_to(folder).parts) for path in whole]
