"""Settings of votes: labels.kind=votes."""

from collections.abc import Iterator
from typing import Any

from settings.loader import AboveOne, Chance, Count, kind
from settings.rules import Rule


@kind("votes")
class Votes:
    """OptPO (arXiv:2512.02882): score by the answer that most completions agree on, without labels."""
    reads_answers = False
    right: Chance = 0.6  # p0, chance of a vote for the true answer
    other: Chance = 0.1  # p1, chance of one for any other answer
    threshold: AboveOne = 19.0  # Bayes factor of leader to runner-up that decides
    chunk: Count = 4               # completions added at a time to a prompt that is not decided
    most: Count = 32               # M, completions of a prompt after which its leader is taken as it is


CHOICES = {"labels=votes": Votes}
HOOKS = ("parts",)
REQUIRES = {"labels.kind=votes": ["windows.tokens=null: unfinished answers do not vote"]}


def rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules that no table states."""
    labels, G = cfg.labels, cfg.rollout.group_size
    yield ("labels.other", labels.other < labels.right,
           f"below labels.right={labels.right}: votes must be likelier for the true answer than for another")
    yield ("labels.most", labels.most >= G, f"at least {G} (rollout.group_size), "
           "which are sampled of every prompt")
    yield ("labels.kind", cfg.reward.needs_answers,
           "gold if no component of the reward compares with an answer")
