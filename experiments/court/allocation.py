"""Give each prompt its own number of completions, n_q, by its history alone: ragged groups.

Rules for n_q, up to a common factor, with a prompt's pass rate p and mean length c in earlier epochs:

    cost       sqrt(p (1 - p) / c)   ours: Neyman's allocation if a completion costs c tokens and all score
                                     gradients have one norm
    spread     sqrt(p (1 - p))       the rule of VIP (arXiv:2602.01601) without its Gaussian process
    posterior  E[p (1 - p)] under a Beta posterior of all epochs: the value that CERO (arXiv:2606.05606) gives
               to one more rollout, without its dual variables across epochs
    length     1 / c                 ours, a control: the pass rate is not read

The factor is such that a step is expected to cost as many tokens as with rollout.group_size completions each.
A prompt without a history gets rollout.group_size.

Every completion is a group of its own, as in leaves/windows; its draw weighs (mean n) / n_q, so that the
loss is a mean over prompts of means over n_q. The baseline is the prompt's mean reward
without this completion. n_q is known before the step: with loss.normalize=sum every rule is unbiased.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from collect import Sampler
from config import Config
from court.pass_rates import NotedRewards, PassRates, Rate, noted, require_plain
from history import PromptHistory, sample_seed
from infra.dist import seed_for
from records import Group, PromptDraw, Request
from settings.kinds import Comparison
from settings.loader import Count, kind


@kind("allocated")
class Allocated(Comparison):
    """Leave-one-out among as many completions of each prompt as its history asks for."""
    rule: Literal["cost", "spread", "posterior", "length"] = "cost"
    least: Annotated[int, "at least 2 to compare them"] = 2  # completions of a prompt
    most: Count = 32


def size_of(rate: Rate, rule: str) -> float:
    """Compute a prompt's number of completions up to a common factor."""
    if rule == "length":
        return 1 / rate.tokens
    if rule == "posterior":
        a, b = 1 + rate.all_right, 1 + rate.all_count - rate.all_right
        return a * b / ((a + b) * (a + b + 1))
    spread = rate.mean * (1 - rate.mean)
    return (spread / rate.tokens if rule == "cost" else spread) ** 0.5


def share_out(size_K: Tensor, cost_K: Tensor, budget: float, least: int, most: int) -> Tensor:
    """Compute factor x size within [least, most], [K], which costs `budget` together if the bounds allow it.

    share_out([2, 1], [1, 1], budget=9, least=2, most=32) = [6, 3].
    """
    low, high = 0.0, most / size_K.min().item()
    for _ in range(100):
        middle = (low + high) / 2
        spent = ((middle * size_K).clamp(least, most) * cost_K).sum().item()
        low, high = (middle, high) if spent <= budget else (low, middle)
    return (low * size_K).clamp(least, most)


@dataclass(frozen=True, slots=True)
class Copy(PromptDraw):
    """A draw of one of a prompt's completions."""

    copy: int = 0

    @property
    def noted(self) -> dict:
        return {"copy": self.copy} if self.copy else {}


class Allocation(PassRates):
    """The history of prompts, which draws each as often as its rate asks for."""

    def __init__(self, history: PromptHistory, settings: Allocated, group_size: int):
        super().__init__(history)
        self.settings = settings
        self.group_size = group_size

    def draw(self, count: int) -> list[PromptDraw]:
        """Draw `count` prompts, and return each copy as a draw of its own."""
        draws = super().draw(count)
        numbers = self.numbers(draws)
        mean = sum(numbers) / len(numbers)
        copies = []
        for draw, n in zip(draws, numbers, strict=True):
            of_draw = draw.prompt, draw.epoch, draw.prob, mean / n, draw.number
            copies += [Copy(*of_draw, copy) for copy in range(n)]
        return copies

    def numbers(self, draws: list[PromptDraw]) -> list[int]:
        """Decide how many completions each prompt gets; a fraction is rounded up with its probability."""
        known = [k for k, draw in enumerate(draws) if draw.prompt.id in self.rates]
        numbers = [self.group_size] * len(draws)
        if not known:
            return numbers
        rates = [self.rates[draws[k].prompt.id] for k in known]
        size_K = torch.tensor([size_of(rate, self.settings.rule) for rate in rates], dtype=torch.float64)
        cost_K = torch.tensor([rate.tokens for rate in rates], dtype=torch.float64)
        budget = self.group_size * cost_K.sum().item()
        wanted_K = share_out(size_K, cost_K, budget, self.settings.least, self.settings.most)
        for k, wanted in zip(known, wanted_K.tolist(), strict=True):
            point = seed_for(self.seed, draws[k].epoch, draws[k].prompt.id, "copies") / 2**63
            numbers[k] = int(wanted) + (point < wanted % 1)
        return numbers


@dataclass(frozen=True, slots=True)
class CopySampler:
    """Sample one completion for each draw."""

    sampler: Sampler

    def rollout(self, draws: list[PromptDraw]) -> list[Group]:
        limit = self.sampler.sampling.max_new_tokens
        seeds = [sample_seed(self.sampler.seed, draw.epoch, draw.prompt.id, draw.copy) for draw in draws]
        requests = [Request(draw.prompt, seed, limit) for draw, seed in zip(draws, seeds, strict=True)]
        samples = self.sampler.complete(requests)
        return [Group(draw.prompt, (sample,)) for draw, sample in zip(draws, samples, strict=True)]

    def score(self, groups: list[Group]) -> NotedRewards:
        """Score all copies, and number their prompts."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(g.prompt.id for g in groups))}
        prompt_N = torch.tensor([numbers[group.prompt.id] for group in groups])
        return noted(self.sampler.score(groups), prompt_N[:, None])


def leave_one_copy_out(reward_N: Tensor, prompt_N: Tensor) -> Tensor:
    """Subtract the mean reward of the prompt's other copies, [N]; 0 for a copy alone."""
    scored_N = (~reward_N.isnan()).double()
    zeros_P = torch.zeros(int(prompt_N.max()) + 1, dtype=torch.float64)
    others_N = zeros_P.index_add(0, prompt_N, scored_N)[prompt_N] - 1
    sum_N = zeros_P.index_add(0, prompt_N, reward_N.nan_to_num())[prompt_N]
    mean_N = (sum_N - reward_N) / others_N.clamp(min=1)
    return torch.where(others_N == 0, 0 * reward_N, reward_N - mean_N)


def wrap(cfg: Config, history: PromptHistory, sampler: Sampler) -> tuple[PromptHistory, Any]:
    """Replace history and sampler if advantage.kind=allocated."""
    if cfg.advantage.kind != "allocated":
        return history, sampler
    require_plain(cfg)
    return Allocation(history, cfg.advantage, cfg.rollout.group_size), CopySampler(sampler)


ADVANTAGES = {Allocated: lambda rewards, settings: leave_one_copy_out(
    rewards.total_NG[:, 0], rewards.note_NG[:, 0])[:, None]}
