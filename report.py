"""Run folders -> one page: held-out accuracy against steps, tokens and seconds, and where the time went.

    python report.py RUN_DIR... [--out DIR]      # writes DIR/report.md, DIR/accuracy.png and DIR/seconds.png

Runs whose configs differ in nothing but `seed` and `out` are one row: the mean over them, and its 95%
interval by Student's t. Methods cost differently, so each is read off at the same number of steps, of
generated tokens, of trained tokens and of seconds (evaluation apart): all and half of what the shortest run
there spent. And by what it had spent when it first came nine tenths of the way from the start to an
accuracy that every run reached. Between two evaluations accuracy is interpolated.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np

import config
from config import ConfigError
from infra import runfolder
from infra.signals import exit_status
from page import summary
from verify.statistics import half_width

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

# what is spent -> the metric of a step that adds to it; a step itself counts 1
SPENT = {"steps": None, "generated tokens": "rollout/tokens", "trained tokens": "train/tokens",
         "seconds": "time/step"}
UNIT = {"steps": 1, "generated tokens": 1000, "trained tokens": 1000, "seconds": 1}  # of tables
OUTSIDE = ("step", "start", "eval", "checkpoint")  # phases that are no part of a step's seconds


@dataclass(frozen=True, slots=True)
class LoggedRun:
    folder: Path
    seed: int
    settings: dict                   # all but the seed and the folder
    spent: dict[str, np.ndarray]     # for each of SPENT its sum up to each evaluation
    accuracy: dict[str, np.ndarray]  # in percent, of each evaluation set
    phases: dict[str, float]         # seconds of the whole run

    def at(self, name: str, kind: str, budget: float) -> float:
        """Interpolate the accuracy on a set when so much of a kind was spent."""
        return float(np.interp(budget, self.spent[kind], self.accuracy[name]))

    def to_reach(self, name: str, kind: str, level: float) -> float:
        """Interpolate what was spent of a kind when the accuracy first reached a level that it does reach."""
        curve, spent = self.accuracy[name], self.spent[kind]
        i = int((curve >= level).argmax())
        return float(np.interp(level, curve[i - 1:i + 1], spent[i - 1:i + 1]) if i else spent[0])


Groups = dict[str, list[LoggedRun]]  # label -> runs of one config


# ---- reading runs

def read_run(folder: Path) -> LoggedRun:
    """Read a run. Raises ConfigError for a folder that is no run, or one without two evaluations."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml; "
                          "give folders that train.py wrote")
    lines = runfolder.read(folder / "metrics.jsonl")
    evals = [line for line in lines if summary.is_evaluation(line)]
    if len(evals) < 2:
        raise ConfigError(f"{folder} has {len(evals)} evaluations, and a curve needs two; let the run go on")
    spent = {kind: spent_until(evals, lines, key) for kind, key in SPENT.items()}
    accuracy = {}
    for key in evals[0]:
        if key.endswith("/accuracy"):
            accuracy[key.split("/")[1]] = np.array([100 * line[key] for line in evals])
    phases = summary.phase_seconds(lines)
    phases["other"] = phases["step"] - sum(s for phase, s in phases.items() if phase not in OUTSIDE)
    settings = config.flatten(config.load(folder / "config.yaml"))
    comparable = {key: value for key, value in settings.items() if key not in ("seed", "out")}
    return LoggedRun(folder, settings["seed"], comparable, spent, accuracy, phases)


def spent_until(evals: list[dict], lines: list[dict], key: str | None) -> np.ndarray:
    """Add up what the steps before each evaluation spent. A step without the metric spent nothing."""
    totals = []
    for e in evals:
        steps = [line for line in lines if "time/step" in line and line["step"] <= e["step"]]
        totals.append(sum(1 if key is None else step.get(key, 0) for step in steps))
    return np.array(totals, dtype=float)


def group_runs(runs: list[LoggedRun]) -> Groups:
    """Put runs of one config together, in the order given, under the first one's name without its seed.

    Where that name is taken it is the whole path. Raises ConfigError for two runs of one config and seed, for
    they are one observation.
    """
    groups: list[list[LoggedRun]] = []
    for run in runs:
        run_group = next((group for group in groups if group[0].settings == run.settings), None)
        groups.append([run]) if run_group is None else run_group.append(run)
    named = {}
    for group in groups:
        seeds = {run.seed for run in group}
        if len(seeds) < len(group):
            folders = ", ".join(str(run.folder) for run in group)
            raise ConfigError(f"of {folders} two have the same config and seed; give each run once")
        name = group[0].folder.resolve().name
        if len(group) > 1:
            name = re.sub(r"[-_]*(seed)?[-_]*\d+$", "", name) or name
        named[name if name not in named else str(group[0].folder)] = group
    return named


# ---- tables

def with_interval(values: list[float]) -> str:
    half = half_width(np.array(values))
    return f"{np.mean(values):.1f}" + ("" if np.isnan(half) else f" ± {half:.1f}")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def accuracy_table(groups: Groups, name: str) -> str:
    """Tabulate accuracy in percent: before, at half and all of the least spent of each kind, at the end."""
    runs = sum(groups.values(), [])
    budgets = []
    for kind in SPENT:
        least = min(run.spent[kind][-1] for run in runs)
        budgets += [(kind, 0.5 * least), (kind, least)]
    columns = [f"{budget:,.0f} {kind}" for kind, budget in budgets]
    head = ["accuracy in %", "runs", "before", *columns, "at its end"]
    rows = []
    for label, group in groups.items():
        row = [label, str(len(group)), f"{group[0].accuracy[name][0]:.1f}"]
        for kind, budget in budgets:
            row.append(with_interval([run.at(name, kind, budget) for run in group]))
        row.append(with_interval([run.accuracy[name][-1] for run in group]))
        rows.append(row)
    return markdown(head, rows)


def reach_table(groups: Groups, name: str) -> str:
    """Tabulate what was spent to come to nine tenths of what every run gained."""
    runs = sum(groups.values(), [])
    before = max(run.accuracy[name][0] for run in runs)
    level = before + 0.9 * (min(run.accuracy[name].max() for run in runs) - before)
    head = [f"to reach {level:.1f}%", "steps", "generated, 1000", "trained, 1000", "seconds"]
    rows = []
    for label, group in groups.items():
        row = [label]
        for kind in SPENT:
            row.append(with_interval([run.to_reach(name, kind, level) / UNIT[kind] for run in group]))
        rows.append(row)
    return markdown(head, rows)


def cost_table(groups: Groups) -> str:
    """Tabulate steps, thousands of tokens, and seconds by phase, of a whole run."""
    phases = phases_of(groups)
    seconds = [f"{phase} s" for phase in phases]
    head = ["of a whole run", "steps", "generated, 1000", "trained, 1000", *seconds]
    rows = []
    for label, group in groups.items():
        row = [label, f"{mean(run.spent['steps'][-1] for run in group):.0f}"]
        for kind in ("generated tokens", "trained tokens"):
            row.append(with_interval([run.spent[kind][-1] / UNIT[kind] for run in group]))
        for phase in phases:
            row.append(with_interval([run.phases.get(phase, 0.0) for run in group]))
        rows.append(row)
    return markdown(head, rows)


def phases_of(groups: Groups) -> list[str]:
    """List the phases of all runs, each once."""
    runs = sum(groups.values(), [])
    return list(dict.fromkeys(phase for run in runs for phase in run.phases))


# ---- plots

def plot_accuracy(groups: Groups, names: list[str], path: Path) -> None:
    """Draw a panel per set and kind of spending: the mean over runs, its 95% interval shaded."""
    size = (4.2 * len(SPENT), 3.4 * len(names))
    figure, axes = pyplot.subplots(len(names), len(SPENT), figsize=size, sharey="row", squeeze=False,
                                   layout="constrained")
    for name, row in zip(names, axes, strict=True):
        for kind, axis in zip(SPENT, row, strict=True):
            for label, group in groups.items():
                plot_curve(axis, label, group, name, kind)
            axis.set_xlabel(kind)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 50k
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"{name}, accuracy in %")
    axes[0, -1].legend(loc="lower right")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def plot_curve(axis: Axes, label: str, group: list[LoggedRun], name: str, kind: str) -> None:
    grid = np.linspace(0, min(run.spent[kind][-1] for run in group), 200)
    curves = np.array([np.interp(grid, run.spent[kind], run.accuracy[name]) for run in group])
    middle, half = curves.mean(axis=0), half_width(curves)
    line, = axis.plot(grid, middle, label=label)
    axis.fill_between(grid, middle - half, middle + half, color=line.get_color(), alpha=0.15)


def plot_seconds(groups: Groups, path: Path) -> None:
    """Draw stacked bars: seconds of each phase of a whole run, mean over runs."""
    figure, axis = pyplot.subplots(figsize=(9, 3 + 0.5 * len(groups)), layout="constrained")
    starts = np.zeros(len(groups))
    for phase in phases_of(groups):
        if phase == "step":
            continue
        width = []
        for group in groups.values():
            width.append(mean(run.phases.get(phase, 0.0) for run in group))
        axis.barh(list(groups), width, left=starts, label=phase)
        starts += width
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a whole run")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


# ---- the page

def write_report(folders: list[Path], out: Path) -> str:
    """Write the page and its plots into `out`, and return the page. Raises ConfigError."""
    runs = [read_run(folder) for folder in folders]
    groups = group_runs(runs)
    names = [name for name in runs[0].accuracy if all(name in run.accuracy for run in runs)]
    if not names:
        raise ConfigError("these runs share no evaluation set; give runs with the same data.eval")
    out.mkdir(parents=True, exist_ok=True)
    plot_accuracy(groups, names, out / "accuracy.png")
    plot_seconds(groups, out / "seconds.png")
    page = ["# Runs compared", __doc__.split("\n\n")[2].replace("\n", " ")]
    for name in names:
        page += [f"## {name}", reach_table(groups, name), accuracy_table(groups, name)]
    page += ["![](accuracy.png)", "## Cost", cost_table(groups), "![](seconds.png)"]
    text = "\n\n".join(page) + "\n"
    (out / "report.md").write_text(text)
    return text


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/report"))
    args = parser.parse_args()
    return exit_status(lambda: print(write_report(args.runs, args.out)))


if __name__ == "__main__":
    sys.exit(main())
