"""Make the training runs of an experiment, each once: an interrupted experiment goes on where it stopped.

An arm is a config and the settings that it changes.
"""

import resource
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import config  # noqa: E402
from infra import runfolder  # noqa: E402

TUNING_SEED = 100  # of the runs that choose a learning rate
VALIDATION = 500   # problems at the end of the toy's training set that they are evaluated on


def train_once(out: Path, name: str, *settings: str, resume: bool = False) -> Path:
    """Train, unless a finished run of the same settings is there. One that was cut off starts anew, or with
    `resume` goes on from its newest checkpoint; then cpu_seconds does not count what came before."""
    settings = (*settings, f"out={out}")
    stored = out / "config.yaml"
    unchanged = stored.is_file() and config.load(stored) == config.load(name, settings)
    if unchanged and (out / "finished").is_file():
        return out
    if not (resume and unchanged):
        shutil.rmtree(out, ignore_errors=True)
    command = ["train.py", "--config", name, *["--resume", "auto"] * resume]
    for setting in settings:
        command += ["--set", setting]
    before = children_seconds()
    run_script(*command)
    (out / "finished").write_text(f"{children_seconds() - before:.1f}")
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


def cpu_seconds(out: Path) -> float:
    """Return the CPU seconds that a run of `train_once` took, its start and evaluations included."""
    return float((out / "finished").read_text())


def accuracies(folder: Path, name: str) -> list[float]:
    """Return the accuracy on a set of each evaluation of a run."""
    lines = runfolder.read_log(folder / "metrics.jsonl")
    return [line[f"eval/{name}/accuracy"] for line in lines if f"eval/{name}/accuracy" in line]


def tune(out: Path, arms: dict[str, list[str]], rates: dict[str, tuple[str, ...]], common: list[str],
         bar: tqdm) -> dict[str, dict[str, float]]:
    """Run every arm at each of its learning rates, on a seed that is not used again; data.limit must leave
    out the problems of the validation. Returns {arm: {rate: mean accuracy over the run's evaluations}}."""
    out.mkdir(parents=True, exist_ok=True)
    validation = out / "validation.jsonl"
    lines = (ROOT / "toy" / "train.jsonl").read_text().splitlines(keepends=True)
    validation.write_text("".join(lines[-VALIDATION:]))
    scores: dict[str, dict[str, float]] = {arm: {} for arm in arms}
    for arm in arms:
        for rate in rates[arm]:
            bar.set_description(f"{arm}, rate {rate}")
            folder = train_once(out / "rates" / f"{arm}-{rate}", *arms[arm], *common, f"optim.lr={rate}",
                                f"seed={TUNING_SEED}", f"data.eval={validation}")
            scores[arm][rate] = mean(accuracies(folder, "validation"))
            bar.update()
    return scores


def on_seeds(out: Path, arms: dict[str, list[str]], best: dict[str, str], seeds: range, common: list[str],
             bar: tqdm) -> dict[str, list[Path]]:
    """Run every arm at its learning rate on every seed, seed by seed, so that a machine that slows down slows
    all arms. Returns the run folders of each arm."""
    folders: dict[str, list[Path]] = {arm: [] for arm in arms}
    for seed in seeds:
        for arm in arms:
            bar.set_description(f"{arm}, seed {seed}")
            folders[arm].append(train_once(out / f"{arm}-seed{seed}", *arms[arm], *common,
                                           f"optim.lr={best[arm]}", f"seed={seed}"))
            bar.update()
    return folders
