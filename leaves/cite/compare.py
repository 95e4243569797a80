"""Compare results on the same problems, pair by pair (eval.py --compare, and the models of a --suite).

Dimension key:  N problems.
"""

import sys
from pathlib import Path

import numpy as np

from infra.digests import differences
from infra.figures import SCORES, align, count_right, mean_reward
from infra.lines import blame_file
from infra.results import summarise_file
from settings.loader import ConfigError
from verify.paired import holm, paired_interval, sign_flip


def compare_files(paths: list[Path]) -> str:
    """Tabulate the differences of two files. Raises ConfigError for a damaged one."""
    results = [(str(path), summarise_file(path)) for path in paths]
    with blame_file(" or ".join(map(str, paths))):
        for difference in differences(*(result["head"] for _, result in results)):
            print(f"the results differ: {difference}", file=sys.stderr)
        return comparison_table(results)


def comparison_table(results: list[tuple[str, dict]]) -> str:
    """Tabulate accuracy and reward of each result less those of the first one, on the sets that both have.

    The p-values are of flipped signs, corrected for all rows (Holm). Raises ConfigError without any row, and
    where a set holds other problems in one of them.
    """
    (first, a), *others = results
    rows, p_values = [], []
    for other, b in others:
        for name in (name for name in a["results"] if name in b["results"]):
            if a["head"]["sets"][name]["data"] != b["head"]["sets"][name]["data"]:
                raise ConfigError(f"--compare: {name} holds other problems in the two results")
            for kind in SCORES:
                pair = a["results"][name], b["results"][name]
                gap_N = gaps(*pair, kind) if all(kind in result for result in pair) else []
                if len(gap_N):
                    p_values.append(sign_flip(gap_N))
                    rows.append([name, f"{other} less {first}", *describe_gap(*pair, kind, gap_N)])
    if not rows:
        raise ConfigError(f"--compare: the results have no set in common: {', '.join(a['results'])} and "
                          f"{', '.join(b['results'])}")
    head = ["set", "results", "problems", "first", "second", "difference, 95% interval", "p"]
    corrected = [[*row, f"{p:.3g}"] for row, p in zip(rows, holm(p_values), strict=True)]
    return "\n".join(align([head, *corrected]))


def describe_gap(a: dict, b: dict, kind: str, gap_N: np.ndarray) -> list[str]:
    """Write the number of problems, both scores, and the mean difference with its interval."""
    form = ".1%" if kind == "accuracy" else ".3f"
    gap, low, high = (f"{x:+{form}}" for x in (gap_N.mean(), *paired_interval(gap_N)))
    return [str(len(gap_N)), *(f"{'reward ' * (kind == 'reward')}{r[kind]:{form}}" for r in (a, b)),
            f"{gap} [{low}, {high}]"]


def gaps(a: dict, b: dict, kind: str) -> np.ndarray:
    """Subtract the score of each problem in one result from that in another, [N], but for those without."""
    values = [[count_right(p) / r["n"] if kind == "accuracy" else mean_reward(p["responses"])
               for p in r["problems"]] for r in (a, b)]
    return np.array([y - x for x, y in zip(*values, strict=True) if None not in (x, y)])
