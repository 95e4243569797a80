r"""Tell whether two answers are equal: one spelling for both (spelling.py), then their structure.

This file reads text and evaluates nothing. Two answers are equal if only their spelling differs: "x = 5" is
5, lists and sets have no order, tuples have one, the brackets of intervals count. `answers_equal` takes both
answers apart into members; number.py compares numbers, and a function of the caller compares expressions
(algebra.py). Answers of more than LONGEST characters are compared by their spelling alone, to bound the time.
"""

import itertools
import re
from collections.abc import Callable

from verify.number import LONGEST, THOUSANDS, number, same_numbers
from verify.spelling import normalise, read_unit, without_unit

DEEPEST = 20      # brackets within brackets
LONGEST_LIST = 40      # members of a list that are compared one by one
Compare = Callable[[str, str], bool]

OPENING, CLOSING = {*"([{", "\\begin"}, {*")]}", "\\end"}
SUBSCRIPT = r"(?:_\w|_\{[^{}]*\}|')*"
INVERSE = r"(?:\^\{?-1\}?)"
NAME = re.compile(
    r"(?!\\pi\Z)(?:\\?[A-Za-z]|\\[A-Za-z]+|\\?[A-Z]{2,4}|\|[A-Z]+\||m?\\(?:angle|triangle) ?[A-Z]+|"
    rf"(?!not(?!e))[A-Za-z]{{4,}}|[A-Za-z]{SUBSCRIPT}:[A-Za-z]){SUBSCRIPT}"
    rf"(?:{INVERSE}?\([A-Za-z0-9,=<>≤≥|]*\))?|\([a-zA-Z](?:,[a-zA-Z])*\)"
    r"|\\frac\{[A-Za-z]+\}\{[A-Za-z]+\}")
CALL = re.compile(rf"(\\?[A-Za-z]+{SUBSCRIPT}{INVERSE}?)\(([a-zA-Z](?:,[a-zA-Z])*)\)")  # f(x), of letters
NAMED_FUNCTIONS = re.compile(r"\\(?:ln|log|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?)")
# If the gold answer has no name, an answer may have one of these on its left too: f(-1), |z|, [ABC],
# \overline{AB}, \cos\theta, m+n.
LOOSE_NAME = re.compile(
    r"[a-zA-Z](?:\^\{?-1\}?)?[(\[].*[)\]]|\|[a-zA-Z]+\||\[[^\]]*[A-Z]\]|"
    r"\\(?:overline|overrightarrow|vec|hat|bar)\{?[A-Za-z]+\}?|"
    r"\\(?:sin|cos|tan|angle|log|ln)[\\ a-zA-Z]+|d?[a-z]/d?[a-z]|\|[^|]*[A-Z][^|]*\||"
    r"(?!not)[a-zA-Z](?:[_^](?:\w|\{\w+\}))*(?:[-+:]?[a-zA-Z](?:[_^](?:\w|\{\w+\}))*)+|"
    r"\\(?:lim|max|min|sup|inf|gcd|deg|dim|det)(?![a-z]).*|[A-Za-z]{2,}\(.*\)|.*\\b?mod(?![a-z]).*")
VARIABLE = rf"(?!\\(?:pi|infty)|e)(?:[a-zA-Z]|\\[a-zA-Z]+){SUBSCRIPT}"
# An inequality bounds one of these: x, f(x), \sin x.
RANGED = re.compile(rf"{VARIABLE}(?:\([a-zA-Z]\))?|\\(?:sin|cos|tan|cot) ?(?:\(?{VARIABLE}\)?)")
# The signs of a relation, but not the one within \sum_{k=1} or P(X=2).
RELATION = re.compile(r"(?<![=<>≤≥≠])(?:=|<|>|≤|≥|≠|\\in(?![a-z]))(?![^{}]*(?<!\\)\})(?![^()\[]*\))")
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
MATRIX = re.compile(r"[\[(]*\\begin\{(?:[pbB]?(?:small)?matrix|array)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\)?"
                    r"\\end\{[a-zA-Z]+\}[\])]*")
TRANSPOSED = re.compile(r"(.*)\^\{?\\?(?:[Tt]|top|intercal)\}?")
# Digits in a base from 2 on, and letters in one above 10: A_1 and S_{10} are names.
BASED = re.compile(r"([-+]?(?:\d+(?=_\{?(?:[2-9]|\d\d))|(?:[0-9A-Z]+|(?=[a-f]*\d)[0-9a-f]+)(?=_\{?(?:1[1-9]|"
                   r"[23]\d))))_\{?(\d+)\}?")
# A text in quotes, of any case; in the prefix of a unit case has a meaning.
TEXT = re.compile(r'" *(?![mM](?:Pa|eV|Hz) *")[A-Za-z][A-Za-z .\'-]+[A-Za-z.] *"')
# May be a set of real numbers: a condition, a union, an interval. JOINED: it is no tuple.
SET = re.compile(r"[<>≤≥≠]|[\[(].*,.*[\])]|\\(?:cup|setminus|emptyset)(?![a-z])")
JOINED = re.compile(r"[<>≤≥≠∪∨]|\\c[au]p(?![a-z])")
CHOICE = re.compile(r'"?\s*\(?([A-Z])[).:]\s*"?\s*([^\s∧∨,].*)')
RADIANS = ("radian", "radians", "rad")
WORDS = re.compile(r"(?i:yes|no)|(?=.*[A-Za-z]{4})(?:[A-Za-z .,']|(?<=[a-z])-(?=[a-z]{2}))+|"
                   r"\d{1,2}:\d\d[ap]m")
# A word between two numbers: 3 lb 4, 3 out of 4, 6 R 1. It is no product.
PARTED = re.compile(r"\d ?(?!e\d)(?:[Rrh]|[a-zA-Z]{2,}) ?\d+(?![\d^])")
SHORT_WORD = re.compile("(?i:(?=.*[aeiou])[a-z]{3})")  # cab, but not mgh, which is a product in any order


# ---- brackets

def depths(x: str) -> list[int]:
    """Count the brackets that are open behind each character."""
    return list(itertools.accumulate((c in OPENING) - (c in CLOSING) for c in x))


def is_short(x: str) -> bool:
    """Tell whether a text is compared by more than its spelling."""
    return len(x) <= LONGEST and max(depths(x), default=0) <= DEEPEST


def closes_at_end(x: str) -> bool:
    """Tell whether the last character of x closes the bracket that its first one opens."""
    return 0 in (depth := depths(x)) and depth.index(0) == len(x) - 1


def split_top_level(x: str, at: str | tuple[str, ...]) -> list[str]:
    """Split at these signs or commands, but not inside brackets or environments, and drop empty pieces."""
    pieces, depth = [""], 0
    for token in re.findall(r"\\[a-zA-Z]+|.", x, re.DOTALL):
        depth = max(0, depth + (token in OPENING) - (token in CLOSING))
        if token in at and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += token
    return [piece for piece in map(str.strip, pieces) if piece]


# ---- structure

def strip_wrapping(answer: str) -> tuple[str, str]:
    """Strip units, outer brackets, one side of an "about equal", and spaces. Return value and last unit."""
    left, about, right = answer.partition("\\approx")
    if about:
        name = left.strip(' ="')
        answer = right if not name or NAME.fullmatch(name) else left
    value, unit = without_unit(answer.strip())
    while value != answer:
        answer, value = value, without_unit(value)[0]
    answer = answer.replace('"', " ").strip().rstrip(" .,;:")
    while is_wrapped(answer):
        answer = answer[1:-1].strip()
    # A space means something behind a command and between digits.
    return re.sub(r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<!\d) | (?!\d)", r"\1", answer), unit


def is_wrapped(x: str) -> bool:
    """Tell whether outer brackets, {...} or (...), are around a single value and mean nothing."""
    outer = x[:1] + x[-1:] in ("()", "{}") and closes_at_end(x)
    return outer and len(split_top_level(x[1:-1], ",;∧∨")) == 1


def find_name(item: str) -> str:
    """Return the left side of an equation: x of x = 5, "" if there is no equals sign."""
    return item.partition("=")[0].strip() if "=" in item else ""


def list_members(x: str) -> list[str]:
    r"""List the members of a list, a set or a union; of anything else [x].

    "a \pm b" has two members, and {1, 2} in plain braces is a list. If the same names come again, the values
    between are one member: x=1, y=2, x=3, y=4 has two.
    """
    x = re.sub(r"^[^={},;∧∨]*=\s*(?=\\\{|\{[^{}]*,)(?!.*=)", "", x.replace("\\cup", "∪"))
    while x[:1] == "{" and closes_at_end(x):
        x = x[1:-1].strip()
    x = re.sub('^"([^"]*)"$', r"\1", x)
    if x.startswith("\\{") and closes_at_end(x[1:]):
        x = x[2:-2]
    elif THOUSANDS.fullmatch(x):
        return [x]
    return [member for item in split_records(x) for member in expand_signs(item)]


def expand_signs(item: str) -> list[str]:
    r"""List the values of an item with \pm; signs vary independently: (\pm 1, \pm 2) is four tuples."""
    pieces = re.split(r"\\pm\s*", item)
    if len(pieces) > 5:
        return [item]
    signed = itertools.product(*["+-"] * (len(pieces) - 1))
    return [pieces[0] + "".join(map("".join, zip(signs, pieces[1:], strict=True))) for signs in signed]


def split_records(x: str) -> list[str]:
    """Split a list into records such as x=1, y=2 if it consists of them, else into its items."""
    values = split_top_level(x, ",;∧∨∪")
    names = [find_name(value) for value in values]
    period = len(set(names))
    if 1 < period < len(names) and names == names[:period] * (len(names) // period):
        return [",".join(values[i:i + period]) for i in range(0, len(values), period)]
    return values


def read_words(x: str) -> str | None:
    """Return an answer in words without case and punctuation.

    None if it may be mathematics, as up to three letters may be a product.
    """
    return re.sub(r"[^a-z0-9]", "", x.lower()) if WORDS.fullmatch(x) else None


def split_relation(x: str) -> tuple[list[str], list[str]]:
    """Split a relation into its expressions and the signs between them."""
    return RELATION.split(x), RELATION.findall(x)


def to_interval(x: str) -> str | None:
    r"""Write an inequality for one value as an interval: "-2 < x ≤ 7" is (-2,7]. None for anything else."""
    bounds, signs = turn_ascending(*split_relation(x))
    ranged = [bool(RANGED.fullmatch(bound)) for bound in bounds]
    if ranged == [True, False]:
        bounds, signs = ["-\\infty", *bounds], ["<", *signs]
    elif ranged == [False, True]:
        bounds, signs = [*bounds, "\\infty"], [*signs, "<"]
    if len(bounds) == 3 and RANGED.fullmatch(bounds[1]) and set(signs) <= set("<≤"):
        opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
        return f"{opening}{bounds[0]},{bounds[2]}{closing}"
    return None


def turn_ascending(values: list[str], signs: list[str]) -> tuple[list[str], list[str]]:
    """Reverse a chain of relations if it falls: 3 > a ≥ b is b ≤ a < 3."""
    if set(signs) <= set(">≥="):
        return values[::-1], [FLIPPED.get(sign, sign) for sign in reversed(signs)]
    return values, signs


def list_rows(x: str, upright: bool) -> list[list[str]]:
    """List the rows of a matrix in TeX or of a list of lists; no rows for anything else.

    A plain list or tuple is a column if `upright`, else a row.
    """
    if transposed := TRANSPOSED.fullmatch(x):
        rows = list_rows(transposed[1], upright=False)
        return [list(column) for column in itertools.zip_longest(*rows, fillvalue="")]
    if matrix := MATRIX.fullmatch(x):
        return [row.split("&") for row in re.split(r"(?:\\\\)+", matrix[1])]
    if x[:1] + x[-1:] not in ("()", "[]") or not closes_at_end(x):
        return []
    lines = split_top_level(x[1:-1], ";")
    members = [f"[{line}]" for line in lines] if len(lines) > 1 else split_top_level(x[1:-1], ",")
    rows = [list_rows(member, upright=False) for member in members]
    if all(rows):
        return sum(rows, [])
    return [[member] for member in members] if upright else [members]


def take_apart(x: str, other: str = "") -> tuple[str, list[str]]:
    """Return the kind of a value ("" for an expression) and its members.

    Kinds are tuples and intervals, matrices, ratios and times, numbers in a base. If the `other` value is a
    matrix in TeX, a list of lists is one too, and a plain list is a row or a column, as the other is.
    """
    if "\\begin" in x + other and (rows := list_rows(x, upright="&" not in x + other)):
        return f"matrix {[len(row) for row in rows]}", sum(rows, [])
    if x[:1] in ("(", "[") and len(members := split_top_level(x[1:-1], ",;")) > 1 and closes_at_end(x):
        return x[0] + x[-1], members
    if based := BASED.fullmatch(x):
        return "" if based[2] == "10" else f"base {based[2]}", [based[1].upper()]
    if len(members := split_top_level(x, ":")) > 1:
        return ":", members
    return "", [x]


# ---- equality

def answers_equal(gold: str, answer: str, compare: Compare) -> bool:
    """Tell whether an answer is the gold one. `compare` decides on two expressions or relations."""
    if max(len(gold), len(answer)) <= LONGEST:
        spellings = normalise(gold), normalise(answer)
        if all(map(is_short, spellings)):
            sets = all(map(SET.search, spellings)) and JOINED.search(" ".join(spellings))
            return same_answers(*spellings, compare) or bool(sets) and compare(*spellings)
    return strip_spaces(gold) == strip_spaces(answer)


def strip_spaces(x: str) -> str:
    return "".join(x.split())


def same_answers(gold: str, answer: str, compare: Compare, labelled: bool = True) -> bool:
    """Compare two normalised answers. `labelled`: one may be a choice with its letter, (B) 42."""
    if any(map(TEXT.fullmatch, (gold, answer))) and gold.strip('" ').lower() == answer.strip('" ').lower():
        return True
    gold_items, answer_items = list_members(gold), list_members(answer)
    if len(gold_items) == len(answer_items) == 1:
        exact, _, rounded = answer_items[0].rpartition("\\approx")
        if not NAME.fullmatch(exact.strip() or "x") and same_numbers(gold_items[0], rounded):
            shift = rf"\cdot 10^{{{len(rounded.partition('.')[2])}}}+0.5\rfloor"
            if compare(rf"\lfloor({exact.rpartition('=')[2]}){shift}", rf"\lfloor({rounded}){shift}"):
                return True
        gold, gold_unit = strip_wrapping(gold_items[0])
        answer, answer_unit = strip_wrapping(answer_items[0])
        in_radians = answer_unit in RADIANS or "\\pi" in answer and answer_unit != "degrees"
        if gold_unit == "degrees" and in_radians:
            return same_values(rf"\frac{{({gold})\pi}}{{180}}", answer, compare)
        if units_differ(gold_unit, answer_unit):
            return False
        gold_items, answer_items = list_members(gold), list_members(answer)
    if not gold_items or not answer_items or gold == answer:
        return bool(gold_items and answer_items)
    if len(gold_items) > 1 or len(answer_items) > 1:
        shapes = {(len(list_members(x)), bool(re.search(r"[∪∨]|\\cup", x))) for x in (gold, answer)}
        # "x > 1 and x < 3" is no list of two sets, and differs from "x > 1 or x < 3".
        as_sets = len(shapes) > 1 and re.search("[<>≤≥]", gold + answer)
        return not as_sets and same_lists(gold_items, answer_items, compare)
    for one, other in ((gold, answer_items[0]), (answer, gold_items[0])) if labelled else ():
        if choice := CHOICE.fullmatch(other):
            letter, value = choice.groups()
            return same_answers(one, letter if re.fullmatch("[A-Z]", one) else value, compare, labelled=False)
    if RELATION.search(gold) or RELATION.search(answer):
        return same_relations(gold, answer, compare)
    return same_values(gold, answer, compare)


def units_differ(gold_unit: str, answer_unit: str) -> bool:
    """Tell whether two units differ: all their names are known, or one of them is "modulo" a number."""
    if not (gold_unit and answer_unit) or gold_unit == answer_unit:
        return False
    powers = read_unit(gold_unit), read_unit(answer_unit)
    return None not in powers and powers[0] != powers[1] or "modulo" in gold_unit + answer_unit


def same_in_order(gold: list[str], answer: list[str], compare: Compare) -> bool:
    """Compare two lists member by member."""
    return len(gold) == len(answer) and all(map(same_answers, gold, answer, [compare] * len(gold)))


def same_lists(gold: list[str], answer: list[str], compare: Compare) -> bool:
    """Compare two lists as sets; if only one of them has names, compare them in order."""
    gold_names, answer_names = set(map(find_name, gold)) - {""}, set(map(find_name, answer)) - {""}
    unnamed_or_tuple = not (gold_names and answer_names) or min(len(gold), len(answer)) == 1
    named_tuple = any(name.startswith("(") for name in gold_names | answer_names)
    if (max(len(gold_names), len(answer_names)) > 1 or named_tuple) and unnamed_or_tuple:
        return same_in_order(list_tuple_members(gold), list_tuple_members(answer), compare)
    if max(len(gold), len(answer)) > LONGEST_LIST:
        return set(map(strip_spaces, gold)) == set(map(strip_spaces, answer))
    if any("ldots" in item for item in gold):
        return same_in_order(gold, answer, compare)
    return (all(any(same_answers(a, b, compare) for b in answer) for a in gold)
            and all(any(same_answers(a, b, compare) for a in gold) for b in answer))


def list_tuple_members(side: list[str]) -> list[str]:
    """Return the members of a single tuple such as (x,y)=(1,2); a list of several items as it is."""
    return take_apart(strip_wrapping(side[0].rpartition("=")[2])[0])[1] if len(side) == 1 else side


def is_name(x: str) -> bool:
    """Tell whether x names a value, or the members of a tuple in alphabetical order."""
    letters = re.findall("[a-zA-Z]", x)
    return bool(NAME.fullmatch(x)) and (x[0] != "(" or letters == sorted(letters))


def same_name(gold: tuple[str, str], answer: tuple[str, str]) -> str | None:
    """Return the answer's value with its variable renamed as in the gold answer. None if the names differ.

    f(x) = x^2 may be written as y = x^2 or as f(t) = t^2, because both sides are rules for a variable. The
    names f(2) and f(3), P(A) and P(B), f and g differ.
    """
    (name, value), (other, other_value) = gold, answer
    if name == other:
        return other_value
    call, other_call = CALL.fullmatch(name), CALL.fullmatch(other)
    if call and other_call:
        new, old = call[2].split(","), other_call[2].split(",")
        free = not set(new) & (set(old) | find_letters(other_value)) and set(old) <= find_letters(other_value)
        if call[1] != other_call[1] or len(new) != len(old) or not free:
            return None
        renamed = dict(zip(old, new, strict=True))
        return re.sub(r"\\[a-zA-Z]+|[a-zA-Z]", lambda m: renamed.get(m[0], m[0]), other_value)
    call, letter = (call, other) if call else (other_call, name)
    if not call or NAMED_FUNCTIONS.fullmatch(call[1]) or not re.fullmatch("[a-zA-Z]", letter):
        return None
    variables = set(call[2].split(","))
    return other_value if variables <= (find_letters(value) & find_letters(other_value)) - {letter} else None


def find_letters(x: str) -> set[str]:
    """Return the letters of x that belong to no command."""
    return {*re.findall(r"\\[a-zA-Z]+|([a-zA-Z])", x)} - {""}


def same_relations(gold: str, answer: str, compare: Compare) -> bool:
    """Compare two answers if at least one is a relation. A name that only one of them has is left out."""
    (a, gold_signs), (b, answer_signs) = split_relation(gold), split_relation(answer)
    if "\\in" in gold_signs + answer_signs:
        if gold_signs == answer_signs and a[0] != b[0]:
            return False
        value = a[-1] if "\\in" in gold_signs else gold
        return same_answers(value, b[-1] if "\\in" in answer_signs else answer, compare)
    if not gold_signs and answer_signs == ["="] and NAME.fullmatch(b[1]) and not NAME.fullmatch(b[0]):
        b = b[::-1]  # 5 = x
    answer_equals = set(answer_signs) == {"="}
    gold_named, answer_named = set(gold_signs) == {"="} and is_name(a[0]), answer_equals and is_name(b[0])
    loose = answer_equals and LOOSE_NAME.fullmatch(b[0])
    if gold_named and not answer_signs or (answer_named or loose) and not gold_signs:
        return same_answers(a[-1], b[-1], compare)
    if gold_named and answer_named:
        value = same_name((a[0], a[-1]), (b[0], b[-1]))
        if value is not None or "(" in a[0] + b[0]:
            return value is not None and same_answers(a[-1], value, compare)
    if not gold_signs and answer_equals and compare(b[0], b[-1]):  # 6/8 = 3/4
        return same_answers(gold, b[-1], compare)
    if len(gold_signs) == len(answer_signs) > 1:
        chain, other = turn_ascending(a, gold_signs), turn_ascending(b, answer_signs)
        if chain[1] == other[1] and same_in_order(chain[0], other[0], compare):
            return True
    left, right = to_interval(gold) if gold_signs else gold, to_interval(answer) if answer_signs else answer
    if len(a) == len(b) == 3 and not (re.fullmatch(VARIABLE, a[1]) and re.fullmatch(VARIABLE, b[1])):
        return False  # 0 < f(x) < 2 is another chain than 0 < g(x) < 2
    if left and right:
        return same_values(left, right, compare)
    return len(gold_signs) == len(answer_signs) == 1 and compare(gold, answer)


def same_values(gold: str, answer: str, compare: Compare) -> bool:
    """Compare two answers that are neither lists nor relations."""
    if (equal_numbers := same_numbers(gold, answer)) is not None:
        return equal_numbers
    words = read_words(gold), read_words(answer)
    # Equal letters were seen before.
    if PARTED.search(f"{gold}|{answer}"):
        return False
    if any(words) or len(gold) == len(answer) == 1 or SHORT_WORD.fullmatch(gold) and answer.isalpha():
        return words[0] is not None and words[0] == words[1]
    gold_kind, gold_members = take_apart(gold, answer)
    answer_kind, answer_members = take_apart(answer, gold)
    if gold_kind == answer_kind != "":
        return same_in_order(gold_members, answer_members, compare)
    if "\\begin" in gold and "\\begin" in answer:
        return compare(gold, answer)
    if gold_kind.startswith("base") and not answer_kind:  # the question has named the base
        return gold_members[0] == answer.upper()
    if gold_kind or answer_kind:
        one, members = (answer, gold_members) if gold_kind else (gold, answer_members)
        if re.match("[(m]", gold_kind + answer_kind) and re.search("[jk]", one):  # unit vectors
            return compare(one, "+".join(map("({}){}".format, members, "ijk")))
        return False  # or sets, which `answers_equal` compares
    return compare(gold_members[0], answer_members[0])


def is_readable(gold: str, reads: Callable[[str], bool]) -> bool:
    """Tell whether every member of an answer can be compared by value. `reads` decides on one expression."""
    return is_short(gold) and can_read_all(normalise(gold), reads)


def can_read_all(x: str, reads: Callable[[str], bool]) -> bool:
    """Do the same for an answer in its normal spelling, and for each of its members."""
    members = list_members(x)
    if len(members) == 1:
        members = list_members(x := strip_wrapping(members[0])[0])
    if len(members) == 1:
        if "\\in" in x or not RELATION.search(x):
            members = take_apart(x)[1]
        else:
            members = [side for side in split_relation(x)[0] if side]
    if len(members) != 1:
        return bool(members) and all(can_read_all(member, reads) for member in members)
    return number(members[0]) is not None or read_words(members[0]) is not None or reads(members[0])
