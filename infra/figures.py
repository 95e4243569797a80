"""Summarise the responses of an evaluation in figures, and tabulate them.

Dimension key:  N problems.
"""

from collections.abc import Callable
from functools import partial

from settings.loader import ConfigError
from verify.statistics import bounded_interval, majority_at, mean, pass_at, vote, wilson

Results = dict[str, dict]  # the summary of each set, or the result of each model


def summarise(problems: list[dict], sizes: list[int] | None = None,
              bounds: tuple[float, float] | None = None) -> dict:
    """Summarise n responses to each problem: accuracies if they are graded, rewards if `bounds` are given.

    A problem without any reward is left out of the mean reward. length is in tokens; groups holds accuracies,
    or else rewards, by level and by subject. Raises ConfigError for a k of pass@k (`sizes`) above n.
    """
    n = len(problems[0]["responses"])
    responses = [response for problem in problems for response in problem["responses"]]
    result = {"n": n, "groups": {}, "length": mean(r["tokens"] for r in responses),
              "truncated": mean(not r["finished"] for r in responses)}
    scored = [p for p in problems if bounds and mean_reward(p) is not None]
    if scored:
        value_N, figures = list(map(mean_reward, scored)), partial(reward_figures, bounds=bounds)
        result |= figures(value_N) | {"reward_range": bounds}
        result["groups"] = summarise_groups(scored, value_N, figures)
    if "verdict" in responses[0]:
        value_N, figures = [count_right(p) / n for p in problems], partial(accuracy_figures, n=n)
        result |= figures(value_N) | summarise_verdicts(problems, responses, sizes)
        result["groups"] = summarise_groups(problems, value_N, figures)
    return result | {"count": len(problems), "problems": problems}


def summarise_verdicts(problems: list[dict], responses: list[dict], sizes: list[int] | None) -> dict:
    """Summarise the graded responses to problems, for these sizes k, or the powers of 2 up to n, and for n.

    last_number counts a response with a right last number, lenient also one with a right marked answer. pass
    and majority are {k: value}, majority over blocks of k responses.
    """
    n = len(problems[0]["responses"])
    require_sizes(sizes, n)
    sizes = sorted({*(sizes or (2 ** i for i in range(n.bit_length()))), n})
    right_N = list(map(count_right, problems))
    votes_N = [list(map(vote, problem["responses"])) for problem in problems]
    result = {key: mean(r[key] for r in responses) for key in ("lenient", "last_number")}
    result["pass"], result["majority"] = {}, {}
    for k in sizes:
        result["pass"][str(k)] = mean(pass_at(k, right, n) for right in right_N)
        result["majority"][str(k)] = mean(majority_at(k, votes) for votes in votes_N)
    for verdict in ("unparsed", "timed_out"):
        result[verdict] = mean(r["verdict"] == verdict for r in responses)
    return result


def require_sizes(sizes: list[int] | None, n: int) -> None:
    """Raise ConfigError for a k of pass@k that n answers to each problem do not allow."""
    if sizes and not 1 <= min(sizes) <= max(sizes) <= n:
        raise ConfigError(f"--k must hold numbers in 1..{n}, the answers to each problem (eval.n), not "
                          f"{sizes}")


def accuracy_figures(value_N: list[float], n: int) -> dict:
    """Compute the accuracy, the mean over n responses to each problem (avg@n), with its interval."""
    low, high = wilson(value_N, n)
    return {"accuracy": mean(value_N), "low": low, "high": high, "count": len(value_N)}


def reward_figures(value_N: list[float], bounds: tuple[float, float]) -> dict:
    """Compute the mean reward with its interval."""
    low, high = bounded_interval(value_N, *bounds)
    return {"reward": mean(value_N), "reward_low": low, "reward_high": high, "count": len(value_N)}


def summarise_groups(problems: list[dict], value_N: list[float], figures: Callable) -> dict[str, dict]:
    """Compute figures by level and by subject, if the problems have them."""
    groups = {}
    for kind in ("level", "subject"):
        labels = [problem.get(kind) for problem in problems]
        if not any(labels):
            continue
        by_label = {}
        for label, value in zip(labels, value_N, strict=True):
            by_label.setdefault(label or "none", []).append(value)
        groups[kind] = {label: figures(values) for label, values in sorted(by_label.items())}
    return groups


def count_right(problem: dict) -> int:
    return sum(response["verdict"] == "right" for response in problem["responses"])


def mean_reward(problem: dict) -> float | None:
    """Average the rewards of a problem's responses; None where none has one."""
    rewards = [response["reward"] for response in problem["responses"] if response["reward"] is not None]
    return mean(rewards) if rewards else None


# ---- tables

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
