"""Settings of trackers: log.to and log.project."""

from typing import Literal

CHOICES = {
    "log.to": list[Literal["wandb"]] | None,  # trackers that get the metrics too
    "log.project": str | None,  # the run's project on wandb; null: winnow
}
HOOKS = ("watch",)
ONLY_WITH = {"log.to": ["log.project"]}
