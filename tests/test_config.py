"""Settings: what is wrong is named with its dotted path, what is right survives the round trip."""

import ast
import os
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Literal, get_args

import pytest
from conftest import PUBLISHED, ROOT

import config
import train
from config import ConfigError, load
from settings import kinds, rules
from settings import loader as settings
from settings.leaves import LEAVES as TABLE
from settings.leaves import settings_of

GOOD = {
    "steps": 3, "model": {"path": "m"}, "data": {"train": "t", "eval": "e"}, "optim": {"lr": 1e-3},
    "rollout": {"group_size": 4, "prompts_per_step": 6, "max_new_tokens": 8}, "pack": {"capacity": 520},
    "eval": {"max_new_tokens": 8},
}


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(config.yaml.safe_dump(GOOD))
    return path


def error_of(path: Path, overrides: str | list[str]) -> str:
    """The message for overrides, in a list or with " & " in between."""
    with pytest.raises(ConfigError) as error:
        load(path, overrides.split(" & ") if isinstance(overrides, str) else overrides)
    return str(error.value)


# What an override must be; of several the last.
MUST_BE = [(override, allowed) for allowed, overrides in {
    "a whole number, at least 1": ["steps=3.5", "steps=010", "steps=1:30", "steps=-010", "steps=2024-01-01"],
    "a whole number, at least 1, or all": ["checkpoint.keep=most", "checkpoint.keep=2.5"],
    "a finite number, above 0": ["optim.lr=fast", "optim.lr=1:30.5"],
    "a finite number, or null": ["loss.trust.dual=x"],
    "true or false": ["optim.offload=1"],
    "one of token, sequence, constant, sum": ["loss.normalize=word"],
    "one of all, attention, mlp": ["model.lora.targets=head"],
    "a section with rank, alpha, targets, path": ["model.lora=8"],
    "a section with path, dtype, products, attention, checkpoint_blocks, compile, logp_chunk, lora": ["model=m"],
    "at least 1": ["steps=0", "rollout.max_rounds=0", "windows.in_flight=0.5",
                   "advantage.kind=soft_value & advantage.samples=0"],
    "at least 1, or null": ["loss.tis_cap=0", "windows.max_age=0", "pack.window=0", "model.lora.rank=0"],
    "at least 1, or all": ["checkpoint.keep=0"],
    "at least 0": ["log.groups=-1", "optim.warmup_steps=-1", "eval.temperature=-1", "loss.entropy=-0.1"],
    "at least 0 (0: only before and after)": ["eval.every=-1"],
    "above 0": ["loss.trust={kind: binary_kl, divergence: 1} & loss.trust.divergence=0",
                "model.lora.alpha=0", "advantage.eps=0", "advantage.kind=decoupled & advantage.eps=0",
                "advantage.kind=soft_value & advantage.beta=0"],
    "above 0: greedy groups have no advantage": ["rollout.temperature=0"],
    "above 0, or null": ["rollout.cache_gib=0", "critic.lr=0", "advantage.kind=soft_value & advantage.residual=0",
                         "advantage.kind=gae & advantage.alpha=0"],
    "above 1": ["loss.trust={kind: binary_kl, divergence: 1} & loss.trust.cap=1"],
    "above 1, or null": ["loss.mask_ratio=1"],
    "at least 1, and left out unless rollout.until=informative": ["rollout.oversample=0.5"],
    "in [0, 1]": ["loss.trust.low=1.1", "advantage.kind=gae & advantage.lam=1.1"],
    "in [0, 1)": ["optim.beta2=1", "optim.beta1=-0.1"],
    "in (0, 1]": ["eval.top_p=0"],
    "in (0, 1)": ["prune.prompts.kind=greso & prune.prompts.target=0",
                  "prune.prompts.kind=greso & prune.prompts.target=1"],
    "in [-1, 1]": ["reward.custom_ended=2"], "in [-1e6, 1e6]": ["reward.accuracy=-2000000"],
    "in [0.05, 0.95], as GRESO bounds it": ["prune.prompts.kind=greso & prune.prompts.explore=1"],
    "in [0, 1): no weight makes up for a certain drop": [
        "prune.completions.kind=bottom & prune.completions.drop_prob=1",
        "prune.completions.kind=bernoulli & prune.completions.drop_prob=1",
        "prune.completions.kind=bernoulli & prune.completions.drop_prob=-0.1",
        "prune.prompts={kind: rank, max_skips: 1} & prune.prompts.drop_prob=1"],
    "at least 1: a prompt that is never rolled out is never measured again": [
        "prune.prompts={kind: rank, drop_prob: 0.5} & prune.prompts.max_skips=0"],
    "at least 1 and at most rollout.group_size; to train on all set prune.completions.kind=none": [
        "prune.completions.kind=topk & prune.completions.keep=0"],
}.items() for override in overrides]


@pytest.mark.parametrize(("overrides", "allowed"), MUST_BE)
def test_a_value_of_a_wrong_type_or_out_of_bounds_is_answered_with_all_that_is_allowed(good, overrides, allowed):
    key, _, value = overrides.split(" & ")[-1].partition("=")
    assert error_of(good, overrides) in (f"{key}={value} must be {allowed}", f"{key}='{value}' must be {allowed}")


NAMED = {
    "BERNOULLI": "prune.completions={kind: bernoulli, drop_prob: 0.5}", "PPS": "prune.completions={kind: pps, keep: 2}",
    "THINNED": "prune.prompts={kind: bernoulli, drop_prob: 0.5}", "WINDOW": "GAE & critic.lr=1 & windows.tokens=4",
    "FLIGHT": "windows.in_flight=3 & windows.max_age=2 & windows.tokens=4",
    "GAE": "advantage.kind=gae",
    "ONE": "advantage.kind=soft_value & rollout.group_size=1", "DECOUPLED": "advantage.kind=decoupled",
    "RESIDUAL": "advantage={kind: soft_value, residual: 1e-3}", "INFORMATIVE": "rollout.until=informative",
    "VLLM": "rollout.engine=vllm", "HUGE": "steps=1" + "0" * 400, "DEEP": "steps=" + "[" * 3000}


@pytest.mark.parametrize(("overrides", "message"), [
    ("HUGE", "0...0"), ("HUGE", " must be below 2**63"), ("DEEP", "[[[...[[["),
    ("loss.per=token", "unknown key 'loss.per': it is called 'loss.normalize' now"),
    ("loss={count: kept}", "unknown key 'loss.count': it is called 'loss.denominator' now"),
    ("prune.completions.kep=4", "unknown key 'prune.completions.kep'. Did you mean 'prune.completions.keep'?"),
    ("qqq=4", "unknown key 'qqq'. Valid keys: out, steps, model"),
    ("prune.kind=topk", "unknown key 'prune.kind'. Valid keys: prune.completions"),
    ("model.lora.r=8", "unknown key 'model.lora.r'. Valid keys: model.lora.rank"),
    ("data.columns={foo: x}", "unknown key 'data.columns.foo'. Valid keys: data.columns.question, data.columns.answer"),
    ("steps=true", "steps=True must be a whole number"), ("optim.lr=true", "optim.lr=True must be a finite number"),
    ("optim.lr=.nan", "optim.lr=nan must be a finite number"),
    ("loss.kl=.inf", "loss.kl=inf must be a finite number"),
    ("checkpoint.keep=null", "checkpoint.keep=None must be a whole number, at least 1, or all"),
    ("advantage.correction=true", "advantage.correction=True must be one of 0, 1"),
    ("data={dir: 3}", "data.dir=3 must be a text, or null"), ("data={train: 3}", "data.train=3 must be a text"),
    ("out=", "out=None must be a text"),
    ("rollout.stop=x", "rollout.stop='x' must be a list, each item a text, or null"),
    ("rollout.stop=[a, 1]", "rollout.stop[1]=1 must be a text"),
    ("data.template=x", "data.template='x' must be a mapping {name: anything}, or null"),
    ("reward.custom=x", "reward.custom='x' must be a finite number, in [-1e6, 1e6], or a mapping {name: "),
    ("reward.custom=1e308", "reward.custom='1e308' must be in [-1e6, 1e6], or a mapping {name: "),
    ("steps", "--set 'steps' must have the form setting=value"),
    ("steps=[a", "--set 'steps=[a': the value is not valid yaml: while parsing a flow sequence"),
    ("prune.completions={kind: topk, keep: 4, keep: 2}", "the value is not valid yaml: 'keep' is given twice in"),
    ("prune.completions={kind: topk, keep: 5}", "prune.completions.keep=5 must be in 1..4 (rollout.group_size); to"),
    ("prune.completions.kind=bernoulli", "missing key 'prune.completions.drop_prob' (a finite number, in [0, 1): no"),
    ("rollout.tensor_parallel=2", "rollout.tensor_parallel=2 must be left out, or 1, unless rollout.engine=vllm"),
    ("VLLM & model.dtype=float64", "model.dtype=float64 must be auto, float32 or bfloat16 with rollout."),
    ("VLLM & rollout.temperature=0.001", "rollout.temperature=0.001 must be at least 0.01 unless"),
    ("VLLM & eval.temperature=0.005", "eval.temperature=0.005 must be 0 or at least 0.01 unless"),
    ("loss={old_logp: engine, tis_cap: 2, trust: {kind: none}}", "loss.tis_cap=2.0 must be null with loss.trust.kind"),
    ("loss.old_logp=engine & loss.mask_ratio=2", "loss.old_logp=engine must be recompute with loss.mask_ratio=2.0"),
    ("PPS & loss.denominator=kept", "loss.denominator=kept must be all with prune.completions.kind=pps: its weights"),
    ("THINNED & loss.normalize=token", "loss.normalize=token must be sequence, constant or sum with prune.prompts.kin"),
    ("prune.prompts={kind: rank, drop_prob: 0.1, max_skips: 2}", "=0.1 must be 0 or enough to skip one of 6 (rollout."),
    ("prune.completions={kind: bottom, drop_prob: 0.2}", "=0.2 must be 0 or enough to drop one of 4 (rollout.group"),
    ("THINNED & INFORMATIVE", "rollout.until=informative must be offered or full with prune.prompts.kind=bernoulli"),
    ("rollout.until=full", "pack.budget=None must be set with rollout.until=full"),
    ("rollout.until=full & pack.budget=0", "pack.budget=0 must be in 1.."),
    ("rollout.until=full & pack.budget=124801", "pack.budget=124801 must be in 1..124800 tokens, all that"),
    ("model.lora.targets=mlp", "model.lora.targets=mlp must be left out, or all, unless model.lora.rank"),
    ("pack.capacity=519", "pack.capacity=519 must be at least 520 tokens, one sequence (data.max_prompt"),
    ("update.minibatches=4", "update.minibatches=4 must be a divisor of 6 (rollout.prompts_per_step)"),
    ("rollout.group_size=1", "rollout.group_size=1 must be at least 2"),
    ("PPS & update.redraw=true", "update.redraw=True must be false with one of update.epochs"),
    ("update={epochs: 2, redraw: true}", "kind=none must be bernoulli or pps with update.redraw=True: without chan"),
    ("reward.accuracy=0", "reward.accuracy=0.0 must be other than 0: no other component has"),
    ("loss.trust.dual=1.1", "loss.trust.dual=1.1 must be above 1 + loss.trust.high"),
    ("loss.kl_corrected=true", "loss.kl_corrected=True must be left out, or false, unless loss.kl: at 0 there"),
    ("loss.likelihood=0.1 & reward={accuracy: 0, tag_exact: 1}", "must be left out, or 0.0, unless reward.acc"),
    ("loss.likelihood=0.1 & THINNED", "loss.likelihood=0.1 must be 0.0 with prune.prompts.kind=bernoulli:"),
    ("loss.entropy=0.1 & THINNED", "loss.entropy=0.1 must be 0.0 with prune.prompts.kind=bernoulli: with loss.denomin"),
    ("prune={truncated: true, prompts: {kind: bernoulli, drop_prob: 0.5}}", "=True must be false with prune."),
    ("RESIDUAL", "loss.trust.kind=clip must be none with advantage.residual=0.001: only then is its gradient"),
    ("RESIDUAL & loss.trust.kind=none", "loss.normalize=sequence must be sum with advantage.residual=0.001"),
    ("reward.overlong=1", "reward.overlong_tokens=None must be set with reward.overlong, and null without"),
    ("reward.overlong_tokens=4", "reward.overlong_tokens=4 must be set with reward.overlong"),
    ("reward={overlong: 1, overlong_tokens: 9}", "reward.overlong_tokens=9 must be in 1..8 (rollout.max_new"),
    ("reward.custom=1", "reward.custom_file=None must be set with reward.custom, and null without"),
    ("eval.n=2", "eval.n=2 must be left out, or 1, unless eval.temperature: at 0"),
    ("model.compile=true & model.checkpoint_blocks=selective", "must be auto, none or all with model.compile"),
    ("rollout.differ_in=accuracy", "rollout.differ_in=accuracy must be left out, or reward, unless rollout.until"),
    ("rollout.differ_in=accuracy & INFORMATIVE & reward={accuracy: 0, wrong: -1}", "unless reward.accuracy: at 0"),
    ("DECOUPLED & INFORMATIVE", "rollout.until=informative must be offered with advantage.kind=decoupled: its scale"),
    ("advantage.kind=gae", "critic.lr=None must be above 0 with advantage.kind=gae"),
    ("GAE & critic={lr: 1, pretrain_steps: 3}", "critic.pretrain_steps=3 must be in 0..2, below"),
    ("advantage={kind: gae, alpha: 1, lam: 0.9} & critic.lr=1", "advantage.lam=0.9 must be left out with advantage"),
    ("GAE & advantage.bootstrap=true & critic.lr=1", "=true must be left out, or prev, unless windows.tokens: nothing"),
    ("GAE & critic.lr=1 & windows.tokens=9", "windows.tokens=9 must be in 1..8 (rollout.max_new"),
    ("windows.tokens=4", "advantage.kind=group_norm must be gae with windows.tokens=4: completions of one"),
    ("WINDOW & loss={normalize: token, likelihood: 0.1}", "loss.likelihood=0.1 must be 0.0 with windows.tokens=4: a s"),
    ("WINDOW & loss={trust: {kind: clip_sequence}, normalize: token}", "must be clip, clamp, total_variation, binary_"),
    ("WINDOW & prune.completions={kind: topk, keep: 2}", "=topk must be none with windows.tokens=4: an unfinished"),
    ("windows.in_flight=2", "windows.in_flight=2.0 must be left out, or 1.0, unless windows.max_age: no group may"),
    ("windows.max_age=1", "windows.max_age=1 must be null, or beside it either windows.in_flight above 1"),
    ("INFORMATIVE & windows.max_age=1 & windows.in_flight=2", "windows.max_age=1 must be null, or beside it either"),
    ("windows.max_age=1 & windows.in_flight=2", "windows.tokens=None must be in 1..8 with windows.in_flight above 1"),
    ("INFORMATIVE & windows.max_age=1 & windows.tokens=4", "windows.tokens=4 must be in 1..8 with windows.in_flight"),
    ("FLIGHT & windows.max_age=1", "windows.in_flight=3.0 must be at most 2, windows.max_age and 1: a step trains"),
    ("FLIGHT & windows.in_flight=1.1", "windows.in_flight=1.1 must be 1, or enough for one group more than 6"),
    ("FLIGHT & rollout.until=full & pack.budget=9", "rollout.until=full must be offered or informative with windows."),
    ("FLIGHT & labels.kind=votes", "windows.tokens=4 must be null with labels.kind=votes: unfinished answers do not"),
    ("INFORMATIVE & windows.max_age=1 & labels.kind=votes", "labels.kind=votes must be gold with windows.max_age=1"),
    ("FLIGHT & advantage.kind=soft_value", "advantage.kind=soft_value must be another kind with windows.max_age: V*"),
    ("FLIGHT & rollout.stop=[x]", "rollout.stop=['x'] must be null with windows.tokens=4: a text that lies"),
    ("ONE & INFORMATIVE", "rollout.until=informative must be offered or full with rollout.group_size=1: the rewards"),
    ("ONE & BERNOULLI", "prune.completions.kind=bernoulli must be none with rollout.group_size=1: there is nothing"),
])
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(good, overrides, message):
    for name, text in NAMED.items():
        overrides = overrides.replace(name, text)
    said = error_of(good, overrides)
    assert message in said and len(said) < 700 and "\n" not in said


def leaves(section, path=""):
    """(dotted name, type) of every setting; of a section with kinds one, whose type is the union."""
    for name, kind in settings.hints(section).items():
        yield from leaves(kind, f"{path}{name}.") if is_dataclass(kind) else [(path + name, kind)]


LEAVES = dict(leaves(config.with_leaves(TABLE)))
UNIONS = {path: settings.choices(kind) for path, kind in LEAVES.items() if settings.choices(kind)}


@pytest.mark.parametrize("path", UNIONS)
def test_kinds_are_named_and_a_key_of_another_kind_is_said_to_belong_to_it(good, path):
    options, listed = UNIONS[path], ", ".join(UNIONS[path])
    assert len(options) == len(get_args(LEAVES[path]))
    default = next(iter(options))  # the file may have what it needs
    assert config.flatten(load("grpo_toy.yaml"))[f"{path}.kind"] == default
    for wrong in ("foo", "[foo]", "5"):
        assert f" must be one of {listed}" in error_of(good, f"{path}.kind={wrong}")
    assert error_of(good, f"{path}=foo") == f"{path}='foo' must be a section with kind, one of {listed}"
    for kind, option in options.items():
        assert next(iter(settings.hints(option).items())) == ("kind", Literal[kind])
        needed = [f.name for f in fields(option) if f.default is MISSING]
        if needed and kind != default:
            assert error_of(good, f"{path}.kind={kind}").startswith(f"missing key '{path}.{needed[0]}' (")
        for key in settings.hints(LEAVES[path]).keys() - settings.hints(option).keys():
            said = error_of(good, [f"{path}={{kind: {kind}, {key}: text}}"])
            start, owners, end = re.fullmatch(rf"(.+) belongs to ([\w, ]+); this is {kind}: (.+)", said).groups()
            assert (start, end) == (f"{path}.{key}", f"leave {path}.{key}='text' out, or set {path}.kind")
            assert owners.split(", ") == [name for name, other in options.items() if key in settings.hints(other)]


@pytest.mark.parametrize("key", ["steps", "model.path", "rollout.group_size", "rollout", "optim.lr"])
def test_a_missing_setting_is_named(good, key):
    raw = config.yaml.safe_load(good.read_text())
    section = raw[key.split(".")[0]] if "." in key else raw
    del section[key.rsplit(".", maxsplit=1)[-1]]
    good.write_text(config.yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=f"missing key '{key}' .*; it has no default"):
        load(good)


def write(folder, **texts):
    """Config files in a folder, by name: child="base: good.yaml" is child.yaml."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_base_may_have_a_base_and_every_key_of_it_can_be_changed(good):
    write(good.parent, child="base: good.yaml\nrollout: {group_size: 8}\noptim: {lr: 1}\n",
          grandchild="base: child.yaml\nrollout: {max_new_tokens: 6}\n",
          last="base: grandchild.yaml\noptim: {lr: 2}\n")
    cfg = load(good.parent / "child.yaml")
    assert (cfg.rollout.group_size, cfg.rollout.prompts_per_step, cfg.out) == (8, 6, "runs/child")
    cfg = load(good.parent / "last.yaml")
    assert (cfg.rollout.group_size, cfg.rollout.max_new_tokens, cfg.optim.lr, cfg.out) == (8, 6, 2, "runs/last")


def test_of_a_list_of_bases_the_later_lies_above_and_a_shared_base_is_a_layer_once(good):
    write(good.parent, low="base: good.yaml\nsteps: 1\nseed: 1\n", left="base: low.yaml\nseed: 2\nout: left\n",
          right="base: low.yaml\nout: right\n", both="base: [left.yaml, right.yaml]\n")
    cfg = config.load(good.parent / "both.yaml")
    assert (cfg.steps, cfg.seed, cfg.out) == (1, 2, "right")


def test_of_several_configs_each_lies_with_its_bases_over_those_before_it(good):
    write(good.parent, low="base: good.yaml\nseed: 1\n", high="steps: 5\nseed: 2\n", named="out: mine\n")
    low, high, named = (good.parent / f"{name}.yaml" for name in ("low", "high", "named"))
    cfg = load([low, high], ["steps=7"])
    assert (cfg.steps, cfg.seed, cfg.out) == (7, 2, "runs/low_high")
    assert load([high, low]).steps == 3 and load([high, low, high]).steps == 5
    assert load([low, named, high]).out == "mine"
    with pytest.raises(ConfigError, match="config 'hihg.yaml' not found, neither as given nor in"):
        load([low, "hihg.yaml"])


def test_a_base_stands_beside_its_file_or_among_the_shipped_configs(good, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write(good.parent, mine="base: cppo_toy.yaml\nsteps: 7\n", up="base: ../good.yaml\n")
    assert load(good.parent / "mine.yaml").prune.completions == kinds.TopK(keep=4)
    write(good.parent, cppo_toy="base: good.yaml\n")
    assert load(good.parent / "mine.yaml").prune.completions == kinds.KeepAll()
    write(tmp_path / "elsewhere", down="base: ../good.yaml\n")
    assert load("down.yaml").steps == 3
    for base in ("5", "nowhere.yaml"):
        write(good.parent, mine=f"base: {base}\n")
        with pytest.raises(ConfigError, match=f"config '{base}' .base of .*mine.yaml. not found, neither as given nor"):
            load(good.parent / "mine.yaml")
    write(good.parent, mine="base: cppo_toi.yaml\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'cppo_toy.yaml'\?"):
        load(good.parent / "mine.yaml")


@pytest.mark.parametrize(("texts", "circle"), [
    ({"a": "base: a.yaml"}, "a.yaml -> .*a.yaml"),
    ({"a": "base: b.yaml", "b": "base: ../x/a.yaml"}, "a.yaml -> .*b.yaml -> .*a.yaml"),
    ({"a": "base: b.yaml", "b": "base: c.yaml", "c": "base: b.yaml"}, "a.yaml -> .*b.yaml -> .*c.yaml -> .*b.yaml"),
])
def test_a_circle_of_bases_is_named(tmp_path, texts, circle):
    (tmp_path / "x").mkdir()
    write(tmp_path / "x", **texts)
    with pytest.raises(ConfigError, match=f"base=.* leads in a circle: .*{circle}; one of them must have no base"):
        load(tmp_path / "x" / "a.yaml")


def test_a_key_given_twice_is_named_with_its_file_and_line(good):
    write(good.parent, twice="base: good.yaml\nrollout:\n  slots: 4\n  group_size: 8\n  slots: 8\n")
    with pytest.raises(ConfigError, match=r"twice.yaml is not valid yaml: 'slots' is given twice in .*line 5, column"):
        load(good.parent / "twice.yaml")
    write(good.parent, twice="base: good.yaml\nadvantage: {kind: gae}\n"
                             "optim: &same {lr: 2}\ncritic: {<<: *same, lr: 1}\n")
    assert load(good.parent / "twice.yaml").critic.lr == 1


def test_a_layer_that_names_another_kind_starts_its_section_empty(good):
    write(good.parent, topk="base: good.yaml\nprune: {completions: {kind: topk, keep: 2, scope: batch}}\n",
          pps="base: topk.yaml\nprune: {completions: {kind: pps, keep: 3}}\n",
          same="base: topk.yaml\nprune: {completions: {kind: topk, keep: 3}}\n",
          gae="base: good.yaml\nadvantage: {kind: gae, lam: 0.9}\nrollout: {group_size: 2}\ncritic: {lr: 1}\n",
          eps="base: good.yaml\nadvantage: {eps: 1}\n", other="base: eps.yaml\nadvantage: {kind: decoupled}\n")
    folder = good.parent
    assert load(folder / "pps.yaml").prune.completions == kinds.Pps(keep=3)
    assert load(folder / "same.yaml").prune.completions == kinds.TopK(keep=3, scope="batch")
    assert load(folder / "topk.yaml", ["prune.completions.keep=1"]).prune.completions.scope == "batch"
    assert load(folder / "topk.yaml", ["prune.completions.kind=none"]).prune == config.Prune()
    assert load(folder / "topk.yaml", ["prune.completions.kind=topk"]).prune.completions.keep == 2
    assert load(folder / "gae.yaml", ["advantage.kind=centred", "critic.lr=null"]).advantage == kinds.Centred()
    with pytest.raises(ConfigError, match="missing key 'prune.completions.keep'"):
        load(folder / "topk.yaml", ["prune.completions.kind=pps"])
    kind, keep = "prune.completions.kind=pps", "prune.completions.keep=3"  # overrides are one layer in any order
    for overrides in ([kind, keep], [keep, kind], ["prune.completions={kind: pps, keep: 3}"],
                      ["prune.completions={kind: bottom, drop_prob: 0.5}", "prune.completions={kind: pps, keep: 3}"]):
        assert load(folder / "topk.yaml", overrides).prune.completions == kinds.Pps(keep=3)
    # The kind that a config has without naming it counts as named.
    assert load(folder / "eps.yaml", ["advantage.kind=group_norm"]).advantage.eps == 1
    assert load(folder / "other.yaml").advantage == kinds.Decoupled()


def test_overrides_win_in_order_and_yaml_reads_their_values(good):
    cfg = load(good, ["optim.lr=1e-6", "out=a", "out=b", "data.system_prompt=x: y", "loss.trust.dual=null",
                      "prune={truncated: yes}", "optim={offload: true, beta1: 010.5e-2, beta2: 0}",
                      "rollout.slots=1_000", "loss.trust={low: 1, high: 0}", "eval.top_p=1"])
    assert (cfg.optim.lr, cfg.out, cfg.data.system_prompt, cfg.loss.trust.dual) == (1e-6, "b", "x: y", None)
    assert (cfg.prune.truncated, cfg.optim.offload, cfg.optim.beta1, cfg.rollout.slots) == (True, True, 0.105, 1000)


@pytest.mark.parametrize("text", ["010", "1e3", "yes", "null", "3", "1:30", "2024-01-01", "[a", "{a: b}", "'x'", "a=b",
                                  " a # b", "~"])
def test_a_setting_that_is_a_text_is_taken_as_it_is_written(good, text):
    cfg = load(good, [f"out={text}", f"data.train={text}", f"model.path={text}", f"data.dir={text}"])
    assert (cfg.out, cfg.data.train, cfg.model.path) == (os.path.expanduser(text), text, text)
    assert cfg.data.dir == (None if text == "null" else text)
    write(good.parent, dumped=config.dump(cfg))
    assert load(good.parent / "dumped.yaml") == cfg


def test_numbers_of_yaml_1_1_are_texts_in_a_file(good):
    write(good.parent, texts="base: good.yaml\nout: 010\ndata: {train: 1:30, eval: 2024-01-01, dir: 1e3}\n")
    cfg = load(good.parent / "texts.yaml", ["data.system_prompt=\"ünïcode: 'a' #b\""])
    assert (cfg.out, cfg.data.train, cfg.data.eval, cfg.data.dir) == ("010", "1:30", "2024-01-01", "1e3")
    write(good.parent, dumped=config.dump(cfg), wrong="base: good.yaml\nsteps: 010\n")
    assert load(good.parent / "dumped.yaml") == cfg
    assert error_of(good.parent / "wrong.yaml", []) == "steps='010' must be a whole number, at least 1"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_loads_at_toy_size_and_keeps_its_kinds(name):
    """Five have sizes that do not fit: their toy configs lie over both files."""
    of, _, _ = name.rpartition("_")
    if of in ("dapo", "depo", "dppo_listed", "tppo", "vapo"):
        files = [path.name for path in settings.read_layers(
            settings.locate(f"{of}_toy.yaml", Path(), config.CONFIGS), config.CONFIGS)]
        assert name in files and files[-2:] == ["toy.yaml", f"{of}_toy.yaml"]
        cfg = load(f"{of}_toy.yaml")
    else:
        cfg = load([name, "toy.yaml"])
        assert cfg.out == f"runs/{Path(name).stem}_toy"
    published, small = config.flatten(load(name)), config.flatten(cfg)
    assert {key for key in published if key.endswith("kind")} == {key for key in small if key.endswith("kind")}
    assert all(small[key] == value for key, value in published.items() if key.endswith("kind"))
    assert small["model.path"] == "toy/model" and small["data.limit"] == 160


def test_the_tables_of_rules_name_real_settings_and_their_values():
    """A misspelt choice would never be made, and its rule never be broken."""
    from leaves.critic.settings import ONLY_WITH as CRITIC_ONLY_WITH
    from leaves.critic.settings import Critic
    words = {f"{path}.{name}": get_args(kind) for path, options in UNIONS.items() for option in options.values()
             for name, kind in settings.hints(option).items()}
    words |= {key: get_args(kind) + ("true", "false") * (bool in (kind, *get_args(kind)))
              for key, kind in LEAVES.items()}
    words |= {f"{path}.kind": tuple(options) for path, options in UNIONS.items()}
    words |= {"rollout.group_size": ("1",), "loss.likelihood": ("0.0",), "loss.entropy": ("0.0",)}
    for table in (rules, *map(settings_of, TABLE)):
        only_with, requires = getattr(table, "ONLY_WITH", {}), getattr(table, "REQUIRES", {})
        demands = [f"{key}={allowed}" for required in requires.values() for key, allowed, _ in required]
        for choice in (part for made in [*only_with, *requires, *demands] for part in made.split(" without ")):
            key, _, values = choice.partition("=")
            null = {"null"} if type(None) in words[key] else set()
            assert {word for word in re.split(", | or ", values) if word} <= {*words[key]} | null, choice
        assert {entry.partition(":")[0] for used in only_with.values() for entry in used} <= words.keys()
    critic = {f"critic.{field.name}" for field in fields(Critic)}
    assert set(CRITIC_ONLY_WITH["advantage.kind=gae"]) == critic
    assert rules.is_chosen({"loss.trust.kind": "clip"}, "loss.trust.kind=clamp or clip")
    assert not rules.is_chosen({"loss.trust.kind": "clip"}, "loss.trust.kind=clamp or clip_sequence")
    assert rules.is_chosen({"windows.tokens": 4}, "windows.tokens") and not rules.is_chosen({}, "windows.tokens")
    assert not rules.is_chosen({"loss.kl": 0.0}, "loss.kl") and rules.is_chosen({"loss.kl": 0.1}, "loss.kl")
    for loss, chosen in ({"a": 1}, True), ({"a": 1, "b": 1}, False), ({"a": 1, "c": 1}, False), ({"b": 1}, False):
        assert rules.is_chosen(loss, "a without b without c") == chosen
    assert rules.is_chosen({"loss.tis_cap": None}, "loss.tis_cap=null")
    assert not rules.is_chosen({"loss.tis_cap": 2.0}, "loss.tis_cap=null")


def test_a_rule_of_a_leaf_stands_beside_the_cores_of_the_same_choice(monkeypatch):
    table = {"prune.completions.kind=bernoulli or pps": [("seed", "1", "odd")]}
    monkeypatch.setattr(rules.leaves, "stated", lambda cfg, name: [table] * (name == "REQUIRES"))
    for sets, why in ([["loss.denominator=kept"], "loss.denominator=kept must be all"], [[], "seed=0 must be 1 with"]):
        with pytest.raises(ConfigError, match=why):
            load("dppo_toy.yaml", sets)


def test_settings_imports_nothing_of_the_project():
    for path in Path(settings.__file__).parent.glob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        names = {node.module for node in tree if isinstance(node, ast.ImportFrom)}
        ours = {name for name in names if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()}
        assert not {name for name in ours if not name.startswith("settings")}, path.name


def test_files_that_are_no_config_are_named(tmp_path):
    said = error_of("cppo_toi.yaml", [])
    assert said.startswith("config 'cppo_toi.yaml' not found") and said.endswith("Did you mean 'cppo_toy.yaml'?")
    for text, message in (("a: [", "is not valid yaml"), ("- a", "'setting: value' lines"), ("", "must hold 'setting")):
        write(tmp_path, bad=text)
        assert message in error_of(tmp_path / "bad.yaml", [])


@pytest.mark.parametrize("name", ["grpo_toy", "cppo_toy", "vapo_math", "apo_gsm8k"])
def test_a_shown_config_loads_as_the_same_and_says_what_is_not_at_its_default(name, tmp_path):
    resolved = pytest.importorskip("leaves.page.show").resolved
    (tmp_path / "mine.py").write_text("")
    cfg = load(f"{name}.yaml", [
        "data.system_prompt=one\n  two: '\"", "rollout.temperature=0.7", "rollout.stop=['\n\n', '#']",
        "data.columns={question: prompt}", "reward.custom={tested: 1, short: 0.1}",
        f"reward.custom_file={tmp_path / 'mine.py'}"])
    shown = resolved(cfg)
    (tmp_path / "shown.yaml").write_text(shown)
    assert load(tmp_path / "shown.yaml") == cfg
    lines = [line for line in shown.splitlines() if not re.fullmatch(r" *\w+:( +#.*)?", line)]
    keys = list(config.flatten(cfg))
    assert [line.split(":")[0].strip() for line in lines] == [key.rpartition(".")[2] for key in keys]
    marked = {key for key, line in zip(keys, lines, strict=True) if "# <- " in line}
    changed = {"data.system_prompt", "rollout.temperature", "rollout.stop", "data.columns", "reward.custom",
               "reward.custom_file"}
    assert changed <= marked and not marked & {"seed", "loss.trust.dual", "pack.window"}
    assert ("advantage.kind" in marked) == (name in ("vapo_math", "apo_gsm8k"))
    assert ("prune.completions.kind" in marked) == (name == "cppo_toy")
    assert "  temperature: 0.7                        # <- 1.0  divides the logits" in shown


def test_the_command_shows_a_config_and_runs_nothing(tmp_path, monkeypatch, command, capsys):
    resolved = pytest.importorskip("leaves.page.show").resolved
    monkeypatch.chdir(tmp_path)
    assert command(train, "--config", "grpo_toy.yaml", "--show", "--set", "steps=7") == 0
    assert capsys.readouterr() == (resolved(load("grpo_toy.yaml", ["steps=7"])) + "\n", "")
    assert not any(tmp_path.iterdir())


def test_cppos_second_release_trains_as_its_scripts_say():
    """lzhxmu/CPPO, cppo_verl/recipe/cppo at rate 0.75; its policy loss takes verl's default, the mean over tokens."""
    said = {"rollout.prompts_per_step": 8 / (1 - 0.75), "rollout.group_size": 16, "rollout.max_new_tokens": 2048,
            "prune.completions.kind": "topk", "prune.completions.scope": "batch",
            "prune.completions.keep": 16 * (1 - 0.75), "update.epochs": 2, "update.minibatches": 1,
            "loss.trust.kind": "clip", "loss.trust.low": 0.2, "loss.trust.high": 0.2, "loss.trust.dual": 10,
            "loss.normalize": "token", "loss.denominator": "kept", "loss.kl": 0.04, "loss.entropy": 0,
            "advantage.correction": 1, "advantage.eps": 1e-6, "steps": 7473 // 32, "optim.lr": 1e-6,
            "optim.schedule": "cosine", "optim.weight_decay": 1e-4, "optim.clip_norm": 1, "optim.warmup_steps": 23}
    flat = config.flatten(load("cppo_gsm8k_verl.yaml"))
    assert {key: flat[key] for key in said} == said
