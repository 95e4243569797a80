"""Add the checks to those before a run."""

from dataclasses import replace

from config import Config
from infra.checks import Ready
from leaves.preflight.checks import compare_with_transformers, run_checks


def before_run(cfg: Config, ready: Ready) -> Ready:
    checks = (*run_checks(ready.cfg, ready.learner, ready.engine, ready.task), *ready.checks)
    if ready.shown:
        checks += tuple(compare_with_transformers(ready.cfg, ready.task))
    return replace(ready, checks=checks)
