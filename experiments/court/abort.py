"""Abort rollouts at a token mark without bias. (abort_controls.py does it with bias.)

All completions are sampled up to `mark` tokens. One that has not ended then goes on with probability

    P = exp(bias + spread log h (1 - h) + rate log h + confidence l + prompt log m)    within [floor, 1]

h is the prompt's pass rate in its newest rollout, m its length, l the mean log-prob of the completion so
far. A prompt without a history has P = 1. The draw is a function of seed, epoch, prompt, copy and mark. A
completion goes on in the same engine, with prompt and tokens so far as the prompt, as in leaves/windows.

Ours: a survivor weighs 1 / P under the denominators of all completions, the aborted ones included, and its
baseline is the mean of the OTHER completions by their weights. P reads nothing behind the mark, so with
loss.normalize=sum the mean of the gradient is the policy gradient. (A mean per completion, `sequence`, is no
policy gradient, and there a baseline's error does not cancel.) DUET (arXiv:2605.08441) weighs aborts too.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from collect import Sampler
from config import Config, ConfigError
from court.pass_rates import NotedRewards, PassRates, noted
from court.survivors import ADVANTAGES as ADVANTAGES
from court.survivors import Drawn, column, drawn, keep_drawn, require
from history import PromptHistory, sample_seed
from infra.dist import seed_for
from records import Group, PromptDraw, Request, Sample
from settings.loader import Count, kind


@kind("abort")
class Abort:
    """Train on the completions that were not aborted, weighed up. Unbiased."""
    mark: Count = 16               # tokens after which a completion may be aborted
    bias: float = 0.9              # with `spread` 1/2: P = 2.5 sqrt(h (1 - h))
    spread: float = 0.5
    rate: float = 0.0
    confidence: float = 0.0
    prompt: float = 0.0
    floor: Annotated[float, "in (0, 1]"] = 0.1


def go_on_prob(settings: Abort, pass_rate: float, prompt_tokens: int, logp: list[float]) -> float:
    """Compute P from a pass rate in (0, 1), the prompt's length and the log-probs so far."""
    size = settings.bias + settings.spread * math.log(pass_rate * (1 - pass_rate))
    size += settings.rate * math.log(pass_rate) + settings.prompt * math.log(prompt_tokens)
    size += settings.confidence * sum(logp) / len(logp)
    return min(1.0, max(settings.floor, math.exp(size)))


@dataclass(frozen=True, slots=True)
class AbortSampler:
    """Sample up to the mark, decide which completions go on, and sample the remainder of these."""

    sampler: Sampler
    rates: PassRates
    settings: Abort

    def rollout(self, draws: list[PromptDraw]) -> list[Group]:
        G, most = self.sampler.sampling.group_size, self.sampler.sampling.max_new_tokens
        mark = self.settings.mark
        turns = [(draw, g) for draw in draws for g in range(G)]
        seeds = [sample_seed(self.sampler.seed, draw.epoch, draw.prompt.id, g) for draw, g in turns]
        asked = [Request(draw.prompt, seed, mark) for (draw, _), seed in zip(turns, seeds, strict=True)]
        opening = self.sampler.complete(asked)
        samples = []
        for n, draw in enumerate(draws):
            of_group = slice(n * G, (n + 1) * G)
            samples += self.decide(draw, seeds[of_group], opening[of_group])
        places = [i for i, sample in enumerate(samples) if not sample.finished and not sample.aborted]
        if places:  # an engine may not take an empty list
            longer = [Request(turns[i][0].prompt, seed_for(seeds[i], mark), most - mark, samples[i])
                      for i in places]
            for i, piece in zip(places, self.sampler.complete(longer), strict=True):
                samples[i] = samples[i].joined(piece)
        return [Group(draw.prompt, tuple(samples[n * G:(n + 1) * G])) for n, draw in enumerate(draws)]

    def decide(self, draw: PromptDraw, seeds: list[int], opening: list[Sample]) -> list[Drawn]:
        """Decide which completions of a prompt go on. An aborted one is `pending`, so it has no reward."""
        rate, decided = self.rates.rates.get(draw.prompt.id), []
        for seed, sample in zip(seeds, opening, strict=True):
            prob = 1.0
            if rate and not sample.finished:
                prob = go_on_prob(self.settings, rate.mean, len(draw.prompt.ids), list(sample.logp))
            aborted = seed_for(seed, self.settings.mark, "abort") / 2**63 >= prob
            weight = 0.0 if aborted else 1 / prob
            decided.append(drawn(sample, pending=aborted, prob=prob, weight=weight, aborted=aborted))
        return decided

    def score(self, groups: list[Group]) -> NotedRewards:
        """Score all completions; the aborted ones have 0 in every component."""
        rewards, aborted_NG = self.sampler.score(groups), column(groups, "aborted").bool()
        components = {name: x_NG.masked_fill(aborted_NG, 0.0) for name, x_NG in rewards.components.items()}
        return noted(replace(rewards, components=components), column(groups, "weight"))


def wrap(cfg: Config, history: PromptHistory, sampler: Sampler) -> tuple[PromptHistory, Any]:
    """Replace history and sampler if prune.completions.kind=abort."""
    if cfg.prune.completions.kind != "abort":
        return history, sampler
    require(cfg)
    if cfg.loss.denominator != "all":
        raise ConfigError("prune.completions.kind=abort needs loss.denominator=all")
    rates = PassRates(history)
    return rates, AbortSampler(sampler, rates, cfg.prune.completions)


COMPLETIONS = {Abort: lambda candidates, settings: keep_drawn(candidates)}
