"""Sum up a run from the lines of its metrics.jsonl: scores before and after, and seconds by phase."""

import math
import sys
from collections import defaultdict
from pathlib import Path

from infra.lines import is_evaluation, read_metrics
from infra.runfolder import SCORES, score_text
from records import frozen
from settings.paths import REPOSITORY


@frozen
class Score:
    """The measure of an evaluation set, accuracy or reward: a key of runfolder.SCORES.

    People read accuracies in percent: a value is `scale` times what the metrics have.
    """

    name: str  # of the set
    kind: str

    @property
    def keys(self) -> tuple[str, str, str]:
        """Name the metrics: the score, and the ends of its interval."""
        return tuple(f"eval/{self.name}/{key}" for key in (self.kind, *SCORES[self.kind]))

    @property
    def percent(self) -> bool:
        return self.kind == "accuracy"

    @property
    def scale(self) -> int:
        return 100 if self.percent else 1

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the ends of the range that a value must lie in."""
        return (0, 100) if self.percent else (-math.inf, math.inf)

    def text(self, value: float) -> str:
        return f"{value:.1f}" if self.percent else f"{value:.3f}"


def scores_of(lines: list[dict]) -> list[Score]:
    """Name the scores that the lines have, set by set."""
    names = dict.fromkeys(key.split("/")[1] for line in lines for key in line if key.startswith("eval/"))
    scores = [Score(name, kind) for name in names for kind in SCORES]
    return [score for score in scores if any(score.keys[0] in line for line in lines)]


def summary(folder: Path) -> str:
    """Tabulate scores before and after with 95% intervals, and seconds by phase; name the next commands."""
    lines = read_metrics(folder / "metrics.jsonl")
    evals = [line for line in lines if is_evaluation(line)]
    first, last = (evals[0], evals[-1]) if evals else ({}, {})  # data.eval=null
    after = f"after {lines[-1]['step']} steps"
    scores = sorted(scores_of([first, last]), key=lambda score: score.name)
    head = "held-out accuracy" if any(score.percent for score in scores) else "held-out"
    table = [f"{head:<18} {'before':>22} {after:>24} {'tokens':>16}"]
    if not evals:
        table = [f"{after}, without a set to evaluate on (data.eval)"]
    for score in scores:
        name, cells = score.name, [score_cell(line, score) for line in (first, last)]
        lengths = " -> ".join(f"{line.get(f'eval/{name}/length', math.nan):.1f}" for line in (first, last))
        table.append(f"{name:<18} {cells[0]:>22} {cells[1]:>24} {lengths:>16}")
    seconds = phase_seconds(lines)
    phases = "  ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    programs = "" if Path.cwd() == REPOSITORY else f"{REPOSITORY}/"
    return "\n".join([*table, "", f"seconds  {phases}", f"run folder  {folder}",
                      f"next  {python} {programs}eval.py --config {folder}/config.yaml --model {folder}/hf"
                      + ("" if evals else " --data SET"),
                      *(f"      {python} {programs}{name}.py {folder}" for name in ("report", "chat"))])


def score_cell(line: dict, score: Score) -> str:
    """Write a score with its interval; "-" where there is none: no answer has a reward, say."""
    if line.get(score.keys[0]) is None:
        return "-"
    figures = {key.rpartition("/")[2]: line[key] for key in score.keys}
    return "-" if None in figures.values() else score_text(figures, score.kind)


def phase_seconds(lines: list[dict]) -> dict[str, float]:
    """Add up the seconds of each phase over the lines of a metrics log, in the order of the phases there."""
    seconds = defaultdict(float)
    for line in lines:
        for key, value in line.items():
            if key.startswith("time/"):
                seconds[key.removeprefix("time/")] += value or 0.0
    return seconds
