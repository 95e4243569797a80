"""Sample at most rollout.window new tokens of every completion per step: T-PPO's successive batching
(arXiv:2506.15050).

A completion that does not end goes on in the next step, and new prompts take the places of completions that
have ended; fewer places than a group needs may stay empty. Every completion is a group of its own, since
completions of a prompt end in different steps. `Pool` replaces the history of prompts, `WindowSampler` the
sampler; the loop is the same. pack.window is something else: the sequences that packing chooses from.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collect import Sampler
from history import PromptHistory, sample_seed
from infra.dist import seed_for
from records import Group, Prompt, PromptDraw, Rewards, Rolled, Sample
from settings.kinds import Prompts


class Pool(PromptHistory):
    """The history of prompts, and the unfinished completions that go on."""

    def __init__(
        self,
        prompts: list[Prompt],
        pruning: Prompts,
        seed: int,
        group_size: int,
    ):
        super().__init__(prompts, pruning, seed, middle=0.0)
        self.remembers = True
        self.group_size = group_size
        self.unfinished: list[tuple[PromptDraw, Sample]] = []

    def draw(self, count: int) -> list[PromptDraw]:
        """Take the turns of single completions: all that go on, then new prompts while there is room."""
        room = count * self.group_size - len(self.unfinished)
        new = []
        for draw in super().draw(room // self.group_size):
            new += [replace(draw, copy=copy) for copy in range(self.group_size)]
        going_on = [draw for draw, _ in self.unfinished]
        return interleave(going_on, new)

    def record(self, rolled: Rolled) -> None:
        """Keep the completions that go on."""
        self.unfinished = []
        for draw, group in zip(rolled.draws, rolled.groups, strict=True):
            sample, = group.samples
            if sample.pending:
                self.unfinished.append((draw, sample))

    def state(self) -> dict:
        pool = []
        for draw, sample in self.unfinished:
            ids = torch.frombuffer(sample.ids, dtype=torch.int32)
            logp = torch.frombuffer(sample.logp, dtype=torch.float64)
            pool.append((*completion_key(draw), ids, logp))
        return super().state() | {"pool": pool}

    def restore(self, state: dict) -> None:
        super().restore(state)
        by_id = {prompt.id: prompt for prompt in self.prompts}
        self.unfinished = []
        for epoch, prompt_id, copy, ids, logp in state["pool"]:
            draw = PromptDraw(by_id[prompt_id], epoch, copy=copy)
            sample = Sample(ids.tolist(), logp.tolist(), finished=False, pending=True)
            self.unfinished.append((draw, sample))


@dataclass(frozen=True, slots=True)
class WindowSampler:
    """Sample the next window of every completion, and score the completions that have ended."""

    sampler: Sampler
    pool: Pool

    def rollout(self, draws: list[PromptDraw]) -> list[Group]:
        """Go on with the completions of the pool, and begin one for each new turn."""
        settings = self.sampler.sampling
        unfinished = {completion_key(draw): sample for draw, sample in self.pool.unfinished}
        so_far = [unfinished.get(completion_key(draw)) for draw in draws]
        prompts, seeds, limits = [], [], []
        for draw, sample in zip(draws, so_far, strict=True):
            ids = draw.prompt.ids
            room = settings.max_new_tokens
            if sample:
                ids = (*ids, *sample.ids)
                room -= sample.length
            prompts.append(ids)
            seeds.append(window_seed(self.sampler.seed, draw, sample))
            limits.append(min(settings.window, room))
        pieces = self.sampler.complete(prompts, seeds, limits)
        groups = []
        for draw, sample, piece in zip(draws, so_far, pieces, strict=True):
            whole = append_piece(sample, piece)
            pending = not whole.finished and whole.length < settings.max_new_tokens
            groups.append(Group(draw.prompt, (replace(whole, pending=pending),)))
        return groups

    def score(self, groups: list[Group]) -> Rewards:
        """Score the completions that have ended; the others have 0 in every component, and 0 tokens."""
        places = [n for n, group in enumerate(groups) if not group.samples[0].pending]
        ended = [groups[n] for n in places]
        rewards = self.sampler.score(ended)
        places_N = torch.tensor(places, dtype=torch.long)

        def among_all(value_NG: Tensor) -> Tensor:
            zeros_NG = value_NG.new_zeros(len(groups), 1)
            return zeros_NG.index_copy(0, places_N, value_NG.view(-1, 1))

        components = {name: among_all(value_NG) for name, value_NG in rewards.components.items()}
        tokens_NG = among_all(rewards.tokens_NG)
        return replace(rewards, components=components, tokens_NG=tokens_NG)


def completion_key(draw: PromptDraw) -> tuple[int, str, int]:
    """Identify the completion of a turn."""
    return draw.epoch, draw.prompt.id, draw.copy


def window_seed(seed: int, draw: PromptDraw, so_far: Sample | None) -> int:
    """Derive the next window's seed; engines always start at the beginning of a seed's stream."""
    first = sample_seed(seed, *completion_key(draw))
    if so_far is None:
        return first
    return seed_for(first, so_far.length)


def append_piece(so_far: Sample | None, piece: Sample) -> Sample:
    """Append the new piece to an unfinished completion."""
    if so_far is None:
        return piece
    ids = so_far.ids + piece.ids
    logp = so_far.logp + piece.logp
    return Sample(ids, logp, piece.finished, start=so_far.length)


def interleave(unfinished: list, new: list) -> list:
    """Merge both lists, each in its order and spread evenly, so that every rank gets long prefixes and new
    prompts alike."""
    places = []
    for items in (unfinished, new):
        for i, item in enumerate(items):
            place = (i + 0.5) / len(items)
            places.append((place, item))
    places.sort(key=lambda pair: pair[0])
    return [item for _, item in places]
