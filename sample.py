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
    level: str | None = None
    subject: str | None = None


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
    copy: int = 0         # which of the prompt's completions, where each is a group of its own (rollout.window)

    @property
    def kept(self) -> bool:
        return self.weight > 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, exactly as the behaviour policy produced it."""

    ids: Sequence[int]     # sampled tokens, including EOS when `finished`
    logp: Sequence[float]  # log pi(ids[t] | prompt, ids[:t]) in nats at the sampling temperature, before any top-p
    finished: bool         # True: ended with an EOS.  False: cut at rollout.max_new_tokens, or pending
    start: int = 0         # tokens sampled in earlier steps, which they were for (rollout.window)
    pending: bool = False  # cut at rollout.window, to go on in the next step

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
    def fresh(self) -> int:
        """Tokens that this step has sampled."""
        return len(self.ids) - self.start

    @property
    def logp_sum(self) -> float:
        """Of the fresh tokens."""
        return sum(self.logp[self.start:])

    def joined(self, piece: "Sample", pending: bool) -> "Sample":
        """This unfinished completion and what was sampled after it."""
        return Sample(self.ids + piece.ids, self.logp + piece.logp, piece.finished, len(self.ids), pending)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What every rank knows of a completion whose tokens another one holds."""

    length: int
    finished: bool
    logp_sum: float
    pending: bool = False  # with rollout.window all ranks hold all tokens

    @property
    def fresh(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    samples: tuple[Sample | Elsewhere, ...]
    owners: tuple[int, ...] | None = None  # the rank that holds each; None: all ranks do


def lengths(groups: list[Group], G: int) -> Tensor:
    """[N, G] tokens of each completion that this step has sampled; N may be 0."""
    return torch.tensor([[s.fresh for s in group.samples] for group in groups], dtype=torch.int64).view(-1, G)


def pending(groups: list[Group], G: int) -> Tensor:
    """bool [N, G]: completions that go on in the next step, and have no reward yet."""
    return torch.tensor([[s.pending for s in group.samples] for group in groups], dtype=torch.bool).view(-1, G)


@dataclass(frozen=True, slots=True)
class Rolled:
    """All that came up in a step, the same on every rank but for tokens that lie elsewhere."""

    turns: list[Turn]           # in order, those skipped included
    groups: list[Group]         # of the turns kept, `kept`
    parts: dict[str, Tensor]    # what reward.measured names, [N, G]; 0 of completions that go on
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
    reward_NG: Tensor
    correct_NG: Tensor   # bool
    adv_NG: Tensor       # with a critic that of the rewards alone, which pruning goes by
    pruned: Pruned       # weight and probability are those of both levels together
    slots: list[int]     # which of the prompts offered each group is of
    offered: int         # prompts, those skipped before rollout included
    seed: int            # of the draw of completions
