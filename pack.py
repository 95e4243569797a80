"""Dense packing: prompts, each before all of its kept completions, in rows of at most `capacity` tokens.

Prefix Grouper (arXiv:2506.05433) had the idea: a row holds a prompt once. `pack` decides which completions
share a row, from lengths alone, and `build_row` then lays the tokens of a row out.

Dimension key:  N groups,  G completions per group,  T tokens of one row (prompts included),  C completion
tokens among them, the only ones that are projected and scored,  S completions in one row.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from config import Pack
from records import Group, Row, Segments, frozen

Members = list[tuple[int, int]]  # completions (n, g)


@frozen
class Minibatch:
    """The completions of one optimizer step, with the weights of their tokens."""

    groups: list[Group]
    keep_NG: Tensor        # bool: packed
    adv_NG: Tensor
    weight_NG: Tensor      # loss.token_weight
    reward_NG: Tensor      # nan without one
    likelihood_NG: Tensor | None = None  # loss.likelihood_weight, if the loss has that term
    bonus_NG: Tensor | None = None       # weight of each token's entropy, if the loss has a bonus
    tokens: list[list[Tensor]] | None = None  # Batch.tokens; the groups are cut off there
    seed: int = 0          # of a draw among these completions


@frozen
class Plan:
    """The completions (n, g) of one row; completions of a group are neighbours."""

    members: Members
    counts: bool = True  # False: the row runs with weight 0, to keep its rank in step


@frozen
class KeptGroup:
    """Tokens of a prompt, and of its completions that are kept."""

    prompt: int
    members: Members
    lengths: list[int]  # of each member


def pack(minibatch: Minibatch, settings: Pack, ranks: int, quadratic: float = 0.0) -> list[list[Plan]]:
    """Plan each rank's rows. A prompt is in a row once, before all of its completions there.

    Rows are of the smallest capacity, by bisection, that keeps the number of rounds (MULTIFIT; Coffman, Garey
    and Johnson 1978): no rank does much more than others, and a group is split only where it is longer.
    Every rank gets the same number of rows, of nearly equal cost: the cheapest with weight 0 fills up. All
    ranks compute the same assignment from the same lengths, so nothing has to be agreed upon.
    """
    kept = []
    low, high = 0, settings.capacity
    for n, group in enumerate(minibatch.groups):
        prompt = len(group.prompt.ids)
        places = minibatch.keep_NG[n].nonzero()[:, 0].tolist()
        lengths = [len(group.samples[g].ids) for g in places]
        kept.append(KeptGroup(prompt, [(n, g) for g in places], lengths))
        low = max([low, *(prompt + length for length in lengths)])
    if low > high:
        raise ValueError(f"a completion with its prompt has {low} tokens but pack.capacity={high}; "
                         "raise pack.capacity or lower rollout.max_new_tokens")
    rows = cut_rows(kept, high, settings.window)
    rounds = -(-len(rows) // ranks)
    while low < high:  # `rows` fit the capacity `high`
        middle = (low + high) // 2
        shorter = cut_rows(kept, middle, settings.window)
        if len(shorter) <= rounds * ranks:
            rows, high = shorter, middle
        else:
            low = middle + 1
    costs = [row_cost(*layout(minibatch, members), quadratic) for members in rows]
    by_rank = []
    for hand in deal_rows(costs, ranks):
        plans = [Plan(rows[row]) for row in hand]
        if len(plans) < rounds:
            cheapest = costs.index(min(costs))
            plans.append(Plan(rows[cheapest], counts=False))
        by_rank.append(plans)
    return by_rank


def cut_rows(groups: list[KeptGroup], capacity: int, window: int | None) -> list[Members]:
    """Choose the members of rows of at most `capacity` tokens, by `within_window` or `best_fit`.

    Groups are packed whole; one that is longer than a row is cut into pieces first.
    """
    items, tokens = [], []
    for group in groups:
        for piece in best_fit(group.lengths, capacity - group.prompt):
            items.append([group.members[i] for i in sorted(piece)])
            tokens.append(group.prompt + sum(group.lengths[i] for i in piece))
    rows = best_fit(tokens, capacity) if window is None else within_window(tokens, capacity, window)
    return [[member for i in row for member in items[i]] for row in rows]


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Assign items to rows of at most `capacity` tokens: longest first, into the fullest row that takes it.

    Deterministic, never cuts and never drops; no item may be longer than a row. Lengths 5 3 4 2 at capacity 7
    give the rows [0, 3] and [2, 1]: 5 opens a row, 4 another, 3 fills that one, and 2 the first.
    """
    rows = []
    room = []  # (tokens left, row), sorted
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        fullest = bisect_left(room, (lengths[i], 0))
        if fullest == len(room):
            room.append((capacity, len(rows)))
            rows.append([])
        left, row = room.pop(fullest)
        rows[row].append(i)
        insort(room, (left - lengths[i], row))
    return rows


def within_window(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    """Assign items to rows of at most `capacity` tokens, chosen from `window` items (pack.window) at a time.

    The window-based greedy packing of Dynamic Pruning (arXiv:2603.04135, section 4.3; a name and a purpose
    are known of it, so this is a reconstruction). A row begins with the oldest item in sight, which therefore
    never starves, and takes the longest in sight that still fits until none does; an item taken makes room
    for the next to come in sight. Never cuts and never drops; no item may be longer than a row.
    """
    waiting = list(range(len(lengths)))  # the first `window` of them are in sight
    rows = []
    while waiting:
        rows.append([])
        room = capacity
        taken = waiting[0]
        while taken is not None:
            waiting.remove(taken)
            rows[-1].append(taken)
            room -= lengths[taken]
            fitting = [i for i in waiting[:window] if lengths[i] <= room]
            taken = max(fitting, key=lengths.__getitem__, default=None)  # of equal lengths the older one
    return rows


def deal_rows(costs: list[float], ranks: int) -> list[list[int]]:
    """Deal rows to ranks, equally many up to one and of nearly equal cost: in each round every rank gets one
    of the most expensive rows left, the most expensive going to the rank with the least cost so far.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    hands = [[] for _ in range(ranks)]
    so_far = [0.0] * ranks
    for start in range(0, len(order), ranks):
        least_first = sorted(range(ranks), key=so_far.__getitem__)
        for row, rank in zip(order[start:start + ranks], least_first, strict=False):
            hands[rank].append(row)
            so_far[rank] += costs[row]
    return hands


def row_cost(queries: Sequence[int], keys: Sequence[int], quadratic: float) -> float:
    """Cost of a row in tokens without attention, by its segments; `quadratic` is Decoder.quadratic.

    A query meets the keys up to its own, so q queries that end with k keys meet q (2k - q) / 2 of them.
    """
    return sum(q + quadratic * q * (2 * k - q) for q, k in zip(queries, keys, strict=True))


def layout(minibatch: Minibatch, members: Members) -> tuple[list[int], list[int]]:
    """Count queries and keys of each completion of a row. The first of a prompt has it among its queries."""
    queries, keys, before = [], [], None
    for n, g in members:
        completion = len(minibatch.groups[n].samples[g].ids)
        keys.append(len(minibatch.groups[n].prompt.ids) + completion)
        queries.append(completion if n == before else keys[-1])
        before = n
    return queries, keys


def build_row(minibatch: Minibatch, plan: Plan) -> Row:
    """Lay a row's completions out. Log-probs are taken of the policy's tokens that this step trains on.

    A prompt of ids 7 8 with the completions 4 5 and 6 becomes ids_T = 7 8 4 5 6 and position_T = 0 1 2 3 2.
    The queries 7 8 4 5 meet themselves, and 6 meets 7 8 6: key_K = 0 1 2 3 0 1 4. Both completions begin
    behind the 8: target_C = 4 5 6 is predicted where predict_C = 1 2 1 say.
    """
    samples = [minibatch.groups[n].samples[g] for n, g in plan.members]
    queries, keys = layout(minibatch, plan.members)
    ids, position, key, predict, target, logp = [], [], [], [], [], []  # arrays, laid end to end below
    end, group = 0, None                          # of the row so far; the group of the last prompt
    for (n, _), sample in zip(plan.members, samples, strict=True):
        prompt = minibatch.groups[n].prompt.ids
        if n != group:                            # its prompt, once, before all of its completions
            prompt_start, group = end, n
            ids.append(prompt)
            position.append(np.arange(len(prompt)))
            end += len(prompt)
        start, end = end, end + len(sample.ids)
        ids.append(sample.ids)
        position.append(np.arange(len(prompt), len(prompt) + len(sample.ids)))
        key += [np.arange(prompt_start, prompt_start + len(prompt)), np.arange(start, end)]
        # A token is predicted where the one before it stands; before the first is the prompt's last.
        before = np.arange(start - 1, end - 1)
        before[0] = prompt_start + len(prompt) - 1
        predict.append(before[sample.scored])
        target.append(np.array(sample.ids)[sample.scored])
        logp.append(np.array(sample.logp)[sample.scored])
    n_S, g_S = torch.tensor(plan.members).T
    segment = [np.full(len(places), i) for i, places in enumerate(predict)]
    ids_T, position_T, key_K, predict_C, target_C, segment_C = (
        torch.from_numpy(np.concatenate(x)).long() for x in (ids, position, key, predict, target, segment))
    n_C, g_C = n_S[segment_C], g_S[segment_C]
    factor_C = float(plan.counts)
    if minibatch.tokens:  # the weight of each token before a cut
        factor_C = factor_C * torch.cat([minibatch.tokens[n][g] for n, g in plan.members])
    weights = {"weight_C": minibatch.weight_NG, "likelihood_C": minibatch.likelihood_NG,
               "bonus_C": minibatch.bonus_NG}
    return Row(
        ids_T=ids_T, position_T=position_T, segments=Segments.of(queries, keys, key_K),
        predict_C=predict_C, target_C=target_C, segment_C=segment_C,
        sampled_logp_C=torch.from_numpy(np.concatenate(logp)),
        adv_C=minibatch.adv_NG[n_C, g_C],
        members=tuple(plan.members), counts=plan.counts,
        **{name: x_NG[n_C, g_C] * factor_C for name, x_NG in weights.items() if x_NG is not None}
    )
