"""Random values in random spellings, of which sympy knows whether they are equal.

    python tests/respelling.py [--pairs 100000] [--changed 1000] [--seed 0]

A value is a tree; `spelled` writes it in one of many ways, with other orders, operators, brackets and sizes. `changed`
changes one thing in it: a sign or another operation, a number, a letter, a function, or what it is taken of.
"""

import argparse
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import sympy
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from verify import algebra  # noqa: E402
from verify.answer import equal  # noqa: E402
from verify.grade import last_number_equal  # noqa: E402

LETTERS = ("x", "y", "a", "t", r"\theta", r"\lambda", "x_1")
FUNCTIONS = {r"\sin": sympy.sin, r"\cos": sympy.cos, r"\tan": sympy.tan, r"\ln": sympy.log, r"\exp": sympy.exp}
SECONDS = 10  # by the clock for one pair, in main
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
    """Change one thing in a tree."""
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
    """Make two answers, and their values: equal ones in other spellings, or of two trees that differ in one thing."""
    tree = random_tree(rng)
    other = tree if rng.random() < 0.5 else changed(tree, rng)
    return spelled(tree, rng), spelled(other, rng), value(tree), value(other)


def are_equal(one: sympy.Expr, other: sympy.Expr) -> bool | None:
    """Whether two values are equal for positive letters, by 60 digits of sympy's at points where both are real; None
    where there are none, and for a division by zero."""
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
    """Whether an answer passes for right by strict or by lenient grading."""
    return judged(gold, answer) is True or last_number_equal(gold, rf"so it is \boxed{{{answer}}}")


def judged(gold: str, answer: str) -> bool | str:
    """Whether we find two answers equal, in this process."""
    try:
        return equal(gold, answer, algebra.compare)
    except Exception as error:  # as the workers have it
        return type(error).__name__


def too_long(number: int, frame: object) -> None:
    raise TimeoutError


def within(seconds: int, function: Callable, *args: object) -> object:
    """Call a function; None where it takes longer."""
    signal.alarm(seconds)
    try:
        return function(*args)
    except TimeoutError:
        return None
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--changed", type=int, default=1000, help="right answers with one thing changed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, counts = random.Random(args.seed), Counter()
    signal.signal(signal.SIGALRM, too_long)
    for _ in tqdm(range(args.pairs), unit="pair"):
        gold, answer, one, other = pair(rng)
        truth = within(SECONDS, are_equal, one, other)
        if truth is None:
            counts["sympy cannot judge"] += 1
            continue
        verdict = within(SECONDS, judged, gold, answer)
        counts[f"{'equal' if truth else 'different'}, judged {'so' if verdict == truth else 'otherwise'}"] += 1
        if verdict != truth:
            tqdm.write(f"{gold}  |  {answer}  |  equal: {truth}, judged {verdict}")
    wrong = [changed_pair(rng) for _ in range(args.changed)]
    counts["changed, judged so"] = sum(not accepted(*pair) for pair in wrong)
    counts["changed, judged otherwise"] = args.changed - counts["changed, judged so"]
    tqdm.write("\n".join(f"{gold}  |  {answer}  |  accepted" for gold, answer in wrong if accepted(gold, answer)))
    print(dict(counts))
    return any(count for what, count in counts.items() if "otherwise" in what)


if __name__ == "__main__":
    sys.exit(main())
