"""Sum up a run from the lines of its metrics.jsonl: scores before and after, and seconds by phase.

A score is the accuracy or the mean reward on an evaluation set, under its name there: "eval/gsm8k/accuracy".
"""

import math
import sys
from pathlib import Path

from infra.figures import SCORES, score_text
from infra.lines import is_evaluation, phase_seconds, read_metrics
from leaves.page.advice import advice
from settings.paths import REPOSITORY


def scores_of(lines: list[dict]) -> list[str]:
    """Name the scores that the lines have, set by set."""
    logged = dict.fromkeys(key for line in lines for key in line)
    sets = dict.fromkeys(key.split("/")[1] for key in logged if key.startswith("eval/"))
    return [key for name in sets for kind in SCORES if (key := f"eval/{name}/{kind}") in logged]


def keys_of(score: str) -> list[str]:
    """Name the metrics of a score: its value, and the ends of its interval."""
    place, _, kind = score.rpartition("/")
    return [f"{place}/{key}" for key in (kind, *SCORES[kind])]


def score_cell(line: dict, score: str) -> str:
    """Write a score with its interval; "-" where there is none: no answer has a reward, say."""
    place, _, kind = score.rpartition("/")
    figures = {key: line.get(f"{place}/{key}") for key in (kind, *SCORES[kind])}
    return "-" if None in figures.values() else score_text(figures, kind)


def summary(folder: Path) -> str:
    """Tabulate scores before and after with 95% intervals, and seconds by phase; name the next commands."""
    lines = read_metrics(folder / "metrics.jsonl")
    evals = [line for line in lines if is_evaluation(line)]
    first, last = (evals[0], evals[-1]) if evals else ({}, {})  # data.eval=null
    after = f"after {lines[-1]['step']} steps"
    table = [f"{'held-out':<18} {'before':>22} {after:>24} {'tokens':>16}" if evals else
             f"{after}, without a set to evaluate on (data.eval)"]
    for score in sorted(scores_of([first, last])):
        name, cells = score.split("/")[1], [score_cell(line, score) for line in (first, last)]
        lengths = " -> ".join(f"{line.get(f'eval/{name}/length', math.nan):.1f}" for line in (first, last))
        table.append(f"{name:<18} {cells[0]:>22} {cells[1]:>24} {lengths:>16}")
    phases = "  ".join(f"{phase} {spent:.1f}" for phase, spent in phase_seconds(lines).items())
    python = f"{sys.executable} {REPOSITORY}"
    return "\n".join([*table, "", f"seconds  {phases}", *advice(lines, {}), f"run folder  {folder}",
                      f"next  {python}/eval.py --config {folder}/config.yaml --model {folder}/hf"
                      + ("" if evals else " --data SET"),
                      *(f"      {python}/{name}.py {folder}" for name in ("report", "chat"))])
