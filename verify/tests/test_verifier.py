"""The verifier's parts: rules of spelling, numbers, the parser of formulas, comparison by values; labelled answers.

answers.jsonl was written before the code that it judges; forms.jsonl has other notations of one answer, and wrong
answers that look like them. PAIRS=100000 in the environment compares so many random values.
"""

import os
import random
import re

import pytest
import sympy
from respelling import LABELLED, ROOT, accepted, are_equal, changed_pair, judged, pair, verdict

from verify.algebra import parse_latex, read_formula
from verify.extract import extract
from verify.formula import Unread, parse_formula
from verify.number import number
from verify.spelling import RULES, read_unit, undouble

PAIRS = int(os.environ.get("PAIRS", "400"))


@pytest.mark.parametrize("category", sorted({case["category"] for case in LABELLED}))
def test_labelled_answers(category):
    chosen = [case for case in LABELLED if case["category"] == category]
    wrong = [(case["gold"], case["completion"], case["correct"]) for case in chosen
             if (judged(case["gold"], extract(case["completion"])) is True) != case["correct"]]
    assert not wrong


CONVENTIONS = re.findall(r"(?m)^\|[^|]*\| `([^`]+)` \| `([^`]+)` \| (right|wrong) \|$",
                         (ROOT / "verify" / "README.md").read_text())


@pytest.mark.parametrize(("gold", "answer", "said"), CONVENTIONS)
def test_the_conventions_are_as_the_page_has_them(gold, answer, said):
    assert len(CONVENTIONS) > 30
    assert verdict(gold, answer) == said


@pytest.mark.parametrize(("pattern", "new", "example"), RULES, ids=[pattern.pattern for pattern, *_ in RULES])
def test_a_rule_of_spelling_does_what_its_example_says(pattern, new, example):
    before, after = example.split(" → ")
    assert pattern.sub(new, before) == after != before


@pytest.mark.parametrize(("text", "once"), [
    (r"\\frac{1}{2}", r"\frac{1}{2}"), (r"\\\\frac{1}{2}", r"\frac{1}{2}"),
    (r"\\begin{a}1\\\\2\\end{a}", r"\begin{a}1\\2\end{a}"),
    (r"\\begin{a}1 \\ 2\\end{a}", r"\begin{a}1 \\ 2\end{a}"), (r"so\n\\(7\\)", r"so\n\(7\)"),
    (r"1,\\ \\pi", r"1,\ \pi"), (r"\\begin{a}1\\ 2\\\\3\\end{a}", r"\begin{a}1\ 2\\3\end{a}"),
    *((text, text) for text in (r"\begin{a}x\\y\end{a}", "7 \\\\\n\\boxed{7}", r"1 \\ 2", r"\frac12", "7"))])
def test_a_second_escape_is_taken_back_but_no_end_of_a_row(text, once):
    assert undouble(text) == once


@pytest.mark.parametrize("names", [
    "m/s^2 | m s^{-2} | meters per second squared | m/s/s | N/kg | s^-2 m", "km/h | kilometers per hour | kph",
    "cm^2 | square centimeters | sq. cm | cm cm | cm^{2}", "N m | J | kg m^2/s^2 | W s", "m^3 | cubic meters", "m^2",
    "m/s | m s^-1", "m s", "s/m", "m", "cm", "m/s^3", "miles/hour | mph", "1/s | Hz | rad/s | s^{-1}"])
def test_units_are_the_same_exactly_when_their_powers_are(names):
    first, *others = names.split(" | ")
    assert first == "m/s^2" or read_unit(first) != read_unit("m/s^2")
    assert all(read_unit(other) == read_unit(first) is not None for other in others)
    assert read_unit(f"{first} apples") is None


@pytest.mark.parametrize("text", [
    "1/2x", "1/2(x+1)", r"2/3\pi", r"\sin x(y+1)", r"\sin(x)y", r"\sin (x)^2", r"\sin^2(x)y", r"\sin x^2", r"\sin 2x y",
    r"\log x", r"\log_2 x", r"\log_a b c", r"\log_{10}x", r"\log_2^2 x", r"\ln x^2", r"\ln|x|y", r"\ln{2}x", "x(y+1)",
    "x_1", "x_{12}", "x_{n+1}", r"\alpha_1", "a_n^2", "abc", "e^x", "ie", r"\exp x", "|x||y|", r"\lfloor x+1\rfloor",
    "2x!", r"\binom{n}{k}", r"\sqrt[3]{x}", r"\sqrt{x}y", "x^2y", "x^{2}3", "x^10", "-x^2", "-2^2", "2-3x",
    r"x\frac{1}{2}", r"\sin\frac{x}{2}y", r"a/b\cdot c", r"a\cdot b/c", r"\sin^{-1}x", r"\sinh^2 x", r"\arctan x",
    r"\sec^{-1}x", r"\sin -x", r"2\cdot-3", "[x+1]y", r"\cos\theta\sin\theta", r"x\sin y z", r"\frac{x}{y}!",
    "2|x|", "x|y|", "E", r"x+3\frac{1}{2}", r"\sum_{k=1}^{n}k+1", r"\frac{1}{3}\frac{1}{2}", "0.25x", "x2"])
def test_the_reader_reads_as_math_verifys_parser_does(text):
    """The same value, of symbols of the same names: a gold answer may be read by one and the answer by the other."""
    ours, theirs = parse_formula(text), parse_latex(text)
    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    point = {symbol: sympy.Rational(1237 + 171 * i, 3001) for i, symbol in enumerate(symbols)}
    assert ours.free_symbols == theirs.free_symbols
    assert abs(sympy.N(ours.subs(point), 30) - sympy.N(theirs.subs(point), 30)) < 1e-25


@pytest.mark.parametrize(("text", "right"), [
    (r"\ln 2\cdot 3", "3*log(2)"), (r"\ln 2/3", "log(2)/3"), (r"\sin 2x\cdot y", "y*sin(2*x)"), ("(2)(3)", "6"),
    (r"\sin\pi/3", "0"), ("2^(1+1)", "4"), ("x^-1", "1/x"), ("10^-3", "1/1000"), (r"17\bmod 5", "2"), ("2^{-3}", "1/8"),
    (r"\prod_{k=1}^{4}k", "24"), (r"\lg 100", "2"), (r"3\frac{1}{2}", "7/2"), (r"3\frac{1}{2}x", "3*x/2")])
def test_what_math_verifys_parser_reads_otherwise_or_not_at_all(text, right):
    assert parse_formula(text) == sympy.sympify(right)


@pytest.mark.parametrize("text", [
    "", "x+", "(x", "x)", "f(x)", "f(2)", "3 4", "2^3^4", "n!!", "dx", r"\int_0^1 x dx", r"\unknown x",
    r"\begin{pmatrix}1\end{pmatrix}", "1,2", "||x|-1|", "x^{'}", r"\frac12", "x^", r"\sqrt", "x=1", r'5"cm"', "²"])
def test_what_is_no_usual_formula_is_left_to_math_verifys_parser(text):
    with pytest.raises(Unread):
        parse_formula(text)


def test_towers_of_powers_are_read_in_no_time():
    for text in ("9^{9^{9^{9}}}", r"10^{10^{10}}", r"x^{10^{9}}", "1000000000!"):
        assert isinstance(parse_formula(text), sympy.Expr)


def test_random_values_are_equal_exactly_when_sympy_says_so():
    rng, equal_ones = random.Random(1), 0
    for _ in range(PAIRS):
        gold, answer, one, other = pair(rng)
        truth = are_equal(one, other)
        if truth is not None:
            assert judged(gold, answer) == truth, (gold, answer)
            equal_ones += truth
    assert PAIRS / 4 < equal_ones < PAIRS * 3 / 4


def test_right_answers_with_one_thing_changed_are_refused_by_both_kinds_of_grading():
    """A sign, an operation, a number, a letter, a function, or what it is taken of."""
    rng = random.Random(2)
    assert not [pair for pair in (changed_pair(rng) for _ in range(250)) if accepted(*pair)]


@pytest.mark.parametrize(("gold", "answer", "right"), [
    (r"\sqrt{x-1}", r"\sqrt{|x-1|}", False),
    (r"\ln x^2", r"2\ln x", True), ("(-1)^n", "(-1)^{n+2}", True), ("(-1)^n", "(-1)^{n+1}", False),
    (r"\frac{x}{2004!}", r"\frac{x}{2006!}", False), ("0", r"\sin^2 x+\cos^2 x-1", True),
    ("0", r"\frac{x}{2^{999}}", False), ("e^{64}+x", "e^{64}-x", False),
    (r"(x-1)^{40}-(x-1)^{39}(x-1)", "0", True), ("x^{n}x^{-n}", "1", True), (r"\ln(-x)", r"\ln x", False)])
def test_values_that_are_hard_to_tell_apart(gold, answer, right):
    assert judged(gold, answer) is right


@pytest.mark.parametrize(("text", "plain"), [
    (r"2.5\cdot 10^{-3}", "0.0025"), ("12.50*10^{-1}", "1.250"), (r"-2.5\cdot 10^{-3}", "-0.0025"),
    ("2.5*10^{3}", "2500"), ("2*10^{-3}", "1/500"), ("2.25*10^{1}", "22.5"), ("x", "x")])
def test_a_decimal_times_a_power_of_ten_is_that_decimal_with_as_many_digits(text, plain):
    assert number(text) == number(plain)


def test_formulas_of_other_kinds_are_read_with_their_arguments_closed():
    assert read_formula(r"\int_0^1 \ln 2 \cdot x dx") == sympy.log(2) / 2
