"""Find data files, and read published data sets that have a name, from a folder or the hub."""

import re
from pathlib import Path

from infra.rows import Rows
from settings.loader import ConfigError, in_short, meant, read
from settings.paths import PLACES, find_path, matching, searched

NAMED_SETS = read(Path(__file__).with_suffix(".yaml"))  # name -> problems, file in data.dir, name on the hub
CHOICES = (f"give a .jsonl, .json, .csv, .tsv or .parquet file, a folder or pattern of them, one of "
           f"{', '.join(NAMED_SETS)}, or a hub name such as openai/gsm8k:main:train")


def find_files(name: str, folder: str | None) -> list[Path]:
    """List the files of a set: one, a folder's, those of a pattern, or a named set's in `folder`; none for a
    set of the hub. Raises ConfigError if there is no such set."""
    named = NAMED_SETS.get(name)
    if named and not folder:
        return []
    file = str(Path(folder, named[1])) if named else name
    if name and find_path(file).is_dir():
        file += "/**/*.[!m]*"  # less the README.md of a hub clone
    paths = [path for path in matching(file, "data set") if path.is_file()]
    listed = "\n".join(path.name for path in paths)
    totals = re.findall(r"-of-(\d+)", listed)
    lacking = any(totals.count(total) % max(int(total), 1) for total in totals)
    splits = {*re.findall(r"(?m)^(train|test|dev|eval|val(?:id(?:ation)?)?)(?![a-z])", listed)}
    if paths[1:] and (lacking or len(splits) > 1):
        raise ConfigError(f"data {name} holds {len(paths)} files, from {paths[0].name} to {paths[-1].name}, "
                          "of several splits, or fewer than the number behind -of-; bring the others, or "
                          "name those that are meant, by a pattern or separated by commas")
    if paths:
        return paths
    if name.count(":") == 2 and "/" in name:
        return []
    beside = [path.name for place in (Path(), *PLACES) for path in (place / file).parent.glob("*")]
    near = meant(Path(file).name, [*NAMED_SETS, *beside])
    raise ConfigError(
        f"data {f'file {file} not found' if Path(file).suffix else f'set {file!r} is not known'} "
        f"({searched()}); {CHOICES}{near and f'. {near}'}")


def read_named(name: str) -> Rows:
    """Yield a place and the row for each row of a set on the hub, a named one or "user/set:config:split".
    Raises ConfigError."""
    import datasets  # slow to import, and needed for names only

    name, config, split = NAMED_SETS.get(name, [0, "", name])[2].split(":")
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"hub data set {name} ({config}, {split}) could not be loaded: "
                          f"{in_short(error)}. Set data.dir to a folder with the files, or give a "
                          "path.") from error
    yield from ((f"{name}: row {i}", row) for i, row in enumerate(rows))
