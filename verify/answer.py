r"""Tell whether two answers are equal: one spelling for both (spelling.py), then their structure.

Text in, text out; nothing is evaluated. Answers are equal when they differ in spelling alone: "x = 5" is 5,
lists and sets have no order, tuples have one, the brackets of intervals count. `equal` takes two answers
apart as far as structure goes, leaves numbers to number.py, and the comparison of two expressions to a
function that it is given (algebra.py). Answers of more than LONGEST characters are compared by their spelling
alone, so that time is bounded.
"""

import itertools
import re
from collections.abc import Callable
from string import ascii_letters

from verify.number import LONGEST, THOUSANDS, number, same_numbers
from verify.spelling import UNITS, normalise, without_unit

DEEPEST = 20      # brackets within brackets
LARGEST = 40      # members of a list that are compared one by one
Compare = Callable[[str, str], bool]

OPENING, CLOSING = "([{", ")]}"
SUBSCRIPT = r"(?:_\w|_\{[^{}]*\}|')*"
INVERSE = r"(?:\^\{?-1\}?)"
NAME = re.compile(
    r"(?:\\?[A-Za-z]|\\[A-Za-z]+|\\?[A-Z]{2,4}|\|[A-Z]+\||m?\\(?:angle|triangle) ?[A-Z]+|[A-Za-z]{4,}|"
    rf"[A-Za-z]{SUBSCRIPT}:[A-Za-z]){SUBSCRIPT}(?:{INVERSE}?\([A-Za-z0-9,=<>≤≥|]*\))?"
    r"|\([a-zA-Z](?:,[a-zA-Z])*\)|\\frac\{[A-Za-z]+\}\{[A-Za-z]+\}")
CALL = re.compile(rf"(\\?[A-Za-z]+{SUBSCRIPT}{INVERSE}?)\(([a-zA-Z](?:,[a-zA-Z])*)\)")  # f(x), of letters
KNOWN = re.compile(r"\\(?:ln|log|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?)")
# What may also stand on the left of an answer where the gold one has no name:
# f(-1), |z|, [ABC], \overline{AB}, \cos\theta, m+n.
LOOSE = re.compile(
    r"[a-zA-Z](?:\^\{?-1\}?)?[(\[].*[)\]]|\|[a-zA-Z]+\||\[[^\]]*[A-Z]\]|"
    r"\\(?:overline|overrightarrow|vec|hat|bar)\{?[A-Za-z]+\}?|"
    r"\\(?:sin|cos|tan|angle|log|ln)[\\ a-zA-Z]+|[a-zA-Z](?:[+:][a-zA-Z])+|d?[a-z]/d?[a-z]")
VARIABLE = rf"(?!\\(?:pi|infty)|e)(?:[a-zA-Z]|\\[a-zA-Z]+){SUBSCRIPT}"
# What an inequality can be for: x, f(x), \sin x.
RANGED = re.compile(rf"{VARIABLE}(?:\([a-zA-Z]\))?|\\(?:sin|cos|tan|cot) ?(?:\(?{VARIABLE}\)?)")
# But not within \sum_{k=1} or P(X=2).
RELATION = re.compile(r"(?<![=<>≤≥≠])(?:=|<|>|≤|≥|≠|\\in(?![a-z]))(?![^{}]*(?<!\\)\})(?![^()\[]*\))")
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
SETS = re.compile(r"\\(?:cup|cap|setminus|backslash|infty|emptyset)(?![a-z])")
MATRIX = re.compile(r"[\[(]*\\begin\{(?:[pb]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\)?"
                    r"\\end\{[a-z]+\}[\])]*")
BASED = re.compile(r"([-+]?[0-9A-Z]+)_\{?(\d+)\}?")
CHOICE = re.compile(r'"?\s*\(?([A-Z])[).:]\s*"?\s*([^\s∧∨,].*)')
RADIANS = ("radian", "radians", "rad")
WORDS = re.compile(r"(?i:yes|no)|(?=.*[A-Za-z]{4})(?:[A-Za-z .,']|(?<=[a-z])-(?=[a-z]{2}))+|"
                   r"\d{1,2}:\d\d[ap]m")


# ---- brackets

def nesting(x: str) -> int:
    """Count the brackets that are open at the deepest place."""
    depth = deepest = 0
    for c in x:
        depth += (c in OPENING) - (c in CLOSING)
        deepest = max(deepest, depth)
    return deepest


def closes_at_end(x: str) -> bool:
    """Tell whether the bracket that opens x is closed by its last character."""
    depth = 0
    for i, c in enumerate(x):
        depth += (c in OPENING) - (c in CLOSING)
        if depth == 0:
            return i == len(x) - 1
    return False


def split(x: str, at: str) -> list[str]:
    """Cut at these characters where no bracket or environment is open, and drop empty pieces."""
    pieces, depth, start = [], 0, 0
    for i, c in enumerate(x):
        depth += (c in OPENING) - (c in CLOSING) + x.startswith("\\begin", i) - x.startswith("\\end", i)
        depth = max(0, depth)
        if c in at and depth == 0:
            pieces.append(x[start:i])
            start = i + 1
    pieces.append(x[start:])
    return [piece.strip() for piece in pieces if piece.strip()]


# ---- structure

def bare(answer: str) -> tuple[str, str]:
    """Strip units, outer brackets, one side of an "about equal", and spaces. Returns value and last unit."""
    left, about, right = answer.partition("\\approx")
    if about:
        answer = right if not left.strip(" =") or NAME.fullmatch(left.strip(" =")) else left
    value, unit = without_unit(answer.strip())
    while value != answer:
        answer, value = value, without_unit(value)[0]
    answer = answer.replace('"', " ").strip().rstrip(" .,;:")
    while is_wrapped(answer):
        answer = answer[1:-1].strip()
    answer = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])", "\\1\x1f", answer)  # the one space that means something
    return re.sub(r"(?<!\d) | (?!\d)", "", answer).replace("\x1f", " "), unit


def is_wrapped(x: str) -> bool:
    """Tell whether outer brackets mean nothing: {...}, or (...) around a single value."""
    if len(x) < 2 or x[0] + x[-1] not in ("()", "{}") or not closes_at_end(x):
        return False
    return x[0] == "{" or len(split(x[1:-1], ",;∧∨")) == 1


def name_of(item: str) -> str:
    return item.partition("=")[0].strip() if "=" in item else ""


def items(x: str) -> list[str]:
    r"""List the members of a list, a set or a union; x alone where it is none.

    "a \pm b" is two of them, and {1, 2} in plain braces a list. Values of several names that come again are
    records: x=1, y=2, x=3, y=4 is two.
    """
    x = re.sub(r"^[A-Za-z]\s*=\s*(?=\\\{)", "", x.strip().replace("\\cup", "∪"))
    while x[:1] == "{" and closes_at_end(x):
        x = x[1:-1].strip()
    if x[:1] == x[-1:] == '"' and x.count('"') == 2:
        x = x[1:-1]
    if x.startswith("\\{") and x.endswith("\\}") and closes_at_end(x[1:]):
        x = x[2:-2]
    elif THOUSANDS.fullmatch(x):
        return [x]
    return [member for item in records(x) for member in of_either_sign(item)]


def of_either_sign(item: str) -> list[str]:
    r"""List the values of an item with \pm: (\pm 1, \pm 2) is four tuples, each sign by itself."""
    pieces = re.split(r"\\pm\s*", item)
    if len(pieces) > 5:
        return [item]
    signed = itertools.product(*["+-"] * (len(pieces) - 1))
    return [pieces[0] + "".join(map("".join, zip(signs, pieces[1:], strict=True))) for signs in signed]


def records(x: str) -> list[str]:
    """Cut a list into its records where it has some, else into its items."""
    groups = split(x, "∧∨;")
    if len(groups) > 1 and all("=" in group and "," in group for group in groups):
        return groups
    values = split(x, ",;∧∨∪")
    names = [name_of(value) for value in values]
    period = len(set(names))
    if 1 < period < len(names) and names == names[:period] * (len(names) // period):
        return [",".join(values[i:i + period]) for i in range(0, len(values), period)]
    return values


def words(x: str) -> str | None:
    """Read a text answer, without case and punctuation.

    None for what may be mathematics, as products of up to three letters.
    """
    return re.sub(r"[^a-z0-9]", "", x.lower()) if WORDS.fullmatch(x) else None


def sides(x: str) -> tuple[list[str], list[str]]:
    """Split a relation into its expressions and the signs between them."""
    return [side.strip() for side in RELATION.split(x)], RELATION.findall(x)


def interval(x: str) -> str | None:
    r"""Write an inequality for one value as an interval: "-2 < x ≤ 7" is (-2,7]. None for anything else."""
    bounds, signs = sides(x)
    ranged = [bool(RANGED.fullmatch(bound)) for bound in bounds]
    if ranged == [False, True] and signs[0] in FLIPPED:
        bounds, signs, ranged = bounds[::-1], [FLIPPED[signs[0]]], [True, False]
    if ranged == [True, False] and signs[0] in FLIPPED:
        if signs[0] in "<≤":
            return f"(-\\infty,{bounds[1]}{')' if signs[0] == '<' else ']'}"
        return f"{'(' if signs[0] == '>' else '['}{bounds[1]},\\infty)"
    if len(bounds) == 3 and ranged[1]:
        bounds, signs = ascending(bounds, signs)
        if set(signs) <= set("<≤"):
            opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
            return f"{opening}{bounds[0]},{bounds[2]}{closing}"
    return None


def ascending(values: list[str], signs: list[str]) -> tuple[list[str], list[str]]:
    """Turn a chain of relations round if it falls: 3 > a ≥ b is b ≤ a < 3."""
    if set(signs) <= set(">≥=") and set(signs) != {"="}:
        return values[::-1], [FLIPPED.get(sign, sign) for sign in reversed(signs)]
    return values, signs


def intersection(x: str) -> str:
    """Write two inequalities for one letter that both hold as the interval between; leave anything else."""

    intervals = [interval(bare(condition)[0]) for condition in split(x, "∧,")]
    if len(intervals) == 2 and all(intervals) and "∨" not in x:
        low, high = sorted(intervals, key=lambda i: i.startswith("(-\\infty"))
        if low.endswith("\\infty)") and high.startswith("(-\\infty,"):
            return low.removesuffix("\\infty)") + high.removeprefix("(-\\infty,")
    return x


def structure(x: str) -> tuple[str, list[str]]:
    """Take a value apart: its kind ("" for an expression) and its members.

    Kinds are tuples and intervals, matrices, ratios and times, numbers in a base.
    """
    if matrix := MATRIX.fullmatch(x):
        rows = [row.split("&") for row in re.split(r"(?:\\\\)+", matrix[1])]
        widths = [len(row) for row in rows]
        return f"matrix {widths}", sum(rows, [])
    if x and x[0] in "([" and x[-1] in ")]" and closes_at_end(x) and len(members := split(x[1:-1], ",;")) > 1:
        return x[0] + x[-1], members
    if based := BASED.fullmatch(x):
        return ("", [based[1]]) if based[2] == "10" else (f"base {based[2]}", [based[1]])
    if len(members := split(x, ":")) > 1:
        return ":", members
    return "", [x]


# ---- equality

def equal(gold: str, answer: str, compare: Compare) -> bool:
    """Tell whether an answer is the gold one. `compare` decides on two expressions or relations."""
    if max(len(gold), len(answer)) <= LONGEST:
        spellings = normalise(gold), normalise(answer)
        if max(map(len, spellings)) <= LONGEST and max(map(nesting, spellings)) <= DEEPEST:
            return same(*spellings, compare)
    return unspaced(gold) == unspaced(answer)


def unspaced(x: str) -> str:
    return "".join(x.split())


def same(gold: str, answer: str, compare: Compare, labelled: bool = True) -> bool:
    """Compare two answers in one spelling. `labelled`: the second may be a choice with its letter, (B) 42."""
    gold, answer = intersection(gold), intersection(answer)
    gold_items, answer_items = items(gold), items(answer)
    if len(gold_items) == len(answer_items) == 1:
        (gold, gold_unit), (answer, answer_unit) = bare(gold_items[0]), bare(answer_items[0])
        in_radians = answer_unit in RADIANS or "\\pi" in answer and answer_unit != "degrees"
        if gold_unit == "degrees" and in_radians:
            return same_values(rf"\frac{{({gold})\pi}}{{180}}", answer, compare)
        if units_differ(gold_unit, answer_unit):
            return False
        gold_items, answer_items = items(gold), items(answer)
    if not gold_items or not answer_items or gold == answer:
        return bool(gold_items and answer_items)
    if len(gold_items) > 1 or len(answer_items) > 1:
        if same_lists(gold_items, answer_items, compare):
            return True
        return bool(SETS.search(gold) and SETS.search(answer)) and compare(bare(gold)[0], bare(answer)[0])
    if labelled and (choice := CHOICE.fullmatch(answer_items[0])):
        letter, value = choice.groups()
        return same(gold, letter if re.fullmatch(r"[A-Z]", gold) else value, compare, labelled=False)
    if RELATION.search(gold) or RELATION.search(answer):
        return same_relations(gold, answer, compare)
    return same_values(gold, answer, compare)


def units_differ(gold_unit: str, answer_unit: str) -> bool:
    """Tell whether two units are different ones, as far as they are known."""
    kinds = [UNITS.get(unit, unit) for unit in (gold_unit, answer_unit)]
    if not gold_unit or not answer_unit or kinds[0] == kinds[1]:
        return False
    return gold_unit in UNITS and answer_unit in UNITS or "modulo" in gold_unit + answer_unit


def in_order(gold: list[str], answer: list[str], compare: Compare) -> bool:
    return len(gold) == len(answer) and all(same(a, b, compare) for a, b in zip(gold, answer, strict=True))


def same_lists(gold: list[str], answer: list[str], compare: Compare) -> bool:
    """Compare two lists as sets, but values without names to named ones in their order."""
    gold_names, answer_names = set(map(name_of, gold)) - {""}, set(map(name_of, answer)) - {""}
    if len(gold_names) > 1 and gold_names == answer_names and len(gold) == len(answer) == len(gold_names):
        return in_order(sorted(gold, key=name_of), sorted(answer, key=name_of), compare)
    unnamed_or_tuple = not (gold_names and answer_names) or min(len(gold), len(answer)) == 1
    named_tuple = any(name.startswith("(") for name in gold_names | answer_names)
    if (max(len(gold_names), len(answer_names)) > 1 or named_tuple) and unnamed_or_tuple:
        return in_order(tuple_members(gold), tuple_members(answer), compare)
    if max(len(gold), len(answer)) > LARGEST:
        return set(map(unspaced, gold)) == set(map(unspaced, answer))
    if any("ldots" in item for item in gold):
        return in_order(gold, answer, compare)
    if not all(any(same(a, b, compare) for b in answer) for a in gold):
        return False
    return all(any(same(a, b, compare) for a in gold) for b in answer)


def tuple_members(side: list[str]) -> list[str]:
    """List the values of a tuple that stands alone, as (x,y)=(1,2); of a list its items."""
    return structure(bare(side[0].rpartition("=")[2])[0])[1] if len(side) == 1 else side


def is_name(x: str) -> bool:
    """Tell whether x names a value, or the members of a tuple in alphabetical order."""
    letters = re.findall("[a-zA-Z]", x)
    return bool(NAME.fullmatch(x)) and (x[0] != "(" or letters == sorted(letters))


def same_name(gold: tuple[str, str], answer: tuple[str, str]) -> str | None:
    """Say what to compare a named gold value with: the answer's, its variable renamed. None: other names.

    A function and a plain letter may stand for each other where both are rules for its variable, as in
    f(x) = x^2 and y = x^2, and so may f(x) = x^2 and f(t) = t^2; not f(2) and f(3), P(A) and P(B), f and g.
    """
    (name, value), (other, other_value) = gold, answer
    if name == other:
        return other_value
    call, other_call = CALL.fullmatch(name), CALL.fullmatch(other)
    if call and other_call:
        new, old = call[2].split(","), other_call[2].split(",")
        free = not set(new) & (set(old) | letters_of(other_value)) and set(old) <= letters_of(other_value)
        if call[1] != other_call[1] or len(new) != len(old) or not free:
            return None
        renamed = dict(zip(old, new, strict=True))
        return re.sub(r"\\[a-zA-Z]+|[a-zA-Z]", lambda m: renamed.get(m[0], m[0]), other_value)
    call, letter = (call, other) if call else (other_call, name)
    if not call or KNOWN.fullmatch(call[1]) or not re.fullmatch("[a-zA-Z]", letter):
        return None
    variables = set(call[2].split(","))
    return other_value if variables <= (letters_of(value) & letters_of(other_value)) - {letter} else None


def letters_of(x: str) -> set[str]:
    return set(re.sub(r"\\[a-zA-Z]+", "", x)) & set(ascii_letters)


def same_chains(gold: str, answer: str, compare: Compare) -> bool:
    """Compare relations in a row, such as a < b ≤ c, read from either end."""
    (a, gold_signs), (b, answer_signs) = ascending(*sides(gold)), ascending(*sides(answer))
    return gold_signs == answer_signs and in_order(a, b, compare)


def same_relations(gold: str, answer: str, compare: Compare) -> bool:
    """Compare two answers of which at least one is a relation; a name that the other lacks is left out."""
    (a, gold_signs), (b, answer_signs) = sides(gold), sides(answer)
    if "\\in" in gold_signs + answer_signs:
        value = a[-1] if "\\in" in gold_signs else gold
        return same(value, b[-1] if "\\in" in answer_signs else answer, compare)
    if not gold_signs and answer_signs == ["="] and NAME.fullmatch(b[1]) and not NAME.fullmatch(b[0]):
        b = b[::-1]  # 5 = x
    gold_named = set(gold_signs) == {"="} and is_name(a[0])
    answer_named = set(answer_signs) == {"="} and is_name(b[0])
    loose = set(answer_signs) == {"="} and bool(LOOSE.fullmatch(b[0]))
    if (gold_named and not answer_signs) or ((answer_named or loose) and not gold_signs):
        return same(a[-1], b[-1], compare)
    if gold_named and answer_named:
        value = same_name((a[0], a[-1]), (b[0], b[-1]))
        if value is not None or "(" in a[0] + b[0]:
            return value is not None and same(a[-1], value, compare)
    if not gold_signs and set(answer_signs) == {"="} and compare(b[0], b[-1]):  # 6/8 = 3/4
        return same(gold, b[-1], compare)
    if len(gold_signs) == len(answer_signs) > 1 and same_chains(gold, answer, compare):
        return True
    left, right = interval(gold) if gold_signs else gold, interval(answer) if answer_signs else answer
    if len(a) == len(b) == 3 and not (re.fullmatch(VARIABLE, a[1]) and re.fullmatch(VARIABLE, b[1])):
        return False  # 0 < f(x) < 2 is another chain than 0 < g(x) < 2
    if left and right and set(gold_signs + answer_signs) - {"=", "≠"}:
        return same_values(left, right, compare)
    return len(gold_signs) == len(answer_signs) == 1 and compare(gold, answer)


def same_values(gold: str, answer: str, compare: Compare) -> bool:
    """Compare two answers that are neither lists nor relations."""
    if (equal_numbers := same_numbers(gold, answer)) is not None:
        return equal_numbers
    if words(gold) or words(answer) or len(gold) == len(answer) == 1:
        return words(gold) is not None and words(gold) == words(answer)
    (gold_kind, gold_members), (answer_kind, answer_members) = structure(gold), structure(answer)
    if gold_kind == answer_kind != "":
        return in_order(gold_members, answer_members, compare)
    if "\\begin" in gold and "\\begin" in answer:
        return compare(gold, answer)
    if gold_kind.startswith("base") and not answer_kind:  # the question has named the base
        return gold_members[0] == answer
    if gold_kind or answer_kind:
        return bool(SETS.search(gold) and SETS.search(answer)) and compare(gold, answer)
    return gold == answer or compare(gold_members[0], answer_members[0])


def readable(gold: str, reads: Callable[[str], bool]) -> bool:
    """Tell whether more than an answer's spelling can be compared. `reads` decides on one expression."""
    return len(gold) <= LONGEST and nesting(gold) <= DEEPEST and reads_all(normalise(gold), reads)


def reads_all(x: str, reads: Callable[[str], bool]) -> bool:
    members = items(x)
    if len(members) == 1:
        members = items(x := bare(members[0])[0])
    if len(members) == 1:
        if "\\in" in x or not RELATION.search(x):
            members = structure(x)[1]
        else:
            members = [side for side in sides(x)[0] if side]
    if len(members) != 1:
        return bool(members) and all(reads_all(member, reads) for member in members)
    return number(members[0]) is not None or words(members[0]) is not None or reads(members[0])
