"""Settings: what is wrong is named with its dotted path, what is right survives the round trip."""

import pytest

import config
from config import ConfigError, load

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
    (["steps=2.5"], "steps=2.5 must be a whole number"),
    (["steps=true"], "steps=True must be a whole number"),
    (["optim.lr=fast"], "optim.lr='fast' must be a finite number"),
    (["optim.lr=true"], "optim.lr=True must be a finite number"),
    (["optim.lr=.nan"], "optim.lr=nan must be a finite number"),
    (["loss.kl=.inf"], "loss.kl=inf must be a finite number"),
    (["loss.dual_clip=x"], "loss.dual_clip='x' must be a finite number or null"),
    (["prune.completions.scope=batch"], "prune.completions.scope=batch must be left out while"),
    (["rollout.tensor_parallel=2"], "rollout.tensor_parallel=2 must be 1 unless rollout.engine=vllm"),
    (["rollout.cache_gib=2"], "rollout.cache_gib=2.0 must be null unless rollout.engine=vllm"),
    (["rollout.engine=vllm", "rollout.cache_gib=0"], "rollout.cache_gib=0.0 must be above 0"),
    (["rollout.engine=vllm", "model.dtype=float64"], "model.dtype=float64 must be other than float64 with"),
    (["loss.tis_cap=0"], "loss.tis_cap=0.0 must be at least 1, or null"),
    (["rollout.engine=vllm", "rollout.temperature=0.001"], "rollout.temperature=0.001 must be at least 0.01 with"),
    (["loss.mask_ratio=1"], "loss.mask_ratio=1.0 must be above 1, or null"),
    (["loss.old_logp=engine", "loss.tis_cap=2"], "loss.old_logp=engine must be recompute with loss.tis_cap"),
    (["loss.old_logp=engine", "loss.mask_ratio=2"], "loss.old_logp=engine must be recompute with loss.tis_cap"),
    (["model=m"], "model='m' must be a section with path, dtype"),
    (["loss.per=word"], "loss.per='word' must be one of token, sequence, constant"),
    (["advantage.correction=true"], "advantage.correction=True must be one of 0, 1"),
    (["data.dir=3"], "data.dir=3 must be a text or null"),
    (["steps"], "--set 'steps' must have the form setting=value"),
    (["data.train=[a"], "the value is not valid yaml"),
    (["prune.completions={kind: topk, keep: 5}"],
     r"prune.completions.keep=5 must be in 1..4 \(rollout.group_size\); to train on all set prune.completions.kind"),
    (["prune.completions={kind: topk, keep: 0}"], r"prune.completions.keep=0 must be in 1..4"),
    (["prune.completions.kind=topk"], r"prune.completions.keep=None must be in 1..4"),
    (["prune.completions.kind=pps"], r"prune.completions.keep=None must be in 1..4"),
    (["prune.completions.kind=bernoulli"], r"prune.completions.drop_prob=None must be in \[0, 1\): no weight"),
    (["prune.completions={kind: bottom, drop_prob: 1}"], r"prune.completions.drop_prob=1.0 must be in \[0, 1\)"),
    (["prune.completions={kind: bernoulli, drop_prob: 0.5, keep: 2}"], "prune.completions.keep=2 must be null while"),
    (["prune.completions={kind: pps, keep: 2, drop_prob: 0.5}"], "prune.completions.drop_prob=0.5 must be null while"),
    (["prune.completions={kind: pps, keep: 2}", "loss.count=kept"], "loss.count=kept must be all with"),
    (["prune.completions.keep=2"], "prune.completions.keep=2 must be null while prune.completions.kind=none"),
    (["prune.prompts.kind=bernoulli"], r"prune.prompts.drop_prob=None must be in \[0, 1\): no weight"),
    (["prune.prompts={kind: rank, drop_prob: 1}"], r"prune.prompts.drop_prob=1.0 must be in \[0, 1\)"),
    (["prune.prompts={kind: greso, drop_prob: 0.5}"], "prune.prompts.drop_prob=0.5 must be null while"),
    (["prune.prompts.max_skips=2"], "prune.prompts.max_skips=2 must be null while prune.prompts.kind=none"),
    (["prune.prompts.explore=1"], r"prune.prompts.explore=1.0 must be in \[0.05, 0.95\]"),
    (["prune.prompts.target=0"], r"prune.prompts.target=0.0 must be in \(0, 1\)"),
    (["prune.unpruned_steps=4"], r"prune.unpruned_steps=4 must be in 0..3 \(steps\)"),
    (["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "loss.per=token"],
     "loss.per=token must be sequence or constant with prune.prompts.kind=bernoulli and loss.count=all: a mean"),
    (["prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 2}", "loss.per=token"],
     "loss.per=token must be sequence or constant with prune.prompts.kind=rank and loss.count=all"),
    (["prune.prompts={kind: rank, drop_prob: 0.1, max_skips: 2}"],
     r"prune.prompts.drop_prob=0.1 must be 0 or enough to skip one of 6 \(rollout.prompts_per_step\)"),
    (["prune.completions={kind: bottom, drop_prob: 0.2}"],
     r"prune.completions.drop_prob=0.2 must be 0 or enough to drop one of 4 \(rollout.group_size\)"),
    (["prune.completions.kind=bottom"], r"prune.completions.drop_prob=None must be in \[0, 1\)"),
    (["prune.prompts={kind: rank, drop_prob: 0.5}"], "prune.prompts.max_skips=None must be at least 1 with"),
    (["prune.prompts.target=0.5"], "prune.prompts.target=0.5 must be left out while prune.prompts.kind=none"),
    (["rollout.until=full", "pack.budget=124801"], "pack.budget=124801 must be in 1..124800 tokens, all that"),
    (["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "loss.count=kept"], "loss.count=kept must be all with"),
    (["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "rollout.until=informative"],
     r"rollout.until=informative must be offered \(or full\) with prune.prompts.kind=bernoulli"),
    (["rollout.max_rounds=0"], "rollout.max_rounds=0 must be at least 1"),
    (["rollout.until=full"], "pack.budget=None must be set with rollout.until=full, and null without"),
    (["pack.budget=100"], "pack.budget=100 must be set with rollout.until=full, and null without"),
    (["rollout.until=full", "pack.budget=0"], "pack.budget=0 must be in 1.."),
    (["pack.window=0"], "pack.window=0 must be at least 1, or null"),
    (["data.limit=0"], "data.limit=0 must be at least 1, or null"),
    (["pack.capacity=519"], r"pack.capacity=519 must be at least 520 tokens, one sequence \(data.max_prompt"),
    (["update.minibatches=4"], r"update.minibatches=4 must be a divisor of 6 \(rollout.prompts_per_step\)"),
    (["rollout.group_size=1"], "rollout.group_size=1 must be at least 2"),
    (["rollout.temperature=0"], "rollout.temperature=0.0 must be above 0"),
    (["optim.warmup_steps=-1"], r"optim.warmup_steps=-1 must be at least 0"),
    (["reward.accuracy=0"], r"reward=.* must be given at least one weight other than 0"),
    (["loss.dual_clip=1.1"], r"loss.dual_clip=1.1 must be above 1 \+ loss.clip_high"),
    (["loss.trust=clamp", "loss.dual_clip=10"], "loss.dual_clip=10.0 must be null with loss.trust=clamp; it belongs"),
    (["loss.trust=none", "loss.clip_low=0.1"], "loss.clip_low=0.1 must be left out with loss.trust=none"),
    (["loss.trust=total_variation"], "loss.divergence=None must be above 0 with loss.trust=total_variation or"),
    (["loss.divergence=0.1"], "loss.divergence=0.1 must be above 0 with loss.trust=.* and null without"),
    (["loss.ratio_cap=5"], "loss.ratio_cap=5.0 must be above 1, and left out unless loss.trust is total_variation"),
    (["loss.likelihood=0.1", "reward={accuracy: 0, tag_exact: 1}"], "loss.likelihood=0.1 must be 0 unless reward.acc"),
    (["loss.likelihood=0.1", "prune.prompts={kind: bernoulli, drop_prob: 0.5}"],
     "loss.likelihood=0.1 must be 0 with prune.prompts.kind=bernoulli and loss.count=all: a mean over all tokens"),
    (["loss.residual=1e-3"], "loss.residual=0.001 must be null unless advantage.kind=soft_value"),
    (["loss.residual=1e-3", "advantage.kind=soft_value"],
     "loss.residual=0.001 must be null unless loss.trust=none and loss.per=sum"),
    (["reward.overlong=1"], "reward.overlong_tokens=None must be set with reward.overlong, and null without"),
    (["reward.overlong_tokens=4"], "reward.overlong_tokens=4 must be set with reward.overlong"),
    (["reward={overlong: 1, overlong_tokens: 9}"], r"reward.overlong_tokens=9 must be in 1..8 \(rollout.max_new"),
    (["reward.length=1"], "reward.length_tokens=None must be set with reward.length, and null without"),
    (["reward={length: 1, length_tokens: 0}"], "reward.length_tokens=0 must be at least 1"),
    (["reward.custom=1"], "reward.custom_file=None must be set with reward.custom, and null without"),
    (["reward={custom: 1, custom_file: no.py}"],
     "reward.custom_file=no.py must be a Python file with a function reward"),
    (["eval.n=2"], "eval.n=2 must be at least 1, and 1 at eval.temperature=0"),
    (["eval.temperature=-1"], "eval.temperature=-1.0 must be at least 0"),
    (["eval={temperature: 0.005}", "rollout.engine=vllm"], "eval.temperature=0.005 must be 0 or at least 0.01 with"),
    (["eval={top_p: 0}"], r"eval.top_p=0.0 must be in \(0, 1\]"),
    (["rollout.differ_in=accuracy"], "rollout.differ_in=accuracy must be reward unless rollout.until=informative"),
    (["rollout.oversample=0.5"], "rollout.oversample=0.5 must be at least 1"),
    (["rollout.oversample=2"], "rollout.oversample=2.0 must be .* left out unless rollout.until=informative"),
    (["reward={overlong: 1, overlong_tokens: 0}"], "reward.overlong_tokens=0 must be in 1..8"),
    (["loss={trust: binary_kl, divergence: 0}"], "loss.divergence=0.0 must be above 0 with"),
    (["loss.trust=binary_kl"], "loss.divergence=None must be above 0 with"),
    (["advantage={kind: gae}", "critic.lr=1", "rollout.window=4"], "loss.per=sequence must be token, constant or sum"),
    (["advantage.kind=decoupled", "rollout.until=informative"],
     "advantage.kind=decoupled must be another than decoupled unless rollout.until=offered"),
    (["critic.lr=1e-5"], r"critic=Critic\(.*\) must be left out unless advantage.kind=gae"),
    (["advantage.kind=gae"], "critic.lr=None must be above 0 with advantage.kind=gae"),
    (["advantage.kind=gae", "critic={lr: 1, pretrain_steps: 3}"], "critic.pretrain_steps=3 must be in 0..2, below"),
    (["advantage.kind=gae", "critic={lr: 1, pretrain_until: 0.5}"],
     r"critic.pretrain_until=0.5 must be in \(0, 1\), with critic.pretrain_steps as the most"),
    (["advantage.alpha=1"], "advantage.alpha=1.0 must be left out while advantage.kind=group_norm; it belongs to gae"),
    (["advantage.samples=2"], "advantage.samples=2 must be left out while .* it belongs to soft_value"),
    (["advantage={kind: gae, alpha: 1, lam: 0.9}", "critic.lr=1"], "advantage.lam=0.9 must be left out with advantage"),
    (["advantage={kind: gae, lam_min: 0.5}", "critic.lr=1"], "advantage.lam_min=0.5 must be left out without advant"),
    (["advantage={kind: gae, lam: 1.1}", "critic.lr=1"], r"advantage.lam=1.1 must be in \[0, 1\]"),
    (["advantage={kind: gae, bootstrap: true}", "critic.lr=1"],
     "advantage.bootstrap=true must be left out without rollout.window: nothing is cut"),
    (["rollout.window=4"], "advantage.kind=group_norm must be gae with rollout.window: completions of one prompt end"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=9"], r"rollout.window=9 must be in 1..8 \(rollout.max_new"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "prune.completions={kind: topk, keep: 2}"],
     "prune.completions.kind=topk must be none with rollout.window: what is cut has no"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "prune.prompts.kind=greso"],
     "prune.prompts.kind=greso must be none with rollout.window: a prompt's group is never in one step"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "rollout.until=informative"],
     "rollout.until=informative must be offered with rollout.window"),
    (["advantage.kind=gae", "critic.lr=1", "rollout.window=4", "loss={trust: clip_sequence, per: token}"],
     "loss.trust=clip_sequence must be other than clip_sequence with rollout.window"),
    (["advantage.kind=reward", "rollout.group_size=1", "prune.prompts.kind=greso"],
     "prune.prompts.kind=greso must be none with rollout.group_size=1"),
    (["advantage.kind=reward", "rollout.group_size=1", "prune.completions={kind: bernoulli, drop_prob: 0.5}"],
     "prune.completions.kind=bernoulli must be none with rollout.group_size=1: there is nothing to compare"),
])
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(good, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(good, overrides)


@pytest.mark.parametrize("key", ["steps", "model.path", "rollout.group_size", "pack", "optim.lr"])
def test_a_missing_setting_is_named(good, key):
    raw = config.yaml.safe_load(good.read_text())
    section = raw[key.split(".")[0]] if "." in key else raw
    del section[key.rsplit(".", maxsplit=1)[-1]]
    good.write_text(config.yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=f"missing key '{key}' .*; it has no default"):
        load(good)


def test_a_base_is_one_level_deep_and_every_key_of_it_can_be_changed(good):
    child, grandchild = good.parent / "child.yaml", good.parent / "grandchild.yaml"
    child.write_text("base: good.yaml\nrollout: {group_size: 8}\n")
    grandchild.write_text("base: child.yaml\n")
    cfg = load(child)
    assert (cfg.rollout.group_size, cfg.rollout.prompts_per_step, cfg.out) == (8, 6, "runs/child")
    with pytest.raises(ConfigError, match="only one level is allowed"):
        load(grandchild)
    child.write_text("base: 5\n")
    with pytest.raises(ConfigError, match="5' not found"):
        load(child)
    child.write_text("base: nowhere.yaml\n")
    with pytest.raises(ConfigError, match="nowhere.yaml' not found"):
        load(child)


def test_overrides_win_in_order_and_yaml_reads_their_values(good):
    cfg = load(good, ["optim.lr=1e-6", "out=a", "out=b", "data.system_prompt='x: y'", "loss.dual_clip=null"])
    assert (cfg.optim.lr, cfg.out, cfg.data.system_prompt, cfg.loss.dual_clip) == (1e-6, "b", "x: y", None)


def test_a_dumped_config_loads_to_the_same(good):
    cfg = load(good, ["data.system_prompt=\"ünïcode: 'a' #b\""])
    (good.parent / "dumped.yaml").write_text(config.dump(cfg))
    assert load(good.parent / "dumped.yaml") == cfg
    assert config.flatten(cfg)["rollout.group_size"] == 4


def test_files_that_are_no_config_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config 'cppo_toi.yaml' not found.*Did you mean 'cppo_toy.yaml'\?"):
        load("cppo_toi.yaml")
    lines = "must hold 'setting: value' lines"
    for text, message in (("a: [", "is not valid yaml"), ("- a", lines), ("", lines)):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "bad.yaml")
