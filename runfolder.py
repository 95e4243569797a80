"""The run folder: what was run, what came of it, and the closing table.

    config.yaml  env.json  lock  metrics.jsonl  samples.jsonl  decisions.jsonl  checkpoints/  hf/

metrics.jsonl is the source of truth: a line per step and a line per evaluation, `step` counting the steps done.
decisions.jsonl says what was offered and kept, with which probability and weight (metrics.decisions).
"""

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import torch
from tqdm import tqdm

import config
from config import Config, ConfigError

LOGS = ("metrics.jsonl", "samples.jsonl", "decisions.jsonl")
Resume = Literal["never", "always", "auto"]  # auto: where there is something to go on from
LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "math-verify")


def claim(cfg: Config, resume: Resume) -> Path:
    """Check that this run may use its folder, before anything is written. Raises ConfigError with the remedies."""
    folder = Path(cfg.out)
    stored = folder / "config.yaml"
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"out={folder} cannot be written, because {above} is no folder or not writable; set `out` to "
                          "a place that is")
    if not stored.is_file():
        if resume == "always":
            raise ConfigError(f"--resume: {stored} not found, so there is no run to resume; check `out`, "
                              "or start it without --resume")
        if folder.exists() and (not folder.is_dir() or any(path.name != "lock" for path in folder.iterdir())):
            raise ConfigError(f"out={folder} exists and is not a run folder; set `out` to a new folder")
        return folder
    old, new = config.flatten(config.load(stored)), config.flatten(cfg)
    changed = [key for key in new if old[key] != new[key] and key != "out"]  # a folder may be moved
    differing = ", ".join(f"{key} ({old[key]!r} there, {new[key]!r} now)" for key in changed)
    if resume != "never" and differing:
        raise ConfigError(f"--resume: {folder} was started with other settings: {differing}; "
                          "resume with the same ones, or start a new run with --set out=...")
    if resume == "never" and differing:
        raise ConfigError(f"out={folder} already holds a run with another config: {differing}; "
                          "start this one with --set out=...")
    if resume == "never":
        raise ConfigError(f"out={folder} already holds a run with this config; "
                          "continue it with --resume, or start a new one with --set out=...")
    return folder


class Log:
    """The files of the run folder and what a person sees. Rank 0 writes and shows; on other ranks it does nothing."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.outer: tqdm | None = None
        self.held: TextIO | None = None

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends. Raises ConfigError when one is in it."""
        if self.folder is None or self.held is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.held = (self.folder / "lock").open("a+")
        try:
            fcntl.lockf(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(f"out={self.folder} lies where files cannot be locked ({error.strerror}); set `out` "
                                  "to another file system") from error
            self.held.seek(0)
            raise ConfigError(f"out={self.folder} is in use by {self.held.read()}; wait for its end or stop it "
                              "(workers outlive a torchrun that is killed), or set another `out`") from error
        self.held.truncate(0)
        print(f"process {os.getpid()} on {platform.node()}", end="", file=self.held, flush=True)

    def create(self, cfg: Config, device: torch.device) -> None:
        """Write what is needed to know later what ran: resolved config, command, code, device, libraries."""
        if self.folder is None:
            return
        self.lock()
        for name in LOGS:  # of a run that was restarted before its first checkpoint
            (self.folder / name).unlink(missing_ok=True)
        cpu = f"cpu, {torch.get_num_threads()} threads"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        env = {
            "argv": sys.argv, "commit": git("rev-parse", "HEAD"), "diff": git("diff", "HEAD"),
            "python": platform.python_version(), "machine": platform.platform(), "device": name,
            "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES} | {
                name: sys.modules[name].__version__ for name in ("vllm", "flash_attn") if name in sys.modules},
        }
        (self.folder / "config.yaml").write_text(config.dump(cfg))
        (self.folder / "env.json").write_text(json.dumps(env, indent=1) + "\n")

    def resume(self, step: int) -> None:
        """Forget what was logged after `step`, the checkpoint's: the resumed run does it again."""
        if self.folder is None:
            return
        for name in LOGS:
            rewrite(self.folder / name, [line for line in read(self.folder / name) if line["step"] <= step])

    def steps(self, first: int, last: int) -> Iterator[int]:
        """The steps still to do, behind a bar."""
        self.outer = tqdm(range(first, last), "training", initial=first, total=last, unit="step",
                          disable=self.folder is None)
        yield from self.outer

    def bar(self, name: str) -> str | None:
        """Name of a bar inside the step, or none on a rank that shows nothing."""
        return None if self.folder is None else name

    def write(self, name: str, line: dict) -> None:
        if self.folder is not None:
            with (self.folder / name).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def evaluated(self, step: int, results: dict[str, dict]) -> None:
        """Log the scores of every set in one line."""
        keys = ("accuracy", "low", "high", "lenient", "length", "truncated", "unparsed")
        line: dict = {"step": step}
        for name, result in results.items():
            line |= {f"eval/{name}/{key}": result[key] for key in keys}
            if (n := result["n"]) > 1:
                line |= {f"eval/{name}/{key}": result[key][str(n)] for key in ("pass", "majority")}
        self.write("metrics.jsonl", line)
        for name, result in results.items():
            self.say(f"step {step}: {name} {result['accuracy']:.1%} [{result['low']:.1%}, {result['high']:.1%}], "
                     f"{result['length']:.1f} tokens")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.write("metrics.jsonl", {"step": step} | metrics)
        shown = {name: f"{metrics[key]:.2f}" for name, key in (("reward", "reward/mean"), ("length", "rollout/length"))
                 if key in metrics}  # a step may roll nothing out
        self.outer.set_postfix(shown, kept=f"{metrics['prune/kept']}/{metrics['prune/offered']}")

    def sample(self, step: int, line: dict) -> None:
        """Keep one group of the step, and show one completion of it now and then."""
        self.write("samples.jsonl", {"step": step} | line)
        if line["texts"] and (step == 1 or step % max(1, self.outer.total // 5) == 0):
            self.say(f"step {step}: {line['id']}, gold {line['gold']}, reward {line['reward'][0]:g}: "
                     f"{line['texts'][0][:400]!r}")

    def say(self, text: str) -> None:
        if self.folder is not None:
            tqdm.write(text, file=sys.stderr)


def git(*command: str) -> str | None:
    """Output of git in the code's folder; None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read(path: Path) -> list[dict]:
    """The lines of a log. A last line without its end was torn by a dying process and is left out."""
    whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
    return [json.loads(line) for line in whole.split("\n")] if whole else []


def rewrite(path: Path, lines: list[dict]) -> None:
    """Replace a log at once."""
    fresh = path.with_name(f"{path.name}.unfinished")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fresh.replace(path)


def mended(path: Path) -> list[dict]:
    """The lines of a log that may be written on."""
    lines = read(path)
    rewrite(path, lines)
    return lines


def summary(folder: Path) -> str:
    """Accuracy before and after with 95% intervals, seconds by phase, and where everything lies."""
    lines = read(folder / "metrics.jsonl")
    evals = [line for line in lines if any(key.startswith("eval/") for key in line)]
    first, last = evals[0], evals[-1]
    names = sorted({key.split("/")[1] for key in last if key.startswith("eval/")})
    after = f"after {last['step']} steps"
    table = [f"{'held-out accuracy':<18} {'before':>22} {after:>24} {'tokens':>16}"]
    for name in names:
        keys = ("accuracy", "low", "high", "length")
        pair = [{key: line[f"eval/{name}/{key}"] for key in keys} for line in (first, last)]
        cells = ["{accuracy:.1%} [{low:.1%}, {high:.1%}]".format_map(values) for values in pair]
        lengths = " -> ".join(f"{values['length']:.1f}" for values in pair)
        table.append(f"{name:<18} {cells[0]:>22} {cells[1]:>24} {lengths:>16}")
    steps = [line for line in lines if "time/step" in line]
    phases = list(dict.fromkeys(key for line in steps for key in line if key.startswith("time/")))
    spent = {key[5:]: sum(line.get(key, 0.0) for line in steps) for key in phases}
    table += ["", "seconds  " + "  ".join(f"{name} {s:.1f}" for name, s in spent.items()), f"run folder  {folder}"]
    return "\n".join(table)
