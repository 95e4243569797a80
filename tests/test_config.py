"""Settings: what is wrong is named with its dotted path, what is right survives the round trip."""

import os
import re
import shlex
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Literal, get_args

import pytest
from conftest import PUBLISHED, refuses

import config
import train
from config import ConfigError, load
from infra import commands
from settings import hints, kinds, rules
from settings import loader as settings
from settings.leaves import LEAVES as TABLE
from settings.leaves import settings_of

GOOD = {
    "steps": 3, "model": {"path": "m"}, "data": {"train": "t", "eval": "e"}, "optim": {"lr": 1e-3},
    "rollout": {"group_size": 4, "prompts_per_step": 6, "max_new_tokens": 8}, "pack": {"capacity": 520},
    "eval": {"max_new_tokens": 8}}


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


CASES = config.yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
MUST_BE = [(override, allowed) for allowed, overrides in CASES["must_be"].items() for override in overrides]


@pytest.mark.parametrize(("overrides", "allowed"), MUST_BE)
def test_a_value_of_a_wrong_type_or_out_of_bounds_is_answered_with_all_that_is_allowed(good, overrides, allowed):
    key, _, value = overrides.split(" & ")[-1].partition("=")
    assert error_of(good, overrides) in (f"{key}={value} must be {allowed}", f"{key}='{value}' must be {allowed}")


NAMED = {
    "BERNOULLI": "prune.completions={kind: bernoulli, drop_prob: 0.5}", "PPS": "prune.completions={kind: pps, keep: 2}",
    "THINNED": "prune.prompts={kind: bernoulli, drop_prob: 0.5}", "WINDOW": "GAE & critic.lr=1 & windows.tokens=4",
    "FLIGHT": "windows.in_flight=3 & windows.max_age=2 & windows.tokens=4",
    "GAE": "advantage.kind=gae", "CUT": "prune.tokens.kind=prefix", "SHARE": "prune.prompts={kind: pps, share: 0.5}",
    "ONE": "advantage.kind=soft_value & rollout.group_size=1", "DECOUPLED": "advantage.kind=decoupled",
    "RESIDUAL": "advantage={kind: soft_value, residual: 1e-3}", "INFORMATIVE": "rollout.until=informative",
    "VLLM": "rollout.engine=vllm", "HUGE": "steps=1" + "0" * 400, "DEEP": "steps=" + "[" * 3000}


@pytest.mark.parametrize(("overrides", "message"), CASES["named"])
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


def test_names_of_other_trainers_are_answered_with_real_settings():
    kinds_of = {f"{path}.{name}" for path in UNIONS for name in settings.hints(LEAVES[path])}
    sections = "|".join({key.split(".")[0] for key in LEAVES if "." in key})
    places = [place for text in hints.TABLE.values() for place in re.findall(rf"\b(?:{sections})\.[\w.]+\w", text)]
    unknown = {*places} - LEAVES.keys() - kinds_of - {"data.columns.question", "data.columns.answer"}
    gone = [place for leaf, place in {"windows": "windows", "lora": "model.lora", "trackers": "log"}.items()
            if leaf not in TABLE]
    assert len(places) > 60 and not [place for place in unknown if not place.startswith(tuple(gone))]


def test_a_dotted_key_of_a_file_is_said_to_be_nested(good):
    for key, nested in (("optim.lr", "optim: {lr: ...}"), ("loss.trust.low", "loss: {trust: {low: ...}}")):
        write(good.parent, dotted=f"base: good.yaml\n{key}: 0.1\n")
        assert error_of(good.parent / "dotted.yaml", []) == f"'{key}' is nested in a file: {nested}"


CHANGED = "a setting is changed by --set"


@pytest.mark.parametrize(("words", "hint"), [
    ("--steps 5", f"{CHANGED} steps=5"), ("--steps=5", f"{CHANGED} steps=5"), ("--set steps 5", f"{CHANGED} steps=5"),
    ("--set a=1 b=2 c=3", f"{CHANGED} b=2 --set c=3"), ("--set optim.lr = 1e-4", f"{CHANGED} optim.lr=1e-4"),
    ("--seed 1 optim.lr=1e-4", f"{CHANGED} seed=1 --set optim.lr=1e-4"),
    ("--set optim.lr 1e-4", f"{CHANGED} optim.lr=1e-4"),
    ("--fit cppo_toy.yaml", "a config is named by --config cppo_toy.yaml"),
    ("--set a={b: c}", "a setting with spaces needs quotes: --set 'a={b: c}'"),
    ("--set a=1 'b c'", "a setting with spaces needs quotes: --set 'a=1 b c'")])
def test_words_that_a_command_line_has_no_place_for_are_put_in_theirs(words, hint, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--config", "grpo_toy.yaml", *shlex.split(words)])
    with pytest.raises(SystemExit):
        commands.of_train("")
    assert capsys.readouterr().err.endswith(f"; {hint}\n")
    assert error_of("steps=5", []).endswith("A setting is changed by --set steps=5.")


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
    refuses(f"missing key '{key}' .*; it has no default", load, good)


def write(folder, **texts):
    """Config files in a folder, by name: child="base: good.yaml" is child.yaml."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)


LAYERS = {
    "child": "base: good.yaml\nrollout: {group_size: 8}\noptim: {lr: 1}\n",
    "grand": "base: child.yaml\nrollout: {max_new_tokens: 6}\n", "last": "base: grand.yaml\noptim: {lr: 2}\n",
    "one": "base: good.yaml\nsteps: 1\nseed: 1\n", "left": "base: one.yaml\nseed: 2\nout: left\n",
    "right": "base: one.yaml\nout: right\n",
    "both": "base: [left.yaml, right.yaml]\n", "low": "base: good.yaml\nseed: 1\n", "high": "steps: 5\nseed: 2\n",
    "named": "out: mine\n"}


@pytest.mark.parametrize(("names", "expected"), [
    ("child", {"rollout.group_size": 8, "rollout.prompts_per_step": 6, "out": "runs/child"}),
    ("last", {"rollout.group_size": 8, "rollout.max_new_tokens": 6, "optim.lr": 2, "out": "runs/last"}),
    ("both", {"steps": 1, "seed": 2, "out": "right"}),  # a base that two share is a layer once
    ("low high", {"steps": 5, "seed": 2, "out": "runs/low_high"}), ("high low", {"steps": 3}),
    ("high low high", {"steps": 5}), ("low named high", {"out": "mine"})])
def test_each_config_lies_with_its_bases_over_those_before_it(good, names, expected):
    write(good.parent, **LAYERS)
    flat = config.flatten(load([good.parent / f"{name}.yaml" for name in names.split()]))
    assert {key: flat[key] for key in expected} == expected
    low = good.parent / "low.yaml"
    assert load([low, good.parent / "high.yaml"], ["steps=7"]).steps == 7
    refuses("config 'hihg.yaml' not found, neither as given nor in", load, [low, "hihg.yaml"])


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
    refuses(r"Did you mean 'cppo_toy.yaml'\?", load, good.parent / "mine.yaml")


@pytest.mark.parametrize(("texts", "circle"), [
    ({"a": "base: a.yaml"}, "a.yaml -> .*a.yaml"),
    ({"a": "base: b.yaml", "b": "base: ../x/a.yaml"}, "a.yaml -> .*b.yaml -> .*a.yaml"),
    ({"a": "base: b.yaml", "b": "base: c.yaml", "c": "base: b.yaml"}, "a.yaml -> .*b.yaml -> .*c.yaml -> .*b.yaml")])
def test_a_circle_of_bases_is_named(tmp_path, texts, circle):
    (tmp_path / "x").mkdir()
    write(tmp_path / "x", **texts)
    refuses(f"base=.* leads in a circle: .*{circle}; one of them must have no base", load, tmp_path / "x" / "a.yaml")


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
    with pytest.raises(ConfigError, match="prune.completions.keep=None must be a number, unless prune"):
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
                                  " a # b", "~", r"\neq \nu \nabla"])
def test_a_setting_that_is_a_text_is_taken_as_it_is_written(good, text):
    cfg = load(good, [f"out={text}", f"data.train={text}", f"model.path={text}", f"data.dir={text}"])
    assert (cfg.out, cfg.data.train, cfg.model.path) == (os.path.expanduser(text), text, text)
    assert cfg.data.dir == (None if text == "null" else text)
    write(good.parent, dumped=config.dump(cfg))
    assert load(good.parent / "dumped.yaml") == cfg


def test_numbers_of_yaml_1_1_are_texts_in_a_file(good):
    write(good.parent, texts="base: good.yaml\nout: 010\ndata: {train: 1:30, eval: 2024-01-01, dir: 1e3}\n")
    cfg = load(good.parent / "texts.yaml")
    assert (cfg.out, cfg.data.train, cfg.data.eval, cfg.data.dir) == ("010", "1:30", "2024-01-01", "1e3")


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
    words |= dict.fromkeys(["loss.likelihood", "loss.entropy", "advantage.reward"], ("0.0",))
    words |= {"rollout.group_size": ("1",), "update.epochs": ("1",), "advantage.lam": ("0.95",)}
    for table in (rules, *map(settings_of, TABLE)):
        only_with, requires = getattr(table, "ONLY_WITH", {}), getattr(table, "REQUIRES", {})
        demands = [entry.partition(": ")[0] for required in requires.values() for entry in required]
        for choice in (part for made in [*only_with, *requires, *demands] for part in made.split(" without ")):
            key, _, values = choice.partition("=")
            null = {"null"} if type(None) in words[key] else set()
            assert {word for word in re.split(", | or ", values) if word} <= {*words[key]} | null, choice
        assert {entry.partition(":")[0] for used in only_with.values() for entry in used} <= words.keys()
    assert set(CRITIC_ONLY_WITH["advantage.kind=gae"]) == {f"critic.{field.name}" for field in fields(Critic)}
    for choice, those, others in (
            ("kind=clamp or clip", [{"kind": "clip"}], []), ("kind=clamp or clip_sequence", [], [{"kind": "clip"}]),
            ("tokens", [{"tokens": 4}], [{}]), ("kl", [{"kl": 0.1}], [{"kl": 0.0}]),
            ("tis_cap=null", [{"tis_cap": None}], [{"tis_cap": 2.0}]),
            ("a without b without c", [{"a": 1}], [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {"b": 1}])):
        assert all(rules.is_chosen(cfg, choice) for cfg in those), choice
        assert not any(rules.is_chosen(cfg, choice) for cfg in others), choice


def test_a_rule_of_a_leaf_stands_beside_the_cores_of_the_same_choice(monkeypatch):
    table = {"prune.completions.kind=bernoulli or pps": ["seed=1: odd"]}
    monkeypatch.setattr(rules.leaves, "stated", lambda cfg, name: [table] * (name == "REQUIRES"))
    for sets, why in ([["loss.denominator=kept"], "loss.denominator=kept must be all"], [[], "seed=0 must be 1 with"]):
        refuses(why, load, "dppo_toy.yaml", sets)


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
