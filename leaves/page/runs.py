"""Read run folders, and put the runs of one config together; choose the completions of a page."""

import json
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from infra import runfolder
from infra.figures import mean_reward
from infra.lines import blame_file, is_evaluation, read_log, read_metrics
from leaves.page.show import as_yaml
from settings.loader import ConfigError, read
from settings.paths import short_names

# kind of cost -> the metric of each step to add up
COSTS = {"steps": "", "generated tokens": "rollout/tokens", "trained tokens": "train/tokens",
         "seconds": "time/step"}
ABSENT = "absent"  # a setting that this kind of a section does not have
UNCOMPARED = ("seed", "out", "log.", "checkpoint.")  # beginnings of settings that make no row of their own

Curve = tuple[np.ndarray, ...]  # x and y of its points; perhaps the ends of intervals of y


@dataclass(frozen=True)
class LoggedRun:
    """A run, as read from its folder."""

    folder: Path
    settings: dict[str, Any]  # of config.yaml, by their dotted names
    state: dict[str, str]     # runfolder.state_of
    lines: list[dict]         # metrics.jsonl

    @cached_property
    def steps(self) -> list[dict]:
        return [line for line in self.lines if not is_evaluation(line)]

    @cached_property
    def evals(self) -> list[dict]:
        return [line for line in self.lines if is_evaluation(line)]

    @cached_property
    def compared(self) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if not key.startswith(UNCOMPARED)}

    @property
    def steps_done(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def finished(self) -> bool:
        return self.state["state"] == "finished"

    def series(self, *keys: str, kind: str = "steps") -> Curve:
        """Return the cost at each value of the first of these metrics, and the values of all of them."""
        points = [[line[key] for key in ("step", *keys)] for line in self.lines
                  if line.get(keys[0]) is not None]
        step_E, *values = np.array(points, dtype=float).reshape(-1, 1 + len(keys)).T
        return self.spent(kind, step_E), *values

    def spent(self, kind: str, until_E: np.ndarray) -> np.ndarray:
        """Add up a cost, one of COSTS or a metric, over the run's steps until each of these steps was done.

        A step without the metric costs nothing. If step 1 trains on 5 tokens and step 2 on 7,
        spent("trained tokens", [0, 1, 2]) is [0, 5, 12].
        """
        if kind == "steps":
            return np.array(until_E, dtype=float)
        done = [0, *(line["step"] for line in self.steps)]
        costs = [0.0, *(line.get(COSTS.get(kind, kind)) or 0 for line in self.steps)]
        return np.cumsum(costs)[np.searchsorted(done, until_E, side="right") - 1]


Groups = dict[str, list[LoggedRun]]  # name of a row -> runs that differ in UNCOMPARED alone


def read_run(folder: Path) -> LoggedRun:
    """Read a run, also one under way. Raises ConfigError for a folder that is no run."""
    path = folder / "config.yaml"
    if not path.is_file():
        hint = f": '{folder}/*'" if any(folder.glob("*/config.yaml")) else ""
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml; give folders that train.py "
                          f"wrote{hint}")
    settings = name_settings(read(path))
    if not isinstance(settings.get("steps"), int):
        raise ConfigError(f"{path}: steps={settings.get('steps')!r} must be a whole number; give folders of "
                          "train.py")
    return LoggedRun(folder, settings, runfolder.state_of(folder), read_metrics(folder / "metrics.jsonl"))


def name_settings(settings: dict, path: str = "") -> dict[str, Any]:
    """Name every setting of a config file by its dotted path."""
    flat = {}
    for key, value in settings.items():
        flat |= name_settings(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def group_runs(runs: list[LoggedRun]) -> Groups:
    """Put runs of one config together, under the name of the first one's folder.

    Raises ConfigError for a folder given twice, and for two finished runs of one config and seed: they are
    one observation.
    """
    groups = {}  # settings -> runs
    for run in runs:
        groups.setdefault(repr(run.compared), []).append(run)
    for group in groups.values():
        known = {run.settings.get("seed") if run.finished else run.folder.resolve() for run in group}
        if len(known) < len(group):
            raise ConfigError(f"of {', '.join(str(run.folder) for run in group)} two have the same config "
                              "and seed; give each run once")
    names = short_names([group[0].folder for group in groups.values()])
    return dict(zip(names, groups.values(), strict=True))


def format_value(value: Any) -> str:
    """Write a value as people type it: 1e-4 and not 0.0001, null and not None."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return format(Decimal(repr(value)), "e")
    return as_yaml(value)


def choose_completions(run: LoggedRun, most: int) -> dict:
    """Choose the steps to show: {"every": k, "steps": [{"step", "groups": [line of samples.jsonl]}]}.

    It takes every k-th step, counted back from the last, for about `most` bytes.
    """
    path, by_step = run.folder / "samples.jsonl", defaultdict(list)
    with blame_file(path):
        for line in read_log(path):
            by_step[line["step"]].append(line | {"mean_reward": mean_reward(line["completions"])})
    steps = [{"step": step, "groups": groups} for step, groups in by_step.items()]
    every = 1 + len(json.dumps(steps)) // most
    return {"every": every, "steps": steps[::-1][::every][::-1]}
