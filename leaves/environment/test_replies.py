"""Replies of an environment are context: no gradient, no log-prob, in no denominator.

The gradient of completions with replies is that of each textbook loss over the policy's own tokens alone, of
completions that run through the model by themselves, replies and all.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import as_batch, as_rolled, make_groups, others_slow
from outcomes import EXACT, distance, mean_of, outcomes
from test_nat import ADV_NG, Short, cuts
from test_objectives import OBJECTIVES, Case, assert_same

from leaves.environment.join import Dialogue, environment_metrics, join
from leaves.windows.join import Piece
from metrics import rollout_metrics
from prune import Candidates, cut_weights, keep_all, token_norm
from records import Group, Sample, lengths
from settings import kinds

# Where replies stand in completions of so many tokens: none, one, at the end (the policy's limit), several.
REPLIES = {2: (), 3: ((1, 2),), 9: ((2, 5), (6, 7)), 5: ((1, 3),), 4: ((2, 4),), 1: (), 7: ((1, 2), (3, 6)),
           8: ((7, 8),)}
PLACES = [[REPLIES[3], REPLIES[9], REPLIES[5], REPLIES[2]], [REPLIES[4], REPLIES[1], REPLIES[7], REPLIES[8]]]


def replied(groups: list[Group], places: list[list[tuple]] = PLACES) -> list[Group]:
    """The same tokens, of which some are replies."""
    def mark(sample: Sample, replies: tuple) -> Sample:
        logp = [0.0 if any(a <= t < b for a, b in replies) else x for t, x in enumerate(sample.logp)]
        return Dialogue(sample.ids, logp, sample.finished, replies)

    return [Group(group.prompt, tuple(map(mark, group.samples, row)))
            for group, row in zip(groups, places, strict=True)]


class RepliedCase(Case):
    """The completions of an update, with replies in them."""

    def with_engine(self, groups):
        return replied(super().with_engine(groups))


@pytest.mark.parametrize("name", others_slow(OBJECTIVES, "dapo", "gspo", "tppo", "apo", "weights", "odpo"))
def test_the_gradient_is_that_of_the_textbook_loss_over_the_policys_own_tokens(name, tiny, tmp_path):
    case = RepliedCase(name, tiny, tmp_path / "run")
    expected, ours = case.by_formula(), case.by_training()
    assert_same(ours, expected)


@pytest.mark.slow
def test_over_all_cuts_and_draws_the_mean_is_the_full_gradient_with_replies_too(tiny, tmp_path, monkeypatch):
    """NAT and PPS together: the cuts count own tokens, and denominators are of whole completions without replies."""
    places = [[((1, 3),), (), ((1, 2), (3, 4))], [((0, 1),), ((2, 4),), ()]]
    groups = replied(make_groups([[5, 1, 6], [3, 7, 1]], [2, 3]), places)
    own = lengths(groups, 3)
    assert own.tolist() == [[3, 1, 4], [2, 5, 1]]
    draw = kinds.Pps(keep=2, size="surprise")
    step = Short(tiny, tmp_path / "run", "loss.normalize=token", "prune.completions={kind: pps, keep: 2}")
    step.groups = groups
    full = step.gradient_of(step.choose(keep_all(ADV_NG), None, monkeypatch), [0, 1])
    drawn = []
    for chance, pruned in outcomes(Candidates(ADV_NG, groups, "token", False, 0), draw):
        kept = pruned.keep_NG.flatten().tolist()
        of_each = [cuts(count) if keep else [(1.0, cut_weights(count, 0.3, 2, 0.0))]
                   for count, keep in zip(own.flatten().tolist(), kept, strict=True)]
        for parts in itertools.product(*of_each):
            tokens = [weight_C for _, weight_C in parts]
            drawn.append((chance * math.prod(part for part, _ in parts),
                          step.choose(pruned, [tokens[:3], tokens[3:]], monkeypatch)))
    assert distance(mean_of(drawn, lambda batch: step.gradient_of(batch, [0, 1])), full) < EXACT


def test_counts_leave_replies_out():
    sample = Dialogue(range(1, 10), [-1.0] * 9, True, replies=((2, 5), (6, 7)))
    assert (sample.length, sample.own, sample.trained, sample.fresh) == (9, 5, 5, 5)
    assert sample.scored.tolist() == [0, 1, 5, 7, 8]
    assert Piece(replace(sample, replies=()), start=4).scored.tolist() == [4, 5, 6, 7, 8]
    assert sample.turns == [(0, 2), (2, 5), (5, 6), (6, 7), (7, 9)]
    begun = Piece(sample, start=3)  # in the midst of a reply
    assert (begun.own, begun.trained, begun.scored.tolist()) == (5, 3, [5, 7, 8])
    assert Piece(sample, fresh_from=6).fresh == 2
    for count, (length, replies) in enumerate([(1, 0), (2, 0), (6, 1), (8, 2), (9, 2)], start=1):
        first = sample.first(count)
        assert (first.own, first.length, len(first.replies), len(first.logp)) == (count, length, replies, length)
    plain = make_groups([[4, 3]], [2])
    first, second = plain[0].samples
    replied_to = Dialogue([*first.ids, 7, 7], [*first.logp, 0, 0], True, replies=((first.length, first.length + 2),))
    norms = [token_norm(groups, "surprise").tolist() for groups in ([Group(plain[0].prompt, (replied_to, second))], plain)]
    assert norms[0] == norms[1]


def test_pieces_are_joined_with_the_places_of_their_replies():
    first = Dialogue([1, 2, 3], [-1.0] * 3, False, replies=((1, 3),), calls=2, failures=1)
    second = Dialogue([4, 5, 6], [-2.0] * 3, True, replies=((1, 2),), calls=1)
    whole = join(first, second)
    assert whole.ids.tolist() == [1, 2, 3, 4, 5, 6] and whole.replies == ((1, 3), (4, 5))
    assert (whole.calls, whole.failures, whole.finished) == (3, 1, True)
    assert whole.logp.tolist() == [-1.0] * 3 + [-2.0] * 3


def test_metrics_count_turns_and_calls():
    groups = replied(make_groups([[3, 9]], [2]), [[REPLIES[3], REPLIES[9]]])
    short, long = groups[0].samples
    samples = replace(short, calls=1, failures=1), replace(long, calls=3, finished=False, cut=True)
    groups = [Group(groups[0].prompt, samples)]
    reward_NG = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    step = as_rolled(groups, reward_NG), as_batch(groups, reward_NG, keep_all(reward_NG))
    measured = rollout_metrics(*step) | environment_metrics(*step)
    expected = {"turns": 2.5, "calls": 2.0, "failures": 0.5, "tokens": 2.5, "cut": 0.5}
    assert {key: measured[f"environment/{key}"] for key in expected} == expected
    assert measured["rollout/tokens"] == 7 and measured["rollout/length"] == 3.5
    assert measured["rollout/entropy"] == pytest.approx(-sum(sum(s.logp) for s in groups[0].samples) / 7)
