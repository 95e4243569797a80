"""Compare two expressions or relations by their values at random points.

formula.py parses the usual formulas, math-verify's parser the others. math-verify's own comparison rounds to
six decimal places (it takes 1/2004! for 1/2006!), so it is used only if values do not decide. This file runs
in worker processes, which may be killed at any time.
"""

import functools
import itertools
import logging
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.evalf import PrecisionExhausted

from verify import formula
from verify.answer import FLIPPED, RELATION, SET, split_relation, split_top_level, strip_wrapping
from verify.number import number, rounds_to

logging.getLogger("math_verify").setLevel(logging.ERROR)  # at every call it warns that its time-outs are off
# spelling.py handles units and mixed numbers; by math-verify's defaults \frac{1}{m} t loses its t and M is m
SPELLED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none")
LITERAL = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
CLOSED = re.compile(r"(\\(?:ln|log|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?)(?:[_^](?:\{[^{}]*\}|\w))*) ?"
                    r"((?:\w|\\(?!cdot|frac)[a-z]+ ?)+)(?= ?(?:\\cdot|/))")  # an argument without brackets
COMPUTED = sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product, sympy.UnevaluatedExpr
RELATIONS = dict(zip("=≠<≤>≥", "== != < <= > >=".split(), strict=True))  # their names in sympy
# What joins sets; what binds least is first.
JOINS = {("\\cup", "∪", "∨"): sympy.Union, ("\\cap", "∧", ","): sympy.Intersection,
         ("\\setminus",): sympy.Complement}
DIGITS, POINTS_COMPARED, POINTS_TRIED = 50, 6, 40
TOLERANCE = sympy.Float(10, DIGITS) ** -40  # tells e^{64} + x from e^{64} - x
POINT_SIZES = (sympy.Rational(1, 10), 1, 3, 10, 30, 100)  # small and large, to tell |x - 6| from 6 - x


@functools.lru_cache(2000)  # a gold answer is compared with every completion of its group
def read_formula(text: str) -> sympy.Basic:
    """Parse a formula, by math-verify's parser if formula.py does not know its kind.

    Raises any exception that math-verify and sympy raise, and ValueError if there is no formula.
    """
    exact = number(text)
    if exact:
        return sympy.Rational(exact[0])
    try:
        return formula.parse_formula(text)
    except formula.Unread:
        return parse_latex(text)


def parse_latex(text: str) -> sympy.Basic:
    """Parse a formula by math-verify's parser, and mend its reading."""
    text = CLOSED.sub(r"\1(\2)", text)  # its argument would run over \cdot
    text = re.sub(r"(?<![A-Za-z\\])E(?![A-Za-z])", r"\\Xi ", text)  # an energy; E alone is not read
    text = re.sub(r"(?<![\w}^])(\d+)\(", r"\1\\cdot(", text)  # 3(1/2) is read as a mixed number
    read = latex2sympy(text, normalization_config=SPELLED, conversion_config=LITERAL)
    # Letters of a gcd are read as polynomials, and of the others a part is dropped.
    half_read = re.search(
        r"(?:gcd|lcm)\W[^)]*[a-z]|'|!!|\\frac\{(d|\\partial) ?[a-zA-Z]\}\{\1", text)
    if half_read or not isinstance(read, sympy.Basic | sympy.MatrixBase):
        raise ValueError(f"nothing to read in {text!r}")
    # The parser takes i for a letter, and decimals for binary fractions.
    imaginary = {s: sympy.I for s in read.free_symbols if s.name == "i"}
    decimals = {x: sympy.Rational(str(x)) for x in read.atoms(sympy.Float)}
    powers = {x: x.base**x.exp for x in read.atoms(sympy.Pow) if isinstance(x.base, sympy.MatrixBase)}
    read = read.xreplace(imaginary | decimals | powers)
    return read.doit() if read.has(*COMPUTED) else read


def draw_points(symbols: list[sympy.Symbol], signed: bool) -> Iterator[dict[sympy.Symbol, sympy.Rational]]:
    """Yield an endless, reproducible stream of points, positive or of either sign.

    In each block of len(POINT_SIZES) points every symbol has every size once.
    """
    draw = random.Random(signed)
    while True:
        columns = [draw.sample(POINT_SIZES, len(POINT_SIZES)) for _ in symbols]
        for sizes in zip(*columns, strict=True) if columns else [()]:
            values = [sympy.Rational(draw.randint(1000, 9999), 3001) * size for size in sizes]
            yield {symbol: value * draw.choice((-1, 1)) if signed else value
                   for symbol, value in zip(symbols, values, strict=True)}


def value_at(expression: sympy.Expr, point: dict) -> sympy.Expr:
    """Evaluate an expression to DIGITS digits; 0 if 400 digits do not tell it from 0.

    Raises ValueError if it has no finite value.
    """
    try:
        value = expression.evalf(DIGITS, subs=point, maxn=400, strict=True)
    except PrecisionExhausted:
        return sympy.Integer(0)
    if not (value.is_number and value.is_finite):
        raise ValueError(f"no value of {expression} at {point}")
    return value


def positive_parts(expression: sympy.Expr) -> list[sympy.Expr]:
    """List the parts that must be positive for an expression to be real: the bases of powers that are no
    integers, and the arguments of logarithms."""
    bases = {p.base for p in expression.atoms(sympy.Pow) if not p.exp.is_integer}
    return [part for part in bases | {x.args[0] for x in expression.atoms(sympy.log)} if part.free_symbols]


def nearly_equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)))


def compare_expressions(gold: str, answer: str) -> bool:
    """Tell whether two expressions are equal, or two relations up to a factor. Raises as `read_formula`."""
    if SET.search(gold) and SET.search(answer):
        with suppress(Exception):
            same = read_set(gold, set()) == read_set(answer, set()) != sympy.S.EmptySet
            if same or not all(map(RELATION.search, (gold, answer))):
                return same
    if RELATION.search(gold) and RELATION.search(answer):
        return compare_relations(gold, answer)
    a, b = read_formula(gold), read_formula(answer)
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        b = rename_free_letter(a, b)
        if not a.free_symbols | b.free_symbols:
            return same_constants(a, b, gold, answer)
        with suppress(ValueError):
            return same_functions(a, b)
    return bool(verify(a, b, float_rounding=12, timeout_seconds=None))


def rename_free_letter(gold: sympy.Expr, answer: sympy.Expr) -> sympy.Expr:
    r"""Name the integer of a family, \pi/4 + k\pi, or the constant of an integral as the gold answer does."""
    new, old = gold.free_symbols - answer.free_symbols, answer.free_symbols - gold.free_symbols
    if not (new and old):
        return answer
    slope = gold.diff(*new)
    names = " ".join(map(str, (*new, *old, *gold.free_symbols & answer.free_symbols)))
    periodic = (slope / sympy.pi).is_Rational or (slope / 180).is_Integer
    if re.fullmatch("[k-n] [k-n]" if periodic else "(C c|c C)( [s-z])*", names) and (periodic or slope == 1):
        return answer.xreplace(dict(zip(old, new, strict=False)))
    return answer


def read_set(text: str, letters: set) -> sympy.Set:
    """Parse intervals, unions and conditions on one letter as a set of real numbers.

    Adds the letter to `letters`. Raises TypeError for several letters, and what sympy and the parser raise.
    """
    for signs, join in JOINS.items():
        if len(pieces := split_top_level(text, signs)) > 1:
            return functools.reduce(join, [read_set(piece, letters) for piece in pieces])
    text = strip_wrapping(text)[0]
    if text[0] in "([":
        ends = map(read_formula, split_top_level(text[1:-1], ",;"))
        return sympy.Interval(*ends, text[0] == "(", text[-1] == ")")
    sides, signs = split_relation(text)
    if not signs:
        return parse_latex(text)
    values = list(map(read_formula, sides))
    letters.update(*[value.free_symbols for value in values])
    relations = map(sympy.Rel, values, values[1:], map(RELATIONS.get, signs))
    return sympy.Intersection(*[sympy.solveset(x, *letters, sympy.S.Reals) for x in relations])


def same_functions(a: sympy.Expr, b: sympy.Expr) -> bool:
    r"""Tell whether two expressions are real at the same positive points, and equal wherever both are real.

    Positive points let \sqrt{1/n} be 1/\sqrt{n} and -\ln(1/x) be \ln x; points of either sign tell |x| from
    x. If no point makes both real, they are compared as complex numbers.
    """
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    parts = positive_parts(a), positive_parts(b)
    compared = 0
    for signed in (False, True):
        wanted = compared + POINTS_COMPARED * (1 + signed)
        for point in itertools.islice(draw_points(symbols, signed), POINTS_TRIED):
            bases = [[value_at(part, point) for part in side] for side in parts]
            real = [all(value.is_real and value > 0 for value in side) for side in bases]
            if real[0] != real[1] and not signed:
                return False
            if not all(real):
                continue
            values = value_at(a, point), value_at(b, point)
            if not signed or all(value.is_real for value in values):
                if not nearly_equal(*values):
                    return False
                compared += 1
            if compared == wanted:
                break
    if compared:
        whole = dict.fromkeys(symbols, 60)
        return not (a - b).has(sympy.floor) or nearly_equal(a.subs(whole), b.subs(whole))
    complex_points = itertools.islice(draw_points(symbols, signed=False), POINTS_COMPARED)
    return all(nearly_equal(value_at(a, point), value_at(b, point)) for point in complex_points)


def same_constants(a: sympy.Expr, b: sympy.Expr, gold: str, answer: str) -> bool:
    """Compare constants: rational ones exactly, others to 300 digits, a decimal to the digits that it has."""
    if not (a.is_finite and b.is_finite):
        return a == b
    exact = [x.doit() if x.is_rational else x for x in (a, b)]
    rational = all(x.is_Rational for x in exact)
    if rational and exact[0] == exact[1]:
        return True
    for text, other in ((gold, b), (answer, a)):
        if (decimal := number(text)) and decimal[1] > 0:
            value = sympy.N(other, DIGITS, maxn=400)
            return bool(value.is_real) and rounds_to(Fraction(str(value)), *decimal)
    if rational:
        return False
    size = max(abs(sympy.N(x, DIGITS, maxn=400)) for x in (a, b))
    return bool(abs(sympy.N(a - b, 15, maxn=500)) <= sympy.Float(10) ** -300 * size)


def compare_relations(gold: str, answer: str) -> bool:
    """Tell whether two relations are equal: left side minus right side has one ratio at every point."""
    (gold_sign,), (answer_sign,) = RELATION.findall(gold), RELATION.findall(answer)
    if (gold_sign in "=≠" or answer_sign in "=≠") and gold_sign != answer_sign:
        return False
    sides = [read_formula(side) for side in RELATION.split(gold) + RELATION.split(answer)]
    if any(not isinstance(side, sympy.Expr) for side in sides):
        return False
    a, b = sides[0] - sides[1], sides[2] - sides[3]
    symbols, ratio = sorted(a.free_symbols | b.free_symbols, key=str), None
    for point in itertools.islice(draw_points(symbols, signed=True), 2 * POINTS_COMPARED):
        value, other = value_at(a, point), value_at(b, point)
        if value == 0 or other == 0:
            return False
        ratio = sympy.N(value / other, DIGITS) if ratio is None else ratio
        if not nearly_equal(value, sympy.N(ratio * other, DIGITS)):
            return False
    if gold_sign in "=≠":
        return True
    return ratio.is_real and gold_sign == (answer_sign if ratio > 0 else FLIPPED[answer_sign])
