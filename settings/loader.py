"""Turn yaml into frozen dataclasses: files over their bases, `--set`, types, bounds, errors.

This file knows no setting. A section is a dataclass. A section that comes in kinds is a union of dataclasses;
each is marked with its name, as `@kind("topk")`, and has it as its first field. A config that names no kind
gets the first one.
"""
import difflib
import json
import math
import os
import re
import reprlib
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, Union, dataclass_transform, get_args, get_origin, get_type_hints

import yaml

UNIONS = (Union, types.UnionType)
NOT_ALLOWED = object()  # stands for a value that a type does not allow
TYPE_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text",
              types.NoneType: "null", Any: "anything"}
MOST = 10_000           # values in a setting that may be anything
SHORT = reprlib.Repr()  # shortens a value in an error: a few lines of yaml can stand for gigabytes
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother, SHORT.maxlong = 2, 200, 200, 200


def in_short(error: Exception) -> str:
    """Write a library's error as one line; it may quote the whole of a file."""
    return " ".join(str(error).split())[:500]


@dataclass_transform(frozen_default=True)
def frozen(cls: type) -> type:
    """Make a dataclass of it, as all sections and records are: its objects cannot be changed."""
    return dataclass(frozen=True, slots=True)(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def named(cls: type) -> type:
    """The same with fields given by name: so a fork may add one anywhere."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def kind(name: str) -> Callable[[type], type]:
    """The same for one kind of a section; the name is its first field, `kind`."""
    def with_kind(cls: type) -> type:
        cls.kind, cls.__annotations__ = name, {"kind": Literal[name]} | cls.__annotations__
        return named(cls)
    return with_kind


class ConfigError(ValueError):
    """A mistake in a setting or a file; the message names the allowed values and the remedy."""


Raw = dict[str, Any]  # settings as yaml has them, section within section


def is_within(number: float, bound: str) -> bool:
    """Tell whether a number is within a bound that stands beside its type, `Annotated[int, "at least 1"]`.

    The others are "above 0" and, as mathematics writes it, "in [0, 1)", which holds 0 and does not hold 1. A
    note for people may follow.
    """
    begin, low, high, end = re.match(
        r"(at least |above |in [(\[])([-.\de]+)(?:, ([-.\de]+)([)\]]))?", bound).groups()
    low, high = float(low), float(high or "inf")
    ends = [low] * (begin in ("at least ", "in [")) + [high] * (end == "]")
    return low < number < high or number in ends


Count = Annotated[int, "at least 1"]
CountOrZero = Annotated[int, "at least 0"]
Positive = Annotated[float, "above 0"]
PositiveOrZero = Annotated[float, "at least 0"]
ZeroToOne = Annotated[float, "in [0, 1]"]
BelowOne = Annotated[float, "in [0, 1)"]
AboveOne = Annotated[float, "above 1"]
Share = Annotated[float, "in (0, 1]"]
Chance = Annotated[float, "in (0, 1)"]


class Loader(yaml.SafeLoader):
    """yaml: a key given twice is an error, and 010, 1:30 and 2024-01-01 are texts, not numbers.

    1e-6 is a text too, as in yaml 1.1, so that every tool reads and quotes a saved config in one way.
    """

    def resolve(self, kind: type, value: str, implicit: tuple[bool, bool]) -> str:
        tag = super().resolve(kind, value, implicit)
        octal_or_base_60 = tag.endswith((":int", ":float")) and re.match(r"[-+]?0[0-9_]|.*:", value)
        return self.DEFAULT_SCALAR_TAG if octal_or_base_60 or tag.endswith(":timestamp") else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"'{key.value}' is given twice", problem_mark=key.start_mark)
            keys.append(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str | bytes, source: str | Path) -> Any:
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 5,000 digits
        raise ConfigError(f"{source} is not valid yaml: {in_short(error)}") from None


def read(path: Path) -> Raw:
    raw = parse(path.read_bytes(), path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold 'setting: value' lines")
    return raw


def encodable(text: str) -> str:
    """Join two halves of a surrogate pair, and put U+FFFD in the place of a single one, which no library can
    encode: decoders write it for what they cannot read, and no later reader makes a half of it again."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_json(text: str | bytes, place: str | Path, remedy: str,
               to_object: Callable | None = None) -> Any:
    """Read JSON from anywhere; with a function that makes objects of keys and values, no NaN either. Raises
    ConfigError."""
    try:
        value = json.loads(text, object_pairs_hook=to_object)
        written = json.dumps(value, ensure_ascii=False, allow_nan=not to_object)
        if (whole := encodable(written)) != written:
            value = json.loads(whole)
    except (ValueError, RecursionError) as error:  # ValueError: bytes that are not UTF-8, or 5,000 digits
        raise ConfigError(f"{place}: not valid JSON ({error}); {remedy}") from None
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model folder. Raises ConfigError."""
    raw = parse_json(path.read_bytes(), path, "download it again")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no JSON object; download it again")
    return raw


def locate(name: str | Path, folder: Path, shipped: tuple[Path, ...], whose: str = "") -> Path:
    """Find a config file in `folder`, or else in one of the folders of those `shipped`."""
    name = os.path.expanduser(name)
    for place in (folder, *shipped):
        if os.path.isfile(place / name):
            return place / name
    names = sorted(path.name for place in shipped for path in place.glob("*.yaml"))
    names = [one for one in names if one.startswith(name)] or names
    advice = meant(Path(name).name, names) or f"There are: {', '.join(names)}."
    advice = f"A setting is changed by --set {name[:200]}." if "=" in name else advice
    advice = f"Give {name}/config.yaml." if os.path.isfile(f"{name}/config.yaml") else advice
    raise ConfigError(f"config '{name[:200]}'{whose} not found, neither as given nor in {shipped[0]}. "
                      f"{advice}")


def read_layers(path: Path, shipped: tuple[Path, ...], above: tuple[Path, ...] = ()) -> dict[Path, Raw]:
    """Read a config file and the files that it names as `base:`, one or a list; the lowest layer comes first.

    Later bases lie over earlier ones. A file that several bases name is a layer once, at its first place.
    """
    if (file := path.resolve()) in above:
        raise ConfigError(f"base={path.name} leads in a circle: {' -> '.join(map(str, [*above, file]))}; "
                          "one of them must have no base")
    raw, layers = read(path), {}
    bases = raw.pop("base", None) or []
    for base in bases if isinstance(bases, list) else [bases]:
        below = locate(str(base), path.parent, shipped, f" (base of {path})")
        layers |= read_layers(below, shipped, (*above, file))
    return layers | {file: raw}


def merge(old: dict, new: dict) -> dict:
    """Lay `new` over `old`, key by key at every depth. A section that gets another kind starts empty."""
    if "kind" in old and new.get("kind", old["kind"]) != old["kind"]:
        return new
    return old | {
        key: merge(old[key], value) if isinstance(value, dict) and isinstance(old.get(key), dict) else value
        for key, value in new.items()}


def override(text: str, type_of: Callable[[Raw], type]) -> Raw:
    """Turn "a.b=c" into {"a": {"b": c}}. c is read as yaml, but taken as it is if the setting is a text.

    `type_of` returns the dataclass that such a dict becomes.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {SHORT.repr(text)} must have the form setting=value")

    def nest(value: Any) -> Raw:
        return reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)

    kind = reduce(lambda section, name: hints(section).get(name), key.split("."), type_of(nest(value)))
    options = get_args(kind) or [kind]
    listed = list[str] in options and re.fullmatch(r"\[.*\]", value)
    as_written = str in options and value and (value != "null" or types.NoneType not in options)
    if as_written and not listed and not value.startswith('"'):  # yaml in double quotes can hold a new line
        return nest(value)
    return nest(parse(value, f"--set {SHORT.repr(text)}: the value"))


@cache
def choices(section: Any) -> dict[str, type]:
    """Map the kinds of a section to their dataclasses, {"none": KeepAll, "topk": TopK}; {} for other types.

    The section is a union of them, or the only one that there is.
    """
    options = get_args(section) if get_origin(section) in UNIONS else (section,)
    firsts = [(option, fields(option)[0]) for option in options if is_dataclass(option)]
    return {first.default: option for option, first in firsts if first.name == "kind"}


@cache
def hints(section: Any) -> dict[str, Any]:
    """Map the settings of a section, of all its kinds, to their types; empty for other types."""
    types_by_name = {}
    for option in choices(section).values() or [section]:
        if is_dataclass(option):
            types_by_name |= get_type_hints(option, include_extras=True)
    return types_by_name


def first_kinds(section: Any) -> Raw:
    """Return the bottom layer, which names the first kind of every section that comes in kinds."""
    layer = {}
    for name, inner in hints(section).items():
        if choices(inner):
            layer[name] = {"kind": next(iter(choices(inner)))}
        elif below := first_kinds(inner):
            layer[name] = below
    return layer


@cache
def extended(section: type, more: tuple[tuple[str, Any], ...]) -> type:
    """Extend a section by kinds, sections and settings: "advantage=gae", "critic" or "log.to", each with its
    type."""
    for name, inner in more:
        head, _, rest = name.partition(".")
        head, _, kind = head.partition("=")
        old = section.__dataclass_fields__.get(head)
        if rest:
            inner = extended(hints(section)[head], ((rest, inner),))
        elif kind:
            inner = hints(section)[head] | inner
        keeps_default = old and (kind or old.default is MISSING)
        default = old.default if keeps_default else inner() if is_dataclass(inner) else None
        section = make_dataclass(section.__name__, [(head, inner, field(default=default))], bases=(section,),
                                 frozen=True, slots=True, namespace={"__module__": section.__module__})
    return section


def build(section: Any, raw: Raw, path: str = "") -> Any:
    """Make a frozen dataclass, and those inside it, from nested dicts.

    Raises ConfigError, with the full dotted name, for a key that is unknown, missing or of another kind, and
    for a value of a wrong type or out of bounds.
    """
    options, option, kind = choices(section), section, ""
    if options:
        kind = convert(raw.get("kind", next(iter(options))), Literal[*options], path + "kind")
        option = options[kind]
    own = hints(option)
    for key in [key for key in raw if key not in own]:
        if owners := [name for name, other in options.items() if key in hints(other)]:
            raise ConfigError(f"{path}{key} belongs to {', '.join(owners)}; this is {kind}: leave "
                              f"{path}{key}={SHORT.repr(raw[key])} out, or set {path}kind")
        raise ConfigError(unknown(key, hints(section), path))
    for f in fields(option):
        if f.name not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"missing key '{path}{f.name}' ({describe(own[f.name])}); it has no default")
    return option(**{key: convert(value, own[key], path + key) for key, value in raw.items()})


def unknown(key: str, valid: Iterable[str], path: str) -> str:
    """Word the error for a key that is not among the valid ones."""
    listed = ", ".join(path + name for name in valid)
    return f"unknown key '{path}{key}'. {meant(key, valid, path) or f'Valid keys: {listed}.'}"


def meant(word: object, words: Iterable[str], path: str = "") -> str:
    """Name the one of the words, behind its path, that a mistyped one is near to; "" if none is."""
    near = difflib.get_close_matches(str(word), words, n=1)
    return f"Did you mean '{path}{near[0]}'?" if near else ""


def convert(value: Any, kind: Any, path: str) -> Any:
    """Convert a value to the type of a setting. Raises ConfigError."""
    union = get_origin(kind) in UNIONS and not choices(kind)
    if value in ("none", "None") and types.NoneType in get_args(kind):
        raise ConfigError(f"{path}={value} is a text; {path}=null says that there is none")
    for option in get_args(kind) if union else [kind]:
        result = fit(value, option, path)
        if result is not NOT_ALLOWED:
            return result
    raise ConfigError(f"{path}={SHORT.repr(value)} must be {describe(kind, value)}")


def fit(value: Any, kind: Any, path: str) -> Any:
    """Convert a value to a type that is no plain union; return NOT_ALLOWED if the type does not allow it.

    Raises ConfigError for a value inside a section, a mapping or a list.
    """
    origin, inner = get_origin(kind), get_args(kind)
    text = value if isinstance(value, str) else ""
    if re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{path}={SHORT.repr(value)} holds half a character; write it as UTF-8")
    # Not \neq, \nu, \nabla and the like, which are LaTeX.
    if re.search(r"\\n(?!abla|eq?\b|eg\b|ot|u\b|i\b|mid|ewline|[lg]eq)", text):
        raise ConfigError(f"{path}={value[:200]} must be in double quotes if it has a new line, and after "
                          f"--set in single quotes as well: '{path}=\"...\\n...\"'; without them \\n is a "
                          "backslash and an n")
    if origin is Annotated:
        number = fit(value, inner[0], path)
        return number if number is not NOT_ALLOWED and is_within(number, inner[1]) else NOT_ALLOWED
    if origin is Literal:
        word = str(value).lower() if isinstance(value, bool) else value  # yaml reads the word true as a bool
        return word if word in inner else NOT_ALLOWED
    if isinstance(value, dict) and hints(kind):
        return build(kind, value, path + ".")
    if isinstance(value, dict) and origin is dict:
        allowed = get_args(inner[0]) or value  # without a list of names any is allowed
        for name in value:
            if name not in allowed:
                raise ConfigError(unknown(name, allowed, path + "."))
        return {str(name): convert(item, inner[1], f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, list) and origin is list:
        return [convert(item, inner[0], f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is float and type(value) in (int, float, str):
        try:
            number = float(value)  # yaml reads 1e-6 as a text
        except (ValueError, OverflowError):
            return NOT_ALLOWED
        return number if math.isfinite(number) else NOT_ALLOWED
    if kind is int and type(value) is int and abs(value) >= 2**63:
        raise ConfigError(f"{path}={SHORT.repr(value)} must be below 2**63")
    if kind is Any:
        require_few(value, path)
    return value if type(value) is kind or kind is Any else NOT_ALLOWED


def require_few(value: Any, path: str) -> None:
    """Raise ConfigError if a value holds more than MOST: a few aliases of yaml can stand for any number."""
    values = [value]
    for each in values:  # which grows
        values += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
        if len(values) > MOST:
            raise ConfigError(f"{path} stands for more than {MOST} values; write fewer, or fewer aliases")


def describe(kind: Any, value: Any = None) -> str:
    """Say which values a type allows; for a number that is out of bounds only the bounds."""
    if choices(kind):
        return f"a section with kind, one of {', '.join(choices(kind))}"
    if is_dataclass(kind):
        return f"a section with {', '.join(hints(kind))}"
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        plain, bounds = inner
        return f"{describe(plain)}, {bounds}" if fit(value, plain, "") is NOT_ALLOWED else bounds
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner))
    if origin in UNIONS:
        return ", or ".join(describe(option, value) for option in inner)
    if origin is dict:
        return f"a mapping {{{', '.join(get_args(inner[0])) or 'name'}: {describe(inner[1])}}}"
    if origin is list:
        return f"a list, each item {describe(inner[0])}"
    return TYPE_NAMES[kind]


def flatten(cfg: Any, path: str = "") -> dict[str, Any]:
    """List every setting with its value under its dotted name; what is so already stays."""
    if isinstance(cfg, dict):
        return cfg
    flat = {}
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        flat |= flatten(value, f"{path}{f.name}.") if is_dataclass(value) else {path + f.name: value}
    return flat
