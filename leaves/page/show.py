"""Show settings with their types, defaults and comments: `train.py --show` and `train.py --settings`.

The comments are those beside the fields, so the texts cannot differ from the code.
"""

import difflib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from textwrap import fill
from types import ModuleType
from typing import Any

import yaml

from config import Config, ConfigError, with_leaves
from settings import leaves
from settings.loader import choices, describe, hints
from settings.rules import ONLY_WITH, REQUIRES

REQUIRED = "required"
RUN, RULES = "run", "rules"  # two more sections: settings of no section, and constraints between settings
WIDTH = 110


def comment_on(setting: str, home: type | ModuleType) -> str:
    """Return the comment behind a setting in the source of its dataclass or leaf, or the lines above it."""
    above_and_behind = rf'((?:^ *# .*\n)*)^(?: *|CHOICES = {{)"?{re.escape(setting)}"?: [^#\n]*(?:# (.*))?'
    written = re.search(above_and_behind, inspect.getsource(home), re.MULTILINE)
    return " ".join([*re.findall("# (.*)", written[1]), written[2] or ""]).strip() if written else ""


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
    return "\n".join(lines(cfg))


def lines(section: Any, indent: str = "", first_kind: str = "") -> Iterator[str]:
    """Yield the lines of a section; `first_kind` is the default of its `kind`, if it has one."""
    types = hints(type(section))
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from lines(value, indent + "  ", next(iter(choices(types[field.name])), ""))
            continue
        default = first_kind if field.name == "kind" else default_of(field)
        changed = f"<- {default}  " if default not in (REQUIRED, as_yaml(value)) else ""
        setting = f"{indent}{field.name}: {as_yaml(value)}"
        yield f"{setting:<40}  # {changed}{comment_on(field.name, type(section))}".rstrip(" #")


def describe_settings(section: str) -> str:
    """Describe a section and the sections inside it, by its dotted name; "" describes all of them.

    Raises ConfigError if there is no such section.
    """
    texts = dict(describe_section(RUN, with_leaves(leaves.LEAVES), "")) | {RULES: describe_rules()}
    chosen = [text for name, text in texts.items() if not section or f"{name}.".startswith(f"{section}.")]
    if not chosen:
        near = [name for name, text in texts.items() if f"\n{section} = " in text] or (
            difflib.get_close_matches(section, texts, n=1))
        advice = f"There are: {', '.join(texts)}."
        if near:
            advice = f"Did you mean {near[0].partition('.kind=')[0]}?"
        raise ConfigError(f"--settings {section}: there is no such section. {advice}")
    return "\n\n".join(chosen)


def describe_section(title: str, section: type, path: str) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of a section, and of the sections inside it, of each kind by itself."""
    own = [] if section.__doc__.startswith(f"{section.__name__}(") else [inspect.cleandoc(section.__doc__)]
    yield title, "\n".join([f"# {title}", *own, *describe_fields(section, path)])
    for name, hint in hints(section).items():
        options = choices(hint) or ({"": hint} if is_dataclass(hint) else {})
        for kind, option in options.items():
            yield from describe_section(path + name + f".kind={kind}" * bool(kind), option, f"{path}{name}.")


def describe_fields(section: type, path: str) -> Iterator[str]:
    """Yield two lines for each of a section's own settings: name, default and values; then its meaning."""
    for field in fields(section):
        kind, key = hints(section)[field.name], path + field.name
        if field.name == "kind" or is_dataclass(kind) or choices(kind):
            continue
        only = [f"; only with {choice}" for choice, served in of_all("ONLY_WITH", ONLY_WITH)
                if key in (entry.partition(":")[0] for entry in served)]
        leaf = next((leaves.settings_of(leaf) for leaf, keys in leaves.LEAVES.items() if key in keys), None)
        comment = comment_on(key, leaf) if leaf else comment_on(field.name, section)
        yield f"{key} = {default_of(field)}  ({describe(kind)})"
        yield indented(comment + "".join(only))


def of_all(name: str, own: dict[str, list]) -> list[tuple[str, list]]:
    """List the entries of a table of settings/rules.py and of the tables of this name of all leaves."""
    tables = [own, *(getattr(leaves.settings_of(leaf), name, {}) for leaf in leaves.LEAVES)]
    return [entry for table in tables for entry in table.items()]


def describe_rules() -> str:
    text = [f"# {RULES}: a choice, and the values of other settings that it requires"]
    for choice, requirements in of_all("REQUIRES", REQUIRES):
        for demand, _, why in (entry.partition(": ") for entry in requirements):
            text += [f"{choice}: {demand.replace('=', ' must be ', 1)}", indented(why)]
    return "\n".join(text)


def indented(text: str) -> str:
    return fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
