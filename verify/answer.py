r"""Tell whether two answers are equal: one spelling for both (spelling.py), then their structure.

Text in, text out; nothing is evaluated. Answers are equal when they differ in spelling alone: "x = 5" is 5,
lists and sets have no order, tuples have one, the brackets of intervals count. A decimal is another number's
value only where it has SIGNIFICANT digits, BEHIND of them behind the point, and all are right. `equal` takes
two answers apart as far as structure goes, and leaves the comparison of two expressions to a function that it
is given (algebra.py). Answers of more than LONGEST characters are compared by their spelling alone, so that
time is bounded.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from verify.spelling import UNITS, normalise, without_unit

LONGEST = 1000    # characters
DEEPEST = 20      # brackets within brackets
LARGEST = 40      # members of a list that are compared one by one
SIGNIFICANT, BEHIND = 6, 4
Compare = Callable[[str, str], bool]

OPENING, CLOSING = "([{", ")]}"
SUBSCRIPT = r"(?:_\w|_\{[^{}]*\}|')*"
NAME = re.compile(
    r"(?:\\?[A-Za-z]|\\[A-Za-z]+|\\?[A-Z]{2,4}|\|[A-Z]+\||m?\\(?:angle|triangle) ?[A-Z]+|[A-Za-z]{4,}|"
    rf"[A-Za-z]{SUBSCRIPT}:[A-Za-z]){SUBSCRIPT}(?:\([A-Za-z0-9,]*\))?|\([a-zA-Z](?:,[a-zA-Z])*\)")
# What may also stand on the left of an answer where the gold one has no name:
# f(-1), |z|, [ABC], \overline{AB}, \cos\theta, m+n.
LOOSE = re.compile(
    r"[a-zA-Z](?:\^\{?-1\}?)?[(\[].*[)\]]|\|[a-zA-Z]+\||\[[^\]]*[A-Z]\]|"
    r"\\(?:overline|overrightarrow|vec|hat|bar)\{?[A-Za-z]+\}?|"
    r"\\(?:sin|cos|tan|angle|log|ln)[\\ a-zA-Z]+|\\frac\{[A-Za-z]+\}\{[A-Za-z]+\}|[a-zA-Z]\^\{?-1\}?|"
    r"[a-zA-Z](?:[+:][a-zA-Z])+|d?[a-z]/d?[a-z]")
RELATION = re.compile(r"(?<![=<>≤≥≠])(?:=|<|>|≤|≥|≠|\\in(?![a-z]))")
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
SETS = re.compile(r"\\(?:cup|cap|setminus|backslash|infty|emptyset)(?![a-z])")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
MATRIX = re.compile(r"[\[(]*\\begin\{(?:[pb]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\)?"
                    r"\\end\{[a-z]+\}[\])]*")
BASED = re.compile(r"([-+]?[0-9A-Z]+)_\{?(\d+)\}?")
CHOICE = re.compile(r'"?\s*\(?([A-Z])[).:]\s*"?\s*([^\s∧∨,].*)')
DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
FRACTION = re.compile(r"([0-9]+\+|[0-9]+(?=\\))?(?:\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}|"
                      r"\(?([-+]?[0-9]*\.?[0-9]+)\)?/\(?([-+]?[0-9]+)\)?)")
POWER_OF_TEN = re.compile(r"(?:([0-9]*\.?[0-9]+)\*)?10\^\{?([-+]?[0-9]{1,3})\}?")
REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")
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


# ---- numbers

def number(x: str) -> tuple[Fraction, int] | None:
    r"""Read a plain number: its value, and the digits behind the point of a decimal (-1: not a decimal).

    Reads decimals, a/b, \frac{a}{b}, mixed numbers, a \cdot 10^{b}, repeating decimals; evaluates nothing.
    """
    if len(x) > LONGEST:
        return None
    x = x.strip()
    if " " in x:
        x = re.sub(r"^([-+]?\d+) (\d+/\d+)$", r"\1+\2", re.sub(r" ?\\cdot ?", r"\\cdot", x))
    x = x.replace("\\cdot", "*")
    if THOUSANDS.fullmatch(x):
        x = x.replace(",", "")
    sign, x = (-1, x[1:]) if x[:1] == "-" else (1, x.removeprefix("+"))
    if re.fullmatch(r"[0-9]*\.?[0-9]*", x):
        return (sign * Fraction(x), len(x.partition(".")[2]) if "." in x else -1) if x.strip(".") else None
    value = fraction(x)
    return None if value is None else (sign * value, -1)


def fraction(x: str) -> Fraction | None:
    """Read a number without a sign that is no decimal: a fraction, a power of ten, a repeating decimal."""
    if match := FRACTION.fullmatch(x):
        integer, top, bottom = match[1], match[2] or match[4], Fraction(match[3] or match[5])
        return Fraction((integer or "0").strip("+")) + Fraction(top) / bottom if bottom else None
    if match := POWER_OF_TEN.fullmatch(x):
        return Fraction(match[1] or 1) * Fraction(10) ** int(match[2])
    if match := REPEATING.fullmatch(x):
        integer, fixed, cycle = match[1] or "0", match[2], match[3]
        nines = (10 ** len(cycle) - 1) * 10 ** len(fixed)
        return Fraction(f"{integer}.{fixed}0") + Fraction(int(cycle), nines)
    return None


def rounds_to(value: Fraction, decimal: str) -> bool:
    """Tell whether a decimal of enough digits is this value, rounded or cut off."""
    written, digits = Fraction(decimal), len(decimal.partition(".")[2])
    digits_known = len(re.sub(r"\D", "", decimal).lstrip("0"))
    error = abs(value - written) * 10 ** digits
    fits = error <= Fraction(1, 2) or (error < 1 and abs(written) < abs(value))
    exact = abs(value - written) <= abs(value) / 10**13
    return digits_known >= SIGNIFICANT and digits >= BEHIND and (fits or exact)


def same_numbers(gold: str, answer: str) -> bool | None:
    """Tell whether two plain numbers are equal, None where one is no number.

    What binary fractions add at the end does not matter. Of two decimals the shorter may be the longer one,
    rounded.
    """
    read = number(gold), number(answer)
    if None in read:
        return None
    (value, digits), (answer_value, answer_digits) = read
    noise = min(Fraction(1, 10**6), abs(value) / 10**9)
    if value == answer_value or max(digits, answer_digits) > 8 and abs(value - answer_value) <= noise:
        return True
    # Not a decimal (-1) counts as longer than any.
    if (digits if digits >= 0 else LONGEST) <= (answer_digits if answer_digits >= 0 else LONGEST):
        short, text, exact = digits, gold, answer_value
    else:
        short, text, exact = answer_digits, answer, value
    return short > 0 and digits != answer_digits and rounds_to(exact, text.replace(",", ""))


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
    answer = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])", "\\1\x1f", answer)  # the one space that means something
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

    "a \pm b" is two of them. Values of several names that come again are records: x=1, y=2, x=3, y=4 is two.
    """
    x = re.sub(r"^[A-Za-z]\s*=\s*(?=\\\{)", "", x.strip().replace("\\cup", "∪"))
    if x[:1] == x[-1:] == '"' and x.count('"') == 2:
        x = x[1:-1]
    if x.startswith("\\{") and x.endswith("\\}") and closes_at_end(x[1:]):
        x = x[2:-2]
    elif THOUSANDS.fullmatch(x):
        return [x]
    members = []
    for item in records(x):
        signs = "+-" if "\\pm" in item else "+"

        members += [re.sub(r"\\pm\s*", sign, item) for sign in signs]
    return members


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
    r"""Write an inequality for one letter as an interval: "-2 < x ≤ 7" is (-2,7]. None for anything else."""
    bounds, signs = sides(x)
    letters = [bool(re.fullmatch(r"[a-zA-Z]", bound)) for bound in bounds]
    if letters == [False, True] and signs[0] in FLIPPED:
        bounds, signs, letters = bounds[::-1], [FLIPPED[signs[0]]], [True, False]
    if letters == [True, False] and signs[0] in FLIPPED:
        if signs[0] in "<≤":
            return f"(-\\infty,{bounds[1]}{')' if signs[0] == '<' else ']'}"
        return f"{'(' if signs[0] == '>' else '['}{bounds[1]},\\infty)"
    if len(bounds) == 3 and letters[1]:
        if set(signs) <= set(">≥"):
            bounds, signs = bounds[::-1], [FLIPPED[sign] for sign in reversed(signs)]
        if set(signs) <= set("<≤"):
            opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
            return f"{opening}{bounds[0]},{bounds[2]}{closing}"
    return None


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
    if max(len(gold_names), len(answer_names)) > 1 and unnamed_or_tuple:
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
    both = gold_named and answer_named and (a[0] == b[0] or re.search(r"\w\(", a[0] + " " + b[0]))
    if (gold_named and not answer_signs) or ((answer_named or loose) and not gold_signs) or both:
        return same(a[-1], b[-1], compare)
    if not gold_signs and set(answer_signs) == {"="} and compare(b[0], b[-1]):  # 6/8 = 3/4
        return same(gold, b[-1], compare)
    left, right = interval(gold) if gold_signs else gold, interval(answer) if answer_signs else answer
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
