"""Show a run beside its folder: some groups of each step as text, and on the trackers of `log.to`.

A tracker is imported only if it is asked for. metrics.jsonl stays the source of truth: a tracker's failure is
one line on stderr (wandb may print more when its own process is gone), and training goes on.
"""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from config import Config, ConfigError, dump, flatten
from records import Batch, Rolled, plain

LONGEST_WAIT = 20.0  # seconds that wandb may take to reach its server, and at the end to send the rest
COLUMNS = ("text", "tokens", "finished", "reward", "advantage", "kept", "trained", "size", "prob", "weight")
Warn = Callable[[Exception], None]
Decode = Callable[[Iterable[int], bool], str]  # of tokens, and whether special ones are written out


def sample_lines(rolled: Rolled, batch: Batch, decode: Decode, count: int) -> list[dict]:
    """Write the first groups of ended completions as lines of samples.jsonl."""
    trained = {id(group): n for n, group in enumerate(batch.groups)}
    lines = []
    for n, group in enumerate(rolled.groups):
        if len(lines) < count and not any(sample.pending for sample in group.samples):
            completions = list(describe_completions(rolled, n, batch, trained.get(id(group)), decode))
            lines.append({"id": group.prompt.id, "prompt": decode(group.prompt.ids, True),
                          "gold": group.prompt.answer, "completions": completions})
    return lines


def describe_completions(rolled: Rolled, n: int, batch: Batch, place: int | None, decode: Decode,
                         ) -> Iterator[dict]:
    """Yield the completions of the n-th group, which is trained on at `place` of the batch; None: not at all.

    The advantage comes from the rewards, before a critic or a reference changes it. A completion that is
    trained on has its advantage there: PODS compares only the completions kept.
    """
    pruned, components = batch.pruned, rolled.rewards.components
    for g, sample in enumerate(rolled.groups[n].samples):
        kept = place is not None and bool(pruned.keep_NG[place, g])
        trained = 0
        turns = [decode(sample.ids[start:to], True) for start, to in sample.turns] if sample.replies else []
        if kept and batch.trained_NG[place, g]:
            trained = len(batch.tokens[place][g]) if batch.tokens else sample.trained
        yield {
            "text": decode(sample.ids, True),
            "tokens": sample.own,
            "finished": sample.finished,
            "reward": plain(rolled.rewards.total_NG[n, g]),
            "components": {name: plain(value_NG[n, g]) for name, value_NG in components.items()},
            "advantage": plain(batch.adv_NG[place, g] if kept else rolled.adv_NG[n, g]),
            "kept": kept,
            "trained": trained,
            "size": None if place is None or pruned.size_NG is None else pruned.size_NG[place, g].item(),
            "prob": None if place is None else pruned.prob_NG[place, g].item(),
            "weight": 0.0 if place is None else pruned.weight_NG[place, g].item(),
        } | ({"turns": turns} if turns else {})


def require_packages(cfg: Config) -> None:
    """Raise ConfigError for a tracker that is asked for and cannot be imported."""
    for name in cfg.log.to or ():
        try:
            importlib.import_module(SINKS[name].package)
        except ImportError as error:
            raise ConfigError(f"log.to: {name} cannot be imported ({error}); pip install -r "
                              f"requirements/trackers.txt, or leave it out") from error


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
            project=cfg.log.project,
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


class Trackio:
    """A run on trackio's board of this machine; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name another one."""

    package, kept = "trackio", "metrics.jsonl has all"

    def __init__(self, cfg: Config, folder: Path, run_id: str, warn: Warn):
        self.trackio = importlib.import_module(self.package)
        name = f"{folder.resolve().name}-{run_id}"
        with suppress(ValueError):  # of a new project
            for run in self.trackio.Api().runs(cfg.log.project):
                if run.name == name:
                    run.delete()  # all that it had is sent again
        with redirect_stdout(StringIO()):  # how to open the board, at each start
            self.run = self.trackio.init(cfg.log.project, name, config=flatten(cfg), embed=False,
                                         auto_log_gpu=False, auto_log_cpu=False)

    def log(self, values: dict) -> None:
        self.run.log({key: value for key, value in values.items() if key != "step"}, values["step"])

    def samples(self, step: int, names: list[str], rows: list[list]) -> None:
        table = self.trackio.Table(columns=names, data=rows, allow_mixed_types=True)
        self.run.log({"completions": table}, step)

    def finish(self, exit_code: int) -> None:
        self.run.finish()


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


SINKS = {"wandb": Wandb, "trackio": Trackio, "tensorboard": TensorBoard}  # log.to -> where metrics go too


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

    def finish(self, exit_code: int) -> None:
        """Send the rest, and tell that the run has ended."""
        self.each("finish", exit_code)

    def warn(self, name: str, error: Exception, what: str = "") -> None:
        """Report a failure once, and where metrics are recorded."""
        if name not in self.warned:
            self.warned.add(name)
            kept = SINKS[name].kept.format(self.folder)
            first = str(error).partition("\n")[0] or type(error).__name__
            print(f"{name}: {first}; {what or kept}", file=sys.stderr, flush=True)
