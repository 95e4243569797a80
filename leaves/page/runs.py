"""Read run folders, group the runs of one config, and compare them at equal cost.

A figure between two evaluations is interpolated if these lie at most a tenth of the run's steps apart. Up to
half of the steps the two ends are given instead; further apart it is not known. Accuracies are in percent.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infra import runfolder
from infra.lines import is_evaluation, read_log, read_metrics
from leaves.page.show import as_yaml
from leaves.page.summary import Score
from records import frozen
from settings.loader import ConfigError, read

# kind of cost -> the metric of each step to add up; None counts the steps.
COSTS = {"steps": None, "generated tokens": "rollout/tokens", "trained tokens": "train/tokens",
         "seconds": "time/step"}
NEAR, FAR = 0.1, 0.5   # shares of a run's steps
LONGEST_LABEL = 60     # characters; the name of the folder stands for more settings than that
ABSENT = "absent"      # a setting that this kind of a section does not have
UNCOMPARED = ("seed", "out", "log.", "checkpoint.")  # beginnings of settings that make no row of their own


@dataclass(frozen=True)
class LoggedRun:
    """A run, as read from its folder."""

    folder: Path
    seed: int
    total: int                # steps that the config asks for
    settings: dict[str, Any]  # all but UNCOMPARED
    state: dict[str, str]     # runfolder.state_of
    lines: list[dict]         # metrics.jsonl

    @cached_property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if not is_evaluation(line)]

    @cached_property
    def evals(self) -> list[dict]:
        return [line for line in self.lines if is_evaluation(line)]

    @cached_property
    def samples(self) -> list[dict]:
        """Read samples.jsonl. Lines of versions that kept no completions one by one are left out."""
        return [line for line in read_log(self.folder / "samples.jsonl") if "completions" in line]

    @property
    def steps_done(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def finished(self) -> bool:
        return self.state["state"] == "finished"

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that measured a metric, and its values."""
        points = [(line["step"], line[key]) for line in self.lines if line.get(key) is not None]
        return tuple(np.array(points, dtype=float).reshape(-1, 2).T)

    def held_out(self, score: Score) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps of a score's evaluations, and its values."""
        step_E, value_E = self.series(score.keys[0])
        return step_E, np.round(score.scale * value_E, 9)  # 58, not 57.99999999999999, is a level reached

    def intervals(self, score: Score) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the steps of a score's evaluations, and the ends of its intervals."""
        _, low, high = score.keys
        points = [(line["step"], line[low], line[high]) for line in self.evals if score.keys[0] in line]
        step_E, low_E, high_E = np.array(points, dtype=float).reshape(-1, 3).T
        return step_E, score.scale * low_E, score.scale * high_E

    def spent(self, kind: str, until_E: np.ndarray) -> np.ndarray:
        """Add up a cost, one of COSTS, over the run's steps until each of these steps was done.

        A step without the metric costs nothing. If step 1 trains on 5 tokens and step 2 on 7,
        spent("trained tokens", [0, 1, 2]) is [0, 5, 12].
        """
        key = COSTS[kind]
        done, costs = [0], [0.0]
        for line in self.steps:
            done.append(line["step"])
            costs.append(1 if key is None else line.get(key) or 0)
        total = np.cumsum(costs)
        return total[np.searchsorted(done, until_E, side="right") - 1].astype(float)


Groups = dict[str, list[LoggedRun]]  # label -> runs that differ in UNCOMPARED alone


@frozen
class Reading:
    """A figure of a run (low = high), or the two evaluations that it lies between."""

    low: float
    high: float


def read_run(folder: Path) -> LoggedRun:
    """Read a run, also one under way. Raises ConfigError for a folder that is no run."""
    path = folder / "config.yaml"
    if not path.is_file():
        hint = f": '{folder}/*'" if any(folder.glob("*/config.yaml")) else ""
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml; give folders that train.py "
                          f"wrote{hint}")
    settings = name_settings(read(path))
    total = settings.get("steps")
    if not isinstance(total, int):
        raise ConfigError(f"{path}: steps={total!r} must be a whole number; give folders of train.py")
    comparable = {key: value for key, value in settings.items() if not key.startswith(UNCOMPARED)}
    return LoggedRun(folder, settings.get("seed", 0), total, comparable, runfolder.state_of(folder),
                     read_metrics(folder / "metrics.jsonl"))


def name_settings(settings: dict, path: str = "") -> dict[str, Any]:
    """Name every setting of a config file by its dotted path."""
    flat = {}
    for key, value in settings.items():
        flat |= name_settings(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def group_runs(runs: list[LoggedRun]) -> Groups:
    """Put runs of one config together, in the order given, labelled by their different settings.

    Raises ConfigError for a folder given twice, and for two finished runs of one config and seed: they are
    one observation.
    """
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise ConfigError("a run folder is given twice; give each once")
    groups = []
    for run in runs:
        of_config = next((group for group in groups if group[0].settings == run.settings), None)
        groups.append([run]) if of_config is None else of_config.append(run)
    for group in groups:
        seeds = [run.seed for run in group if run.finished]
        if len(set(seeds)) < len(seeds):
            folders = ", ".join(str(run.folder) for run in group)
            raise ConfigError(f"of {folders} two have the same config and seed; give each run once")
    keys = differing_settings([group[0] for group in groups])
    named = {}
    for group in groups:
        named[label_of(group, keys, named)] = group
    return named


def label_of(group: list[LoggedRun], keys: list[str], taken: Iterable[str]) -> str:
    """Name a row by its values of these settings.

    Where they are too many for a label it is the first folder's name without its seed; where that is taken,
    the whole path.
    """
    run = group[0]
    label = ", ".join(f"{key}={format_value(run.settings[key])}" for key in keys if key in run.settings)
    if not label or len(label) > LONGEST_LABEL:
        label = run.folder.resolve().name
        if len(group) > 1:
            label = re.sub(r"[-_]*(seed)?[-_]*\d+$", "", label) or label
    return label if label not in taken else str(run.folder)


def differing_settings(runs: list[LoggedRun]) -> list[str]:
    """Name the settings that differ between runs."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in keys if len({repr(run.settings.get(key, ABSENT)) for run in runs}) > 1]


def format_value(value: Any) -> str:
    """Write a value as people type it: 1e-4 and not 0.0001, null and not None."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return format(Decimal(repr(value)), "e")
    return as_yaml(value)


# ---- at equal cost

def read_between(run: LoggedRun, step_E: np.ndarray, i: int, weight: float,
                 value_E: np.ndarray) -> Reading | None:
    """Read a curve between its evaluations i and i + 1; None if they are too far apart."""
    if weight == 0:
        return Reading(value_E[i], value_E[i])
    gap = (step_E[i + 1] - step_E[i]) / run.total
    if gap > FAR:
        return None
    if gap > NEAR:
        return Reading(*sorted(value_E[i:i + 2]))
    value = value_E[i] + weight * (value_E[i + 1] - value_E[i])
    return Reading(value, value)


def score_at(run: LoggedRun, score: Score, kind: str, budget: float) -> Reading | None:
    """Read a score at a budget of one kind of cost; None if it is not known."""
    step_E, value_E = run.held_out(score)
    spent_E = run.spent(kind, step_E)
    if not len(step_E) or not spent_E[0] <= budget <= spent_E[-1]:
        return None
    i = int(np.searchsorted(spent_E, budget, side="right")) - 1
    weight = 0.0 if i + 1 == len(spent_E) else (budget - spent_E[i]) / (spent_E[i + 1] - spent_E[i])
    return read_between(run, step_E, i, weight, value_E)


def reaches(run: LoggedRun, score: Score, level: float) -> bool:
    """Tell whether a run was at a level at any evaluation."""
    return bool((run.held_out(score)[1] >= level).any())


def cost_to_reach(run: LoggedRun, score: Score, kind: str, level: float) -> Reading | None:
    """Read the cost of a level that the score reaches."""
    step_E, value_E = run.held_out(score)
    spent_E = run.spent(kind, step_E)
    i = int((value_E >= level).argmax())
    if i == 0:
        return Reading(spent_E[0], spent_E[0])
    weight = (level - value_E[i - 1]) / (value_E[i] - value_E[i - 1])
    return read_between(run, step_E, i - 1, weight, spent_E)
