"""Show settings with their types, defaults and comments: `train.py --show` and `train.py --settings`.

The comments are those beside the fields, so the texts cannot differ from the code.
"""

import ast
import difflib
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, reduce
from inspect import cleandoc
from itertools import takewhile
from operator import or_
from textwrap import dedent, fill
from typing import Any, get_type_hints

import yaml

from config import Config, ConfigError, with_leaves
from settings import leaves
from settings.loader import choices, describe
from settings.rules import ONLY_WITH, REQUIRES

REQUIRED = "required"
RUN, RULES = "run", "rules"  # two more sections: settings of no section, and constraints between settings
WIDTH = 110


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


def describe_settings(section: str = "") -> str:
    """Describe a section and the sections inside it, by its dotted name; "" describes all of them.

    Raises ConfigError if there is no such section.
    """
    every = with_leaves(leaves.LEAVES)
    run = "\n".join([f"# {RUN}", *describe_fields(every, "")])
    texts = {RUN: run} | dict(describe_sections(every, "")) | {RULES: describe_rules()}
    chosen = [name for name in texts if f"{name}.".startswith(f"{section}.")] if section else list(texts)
    if not chosen:
        raise ConfigError(f"--settings {section}: there is no such section. {advise(section, texts)}")
    return "\n\n".join(texts[name] for name in chosen)


def advise(section: str, texts: dict[str, str]) -> str:
    """Name the section that was meant: one that is spelled alike, or the section of a setting."""
    names = {name.partition(".kind=")[0] for name in texts}
    holding = [name.partition(".kind=")[0] for name, text in texts.items() if f"\n{section} = " in text]
    inner = [name for name in names if name.endswith(f".{section}")]
    meant = holding or inner or difflib.get_close_matches(section, names, n=1)
    return f"Did you mean {meant[0]}?" if meant else f"There are: {', '.join(sorted(names))}."


def describe_sections(section: type, path: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of each section inside this one, and of each kind of it."""
    for name, hint in get_type_hints(section, include_extras=True).items():
        for kind, option in (choices(hint) or {"": hint}).items():
            if is_dataclass(option):
                title = f"{path}{name}" + (f".kind={kind}" if kind else "")
                own = option.__doc__ if not option.__doc__.startswith(f"{option.__name__}(") else ""
                head = [f"# {title}", *([cleandoc(own)] if own else [])]
                yield title, "\n".join([*head, *describe_fields(option, f"{path}{name}.")])
                yield from describe_sections(option, f"{path}{name}.")


def describe_fields(section: type, path: str) -> Iterator[str]:
    """Yield two lines for each of a section's own settings: name, default and values; then its meaning."""
    hints = get_type_hints(section, include_extras=True)
    for field in fields(section):
        kind, key = hints[field.name], path + field.name
        if field.name == "kind" or is_dataclass(kind) or choices(kind):
            continue
        only = [f"; only with {choice}" for choice, served in of_all("ONLY_WITH", ONLY_WITH).items()
                if key in (entry.partition(":")[0] for entry in served)]
        yield f"{key} = {default_of(field)}  ({describe(kind)})"
        yield indented((comments(section).get(field.name) or comment_of_leaf(key)) + "".join(only))


def of_all(name: str, table: dict[str, list]) -> dict[str, list]:
    """Extend a table of settings/rules.py by the tables of this name of all leaves."""
    modules = map(leaves.settings_of, leaves.LEAVES)
    return reduce(or_, (getattr(module, name, {}) for module in modules), table)


def comment_of_leaf(key: str) -> str:
    """Return the comment on a leaf's own setting, behind its entry in CHOICES or above it."""
    leaf, = (name for name, keys in leaves.LEAVES.items() if key in keys)
    lines = inspect.getsource(leaves.settings_of(leaf)).splitlines()
    at = next(i for i, line in enumerate(lines) if f'"{key}":' in line)
    above = takewhile(lambda line: line.startswith("#"), reversed(lines[:at]))
    return lines[at].partition("  # ")[2] or " ".join(line.lstrip("# ") for line in reversed([*above]))


def describe_rules() -> str:
    lines = [f"# {RULES}: a choice, and the values of other settings that it requires"]
    for choice, requirements in of_all("REQUIRES", REQUIRES).items():
        for key, allowed, why in requirements:
            lines += [f"{choice}: {key} must be {allowed}", indented(why)]
    return "\n".join(lines)


def indented(text: str) -> str:
    return fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
