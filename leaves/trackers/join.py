"""Send the metrics and texts of a run to the trackers that `log.to` names."""

import json
import secrets
from importlib import import_module
from itertools import groupby
from pathlib import Path

from config import Config, ConfigError
from infra.choices import Choice
from infra.lines import blame_file, read_log, write_json
from infra.runfolder import RunLog
from leaves.trackers.trackers import SINKS, Trackers


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
    """Begin to send. A resumed run sends all of its metrics and texts again: the last ones may not have
    arrived."""
    if cfg.log.to:
        tracker = Trackers(cfg, log.folder, name_run(log.folder))
        for line in read_log(log.folder / "metrics.jsonl"):
            tracker.log(line)
        for step, lines in groupby(read_log(log.folder / "samples.jsonl"), lambda line: line["step"]):
            tracker.samples(step, list(lines))
        log.watchers.append(tracker)
    return log


def name_run(folder: Path) -> str:
    """Return the run's name on every tracker, which changes only in a copy of its folder (env.json)."""
    path, home = folder / "env.json", str(folder.resolve())
    with blame_file(path):
        ran_on = {"tracked": None, "folder": home} | json.loads(path.read_text())
        if ran_on["tracked"] is None or ran_on["folder"] != home and Path(ran_on["folder"]).exists():
            ran_on |= {"tracked": secrets.token_hex(4)}
        ran_on["folder"] = home
    write_json(path, ran_on)
    return ran_on["tracked"]
