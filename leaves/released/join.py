"""Read a system prompt from where a release has it, so that no config repeats its words."""

import ast
import hashlib
from pathlib import Path
from typing import Any

from leaves.released.settings import Text
from settings.leaves import look_up
from settings.loader import ConfigError, Raw, build, merge, parse
from settings.paths import find_path

PLACE = "data.system_prompt"


def read(raw: Raw, layers: Raw) -> Raw:
    """Put the text, as the program sees it that has the file, in the place of the section that names it.

    Raises ConfigError.
    """
    source = build(Text, look_up(raw, PLACE), f"{PLACE}.")
    path = find_path(source.file)
    try:
        content = path.read_bytes().decode()  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{PLACE}.file={source.file} cannot be read ({error}); give a file of a checkout "
                          "of the release") from None
    text = content if source.field is None else value_of(path, content, source.field)
    if not isinstance(text, str):
        raise ConfigError(f"{PLACE}.field={source.field}: {path} has no text of that name; it is a dotted "
                          "key in a .yaml or .json file, or a variable of a .py file with a plain text")
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    if source.sha256 not in (None, digest):
        raise ConfigError(f"{PLACE}.sha256={source.sha256} must be {digest}, which the text in {path} has: "
                          "check out the commit that the hash is of, or leave it out")
    return merge(layers, {"data": {"system_prompt": text}})


def value_of(path: Path, content: str, field: str) -> Any:
    """Find a value by its name; None if there is none, or a variable has several."""
    if path.suffix != ".py":
        return look_up(parse(content, path), field)
    try:
        nodes = ast.walk(ast.parse(content))
    except (SyntaxError, ValueError, RecursionError) as error:  # ValueError: it has a NUL
        raise ConfigError(f"{PLACE}.file={path} is no Python file: {error}") from None
    values = {node.value.value for node in nodes if isinstance(node, ast.Assign)
              and isinstance(node.value, ast.Constant) and field in map(ast.unparse, node.targets)}
    return values.pop() if len(values) == 1 else None
