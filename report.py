"""Run folders -> one page: held-out accuracy against steps, tokens and seconds, and where the time went.

    python report.py RUN_DIR... [--out DIR]      # writes DIR/report.md, DIR/accuracy.png and DIR/seconds.png

Runs whose configs differ in nothing but `seed` and `out` are one row: the mean over them, and its 95% interval by
Student's t. Methods cost differently, so each is read off at the same number of steps, of generated tokens, of trained
tokens and of seconds (evaluation apart): all and half of what the shortest run there spent. And by what it had spent
when it first came nine tenths of the way from the start to an accuracy that every run reached. Between two evaluations
accuracy is interpolated.
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
import runfolder
from config import ConfigError

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

# what is spent -> the metric of a step that adds to it; a step itself counts 1
SPENT = {"steps": None, "generated tokens": "rollout/tokens", "trained tokens": "train/tokens", "seconds": "time/step"}
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # for 1 to 10 degrees of freedom


@dataclass(frozen=True, slots=True)
class Run:
    folder: Path
    seed: int
    settings: dict                  # all but the seed and the folder
    spent: dict[str, np.ndarray]    # for each of SPENT its sum up to each evaluation
    accuracy: dict[str, np.ndarray]  # in percent, of each evaluation set
    phases: dict[str, float]        # seconds of the whole run

    def at(self, name: str, kind: str, budget: float) -> float:
        """Accuracy on a set when so much of a kind was spent."""
        return float(np.interp(budget, self.spent[kind], self.accuracy[name]))


    def to_reach(self, name: str, kind: str, level: float) -> float:
        """What was spent of a kind when the accuracy on a set first reached a level that it does reach."""
        curve, spent = self.accuracy[name], self.spent[kind]
        i = int((curve >= level).argmax())
        return float(np.interp(level, curve[i - 1:i + 1], spent[i - 1:i + 1]) if i else spent[0])


def read_run(folder: Path) -> Run:
    """Raises ConfigError for a folder that is no run, or one without two evaluations."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.yaml; give folders that train.py wrote")
    lines = runfolder.read(folder / "metrics.jsonl")
    steps = [line for line in lines if "time/step" in line]
    evals = [line for line in lines if any(key.startswith("eval/") for key in line)]
    if len(evals) < 2:
        raise ConfigError(f"{folder} has {len(evals)} evaluations, and a curve needs two; let the run go on")
    # A step in which a critic alone learns trains the policy on no tokens.
    spent = {kind: np.array([sum(1 if key is None else step.get(key, 0) for step in steps if step["step"] <= e["step"])
                             for e in evals], dtype=float) for kind, key in SPENT.items()}
    names = [key.split("/")[1] for key in evals[0] if key.endswith("/accuracy")]
    phases = dict.fromkeys((key[5:] for step in steps for key in step if key.startswith("time/")), 0.0)
    for name in phases:
        phases[name] = sum(step.get(f"time/{name}", 0.0) for step in steps)
    phases["other"] = phases["step"] - sum(s for name, s in phases.items() if name != "step")
    settings = config.flatten(config.load(folder / "config.yaml"))
    same = {key: value for key, value in settings.items() if key not in ("seed", "out")}
    return Run(folder, settings["seed"], same, spent,
               {name: np.array([100 * e[f"eval/{name}/accuracy"] for e in evals]) for name in names}, phases)


def group_runs(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs of one config together, in the order given, under the first one's name without its seed, or where that is
    taken under its whole path. Raises ConfigError for two runs of one config and seed: they are one observation.
    """
    groups: list[list[Run]] = []
    for run in runs:
        same = next((group for group in groups if group[0].settings == run.settings), None)
        groups.append([run]) if same is None else same.append(run)
    named = {}
    for group in groups:
        seeds = [run.seed for run in group]
        if len(set(seeds)) < len(seeds):
            folders = ", ".join(str(run.folder) for run in group)
            raise ConfigError(f"of {folders} two have the same config and seed; give each run once")
        name = group[0].folder.resolve().name
        name = re.sub(r"[-_]*(seed)?[-_]*\d+$", "", name) or name if len(group) > 1 else name
        named[name if name not in named else str(group[0].folder)] = group
    return named


def half_width(values: np.ndarray) -> np.ndarray:
    """Of the 95% interval of the mean over the first axis; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    return T95[min(len(values) - 1, len(T95)) - 1] * values.std(axis=0, ddof=1) / len(values) ** 0.5


def with_interval(values: list[float]) -> str:
    half = half_width(np.array(values))
    return f"{np.mean(values):.1f}" + ("" if np.isnan(half) else f" ± {half:.1f}")


def accuracy_table(groups: dict[str, list[Run]], name: str) -> str:
    """Markdown: accuracy in percent before training, and at half and all of the smallest amount spent, of each kind."""
    runs = [run for group in groups.values() for run in group]
    least = {kind: min(run.spent[kind][-1] for run in runs) for kind in SPENT}
    budgets = [(kind, share * least[kind]) for kind in SPENT for share in (0.5, 1)]
    head = ["accuracy in %", "runs", "before", *(f"{budget:,.0f} {kind}" for kind, budget in budgets), "at its end"]
    rows = [[label, str(len(group)), f"{group[0].accuracy[name][0]:.1f}",
             *(with_interval([run.at(name, kind, budget) for run in group]) for kind, budget in budgets),
             with_interval([run.accuracy[name][-1] for run in group])] for label, group in groups.items()]
    return markdown(head, rows)


def reach_table(groups: dict[str, list[Run]], name: str) -> str:
    """Markdown: thousands of tokens, steps and seconds to nine tenths of what every run gained."""
    runs = [run for group in groups.values() for run in group]
    before = max(run.accuracy[name][0] for run in runs)
    level = before + 0.9 * (min(run.accuracy[name].max() for run in runs) - before)
    head = [f"to reach {level:.1f}%", "steps", "generated, 1000", "trained, 1000", "seconds"]
    scale = {"steps": 1, "generated tokens": 1000, "trained tokens": 1000, "seconds": 1}
    rows = [[label, *(with_interval([run.to_reach(name, kind, level) / scale[kind] for run in group])
                      for kind in SPENT)] for label, group in groups.items()]
    return markdown(head, rows)


def cost_table(groups: dict[str, list[Run]]) -> str:
    """Markdown: thousands of tokens and seconds by phase of a whole run."""
    phases = list(dict.fromkeys(name for group in groups.values() for run in group for name in run.phases))
    head = ["of a whole run", "steps", "generated, 1000", "trained, 1000", *(f"{name} s" for name in phases)]
    rows = [[label, f"{mean(run.spent['steps'][-1] for run in group):.0f}",
             *(with_interval([run.spent[kind][-1] / 1000 for run in group])
               for kind in ("generated tokens", "trained tokens")),
             *(with_interval([run.phases.get(name, 0.0) for run in group]) for name in phases)]
            for label, group in groups.items()]
    return markdown(head, rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def plot_accuracy(groups: dict[str, list[Run]], names: list[str], path: Path) -> None:
    """A panel per set and kind of spending: the mean over runs, its 95% interval shaded."""
    figure, axes = pyplot.subplots(len(names), len(SPENT), figsize=(4.2 * len(SPENT), 3.4 * len(names)), sharey="row",
                                   squeeze=False, layout="constrained")
    for name, row in zip(names, axes, strict=True):
        for kind, axis in zip(SPENT, row, strict=True):
            for label, group in groups.items():
                grid = np.linspace(0, min(run.spent[kind][-1] for run in group), 200)
                curves = np.array([[run.at(name, kind, x) for x in grid] for run in group])
                line, = axis.plot(grid, curves.mean(axis=0), label=label)
                low, high = (curves.mean(axis=0) + sign * half_width(curves) for sign in (-1, 1))
                axis.fill_between(grid, low, high, color=line.get_color(), alpha=0.15)
            axis.set_xlabel(kind)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 50k
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"{name}, accuracy in %")
    axes[0, -1].legend(loc="lower right")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def plot_seconds(groups: dict[str, list[Run]], path: Path) -> None:
    """Stacked bars: seconds of each phase of a whole run, mean over runs."""
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.5 * len(groups)), layout="constrained")
    left = np.zeros(len(groups))
    for phase in dict.fromkeys(name for group in groups.values() for run in group for name in run.phases):
        if phase != "step":
            width = np.array([mean(run.phases.get(phase, 0.0) for run in group) for group in groups.values()])
            axis.barh(list(groups), width, left=left, label=phase)
            left += width
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a whole run, evaluation apart")
    axis.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def report(folders: list[Path], out: Path) -> str:
    """Write the page and its plots into `out`, and return the page. Raises ConfigError."""
    runs = [read_run(folder) for folder in folders]
    groups = group_runs(runs)
    names = [name for name in runs[0].accuracy if all(name in run.accuracy for run in runs)]
    if not names:
        raise ConfigError("these runs share no evaluation set; give runs with the same data.eval")
    out.mkdir(parents=True, exist_ok=True)
    plot_accuracy(groups, names, out / "accuracy.png")
    plot_seconds(groups, out / "seconds.png")
    tables = [f"## {name}\n\n{reach_table(groups, name)}\n\n{accuracy_table(groups, name)}" for name in names]
    page = "\n\n".join(["# Runs compared", __doc__.split("\n\n")[2].replace("\n", " "), *tables, "![](accuracy.png)",
                        "## Cost", cost_table(groups), "![](seconds.png)"]) + "\n"
    (out / "report.md").write_text(page)
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/report"))
    args = parser.parse_args()
    try:
        print(report(args.runs, args.out))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
