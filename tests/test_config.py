"""Settings: what is wrong is named with its dotted path, what is right survives the round trip."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
from conftest import ROOT

import config
from config import ConfigError, load
from page.show import resolved
from settings import kinds, rules
from settings import loader as settings

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


@pytest.mark.parametrize(("overrides", "message"), [
    (["prune.completions.kep=4"], r"unknown key 'prune.completions.kep'. Did you mean 'prune.completions.keep'\?"),
    (["qqq=4"], "unknown key 'qqq'. Valid keys: out, steps, model"),
    (["prune.kind=topk"], "unknown key 'prune.kind'. Valid keys: prune.completions"),
    (["steps=many"], "steps='many' must be a whole number"),
    (["steps=1" + "0" * 400], r"steps=10+\.\.\.0+ must be below 2\*\*63"),
    (["steps=2.5"], "steps=2.5 must be a whole number"),
    (["steps=true"], "steps=True must be a whole number"),
    (["optim.lr=fast"], "optim.lr='fast' must be a finite number"),
    (["optim.lr=true"], "optim.lr=True must be a finite number"),
    (["optim.lr=.nan"], "optim.lr=nan must be a finite number"),
    (["loss.kl=.inf"], "loss.kl=inf must be a finite number"),
    (["loss.dual_clip=x"], "loss.dual_clip='x' must be a finite number or null"),
    (["checkpoint.keep=0"], "checkpoint.keep=0 must be at least 1, or all"),
    (["checkpoint.keep=null"], "checkpoint.keep=None must be a whole number or all"),
    (["checkpoint.keep=most"], "checkpoint.keep='most' must be a whole number or all"),
    (["log.groups=-1"], "log.groups=-1 must be at least 0"),
    (["prune.completions.scope=batch"],
     "prune.completions.scope belongs to topk and pps; this is none: leave prune.completions.scope=batch out, or set "
     "prune.completions.kind"),
    (["prune.completions={kind: bernoulli, drop_prob: 0.5, scope: batch}"],
     "prune.completions.scope belongs to topk and pps; this is bernoulli"),
    (["prune.completions.kind=foo"], "prune.completions.kind='foo' must be one of none, topk, bottom, bernoulli, pps"),
    (["prune.prompts.kind=[a]"], r"prune.prompts.kind=\['a'\] must be one of none, bernoulli, rank, greso"),
    (["advantage=centred"], "advantage='centred' must be a section with kind, one of group_norm, centred, leave_one"),
    (["prune={completions: 4}"], "prune.completions=4 must be a section with kind, one of none, topk"),
    (["rollout.tensor_parallel=2"], "rollout.tensor_parallel=2 must be left out, or 1, unless rollout.engine=vllm"),
    (["rollout.cache_gib=2"], "rollout.cache_gib=2.0 must be left out, or null, unless rollout.engine=vllm"),
    (["rollout.engine=vllm", "rollout.cache_gib=0"], "rollout.cache_gib=0.0 must be above 0, or null"),
    (["rollout.engine=vllm", "model.dtype=float64"], "model.dtype=float64 must be auto, float32 or bfloat16 with"),
    (["loss.tis_cap=0"], "loss.tis_cap=0.0 must be at least 1, or null"),
    (["rollout.engine=vllm", "rollout.temperature=0.001"], "rollout.temperature=0.001 must be at least 0.01 unless"),
    (["loss.mask_ratio=1"], "loss.mask_ratio=1.0 must be above 1, or null"),
    (["loss.old_logp=engine", "loss.tis_cap=2"], "loss.old_logp=engine must be recompute with loss.tis_cap=2.0: a"),
    (["loss.old_logp=engine", "loss.mask_ratio=2"], "loss.old_logp=engine must be recompute with loss.mask_ratio=2.0"),
    (["model=m"], "model='m' must be a section with path, dtype"),
    (["loss.per=word"], "loss.per='word' must be one of token, sequence, constant"),
    (["advantage.correction=true"], "advantage.correction=True must be one of 0, 1"),
    (["data={dir: 3}"], "data.dir=3 must be a text or null"),
    (["data={train: 3}"], "data.train=3 must be a text"),
    (["out="], "out=None must be a text"),
    (["steps=010"], "steps='010' must be a whole number"),
    (["steps=1:30"], "steps='1:30' must be a whole number"),
    (["steps=-010"], "steps='-010' must be a whole number"),
    (["optim.lr=1:30.5"], "optim.lr='1:30.5' must be a finite number"),
    (["steps=2024-01-01"], "steps='2024-01-01' must be a whole number"),
    (["steps"], "--set 'steps' must have the form setting=value"),
    (["steps=[a"], r"--set 'steps=\[a': the value is not valid yaml: while parsing a flow sequence"),
    (["prune.completions={kind: topk, keep: 4, keep: 2}"], "the value is not valid yaml: 'keep' is given twice in"),
    (["prune.completions={kind: topk, keep: 5}"],
     r"prune.completions.keep=5 must be in 1..4 \(rollout.group_size\); to train on all set prune.completions.kind"),
    (["prune.completions={kind: topk, keep: 0}"],
     "prune.completions.keep=0 must be at least 1 and at most rollout.group_size; to train on"),
    (["prune.completions={kind: pps, keep: 5}"], r"prune.completions.keep=5 must be in 1..4"),
    (["prune.completions.kind=topk"],
     r"missing key 'prune.completions.keep' \(a whole number, at least 1 and at most rollout.group_size"),
    (["prune.completions.kind=pps"],
     r"missing key 'prune.completions.keep' \(a whole number, at least 1 and at most rollout.group_size"),
    (["prune.completions.kind=bernoulli"],
     r"missing key 'prune.completions.drop_prob' \(a finite number, in \[0, 1\): no weight makes up for .*no default"),
    (["prune.completions={kind: bottom, drop_prob: 1}"], r"prune.completions.drop_prob=1.0 must be in \[0, 1\)"),
    (["prune.completions={kind: bernoulli, drop_prob: 1}"], r"drop_prob=1.0 must be in \[0, 1\): no weight makes up"),
    (["prune.completions={kind: bernoulli, drop_prob: -0.1}"], r"prune.completions.drop_prob=-0.1 must be in \[0, 1\)"),
    (["prune.completions={kind: bernoulli, drop_prob: 0.5, keep: 2}"],
     "prune.completions.keep belongs to topk, pps and pods; this is bernoulli: leave prune.completions.keep=2 out"),
    (["prune.completions={kind: pps, keep: 2, drop_prob: 0.5}"],
     "prune.completions.drop_prob belongs to bottom and bernoulli; this is pps"),
    (["prune.completions={kind: pps, keep: 2}", "loss.count=kept"],
     "loss.count=kept must be all with prune.completions.kind=pps: its weights restore the full batch"),
    (["prune.completions={kind: bernoulli, drop_prob: 0.5}", "loss.count=kept"], "loss.count=kept must be all with"),
    (["prune.completions.keep=2"], "prune.completions.keep belongs to topk, pps and pods; this is none"),
    (["prune.prompts.kind=bernoulli"], r"missing key 'prune.prompts.drop_prob' \(a finite number, in \[0, 1\)"),
    (["prune.prompts={kind: rank, drop_prob: 1, max_skips: 1}"], r"prune.prompts.drop_prob=1.0 must be in \[0, 1\)"),
    (["prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 0}"],
     "prune.prompts.max_skips=0 must be at least 1: a prompt that is never rolled out is never measured again"),
    (["prune.prompts={kind: greso, drop_prob: 0.5}"], "prune.prompts.drop_prob belongs to bernoulli and rank; this is"),
    (["prune.prompts.max_skips=2"], "prune.prompts.max_skips belongs to rank; this is none"),
    (["prune.prompts={kind: greso, explore: 1}"], r"prune.prompts.explore=1.0 must be in \[0.05, 0.95\]"),
    (["prune.prompts={kind: greso, target: 0}"], r"prune.prompts.target=0.0 must be in \(0, 1\)"),
    (["prune.prompts={kind: greso, target: 1}"], r"prune.prompts.target=1.0 must be in \(0, 1\)"),
    (["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "loss.per=token"],
     "loss.per=token must be sequence, constant or sum with prune.prompts.kind=bernoulli and loss.count=all: a mean"),
    (["prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 2}", "loss.per=token"],
     "loss.per=token must be sequence, constant or sum with prune.prompts.kind=rank and loss.count=all"),
    (["prune.prompts={kind: rank, drop_prob: 0.1, max_skips: 2}"],
     r"prune.prompts.drop_prob=0.1 must be 0 or enough to skip one of 6 \(rollout.prompts_per_step\)"),
    (["prune.completions={kind: bottom, drop_prob: 0.2}"],
     r"prune.completions.drop_prob=0.2 must be 0 or enough to drop one of 4 \(rollout.group_size\)"),
    (["prune.completions.kind=bottom"], "missing key 'prune.completions.drop_prob'"),
    (["prune.prompts={kind: rank, drop_prob: 0.5}"], "missing key 'prune.prompts.max_skips' .* at least 1: a prompt"),
    (["prune.prompts.target=0.5"], "prune.prompts.target belongs to greso; this is none"),
    (["rollout.until=full", "pack.budget=124801"], "pack.budget=124801 must be in 1..124800 tokens, all that"),
    (["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "loss.count=kept"], "loss.count=kept must be all with"),
    (["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "rollout.until=informative"],
     "rollout.until=informative must be offered or full with prune.prompts.kind=bernoulli"),
    (["rollout.max_rounds=0"], "rollout.max_rounds=0 must be at least 1"),
    (["rollout.until=full"], "pack.budget=None must be set with rollout.until=full"),
    (["pack.budget=100"], "pack.budget=100 must be left out, or null, unless rollout.until=full"),
    (["rollout.until=full", "pack.budget=0"], "pack.budget=0 must be in 1.."),
    (["pack.window=0"], "pack.window=0 must be at least 1, or null"),
    (["model.lora.rank=0"], "model.lora.rank=0 must be at least 1, or null"),
    (["model.lora=8"], "model.lora=8 must be a section with rank, alpha, targets, path"),
    (["model.lora.r=8"], "unknown key 'model.lora.r'. Valid keys: model.lora.rank"),
    (["model.lora.alpha=16"], "model.lora.alpha=16.0 must be left out, or 32.0, unless model.lora.rank"),
    (["model.lora.targets=mlp"], "model.lora.targets=mlp must be left out, or all, unless model.lora.rank"),
    (["model.lora.path=configs"], "configs must be left out, or null, unless model.lora.rank"),
    (["model.lora={rank: 8, alpha: 0}"], "model.lora.alpha=0.0 must be above 0"),
    (["model.lora={rank: 8, targets: head}"], "model.lora.targets='head' must be one of all, attention, mlp"),
    (["data.limit=0"], "data.limit=0 must be at least 1, or null"),
    (["pack.capacity=519"], r"pack.capacity=519 must be at least 520 tokens, one sequence \(data.max_prompt"),
    (["update.minibatches=4"], r"update.minibatches=4 must be a divisor of 6 \(rollout.prompts_per_step\)"),
    (["rollout.group_size=1"], "rollout.group_size=1 must be at least 2"),
    (["rollout.temperature=0"], "rollout.temperature=0.0 must be above 0"),
    (["optim.warmup_steps=-1"], r"optim.warmup_steps=-1 must be at least 0"),
    (["reward.accuracy=0"], "reward.accuracy=0.0 must be other than 0: no other component has"),
    (["loss.dual_clip=1.1"], r"loss.dual_clip=1.1 must be above 1 \+ loss.clip_high"),
    (["loss.trust=clamp", "loss.dual_clip=10"], "loss.dual_clip=10.0 must be left out, or null, unless loss.trust"),
    (["loss.trust=none", "loss.clip_low=0.1"], "loss.clip_low=0.1 must be left out, or 0.2, unless loss.trust=clip"),
    (["loss.trust=total_variation"], "loss.divergence=None must be above 0 with loss.trust=total_var"),
    (["loss.divergence=0.1"], "loss.divergence=0.1 must be left out, or null, unless loss.trust=total_variation"),
    (["loss.ratio_cap=5"], "loss.ratio_cap=5.0 must be left out, or 20.0, unless loss.trust=total_variation or b"),
    (["loss.likelihood=0.1", "reward={accuracy: 0, tag_exact: 1}"], "loss.likelihood=0.1 must be 0 unless reward.acc"),
    (["loss.likelihood=0.1", "prune.prompts={kind: bernoulli, drop_prob: 0.5}"],
     "loss.likelihood=0.1 must be 0 with prune.prompts.kind=bernoulli and loss.count=all: a mean over all tokens"),
    (["advantage.residual=1e-3"], "advantage.residual belongs to soft_value; this is group_norm"),
    (["advantage={kind: soft_value, residual: 1e-3}"],
     "loss.trust=clip must be none with advantage.residual=0.001: only then is its gradient"),
    (["advantage={kind: soft_value, residual: 1e-3}", "loss.trust=none"],
     "loss.per=sequence must be sum with advantage.residual=0.001"),
    (["advantage={kind: soft_value, residual: 0}"], "advantage.residual=0.0 must be above 0, or null"),
    (["advantage={kind: soft_value, beta: 0}"], "advantage.beta=0.0 must be above 0"),
    (["advantage={kind: soft_value, samples: 0}"], "advantage.samples=0 must be at least 1"),
    (["reward.overlong=1"], "reward.overlong_tokens=None must be set with reward.overlong, and null without"),
    (["reward.overlong_tokens=4"], "reward.overlong_tokens=4 must be set with reward.overlong"),
    (["reward={overlong: 1, overlong_tokens: 9}"], r"reward.overlong_tokens=9 must be in 1..8 \(rollout.max_new"),
    (["reward.custom=1"], "reward.custom_file=None must be set with reward.custom, and null without"),
    (["reward={custom: 1, custom_file: x.py, custom_ended: 2}"], "reward.custom_ended=2.0 must be in"),
    (["eval.n=2"], "eval.n=2 must be 1 at eval.temperature=0: greedy answers"),
    (["eval.temperature=-1"], "eval.temperature=-1.0 must be at least 0"),
    (["model.compile=true", "model.checkpoint_blocks=selective"],
     "model.checkpoint_blocks=selective must be auto, none or all with model.compile=true"),
    (["eval={temperature: 0.005}", "rollout.engine=vllm"], "eval.temperature=0.005 must be 0 or at least 0.01 unless"),
    (["eval={top_p: 0}"], r"eval.top_p=0.0 must be in \(0, 1\]"),
    (["rollout.differ_in=accuracy"], "rollout.differ_in=accuracy must be left out, or reward, unless rollout.until"),
    (["rollout.differ_in=accuracy", "rollout.until=informative", "reward={accuracy: 0, wrong: -1}"],
     "rollout.differ_in=accuracy must be reward unless reward.accuracy has a weight"),
    (["rollout.oversample=0.5"], "rollout.oversample=0.5 must be at least 1, and left out unless"),
    (["rollout.oversample=2"], "rollout.oversample=2.0 must be left out, or 1.5, unless rollout.until=informat"),
    (["reward={overlong: 1, overlong_tokens: 0}"], "reward.overlong_tokens=0 must be in 1..8"),
    (["loss={trust: binary_kl, divergence: 0}"], "loss.divergence=0.0 must be above 0 with"),
    (["loss.trust=binary_kl"], "loss.divergence=None must be above 0 with"),
    (["advantage={kind: gae}", "critic.lr=1", "rollout.window=4"], "loss.per=sequence must be token, constant or sum"),
    (["advantage.kind=decoupled", "rollout.until=informative"],
     "rollout.until=informative must be offered with advantage.kind=decoupled: its scale is that of one round"),
    (["advantage.kind=decoupled", "prune.prompts={kind: bernoulli, drop_prob: 0.5}"],
     "prune.prompts.kind=bernoulli must be none with advantage.kind=decoupled: its scale would be that of"),
    (["advantage.eps=0"], "advantage.eps=0.0 must be above 0"),
    (["advantage={kind: decoupled, eps: 0}"], "advantage.eps=0.0 must be above 0"),
    (["advantage.kind=soft_value", "rollout.group_size=1", "rollout.until=informative"],
     "rollout.until=informative must be offered or full with rollout.group_size=1: the rewards of one completion"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "loss={per: token, likelihood: 0.1}"],
     "loss.likelihood=0.1 must be 0 with rollout.window: a step has only the last window of an answer"),
    (["prune={truncated: true, prompts: {kind: bernoulli, drop_prob: 0.5}}"],
     "prune.truncated=True must be false with prune.prompts.kind=bernoulli: how many answers of a prompt"),
    (["loss.entropy=0.1", "prune.prompts={kind: bernoulli, drop_prob: 0.5}"],
     "loss.entropy=0.1 must be 0 with prune.prompts.kind=bernoulli and loss.count=all: a mean over all tokens"),
    (["loss.entropy=-0.1"], "loss.entropy=-0.1 must be at least 0"),
    (["loss.kl_corrected=true"], "loss.kl_corrected=True must be false, or left out, unless loss.kl > 0"),
    (["critic.lr=1e-5"], "critic.lr=1e-05 must be left out, or null, unless advantage.kind=gae"),
    (["advantage.kind=gae"], "critic.lr=None must be above 0 with advantage.kind=gae"),
    (["advantage.kind=gae", "critic={lr: 1, pretrain_steps: 3}"], "critic.pretrain_steps=3 must be in 0..2, below"),
    (["advantage.kind=gae", "critic.lr=0"], "critic.lr=0.0 must be above 0 with advantage.kind=gae"),
    (["critic.epochs=2"], "critic.epochs=2 must be left out, or 1, unless advantage.kind=gae"),
    (["advantage.alpha=1"], "advantage.alpha belongs to gae; this is group_norm: leave advantage.alpha=1 out, or set"),
    (["advantage.samples=2"], "advantage.samples belongs to soft_value; this is group_norm"),
    (["advantage={kind: centred, eps: 1}"], "advantage.eps belongs to group_norm and decoupled; this is centred"),
    (["advantage={kind: gae, alpha: 0}", "critic.lr=1"], "advantage.alpha=0.0 must be above 0, or null"),
    (["advantage={kind: gae, alpha: 1, lam: 0.9}", "critic.lr=1"], "advantage.lam=0.9 must be left out with advantage"),
    (["advantage={kind: gae, lam: 1.1}", "critic.lr=1"], r"advantage.lam=1.1 must be in \[0, 1\]"),
    (["advantage={kind: gae, bootstrap: true}", "critic.lr=1"],
     "advantage.bootstrap=true must be left out, or prev, unless rollout.window: nothing is cut"),
    (["rollout.window=4"], "advantage.kind=group_norm must be gae with rollout.window=4: completions of one"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=9"], r"rollout.window=9 must be in 1..8 \(rollout.max_new"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "prune.completions={kind: topk, keep: 2}"],
     "prune.completions.kind=topk must be none with rollout.window=4: what is cut has no"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "prune.prompts.kind=greso"],
     "prune.prompts.kind=greso must be none with rollout.window=4: a prompt's group is never in one step"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "rollout.until=informative"],
     "rollout.until=informative must be offered with rollout.window"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "loss={trust: clip_sequence, per: token}"],
     "loss.trust=clip_sequence must be clip, clamp, total_variation, binary_kl or none with rollout.window=4"),
    (["advantage.kind=soft_value", "rollout.group_size=1", "prune.prompts.kind=greso"],
     "prune.prompts.kind=greso must be none with rollout.group_size=1"),
    (["advantage.kind=soft_value", "rollout.group_size=1", "prune.completions={kind: bernoulli, drop_prob: 0.5}"],
     "prune.completions.kind=bernoulli must be none with rollout.group_size=1: there is nothing to compare"),
    (["optim.beta2=1"], r"optim.beta2=1.0 must be in \[0, 1\)"),
    (["eval.every=-1"], r"eval.every=-1 must be at least 0 \(0: only before and after\)"),
    (["loss.ratio_cap=1"], "loss.ratio_cap=1.0 must be above 1, and left out with other"),
    (["loss.clip_low=1.1"], r"loss.clip_low=1.1 must be in \[0, 1\]"),
])
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(good, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(good, overrides)


@pytest.mark.parametrize("key", ["steps", "model.path", "rollout.group_size", "optim", "optim.lr"])
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


TOPK = "base: good.yaml\nprune: {completions: {kind: topk, keep: 2, scope: batch}}\n"


def test_a_layer_that_names_another_kind_starts_its_section_empty(good):
    write(good.parent, topk=TOPK, pps="base: topk.yaml\nprune: {completions: {kind: pps, keep: 3}}\n",
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
    # The kind that a config has without naming it counts as named.
    assert load(folder / "eps.yaml", ["advantage.kind=group_norm"]).advantage.eps == 1
    assert load(folder / "other.yaml").advantage == kinds.Decoupled()


def test_the_overrides_are_one_layer_in_whatever_order_they_come(good):
    write(good.parent, topk=TOPK)
    kind, keep = "prune.completions.kind=pps", "prune.completions.keep=3"
    for overrides in ([kind, keep], [keep, kind], ["prune.completions={kind: pps, keep: 3}"],
                      ["prune.completions={kind: bottom, drop_prob: 0.5}", "prune.completions={kind: pps, keep: 3}"]):
        assert load(good.parent / "topk.yaml", overrides).prune.completions == kinds.Pps(keep=3)


def test_overrides_win_in_order_and_yaml_reads_their_values(good):
    cfg = load(good, ["optim.lr=1e-6", "out=a", "out=b", "data.system_prompt=x: y", "loss.dual_clip=null",
                      "prune={truncated: yes}", "optim={offload: true, beta1: 010.5e-2}", "rollout.slots=1_000"])
    assert (cfg.optim.lr, cfg.out, cfg.data.system_prompt, cfg.loss.dual_clip) == (1e-6, "b", "x: y", None)
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
    write(good.parent, texts="base: good.yaml\nout: 010\ndata: {train: 1:30, eval: 2024-01-01}\n")
    cfg = load(good.parent / "texts.yaml")
    assert (cfg.out, cfg.data.train, cfg.data.eval) == ("010", "1:30", "2024-01-01")
    write(good.parent, texts="base: good.yaml\nsteps: 010\n")
    with pytest.raises(ConfigError, match="steps='010' must be a whole number"):
        load(good.parent / "texts.yaml")


def test_a_dumped_config_loads_to_the_same(good):
    cfg = load(good, ["data.system_prompt=\"ünïcode: 'a' #b\""])
    (good.parent / "dumped.yaml").write_text(config.dump(cfg))
    assert load(good.parent / "dumped.yaml") == cfg
    assert config.flatten(cfg)["rollout.group_size"] == 4


@pytest.mark.parametrize("path", sorted(config.CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_survives_the_round_trip(path, tmp_path):
    write(tmp_path, dumped=config.dump(load(path)))
    assert load(tmp_path / "dumped.yaml") == load(path)


def leaves(section=config.Config, path=""):
    """(dotted name, type) of every setting; of a section with kinds one, whose type is the union."""
    for name, kind in settings.hints(section).items():
        yield from leaves(kind, f"{path}{name}.") if is_dataclass(kind) else [(path + name, kind)]


LEAVES = dict(leaves())
UNIONS = {path: settings.choices(kind) for path, kind in LEAVES.items() if settings.choices(kind)}


@pytest.mark.parametrize("path", UNIONS)
def test_every_kind_names_itself_first_and_the_first_of_a_union_is_the_default(path):
    assert len(UNIONS[path]) == len(get_args(LEAVES[path]))
    for kind, option in UNIONS[path].items():
        assert next(iter(settings.hints(option).items())) == ("kind", Literal[kind])
    assert config.flatten(load("grpo_toy.yaml"))[f"{path}.kind"] == next(iter(UNIONS[path]))


def test_the_tables_of_rules_name_real_settings_and_their_values():
    """A misspelt choice would never be made, and its rule never be broken."""
    words = {f"{path}.{name}": get_args(kind) for path, options in UNIONS.items() for option in options.values()
             for name, kind in settings.hints(option).items()}
    words |= {key: get_args(kind) for key, kind in LEAVES.items()}
    words |= {f"{path}.kind": tuple(options) for path, options in UNIONS.items()}
    words["rollout.group_size"] = ("1",)
    demands = [f"{key}={allowed}" for asked in rules.ASKS.values() for key, allowed, _ in asked]
    for choice in [*rules.SERVES, *rules.ASKS, *demands]:
        key, _, values = choice.partition("=")
        null = {"null"} if type(None) in words[key] else set()
        assert {word for word in re.split(", | or ", values) if word} <= {*words[key]} | null, choice
    assert {entry.partition(":")[0] for served in rules.SERVES.values() for entry in served} <= words.keys()
    critic = {f"critic.{field.name}" for field in fields(config.Critic)}
    assert set(rules.SERVES["advantage.kind=gae"]) == critic
    assert settings.made({"loss.trust": "clip"}, "loss.trust=clamp or clip")
    assert not settings.made({"loss.trust": "clip"}, "loss.trust=clamp or clip_sequence")
    assert settings.made({"rollout.window": 4}, "rollout.window") and not settings.made({}, "rollout.window")
    assert settings.made({"loss.tis_cap": None}, "loss.tis_cap=null")
    assert not settings.made({"loss.tis_cap": 2.0}, "loss.tis_cap=null")


def test_settings_knows_no_project_file_and_numbers_have_the_bounds_that_their_type_says():
    tree = ast.parse(Path(settings.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not names & {path.stem for path in Path(settings.__file__).parent.glob("*.py")}
    for bound, inside, outside in ((settings.at_least(1), (1, 2), (0,)), (settings.above(0), (0.1,), (0, -1)),
                                   (settings.within("[0, 1]"), (0, 0.5, 1), (-0.1, 1.1)),
                                   (settings.within("[0, 1)"), (0, 0.5), (-0.1, 1)),
                                   (settings.within("(0, 1]"), (0.5, 1), (0, 1.1)),
                                   (settings.within("(0, 1)"), (0.5,), (0, 1))):
        kind = Annotated[float, bound]
        assert [settings.convert(number, kind, "x") for number in inside] == list(inside)
        for number in outside:
            with pytest.raises(ConfigError, match="x=.* must be"):
                settings.convert(number, kind, "x")


def test_files_that_are_no_config_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config 'cppo_toi.yaml' not found.*Did you mean 'cppo_toy.yaml'\?"):
        load("cppo_toi.yaml")
    lines = "must hold 'setting: value' lines"
    for text, message in (("a: [", "is not valid yaml"), ("- a", lines), ("", lines)):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "bad.yaml")


def differing(section, path: str = "") -> set[str]:
    """Settings of a config that are not at the default that their dataclass gives them."""
    names = set()
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            names |= differing(value, f"{path}{f.name}.")
        elif f.default not in (MISSING, value):
            names.add(path + f.name)
    return names


@pytest.mark.parametrize("name", ["grpo_toy", "cppo_toy", "vapo_math", "apo_gsm8k"])
def test_a_shown_config_loads_as_the_same_and_says_what_is_not_at_its_default(name, tmp_path):
    cfg = load(f"{name}.yaml", ["data.system_prompt=one\n  two: '\"", "rollout.temperature=0.7"])
    shown = resolved(cfg)
    (tmp_path / "shown.yaml").write_text(shown)
    assert load(tmp_path / "shown.yaml") == cfg
    lines = [line for line in shown.splitlines() if not re.fullmatch(r" *\w+:( +#.*)?", line)]
    keys = list(config.flatten(cfg))
    assert [line.split(":")[0].strip() for line in lines] == [key.rpartition(".")[2] for key in keys]
    marked = {key for key, line in zip(keys, lines, strict=True) if "# <- " in line}
    first = {"advantage.kind": "group_norm", "prune.completions.kind": "none", "prune.prompts.kind": "none"}
    flat = config.flatten(cfg)
    assert marked == differing(cfg) | {key for key, kind in first.items() if flat[key] != kind}
    assert "  temperature: 0.7                        # <- 1.0  divides the logits" in shown


def test_the_command_shows_a_config_and_runs_nothing(tmp_path):
    command = [sys.executable, ROOT / "train.py", "--config", "grpo_toy.yaml", "--show", "--set", "steps=7"]
    shown = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert shown.stdout == resolved(load("grpo_toy.yaml", ["steps=7"])) + "\n" and shown.stderr == ""
    assert not any(tmp_path.iterdir())
