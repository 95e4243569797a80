"""How fast and how right is the verifier, against plain math-verify, and does it survive any text?

    python bench/grade.py [--cases FILE.jsonl] [--hostile 100000]

The pairs are made here: gold answers of seven kinds, and of eight that need algebra, each with one of its
spellings or another value, other ones in every round, so no cache helps. Both verifiers take the same
completions in turns, in 5 rounds. math-verify runs in this process with its own time-outs, as its
documentation has it, and reads the completion itself. The hostile texts are random pieces of mathematics and
constructed ones; none may end this process, or take it longer than the time-out allows.
"""

import argparse
import json
import logging
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from verify import grade as grading
from verify.cases import read_cases

ROUNDS, PAIRS = 5, 560  # pairs that both numbers of kinds divide
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
    d, x = c if rng.random() < 0.5 else c + 1, rng.choice("xyzt")
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


def plain(gold: str, text: str) -> bool:
    """Ask math-verify, as its documentation has it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${gold}$"), parse(text)))


def ours(pairs: list[tuple[str, str]]) -> list[bool]:
    grading.begin_verdict.cache_clear()
    return [graded["verdict"] == "right" for graded in grading.grade(pairs)]


def theirs(pairs: list[tuple[str, str]]) -> list[bool]:
    return [plain(gold, text) for gold, text in pairs]


VERIFIERS: dict[str, Callable] = {"winnow": ours, "math-verify": theirs}


def speed(mix: str) -> dict:
    kinds = MIXES[mix]
    for verifier in VERIFIERS.values():  # imports, processes
        verifier(made(PAIRS // 10, kinds, random.Random("warm")))
    rates: dict[str, list[float]] = {name: [] for name in VERIFIERS}
    for i in range(ROUNDS):
        pairs = made(PAIRS, kinds, random.Random(i))
        for name in list(VERIFIERS)[::1 if i % 2 else -1]:
            start = time.perf_counter()
            VERIFIERS[name](pairs)
            rates[name].append(PAIRS / (time.perf_counter() - start))
    print(f"{mix}: {PAIRS} answers, {ROUNDS} rounds in turns, {grading.WORKERS} worker")
    print(f"{'verifier':<12} {'answers/s':>10} {'min - max':>16}")
    for name, measured in rates.items():
        print(f"{name:<12} {median(measured):>10,.0f} {f'{min(measured):,.0f} - {max(measured):,.0f}':>16}")
    return {name: round(median(measured), 1) for name, measured in rates.items()}


# ---- labelled cases

def labelled(path: Path) -> dict:
    cases = read_cases(path)
    pairs = [(case["gold"], case["completion"]) for case in cases]
    outcomes = {}
    for name, verifier in VERIFIERS.items():
        start = time.perf_counter()
        rights = verifier(pairs)
        kinds = Counter((case["correct"], right) for case, right in zip(cases, rights, strict=True))
        outcomes[name] = {"accuracy": (kinds[True, True] + kinds[False, False]) / len(cases),
                          "false positives": kinds[False, True], "false negatives": kinds[True, False],
                          "s": time.perf_counter() - start}
    print(f"\n{len(cases)} labelled cases")
    print(f"{'verifier':<12} {'accuracy':>9} {'false +':>8} {'false -':>8} {'seconds':>8}")
    for name, x in outcomes.items():
        print(f"{name:<12} {x['accuracy']:>9.1%} {x['false positives']:>8} {x['false negatives']:>8} "
              f"{x['s']:>8.1f}")
    return outcomes


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


def resident(pid: int | str = "self") -> float:
    """Read how many MiB of memory a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def hostile(count: int) -> dict:
    rng, verdicts, longest, memory = random.Random(0), Counter(), 0.0, []
    start = time.perf_counter()
    for i in tqdm(range(count), "hostile", unit="text"):
        text = hostile_text(i, rng)
        gold = rng.choice(GOLDS)
        before = time.perf_counter()
        graded, = grading.grade([(gold, text)])
        longest = max(longest, time.perf_counter() - before)
        verdicts[graded["verdict"]] += 1
        if i % max(1, count // 10) == count // 20:
            worker = grading.Call(os.getpid).result()
            memory.append([round(resident()), round(resident(worker))])
    seconds = time.perf_counter() - start
    print(f"\n{count:,} hostile texts in {seconds:.0f} s: {dict(verdicts)}; the longest took {longest:.1f} s "
          f"(the worker has {grading.VERIFY_SECONDS:g} s of computing)")
    print(f"MiB of this process and the worker on the way: {memory}")
    if longest > 2 * grading.VERIFY_SECONDS + 1:
        sys.exit("error: a text took longer than the time-out allows")
    return {"texts": count, "verdicts": dict(verdicts), "longest": longest, "memory": memory,
            "seconds": seconds}


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cases", type=Path, help="labelled cases, as for reward.py")
    parser.add_argument("--hostile", type=int, default=100_000, help="how many texts")
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    results = {"speed": {mix: speed(mix) for mix in MIXES}}
    if args.cases:
        results["cases"] = labelled(args.cases)
    if args.hostile:
        results["hostile"] = hostile(args.hostile)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
