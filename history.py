"""Draw prompts in a seeded order, and remember the rewards of their rollouts.

Dimension key:  N prompts (groups) rolled out in one step,  G completions per prompt,  K prompts that come up.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from advantage import flat_groups, has_comparison
from infra.dist import seed_for
from prune import PROMPTS, REFILLING, Memory, adapt_p
from records import Prompt, PromptDraw, Rolled
from settings import kinds


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Permute `count` prompts for one epoch: a pure function of (seed, epoch)."""
    bits = np.random.Philox(seed_for(seed, epoch, "order"))
    return np.random.Generator(bits).permutation(count)


def sample_seed(seed: int, epoch: int, prompt_id: str, g: int) -> int:
    """Derive the seed of a prompt's g-th completion in an epoch; it does not depend on rank or step."""
    return seed_for(seed, epoch, prompt_id, g, "rollout")


class PromptRecord(NamedTuple):
    """Numbers of a prompt's rollouts, for pruning it; a rollout has all of its completions."""

    size: float       # mean |A| of the newest
    easy: int         # newest rollouts in a row with equal, high rewards
    hard: int         # ... all equal and low
    skipped: int = 0  # times that it was skipped since the newest


NO_RECORD = PromptRecord(size=math.nan, easy=0, hard=0)  # of a prompt without a rollout


def mark_easy_and_hard(value_NG: Tensor, middle: float) -> tuple[Tensor, Tensor]:
    """Mark easy groups, of equal values above `middle`, and hard ones, of other equal values, bool [N]."""
    flat_N = flat_groups(value_NG)
    high_N = value_NG.nan_to_num(nan=-torch.inf).amax(dim=1) > middle
    return flat_N & high_N, flat_N & ~high_N


class PromptHistory:
    """The place in the endless sequence of epochs and, if prune.prompts needs them, the sizes and rewards of
    earlier rollouts: all the state that drawing prompts has.

    It comes from records that all ranks hold, so it is the same on every rank and for any number of ranks.
    """

    def __init__(self, prompts: list[Prompt], pruning: kinds.Prompts, seed: int, middle: float):
        self.prompts = prompts
        self.pruning = pruning
        self.seed = seed
        self.remembers = pruning.kind != "none"  # `record` is called
        self.adapts = pruning.kind in REFILLING  # `adapt` is called
        self.middle = middle  # equal values above it mark an easy prompt (collect.reward_midpoint)
        self.place = 0
        self.records: dict[str, PromptRecord] = {}
        explore = getattr(pruning, "explore", 0.5)
        self.explore = explore, explore  # GRESO's p for easy and for hard prompts

    def draw(self, count: int) -> list[PromptDraw]:
        """Draw the next `count` prompts, kept or skipped; a kind that refills (REFILLING) draws until `count`
        are kept.

        Whether a prompt is kept is a function of the seed, the epoch and its id, and of the draws before this
        call.
        """
        if self.pruning.kind == "none":
            return [PromptDraw(prompt, epoch) for epoch, prompt in self.coming(count)]
        draws: list[PromptDraw] = []
        missing = count
        while missing:
            block = self.coming(missing)
            prompts = [prompt for _, prompt in block]
            prob_K = self.rollout_prob(prompts)
            for (epoch, prompt), prob in zip(block, prob_K.tolist(), strict=True):
                kept = seed_for(self.seed, epoch, prompt.id, "prompt") < prob * 2**63
                weight = 0.0
                if kept:
                    weight = 1.0 if self.adapts else 1 / prob
                elif record := self.records.get(prompt.id):
                    self.records[prompt.id] = record._replace(skipped=record.skipped + 1)
                draws.append(PromptDraw(prompt, epoch, prob, weight))
            missing = 0
            if self.adapts:
                missing = count - sum(draw.kept for draw in draws)
        return draws

    def rollout_prob(self, prompts: list[Prompt]) -> Tensor:
        """Compute each prompt's probability of a rollout, [K]."""
        return PROMPTS[self.pruning.kind](self.remembered(prompts), self.pruning)

    def coming(self, count: int) -> list[tuple[int, Prompt]]:
        """Advance by `count` prompts in the endless sequence of epochs; return each with its epoch."""
        size = len(self.prompts)
        drawn = []
        while len(drawn) < count:
            epoch, first = divmod(self.place, size)
            places = epoch_order(size, self.seed, epoch)[first:first + count - len(drawn)]
            drawn += [(epoch, self.prompts[i]) for i in places]
            self.place += len(places)
        return drawn

    def remembered(self, prompts: list[Prompt]) -> Memory:
        """Gather the history of these prompts for prune.PROMPTS."""
        records = [self.records.get(prompt.id, NO_RECORD) for prompt in prompts]
        sizes = [record.size for record in self.records.values()]

        def column(name: str) -> Tensor:
            return torch.tensor([getattr(record, name) for record in records], dtype=torch.float64)

        return Memory(
            size_K=column("size"),
            skipped_K=column("skipped"),
            easy_K=column("easy"),
            hard_K=column("hard"),
            mean=math.fsum(sizes) / len(sizes) if sizes else math.nan,
            explore=self.explore,
            rows=[prompt.row for prompt in prompts],
        )

    def record(self, rolled: Rolled) -> None:
        """Remember a round's rollouts, for pruning prompts. A group that shows nothing (`has_comparison`)
        counts as if its prompt had not come up."""
        value_NG = rolled.rewards.compared_NG
        easy_N, hard_N = mark_easy_and_hard(value_NG, self.middle)
        size_N = rolled.adv_NG.abs().nanmean(dim=1).nan_to_num()  # 0 without rewards
        shows_N = has_comparison(value_NG)
        for n, draw in enumerate(rolled.kept):
            if shows_N[n]:
                old = self.records.get(draw.prompt.id, NO_RECORD)
                easy = old.easy + 1 if easy_N[n] else 0
                hard = old.hard + 1 if hard_N[n] else 0
                self.records[draw.prompt.id] = PromptRecord(size_N[n].item(), easy, hard)

    def adapt(self, rolled: Rolled) -> None:
        """Move GRESO's p (`adapt_p`) by a step's flat groups, from the second epoch on."""
        if rolled.draws[-1].epoch > 0:
            value_NG = rolled.rewards.compared_NG
            value_NG = value_NG[has_comparison(value_NG)]
            easy_N, hard_N = mark_easy_and_hard(value_NG, self.middle)
            easy = easy_N.double().mean().nan_to_num().item()
            hard = hard_N.double().mean().nan_to_num().item()
            self.explore = adapt_p(self.explore, easy, hard, self.pruning.target)

    def state(self) -> dict:
        """Return plain values for a checkpoint, which later steps do not change."""
        records = {prompt_id: tuple(record) for prompt_id, record in self.records.items()}
        return {"place": self.place, "explore": self.explore, "records": records}

    def restore(self, state: dict) -> None:
        self.place = state["place"]
        self.explore = state["explore"]
        self.records = {prompt_id: PromptRecord(*values) for prompt_id, values in state["records"].items()}
