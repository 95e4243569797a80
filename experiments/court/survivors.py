"""Train on a step's survivors by their weights: the part that abort.py and abort_controls.py share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from config import Config, ConfigError
from court.pass_rates import NotedRewards, require_plain
from prune import Candidates
from records import Group, Pruned, Sample
from settings.kinds import Comparison
from settings.loader import kind


@kind("survivors")
class Survivors(Comparison):
    """Leave-one-out among the completions that were not aborted, by their weights."""


@dataclass(frozen=True, slots=True)
class Drawn(Sample):
    """A completion that went on with probability `prob`."""

    pending: bool = False  # aborted without a reward
    prob: float = 1.0
    weight: float = 1.0
    aborted: bool = False


def drawn(sample: Sample, **decided: float | bool) -> Drawn:
    """Note the decision on a completion."""
    return Drawn(sample.ids, sample.logp, sample.finished, **decided)


def column(groups: list[Group], name: str) -> Tensor:
    """Collect a field of all completions, [N, G]."""
    rows = [[getattr(sample, name) for sample in group.samples] for group in groups]
    return torch.tensor(rows, dtype=torch.float64)


def survivors_advantage(rewards: NotedRewards, settings: Survivors) -> Tensor:
    """Subtract the weighted mean of the others, [N, G]; if no other has a weight above 0, that mean is 0."""
    reward_NG = rewards.total_NG
    weight_NG = rewards.note_NG * ~reward_NG.isnan()
    worth_NG = weight_NG * reward_NG.nan_to_num()
    others_NG = weight_NG.sum(dim=1, keepdim=True) - weight_NG
    sum_NG = worth_NG.sum(dim=1, keepdim=True) - worth_NG
    mean_NG = torch.where(others_NG > 1e-9, sum_NG / others_NG.clamp(min=1e-9), 0.0)
    return reward_NG - mean_NG


def keep_drawn(candidates: Candidates) -> Pruned:
    """Keep the completions of weight above 0."""
    weight_NG = column(candidates.groups, "weight") * ~candidates.adv_NG.isnan()
    return Pruned(weight_NG > 0, weight_NG, column(candidates.groups, "prob"))


def require(cfg: Config) -> None:
    """Raise ConfigError for settings that do not go with aborts."""
    require_plain(cfg)
    if cfg.advantage.kind != "survivors" or cfg.loss.normalize == "token" or cfg.prune.truncated:
        raise ConfigError("aborts need advantage.kind=survivors and prune.truncated=false, and not "
                          "loss.normalize=token: its denominator would depend on the aborts")
    mark, most = cfg.prune.completions.mark, cfg.rollout.max_new_tokens
    if mark >= most:
        raise ConfigError(f"prune.completions.mark={mark} must be below rollout.max_new_tokens={most}")


ADVANTAGES = {Survivors: survivors_advantage}
