"""rollout.drafts: completions are those without drafts, whatever the drafts hold, so their law is the policy's; a run
with drafts is the run without, and resumes as itself."""

import random
from array import array
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from conftest import TOY, load, refuses, steps_of, toy_config, weights
from test_rollout import spec

import rollout
import train
from infra.choices import resolve_auto
from leaves.drafts.join import DraftDecoding, Tree
from leaves.drafts.proposals import Steps, follow
from records import Prompt, Request, Sample, Stops
from rollout import TorchEngine

PROMPTS = [Prompt(str(i), tuple(random.Random(i).choices(range(3, 400), k=1 + 4 * i)), "") for i in range(5)]
ENDING = frozenset(range(0, 477, 9))  # a ninth of the vocabulary, so that completions have many lengths


def engine_on(**settings) -> TorchEngine:
    settings = {"slots": 6, "dtype": torch.float64, "eos": ENDING} | settings
    engine = TorchEngine(load(TOY, torch.float64), spec(TOY, **settings))
    engine.sync(load(TOY, torch.float64))
    return engine


def asked(first: int = 0, copies: int = 4) -> list[Request]:
    return [Request(prompt, first + 100 * i + g, 20) for i, prompt in enumerate(PROMPTS) for g in range(copies)]


def offering(engine: TorchEngine, drafts_of) -> TorchEngine:
    """The engine with these drafts of the i-th prompt."""
    engine.decoding = partial(DraftDecoding, {prompt.ids: drafts_of(i) for i, prompt in enumerate(PROMPTS)})
    return engine


def made_up(samples, kind: str):
    """Drafts of the i-th prompt, of its samples."""
    own = [[tuple(s.ids) for s in samples[4 * i:4 * i + 4]] for i in range(len(PROMPTS))]
    draw = random.Random(0)
    return {"the same": lambda i: tuple(own[i]),
            "cut anywhere": lambda i: tuple(ids[:draw.randint(1, len(ids))] for ids in own[i] * 2),
            "of some prompts": lambda i: tuple(own[i]) if i % 2 else (),
            "of other prompts": lambda i: tuple(own[i - 1]),
            "longer": lambda i: tuple((*ids, 7, 8) for ids in own[i]),
            "one token": lambda i: (own[i][0][:1],),
            "noise": lambda i: tuple(tuple(draw.choices(range(477), k=9)) for _ in range(3))}[kind]


@cache
def without_drafts(first: int) -> list[Sample]:
    return engine_on().generate(asked(first), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 7])  # the same seeds, or others, as those of the drafts
@pytest.mark.parametrize("kind", ["the same", "cut anywhere", "of some prompts", "of other prompts", "longer",
                                  "one token", "noise"])
def test_drafts_change_no_token(kind, first):
    plain = without_drafts(first)
    saved = Steps.saved
    found = offering(engine_on(), made_up(without_drafts(0), kind)).generate(asked(first), 1.0)
    assert [(list(s.ids), s.finished) for s in found] == [(list(s.ids), s.finished) for s in plain]
    for mine, other in zip(found, plain, strict=True):
        assert list(mine.logp) == pytest.approx(list(other.logp), abs=1e-10)
    if kind == "the same" and first == 0:
        assert Steps.saved - saved == sum(s.length for s in found)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}])
@pytest.mark.parametrize("slots", [1, 3, 20, 64])
def test_so_they_do_with_other_ways_to_sample_and_stop_texts(settings, slots):
    sampling = {"temperature": 1.3} | settings
    tokenizer = train.data.Tokenizer(TOY)
    stops = replace(train.data.Tokenizer(TOY, stop=[tokenizer.decode([token]) for token in range(50, 60)]).stops)
    assert isinstance(stops, Stops)
    engine = engine_on(slots=slots, stops=stops)
    drafts, plain = engine.generate(asked(), **sampling), engine.generate(asked(5), **sampling)
    saved = Steps.saved
    found = offering(engine, made_up(drafts, "cut anywhere")).generate(asked(5), **sampling)
    assert [(list(s.ids), s.finished) for s in found] == [(list(s.ids), s.finished) for s in plain]
    assert Steps.saved - saved >= len(found)


def test_what_is_drafted_needs_no_decoding_step(monkeypatch):
    engine, steps = engine_on(slots=20), []
    true_decode = rollout.Cache.decode
    monkeypatch.setattr(rollout.Cache, "decode", lambda *given: steps.append(1) or true_decode(*given))
    drafts = engine.generate(asked(), 1.0)
    assert len(steps) == max(s.length for s in drafts)
    steps.clear()
    offering(engine, made_up(drafts, "the same")).generate(asked(), 1.0)
    assert not steps


def test_a_tree_holds_what_drafts_have_in_common_once():
    """Behind the prompt 8 9 the tokens 1, 2, 4 and 6 are read: behind a last token nothing is drawn."""
    tree = Tree()
    assert tree.grow((8, 9), 3, ((1, 2, 3), (1, 2, 4, 5), (1, 2), (6, 7), (1, 2, 3))) == 1
    assert tree.ids == [8, 9, 1, 2, 4, 6] and tree.positions == [0, 1, 2, 3, 4, 2]
    assert tree.rows == [3, -1, -1, -1, -1, -1]
    assert tree.child == {(1, 1): 2, (2, 2): 3, (3, 4): 4, (1, 6): 5}
    assert tree.queries == [2, 1, 1, 1, 1] and tree.keys == [2, 3, 4, 5, 3]
    assert tree.key == [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 5]


@pytest.mark.parametrize(("made", "proposed"), [
    ((), (1, 2, 3)), ((1,), (2, 3)), ((1, 2, 3), ()), ((9, 9, 1), ()), ((1, 4), (6, 7, 8, 9, 10, 11, 12, 13)),
    ((*range(20, 40), 1, 4, 6, 7), ()), ((*range(40), *range(4, 12)), (12, 13, 0xD800, 5))])
def test_vllm_is_proposed_what_came_next_behind_the_last_8_tokens_of_a_draft(made, proposed):
    """A draft may hold any number, such as those that are no letters."""
    drafts = [array("i", ids) for ids in ((1, 2, 3), (1, 4, *range(6, 20)), (*range(14), 0xD800, 5), ())]
    assert follow(drafts, array("i", made)) == list(proposed)
    assert follow((), array("i", made)) == []


def run_config(out, *settings: str):
    return toy_config(out, "data.limit=6", "data.eval=null", "rollout.group_size=4", "steps=3", "optim.lr=1e-3",
                      "rollout.max_new_tokens=24", *settings, name="grpo_toy.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    ("prune.prompts={kind: pps, share: 0.5}",), ("rollout.until=informative", "rollout.max_rounds=2"),
    ("prune.completions={kind: topk, keep: 2}", "update.minibatches=2"),
    ("rollout.stop=['=']", "environment={file: toy/calculator.py, max_context: 256}")])
def test_a_run_with_drafts_is_the_run_without_and_goes_on_as_itself(settings, tmp_path):
    plain = weights(train.train(run_config(tmp_path / "plain", *settings)))
    cfg = run_config(tmp_path / "run", "rollout.drafts=true", "checkpoint.every=1", *settings)
    whole = weights(train.train(cfg))
    torch.testing.assert_close(whole, plain, rtol=1e-6, atol=1e-8)
    assert [line["rollout/tokens"] for line in steps_of(tmp_path / "run")] == [
        line["rollout/tokens"] for line in steps_of(tmp_path / "plain")]
    assert any(line.get("rollout/drafted", 0) > 0.1 for line in steps_of(tmp_path / "run"))
    assert not any("rollout/drafted" in line for line in steps_of(tmp_path / "plain"))
    cut = replace(cfg, out=str(tmp_path / "cut"))
    train.train(replace(cut, steps=2))
    resumed = weights(train.train(cut, resume="always"))
    assert all(torch.equal(resumed[name], p) for name, p in whole.items())
    last = [steps_of(tmp_path / name)[-1].get("rollout/drafted") for name in ("cut", "run")]
    assert last[0] == last[1]


@pytest.mark.parametrize("setting, message", [
    ("windows.tokens=8", "windows.tokens=8 must be null"),
    ("labels={kind: votes, most: 16}", "labels.kind=votes must be gold"),
    ("prune.prompts={kind: depo}", "prune.prompts.kind=depo must be none, bernoulli")])
def test_settings_that_do_not_go_with_drafts(setting, message, tmp_path):
    more = ["windows.in_flight=2", "windows.max_age=1"] * ("window" in setting)
    refuses(message, toy_config, tmp_path / "run", "model.dtype=float32", "rollout.drafts=true", setting, *more)


def test_the_keys_of_drafts_are_counted(tmp_path):
    counts = pytest.importorskip("leaves.fit.counts")
    cfg = run_config(tmp_path / "run", "model.dtype=float32", "rollout.drafts=true", "device=cpu")
    with_drafts = resolve_auto(cfg, TOY)
    shape = rollout.empty_model(TOY, torch.float32).shape
    parts, without = (counts.sampling_parts(c, shape) for c in (
        with_drafts, replace(with_drafts, rollout=replace(with_drafts.rollout, drafts=False))))
    assert parts["KV cache"] == 2 * without["KV cache"]
