"""Choose the completions and held-out answers that a page shows, within a number of bytes.

Of a run whose texts are too many, every k-th step is on the page, and of too many answers that changed the
first; texts may be cut too. What was left out is told in the page itself.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from infra.runfolder import read

TEXT_LIMITS = (None, 20_000, 4_000, 1_000)  # characters of one text
ROWS = (1000, 200, 50, 20, 8, 3)            # answers that changed, for each pair of evaluations


def size(value: Any) -> int:
    """Count the bytes that a value takes in the page."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def shortened(value: Any, limit: int | None) -> Any:
    """Cut all texts inside a value, and say so at their ends."""
    if isinstance(value, dict):
        return {key: shortened(inner, limit) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner, limit) for inner in value]
    if not isinstance(value, str) or limit is None or len(value) <= limit:
        return value
    return f"{value[:limit]} … ({len(value) - limit:,} more characters in the run folder)"


def completions(folder: Path, most: int) -> dict:
    """Choose the steps of samples.jsonl whose groups are shown: all, or every k-th and the last.

    {"every": k, "steps": [{"step", "groups": lines of samples.jsonl}]}; at most so many bytes.
    """
    by_step: dict[int, list[dict]] = {}
    for line in read(folder / "samples.jsonl"):
        by_step.setdefault(line["step"], []).append(line)
    steps = [{"step": step, "groups": groups} for step, groups in sorted(by_step.items())]
    every, shown = 1, steps
    for limit in TEXT_LIMITS:
        cut = [shortened(step, limit) for step in steps]
        sizes = [size(step) for step in cut]
        fitting = (k for k in range(1, len(steps) + 1) if sum(every_kth(sizes, k)) <= most)
        every = next(fitting, len(steps))
        shown = every_kth(cut, every)
        if every <= max(1, len(steps) // 20):  # as many steps as a reader may want to go through
            break
    return {"every": every, "steps": shown}


def every_kth(items: list, k: int) -> list:
    """Take every k-th item, counted back from the last."""
    return items[::-1][::k][::-1] if k else items


def held_out(folder: Path, most: int) -> dict:
    """Choose the held-out answers that changed between two evaluations.

    {set: [{"from", "to", "better": how many, "worse": how many, "rows": [...]}]} for the first and the last
    evaluation, and for each and the one before it. A row has "id", "question", "gold", and of both
    evaluations the text of the first answer and the share of answers that were right. At most so many bytes.
    """
    paths = sorted(folder.glob("eval_*.jsonl"))
    for limit, rows in zip((*TEXT_LIMITS, *TEXT_LIMITS[-1:] * 2), ROWS, strict=True):
        shown = changes(paths, limit, rows)
        if size(shown) <= most:
            break
    return shown


def changes(paths: list[Path], limit: int | None, rows: int) -> dict:
    """Compare evaluations that follow one another, and the first with the last, in at most so many rows."""
    whole = [(paths[0], paths[-1])] if len(paths) > 2 else []
    by_set: dict[str, list[dict]] = {}
    for before, after in [*whole, *reversed(list(pairwise(paths)))]:
        for name, pair in compared(before, after, limit, rows).items():
            by_set.setdefault(name, []).append(pair)
    return by_set


def compared(before: Path, after: Path, limit: int | None, rows: int) -> dict[str, dict]:
    """Compare two evaluations, set by set."""
    first = {(line["set"], line["id"]): line for line in read(before)}
    by_set: dict[str, dict] = {}
    for line in read(after):
        old = first.get((line["set"], line["id"]))
        pair = by_set.setdefault(line["set"], {"from": step_of(before), "to": step_of(after), "better": 0,
                                               "worse": 0, "rows": []})
        if old is None or share_right(old) == share_right(line):
            continue
        pair["better" if share_right(line) > share_right(old) else "worse"] += 1
        if len(pair["rows"]) < rows:
            texts = {"before": old["responses"][0]["text"], "after": line["responses"][0]["text"]}
            shares = {"right_before": share_right(old), "right_after": share_right(line)}
            row = {key: line[key] for key in ("id", "question", "gold")} | texts | shares
            pair["rows"].append(shortened(row, limit))
    return by_set


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("eval_"))


def share_right(line: dict) -> float:
    verdicts = [response["verdict"] == "right" for response in line["responses"]]
    return sum(verdicts) / len(verdicts)
