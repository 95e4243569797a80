"""Two ways to ask the verifier, the labelled answers, and random values in random spellings that sympy compares.

A value is a tree; `spelled` writes it in one of many ways, with other orders, operators, brackets and sizes. `changed`
changes one thing in it: a sign or another operation, a number, a letter, a function or its argument.
"""

import json
import random
from pathlib import Path

import sympy

from verify import algebra
from verify import grade as grading
from verify.answer import answers_equal

ROOT = Path(__file__).parents[2]
LABELLED = [json.loads(line) for name in ("answers", "forms")
            for line in (Path(__file__).parent / f"{name}.jsonl").read_text().splitlines()]
LETTERS = ("x", "y", "a", "t", r"\theta", r"\lambda", "x_1")
FUNCTIONS = {r"\sin": sympy.sin, r"\cos": sympy.cos, r"\tan": sympy.tan, r"\ln": sympy.log, r"\exp": sympy.exp}
TIMES = (r"\cdot", r"\times", "*")
Tree = tuple  # ("number", 3), ("letter", "x"), ("sum", tree, tree), ("product", ...), ("power", tree, 2), ...


def random_tree(rng: random.Random, depth: int = 3) -> Tree:
    kind = rng.choice(("number", "letter")) if depth == 0 else rng.choice(
        ("number", "letter", "sum", "difference", "product", "product", "power", "quotient", "root", "function"))
    if kind == "number":
        return kind, rng.randint(2, 9)
    if kind == "letter":
        return kind, rng.choice(LETTERS)
    if kind == "power":
        return kind, random_tree(rng, depth - 1), rng.randint(2, 3)
    if kind == "root":
        return kind, random_tree(rng, depth - 1)
    if kind == "function":
        return kind, rng.choice(list(FUNCTIONS)), random_tree(rng, depth - 1)
    return kind, random_tree(rng, depth - 1), random_tree(rng, depth - 1)


def value(tree: Tree) -> sympy.Expr:
    kind, *rest = tree
    if kind == "number":
        return sympy.Integer(rest[0])
    if kind == "letter":
        return sympy.Symbol(rest[0].lstrip("\\"), positive=True)
    if kind == "function":
        return FUNCTIONS[rest[0]](value(rest[1]))
    if kind == "power":
        return value(rest[0]) ** rest[1]
    if kind == "root":
        return sympy.sqrt(value(rest[0]))
    one, other = map(value, rest)
    return {"sum": one + other, "difference": one - other, "product": one * other, "quotient": one / other}[kind]


def bracketed(text: str, rng: random.Random) -> str:
    return rng.choice((f"({text})", rf"\left({text}\right)", f"[{text}]"))


def simple(tree: Tree) -> bool:
    """A number or letter needs no brackets as a factor, a base or an argument."""
    return tree[0] in ("number", "letter")


def factor(tree: Tree, rng: random.Random) -> str:
    text = spelled(tree, rng)
    return text if simple(tree) or tree[0] == "root" else bracketed(text, rng)


def spelled(tree: Tree, rng: random.Random) -> str:
    kind, *rest = tree
    if kind in ("number", "letter"):
        return str(rest[0])
    if kind == "sum":
        return rng.choice((" + ", "+")).join(spelled(part, rng) for part in rng.sample(rest, 2))
    if kind == "difference":
        one, other = spelled(rest[0], rng), factor(rest[1], rng)
        return rng.choice((f"{one} - {other}", f"-{other}+{one}"))
    if kind == "product":
        one, other = rng.sample(rest, 2)
        if one[0] == other[0] == "function" and rng.random() < 0.3:
            return f"{spelled(one, rng)} {spelled(other, rng)}"
        if one[0] == "function" and rng.random() < 0.5:  # without brackets, and so behind it an operator
            return f"{spelled(one, rng)} {rng.choice(TIMES)} {factor(other, rng)}"
        if one[0] == "number" and other[0] == "letter" and rng.random() < 0.5:
            return f"{one[1]}{other[1]}"
        return f"{factor(one, rng)} {rng.choice(TIMES)} {factor(other, rng)}"
    if kind == "quotient":
        if rng.random() < 0.3:
            return f"{factor(rest[0], rng)}/{factor(rest[1], rng)}"
        return rf"\{rng.choice('dt ').strip()}frac{{{spelled(rest[0], rng)}}}{{{spelled(rest[1], rng)}}}"
    if kind == "power":
        exponent = rng.choice(("{%d}", "%d", "(%d)")) % rest[1]
        return f"{factor(rest[0], rng)}{rng.choice(('^', '**'))}{exponent}"
    if kind == "root":
        return rf"\sqrt{{{spelled(rest[0], rng)}}}"
    name, argument = rest
    text = spelled(argument, rng)
    return f"{name} {text}" if simple(argument) and rng.random() < 0.5 else f"{name}{bracketed(text, rng)}"


def changed(tree: Tree, rng: random.Random) -> Tree:
    kind, *rest = tree
    inner = [i for i, part in enumerate(rest) if isinstance(part, tuple)]
    if inner and rng.random() < 0.7:
        at = rng.choice(inner)
        return kind, *(changed(part, rng) if i == at else part for i, part in enumerate(rest))
    if kind == "number":
        return kind, rest[0] + rng.randint(1, 5)
    if kind == "letter":
        return kind, rng.choice([letter for letter in LETTERS if letter != rest[0]])
    if kind == "function":
        return kind, rng.choice([name for name in FUNCTIONS if name != rest[0]]), rest[1]
    if kind == "power":
        return kind, rest[0], rest[1] + 1
    if kind == "root":
        return rest[0]
    others = {"sum": ("product", "difference"), "product": ("sum", "quotient"), "quotient": ("product",),
              "difference": ("sum",)}
    return rng.choice(others[kind]), *rest


def pair(rng: random.Random) -> tuple[str, str, sympy.Expr, sympy.Expr]:
    """Make two answers and their values: one tree in two spellings, or two trees that differ in one thing."""
    tree = random_tree(rng)
    other = tree if rng.random() < 0.5 else changed(tree, rng)
    return spelled(tree, rng), spelled(other, rng), value(tree), value(other)


def are_equal(one: sympy.Expr, other: sympy.Expr) -> bool | None:
    """Tell whether two values are equal at positive letters, by 60 digits; None without such points."""
    if one.has(sympy.zoo, sympy.nan, sympy.oo) or other.has(sympy.zoo, sympy.nan, sympy.oo):
        return None
    if one == other:
        return True
    rng, letters, compared = random.Random(1), sorted(one.free_symbols | other.free_symbols, key=str), 0
    for _ in range(8):
        point = {letter: sympy.Rational(rng.randint(100, 2999), 1009) for letter in letters}
        values = [x.evalf(60, subs=point, maxn=200) for x in (one, other)]
        if not all(v.is_real and v.is_finite and abs(v) < 10**60 for v in values):
            continue
        if abs(values[0] - values[1]) > sympy.Float(10) ** -50 * max(map(abs, values)):
            return False
        compared += 1
    return True if compared else None


def changed_pair(rng: random.Random) -> tuple[str, str]:
    """Make a gold answer and one that is wrong by one thing."""
    while True:
        tree = random_tree(rng)
        other = changed(tree, rng)
        if are_equal(value(tree), value(other)) is False:
            return spelled(tree, rng), spelled(other, rng)


def accepted(gold: str, answer: str) -> bool:
    """Tell whether an answer passes for right by strict or by lenient grading."""
    return judged(gold, answer) is True or grading.last_number_equal(gold, rf"so it is \boxed{{{answer}}}")


def judged(gold: str, answer: str) -> bool | str:
    """Judge an answer in this process; the name of the exception if there is one."""
    try:
        return answers_equal(gold, answer, algebra.compare_expressions)
    except Exception as error:  # as the workers do
        return type(error).__name__


def verdict(gold: str, answer: str | None) -> str:
    """Judge an answer with the help of the workers."""
    return grading.finish_verdict(grading.begin_verdict(gold, answer))
