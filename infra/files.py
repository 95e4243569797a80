"""Read data files of all kinds: each row with its place, for error messages."""

import csv
import gzip
import io
import re
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

from infra.rows import Rows, to_object
from infra.terminal import to_stderr
from settings.loader import SHORT, ConfigError, in_short, parse_json

PLAIN = "each number finite, and null for none"
TYPES = {str: "texts", bool: "true or false", list: "lists", dict: "objects"}  # others are numbers
TWO_WAYS = re.compile(r"-?\d+(\.\d{3})*,\d+|-?[1-9]\d{0,2}(\.\d{3})+")  # numbers where a comma is the point


def print_doubts(path: Path, rows: list[tuple]) -> None:
    """Print which columns hold several types, with a cell of each, or choices, and how many rows U+FFFD."""
    columns = defaultdict(lambda: defaultdict(list))  # name -> type -> cells
    for _, row in rows:
        cells = [*row.items()]
        for name, value in cells:  # which grows
            if isinstance(value, dict):
                cells += [(f"{name}.{inner}", cell) for inner, cell in value.items()]
            if value is not None:
                columns[name][TYPES.get(type(value), "numbers")].append(value)
    for name, types in columns.items():
        if len(types) > 1:
            counts = (f"{len(cells)} {kind} such as {SHORT.repr(cells[0])}" for kind, cells in types.items())
            to_stderr(f"{path}: column {name!r} holds {' and '.join(counts)}")
    for name in columns.keys() & {"choices", "options"}:
        to_stderr(f"{path}: column {name!r} is not asked: a question must hold its choices, and the answer "
                  "be that of a completion")
    if lossy := [place for place, row in rows if "\ufffd" in str(row)]:
        to_stderr(f"{path}: {len(lossy)} of {len(rows)} rows hold U+FFFD in the place of a character that "
                  f"was cut or lost: {lossy[0]}")


def read_rows(path: Path) -> Rows:
    """Yield a place and the row for each row of a file, by its ending. Raises ConfigError."""
    name, content = path.name.lower(), path.read_bytes()
    if name.endswith(".gz"):
        try:
            name, content = name[:-3], gzip.decompress(content)
        except Exception as error:  # of the file system, of zlib, or of neither
            raise ConfigError(f"{path} cannot be unpacked ({error}); download or write it again") from None
    ending = Path(name).suffix
    if ending not in READERS:
        raise ConfigError(f"{path} is there, but no file with the ending {ending!r} is read; unpack it, "
                          f"save it as one of {', '.join(READERS)}, or name the other files by a pattern")
    rows = READERS[ending](path, content)
    if isinstance(rows, list):
        rows = ((f"{path}: row {i}", row) for i, row in enumerate(rows))
    for place, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: a row must be an object with 'question' and 'answer', not "
                              f"{type(row).__name__}")
        yield place, row


def decode(content: bytes, path: Path) -> str:
    """Read UTF-8, or UTF-16, which has zeros among its bytes. Raises ConfigError."""
    wide = b"\0" in content[:400]
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None


def read_jsonl(path: Path, content: bytes) -> Rows:
    """Yield "file:line" and the row of each line that is not blank. Raises ConfigError."""
    # Not splitlines(): it also cuts at U+2028 and the like, which stand inside real questions.
    for number, line in enumerate(decode(content, path).split("\n"), 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, parse_json(line, place, f"each line must be one object, {PLAIN}; what git-lfs "
                                              "left of a file is fetched by git lfs pull", to_object)


def read_parquet(path: Path, content: bytes) -> list:
    """Read the rows of a parquet file. Raises ConfigError."""
    import pyarrow.parquet  # slow to import

    try:
        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    except ValueError as error:  # a text that is no UTF-8, or a column twice, too
        raise ConfigError(f"{path} cannot be read as parquet ({in_short(error)}); download or write it "
                          "again; what git-lfs left of a file is fetched by git lfs pull") from None


def read_json(path: Path, content: bytes) -> list:
    """Read the objects of an array, or of {"data": [...]}; one object a line, as pandas and datasets write
    them; or a single one. Raises ConfigError."""
    text = re.sub(r"\}\s*\n\s*\{", "},\n{", decode(content, path))
    values = parse_json(f"[{text}]", path, f"it must hold an array of objects, {PLAIN}", to_object)
    whole = values[0] if len(values) == 1 else values
    rows = whole.get("data") if isinstance(whole, dict) else whole
    return rows if isinstance(rows, list) else values


def read_csv(path: Path, content: bytes) -> Rows:
    """Yield "file:line" and the row of each line below the head that is not blank; an empty cell is None.

    A first line "sep=;" says what separates cells, or else it is what stands most often in the head, quotes
    aside: a comma, a tab, a semicolon or a bar. Raises ConfigError.
    """
    csv.field_size_limit(1 << 40)
    text = decode(content, path)
    told = re.match(r"(?:sep=(.)\r?\n)?", text)
    text = text[told.end():]
    separator = told[1] or max(",\t;|", key=re.sub('"[^"]*"', "", text).partition("\n")[0].count)
    lines = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    try:
        names = [name.strip() for name in next(lines, [])]
        while names and not names[-1]:  # as office programs end each line
            names.pop()
        if len(set(names)) < len(names):
            raise ConfigError(f"{path}:1: a column is named twice in {', '.join(names)}; give each "
                              "a name of its own, or delete it")
        for cells in lines:
            place = f"{path}:{lines.line_num + bool(told[1])}"
            if not "".join(cells).strip():
                continue
            if any(cells[len(names):]):
                raise ConfigError(f"{place}: more cells than the {len(names)} columns of line 1; a text with "
                                  f"{separator!r} needs double quotes")
            if separator == ";" and any(TWO_WAYS.fullmatch(cell) for cell in cells):
                raise ConfigError(f"{place}: a number can be read in two ways; write 1.234,5 as 1234.5, and "
                                  "a decimal 1.234 as 1.2340")
            yield place, {name: cell or None for name, cell in zip_longest(names, cells[:len(names)])}
    except csv.Error as error:
        raise ConfigError(f"{path}:{lines.line_num}: not valid CSV ({error}); look for a double quote that "
                          "nothing closes") from None


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".tsv": read_csv,
           ".parquet": read_parquet}
