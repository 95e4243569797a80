"""Show a run beside its folder: some groups of each step as text, and Weights & Biases.

wandb is imported only if `log.wandb` asks for it. metrics.jsonl stays the source of truth: a failure of wandb
is one line on stderr (wandb may print more when its own process is gone), and training goes on.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from config import Config, ConfigError, flatten
from records import Batch, Rolled, plain

LONGEST_WAIT = 20.0  # seconds that wandb may take to reach its server, and at the end to send the rest
COLUMNS = ("text", "tokens", "finished", "reward", "advantage", "kept", "trained", "size", "prob", "weight")
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


def require_package(cfg: Config) -> None:
    """Raise ConfigError if wandb is asked for and cannot be imported."""
    if cfg.log.wandb is not None:
        try:
            importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(f"log.wandb={cfg.log.wandb}, but wandb cannot be imported ({error}); "
                              "pip install -r requirements.txt, or set log.wandb=null") from error


class Tracker:
    """A run on Weights & Biases, recorded on disk if the server cannot be reached.

    Metrics carry `step` as a value of their own, for wandb's counter cannot go back: steps that a resumed run
    does again are logged a second time, and of two values of a step the later one counts.
    """

    def __init__(self, cfg: Config, folder: Path, run_id: str):
        self.wandb, self.folder, self.warned = importlib.import_module("wandb"), folder, False
        self.failures = (self.wandb.Error, OSError)  # OSError: its own process is gone, or time is up
        settings = self.wandb.Settings(console="off", init_timeout=LONGEST_WAIT, finish_timeout=LONGEST_WAIT,
                                       finish_timeout_raises=True)
        init = partial(
            self.wandb.init,
            project=cfg.log.wandb,
            id=run_id,
            resume="allow",
            dir=folder,
            name=folder.resolve().name,
            config=flatten(cfg),
            settings=settings)
        try:
            self.run = self.begin(init)
        except self.failures as error:
            self.run = self.begin_offline(init, error)

    def begin(self, init: Callable) -> Any:
        """Begin a wandb.Run. Nothing is printed, and so no question asked at a terminal."""
        self.wandb.setup(self.wandb.Settings(silent=True))
        run = init()
        run.define_metric("*", step_metric="step")
        return run

    def begin_offline(self, init: Callable, reason: Exception) -> Any:
        """Begin a wandb.Run that is only recorded; None if that fails too. Either is printed."""
        self.wandb.teardown()  # else the id is in use
        try:
            run = self.begin(partial(init, mode="offline"))
        except self.failures:
            self.warn(reason, "nothing of the run is recorded there")
            return None
        self.warn(reason)
        return run

    def log(self, values: dict) -> None:
        """Send values of one step, `step` among them."""
        try:
            if self.run:
                self.run.log(values)
        except self.failures as error:
            self.warn(error)

    def samples(self, step: int, lines: list[dict]) -> None:
        """Send the completions of lines of samples.jsonl as a table."""
        names, rows = ["step", "id", "prompt", "gold", *COLUMNS], []
        for line in lines:
            for completion in line["completions"]:
                values = [completion[key] for key in COLUMNS]
                rows.append([step, line["id"], line["prompt"], line["gold"], *values])
        self.log({"step": step, "completions": self.wandb.Table(columns=names, data=rows)})

    def finish(self, exit_code: int) -> None:
        """Send the rest, and tell wandb that the run has ended."""
        try:
            if self.run:
                self.run.finish(exit_code=exit_code)
        except self.failures as error:
            self.warn(error)

    def warn(self, error: Exception, what: str = "") -> None:
        """Report a failure once, and where metrics are recorded."""
        if not self.warned:
            self.warned = True
            kept = (f"its record of the run stays in {self.folder}/wandb, and `wandb sync` sends it later, "
                    "after `wandb login` where that is missing")
            print(f"wandb: {str(error).splitlines()[0]}; {what or kept}", file=sys.stderr, flush=True)
