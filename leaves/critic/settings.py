"""Settings of a critic: advantage.kind=gae, and the section `critic`."""

from collections.abc import Iterator
from typing import Any, Literal

from settings.kinds import Comparison
from settings.loader import Count, CountOrZero, Positive, ZeroToOne, frozen, kind
from settings.rules import Rule


@kind("gae")
class Gae(Comparison):
    """PPO (arXiv:1707.06347), VAPO (arXiv:2504.05118), T-PPO (arXiv:2506.15050): with a critic."""
    compares, by_model = False, True
    lam: ZeroToOne = 0.95          # lambda of the policy's advantage
    # In place of lam, 1 - 1 / (alpha x length), and 0 up to 1 / alpha tokens. VAPO has 0.05; for short
    # answers take 1
    alpha: Positive | None = None
    lam_critic: ZeroToOne = 1.0    # lambda of the critic's target; 1: the reward itself
    bootstrap: Literal["prev", "true"] = "prev"  # value behind a cut: of the state before (EGAE), or its own


@frozen
class Critic:
    """The critic of advantage.kind=gae, a value head on the policy's backbone; all else is as in `optim`."""
    lr: Positive | None = None     # learning rate, constant after the warm-up
    warmup_steps: CountOrZero = 0  # steps of a rising rate, from 0
    epochs: Count = 1              # passes over each rollout
    minibatches: Count = 1         # optimizer steps per pass
    pretrain_steps: CountOrZero = 0  # first steps of the run: only the critic learns


CHOICES = {"advantage=gae": Gae, "critic": Critic}
HOOKS = ("parts",)
ONLY_WITH = {
    "windows.tokens": ["advantage.bootstrap: nothing is cut"],
    "advantage.kind=gae": ["critic.lr", "critic.warmup_steps", "critic.epochs", "critic.minibatches",
                           "critic.pretrain_steps"],
}
REQUIRES = {
    "advantage.kind=gae": ["prune.tokens.kind=none: a critic's advantages need all tokens"],
    "advantage.alpha": ["advantage.lam=0.95: leave it out, for alpha is in its place"],
}


def rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules that no table states."""
    if cfg.advantage.kind == "gae":
        yield "critic.lr", cfg.critic.lr, "above 0 with advantage.kind=gae"
        yield ("critic.pretrain_steps", cfg.critic.pretrain_steps < cfg.steps,
               f"in 0..{cfg.steps - 1}, below steps")
