"""Tables of evaluations: what eval.py prints of a result, and of two.

Dimension key:  N problems.
"""

import json
import sys
from hashlib import sha256

import numpy as np

from config import ConfigError
from infra.results import Results, differences
from verify.statistics import holm, mcnemar, mean, paired_interval, sign_flip


def results_table(results: Results) -> str:
    """Tabulate results by set, accuracies and rewards apart, and below them those by level and subject; where
    math-verify was asked, also the answers that it judges otherwise."""
    graded = {name: r for name, r in results.items() if "accuracy" in r}
    scored = {name: r for name, r in results.items() if "reward" in r}
    lines = [*accuracy_lines(graded), *reward_lines(scored)]
    for name, r in results.items():
        for kind, groups in r["groups"].items():
            cells = [f"{label} {format_score(x)} of {x['count']}" for label, x in groups.items()]
            lines.append(f"{name} by {kind}: {', '.join(cells)}")
        lines += list_disagreements(name, r)
    return "\n".join(lines)


def list_disagreements(name: str, result: dict) -> list[str]:
    """List the answers that math-verify and we read differently, with both readings."""
    lines = []
    for problem in result["problems"] if "math_verify" in result else []:
        for response in problem["responses"]:
            theirs = response["math_verify"]
            if theirs["right"] != (response["verdict"] == "right"):
                lines.append(f"{name} {problem['id']}: {response['answer']!r} for {problem['gold']!r} is "
                             f"{response['verdict']}; math-verify reads {theirs['read']}, "
                             f"{'right' if theirs['right'] else 'wrong'}")
    return lines


def format_score(x: dict) -> str:
    return f"{x['accuracy']:.1%}" if "accuracy" in x else f"{x['reward']:.3f}"


def accuracy_lines(results: Results) -> list[str]:
    """Tabulate graded results; empty without any."""
    lines = [f"{'set':<16} {'problems':>8} {'n':>3} {'accuracy':>9} {'95% interval':<16} {'lenient':>8} "
             f"{'last number':>11} {'pass@n':>7} {'maj@n':>7} {'tokens':>8} {'truncated':>9} {'unparsed':>9}"
             + f" {'math-verify':>11}" * any("math_verify" in r for r in results.values())]
    for name, r in results.items():
        n, bounds = str(r["n"]), f"[{r['low']:.1%}, {r['high']:.1%}]"
        lines.append(f"{name:<16} {r['count']:>8} {n:>3} {r['accuracy']:>9.1%} {bounds:<16} "
                     f"{r['lenient']:>8.1%} {r['last_number']:>11.1%} {r['pass'][n]:>7.1%} "
                     f"{r['majority'][n]:>7.1%} {r['length']:>8.1f} {r['truncated']:>9.1%} "
                     f"{r['unparsed']:>9.1%}"
                     + (f" {r['math_verify']:>11.1%}" if "math_verify" in r else ""))
    return lines if results else []


def reward_lines(results: Results) -> list[str]:
    """Tabulate results that were scored; empty without any."""
    lines = [f"{'set':<16} {'problems':>8} {'n':>3} {'reward':>9} {'95% interval':<16} {'tokens':>8} "
             f"{'truncated':>9}"]
    for name, r in results.items():
        bounds = f"[{r['reward_low']:.3f}, {r['reward_high']:.3f}]"
        lines.append(f"{name:<16} {r['count']:>8} {r['n']:>3} {r['reward']:>9.3f} {bounds:<16} "
                     f"{r['length']:>8.1f} {r['truncated']:>9.1%}")
    return lines if results else []


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


# ---- suites

def suite_lines(suite: str, results: Results) -> list[str]:
    """Write what a paper needs of one suite's results {model: result}: a line to cite for each set and model,
    a row of LaTeX for each model, and from two models on a table of differences to the first."""
    lines = []
    for model, result in results.items():
        cells = []
        for name, r in result["results"].items():
            bounds = f"[{r['low']:.1%}, {r['high']:.1%}]"
            lines.append(f"{name} {r['accuracy']:.1%} {bounds} avg@{r['n']}, suite {suite} "
                         f"{suite_hash(result['head'], name)}, model {model} "
                         f"{result['head']['model']['files'][:12]}")
            cells.append(f"{100 * r['accuracy']:.1f}")
        latex = model.replace("_", r"\_")
        lines.append(f"{latex} & {' & '.join(cells)} \\\\")
    return [*lines, *ranking(results)] if len(results) > 1 else lines


def suite_hash(head: dict, name: str) -> str:
    """Identify how a set was evaluated, apart from the model: its problems, sampling, prompt and verifier."""
    keys = ("sampling", "system_prompt", "stop", "verifier")
    said = [head["sets"][name]["data"], *(head[key] for key in keys)]
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


def ranking(results: Results) -> list[str]:
    """Tabulate each model's accuracy less the first one's on the same problems, with p-values of flipped
    signs that are corrected for all rows (Holm)."""
    first, *others = results
    rows, p_values = [], []
    for name, a in results[first]["results"].items():
        for other in others:
            difference_N = accuracy_gaps(a, results[other]["results"][name])
            low, high = paired_interval(difference_N)
            p_values.append(sign_flip(difference_N))
            bounds = f"[{low:+.1%}, {high:+.1%}]"
            rows.append(f"{name:<16} {other} less {first}: {difference_N.mean():+.1%} {bounds}")
    return [f"{row}, p = {p:.3g}" for row, p in zip(rows, holm(p_values), strict=True)]


def accuracy_gaps(a: dict, b: dict) -> np.ndarray:
    """Subtract the share of right answers to each problem in one result from that in another, [N]."""
    return np.subtract(*([count_right(problem) / r["n"] for problem in r["problems"]] for r in (b, a)))


def count_right(problem: dict) -> int:
    return sum(response["verdict"] == "right" for response in problem["responses"])


def mean_reward(problem: dict) -> float | None:
    """Average the rewards of a problem's responses; None where none has one."""
    rewards = [response["reward"] for response in problem["responses"] if response["reward"] is not None]
    return mean(rewards) if rewards else None
