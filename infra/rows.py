"""Read data files of questions and answers: each row with the place that an error about it names."""

import json
from collections.abc import Iterator
from pathlib import Path

from config import ConfigError


def read_jsonl(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield "file:line" and the row of each line that is not blank. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); convert it") from None
    # Not splitlines(): it also cuts at U+2028 and the like, which stand inside real questions.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number}: not valid JSON ({error}); "
                                  "each line must be one object") from None
            yield f"{path}:{number}", row


def read_parquet(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield a place and the row for each row of a parquet file. Raises ConfigError."""
    import pyarrow.parquet  # slow to import, and most runs read jsonl

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a parquet file: {error}") from None
    yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows))


def read_hub(name: str, config: str, split: str) -> Iterator[tuple[str, dict]]:
    """Yield a place and the row for each row of a data set on the hub. Raises ConfigError."""
    import datasets  # slow to import, and needed for names only

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"hub data set {name} ({config}, {split}) could not be loaded: "
                          f"{str(error).splitlines()[0]}. Set data.dir to a folder with the files, or give a "
                          "path.") from error
    yield from ((f"{name}: row {i}", row) for i, row in enumerate(rows))
