"""Settings of distillation: advantage.kind=distill, and the section `teacher`."""

from collections.abc import Iterator
from typing import Any

from settings.kinds import Comparison
from settings.loader import Count, Positive, PositiveOrZero, frozen, kind
from settings.rules import Rule


@kind("distill")
class Distill(Comparison):
    """On-policy distillation (arXiv:2306.13649): the teacher's log-prob of each token less the student's."""
    compares, by_model = False, True
    reward: PositiveOrZero = 0.0   # weight of the group's standardised rewards, added to every token
    bound: Positive | None = None  # on the size of the difference of log-probs, in nats; verl has 10. Biased


@frozen
class Teacher:
    """The frozen model of advantage.kind=distill, which the policy learns from."""
    path: str | None = None        # a Hugging Face folder or a hub name, with the token ids of model.path
    # completions per group, on average over a step, that the student trains on: drawn again, of those that
    # the teacher has read, in proportion to their gradients' norms as guessed from A_t. null: all of them
    keep: Count | None = None
    error: Positive | None = None  # in its place: the fewest with this predicted error of the gradient


CHOICES = {"advantage=distill": Distill, "teacher": Teacher}
HOOKS = ("inputs", "parts")
PATHS = ("teacher.path",)
SECOND = [  # of a second draw
    "loss.denominator=all: its weights restore the full batch, not a mean over the kept",
    "loss.likelihood=0.0: it has no part in the size that completions are drawn by",
    "loss.entropy=0.0: it has no part in the size that completions are drawn by",
]
REQUIRES = {
    "rollout.group_size=1": ["advantage.reward=0.0: there is nothing to compare a reward with"],
    "teacher.path": ["advantage.kind=distill: nothing else reads a teacher"],
    "advantage.reward": ["prune.truncated=false: cut completions would be left out of their group's mean"],
    "teacher.keep": ["teacher.error=null: teacher.keep is in its place", *SECOND],
    "teacher.error": SECOND,
    "advantage.kind=distill": [
        "prune.completions.kind=none or pps: no |A| is known before the teacher has read",
        "prune.prompts.kind=none or pps: no |A| is known before the teacher has read",
        "rollout.until=offered or full: a group of equal rewards has a gradient too",
    ],
}


def rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules that no table states."""
    yield "teacher.path", cfg.teacher.path, "the folder or hub name of a model"
    most = getattr(cfg.prune.completions, "keep", None) or cfg.rollout.group_size
    yield ("teacher.keep", (cfg.teacher.keep or 0) <= most,
           f"at most {most}, the completions per group that the teacher reads")
