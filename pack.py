"""Dense packing: kept completions, each behind its prompt, laid end to end in rows of at most `capacity` tokens.

Dimension key:  N groups,  G completions per group,  T tokens of one row (prompts included),  C completion tokens
among them, the only ones that are projected and scored.  S sequences in one row.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from sample import Group


@dataclass(frozen=True, slots=True)
class Row:
    """One forward pass. Attention stays within a sequence; positions start at 0 in each."""

    ids_T: Tensor
    position_T: Tensor
    offsets: Tensor     # [S + 1] offsets of the sequences, and T
    max_len: int        # of the longest sequence
    predict_C: Tensor   # where in T the token before each completion token stands
    target_C: Tensor    # the completion token itself, EOS included
    sampled_logp_C: Tensor  # the engine's log-prob of it, in nats
    adv_C: Tensor       # what is known of it before a critic's values
    weight_C: Tensor    # > 0 for kept completions, 0 in the rows that only keep ranks in step
    likelihood_C: Tensor  # loss.likelihood_weight
    reward_S: Tensor    # of each sequence; 0 where it goes on
    pending_S: Tensor   # bool: it goes on in the next step (rollout.window)
    length_S: Tensor    # tokens of its completion so far

    @property
    def segment_C(self) -> Tensor:
        """Which of the row's sequences each completion token belongs to."""
        return torch.bucketize(self.predict_C, self.offsets, right=True) - 1

    def to(self, device: torch.device, dtype: torch.dtype) -> "Row":
        """On `device`, with the floating-point fields in `dtype`."""
        moved = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None)
            moved[f.name] = value
        return Row(**moved)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Assign items to rows of at most `capacity` tokens: longest first, into the fullest row that still takes it.

    Deterministic, never cuts and never drops: an item longer than a row is an error.
    Which amounts of free room exist is a bit mask, so the best fit is its lowest bit from `length` upwards.
    """
    check_fit(lengths, capacity)
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms = 0
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = lengths[i]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        rows_by_room.setdefault(room - length, []).append(row)
        rooms |= 1 << (room - length)
    return rows


def within_window(lengths: list[int], capacity: int, window: int) -> list[list[int]]:
    """Assign items to rows of at most `capacity` tokens, with no more than `window` of them in sight at a time.

    The window-based greedy packing of Dynamic Pruning (arXiv:2603.04135, section 4.3; a name and a purpose are known of
    it, so this is a reconstruction). A row begins with the oldest item in sight, which therefore never starves, and
    takes the longest in sight that still fits until none does; an item taken makes room for the next to come in sight.
    Never cuts and never drops: an item longer than a row is an error.
    """
    check_fit(lengths, capacity)
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


def check_fit(lengths: list[int], capacity: int) -> None:
    for i, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"item {i} has {length} tokens but pack.capacity={capacity}; "
                             "raise pack.capacity or lower rollout.max_new_tokens")


def cost(lengths: list[int], quadratic: float) -> float:
    """Of a row of sequences of these lengths, in tokens without attention; `quadratic` is Decoder.quadratic."""
    return sum(length + quadratic * length ** 2 for length in lengths)


def deal(costs: list[float], ranks: int) -> list[list[int]]:
    """Rows for each rank, as many for all up to one, of sums as equal as dealing in rounds makes them: of the most
    expensive rows left, one for each rank, the most expensive to the rank with the least so far.
    """
    order = sorted(range(len(costs)), key=lambda row: -costs[row])
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        by_sum = sorted(hands, key=lambda hand: sum(costs[row] for row in hand))
        for row, hand in zip(order[start:start + ranks], by_sum, strict=False):
            hand.append(row)
    return hands


@dataclass(frozen=True, slots=True)
class Plan:
    """The completions (n, g) of one row."""

    members: list[tuple[int, int]]
    counts: bool = True  # False: the row runs with weight 0, to keep its rank in step


def pack(groups: list[Group], keep_NG: Tensor, capacity: int, window: int | None, ranks: int, quadratic: float = 0.0,
         ) -> list[list[Plan]]:
    """Each rank's rows, packed by `within_window` where there is a window, else by `best_fit`.

    Every rank gets the same number of rows, of nearly equal cost: the shortest row with weight 0 fills up.
    All ranks compute the same assignment from the same lengths, so nothing has to be agreed upon.
    """
    kept = [(n, g) for n, g in keep_NG.nonzero().tolist()]
    lengths = [len(groups[n].prompt.ids) + groups[n].samples[g].length for n, g in kept]
    found = best_fit(lengths, capacity) if window is None else within_window(lengths, capacity, window)
    plans = [Plan([kept[i] for i in members]) for members in found]
    hands = [[plans[row] for row in hand]
             for hand in deal([cost([lengths[i] for i in members], quadratic) for members in found], ranks)]
    most = max(map(len, hands))
    shortest = min(range(len(plans)), key=lambda row: sum(lengths[i] for i in found[row]), default=0)
    return [hand if len(hand) == most else [*hand, Plan(plans[shortest].members, counts=False)] for hand in hands]


def build(groups: list[Group], adv_NG: Tensor, weight_NG: Tensor, plan: Plan, reward_NG: Tensor | None = None,
          likelihood_NG: Tensor | None = None) -> Row:
    """Lay a row's completions out. The tokens scored are those that this step has sampled; what a loss has no use for,
    rewards or likelihood weights, is 0."""
    members = plan.members
    prompts = [groups[n].prompt.ids for n, _ in members]
    samples = [groups[n].samples[g] for n, g in members]
    lengths = [len(p) + s.length for p, s in zip(prompts, samples, strict=True)]
    starts = [0, *accumulate(lengths)]
    ends = [end - 1 for end in starts[1:]]  # nothing is predicted after the last token
    tokens_S = torch.tensor([s.fresh for s in samples])
    n_S, g_S = torch.tensor(members).T

    def per_token(x_NG: Tensor) -> Tensor:
        return x_NG[n_S, g_S].repeat_interleave(tokens_S)

    none_NG = torch.zeros_like(weight_NG)
    return Row(
        ids_T=joined([part for p, s in zip(prompts, samples, strict=True) for part in (p, s.ids)]).long(),
        position_T=torch.cat([torch.arange(length) for length in lengths]),
        offsets=torch.tensor(starts),
        max_len=max(lengths),
        predict_C=torch.cat([torch.arange(end - s.fresh, end) for end, s in zip(ends, samples, strict=True)]),
        target_C=joined([s.ids[s.start:] for s in samples]).long(),
        sampled_logp_C=joined([s.logp[s.start:] for s in samples]),
        adv_C=per_token(adv_NG),
        weight_C=per_token(weight_NG) * plan.counts,
        likelihood_C=per_token(none_NG if likelihood_NG is None else likelihood_NG) * plan.counts,
        reward_S=(none_NG if reward_NG is None else reward_NG)[n_S, g_S],
        pending_S=torch.tensor([s.pending for s in samples]),
        length_S=torch.tensor([s.length for s in samples]),
    )


def joined(parts: list[Sequence]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
