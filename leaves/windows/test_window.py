"""Windowed rollout (T-PPO): completions that go on over several steps, and what policy and critic see of them."""

from dataclasses import replace

import pytest
import torch
from conftest import TOY, as_rolled, ask, load, others_slow, steps_of, toy_config

import config
import data
import learner
import train
from collect import Sampler, Selection, choose
from history import PromptHistory
from infra import runfolder
from infra.choices import resolve_auto
from leaves.critic import join as critic
from leaves.windows.join import Piece, Pool, Turn
from metrics import rollout_metrics
from policy import Weights
from records import EngineSpec, Group, Prompt, Rolled, Sample

ALONE = ["rollout.group_size=1", "rollout.prompts_per_step=8", "windows.tokens=10", "critic.pretrain_steps=0"]


def windowed(out, *settings: str) -> config.Config:
    return toy_config(out, *ALONE, *settings, name="tppo_toy.yaml")


@pytest.mark.slow
def test_every_token_is_trained_once_by_the_policy_and_by_the_critic_when_the_completion_is_done(tmp_path, monkeypatch):
    """Over 5 steps in which the policy changes, by the rows that the two models are given."""
    trained, learnt, true = {}, {}, learner.build_row

    def watch(seen):
        def build(minibatch, plan):
            row = true(minibatch, plan)
            samples = [minibatch.groups[n].samples[g] for n, g in plan.members]
            assert row.target_C.tolist() == [i for s in samples for i in s.ids[s.start:]]
            last_S = row.segments.start_2S[0, 1:] - 1
            assert row.predict_C.tolist() == [t for s, last in zip(samples, last_S.tolist(), strict=True)
                                              for t in range(last - s.trained, last)]  # each has a prompt of its own
            for (n, _), s in zip(plan.members, samples, strict=True):
                seen.setdefault(minibatch.groups[n].prompt.id, []).append((s.start, s.length, s.pending))
            return row
        return build

    fit = critic.fit_values

    def watched_fit(*given):
        monkeypatch.setattr(learner, "build_row", watch(learnt))
        measured = fit(*given)
        monkeypatch.setattr(learner, "build_row", watch(trained))
        return measured

    monkeypatch.setattr(critic, "fit_values", watched_fit)
    monkeypatch.setattr(learner, "build_row", watch(trained))
    train.train(windowed(tmp_path / "run", "steps=5", "optim.lr=1e-3", "data.eval=null"))
    assert max(map(len, trained.values())) > 2
    for name, parts in trained.items():
        ends = [end for _, end, _ in parts]
        assert [start for start, _, _ in parts] == [0, *ends[:-1]]
        assert all(pending for _, _, pending in parts[:-1])
        assert learnt.get(name, []) == ([(0, ends[-1], False)] if not parts[-1][2] else [])
    assert learnt.keys() < trained.keys()


@pytest.mark.slow
def test_the_engine_reads_what_was_begun_with_the_weights_it_has_now(tmp_path):
    """In float64 its log-probs of a window are the policy's, also where the prefix is older than the policy."""
    train.train(windowed(tmp_path / "run", "steps=3", "optim.lr=1e-3", "data.eval=null"))
    lines = steps_of(tmp_path / "run")
    assert all(line["mismatch/logp_abs_max"] < 1e-9 for line in lines)
    assert all(line["rollout/pending"] > 0 for line in lines)
    decided = runfolder.read_log(tmp_path / "run" / "decisions.jsonl")
    right = [[correct for prompt in step["prompts"] for correct in prompt["right"]] for step in decided]
    assert [verdicts.count(None) for verdicts in right] == [line["rollout/pending"] for line in lines]
    ended = [verdicts.count(0) + verdicts.count(1) for verdicts in right]
    assert [verdicts.count(1) for verdicts in right] == pytest.approx(
        [line.get("reward/accuracy", 0) * count for line, count in zip(lines, ended, strict=True)])
    assert all(c["finished"] or c["tokens"] == 48 for line in runfolder.read_log(tmp_path / "run" / "samples.jsonl")
               for c in line["completions"])  # what goes on is not shown
    assert sum(line["rollout/tokens"] for line in lines) == sum(line["train/tokens"] for line in lines)


def pool_of(cfg: config.Config, prompts: list[Prompt], engine=None) -> Pool:
    sampler = Sampler(engine, data.Tokenizer(TOY), cfg.rollout, cfg.reward, cfg.seed)
    return Pool(PromptHistory(prompts, cfg.prune.prompts, cfg.seed, middle=0.5), sampler, cfg.windows)


def one_round(pool: Pool, count: int) -> Rolled:
    draws = pool.draw(count)
    groups = pool.rollout(draws)
    rewards = pool.score(groups)
    rolled = Rolled() + Rolled(draws, groups, rewards, rewards.total_NG.clone())
    pool.record(rolled)
    return rolled


@pytest.mark.parametrize("window", others_slow([1, 3, 48], 3))
def test_windows_laid_end_to_end_are_the_whole_completion(window, tmp_path):
    """Greedy, with one policy. Those done are replaced by new prompts, in order, and nobody is lost."""
    cfg = windowed(tmp_path / "run", f"windows.tokens={window}")
    cfg = replace(cfg, rollout=replace(cfg.rollout, temperature=0.0))
    task = train.load_task(cfg)
    _, engine = train.load_models(resolve_auto(cfg, task.source), task, Weights())
    engine.sync(load(TOY, torch.float64))
    pool, ended, steps = pool_of(cfg, task.prompts, engine), {}, 0
    while len(ended) < 20:
        rolled = one_round(pool, 8)
        steps += 1
        assert len(rolled.groups) == 8 and len(pool.begun) == sum(g.samples[0].pending for g in rolled.groups)
        assert all(g.samples[0].fresh <= window for g in rolled.groups)
        ended |= {g.prompt.id: g.samples[0] for g in rolled.groups if not g.samples[0].pending}
    assert steps >= 3
    order = [task.prompts[k] for _, k in pool_of(cfg, task.prompts).coming(pool.place)]
    assert ended.keys() | {turn.prompt.id for turn in pool.begun} == {prompt.id for prompt in order}
    alone = engine.generate(ask([p.ids for p in order], [0] * len(order), 48), 0.0)
    for prompt, sample in zip(order, alone, strict=True):
        if prompt.id in ended:
            assert (ended[prompt.id].ids, ended[prompt.id].finished) == (sample.ids, sample.finished)
            assert list(ended[prompt.id].logp) == pytest.approx(list(sample.logp), abs=1e-9)


def test_a_completion_that_reaches_its_limit_is_done_and_scored(tmp_path):
    """20 tokens in windows of 8: 8, 8 and 4. Its groups stay ragged: new prompts fill only whole groups' places."""
    cfg = windowed(tmp_path / "run", "windows.tokens=8", "rollout.max_new_tokens=20", "rollout.group_size=3",
                   "rollout.prompts_per_step=2", "reward.overlong=1", "reward.overlong_tokens=10")
    prompts = [Prompt(f"q{n}", (n + 3,), "1") for n in range(40)]

    class Endless:
        def generate(self, requests, *rest, **named):
            self.asked = [(len(request.tokens_before), request.limit) for request in requests]
            self.seeds = [request.seed for request in requests]
            return [Sample((9,) * request.limit, (-0.5,) * request.limit, False) for request in requests]

    engine, rounds, seeds = Endless(), [], []
    pool = pool_of(cfg, prompts, engine)
    begun = Piece(Sample((9,) * 16, (-1.0,) * 16, False), pending=True)
    pool.begun = [Turn(prompts[30], 0, copy=1, number=30, so_far=(begun,))]
    for _ in range(3):
        rolled = one_round(pool, 2)
        rounds.append((engine.asked, [(g.samples[0].start, g.samples[0].length) for g in rolled.groups]))
        seeds += engine.seeds
    # What was begun stands between what is new, so that ranks share out both.
    assert rounds[0] == ([(1, 8), (17, 4), (1, 8), (1, 8)], [(0, 8), (16, 20), (0, 8), (0, 8)])
    assert rounds[1] == ([(9, 8), (1, 8)] * 3, [(8, 16), (0, 8)] * 3)
    assert rounds[2][0] == [(17, 4), (9, 8)] * 3
    assert sorted(rolled.rewards.components["overlong"].flatten().tolist()) == [-1.0] * 3 + [0.0] * 3
    assert len(set(seeds)) == len(seeds)
    measured = rollout_metrics(rolled, choose(rolled, Selection.of(cfg), 0))
    assert (measured["rollout/pending"], measured["rollout/length"], measured["rollout/truncated"]) == (3, 20, 1)
    assert measured["reward/overlong"] == -1 and measured["rollout/tokens"] == 3 * 4 + 3 * 8
    assert measured["rollout/entropy"] == 0.5


def test_truncated_completions_can_be_dropped_and_those_that_go_on_are_not(tmp_path):
    cfg = windowed(tmp_path / "run", "prune.truncated=true", "loss.denominator=kept")
    samples = [Sample((1,), (-1.0,), True), Sample((1,), (-1.0,), False), Piece(Sample((1,), (-1.0,), False), pending=True)]
    groups = [Group(Prompt(str(n), (1,), ""), (s,)) for n, s in enumerate(samples)]
    pruned = choose(as_rolled(groups, torch.zeros(3, 1, dtype=torch.float64)), Selection.of(cfg), 0).pruned
    assert pruned.keep_NG.tolist() == [[True], [False], [True]]
    assert pruned.weight_NG.tolist() == [[1], [0], [1]]


def test_prefill_in_runs_is_prefill_at_once(monkeypatch):
    """Long prefixes go through the model a few at a time."""
    import rollout
    model = load(TOY, torch.float64)
    prompts = [(5, 6, 7), (5, 6, 7), (8,) * 9, (4,) * 30, (3, 2)]
    sizes = {0: 3, 1: 9, 2: 30, 3: 2}
    assert rollout.group_by_size(sizes) == [[3, 0, 1, 2]]

    def answers() -> list[Sample]:
        spec = EngineSpec(TOY, torch.float64, torch.device("cpu"), "sdpa", frozenset({2}), slots=8, max_len=64)
        engine = rollout.TorchEngine(load(TOY, torch.float64), spec)
        engine.sync(model)
        return engine.generate(ask(prompts, [1, 2, 3, 4, 5], [4, 9, 1, 12, 6]), 1.0)

    whole = answers()
    monkeypatch.setattr(rollout, "PREFILL_TOKENS", 18)
    assert rollout.group_by_size(sizes) == [[3, 0], [1], [2]]
    assert [s.ids for s in whole] == [s.ids for s in answers()]
    assert all(s.length == limit or s.finished for s, limit in zip(whole, [4, 9, 1, 12, 6], strict=True))
