"""Groups that go on over several steps, and those that wait: who is trained on when, and by which ratios."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import survive
import torch
from conftest import ROOT, TOY, attend_alone, gradients, load, toy_config, weights
from test_invariance import on_ranks, step_metrics, trained_unchecked

import config
import data
import train
import update
from collect import Sampler, Selection, choose
from history import PromptHistory
from infra import dist, runfolder
from methods import samplers
from methods.window import Pool, WindowSampler
from metrics import rollout_metrics
from records import Group, Prompt, Rolled, Sample

FLIGHT = ["steps=6", "optim.lr=1e-3", "rollout.in_flight=2", "rollout.max_age=2", "rollout.window=8"]
THINNED = ["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "data.limit=10", "steps=10"]


def in_flight(out, *settings: str) -> config.Config:
    return toy_config(out, *FLIGHT, *settings, name="flight_toy.yaml")


# ---- by hand

class Scripted:
    """An engine whose completions have given lengths, by the first token of their prompt."""

    def __init__(self, lengths: dict[int, list[int]]):
        self.left = {first: list(of_group) for first, of_group in lengths.items()}
        self.asked = 0

    def generate(self, prompts, seeds, limits, *rest, **named):
        samples = []
        for ids, limit in zip(prompts, limits, strict=True):
            length = self.left[ids[0]][0] - (len(ids) - 1)  # what is behind the prompt's one token was sampled before
            made = min(length, limit)
            if made == length:
                self.left[ids[0]].pop(0)
            samples.append(Sample((9,) * made, (-float(self.asked),) * made, made == length))
            self.asked += made
        return samples


def scripted(lengths: list[int], *settings: str) -> tuple[WindowSampler, Pool, config.Config]:
    """Groups of one completion with these lengths, in the order in which they are drawn."""
    cfg = toy_config(ROOT / "runs" / "unused" / "run", "rollout.group_size=1", "rollout.prompts_per_step=2",
                     "rollout.max_new_tokens=20", "rollout.window=4", "rollout.in_flight=2", "rollout.max_age=2",
                     "advantage.kind=gae", "critic.lr=1", *settings, name="flight_toy.yaml")
    prompts = [Prompt(f"q{n}", (n + 3,), "1") for n in range(len(lengths))]
    pool = Pool(PromptHistory(prompts, cfg.prune.prompts, cfg.seed, middle=0.5), cfg.rollout)
    order = [prompt for _, prompt in PromptHistory(prompts, cfg.prune.prompts, cfg.seed, 0.5).coming(len(prompts))]
    engine = Scripted({prompt.ids[0]: [length] for prompt, length in zip(order, lengths, strict=True)})
    return WindowSampler(Sampler(engine, data.Tokenizer(TOY), cfg.rollout, cfg.reward, 0), pool), pool, cfg


def one_step(sampler: WindowSampler, pool: Pool, cfg: config.Config) -> tuple[Rolled, list[tuple[int, int, int]]]:
    """(length, age, old tokens) of what is trained on."""
    draws = pool.draw(cfg.rollout.prompts_per_step)
    groups = sampler.rollout(draws)
    rewards = sampler.score(groups)
    rolled = Rolled() + Rolled(draws, groups, rewards, rewards.total_NG.clone())
    pool.record(rolled)
    batch = choose(rolled, Selection.of(cfg), 0)
    assert batch.places == list(range(len(batch.groups))) and batch.offered == len(batch.groups)
    return rolled, [(group.samples[0].length, draw.age, group.samples[0].old)
                    for draw, group in zip(batch.draws, batch.groups, strict=True)]


def test_a_step_trains_on_the_first_that_are_whole_and_waits_for_the_oldest():
    sampler, pool, cfg = scripted([20, 3, 20, 4, 5, 6, 1, 2, 7, 7, 7, 7])
    # 20 3 20 4 in one window of 4: those of 3 and 4 are whole.
    rolled, trained = one_step(sampler, pool, cfg)
    assert trained == [(3, 0, 0), (4, 0, 0)] and len(rolled.groups) == 4
    assert rolled.rewards.total_NG.isnan().flatten().tolist() == [True, False, True, False]
    assert [(draw.age, samples[0].length) for draw, samples in pool.begun] == [(1, 4), (1, 4)]
    # Those of 5 and 6 after two more windows; both of 20 are at 12.
    rolled, trained = one_step(sampler, pool, cfg)
    assert trained == [(5, 0, 0), (6, 0, 0)] and rolled.rewards.tokens_NG.sum() == 11
    measured = rollout_metrics(rolled, choose(rolled, Selection.of(cfg), 0))
    assert measured["rollout/tokens"] == 2 * 8 + 11 and measured["rollout/prompts"] == 2
    assert measured["rollout/pending"] == 2 and measured["rollout/unscored"] == 0 and "age/mean" not in measured
    # At age 2 they hold the step up, and those of 1 and 2 wait although they are whole.
    rolled, trained = one_step(sampler, pool, cfg)
    assert trained == [(20, 2, 12), (20, 2, 12)]
    measured = rollout_metrics(rolled, choose(rolled, Selection.of(cfg), 0))
    assert (measured["age/mean"], measured["age/most"], measured["age/old_tokens"]) == (2, 2, 24 / 40)
    assert measured["rollout/tokens"] == 2 * 8 + 3
    # The older ones first.
    rolled, trained = one_step(sampler, pool, cfg)
    assert trained == [(1, 1, 1), (2, 1, 2)] or trained == [(2, 1, 2), (1, 1, 1)]


def test_a_step_trains_on_more_than_n_if_so_many_are_due():
    sampler, pool, cfg = scripted([9, 9, 9, 9, 1, 1, 1, 1, 2, 2], "rollout.in_flight=2.5", "rollout.max_age=2")
    assert len(one_step(sampler, pool, cfg)[1]) == 2
    ages = [[age for _, age, _ in one_step(sampler, pool, cfg)[1]] for _ in range(2)]
    assert max(max(of_step) for of_step in ages) <= 2


# ---- runs

@pytest.fixture
def watched(monkeypatch):
    """Of every step: the pool's new draws, the batch, and a copy of the policy that sampled."""
    seen = {"new": [], "batch": [], "policy": [], "rolled": [], "pool": None}
    true_update, true_choose = train.update, samplers.choose_sampler

    def choose_sampler(*given):
        history, sampler = true_choose(*given)
        seen["pool"] = history
        return history, sampler

    def watch(learner, batch, step, clock):
        seen["batch"].append(batch)
        seen["policy"].append(weights(learner.policy))
        return true_update(learner, batch, step, clock)

    def watched_choose(rolled, selection, seed):
        seen["new"].append([draw for draw in rolled.draws if draw.age == 0])
        seen["rolled"].append(rolled)
        return choose(rolled, selection, seed)

    monkeypatch.setattr(train, "update", watch)
    monkeypatch.setattr(train, "choose", watched_choose)
    monkeypatch.setattr(train.samplers, "choose_sampler", choose_sampler)
    return seen


def name_of(draw) -> tuple[int, str]:
    return draw.epoch, draw.prompt.id


@pytest.mark.parametrize("settings", [
    [], ["rollout.in_flight=1.5", "rollout.max_age=1"], ["rollout.in_flight=4", "rollout.max_age=3", "steps=9"], THINNED])
def test_every_group_that_is_begun_is_trained_on_once_and_none_is_too_old(settings, watched, tmp_path):
    cfg = in_flight(tmp_path / "run", *settings)
    train.train(cfg)
    begun = Counter(name_of(draw) for new in watched["new"] for draw in new if draw.kept)
    trained = Counter(name_of(draw) for batch in watched["batch"] for draw in batch.draws)
    under_way = Counter(name_of(draw) for draw, _ in watched["pool"].begun)
    assert begun == trained + under_way and set(begun.values()) == {1} and under_way
    N = cfg.rollout.prompts_per_step
    ages = [draw.age for batch in watched["batch"] for draw in batch.draws]
    assert 0 < max(ages) <= cfg.rollout.max_age
    for batch in watched["batch"]:
        assert all(s.finished or s.length == cfg.rollout.max_new_tokens for g in batch.groups for s in g.samples)
        assert batch.offered >= N and (batch.offered == N or max(draw.age for draw in batch.draws) == cfg.rollout.max_age)
    skipped = [sum(not draw.kept for draw in new) for new in watched["new"]]
    assert any(skipped) == (settings == THINNED)
    for batch, missing in zip(watched["batch"], skipped, strict=True):
        assert batch.offered == len(batch.groups) + missing
    weighed = {name_of(draw): draw.weight for new in watched["new"] for draw in new}
    assert all(draw.weight == weighed[name_of(draw)] for batch in watched["batch"] for draw in batch.draws)
    lines = [line for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl") if "train/tokens" in line]
    sampled = sum(line["rollout/tokens"] for line in lines)
    assert sampled == sum(s.length for batch in watched["batch"] for group in batch.groups for s in group.samples) + sum(
        s.length for _, samples in watched["pool"].begun for s in samples)


def logp_of(policy, group: Group, sample: Sample) -> torch.Tensor:
    """Of one completion alone, by nothing of the training step but the model."""
    ids, first = torch.tensor([*group.prompt.ids, *sample.ids]), len(group.prompt.ids)
    predict = torch.arange(first - 1, len(ids) - 1)
    return policy(ids, torch.arange(len(ids)), attend_alone, predict, ids[first:], 1.0)


def drawn_at(watched: dict, step: int, n: int, g: int) -> list[int]:
    """The step in which each token of a completion that is trained on in `step` was drawn, by the rollouts' lengths."""
    batch, ends = watched["batch"][step], []
    key = name_of(batch.draws[n])
    for rolled in watched["rolled"][:step + 1]:
        lengths = {name_of(draw): group.samples[g].length for draw, group in zip(rolled.kept, rolled.groups, strict=True)}
        ends.append(lengths.get(key, 0))
    return [next(s for s, end in enumerate(ends) if t < end) for t in range(ends[-1])]


@pytest.mark.parametrize("loss", [
    ["loss.tis_cap=1.05"], ["loss.old_logp=engine", "loss.tis_cap=1.3", "loss.trust={low: 0.1, high: 0.1}"],
    ["loss.old_logp=engine", "loss.tis_cap=null", "loss.trust={kind: total_variation, divergence: 0.02, sides: both}"],
], ids=["decoupled", "clip", "ipo"])
def test_the_gradient_of_mixed_ages_is_the_formulas_and_each_token_has_the_log_prob_of_its_policy(
        loss, watched, tmp_path):
    """-1/(N G) sum_i 1/|o_i| sum_t f_t A_i grad log pi, with the ratio of every token to the policy that drew it: the
    weights of that step, run over the completion alone."""
    cfg = in_flight(tmp_path / "run", *loss, "steps=5")
    train.train(cfg)
    batch, policy = watched["batch"][-1], load(TOY, torch.float64)
    assert len({draw.age for draw in batch.draws}) > 1 and any(s.old for group in batch.groups for s in group.samples)
    stopped = corrected = 0
    policy.load_state_dict({name: p for name, p in watched["policy"][-1].items()}, strict=False)
    versions = []
    for kept in watched["policy"]:
        version = load(TOY, torch.float64).requires_grad_(False)
        version.load_state_dict(kept, strict=False)
        versions.append(version)
    for n, group in enumerate(batch.groups):
        for g, sample in enumerate(group.samples):
            steps = torch.tensor(drawn_at(watched, len(versions) - 1, n, g))
            by_version = torch.stack([logp_of(version, group, sample) for version in versions])
            drawn = by_version.gather(0, steps[None])[0]
            torch.testing.assert_close(torch.tensor(list(sample.logp), dtype=torch.float64), drawn, rtol=0, atol=1e-9)
            assert sample.old == int((steps < len(versions) - 1).sum())
            A, logp = batch.adv_NG[n, g], logp_of(policy, group, sample)
            ratio = (logp.detach() - drawn).exp()
            if cfg.loss.old_logp == "recompute":
                f = ratio.clamp(max=1.05)
                corrected += int((ratio > 1.05).sum())
            elif cfg.loss.trust.kind == "clip":
                out = (ratio > 1.1) if A > 0 else (ratio < 0.9)
                f = torch.where(out, 0.0, ratio.clamp(max=1.3))
                corrected += int((ratio > 1.3).sum())
                stopped += int(out.sum())
            else:
                out = (logp.detach().exp() - drawn.exp()).abs() > 0.02
                f = torch.where(out, 0.0, ratio.clamp(max=20))
                stopped += int(out.sum())
            (-(f * A * logp).mean() / len(batch.groups) / len(group.samples)).backward()
    assert corrected or cfg.loss.trust.kind == "total_variation"
    assert stopped or cfg.loss.old_logp == "recompute"
    expected = gradients(policy)
    learner = train.load_models(cfg_with_dtype(cfg), data.Task(TOY, data.Tokenizer(TOY), [], [], []))[0]
    with torch.no_grad():
        for name, p in learner.policy.named_parameters():
            p.copy_(dist.sharded_like(watched["policy"][-1][name], p))
    weighed = update.minibatch(learner, batch, list(range(batch.offered)))
    prepared = update.prepare_rows(learner, learner.rows(weighed), extra_pass=False)
    update.add_gradients(learner, weighed, prepared, unmoved=True)
    for name, ours in gradients(learner.policy).items():
        torch.testing.assert_close(ours, expected[name], rtol=0, atol=1e-10 * float(expected[name].abs().max()), msg=name)


def cfg_with_dtype(cfg: config.Config) -> config.Config:
    from preflight import memory
    return memory.resolve_auto(cfg, TOY)
