r"""Parse a formula of a usual kind into a sympy expression, by recursive descent.

    sum      = product (("+" | "-") product)*
    product  = signed (("\cdot" | "/" | "\bmod") signed)*      1/2x is 1/(2x), and 1/2(x+1) is (x+1)/2
    signed   = ("+" | "-")* powers
    powers   = power+                                          xy is a product, 2\frac{1}{3} alone is mixed
    power    = atom "!"? ("^" exponent)?

The argument of a function without brackets ends at an operator or at the next function: \ln 2x \cdot 3 is
3\ln(2x). The text must be normalised (spelling.py). Limits, integrals, matrices and f(x) raise Unread, and
algebra.py leaves them to math-verify's parser. With that parser alone, verdicts take 2 to 13 times the CPU
time, x^(2) is not read, \ln x^2 \cdot 3 is \ln(3x^2) and (2)(3) is 5.
"""

import re
from collections.abc import Callable
from operator import mul, truediv

import sympy

TOKEN = re.compile(r" *(\\[a-zA-Z]+|\\[{}]|\d+\.?\d*|\.\d+|[a-zA-Z]|[-+/^_!|(){}\[\],=])")
LARGEST_COMPUTED = 10_000  # largest exponent, and largest number with a computed factorial
GREEK = {f"\\{name}" for name in (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma "
    "tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell").split()}
NAMES = "sin cos tan cot sec csc sinh cosh tanh coth".split()
INVERSES = {f"\\{name}": getattr(sympy, f"a{name}") for name in NAMES}
FUNCTIONS: dict[str, Callable] = {f"\\{name}": getattr(sympy, name) for name in (*NAMES, "exp")} | {
    f"\\arc{name}": INVERSES[f"\\{name}"] for name in NAMES} | {
    "\\ln": sympy.log, "\\log": lambda x, base=10: sympy.log(x, base), "\\lg": lambda x: sympy.log(x, 10),
    "\\cis": lambda x: sympy.exp(sympy.I * x)}
SERIES = {"\\sum": sympy.Sum, "\\prod": sympy.Product}
BRACKET_PAIRS = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
AROUND: dict[str, Callable] = {"|": sympy.Abs, "\\lfloor": sympy.floor, "\\lceil": sympy.ceiling}
CONSTANTS = {"\\pi": sympy.pi, "\\infty": sympy.oo, "e": sympy.E, "i": sympy.I}
OPERATORS: dict[str, Callable] = {"\\cdot": mul, "/": truediv, "\\bmod": sympy.Mod}
FRACTIONS: dict[str, Callable] = {"\\frac": truediv, "\\binom": sympy.binomial}
STOPS = {"", "+", "-", *OPERATORS, ")", "]", "}", "\\rfloor", "\\rceil", ",", "="}


class Unread(ValueError):
    """The text cannot be parsed as a formula that is supported."""


def bounded_power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """Return a power, unevaluated if its value would fill the memory, as in 9^{9^{9^9}}."""
    large = exponent.is_Rational and abs(exponent) > LARGEST_COMPUTED
    tower = exponent.is_number and exponent.is_Pow
    return sympy.Pow(base, exponent, evaluate=not (large or tower))


class Reader:
    """The tokens of a formula, and the place of the next one. Its methods are the rules of the grammar."""

    def __init__(self, text: str):
        self.tokens = [*TOKEN.findall(text), ""]  # "" is the end
        if "".join(self.tokens) != text.replace(" ", ""):
            raise Unread(f"a character of no token in {text!r}")
        self.place = 0
        self.in_bars = False  # whether the next | closes
        self.indices = set()  # of sums: i is no constant there

    @property
    def token(self) -> str:
        return self.tokens[self.place]

    def take(self, *expected: str) -> str:
        token = self.token
        if not token or expected and token not in expected:
            raise Unread(f"{token!r} where {expected or 'more'} should be")
        self.place += 1
        return token

    def sum(self) -> sympy.Expr:
        terms = [self.product()]
        while self.token in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            terms.append(sign * self.product())
        return sympy.Add(*terms)

    def product(self) -> sympy.Expr:
        value = self.signed()
        while self.token in (*OPERATORS, "("):
            operator = "\\cdot" if self.token == "(" else self.take()
            value = OPERATORS[operator](value, self.signed())
        return value

    def signed(self, in_argument: bool = False) -> sympy.Expr:
        sign = 1
        while self.token in ("+", "-"):
            sign = sign if self.take() == "+" else -sign
        return sign * self.powers(in_argument)

    def powers(self, in_argument: bool) -> sympy.Expr:
        """Read factors that stand side by side; the argument of a function ends before another function.

        No factor begins with "^" or "!": so 2^3^4 and n!! are not read.
        """
        factors = []
        start, plain = "", False  # of the factor before; and whether that is a number, without a power, alone
        while not (self.token in STOPS or self.token == "|" and self.in_bars
                   or factors and in_argument and self.token in FUNCTIONS):
            if start[:1].isdigit() and self.token[0].isdigit():
                raise Unread("two numbers beside each other")
            if plain and self.token == "(" and not in_argument:
                break  # 1/2(x+1) is (x+1)/2
            mixed, begun, start = plain and self.token == "\\frac", self.place, self.token
            factors.append(self.power())
            plain = len(factors) == 1 and self.place == begun + 1 and start[0].isdigit()
        if not factors:
            raise Unread(f"{self.token!r} where a formula should be")
        if len(factors) == 2 and mixed and factors[1].is_Rational:
            return sympy.Add(*factors)  # a mixed number
        return sympy.Mul(*factors)

    def power(self) -> sympy.Expr:
        base = self.atom()
        if self.token == "!":
            self.take()
            base = sympy.factorial(base, evaluate=not base.is_number or base <= LARGEST_COMPUTED)
        if self.token == "^":
            base = bounded_power(base, self.exponent())
        return base

    def exponent(self) -> sympy.Expr:
        self.take("^")
        sign = -1 if self.token == "-" and self.take() else 1
        return sign * self.atom()

    def atom(self) -> sympy.Expr:
        token = self.take()
        if re.match(r"\.?\d", token):
            return sympy.Rational(token)
        if token in BRACKET_PAIRS:
            return AROUND.get(token, lambda x: x)(self.group(token))
        if token in FUNCTIONS:
            return self.function(token)
        if token in SERIES:
            return self.series(SERIES[token])
        if token in CONSTANTS and self.token != "_" and token not in self.indices:
            return CONSTANTS[token]
        if token in FRACTIONS:
            return FRACTIONS[token](self.braced(), self.braced())
        if token == "\\sqrt":
            degree = self.group(self.take()) if self.token == "[" else sympy.Integer(2)
            return bounded_power(self.braced(), 1 / degree)
        if token in GREEK or token.isalpha():
            return self.symbol(token)
        raise Unread(f"{token!r} in a formula")

    def group(self, opening: str) -> sympy.Expr:
        outer, self.in_bars = self.in_bars, opening == "|"
        value = self.sum()
        self.take(BRACKET_PAIRS[opening])
        self.in_bars = outer
        return value

    def braced(self) -> sympy.Expr:
        return self.group(self.take("{"))

    def symbol(self, name: str) -> sympy.Symbol:
        """Read a letter with its index, and name the symbol as math-verify's parser does."""
        name = "Xi" if name == "E" else name.lstrip("\\")
        following = "".join(self.tokens[self.place:self.place + 3])
        if re.match(r"\([^\W_]+\)", following):
            raise Unread(f"a function {name}{following}")
        if name == "d" and self.token.isalpha():
            raise Unread("a differential")
        if self.token != "_":
            return sympy.Symbol(name)
        self.take("_")
        index = self.take()
        if index == "{":
            while self.token != "}":
                index += self.take()
            index = re.sub(r"^\{(.)\}$", r"\1", index + self.take())
        return sympy.Symbol(f"{name}_{index}")

    def function(self, name: str) -> sympy.Expr:
        exponent, base = sympy.Integer(1), []
        while self.token == "^" or self.token == "_" and name == "\\log":
            if self.token == "^":
                exponent = self.exponent()
            else:
                self.take()
                base = [self.atom()]
        value = self.group(self.take()) if self.token in ("(", "[") else self.signed(in_argument=True)
        if exponent == -1 and name in INVERSES:
            return INVERSES[name](value)
        return bounded_power(FUNCTIONS[name](value, *base), exponent)

    def series(self, kind: type) -> sympy.Expr:
        r"""Read \sum_{k=a}^{b} or \prod_{k=a}^{b} with the product behind it, and evaluate it."""
        self.take("_")
        self.take("{")
        name = self.take()
        index = self.symbol(name)
        self.take("=")
        first = self.sum()
        self.take("}")
        last, outer = self.exponent(), self.indices
        self.indices = outer | {name}
        body = self.product()
        self.indices = outer
        return kind(body, (index, first, last)).doit()


def parse_formula(text: str) -> sympy.Expr:
    """Parse a formula. Raises Unread if it is of another kind, RecursionError if it is too deep."""
    reader = Reader(text)
    expression = reader.sum()
    if reader.token:
        raise Unread(f"{reader.token!r} behind a formula")
    return expression
