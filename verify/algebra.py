"""Tell whether two expressions or relations are equal: math-verify's parser reads them, their values decide.

math-verify rounds to six places behind the point when it compares (1/2004! equals 1/2006! to it), so its own
comparison is used only where values do not decide. This file runs in a process of its own, which may be
killed at any time.
"""

import functools
import logging
import random
import re
from fractions import Fraction

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify

from verify.answer import DECIMAL, FLIPPED, RELATION, number, rounds_to

logging.getLogger("math_verify").setLevel(logging.ERROR)  # at every call it warns that its time-outs are off
# Units and mixed numbers are handled before; by math-verify's way \frac{1}{m} t loses its t, and M is m.
SPELLED = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none")
LITERAL = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
DIGITS, POINTS = 30, 6
TOLERANCE = sympy.Float(10, DIGITS) ** -20
SIZES = (0.1, 1, 3, 10, 30, 100)  # of the points, so that |x - 6| is not always 6 - x


@functools.lru_cache(maxsize=2000)  # a gold answer is compared with every completion of its group
def read_formula(text: str) -> sympy.Basic:
    """Read a formula with math-verify's parser.

    Raises whatever that and sympy raise, and ValueError where there is nothing to read.
    """
    exact = number(text)
    if exact:
        return sympy.Rational(exact[0].numerator, exact[0].denominator)
    text = re.sub(r"(?<![A-Za-z\\])E(?![A-Za-z])", r"\\Xi ", text)  # an energy; E alone is not read
    text = re.sub(r"(?<![\w}^])(\d+)\(", r"\1\\cdot(", text)  # 3(1/2) is read as a mixed number
    formula = latex2sympy(text, normalization_config=SPELLED, conversion_config=LITERAL)
    if not isinstance(formula, sympy.Basic | sympy.MatrixBase):
        raise ValueError(f"nothing to read in {text!r}")
    # The parser takes i for a letter, and decimals for binary fractions.
    imaginary = {s: sympy.I for s in formula.free_symbols if s.name == "i"}
    decimals = {x: sympy.Rational(str(x)) for x in formula.atoms(sympy.Float)}
    return formula.xreplace(imaginary | decimals)


def values_at_points(expressions: list[sympy.Expr], signed: bool) -> list[list[sympy.Expr]]:
    """Compute expressions at random points, the same for all: positive ones, or of either sign.

    Raises ValueError where an expression has no value.
    """
    draw, rows = random.Random(0), []
    symbols = sorted(set().union(*(e.free_symbols for e in expressions)), key=str)
    for _ in range(POINTS * (1 + signed)):
        point = {}
        for symbol in symbols:
            size = sympy.Rational(draw.randint(1000, 9999), 3001) * sympy.Rational(str(draw.choice(SIZES)))
            point[symbol] = size * draw.choice((-1, 1)) if signed else size
        row = [sympy.N(e.subs(point), DIGITS, maxn=400) for e in expressions]
        if not all(v.is_number and v.is_finite for v in row):
            raise ValueError(f"no value of {expressions} at {point}")
        rows.append(row)
    return rows


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
        positive, signed = values_at_points([a, b], signed=False), values_at_points([a, b], signed=True)
    except ValueError:
        return bool(verify(a, b, float_rounding=12, timeout_seconds=None))
    # sqrt(1/n) is 1/sqrt(n) for positive n; |x| is not x, which other points tell where both are real.
    if not all(nearly_equal(x, y) for x, y in positive):
        return False
    return all(nearly_equal(x, y) for x, y in signed if x.is_real and y.is_real)


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
    sides = [read_formula(side) for side in RELATION.split(gold) + RELATION.split(answer)]
    if any(not isinstance(side, sympy.Expr) for side in sides):
        return False
    rows = values_at_points([sides[0] - sides[1], sides[2] - sides[3]], signed=True)
    if any(v == 0 for v in sum(rows, [])):
        return False

    ratio = rows[0][0] / rows[0][1]
    if not all(nearly_equal(a, ratio * b) for a, b in rows):
        return False
    if gold_sign in "=≠":
        return gold_sign == answer_sign
    return ratio.is_real and gold_sign == (answer_sign if ratio > 0 else FLIPPED.get(answer_sign))
