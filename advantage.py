"""Compute advantages: rewards in, one number per completion out. Pure functions.

A completion without a reward, nan, has no advantage, nan, and its group is compared as if it were not there.

Dimension key:  N prompts (groups) in one step,  G completions per prompt.
"""

from typing import Any

import torch
from torch import Tensor

from methods.preference import of_pairs
from records import Rewards


def advantage(rewards: Rewards, settings: Any) -> Tensor:
    """Compare the completions of each group by advantage.kind, [N, G], from all G of them."""
    adv_NG = ESTIMATORS[settings.kind](rewards, settings)
    if adv_NG.shape != rewards.total_NG.shape:  # of a method of one's own: it would be broadcast further on
        raise ValueError(f"advantage.kind={settings.kind} returns shape {[*adv_NG.shape]}, and must return "
                         f"{[*rewards.total_NG.shape]}, a number for each completion of each group")
    if (adv_NG.isnan() & ~rewards.total_NG.isnan()).any():  # nan is nobody's but those without a reward
        raise ValueError(f"advantage.kind={settings.kind} returns nan for a completion that has a reward; "
                         "torch.nanmean and its like leave out those without one")
    return adv_NG


def flat(reward_NG: Tensor) -> Tensor:
    """Mark groups of equal rewards, bool [N]. Not by std > 0: the mean of equal floats may be off."""
    return reward_NG.nan_to_num(nan=-torch.inf).amax(dim=1) <= reward_NG.nan_to_num(nan=torch.inf).amin(dim=1)


def comparable(reward_NG: Tensor) -> Tensor:
    """Mark groups that show something: two completions or more have a reward, or all of them, bool [N]."""
    scored_NG = ~reward_NG.isnan()
    return (scored_NG.sum(dim=1) > 1) | scored_NG.all(dim=1)


def count_scored(reward_NG: Tensor) -> Tensor:
    """Count the completions of each group that have a reward, [N, 1], at least 1."""
    return (~reward_NG.isnan()).to(reward_NG.dtype).sum(dim=1, keepdim=True).clamp(min=1)


def centred(reward_NG: Tensor) -> Tensor:
    """Subtract the group's mean: Dr. GRPO (arXiv:2503.20783). Without a division by the deviation, hard and
    easy prompts weigh no more than others. Exactly 0 for a flat group.
    """
    level_NG = torch.where(flat(reward_NG)[:, None], reward_NG, reward_NG.nanmean(dim=1, keepdim=True))
    return reward_NG - level_NG


def group_norm(reward_NG: Tensor, correction: int, eps: float) -> Tensor:
    """Standardise rewards within their group, (r - mean) / (std + eps): GRPO (arXiv:2402.03300).

    correction 0 is the paper's population deviation, 1 the sample deviation of the released codes.
    A group whose rewards are all equal carries no signal and gets exactly 0, and so does a group of one.
    """
    centred_NG = centred(reward_NG)
    count_N1 = (count_scored(reward_NG) - correction).clamp(min=1)
    std_N1 = (centred_NG.square().nansum(dim=1, keepdim=True) / count_N1).sqrt()
    return torch.where(flat(reward_NG)[:, None], centred_NG, centred_NG / (std_N1 + eps))


def leave_one_out(reward_NG: Tensor) -> Tensor:
    """Subtract the mean of the other rewards in the group: RLOO (arXiv:2402.14740). Unbiased, unlike a mean
    that includes r.

    Not divided by a deviation: that of the other rewards may be 0 while the difference is not.
    """
    count_N1 = count_scored(reward_NG)
    return centred(reward_NG) * (count_N1 / (count_N1 - 1).clamp(min=1))


def decoupled(rewards: Rewards, correction: int, eps: float) -> Tensor:
    """Standardise each component within its group, sum them by weight, and divide by the deviation over the
    step: GDPO (arXiv:2601.05242). Rewards that are summed first map distinct combinations to one advantage.

    Every group's sum is 0, so the step's mean is 0 and only its scale is normalised: over completions, as the
    authors do in TRL; verl does it over tokens, where long completions count more. A component that is nan
    for a completion adds nothing to it.
    """
    adv_NG = sum(weight * group_norm(rewards.components[name], correction, eps).nan_to_num()
                 for name, weight in rewards.weights.items())
    none_NG = rewards.total_NG.isnan()
    scale = adv_NG[~none_NG].std(correction=correction) + eps if adv_NG.any() else 1
    return (adv_NG / scale).masked_fill(none_NG, torch.nan)


# advantage.kind -> function of the rewards and of that section of the config, [N, G]
ESTIMATORS = {
    "group_norm": lambda rewards, settings: group_norm(rewards.total_NG, settings.correction, settings.eps),
    "centred": lambda rewards, settings: centred(rewards.total_NG),
    "leave_one_out": lambda rewards, settings: leave_one_out(rewards.total_NG),
    "decoupled": lambda rewards, settings: decoupled(rewards, settings.correction, settings.eps),
    # At the initial policy; before every optimizer step `preference.compare` has them for the policy of then.
    "preference": lambda rewards, settings: of_pairs(torch.zeros_like(rewards.total_NG), rewards.total_NG,
                                                     settings),
    "group_preference": lambda rewards, settings: centred(rewards.total_NG),
    # Read by pruning alone; the loss takes the critic's advantage of every token (methods/critic.py).
    "gae": lambda rewards, settings: group_norm(rewards.total_NG, correction=1, eps=1e-4),
}
