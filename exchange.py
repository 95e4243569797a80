"""How a step's completions travel between ranks: as flat arrays of tokens and log-probs, and no further than needed.

A step of few tokens is gathered whole. Of a larger one every rank learns the lengths, and gets the tokens of what it
trains on when rows are dealt.
"""

from array import array
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

import dist
from sample import Elsewhere, Group, Sample

Members = list[tuple[int, int]]  # completions, as (group, place in the group)


def gather(samples: list[Sample], limit: int) -> tuple[list[Sample | Elsewhere], list[int] | None]:
    """Every rank's completions, in rank order, on every rank; of more than `limit` tokens only what describes those
    that lie elsewhere, and then also the rank that holds each.
    """
    about = torch.tensor([(s.length, s.finished, s.logp_sum) for s in samples], dtype=torch.float64).view(-1, 3)
    parts = dist.gather_rows(about)
    lengths, finished, logp_sums = torch.cat(parts).T.tolist()
    if sum(lengths) <= limit:
        ids_T, logp_T = (torch.cat(dist.gather_rows(array_T)) for array_T in flat(samples))
        return unflat(ids_T, logp_T, list(map(int, lengths)), list(map(bool, finished))), None
    owners = [rank for rank, part in enumerate(parts) for _ in part]
    mine = iter(samples)
    return [next(mine) if owner == dist.rank() else Elsewhere(int(length), bool(ended), total)
            for owner, length, ended, total in zip(owners, lengths, finished, logp_sums, strict=True)], owners


def fetch(groups: list[Group], hands: list[Members]) -> list[Group]:
    """The groups with the completions that this rank trains on, its hand, in place of what told of them."""
    if all(group.owners is None for group in groups):
        return groups
    here = dist.rank()

    def sent(source: int, target: int) -> Members:
        return [(n, g) for n, g in dict.fromkeys(hands[target])
                if source != target and groups[n].owners is not None and groups[n].owners[g] == source]

    ranks = range(dist.world_size())
    coming = [sent(rank, here) for rank in ranks]
    lengths = [[groups[n].samples[g].length for n, g in members] for members in coming]
    leaving = [flat([groups[n].samples[g] for n, g in sent(here, rank)]) for rank in ranks]
    ids_T, logp_T = (dist.exchange([arrays[i] for arrays in leaving], list(map(sum, lengths))) for i in (0, 1))
    members = [member for part in coming for member in part]
    finished = [groups[n].samples[g].finished for n, g in members]
    arrived = dict(zip(members, unflat(ids_T, logp_T, sum(lengths, []), finished), strict=True))
    return [Group(group.prompt, tuple(arrived.get((n, g), s) for g, s in enumerate(group.samples)), group.owners)
            for n, group in enumerate(groups)]


def flat(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Token ids as int32 and log-probs as float64, one completion behind the other."""
    return (torch.from_numpy(np.concatenate([np.empty(0, np.int32), *(s.ids for s in samples)])),
            torch.from_numpy(np.concatenate([np.empty(0), *(s.logp for s in samples)])))


def unflat(ids_T: Tensor, logp_T: Tensor, lengths: list[int], finished: list[bool]) -> list[Sample]:
    """Undo `flat`."""
    ids, logp = array("i", ids_T.numpy().tobytes()), array("d", logp_T.numpy().tobytes())
    ends = accumulate(lengths, initial=0)
    return [Sample(ids[a:b], logp[a:b], ended) for (a, b), ended in zip(pairwise(ends), finished, strict=True)]
