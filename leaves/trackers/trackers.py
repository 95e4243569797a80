"""Show a run on the trackers of `log.to`, each imported only if it is asked for.

metrics.jsonl stays the source of truth: a tracker's failure is one line on stderr (wandb may print more when
its own process is gone), and training goes on.
"""

import importlib
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from config import Config, dump, flatten

LONGEST_WAIT = 20.0  # seconds that wandb may take to reach its server, and at the end to send the rest
COLUMNS = ("text", "tokens", "finished", "reward", "advantage", "kept", "trained", "size", "prob", "weight")
Warn = Callable[[Exception], None]


class Wandb:
    """A run on Weights & Biases, recorded on disk if the server cannot be reached.

    Metrics carry `step` as a value of their own, for wandb's counter cannot go back: steps that a resumed run
    does again are logged a second time, and of two values of a step the later one counts.
    """

    package = "wandb"
    kept = ("its record of the run stays in {}/wandb, and `wandb sync` sends it later, after `wandb login` "
            "where that is missing")

    def __init__(self, cfg: Config, folder: Path, run_id: str, warn: Warn):
        self.wandb = importlib.import_module(self.package)
        settings = self.wandb.Settings(console="off", init_timeout=LONGEST_WAIT, finish_timeout=LONGEST_WAIT,
                                       finish_timeout_raises=True)
        init = partial(
            self.wandb.init,
            project=cfg.log.project or "winnow",
            id=run_id,
            resume="allow",
            dir=folder,
            name=folder.resolve().name,
            config=flatten(cfg),
            settings=settings)
        try:
            self.run = self.begin(init)
        except Exception as error:
            self.wandb.teardown()  # else the id is in use
            self.run = self.begin(partial(init, mode="offline"))
            warn(error)

    def begin(self, init: Callable) -> Any:
        """Begin a wandb.Run. Nothing is printed, and so no question asked at a terminal."""
        self.wandb.setup(self.wandb.Settings(silent=True))
        run = init()
        run.define_metric("*", step_metric="step")
        return run

    def log(self, values: dict) -> None:
        self.run.log(values)

    def samples(self, step: int, names: list[str], rows: list[list]) -> None:
        self.run.log({"step": step, "completions": self.wandb.Table(columns=names, data=rows)})

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    package, kept = "torch.utils.tensorboard", "metrics.jsonl has all"

    def __init__(self, cfg: Config, folder: Path, run_id: str, warn: Warn):
        writer = importlib.import_module(self.package).SummaryWriter
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # all that it had is sent again
        self.writer = writer(folder / "tensorboard")
        self.writer.add_text("config", f"```\n{dump(cfg)}```")

    def log(self, values: dict) -> None:
        for key, value in values.items():
            if isinstance(value, int | float) and key != "step":
                self.writer.add_scalar(key, value, values["step"])

    def samples(self, step: int, names: list[str], rows: list[list]) -> None:
        for n, row in enumerate(rows):
            told = (f"{name}: {value}" for name, value in zip(names, row, strict=True))
            self.writer.add_text(f"completions/{n}", "```\n" + "\n".join(told) + "\n```", step)

    def finish(self, exit_code: int) -> None:
        self.writer.close()


SINKS = {"wandb": Wandb, "tensorboard": TensorBoard}  # log.to -> where metrics go too


class Trackers:
    """Where a run's metrics go beside metrics.jsonl. What fails there is told once, and training goes on."""

    def __init__(self, cfg: Config, folder: Path, run_id: str):
        self.folder, self.warned, self.sinks = folder, set(), {}
        for name in dict.fromkeys(cfg.log.to or ()):
            try:
                self.sinks[name] = SINKS[name](cfg, folder, run_id, partial(self.warn, name))
            except Exception as error:
                self.warn(name, error, "nothing of the run is recorded there")

    def each(self, method: str, *given: Any) -> None:
        for name, sink in self.sinks.items():
            try:
                getattr(sink, method)(*given)
            except Exception as error:  # of packages that raise what they like
                self.warn(name, error)

    def log(self, values: dict) -> None:
        """Send values of one step, `step` among them."""
        self.each("log", values)

    def samples(self, step: int, lines: list[dict]) -> None:
        """Send the completions of lines of samples.jsonl as a table."""
        rows = [[step, line["id"], line["prompt"], line["gold"], *(completion[key] for key in COLUMNS)]
                for line in lines for completion in line["completions"]]
        self.each("samples", step, ["step", "id", "prompt", "gold", *COLUMNS], rows)

    def finish(self, state: dict) -> None:
        """Send the rest, and tell that the run has ended, and whether it failed."""
        self.each("finish", int("error" in state))

    def warn(self, name: str, error: Exception, what: str = "") -> None:
        """Report a failure once, and where metrics are recorded."""
        if name not in self.warned:
            self.warned.add(name)
            kept = SINKS[name].kept.format(self.folder)
            first = str(error).partition("\n")[0] or type(error).__name__
            print(f"{name}: {first}; {what or kept}", file=sys.stderr, flush=True)
