"""Show a run on the trackers of `log.to`, each imported only if it is asked for.

metrics.jsonl stays the source of truth: a tracker's failure is one line on stderr (wandb may print more when
its own process is gone), and training goes on.
"""

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import Config, flatten

LONGEST_WAIT = 20.0  # seconds that wandb may take to reach its server, and at the end to send the rest


class Wandb:
    """A run on Weights & Biases.

    Metrics carry `step` as a value of their own, for wandb's counter cannot go back: steps that a resumed run
    does again are logged a second time, and of two values of a step the later one counts.
    """

    package = "wandb"
    advice = "with WANDB_MODE=offline a run is recorded in its folder, and `wandb sync` sends it later"

    def __init__(self, cfg: Config, folder: Path, run_id: str):
        wandb = importlib.import_module(self.package)
        wandb.setup(wandb.Settings(silent=True))  # nothing is printed, and no question asked at a terminal
        settings = wandb.Settings(console="off", init_timeout=LONGEST_WAIT, finish_timeout=LONGEST_WAIT,
                                  finish_timeout_raises=True)
        self.run = wandb.init(project=cfg.log.project or "winnow", id=run_id, resume="allow", dir=folder,
                              name=folder.resolve().name, config=flatten(cfg), settings=settings)
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict) -> None:
        self.run.log(values)

    def finish(self, state: dict) -> None:
        self.run.finish(exit_code=int("error" in state))


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    package, advice = "torch.utils.tensorboard", "metrics.jsonl has all"

    def __init__(self, cfg: Config, folder: Path, run_id: str):
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # all that it had is sent again
        self.writer = importlib.import_module(self.package).SummaryWriter(folder / "tensorboard")

    def log(self, values: dict) -> None:
        for key, value in values.items():
            if isinstance(value, int | float) and key != "step":
                self.writer.add_scalar(key, value, values["step"])

    def finish(self, state: dict) -> None:
        self.writer.close()


SINKS = {"wandb": Wandb, "tensorboard": TensorBoard}  # log.to -> where metrics go too


class Tracker:
    """One of SINKS. When it fails, that is told once, nothing more is sent to it, and training goes on."""

    def __init__(self, name: str, cfg: Config, folder: Path, run_id: str):
        self.name = name
        self.sink = self.attempt(SINKS[name], cfg, folder, run_id)

    def attempt(self, call: Callable, *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:  # of packages that raise what they like
            first = str(error).partition("\n")[0] or type(error).__name__
            print(f"{self.name} gets no more of this run: {first}; {SINKS[self.name].advice}",
                  file=sys.stderr, flush=True)
            self.sink = None

    def log(self, values: dict) -> None:
        """Send values of one step, `step` among them."""
        if self.sink:
            self.attempt(self.sink.log, values)

    def finish(self, state: dict) -> None:
        """Send the rest, and tell that the run has ended, and whether it failed."""
        if self.sink:
            self.attempt(self.sink.finish, state)
