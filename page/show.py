"""Show every setting with its type, default and comment: `train.py --show`, and docs/settings.md.

    python -m page.show > docs/settings.md

The comments are those beside the fields, so the page cannot say anything else than the code.
"""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from textwrap import dedent
from typing import Any, get_type_hints

import yaml

from config import Config
from settings.loader import choices, describe
from settings.rules import ONLY_WITH, REQUIRES

HEAD = """# Settings

Written by `python -m page.show` from `config.py` and `settings/kinds.py`, with the comments there
beside the fields.

A config file holds its differences from the files that it names as `base:`; `--set section.setting=value`
comes on top. `train.py --config NAME.yaml --show` prints all settings of a run as yaml and marks differences
from the default. An unknown setting, a wrong type, a value out of bounds or a combination that cannot work is
an error that names the allowed values.
"""

REQUIRED = "required"
BAR = r"\|"  # in a cell of a table


@cache
def comments(section: type) -> dict[str, str]:
    """Setting -> the comment behind it in the source of its dataclass, or above it and behind it."""
    source = dedent(inspect.getsource(section))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    by_line = {t.start[0]: t.string.lstrip("# ") for t in tokens}
    alone = {t.start[0] for t in tokens if t.line.lstrip().startswith("#")}
    texts = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            first = node.lineno
            while first - 1 in alone:
                first -= 1
            numbers = range(first, node.end_lineno + 1)
            texts[node.target.id] = " ".join(by_line[i] for i in numbers if i in by_line)
    return texts


def default_of(field: Field) -> str:
    """Write the default as yaml, or REQUIRED."""
    return REQUIRED if field.default is MISSING else as_yaml(field.default)


def as_yaml(value: Any) -> str:
    """Write a value as yaml on one line."""
    quotes = '"' if "\\n" in repr(value) else None  # a text of several lines
    text = yaml.safe_dump(value, width=float("inf"), allow_unicode=True, default_style=quotes,
                          default_flow_style=True)
    return text.removesuffix("...\n").strip()


def resolved(cfg: Config) -> str:
    """Write a config as yaml that `config.load` reads back, a setting and its comment per line.

    Where a setting is not at its default, that default stands behind an arrow.
    """
    return "\n".join(lines(cfg, ""))


def lines(section: Any, indent: str) -> Iterator[str]:
    hints = get_type_hints(type(section), include_extras=True)
    for field in fields(section):
        value, kinds = getattr(section, field.name), choices(hints[field.name])
        if not is_dataclass(value):
            yield line(section, field, default_of(field), indent)
            continue
        yield f"{indent}{field.name}:"
        if kinds:
            yield line(value, fields(value)[0], next(iter(kinds)), indent + "  ")
        yield from list(lines(value, indent + "  "))[bool(kinds):]


def line(section: Any, field: Field, default: str, indent: str) -> str:
    value = as_yaml(getattr(section, field.name))
    changed = f"<- {default}  " if default not in (REQUIRED, value) else ""
    setting = f"{indent}{field.name}: {value}"
    return f"{setting:<40}  # {changed}{comments(type(section)).get(field.name, '')}".rstrip(" #")


def page() -> str:
    """Write docs/settings.md."""
    required = []
    for choice, requirements in REQUIRES.items():
        for key, allowed, why in requirements:
            because = why.replace("|", BAR)
            required.append(f"| `{choice}` | `{key}`: {allowed} | {because} |")
    return "\n".join([HEAD, "## The run", "", *table(Config, ""), *chapters(Config, "", "##"),
                      "## Constraints between settings", "", "| choice | requires | because |",
                      "|---|---|---|", *required, ""])


def chapters(section: type, path: str, level: str) -> Iterator[str]:
    """Yield a heading, a docstring and a table for each section inside this one, and for each kind of it."""
    for name, hint in get_type_hints(section, include_extras=True).items():
        for kind, option in (choices(hint) or {"": hint}).items():
            if is_dataclass(option):
                yield f"{level} {path}{name}" + (f".kind: {kind}" if kind else "")
                own = option.__doc__ if not option.__doc__.startswith(f"{option.__name__}(") else ""
                yield from ["", own, ""] if own else [""]
                yield from table(option, f"{path}{name}.")
                yield from chapters(option, f"{path}{name}.", level + "#")


def table(section: type, path: str) -> list[str]:
    """Make a table of a section's own settings; empty where it has none."""
    hints, rows = get_type_hints(section, include_extras=True), []
    for field in fields(section):
        kind, key = hints[field.name], path + field.name
        if field.name == "kind" or is_dataclass(kind) or choices(kind):
            continue
        meaning = comments(section)[field.name].replace("|", BAR)
        only = [f"; only with {choice}" for choice, served in ONLY_WITH.items()
                if key in (entry.partition(":")[0] for entry in served)]
        rows.append(f"| `{key}` | {describe(kind)} | `{default_of(field)}` | {meaning}{''.join(only)} |")
    return ["| setting | value | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []


if __name__ == "__main__":
    print(page(), end="")
