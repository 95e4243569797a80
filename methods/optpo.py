"""Learn without labels, from the answer that most completions of a prompt agree on: OptPO (arXiv:2512.02882),
test-time training with a sequential test for how many completions that takes.

Each completion votes for its answer. If answer j is the true one, a vote is for it with probability p0
(labels.right) and for any other one with p1 (labels.other), so the Bayes factor of the leader against the
runner-up is (p0 / p1)^(their votes' difference). Completions are added, `labels.chunk` at a time, until it
is labels.threshold or more, which is a lead of `lead_needed` votes, or until there are labels.most. The
leader is the prompt's label: rewards are agreement with it. All votes count for the label; the first
rollout.group_size completions are trained on, so every group is whole.

A label of the data is read for the metrics alone, and need not be there; a reward function of the user's
own gets the whole row, with the answer in it. `VotingSampler` stands in for the sampler; the loop is the
same. What the paper leaves open (p0, p1, the threshold, chunks) are settings.

Dimension key:  N groups.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from collect import Sampler
from history import sample_seed
from infra import dist
from records import Group, Rewards, Sample, Turn
from settings.kinds import Votes
from verify.extract import extract, until_end
from verify.grade import first_equal
from verify.statistics import reduce_spelling

CLASSES = 4  # those with most votes are compared with a new spelling: a pair may take the verifier seconds

Ballot = list[str | None]  # what each completion votes for: the first answer of its class; None: for none


def lead_needed(settings: Votes) -> int:
    """Count the votes by which the leader must be ahead, k = ceil(log threshold / log(p0 / p1)): with p0 0.6,
    p1 0.1 and threshold 19 it is 2."""
    return math.ceil(math.log(settings.threshold) / math.log(settings.right / settings.other) - 1e-9)


def lead(ballot: Ballot) -> tuple[str | None, int]:
    """Return the leader, of several the one that was first, and its votes over those of the runner-up."""
    first, second = [*Counter(filter(None, ballot)).most_common(2), (None, 0), (None, 0)][:2]
    return first[0], first[1] - second[1]


def classify(answers: Sequence[str | None], equal: Callable[[list[str], str], str | None]) -> Ballot:
    """Let answers vote: for the class of the same spelling, or else for one of the CLASSES with most votes so
    far that is `equal`, or else for a class of their own. An answer that is None votes for none."""
    class_of: dict[str, str] = {}  # by spelling
    ballot: Ballot = []
    for answer in answers:
        key = reduce_spelling(answer)
        if key and key not in class_of:
            leaders = [known for known, _ in Counter(filter(None, ballot)).most_common(CLASSES)]
            class_of[key] = equal(leaders, answer) or answer
        ballot.append(class_of[key] if key else None)
    return ballot


@dataclass(frozen=True, slots=True)
class Vote:
    """A prompt's label and the completions that voted for it, of which a group has the first."""

    label: str | None       # None where no completion has an answer
    lead: int               # votes over those of the runner-up
    completions: int
    tokens: int
    label_right: bool | None     # by the data's own label, where there is one; for the metrics
    accuracy: float | None       # share of the group's completions that are right by it


@dataclass(frozen=True, slots=True)
class VotingSampler:
    """Samples until a prompt's answers agree, and scores by the answer that they agree on."""

    sampler: Sampler
    settings: Votes

    def rollout(self, turns: list[Turn]) -> list[Group]:
        """Sample groups, and more completions of those prompts whose leader is not far enough ahead."""
        groups, needed = self.sampler.rollout(turns), lead_needed(self.settings)
        kept = [turn for turn in turns if turn.kept]
        samples = [list(group.samples) for group in groups]
        ballots = self.vote(samples)
        while undecided := [n for n, ballot in enumerate(ballots)
                            if lead(ballot)[1] < needed and len(ballot) < self.settings.most]:
            added = self.sample_more([kept[n] for n in undecided], [len(samples[n]) for n in undecided])
            for n, new in zip(undecided, added, strict=True):
                samples[n] += new
            for n, ballot in zip(undecided, self.vote([samples[n] for n in undecided]), strict=True):
                ballots[n] = ballot
        return self.labelled(groups, ballots, samples)

    def sample_more(self, turns: list[Turn], so_far: list[int]) -> list[list[Sample]]:
        """Sample up to `chunk` more completions of each prompt, those that a larger group would have."""
        wanted = [(turn, g) for turn, first in zip(turns, so_far, strict=True)
                  for g in range(first, min(first + self.settings.chunk, self.settings.most))]
        seeds = [sample_seed(self.sampler.seed, turn.epoch, turn.prompt.id, g) for turn, g in wanted]
        limits = [self.sampler.sampling.max_new_tokens] * len(wanted)
        sampled = self.sampler.complete([turn.prompt.ids for turn, _ in wanted], seeds, limits)
        by_turn: dict[Turn, list[Sample]] = {turn: [] for turn in turns}
        for (turn, _), sample in zip(wanted, sampled, strict=True):
            by_turn[turn].append(sample)
        return [by_turn[turn] for turn in turns]

    def vote(self, samples: list[list[Sample]]) -> list[Ballot]:
        """Read the votes of each prompt's completions; each rank reads those of its `local_slice`."""
        decode = self.sampler.tokenizer.decode
        return dist.gather([classify([extract(until_end(decode(s.ids))) for s in of_prompt], first_equal)
                            for of_prompt in dist.local_slice(samples)])

    def labelled(self, groups: list[Group], ballots: list[Ballot], samples: list[list[Sample]],
                 ) -> list[Group]:
        """Put the leader in place of each prompt's answer. Each rank compares its `local_slice` with the
        labels of the data."""
        votes = dist.gather([vote_of(*counted) for counted in
                             dist.local_slice(list(zip(groups, ballots, samples, strict=True)))])
        return [replace(group, prompt=replace(group.prompt, answer=vote.label or ""), vote=vote)
                for group, vote in zip(groups, votes, strict=True)]

    def score(self, groups: list[Group]) -> Rewards:
        """Score by the labels that were voted for."""
        return self.sampler.score(groups)


def vote_of(group: Group, ballot: Ballot, samples: list[Sample]) -> Vote:
    """Sum up a prompt's votes. The label of the data, where there is one, is read here and nowhere else."""
    label, ahead = lead(ballot)
    gold, right = group.prompt.answer, {}
    if gold:
        right = {answer: bool(first_equal([gold], answer)) for answer in set(filter(None, ballot))}
    of_group = ballot[:len(group.samples)]
    share = sum(right.get(answer, False) for answer in of_group) / len(of_group) if gold else None
    return Vote(label, ahead, len(samples), sum(sample.length for sample in samples),
                right.get(label, False) if gold else None, share)


