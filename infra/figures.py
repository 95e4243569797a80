"""Summarise the responses of an evaluation in figures, and tabulate them.

Dimension key:  N problems.
"""

from statistics import fmean

from verify.statistics import bounded_interval, majority_at, pass_at, vote, wilson

Results = dict[str, dict]  # the summary of each set
Bounds = tuple[float, float]

SCORES = {"accuracy": ("low", "high"), "reward": ("reward_low", "reward_high")}  # and their 95% intervals
SHARES = ("lenient", "last_number", "pass", "majority", "truncated", "unparsed")  # columns, in percent


def summarise(problems: list[dict], bounds: Bounds | None = None) -> dict:
    """Summarise n responses to each problem: accuracies if they are graded, rewards if `bounds` are given.

    A problem without any reward is left out of the mean reward. length is in tokens; groups holds accuracies,
    or else rewards, by level and by subject.
    """
    n = len(problems[0]["responses"])
    responses = [response for problem in problems for response in problem["responses"]]
    result = {"n": n, "groups": {}, "length": fmean(r["tokens"] for r in responses),
              "truncated": fmean(not r["finished"] for r in responses)}
    scored = [p for p in problems if bounds and mean_reward(p["responses"]) is not None]
    if scored:
        value_N = [mean_reward(p["responses"]) for p in scored]
        result |= summarise_scores(scored, value_N, n, bounds) | {"reward_range": bounds}
    if "verdict" in responses[0]:
        value_N = [count_right(p) / n for p in problems]
        result |= summarise_scores(problems, value_N, n) | summarise_verdicts(problems, responses)
    return result | {"count": len(problems), "problems": problems}


def summarise_scores(problems: list[dict], value_N: list[float], n: int, bounds: Bounds | None = None,
                     ) -> dict:
    """Compute figures of all problems and, as "groups", by level and by subject if the problems have them."""
    groups = {}
    for kind in ("level", "subject"):
        by_label = {}
        for problem, value in zip(problems, value_N, strict=True):
            by_label.setdefault(problem.get(kind) or "none", []).append(value)
        if by_label.keys() != {"none"}:
            groups[kind] = {label: mean_figures(by_label[label], n, bounds) for label in sorted(by_label)}
    return mean_figures(value_N, n, bounds) | {"groups": groups}


def mean_figures(value_N: list[float], n: int, bounds: Bounds | None) -> dict:
    """Compute the mean reward within the bounds, or without them the accuracy over n responses to each
    problem (avg@n), with its interval."""
    kind = "reward" if bounds else "accuracy"
    ends = bounded_interval(value_N, *bounds) if bounds else wilson(value_N, n)
    return {kind: fmean(value_N), "count": len(value_N)} | dict(zip(SCORES[kind], ends, strict=True))


def summarise_verdicts(problems: list[dict], responses: list[dict]) -> dict:
    """Summarise the graded responses to problems, for the sizes k of the powers of 2 up to n, and for n.

    last_number counts a response with a right last number, lenient also one with a right marked answer. pass
    and majority are {k: value}, majority over blocks of k responses.
    """
    n = len(problems[0]["responses"])
    sizes = sorted({*(2 ** i for i in range(n.bit_length())), n})
    right_N = list(map(count_right, problems))
    votes_N = [list(map(vote, problem["responses"])) for problem in problems]
    return {
        **{key: fmean(r[key] for r in responses) for key in ("lenient", "last_number")},
        "pass": {str(k): fmean(pass_at(k, right, n) for right in right_N) for k in sizes},
        "majority": {str(k): fmean(majority_at(k, votes) for votes in votes_N) for k in sizes},
        **{key: fmean(r["verdict"] == key for r in responses) for key in ("unparsed", "timed_out")}}


def count_right(problem: dict) -> int:
    return sum(response["verdict"] == "right" for response in problem["responses"])


def mean_reward(responses: list[dict]) -> float | None:
    """Average the rewards of responses; None where none has one."""
    rewards = [response["reward"] for response in responses if response["reward"] is not None]
    return fmean(rewards) if rewards else None


# ---- tables

def format_score(value: float, kind: str) -> str:
    return f"{value:.1%}" if kind.endswith("accuracy") else f"{value:.3f}"


def score_text(figures: dict, kind: str) -> str:
    """Write the accuracy or the reward of an evaluation with its 95% interval."""
    value, *ends = (format_score(figures[key], kind) for key in (kind, *SCORES[kind]))
    return f"{'reward ' * (kind == 'reward')}{value} [{', '.join(ends)}]"


def align(rows: list[list[str]]) -> list[str]:
    """Write rows of cells as lines, the first column to the left. A column of "-" alone is left out."""
    columns = [column for column in zip(*rows, strict=True) if {*column[1:]} != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in zip(*columns, strict=True)]


def results_table(results: Results) -> str:
    """Tabulate results by set, and below them those by level and subject."""
    rows, below = [["set", "problems", "n", "score, 95% interval", "tokens", *SHARES]], []
    for name, r in results.items():
        n, shares = str(r["n"]), [r.get(key) for key in SHARES]
        shares = [share[n] if isinstance(share, dict) else share for share in shares]
        cells = ["-" if share is None else f"{share:.1%}" for share in shares]
        rows += [[name, str(r["count"]), n, score_text(r, kind), f"{r['length']:.1f}", *cells]
                 for kind in SCORES if kind in r]
        for kind, groups in r["groups"].items():
            scores = [f"{label} {score_text(x, next(kind for kind in SCORES if kind in x))} of {x['count']}"
                      for label, x in groups.items()]
            below.append(f"{name} by {kind}: {', '.join(scores)}")
    return "\n".join([*align(rows), *below])
