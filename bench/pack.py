"""How full are the rows, and how long does packing take?

    python bench/pack.py

Rows against the bound ceil(tokens / capacity), which no packing can beat, and the median milliseconds of five calls.
"""

import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from pack import best_fit

CAPACITY = 16_384
# Prompt and completion together, in tokens: (median, sigma of the logarithm, longest).
KINDS = {"gsm8k-like": (330, 0.35, 1536), "long-tailed": (1500, 1.0, CAPACITY)}


def measure(kind: str, count: int) -> dict:
    middle, sigma, longest = KINDS[kind]
    drawn = np.random.default_rng(0).lognormal(np.log(middle), sigma, count)
    lengths = drawn.astype(int).clip(1, longest).tolist()
    seconds = []
    for _ in range(5):
        begun = perf_counter()
        rows = best_fit(lengths, CAPACITY)
        seconds.append(perf_counter() - begun)
    bound = -(-sum(lengths) // CAPACITY)
    return {"lengths": kind, "sequences": count, "rows": len(rows), "bound": bound,
            "excess": len(rows) / bound - 1, "milliseconds": 1000 * median(seconds)}


if __name__ == "__main__":
    results = [measure(kind, count) for kind in KINDS for count in (10_000, 100_000)]
    print(f"{'lengths':<12} {'sequences':>10} {'rows':>7} {'bound':>7} {'excess':>8} {'ms':>8}   capacity {CAPACITY}")
    for r in results:
        print(f"{r['lengths']:<12} {r['sequences']:>10,} {r['rows']:>7,} {r['bound']:>7,} {r['excess']:>8.2%} "
              f"{r['milliseconds']:>8.0f}")
    print(json.dumps({"bench": "pack", "capacity": CAPACITY, "results": results}))
