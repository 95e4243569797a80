"""How full are the rows, how long does packing take, and does every rank have as much to do?

    python bench/pack.py

First, best fit over all sequences: rows against the bound ceil(tokens / capacity), which no packing can beat,
and the median milliseconds of five calls. Then a step of 256 groups of 16 before and after pruning at three
rates, packed with everything in sight and through windows: share of the rows that is tokens, mean over ten
steps.

Last, steps of 8 ranks: tokens of the busiest over an ideal that no packing can beat, the longest prompt with
its completion or all tokens with each prompt once over the ranks. `alone` packs each completion behind a
prompt of its own by best fit to the full capacity, as Winnow did before prompts were shared; `shared` is
`pack`. The ideal does not count that a prompt is paid for again on every rank that has some of its
completions; `bound` is the ideal with the fewest such copies, one for each rank beyond the number of groups.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from config import Pack
from pack import Minibatch, Plan, best_fit, deal, layout, pack, within_window
from records import Group, Prompt, Sample

CAPACITY = 16_384
# Prompt and completion together, in tokens: (median, sigma of the logarithm, longest).
KINDS = {"gsm8k-like": (330, 0.35, 1536), "long-tailed": (1500, 1.0, CAPACITY)}
RANKS, DRAWS = 8, 100
# step -> prompts, completions of each, how many are kept, of all together or of each group
KEPT = {"cppo_gsm8k": (4, 16, 16, "batch"), "cppo_math": (6, 16, 48, "batch"),
        "pps_gsm8k": (4, 16, 16, "batch"),
        **{f"128 x 16, keep {keep}": (128, 16, keep, "group") for keep in (16, 8, 4, 2, 1)}}
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


def drawn_step(prompts: int, G: int, kept: int, scope: str, seed: int) -> Minibatch:
    """Draw prompts of 180 tokens in the median, completions of 230, and which of them are kept."""
    draw = np.random.default_rng(seed)
    prompt_N = draw.lognormal(np.log(180), 0.2, prompts).astype(int).clip(60, 512).tolist()
    length_NG = draw.lognormal(np.log(230), 0.45, (prompts, G)).astype(int).clip(30, 1024).tolist()
    chance_NG = torch.from_numpy(draw.random((prompts, G)))
    flat_NG = chance_NG.view(1, -1) if scope == "batch" else chance_NG
    keep_NG = (flat_NG.argsort(dim=1).argsort(dim=1) < kept).view(prompts, G)
    groups = [Group(Prompt(str(n), (0,) * prompt_N[n], ""),
                    tuple(Sample([0] * length, [0.0] * length, True) for length in length_NG[n]))
              for n in range(prompts)]
    return Minibatch.plain(groups, keep_NG, torch.zeros(prompts, G), torch.zeros(prompts, G))


def busiest(plans: list[list[Plan]], minibatch: Minibatch) -> int:
    """Count the tokens of the rank that has the most."""
    return max(sum(sum(layout(minibatch, plan.members)[0]) for plan in mine if plan.counts) for mine in plans)


def over_ideal(step: str, seed: int) -> tuple[float, float, float]:
    """Measure a drawn step: the busiest rank over the ideal, unshared, shared, and at best."""
    minibatch = drawn_step(*KEPT[step], seed)
    members = minibatch.keep_NG.nonzero().tolist()
    alone = [layout(minibatch, [member])[0][0] for member in members]
    rows = best_fit(alone, CAPACITY)
    sums = [sum(alone[i] for i in row) for row in rows]
    unshared = max(sum(sums[row] for row in hand) for hand in deal(sums, RANKS))
    prompts = [len(minibatch.groups[n].prompt.ids) for n in sorted({n for n, _ in members})]
    tokens = sum(minibatch.groups[n].samples[g].length for n, g in members) + sum(prompts)
    copies = sum(sorted(prompts)[:max(0, RANKS - len(prompts))])
    ideal = max(max(alone), tokens / RANKS)
    shared = busiest(pack(minibatch, Pack(capacity=CAPACITY), RANKS), minibatch)
    return unshared / ideal, shared / ideal, max(max(alone), (tokens + copies) / RANKS) / ideal


def on_ranks(step: str) -> dict:
    """Measure a hundred draws of a step."""
    columns = zip(*(over_ideal(step, seed) for seed in range(DRAWS)), strict=True)
    ratios = dict(zip(("alone", "shared", "bound"), map(list, columns), strict=True))
    return {"step": step} | {name: {"median": median(values), "worst": max(values)}
                             for name, values in ratios.items()}


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
    print(f"\nbusiest of {RANKS} ranks over the ideal, {DRAWS} draws: median (worst)\n"
          f"{'step':<20} {'alone':>14} {'shared':>14} {'bound':>14}")
    balance = []
    for step in KEPT:
        balance.append(on_ranks(step))
        print(f"{step:<20} " + " ".join(f"{r['median']:>7.3f} {r['worst']:>6.2f}" for r in (
            balance[-1][name] for name in ("alone", "shared", "bound"))), flush=True)
    print(json.dumps({"bench": "pack", "capacity": CAPACITY, "results": results, "pruned": pruned,
                      "ranks": RANKS, "balance": balance}))


if __name__ == "__main__":
    main()
