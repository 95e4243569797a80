"""Choose the completions and held-out answers of a page, which says what it leaves out."""

import json
from collections import defaultdict
from pathlib import Path

from infra import runfolder
from infra.figures import count_right, mean_reward
from infra.lines import blame_file, read_log
from leaves.page.runs import LoggedRun


def choose(items: list[dict], most: int) -> tuple[list[dict], int]:
    """Take every k-th item, counted back from the last, for about so many bytes; return k too."""
    every = 1 + len(json.dumps(items)) // most
    return items[::-1][::every][::-1], every


def choose_completions(run: LoggedRun, most: int) -> dict:
    """Choose the steps to show: {"every": k, "steps": [{"step", "groups": [line of samples.jsonl]}]}."""
    path, by_step = run.folder / "samples.jsonl", defaultdict(list)
    with blame_file(path):
        for line in read_log(path):
            by_step[line["step"]].append(line | {"mean_reward": mean_reward(line["completions"])})
    steps, every = choose([{"step": step, "groups": groups} for step, groups in by_step.items()], most)
    return {"every": every, "steps": steps}


def choose_answers(run: LoggedRun, most: int) -> dict:
    """Choose the held-out answers that changed from the first evaluation to the last one.

    {"from": step, "to": step, "every": k, "better": count, "worse": count, "pairs": [{"before", "after"}]}
    """
    files = runfolder.evaluations(run.folder)
    first, last = min(files, default=0), max(files, default=0)
    old, new = (scored_answers(files[step]) if files else {} for step in (first, last))
    changed = [{"before": old[key], "after": now} for key, now in new.items()
               if key in old and old[key]["score"] != now["score"]]
    better = sum(pair["after"]["score"] > pair["before"]["score"] for pair in changed)
    pairs, every = choose(changed, most)
    return {"from": first, "to": last, "every": every, "better": better, "worse": len(changed) - better,
            "pairs": pairs}


def scored_answers(path: Path) -> dict[tuple[str, str], dict]:
    """Read an evaluation: (set, id) -> the first answer to a problem, and the score of all answers to it.

    It is the share that was right, or the mean reward if the set has no gold answers.
    """
    answers = {}
    with blame_file(path):
        for line in read_log(path):
            responses = line["responses"]
            graded = "verdict" in responses[0]
            turns = responses[0].get("turns", [responses[0]["text"]])
            score = count_right(line) / len(responses) if graded else mean_reward(responses)
            if score is not None:
                answers[line["set"], line["id"]] = {
                    **{key: line[key] for key in ("set", "id", "question", "gold")},
                    "text": "".join(turns), "graded": graded, "score": score}
    return answers
