"""Go through all steps that may happen in a small problem, with their probabilities (for atlas.py).

A table of logits stands for the policy. Advantages, pruners, trust regions and token weights are the
functions that train.

Dimension key:  Q prompts,  K completions that exist,  L tokens,  P parameters,  S steps that may happen,
R the same with every outcome of a draw,  U distinct ones,  N groups of a step,  G completions of a group,
C tokens of completions, end to end.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from advantage import advantage, flat_groups  # noqa: E402
from loss import TRUST, engine_weight, segment_sum, token_weight  # noqa: E402
from methods.soft_value import soft_value  # noqa: E402
from prune import (  # noqa: E402
    COMPLETIONS,
    PROMPTS,
    Candidates,
    Memory,
    below_mean,
    gradient_size,
    inclusion,
    systematic,
    thin,
)
from records import LogProbs, Pruned, Rewards  # noqa: E402
from settings import kinds  # noqa: E402

EXACT = 1e-12
MAX_LEN = 3      # tokens
# A token is a choice (prefix, 1 or 0) by the logit of its prefix, which is a parameter.
TREES = {
    "unequal": {"e": [(0, 0)], "ae": [(0, 1), (1, 0)], "aae": [(0, 1), (1, 1), (2, 0)],
                "aaa": [(0, 1), (1, 1), (2, 1)]},
    "equal": {"aa": [(0, 1), (1, 1)], "ab": [(0, 1), (1, 0)], "ba": [(0, 0), (2, 1)], "bb": [(0, 0), (2, 0)]},
}
THETA = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64)
OWN = torch.tensor([[0.5, 0.2, -0.4], [-0.9, 0.6, 0.7]], dtype=torch.float64)  # fixed logits of each prompt
AWAY = torch.tensor([-0.9, 0.8, -0.6], dtype=torch.float64)  # from the policy to the one that sampled
BEHIND = {"on-policy": 0.0, "near": 0.5, "far": 2.0}
# Two components; the reward is their mean. The first prompt's is 0, 1/2 or 1, the second's 0 or 1.
GRADED = torch.tensor([[[1, 0, 1, 0], [1, 1, 0, 0]], [[0, 0, 1, 0], [1, 1, 0, 0]]], dtype=torch.float64)


# ---- the problem

@dataclass(frozen=True, eq=False)
class Problem:
    """Prompts that share a table of logits, and the completions that they can have."""

    component_CQK: Tensor
    len_K: Tensor
    logp_QKL: Tensor     # of the current policy; 0 behind the end
    score_QKLP: Tensor   # the gradient of logp_QKL
    sampled: dict[str, Tensor]  # logp_QKL of the policy that samples, by its distance
    size: int            # completions of a group

    @property
    def reward_QK(self) -> Tensor:
        return self.component_CQK.mean(dim=0)

    @property
    def full_QKP(self) -> Tensor:
        """Sum the scores of each completion's tokens."""
        return self.score_QKLP.sum(dim=2)

    def target(self) -> Tensor:
        """Compute grad J of the mean reward over prompts under the current policy."""
        chance_QK = self.logp_QKL.sum(dim=2).exp()
        return torch.einsum("qk,qk,qkp->p", chance_QK, self.reward_QK, self.full_QKP) / len(chance_QK)


def policy(tree: dict, logit_QP: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log-prob [Q, K, L] of each token, and its gradient [Q, K, L, P]."""
    logp_QKL = logit_QP.new_zeros(len(logit_QP), len(tree), MAX_LEN)
    score_QKLP = logit_QP.new_zeros(*logp_QKL.shape, logit_QP.shape[1])
    for k, path in enumerate(tree.values()):
        for t, (prefix, choice) in enumerate(path):
            logit_Q = logit_QP[:, prefix]
            logp_QKL[:, k, t] = torch.nn.functional.logsigmoid(logit_Q if choice else -logit_Q)
            score_QKLP[:, k, t, prefix] = choice - logit_Q.sigmoid()
    return logp_QKL, score_QKLP


def make_problem(lengths: str = "unequal", prompts: tuple[int, ...] = (0, 1), graded: bool = True,
                 size: int = 3) -> Problem:
    """Make the problem of these prompts; not `graded`: the first one's reward is 0/1 too."""
    tree, own_QP = TREES[lengths], OWN[list(prompts)]
    component_CQK = GRADED[:, list(prompts)] if graded else GRADED[1:, list(prompts)]
    logp_QKL, score_QKLP = policy(tree, THETA + own_QP)
    sampled = {name: policy(tree, THETA + far * AWAY + own_QP)[0] for name, far in BEHIND.items()}
    len_K = torch.tensor([len(path) for path in tree.values()])
    return Problem(component_CQK, len_K, logp_QKL, score_QKLP, sampled, size)


# ---- the steps that may happen

class Steps(NamedTuple):
    """Steps and their probabilities. A completion that is not `there` was aborted, or never asked for."""

    chance_S: Tensor
    prompt_SN: Tensor
    id_SNG: Tensor      # which of the completions that exist
    there_SNG: Tensor   # bool
    weight_SN: Tensor   # of the whole group; 0 if its prompt was skipped

    def take(self, index_R: Tensor, chance_R: Tensor) -> "Steps":
        """Take these steps, each as often as it is named, with other probabilities."""
        return Steps(chance_R, *(field[index_R] for field in self[1:]))


def join(parts: list[Steps]) -> Steps:
    """Go through several kinds of steps, one behind the other."""
    return Steps(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def together(first: Steps, second: Steps) -> Steps:
    """Put independent groups into one step, in all combinations."""
    i, j = torch.cartesian_prod(torch.arange(len(first.chance_S)), torch.arange(len(second.chance_S))).T
    chance_S = first.chance_S[i] * second.chance_S[j]
    pairs = zip(first[1:], second[1:], strict=True)
    return Steps(chance_S, *(torch.cat([a[i], b[j]], dim=1) for a, b in pairs))


def one_group(problem: Problem, behind: str, q: int, size: int, width: int) -> Steps:
    """Go through all groups of `size` completions of a prompt, padded to `width`."""
    chance_K = problem.sampled[behind][q].sum(dim=1).exp()
    id_SG = torch.cartesian_prod(*[torch.arange(len(chance_K))] * size)
    chance_S, S = chance_K[id_SG].prod(dim=1), len(id_SG)
    id_SNG = torch.nn.functional.pad(id_SG, (0, width - size))[:, None]
    there_SNG = (torch.arange(width) < size).expand(S, 1, width)
    return Steps(chance_S, torch.full((S, 1), q), id_SNG, there_SNG, torch.ones(S, 1, dtype=torch.float64))


def skipped_at(groups: Steps, prob: float, weight: float) -> Steps:
    """Roll a prompt out with a probability and at a weight, else skip it."""
    rolled_out = groups._replace(chance_S=groups.chance_S * prob, weight_SN=groups.weight_SN * weight)
    skipped = groups._replace(chance_S=groups.chance_S * (1 - prob), weight_SN=0 * groups.weight_SN)
    return join([rolled_out, skipped])


def informative(problem: Problem, groups: Steps) -> Steps:
    """Roll out anew until the rewards of the group differ."""
    differ_S = ~flat_groups(reward_of(problem, groups)[:, 0])
    return groups.take(differ_S, groups.chance_S[differ_S] / groups.chance_S[differ_S].sum())


def aborted_at(groups: Steps, prob_QK: Tensor) -> Steps:
    """Let every completion go on with a known probability, decided by what is seen of it."""
    prob_SG = prob_QK[groups.prompt_SN, groups.id_SNG[:, 0]]
    parts = []
    for bits in itertools.product([True, False], repeat=prob_SG.shape[1]):
        there_G = torch.tensor(bits)
        chance_S = groups.chance_S * torch.where(there_G, prob_SG, 1 - prob_SG).prod(dim=1)
        some_S = chance_S > 0
        part = groups._replace(there_SNG=there_G.expand_as(groups.there_SNG))
        parts.append(part.take(some_S, chance_S[some_S]))
    return join(parts)


# Chances to go on, by what is seen: the first token. BELOW aborts if the mean reward behind it is below 0.3.
GO_ON = torch.tensor([[1, 0.4, 0.4, 0.4], [1, 0.7, 0.7, 0.7]], dtype=torch.float64)
BELOW = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.float64)
# Mean |A| of each prompt's newest group, which pruners of prompts read: the second is below their mean.
SIZE_Q, NONE_Q = torch.tensor([0.6, 0.3], dtype=torch.float64), torch.zeros(2)
HISTORY = Memory(SIZE_Q, NONE_Q, NONE_Q, NONE_Q, 0.45, (0.5, 0.5), [])
SKIPPING = {"bernoulli": kinds.BernoulliPrompts(drop_prob=0.5), "pps": kinds.ProportionalPrompts(share=0.6),
            "rank": kinds.LowestRank(drop_prob=0.5, max_skips=2)}


def prompt_chances(kind: str) -> tuple[list[float], list[float]]:
    """Ask the pruner of prompts for the probabilities of this history, and for the weights."""
    prob_Q = PROMPTS[kind](HISTORY, SKIPPING[kind])
    weight_Q = prob_Q.ceil() if kind == "rank" else 1 / prob_Q
    return prob_Q.tolist(), weight_Q.tolist()


@cache
def all_steps(problem: Problem, behind: str, prompts: str) -> Steps:
    """Go through all rollouts of a step under a rule for its prompts.

    all          every prompt once
    bernoulli, pps, rank  skipped by their history (prune.PROMPTS), not replaced
    refill       the next prompt of the data in place of one without differences, two in all: DAPO
    same refill  the same prompt anew until its rewards differ
    aborted, threshold  completions go on with the probabilities GO_ON, or BELOW
    ragged       groups of 2 and 4
    """
    if prompts == "ragged":
        return together(one_group(problem, behind, 0, 2, 4), one_group(problem, behind, 1, 4, 4))
    groups = [one_group(problem, behind, q, problem.size, problem.size) for q in range(len(problem.logp_QKL))]
    if prompts == "refill":
        mixed = join([group._replace(chance_S=group.chance_S / len(groups)) for group in groups])
        groups = [informative(problem, mixed)] * len(groups)
    elif prompts == "same refill":
        groups = [informative(problem, group) for group in groups]
    elif prompts in ("aborted", "threshold"):
        groups = [aborted_at(group, GO_ON if prompts == "aborted" else BELOW) for group in groups]
    elif prompts in SKIPPING:
        chances = zip(groups, *prompt_chances(prompts), strict=True)
        groups = [skipped_at(group, prob, weight) for group, prob, weight in chances]
    return groups[0] if len(groups) == 1 else together(*groups)


# ---- estimators of the repository

Draws = list[tuple[float, Pruned]]  # the outcomes of a draw, with their probabilities


class Estimator(NamedTuple):
    """Choices that make an estimator; the names are keys of the tables below."""

    advantage: str = "leave_one_out"
    normalize: str = "sum"
    denominator: str = "all"
    trust: str = "none"
    completions: str = "none"
    prompts: str = "all"
    behind: str = "on-policy"


ADVANTAGES = {
    "reward": None,
    "soft_value": kinds.SoftValue(),
    "leave_one_out": kinds.LeaveOneOut(),
    "centred": kinds.Centred(),
    "group_norm": kinds.GroupNorm(),
    "group_norm, correction 0": kinds.GroupNorm(correction=0),
    "decoupled": kinds.Decoupled(),
}
PRUNERS = {
    "none": kinds.KeepAll(),
    "topk": kinds.TopK(keep=2),
    "topk of the step": kinds.TopK(keep=2, scope="batch"),
    "bottom": kinds.Bottom(drop_prob=0.7),
    "bernoulli": kinds.Bernoulli(drop_prob=0.5),
    "pps": kinds.Pps(keep=2, size="adv"),
    "pps of the step": kinds.Pps(keep=2, scope="batch", size="adv"),
    "pps of the step by surprise": kinds.Pps(keep=2, scope="batch", size="adv"),
    "pods": kinds.Pods(keep=2),
    "pods, compared with all": kinds.Pods(keep=2, compare="all"),
    "variance": kinds.VarianceShare(share=0.7),
}
REGIONS = {
    "none": kinds.NoBound(),
    "clip": kinds.Clip(),
    "clip, high 0.28": kinds.Clip(high=0.28),
    "clip_sequence": kinds.ClipSequence(low=3e-4, high=4e-4),
    "clamp": kinds.Clamp(low=1, high=0.2),
    "total_variation": kinds.TotalVariation(divergence=0.15),
    "total_variation, both sides": kinds.TotalVariation(divergence=0.3, sides="both", cap=1e4),
    "binary_kl": kinds.BinaryKl(divergence=0.05),
}


def log_ratio(logps: LogProbs) -> Tensor:
    return logps.logp_C - logps.old_logp_C


def cumulative(x_C: Tensor, segment_C: Tensor) -> Tensor:
    """Sum over the tokens of a completion up to each token."""
    return torch.cat([x_C[segment_C == s].cumsum(dim=0) for s in segment_C.unique()])


def completion_ratio(logps: LogProbs) -> Tensor:
    return segment_sum(log_ratio(logps), logps.segment_C).exp()[logps.segment_C]


def truncated_ratio(logps: LogProbs) -> Tensor:
    """Compute TIS, min(pi / pi_old, 2), as `loss.tis_cap` does."""
    return engine_weight(logps.logp_C, logps.old_logp_C, logps.segment_C, cap=2.0, mask_ratio=None)


CONTROLS = {  # beside the trust regions: f, as loss.TRUST returns it
    "ratio of the completion": completion_ratio,
    # CTPO (arXiv:2605.07331), without its clip
    "ratio of the tokens so far": lambda logps: cumulative(log_ratio(logps), logps.segment_C).exp(),
    "token ratio": lambda logps: log_ratio(logps).exp(),
    "token ratio, at most 2": truncated_ratio,
}


def distinct(*keys: Tensor) -> tuple[list[int], Tensor]:
    """Number equal steps alike; returns one step of each kind, [U], and the kind of each, [S]."""
    flat = torch.cat([key.nan_to_num(nan=-9.0).double().flatten(start_dim=1) for key in keys], dim=1)
    _, kind_S = flat.unique(dim=0, return_inverse=True)
    first_U = torch.zeros(int(kind_S.max()) + 1, dtype=torch.int64)
    first_U[kind_S] = torch.arange(len(kind_S))
    return first_U.tolist(), kind_S


def rewards_of(problem: Problem, steps: Steps, s: int, keep_NG: Tensor | bool) -> Rewards:
    """Look up the rewards of one step; nan for a completion that is not there, or not kept."""
    prompt_N1, id_NG, there_NG = steps.prompt_SN[s][:, None], steps.id_SNG[s], steps.there_SNG[s] & keep_NG
    components = {}
    for c, x_QK in enumerate(problem.component_CQK):
        components[f"part {c}"] = x_QK[prompt_N1, id_NG].masked_fill(~there_NG, torch.nan)
    return Rewards(components, dict.fromkeys(components, 1 / len(components)), problem.len_K[id_NG])


def reward_of(problem: Problem, steps: Steps) -> Tensor:
    """Look up all rewards, [S, N, G]; nan for a completion that is not there."""
    reward_SNG = problem.reward_QK[steps.prompt_SN[..., None], steps.id_SNG]
    return reward_SNG.masked_fill(~steps.there_SNG, torch.nan)


def compare(problem: Problem, steps: Steps, kind: str, keep_SNG: Tensor | None = None) -> Tensor:
    """Compute the advantages of all steps, [S, N, G], by `advantage.advantage` on each distinct one."""
    reward_SNG = reward_of(problem, steps)
    if keep_SNG is not None:
        reward_SNG = reward_SNG.masked_fill(~keep_SNG, torch.nan)
    if kind == "reward":
        return reward_SNG
    if kind == "soft_value":  # under an initial policy that has each completion equally often
        return reward_SNG - soft_value(problem.reward_QK, ADVANTAGES[kind].beta)[steps.prompt_SN][..., None]
    first_U, kind_S = distinct(reward_SNG)
    adv_U = []
    for s in first_U:
        kept_NG = True if keep_SNG is None else keep_SNG[s]
        adv_U.append(advantage(rewards_of(problem, steps, s, kept_NG), ADVANTAGES[kind]))
    return torch.stack(adv_U)[kind_S]


def surprise(problem: Problem, behind: str) -> Tensor:
    """Compute sqrt(sum_t (1 - p_t)^2) of each completion under the policy that samples, [Q, K]."""
    logp_QKL = problem.sampled[behind]
    return ((1 - logp_QKL.exp()).square() * (logp_QKL < 0)).sum(dim=2).sqrt()


def size_of(given: Candidates, settings: kinds.Pps, surprise_NG: Tensor | None) -> Tensor:
    """Compute the sizes of pps; by surprise |A| times it, and over the length if a completion's weight is."""
    size_NG = gradient_size(given, settings.size, settings.by_cost)
    if surprise_NG is None:
        return size_NG
    return size_NG * surprise_NG / (given.len_NG if given.normalize == "sequence" else 1)


def draw_proportionally(given: Candidates, settings: kinds.Pps, surprise_NG: Tensor | None) -> Draws:
    """Go through the starts of systematic sampling; completions lie by group, sign of A, and length."""
    size_NG = size_of(given, settings, surprise_NG)
    group_N1 = torch.arange(len(size_NG))[:, None]
    place_NG = (group_N1 * 3 + given.adv_NG.sign()) * (MAX_LEN + 1) + given.len_NG
    parts = 1 if settings.scope == "batch" else len(size_NG)
    draws = []
    for size_K, place_K in zip(size_NG.view(parts, -1), place_NG.view(parts, -1), strict=True):
        prob_K = inclusion(size_K, settings.keep * len(size_NG) / parts)
        order_K = place_K.argsort(stable=True)
        ends = prob_K[order_K][prob_K[order_K] < 1].cumsum(0) % 1
        edges = itertools.pairwise(sorted({0.0, 1.0, *ends.tolist()}))
        draws.append([(b - a, prob_K, systematic(prob_K, order_K, (a + b) / 2))
                      for a, b in edges if b - a > 1e-14])
    outcomes = []
    for drawn in itertools.product(*draws):
        chances, probs, keeps = zip(*drawn, strict=True)
        pruned = thin(torch.stack(probs).view_as(size_NG), torch.stack(keeps).view_as(size_NG))
        outcomes.append((math.prod(chances), pruned))
    return outcomes


def draw_each(given: Candidates, settings: kinds.Bernoulli) -> Draws:
    """Go through all outcomes of independent draws."""
    prob_NG = below_mean(given.adv_NG, settings.drop_prob)
    outcomes = []
    for bits in itertools.product(*[[True] if p == 1 else [True, False] for p in prob_NG.flatten().tolist()]):
        keep_NG = torch.tensor(bits).view_as(prob_NG)
        outcomes.append((torch.where(keep_NG, prob_NG, 1 - prob_NG).prod().item(), thin(prob_NG, keep_NG)))
    return outcomes


class Drawn(NamedTuple):
    """Steps with every outcome of the draw of completions."""

    steps: Steps         # R
    of_R: Tensor         # which step without draws each is of
    adv_RNG: Tensor
    keep_RNG: Tensor
    weight_RNG: Tensor   # of both levels; 0 if not kept


def outcomes_of(given: Candidates, settings: Any, surprise_NG: Tensor | None) -> Draws:
    """Go through the outcomes of one step's draw; kinds without chance have one."""
    if settings.kind == "pps":
        return draw_proportionally(given, settings, surprise_NG)
    if settings.kind == "bernoulli":
        return draw_each(given, settings)
    return [(1.0, COMPLETIONS[settings.kind](given, settings))]


def draw(problem: Problem, steps: Steps, chosen: Estimator) -> Drawn:
    """Compare and prune the completions of all steps, in all outcomes of the draw."""
    adv_SNG, settings = compare(problem, steps, chosen.advantage), PRUNERS[chosen.completions]
    seen_SNG = surprise(problem, chosen.behind)[steps.prompt_SN[..., None], steps.id_SNG]
    place_SNG = torch.arange(steps.id_SNG.shape[2]).expand_as(steps.id_SNG)
    if settings.kind == "pps":  # goes by length, not by place, so permuted groups are drawn from alike
        place_SNG = steps.id_SNG.argsort(dim=2, stable=True)
    fields = (adv_SNG, reward_of(problem, steps), problem.len_K[steps.id_SNG] * steps.there_SNG, seen_SNG)
    adv, reward, length, seen = (field_SNG.gather(2, place_SNG) for field_SNG in fields)
    first_U, kind_S = distinct(adv, reward, *([length, seen] if settings.kind == "pps" else []))
    surprised, draws = chosen.completions.endswith("by surprise"), []
    for s in first_U:
        given = Candidates(adv[s], length[s], chosen.normalize, True, 0, reward_NG=reward[s])
        draws.append(outcomes_of(given, settings, seen[s] if surprised else None))
    count_U = torch.tensor([len(outcomes) for outcomes in draws])
    count_S = count_U[kind_S]
    of_R = torch.arange(len(kind_S)).repeat_interleave(count_S)
    within_R = torch.arange(len(of_R)) - (count_S.cumsum(0) - count_S)[of_R]
    at_R = (count_U.cumsum(0) - count_U)[kind_S[of_R]] + within_R
    chances, pruned = zip(*itertools.chain(*draws), strict=True)
    chance_R = torch.tensor(chances, dtype=torch.float64)[at_R]
    back_RNG = place_SNG.argsort(dim=2)[of_R]
    keep_RNG = torch.stack([outcome.keep_NG for outcome in pruned])[at_R].gather(2, back_RNG)
    weight_RNG = torch.stack([outcome.weight_NG for outcome in pruned])[at_R].gather(2, back_RNG)
    drawn = steps.take(of_R, steps.chance_S[of_R] * chance_R)
    adv_RNG = adv_SNG[of_R]
    if getattr(settings, "compare", "all") == "kept":
        adv_RNG = compare(problem, drawn, chosen.advantage, keep_RNG)
    keep_RNG = keep_RNG & drawn.there_SNG & (drawn.weight_SN > 0)[..., None]
    return Drawn(drawn, of_R, adv_RNG.nan_to_num(), keep_RNG, weight_RNG * drawn.weight_SN[..., None])


def all_draws(problem: Problem, chosen: Estimator) -> Drawn:
    """Go through all steps and draws, once for all estimators that prune alike."""
    normalize = chosen.normalize if chosen.completions.endswith("by surprise") else ""
    return draw_all(problem, chosen._replace(normalize=normalize, denominator="", trust=""))


@cache
def draw_all(problem: Problem, chosen: Estimator) -> Drawn:
    return draw(problem, all_steps(problem, chosen.behind, chosen.prompts), chosen)


@cache
def pulls(problem: Problem, trust: str, behind: str) -> Tensor:
    """Compute sum_t f_t grad logp_t of each completion, [Q, K, 3, P], for an advantage below, at and above 0.

    A trust region reads no more of the advantage than its sign.
    """
    there_QKL = problem.logp_QKL < 0
    segment_QKL = torch.arange(there_QKL[..., 0].numel()).view(*there_QKL.shape[:2], 1).expand_as(there_QKL)
    new_C, old_C, segment_C = (x[there_QKL] for x in (problem.logp_QKL, problem.sampled[behind], segment_QKL))
    pulls = []
    for sign in (-1, 0, 1):
        logps = LogProbs(new_C, old_C, torch.full_like(new_C, sign), segment_C)
        if trust in CONTROLS:
            f_C = CONTROLS[trust](logps)
        else:
            f_C = TRUST[REGIONS[trust].kind](logps, REGIONS[trust])
        f_QKL = torch.zeros_like(problem.logp_QKL).masked_scatter(there_QKL, f_C)
        pulls.append(torch.einsum("qkl,qklp->qkp", f_QKL, problem.score_QKLP))
    return torch.stack(pulls, dim=2)


def gradients(problem: Problem, drawn: Drawn, chosen: Estimator) -> Tensor:
    """Compute the gradient of every step, [R, P]: the sum of w f A grad logp, as loss.py has it."""
    def weigh(len_NG: Tensor, keep_NG: Tensor, weight_NG: Tensor) -> Tensor:
        pruned = Pruned(keep_NG, weight_NG, weight_NG)
        return token_weight(len_NG, pruned, chosen.normalize, chosen.denominator, MAX_LEN, len(len_NG))

    steps = drawn.steps
    len_RNG = problem.len_K[steps.id_SNG] * steps.there_SNG
    scale_RNG = torch.vmap(weigh)(len_RNG, drawn.keep_RNG, drawn.weight_RNG) * drawn.adv_RNG
    pull_QK3P = pulls(problem, chosen.trust, chosen.behind)
    pull_RNGP = pull_QK3P[steps.prompt_SN[..., None], steps.id_SNG, drawn.adv_RNG.sign().long() + 1]
    return torch.einsum("rng,rngp->rp", scale_RNG, pull_RNGP)

def summary(problem: Problem, chance_R: Tensor, gradient_RP: Tensor, trained_RNG: Tensor) -> dict[str, float]:
    """Compute scale, bias and variance, and the mean number of completions that are trained on."""
    target_P, mean_P = problem.target(), chance_R @ gradient_RP
    scale = (mean_P @ target_P / (target_P @ target_P)).item()
    size = abs(scale) * target_P.norm()
    bias = ((mean_P - scale * target_P).norm() / size).item()
    variance = (chance_R @ (gradient_RP - mean_P).square().sum(dim=1) / size.square()).item()
    trained = (chance_R @ trained_RNG.double().sum(dim=(1, 2))).item()
    return {"scale": scale, "bias": bias, "variance": variance, "trained": trained}
