"""What a step trains on: rounds until it has enough, what counts as offered, and records that say it all."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TOY, as_rolled, make_groups, toy_config
from test_invariance import on_ranks

import collect
import config
import data
import history
import train
from advantage import advantage
from collect import Sampler, Selection, choose, prompts_needed
from infra import dist, runfolder
from prune import adapt_p
from records import Prompt, Rolled, Sample
from settings.kinds import GroupNorm

TOKENIZER = data.Tokenizer(TOY)


class Script:
    """An engine whose answers to a prompt are all right (e), all wrong (h) or of both kinds (i), by its id's letter."""

    def __init__(self, prompts: list[Prompt]):
        self.kind = {prompt.ids: prompt.id[0] for prompt in prompts}
        self.right, self.wrong = TOKENIZER.encode(["#### 1", "#### 2 3"])
        self.rounds: list[list[str]] = []

    def generate(self, requests, *rest, **named):
        prompts = [request.prompt.ids for request in requests]
        self.rounds.append([self.kind[ids] for ids in prompts[::4]])
        texts = [self.right if self.kind[ids] == "e" or (self.kind[ids] == "i" and i % 4 == 0) else self.wrong
                 for i, ids in enumerate(prompts)]
        return [Sample(ids, (-1.0,) * len(ids), True) for ids in texts]


def prompts_of(letters: str) -> list[Prompt]:
    return [Prompt(f"{letter}{n}", (n + 1, 5), "1") for n, letter in enumerate(letters)]


def steps(tmp_path, letters: str, count: int, *settings: str) -> list[tuple]:
    """(kinds of the prompts by round, Rolled, Batch, what is short) of so many steps over these prompts, in order."""
    prompts = prompts_of(letters)
    cfg = toy_config(tmp_path / "run", "rollout.group_size=4", "rollout.prompts_per_step=4", "steps=9", *settings,
                     name="grpo_toy.yaml")
    script, selection = Script(prompts), Selection.of(cfg)
    sampler = Sampler(script, TOKENIZER, cfg.rollout, cfg.reward, cfg.seed)
    memory = history.PromptHistory(prompts, cfg.prune.prompts, cfg.seed,
                                   collect.reward_midpoint(cfg.reward, cfg.rollout.differ_in))
    out = []
    for step in range(count):
        script.rounds, rolled, seed = [], Rolled(), dist.seed_for(cfg.seed, step, "prune")
        while asked := prompts_needed(rolled, selection, seed):
            draws = memory.draw(asked)
            groups = sampler.rollout(draws)
            rewards = sampler.score(groups)
            # Those of a model have a function of their own, and prune by another.
            compared = GroupNorm() if cfg.advantage.by_model else cfg.advantage
            newest = Rolled(draws, groups, rewards, advantage(rewards, compared))
            memory.record(newest)
            rolled += newest
        batch = choose(rolled, selection, seed)
        memory.adapt(rolled)
        assert [draw.prompt for draw in rolled.draws if draw.kept] == [group.prompt for group in rolled.groups]
        out.append((["".join(kinds) for kinds in script.rounds], rolled, batch,
                    collect.shortage(rolled, batch, selection)))
    return out


@pytest.fixture
def in_order(monkeypatch):
    monkeypatch.setattr(history, "epoch_order", lambda count, seed, epoch: np.arange(count))


def test_offered_is_one_round_of_all_and_the_first_of_several_offers_what_oversample_says(in_order, tmp_path):
    (rounds, rolled, batch, _), (after, *_) = steps(tmp_path, "eehiihee", 2)
    assert rounds == ["eehi"] and after == ["ihee"]
    assert (batch.places, batch.offered, len(batch.groups), len(rolled.sizes)) == ([0, 1, 2, 3], 4, 4, 1)
    (rounds, *_), = steps(tmp_path, "iiiieeee" * 2, 1, "rollout.until=informative", "rollout.oversample=3")
    assert rounds == ["iiiieeeeiiii"]


def test_each_epoch_has_a_draw_of_its_own_if_asked_for(tmp_path):
    pruning = "prune.completions={kind: bernoulli, drop_prob: 0.5}"
    (_, rolled, first, _), = steps(tmp_path, "iiii", 1, pruning)
    settings = [pruning, "loss.denominator=all", "update.epochs=3"]
    for redrawn, count in ((False, 1), (True, 3)):
        cfg = toy_config(tmp_path, *settings, f"update.redraw={str(redrawn).lower()}", name="grpo_toy.yaml")
        assert Selection.of(cfg).draws == count
    batches = [choose(rolled, Selection.of(cfg), seed, epoch) for seed in range(10) for epoch in range(3)]
    assert len({tuple(batch.pruned.keep_NG.flatten().tolist()) for batch in batches}) > 25
    assert all(batch.groups == first.groups and batch.places == first.places for batch in batches)


def test_informative_goes_on_until_enough_differ_and_drops_the_rest(in_order, tmp_path):
    """Rounds of 6 for 4. The first 4 of the 5 that differ are trained on; the next step goes on behind all 18."""
    (rounds, rolled, batch, said), (after, *_) = steps(tmp_path, "eiheeh" "hieeei" "ieiehh" "iiiihh", 2,
                                                       "rollout.until=informative")
    assert rounds == ["eiheeh", "hieeei", "ieiehh"] and after == ["iiiihh"] and said == ""
    assert [group.prompt.id for group in batch.groups] == ["i1", "i7", "i11", "i12"]
    assert (batch.places, batch.offered, len(rolled.sizes), len(rolled.groups)) == ([0, 1, 2, 3], 4, 3, 18)
    assert (batch.adv_NG != 0).any(dim=1).all() and batch.pruned.weight_NG.unique().tolist() == [1]


def test_after_the_last_round_a_step_goes_on_with_what_it_has_and_says_so(in_order, tmp_path):
    (rounds, _, batch, said), = steps(tmp_path, "eiheeh", 1, "rollout.until=informative", "rollout.max_rounds=2")
    assert rounds == ["eiheeh"] * 2 and (len(batch.groups), batch.offered) == (2, 2)
    assert said == "2 groups short after 2 rounds; training on the 2 groups there are"
    (_, _, nothing, said), = steps(tmp_path, "eheh", 1, "rollout.until=informative", "rollout.max_rounds=3")
    assert nothing.groups == [] and nothing.offered == 0 and nothing.adv_NG.shape == (0, 4) and "4 groups short" in said


def test_greso_rounds_are_as_large_as_it_estimates(in_order, tmp_path):
    """4 wanted, so 6 first, as 384 for 256; of them 5 flat and 3 missing: 1.25 x 3 / (1 / 6) = 22, so 6 more and on;
    then 2 missing at 4 flat of 6: 7, so 6 and on; 1 missing at 3 flat of 6: 2.5, so 2, the last."""
    (rounds, rolled, batch, said), = steps(tmp_path, "iehehe" "ieheeh" "eheheh" "iieheh" "ii", 1,
                                           "rollout.until=informative", "prune.prompts.kind=greso")
    assert rounds == ["iehehe", "ieheeh", "eheheh", "iieheh"] and said == ""
    assert (len(batch.groups), batch.offered, len(rolled.sizes)) == (4, 4, 4)
    (rounds, *_), = steps(tmp_path, "eheheh" "iiiheh" "ei" "iiii", 1, "rollout.until=informative",
                          "prune.prompts.kind=greso")
    assert rounds == ["eheheh", "iiiheh", "ei"]  # 1 missing at 3 of the newest 6, not of all 12: 2.5
    (rounds, _, batch, said), = steps(tmp_path, "iiieee" "ehehe", 1, "rollout.until=informative",
                                      "prune.prompts.kind=greso")
    assert rounds == ["iiieee", "eh"] and (len(batch.groups), batch.offered) == (3, 3)
    assert said == "1 groups short after 2 rounds; training on the 3 groups there are"


def test_full_goes_on_until_the_budget_and_weighs_by_all_that_was_offered(in_order, tmp_path):
    """Each prompt takes 2 tokens and each answer as many as it has; top 2 of 4 are kept."""
    right, wrong = (len(ids) for ids in TOKENIZER.encode(["#### 1", "#### 2 3"]))
    round_ = 4 * (2 + right + 2 + wrong)
    for budget, expected in ((round_, 1), (round_ + 1, 2), (3 * round_, 3)):
        (rounds, _, batch, said), = steps(tmp_path, "iiiiiiii", 1, "rollout.until=full", f"pack.budget={budget}",
                                          "prune.completions={kind: topk, keep: 2}")
        assert rounds == ["iiii"] * expected and batch.offered == len(batch.groups) == 4 * expected and said == ""
    (rounds, _, batch, said), = steps(tmp_path, "iiii", 1, "rollout.until=full", "pack.budget=5000",
                                      "rollout.max_rounds=2")
    assert len(rounds) == 2 and "tokens short after 2 rounds" in said


def test_greso_adapts_once_a_step_from_all_that_was_rolled_out_but_not_in_the_first_epoch(in_order, tmp_path,
                                                                                          monkeypatch):
    """e and h are rolled out in the second step, not in the third."""
    calls, true = [], adapt_p
    monkeypatch.setattr(history, "adapt_p", lambda *given: calls.append(given) or true(*given))
    steps(tmp_path, "eiiiih", 3, "rollout.until=informative", "prune.prompts={kind: greso, target: 0.6}")
    assert [given[1:] for given in calls] == [(1 / 6, 1 / 6, 0.6), (0, 0, 0.6)]
    assert calls[0][0] == (0.5, 0.5) and calls[1][0] == pytest.approx((0.51, 0.51))
    steps(tmp_path, "eiiiih", 3, "rollout.until=informative")
    assert len(calls) == 2


def twelve() -> list[Sample]:
    """Completions of several lengths, every third of them cut."""
    groups = make_groups([[3, 30, 7, 1], [12, 2, 9, 25], [8, 8, 8, 8]], [5, 17, 1])
    return [replace(s, finished=i % 3 > 0) for i, s in enumerate(s for group in groups for s in group.samples)]


def gathered() -> list[Sample]:
    """Every rank's completions at every rank; the first has five of them, the second seven, the third none."""
    bounds = [0, 5, 12, 12]
    mine = twelve()[bounds[dist.rank()]:bounds[dist.rank() + 1]]
    return Sampler(SimpleNamespace(generate=lambda *_, **__: mine), None, config.Rollout(1, 1, 1), None, 0).complete([])


def test_every_rank_gets_every_completion_whole_and_in_order(tmp_path):
    assert on_ranks(3, tmp_path, gathered) == [twelve()] * 3


def test_probabilities_and_weights_of_both_levels_multiply(tmp_path):
    cfg = toy_config(tmp_path / "run", "rollout.group_size=4", "prune.prompts={kind: bernoulli, drop_prob: 0.75}",
                     "prune.completions={kind: bernoulli, drop_prob: 0.5}", name="grpo_toy.yaml")
    adv_NG = torch.tensor([[3.0, -1, -1, -1], [1, 1, -1, -1], [1, 1, 1, -3]], dtype=torch.float64)
    alone = as_rolled(make_groups([[3, 2, 4, 1]] * 3, [2] * 3), adv_NG, adv_NG)
    prob_N = [0.25, 0.5, 1.0]
    draws = [replace(draw, prob=p, weight=1 / p) for draw, p in zip(alone.draws, prob_N, strict=True)]
    one, both = (choose(rolled, Selection.of(cfg), seed=0).pruned for rolled in (alone, replace(alone, draws=draws)))
    assert one.prob_NG.unique().tolist() == [0.5, 1] and torch.equal(one.keep_NG, both.keep_NG)
    prob_N1 = torch.tensor(prob_N, dtype=torch.float64)[:, None]
    assert torch.equal(both.prob_NG, one.prob_NG * prob_N1)
    assert torch.equal(both.weight_NG, one.weight_NG / prob_N1)


def test_easy_and_hard_meet_in_the_middle_of_what_groups_are_compared_by():
    reward = config.Reward(accuracy=4, wrong=-1, overlong=1, overlong_tokens=8)
    assert (collect.reward_midpoint(reward, "reward"), collect.reward_midpoint(reward, "accuracy")) == (1.5, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    ("rollout.prompts_per_step=1", "data.limit=3", "steps=8", "prune.completions={kind: pps, keep: 1}",
     "prune.prompts={kind: bernoulli, drop_prob: 0.9}", "seed=6"),
    ("rollout.prompts_per_step=2", "data.limit=1", "steps=4", "prune.prompts={kind: bernoulli, drop_prob: 0.9}",
     "prune.completions={kind: pps, keep: 1, scope: batch}", "update.minibatches=2")])
def test_a_step_that_rolls_nothing_out_and_one_without_variance_are_finite(settings, tmp_path):
    """That nothing changes then, whatever momentum there is, is what test_loop.py says."""
    train.train(toy_config(tmp_path / "run", "optim.lr=1e-3", "data.eval=null", *settings, name="grpo_toy.yaml"))
    lines = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")
    assert all(math.isfinite(value) for line in lines for value in line.values())
    found = [line for line in lines if "time/step" in line]
    if "steps=8" in settings:
        assert {line["train/grad_norm"] == 0 for line in found} == {True, False}
        assert 0 in {line["rollout/prompts"] for line in found}


def test_differences_in_length_alone_are_no_information_for_dapo(in_order, tmp_path):
    """By the reward, punishment of length included, every group differs; by accuracy those neither right nor wrong."""
    sections = ["rollout.until=informative", "rollout.max_rounds=1", "reward={accuracy: 2, overlong: 1, "
                "overlong_tokens: 48}", "rollout.oversample=2"]
    found = {}
    for what in ("reward", "accuracy"):
        (rounds, rolled, batch, _), = steps(tmp_path, "ieiieiee", 1, *sections, f"rollout.differ_in={what}")
        found[what] = [group.prompt.id[0] for group in batch.groups]
        assert rounds == ["ieiieiee"]
        if what == "accuracy":  # the fixture's answers are of one length; make the solved groups differ in it
            rolled.rewards.components["overlong"][1, 0] -= 0.25
            other = replace(rolled, rewards=replace(rolled.rewards, differ_in="reward"))
            assert collect.informative_groups(rolled).tolist() == [k == "i" for k in "ieiieiee"]
            assert collect.informative_groups(other).tolist() == [k == "i" or n == 1 for n, k in enumerate("ieiieiee")]
    assert found["accuracy"] == list("iiii")


def test_another_term_of_the_loss_gives_completions_of_advantage_0_a_gradient(in_order, tmp_path):
    """Else they are in no row, and a flat group has probability 0 under PPS."""
    pps = "prune.completions={kind: pps, keep: 2, scope: batch}"
    pairs = ["loss.trust.kind=none", "loss.normalize=sum", "prune.completions.kind=none"]
    for settings, advantage_only in (
            ([], True), (["loss.likelihood=0.1"], False), (["loss.kl=0.1"], False), (["loss.entropy=0.1"], False),
            (["advantage.kind=gae", "critic.lr=1e-4"], False),
            (["advantage={kind: preference, beta: 0.1}", *pairs], False)):
        (_, _, batch, _), = steps(tmp_path, "eiih", 1, pps, *settings)
        assert torch.equal(batch.trained_NG[0], batch.pruned.keep_NG[0] & (not advantage_only))
        assert bool((batch.pruned.prob_NG[0] == 0).all()) == advantage_only
