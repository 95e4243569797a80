"""Go through all steps that may happen in a small problem, with their probabilities (for atlas.py).

A table of logits stands for the policy, so there are few completions, and every group of them can be listed.

Dimension key:  Q prompts,  K completions that exist,  L tokens,  P parameters,  S steps that may happen,
N groups of a step,  G completions of a group.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from advantage import flat_groups  # noqa: E402
from prune import PROMPTS, Memory  # noqa: E402
from settings import kinds  # noqa: E402

MAX_LEN = 3  # tokens
# A token is a choice (prefix, 1 or 0) by the logit of its prefix, which is a parameter.
TREES = {
    "one": {"e": [(0, 0)], "a": [(0, 1)]},
    "short": {"e": [(0, 0)], "ae": [(0, 1), (1, 0)], "aa": [(0, 1), (1, 1)]},
    "unequal": {"e": [(0, 0)], "ae": [(0, 1), (1, 0)],
                "aae": [(0, 1), (1, 1), (2, 0)], "aaa": [(0, 1), (1, 1), (2, 1)]},
    "equal": {"aa": [(0, 1), (1, 1)], "ab": [(0, 1), (1, 0)], "ba": [(0, 0), (2, 1)], "bb": [(0, 0), (2, 0)]},
}
# An environment replies x or y to a token, and the policy has one more; behind "ay" there is no room for it.
TREES["turns"] = {word: [(0, int(word[0] == "a")), (0, int(word[1] == "x")),
                         (1 + (word[1] == "x"), int(word[-1] == "a"))][:len(word)]
                  for word in ("axa", "axb", "ay", "bxa", "bxb", "bya", "byb")}


def numbers(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


REPLY_K = numbers([0.7, 0.7, 0.3, 0.4, 0.4, 0.6, 0.6])
REWARDS_OF_TURNS = numbers([[[1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0]],   # the first turn's, by prompt
                            [[1, 0, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0, 1]]])

THETA = numbers([0.3, -0.2, 0.4])
OWN = numbers([[0.5, 0.2, -0.4], [-0.9, 0.6, 0.7]])  # fixed logits of each prompt
AWAY = numbers([-0.9, 0.8, -0.6])  # from the policy to the one that sampled
BY_HAND = numbers([-2.0, 2.0, 2.0]) * math.log(3)  # in its place: half of it makes 1/2 a quarter
BEHIND = {"on-policy": 0.0, "near": 0.5, "far": 2.0}
# Two components; the reward is their mean. The first prompt's is 0, 1/2 or 1, the second's 0 or 1.
GRADED = numbers([[[1, 0, 1, 0], [1, 1, 0, 0]], [[0, 0, 1, 0], [1, 1, 0, 0]]])
# Chances to go on, by what is seen: the first token. BELOW aborts if the mean reward behind it is below 0.3.
GO_ON = numbers([[1, 0.4, 0.4, 0.4], [1, 0.7, 0.7, 0.7]])
BELOW = numbers([[1, 0, 0, 0], [1, 1, 1, 1]])
# A teacher, by logits that differ from the policy's, and the chances that it reads a completion, and that the
# student then trains on it.
TEACHER = numbers([0.8, -1.1, 1.0])
READ, TRAINED = numbers([[0.3, 0.5, 0.9, 0.6]] * 2), numbers([[0.5, 0.8, 0.4, 1.0]] * 2)
SURVIVAL = {"aborted": GO_ON, "threshold": BELOW, "drawn": READ * TRAINED}
# What pruners of prompts read: the mean |A| of each prompt's newest group. The second is below their mean.
HISTORY = Memory(numbers([0.6, 0.3]), skipped_K=torch.zeros(2), easy_K=torch.zeros(2), hard_K=torch.zeros(2),
                 mean=0.45, explore=(0.5, 0.5), rows=[])
SKIPPING = {
    "bernoulli": kinds.BernoulliPrompts(drop_prob=0.5),
    "pps": kinds.ProportionalPrompts(share=0.6),
    "rank": kinds.LowestRank(drop_prob=0.5, max_skips=2),
}


# ---- the problem

@dataclass(frozen=True, eq=False)
class Problem:
    """Prompts that share a table of logits, and the completions that they can have."""

    names: tuple[str, ...]      # of the completions that exist, a letter for each token
    component_CQK: Tensor
    len_K: Tensor
    logp_QKL: Tensor     # of the current policy; 0 behind the end
    score_QKLP: Tensor   # the gradient of logp_QKL
    sampled: dict[str, Tensor]  # logp_QKL of the policy that samples, by its distance
    size: int            # completions of a group
    own_L: Tensor        # 0 for the place of an environment's reply, else 1

    @property
    def reward_QK(self) -> Tensor:
        return self.component_CQK.mean(dim=0)

    @property
    def full_QKP(self) -> Tensor:
        """Sum the scores of each completion's tokens."""
        return torch.einsum("qklp,l->qkp", self.score_QKLP, self.own_L)

    def target(self) -> Tensor:
        """Compute grad J of the mean reward over prompts under the current policy."""
        chance_QK = self.logp_QKL.sum(dim=2).exp()
        gradient_QP = torch.einsum("qk,qkp->qp", chance_QK * self.reward_QK, self.full_QKP)
        return gradient_QP.mean(dim=0)


def policy(tree: dict, logit_QP: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-prob [Q, K, L] of each token, and its gradient [Q, K, L, P]."""
    Q, P = logit_QP.shape
    longest = max(MAX_LEN, *map(len, tree.values()))
    logp_QKL = logit_QP.new_zeros(Q, len(tree), longest)
    score_QKLP = logit_QP.new_zeros(Q, len(tree), longest, P)
    for k, path in enumerate(tree.values()):
        for t, (prefix, choice) in enumerate(path):
            logit_Q = logit_QP[:, prefix]
            signed_Q = logit_Q if choice else -logit_Q
            logp_QKL[:, k, t] = torch.nn.functional.logsigmoid(signed_Q)
            score_QKLP[:, k, t, prefix] = choice - logit_Q.sigmoid()
    return logp_QKL, score_QKLP


def make_problem(lengths: str = "unequal", prompts: tuple[int, ...] = (0, 1), graded: bool = True,
                 size: int = 3, rewards: list | None = None) -> Problem:
    """Make the problem of these prompts; not `graded`: the first one's reward is 0/1 too. With `rewards` of
    its own it is one to go through by hand: all chances are 1/2, and 1/4 or 3/4 of the policy near it."""
    tree, own_L = TREES[lengths], torch.ones(MAX_LEN, dtype=torch.float64)
    own_QP, away = OWN[list(prompts)], AWAY
    component_CQK = GRADED[:, list(prompts)]
    if rewards:
        own_QP, away, component_CQK = -THETA.expand(len(rewards), 3), BY_HAND, numbers(rewards)[None]
    logp_QKL, score_QKLP = policy(tree, THETA + own_QP)
    sampled = {name: policy(tree, THETA + far * away + own_QP)[0] for name, far in BEHIND.items()}
    if lengths == "turns":  # the policy has an opinion of replies, but the environment draws them
        own_L[1], component_CQK = 0, REWARDS_OF_TURNS[:, list(prompts)]
        for table_QKL in (logp_QKL, *sampled.values()):
            table_QKL[..., 1] = REPLY_K.log()
    len_K = torch.tensor([len(path) for path in tree.values()])
    return Problem(tuple(tree), component_CQK if graded else component_CQK[1:], len_K, logp_QKL, score_QKLP,
                   sampled, size, own_L)


# ---- the steps that may happen

class Steps(NamedTuple):
    """Steps and their probabilities. A completion that is not `there` was aborted, or never asked for."""

    chance_S: Tensor
    prompt_SN: Tensor
    id_SNG: Tensor      # which of the completions that exist
    there_SNG: Tensor   # bool
    weight_SN: Tensor   # of the whole group; 0 if its prompt was skipped

    @property
    def completions(self) -> int:
        """Count the completions of a step, N G."""
        return self.id_SNG[0].numel()

    def take(self, index_R: Tensor, chance_R: Tensor) -> "Steps":
        """Take these steps, each as often as it is named, with other probabilities."""
        return Steps(chance_R, *(field[index_R] for field in self[1:]))

    def look_up(self, table_QK: Tensor) -> Tensor:
        """Look up each completion in a table, [S, N, G, ...]."""
        return table_QK[self.prompt_SN[..., None], self.id_SNG]


def reward_of(problem: Problem, steps: Steps) -> Tensor:
    """Look up all rewards, [S, N, G]; nan for a completion that is not there."""
    return steps.look_up(problem.reward_QK).masked_fill(~steps.there_SNG, torch.nan)


def lengths_of(problem: Problem, steps: Steps) -> Tensor:
    """Look up the tokens of all completions, [S, N, G]; 0 for one that is not there."""
    return problem.len_K[steps.id_SNG] * steps.there_SNG


def join(parts: list[Steps]) -> Steps:
    """Go through several kinds of steps, one behind the other."""
    return Steps(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def together(first: Steps, second: Steps) -> Steps:
    """Put independent groups into one step, in all combinations."""
    i, j = torch.cartesian_prod(*(torch.arange(len(steps.chance_S)) for steps in (first, second))).T
    fields = [torch.cat([a[i], b[j]], dim=1) for a, b in zip(first[1:], second[1:], strict=True)]
    return Steps(first.chance_S[i] * second.chance_S[j], *fields)


def one_group(problem: Problem, behind: str, q: int, size: int, width: int) -> Steps:
    """Go through all groups of `size` completions of a prompt, padded to `width`."""
    chance_K = problem.sampled[behind][q].sum(dim=1).exp()
    id_SG = torch.cartesian_prod(*[torch.arange(len(chance_K))] * size)
    S = len(id_SG)
    padded_SG = torch.nn.functional.pad(id_SG, (0, width - size))
    there_S1G = (torch.arange(width) < size).expand(S, 1, width)
    return Steps(chance_K[id_SG].prod(dim=1), torch.full((S, 1), q), padded_SG[:, None], there_S1G,
                 torch.ones(S, 1, dtype=torch.float64))


def skipped_at(groups: Steps, prob: float, weight: float) -> Steps:
    """Roll a prompt out with a probability and at a weight, else skip it."""
    rolled_out = groups._replace(chance_S=groups.chance_S * prob, weight_SN=groups.weight_SN * weight)
    skipped = groups._replace(chance_S=groups.chance_S * (1 - prob), weight_SN=groups.weight_SN * 0)
    return join([rolled_out, skipped])


def informative(problem: Problem, groups: Steps) -> Steps:
    """Keep only groups of unequal rewards, as if each was rolled out anew until they differ."""
    differ_S = ~flat_groups(reward_of(problem, groups)[:, 0])
    chance_S = groups.chance_S[differ_S]
    return groups.take(differ_S, chance_S / chance_S.sum())


def aborted_at(groups: Steps, prob_QK: Tensor) -> Steps:
    """Let every completion go on with a known probability, decided by what is seen of it."""
    prob_SNG = groups.look_up(prob_QK)
    G = prob_SNG.shape[2]
    parts = []
    for bits in itertools.product([True, False], repeat=G):
        there_G = torch.tensor(bits)
        chance_S = groups.chance_S * torch.where(there_G, prob_SNG, 1 - prob_SNG).prod(dim=2)[:, 0]
        possible_S = chance_S > 0
        part = groups._replace(there_SNG=there_G.expand_as(groups.there_SNG))
        parts.append(part.take(possible_S, chance_S[possible_S]))
    return join(parts)


def prompt_chances(name: str) -> tuple[list[float], list[float]]:
    """Ask the pruner of prompts for the probabilities of this history, and for the weights."""
    prob_Q = PROMPTS[SKIPPING[name].kind](HISTORY, SKIPPING[name])
    weight_Q = (1 / prob_Q).masked_fill(prob_Q == 0, 0)
    return prob_Q.tolist(), weight_Q.tolist()


@cache
def all_steps(problem: Problem, behind: str, prompts: str) -> Steps:
    """Go through all rollouts of a step under a rule for its prompts.

    all, taught, recent, turns  every prompt once
    one of SKIPPING  skipped by their history (prune.PROMPTS), not replaced
    refill       the next prompt of the data in place of one without differences, two in all: DAPO
    same refill  the same prompt anew until its rewards differ
    aborted, threshold, drawn  completions survive with the probabilities of SURVIVAL
    ragged       groups of 2 and 4
    """
    if prompts == "ragged":
        return together(one_group(problem, behind, 0, 2, 4), one_group(problem, behind, 1, 4, 4))
    size, Q = problem.size, len(problem.logp_QKL)
    groups = [one_group(problem, behind, q, size, size) for q in range(Q)]
    if prompts == "refill":
        mixed = join([group._replace(chance_S=group.chance_S / Q) for group in groups])
        groups = [informative(problem, mixed)] * Q
    elif prompts == "same refill":
        groups = [informative(problem, group) for group in groups]
    elif prompts in SURVIVAL:
        groups = [aborted_at(group, SURVIVAL[prompts]) for group in groups]
    elif prompts in SKIPPING:
        chances = zip(groups, *prompt_chances(prompts), strict=False)  # of one prompt the first one's
        groups = [skipped_at(group, prob, weight) for group, prob, weight in chances]
    return groups[0] if Q == 1 else together(*groups)
