"""Preferences within groups: pairs, weights, and how the losses reduce to one another. Their gradients are compared
with autograd of the textbook losses in test_objectives.py, and cuts, orders and ranks in test_invariance.py."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import as_batch, as_rewards, make_groups, nudge, parts_of, toy_config
from test_objectives import compare, gradient_of

import config
import train
from config import has_reference
from infra import runfolder
from leaves.preferences import join as preference
from leaves.preferences.join import Pairs, group_weight, madpo_weight, mark_pairs, preference_advantage
from leaves.preferences.settings import GroupPreference, Preference
from prune import keep_all
from settings.loader import ConfigError

NAN = math.nan
REWARD_NG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
GRADED_NG = torch.tensor([[3.0, 0.0, 2.5, 0.25], [1.0, NAN, 0.5, 0.0], [NAN, NAN, 1.0, 1.0]], dtype=torch.float64)
RATIO_NG = torch.tensor([[0.3, -2.0, 1.0, 4.0], [9.0, 0.5, -1.0, 2.0], [0.2, 0.1, 7.0, -3.0]], dtype=torch.float64)


def pairs_of(reward_NG: torch.Tensor, pairs: str) -> set[tuple[int, int, int]]:
    return set(map(tuple, mark_pairs(reward_NG, pairs).nonzero().tolist()))


def test_pairs_are_all_of_different_rewards_or_the_best_with_the_worst():
    G = range(4)
    for reward_NG in (REWARD_NG, GRADED_NG):
        every = {(n, w, r) for n, w, r in product(range(3), G, G) if reward_NG[n, w] > reward_NG[n, r]}
        assert pairs_of(reward_NG, "all") == every
    assert pairs_of(REWARD_NG, "extremes") == pairs_of(REWARD_NG, "all")  # right and wrong are all that there is
    assert pairs_of(GRADED_NG, "extremes") == {(0, 0, 1), (1, 0, 3)}
    tied = torch.tensor([[2.0, 0.0, 2.0, 1.0]])
    assert pairs_of(tied, "extremes") == {(0, 0, 1), (0, 2, 1)}


@pytest.mark.parametrize("reward_NG", [REWARD_NG, GRADED_NG])
@pytest.mark.parametrize("settings", [Preference(beta=0.7), Preference(pairs="extremes", gap=1.0),
                                      Preference(likelihood=0.5)])
def test_advantages_are_the_negative_derivative_of_the_loss_by_log_ratios(reward_NG, settings):
    """A group counts by its completions with a reward; one without has no advantage, and a group without pairs 0."""
    ratio_NG = RATIO_NG.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for n in range(3):
        chosen = sorted((w, r) for k, w, r in pairs_of(reward_NG, settings.pairs) if k == n)
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


def test_rpo_without_its_likelihood_is_dpo_and_with_it_adds_the_chosen():
    plain, more = (preference_advantage(RATIO_NG, REWARD_NG, Preference(likelihood=eta)) for eta in (0.0, 0.3))
    chosen_NG = torch.tensor([[0.5, 0, 0, 0.5], [0, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.float64)  # share of the pairs
    torch.testing.assert_close(more - plain, 4 * 0.1 * 0.3 * chosen_NG)  # beta is 0.1


def test_madpo_with_rewards_of_0_and_1_is_dpo_times_a_constant_and_with_graded_ones_is_not():
    for gap in (0.5, 2.0):
        adaptive, plain = (preference_advantage(RATIO_NG, REWARD_NG, Preference(gap=g)) for g in (gap, None))
        c = 0.5 + 1.5 / (1 + 2 * math.exp(1 - gap))
        torch.testing.assert_close(adaptive, plain * (1 + math.exp(-1)) / (1 + math.exp(-c)))
    adaptive, plain = (preference_advantage(RATIO_NG, GRADED_NG, Preference(gap=g)) for g in (2.0, None))
    factor = (adaptive / plain)[0]
    assert factor.max() > factor.min() * 1.05


def test_madpos_weight_is_one_at_the_gap_and_above_it_for_smaller_differences():
    settings = Preference(gap=2.0, c_max=4.0, c_min=0.25, steepness=3.0)
    weight = madpo_weight(torch.tensor([0.0, 1.0, 2.0, 3.0, 60.0], dtype=torch.float64), settings)
    assert weight[[0, 2, 4]].tolist() == pytest.approx([1, 1, 1]) and weight[1] > 1 > weight[3]


def test_dgpos_weight_fades_as_a_group_is_told_apart():
    adv_NG = REWARD_NG - REWARD_NG.mean(dim=1, keepdim=True)
    zero_NG = torch.zeros_like(adv_NG)
    assert group_weight(zero_NG, adv_NG, 5.0).tolist() == [[0.5]] * 3
    weights = [group_weight(scale * adv_NG, adv_NG, 1.0)[:, 0] for scale in (-9, 0, 1, 9)]
    for lower, higher in zip(weights[1:], weights, strict=False):
        assert (lower < higher).tolist() == [True, False, True]
    one = group_weight(RATIO_NG, adv_NG, 0.8)[2]
    assert one.item() == pytest.approx(1 / (1 + math.exp(0.8 / 4 * float((adv_NG[2] * RATIO_NG[2]).sum()))))


def test_dgpo_with_weights_of_one_is_grpo_without_the_deviation(tiny, tmp_path, monkeypatch):
    """Bit for bit, after a first update."""
    groups = make_groups([[3, 9, 5, 2], [4, 1, 7, 8]], [5, 1])
    reward_NG = torch.tensor([[1.0, 0, 0, 1], [1, 1, 0, 1]], dtype=torch.float64)
    gradients = {}
    monkeypatch.setattr(preference, "group_weight", lambda ratio_NG, adv_NG, beta: torch.ones_like(adv_NG[:, :1]))
    for kind in ("group_preference", "centred"):
        cfg = toy_config(tmp_path / kind, f"model.path={tiny}", "rollout.group_size=4", "loss.trust.kind=none",
                         "loss.normalize=sum", f"advantage.kind={kind}", name="grpo_toy.yaml")
        parts = parts_of(cfg, tiny)
        nudge(parts.learner.policy, 0.02)
        adv_NG = compare(parts, groups, as_rewards({"accuracy": reward_NG}, {"accuracy": 1.0}))
        batch = replace(as_batch(groups, adv_NG, keep_all(adv_NG)), reward_NG=reward_NG)
        gradients[kind], _ = gradient_of(parts.learner, batch, moved=0.03)
    assert any(g.any() for g in gradients["centred"].values())
    for name, expected in gradients["centred"].items():
        assert gradients["group_preference"][name].equal(expected), name


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
    lines = [line for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert lines[0]["preference/margin"] == pytest.approx(both[1] / both[0])
    assert 0 < lines[0]["preference/accuracy"] < 1


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
    (["advantage.gap=1", "advantage.c_min=1"], r"advantage.c_min=1(.0)? must be in \[0, 1\)"),
])
def test_what_a_preference_cannot_go_with_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        config.load(["odpo_gsm8k.yaml", "toy.yaml"], changes)


def test_a_preference_has_a_reference_and_room_for_it():
    kinds = {name: config.load(f"{name}_gsm8k.yaml") for name in ("odpo", "rpo", "madpo", "dgpo")}
    kinds["grpo"] = config.load("grpo_toy.yaml")
    assert {name: has_reference(cfg) for name, cfg in kinds.items()} == dict.fromkeys(kinds, True) | {"grpo": False}
    assert isinstance(kinds["dgpo"].advantage, GroupPreference) and kinds["madpo"].advantage.gap == 2
