"""Tell whether two expressions or relations are equal: math-verify's parser reads them, their values decide.

math-verify rounds to six places behind the point when it compares (1/2004! equals 1/2006! to it), so its own
comparison is used only where values do not decide. This file runs in a process of its own, which may be
killed at any time.
"""

import functools
import itertools
import logging
import random
import re
from collections.abc import Iterator
from fractions import Fraction

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.evalf import PrecisionExhausted

from verify import formula
from verify.answer import FLIPPED, RELATION
from verify.number import DECIMAL, number, rounds_to

logging.getLogger("math_verify").setLevel(logging.ERROR)  # at every call it warns that its time-outs are off
# Units and mixed numbers are handled before; by math-verify's way \frac{1}{m} t loses its t, and M is m.
SPELLED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none")
LITERAL = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
CLOSED = re.compile(r"(\\(?:ln|log|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?)(?:[_^](?:\{[^{}]*\}|\w))*) ?"
                    r"((?:\w|\\(?!cdot|frac)[a-z]+ ?)+)(?= ?(?:\\cdot|/))")  # an argument without brackets
DIGITS, POINTS, TRIES = 50, 6, 40
TOLERANCE = sympy.Float(10, DIGITS) ** -40  # e^{64} + x is not e^{64} - x
SIZES = (sympy.Rational(1, 10), 1, 3, 10, 30, 100)  # of the points, so that |x - 6| is not always 6 - x


@functools.lru_cache(maxsize=2000)  # a gold answer is compared with every completion of its group
def read_formula(text: str) -> sympy.Basic:
    """Read a formula, with math-verify's parser where it is of a kind that formula.py does not know.

    Raises whatever that and sympy raise, and ValueError where there is nothing to read.
    """
    exact = number(text)
    if exact:
        return sympy.Rational(exact[0].numerator, exact[0].denominator)
    try:
        return formula.read(text)
    except formula.Unread:
        return latex2sympy_read(text)


def latex2sympy_read(text: str) -> sympy.Basic:
    text = CLOSED.sub(r"\1(\2)", text)  # its argument would run over \cdot
    text = re.sub(r"(?<![A-Za-z\\])E(?![A-Za-z])", r"\\Xi ", text)  # an energy; E alone is not read
    text = re.sub(r"(?<![\w}^])(\d+)\(", r"\1\\cdot(", text)  # 3(1/2) is read as a mixed number
    read = latex2sympy(text, normalization_config=SPELLED, conversion_config=LITERAL)
    if not isinstance(read, sympy.Basic | sympy.MatrixBase):
        raise ValueError(f"nothing to read in {text!r}")
    # The parser takes i for a letter, and decimals for binary fractions.
    imaginary = {s: sympy.I for s in read.free_symbols if s.name == "i"}
    decimals = {x: sympy.Rational(str(x)) for x in read.atoms(sympy.Float)}
    read = read.xreplace(imaginary | decimals)
    return read.doit() if read.has(sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product) else read


def points(symbols: list[sympy.Symbol], signed: bool) -> Iterator[dict[sympy.Symbol, sympy.Rational]]:
    """Draw points without end, the same every time: positive ones, or of either sign.

    Of as many as there are SIZES every symbol has every size once.
    """
    draw = random.Random(signed)
    while True:
        columns = [draw.sample(SIZES, len(SIZES)) for _ in symbols]
        for sizes in zip(*columns, strict=True) if columns else [()]:
            values = [sympy.Rational(draw.randint(1000, 9999), 3001) * size for size in sizes]
            yield {symbol: value * draw.choice((-1, 1)) if signed else value
                   for symbol, value in zip(symbols, values, strict=True)}


def value_at(expression: sympy.Expr, point: dict) -> sympy.Expr:
    """Compute an expression to DIGITS digits; 0 where 400 digits do not tell it from 0.

    Raises ValueError where it has no value.
    """
    try:
        value = expression.evalf(DIGITS, subs=point, maxn=400, strict=True)
    except PrecisionExhausted:
        return sympy.Integer(0)
    if not (value.is_number and value.is_finite):
        raise ValueError(f"no value of {expression} at {point}")
    return value


def positive_parts(expression: sympy.Expr) -> list[sympy.Expr]:
    """List what must be positive so that an expression is real: bases of powers that are no integers, and the
    arguments of logarithms."""
    bases = {p.base for p in expression.atoms(sympy.Pow) if not p.exp.is_integer}
    return [part for part in bases | {x.args[0] for x in expression.atoms(sympy.log)} if part.free_symbols]


def is_defined(parts: list[sympy.Expr], point: dict) -> bool:
    """Tell whether all parts are positive at a point."""
    values = [value_at(part, point) for part in parts]
    return all(value.is_real and value > 0 for value in values)


def nearly_equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)))


def compare(gold: str, answer: str) -> bool:
    """Tell whether two expressions are equal, or two relations up to a factor. Raises what `read` does."""
    if RELATION.search(gold) and RELATION.search(answer):
        return compare_relations(gold, answer)
    a, b = read_formula(gold), read_formula(answer)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return bool(verify(a, b, float_rounding=12, timeout_seconds=None))
    if not a.free_symbols | b.free_symbols:
        return same_constants(a, b, gold, answer)
    try:
        return same_functions(a, b)
    except ValueError:
        return bool(verify(a, b, float_rounding=12, timeout_seconds=None))


def same_functions(a: sympy.Expr, b: sympy.Expr) -> bool:
    r"""Tell whether two expressions are real at the same positive points, and equal wherever both are real.

    \sqrt{1/n} is 1/\sqrt{n} for positive n, and -\ln(1/x) is \ln x where both are real; |x| is not x, which
    points of either sign tell. Two that are not seen to be real anywhere are compared as complex numbers.
    """
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    parts = positive_parts(a), positive_parts(b)
    compared = 0
    for signed in (False, True):
        wanted = compared + POINTS * (1 + signed)
        for point in itertools.islice(points(symbols, signed), TRIES):
            real = [is_defined(p, point) for p in parts]
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
        return True
    complex_points = itertools.islice(points(symbols, signed=False), POINTS)
    return all(nearly_equal(value_at(a, point), value_at(b, point)) for point in complex_points)


def same_constants(a: sympy.Expr, b: sympy.Expr, gold: str, answer: str) -> bool:
    """Compare constants: rational ones to the last digit, others to hundreds, a decimal to those it has."""
    if not (a.is_finite and b.is_finite):
        return a == b
    exact = [x.doit() if x.is_rational else x for x in (a, b)]
    rational = all(x.is_Rational for x in exact)
    if rational and exact[0] == exact[1]:
        return True
    decimal = next((x for x in (gold, answer) if DECIMAL.fullmatch(x) and "." in x), None)
    if decimal:
        rounded_value = sympy.N(a if decimal == answer else b, DIGITS, maxn=400)
        return bool(rounded_value.is_real) and rounds_to(Fraction(str(rounded_value)), decimal)
    if rational:
        return False
    size = max(abs(sympy.N(x, DIGITS, maxn=400)) for x in (a, b))
    return bool(abs(sympy.N(a - b, 15, maxn=500)) <= sympy.Float(10) ** -300 * size)


def compare_relations(gold: str, answer: str) -> bool:
    """Tell whether two relations say the same: their differences are in one ratio at every point."""
    (gold_sign,), (answer_sign,) = RELATION.findall(gold), RELATION.findall(answer)
    if (gold_sign in "=≠" or answer_sign in "=≠") and gold_sign != answer_sign:
        return False
    sides = [read_formula(side) for side in RELATION.split(gold) + RELATION.split(answer)]
    if any(not isinstance(side, sympy.Expr) for side in sides):
        return False
    a, b = sides[0] - sides[1], sides[2] - sides[3]
    symbols, ratio = sorted(a.free_symbols | b.free_symbols, key=str), None
    for point in itertools.islice(points(symbols, signed=True), 2 * POINTS):
        value, other = value_at(a, point), value_at(b, point)
        if value == 0 or other == 0:
            return False
        ratio = sympy.N(value / other, DIGITS) if ratio is None else ratio
        if not nearly_equal(value, sympy.N(ratio * other, DIGITS)):
            return False
    if gold_sign in "=≠":
        return True
    return ratio.is_real and gold_sign == (answer_sign if ratio > 0 else FLIPPED[answer_sign])
