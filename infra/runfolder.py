"""Write and read the run folder: the settings of a run, its logs, and how it ended.

    config.yaml  env.json  lock  metrics.jsonl  samples.jsonl  decisions.jsonl  eval_000005.jsonl  state.json
    checkpoints/  hf/  hf_adapter/  custom_reward.py  environment.py  chat_template.jinja (COPIES)

metrics.jsonl is the source of truth: a line per step and a line per evaluation; `step` counts the steps done.
samples.jsonl has groups as text (metrics.sample_lines), decisions.jsonl the prompts and completions of each
step with their probabilities and weights (list_decisions), and eval_000005.jsonl the problems of the
evaluation after step 5 with their responses. state.json says how the run ended; a run under way has none
(`state_of`).
"""

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

import config
from config import Config, ConfigError, Reward
from infra.digests import size_and_hash
from infra.figures import SCORES, score_text
from infra.lines import append, blame_file, flush, read_log, remove, replace, rewrite_log, write_json
from infra.terminal import print_progress
from infra.tokenizer import Tokenizer
from records import Metrics
from settings import leaves
from settings.loader import read_json
from settings.paths import REPOSITORY, user_path

LOGS = ("metrics.jsonl", "samples.jsonl", "decisions.jsonl")
EXPORTS = ("hf", "hf_adapter")
SILENT = 5  # steps without any signal that are warned of, once
SOFT_VALUES = "soft_values.jsonl"  # leaves/soft_value goes on with it
Resume = Literal["never", "always", "auto"]  # auto: if there is a checkpoint to go on from
NO_EFFECT_ON_STEPS = ("eval.", "checkpoint.", "log.")  # settings that no step depends on
# Settings that save memory; they change the last bits of a step only.
MEMORY_SETTINGS = ("pack.capacity", "model.checkpoint_blocks", "model.logp_chunk", "optim.offload",
                   "rollout.slots", "rollout.cache_gib", "rollout.sleep")
# A copy of each, made at the start, lies in the run folder. A module that the reward file or the environment
# imports from its own folder has a copy of the same name.
COPIES = {"reward.custom_file": "custom_reward.py", "environment.file": "environment.py",
          "data.chat_template": "chat_template.jinja"}
Texts = dict[str, str | None]  # of COPIES and of helpers, as they are now; None if not set
LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "math-verify")


# ---- may this run use the folder?

def require_free_folder(cfg: Config, resume: Resume) -> Path:
    """Check, before anything is written, that this run may use its folder. Raises ConfigError."""
    folder = Path(cfg.out)
    stored = folder / "config.yaml"
    for name in ("", "checkpoints", *EXPORTS):
        require_place(folder, name)
    if not stored.is_file():
        if resume == "always":
            raise ConfigError(f"--resume: {stored.absolute()} not found, so there is no run to resume; check "
                              "`out`, or start it without --resume")
        if folder.exists() and any(path.stem not in ("lock", "config.yaml") for path in folder.iterdir()):
            raise ConfigError(f"out={folder} exists and is not a run folder; set `out` to a new folder")
        return folder
    log, saved = folder / "metrics.jsonl", any((folder / "checkpoints").glob("step_*"))
    with blame_file(log):
        logged = any(line["step"] > 0 for line in read_log(log))
    if not logged and not saved:
        if resume == "always":
            raise ConfigError(f"--resume: {folder} has no step done, so there is nothing to go on from; "
                              "start it without --resume")
        return folder  # nothing is lost there
    there = config.load(stored)
    differing, refused = changed_settings(there, cfg), refused_changes(there, cfg)
    if resume != "never" and refused:
        raise ConfigError(f"--resume: {folder} was started with other settings: {', '.join(refused)}; resume "
                          "with the same ones, or start a new run with --set out=... (a constant rate lets "
                          f"steps grow; eval.*, checkpoint.*, log.* and {', '.join(MEMORY_SETTINGS)} may "
                          "change)")
    if resume == "never":
        what = f"another config: {', '.join(differing.values())}" if differing else "this config"
        remedy = "it has no checkpoint, so --resume auto begins it again; or start a new one"
        if refused or saved:
            remedy = "start this one" if refused else "continue it with --resume, or start a new one"
        raise ConfigError(f"out={folder} already holds a run with {what}; {remedy} with --set out=...")
    return folder


def require_place(folder: Path, name: str) -> None:
    """Check that a run can write its folder or, by its name, one inside it, which may be a link to another
    disk. Raises ConfigError."""
    path = folder / name
    place = Path(os.path.realpath(path))
    if name and os.path.lexists(path) and not path.is_dir():
        raise ConfigError(f"{path} is of another kind, or a link to nothing; bring it back, or remove it")
    if name and place.parent != folder.resolve() and (place.parent / "config.yaml").is_file():
        raise ConfigError(f"{path} is a link into another run, {place.parent}; put a copy in its place, or "
                          f"set out={place.parent} to go on with that run")
    above = next(above for above in (place, *place.parents) if above.exists())
    replaced = name in EXPORTS and above == place
    for needed in (above, place.parent) if replaced else (above,):
        if not needed.is_dir() or not os.access(needed, os.W_OK | os.X_OK) or replaced and place.is_mount():
            raise ConfigError(f"out={path} cannot be written, because {needed} is no folder or not writable; "
                              "set `out` to a place that is")


def own_folder(cfg: Config, names: list[str]) -> Config:
    """Let the run of a folder's own config.yaml, one of `names`, go on in that folder, if it has been moved.

    Raises ConfigError for a copy: both folders are there, and it does not say which one is meant.
    """
    own = [path for path in map(user_path, names)
           if path.name.startswith("config") and (path.parent / "env.json").is_file()][-1:]
    if not own or config.load(own).out != cfg.out:  # a later one sets `out`
        return cfg
    here, out = own[0].parent, Path(cfg.out)
    if out.exists():
        if here.samefile(out):
            return cfg
        raise ConfigError(f"{own[0]} lies in the run folder {here}, says out={out}, and both are there, as "
                          f"after a copy; set one: --set out={here}, or --set out={out}")
    return config.replace(cfg, out=str(here))


def changed_settings(there: Config | dict, now: Config | dict) -> dict[str, str]:
    """Name each setting that differs, with both values; not `out`, since a folder can be moved."""
    old, new = config.flatten(there), config.flatten(now)
    named = {}
    for key in dict.fromkeys((*new, *old)):  # kinds of one section have different settings
        before, after = (repr(side[key]) if key in side else "absent" for side in (old, new))
        if before != after and key != "out":
            named[key] = f"{key} ({before[:200]} there, {after[:200]} now)"
    return named


def require_same_settings(step: Path, saved: dict, now: Config) -> None:
    """Raise ConfigError if a checkpoint was made with other settings, though config.yaml may agree with them:
    it can be edited. `saved` is flat; nothing is compared that it lacks, or that is `auto` now."""
    there = {key: value if value == "auto" else saved.get(key, value)
             for key, value in config.flatten(now).items()}
    if refused := refused_changes(there, now):
        raise ConfigError(f"--resume: {step} was made with other settings: {', '.join(refused)}; set them as "
                          "they were there")


def refused_changes(there: Config | dict, now: Config) -> list[str]:
    """Name the changed settings that keep a run from going on: its finished steps depend on them."""
    refused = []
    old, new = config.flatten(there), config.flatten(now)
    for key, change in changed_settings(there, now).items():
        grows = key == "steps" and new[key] > old[key]
        if grows and old.get("optim.schedule") == "cosine":
            refused.append(f"{change}: optim.schedule=cosine has spread its rate over the steps there")
        # A file at another path: its content is compared (`require_same_files`, `require_same_inputs`).
        of_file = key in (*COPIES, "model.lora.path", "teacher.path")
        moved = of_file and None not in (old.get(key), new.get(key))
        if not (grows or moved or key.startswith(NO_EFFECT_ON_STEPS + MEMORY_SETTINGS)):
            refused.append(change)
    return refused


def require_same_files(folder: Path, texts: Texts) -> None:
    """Raise ConfigError if a file of COPIES has changed since the run began."""
    for setting, copy in changed_files(folder, texts).items():
        raise ConfigError(f"--resume: the file of {setting} has changed since the run began; restore it from "
                          f"{copy}, write the new one over that copy to go on with it all the same, or start "
                          "a new run with --set out=...")


def files_of(reward: Reward, tokenizer: Tokenizer) -> Texts:
    """Return the texts of COPIES, as they were read."""
    files = {"reward.custom_file": None}
    if reward.functions:
        from infra.user_files import read_file

        source = read_file(reward.custom_file, "reward.custom_file")
        files = {"reward.custom_file": source.text} | dict(source.helpers)
    return files | tokenizer.own_files


def changed_files(folder: Path, texts: Texts) -> dict[str, Path]:
    """Map each setting with a file that has changed since the run in a folder began to the copy there.

    `texts` holds the present text of each file of COPIES, or None if it is not set.
    """
    copies = {setting: folder / COPIES.get(setting, setting) for setting in texts}
    return {setting: copy for setting, copy in copies.items()
            if texts[setting] != (copy.read_text() if copy.is_file() else None)}


def is_done(cfg: Config, resume: Resume) -> bool:
    """Tell whether a run has finished all its steps and its export. Raises ConfigError."""
    folder = require_free_folder(cfg, resume)
    ended = resume != "never" and state_of(folder)["state"] == "finished" and (folder / "hf").is_dir()
    done = [line["step"] for line in read_log(folder / "metrics.jsonl")]
    return ended and max(done, default=0) == cfg.steps  # config.yaml may have been edited


def is_locked(folder: Path) -> bool:
    """Tell whether a run is in the folder. Nothing is written there."""
    holder = folder / "lock"
    if not holder.is_file():
        return False
    with holder.open() as file:  # opened anew, so that a lock of this process is met too, and stays
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:  # no file can be locked there, and no run has
            return isinstance(error, BlockingIOError)
    return False


def state_of(folder: Path) -> dict:
    """Return {"state": "running", "finished", "stopped", "failed" or "died"}, and a failed run's "error".

    A run that died was killed before it could write its state.
    """
    if is_locked(folder):
        return {"state": "running"}
    lines = read_log(folder / "state.json")
    return {"state": lines[0]["state"], **lines[0]} if lines else {"state": "died"}


def evaluations(folder: Path) -> dict[int, Path]:
    """Map the step of each evaluation to its file of answers, in order."""
    paths = {path.stem.removeprefix("eval_"): path for path in folder.glob("eval_*.jsonl")}
    return dict(sorted((int(step), path) for step, path in paths.items() if step.isdecimal()))


def describe_environment(device: torch.device, diff: str) -> dict:
    """Describe command, code, machine, device and libraries; `diff` is that of the code to its commit."""
    cpu = f"cpu, {torch.get_num_threads()} threads"
    optional = {name: sys.modules[name].__version__ for name in ("vllm", "flash_attn") if name in sys.modules}
    return {
        "argv": sys.argv,
        "commit": run_git("rev-parse", "HEAD"),
        "diff": {"sha256": hashlib.sha256(diff.encode()).hexdigest(),
                 "files": re.findall(r"^diff --git a/(.*) b/", diff, re.MULTILINE)},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "libraries": versions() | optional,
    }


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def run_git(*command: str) -> str | None:
    """Return the output of git in the code's folder; None without git, or if it is no checkout."""
    own = f"--git-dir={REPOSITORY / '.git'}"  # another repository may lie around an installed copy
    try:
        process = subprocess.run(["git", own, *command], cwd=REPOSITORY, capture_output=True, text=True,
                                 errors="replace")
    except FileNotFoundError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None


# ---- writing the files, and progress on the screen

class RunLog:
    """Write the files of the run folder and show how the run goes.

    Rank 0 does it. On other ranks the folder is None, and nothing is written or shown.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.outer: tqdm | None = None
        self.held: FileLock | None = None
        self.watchers: list = []  # of leaves: they have log and finish
        self.first, self.start = 0, perf_counter()  # of the steps that this process does
        self.unlogged: Metrics = {}  # goes into the next line of metrics.jsonl
        self.sizes = dict.fromkeys(LOGS, 0)  # of the logs, as this process has left them
        self.silent = 0  # steps in a row without a group of different rewards

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends, however it ends.

        One process may lock a folder several times, to resume a run that failed in it. Its forks do not hold
        the lock. Raises ConfigError if another run holds it for a second; `state_of` holds it for an instant.
        """
        if not self.folder or self.held:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        holder = self.folder / "lock"
        holder.touch()
        lock = FileLock(holder, timeout=1, is_singleton=True, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(f"out={self.folder} is in use by {holder.read_text()}; wait for its end or "
                              "stop it (workers outlive a torchrun that is killed), or set another `out`"
                              ) from None
        except OSError as error:
            raise ConfigError(f"out={self.folder} lies where files cannot be locked ({error.strerror}); set "
                              "`out` to another file system") from error
        holder.write_text(f"process {os.getpid()} on {platform.node()}")
        self.held = lock

    def unlock(self) -> None:
        """Release the folder."""
        if self.held:
            self.held.release()
            self.held = None

    def create(self, cfg: Config, resume: Resume, device: torch.device, noted: dict, texts: Texts) -> None:
        """Write config.yaml, env.json and the files of COPIES, and begin the logs anew.

        `noted` has "chosen" of choices.list_choices and "inputs", hashes; `texts` is of COPIES. Raises
        ConfigError if another run has used the folder since it was claimed.
        """
        if self.folder is None:
            return
        self.lock()
        stored = require_free_folder(cfg, resume) / "config.yaml"
        self.forget_later(evaluated_after=-1)
        for name in LOGS:
            if os.path.lexists(path := self.folder / name):
                path.unlink()
                self.say(f"{path} begins anew, since no checkpoint was there to go on from")
        env = self.folder / "env.json"
        same = stored.is_file() and stored.read_text() == config.dump(cfg) and env.is_file()
        if not same or read_json(env).get("inputs") != noted["inputs"] or changed_files(self.folder, texts):
            (self.folder / SOFT_VALUES).unlink(missing_ok=True)  # of another run
        replace(stored, config.dump(cfg))  # first: a folder with other files and without it is not a run's
        for setting, text in texts.items():
            copy = self.folder / COPIES.get(setting, setting)
            copy.unlink(missing_ok=True)
            if text is not None:
                copy.parent.mkdir(exist_ok=True)
                copy.write_text(text)
        patch, diff = self.folder / "diff.patch", run_git("diff", "HEAD") or ""
        patch.unlink(missing_ok=True)
        patch.touch(mode=0o600)  # it may hold a secret
        patch.write_text(diff)
        write_json(env, describe_environment(device, diff) | noted)

    def seal(self) -> dict[str, dict]:
        """Flush the logs to the disk, since a checkpoint will count on them; returns {"logs": name -> [bytes,
        sha256]}."""
        for name in self.sizes:
            self.mend(name)
        paths, sealed = [self.folder / name for name in (*LOGS, SOFT_VALUES)], {}
        for path in (*filter(Path.is_file, paths), *evaluations(self.folder).values()):
            flush(path)
            sealed[path.name] = size_and_hash(path)
        return {"logs": sealed}

    def require_logs(self, step: int, sealed: dict[str, list]) -> None:
        """Raise ConfigError unless the logs begin as they were when the checkpoint of a step counted on them
        (`seal`)."""
        for name, (length, digest) in sealed.items() if self.folder else ():
            path = self.folder / name
            if hashlib.sha256(path.read_bytes()[:length] if path.is_file() else b"").hexdigest() != digest:
                raise ConfigError(f"{path} is not as it was when step {step} was saved, with {length} bytes "
                                  "up to there; bring the file back, or write the name of an earlier "
                                  "checkpoint into checkpoints/latest to go on from that one")

    def resume(self, step: int, cfg: Config) -> None:
        """Cut the logs back to the checkpoint's step: the resumed run does the later ones again.

        Say so. If settings differ, print them, write the new config, and keep the old one as
        config_until_STEP.yaml.
        """
        if self.folder is None:
            return
        self.forget_later(evaluated_after=step)
        stored, kept = self.folder / "config.yaml", self.folder / f"config_until_{step:06d}.yaml"
        changed = changed_settings(config.load(stored), cfg)
        self.say(f"going on from step {step}" + f" with {', '.join(changed.values())}" * bool(changed))
        if changed and not kept.exists():  # else no step between the two is left
            shutil.copyfile(stored, kept)
        replace(stored, config.dump(cfg))  # `out` too: the folder may have been moved
        for name in LOGS:
            path = self.folder / name
            with blame_file(path):
                rewrite_log(path, [line for line in read_log(path) if line["step"] <= step])
            self.sizes[name] = path.stat().st_size

    def forget_later(self, evaluated_after: int) -> None:
        """Remove state.json and what was left unfinished, and the evaluations after a step."""
        for leftover in (*self.folder.glob("*.unfinished"), self.folder / "state.json"):
            remove(leftover)
        for step, path in evaluations(self.folder).items():
            if step > evaluated_after:
                remove(path)

    @contextmanager
    def running(self, cfg: Config) -> Iterator[None]:
        """Let leaves watch the run, write down how it ends, and release the folder."""
        try:
            if self.folder:
                leaves.through("watch", cfg, self)
            yield
        except KeyboardInterrupt:  # locked until this process has ended, since a save may be under way
            self.write_ending({"state": "stopped"})
            raise
        except BaseException as error:
            said, *_ = f"{type(error).__name__}: {error}".split("\n")
            with suppress(OSError):  # a full disk may be the error itself
                self.write_ending({"state": "failed", "error": said})
            self.unlock()
            raise
        self.write_ending({"state": "finished"})
        self.unlock()

    def write_ending(self, state: dict) -> None:
        """Write state.json, after all watchers have finished."""
        for watcher in self.watchers:
            watcher.finish(state)
        if self.folder:
            rewrite_log(self.folder / "state.json", [state])

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Yield the remaining steps, and show a progress bar at a terminal."""
        self.outer = tqdm(range(first, last), "training", initial=first, total=last, unit="step",
                          disable=None if self.folder else True)  # None: unless there is a terminal
        self.first, self.start = first, perf_counter()
        yield from self.outer

    def write(self, name: str, line: dict) -> None:
        """Append a line to one of the logs."""
        if self.folder:
            self.mend(name)
            append(self.folder / name, line)
            self.sizes[name] = (self.folder / name).stat().st_size

    def mend(self, name: str) -> None:
        """Say so if a log is not as long as this process has left it, and go on with its whole lines. Raises
        ConfigError for a broken line before the last whole one."""
        path, left = self.folder / name, self.sizes[name]
        size = path.stat().st_size if path.is_file() else -os.path.lexists(path)
        if size != left:
            lines = read_log(path)
            rewrite_log(path, lines)
            self.sizes[name] = path.stat().st_size
            self.say(f"{path} was changed by another program, from {left} bytes to {max(size, 0)}: it goes "
                     f"on with {len(lines)} whole lines, and a report lacks the others")

    def measure(self, step: int, metrics: Metrics) -> None:
        """Append a line to metrics.jsonl, and show it to the watchers."""
        line = {"step": step} | self.unlogged | metrics
        self.write("metrics.jsonl", line)
        for watcher in self.watchers:
            watcher.log(line)
        self.unlogged = {}

    def evaluated(self, step: int, results: dict[str, dict], seconds: float) -> None:
        """Log the scores of every set in one line."""
        keys = "accuracy low high reward reward_low reward_high lenient length truncated unparsed".split()
        metrics = {"time/eval": seconds}
        for name, result in results.items():
            metrics |= {f"eval/{name}/{key}": result[key] for key in keys if key in result}
            if (n := result["n"]) > 1 and "pass" in result:
                metrics |= {f"eval/{name}/{key}": result[key][str(n)] for key in ("pass", "majority")}
        self.measure(step, metrics)
        if self.folder:
            problems = [{"set": name} | p for name, result in results.items() for p in result["problems"]]
            rewrite_log(self.folder / f"eval_{step:06d}.jsonl", problems)
        for name, result in results.items():
            scores = [score_text(result, kind) for kind in SCORES if kind in result] or ["no reward"]
            self.say(f"step {step}: {name} {', '.join(scores)}, {result['length']:.1f} tokens")

    def step(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step, and show some beside the bar, or in a line if there is no terminal."""
        self.measure(step, metrics)
        flat = metrics.get("advantage/flat_groups")  # None if a step rolls nothing out
        if flat is not None:
            self.silent = self.silent + 1 if flat == 1 else 0
        if flat == 1 and self.silent == SILENT:
            self.say(f"step {step}: no group of the last {SILENT} steps has different rewards, and "
                     f"{metrics['rollout/truncated']:.0%} of these completions are truncated: nothing is "
                     "learnt; look at samples.jsonl, allow longer completions or take easier problems")
        names = {"reward": "reward/mean", "length": "rollout/length"}  # absent if a step rolls nothing out
        shown = {name: f"{metrics[key]:.2f}" for name, key in names.items() if key in metrics}
        shown["kept"] = f"{metrics['prune/kept']}/{metrics['prune/offered']}"
        self.outer.set_postfix(shown)
        if self.folder:
            total, seconds = self.outer.total, (perf_counter() - self.start) / (step - self.first)
            values = ", ".join(f"{name} {value}" for name, value in shown.items())
            left = timedelta(seconds=round(seconds * (total - step)))
            print_progress(f"step {step}/{total}: {values}, {metrics['time/step']:.1f} s, {left} left")

    def sampled(self, step: int, lines: list[dict]) -> None:
        """Keep groups of the step, and show one completion of the first now and then."""
        for line in lines:
            self.write("samples.jsonl", {"step": step} | line)
        if lines and (step == 1 or step % max(1, self.outer.total // 5) == 0):
            line, shown = lines[0], lines[0]["completions"][0]
            gold = f", gold {line['gold']}" if line["gold"] else ""
            earned = "none" if shown["reward"] is None else f"{shown['reward']:g}"
            self.say(f"step {step}: {line['id']}{gold}, reward {earned}: {shown['text'][:400]!r}")

    def warn(self, step: int, warning: str) -> None:
        """Print a warning about a step, if there is one."""
        if warning:
            self.say(f"step {step}: {warning}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.folder:
            tqdm.write(text, file=sys.stderr)
