"""Call the user's own reward functions, those of the file reward.custom_file, in workers that may be ended.

A function asks by the names of its parameters for what it reads, any of KNOWN; where it has none of these
names it gets the first of them in this order. It returns a number in [-1, 1], or None for a completion that
it cannot judge. Only numbers and texts travel back, so whatever it raises or returns, the trainer lives.
"""

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from config import ConfigError, Reward
from infra.reward_worker import call_functions
from records import Problem, Prompt, Rewards
from verify.grade import MEMORY, PATIENCE, TIME, WORKERS, Call, Limits, OverLimit


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of reward functions, as it was when the run began, and how its functions are called."""

    path: str
    source: str
    functions: tuple[str, ...]
    limits: Limits
    ended: float  # the value of a function whose call was ended

    @staticmethod
    def of(cfg: Reward) -> "OwnFile":
        workers = cfg.custom_workers or WORKERS
        limits = Limits("reward function", int(cfg.custom_gib * 2**30), workers, cfg.custom_seconds)
        return OwnFile(cfg.custom_file, source_of(cfg), tuple(cfg.functions.values()), limits,
                       cfg.custom_ended)

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"reward.custom_file={self.path}: {what}")


def source_of(cfg: Reward) -> str | None:
    """Return the text of the user's file; None where none of its functions counts. Raises ConfigError."""
    return read_once(cfg.custom_file) if cfg.functions else None


@functools.cache
def read_once(path: str) -> str:
    """Read a file once: a change while a run is under way is not seen."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.custom_file={path} cannot be read: {error}") from None


SAID: set[tuple[OwnFile, str]] = set()  # which reasons have been said


@dataclass(frozen=True, slots=True)
class Judged:
    """What a completion's reward is a function of. Rows are told apart by what they are, and not by what they
    hold: two sets may ask the same of other rows."""

    text: str
    gold: str
    tokens: int
    row: dict = field(compare=False)
    row_id: int  # of the row, which lives as long as this


def begin(own: OwnFile, problem: Problem | Prompt, text: str, tokens: int) -> Call:
    """Start all functions on one completion, in one call. One that comes again is not judged again."""
    return begin_once(own, Judged(text, problem.answer, tokens, problem.row, id(problem.row)))


@functools.lru_cache(maxsize=20_000)
def begin_once(own: OwnFile, judged: Judged) -> Call:
    values = judged.text, judged.gold, judged.tokens, judged.row
    return Call(call_functions, own.path, own.source, own.functions, own.limits.seconds, values,
                limits=own.limits)


def finish(own: OwnFile, call: Call, row_id: str) -> tuple[list[float], str | None]:
    """Wait for a call on a row: a value of each function, nan for None, and why it was ended, or None.

    A call that was ended has own.ended of every function. Raises ConfigError for anything else that goes
    wrong.
    """
    try:
        return values_of(own, call, row_id), None
    except OverLimit as error:
        say_once(own, str(error), row_id)
        return [own.ended] * len(own.functions), str(error)


def awaited(own: OwnFile, cfg: Reward, call: Call, row_id: str, timed_out: bool) -> dict[str, float]:
    """Wait for the user's functions on one completion: their values, and whether the call was ended."""
    returned, ended = finish(own, call, row_id)
    values = dict(zip(cfg.functions, returned, strict=True))
    return values | {"timed_out": timed_out or ended == TIME, "died": ended not in (None, TIME)}


def values_of(own: OwnFile, call: Call, row_id: str) -> list[float]:
    """Wait for a call: a value of each function, nan for None. Raises OverLimit and ConfigError."""
    values = call.result()
    if isinstance(values, str):
        raise own.error(f"{values} (row {row_id})")
    return [math.nan if value is None else value for value in values]


def say_once(own: OwnFile, reason: str, row_id: str) -> None:
    """Say on stderr that a call was ended, the first time that it is for this reason."""
    if (own, reason) not in SAID:
        SAID.add((own, reason))
        print(f"reward.custom_file={own.path}: a call {ending(own, reason)} (row {row_id}); its value is "
              f"{own.ended:g} (reward.custom_ended), as of all that end so (reward/timed_out, reward/died)",
              file=sys.stderr, flush=True)


def ending(own: OwnFile, reason: str) -> str:
    """Say how a call was ended, and which setting allows it more."""
    if reason == TIME:
        return (f"took more than {own.limits.seconds:g} s of computing or {PATIENCE} times that by the clock "
                "(reward.custom_seconds), and was ended")
    if reason == MEMORY:
        return f"asked for more than {own.limits.size / 2**30:g} GiB of memory (reward.custom_gib)"
    return f"ended its process by {reason}"


def require_lives(rewards: Rewards, cfg: Reward) -> None:
    """Raise ConfigError where the process of every completion of a step or of a round has died."""
    if rewards.total_NG.numel() and rewards.components["died"].all():
        raise OwnFile.of(cfg).error(f"the process of each of {rewards.total_NG.numel()} completions died or "
                                    "ran out of memory (reward.custom_gib): there is no reward to learn from")


def remark(rewards: Rewards, cfg: Reward) -> str:
    """Say which of the functions are None for every completion of a step; empty where none is."""
    count = rewards.total_NG.numel()
    if not count:
        return ""
    if rewards.total_NG.isnan().all():
        return f"none of {count} completions has a reward: every component is None, so none is trained on"
    absent = [name for name in cfg.functions if rewards.components[name].isnan().all()]
    return f"{', '.join(absent)}: None for all of {count} completions" * bool(absent)


def try_out(cfg: Reward, *sets: Sequence[Problem]) -> None:
    """Load the file and call its functions on the first and the last row of each set, the solution or the
    gold answer as the completion.

    Raises ConfigError for a file that cannot be loaded, for a function that is missing, that asks for what
    there is not or returns what is no reward, and for a call that has to be ended.
    """
    if not cfg.functions or not sets:
        return
    read_once.cache_clear()
    own, rows = OwnFile.of(cfg), [row for problems in sets for row in (problems[0], problems[-1])]
    calls = [begin(own, problem, problem.solution or problem.answer, 1) for problem in rows]
    for problem, call in zip(rows, calls, strict=True):
        try:
            values_of(own, call, problem.id)
        except OverLimit as error:
            raise own.error(f"before the run, a call {ending(own, str(error))} (row {problem.id})") from None
