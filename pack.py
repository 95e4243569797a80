"""Pack kept completions densely: each behind its prompt, end to end in rows of at most `capacity` tokens.

Dimension key:  N groups,  G completions per group,  T tokens of one row (prompts included),  C completion
tokens among them, the only ones that are projected and scored,  S sequences in one row.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from config import Pack
from records import Group, Row


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Assign items to rows of at most `capacity` tokens: longest first, into the fullest row that takes it.

    Deterministic, never cuts and never drops: an item longer than a row is an error. Lengths 5 3 4 2 at
    capacity 7 give the rows [0, 3] and [2, 1]: 5 opens a row, 4 another, 3 fills that one, and 2 the first.
    """
    if max(lengths, default=0) > capacity:
        raise too_long(lengths, capacity)
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fullest = bisect_left(room, (lengths[i], 0))
        left, row = room.pop(fullest) if fullest < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (left - lengths[i], row))
    return rows


def within_window(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    """Assign items to rows of at most `capacity` tokens, chosen from `window` items (pack.window) at a time.

    The window-based greedy packing of Dynamic Pruning (arXiv:2603.04135, section 4.3; a name and a purpose
    are known of it, so this is a reconstruction). A row begins with the oldest item in sight, which therefore
    never starves, and takes the longest in sight that still fits until none does; an item taken makes room
    for the next to come in sight. Never cuts and never drops: an item longer than a row is an error.
    """
    if max(lengths, default=0) > capacity:
        raise too_long(lengths, capacity)
    coming = iter(enumerate(lengths))
    rows: list[list[int]] = []
    oldest: dict[int, int] = {}  # item -> length, in the order they came in sight
    longest: list[tuple[int, int]] = []  # (length, -item): of equal lengths the older one is taken

    def look() -> None:
        for i, length in islice(coming, window - len(oldest)):
            oldest[i] = length
            insort(longest, (length, -i))

    look()
    while oldest:
        rows.append([])
        room, taken = capacity, next(iter(oldest))
        while taken is not None:
            rows[-1].append(taken)
            length = oldest.pop(taken)
            room -= length
            longest.pop(bisect_left(longest, (length, -taken)))
            look()
            fits = bisect_right(longest, (room, 1))
            taken = -longest[fits - 1][1] if fits else None
    return rows


def too_long(lengths: list[int], capacity: int) -> ValueError:
    i = max(range(len(lengths)), key=lengths.__getitem__)
    return ValueError(f"item {i} has {lengths[i]} tokens but pack.capacity={capacity}; "
                      "raise pack.capacity or lower rollout.max_new_tokens")


def cost(lengths: list[int], quadratic: float) -> float:
    """Compute a row's cost in units of a token without attention; `quadratic` is Decoder.quadratic."""
    return sum(length + quadratic * length ** 2 for length in lengths)


def deal(costs: list[float], ranks: int) -> list[list[int]]:
    """Deal rows to ranks, equally many up to one and of nearly equal cost: in each round every rank gets one
    of the most expensive rows left, the most expensive going to the rank with the least cost so far.
    """
    order = sorted(range(len(costs)), key=lambda row: -costs[row])
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        by_sum = sorted(hands, key=lambda hand: sum(costs[row] for row in hand))
        for row, hand in zip(order[start:start + ranks], by_sum, strict=False):
            hand.append(row)
    return hands


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The completions of one optimizer step, and what each of their tokens carries."""

    groups: list[Group]
    keep_NG: Tensor        # bool: what is packed
    adv_NG: Tensor
    weight_NG: Tensor      # loss.token_weight
    likelihood_NG: Tensor  # loss.likelihood_weight
    reward_NG: Tensor      # for a critic

    @staticmethod
    def plain(groups: list[Group], keep_NG: Tensor, adv_NG: Tensor, weight_NG: Tensor) -> "Minibatch":
        """Make a mini-batch without likelihood weights and rewards."""
        none_NG = torch.zeros_like(weight_NG)
        return Minibatch(groups, keep_NG, adv_NG, weight_NG, none_NG, none_NG)


@dataclass(frozen=True, slots=True)
class Plan:
    """The completions (n, g) of one row."""

    members: list[tuple[int, int]]
    counts: bool = True  # False: the row runs with weight 0, to keep its rank in step


def pack(minibatch: Minibatch, settings: Pack, ranks: int, quadratic: float = 0.0) -> list[list[Plan]]:
    """Plan each rank's rows, by `within_window` where pack.window is set, else by `best_fit`.

    Every rank gets the same number of rows, of nearly equal cost: the shortest row with weight 0 fills up.
    All ranks compute the same assignment from the same lengths, so nothing has to be agreed upon.
    """
    kept = [(n, g) for n, g in minibatch.keep_NG.nonzero().tolist()]
    lengths = [len(minibatch.groups[n].prompt.ids) + minibatch.groups[n].samples[g].length for n, g in kept]
    if settings.window is None:
        rows = best_fit(lengths, settings.capacity)
    else:
        rows = within_window(lengths, settings.capacity, settings.window)
    plans = [Plan([kept[i] for i in members]) for members in rows]
    costs = [cost([lengths[i] for i in members], quadratic) for members in rows]
    hands = [[plans[row] for row in hand] for hand in deal(costs, ranks)]
    most = max(map(len, hands))
    shortest = min(range(len(plans)), key=lambda row: sum(lengths[i] for i in rows[row]), default=0)
    return [hand if len(hand) == most else [*hand, Plan(plans[shortest].members, counts=False)]
            for hand in hands]


def build_row(minibatch: Minibatch, plan: Plan) -> Row:
    """Lay a row's completions out. Log-probs are taken of the tokens that this step has sampled.

    A prompt of ids 7 8 with the completions 4 5 and 6 becomes two sequences, ids_T = 7 8 4 5 7 8 6,
    position_T = 0 1 2 3 0 1 2 and offsets = 0 4 7; target_C = 4 5 6 is predicted where predict_C = 1 2 5 say.
    """
    samples = [minibatch.groups[n].samples[g] for n, g in plan.members]
    prompts = [minibatch.groups[n].prompt.ids for n, _ in plan.members]
    lengths = [len(prompt) + sample.length for prompt, sample in zip(prompts, samples, strict=True)]
    offsets = [0, *accumulate(lengths)]
    n_S, g_S = torch.tensor(plan.members).T
    n_C, g_C = torch.tensor(plan.members).repeat_interleave(torch.tensor([s.fresh for s in samples]), dim=0).T
    pieces = []
    for prompt, sample in zip(prompts, samples, strict=True):
        pieces += [prompt, sample.ids]
    last = [end - 1 for end in offsets[1:]]  # nothing is predicted after the last token
    predict = [torch.arange(end - sample.fresh, end) for end, sample in zip(last, samples, strict=True)]
    return Row(
        ids_T=torch.from_numpy(np.concatenate(pieces)).long(),
        position_T=torch.cat([torch.arange(length) for length in lengths]),
        offsets=torch.tensor(offsets),
        max_len=max(lengths),
        predict_C=torch.cat(predict),
        target_C=torch.from_numpy(np.concatenate([s.ids[s.start:] for s in samples])).long(),
        sampled_logp_C=torch.from_numpy(np.concatenate([s.logp[s.start:] for s in samples])),
        adv_C=minibatch.adv_NG[n_C, g_C],
        weight_C=minibatch.weight_NG[n_C, g_C] * plan.counts,
        likelihood_C=minibatch.likelihood_NG[n_C, g_C] * plan.counts,
        reward_S=minibatch.reward_NG[n_S, g_S],
        pending_S=torch.tensor([sample.pending for sample in samples]),
        length_S=torch.tensor([sample.length for sample in samples]),
    )
