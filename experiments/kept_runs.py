"""Make training runs, each once, keep what they measured in one file, and compare them at equal cost.

An experiment's results are lines of JSON, compressed: results.jsonl.xz. A line is a run: its name, what ran
(arm, learning rate, seed, split, every setting, commit, day, machine, seconds), and the lines of its
metrics.jsonl by the keys in KEPT. A new run is a new stream behind the others; of two lines of one name the
last one counts. Run folders go: weights are not kept.

Dimension key:  E evaluations of a run,  P runs in pairs.
"""

import json
import lzma
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from filelock import FileLock
from scipy.stats import t as student
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "bench"))  # behind the root: one of its files has a name of ours

from common import listed, parser, print_json  # noqa: E402, F401

import config  # noqa: E402
from infra import runfolder  # noqa: E402
from infra.lines import is_evaluation  # noqa: E402
from infra.signals import exit_status  # noqa: E402
from leaves.page.runs import COSTS, LoggedRun  # noqa: E402
from leaves.page.tables import LEAST_EVALUATIONS, evaluations_within  # noqa: E402
from settings.loader import flatten  # noqa: E402

RESULTS = Path(__file__).parent / "results.jsonl.xz"
RECIPE = "grpo_hard.yaml"  # that arms are differences from unless they name another one
KEPT = ("step", "rollout/tokens", "rollout/prompts", "rollout/length", "train/tokens", "train/grad_norm",
        "prune/kept", "prune/offered", "prune/error", "reward/mean", "advantage/flat_groups", "age/mean",
        "critic/explained_variance", "age/old_tokens", "mismatch/ess", "teacher/tokens", "teacher/share",
        "teacher/kl", *(f"time/{phase}" for phase in (
            "rollout", "reward", "score", "update", "critic", "sync", "step", "eval")))
DIGITS = 6   # behind the point
LAST = 0.75  # the end of a curve is what lies behind this share of a budget


def experiment_status(experiment: Callable[[], None]) -> int:
    """Run an experiment and return its exit status; SIGTERM ends a run under way as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_status(experiment, lambda: "the same command goes on from there")


# ---- training

def train_once(out: Path, name: str, *settings: str, resume: bool = False, method: str = "") -> Path:
    """Train, unless a finished run of the same settings is there. One that was cut off starts anew, or with
    `resume` goes on from its newest checkpoint. `method` is a file that try_method.py plugs in, and must be
    plugged in here. Raises ConfigError for a run of other
    settings that is finished or could be resumed, and RuntimeError with what a run that failed has said."""
    settings = (*settings, f"out={out}")
    stored = out / "config.yaml"
    unchanged = stored.is_file() and config.load(stored) == config.load(name, settings)
    finished = (out / "finished").is_file()
    if unchanged and finished:
        return out
    if stored.is_file() and not unchanged and (finished or resume):
        raise config.ConfigError(f"{out} is a run of other settings: move it, or choose another folder")
    if not (resume and unchanged):
        shutil.rmtree(out, ignore_errors=True)
    script = ["experiments/try_method.py", method] if method else ["train.py"]
    changes = (word for setting in settings for word in ("--set", setting))
    run_script(*script, "--config", name, *["--resume", "auto"] * resume, *changes)
    (out / "finished").touch()
    return out


def run_script(*command: str) -> str:
    """Run a script of this repository, and return what it printed; RuntimeError has its errors."""
    process = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr}")
    return process.stdout


def children_seconds() -> float:
    """Return the CPU seconds that ended child processes have used, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- keeping

@dataclass(frozen=True, slots=True)
class Run:
    """One training run of a comparison."""

    arm: str
    settings: tuple[str, ...]  # those that make the arm of `recipe`
    rate: str
    seed: int
    family: str = ""           # the arm by whose learning rate this one runs
    data: str | None = None    # a file to evaluate on in place of the test problems: the validation split
    recipe: str = RECIPE
    method: str = ""           # the file that brings the method, if it is none of the product's
    again: tuple[int, int] | None = None  # its first steps to run again, and those between two evaluations

    @property
    def split(self) -> str:
        return "validation" if self.data else "test"

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.rate}-{self.split}-seed{self.seed}"

    @property
    def all_settings(self) -> tuple[str, ...]:
        of_run = ["checkpoint.every=0", f"optim.lr={self.rate}", f"seed={self.seed}"]
        return (*self.settings, *of_run, *([f"data.eval={self.data}"] if self.data else []))

    def plain_settings(self) -> dict:
        """List every setting but the folder, as JSON has it."""
        flat = flatten(config.load(self.recipe, self.all_settings))
        return json.loads(json.dumps({key: value for key, value in flat.items() if key != "out"}))


@dataclass(frozen=True, slots=True, eq=False)  # hashed as an object: its curve is computed once
class Record:
    """What is kept of a run."""

    about: dict
    lines: list[dict]


def read(results: Path) -> dict[str, Record]:
    """Read all that is kept, by the names of runs."""
    return parsed(results, results.stat().st_size) if results.is_file() else {}


@lru_cache(maxsize=1)
def parsed(results: Path, size: int) -> dict[str, Record]:
    """Parse the file. It only grows, so that its size tells whether it has changed."""
    records = {}
    with lzma.open(results, "rt") as lines:
        for line in lines:
            kept = json.loads(line)
            records[kept["name"]] = Record(kept["about"], kept["lines"])
    return records


def append(name: str, record: Record, results: Path) -> None:
    """Write a record behind the others: the file is whole at any time, also with a second process at work."""
    line = json.dumps({"name": name, "about": record.about, "lines": record.lines}, separators=(",", ":"))
    part = results.with_suffix(".part")
    with FileLock(results.with_suffix(".lock")):
        before = results.read_bytes() if results.is_file() else b""
        part.write_bytes(before + lzma.compress(f"{line}\n".encode()))
        os.replace(part, results)


def is_kept(run: Run, results: Path) -> bool:
    """Tell whether a run of the same settings is kept. A setting that came or went since does not count."""
    record = read(results).get(run.name)
    if record is None:
        return False
    then, now = record.about["settings"], run.plain_settings()
    return all(then[key] == now[key] for key in then.keys() & now.keys())


def keep(run: Run, results: Path, bar: tqdm) -> None:
    """Train a run and keep what it measured, unless that is there. One that was cut off starts anew. If a
    loss or gradient is not finite, a run on the validation split is kept too, with `finite` false."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread, so that CPU seconds mean the same everywhere
    bar.set_description(run.name)
    if not is_kept(run, results):
        make(run, results)
    if run.again:
        evaluate_again(run, results)
    bar.update()


def keep_all(runs: list[Run], results: Path) -> None:
    with tqdm(total=len(runs), unit="run") as bar:
        for run in runs:
            keep(run, results, bar)


def free_folder(run: Run) -> Path:
    folder = ROOT / "runs" / "measured" / run.name
    if runfolder.state_of(folder)["state"] == "running":
        sys.exit(f"{folder} is a run of another process; the same command goes on when it has ended")
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def make(run: Run, results: Path) -> None:
    folder = free_folder(run)
    began, before, finite = time.monotonic(), children_seconds(), {}
    try:
        train_once(folder, run.recipe, *run.all_settings, method=run.method)
    except RuntimeError:
        if run.split == "test" or not list(folder.glob("not_finite_step_*.pt")):
            raise
        finite = {"finite": False}
    about = describe(run, folder) | finite
    about["cpu_seconds"] = round(children_seconds() - before, 1)
    about["wall_seconds"] = round(time.monotonic() - began, 1)
    lines = [kept_of(line) for line in runfolder.read_log(folder / "metrics.jsonl")]
    append(run.name, Record(about, lines), results)
    shutil.rmtree(folder)


def evaluate_again(run: Run, results: Path) -> None:
    """Run the first steps of a kept run again with more evaluations, and keep these beside its own.

    Raises RuntimeError if the steps do not come out as they are kept.
    """
    record, (steps, every) = read(results)[run.name], run.again
    evaluated = {line["step"] for line in record.lines if is_evaluation(line)}
    missing = {*range(every, steps + 1, every)} - evaluated
    if not missing:
        return
    folder = free_folder(run)
    again = (f"steps={steps}", f"eval.every={every}")
    train_once(folder, run.recipe, *run.all_settings, *again, method=run.method)
    lines = [kept_of(line) for line in runfolder.read_log(folder / "metrics.jsonl")]
    kept = {(line["step"], is_evaluation(line)): line for line in record.lines}
    for line in lines:
        before = kept.setdefault((line["step"], is_evaluation(line)), line)
        for key in before.keys() & line.keys():
            if not key.startswith("time/") and before[key] != line[key]:
                raise RuntimeError(f"{run.name} comes out otherwise than it is kept: step {line['step']} has "
                                   f"{key}={line[key]}, and had {before[key]}; run all of it again")
    ran = describe(run, folder)
    later = {key: ran[key] for key in ("commit", "date", "machine")} | {"steps": sorted(missing)}
    about = record.about | {"evaluated_again": later}
    append(run.name, Record(about, [kept[place] for place in sorted(kept)]), results)
    shutil.rmtree(folder)


def describe(run: Run, folder: Path) -> dict:
    """Say what ran, where and when."""
    ran_on = json.loads((folder / "env.json").read_text())
    changed = any(not file.endswith(".jsonl.xz") for file in ran_on["diff"]["files"])
    commit = ran_on["commit"] + " with changes" * changed
    machine = (f"{os.cpu_count()} {platform.machine()} cores, {ran_on['device']}, "
               f"torch {ran_on['libraries']['torch']}, Python {ran_on['python']}")
    return {"arm": run.arm, "family": run.family, "rate": run.rate, "seed": run.seed, "split": run.split,
            "config": Path(run.recipe).name, "settings": run.plain_settings(), "commit": commit,
            "date": date.today().isoformat(), "machine": machine}


def kept_of(line: dict) -> dict:
    """Reduce a line of metrics.jsonl to what is kept of it."""
    return {key: round(value, DIGITS) for key, value in line.items()
            if key in KEPT or key.startswith("eval/") and key.endswith("/accuracy")}


# ---- curves at equal cost

@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out accuracy in percent at each evaluation, and what was spent of each cost until then."""

    spent: dict[str, np.ndarray]
    accuracy_E: np.ndarray


def cpu_share(record: Record) -> float:
    """Return CPU seconds over wall seconds, of a whole run."""
    return record.about["cpu_seconds"] / record.about["wall_seconds"]


@cache
def curve(record: Record) -> Curve:
    """Read a run's curve. Seconds are those of its steps on the wall, times the share of CPU seconds."""
    run = LoggedRun(RESULTS, record.about["settings"], {}, record.lines)
    step_E = [line["step"] for line in run.evals]
    spent = {cost: run.spent(cost, step_E) for cost in COSTS}
    spent["seconds"] = spent["seconds"] * cpu_share(record)
    spent["teacher tokens"] = run.spent("teacher/tokens", step_E)  # 0 without a teacher
    spent["all tokens"] = sum(spent[f"{kind} tokens"] for kind in ("generated", "trained", "teacher"))
    accuracies = [value for line in run.evals for key, value in line.items() if key.startswith("eval/")]
    return Curve(spent, 100 * np.array(accuracies))


def area(x_E: np.ndarray, y_E: np.ndarray, low: float, high: float) -> float:
    """Average a curve of straight lines between two places.

    area([0, 2], [10, 30], 0, 1) = 15, the mean of 10 and 20.
    """
    x = np.array([low, *x_E[(x_E > low) & (x_E < high)], high])
    return float(np.trapezoid(np.interp(x, x_E, y_E), x) / (high - low))


def evaluations(curves: Iterable[Curve], cost: str, budget: float) -> int:
    """Count the evaluations within a budget of the curve that has the fewest."""
    return min(evaluations_within(of.spent[cost], budget) for of in curves)


def area_of(of: Curve, cost: str, budget: float, begin: float = 0.0) -> float:
    """Average a curve from a share `begin` of a budget up to all of it.

    Raises ValueError for a curve with fewer than LEAST_EVALUATIONS within the budget: what lies between two
    evaluations is a straight line that nobody has measured.
    """
    count = evaluations([of], cost, budget)
    if count < LEAST_EVALUATIONS:
        raise ValueError(f"{count} evaluations within {budget:,.0f} {cost}; a comparison needs "
                         f"{LEAST_EVALUATIONS}: run it again with a smaller eval.every")
    return area(of.spent[cost], of.accuracy_E, begin * budget, budget)


def least(curves: list[Curve], cost: str) -> float:
    """Find the most that every one of these runs has spent."""
    return min(float(of.spent[cost][-1]) for of in curves)


# ---- differences, and how sure they are

@dataclass(frozen=True, slots=True)
class Difference:
    """A mean of paired differences with its interval, and the chance of one as large by chance alone."""

    mean: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def difference(these_P: list[float], those_P: list[float], comparisons: int) -> Difference:
    """Compare two or more pairs; the interval is Student's at 1 - 0.05 / comparisons."""
    gap_P = np.array(these_P) - np.array(those_P)
    error, df = gap_P.std(ddof=1) / len(gap_P) ** 0.5, len(gap_P) - 1
    middle = float(gap_P.mean())
    half = float(student.isf(0.025 / comparisons, df) * error)
    p_value = float(2 * student.sf(abs(middle) / max(error, 1e-12), df))
    return Difference(middle, middle - half, middle + half, p_value)


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference of two arms' areas, and how many evaluations of each it rests on."""

    evaluations: tuple[int, int]    # within the budget
    difference: Difference | None   # None: an arm has fewer than LEAST_EVALUATIONS

    @property
    def counts(self) -> str:
        return " and ".join(map(str, self.evaluations))

    def __str__(self) -> str:
        return f"{self.difference or '-'}, {self.counts}"


def area_gap(these: dict[int, Record], those: dict[int, Record], cost: str, comparisons: int) -> Gap:
    """Compare the areas of two arms' runs at a cost, paired by seed, up to what all of them have spent."""
    seeds = sorted(these.keys() & those.keys())
    curves = [[curve(by_seed[seed]) for seed in seeds] for by_seed in (these, those)]
    budget = least([*curves[0], *curves[1]], cost)
    counts = tuple(evaluations(runs, cost, budget) for runs in curves)
    if min(counts) < LEAST_EVALUATIONS:
        return Gap(counts, None)
    areas = [[area_of(of, cost, budget) for of in runs] for runs in curves]
    return Gap(counts, difference(*areas, comparisons))


def judge(of: Difference | None, bound: float = 0.0) -> str:
    """Say whether an interval lies above a bound; None is a difference that nobody has measured."""
    if of is None:
        return "not measured"
    return "holds" if of.low > bound else "does not" if of.high < bound else "cannot tell"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Write a table as markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def holm(p_values: list[float]) -> list[float]:
    """Correct p-values of one family by Holm's step-down method."""
    order = np.argsort(p_values, kind="stable")
    steps = np.take(p_values, order) * np.arange(len(order), 0, -1)
    return np.maximum.accumulate(steps).clip(max=1)[order.argsort()].tolist()
