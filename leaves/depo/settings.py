"""Settings of DEPO: prune.prompts.kind=depo."""

from collections.abc import Iterator
from typing import Any

from settings.kinds import Draw
from settings.loader import CountOrZero, Positive, ZeroToOne, kind
from settings.rules import Rule


@kind("depo")
class Depo(Draw):
    """DEPO (arXiv:2602.06375): roll out prompts that are estimated neither too hard nor too easy. Biased."""
    refills = True
    low: ZeroToOne = 0.15          # of the share of right answers that is estimated, from here ...
    high: ZeroToOne = 0.85         # ... up to here a prompt is rolled out
    warmup_steps: CountOrZero = 100  # first steps: every prompt is rolled out
    explore: ZeroToOne = 0.0       # chance of a rollout outside; 0 as released: it may never come again
    lr: Positive = 2e-4            # of the network's AdamW


CHOICES = {"prune.prompts=depo": Depo}
HOOKS = ("parts",)


def rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules that no table states."""
    prompts = cfg.prune.prompts
    yield "prune.prompts.high", prompts.low < prompts.high, f"above prune.prompts.low={prompts.low}"
    yield ("prune.prompts.kind", cfg.reward.accuracy != 0,
           "another kind unless reward.accuracy has a weight, which tells what is right")
