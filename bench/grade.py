"""How fast is the verifier, against plain math-verify, and does it survive any text?

    python bench/grade.py [--rounds 5] [--hostile 100000]

The pairs are made here: gold answers of seven kinds, and of eight that need algebra, each with one of its
spellings or another value, other ones in every round, so no cache helps. Both verifiers take the same
completions in turns. math-verify runs in this process with its own time-outs, as its documentation has it,
and reads the completion itself. The hostile texts are random pieces of mathematics and constructed ones;
none may end this process, or take it longer than the time-out allows. How right the verifier is on labelled
cases says `python reward.py --cases FILE.jsonl`.
"""

import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from common import count, parser, print_json, show, timed
from tqdm import tqdm

from verify import grade as grading

PAIRS = 560  # of a round; both numbers of kinds divide it
GOLDS = ("1", r"\frac{1}{2}", "(1,2)", "x^2+1", r"\text{east}", r"[0,\infty)")  # of the hostile texts
MIXES = {"common": ("integer", "fraction", "root", "polynomial", "interval", "tuple", "text"),
         "symbolic": ("rational", "trigonometric", "exponential", "line", "set", "logarithm", "inequality",
                      "series")}
PIECES = ("{", "}", "(", ")", "[", "]", "\\boxed{", "\\frac", "\\sqrt{", "^", "_", "\\\\", "&", "$",
          "\\text{", "\\begin{pmatrix}", "\\end{pmatrix}", ",", ";", " and ", "=", "<", "\\le", "1", "23",
          ".", "e5", "x", "\\pm", "\\cup", "\\in", ":", "%", "\x00", "\u202e", "\u200f", "π", "\\", '"',
          "####", "<answer>", "</answer>", "!", "The answer is ", "\n", " ", "-", "|", "\\sin", "\\log",
          "\\int", "\\sum", "9" * 20, "^{99", "²", "\ud800")
LARGE = ("{", "}", "\\boxed{", "$", "answer is ", "<answer>", "1", "1,", "\\boxed{1}, ", " ", "####", "(",
         "\n")


# ---- speed

def pair(kind: str, rng: random.Random) -> tuple[str, str]:
    """Make a gold answer and an answer, which is another spelling of it half of the time."""
    a, b, c = (rng.randint(2, 999) for _ in "abc")
    d, x = c + (rng.random() >= 0.5), rng.choice("xyzt")  # d is c, or one more in a wrong answer
    return {
        "rational": (rf"\frac{{{x}^2-{a * a}}}{{{x}+{c}}}", rf"\frac{{({x}-{a})({x}+{a})}}{{{d}+{x}}}"),
        "trigonometric": (rf"{a}\sin {x}\cos {x}+{c}", rf"\frac{{{a}}}{{2}}\sin 2{x}+{d}"),
        "exponential": (rf"e^{{{b}{x}}}({x}+{c})", rf"({d}+{x})\cdot e^{{{b}{x}}}"),
        "line": (rf"w={a}{x}+{c}", rf"{a}{x}-w+{d}=0"),
        "set": (rf"\{{{x}+{a},{x}^2-{c}\}}", rf"\{{{x}^2-{d},{a}+{x}\}}"),
        "logarithm": (rf"\sqrt{{{x}^2+{a}}}\ln({x}+{c})", rf"\ln({d}+{x})\sqrt{{{a}+{x}^2}}"),
        "inequality": (rf"{a}{x}+{b}w\le {c}", rf"{d}\ge {b}w+{a}{x}"),
        "series": (rf"\frac{{{a}(1-{x}^n)}}{{{c}-{x}}}", rf"\frac{{{a}({x}^n-1)}}{{{x}-{d}}}"),
        "integer": (f"{1000 * a + b}", f"{a},{b:03d}" if d == c else f"{a},{b + 1:03d}"),
        "fraction": (rf"\frac{{{a}}}{{{c}}}", rf"\dfrac{{{2 * a}}}{{{2 * d}}}"),
        "root": (rf"{a}\sqrt{{{c}}}", rf"\sqrt{{{a * a * d}}}"),
        "polynomial": (f"x^2+{a + c}x+{a * c}", f"(x+{a})(x+{d})"),
        "interval": (rf"[{-a},{c})", rf"{-a} \le x < {d}"),
        "tuple": (rf"({a},\frac{{{b}}}{{2}},{c})", f"({a}, {b / 2}, {d})"),
        "text": (rf"\text{{town {a} of {c}}}", f"town {a} of {d}"),
    }[kind]


def made(count: int, kinds: tuple[str, ...], rng: random.Random) -> list[tuple[str, str]]:
    pairs = [pair(kinds[i % len(kinds)], rng) for i in range(count)]
    return [(gold, rf"Therefore it is $\boxed{{{text}}}$.") for gold, text in pairs]


def ours(pairs: list[tuple[str, str]]) -> list[bool]:
    grading.begin_verdict.cache_clear()
    return [graded["verdict"] == "right" for graded in grading.grade(pairs)]


def theirs(pairs: list[tuple[str, str]]) -> list[bool]:
    """Ask math-verify, as its documentation has it."""
    from math_verify import parse, verify

    return [bool(verify(parse(f"${gold}$"), parse(text))) for gold, text in pairs]


VERIFIERS: dict[str, Callable] = {"winnow": ours, "math-verify": theirs}


def speed(mix: str, rounds: int, count: int = PAIRS) -> list[dict]:
    """Measure the answers a second of both verifiers, in turns."""
    kinds = MIXES[mix]
    for verifier in VERIFIERS.values():  # imports, processes
        verifier(made(len(kinds), kinds, random.Random("warm")))
    rates: dict[str, list[float]] = {name: [] for name in VERIFIERS}
    for i in range(rounds):
        pairs = made(count, kinds, random.Random(i))
        for name in list(VERIFIERS)[::1 if i % 2 else -1]:
            rates[name].append(count / timed(lambda name=name, pairs=pairs: VERIFIERS[name](pairs)))
    return show(f"{mix}: {count} answers, {rounds} rounds in turns, {grading.WORKERS} worker",
                [{"verifier": name, "answers/s": measured} for name, measured in rates.items()])


# ---- hostile texts

def constructed(rng: random.Random) -> str:
    """Make one of the shapes that have brought verifiers down."""
    n = rng.choice((30, 1000, 5000))
    inside = rng.choice((
        "^".join(["9"] * rng.randint(3, 6)), "{9^" * 8 + "9" + "}" * 8, "**".join(["99", "98", "97"]),
        "9" * n, "1e" + "9" * 9, "(" * n, "{" * n, r"\frac{" * (n // 10), r"\sqrt{" * 20 + "2" + "}" * 20,
        r"\left(" * (n // 6), r"\text{" * (n // 6), "1," * n, r"\pm" * (n // 3), "x=" * n,
        "a and " * (n // 6), "\x00" * n, "\u202e" + "12" * 20, "٣٤", "10^{10^{10}}!",
        r"\binom{10^{9}}{5\cdot 10^{8}}",
        r"\sum_{k=1}^{10^{9}} k^{k}", r"x^{999999999}+1", r"\int_0^1 x^{x^{x}} dx",
        "".join(chr(rng.randint(1, 0xd7ff)) for _ in range(40))))
    return rng.choice((r"\boxed{" + inside + "}", r"\boxed{" + inside, "The answer is " + inside,
                       "#### " + inside, r"\boxed{" * 20 + inside + "}" * 20,
                       "<think>" + inside + r"</think>\boxed{" + inside + "}"))


def hostile_text(i: int, rng: random.Random) -> str:
    """Make the i-th text: a megabyte of one piece first, then constructed and random ones."""
    if i < len(LARGE):
        return LARGE[i] * (1_000_000 // len(LARGE[i]))
    if i % 500 == 0:
        return constructed(rng)
    text = "".join(rng.choices(PIECES, k=rng.choice((5, 20, 100))))
    return text if i % 2 else rf"\boxed{{{text}}}"


def hostile(count: int) -> dict:
    """Grade so many texts. Raises SystemExit where one takes longer than the time-out allows."""
    rng, verdicts, longest = random.Random(0), Counter(), 0.0
    start = time.perf_counter()
    for i in tqdm(range(count), "hostile", unit="text"):
        given = rng.choice(GOLDS), hostile_text(i, rng)
        before = time.perf_counter()
        graded, = grading.grade([given])
        longest = max(longest, time.perf_counter() - before)
        verdicts[graded["verdict"]] += 1
    row = {"texts": count, "seconds": time.perf_counter() - start, "longest": longest} | verdicts
    show(f"Hostile texts; the worker has {grading.VERIFY_SECONDS:g} s of computing for one", [row])
    if longest > 2 * grading.VERIFY_SECONDS + 1:
        sys.exit("error: a text took longer than the time-out allows")
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=count, default=5, help="of each mix of answers")
    options.add_argument("--hostile", type=int, default=100_000, help="how many texts")
    args = options.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    print_json("grade", speed={mix: speed(mix, args.rounds) for mix in MIXES}, hostile=hostile(args.hostile))


if __name__ == "__main__":
    main()
