"""Abort rollouts at a token mark with bias: controls for abort.py, after how papers treat an abort.

    dropped   random by P of abort.py; survivors weigh 1 and are compared with one another alone
    failed    certain if P is below `cut`; an aborted completion has reward 0 and is trained on up to the
              mark, as the failure state of ESPO (arXiv:2605.29860)
    balanced  of a group's unfinished completions a share `cut` goes on, half of it with the highest log-prob
              so far and half with the lowest: a balance of right and wrong as predicted, after ARRoL
              (arXiv:2603.24840), where a trained head predicts

The rules are the papers' ideas in their simplest form, and not their code.
"""

import math
from dataclasses import replace
from typing import Any, Literal

from collect import Sampler
from config import Config
from court.abort import Abort, AbortSampler, go_on_prob
from court.pass_rates import PassRates
from court.survivors import ADVANTAGES as ADVANTAGES
from court.survivors import Drawn, drawn, keep_drawn, require
from history import PromptHistory
from records import PromptDraw, Sample
from settings.loader import ZeroToOne, kind


@kind("biased_abort")
class BiasedAbort(Abort):
    """Train on the completions that were not aborted, at weight 1. Biased."""
    aborted: Literal["dropped", "failed", "balanced"] = "dropped"
    cut: ZeroToOne = 0.5           # failed: the least P that goes on; balanced: the share that goes on


def balanced(confidence: list[float], share: float) -> list[bool]:
    """Mark ceil(share x all) items, half of them the largest and half the smallest; of an odd number the
    largest have one more."""
    order = sorted(range(len(confidence)), key=confidence.__getitem__, reverse=True)
    count = math.ceil(share * len(order) - 1e-9)
    upper = (count + 1) // 2
    ends = order[:upper] + order[len(order) - (count - upper):]
    return [i in ends for i in range(len(order))]


class BiasedSampler(AbortSampler):
    """Decide with bias which completions go on."""

    def decide(self, draw: PromptDraw, seeds: list[int], opening: list[Sample]) -> list[Drawn]:
        if self.settings.aborted == "dropped":
            decided = super().decide(draw, seeds, opening)
            return [replace(sample, weight=float(not sample.aborted)) for sample in decided]
        goes_on = [True] * len(opening)
        unfinished = [i for i, sample in enumerate(opening) if not sample.finished]
        if self.settings.aborted == "balanced":
            kept = balanced([sum(opening[i].logp) for i in unfinished], self.settings.cut)
            for i, keep in zip(unfinished, kept, strict=True):
                goes_on[i] = keep
        elif rate := self.rates.rates.get(draw.prompt.id):
            for i in unfinished:
                prob = go_on_prob(self.settings, rate.mean, len(draw.prompt.ids), list(opening[i].logp))
                goes_on[i] = prob >= self.settings.cut
        failed = float(self.settings.aborted == "failed")
        return [drawn(sample, pending=not on and not failed, weight=1.0 if on else failed, aborted=not on)
                for sample, on in zip(opening, goes_on, strict=True)]


def wrap(cfg: Config, history: PromptHistory, sampler: Sampler) -> tuple[PromptHistory, Any]:
    """Replace history and sampler if prune.completions.kind=biased_abort."""
    if cfg.prune.completions.kind != "biased_abort":
        return history, sampler
    require(cfg)
    rates = PassRates(history)
    return rates, BiasedSampler(sampler, rates, cfg.prune.completions)


COMPLETIONS = {BiasedAbort: lambda candidates, settings: keep_drawn(candidates)}
