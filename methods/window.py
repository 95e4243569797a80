"""Sample completions over several steps: groups that go on (rollout.in_flight), groups that wait
(rollout.until=informative with max_age), and T-PPO's successive batching (rollout.window, arXiv:2506.15050).

Groups that go on: in_flight x N groups are under way. All unfinished completions advance by rollout.window
tokens at a time until N groups are whole, and these are trained on, the oldest first. The others keep their
tokens, each with the log-prob of the policy that drew it, and go on in the next step, under the weights that
the engine has then. A group of age max_age holds the step up until it is whole. Time is counted in tokens, so
which groups are whole depends neither on the number of ranks nor on the speed of the machine. Every group is
trained on once. It is off-policy and outside the proof of unbiased pruning: short groups come first, and a
ratio for each token (loss.tis_cap, loss.old_logp) does not correct for the tokens before it.

T-PPO: a step has one window and trains on its tokens at once. Every completion is then a group of its own,
and new prompts take the places of completions that have ended; fewer places than a group needs may stay
empty.

`Pool` replaces the history of prompts, `WindowSampler` the sampler; the loop is the same. pack.window is
something else: the sequences that packing chooses from.
"""

from dataclasses import replace

import torch
from torch import Tensor

from collect import Sampler, rank_informative
from config import Rollout
from history import PromptHistory, sample_seed
from infra.dist import seed_for
from records import Group, PromptDraw, Request, Rewards, Rolled, Sample, frozen, join

Begun = tuple[PromptDraw, tuple[Sample, ...]]  # a group that goes on or waits


class Pool(PromptHistory):
    """The history of prompts, and the groups that were begun in earlier steps and not trained on yet."""

    def __init__(self, history: PromptHistory, sampling: Rollout):
        super().__init__(history.prompts, history.pruning, history.seed, history.middle)
        self.remembers = True
        self.adapts = sampling.until == "informative"
        self.sampling = sampling
        self.one_by_one = sampling.max_age is None  # T-PPO: a completion is a group of its own
        self.begun: list[Begun] = []

    def draw(self, count: int) -> list[PromptDraw]:
        """Take the turns of all groups that were begun, then new prompts while there is room."""
        copies = self.sampling.group_size if self.one_by_one else 1
        room = int(self.sampling.in_flight * count) * copies - len(self.begun)
        new = []
        for draw in super().draw(max(0, room) // copies):
            new += [replace(draw, copy=copy) for copy in range(copies)]
        going_on = [draw for draw, _ in self.begun]
        return interleave(going_on, new)

    def record(self, rolled: Rolled) -> None:
        """Keep the groups that go on. The others are remembered if prune.prompts needs them."""
        self.begun = []
        for draw, group in zip(rolled.kept, rolled.groups, strict=True):
            if group.samples[0].pending:
                self.keep(draw, group)
        super().record(rolled)

    def adapt(self, rolled: Rolled) -> None:
        """Keep the informative groups that a step has left over, as many as max_age steps can train on."""
        N = self.sampling.prompts_per_step
        for i, n in enumerate(rank_informative(rolled)[N:]):
            draw = rolled.kept[n]
            if draw.age + 1 + i // N <= self.sampling.max_age:
                self.keep(draw, rolled.groups[n])

    def keep(self, draw: PromptDraw, group: Group) -> None:
        self.begun.append((replace(draw, age=draw.age + 1), group.samples))

    def state(self) -> dict:
        pool = []
        for draw, samples in self.begun:
            kept = []
            for sample in samples:
                ids = torch.frombuffer(sample.ids, dtype=torch.int32)
                logp = torch.frombuffer(sample.logp, dtype=torch.float64)
                others = sample.replies, sample.calls, sample.failures, sample.cut
                kept.append((ids, logp, sample.finished, *others))
            turn = draw.epoch, draw.prob, draw.weight, draw.copy, draw.age, draw.number
            pool.append((*turn, kept))
        return super().state() | {"pool": pool}

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.begun = []
        for *turn, number, kept in state["pool"]:
            draw = PromptDraw(self.prompts[number], *turn, number)
            samples = []
            for ids, logp, finished, replies, calls, failures, cut in kept:
                samples.append(Sample(ids.tolist(), logp.tolist(), finished, replies=replies, calls=calls,
                                      failures=failures, cut=cut))
            self.begun.append((draw, tuple(samples)))


@frozen
class WindowSampler:
    """Sample windows of every completion until a step has enough, and score what goes on no more."""

    sampler: Sampler
    pool: Pool

    def rollout(self, draws: list[PromptDraw]) -> list[Group]:
        """Go on with the groups of the pool, and begin one for each new draw that is kept."""
        begun = {turn_key(draw): samples for draw, samples in self.pool.begun}
        width = 1 if self.pool.one_by_one else self.pool.sampling.group_size
        kept = [draw for draw in draws if draw.kept]
        groups = []
        for draw in kept:
            so_far = begun.get(turn_key(draw), ())
            groups.append([self.carry(sample) for sample in so_far] or [None] * width)
        skipped = len(draws) - len(kept)
        leaving = None
        while leaving is None:
            self.advance(kept, groups)
            leaving = self.find_leaving(kept, groups, skipped)
        rolled = []
        for n, draw in enumerate(kept):
            samples = [replace(sample, pending=n not in leaving) for sample in groups[n]]
            rolled.append(Group(draw.prompt, tuple(samples)))
        return rolled

    def carry(self, sample: Sample) -> Sample:
        """Mark the tokens of a completion as those of earlier steps."""
        if self.pool.one_by_one:
            return replace(sample, start=sample.length, pending=False)
        return replace(sample, old=sample.length, pending=False)

    def advance(self, draws: list[PromptDraw], groups: list[list[Sample | None]]) -> None:
        """Sample the next window of every completion that is not whole, in place."""
        settings = self.pool.sampling
        places, requests = [], []
        for n, draw in enumerate(draws):
            for g, sample in enumerate(groups[n]):
                room = settings.max_new_tokens - (sample.own if sample else 0)
                if not (sample and sample.is_whole(settings.max_new_tokens)):
                    places.append((n, g))
                    seed = sample_seed(self.sampler.seed, draw.epoch, draw.prompt.id, draw.copy + g)
                    if sample:  # engines always start at the beginning of a seed's stream
                        seed = seed_for(seed, sample.length)
                    requests.append(Request(draw.prompt, seed, min(settings.window or room, room), sample))
        pieces = self.sampler.complete(requests)
        for (n, g), piece in zip(places, pieces, strict=True):
            groups[n][g] = join(groups[n][g], piece)

    def find_leaving(
        self,
        draws: list[PromptDraw],
        groups: list[list[Sample]],
        skipped: int,
    ) -> list[int] | None:
        """Find the groups that leave the pool; None if the step needs another window.

        Prompts that are skipped count among the N that the step is offered.
        """
        settings = self.pool.sampling
        whole = [n for n, samples in enumerate(groups)
                 if all(sample.is_whole(settings.max_new_tokens) for sample in samples)]
        if settings.in_flight == 1:  # one window is a step
            return whole
        whole.sort(key=lambda n: -draws[n].age)
        due = {n for n, draw in enumerate(draws) if draw.age >= settings.max_age}
        needed = max(settings.prompts_per_step - skipped, len(due))
        if len(whole) < needed or not due <= set(whole):
            return None
        return whole[:needed]

    def score(self, groups: list[Group]) -> Rewards:
        """Score the groups that go on no more. In every component the others have 0 in T-PPO, which trains on
        them too, or else nan, no reward; and 0 tokens."""
        places = [n for n, group in enumerate(groups) if not group.samples[0].pending]
        rewards = self.sampler.score([groups[n] for n in places])
        places_N = torch.tensor(places, dtype=torch.long)
        width = len(groups[0].samples) if groups else self.pool.sampling.group_size

        def among_all(value_NG: Tensor, missing: float) -> Tensor:
            missing_NG = value_NG.new_full((len(groups), width), missing)
            return missing_NG.index_copy(0, places_N, value_NG.view(-1, width))

        missing = 0.0 if self.pool.one_by_one else torch.nan
        components = {name: among_all(value_NG, missing) for name, value_NG in rewards.components.items()}
        return replace(rewards, components=components, tokens_NG=among_all(rewards.tokens_NG, 0))


def turn_key(draw: PromptDraw) -> tuple[int, str, int]:
    """Identify a group over the steps that it takes."""
    return draw.epoch, draw.prompt.id, draw.copy


def interleave(going_on: list, new: list) -> list:
    """Merge both lists, each in its order and spread evenly, so that every rank gets long prefixes and new
    prompts alike."""
    placed = [((i + 0.5) / len(items), item) for items in (going_on, new) for i, item in enumerate(items)]
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]
