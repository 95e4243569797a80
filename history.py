"""Draw prompts in a seeded order, and remember the rewards of their rollouts.

Dimension key:  N prompts (groups) rolled out in one step,  G completions per prompt,  K prompts that come up.
"""

import math
from functools import lru_cache
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from advantage import flat_groups, has_comparison
from infra.dist import seed_for
from prune import PROMPTS, Memory, adapt_p
from records import Prompt, PromptDraw, Rolled
from settings import kinds


@lru_cache(2)  # a step may end one epoch and begin the next
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Permute `count` prompts for one epoch: a pure function of (seed, epoch)."""
    return np.random.Generator(np.random.Philox(seed_for(seed, epoch, "order"))).permutation(count)


def sample_seed(seed: int, epoch: int, prompt_id: str, g: int) -> int:
    """Derive the seed of a prompt's g-th completion in an epoch; it does not depend on rank or step."""
    return seed_for(seed, epoch, prompt_id, g, "rollout")


# What is known of a prompt's rollouts, for pruning it; a rollout has all of its completions.
RECORD = np.dtype([
    ("size", np.float64),   # mean |A| of the newest; nan before the first
    ("flat", np.int32),     # newest in a row with equal rewards, all high; below 0: with all low
    ("skipped", np.int32),  # times that the prompt was skipped since the newest
])


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
        self.adapts = pruning.refills  # prompts that are skipped are replaced, and `adapt` learns
        self.middle = middle  # equal values above it mark an easy prompt (collect.reward_midpoint)
        self.place = 0
        self.per_epoch = len(prompts)
        # By the number of the prompt.
        self.records = np.zeros(0 if pruning.kind == "none" else self.per_epoch, RECORD)
        self.records["size"] = math.nan
        explore = getattr(pruning, "explore", 0.5)
        self.explore = explore, explore  # GRESO's p for easy and for hard prompts

    def draw(self, count: int) -> list[PromptDraw]:
        """Draw the next `count` prompts, kept or skipped; a kind that refills draws until `count`
        are kept.

        Whether a prompt is kept is a function of the seed, the epoch and its id, and of the draws before this
        call.
        """
        if self.pruning.kind == "none":
            return [PromptDraw(self.prompts[k], epoch, number=k) for epoch, k in self.coming(count)]
        draws = []
        missing = count
        while missing:
            block = self.coming(missing)
            prob_K = self.rollout_prob([k for _, k in block])
            for (epoch, k), prob in zip(block, prob_K.tolist(), strict=True):
                prompt = self.prompts[k]
                # A seed is uniform below 2^63.
                kept = seed_for(self.seed, epoch, prompt.id, "prompt") < prob * 2**63
                weight = 0.0
                if kept:
                    weight = 1.0 if self.adapts else 1 / prob
                elif not math.isnan(self.records["size"][k]):
                    self.records["skipped"][k] += 1
                draws.append(PromptDraw(prompt, epoch, prob, weight, number=k))
            missing = count - sum(draw.kept for draw in draws) if self.adapts else 0
        return draws

    def recall(self, lines: list[dict]) -> list[PromptDraw]:
        """Return the draws that lines of decisions.jsonl name. Raises KeyError for an unknown prompt."""
        numbers = {prompt.id: k for k, prompt in enumerate(self.prompts)}
        return [PromptDraw(self.prompts[k], line["epoch"], line["prob"], line["weight"], k)
                for line in lines for k in [numbers[line["id"]]]]

    def rollout_prob(self, numbers: list[int]) -> Tensor:
        """Compute the probability of a rollout of the prompts with these numbers, [K]."""
        return PROMPTS[self.pruning.kind](self.remembered(numbers), self.pruning)

    def coming(self, count: int) -> list[tuple[int, int]]:
        """Advance by `count` prompts in the endless sequence of epochs; return epoch and number of each."""
        drawn = []
        while len(drawn) < count:
            epoch, first = divmod(self.place, self.per_epoch)
            places = epoch_order(self.per_epoch, self.seed, epoch)[first:first + count - len(drawn)]
            drawn += [(epoch, k) for k in places.tolist()]
            self.place += len(places)
        return drawn

    def remembered(self, numbers: list[int]) -> Memory:
        """Gather the history of these prompts for prune.PROMPTS."""
        records = self.records[numbers]
        flat_K = torch.from_numpy(records["flat"].astype(np.float64))
        sizes = self.records["size"]
        known = sizes[~np.isnan(sizes)]
        return Memory(
            size_K=torch.from_numpy(records["size"]),
            skipped_K=torch.from_numpy(records["skipped"].astype(np.float64)),
            easy_K=flat_K.clamp(min=0),
            hard_K=(-flat_K).clamp(min=0),
            mean=fmean(known) if len(known) else math.nan,  # of an exact sum, whatever the order
            explore=self.explore,
            rows=[self.prompts[k].row for k in numbers]
        )

    def record(self, rolled: Rolled) -> None:
        """Remember a round's rollouts, for pruning prompts. A group that shows nothing (`has_comparison`)
        counts as if its prompt had not come up. Without pruning of prompts nothing is remembered."""
        if self.pruning.kind == "none":
            return
        value_NG = rolled.rewards.compared_NG
        easy_N, hard_N = mark_easy_and_hard(value_NG, self.middle)
        size_N = rolled.adv_NG.abs().nanmean(dim=1).nan_to_num()  # 0 without rewards
        shows_N = has_comparison(value_NG)
        for n, draw in enumerate(rolled.kept):
            if shows_N[n]:
                flat = self.records["flat"][draw.number]
                easy = max(flat, 0) + 1 if easy_N[n] else 0
                hard = max(-flat, 0) + 1 if hard_N[n] else 0
                self.records[draw.number] = size_N[n].item(), easy - hard, 0

    def adapt(self, rolled: Rolled) -> None:
        """Move GRESO's p (`adapt_p`) by a step's flat groups, from the second epoch on."""
        if self.adapts and rolled.draws[-1].epoch > 0:
            value_NG = rolled.rewards.compared_NG
            value_NG = value_NG[has_comparison(value_NG)]
            marked = mark_easy_and_hard(value_NG, self.middle)
            easy, hard = (flags_N.double().mean().nan_to_num().item() for flags_N in marked)
            self.explore = adapt_p(self.explore, easy, hard, self.pruning.target)

    def state(self) -> dict:
        """Return plain values for a checkpoint, which later steps do not change."""
        records = torch.from_numpy(self.records.copy().view(np.uint8))  # 16 bytes of each prompt
        return {"place": self.place, "explore": self.explore, "records": records}

    def restore(self, state: dict) -> None:
        self.place = state["place"]
        self.explore = state["explore"]
        self.records[:] = state["records"].numpy().view(RECORD)
