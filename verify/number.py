r"""Read plain numbers exactly, and compare them. Nothing is evaluated.

A decimal equals a number that is no decimal, such as 1/3, only if it has at least SIGNIFICANT digits, BEHIND
of them behind the point, and all are right.
"""

import re
from decimal import Decimal
from fractions import Fraction

LONGEST = 1000    # characters
SIGNIFICANT, BEHIND = 6, 4
THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
DECIMAL = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")
FRACTION = re.compile(r"([0-9]+\+|[0-9]+(?=\\))?(?:\\frac\{([-+]?[0-9]+)\}\{([-+]?[0-9]+)\}|"
                      r"\(?([-+]?[0-9]*\.?[0-9]+)\)?/\(?([-+]?[0-9]+)\)?)")
POWER_OF_TEN = re.compile(r"(?:([0-9]*\.?[0-9]+)\*)?10\^\{?([-+]?[0-9]{1,3})\}?")
REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")


def number(x: str) -> tuple[Fraction, int] | None:
    r"""Read a plain number: its value, and the digits behind the point of a decimal (-1: not a decimal).

    Reads decimals, a/b, \frac{a}{b}, mixed numbers, a \cdot 10^{b}, repeating decimals; evaluates nothing.
    2.5 \cdot 10^{-3} is the decimal 0.0025.
    """
    if len(x) > LONGEST:
        return None
    x = re.sub(r" ?\\cdot ?", "*", x.strip())
    x = re.sub(r"^([-+]?\d+) (\d+/\d+)$", r"\1+\2", x)
    if THOUSANDS.fullmatch(x):
        x = x.replace(",", "")
    sign, x = (-1, x[1:]) if x[:1] == "-" else (1, x.removeprefix("+"))
    power = POWER_OF_TEN.fullmatch(x)
    if power or DECIMAL.fullmatch(x):
        decimal = Decimal(f"{power[1] or 1}e{power[2]}" if power else x)
        digits = -decimal.as_tuple().exponent
        return sign * Fraction(decimal), digits if "." in x and digits >= 0 else -1
    value = read_fraction(x)
    return None if value is None else (sign * value, -1)


def read_fraction(x: str) -> Fraction | None:
    """Read a fraction, a mixed number or a repeating decimal without a sign; None for anything else."""
    if match := FRACTION.fullmatch(x):
        integer, top, bottom = match[1], match[2] or match[4], Fraction(match[3] or match[5])
        return Fraction((integer or "0").strip("+")) + Fraction(top) / bottom if bottom else None
    if match := REPEATING.fullmatch(x):
        integer, fixed, cycle = match[1] or "0", match[2], match[3]
        nines = (10 ** len(cycle) - 1) * 10 ** len(fixed)
        return Fraction(f"{integer}.{fixed}0") + Fraction(int(cycle), nines)
    return None


def rounds_to(value: Fraction, decimal: Fraction, digits: int) -> bool:
    """Tell whether a decimal with so many digits behind the point has enough and is this value, rounded or
    cut off."""
    unit = Fraction(1, 10**digits)
    error = abs(value - decimal)
    fits = error <= unit / 2 or (error < unit and abs(decimal) < abs(value))
    exact = error <= abs(value) / 10**13
    return abs(decimal) >= unit * 10 ** (SIGNIFICANT - 1) and digits >= BEHIND and (fits or exact)


def same_numbers(gold: str, answer: str) -> bool | None:
    """Tell whether two plain numbers are equal; None if one of them is no plain number.

    Rounding errors of binary fractions (0.30000000000000004) do not matter. The shorter of two decimals may
    be the longer one, rounded.
    """
    read = number(gold), number(answer)
    if None in read:
        return None
    (value, digits), (answer_value, answer_digits) = read
    noise = min(Fraction(1, 10**6), abs(value) / 10**9)
    if value == answer_value or max(digits, answer_digits) > 8 and abs(value - answer_value) <= noise:
        return True
    # Not a decimal (-1) counts as longer than any.
    shorter, (exact, _) = sorted(read, key=lambda one: one[1] if one[1] >= 0 else LONGEST)
    return digits != answer_digits and shorter[1] > 0 and rounds_to(exact, *shorter)
