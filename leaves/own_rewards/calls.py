"""Call the user's own reward functions, from the file reward.custom_file, in workers that may be ended.

The names of a function's parameters choose its arguments, any of those that `start_once` knows. It returns a
number in [-1, 1], or None for a completion that it cannot judge. Only numbers and texts travel back, so no
exception and no result can end the trainer.
"""

import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import field

from config import Reward
from infra.user_files import MOST, UserFile, read_file
from leaves.own_rewards.worker import call_functions
from records import Problem, Prompt, Rewards, frozen
from verify.workers import TIME, OverLimit


@frozen
class RewardFile(UserFile):
    """A file of reward functions."""

    functions: tuple[str, ...] = ()

    @staticmethod
    def of(cfg: Reward) -> "RewardFile":
        source = read_file(cfg.custom_file, "reward.custom_file")
        return RewardFile("reward.custom_file", source, cfg.custom_seconds, cfg.custom_gib,
                          cfg.custom_workers or MOST, tuple(cfg.functions.values()))


@frozen
class RewardCall:
    """The arguments of a completion's reward. Rows are compared by identity and not by content: two sets may
    ask the same question of different rows."""

    turns: tuple[str, ...]
    gold: str
    tokens: int
    row: dict = field(compare=False)
    row_id: int  # id(row); the row lives as long as this


def start_call(own: RewardFile, problem: Problem | Prompt, turns: Sequence[str], tokens: int) -> Future:
    """Start all functions on one completion, in one call. An equal completion is not judged again."""
    return start_once(own, RewardCall(tuple(turns), problem.answer, tokens, problem.row, id(problem.row)))


@functools.lru_cache(20_000)
def start_once(own: RewardFile, judged: RewardCall) -> Future:
    known = {
        "text": judged.turns[-1],  # the policy's last turn
        "gold": judged.gold,
        "tokens": judged.tokens,
        "row": judged.row,
        "turns": judged.turns,     # the policy's, by turns with those of an environment
    }
    return own.call(call_functions, own.functions, known)


def read_values(own: RewardFile, cfg: Reward, call: Future, row_id: str, timed_out: bool) -> dict[str, float]:
    """Wait for a call: a value of each function, nan for None, and whether the call was ended.

    All functions of a call that was ended have the value reward.custom_ended. Raises ConfigError for anything
    else that goes wrong.
    """
    reason = ""
    try:
        returned = own.checked(call.result(), f" (row {row_id})")
    except OverLimit as error:
        reason = str(error)
        own.report_once(error, row_id, f"its value is {cfg.custom_ended:g} (reward.custom_ended), as of all "
                        "that end so (reward/timed_out, reward/died)")
        returned = [cfg.custom_ended] * len(own.functions)
    values = {name: math.nan if value is None else value
              for name, value in zip(cfg.functions, returned, strict=True)}
    return values | {"timed_out": timed_out or reason == TIME, "died": reason not in ("", TIME)}


def require_lives(rewards: Rewards, cfg: Reward) -> None:
    """Raise ConfigError if the process of every completion of a step or of a round has died."""
    count = rewards.total_NG.numel()
    if count and rewards.components["died"].all():
        raise RewardFile.of(cfg).error(
            f"the process of each of {count} completions died or ran out of memory (reward.custom_gib): "
            "there is no reward to learn from")


def try_functions(cfg: Reward, *sets: Sequence[Problem]) -> None:
    """Load the file and call its functions on the first and the last row of each set, the solution or the
    gold answer as the completion.

    Raises ConfigError for a file that cannot be loaded, for a function that is missing, asks for an unknown
    argument or returns no reward, and for a call that has to be ended.
    """
    read_file.cache_clear()
    own = RewardFile.of(cfg)
    rows = [row for problems in sets for row in (problems[0], problems[-1])]
    calls = [start_call(own, problem, (problem.solution or problem.answer,), 1) for problem in rows]
    for problem, call in zip(rows, calls, strict=True):
        own.first_value(call, f" (row {problem.id})")
