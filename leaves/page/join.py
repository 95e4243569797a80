"""Sum up a run at its end, and measure what its advice on pruning needs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from config import Config
from infra.runfolder import RunLog
from leaves.page.advice import may_draw, share_of_tokens
from leaves.page.summary import summary


class Summary:
    """Print the summary of a run that has finished, and nothing before."""

    def __init__(self, folder: Path):
        self.folder = folder

    def log(self, values: dict) -> None: ...

    def finish(self, state: dict) -> None:
        if state["state"] == "finished":
            print(summary(self.folder), flush=True)


def parts(cfg: Config, run: Any) -> Any:
    """Add the measure to train.Parts."""
    return replace(run, measures=(*run.measures, partial(share_of_tokens, cfg))) if may_draw(cfg) else run


def watch(cfg: Config, log: RunLog) -> RunLog:
    log.watchers.append(Summary(log.folder))
    return log
