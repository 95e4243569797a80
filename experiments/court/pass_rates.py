"""Remember each prompt's rewards and lengths: the history that allocation and aborts decide by.

Rewards lie in [0, 1]. A rate is of past steps alone, so a decision by it is independent of the rewards that
it is about.
"""

from dataclasses import astuple, dataclass, fields

from torch import Tensor

from config import Config, ConfigError
from history import PromptHistory
from records import Rewards, Rolled
from settings.loader import flatten

PLAIN = {
    "prune.prompts.kind": "none", "rollout.until": "offered", "rollout.drafts": None,
    "windows.tokens": None, "rollout.stop": None, "labels.kind": "gold",
    "update.minibatches": 1,
}


@dataclass(frozen=True, slots=True)
class Rate:
    """The sums over a prompt's completions."""

    right: float      # sum of the rewards of its newest completions, by their weights
    count: float      # sum of these weights
    tokens: float     # mean length of these completions
    all_right: float  # the same sums over all epochs
    all_count: float

    @property
    def mean(self) -> float:
        """Estimate the pass rate with one right and one wrong completion added, never 0 or 1."""
        return (self.right + 1) / (self.count + 2)


class PassRates(PromptHistory):
    """A history that also keeps the pass rate of each prompt."""

    def __init__(self, history: PromptHistory):
        super().__init__(history.prompts, history.pruning, history.seed, history.middle)
        self.remembers = True  # `record` is called
        self.rates: dict[str, Rate] = {}

    def record(self, rolled: Rolled) -> None:
        """Keep the sums over each prompt's completions, however many groups they are in."""
        seen: dict[str, list[tuple[float, float, int]]] = {}
        for group, reward_G in zip(rolled.groups, rolled.rewards.total_NG.tolist(), strict=True):
            for sample, reward in zip(group.samples, reward_G, strict=True):
                weight = getattr(sample, "weight", 1.0)
                if weight > 0 and reward == reward:  # not nan
                    seen.setdefault(group.prompt.id, []).append((weight, reward, sample.length))
        for prompt_id, completions in seen.items():
            count = sum(weight for weight, _, _ in completions)
            right = sum(weight * reward for weight, reward, _ in completions)
            tokens = sum(weight * length for weight, _, length in completions) / count
            old = self.rates.get(prompt_id, Rate(0, 0, 0, 0, 0))
            self.rates[prompt_id] = Rate(right, count, tokens, old.all_right + right, old.all_count + count)

    def state(self) -> dict:
        return super().state() | {"rates": {name: [*astuple(rate)] for name, rate in self.rates.items()}}

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.rates = {prompt_id: Rate(*sums) for prompt_id, sums in state["rates"].items()}


@dataclass(frozen=True, slots=True)
class NotedRewards(Rewards):
    """Rewards with a number of each completion that its advantage needs, [N, G]."""

    note_NG: Tensor | None = None


def noted(rewards: Rewards, note_NG: Tensor) -> NotedRewards:
    return NotedRewards(**{f.name: getattr(rewards, f.name) for f in fields(Rewards)}, note_NG=note_NG)


def require_plain(cfg: Config) -> None:
    """Raise ConfigError for a setting that a sampler of this folder does not go with."""
    settings = flatten(cfg)
    for key, wanted in PLAIN.items():
        value = settings.get(key)  # None: of a leaf that is not chosen
        if value != wanted:
            needed = "null" if wanted is None else wanted
            raise ConfigError(f"{key}={value} must be {needed} with this method")
