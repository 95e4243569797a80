"""How yaml becomes frozen dataclasses: files over their bases, `--set`, types, bounds, errors.

No setting is known here. A section is a dataclass. One that comes in kinds is a union of dataclasses; each
has its kind as the first field, `kind: Literal["topk"] = "topk"`; a config that names none has the first.
"""
import contextlib
import difflib
import json
import math
import os
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

UNIONS = (Union, types.UnionType)
SHORT = reprlib.Repr()  # of a value in an error: a few lines of yaml can stand for gigabytes
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother, SHORT.maxlong = 2, 200, 200, 200


class ConfigError(ValueError):
    """A setting, or a file it names, that the user must mend; the message says what is allowed and how."""


# A number that a setting may have. It stands beside the type: `Annotated[int, at_least(1)]`.
Bound = tuple[Callable[[float], bool], str]


def at_least(low: float, note: str = "") -> Bound:
    return lambda number: number >= low, f"at least {low}{note}"


def above(low: float, note: str = "") -> Bound:
    return lambda number: number > low, f"above {low}{note}"


def within(interval: str, note: str = "") -> Bound:
    """Bound a number on both sides, as mathematics writes it: "[0, 1)" holds 0 and does not hold 1."""
    low, high = map(float, interval[1:-1].split(","))
    ends = [low] * (interval[0] == "[") + [high] * (interval[-1] == "]")
    return lambda number: low < number < high or number in ends, f"in {interval}{note}"


Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
Positive = Annotated[float, above(0)]
PositiveOrZero = Annotated[float, at_least(0)]
ZeroToOne = Annotated[float, within("[0, 1]")]
BelowOne = Annotated[float, within("[0, 1)")]


class Loader(yaml.SafeLoader):
    """yaml in which a key given twice is an error, and 010, 1:30 and 2024-01-01 are no numbers but texts."""

    def resolve(self, kind: type, value: str, implicit: tuple[bool, bool]) -> str:
        tag = super().resolve(kind, value, implicit)
        octal_or_base_60 = tag.endswith((":int", ":float")) and re.match(r"[-+]?0[0-9_]|.*:", value)
        return self.DEFAULT_SCALAR_TAG if octal_or_base_60 or tag.endswith(":timestamp") else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"'{key.value}' is given twice", problem_mark=key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str | bytes, source: str | Path) -> Any:
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a number of 5,000 digits
        raise ConfigError(f"{source} is not valid yaml: {' '.join(str(error).split())}") from None


def read(path: Path) -> dict[str, Any]:
    raw = parse(path.read_bytes(), path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold 'setting: value' lines")
    return raw


def parse_json(text: str | bytes, place: str | Path, remedy: str) -> Any:
    """Read JSON of whatever origin. Raises ConfigError."""
    try:
        json.dumps(value := json.loads(text), ensure_ascii=False).encode()  # half a character is none
        return value
    except (ValueError, RecursionError) as error:  # of other bytes than UTF-8 and of 5,000 digits too
        raise ConfigError(f"{place}: not valid JSON ({error}); {remedy}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model folder. Raises ConfigError."""
    found = parse_json(path.read_bytes(), path, "download it again")
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; download it again")
    return found


def locate(name: str | Path, folder: Path, shipped: Path, whose: str = "") -> Path:
    """Find a config file in `folder`, or else in `shipped`."""
    name = os.path.expanduser(name)
    path = next((path for path in (folder / name, shipped / name) if os.path.isfile(path)), None)
    if path is None:
        names = sorted(path.name for path in shipped.glob("*.yaml"))
        near = difflib.get_close_matches(Path(name).name, names, n=1)
        advice = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(names)}."
        raise ConfigError(f"config '{name[:200]}'{whose} not found, neither as given nor in {shipped}. "
                          f"{advice}")
    return path


def layers(path: Path, shipped: Path) -> list[dict[str, Any]]:
    """Read a config file, the one that it names as `base:`, that one's, and so on; the last comes first."""
    chain: dict[Path, dict[str, Any]] = {}
    while path.resolve() not in chain:
        raw = chain[path.resolve()] = read(path)
        base = raw.pop("base", None)
        if base is None:
            return list(reversed(chain.values()))
        path = locate(str(base), path.parent, shipped, f" (base of {path})")
    circle = " -> ".join(map(str, [*chain, path.resolve()]))
    raise ConfigError(f"base={base} leads in a circle: {circle}; one of them must have no base")


def merge(old: dict, new: dict) -> dict:
    """Lay `new` over `old`, key by key at every depth. A section that gets another kind starts empty."""
    if "kind" in old and new.get("kind", old["kind"]) != old["kind"]:
        return new
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(old.get(key), dict)
        merged[key] = merge(old[key], value) if both else value
    return merged


def override(text: str, section: Any) -> dict[str, Any]:
    """Turn "a.b=c" into {"a": {"b": c}}; c is read as yaml, or as it is written for a text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text!r} must have the form setting=value")
    kind = section
    for part in key.split("."):
        kind = hints(kind).get(part)
    as_written = (kind is str and value) or (kind == str | None and value not in ("", "null"))
    quoted = value.startswith('"')  # yaml's way to write a new line
    nested = value if as_written and not quoted else parse(value, f"--set {text!r}: the value")
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def choices(section: Any) -> dict[str, type]:
    """Map the kinds of a union to its dataclasses: {"none": KeepAll, "topk": TopK}; empty for other types."""
    options = get_args(section) if get_origin(section) in UNIONS else ()
    return {fields(option)[0].default: option for option in options if is_dataclass(option)}


def hints(section: Any) -> dict[str, Any]:
    """Map the settings of a section to their types, whichever of its kinds has them; empty for no section."""
    options = choices(section).values() or filter(is_dataclass, [section])
    types_by_name: dict[str, Any] = {}
    for option in options:
        types_by_name |= get_type_hints(option, include_extras=True)
    return types_by_name


def first_kinds(section: Any) -> dict[str, Any]:
    """Make the layer under all others: the kind that a section has where nobody names one."""
    layer: dict[str, Any] = {}
    for name, inner in hints(section).items():
        if choices(inner):
            layer[name] = {"kind": next(iter(choices(inner)))}
        elif below := first_kinds(inner):
            layer[name] = below
    return layer


def build(section: Any, raw: dict[str, Any], path: str = "") -> Any:
    """Fill a frozen dataclass (and those inside it) from nested dicts.

    Raises ConfigError, naming the full dotted path, on a key that is unknown, missing or of another kind,
    on a wrong type and on a number out of bounds.
    """
    options = choices(section) or {"": section}
    first = next(iter(options))
    kind = first and convert(raw.get("kind", first), Literal[*options], path + "kind")
    own = hints(options[kind])
    for key, value in raw.items():
        if key not in own:
            raise ConfigError(misplaced(section, key, value, kind, path))
    for f in fields(options[kind]):
        if f.name not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"missing key '{path}{f.name}' ({describe(own[f.name])}); it has no default")
    return options[kind](**{key: convert(value, own[key], path + key) for key, value in raw.items()})


def misplaced(section: Any, key: str, value: Any, kind: str, path: str) -> str:
    """Word the error for a key that a section, or this kind of it, does not have."""
    owners = [name for name, option in choices(section).items() if key in hints(option)]
    if owners:
        named = " and ".join(owners).replace(" and ", ", ", len(owners) - 2)
        return (f"{path}{key} belongs to {named}; this is {kind}: leave {path}{key}={value} "
                f"out, or set {path}kind")
    return unknown(key, hints(section), path)


def unknown(key: str, valid: Iterable[str], path: str) -> str:
    """Word the error for a key that is not among the valid ones."""
    near = difflib.get_close_matches(str(key), valid, n=1)
    listed = ", ".join(path + name for name in valid)
    advice = f"Did you mean '{path}{near[0]}'?" if near else f"Valid keys: {listed}."
    return f"unknown key '{path}{key}'. {advice}"


def convert(value: Any, kind: Any, path: str, or_word: str = "") -> Any:
    """Convert a value to a type, or raise ConfigError. yaml reads 1e-6 as a text, so a float may be one."""
    if is_dataclass(kind) or choices(kind):
        if isinstance(value, dict):
            return build(kind, value, path + ".")
    elif isinstance(value, dict) and (by_name := weights_of(kind)):
        return {str(name): convert(number, by_name, f"{path}.{name}") for name, number in value.items()}
    elif get_origin(kind) in UNIONS:
        first, word, name = with_word(kind)
        return word if value == word else convert(value, first, path, f" or {name}")
    elif get_origin(kind) is Annotated:
        plain, (fits, allowed) = get_args(kind)
        number = convert(value, plain, path, or_word)
        if fits(number):
            return number
        raise ConfigError(f"{path}={number} must be {allowed}{or_word and ',' + or_word}")
    elif get_origin(kind) is dict and isinstance(value, dict):
        names, inner = get_args(kind)
        for key in value:
            if get_args(names) and key not in get_args(names):
                raise ConfigError(unknown(key, get_args(names), path + "."))
        return {str(key): convert(item, inner, f"{path}.{key}") for key, item in value.items()}
    elif get_origin(kind) is list and isinstance(value, list):
        return [convert(item, get_args(kind)[0], f"{path}[{i}]") for i, item in enumerate(value)]
    elif get_origin(kind) is Literal:
        word = str(value).lower() if isinstance(value, bool) else value  # yaml reads true as no word
        if word in get_args(kind):
            return word
    elif kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # what is no number meets the error below
            number = float(value)
            if math.isfinite(number):
                return number
    elif type(value) is kind or kind is Any:
        if kind is int and abs(value) >= 2**63:
            raise ConfigError(f"{path}={SHORT.repr(value)} must be below 2**63")
        return value
    raise ConfigError(f"{path}={SHORT.repr(value)} must be {describe(kind)}{or_word}")


def with_word(kind: Any) -> tuple[Any, str | None, str]:
    """Take apart `int | None` or `int | Literal["all"]`: the type, the word beside it, and its name."""
    plain, other = get_args(kind)
    if weights_of(kind):
        return plain, "{name: number}", "{name: number}"
    word = None if other is types.NoneType else get_args(other)[0]
    return plain, word, word or "null"


def weights_of(kind: Any) -> Any:
    """Return the type of the numbers of `float | dict[str, float]`; None for other types."""
    other = get_args(kind)[-1] if get_origin(kind) in UNIONS else None
    return get_args(other)[1] if get_origin(other) is dict else None


def describe(kind: Any) -> str:
    if choices(kind):
        return f"a section with kind, one of {', '.join(choices(kind))}"
    if is_dataclass(kind):
        return f"a section with {', '.join(f.name for f in fields(kind))}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is Annotated:
        plain, (_, allowed) = get_args(kind)
        return f"{describe(plain)}, {allowed}"
    if get_origin(kind) in UNIONS:
        first, _, name = with_word(kind)
        return f"{describe(first)}, or {name}"
    if get_origin(kind) is dict:
        return f"a mapping with {', '.join(get_args(get_args(kind)[0])) or 'names'}"
    if get_origin(kind) is list:
        return f"a list of which each is {describe(get_args(kind)[0])}"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}[kind]


def flatten(cfg: Any, path: str = "") -> dict[str, Any]:
    """List every setting with its value under its dotted name."""
    flat: dict[str, Any] = {}
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        flat |= flatten(value, f"{path}{f.name}.") if is_dataclass(value) else {path + f.name: value}
    return flat


Rule = tuple[str, bool, str]  # a setting, whether it is as it must be, and how it must be


def made(flat: dict[str, Any], choice: str) -> bool:
    """Tell whether a config makes a choice: "loss.per=token or sum" (either), "loss.tis_cap" (not null)."""
    key, named, values = choice.partition("=")
    value = "null" if flat.get(key) is None else str(flat[key])
    return value in re.split(", | or ", values) if named else value != "null"


def table_rules(cfg: Any, serves: dict[str, list[str]], asks: dict[str, list[tuple]]) -> Iterator[Rule]:
    """Yield rules from two tables: what a choice alone has settings for, and what it asks of others."""
    flat = flatten(cfg)
    for choice, served in serves.items():
        for key, _, why in (entry.partition(": ") for entry in served):
            if key in flat and not made(flat, choice):
                *sections, name = key.split(".")
                default = type(reduce(getattr, sections, cfg)).__dataclass_fields__[name].default
                shown = "null" if default is None else default
                yield key, flat[key] == default, f"left out, or {shown}, unless {choice}{why and ': ' + why}"
    for choice, asked in asks.items():
        chosen = choice.partition("=")[0]
        for key, allowed, why in asked if made(flat, choice) else ():
            yield key, made(flat, f"{key}={allowed}"), f"{allowed} with {chosen}={flat[chosen]}: {why}"
