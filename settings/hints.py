"""Say which setting was meant by a name or a word that is none. Imported once a config is refused."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from settings.loader import ConfigError, Raw, build, hints, meant, read

TABLE = read(Path(__file__).with_suffix(".yaml"))


def with_hint(error: ConfigError, root: Any, raw: Raw) -> ConfigError:
    """Add what may have been meant to the error of a config. `root` has the settings of all leaves."""
    try:
        build(root, raw)
    except ConfigError as fuller:  # it names all that there is
        error = fuller
    said = str(error)
    if unknown := re.match(r"unknown key '(.+?)'\.", said):
        words, inner = unknown[1].split("."), raw.get(unknown[1])
        while isinstance(inner, dict) and inner and len(words) < 9:  # aliases of yaml can go on for ever
            words.append(next(iter(inner)))
            inner = inner[words[-1]]
        key, known = ".".join(words), [*settings_of(root)]
        found = [TABLE[word] for word in reversed(words) if word in TABLE][:1] or [
            one for one in known if one.split(".")[-1] == words[-1]]
        if not found and said[-1] == ".":  # nor does it name one that is near
            found = [TABLE[word] for word in difflib.get_close_matches(words[-1], TABLE, 1, 0.8)]
        if key in known:
            said = f"'{key}' is nested in a file: {': {'.join(words)}: ...{'}' * key.count('.')}"
        elif found and key.rpartition(".")[0] not in known:
            said = f"unknown key '{key}'. Set {' or '.join(found)}."
    if word := re.match(r"\S+='(\w+)' must be one of (.+)", said.lower()):
        allowed = word[2].split(", ")
        near = (meant(one, allowed) for one in re.findall(r"\w+", TABLE.get(word[1], word[1])))
        said = ". ".join([said, *filter(None, near)][:2])
    return ConfigError(said)


def settings_of(section: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings, of all kinds."""
    for name, inner in hints(section).items():
        yield from settings_of(inner, f"{path}{name}.") if hints(inner) else [path + name]
