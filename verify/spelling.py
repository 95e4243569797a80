r"""Give answers that are spelled in several ways one spelling, and split off their units. Text in, text out.

Units, currency, percent and degree signs may be left out or added; spaces, sizes, fonts and words around an
answer mean nothing. No rule here changes a value. What the members of an answer are, and when two answers are
equal, stands in answer.py.
"""

import re
import unicodedata

CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "‑": "-", "×": r"\cdot ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "±": r"\pm ", "∅": r"\emptyset ", "≈": r"\approx ", "√": r"\sqrt ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "∖": r"\setminus ", "⟨": "(", "⟩": ")", "“": None, "”": None, '"': None, "′": "'", "’": "'", "、": ",",
    "。": ".", "∴": None, **{c: f"^{{{i}}}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}})
NUMERALS = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
            "nine": "9", "ten": "10"}
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


# What is written in several ways -> one of them, in this order.
# Words in quotes are texts; ∧ and ∨ are "and" and "or".
SPELLING = [(re.compile(pattern), new) for pattern, new in (
    # what is not there to be read
    ("[\u0000-\u0008\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", ""),
    (r"\s+", " "),
    (r"^[\s=]+|\\? ?$", ""),
    (command("boxed", "fbox", "displaystyle", "textstyle", "limits", "bf", "rm", "small", "large", "Large",
             "LARGE", "huge", "Huge", "checkmark", "therefore", "underline"), ""),
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
    (r'^\s*"[^"]*(?:\bis|:)\s*"|(?i:^(?:the )?(?:final )?answer(?: is|:)\s*)|'
     r'^\s*"?\s*(?:US|USD|Rs\.?)\s*"?\s*(?=\d)', ""),
    (r'^\s*("?)\s*(?:[Tt]he|[Aa]n|a|[Oo]ption|[Cc]hoice)\s+(?!and\b|or\b)'
     r'(?=[a-zA-Z]{3}|\(?[a-zA-Z]\)?"?$)', r"\1"),
    (r'"?\s?,?\s?\band\b\s?"?|' + command("land", "wedge"), "∧"),
    (r'"?\s?,?\s?\bor\b\s?"?|' + command("lor", "vee"), "∨"),
)]


def normalise(answer: str) -> str:
    """Write in one way what may be written in several without changing its value."""
    answer = unicodedata.normalize("NFKC", answer.translate(CHARACTERS)).translate(CHARACTERS).strip()
    if TRIGONOMETRIC.search(answer):
        answer = DEGREES.sub(r"(\\frac{\1\\pi}{180})", answer)
    for pattern, new in SPELLING:
        answer = pattern.sub(new, answer)
    return answer.strip().rstrip(" .,;:")


# ---- units

# The names of one unit stand together. Those of different units are different values.
SYNONYMS = (
    "mm millimeter millimeters", "cm centimeter centimeters", "m meter meters metre metres",
    "km kilometer kilometers", "inch inches in", "foot feet ft", "yard yards yd", "mile miles mi",
    "second seconds s sec", "minute minutes min", "hour hours h hr hrs", "day days", "week weeks",
    "month months", "year years", "cent cents", "dollar dollars", "gram grams g", "kg kilogram kilograms",
    "mg", "pound pounds lb lbs", "ounce ounces oz", "degree degrees", "radian radians rad",
    "liter liters litre litres l L", "gallon gallons", "ml mL", "mph", "N", "J", "W", "V", "A", "K", "C", "F",
    "T", "Hz", "kJ", "eV", "mol", "nm", "um", "ohm", "Pa", "ton tons", "man men", "cup cups", "way ways",
    "euro euros", "sterling", "yen", "rupee rupees",
)
UNITS = {name: i for i, names in enumerate(SYNONYMS) for name in names.split()}  # name -> which unit
POWER = r"\^\s*\{?-?\d+\}?"
UNIT = re.compile(r'\s?(?:"(?P<text>[^"]*)"|(?<=[\d)}\] ])(?P<word>[a-zA-Z]+(?:[ /.]+[a-zA-Z]+)*\.?))\s?'
                  rf"(?:{POWER})?\.?$")
NO_UNIT = re.compile(r"[\d\\;∧∨]|\b(?:not|wrong|incorrect|except|[ap]m|pi|factorial|mod)\b")


def without_unit(x: str) -> tuple[str, str]:
    """Split a value from the unit behind it, "" for none.

    A text in quotes behind a number is a unit. Words without quotes are one where each has four letters or
    more; shorter ones are products of letters unless they are known.
    """
    match = UNIT.search(x)
    if not match:
        return x, ""
    value, quoted = x[:match.start()].rstrip(), match["text"] is not None
    unit = re.sub(POWER, "", match["text"] if quoted else match["word"]).strip(" .")
    if unit.startswith("modulo "):
        return value, unit
    names = re.sub(r"\b(?:square|cubic|per|sq)\b\.? ?", "", unit)
    known_unit = all(name in UNITS for name in re.split(r"[ /.]+", names) if name)
    separate = quoted or x[match.start("word") - 1] == " " or (known_unit and len(unit) > 1)
    if quoted:
        named = len(unit) > 1 and re.search(r"\d", value)
    else:
        named = all(len(name) >= 4 for name in unit.split())
    counted = re.search(r"[\d)}]|\\pi(?![a-z])", value) or (known_unit and quoted and unit)
    open_end = value.endswith(tuple("=+-<>≤≥,;:∧∨(_^")) or (value.endswith('"') and not known_unit)
    if not (separate and counted and (known_unit or named)) or open_end or NO_UNIT.search(unit):
        return x, ""
    return re.sub(r'\s*(?:\\cdot|(?<=") ?/)?[\\\s]*$', "", value), names
