"""Sample at most rollout.window new tokens of every completion per step: T-PPO's successive batching
(arXiv:2506.15050).

A completion that does not end goes on in the next step, and new prompts take the places of those that have
ended; fewer places than a group needs may stay empty. Every completion is a group of its own, since those of
a prompt end in different steps. `Pool` stands in for the history of prompts, `WindowSampler` for the sampler;
the loop is the same. pack.window is another thing: sequences that packing chooses from.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from collect import Sampler
from history import PromptHistory, sample_seed
from infra.dist import seed_for
from records import Group, Prompt, Rewards, Rolled, Sample, Turn
from settings.kinds import Prompts


class Pool(PromptHistory):
    """The history of prompts, and the unfinished completions that go on."""

    def __init__(self, prompts: list[Prompt], pruning: Prompts, seed: int, group_size: int):
        super().__init__(prompts, pruning, seed, middle=0.0)
        self.records, self.group_size = True, group_size
        self.unfinished: list[tuple[Turn, Sample]] = []

    def draw(self, count: int) -> list[Turn]:
        """Take the turns of single completions: all that go on, then new prompts while there is room."""
        drawn = super().draw((count * self.group_size - len(self.unfinished)) // self.group_size)
        new = [replace(turn, copy=copy) for turn in drawn for copy in range(self.group_size)]
        return interleaved([turn for turn, _ in self.unfinished], new)

    def record(self, rolled: Rolled) -> None:
        """Keep the completions that go on."""
        self.unfinished = [(turn, sample) for turn, group in zip(rolled.turns, rolled.groups, strict=True)
                           for sample in group.samples if sample.pending]

    def state(self) -> dict:
        pool = [(turn.epoch, turn.prompt.id, turn.copy,
                 *(torch.from_numpy(np.array(x)) for x in (sample.ids, sample.logp)))
                for turn, sample in self.unfinished]
        return super().state() | {"pool": pool}

    def restore(self, state: dict) -> None:
        super().restore(state)
        by_id = {prompt.id: prompt for prompt in self.prompts}
        self.unfinished = [(Turn(by_id[prompt_id], epoch, copy=copy),
                            Sample(ids.tolist(), logp.tolist(), finished=False, pending=True))
                           for epoch, prompt_id, copy, ids, logp in state["pool"]]


@dataclass(frozen=True, slots=True)
class WindowSampler:
    """Samples the next window of every completion, and scores those that have ended."""

    sampler: Sampler
    pool: Pool

    def rollout(self, turns: list[Turn]) -> list[Group]:
        """Go on with the completions of the pool, and begin those of new turns."""
        settings = self.sampler.sampling
        unfinished = {completion_key(turn): sample for turn, sample in self.pool.unfinished}
        so_far = [unfinished.get(completion_key(turn)) for turn in turns]
        prompts = [(*turn.prompt.ids, *sample.ids) if sample else turn.prompt.ids
                   for turn, sample in zip(turns, so_far, strict=True)]
        seeds = [window_seed(self.sampler.seed, turn, sample)
                 for turn, sample in zip(turns, so_far, strict=True)]
        room = [settings.max_new_tokens - (sample.length if sample else 0) for sample in so_far]
        pieces = self.sampler.complete(prompts, seeds, [min(settings.window, tokens) for tokens in room])
        groups = []
        for turn, sample, piece, tokens in zip(turns, so_far, pieces, room, strict=True):
            goes_on = not piece.finished and piece.length < tokens
            groups.append(Group(turn.prompt, (joined(sample, piece, goes_on),)))
        return groups

    def score(self, groups: list[Group]) -> Rewards:
        """Score the completions that have ended; those that go on have 0 in every component, and 0 tokens."""
        places = [n for n, group in enumerate(groups) if not group.samples[0].pending]
        rewards = self.sampler.score([groups[n] for n in places])
        places_N = torch.tensor(places, dtype=torch.long)

        def among_all(value_NG: Tensor) -> Tensor:
            return value_NG.new_zeros(len(groups), 1).index_copy(0, places_N, value_NG.view(-1, 1))

        components = {name: among_all(value_NG) for name, value_NG in rewards.components.items()}
        return replace(rewards, components=components, tokens_NG=among_all(rewards.tokens_NG))


def windowed(history: PromptHistory, sampler: Sampler) -> tuple[Pool, WindowSampler]:
    """Put a pool in place of a run's history, and a sampler of windows in place of its sampler."""
    pool = Pool(history.prompts, history.pruning, history.seed, sampler.sampling.group_size)
    return pool, WindowSampler(sampler, pool)


def completion_key(turn: Turn) -> tuple[int, str, int]:
    """Identify the completion of a turn."""
    return turn.epoch, turn.prompt.id, turn.copy


def window_seed(seed: int, turn: Turn, so_far: Sample | None) -> int:
    """Derive the next window's seed; engines always start at the beginning of a seed's stream."""
    first = sample_seed(seed, turn.epoch, turn.prompt.id, turn.copy)
    return seed_for(first, so_far.length) if so_far else first


def joined(so_far: Sample | None, piece: Sample, goes_on: bool) -> Sample:
    """Append the new piece to an unfinished completion."""
    if so_far is None:
        return replace(piece, pending=goes_on)
    return Sample(so_far.ids + piece.ids, so_far.logp + piece.logp, piece.finished, so_far.length, goes_on)


def interleaved(unfinished: list, new: list) -> list:
    """Merge both lists, each in its order and spread evenly, so that every rank gets long prefixes and new
    prompts alike."""
    places = [((i + 0.5) / len(items), item) for items in (unfinished, new) for i, item in enumerate(items)]
    return [item for _, item in sorted(places, key=lambda pair: pair[0])]
