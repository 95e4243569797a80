"""Compare two results on the same problems, pair by pair (eval.py --compare).

Dimension key:  N problems.
"""

import sys
from pathlib import Path

import numpy as np

from infra.digests import differences
from infra.figures import count_right, mean_reward
from infra.lines import blame_file
from infra.results import summarise_file
from settings.loader import ConfigError
from verify.paired import mcnemar, paired_interval


def compare_files(paths: list[Path]) -> str:
    """Tabulate the differences of two files. Raises ConfigError for a damaged one."""
    results = [summarise_file(path) for path in paths]
    with blame_file(" or ".join(map(str, paths))):
        return comparison_table(*results)


def comparison_table(first: dict, second: dict) -> str:
    """Tabulate the accuracy of the second result less that of the first, on the sets that both have, and the
    reward likewise.

    Raises ConfigError without any, and where a set holds other problems in one of them.
    """
    lines = [f"{'set':<16} {'problems':>8} {'first':>7} {'second':>7} {'difference':>10} "
             f"{'95% interval':<18} McNemar's p"]
    for difference in differences(first["head"], second["head"]):
        print(f"the results differ: {difference}", file=sys.stderr)
    for name in first["results"]:
        if name not in second["results"]:
            continue
        if first["head"]["sets"][name]["data"] != second["head"]["sets"][name]["data"]:
            raise ConfigError(f"--compare: {name} holds other problems in the two results")
        pair = first["results"][name], second["results"][name]
        rows = [row(name, *pair) for key, row in (("accuracy", accuracy_row), ("reward", reward_row))
                if all(key in result for result in pair)]
        lines += filter(None, rows)
    if len(lines) == 1:
        raise ConfigError(f"--compare: the results have no set in common: {', '.join(first['results'])} and "
                          f"{', '.join(second['results'])}")
    return "\n".join(lines)


def accuracy_row(name: str, a: dict, b: dict) -> str:
    """Write the row of the accuracy on one set."""
    difference_N = accuracy_gaps(a, b)
    worse, better = int((difference_N < 0).sum()), int((difference_N > 0).sum())
    p_value = f"{mcnemar(worse, better):.3g}" if a["n"] == b["n"] == 1 else "-"
    low, high = paired_interval(difference_N)
    bounds = f"[{low:+.1%}, {high:+.1%}]"
    return (f"{name:<16} {a['count']:>8} {a['accuracy']:>7.1%} {b['accuracy']:>7.1%} "
            f"{difference_N.mean():>+10.1%} {bounds:<18} {p_value}")


def reward_row(name: str, a: dict, b: dict) -> str:
    """Write the row of the reward on one set; empty where no problem has one in both results."""
    pairs = zip(*(map(mean_reward, r["problems"]) for r in (a, b)), strict=True)
    difference_N = np.array([second - first for first, second in pairs if None not in (first, second)])
    if not len(difference_N):
        return ""
    low, high = paired_interval(difference_N)
    bounds = f"[{low:+.3f}, {high:+.3f}]"
    return (f"{name + ' reward':<16} {len(difference_N):>8} {a['reward']:>7.3f} {b['reward']:>7.3f} "
            f"{difference_N.mean():>+10.3f} {bounds:<18} -")


def accuracy_gaps(a: dict, b: dict) -> np.ndarray:
    """Subtract the share of right answers to each problem in one result from that in another, [N]."""
    return np.subtract(*([count_right(problem) / r["n"] for problem in r["problems"]] for r in (b, a)))
