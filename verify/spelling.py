r"""Rewrite an answer in one normal spelling, and split off its unit. Text in, text out.

Units, currency, percent and degree signs may be left out or added; spaces, sizes, fonts and words around an
answer mean nothing. No rule here changes a value. answer.py splits an answer into members and compares them.
"""

import itertools
import re
import unicodedata
from collections import Counter

COMMANDS = r"""
    × \cdot, · \cdot, π \pi, ∞ \infty, ° ^\circ, ≤ \le, ≥ \ge, ≠ \ne, ∪ \cup, ∩ \cap, ∈ \in, ± \pm,
    ∅ \emptyset, ≈ \approx, √ \sqrt, ∖ \setminus, ∉ \notin, ≡ \equiv, ℝ \mathbb{R},
    ⩽ \le, ⩾ \ge, ≦ \le, ≧ \ge, ⟨ (, 〈 (, ⟩ ), 〉 ), ⋅ \cdot, ∙ \cdot, • \cdot, ✕ \cdot, ∗ \cdot,
    º ^\circ, ˚ ^\circ, ∛ \sqrt[3], ∜ \sqrt[4], ∓ \mp, ⌊ \lfloor, ⌋ \rfloor, ⌈ \lceil, ⌉ \rceil, ∑ \sum,
    ∏ \prod, ∫ \int, ∠ \angle, △ \triangle, ∣ |, ∶ :, ∕ /, Ø \emptyset, ⌀ \emptyset, ⋯ \ldots, ∆ \Delta,
    ℤ \mathbb{Z}, ℕ \mathbb{N}, ℚ \mathbb{Q}, ℂ \mathbb{C}, Å angstrom, Å angstrom,
    α \alpha, β \beta, γ \gamma, δ \delta, ε \epsilon, ζ \zeta, η \eta, θ \theta, κ \kappa, λ \lambda, μ \mu,
    ν \nu, ξ \xi, ρ \rho, σ \sigma, τ \tau, φ \phi, χ \chi, ψ \psi, ω \omega, Γ \Gamma, Δ \Delta,
    Θ \Theta, Λ \Lambda, Ξ \Xi, Σ \Sigma, Φ \Phi, Ψ \Psi, Ω \Omega, Ω \Omega"""
CHARACTERS = str.maketrans({
    **{c: f"{command} " for c, command in map(str.split, COMMANDS.split(","))},
    **dict.fromkeys("−–‑—―‒", "-"), **dict.fromkeys("′’", "'"), **dict.fromkeys("“”\"∴"),
    "÷": "/", "、": ",", "。": ".", "٫": ".", "٬": ","})
# NFKC would write 4³ as 43, and 2⅓ as 21/3. These are its names for a run of small signs.
SHIFTED = {"<super>": "^{{{}}}", "<sub>": "_{{{}}}", "<fraction>": " {}"}
# What stands for a sign, commands and pairs of characters, and the sign.
SIGNS = {name: sign + " " * sign[1:].isalpha() for *names, sign in map(str.split, r"""
    le leq leqslant <= =< ≤, ge geq geqslant >= => ≥, lt <, gt >, ne neq != ≠, langle (, rangle ),
    lbrace \{, rbrace \}, backslash smallsetminus \setminus, colon :,
    ldots cdots dots \ldots, mid vert lvert rvert |, times ast \cdot, div /""".split(",")) for name in names}
NUMERALS, FACTORS, CURRENCIES = (dict(map(str.split, text.split(","))) for text in (
    "two 2, three 3, four 4, five 5, six 6, seven 7, eight 8, nine 9, ten 10",
    "dozen 12, hundred 100, thousand 1000, million 10^{6}, billion 10^{9}, trillion 10^{12}",
    "$ dollars, £ sterling, € euros, ¥ yen, ₹ rupees"))
# The names of one unit stand between commas, its parts behind the equals sign. Different units differ.
SYNONYMS = """
    mm millimeter millimeters millimetre millimetres = milli m, dm = deci m, um = micro m, nm = nano m,
    cm centimeter centimeters centimetre centimetres = centi m, m meter meters metre metres,
    km kilometer kilometers kilometre kilometres = kilo m, inch inches in, foot feet ft,
    yard yards yd, mile miles mi, second seconds s sec, minute minutes min, hour hours h hr hrs, day days,
    week weeks, month months, year years, cent cents, dollar dollars, gram grams g, mg = milli g,
    kg kilogram kilograms = kilo g, ms = milli s, us = micro s, ns = nano s,
    pound pounds lb lbs, ounce ounces oz, degree degrees deg, radian radians rad = m m^-1,
    liter liters litre litres l L, gallon gallons, ml mL = milli L, cL = centi L, dL = deci L,
    A ampere amperes, mA = milli A, uA = micro A, K kelvin, C, F, T,
    eV, keV = kilo eV, MeV = mega eV, GeV = giga eV,
    mol mole moles, mmol = milli mol, umol = micro mol, kmol = kilo mol,
    ton tons, man men, cup cups, way ways, euro euros, sterling, yen, rupee rupees, angstrom angstroms,
    mph = mile h^-1, kph kmph = km h^-1, Hz hertz = s^-1, kHz = kilo Hz, MHz = mega Hz, GHz = giga Hz,
    N newton newtons = kg m s^-2, kN = kilo N, mN = milli N,
    J joule joules = kg m^2 s^-2, kJ = kilo J, MJ = mega J,
    W watt watts = kg m^2 s^-3, mW = milli W, kW kilowatt kilowatts = kilo W, MW = mega W, GW = giga W,
    Pa pascal pascals = kg m^-1 s^-2, hPa = hecto Pa, kPa = kilo Pa, MPa = mega Pa, mPa = milli Pa,
    V volt volts = kg m^2 s^-3 A^-1, mV = milli V, kV = kilo V, ohm ohms = kg m^2 s^-3 A^-2, kohm = kilo ohm,
    nano, micro, milli, centi, deci, hecto, kilo, mega, giga
"""
UNITS = {name: parts or names.split()[0]  # the unit's parts, or its first name
         for names, _, parts in (text.partition("=") for text in SYNONYMS.split(","))
         for name in names.split()}
POWER = r"\^\s*(?:-?\d+|\{\s*-?\d+\s*\})"
# Texts in quotes side by side, each with its power; a text may contain \cdot and powers.
UNIT_PRODUCT = rf'"(?:[^"{{}}\\]|\\cdot|\{{-?\d+\}})*"(?:{POWER})?'
UNIT_PRODUCT += rf"(?: ?(?:\\cdot|/)? ?{UNIT_PRODUCT})*"
BODY = r"((?:[^{}]|\{[^{}]*\})*)"
BRACED = rf"\s*\{{{BODY}\}}"
ABOUT_WORD = (r"(?i:\(?\b(?:is )?(?:about|approximately|approx|roughly|around|circa|ca)\b\.?"
              r"(?: equal to)?\)?)")
# Behind a number or a group, ~ is a range or a relation: 5 ~ 7.
ABOUT_SIGN = (r"(?:\\(?:(?:thick)?approx|approxeq|simeq|eqsim|(?:fallingdots|risingdots|dot)eq)(?![a-zA-Z])|"
              r"[≃≐≒]|(?<![\d%}])(?<![\d}] )(?:\\(?:(?:thick)?sim|cong|textasciitilde)(?![a-zA-Z])(?:\{\})?|"
              r"[∼≅])|(?<=[a-zA-Z] )~)")
ARGUMENT = r"\s*(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\d|\\[a-zA-Z]+|[a-zA-Z])"
FRACTION = rf"(\\frac|\\binom){ARGUMENT}{ARGUMENT}"
CIRCLE = r"\s*\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})"
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])|\bcis")
TWICE = r"(?<!\\)(?:\\\\)+[a-zA-Z(\[{$%]"
ONCE = r'(?<!\\)(?:\\\\)*\\(?![\\nrt"/])'
DEGREES = re.compile(rf"(?<![\d.])(\d+(?:\.\d*)?){CIRCLE}")


def with_braces(match: re.Match) -> str:
    """Put braces around the arguments of a fraction that have none, and of the fractions within."""
    command, *arguments = match.groups()
    braced = "".join(x if x[0] == "{" else f"{{{x}}}" for x in arguments)
    return command + re.sub(FRACTION, with_braces, braced)


def undouble(text: str) -> str:
    r"""Take back the second escape of a text that was escaped twice: in it, \\frac stands for \frac.

    No command of such a text has an odd number of backslashes, but a line may end with \n, as in JSON. If no
    row of a matrix ends with four, the end of a row was not escaped and stays.
    """
    while re.search(TWICE, text) and not re.search(ONCE, text):
        plain_rows = "begin" in text and r"\\\\" not in text
        text = re.sub(r"\\\\(?=[^\s\d])" if plain_rows else r"\\\\", r"\\", text)
    return text


def write_unit(match: re.Match) -> str:
    r"""Write a formula of texts as one text: "N"\cdot "m" is "N m", and \frac{60 "km"}{"h"} is 60 "km/h"."""
    number, *factors = match.groups("")
    return number + '"' + re.sub(r'\\cdot|["{}]', " ", "/".join(factors)) + '"'


# Pattern, replacement, and an example, before → after, which is a test. They are applied in this order.
# Words stand in quotes; ∧ and ∨ are "and" and "or".
RULES = [(re.compile(pattern), new, example) for pattern, new, example in (
    # Characters and commands without a meaning:
    # characters that are not shown
    ("[\u0000-\u0008\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", "", "1\u200b2 → 12"),
    (r"\s+", " ", "1 \n 2 → 1 2"),  # white space
    # the upright font of plain TeX
    (rf"\{{\s*\\rm\s{BODY}\}}|\\rm{BRACED}", r"{\\mathrm{\1\2}}", r"5{\rm cm} → 5{\mathrm{cm}}"),
    # an equals sign at the start, boxes, sizes, fonts without an argument, brackets' sizes, colours, tags
    (r"\\(?:boxed|fbox|displaystyle|textstyle|limits|bf|rm|small|large|Large|LARGE|huge|Huge|checkmark|"
     r"therefore|underline|hfill|noindent)(?![a-zA-Z])|^(?:[\s=]|\\#)+|\\? ?$|\\(?:text)?color\{[^{}]*\}|"
     r"\\(?:left|right|middle|[bB]igg?[lr]?)(?![a-zA-Z])\.?|"
     r"\\tag\{[^{}]*\}|(?<=matrix)\*(?=\})|(?<=matrix\*\})\[[lcr]\]", "", r"=\left(5\right)\tag{1} → (5)"),
    # Money and delimiters of formulas:
    # a currency's sign
    (r"^\\?([\$£€¥₹])\s*([\d.,]+)$", lambda m: f'{m[2]} "{CURRENCIES[m[1]]}"', r'\$5 → 5 "dollars"'),
    # delimiters of a formula, bold markdown, a module of Python, alignment and the line before that goes on
    (r"\\(?:pounds|euro)(?![a-zA-Z])|\b(?:np|numpy|math|sp|sympy|torch)\.(?=[a-zA-Z])|"
     r"(?:\\\\\s*)?&\s*(?==)|(?<==)&|^[\s$]*\*\*|\*\*(?=[\s$]*$)|(?<!\\)\\[()\[\]]|\\?\$|[£€₹¥]", "",
     "**$x$** → x"),
    # Sizes and fonts; texts in quotes:
    (r"\*\*", "^", "x**2 → x^2"),  # a power as in Python
    (r"\\[tdc](frac|binom)", r"\\\1", r"\dfrac12 → \frac12"),  # sizes of fractions
    (r"\\(text|math)(rm|bf|it|sf)?(?:\s*(\d+)|\s+([a-zA-Z](?![a-zA-Z])))", r"\\\1\2{\3\4}",
     r"\text7 → \text{7}"),  # a font's argument without braces
    (rf"\\ang{BRACED}", r"\1^\\circ", r"\ang{5} → 5^\circ"),  # degrees by siunitx
    # numbers by siunitx
    (rf"\\(?:num|SI|qty)(?:\[[^\]]*\])?{BRACED}", r"\1\\unit", r"\SI{5}{cm} → 5\unit{cm}"),
    (rf"\\(?:si|unit)(?![a-zA-Z])(?:{BRACED})?",
     lambda m: '"' + re.sub(r"\\(kilo|centi|milli)?\\?", r" \1", m[1] or "") + '"',
     r'\unit{\kilo\metre} → " kilometre"'),  # units by siunitx
    (rf"\\operatorname\s*\{{(?=(?:{'|'.join(UNITS)})\}})", r"\\mathrm{",
     r"5\operatorname{cm} → 5\mathrm{cm}"),  # operators that are units
    # an upright fraction
    (rf"\\(mathrm|text)\s*\{{\s*\\frac{BRACED}{BRACED}\s*\}}",
     r"\\frac{\\\1{\2}}{\\\1{\3}}", r"\mathrm{\frac{m}{s}} → \frac{\mathrm{m}}{\mathrm{s}}"),
    # functions that TeX lacks
    (r"\\(?:operatorname|mathrm|text)\s*\{\s*(cis|lcm|gcd)\s*\}", r"\\\1 ", r"\text{cis}x → \cis x"),
    # texts, upright words
    (rf"\\(?:text(?:rm|bf|it|normal|sf|tt)?|mbox|hbox|emph){BRACED}|"
     r"\\mathrm\s*\{((?![eid]\})(?:[^{}\\]|\{[^{}]*\}|\\(?:cdot|times|mu|Omega|[,:;! ]))*)\}|"
     r"^\\(triangle\s*[A-Z]{3})$", r'"\1\2\3"', r'5 \mathrm{cm} \text{east} → 5 "cm" "east"'),
    (r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|operatorname|mathcal)\s*\{([^{}]*)\}|"
     r"^\\overline\s*\{([A-Z]{2})\}(?=\s*=)",
     r"\1\2", r"\mathbf{v} → v"),  # fonts, a segment's length
    # cases and lines
    (r"\\begin\{((?:cases|align|gather|equation|split)(?:ed)?\*?)\}(.*)\\end\{\1\}",
     lambda m: m[2].replace("\\\\", ","), r"\begin{cases}x=1\\y=2\end{cases} → x=1,y=2"),
    # integers that an index runs over, a condition in words
    (r"[\s\\]*(?:,|\(|\\q?quad|\\mid|\||:)\s*[a-zA-Z]\s*\\in\s*\\mathbb\s*\{?[ZN]\}?(?:\)|\s*(\\\}))?\s*$|"
     r'(?<=\S)\s*,?\s*"\s*(?:for (?:all|every|each|any|some|integers?)\b|for\s*"|'
     r'(?:where|only|because|since)\b)[^;]*$', r"\1", r"2k\pi, k \in \mathbb{Z} → 2k\pi"),
    (r"\\mathbb\s*\{?R\}?|\\R(?![a-zA-Z])|(?i:\ball real numbers\b)",
     r"(-\\infty,\\infty)", r"\mathbb{R} → (-\infty,\infty)"),  # the reals
    # reals but some
    (r'(?<=\(-\\infty,\\infty\))\s*"?\s*,?\s*except (?:for )?(?:[a-z] ?= ?)?"?\s*([-\d\\{][^"]*)"?$',
     r"\\setminus \\{\1\\}", r"(-\infty,\infty) except 2 → (-\infty,\infty)\setminus \{2\}"),
    # Letters with marks, rows of matrices:
    # unit vectors
    (r"\\(?:hat|vec)\s*\{?\\?([ijk])(?:math)?(?![a-zA-Z])\s*\}?", r" \1", r"3\hat{\imath} → 3 i"),
    # a point
    (r"^([A-Z])\s*(?=\([^()=<>]*,[^()=<>]*\)$)", r"\1=", "P(2,3) → P=(2,3)"),
    (r"^(?!.*\\pm)(.*)\\mp(?![a-z])", r"\1\\pm", r"2\mp 1 → 2\pm 1"),  # signs that no other goes with
    (r"([A-Za-z])((?:\^\s*\{?(?:\s*\\prime)+\s*\}?|')+)",
     lambda m: m[1] + "_{" + "p" * len(re.findall("prime|'", m[2])) + "}", "x'' → x_{pp}"),  # primes
    (r"\\(vec|hat|bar)\s+([a-zA-Z])", r"\\\1{\2}", r"\vec v → \vec{v}"),  # marks on letters
    (rf"\\([pb]?matrix){BRACED}", r"\\begin{\1}\2\\end{\1}",
     r"\pmatrix{1&2} → \begin{pmatrix}1&2\end{pmatrix}"),  # a matrix by plain TeX
    # space between rows, the end of a row
    (r"\\\\\[-?[\d.]+[a-z]+\]|\\cr(?![a-zA-Z])", r"\\\\", r"1\\[4pt]2\cr 3 → 1\\2\\ 3"),
    # Spaces, thousands, bases:
    (r"\{([,:])\}", r"\1", "1{,}234 → 1,234"),  # a comma or a colon in braces
    (rf'(?:\{{\}})?(\{{)?(?:{ABOUT_SIGN}|"(?:[^"\d]*(?:\bis|:))?\s*{ABOUT_WORD}\s*"|{ABOUT_WORD})'
     r'(?(1)\})(?:\s|\\[,:;! ]|~)*(?=[-+]?\s*"?\s*\{?(?:[\d.]|\\(?:frac|sqrt)\s*\{?\d|\\pi))', r"\\approx ",
     r"x\sim 5 → x\approx 5"),  # about
    # a space backwards, thousands of a number in a base, an empty text
    (r'(?<!\\)\\!\s*|(?<=[0-9a-z}]),(?=\d{3}_)|""', "", r'1,101_2,1,\!234"" → 1101_2,1,234'),
    (r"(?<=\d)\s*\\q?quad\s*(?=\d)", " ; ", r"1\quad 2 → 1 ; 2"),  # wide space between numbers
    (r"(?:(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|\\hspace\{[^{}]*\}|\\phantom\s*(?:\{[^{}]*\}|.)| )+", " ",
     r"1\, m → 1 m"),  # space
    # thousands before a unit, behind about, in braces, with spaces
    (r'^[-+]?\d{1,3}(,\d{3})+(?=[ .\d]*["a-zA-Z\\/])|(?<=\\approx )[-+]?\d{1,3}(,\d{3})+(?![,\d])|'
     r"(?<!\\\{)(?<=\{)\d{1,3}(,\d{3})+(?=\})|(?<![\d._^\\a-zA-Z])\d{1,3}(?: \d{3})+(?![\d ])",
     lambda m: re.sub("[, ]", "", m[0]), "1,234 km → 1234 km"),
    (r"\((\w+)\)_", r"\1_", "(43)_5 → 43_5"),  # brackets around a number in a base
    (r'\s*"?\s*\(?\bbase\s*"?\s*(\w+)\)?"?', r"_{\1}", "43 base 5 → 43_{5}"),  # a base in words
    # a base's name, a fraction of one character
    (rf'_\{{"?({"|".join(NUMERALS)})"?\}}', lambda m: f"_{{{NUMERALS[m[1]]}}}", "43_{five} → 43_{5}"),
    (r"(\d+|\b[a-z]|\\pi ?)⁄(\d+|[a-z])", r"\\frac{\1}{\2}", r"3⁄8 → \frac{3}{8}"),
    # Units that are signs:
    # units in Chinese, Japanese and Korean, but for words that change a value
    (r'(?<=[\d)}]) ?"? ?(?![^"]*(?:分之|[十百万萬億亿兆半不非无負负]|千(?![米克瓦])))'
     r'[\u3040-\u9fff\uac00-\ud7af]+ ?"?(?=$|[,;])', "", '42"个" → 42'),
    # degrees of temperature
    (rf'(?:{CIRCLE}|\s*"?\s*\bdegrees?)\s*"?\s*([CF])"?\s*\.?$', r'"\1"', r'30^\circ C → 30"C"'),
    (rf"{CIRCLE}\s*\.?$", '"degrees"', r'60^\circ → 60"degrees"'),  # degrees
    # degrees within a formula, percent
    (rf"{CIRCLE}(?! ?\d)|\\deg(?:ree)?(?![a-zA-Z])|\\?%|(?i:\b(?:percent|per cent|pct|percentage points?)\b)",
     "",
     r"60^\circ, 30\% → 60, 30"),
    (r'"?\s*\\mu\s*"?(\w+)"|(?<=\d) ?\\mu (m|s|g|L|A|mol)$', r'"u\1\2"', r'5\mu "m" → 5"um"'),  # micro
    (r'"\s*(\w?)\\Omega\s*"|\\Omega\s*(?=$|(?:\\cdot|/) ?")', r'"\1ohm"', r'5\Omega → 5"ohm"'),  # ohm
    (r'^([\s{"]*\d+)\s*(?:\^\s*)?(\{\s*)?"?(?:st|nd|rd|th)"?(?(2)\s*\})(?=[\s.}]*(?:$|"| [a-z]{4}))',
     r"\1", "15th → 15"),  # ordinals
    # Relations, operators, sets:
    # angles by the signs of relations
    (r"(^|=)\s*<([^<>=,]*,[^<>=]*)>\s*$", r"\1(\2)", "v = <1, 2> → v =(1, 2)"),
    (rf"\\({'|'.join(SIGNS)})(?![a-zA-Z])|[<>!]=|=[<>]", lambda m: SIGNS[m[1] or m[0]],
     r"x \le 1 != 2 → x ≤ 1 ≠ 2"),
    (r"\\not\s*(?:=|\\approx|\\sim|\\cong)", "≠", r"x \not= 1 → x ≠ 1"),
    # the empty set
    (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}|"
     r'^"?(?i:(?:there (?:is|are) |[a-z ]+ has )?no (?:real |such )?(?:solutions?|roots?|values?|numbers?)'
     r'(?: exists?)?|(?:the )?(?:empty|null) set)\.?"?$',
     r"\\emptyset ", r"\{\} → \emptyset "),
    # that set in a set
    (r"\\\{\s*\\emptyset\s*\\\}", '"set of nothing"', r'\{\emptyset\} → "set of nothing"'),
    (r"\\\}\s*\\cup\s*\\\{", ",", r"\{1\}\cup\{2\} → \{1,2\}"),  # a union of lists
    # open ends of intervals by ISO
    (r"(^|\\c[au]p|\\in|=)\s*\](?=[^\[\]()]*[,;][^\[\]()]*[\[\]])", r"\1(", "]1, 2] → (1, 2]"),
    (r"([\[(][^\[\]()]*[,;][^\[\]()]*)\[(?=\s*(?:$|\\c[au]p))", r"\1)", "[1, 2[ → [1, 2)"),
    # one word for what is not there
    (r'^"?\s*(?i:dne|(?:it |the limit )?do(?:es)?(?: not|n\'t) exist)\.?\s*"?$', '"does not exist"',
     'DNE → "does not exist"'),
    # yes, no and none with more words
    (r'^"?(?i:(yes)\b(?!.*\b(?:no|not|but|if|only|unless)\b),[^\d\\,]*|'
     r'(no)\b(?!.*\b(?:yes|but|if|only|unless)\b),'
     r'[^\d\\,]*|(none) of (?:them|these|those|the above)\.?"?)$', r'"\1\2\3"', 'Yes, it is → "Yes"'),
    # x before a power of ten
    (r"(?<=\d) ?x ?(?=10\s*\^)|\*", r"\\cdot ", r"2*3 x 10^8 → 2\cdot 3\cdot 10^8"),
    (r"\\not\s*\\in(?![a-z])", r"\\notin ", r"x \not\in A → x \notin  A"),  # no member
    # a difference of sets
    (r"(?<=\)) ?- ?(?=\\\{)", r"\\setminus ", r"(0,1)-\{2\} → (0,1)\setminus \{2\}"),
    # a set by a rule
    (r"^\\\{\s*\\?[a-zA-Z]+\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?(?:\\mid(?![a-z])|\||:)\s*(.*)\\\}$", r"\1",
     r"\{x : x>3\} → x>3"),
    # a modulus in words, behind a congruence, and behind a value
    (r'"?\s*(?<![a-zA-Z\\])mod\b\s*"?|\\mod(?![a-zA-Z])', r"\\bmod ", r"17 mod 5 → 17\bmod 5"),
    (r"\\pmod(?=\s*\{?\w+\}?\s*=)", r"\\bmod", r"17 \pmod 5 = 2 → 17 \bmod 5 = 2"),
    (r"^(?!.*\\not)[^=,;∧∨]*\\equiv(?![a-z])([^=]*?)\s*\(?\s*\\[pb]mod\s*\{?(\w+)\}?\s*\)?\s*$",
     r'\1"modulo \2"', r'x\equiv 3 \pmod 5 →  3"modulo 5"'),
    (r'\s*(?:\\pmod\s*\{?(\w+)\}?|"?\s*\(\s*\\bmod\s*\{?(\w+)\}?\s*\)"?|"?\s*\bmodulo\s*"?\s*(\w+))\s*$',
     r'"modulo \1\2\3"', r'3 \pmod{5} → 3"modulo 5"'),
    # choices
    (r"(?<![\w}])(?:\{\})?[_^](?:(\w)|\{(\w+)\})\s*C_(?:(\w)|\{(\w+)\})|\b(\d+)C(\d+)\b(?!_)",
     r"\\binom{\1\2\5}{\3\4\6}", r"{}_5C_2 → \binom{5}{2}"),
    # a binomial by TeX
    (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}", r"{3\choose 2} → \binom{3}{ 2}"),
    # Spellings of programs and in words:
    (r'(?<![a-zA-Z])"?(?:[a-zA-Z]*[mM]atrix|array|tensor|[vV]ector)"?\s*\((\[.*\])\)', r"\1",
     "Matrix([[1], [2]]) → [[1], [2]]"),  # a matrix of a program
    (r"(?i:\binfinity\b|\binf\b)|\boo\b", r"\\infty ", r"oo → \infty "),  # infinity
    (r"(?<![\\a-zA-Z])(sqrt|pi|sin|cos|tan|arcsin|arccos|arctan|ln|log|exp|cis|gcd|lcm)(?![a-zA-Z])", r"\\\1",
     r"sin x → \sin x"),  # functions without a backslash
    # a root in brackets or without braces
    (r"\\sqrt(\[[^\]]*\])?\s*(?:\(([^()]*)\)|(\d+|\\frac(?:\s*(?:\{[^{}]*\}|\d)){2}|\\[a-z]+|[a-zA-Z]))",
     r"\\sqrt\1{\2\3}", r"\sqrt2+\sqrt(3) → \sqrt{2}+\sqrt{3}"),
    # a fraction without braces
    (FRACTION, with_braces, r"\frac{1+\frac12}3 → \frac{1+\frac{1}{2}}{3}"),
    # Numbers:
    (r"(?<![a-zA-Z\\}\d.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?!\.?\d|[a-zA-Z])",
     r"\1\\cdot 10^{\2}", r"2e3 → 2\cdot 10^{3}"),  # e-notation
    (rf'(\d)\s*"?\s*({"|".join(FACTORS)})(?![a-z])',
     lambda m: rf'{m[1]}\cdot {FACTORS[m[2]]}"', r'5 million → 5\cdot 10^{6}"'),  # a factor in words
    # repeating decimals by marks on digits, in brackets, by dots
    (r"^([-+]?\d*\.\d*)\((\d+)\)$|\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?|"
     r"(\d)[\u0304\u0305\u0307](?:(\d)[\u0304\u0305\u0307])?(?:(\d)[\u0304\u0305\u0307])?",
     r"\1\\overline{\2\3\4\5\6\7\8}", r"0.1(6) → 0.1\overline{6}"),
    (r"(\.\d*?)(\d{1,2}?)\2{2,}\s*(?:\.\.\.|\\ldots)", r"\1\\overline{\2}", r"0.333... → 0.\overline{3}"),
    (r"(?<=[\d.])\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))",
     lambda m: rf"\overline{{{m[1] or m[2]}}}", r"0.\bar3 → 0.\overline{3}"),  # repeating decimals
    (r"(\d)\.(?![\d.]|\\overline)", r"\1", "5. → 5"),  # a point behind an integer
    # a bound in words
    (r' ?"? ?\bis at (m)?(?:ost|least)\b ?"? ?', lambda m: "≤" if m[1] else "≥", "n is at most 5 → n≤5"),
    (r'(\d)\s*"?\s*to\s*"?\s*(\d)', r"\1:\2", "2 to 3 → 2:3"),  # a ratio in words
    (r'(?i:(\d)(\s*"?\s*)([ap])\.?\s?m\b\.?)', lambda m: f"{m[1]}{m[2]}{m[3].lower()}m",
     "4:30 P.M. → 4:30 pm"),  # half of the day
    # a sign in words
    (r'"?\s*\b(?i:minus|^negative)\s*"?\s*(?=[\d.]|\\(?:frac|sqrt|pi))', "-", "minus 5 → -5"),
    # Words around the answer:
    (r'^\s*"[^"]*(?:\bis|:)\s*"|(?i:^(?:the )?(?:final )?answer(?: is|:)\s*)|'
     r'(?i:^"?(?:either|both|only|the set)\b\s*"?\s*(?=[-\d{\\(]))|^[a-z] is (?=[-\d{\\(])|'
     r'^\s*"?\s*(?:US|USD|Rs\.?)\s*"?\s*(?=\d)', "", "Answer: 5 → 5"),  # words before the answer
    (r'^\s*("?)\s*(?:[Tt]he|[Aa]n|a|[Oo]ption|[Cc]hoice)\s+(?!and\b|or\b)'
     r'(?=[a-zA-Z]{3}|\(?[a-zA-Z]\)?"?$)', r"\1", "the east → east"),  # articles
    (r'(?<=\d) ?"([^"\d]*\w) and ?"', r' "\1"∧', '7 " goats and "4 → 7 " goats"∧4'),  # and within a text
    (r'"?\s?,?\s?\band\b\s?"?|\\(?:land|wedge)(?![a-zA-Z])', "∧", "1 and 2 → 1∧2"),  # and
    (r'"?\s?,?\s?\bor\b\s?"?|\\(?:lor|vee)(?![a-zA-Z])', "∨", "1 or 2 → 1∨2"),  # or
    # several choices, the set of a value
    (r'(?<=\b[A-Z])[,∧ "]+(?=[A-Z]\b[A-Z,∧ "]*(?:\\\})? *$)|'
     r"(?:^|(?<=∨)) ?(?:\\?[a-zA-Z]+(?:_\w+|_\{\w+\})?|\((?:x, ?y(?:, ?z)?|a, ?b(?:, ?c)?|m, ?n|p, ?q)\))"
     r"(?: ?\\in(?![a-z]) ?| in (?=\\?[{(\[]))(?![^∨]*\\in(?![a-z]))", "", "A, B∧D → ABD"),
    # Formulas of units:
    (r'(?:(?<=[\w)}\]]) ?(?:\\cdot ?)?\\frac\{1?|(?:(?<=[\w)}\]]) ?\\cdot ?)?\\frac\{([^{}"]*?) ?'
     rf"({UNIT_PRODUCT}))\}}\{{(?:1(?![\d.]) ?)?({UNIT_PRODUCT})\}}", write_unit,
     r'\frac{5 "m"}{"s"} → 5" m / s "'),  # a fraction of units
    (rf'(?<=[\d)}}\]"]) ?(/|\\cdot )? ?(?:[(\[]|(?<!\}})(?<!\}} )\{{) ?({UNIT_PRODUCT}) ?[)\]}}]', r" \1\2",
     '5("m") → 5 "m"'),  # brackets around a unit
    # a product of units
    (rf"(?:^|(?<=[\w)}}\]])) ?()((?:\\cdot|/)? ?{UNIT_PRODUCT})", write_unit, '5 "m"/"s" → 5" m / s "')
)]


def normalise(answer: str) -> str:
    """Rewrite an answer in its normal spelling, without changing its value."""
    answer = undouble(answer).translate(CHARACTERS)
    runs = itertools.groupby(answer, lambda c: unicodedata.decomposition(c).partition(" ")[0])
    answer = "".join(SHIFTED.get(kind, "{}").format("".join(run)) for kind, run in runs)
    answer = unicodedata.normalize("NFKC", answer).translate(CHARACTERS)
    answer = re.sub(r"\d", lambda m: str(int(m[0])), answer)  # digits of other scripts
    if TRIGONOMETRIC.search(answer):
        answer = DEGREES.sub(r"(\\frac{\1\\pi}{180})", answer)
    for pattern, new, _ in RULES:
        answer = pattern.sub(new, answer)
    return answer.strip().rstrip(" .,;:")


# ---- units

UNIT = re.compile(r'\s?(?:"(?P<text>[^"]*)"|(?<=[\d)}\] ])(?P<word>[a-zA-Z]+(?:[ /.]+[a-zA-Z]+)*\.?))\s?'
                  rf"(?P<power>{POWER})?\.?$")
# Words behind a number that are no unit, because they change its value or deny it.
NO_UNIT = re.compile(r"""(?x)[\d\\;∧∨]|^(?:squared|cubed)\b|
    \b(?:no|not|wrong|incorrect|except|[ap]m|pi|mod|zero|factorial|
    inverse|reciprocal|root|power|raised|to[ ]the|doubled|tripled|quadrupled|halved|negated|
    negative|minus|plus|than|times[ ](?!a\b|per\b|each|every|in\b)\w+|over|choose|point[ ]\w+|
    at[ ](?:least|most)|out[ ]of|\w+illion|dozens|halves|thirds|tens|hundreds|thousands|
    (?:fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths)\b|[\u3040-\u9fff]""")


def without_unit(x: str) -> tuple[str, str]:
    """Return a value and the unit behind it, "" for none.

    A text in quotes behind a number is a unit. Words without quotes are a unit if each has four letters or
    more; shorter ones are products of letters, unless UNITS has them.
    """
    match = UNIT.search(x)
    if not match:
        return x, ""
    value, quoted = x[:match.start()], match["text"] is not None
    written = (match["text"] or match["word"] or "") + (match["power"] or "")
    unit = re.sub(POWER, "", written).strip(" .")
    if unit.startswith("modulo "):
        return value, unit
    names = re.sub(r"\b(?:squared?|cubic|cubed|per|sq)\b\.? ?", "", unit)
    known_unit = {*re.split(r"[ /.]+", names)} <= {"", *UNITS}
    separate = quoted or x[match.start("word") - 1] == " " or (known_unit and len(unit) > 1)
    short = not unit[1:] or not re.search(r"\d", value) if quoted else re.search(r"\b\w{1,3}\b", unit)
    counted = re.search(r"[\d}]|(?<!^\([A-Z])(?<!^[A-Z])\)|\\pi(?![a-z])", value) or (
        known_unit and quoted and value)
    open_end = value.endswith(tuple("=+-<>≤≥,;:∧∨(_^")) or (value.endswith('"') and not known_unit)
    if not (separate and counted and (known_unit or not short)) or open_end or NO_UNIT.search(unit):
        return x, ""
    return re.sub(r"\s*(?:\\cdot)?[\\\s]*$", "", value), written.strip(" .")


def read_unit(unit: str) -> Counter | None:
    """Return the powers of the units in a text, m: 1 and second: -2 for "m/s^2"; None if a name is unknown.

    A slash or "per" divides by all that follows.
    """
    unit = re.sub(r"\b(?:square|sq)\b\.? ?([a-zA-Z]+)|([a-zA-Z]+) squared", r"\1\2^2", unit)
    unit = re.sub(r"\bcubic ([a-zA-Z]+)|([a-zA-Z]+) cubed", r"\1\2^3", unit)
    powers = Counter()
    for i, side in enumerate(re.split(r"/|\bper\b", unit)):
        for name, power in re.findall(r"([a-zA-Z]+)\s*(?:\^\s*\{?(-?\d+))?", side):
            if name not in UNITS:
                return None
            parts = {UNITS[name]: 1} if UNITS[name] in UNITS else read_unit(UNITS[name])
            for part, exponent in parts.items():
                powers[part] += exponent * int(power or 1) * (-1 if i else 1)
    return powers
