"""Learn without labels, from the answer that most completions of a prompt agree on: OptPO (arXiv:2512.02882),
test-time training with a sequential test that decides how many completions it takes.

Each completion votes for its answer. If answer j is the true one, a vote is for it with probability p0
(labels.right) and for any other one with p1 (labels.other), so the Bayes factor of the leader against the
runner-up is (p0 / p1)^(their votes' difference). Completions are added, `labels.chunk` at a time, until the
factor is labels.threshold or more, which is a lead of `count_needed` votes, or until there are labels.most.
The leader is the prompt's label, and the reward is agreement with it. All votes count for the label; the
first rollout.group_size completions are trained on, so every group is whole.

The label of the data is read for the metrics alone, and may be missing; the user's own reward function gets
the whole row, with the answer in it. `VotingSampler` replaces the sampler; the loop is the same. Numbers that
the paper leaves open (p0, p1, the threshold, chunks) are settings.

Dimension key:  N groups.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from collect import Sampler
from infra import dist
from leaves.votes.settings import Votes
from records import Batch, Group, Metrics, PromptDraw, Rewards, Rolled, Sample, frozen
from verify.extract import extract
from verify.grade import VERIFY_SECONDS, judge
from verify.statistics import reduce_spelling

COMPARED_CLASSES = 4  # compare a new answer with the 4 leading ones only: one comparison can take seconds

Ballot = list[str | None]  # the vote of each completion: the first answer of its class; None: no vote


def count_needed(settings: Votes) -> int:
    """Compute the lead in votes that ends sampling, k = ceil(log threshold / log(p0 / p1)): with p0 0.6,
    p1 0.1 and threshold 19 it is 2."""
    return math.ceil(math.log(settings.threshold, settings.right / settings.other) - 1e-9)


def find_leader(ballot: Ballot) -> tuple[str | None, int]:
    """Return the leader, among equals the first, and its lead over the runner-up in votes."""
    ranking = [*Counter(filter(None, ballot)).most_common(2), (None, 0), (None, 0)]
    (leader, votes), (_, votes_of_second), *_ = ranking
    return leader, votes - votes_of_second


def first_equal(golds: list[str], answer: str) -> str | None:
    """Return the first of several answers that another one equals, by the verifier; None if none."""
    verdicts = judge([(gold, answer) for gold in golds], VERIFY_SECONDS)
    return next((gold for gold in golds if verdicts[gold, answer] == "right"), None)


def classify(answers: list[str | None]) -> Ballot:
    """Let answers vote: for the class of the same spelling, or else for an equal one of the leading
    COMPARED_CLASSES, or else for a class of their own. None does not vote."""
    class_of = {}  # by spelling
    ballot = []
    for answer in answers:
        key = reduce_spelling(answer)
        if key and key not in class_of:
            leaders = [known for known, _ in Counter(filter(None, ballot)).most_common(COMPARED_CLASSES)]
            class_of[key] = first_equal(leaders, answer) or answer
        ballot.append(class_of[key] if key else None)
    return ballot


@frozen
class Vote:
    """A prompt's label and the completions that voted; the group has the first of these."""

    label: str | None       # None if no completion has an answer
    lead: int               # votes over the runner-up
    completions: int
    tokens: int
    label_accuracy: bool | None  # by the data's own label, if there is one; for the metrics
    accuracy: float | None       # share of the group's completions that are right by it


@frozen
class VotedGroup(Group):
    """A group, and the vote of its prompt's completions."""

    vote: Vote


def vote_metrics(rolled: Rolled, batch: Batch) -> Metrics:
    """Compute means over the groups of a step, and the tokens of all completions that voted, which were all
    sampled."""
    votes = [group.vote for group in rolled.groups]
    metrics = {"rollout/tokens": sum(vote.tokens for vote in votes)}
    for name in ("completions", "lead", "label_accuracy", "accuracy"):
        known = [value for vote in votes if (value := getattr(vote, name)) is not None]
        if known:
            metrics[f"votes/{name}"] = sum(known) / len(known)
    return metrics


def parts(cfg: Any, run: Any) -> Any:
    """Give a run a sampler that lets completions vote."""
    return replace(run, sampler=VotingSampler(run.sampler, cfg.labels),
                   measures=(*run.measures, vote_metrics))


@frozen
class VotingSampler:
    """Sample until a prompt's answers agree, and score by the answer that they agree on."""

    sampler: Sampler
    settings: Votes

    def rollout(self, draws: list[PromptDraw]) -> list[Group]:
        """Sample groups, and up to `chunk` more completions at a time for prompts without a clear leader;
        replace each prompt's answer by its most frequent one."""
        groups = self.sampler.rollout(draws)
        kept = [draw for draw in draws if draw.kept]
        samples = [list(group.samples) for group in groups]
        ballots = dict(enumerate(self.vote(samples)))
        needed, most, chunk = count_needed(self.settings), self.settings.most, self.settings.chunk
        for count in range(self.sampler.sampling.group_size, most, chunk):  # that the undecided have
            undecided = [n for n, ballot in ballots.items() if find_leader(ballot)[1] < needed]
            if not undecided:
                break
            following = range(count, min(count + chunk, most))  # as a larger group would have them
            added = self.sampler.rollout([kept[n] for n in undecided], following)
            for n, group in zip(undecided, added, strict=True):
                samples[n] += group.samples
            ballots |= zip(undecided, self.vote([samples[n] for n in undecided]), strict=True)
        # Each rank compares the labels of its `local_slice` with the data's.
        counted = list(zip(groups, ballots.values(), samples, strict=True))
        votes = dist.gather([sum_up_votes(*given) for given in dist.local_slice(counted)])
        return [VotedGroup(replace(group.prompt, answer=vote.label or ""), group.samples, vote)
                for group, vote in zip(groups, votes, strict=True)]

    def vote(self, samples: list[list[Sample]]) -> list[Ballot]:
        """Read the votes of each prompt's completions; each rank reads its `local_slice`."""
        read = self.sampler.tokenizer.read
        return dist.gather([classify([extract(read(sample)[-1]) for sample in of_prompt])
                            for of_prompt in dist.local_slice(samples)])

    def score(self, groups: list[Group]) -> Rewards:
        """Score by the labels that were voted for."""
        return self.sampler.score(groups)


def sum_up_votes(group: Group, ballot: Ballot, samples: list[Sample]) -> Vote:
    """Sum up a prompt's votes. The label of the data, if there is one, is read here and nowhere else."""
    label, lead = find_leader(ballot)
    gold = group.prompt.answer
    label_accuracy = accuracy = None
    if gold:
        right = {answer for answer in set(filter(None, ballot)) if first_equal([gold], answer)}
        of_group = ballot[:len(group.samples)]
        label_accuracy = label in right
        accuracy = sum(answer in right for answer in of_group) / len(of_group)
    return Vote(label, lead, len(samples), sum(sample.own for sample in samples), label_accuracy, accuracy)
