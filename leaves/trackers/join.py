"""Send the metrics of a run to the trackers that `log.to` names."""

import json
import secrets
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from config import Config, ConfigError
from infra.choices import Choice
from infra.lines import blame_file, read_log, write_json
from infra.runfolder import RunLog
from leaves.trackers.trackers import SINKS, Tracker


def decide(cfg: Config, choice: Choice) -> Choice:
    """Raise ConfigError for a tracker that is asked for and cannot be imported."""
    for name in cfg.log.to or ():
        try:
            import_module(SINKS[name].package)
        except ImportError as error:
            raise ConfigError(f"log.to: {name} cannot be imported ({error}); pip install -r "
                              f"requirements/trackers.txt, or leave it out") from error
    return choice


def watch(cfg: Config, log: RunLog) -> RunLog:
    """Begin to send. A resumed run sends all of its metrics again: the last ones may not have arrived."""
    for name in dict.fromkeys(cfg.log.to or ()):
        tracker = Tracker(name, cfg, log.folder, name_run(log.folder))
        for line in read_log(log.folder / "metrics.jsonl"):
            tracker.log(line)
        log.watchers.append(tracker)
    return log


def name_run(folder: Path) -> str:
    """Return the run's name on every tracker; a copy of its folder, or one that was moved, has another."""
    path = folder / "env.json"
    with blame_file(path):
        ran_on = {"tracked": secrets.token_hex(4)} | json.loads(path.read_text())
    write_json(path, ran_on)
    return sha256(f"{ran_on['tracked']} {folder.resolve()}".encode()).hexdigest()[:8]
