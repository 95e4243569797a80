"""How full are the rows, and how long does packing take?

    python bench/pack.py

First, best fit over all sequences: rows against the bound ceil(tokens / capacity), which no packing can beat, and the
median milliseconds of five calls. Then a step of 256 groups of 16 before and after pruning at three rates, packed with
everything in sight and through windows: share of the rows that is tokens, mean over ten steps.
"""

import json
import sys
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from pack import best_fit, within_window

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
        begun = perf_counter()
        rows = best_fit(lengths, CAPACITY)
        seconds.append(perf_counter() - begun)
    bound = -(-sum(lengths) // CAPACITY)
    return {"lengths": kind, "sequences": count, "rows": len(rows), "bound": bound,
            "excess": len(rows) / bound - 1, "milliseconds": 1000 * median(seconds)}


def after_pruning(kind: str, rate: float) -> dict:
    """Density of the rows of a step in which this share of the completions was dropped at random, by window."""
    density = {window: [] for window in WINDOWS}
    for step in range(STEPS):
        kept = np.random.default_rng(step).random(256 * 16) >= rate
        lengths = [length for length, keep in zip(lengths_of(kind, 256 * 16, step), kept, strict=True) if keep]
        for window in WINDOWS:
            rows = best_fit(lengths, CAPACITY) if window is None else within_window(lengths, CAPACITY, window)
            density[window].append(sum(lengths) / (len(rows) * CAPACITY))
    return {"lengths": kind, "dropped": rate} | {str(window or "all"): mean(found) for window, found in density.items()}


if __name__ == "__main__":
    results = [measure(kind, count) for kind in KINDS for count in (10_000, 100_000)]
    print(f"{'lengths':<12} {'sequences':>10} {'rows':>7} {'bound':>7} {'excess':>8} {'ms':>8}   capacity {CAPACITY}")
    for r in results:
        print(f"{r['lengths']:<12} {r['sequences']:>10,} {r['rows']:>7,} {r['bound']:>7,} {r['excess']:>8.2%} "
              f"{r['milliseconds']:>8.0f}")
    print(f"\ndensity      {'dropped':>8}  in sight: " + " ".join(f"{window or 'all':>7}" for window in WINDOWS))
    pruned = [after_pruning(kind, rate) for kind in KINDS for rate in RATES]
    for r in pruned:
        print(f"{r['lengths']:<12} {r['dropped']:>8.2%}            "
              + " ".join(f"{r[str(window or 'all')]:>7.1%}" for window in WINDOWS))
    print(json.dumps({"bench": "pack", "capacity": CAPACITY, "results": results, "pruned": pruned}))
