"""Preferences within groups: pairs, and advantages of completions without a reward. Gradients are compared with autograd
of the textbook losses in test_objectives.py, and cuts, orders and ranks in test_invariance.py."""

import math
from itertools import product

import pytest
import torch
from conftest import refuses, steps_of, toy_config

import config
import train
from leaves.preferences.join import Pairs, madpo_weight, mark_pairs, preference_advantage
from leaves.preferences.settings import Preference

NAN = math.nan
REWARD_NG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
GRADED_NG = torch.tensor([[3.0, 0.0, 2.5, 0.25], [1.0, NAN, 0.5, 0.0], [NAN, NAN, 1.0, 1.0]], dtype=torch.float64)
RATIO_NG = torch.tensor([[0.3, -2.0, 1.0, 4.0], [9.0, 0.5, -1.0, 2.0], [0.2, 0.1, 7.0, -3.0]], dtype=torch.float64)


def pairs_of(reward_NG: torch.Tensor) -> set[tuple[int, int, int]]:
    return set(map(tuple, mark_pairs(reward_NG).nonzero().tolist()))


def test_pairs_are_all_of_different_rewards():
    G = range(4)
    for reward_NG in (REWARD_NG, GRADED_NG):
        every = {(n, w, r) for n, w, r in product(range(3), G, G) if reward_NG[n, w] > reward_NG[n, r]}
        assert pairs_of(reward_NG) == every


@pytest.mark.parametrize("reward_NG", [REWARD_NG, GRADED_NG])
@pytest.mark.parametrize("settings", [Preference(beta=0.7), Preference(gap=1.0), Preference(likelihood=0.5)])
def test_advantages_are_the_negative_derivative_of_the_loss_by_log_ratios(reward_NG, settings):
    """A group counts by its completions with a reward; one without has no advantage, and a group without pairs 0."""
    ratio_NG = RATIO_NG.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for n in range(3):
        chosen = sorted((w, r) for k, w, r in pairs_of(reward_NG) if k == n)
        for w, r in chosen:
            h = float(reward_NG[n, w] - reward_NG[n, r])
            weight = float(madpo_weight(torch.tensor(h), settings)) if settings.gap else 1.0
            loss = -weight * (settings.beta * (ratio_NG[n, w] - ratio_NG[n, r])).sigmoid().log()
            scored = int((~reward_NG[n].isnan()).sum())
            total = total + scored * (loss - settings.beta * settings.likelihood * ratio_NG[n, w]) / len(chosen)
    total.backward()
    adv_NG = preference_advantage(RATIO_NG, reward_NG, settings)
    assert adv_NG.isnan().equal(reward_NG.isnan())
    torch.testing.assert_close(adv_NG.nan_to_num(), -ratio_NG.grad, rtol=0, atol=1e-7)
    assert not adv_NG[1 if reward_NG is REWARD_NG else 2].nan_to_num().any()


@pytest.mark.slow
def test_margins_are_of_the_policy_before_each_optimizer_step(tmp_path, monkeypatch):
    """At the first of a run the policy is the reference, so every margin is 0; later ones are what was learnt."""
    cfg = toy_config(tmp_path / "run", "update.epochs=2", "steps=1", "optim.lr=1e-3", name="odpo_gsm8k.yaml toy.yaml")
    told, compared = [], Pairs.compare

    def watched(self, *given):
        prepared = compared(self, *given)
        told.append((self.count, self.margin, self.right))  # of the step so far
        return prepared

    monkeypatch.setattr(Pairs, "compare", watched)
    train.train(cfg)
    first, both = told
    assert first[1] == 0 == first[2]
    assert both[1] / (both[0] - first[0]) > 0.1
    line, = steps_of(tmp_path / "run")
    assert line["preference/margin"] == pytest.approx(both[1] / both[0]) and 0 < line["preference/accuracy"] < 1


def test_metrics_are_left_out_where_there_are_no_pairs():
    pairs = Pairs()
    assert pairs.metrics() == {}
    pairs.count, pairs.margin, pairs.right = 4, 2.0, 3
    assert pairs.metrics() == {"preference/margin": 0.5, "preference/accuracy": 0.75}
    assert pairs.metrics() == {}  # each update begins anew


@pytest.mark.parametrize(("changes", "said"), [
    (["prune.completions={kind: topk, keep: 2}"],
     "prune.completions.kind=topk must be none with advantage.kind=preference"),
    (["prune.completions={kind: pps, keep: 2}"], "prune.completions.kind=pps must be none"),
    (["prune.tokens.kind=prefix"], "prune.tokens.kind=prefix must be none"),
    (["loss.trust.kind=clip"], "loss.trust.kind=clip must be none"),
    (["loss.normalize=token"], "loss.normalize=token must be sum"),
    (["loss.tis_cap=2"], "loss.tis_cap=2.0 must be null with advantage.kind=preference"),
    (["loss.mask_ratio=2"], "loss.mask_ratio=2.0 must be null"),
    (["rollout.group_size=1"], "rollout.group_size=1 must be at least 2"),
    (["advantage.c_max=3"], "advantage.c_max=3.0 must be left out, or 2.0, unless advantage.gap"),
    (["advantage.gap=1", "advantage.c_min=1"], r"advantage.c_min=1(.0)? must be in \[0, 1\)")])
def test_what_a_preference_cannot_go_with_is_refused(changes, said):
    refuses(said, config.load, ["odpo_gsm8k.yaml", "toy.yaml"], changes)
