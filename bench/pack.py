"""How full are the rows, and how long does packing take?

    python bench/pack.py

First, best fit over all sequences: rows against the bound ceil(tokens / capacity), which no packing can beat,
and the median milliseconds of five calls. Then a step of 256 groups of 16 before and after pruning at three
rates, packed with everything in sight and through windows: share of the rows that is tokens, mean over ten
steps.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from methods.greedy_packing import within_window
from pack import best_fit

CAPACITY = 16_384
# Prompt and completion together, in tokens: (median, sigma of the logarithm, longest).
KINDS = {"gsm8k-like": (330, 0.35, 1536), "long-tailed": (1500, 1.0, CAPACITY)}
RATES, WINDOWS, STEPS = (0.0, 0.5, 0.75, 0.9375), (None, 256, 64, 16, 4, 1), 10


def lengths_of(kind: str, count: int, seed: int) -> list[int]:
    middle, sigma, longest = KINDS[kind]
    drawn = np.random.default_rng(seed).lognormal(np.log(middle), sigma, count)
    return drawn.astype(int).clip(1, longest).tolist()


def measure(kind: str, count: int) -> dict:
    lengths = lengths_of(kind, count, seed=0)
    seconds = []
    for _ in range(5):
        start = perf_counter()
        rows = best_fit(lengths, CAPACITY)
        seconds.append(perf_counter() - start)
    bound = -(-sum(lengths) // CAPACITY)
    return {"lengths": kind, "sequences": count, "rows": len(rows), "bound": bound,
            "excess": len(rows) / bound - 1, "milliseconds": 1000 * median(seconds)}


def after_pruning(kind: str, rate: float) -> dict:
    """Measure the density of a step's rows by pack.window, after this share of the completions was dropped at
    random."""
    by_window = {window: [] for window in WINDOWS}
    for step in range(STEPS):
        kept = np.random.default_rng(step).random(256 * 16) >= rate
        drawn = lengths_of(kind, 256 * 16, step)
        lengths = [length for length, keep in zip(drawn, kept, strict=True) if keep]
        for window, densities in by_window.items():
            if window is None:
                rows = best_fit(lengths, CAPACITY)
            else:
                rows = within_window(lengths, CAPACITY, window)
            densities.append(sum(lengths) / (len(rows) * CAPACITY))
    means = {str(window or "all"): mean(densities) for window, densities in by_window.items()}
    return {"lengths": kind, "dropped": rate} | means


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = [measure(kind, count) for kind in KINDS for count in (10_000, 100_000)]
    print(f"{'lengths':<12} {'sequences':>10} {'rows':>7} {'bound':>7} {'excess':>8} {'ms':>8}   "
          f"capacity {CAPACITY}")
    for r in results:
        print(f"{r['lengths']:<12} {r['sequences']:>10,} {r['rows']:>7,} {r['bound']:>7,} "
              f"{r['excess']:>8.2%} {r['milliseconds']:>8.0f}")
    names = [str(window or "all") for window in WINDOWS]
    print(f"\ndensity      {'dropped':>8}  in sight: " + " ".join(f"{name:>7}" for name in names))
    pruned = [after_pruning(kind, rate) for kind in KINDS for rate in RATES]
    for r in pruned:
        print(f"{r['lengths']:<12} {r['dropped']:>8.2%}            "
              + " ".join(f"{r[name]:>7.1%}" for name in names))
    print(json.dumps({"bench": "pack", "capacity": CAPACITY, "results": results, "pruned": pruned}))


if __name__ == "__main__":
    main()
