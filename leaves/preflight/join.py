"""Add the checks to those before a run."""

from dataclasses import replace

from config import Config
from infra.checks import Ready
from leaves.preflight.checks import run_checks


def before_run(cfg: Config, ready: Ready) -> Ready:
    checks = run_checks(ready.cfg, ready.learner, ready.engine, ready.task)
    return replace(ready, checks=(*ready.checks, *checks))
