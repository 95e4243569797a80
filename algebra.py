"""Whether two expressions or relations are equal: math-verify's parser reads them, and their values decide.

math-verify rounds to six places behind the point when it compares (1/2004! is 1/2006! to it), so its own comparison
is asked only where values do not tell. This file runs in a process of its own, which may be killed at any time.
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

from answer import DECIMAL, FLIPPED, RELATION, number, rounds_to

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its own time-outs are off
# Units and mixed numbers are seen to already; as math-verify does it, \frac{1}{m} t loses its t, and M is m.
SPELLED = NormalizationConfig(basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none")
LITERAL = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
DIGITS, POINTS = 30, 6
TOLERANCE = sympy.Float(10, DIGITS) ** -20
SIZES = (0.1, 1, 3, 10, 30, 100)  # of the points, so that |x - 6| is not always 6 - x


@functools.lru_cache(maxsize=2000)  # a gold answer is compared with every completion of its group
def read(text: str) -> sympy.Basic:
    """What math-verify's parser reads in a formula. Raises whatever it and sympy raise, and ValueError for nothing."""
    exact = number(text)
    if exact:
        return sympy.Rational(exact[0].numerator, exact[0].denominator)
    text = re.sub(r"(?<![A-Za-z\\])E(?![A-Za-z])", r"\\Xi ", text)  # an energy; E alone is not read
    text = re.sub(r"(?<![\w}^])(\d+)\(", r"\1\\cdot(", text)  # 3(1/2) is read as a mixed number
    found = latex2sympy(text, normalization_config=SPELLED, conversion_config=LITERAL)
    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        raise ValueError(f"nothing to read in {text!r}")
    # i is a letter there, and decimals are binary fractions.
    return found.xreplace({s: sympy.I for s in found.free_symbols if s.name == "i"}
                          | {x: sympy.Rational(str(x)) for x in found.atoms(sympy.Float)})


def values(expressions: list[sympy.Expr], signed: bool) -> list[list[sympy.Expr]]:
    """Their values at random points, the same for all, positive or of either sign. Raises ValueError where one has
    none."""
    draw, found = random.Random(0), []
    symbols = sorted(set().union(*(e.free_symbols for e in expressions)), key=str)
    for _ in range(POINTS * (1 + signed)):
        point = {s: sympy.Rational(draw.randint(1000, 9999), 3001) * sympy.Rational(str(draw.choice(SIZES)))
                 * (draw.choice((-1, 1)) if signed else 1) for s in symbols}
        row = [sympy.N(e.subs(point), DIGITS, maxn=400) for e in expressions]
        if not all(v.is_number and v.is_finite for v in row):
            raise ValueError(f"no value of {expressions} at {point}")
        found.append(row)
    return found


def close(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)))


def compare(gold: str, answer: str) -> bool:
    """Equality of two expressions, or of two relations up to a factor. Raises what `read` does."""
    if RELATION.search(gold) and RELATION.search(answer):
        return compare_relations(gold, answer)
    a, b = read(gold), read(answer)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return bool(verify(a, b, float_rounding=12, timeout_seconds=None))
    if not a.free_symbols | b.free_symbols:
        return same_constants(a, b, gold, answer)
    try:
        positive, signed = values([a, b], signed=False), values([a, b], signed=True)
    except ValueError:
        return bool(verify(a, b, float_rounding=12, timeout_seconds=None))
    # sqrt(1/n) is 1/sqrt(n) for positive n; |x| is not x, which other points tell where both are real.
    return all(close(*row) for row in positive) and all(close(*row) for row in signed if all(v.is_real for v in row))


def same_constants(a: sympy.Expr, b: sympy.Expr, gold: str, answer: str) -> bool:
    """Rational ones to the last digit, others to hundreds of them; of a decimal as many as it has."""
    if not (a.is_finite and b.is_finite):
        return a == b
    exact = [x.doit() if x.is_rational else x for x in (a, b)]
    if all(x.is_Rational for x in exact) and exact[0] == exact[1]:
        return True
    decimal = next((x for x in (gold, answer) if DECIMAL.fullmatch(x) and "." in x), None)
    if decimal:
        other = sympy.N(a if decimal == answer else b, DIGITS, maxn=400)
        return bool(other.is_real) and rounds_to(Fraction(str(other)), decimal)
    if all(x.is_Rational for x in exact):
        return False
    size = max(abs(sympy.N(x, DIGITS, maxn=400)) for x in (a, b))
    return bool(abs(sympy.N(a - b, 15, maxn=500)) <= sympy.Float(10) ** -300 * size)


def compare_relations(gold: str, answer: str) -> bool:
    (sign,), (other,) = RELATION.findall(gold), RELATION.findall(answer)
    sides = [read(x) for relation in (gold, answer) for x in RELATION.split(relation)]
    if any(not isinstance(x, sympy.Expr) for x in sides):
        return False
    rows = values([sides[0] - sides[1], sides[2] - sides[3]], signed=True)
    if any(v == 0 for row in rows for v in row):
        return False
    ratio = rows[0][0] / rows[0][1]
    if not all(close(a, ratio * b) for a, b in rows):
        return False
    return sign == other if sign in "=≠" else ratio.is_real and sign == (other if ratio > 0 else FLIPPED.get(other))
