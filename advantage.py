"""Advantage estimators: rewards in, advantages out. Pure functions; this file imports only torch.

Dimension key:  N prompts (groups) in one step,  G completions per prompt,  K reference samples of a prompt,
C completion tokens of one packed row, which are those of  S completions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """What an estimator may look at."""

    reward_NG: Tensor
    parts: dict[str, Tensor]     # each reward component, [N, G]
    weights: dict[str, float]    # and its weight
    value_N1: Tensor             # V* of each prompt; nan where there is no table


def flat(reward_NG: Tensor) -> Tensor:
    """bool [N]: groups whose rewards are all equal. Not std > 0: the mean of equal floats can be off by one ulp."""
    return (reward_NG == reward_NG[:, :1]).all(dim=1)


def centred(reward_NG: Tensor) -> Tensor:
    """Dr. GRPO (arXiv:2503.20783): r - mean of the group. Without the deviation hard and easy prompts weigh no more
    than others. Exactly 0 for a flat group.
    """
    return torch.where(flat(reward_NG)[:, None], 0.0, reward_NG - reward_NG.mean(dim=1, keepdim=True))


def group_norm(reward_NG: Tensor, correction: int, eps: float) -> Tensor:
    """GRPO (arXiv:2402.03300): the reward standardised within its group, (r - mean) / (std + eps).

    correction 0 is the paper's population deviation, 1 the sample deviation of the released codes.
    A group whose rewards are all equal carries no signal and gets exactly 0, and so does a group of one.
    """
    centred_NG = centred(reward_NG)
    std_N1 = (centred_NG.square().sum(dim=1, keepdim=True) / max(reward_NG.shape[1] - correction, 1)).sqrt()
    return torch.where(flat(reward_NG)[:, None], 0.0, centred_NG / (std_N1 + eps))


def leave_one_out(reward_NG: Tensor) -> Tensor:
    """RLOO (arXiv:2402.14740): r - mean of the group's others, unbiased, unlike a mean that the completion is in.

    Not divided by a deviation: of the others alone it may be 0 while the difference is not.
    """
    G = reward_NG.shape[1]
    return centred(reward_NG) * (G / (G - 1))


def decoupled(scores: Scores, correction: int, eps: float) -> Tensor:
    """GDPO (arXiv:2601.05242): each component standardised within its group, then summed by weight, then scaled by the
    deviation over the step. Rewards that are summed first map distinct combinations to one advantage.

    Every group's sum is 0, so the step's mean is 0 and only its scale is left to normalise. Taken over completions, as
    the authors do in TRL; verl takes it over tokens, where long ones count more.
    """
    adv_NG = sum(weight * group_norm(scores.parts[name], correction, eps) for name, weight in scores.weights.items())
    return adv_NG / (adv_NG.std(correction=0) + eps) if adv_NG.any() else adv_NG


def soft_value(reward_NK: Tensor, beta: float) -> Tensor:
    """A*-PO (arXiv:2505.20686): V*(x) = beta log mean exp(r / beta) over samples of the reference policy, [N].

    The value that the best policy under a KL of weight beta has: the largest reward as beta goes to 0, the mean as it
    grows.
    """
    return beta * (torch.logsumexp(reward_NK / beta, dim=1) - reward_NK.new_tensor(reward_NK.shape[1]).log())


# advantage.kind -> function of the scores and of that section of the config, [N, G]
ESTIMATORS = {
    "group_norm": lambda scores, settings: group_norm(scores.reward_NG, settings.correction, settings.eps),
    "centred": lambda scores, settings: centred(scores.reward_NG),
    "leave_one_out": lambda scores, settings: leave_one_out(scores.reward_NG),
    "reward": lambda scores, settings: scores.reward_NG,  # REINFORCE without a baseline
    "decoupled": lambda scores, settings: decoupled(scores, settings.correction, settings.eps),
    "soft_value": lambda scores, settings: scores.reward_NG - scores.value_N1,
    # What pruning goes by. The values come later, on the rows that are left, and make `gae` of it.
    "gae": lambda scores, settings: group_norm(scores.reward_NG, settings.correction, settings.eps),
}


def discounted(delta_C: Tensor, lam_C: Tensor, segment_C: Tensor) -> Tensor:
    """sum_k lam^k delta_{t+k} over what follows in the same segment, in log2(C) vector steps.

    A sum of the next m terms, and lam^m times the one that begins m later, are the sum of the next 2m.
    """
    total_C, m = delta_C, 1
    while m < len(delta_C):
        same = segment_C[m:] == segment_C[:-m]
        later = torch.where(same, lam_C[:-m] ** m * total_C[m:], 0.0)
        total_C, m = torch.cat([total_C[:-m] + later, total_C[-m:]]), 2 * m
    return total_C


def gae(value_C: Tensor, end_S: Tensor, segment_C: Tensor, lam_S: Tensor) -> Tensor:
    """Generalised advantage estimation (arXiv:1506.02438) without discount, of completions that may be cut, [C]:
    sum_k lam^k (r_{t+k} + V(s_{t+k+1}) - V(s_{t+k})), where only a last token has a reward.

    Args:    value_C    V(s_t), of the state before each token
             end_S      what stands behind the last token: the reward of a completion that is done, else a value of the
                        state there. T-PPO's EGAE (arXiv:2506.15050, eq. 6 as it is reported) takes V(s_l) := V(s_{l-1})
             segment_C  which completion each token belongs to: 0, 1, ...
             lam_S      of each completion, in [0, 1]. At 1 a token that is done has A = R - V(s_t): Monte Carlo
    Units are those of the reward. A + V(s_t) is the lambda-return.
    """
    last_C = torch.cat([segment_C[1:] != segment_C[:-1], segment_C.new_ones(1, dtype=torch.bool)])
    next_C = torch.where(last_C, end_S[segment_C], value_C.roll(-1))
    return discounted(next_C - value_C, lam_S[segment_C], segment_C)


def adaptive_lambda(length_S: Tensor, alpha: float, lowest: float) -> Tensor:
    """VAPO (arXiv:2504.05118, eq. 4-5): lambda = 1 - 1 / (alpha l), which sums lam^t to alpha l tokens, [S].

    A reward reaches the first token of any response with weight exp(-1 / alpha). Up to 1 / alpha tokens the formula is
    at or below 0; it is held at `lowest`, which is ours. The length of a response that goes on is not known: what it
    has so far stands for it (inferred).
    """
    return (1 - 1 / (alpha * length_S)).clamp(min=lowest)
