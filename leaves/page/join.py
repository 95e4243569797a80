"""Sum up a run at its end."""

from types import SimpleNamespace

from config import Config
from infra.runfolder import RunLog
from leaves.page.summary import summary


def watch(cfg: Config, log: RunLog) -> RunLog:
    """Print the summary of a run once it has finished, and nothing before."""
    folder = log.folder  # with the log itself `finish` would keep the run's lock for ever

    def finish(state: dict) -> None:
        if state["state"] == "finished":
            print(summary(folder), flush=True)

    log.watchers.append(SimpleNamespace(log=lambda values: None, finish=finish))
    return log
