"""Sum up a run at its end."""

from pathlib import Path

from config import Config
from infra.runfolder import RunLog
from leaves.page.summary import summary


class Summary:
    """Print the summary of a run that has finished, and nothing before."""

    def __init__(self, folder: Path):
        self.folder = folder

    def log(self, values: dict) -> None: ...

    def finish(self, state: dict) -> None:
        if state["state"] == "finished":
            print(summary(self.folder), flush=True)


def watch(cfg: Config, log: RunLog) -> RunLog:
    log.watchers.append(Summary(log.folder))
    return log
