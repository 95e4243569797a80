"""The records that flow from stage to stage. Frozen, complete at birth: no later stage fills anything in.

Dimension key:  N prompts (groups) in one step,  G completions per prompt.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prune import Pruned


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of a data set."""

    id: str
    question: str
    answer: str          # the gold final answer alone
    solution: str = ""   # worked gold solution where the data has one


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem rendered through the model's chat template."""

    id: str
    ids: tuple[int, ...]   # up to and including the generation prompt
    answer: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt that comes up in a step, to be rolled out or skipped."""

    prompt: Prompt
    epoch: int
    prob: float = 1.0     # with which it is rolled out
    weight: float = 1.0   # of its whole group: 1 / prob where pruning is unbiased, else 1; 0 where it is skipped

    @property
    def kept(self) -> bool:
        return self.weight > 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, exactly as the behaviour policy produced it."""

    ids: Sequence[int]     # sampled tokens, including EOS when `finished`
    logp: Sequence[float]  # log pi(ids[t] | prompt, ids[:t]) in nats at the sampling temperature, before any top-p
    finished: bool         # True: ended with an EOS.  False: cut at rollout.max_new_tokens

    def __post_init__(self):
        # Flat, as they travel and are packed: lists of Python's numbers take five times the room and the time.
        object.__setattr__(self, "ids", array("i", self.ids))
        object.__setattr__(self, "logp", array("d", self.logp))
        if not self.ids or len(self.ids) != len(self.logp):
            raise ValueError(f"a Sample needs at least one token and one logp each, "
                             f"not {len(self.ids)} ids and {len(self.logp)} logp")

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def logp_sum(self) -> float:
        return sum(self.logp)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What every rank knows of a completion whose tokens another one holds."""

    length: int
    finished: bool
    logp_sum: float


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    samples: tuple[Sample | Elsewhere, ...]
    owners: tuple[int, ...] | None = None  # the rank that holds each; None: all ranks do


def lengths(groups: list[Group], G: int) -> Tensor:
    """[N, G] tokens of each completion; N may be 0."""
    return torch.tensor([[s.length for s in group.samples] for group in groups], dtype=torch.int64).view(-1, G)


@dataclass(frozen=True, slots=True)
class Rolled:
    """All that came up in a step, the same on every rank but for tokens that lie elsewhere."""

    turns: list[Turn]           # in order, those skipped included
    groups: list[Group]         # of the turns kept, `kept`
    parts: dict[str, Tensor]    # each reward component, [N, G]
    reward_NG: Tensor           # their weighted sum
    adv_NG: Tensor
    rounds: int = 1

    @property
    def kept(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.kept]

    def __add__(self, other: "Rolled") -> "Rolled":
        parts = {name: torch.cat([part_NG, other.parts[name]]) for name, part_NG in self.parts.items()}
        return Rolled(self.turns + other.turns, self.groups + other.groups, parts,
                      torch.cat([self.reward_NG, other.reward_NG]), torch.cat([self.adv_NG, other.adv_NG]),
                      self.rounds + other.rounds)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step trains on, the same on every rank but for tokens that lie elsewhere. Its N may be fewer than were
    rolled out."""

    turns: list[Turn]
    groups: list[Group]
    adv_NG: Tensor
    pruned: Pruned       # weight and probability are those of both levels together
    slots: list[int]     # which of the prompts offered each group is of
    offered: int         # prompts, those skipped before rollout included
    seed: int            # of the draw of completions
