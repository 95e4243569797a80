"""How fast and how right is the verifier, against plain math-verify, and does it survive any text?

    python bench/verify.py [--cases FILE.jsonl] [--hostile 100000]

The pairs are made here: gold answers of seven kinds, each with one of its spellings or another value, other ones in
every round,
so no cache helps. Both verifiers take the same completions in turns, in 5 rounds. math-verify runs in this process
with its own time-outs, as its documentation has it, and reads the completion itself. The hostile texts are random
pieces of mathematics and constructed ones; none may end this process, or take it longer than the time-out allows. """

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

import reward

ROUNDS, PAIRS = 5, 700
KINDS = ("integer", "fraction", "root", "polynomial", "interval", "tuple", "text")
PIECES = ("{", "}", "(", ")", "[", "]", "\\boxed{", "\\frac", "\\sqrt{", "^", "_", "\\\\", "&", "$", "\\text{",
          "\\begin{pmatrix}", "\\end{pmatrix}", ",", ";", " and ", "=", "<", "\\le", "1", "23", ".", "e5", "x", "\\pm",
          "\\cup", "\\in", ":", "%", "\x00", "\u202e", "\u200f", "π", "\\", '"', "####", "<answer>", "</answer>", "!",
          "The answer is ", "\n", " ", "-", "|", "\\sin", "\\log", "\\int", "\\sum", "9" * 20, "^{99", "²", "\ud800")


def pair(kind: str, rng: random.Random) -> tuple[str, str]:
    """A gold answer and an answer, which is another spelling of it half of the time."""
    a, b, c = (rng.randint(2, 999) for _ in "abc")
    d = c if rng.random() < 0.5 else c + 1
    return {
        "integer": (f"{1000 * a + b}", f"{a},{b:03d}" if d == c else f"{a},{b + 1:03d}"),
        "fraction": (rf"\frac{{{a}}}{{{c}}}", rf"\dfrac{{{2 * a}}}{{{2 * d}}}"),
        "root": (rf"{a}\sqrt{{{c}}}", rf"\sqrt{{{a * a * d}}}"),
        "polynomial": (f"x^2+{a + c}x+{a * c}", f"(x+{a})(x+{d})"),
        "interval": (rf"[{-a},{c})", rf"{-a} \le x < {d}"),
        "tuple": (rf"({a},\frac{{{b}}}{{2}},{c})", f"({a}, {b / 2}, {d})"),
        "text": (rf"\text{{town {a} of {c}}}", f"town {a} of {d}"),
    }[kind]


def plain(gold: str, text: str) -> bool:
    """math-verify as its documentation has it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${gold}$"), parse(text)))


def ours(pairs: list[tuple[str, str]]) -> list[bool]:
    reward.verification.cache_clear()
    return [graded["verdict"] == "right" for graded in reward.grade(pairs)]


def theirs(pairs: list[tuple[str, str]]) -> list[bool]:
    return [plain(*one) for one in pairs]


def made(count: int, rng: random.Random) -> list[tuple[str, str]]:
    pairs = [pair(KINDS[i % len(KINDS)], rng) for i in range(count)]
    return [(gold, rf"Therefore it is $\boxed{{{text}}}$.") for gold, text in pairs]


def speed() -> dict:
    ways: dict[str, Callable] = {"winnow": ours, "math-verify": theirs}
    for way in ways.values():  # imports, processes
        way(made(PAIRS // 10, random.Random("warm")))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS):
        pairs = made(PAIRS, random.Random(i))
        for name, way in list(ways.items())[::1 if i % 2 else -1]:
            began = time.perf_counter()
            way(pairs)
            rates[name].append(PAIRS / (time.perf_counter() - began))
    print(f"{PAIRS} answers, {ROUNDS} rounds in turns, {reward.WORKERS} worker\n"
          f"{'verifier':<12} {'answers/s':>10} {'min - max':>16}")
    for name, found in rates.items():
        print(f"{name:<12} {median(found):>10,.0f} {f'{min(found):,.0f} - {max(found):,.0f}':>16}")
    return {name: round(median(found), 1) for name, found in rates.items()}


def labelled(path: Path) -> dict:
    cases = reward.read_cases(path)
    pairs, found = [(case["gold"], case["completion"]) for case in cases], {}
    for name, way in (("winnow", ours), ("math-verify", theirs)):
        began = time.perf_counter()
        kinds = Counter((case["correct"], right) for case, right in zip(cases, way(pairs), strict=True))
        found[name] = {"accuracy": (kinds[True, True] + kinds[False, False]) / len(cases), "false positives":
                       kinds[False, True], "false negatives": kinds[True, False], "s": time.perf_counter() - began}
    print(f"\n{len(cases)} labelled cases")
    print(f"{'verifier':<12} {'accuracy':>9} {'false +':>8} {'false -':>8} {'seconds':>8}")
    for name, x in found.items():
        print(f"{name:<12} {x['accuracy']:>9.1%} {x['false positives']:>8} {x['false negatives']:>8} {x['s']:>8.1f}")
    return found


def constructed(rng: random.Random) -> str:
    """One of the shapes that have brought verifiers down."""
    n = rng.choice((30, 1000, 5000))
    inside = rng.choice((
        "^".join(["9"] * rng.randint(3, 6)), "{9^" * 8 + "9" + "}" * 8, "**".join(["99", "98", "97"]), "9" * n,
        "1e" + "9" * 9,
        "(" * n, "{" * n, r"\frac{" * (n // 10), r"\sqrt{" * 20 + "2" + "}" * 20, r"\left(" * (n // 6),
        r"\text{" * (n // 6),
        "1," * n, r"\pm" * (n // 3), "x=" * n, "a and " * (n // 6), "\x00" * n, "\u202e" + "12" * 20, "٣٤",
        "10^{10^{10}}!",
        r"\binom{10^{9}}{5\cdot 10^{8}}", r"\sum_{k=1}^{10^{9}} k^{k}", r"x^{999999999}+1", r"\int_0^1 x^{x^{x}} dx",
        "".join(chr(rng.randint(1, 0xd7ff)) for _ in range(40))))
    return rng.choice((r"\boxed{" + inside + "}", r"\boxed{" + inside, "The answer is " + inside, "#### " + inside,
                       r"\boxed{" * 20 + inside + "}" * 20, "<think>" + inside + r"</think>\boxed{" + inside + "}"))


def megabytes() -> list[str]:
    return [piece * (1_000_000 // len(piece)) for piece in
            ("{", "}", "\\boxed{", "$", "answer is ", "<answer>", "1", "1,", "\\boxed{1}, ", " ", "####", "(", "\n")]


def resident(pid: int | str = "self") -> float:
    """MiB of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def hostile(count: int) -> dict:
    rng, verdicts, longest, memory = random.Random(0), Counter(), 0.0, []
    large = megabytes()
    began = time.perf_counter()
    for i in tqdm(range(count), "hostile", unit="text"):
        if i < len(large):
            text = large[i]
        elif i % 500 == 0:
            text = constructed(rng)
        else:
            text = "".join(rng.choices(PIECES, k=rng.choice((5, 20, 100))))
            text = text if i % 2 else rf"\boxed{{{text}}}"
        gold = rng.choice(("1", r"\frac{1}{2}", "(1,2)", "x^2+1", r"\text{east}", r"[0,\infty)"))
        before = time.perf_counter()
        graded, = reward.grade([(gold, text)])
        longest = max(longest, time.perf_counter() - before)
        verdicts[graded["verdict"]] += 1
        if i % max(1, count // 10) == count // 20:
            memory.append([round(resident()), round(resident(reward.Task(os.getpid).result()))])
    seconds = time.perf_counter() - began
    print(f"\n{count:,} hostile texts in {seconds:.0f} s: {dict(verdicts)}; the longest took {longest:.1f} s "
          f"(the worker has {reward.VERIFY_SECONDS:g} s of computing)")
    print(f"MiB of this process and the worker on the way: {memory}")
    if longest > 2 * reward.VERIFY_SECONDS + 1:
        sys.exit("error: a text took longer than the time-out allows")
    return {"texts": count, "verdicts": dict(verdicts), "longest": longest, "memory": memory, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, help="labelled cases, as for reward.py")
    parser.add_argument("--hostile", type=int, default=100_000, help="how many texts")
    args = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    found = {"speed": speed()}
    if args.cases:
        found["cases"] = labelled(args.cases)
    if args.hostile:
        found["hostile"] = hostile(args.hostile)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
