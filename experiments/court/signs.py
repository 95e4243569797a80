"""Learn from right or from wrong completions alone (arXiv:2506.01347), without a baseline.

The reward is +1 for a right completion and -1 for a wrong one. PSR takes the right ones alone (wrong=0), NSR
the wrong ones alone (right=0), and W-REINFORCE both, the right ones at a tenth (right=0.1, the default).
"""

import torch
from torch import Tensor

from records import Rewards
from settings.kinds import Comparison
from settings.loader import PositiveOrZero, kind


@kind("signs")
class Signs(Comparison):
    """A number for right completions, and another one below 0 for wrong ones."""
    right: PositiveOrZero = 0.1
    wrong: PositiveOrZero = 1.0


def signs(rewards: Rewards, settings: Signs) -> Tensor:
    """Compute the advantage of rewards of 1 and 0, [N, G]."""
    reward_NG = rewards.total_NG
    adv_NG = torch.full_like(reward_NG, -settings.wrong).masked_fill(reward_NG > 0.5, settings.right)
    return adv_NG + 0 * reward_NG  # nan stays


ADVANTAGES = {Signs: signs}
