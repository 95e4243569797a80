"""Draw prompts in a seeded order, and remember the rewards of their rollouts.

Dimension key:  N prompts (groups) rolled out in one step,  G completions per prompt,  K prompts that come up.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from advantage import comparable, flat
from infra.dist import seed_for
from prune import PROMPTS, REFILLING, Memory, adapt_p
from records import Prompt, Rolled, Turn
from settings import kinds


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Permute `count` prompts for one epoch: a pure function of (seed, epoch)."""
    return np.random.Generator(np.random.Philox(seed_for(seed, epoch, "order"))).permutation(count)


def sample_seed(seed: int, epoch: int, prompt_id: str, g: int) -> int:
    """Derive the seed of a prompt's g-th completion in an epoch, whichever rank and step sample it."""
    return seed_for(seed, epoch, prompt_id, g, "rollout")


class Visit(NamedTuple):
    """The newest rollout of a prompt, from all of its completions, and how often it was easy or skipped."""

    epoch: int
    rewards: tuple[float, ...]  # or accuracies, as rollout.differ_in says
    size: float       # mean |A|
    easy: int         # newest rollouts in a row whose rewards were all equal and high
    hard: int         # ... all equal and low
    times: int = 1    # rolled out so far
    skipped: int = 0  # turns at which it was skipped since


def easy_and_hard(value_NG: Tensor, middle: float) -> tuple[Tensor, Tensor]:
    """Mark easy groups, of equal values above `middle`, and hard ones, of other equal values, bool [N]."""
    flat_N, high_N = flat(value_NG), value_NG.nan_to_num(nan=-torch.inf).amax(dim=1) > middle
    return flat_N & high_N, flat_N & ~high_N


class PromptHistory:
    """The place in the endless sequence of epochs, and, where a kind of prune.prompts needs them, the sizes
    and rewards of earlier rollouts: all the state that drawing prompts has.

    It is the same on every rank, and independent of their number: it is made of records that all ranks hold.
    """

    def __init__(self, prompts: list[Prompt], pruning: kinds.Prompts, seed: int, middle: float):
        self.prompts, self.pruning, self.seed = prompts, pruning, seed
        self.records = pruning.kind != "none"     # rollouts are remembered
        self.adapts = pruning.kind in REFILLING   # and `adapt` has something to do
        self.middle = middle  # equal values above it are those of an easy prompt (collect.middle)
        self.place = 0
        self.visits: dict[str, Visit] = {}
        self.explore = (getattr(pruning, "explore", 0.5),) * 2  # GRESO's p for easy and for hard prompts

    def draw(self, count: int) -> list[Turn]:
        """Take the turns of the next `count` prompts, kept or skipped; a kind that refills (REFILLING) takes
        turns until `count` are kept.

        Whether a prompt is kept is a function of the seed, the epoch and its id, and of the turns before this
        call.
        """
        if self.pruning.kind == "none":
            return [Turn(prompt, epoch) for epoch, prompt in self.coming(count)]
        turns: list[Turn] = []
        refills = self.pruning.kind in REFILLING
        missing = count
        while missing:
            block = self.coming(missing)
            prob_K = self.rollout_prob([prompt for _, prompt in block])
            for (epoch, prompt), prob in zip(block, prob_K.tolist(), strict=True):
                if seed_for(self.seed, epoch, prompt.id, "prompt") < prob * 2**63:
                    turns.append(Turn(prompt, epoch, prob, 1.0 if refills else 1 / prob))
                else:
                    turns.append(Turn(prompt, epoch, prob, weight=0.0))
                    if visit := self.visits.get(prompt.id):
                        self.visits[prompt.id] = visit._replace(skipped=visit.skipped + 1)
            missing = count - sum(turn.kept for turn in turns) if refills else 0
        return turns

    def rollout_prob(self, prompts: list[Prompt]) -> Tensor:
        """Compute each prompt's probability of a rollout, [K]."""
        return PROMPTS[self.pruning.kind](self.remembered(prompts), self.pruning)

    def coming(self, count: int) -> list[tuple[int, Prompt]]:
        """Advance by `count` prompts in the endless sequence of epochs; return each with its epoch."""
        size = len(self.prompts)
        places = [divmod(i, size) for i in range(self.place, self.place + count)]
        orders = {epoch: order(size, self.seed, epoch) for epoch in {epoch for epoch, _ in places}}
        self.place += count
        return [(epoch, self.prompts[orders[epoch][i]]) for epoch, i in places]

    def remembered(self, prompts: list[Prompt]) -> Memory:
        """Gather what prune.PROMPTS reads of these prompts and their history."""
        visits = [self.visits.get(prompt.id) for prompt in prompts]
        sizes = [visit.size for visit in self.visits.values()]

        def column(name: str, unseen: float) -> Tensor:
            values = [unseen if visit is None else getattr(visit, name) for visit in visits]
            return torch.tensor(values, dtype=torch.float64)

        mean = math.fsum(sizes) / len(sizes) if sizes else math.nan
        return Memory(column("size", math.nan), column("skipped", 0), column("easy", 0), column("hard", 0),
                      mean, self.explore, [prompt.row for prompt in prompts])

    def record(self, rolled: Rolled) -> None:
        """Remember a round's rollouts that show something: prompts are pruned by them."""
        value_NG = rolled.rewards.compared_NG
        easy_N, hard_N = easy_and_hard(value_NG, self.middle)
        sizes = rolled.adv_NG.abs().nanmean(dim=1).nan_to_num().tolist()  # 0 where none has a reward
        rows = zip(rolled.kept, value_NG.tolist(), sizes, easy_N.tolist(), hard_N.tolist(), strict=True)
        for shows, (turn, values, size, is_easy, is_hard) in zip(comparable(value_NG), rows, strict=True):
            if not shows:  # as if it had not come up
                continue
            old = self.visits.get(turn.prompt.id)
            easy, hard, times = (old.easy, old.hard, old.times) if old else (0, 0, 0)
            self.visits[turn.prompt.id] = Visit(turn.epoch, tuple(values), size, easy + 1 if is_easy else 0,
                                                hard + 1 if is_hard else 0, times + 1)

    def adapt(self, rolled: Rolled) -> None:
        """Move GRESO's p (`adapt_p`) by a step's flat groups, from the second epoch on."""
        if rolled.turns[-1].epoch > 0:
            value_NG = rolled.rewards.compared_NG
            marks = easy_and_hard(value_NG[comparable(value_NG)], self.middle)
            easy, hard = (x_N.double().mean().nan_to_num().item() for x_N in marks)
            self.explore = adapt_p(self.explore, easy, hard, self.pruning.target)

    def state(self) -> dict:
        """Return plain values for a checkpoint, which later steps leave as they are."""
        return {"place": self.place, "explore": self.explore,
                "visits": {prompt_id: tuple(visit) for prompt_id, visit in self.visits.items()}}

    def restore(self, state: dict) -> None:
        self.place, self.explore = state["place"], state["explore"]
        self.visits = {prompt_id: Visit(*values) for prompt_id, values in state["visits"].items()}
