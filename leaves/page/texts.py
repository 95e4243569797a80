"""Choose the completions and held-out answers of a page, within a number of bytes.

If a run has too many texts, the page shows every k-th step, the first of the answers that changed between two
evaluations, and the newest pairs of evaluations. Texts may be cut too. The page says what it leaves out.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from infra import runfolder
from infra.figures import mean_reward
from infra.lines import blame_file, read_log

TEXT_LIMITS = (None, 20_000, 4_000, 1_000)  # characters of one text
ROWS = (1000, 200, 50, 20, 8, 3)            # answers that changed, for each pair of evaluations


def count_bytes(value: Any) -> int:
    """Count the bytes that a value takes in the page."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace"))


def shorten_texts(value: Any, limit: int | None) -> Any:
    """Cut all texts inside a value, and say so at their ends."""
    if isinstance(value, dict):
        return {key: shorten_texts(inner, limit) for key, inner in value.items()}
    if isinstance(value, list):
        return [shorten_texts(inner, limit) for inner in value]
    if not isinstance(value, str) or limit is None or len(value) <= limit:
        return value
    return f"{value[:limit]} … ({len(value) - limit:,} more characters in the run folder)"


def choose_completions(samples: list[dict], most: int) -> dict:
    """Choose the steps to show groups of, from lines of samples.jsonl: all, or every k-th and the last.

    {"every": k, "steps": [{"step", "groups": [line]}]}; at most so many bytes, but for one step.
    """
    by_step: dict[int, list[dict]] = {}
    for line in samples:
        by_step.setdefault(line["step"], []).append(line)
    steps = [{"step": step, "groups": groups} for step, groups in sorted(by_step.items())]
    for limit in TEXT_LIMITS:
        cut = [shorten_texts(step, limit) for step in steps]
        sizes = [count_bytes(step) for step in cut]
        fitting = (k for k in range(1, len(steps) + 1) if sum(take_every(sizes, k)) <= most)
        every = next(fitting, len(steps))
        shown = take_every(cut, every)
        if every <= max(1, len(steps) // 20):  # at least 20 steps are shown
            break
    return {"every": every, "steps": shown}


def take_every(items: list, k: int) -> list:
    """Take every k-th item, counted back from the last."""
    return items[::-1][::k][::-1] if k else items


def choose_answers(folder: Path, most: int) -> dict:
    """Choose the held-out answers that changed between two evaluations, of the first and the last one, and of
    each and the one before it.

    {"pairs": [{"set", "from", "to", "better": how many, "worse": how many, "scored", "rows": [...]}],
    "left_out": how many pairs, the oldest}. A row has "id", "question", "gold", and of both evaluations the
    text of the first answer and the score of its answers: the share that was right, or the mean reward where
    the set has no gold answers ("scored": "reward"). At most so many bytes, but for one pair.
    """
    pairs = compare_evaluations(runfolder.evaluations(folder))
    for limit, rows in zip((*TEXT_LIMITS, *TEXT_LIMITS[-1:] * 2), ROWS, strict=True):
        shown = [pair | {"rows": shorten_texts(pair["rows"][:rows], limit)} for pair in pairs]
        if count_bytes(shown) <= most:
            break
    while len(shown) > 1 and count_bytes(shown) > most:
        shown = shown[:len(shown) // 2]
    return {"pairs": shown, "left_out": len(pairs) - len(shown)}


def compare_evaluations(files: dict[int, Path]) -> list[dict]:
    """Compare the first evaluation with the last, and each, the newest first, with the one before it."""
    pairs = []
    first = last = None
    for step, path in files.items():
        with blame_file(path):
            answers = {(line["set"], line["id"]): line for line in read_log(path)}
            if last:
                pairs = compare_pair(*last, step, answers) + pairs
        first, last = first or (step, answers), (step, answers)
    return [*compare_pair(*first, *last), *pairs] if len(files) > 2 else pairs


def compare_pair(before: int, old: dict, after: int, new: dict) -> list[dict]:
    """Compare the evaluations after two steps, set by set. They are {(set, id): line of eval_*.jsonl}."""
    by_set: dict[str, dict] = {}
    for (name, key), line in new.items():
        scored = "right" if "verdict" in line["responses"][0] else "reward"
        pair = by_set.setdefault(name, {"set": name, "from": before, "to": after, "better": 0, "worse": 0,
                                        "scored": scored, "rows": []})
        was, now = (score_of(one) if one else None for one in (old.get((name, key)), line))
        if was is None or now in (None, was):
            continue
        pair["better" if now > was else "worse"] += 1
        if len(pair["rows"]) < ROWS[0]:
            texts = {"before": old[name, key]["responses"][0]["text"], "after": line["responses"][0]["text"]}
            row = {"id": key, "question": line["question"], "gold": line["gold"]} | texts
            scores = {"score_before": was, "score_after": now}
            pair["rows"].append(shorten_texts(row, TEXT_LIMITS[1]) | scores)
    return list(by_set.values())


def score_of(line: dict) -> float | None:
    """Compute the share of right answers to a problem, or without verdicts the mean reward."""
    if "verdict" in line["responses"][0]:
        return mean(response["verdict"] == "right" for response in line["responses"])
    return mean_reward(line)
