"""Sample completions over several steps: groups that go on (windows.in_flight), groups that wait
(rollout.until=informative with windows.max_age), and T-PPO's successive batching (windows.tokens,
arXiv:2506.15050).

Groups that go on: in_flight x N groups are under way. All unfinished completions advance by windows.tokens
tokens at a time until N groups are whole, and these are trained on, the oldest first. The others keep their
tokens, each with the log-prob of the policy that drew it, and go on in the next step, under the weights that
the engine has then. A group of age max_age holds the step up until it is whole. Time is counted in tokens, so
which groups are whole depends neither on the number of ranks nor on the speed of the machine. Every group is
trained on once. It is off-policy and outside the proof of unbiased pruning: short groups come first, and a
ratio for each token (loss.tis_cap, loss.old_logp) does not correct for the tokens before it.

T-PPO: a step has one window and trains on its tokens at once. Every completion is then a group of its own,
and new prompts take the places of completions that have ended; fewer places than a group needs may stay
empty.

A `Pool` replaces both the history of prompts and the sampler; the loop is the same. pack.window is something
else: the sequences that packing chooses from.
"""

from dataclasses import astuple, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collect import Sampler, rank_informative
from history import PromptHistory, sample_seed
from infra.dist import seed_for
from leaves.windows.settings import Windows
from records import Batch, Group, Metrics, PromptDraw, Request, Rewards, Rolled, Sample, frozen


@frozen
class Piece:
    """A completion, and how much of it is of earlier steps. It stands for the sample: what it does not know
    itself, it asks of it."""

    sample: Sample
    fresh_from: int = 0    # tokens sampled in earlier steps, by older policies
    start: int = 0         # those of them that were trained on there (T-PPO): all, or none
    pending: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sample, name)

    def places_from(self, first: int) -> np.ndarray:
        places = np.arange(self.sample.length)[self.sample.scored]
        return places[places >= first]

    @property
    def scored(self) -> np.ndarray:
        return self.places_from(self.start)

    @property
    def trained(self) -> int:
        return len(self.scored)

    @property
    def fresh(self) -> int:
        return len(self.places_from(self.fresh_from))

    @property
    def whole(self) -> "Piece":
        return self if self.pending else replace(self, start=0)

    def first(self, count: int) -> "Piece":
        return replace(self, sample=self.sample.first(self.own - self.trained + count))


@frozen
class Turn(PromptDraw):
    """A prompt's turn in a step, which may have begun in an earlier one."""

    copy: int = 0          # which of the prompt's completions, if each is a group of its own (T-PPO)
    age: int = 0           # steps since it was drawn
    so_far: tuple[Piece, ...] = field(default=(), hash=False)  # of its group

    @property
    def noted(self) -> dict:
        return {name: value for name, value in (("copy", self.copy), ("age", self.age)) if value}


@frozen
class OpenGroup(Group):
    """A group that may go on."""

    offered: bool = True


def parts(cfg: Any, run: Any) -> Any:
    """Give a run a pool of groups, which go on."""
    if not (cfg.windows.tokens or cfg.windows.max_age):
        return run
    pool = Pool(run.history, run.sampler, cfg.windows)
    return replace(run, history=pool, sampler=pool, measures=(*run.measures, age_metrics))


def age_metrics(rolled: Rolled, batch: Batch) -> Metrics:
    """Compute the ages of the groups trained on, and their share of tokens by older policies; nothing if none
    is older than the step."""
    ages = [draw.age for draw in batch.draws]
    if not any(ages):
        return {}
    samples = [s for group in batch.groups for s in group.samples]
    return {
        "age/mean": sum(ages) / len(ages),
        "age/most": max(ages),
        "age/old_tokens": sum(s.trained - s.fresh for s in samples) / sum(s.trained for s in samples),
    }


class Pool(PromptHistory):
    """The groups that were begun in earlier steps and not trained on yet; as a sampler, it samples windows of
    every completion until a step has enough, and scores the groups that go on no more."""

    def __init__(self, history: PromptHistory, sampler: Sampler, settings: Windows):
        vars(self).update(vars(history))
        self.sampler, self.sampling, self.settings = sampler, sampler.sampling, settings
        self.adapts = self.sampling.until == "informative"
        self.one_by_one = settings.max_age is None  # T-PPO: a completion is a group of its own
        self.width = 1 if self.one_by_one else self.sampling.group_size  # completions of a group
        self.begun = []

    def draw(self, count: int) -> list[Turn]:
        """Take the turns of all groups that were begun, then new prompts while there is room."""
        copies = self.sampling.group_size // self.width
        room = int(self.settings.in_flight * count) * copies - len(self.begun)
        draws = super().draw(max(0, room) // copies)
        new = [take_turn(draw, copy) for draw in draws for copy in range(copies)]
        # Each in its order, spread evenly: every rank gets long prefixes and new prompts alike.
        placed = [((i + 0.5) / len(turns), turn)
                  for turns in (self.begun, new) for i, turn in enumerate(turns)]
        return [turn for _, turn in sorted(placed, key=itemgetter(0))]

    def recall(self, lines: list[dict]) -> list[Turn]:
        begun = {(turn.epoch, turn.prompt.id, turn.copy): turn for turn in self.begun}
        turns = []
        for draw, line in zip(super().recall(lines), lines, strict=True):
            copy = line.get("copy", 0)
            turns.append(begun.get((draw.epoch, draw.prompt.id, copy), take_turn(draw, copy)))
        return turns

    def record(self, rolled: Rolled) -> None:
        """Keep the groups that go on. The others are remembered if prune.prompts needs them."""
        self.begun = []
        for turn, group in zip(rolled.kept, rolled.groups, strict=True):
            if group.samples[0].pending:
                self.keep(turn, group)
        super().record(rolled)

    def adapt(self, rolled: Rolled) -> None:
        """Keep the informative groups that a step has left over, as many as max_age steps can train on."""
        if not self.adapts:
            return
        N = self.sampling.prompts_per_step
        for i, n in enumerate(rank_informative(rolled)[N:]):
            draw = rolled.kept[n]
            if draw.age + 1 + i // N <= self.settings.max_age:
                self.keep(draw, rolled.groups[n])

    def keep(self, turn: Turn, group: Group) -> None:
        self.begun.append(replace(turn, age=turn.age + 1, so_far=group.samples))

    def state(self) -> dict:
        pool = []
        for turn in self.begun:
            samples = (astuple(piece.sample) for piece in turn.so_far)
            kept = [(ids.tobytes(), logp.tobytes(), *others) for ids, logp, *others in samples]
            pool.append((turn.epoch, turn.prob, turn.weight, turn.number, turn.copy, turn.age, kept))
        return super().state() | {"pool": pool}

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.begun, sample_class = [], getattr(self.sampler.engine, "sample_class", Sample)
        for *turn, kept in state["pool"]:
            so_far = tuple(Piece(sample_class(*written)) for written in kept)  # its arrays read bytes
            self.begun.append(Turn(self.prompts[turn[3]], *turn, so_far=so_far))

    def rollout(self, draws: list[Turn]) -> list[Group]:
        """Go on with the groups of the pool, and begin one for each new draw that is kept."""
        kept = [draw for draw in draws if draw.kept]
        groups = [[
            replace(piece, fresh_from=piece.length, start=piece.length * self.one_by_one, pending=False)
            for piece in draw.so_far] or [None] * self.width for draw in kept]
        leaving = None
        while leaving is None:
            self.advance(kept, groups)
            leaving = self.find_leaving(kept, groups, len(draws) - len(kept))
        one_window = self.settings.in_flight == 1  # is a step, which trains on its tokens at once
        return [OpenGroup(draw.prompt, tuple(replace(piece, pending=n not in leaving) for piece in groups[n]),
                          one_window or n in leaving) for n, draw in enumerate(kept)]

    def advance(self, draws: list[Turn], groups: list[list[Piece | None]]) -> None:
        """Sample the next window of every completion that is not whole, in place."""
        limit = self.sampling.max_new_tokens
        places, requests = [], []
        for n, draw in enumerate(draws):
            for g, piece in enumerate(groups[n]):
                if piece and piece.is_whole(limit):
                    continue
                room = limit - (piece.own if piece else 0)
                seed = sample_seed(self.seed, draw.epoch, draw.prompt.id, draw.copy + g)
                if piece:  # engines always start at the beginning of a seed's stream
                    seed = seed_for(seed, piece.length)
                window = min(self.settings.tokens or room, room)
                requests.append(Request(draw.prompt, seed, window, piece and piece.sample))
                places.append((n, g))
        for (n, g), sample in zip(places, self.sampler.complete(requests), strict=True):
            piece = groups[n][g]
            groups[n][g] = replace(piece, sample=piece.sample.joined(sample)) if piece else Piece(sample)

    def find_leaving(self, draws: list[Turn], groups: list[list[Piece]], skipped: int) -> list[int] | None:
        """Find the groups that leave the pool; None if the step needs another window.

        Prompts that are skipped count among the N that the step is offered.
        """
        sampling = self.sampling
        whole = [n for n, pieces in enumerate(groups)
                 if all(piece.is_whole(sampling.max_new_tokens) for piece in pieces)]
        if self.settings.in_flight == 1:  # one window is a step
            return whole
        whole.sort(key=lambda n: -draws[n].age)
        due = {n for n, draw in enumerate(draws) if draw.age >= self.settings.max_age}
        needed = max(sampling.prompts_per_step - skipped, len(due))
        return whole[:needed] if len(whole) >= needed and due <= set(whole) else None

    def score(self, groups: list[Group]) -> Rewards:
        """Score the groups that go on no more. In every component the others have 0 in T-PPO, which trains on
        them too, or else nan, no reward; and 0 tokens."""
        places = [n for n, group in enumerate(groups) if not group.samples[0].pending]
        rewards = self.sampler.score([groups[n] for n in places])

        def among_all(value_NG: Tensor, missing: float) -> Tensor:
            all_NG = value_NG.new_full((len(groups), self.width), missing)
            all_NG[places] = value_NG.view(-1, self.width)
            return all_NG

        missing = 0.0 if self.one_by_one else torch.nan
        components = {name: among_all(value_NG, missing) for name, value_NG in rewards.components.items()}
        return replace(rewards, components=components, tokens_NG=among_all(rewards.tokens_NG, 0))


def take_turn(draw: PromptDraw, copy: int) -> Turn:
    return Turn(draw.prompt, draw.epoch, draw.prob, draw.weight, draw.number, copy)
