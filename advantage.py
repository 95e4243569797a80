"""Compute advantages: rewards in, one number per completion out. Pure functions.

A completion without a reward, nan, has no advantage, nan, and its group is compared as if it were not there.

Dimension key:  N prompts (groups) in one step,  G completions per prompt.
"""

from typing import Any

import torch
from torch import Tensor

from records import Rewards
from settings.loader import ConfigError

ROUNDING = 1e-11  # of a reward, as of a sum in another order


def advantage(rewards: Rewards, settings: Any) -> Tensor:
    """Compare the completions of each group by advantage.kind, [N, G], from all G of them."""
    adv_NG = ESTIMATORS[settings.kind](rewards, settings)
    shape = getattr(adv_NG, "shape", type(adv_NG))
    if shape != rewards.total_NG.shape:  # of a method of one's own: it would be broadcast further on
        raise ConfigError(
            f"advantage.kind={settings.kind} returns {shape}, and must return a tensor "
            f"{[*rewards.total_NG.shape]}, a number for each completion of each group")
    if (adv_NG.isnan() & ~rewards.total_NG.isnan()).any():  # nan is nobody's but those without a reward
        raise ConfigError(f"advantage.kind={settings.kind} returns nan for a completion that has a reward; "
                          "torch.nanmean and its like leave out those without one")
    return adv_NG


def flat_groups(reward_NG: Tensor) -> Tensor:
    """Mark groups of equal rewards, within ROUNDING, bool [N]. Not by std > 0: a mean may be off."""
    high_N = reward_NG.nan_to_num(nan=-torch.inf).amax(dim=1)
    low_N = reward_NG.nan_to_num(nan=torch.inf).amin(dim=1)
    return high_N - low_N <= ROUNDING


def has_comparison(reward_NG: Tensor) -> Tensor:
    """Mark groups that show something: two completions or more have a reward, or all of them, bool [N]."""
    scored_NG = ~reward_NG.isnan()
    return (scored_NG.sum(dim=1) > 1) | scored_NG.all(dim=1)


def centred(reward_NG: Tensor) -> Tensor:
    """Subtract the group's mean: Dr. GRPO (arXiv:2503.20783). Without a division by the deviation, hard and
    easy prompts weigh no more than others. Exactly 0 for a flat group.
    """
    mean_N1 = reward_NG.nanmean(dim=1, keepdim=True)
    level_NG = torch.where(flat_groups(reward_NG)[:, None], reward_NG, mean_N1)
    return reward_NG - level_NG


def group_norm(reward_NG: Tensor, correction: int, eps: float) -> Tensor:
    """Standardise rewards within their group, (r - mean) / (std + eps): GRPO (arXiv:2402.03300).

    correction 0 is the population deviation, 1 the sample deviation, as in released codes.
    A flat group (all rewards equal) and a group of one carry no signal and get exactly 0.
    """
    centred_NG = centred(reward_NG)
    count_N1 = (~reward_NG.isnan()).sum(dim=1, keepdim=True)
    square_N1 = centred_NG.square().nansum(dim=1, keepdim=True)
    std_N1 = (square_N1 / (count_N1 - correction).clamp(min=1)).sqrt()
    return torch.where(flat_groups(reward_NG)[:, None], centred_NG, centred_NG / (std_N1 + eps))


def leave_one_out(reward_NG: Tensor) -> Tensor:
    """Subtract the mean of the other rewards in the group: RLOO (arXiv:2402.14740). With loss.normalize=sum
    the gradient is unbiased; a mean that includes r makes it smaller by the factor (G - 1) / G.

    Not divided by a deviation: the other rewards may have deviation 0 while the difference is not 0.
    """
    count_N1 = (~reward_NG.isnan()).sum(dim=1, keepdim=True)
    factor_N1 = count_N1.to(reward_NG.dtype) / (count_N1 - 1).clamp(min=1)
    return centred(reward_NG) * factor_N1


def shrinkage(reward_NG: Tensor) -> Tensor:
    """Subtract the mean of the others in the group, shrunk towards the mean M of the step's other prompts
    (arXiv:2511.03710). With lam = (N - 1) / N x v / (v + t) the baseline is (1 - lam) m + lam M; v is the
    noise of a group's mean and t the spread of the means, both of the other prompts alone.

    No part of the baseline reads its own completion, so it is unbiased as `leave_one_out` is. A flat group
    has an advantage if the other prompts' mean is another.
    """
    count_N = (~reward_NG.isnan()).sum(dim=1)
    mean_N = reward_NG.nanmean(dim=1).nan_to_num()
    noise_N = centred(reward_NG).square().nansum(dim=1) / (count_N * (count_N - 1)).clamp(min=1)
    known_N = (count_N > 0).to(mean_N.dtype)
    others_NN = known_N - known_N.diag()
    many_N1 = others_NN.sum(dim=1, keepdim=True)
    share_NN = others_NN / many_N1.clamp(min=1)
    target_N1 = (share_NN @ mean_N)[:, None]
    spread_N1 = (share_NN * (mean_N - target_N1).square()).sum(dim=1, keepdim=True)
    noise_N1 = (share_NN @ noise_N)[:, None]
    lam_N1 = many_N1 / (many_N1 + 1) * noise_N1 / (noise_N1 + spread_N1).clamp(min=1e-12)
    return (1 - lam_N1) * leave_one_out(reward_NG) + lam_N1 * (reward_NG - target_N1)


def decoupled(rewards: Rewards, correction: int, eps: float) -> Tensor:
    """Standardise each component within its group, sum them by weight, and divide by the deviation over the
    step: GDPO (arXiv:2601.05242). Rewards that are summed first map distinct combinations to one advantage.

    Every group's sum is 0, so the step's mean is 0 and only its scale is normalised: over completions, as the
    authors do in TRL. In verl it is over tokens, so long completions count more. A component that is nan
    for a completion adds nothing to it.
    """
    adv_NG = sum(weight * group_norm(rewards.components[name], correction, eps).nan_to_num()
                 for name, weight in rewards.weights.items() if weight)
    none_NG = rewards.total_NG.isnan()
    scale = adv_NG[~none_NG].std(correction=correction) + eps if adv_NG.any() else 1
    return (adv_NG / scale).masked_fill(none_NG, torch.nan)


# advantage.kind -> function of the rewards and of that section of the config, [N, G]
ESTIMATORS = {
    "group_norm": lambda rewards, settings: group_norm(rewards.total_NG, settings.correction, settings.eps),
    "centred": lambda rewards, settings: centred(rewards.total_NG),
    "leave_one_out": lambda rewards, settings: leave_one_out(rewards.total_NG),
    "shrinkage": lambda rewards, settings: shrinkage(rewards.total_NG),
    "decoupled": lambda rewards, settings: decoupled(rewards, settings.correction, settings.eps),
}
