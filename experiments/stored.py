"""Keep what a run measured, and do not train again what is kept: results/NAME.jsonl.gz, some kilobytes a run.

The first line says what ran: the arm, its learning rate, seed and split, every setting, and the commit, day,
machine and seconds. The other lines are those of metrics.jsonl, by the keys in KEPT alone, and an
evaluation's accuracy as `accuracy`. The run folder goes: weights are not kept.
"""

import gzip
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tqdm import tqdm
from training import ROOT, cpu_seconds, train_once

import config
from infra import runfolder
from settings.loader import flatten

RESULTS = Path(__file__).parent / "results"
RECIPE = "grpo_hard.yaml"  # that every arm is a difference from
KEPT = ("step", "rollout/tokens", "rollout/prompts", "rollout/length", "train/tokens", "prune/kept",
        "prune/offered", "reward/mean", "advantage/flat_groups", "critic/explained_variance", "time/rollout",
        "time/reward", "time/score", "time/update", "time/critic", "time/sync", "time/step", "time/eval")
DIGITS = 6  # behind the point


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of an experiment."""

    arm: str
    settings: tuple[str, ...]  # those that make the arm of RECIPE
    rate: str
    seed: int
    family: str = ""           # the arm of the comparison by whose learning rate this one runs
    data: str | None = None    # a file to evaluate on in place of the test problems: the validation split

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


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a run."""

    file: str
    about: dict
    lines: list[dict]


def path_of(run: Run, results: Path) -> Path:
    return results / f"{run.name}.jsonl.gz"


def plain_settings(run: Run) -> dict:
    """List every setting of a run but the folder, as JSON has it."""
    flat = flatten(config.load(RECIPE, run.all_settings))
    return json.loads(json.dumps({key: value for key, value in flat.items() if key != "out"}))


def is_kept(run: Run, results: Path) -> bool:
    """Tell whether a run of the same settings is kept. A setting that came or went since does not count."""
    path = path_of(run, results)
    if not path.is_file():
        return False
    then, now = read(path).about["settings"], plain_settings(run)
    return all(then[key] == now[key] for key in then.keys() & now.keys())


def keep(run: Run, results: Path, bar: tqdm) -> None:
    """Train a run and keep what it measured, unless that is there. One that was cut off starts anew."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread, so that CPU seconds mean the same everywhere
    bar.set_description(run.name)
    bar.update()
    if is_kept(run, results):
        return
    folder = ROOT / "runs" / "measured" / run.name
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    train_once(folder, RECIPE, *run.all_settings)
    about = describe(run, folder) | {"wall_seconds": round(time.monotonic() - began, 1)}
    lines = [kept_of(line) for line in runfolder.read_log(folder / "metrics.jsonl")]
    write([about, *lines], path_of(run, results))
    shutil.rmtree(folder)


def describe(run: Run, folder: Path) -> dict:
    """Say what ran, where and when."""
    ran_on = json.loads((folder / "env.json").read_text())
    diff = [line for line in (ran_on["diff"] or "").splitlines() if line.startswith("diff --git ")]
    changed = " with changes" if any("experiments/results/" not in line for line in diff) else ""
    machine = (f"{os.cpu_count()} {platform.machine()} cores, {ran_on['device']}, "
               f"torch {ran_on['libraries']['torch']}, Python {ran_on['python']}")
    return {"arm": run.arm, "family": run.family, "rate": run.rate, "seed": run.seed, "split": run.split,
            "config": RECIPE, "settings": plain_settings(run), "commit": f"{ran_on['commit']}{changed}",
            "date": date.today().isoformat(), "machine": machine, "cpu_seconds": cpu_seconds(folder)}


def kept_of(line: dict) -> dict:
    """Reduce a line of metrics.jsonl to what is kept of it."""
    kept = {key: line[key] for key in KEPT if key in line}
    for key in line:
        if key.startswith("eval/") and key.endswith("/accuracy"):
            kept["accuracy"] = line[key]
    return {key: round(value, DIGITS) for key, value in kept.items()}


def write(lines: list[dict], path: Path) -> None:
    """Write lines of JSON, compressed: the same bytes for the same lines, and a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(text.encode(), mtime=0))
    os.replace(part, path)


def read(path: Path) -> Record:
    about, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    return Record(path.name, about, lines)


def records(results: Path) -> Iterator[Record]:
    """Read every run that is kept."""
    for path in sorted(results.glob("*-seed*.jsonl.gz")):
        yield read(path)
