"""Settings of windows: completions that are sampled over several steps."""

from collections.abc import Iterator
from typing import Annotated, Any

from settings.loader import Count, frozen
from settings.rules import Rule


@frozen
class Windows:
    """Completions that go on in the next step (T-PPO, arXiv:2506.15050), and groups that go on or wait."""
    # New tokens of a completion in a window; null: no windows. A step is one window and trains on it (T-PPO);
    # with in_flight, windows repeat until N groups are complete.
    tokens: int | None = None
    # Groups under way over prompts_per_step; those beyond N go on in the next step. It is off-policy, outside
    # the proof of unbiased pruning
    in_flight: Annotated[float, "at least 1"] = 1.0
    # How many steps older a group may be than the step that trains on it; null: none. With in_flight, a group
    # of this age holds the step up. With until=informative, surplus groups wait for the next steps.
    max_age: Count | None = None


CHOICES = {"windows": Windows}
HOOKS = ("parts",)
ONLY_WITH = {"windows.max_age": ["windows.in_flight: no group may be older than its step"]}
REQUIRES = {
    "windows.tokens": ["rollout.stop=null: a text that lies across two windows would be missed"],
    "windows.max_age": [
        "labels.kind=gold: completions are added until their votes agree, all by one policy",
        "rollout.until=offered or informative: survivors that fill a budget cannot be counted before",
        "prune.prompts.kind=none, bernoulli, pps or rank: others draw more as a step's groups show",
    ],
    "windows.tokens without windows.max_age": [
        "advantage.kind=gae: completions of one prompt end in different steps and are not compared",
        "prune.completions.kind=none: an unfinished completion has no |advantage| yet to be pruned by",
        "prune.prompts.kind=none: a prompt's group is never in one step, so none is remembered",
        "rollout.until=offered: no group of a round is whole, so none can be chosen or counted",
        "loss.likelihood=0.0: a step has only the last window of a correct answer",
        "loss.normalize=token, constant or sum: a step has only a part of a sequence",
        "loss.trust.kind=clip, clamp, total_variation, binary_kl or none: a step has parts of sequences",
    ],
}


def rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules that no table states."""
    roll, own = cfg.rollout, cfg.windows
    N, new = roll.prompts_per_step, roll.max_new_tokens
    yield ("windows.tokens", own.tokens is None or 1 <= own.tokens <= new,
           f"in 1..{new} (rollout.max_new_tokens), or null")
    if own.max_age is None:
        return
    going_on, waits = own.in_flight > 1, roll.until == "informative"
    yield ("windows.max_age", going_on != waits, "null, or beside it either windows.in_flight above 1 "
           "(groups go on) or rollout.until=informative (groups that are left over wait)")
    yield ("windows.tokens", (own.tokens is not None) == going_on,
           f"in 1..{new} with windows.in_flight above 1, tokens after which a step looks for whole "
           "groups, and null with groups that wait")
    yield ("windows.in_flight", own.in_flight <= own.max_age + 1,
           f"at most {own.max_age + 1}, windows.max_age and 1: a step trains on prompts_per_step groups")
    yield ("windows.in_flight", not going_on or int(own.in_flight * N) > N,
           f"1, or enough for one group more than {N} (rollout.prompts_per_step)")
