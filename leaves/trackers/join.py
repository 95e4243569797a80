"""Send the metrics of a run to Weights & Biases, if `log.to` names it.

metrics.jsonl stays the source of truth: a failure is one line on stderr (wandb may print more when its own
process is gone), and training goes on.
"""

import json
import secrets
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from config import Config, flatten
from infra.lines import blame_file, read_log, write_json
from infra.runfolder import RunLog
from infra.terminal import to_stderr
from settings.loader import in_short

LONGEST_WAIT = 20.0  # seconds that wandb may take to reach its server, and at the end to send the rest


def watch(cfg: Config, log: RunLog) -> RunLog:
    """Begin to send. A resumed run sends all of its metrics again: the last ones may not have arrived."""
    if cfg.log.to:
        tracker = Tracker(cfg, log.folder)
        for line in read_log(log.folder / "metrics.jsonl"):
            tracker.log(line)
        log.watchers.append(tracker)
    return log


class Tracker:
    """A run on Weights & Biases. When it fails, that is told once, and nothing more is sent.

    Metrics carry `step` as a value of their own, for wandb's counter cannot go back: steps that a resumed run
    does again are logged a second time, and of two values of a step the later one counts.
    """

    def __init__(self, cfg: Config, folder: Path):
        self.run = self.attempt(begin, cfg, folder)

    def attempt(self, call: Callable, *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:  # of a package that raises what it likes
            to_stderr(f"wandb gets no more of this run: {in_short(error) or type(error).__name__}; with "
                      "WANDB_MODE=offline a run is recorded in its folder, and `wandb sync` sends it later")
            self.run = None

    def log(self, values: dict) -> None:
        """Send values of one step, `step` among them."""
        if self.run:
            self.attempt(self.run.log, values)

    def finish(self, state: dict) -> None:
        """Send the rest, and tell that the run has ended, and whether it failed."""
        if self.run:
            self.attempt(self.run.finish, int("error" in state))  # its exit status


def begin(cfg: Config, folder: Path) -> Any:
    """Begin a run of wandb, or go on with it."""
    wandb = import_module("wandb")
    wandb.setup(wandb.Settings(silent=True))  # nothing is printed, and no question asked at a terminal
    settings = wandb.Settings(console="off", init_timeout=LONGEST_WAIT, finish_timeout=LONGEST_WAIT,
                              finish_timeout_raises=True)
    run = wandb.init(project=cfg.log.project or "winnow", id=name_run(folder), resume="allow", dir=folder,
                     name=folder.resolve().name, config=flatten(cfg), settings=settings)
    run.define_metric("*", step_metric="step")
    return run


def name_run(folder: Path) -> str:
    """Return the run's name on wandb; a copy of its folder, or one that was moved, has another."""
    path = folder / "env.json"
    with blame_file(path):
        ran_on = {"tracked": secrets.token_hex(4)} | json.loads(path.read_text())
    write_json(path, ran_on)
    return sha256(f"{ran_on['tracked']} {folder.resolve()}".encode()).hexdigest()[:8]
