r"""Whether two answers are equal: one spelling for both, then their structure. Text in, text out; nothing is evaluated.

Answers are equal when they differ in spelling alone: units, currency, percent and degree signs may be left out or
added, "x = 5" is 5, lists and sets have no order, tuples have one, the brackets of intervals count, and a decimal is
another number's value only where it has SIGNIFICANT digits, BEHIND of them behind the point, and all are right. `equal`
takes two answers apart as far as structure goes, and leaves the comparison of two expressions to a function that it is
given (algebra.py). Answers of more than LONGEST characters are compared by their spelling alone, so time is bounded.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

LONGEST = 1000    # characters
DEEPEST = 20      # brackets within brackets
LARGEST = 40      # members of a list that are compared one by one
SIGNIFICANT, BEHIND = 6, 4
Compare = Callable[[str, str], bool]

# ---- one spelling

CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "‑": "-", "×": r"\cdot ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
    "∅": r"\emptyset ", "≈": r"\approx ", "√": r"\sqrt ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "∖": r"\setminus ", "⟨": "(", "⟩": ")", "“": None, "”": None, '"': None, "′": "'", "’": "'", "、": ",", "。": ".",
    "∴": None, **{c: f"^{{{i}}}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}})
NUMERALS = {name: str(i) for i, name in enumerate("two three four five six seven eight nine ten".split(), start=2)}
FACTORS = {"dozen": "12", "hundred": "100", "thousand": "1000", "million": "10^{6}", "billion": "10^{9}",
           "trillion": "10^{12}"}
CURRENCIES = {"$": "dollars", "£": "sterling", "€": "euros", "¥": "yen", "₹": "rupees"}
BRACED = r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
ARGUMENT = r"\s*(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\d|\\[a-zA-Z]+|[a-zA-Z](?![a-zA-Z]))"
CIRCLE = r"\s*\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})"
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
DEGREES = re.compile(r"(?<![\d.])(\d+(?:\.\d*)?)" + CIRCLE)


def command(*names: str) -> str:
    return rf"\\(?:{'|'.join(names)})(?![a-zA-Z])"


def with_braces(match: re.Match) -> str:
    return "\\frac" + "".join(x if x[0] == "{" else f"{{{x}}}" for x in match.groups())


# What is written in several ways -> one of them, in this order. Words in quotes are texts; ∧ and ∨ are "and" and "or".
SPELLING = [(re.compile(pattern), new) for pattern, new in (
    # what is not there to be read
    ("[\u0000-\u0008\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", ""),
    (r"\s+", " "),
    (r"^[\s=]+|\\? ?$", ""),
    (command("boxed", "fbox", "displaystyle", "textstyle", "limits", "bf", "rm", "large", "Large", "LARGE", "huge",
             "Huge",
             "small", "checkmark", "therefore", "underline"), ""),
    (r"\\(?:text)?color\{[^{}]*\}|\\tag\{[^{}]*\}", ""),
    # money and delimiters of formulas
    (r"^\\?([\$£€¥₹])\s*([\d.,]+)$", lambda m: f'{m[2]} "{CURRENCIES[m[1]]}"'),
    (r'^[-+]?\d{1,3}(,\d{3})+(?=[ .\d]*["a-zA-Z\\])', lambda m: m[0].replace(",", "")),
    (r"(?<!\\)\\[()\[\]]|\\?\$|" + command("pounds", "euro") + "|[£€₹¥]", ""),
    # sizes and fonts; texts in quotes
    (r"\*\*(?=\s*$)|^\s*\*\*", ""),
    (r"\*\*", "^"),
    (r"\\[tdc]frac", r"\\frac"),
    (r"\\[td]binom", r"\\binom"),
    (command("left", "right", "[bB]igg?[lr]?") + r"\.?", ""),
    (r"\\(?:text(?:rm|bf|it|normal|sf|tt)?|mbox|hbox|emph)" + BRACED, r'"\1"'),
    (r"\\mathrm\s*\{((?![eid]\})(?:[^{}\\]|\{[^{}]*\})*)\}", r'"\1"'),
    (r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|operatorname|mathcal)\s*\{([^{}]*)\}", r"\1"),
    (r"\\begin\{cases\}(.*)\\end\{cases\}", lambda m: m[1].replace("\\\\", ",")),
    (r"\\mathbb\s*\{?R\}?|" + command("R") + r"|(?i:\ball real numbers\b)", r"(-\\infty,\\infty)"),
    # letters with marks, rows of matrices
    (r"([A-Za-z])(?:\^\s*\{?\s*\\prime\s*\}?|')", r"\1_{p}"),
    (r"_\{\\([a-z]+)\s*\}", r"_{\1}"),
    (r"\\(vec|hat|bar)\s+([a-zA-Z])", r"\\\1{\2}"),
    (r"\\\\\[-?[\d.]+[a-z]+\]", r"\\\\"),
    (command("cr"), r"\\\\"),
    # spaces, thousands, bases
    (r"\{,\}", ","),
    (r"\{:\}", ":"),
    (r"(?<!\\)\\!\s*", ""),
    (r"(?<=\d)\s*\\q?quad\s*(?=\d)", " ; "),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|\\hspace\{[^{}]*\}|\\phantom\s*(?:\{[^{}]*\}|.)", " "),
    (r" +", " "),
    ('""', ""),
    (r"(?<!\\)\{\s*(\d{1,3}(?:,\d{3})+)\s*\}", lambda m: "{" + m[1].replace(",", "") + "}"),
    (r"(?<![\d._^\\a-zA-Z])\d{1,3}(?: \d{3})+(?![\d ])", lambda m: m[0].replace(" ", "")),
    (r"(?<=[0-9a-z}]),(?=\d{3}_)", ""),
    (r"\((\w+)\)_", r"\1_"),
    (r'\s*"?\s*\(?\bbase\s*"?\s*(\w+)\)?"?', r"_{\1}"),
    (r'_\{"?(' + "|".join(NUMERALS) + r')"?\}', lambda m: f"_{{{NUMERALS[m[1]]}}}"),
    # units that are signs
    (CIRCLE + r'\s*"?\s*([CF])"?\s*\.?$', r'"\1"'),
    (CIRCLE + r"\s*\.?$", '"degrees"'),
    (CIRCLE + "|" + command("degree", "deg"), ""),
    (r"\\?%|(?i:\b(?:percent|per cent|pct|percentage points?)\b)", ""),
    (r'\\mu\s*"(\w)"', r'"u\1"'),
    (r"\\Omega\s*$", '"ohm"'),
    # relations, operators, sets
    (command("le", "leq", "leqslant") + "|<=|=<", "≤"),
    (command("ge", "geq", "geqslant") + "|>=|=>", "≥"),
    (command("lt"), "<"),
    (command("gt"), ">"),
    (command("ne", "neq") + r"|!=|\\not\s*=", "≠"),
    (command("varnothing", "emptyset") + r"|\\\{\s*\\\}", r"\\emptyset "),
    (command("ldots", "cdots", "dots"), r"\\ldots "),
    (command("langle"), "("),
    (command("rangle"), ")"),
    (command("lbrace"), r"\\{"),
    (command("rbrace"), r"\\}"),
    (r"(?<=\d) ?x ?(?=10\s*\^)", r"\\cdot "),
    (command("times", "ast") + r"|\*", r"\\cdot "),
    (command("div"), "/"),
    (r"^\\\{\s*[a-z]\s*(?:\\mid(?![a-z])|\||:)\s*(.*)\\\}$", r"\1"),
    (command("mid", "vert", "lvert", "rvert"), "|"),
    (r"\s*\\pmod\s*\{?(\w+)\}?\s*$", r'"modulo \1"'),
    (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
    # as programs and words have it
    (r"\b(?:np|math|sympy)\.(?=[a-z])", ""),
    (r"(?i:\binfinity\b|\binf\b)|\boo\b", r"\\infty "),
    (r"(?<![\\a-zA-Z])(sqrt|pi|sin|cos|tan|arcsin|arccos|arctan|ln|log|exp)(?![a-zA-Z])", r"\\\1"),
    (r"\\log_\s*\{?e\}?(?![a-z])", r"\\ln "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt(\[[^\]]*\])?\s*(\d+|\\[a-z]+|[a-zA-Z])", r"\\sqrt\1{\2}"),
    (r"\\frac" + ARGUMENT + ARGUMENT, with_braces),
    (r"(?<=[{}\w])\\frac" + ARGUMENT + ARGUMENT, with_braces),  # inside the arguments of another
    # numbers
    (r"(?<![a-zA-Z\\}\d.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\d.a-zA-Z])", r"\1\\cdot 10^{\2}"),
    (r'(\d)\s*"?\s*(' + "|".join(FACTORS) + ")(?![a-z])", lambda m: rf'{m[1]}\cdot {FACTORS[m[2]]}"'),
    (r"(\.\d*?)(\d{1,2}?)\2{2,}\s*(?:\.\.\.|\\ldots)", r"\1\\overline{\2}"),
    (r"(?<=[\d.])\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))", lambda m: rf"\overline{{{m[1] or m[2]}}}"),
    (r"(\d)\.(?![\d.]|\\overline)", r"\1"),
    (r'(\d)\s*"?\s*to\s*"?\s*(\d)', r"\1:\2"),
    (r'(?i:(\d)(\s*"?\s*)([ap])\.?\s?m\b\.?)', lambda m: f"{m[1]}{m[2]}{m[3].lower()}m"),
    # words around the answer
    (r'^\s*"[^"]*(?:\bis|:)\s*"|(?i:^(?:the )?(?:final )?answer(?: is|:)\s*)|^\s*"?\s*(?:US|USD|Rs\.?)\s*"?\s*(?=\d)',
     ""),
    (r'^\s*("?)\s*(?:[Tt]he|[Aa]n|a|[Oo]ption|[Cc]hoice)\s+(?!and\b|or\b)(?=[a-zA-Z]{3}|\(?[a-zA-Z]\)?"?$)', r"\1"),
    (r'"?\s?,?\s?\band\b\s?"?|' + command("land", "wedge"), "∧"),
    (r'"?\s?,?\s?\bor\b\s?"?|' + command("lor", "vee"), "∨"),
)]


def normalise(answer: str) -> str:
    """One spelling for what may be spelled in several ways without changing the value."""
    answer = unicodedata.normalize("NFKC", answer.translate(CHARACTERS)).translate(CHARACTERS).strip()
    if TRIGONOMETRIC.search(answer):
        answer = DEGREES.sub(r"(\\frac{\1\\pi}{180})", answer)
    for pattern, new in SPELLING:
        answer = pattern.sub(new, answer)
    return answer.strip().rstrip(" .,;:")


# ---- units

UNITS = {name: i for i, names in enumerate((  # names of one unit; those of different units are different values
    "mm millimeter millimeters", "cm centimeter centimeters", "m meter meters metre metres",
    "km kilometer kilometers", "inch inches in", "foot feet ft", "yard yards yd", "mile miles mi",
    "second seconds s sec", "minute minutes min", "hour hours h hr hrs", "day days", "week weeks", "month months",
    "year years", "cent cents", "dollar dollars", "gram grams g", "kg kilogram kilograms", "mg", "pound pounds lb lbs",
    "ounce ounces oz", "degree degrees", "radian radians rad", "liter liters litre litres l L", "gallon gallons",
    "ml mL", "mph", "N", "J", "W", "V", "A", "K", "C", "F", "T", "Hz", "kJ", "eV", "mol", "nm", "um", "ohm", "Pa",
    "ton tons", "man men", "cup cups", "way ways", "euro euros", "sterling", "yen",
    "rupee rupees")) for name in names.split()}
POWER = r"\^\s*\{?-?\d+\}?"
UNIT = re.compile(r'\s?(?:"(?P<text>[^"]*)"|(?<=[\d)}\] ])(?P<word>[a-zA-Z]+(?:[ /.]+[a-zA-Z]+)*\.?))\s?'
                  rf"(?:{POWER})?\.?$")
NO_UNIT = re.compile(r"[\d\\;∧∨]|\b(?:not|wrong|incorrect|except|[ap]m|pi|factorial|mod)\b")


def without_unit(x: str) -> tuple[str, str]:
    """A value and the unit behind it, "" for none.

    A text in quotes is one behind a number; words are where all have four letters or more. Shorter ones are products of
    letters unless they are known.
    """
    found = UNIT.search(x)
    if not found:
        return x, ""
    value, quoted = x[:found.start()].rstrip(), found["text"] is not None
    unit = re.sub(POWER, "", found["text"] if quoted else found["word"]).strip(" .")
    if unit.startswith("modulo "):
        return value, unit
    names = re.sub(r"\b(?:square|cubic|per|sq)\b\.? ?", "", unit)
    known = all(name in UNITS for name in re.split(r"[ /.]+", names) if name)
    apart = quoted or x[found.start("word") - 1] == " " or (known and len(unit) > 1)
    named = len(unit) > 1 and re.search(r"\d", value) if quoted else all(len(name) >= 4 for name in unit.split())
    counted = re.search(r"[\d)}]|\\pi(?![a-z])", value) or (known and quoted and unit)
    open_end = value.endswith(tuple("=+-<>≤≥,;:∧∨(_^")) or (value.endswith('"') and not known)
    if not (apart and counted and (known or named)) or open_end or NO_UNIT.search(unit):
        return x, ""
    return re.sub(r'\s*(?:\\cdot|(?<=") ?/)?[\\\s]*$', "", value), names


def bare(answer: str) -> tuple[str, str]:
    """The value without its units, outer brackets, what is about equal to it, and spaces; and the last unit."""
    left, about, right = answer.partition("\\approx")
    if about:
        answer = right if not left.strip(" =") or NAME.fullmatch(left.strip(" =")) else left
    value, unit = without_unit(answer.strip())
    while value != answer:
        answer, value = value, without_unit(value)[0]
    answer = answer.replace('"', " ").strip().rstrip(" .,;:")
    while len(answer) > 1 and answer[0] + answer[-1] in ("()", "{}") and closes_at_end(answer) and (
            answer[0] == "{" or len(split(answer[1:-1], ",;∧∨")) == 1):
        answer = answer[1:-1].strip()
    answer = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])", "\\1\x1f", answer)  # the one space that means something
    return re.sub(r"(?<!\d) | (?!\d)", "", answer).replace("\x1f", " "), unit


# ---- structure

OPENING, CLOSING = "([{", ")]}"
SUBSCRIPT = r"(?:_\w|_\{[^{}]*\}|')*"
NAME = re.compile(rf"(?:\\?[A-Za-z]|\\[A-Za-z]+|\\?[A-Z]{{2,4}}|\|[A-Z]+\||m?\\(?:angle|triangle) ?[A-Z]+|"
                  r"[A-Za-z]{4,}|"
                  rf"[A-Za-z]{SUBSCRIPT}:[A-Za-z]){SUBSCRIPT}(?:\([A-Za-z0-9,]*\))?|\([a-zA-Z](?:,[a-zA-Z])*\)")
# On the left of an answer where the gold one has no name, also: f(-1), |z|, [ABC], \overline{AB}, \cos\theta, m+n
LOOSE = re.compile(r"[a-zA-Z](?:\^\{?-1\}?)?[(\[].*[)\]]|\|[a-zA-Z]+\||\[[^\]]*[A-Z]\]|"
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


def closes_at_end(x: str) -> bool:
    """Whether the bracket that opens x is closed by its last character."""
    depth = 0
    for i, c in enumerate(x):
        depth += (c in OPENING) - (c in CLOSING)
        if depth == 0:
            return i == len(x) - 1
    return False


def split(x: str, at: str) -> list[str]:
    """Cut at these characters where no bracket or environment is open."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(x):
        depth = max(0, depth + (c in OPENING) - (c in CLOSING) + x.startswith("\\begin", i) - x.startswith("\\end", i))
        if c in at and depth == 0:
            parts.append(x[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, x[start:]) if part.strip()]


def name_of(item: str) -> str:
    return item.partition("=")[0].strip() if "=" in item else ""


def items(x: str) -> list[str]:
    r"""The members of a list, a set or a union; x alone where it is none. "a \pm b" is two of them, and values of
    several names that come again, as x=1, y=2, x=3, y=4, are records."""
    x = re.sub(r"^[A-Za-z]\s*=\s*(?=\\\{)", "", x.strip().replace("\\cup", "∪"))
    if x[:1] == x[-1:] == '"' and x.count('"') == 2:
        x = x[1:-1]
    if x.startswith("\\{") and x.endswith("\\}") and closes_at_end(x[1:]):
        x = x[2:-2]
    elif THOUSANDS.fullmatch(x):
        return [x]
    groups = split(x, "∧∨;")
    if not (len(groups) > 1 and all("=" in group and "," in group for group in groups)):
        groups = split(x, ",;∧∨∪")
        names = [name_of(item) for item in groups]
        period = len(set(names))
        if 1 < period < len(names) and names == names[:period] * (len(names) // period):
            groups = [",".join(groups[i:i + period]) for i in range(0, len(groups), period)]
    return [re.sub(r"\\pm\s*", sign, item) for item in groups for sign in ("+-" if "\\pm" in item else "+")]


def number(x: str) -> tuple[Fraction, int] | None:
    r"""The value of a plain number, and how many digits are behind the point of a decimal one (-1: not a decimal).

    Decimals, a/b, \frac{a}{b}, mixed numbers, a \cdot 10^{b}, repeating decimals. Evaluates no expression.
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
    if found := re.fullmatch(r"([0-9]+\+|[0-9]+(?=\\))?(?:\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}|"
                             r"\(?([-+]?[0-9]*\.?[0-9]+)\)?/\(?([-+]?[0-9]+)\)?)", x):
        whole, top, bottom = found[1], found[2] or found[4], Fraction(found[3] or found[5])
        return (sign * (Fraction((whole or "0").strip("+")) + Fraction(top) / bottom), -1) if bottom else None
    if found := re.fullmatch(r"(?:([0-9]*\.?[0-9]+)\*)?10\^\{?([-+]?[0-9]{1,3})\}?", x):
        return sign * Fraction(found[1] or 1) * Fraction(10) ** int(found[2]), -1
    if found := re.fullmatch(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}", x):
        whole, fixed, cycle = found[1] or "0", found[2], found[3]
        part = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
        return sign * (Fraction(f"{whole}.{fixed}0") + part), -1
    return None


def rounds_to(value: Fraction, decimal: str) -> bool:
    """Whether a decimal of enough digits is this value, rounded or cut off."""
    written, digits = Fraction(decimal), len(decimal.partition(".")[2])
    known = len(re.sub(r"\D", "", decimal).lstrip("0"))
    error = abs(value - written) * 10 ** digits
    fits = error <= Fraction(1, 2) or (error < 1 and abs(written) < abs(value))
    return known >= SIGNIFICANT and digits >= BEHIND and (fits or abs(value - written) <= abs(value) / 10**13)


def same_numbers(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal, None where one is none. What binary fractions add at the end is no
    matter."""
    a, b = number(gold), number(answer)
    if a is None or b is None:
        return None
    if a[0] == b[0] or max(a[1], b[1]) > 8 and abs(a[0] - b[0]) <= min(Fraction(1, 10**6), abs(a[0]) / 10**9):
        return True
    (short, text), (other, _) = sorted(((a, gold), (b, answer)), key=lambda x: x[0][1] if x[0][1] >= 0 else LONGEST)
    return short[1] > 0 and short[1] != other[1] and rounds_to(other[0], text.replace(",", ""))


def words(x: str) -> str | None:
    """A text answer without case and punctuation; None for what may be mathematics, as products of up to three
    letters."""
    text = re.fullmatch(r"(?i:yes|no)|(?=.*[A-Za-z]{4})(?:[A-Za-z .,']|(?<=[a-z])-(?=[a-z]{2}))+|\d{1,2}:\d\d[ap]m", x)
    return re.sub(r"[^a-z0-9]", "", x.lower()) if text else None


def sides(x: str) -> tuple[list[str], list[str]]:
    """Expressions and the relations between them."""
    return [part.strip() for part in RELATION.split(x)], RELATION.findall(x)


def interval(x: str) -> str | None:
    r"""An inequality for one letter, as an interval: "-2 < x ≤ 7" is (-2,7]."""
    parts, signs = sides(x)
    letters = [bool(re.fullmatch(r"[a-zA-Z]", part)) for part in parts]
    if letters == [False, True] and signs[0] in FLIPPED:
        parts, signs, letters = parts[::-1], [FLIPPED[signs[0]]], [True, False]
    if letters == [True, False] and signs[0] in FLIPPED:
        if signs[0] in "<≤":
            return f"(-\\infty,{parts[1]}{')' if signs[0] == '<' else ']'}"
        return f"{'(' if signs[0] == '>' else '['}{parts[1]},\\infty)"
    if len(parts) == 3 and letters[1]:
        if set(signs) <= set(">≥"):
            parts, signs = parts[::-1], [FLIPPED[s] for s in reversed(signs)]
        if set(signs) <= set("<≤"):
            return f"{'(' if signs[0] == '<' else '['}{parts[0]},{parts[2]}{')' if signs[1] == '<' else ']'}"
    return None


def met(x: str) -> str:
    """Two inequalities for one letter that both hold, as the interval between; else x."""
    found = [interval(bare(part)[0]) for part in split(x, "∧,")]
    if len(found) == 2 and all(found) and "∨" not in x:
        low, high = sorted(found, key=lambda i: i.startswith("(-\\infty"))
        if low.endswith("\\infty)") and high.startswith("(-\\infty,"):
            return low.removesuffix("\\infty)") + high.removeprefix("(-\\infty,")
    return x


def structure(x: str) -> tuple[str, list[str]]:
    """Kind and parts of a tuple or interval, a matrix, a ratio or time, a number in a base; "" for an expression."""
    if matrix := MATRIX.fullmatch(x):
        rows = [row.split("&") for row in re.split(r"(?:\\\\)+", matrix[1])]
        return f"matrix {[len(row) for row in rows]}", [entry for row in rows for entry in row]
    if x and x[0] in "([" and x[-1] in ")]" and closes_at_end(x) and len(parts := split(x[1:-1], ",;")) > 1:
        return x[0] + x[-1], parts
    if based := BASED.fullmatch(x):
        return ("", [based[1]]) if based[2] == "10" else (f"base {based[2]}", [based[1]])
    if len(parts := split(x, ":")) > 1:
        return ":", parts
    return "", [x]


# ---- equality

def equal(gold: str, answer: str, compare: Compare) -> bool:
    """Whether an answer is the gold one. `compare` tells it of two expressions or relations, in LaTeX."""
    if max(len(gold), len(answer)) <= LONGEST:
        left, right = normalise(gold), normalise(answer)
        if max(len(left), len(right)) <= LONGEST and max(nesting(left), nesting(right)) <= DEEPEST:
            return same(left, right, compare)
    return "".join(gold.split()) == "".join(answer.split())


def nesting(x: str) -> int:
    depth = deepest = 0
    for c in x:
        depth += (c in OPENING) - (c in CLOSING)
        deepest = max(deepest, depth)
    return deepest


def same(gold: str, answer: str, compare: Compare, labelled: bool = True) -> bool:
    gold, answer = met(gold), met(answer)
    members, others = items(gold), items(answer)
    if len(members) == len(others) == 1:
        (gold, unit), (answer, other_unit) = bare(members[0]), bare(others[0])
        if unit and other_unit and UNITS.get(unit, unit) != UNITS.get(other_unit, other_unit) and (
                unit in UNITS and other_unit in UNITS or "modulo" in unit + other_unit):
            return False
        members, others = items(gold), items(answer)
    if not members or not others or gold == answer:
        return bool(members and others)
    if len(members) > 1 or len(others) > 1:
        if same_lists(members, others, compare):
            return True
        return bool(SETS.search(gold) and SETS.search(answer)) and compare(bare(gold)[0], bare(answer)[0])
    if labelled and (choice := CHOICE.fullmatch(others[0])):
        return same(gold, choice[1] if re.fullmatch(r"[A-Z]", gold) else choice[2], compare, labelled=False)
    if RELATION.search(gold) or RELATION.search(answer):
        return same_relations(gold, answer, compare)
    return same_values(gold, answer, compare)


def in_order(gold: list[str], answer: list[str], compare: Compare) -> bool:
    return len(gold) == len(answer) and all(same(a, b, compare) for a, b in zip(gold, answer, strict=True))


def same_lists(gold: list[str], answer: list[str], compare: Compare) -> bool:
    """As sets; but values without names, for several named ones, are taken in their order."""
    names, others = ({name_of(x) for x in side} - {""} for side in (gold, answer))
    if len(names) > 1 and names == others and len(gold) == len(answer) == len(names):
        return in_order(sorted(gold, key=name_of), sorted(answer, key=name_of), compare)
    if max(len(names), len(others)) > 1 and (not (names and others) or min(len(gold), len(answer)) == 1):
        parts = [structure(bare(x[0].rpartition("=")[2])[0])[1] if len(x) == 1 else x for x in (gold, answer)]
        return in_order(*parts, compare)
    if max(len(gold), len(answer)) > LARGEST:
        return {"".join(x.split()) for x in gold} == {"".join(x.split()) for x in answer}
    if any("ldots" in item for item in gold):
        return in_order(gold, answer, compare)
    return (all(any(same(a, b, compare) for b in answer) for a in gold)
            and all(any(same(a, b, compare) for a in gold) for b in answer))


def is_name(x: str) -> bool:
    """Of a value; those of a tuple's in the usual order."""
    letters = re.findall("[a-zA-Z]", x)
    return bool(NAME.fullmatch(x)) and (x[0] != "(" or letters == sorted(letters))


def same_relations(gold: str, answer: str, compare: Compare) -> bool:
    (a, signs), (b, others) = sides(gold), sides(answer)
    if "\\in" in signs + others:
        return same(a[-1] if "\\in" in signs else gold, b[-1] if "\\in" in others else answer, compare)
    if not signs and others == ["="] and NAME.fullmatch(b[1]) and not NAME.fullmatch(b[0]):
        b = b[::-1]  # 5 = x
    named, other_named = (bool(s) and set(s) == {"="} and is_name(x[0]) for x, s in ((a, signs), (b, others)))
    loose = bool(others) and set(others) == {"="} and bool(LOOSE.fullmatch(b[0]))
    if (named and not others) or ((other_named or loose) and not signs) or (
            named and other_named and (a[0] == b[0] or re.search(r"\w\(", a[0] + " " + b[0]))):
        return same(a[-1], b[-1], compare)
    if not signs and set(others) == {"="} and compare(b[0], b[-1]):  # 6/8 = 3/4
        return same(gold, b[-1], compare)
    left, right = interval(gold) if signs else gold, interval(answer) if others else answer
    if left and right and (set(signs + others) - {"=", "≠"}):
        return same_values(left, right, compare)
    return len(signs) == len(others) == 1 and compare(gold, answer)


def same_values(gold: str, answer: str, compare: Compare) -> bool:
    if (known := same_numbers(gold, answer)) is not None:
        return known
    if words(gold) or words(answer) or len(gold) == len(answer) == 1:
        return words(gold) is not None and words(gold) == words(answer)
    (kind, parts), (other, others) = structure(gold), structure(answer)
    if kind == other != "":
        return in_order(parts, others, compare)
    if "\\begin" in gold and "\\begin" in answer:
        return compare(gold, answer)
    if kind or other:
        return bool(SETS.search(gold) and SETS.search(answer)) and compare(gold, answer)
    return gold == answer or compare(parts[0], others[0])


def readable(gold: str, reads: Callable[[str], bool]) -> bool:
    """Whether an answer can be told from others by more than its spelling. `reads` says it of one expression."""
    return len(gold) <= LONGEST and nesting(gold) <= DEEPEST and reads_all(normalise(gold), reads)


def reads_all(x: str, reads: Callable[[str], bool]) -> bool:
    parts = items(x)
    if len(parts) == 1:
        parts = items(x := bare(parts[0])[0])
    if len(parts) == 1:
        parts = structure(x)[1] if "\\in" in x or not RELATION.search(x) else [side for side in sides(x)[0] if side]
    if len(parts) != 1:
        return bool(parts) and all(reads_all(part, reads) for part in parts)
    return number(parts[0]) is not None or words(parts[0]) is not None or reads(parts[0])
