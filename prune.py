"""Pruning: which prompts are rolled out, which completions are trained on, and at what weight.

A biased pruner says so. An unbiased one keeps an item with a known probability p and weighs it 1/p, on its
whole term and under the full batch's denominator (Horvitz-Thompson), so the expected gradient is the full
batch's. Probability and outcome are computed apart, so that a test can go through all outcomes. A completion
without a reward has advantage nan, is no candidate and is never kept. Pure functions; this file imports only
torch, the records and methods.

Dimension key:  N groups in one step,  G completions per group,  K items of which some are drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from methods import greso
from methods.pods import max_variance
from methods.proportional import inclusion, rollout_prob, systematic
from methods.variance_share import most_variance
from records import Pruned

FLOOR = 0.1  # smallest size over the mean size, for a completion without advantage that still carries a KL
SLACK = 1 - 1e-5  # factor on a mean: equal sizes are not below it, however their sum is rounded


@dataclass(frozen=True, slots=True)
class Offer:
    """The completions of a step before any is dropped, as far as a pruner may look at them."""

    adv_NG: Tensor
    len_NG: Tensor   # completion tokens
    per: str         # loss.per, which decides what a long completion's gradient weighs
    inert: bool      # advantage 0 means no gradient at all: the loss has no KL
    seed: int        # of this step, the same on all ranks
    weight_N1: Tensor | float = 1.0  # of each group, where prompts were skipped before rollout
    reward_NG: Tensor | None = None  # for the kinds that go by it; nan where there is none


def as_it_is(kept_NG: Tensor, adv_NG: Tensor) -> Pruned:
    """Keep these candidates at weight 1, with nothing left to chance."""
    kept_NG = kept_NG & ~adv_NG.isnan()
    return Pruned(kept_NG, kept_NG.to(adv_NG.dtype), kept_NG.to(adv_NG.dtype))


def keep_all(adv_NG: Tensor) -> Pruned:
    return as_it_is(torch.ones_like(adv_NG, dtype=torch.bool), adv_NG)


def keep_largest(adv_NG: Tensor, keep: int, scope: str) -> Pruned:
    """Keep the completions with the largest |advantage|, as CPPO (arXiv:2503.22342).

    scope   "group"  `keep` of every group, as the paper's eq. 8-10 have it
            "batch"  `keep` x N of the whole step, as the released code has it: groups whose rewards are all
                     equal are dropped whole, and groups with a rare outcome keep more
    Biased on purpose: survivors keep weight 1. Ties keep the earlier completion, on every device.
    """
    if not 1 <= keep <= adv_NG.shape[1]:
        raise ValueError(f"prune.completions.keep={keep} must be in 1..{adv_NG.shape[1]} "
                         "(rollout.group_size); to train on all set prune.completions.kind=none")
    if scope == "group":
        return keep_first(adv_NG, torch.full((len(adv_NG), 1), keep))
    pruned = keep_first(adv_NG.view(1, -1), torch.tensor([[keep * len(adv_NG)]]))
    return Pruned(*(x.view_as(adv_NG) for x in (pruned.keep_NG, pruned.weight_NG, pruned.prob_NG)))


def keep_first(adv_NG: Tensor, count_N1: Tensor) -> Pruned:
    """Keep the first `count_N1` of each row by |advantage|, then by place; survivors keep weight 1."""
    order_NG = adv_NG.abs().nan_to_num(nan=-1.0).argsort(dim=1, descending=True, stable=True)
    return as_it_is(order_NG.argsort(dim=1) < count_N1, adv_NG)


def drop_bottom(adv_NG: Tensor, drop_prob: float) -> Pruned:
    """Drop the floor(drop_prob x G) completions of each group with the smallest |advantage|: the listed
    algorithm of Dynamic Pruning (arXiv:2603.04135, appendix A, as it is reported). Biased: nothing is left to
    chance, so there is no probability to weigh by, and its theorem does not cover it.
    """
    candidates_N1 = (~adv_NG.isnan()).sum(dim=1, keepdim=True)
    return keep_first(adv_NG, candidates_N1 - (drop_prob * candidates_N1.double() + 1e-9).long())


def thin(prob_NG: Tensor, keep_NG: Tensor) -> Pruned:
    """Weigh a survivor of probability p by 1/p, so that the expected weight of every candidate is 1."""
    return Pruned(keep_NG, torch.where(keep_NG, 1 / prob_NG, 0.0), prob_NG)


def below_mean(adv_NG: Tensor, drop_prob: float) -> Tensor:
    """Compute the probability to keep, [N, G]: 1 - drop_prob below the group's mean |advantage|, else 1."""
    size_NG = adv_NG.abs()
    small_NG = size_NG < size_NG.nanmean(dim=1, keepdim=True) * SLACK
    return (1 - drop_prob * small_NG.to(adv_NG.dtype)).masked_fill(adv_NG.isnan(), 0.0)


def bernoulli(adv_NG: Tensor, drop_prob: float, seed: int) -> Pruned:
    """Drop completions at random by `below_mean`: Dynamic Pruning (arXiv:2603.04135) as proved. Unbiased."""
    prob_NG = below_mean(adv_NG, drop_prob)
    uniform_NG = torch.rand(adv_NG.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return thin(prob_NG, uniform_NG < prob_NG)


def gradient_size(offer: Offer, size: str, by_cost: bool) -> Tensor:
    """Estimate the norm of each completion's gradient up to a common factor, [N, G]: its size in `pps`.

    size     "adv"   |A|
             "norm"  |A| x token weight x sqrt(length), as if the gradients of its tokens were independent
    by_cost  divided by sqrt(length), which is best when trained tokens are the budget, not completions
    |A| in place of a norm, and a norm over sqrt(cost), are Cost-Aware GRPO's (arXiv:2604.28020).
    A group's own weight is part of the norm. Without advantage the size is 0; where a KL remains it is at
    least FLOOR of the mean: no weight could make up for a candidate that is never kept.
    """
    none_NG = offer.adv_NG.isnan()
    size_NG, root_NG = offer.adv_NG.nan_to_num().abs() * offer.weight_N1, offer.len_NG.sqrt()
    if size == "norm":
        size_NG = size_NG * root_NG / (offer.len_NG if offer.per == "sequence" else 1)
    if by_cost:
        size_NG = size_NG / root_NG
    if offer.inert:
        return size_NG
    mean = size_NG[~none_NG].mean()
    floored_NG = size_NG.clamp(min=FLOOR * mean) if mean > 0 else torch.ones_like(size_NG)
    return floored_NG.masked_fill(none_NG, 0.0)


def pps(size_NG: Tensor, keep: int, scope: str, seed: int) -> Pruned:
    """Sample with probability proportional to size: exactly `keep` completions of each group, or `keep` x N
    of the step, and fewer only where fewer have a size above 0. CPPO's fixed cost with Dynamic Pruning's
    unbiasedness.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = size_NG if scope == "group" else size_NG.flatten()[None]
    count = keep if scope == "group" else keep * len(size_NG)
    prob = torch.stack([inclusion(row, count) for row in rows])
    kept = []
    for row in prob:
        order = torch.randperm(len(row), generator=generator)
        start = torch.rand((), dtype=torch.float64, generator=generator).item()
        kept.append(systematic(row, order, start))
    return thin(prob.view_as(size_NG), torch.stack(kept).view_as(size_NG))


# prune.completions.kind -> function of the offer and of that section of the config
COMPLETIONS = {
    "none": lambda offer, settings: keep_all(offer.adv_NG),
    "topk": lambda offer, settings: keep_largest(offer.adv_NG, settings.keep, settings.scope),
    "bottom": lambda offer, settings: drop_bottom(offer.adv_NG, settings.drop_prob),
    "bernoulli": lambda offer, settings: bernoulli(offer.adv_NG, settings.drop_prob, offer.seed),
    "pps": lambda offer, settings: pps(
        gradient_size(offer, settings.size, settings.by_cost), settings.keep, settings.scope, offer.seed),
    "pods": lambda offer, settings: as_it_is(max_variance(offer.reward_NG, settings.keep), offer.adv_NG),
    "variance": lambda offer, settings: as_it_is(
        most_variance(offer.reward_NG, settings.share, settings.slack), offer.adv_NG),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """The history of K prompts that come up, before they are rolled out."""

    size_K: Tensor    # mean |A| of the newest rollout, from all G; nan for a prompt that never was rolled out
    skipped_K: Tensor  # turns at which it was skipped since
    easy_K: Tensor    # newest rollouts in a row whose rewards were all equal and high; 0 after any other
    hard_K: Tensor    # ... all equal and low
    mean: float       # size of all prompts that were rolled out; nan before there is one
    explore: tuple[float, float]  # GRESO's p for easy and for hard prompts


def rarely_below_mean(memory: Memory, drop_prob: float) -> Tensor:
    """Compute each prompt's probability of a rollout, [K]: 1 - drop_prob for a size below the mean, else 1,
    also for a prompt never rolled out. Dynamic Pruning (arXiv:2603.04135) at the prompt level, reconstructed:
    the sources say that prompts of low historical advantage are skipped, not where low begins.
    """
    return 1 - drop_prob * (memory.size_K < memory.mean * SLACK).double()


def all_but_lowest(memory: Memory, drop_prob: float, max_skips: int) -> Tensor:
    """Skip the floor(drop_prob x K) prompts of the lowest size: probability 0 or 1 of a rollout, [K]. The
    listed algorithm of Dynamic Pruning, as it is reported. Biased, as `drop_bottom` is. A prompt that was
    never rolled out is not skipped, nor one that was skipped `max_skips` times in a row before this step:
    otherwise its size would never be measured again (our addition).
    """
    free_K = memory.size_K.isnan() | (memory.skipped_K >= max_skips)
    order_K = memory.size_K.masked_fill(free_K, torch.inf).argsort(stable=True)
    keep_K = torch.ones_like(free_K)
    keep_K[order_K[:int(drop_prob * len(order_K) + 1e-9)]] = False
    return (keep_K | free_K).double()


# prune.prompts.kind -> function of the memory and of that section of the config: probability [K] of a rollout
PROMPTS = {
    "none": lambda memory, settings: torch.ones_like(memory.size_K),
    "bernoulli": lambda memory, settings: rarely_below_mean(memory, settings.drop_prob),
    "rank": lambda memory, settings: all_but_lowest(memory, settings.drop_prob, settings.max_skips),
    "pps": lambda memory, settings: rollout_prob(memory.size_K, settings.share, settings.floor),
    "greso": lambda memory, settings: greso.explored(memory.easy_K, memory.hard_K, memory.explore),
}
REFILLING = {"greso", "depo"}  # kinds that replace a prompt they skip: no other is weighed up for it
