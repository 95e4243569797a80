"""Pruning: which prompts are rolled out, which completions and tokens are trained on, and their weights.

A biased pruner says so. An unbiased one keeps an item with a known probability p and weighs it 1/p, on its
whole term and under the full batch's denominator (Horvitz-Thompson), so the expected gradient is the full
batch's. Probability and outcome are computed apart, so that a test can go through all outcomes. A completion
without a reward has advantage nan, is no candidate and is never kept. Pure functions.

Dimension key:  N groups in one step,  G completions per group,  K items to draw from,
L tokens of one completion.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from records import Group, Pruned, Rewards, frozen, lengths
from settings import kinds
from settings.loader import ConfigError

SIZE_FLOOR = 0.1  # least size over the mean size if a KL, say, gives an advantage of 0 a gradient
LEAST_SURPRISE = 0.01  # least size of a token: the trainer may be less sure of it than the engine was
SLACK = 1 - 1e-5  # factor on a mean, so that equal sizes are not below theirs, which a sum has rounded
MOST_DROPPED = 0.99  # largest chance to be dropped: a norm that is guessed to be 0 may not be 0
RELATIVE_ZERO = 1e-12  # a size below so much of the largest is a rounding error, and counts as 0
LARGER, TINY = 1 + 1e-9, 1e-12  # equal variances are not larger, however they are rounded


@frozen
class Candidates:
    """The completions of a step before any is dropped, as far as a pruner may look at them."""

    adv_NG: Tensor
    groups: list[Group]
    normalize: str         # loss.normalize; it decides the weight of a long completion
    advantage_only: bool  # the loss has no other gradient, such as a KL's
    seed: int        # of this step, the same on all ranks
    weight_N1: Tensor | float = 1.0  # of each group, if prompts were skipped before rollout
    reward_NG: Tensor | None = None  # for the kinds that read it; nan without a reward

    @property
    def len_NG(self) -> Tensor:
        """Count the completion tokens."""
        return lengths(self.groups, self.adv_NG.shape[1])


def keep_all(adv_NG: Tensor) -> Pruned:
    """Keep every candidate at weight 1."""
    kept_NG = ~adv_NG.isnan()
    return Pruned(kept_NG, kept_NG.to(adv_NG.dtype), kept_NG.to(adv_NG.dtype))


def keep_marked(kept_NG: Tensor, adv_NG: Tensor) -> Pruned:
    """Keep these candidates at weight 1, with nothing left to chance."""
    return keep_all(adv_NG.masked_fill(~kept_NG, torch.nan))


def keep_largest(adv_NG: Tensor, keep: int, scope: str) -> Pruned:
    """Keep the completions with the largest |advantage|, as CPPO (arXiv:2503.22342).

    scope   "group"  `keep` of every group, as the paper's eq. 8-10 have it
            "batch"  `keep` x N of the whole step, as the released code has it: flat groups are dropped whole,
                     and groups with a rare outcome keep more
    Biased on purpose: survivors keep weight 1. Ties keep the earlier completion, on every device.
    """
    if not 1 <= keep <= adv_NG.shape[1]:
        raise ValueError(f"prune.completions.keep={keep} must be in 1..{adv_NG.shape[1]} "
                         "(rollout.group_size); to train on all set prune.completions.kind=none")
    of_part = adv_NG if scope == "group" else adv_NG.view(1, -1)
    return keep_marked(are_first(of_part, keep * len(adv_NG) // len(of_part)).view_as(adv_NG), adv_NG)


def are_first(adv_NG: Tensor, count_N1: Tensor | int) -> Tensor:
    """Mark the first `count_N1` of each row by |advantage|, then by place."""
    order_NG = adv_NG.abs().nan_to_num(nan=-1.0).argsort(dim=1, descending=True, stable=True)
    return order_NG.argsort(dim=1) < count_N1


def drop_bottom(adv_NG: Tensor, drop_prob: float) -> Pruned:
    """Drop the floor(drop_prob x G) completions of each group with the smallest |advantage|: the pseudocode
    of Dynamic Pruning (arXiv:2603.04135, appendix A, as readers report it), not its proved variant. Biased:
    the choice is deterministic, so there are no probabilities for importance weights.
    """
    candidates_N1 = (~adv_NG.isnan()).sum(dim=1, keepdim=True)
    count_N1 = candidates_N1 - (drop_prob * candidates_N1.double() + 1e-9).long()
    return keep_marked(are_first(adv_NG, count_N1), adv_NG)


def thin(prob_NG: Tensor, keep_NG: Tensor) -> Pruned:
    """Weigh a survivor of probability p by 1/p, so that the expected weight of every candidate is 1."""
    return Pruned(keep_NG, torch.where(keep_NG, 1 / prob_NG, 0.0), prob_NG)


def below_mean(adv_NG: Tensor, drop_prob: float) -> Tensor:
    """Compute the probability to keep, [N, G]: 1 - drop_prob below the group's mean |advantage|, else 1."""
    size_NG = adv_NG.abs()
    small_NG = size_NG < size_NG.nanmean(dim=1, keepdim=True) * SLACK
    return (1 - drop_prob * small_NG.to(adv_NG.dtype)).masked_fill(adv_NG.isnan(), 0.0)


def bernoulli(candidates: Candidates, drop_prob: float | None, error: float | None) -> Pruned:
    """Drop completions at random by `below_mean`: Dynamic Pruning (arXiv:2603.04135) as proved. Unbiased."""
    adv_NG = candidates.adv_NG
    if drop_prob is None:
        norm_NG = gradient_size(candidates, "surprise", by_cost=False)
        drop_prob = drop_within(norm_NG, below_mean(adv_NG, 1.0) == 0, error)
    prob_NG = below_mean(adv_NG, drop_prob)
    generator = torch.Generator().manual_seed(candidates.seed)
    uniform_NG = torch.rand(adv_NG.shape, dtype=torch.float64, generator=generator)
    return thin(prob_NG, uniform_NG < prob_NG)


def predicted_error(norm_K: Tensor, prob_K: Tensor) -> float:
    """Predict the squared error of a draw over the squared norm of the full gradient, from the norms of its
    terms: sum s^2 (1/p - 1) / sum s^2. It is exact for terms at right angles, and if the norms are guessed
    it is a guess. A gradient of this error has 1 + e times the mean square.
    """
    square_K, drawn_K = norm_K.square(), prob_K > 0
    lost_K = square_K[drawn_K] * (1 / prob_K[drawn_K] - 1)
    return (lost_K.sum() / square_K.sum()).nan_to_num().item()


def fewest(size_K: Tensor, norm_K: Tensor, error: float) -> int:
    """Find the fewest draws in proportion to size with a `predicted_error` of at most `error`."""
    counts = range(1, len(size_K) + 1)
    return counts[bisect_left(
        counts, True, key=lambda n: predicted_error(norm_K, inclusion(size_K, n)) <= error)]


def drop_within(norm_K: Tensor, small_K: Tensor, error: float) -> float:
    """Find the largest chance to drop the small ones with a `predicted_error` of at most `error`."""
    square_K = norm_K.square()
    gain, lost = error * square_K.sum(), square_K[small_K].sum()
    return (gain / (gain + lost)).nan_to_num().clamp(max=MOST_DROPPED).item()


def gradient_size(candidates: Candidates, size: str, by_cost: bool) -> Tensor:
    """Estimate the norm of each completion's gradient up to a common factor, [N, G]: its size in `pps`.

    size     "adv"       |A|
             "surprise"  |A| x token weight x sqrt(sum_t (1 - p_t)^2), with the engine's probability p_t of
                         token t: the derivative of log p_t by its own logit is 1 - p_t, and the gradients of
                         tokens add up as if they were independent
             "nats"      the same with (1 - p_t) log p_t: what a teacher will say is guessed by log p_t
             "length"    the same with 1: |A| x token weight x sqrt(length)
    by_cost  divided by sqrt(length), which is best when trained tokens are the budget, not completions
    |A| in place of a norm, and a norm over sqrt(cost), are Cost-Aware GRPO's (arXiv:2604.28020).
    A group's own weight is part of the norm. An advantage of 0 has size 0; if the loss has a KL it is at
    least SIZE_FLOOR of the mean: no weight could make up for a candidate that is never kept.
    """
    none_NG, len_NG = candidates.adv_NG.isnan(), candidates.len_NG
    size_NG = candidates.adv_NG.nan_to_num().abs() * candidates.weight_N1
    if size != "adv":
        weight_NG = 1 / len_NG if candidates.normalize == "sequence" else 1
        size_NG = size_NG * weight_NG * token_norm(candidates.groups, size)
    if by_cost:
        size_NG = size_NG / len_NG.sqrt()
    if candidates.advantage_only:
        return size_NG
    mean = size_NG[~none_NG].mean()
    floored_NG = size_NG.clamp(min=SIZE_FLOOR * mean) if mean > 0 else torch.ones_like(size_NG)
    return floored_NG.masked_fill(none_NG, 0.0)


# size -> of a token, by its log-prob
TOKEN_SIZES = {
    "surprise": lambda logp: 1 - logp.exp(),
    "nats": lambda logp: (logp.exp() - 1) * logp,
    "length": torch.ones_like,
}


def token_norm(groups: list[Group], size: str) -> Tensor:
    """Compute sqrt(sum_t size_t^2) over the tokens that this step trains on, by TOKEN_SIZES, [N, G]."""
    samples = [sample for group in groups for sample in group.samples]
    tokens = [torch.frombuffer(s.logp, dtype=torch.float64)[s.scored] for s in samples]
    counts = torch.tensor([len(logp) for logp in tokens])
    size_T = TOKEN_SIZES[size](torch.cat(tokens)).clamp(min=LEAST_SURPRISE)
    owner = torch.arange(len(samples)).repeat_interleave(counts)
    squares = torch.zeros(len(samples), dtype=torch.float64).index_add_(0, owner, size_T.square())
    return squares.sqrt().view(len(groups), -1)


def similar_order(candidates: Candidates) -> Tensor:
    """Order the completions so that neighbours have similar gradients, [NG]: by group, by the sign of the
    advantage, and by their tokens, so that those that begin alike lie together. `systematic` then draws from
    each stretch of this order its share, and keeps few that say the same.
    """
    G = candidates.adv_NG.shape[1]
    positive_NG = (candidates.adv_NG > 0).tolist()

    def place(i):
        n, g = divmod(i, G)
        return n, positive_NG[n][g], candidates.groups[n].samples[g].ids

    return torch.tensor(sorted(range(candidates.adv_NG.numel()), key=place))


def pps_by(candidates: Candidates, settings: kinds.Pps) -> Pruned:
    """Draw by `pps` as many as settings.keep says, or as few as settings.error allows in the whole step."""
    size_NG, norm_NG = (gradient_size(candidates, settings.size, by_cost)
                        for by_cost in (settings.by_cost, False))
    keep = settings.keep or fewest(size_NG.flatten(), norm_NG.flatten(), settings.error) / len(size_NG)
    scope = settings.scope if settings.keep else "batch"
    return pps(size_NG, similar_order(candidates), keep, scope, candidates.seed)


def pps(size_NG: Tensor, order_K: Tensor, keep: float, scope: str, seed: int) -> Pruned:
    """Sample with probability proportional to size: exactly `keep` completions of each group, or `keep` x N
    of the step, and fewer only if fewer have a size above 0. CPPO's fixed cost with Dynamic Pruning's
    unbiasedness.

    order_K  all completions of the step, group by group; any order is unbiased (see `similar_order`)
    """
    generator = torch.Generator().manual_seed(seed)
    rows = size_NG if scope == "group" else size_NG.flatten()[None]
    count = keep if scope == "group" else round(keep * len(size_NG))
    prob = torch.stack([inclusion(row, count) for row in rows])
    kept = [systematic(row, order, torch.rand((), dtype=torch.float64, generator=generator).item())
            for row, order in zip(prob, order_K.view(rows.shape) % rows.shape[1], strict=True)]
    drawn = thin(prob.view_as(size_NG), torch.stack(kept).view_as(size_NG))
    return replace(drawn, size_NG=size_NG / size_NG.mean().clamp(min=1e-300))


def inclusion(size_K: Tensor, count: float) -> Tensor:
    """Compute probabilities [K] in proportion to size, at most 1 each, that add up to `count`.

    An item that would pass 1 gets 1, largest first, and the others divide the remaining places in proportion
    to their size. At most `count` sizes above 0 get 1 each; a size below RELATIVE_ZERO counts as 0. To
    keep 2 of the sizes 4 2 1 1: the first would get 2 x 4/8 = 1 and is certain, the others divide 1 place:
    1 1/2 1/4 1/4.
    """
    sorted_K, order_K = size_K.double().sort(descending=True, stable=True)
    sorted_K = sorted_K * (sorted_K >= RELATIVE_ZERO * sorted_K[:1])
    tail_K = sorted_K.flip(0).cumsum(0).flip(0)  # this size and all smaller ones
    places_K = count - torch.arange(len(size_K), dtype=torch.float64)
    certain = int((places_K * sorted_K >= tail_K).logical_and(places_K > 0).cumprod(0).sum())
    prob_K = (sorted_K > 0).double()
    if certain < count < prob_K.sum():
        prob_K[certain:] = places_K[certain] * sorted_K[certain:] / tail_K[certain]
    return torch.zeros_like(prob_K).scatter_(0, order_K, prob_K)


def systematic(prob_K: Tensor, order_K: Tensor, start: float) -> Tensor:
    """Draw items by systematic sampling, bool [K]: they lie end to end in this order, each as long as its
    probability, and an item is kept if one of the points start, start + 1, ... lies in it (start in [0, 1)).

    Over a uniform start each item is kept with exactly its probability, and always as many are kept as the
    probabilities add up to. Probabilities 1/2 1/2 3/4 1/4 in that order end at 1/2 1 7/4 2: start 0.6 has its
    points at 0.6 and 1.6 and keeps the second and third item, start 0.2 the first and third.
    """
    chance_K = order_K[prob_K[order_K] < 1]
    ends = prob_K[chance_K].cumsum(0)
    if len(ends):
        ends[-1] = ends[-1].round()  # an integer but for rounding
    points = (ends - start).ceil()  # how many lie before each end
    keep_K = prob_K >= 1
    keep_K[chance_K] = points.diff(prepend=points.new_zeros(1)) > 0
    return keep_K


def max_variance(reward_NG: Tensor, keep: int) -> Tensor:
    """Mark the `keep` completions of each group with the largest reward variance, bool [N, G]: PODS
    (arXiv:2504.13818). Biased.

    One such set is of the i highest and the keep - i lowest rewards, for some i, so keep + 1 are tried. As
    released, the highest alone come first, then i = 0, 1, ..., and the first of equals wins. Among equal
    rewards the earlier completions count as higher. One without a reward, nan, is no candidate.
    """
    kept_NG = torch.zeros_like(reward_NG, dtype=torch.bool)
    for kept_G, reward_G in zip(kept_NG, reward_NG, strict=True):
        order = reward_G.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        order = order[:int((~reward_G.isnan()).sum())].tolist()
        m, best, largest = min(keep, len(order)), [], -1.0
        for i in (m, *range(m)) if m else ():
            ends = order[:i] + order[len(order) - m + i:]
            if (variance := reward_G[ends].var(correction=0).item()) > largest * LARGER + TINY:
                best, largest = ends, variance
        kept_G[best] = True
    return kept_NG


def rewards_of_kept(rewards: Rewards, groups: list[int], keep_NG: Tensor) -> Rewards:
    """Take the reward from every completion of these groups that is not kept, so that advantages compare the
    kept with one another alone, as in the release of PODS."""
    components = {name: x_NG[groups].masked_fill(~keep_NG, torch.nan)
                  for name, x_NG in rewards.components.items()}
    return replace(rewards, components=components, tokens_NG=rewards.tokens_NG[groups])


def most_variance(reward_NG: Tensor, share: float, slack: float) -> Tensor:
    """Mark all completions of the groups of the largest reward variance, bool [N, G]: RAGEN-2's filter by
    signal-to-noise ratio (arXiv:2604.06268). Biased.

    They are the fewest groups that hold `share` of the sum of all variances, less `slack`; of equal variances
    the earlier group comes first.
    Variances are of samples (correction 1), over the completions that have a reward. A sum of at most
    slack / share keeps nothing, and a flat group is never kept.
    """
    count_N = (~reward_NG.isnan()).sum(dim=1)
    apart_NG = reward_NG - reward_NG.nanmean(dim=1, keepdim=True)
    variance_N = apart_NG.square().nansum(dim=1) / (count_N - 1).clamp(min=1)
    variance_N = variance_N.round(decimals=12)  # equal variances are equal, and a flat group has 0
    sorted_N, order_N = variance_N.sort(descending=True, stable=True)
    target = share * sorted_N.sum() - slack
    before_N = sorted_N.cumsum(0) - sorted_N  # the sum of all larger ones; for a flat group the whole sum
    kept_N = before_N < target * (1 - 1e-9)
    return torch.zeros_like(kept_N).scatter_(0, order_N, kept_N)[:, None].expand_as(reward_NG)


# prune.completions.kind -> function of the candidates and of that section of the config
COMPLETIONS = {
    "none": lambda given, settings: keep_all(given.adv_NG),
    "topk": lambda given, settings: keep_largest(given.adv_NG, settings.keep, settings.scope),
    "bottom": lambda given, settings: drop_bottom(given.adv_NG, settings.drop_prob),
    "bernoulli": lambda given, settings: bernoulli(given, settings.drop_prob, settings.error),
    "pps": pps_by,
    "pods": lambda given, settings: keep_marked(max_variance(given.reward_NG, settings.keep), given.adv_NG),
    "variance": lambda given, settings: keep_marked(
        most_variance(given.reward_NG, settings.share, settings.slack), given.adv_NG),
}


CutWeights = list[list[Tensor]]  # of each completion, [N][G]: the weights of those tokens that are trained on


def prefix_prob(length: int, whole: float, least: int) -> Tensor:
    """Compute each token's probability of being kept by a random cut, [L]: NAT (arXiv:2603.06619) by
    prefixes; the distribution of the cut is ours.

    With probability `whole` nothing is cut. Else the number of kept tokens is uniform from `least` to L. Four
    tokens with least 2 and whole 0.4 have probabilities 1, 1, 0.8, 0.6.
    """
    least = min(least, length)
    behind_L = torch.arange(length, 0, -1, dtype=torch.float64)  # cuts that keep a token
    return whole + (1 - whole) * (behind_L / (length - least + 1)).clamp(max=1)


def draw_cuts(groups: list[Group], settings: kinds.Prefix, seed: int) -> CutWeights | None:
    """Draw a cut of every completion; returns the weights of the tokens before it, or None without groups.

    Tokens behind the cut are in no row, so the forward pass is saved too. A token weighs the inverse of its
    probability under the denominators of whole completions, so the mean over all cuts is the full gradient of
    every loss that is a sum over tokens. Unbiased.
    """
    if not groups:
        return None
    shape, generator = (len(groups), len(groups[0].samples)), torch.Generator().manual_seed(seed)
    point_NG = torch.rand(shape, dtype=torch.float64, generator=generator).tolist()
    return [[cut_weights(sample.trained, settings.whole, settings.least, point)
             for sample, point in zip(group.samples, point_G, strict=True)]
            for group, point_G in zip(groups, point_NG, strict=True)]


def cut_weights(length: int, whole: float, least: int, point: float) -> Tensor:
    """Weigh the tokens with a probability above a point; a uniform point gives the law of `prefix_prob`."""
    prob_L = prefix_prob(length, whole, least)
    return 1 / prob_L[prob_L > point]


def cut_completions(groups: list[Group], tokens: CutWeights) -> list[Group]:
    """Cut the completions off behind the tokens that are trained on."""
    return [replace(group, samples=tuple(
        sample.first(len(weight_C)) for sample, weight_C in zip(group.samples, weight_GC, strict=True)))
        for group, weight_GC in zip(groups, tokens, strict=True)]


@frozen
class Memory:
    """The history of K prompts that come up, before they are rolled out."""

    size_K: Tensor    # mean |A| of the newest rollout, from all G; nan for a prompt that never was rolled out
    skipped_K: Tensor  # times that it was skipped since
    easy_K: Tensor    # newest rollouts in a row with equal, high rewards; 0 after any other
    hard_K: Tensor    # ... all equal and low
    mean: float       # size of all prompts that were rolled out; nan before there is one
    explore: tuple[float, float]  # GRESO's p for easy and for hard prompts
    rows: list[dict]  # of the data file


def bernoulli_prompts(memory: Memory, drop_prob: float | None, error: float | None = None) -> Tensor:
    """Compute each prompt's probability of a rollout, [K]: 1 - drop_prob for a size below the mean, else 1,
    also for a prompt never rolled out. Dynamic Pruning (arXiv:2603.04135) at the prompt level, reconstructed:
    the sources say that prompts of low historical advantage are skipped, but not the limit.
    """
    small_K = memory.size_K < memory.mean * SLACK
    if drop_prob is None:
        # A prompt that showed nothing the last time may come back, as in `proportional_prob`.
        norm_K = memory.size_K.nan_to_num(nan=memory.mean).clamp(min=0.1 * memory.mean)
        drop_prob = drop_within(norm_K, small_K, error)
    return 1 - drop_prob * small_K.double()


def skip_lowest(memory: Memory, drop_prob: float, max_skips: int) -> Tensor:
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


def proportional_prob(size_K: Tensor, share: float | None, floor: float, error: float | None = None,
                      ) -> Tensor:
    """Compute each prompt's probability of a rollout, [K], in proportion to its size, the mean |A| of its
    newest group: with 0/1 rewards over their deviation that is 2 sqrt(p (1 - p)), p the share of right ones.

    Of the prompts that were rolled out before, `share` are expected to be again; one that never was is
    certain. A size counts as at least `floor` times their mean, so that a prompt that showed nothing the last
    time comes back, and no weight is above (1 + floor) / (share floor). `error` stands in place of the share:
    the fewest with this `predicted_error`.
    """
    seen_K, prob_K = ~size_K.isnan(), torch.ones_like(size_K, dtype=torch.float64)
    if not seen_K.any():
        return prob_K
    size_S = size_K[seen_K]
    floored_S = size_S.clamp(min=floor * size_S.mean()) if size_S.any() else torch.ones_like(size_S)
    count = share * len(size_S) if share else fewest(floored_S, floored_S, error)
    prob_K[seen_K] = inclusion(floored_S, count)
    return prob_K


def greso_prob(easy_K: Tensor, hard_K: Tensor, explore: tuple[float, float]) -> Tensor:
    """Compute each prompt's probability of a rollout, [K]: max(p^z, 0.01) after z rollouts in a row that were
    all easy, or all hard; p, in `explore`, differs for the two. GRESO (arXiv:2506.02177), biased on purpose:
    every weight stays 1, and other prompts are drawn in place of those skipped.
    """
    easy, hard = explore
    return torch.where(easy_K > 0, easy ** easy_K, hard ** hard_K).clamp(min=0.01)


def adapt_p(explore: tuple[float, float], easy: float, hard: float, target: float) -> tuple[float, float]:
    """Move GRESO's p for easy and for hard prompts by the fractions of a step's prompts that were easy and
    hard: 0.01 down if a fraction has reached its limit, a third of `target` for easy prompts and two
    thirds for hard ones, else 0.01 up.
    """
    def moved(p: float, fraction: float, limit: float) -> float:
        return min(max(p - 0.01 if fraction >= limit else p + 0.01, 0.05), 0.95)

    return moved(explore[0], easy, target / 3), moved(explore[1], hard, target * 2 / 3)


def next_round_size(missing: int, flat_share: float, largest: int) -> tuple[int, bool]:
    """Size GRESO's next round for `missing` informative groups when `flat_share` of the last round's groups
    were flat: a number of prompts within [largest / 6, largest] as released, and whether it is estimated to
    be enough.
    """
    estimate = 1.25 * missing / (1 - flat_share) if flat_share < 1 else float("inf")
    return max(int(min(estimate, largest)), largest // 6, 1), estimate <= largest


# prune.prompts.kind -> function of the memory and of that section of the config: probability [K] of a rollout
PROMPTS = {
    "none": lambda memory, settings: torch.ones_like(memory.size_K),
    "bernoulli": lambda memory, settings: bernoulli_prompts(memory, settings.drop_prob, settings.error),
    "rank": lambda memory, settings: skip_lowest(memory, settings.drop_prob, settings.max_skips),
    "pps": lambda memory, settings: proportional_prob(
        memory.size_K, settings.share, settings.floor, settings.error),
    "greso": lambda memory, settings: greso_prob(memory.easy_K, memory.hard_K, memory.explore),
}


def checked(pruner: Callable) -> Callable:
    """Wrap a pruner of one's own: it raises ConfigError for what would be broadcast, or turn a gradient."""
    def prune(given: Candidates, settings: object) -> Pruned:
        adv_NG = given.adv_NG
        drawn = pruner(replace(given, adv_NG=adv_NG.clone()), settings)
        tensors = [getattr(drawn, name, None) for name in ("keep_NG", "weight_NG", "prob_NG")]
        if [getattr(x, "shape", None) for x in tensors] != [adv_NG.shape] * 3:
            raise ConfigError(f"prune.completions.kind={settings.kind} must return a Pruned of three tensors "
                              f"{[*adv_NG.shape]}: who is kept, weights and probabilities")
        keep_NG, weight_NG, prob_NG = tensors
        fine_NG = weight_NG.isfinite() & (weight_NG >= 0) & ~((prob_NG < 0) | (prob_NG > LARGER))
        if keep_NG.dtype != torch.bool or not fine_NG.all():
            raise ConfigError(f"prune.completions.kind={settings.kind} must return who is kept as bool, "
                              "finite weights of at least 0, and probabilities of at most 1")
        return drawn

    return prune
