"""Check a run before its first step. The checks are of leaves; one that fails stops the run."""

from typing import Any

from config import Config, ConfigError
from infra import dist
from records import frozen
from settings import leaves


@frozen
class Check:
    name: str
    passed: bool
    figures: str  # the measurements
    remedy: str   # what to do if it failed


@frozen
class Ready:
    """A run that is loaded."""

    cfg: Config      # with nothing left to `auto`
    learner: Any     # learner.Learner
    engine: Any      # rollout.Engine
    task: Any        # data.Task
    checks: tuple[Check, ...] = ()


def before_run(cfg: Config, ready: Ready) -> Ready:
    """Let leaves check a run. Collective; the engine needs another sync."""
    return leaves.through("before_run", cfg, ready)


def require_checks(checks: tuple[Check, ...]) -> None:
    """Raise ConfigError with what failed and what to do about it."""
    failed = [check for check in checks if not check.passed]
    if failed:
        lines = [f"\n  {check.name}: {check.figures}\n    {check.remedy}" for check in failed]
        raise ConfigError(f"{len(failed)} of {len(checks)} checks before the run failed "
                          f"(train.py --check shows all):{''.join(lines)}")


def print_checks(checks: tuple[Check, ...]) -> int:
    """Print the table of all checks; returns the exit status, 2 if one failed."""
    for check in checks:
        dist.say(f"{'pass' if check.passed else 'FAIL':<5} {check.name:<30} {check.figures}")
        if not check.passed:
            dist.say(f"{'':<6}{check.remedy}")
    return 0 if all(check.passed for check in checks) else 2
