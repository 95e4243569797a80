"""Groups that go on over several steps, and those that wait: who is trained on when, and by which log-probs."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, load, logp_alone, steps_of, toy_config, weights
from test_invariance import on_ranks, trained_unchecked

import config
import train
import update
from collect import Selection, choose
from infra.choices import sequences_asked
from leaves.windows.join import Pool, age_metrics, parts
from leaves.windows.test_window import one_round, pool_of
from metrics import rollout_metrics
from records import Prompt, Rolled, Sample
from settings import leaves

FLIGHT = ["steps=6", "data.eval=null", "optim.lr=1e-3", "windows.in_flight=2", "windows.max_age=2", "windows.tokens=8"]
THINNED = ["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "data.limit=10", "steps=10"]


def in_flight(out, *settings: str) -> config.Config:
    return toy_config(out, *FLIGHT, *settings, name="flight_toy.yaml")


class Scripted:
    """An engine whose completions have given lengths, by the first token of their prompt."""

    def __init__(self, lengths: dict[int, list[int]]):
        self.left = {first: list(of_group) for first, of_group in lengths.items()}
        self.asked = 0

    def generate(self, requests, *rest, **named):
        samples = []
        for request in requests:
            ids, limit = request.tokens_before, request.limit
            length = self.left[ids[0]][0] - (len(ids) - 1)  # what is behind the prompt's one token was sampled before
            made = min(length, limit)
            if made == length:
                self.left[ids[0]].pop(0)
            samples.append(Sample((9,) * made, (-float(self.asked),) * made, made == length))
            self.asked += made
        return samples


def scripted(lengths: list[int], *settings: str) -> tuple[Pool, config.Config]:
    """Groups of one completion with these lengths, in the order in which they are drawn."""
    cfg = toy_config(ROOT / "runs" / "unused" / "run", "rollout.group_size=1", "rollout.prompts_per_step=2",
                     "rollout.max_new_tokens=20", "windows.tokens=4", "windows.in_flight=2", "windows.max_age=2",
                     "advantage.kind=gae", "critic.lr=1", *settings, name="flight_toy.yaml")
    prompts = [Prompt(f"q{n}", (n + 3,), "1") for n in range(len(lengths))]
    order = [prompts[k] for _, k in pool_of(cfg, prompts).coming(len(prompts))]
    engine = Scripted({prompt.ids[0]: [length] for prompt, length in zip(order, lengths, strict=True)})
    return pool_of(cfg, prompts, engine), cfg


def one_step(pool: Pool, cfg: config.Config) -> tuple[Rolled, list[tuple[int, int, int]]]:
    """(length, age, old tokens) of what is trained on."""
    rolled = one_round(pool, cfg.rollout.prompts_per_step)
    batch = choose(rolled, Selection.of(cfg), 0)
    assert batch.places == list(range(len(batch.groups))) and batch.offered == len(batch.groups)
    return rolled, [(group.samples[0].length, draw.age, group.samples[0].fresh_from)
                    for draw, group in zip(batch.draws, batch.groups, strict=True)]


def metrics_of(rolled: Rolled, cfg: config.Config) -> dict[str, float]:
    batch = choose(rolled, Selection.of(cfg), 0)
    return rollout_metrics(rolled, batch) | age_metrics(rolled, batch)


def test_a_step_trains_on_the_first_that_are_whole_and_waits_for_the_oldest():
    pool, cfg = scripted([20, 3, 20, 4, 5, 6, 1, 2, 7, 7, 7, 7])
    # 20 3 20 4 in one window of 4: those of 3 and 4 are whole.
    rolled, trained = one_step(pool, cfg)
    assert trained == [(3, 0, 0), (4, 0, 0)] and len(rolled.groups) == 4
    assert rolled.rewards.total_NG.isnan().flatten().tolist() == [True, False, True, False]
    assert [(turn.age, turn.so_far[0].length) for turn in pool.begun] == [(1, 4), (1, 4)]
    # Those of 5 and 6 after two more windows; both of 20 are at 12.
    rolled, trained = one_step(pool, cfg)
    assert trained == [(5, 0, 0), (6, 0, 0)] and rolled.rewards.tokens_NG.sum() == 11
    measured = metrics_of(rolled, cfg)
    assert measured["rollout/tokens"] == 2 * 8 + 11 and measured["rollout/prompts"] == 2
    assert measured["rollout/pending"] == 2 and measured["rollout/unscored"] == 0 and "age/mean" not in measured
    # At age 2 they hold the step up, and those of 1 and 2 wait although they are whole.
    rolled, trained = one_step(pool, cfg)
    assert trained == [(20, 2, 12), (20, 2, 12)]
    measured = metrics_of(rolled, cfg)
    assert (measured["age/mean"], measured["age/most"], measured["age/old_tokens"]) == (2, 2, 24 / 40)
    assert measured["rollout/tokens"] == 2 * 8 + 3
    # The older ones first.
    rolled, trained = one_step(pool, cfg)
    assert trained == [(1, 1, 1), (2, 1, 2)] or trained == [(2, 1, 2), (1, 1, 1)]


def test_a_step_trains_on_more_than_n_if_so_many_are_due():
    pool, cfg = scripted([9, 9, 9, 9, 1, 1, 1, 1, 2, 2], "windows.in_flight=2.5", "windows.max_age=2")
    assert len(one_step(pool, cfg)[1]) == 2
    ages = [[age for _, age, _ in one_step(pool, cfg)[1]] for _ in range(2)]
    assert max(max(of_step) for of_step in ages) <= 2


@pytest.fixture
def watched(monkeypatch):
    """Of every step: the pool's new draws, the batch, and a copy of the policy that sampled."""
    seen = {"new": [], "batch": [], "policy": [], "rolled": [], "pool": None}
    true_update, true_through = train.update, leaves.through

    def through(hook, cfg, thing):
        thing = true_through(hook, cfg, thing)
        if hook == "parts":
            seen["pool"] = thing.history
        return thing

    def watch(learner, batch, *given):
        seen["batch"].append(batch)
        seen["policy"].append(weights(learner.policy))
        return true_update(learner, batch, *given)

    def watched_choose(rolled, *given):
        seen["new"].append([draw for draw in rolled.draws if draw.age == 0])
        seen["rolled"].append(rolled)
        return choose(rolled, *given)

    monkeypatch.setattr(train, "update", watch)
    monkeypatch.setattr(train, "choose", watched_choose)
    monkeypatch.setattr(leaves, "through", through)
    return seen


def name_of(draw) -> tuple[int, str]:
    return draw.epoch, draw.prompt.id


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    pytest.param(["windows.in_flight=1.5", "windows.max_age=1"], marks=pytest.mark.slow),
    pytest.param(["windows.in_flight=4", "windows.max_age=3", "steps=9"], marks=pytest.mark.slow),
    [*THINNED, "steps=6", "rollout.max_new_tokens=32"]])
def test_every_group_that_is_begun_is_trained_on_once_and_none_is_too_old(settings, watched, tmp_path):
    cfg = in_flight(tmp_path / "run", *settings)
    train.train(cfg)
    begun = Counter(name_of(draw) for new in watched["new"] for draw in new if draw.kept)
    trained = Counter(name_of(draw) for batch in watched["batch"] for draw in batch.draws)
    under_way = Counter(map(name_of, watched["pool"].begun))
    assert begun == trained + under_way and set(begun.values()) == {1} and under_way
    N = cfg.rollout.prompts_per_step
    assert 0 < max([draw.age for batch in watched["batch"] for draw in batch.draws]) <= cfg.windows.max_age
    for batch in watched["batch"]:
        assert all(s.finished or s.length == cfg.rollout.max_new_tokens for g in batch.groups for s in g.samples)
        oldest = max(draw.age for draw in batch.draws)
        assert batch.offered == N or (batch.offered > N and oldest == cfg.windows.max_age)
    skipped = [sum(not draw.kept for draw in new) for new in watched["new"]]
    assert any(skipped) == (settings[:2] == THINNED[:2])
    for batch, missing in zip(watched["batch"], skipped, strict=True):
        assert batch.offered == len(batch.groups) + missing
    weighed = {name_of(draw): draw.weight for new in watched["new"] for draw in new}
    assert all(draw.weight == weighed[name_of(draw)] for batch in watched["batch"] for draw in batch.draws)
    lines = steps_of(tmp_path / "run")
    whole = [group.samples for batch in watched["batch"] for group in batch.groups]
    under_way = [turn.so_far for turn in watched["pool"].begun]
    lengths = [s.length for samples in whole + under_way for s in samples]
    assert sum(line["rollout/tokens"] for line in lines) == sum(lengths)


def drawn_at(watched: dict, step: int, n: int, g: int) -> list[int]:
    """The step in which each token of a completion that is trained on in `step` was drawn, by the rollouts' lengths."""
    batch, ends = watched["batch"][step], []
    key = name_of(batch.draws[n])
    for rolled in watched["rolled"][:step + 1]:
        pairs = zip(rolled.kept, rolled.groups, strict=True)
        ends.append({name_of(draw): group.samples[g].length for draw, group in pairs}.get(key, 0))
    return [next(s for s, end in enumerate(ends) if t < end) for t in range(ends[-1])]


@pytest.mark.slow
def test_each_token_is_trained_on_with_the_log_prob_of_the_policy_that_drew_it(watched, tmp_path):
    """By the weights of that step, run over the completion alone. What the loss makes of it: test_objectives.py."""
    cfg = in_flight(tmp_path / "run", "windows.in_flight=1.75", "steps=4")
    N, G = cfg.rollout.prompts_per_step, cfg.rollout.group_size
    assert sequences_asked(cfg, ranks=1) == int(1.75 * N) * G  # slots for all that is under way
    train.train(cfg)
    step = max(step for step, batch in enumerate(watched["batch"]) if len({draw.age for draw in batch.draws}) > 1)
    batch, versions = watched["batch"][step], []
    assert any(s.fresh_from for group in batch.groups for s in group.samples)
    for kept in watched["policy"][:step + 1]:
        versions.append(load(TOY, torch.float64).requires_grad_(False))
        versions[-1].load_state_dict(kept, strict=False)
    for n, group in enumerate(batch.groups):
        for g, sample in enumerate(group.samples):
            steps = torch.tensor(drawn_at(watched, step, n, g))
            by_version = torch.stack([logp_alone(version, group, sample) for version in versions])
            drawn = by_version.gather(0, steps[None])[0]
            torch.testing.assert_close(torch.tensor(list(sample.logp), dtype=torch.float64), drawn, rtol=0, atol=1e-9)
            assert sample.fresh_from == int((steps < step).sum())
    trained = [batch.groups[n].samples[g].length for n, g in batch.trained_NG.nonzero().tolist()]
    assert steps_of(tmp_path / "run")[step]["train/tokens"] == sum(trained)


@pytest.mark.slow
def test_the_rate_follows_the_effective_share_of_whole_completions(tmp_path):
    """VCPO by hand: two rows of one and of two completions, and a row that only keeps its rank in step."""
    def passed(gaps: list[list[float]], counts: bool = True):
        gap_C = torch.tensor([gap for of in gaps for gap in of], dtype=torch.float64)
        segment_C = torch.tensor([i for i, of in enumerate(gaps) for _ in of])
        row = SimpleNamespace(counts=counts, sampled_logp_C=torch.zeros_like(gap_C), segment_C=segment_C)
        return SimpleNamespace(row=row), SimpleNamespace(logp_C=gap_C)

    log2 = 0.6931471805599453
    rows = [passed([[0.0, 0.0]]), passed([[log2, log2], [-log2]]), passed([[9.0]], counts=False)]
    assert update.effective_share(rows) == pytest.approx((1 + 4 + 0.5) ** 2 / 3 / (1 + 16 + 0.25))
    assert update.effective_share([]) == 1
    assert 0 < update.effective_share([passed([[1e4], [0.0]])]) < 1
    far = passed([[-1e4], [log2, -1e4]])  # long completions, all of them unlikely by now
    assert update.effective_share([far]) == pytest.approx((1 + 2) ** 2 / 2 / (1 + 4))
    train.train(toy_config(tmp_path / "run", "steps=2", "optim.lr=1e-3", "update.minibatches=2", "data.eval=null",
                           "update.rate_by_ess=true", name="grpo_toy.yaml"))
    rates = [line["train/lr"] for line in steps_of(tmp_path / "run")]
    assert len(rates) == 2 and all(0 < rate <= 1e-3 for rate in rates) and min(rates) < 0.999e-3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [
    ("flight_toy.yaml", [*FLIGHT, *THINNED, "update.rate_by_ess=true", "update.minibatches=2"]),
    ("surplus_toy.yaml", ["optim.lr=1e-3", "rollout.prompts_per_step=2", "rollout.oversample=4",
                          "update.minibatches=2"])])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_cut_off_with_groups_under_way_resumes_as_the_same_run(name, settings, ranks, tmp_path):
    """Another number of ranks goes on with the same pool; parameters then agree but for rounding."""
    cfg = toy_config(tmp_path / "whole", *settings, "steps=4", "data.eval=null", "checkpoint.every=2", name=name)
    whole = trained_unchecked(cfg)
    first = replace(cfg, out=str(tmp_path / "cut"), steps=2)
    on_ranks(ranks, tmp_path, trained_unchecked, first) if ranks > 1 else trained_unchecked(first)
    saved = torch.load(tmp_path / "cut" / "checkpoints" / "step_000002" / "extra.pt", weights_only=True)
    assert saved["history"]["pool"]
    resumed = weights(train.train(replace(first, steps=4), resume="always"))
    decided = [(tmp_path / run / "decisions.jsonl").read_text() for run in ("whole", "cut")]
    assert decided[0] == decided[1] and '"age"' in decided[0]
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0 if ranks == 1 else 1e-9)


def test_one_in_flight_is_a_run_without_the_setting(tmp_path):
    cfg = toy_config(tmp_path / "run", "data.eval=null", "windows.in_flight=1", name="grpo_toy.yaml")
    assert parts(cfg, "a run") == "a run"


@pytest.mark.slow
def test_informative_groups_that_are_left_over_are_trained_on_in_the_next_step(watched, tmp_path):
    cfg = toy_config(tmp_path / "run", "steps=3", "optim.lr=1e-3", "rollout.prompts_per_step=2", "rollout.oversample=3",
                     "update.minibatches=2", "data.eval=null", "rollout.max_new_tokens=32", name="surplus_toy.yaml")
    train.train(cfg)
    trained = Counter(name_of(draw) for batch in watched["batch"] for draw in batch.draws)
    assert set(trained.values()) == {1}
    waited = 0
    selection = Selection.of(cfg)
    for step, rolled in enumerate(watched["rolled"]):
        old = [draw for draw in rolled.kept if draw.age]
        used = {name_of(draw) for draw in watched["batch"][step].draws}
        assert all(name_of(draw) in used and draw.age == 1 for draw in old), "one step, and no longer"
        waited += len(old)
        if step + 1 < len(watched["rolled"]):
            values = rolled.rewards.components["accuracy"].tolist()
            informative = [rolled.kept[n] for n, row in enumerate(values) if len(set(row)) > 1]
            spare = [name_of(draw) for draw in informative if name_of(draw) not in used]
            following = [name_of(draw) for draw in watched["rolled"][step + 1].kept if draw.age]
            assert following == spare[:selection.rollout.prompts_per_step]
    assert waited
    lines = steps_of(tmp_path / "run")
    assert max(line.get("age/most", 0) for line in lines) == 1
    assert sum(line["rollout/prompts"] for line in lines) == len({name_of(d) for new in watched["new"] for d in new})
    fresh = sum(s.length for new in watched["rolled"] for draw, group in zip(new.kept, new.groups, strict=True)
                for s in group.samples if draw.age == 0)
    assert sum(line["rollout/tokens"] for line in lines) == fresh
