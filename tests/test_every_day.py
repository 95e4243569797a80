"""What somebody does every day: start again after a mistake, go on for longer, evaluate a checkpoint, use paths with ~
or patterns, work from another folder, and train without a set to evaluate on."""

import json
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TOY, load, nudge, refuses, toy_config, weights, write_tiny
from test_checkpoint import sharded
from test_eval import sets
from test_invariance import on_ranks
from test_train import without_times

import config
import data
import eval as evaluation
import train
from config import ConfigError
from infra import runfolder
from infra.checkpoint import Checkpoints
from infra.export import export
from infra.weights import find_model
from policy import Weights
from settings import leaves

SHORT = ["rollout.max_new_tokens=16", "eval.max_new_tokens=8"]


def written(cfg: config.Config) -> Path:
    path = Path(cfg.out).parent / "test.yaml"
    path.write_text(config.dump(cfg))
    return path


def begun(folder: Path, cfg: config.Config, *steps: int) -> Path:
    """A run folder whose run has done these steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config.dump(cfg))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    return folder


@pytest.mark.slow
def test_a_folder_without_a_step_done_is_taken_over_by_the_same_command_and_by_another(
        tmp_path, command, monkeypatch, capsys):
    yaml = written(toy_config(tmp_path / "run", "steps=1", *SHORT))

    def broken(*given):
        raise ConfigError("a mistake of the user")

    with monkeypatch.context() as patch:
        patch.setattr(train, "update", broken)
        assert command(train, "--config", yaml) == 2
        assert [line["step"] for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl")] == [0]
        for name in ("soft_values.jsonl", "of_the_user.jsonl"):
            (tmp_path / "run" / name).touch()
        assert command(train, "--config", yaml, "--resume") == 2
        said = capsys.readouterr().err
        assert "has no step done, so there is nothing to go on from; start it without --resume" in said
        assert command(train, "--config", yaml) == 2
    assert (tmp_path / "run" / "soft_values.jsonl").is_file()  # what was sampled for this config serves it still
    assert command(train, "--config", yaml, "--set", "seed=5") == 0
    assert [line["step"] for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 1]
    assert config.load(tmp_path / "run" / "config.yaml").seed == 5
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert "of_the_user.jsonl" in left and "soft_values.jsonl" not in left
    assert command(train, "--config", yaml) == 2  # now there is a step to lose
    assert "already holds a run with another config: seed (5 there, 0 now); start this one" in capsys.readouterr().err


def test_a_table_of_another_reward_file_or_of_other_weights_is_not_taken_over(tmp_path):
    cfg, device = toy_config(tmp_path / "run", "steps=1"), torch.device("cpu")
    texts = {"reward.custom_file": "one", "environment.file": None, "data.chat_template": None}
    for text, inputs, stays in (("one", {}, True), ("one", {"a": "b"}, False), ("two", {}, False), (None, {}, False)):
        with_table = runfolder.RunLog(tmp_path / "run")
        with_table.create(cfg, "never", device, {"inputs": {}}, texts)
        (tmp_path / "run" / "soft_values.jsonl").touch()
        with_table.create(cfg, "never", device, {"inputs": inputs}, texts | {"reward.custom_file": text})
        assert (tmp_path / "run" / "soft_values.jsonl").exists() == stays
        assert (tmp_path / "run" / "custom_reward.py").exists() == (text is not None)
        with_table.unlock()


def test_a_run_that_came_and_went_while_models_were_loaded_is_not_written_over(tmp_path, monkeypatch):
    cfg, true = toy_config(tmp_path / "run", *SHORT), train.load_models

    def meanwhile(*given):
        begun(tmp_path / "run", cfg, 0, 1)
        return true(*given)

    monkeypatch.setattr(train, "load_models", meanwhile)
    refuses("already holds a run with this config", train.train, cfg)
    assert len(runfolder.read_log(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "stopped"])
def test_a_run_goes_on_for_longer_and_is_the_longer_run(stopped, tmp_path, command, monkeypatch, capsys):
    """With other settings of evaluation, checkpoints and log besides, none of which changes a step."""
    whole = toy_config(tmp_path / "whole", "steps=3", "optim.warmup_steps=3", *SHORT)
    expected, once = weights(train.train(whole)), replace(whole, steps=2, out=str(tmp_path / "run"))
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(train, "asked_to_stop", lambda stop: stopped)
        train.train(once)
    first = 1 if stopped else 2
    yaml, changed = written(once), {"eval.every": (10, 1), "checkpoint.keep": (1, 2), "log.groups": (2, 1)}
    sets = [word for key, (_, now) in changed.items() for word in ("--set", f"{key}={now}")]
    capsys.readouterr()
    assert command(train, "--config", yaml, "--resume", "--set", "steps=3", *sets) == 0
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith(f"going on from step {first} with ")]
    assert len(said) == 1 and "steps (2 there, 3 now)" in said[0]
    assert all(f"{key} ({there} there, {now} now)" in said[0] for key, (there, now) in changed.items())
    folder = tmp_path / "run"
    assert config.load(folder / f"config_until_{first:06d}.yaml") == once
    assert config.load(folder / "config.yaml") == config.load(yaml, ["steps=3", *sets[1::2]])
    one, other = ([line for line in without_times(place) if "reward/mean" in line]
                  for place in (tmp_path / "whole", folder))
    assert one == other and len(one) == 3
    evaluated = {line["step"] for line in runfolder.read_log(folder / "metrics.jsonl") if "eval/few/accuracy" in line}
    assert evaluated == {0, first, 2, 3} and len(list((folder / "checkpoints").glob("step_*"))) == 2
    exported = weights(load(folder / "hf"))
    assert all(torch.equal(exported[name], p.float()) for name, p in expected.items())


@pytest.mark.parametrize(("there", "now", "message"), [
    (["optim.schedule=cosine"], ["optim.schedule=cosine", "steps=9"],
     r"steps \(2 there, 9 now\): optim.schedule=cosine has spread its rate over the steps there; resume with"),
    ([], ["steps=1"], r"other settings: steps \(2 there, 1 now\); resume with"),
    ([], ["eval.every=1", "optim.lr=1", "steps=9"], r"settings: optim.lr \(0.0001 there, 1.0 now\); resume with")])
def test_what_the_steps_done_depend_on_may_not_change(there, now, message, tmp_path):
    folder = begun(tmp_path / "run", toy_config(tmp_path / "run", *there), 0, 1)
    for resume in ("always", "auto"):
        refuses(message, runfolder.require_free_folder, toy_config(folder, *now), resume)


def test_the_remedy_that_is_named_works(tmp_path):
    """Without a checkpoint --resume would fail, and --resume auto begins again."""
    cfg = toy_config(tmp_path / "run")
    folder = begun(tmp_path / "run", cfg, 0, 1)
    with pytest.raises(ConfigError, match="this config; it has no checkpoint, so --resume auto begins it again; or"):
        runfolder.require_free_folder(cfg, "never")
    assert runfolder.require_free_folder(cfg, "auto") == folder
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="this config; continue it with --resume, or start a new one with --set out"):
        runfolder.require_free_folder(cfg, "never")
    longer = replace(cfg, steps=3)
    with pytest.raises(ConfigError, match=r"another config: steps \(2 there, 3 now\); continue it with --resume, or"):
        runfolder.require_free_folder(longer, "never")
    assert runfolder.require_free_folder(longer, "always") == folder


def test_a_run_whose_steps_are_done_says_so_and_loads_nothing(tmp_path, command, monkeypatch, capsys):
    """Unless `steps` was raised since, in the run folder's own config."""
    cfg = toy_config(tmp_path / "run", "steps=1", *SHORT)
    train.train(cfg)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    monkeypatch.setattr(train, "load_task", None)
    for resume in (["--resume"], ["--resume", "auto"]):
        capsys.readouterr()
        assert command(train, "--config", written(cfg), *resume) == 0
        assert capsys.readouterr().out == (f"{cfg.out} is finished: its 1 steps are done, and nothing is left to do; "
                                           "set a larger `steps` to go on\n")
    path = tmp_path / "run" / "config.yaml"
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before and runfolder.is_done(cfg, "always")
    (tmp_path / "run" / "state.json").write_text('{"state": "failed"}\n')
    assert not runfolder.is_done(cfg, "always")  # it died while it exported its model
    assert not runfolder.is_done(replace(cfg, out=str(tmp_path / "new")), "auto")
    (tmp_path / "run" / "state.json").write_text('{"state": "finished"}\n')
    path.write_text(path.read_text().replace("\nsteps: 1\n", "\nsteps: 2\n"))
    assert not runfolder.is_done(config.load(path), "always")


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """A run of one step in a folder of its own, with its model and data."""
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(TOY, folder / "model")
    for name in ("train", "test"):
        lines = (ROOT / "toy" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:12]))
    train.train(going(folder))
    return folder


def going(folder, *settings: str):
    return toy_config(folder / "run", "steps=1", *SHORT, f"model.path={folder / 'model'}",
                      f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'test.jsonl'}", *settings)


@pytest.mark.slow
def test_a_run_that_finds_other_inputs_does_not_go_on(first_step):
    """Rows in another order, or a tokenizer's file with one word more."""
    for name, setting in (
            ("train.jsonl", r"12 prompts of sha256 \w{16} at data.train, and here it is 12 prompts"),
            ("test.jsonl", r"12 prompts of sha256 \w{16} at data.eval .test., and here"),
            ("model/tokenizer_config.json", "json and jinja files .* at model.path, and here")):
        path = first_step / name
        before = path.read_text()
        reordered = "".join(reversed(before.splitlines(keepends=True)))
        path.write_text(reordered if name.endswith("jsonl") else json.dumps(json.loads(before) | {"one_more": 1}))
        with pytest.raises(ConfigError, match=f"step_000001 was trained with {setting}.*or begin another run"):
            train.train(going(first_step, "steps=2"), resume="always")
        path.write_text(before)


@pytest.mark.slow
def test_a_run_goes_on_from_copies_and_with_less_to_evaluate_on(first_step, tmp_path):
    shutil.copytree(first_step / "run", tmp_path / "run")
    train.train(replace(going(first_step, "steps=2", "eval.limit=3"), out=str(tmp_path / "run")), resume="always")
    assert runfolder.state_of(tmp_path / "run") == {"state": "finished"}


def save_policy(folder: Path, size: float, *settings: str) -> None:
    """Save a policy that was moved by so much, as a run does, and export it."""
    cfg, (model, optimizer) = toy_config(folder, *settings), sharded(*settings)
    nudge(model, size)
    checkpoints = Checkpoints(folder / "checkpoints", 1, {"policy": (model, optimizer)}, torch.device("cpu"))
    inputs = leaves.through("weights", cfg, Weights()).identify(TOY)
    checkpoints.reach(7, {"config": config.flatten(cfg), "inputs": inputs})
    checkpoints.save()
    checkpoints.wait()
    export(model, TOY, folder / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["model.lora.rank=2"], []], ids=str)
def test_eval_takes_a_checkpoint_of_any_number_of_ranks(settings, tmp_path, command, capsys):
    """Its answers are those of the exported model, and a result names the weights by their hash."""
    (tmp_path / "few.jsonl").write_text("".join((ROOT / "toy" / "test.jsonl").read_text().splitlines(True)[:6]))
    size = 1e-2 if settings else 1e-3
    on_ranks(2, tmp_path, save_policy, tmp_path / "two", size, *settings)
    save_policy(tmp_path / "one", 2 * size, *settings)
    given = ("--data", tmp_path / "few.jsonl", *sets("eval.max_new_tokens=8", "eval.n=2", "eval.temperature=1"))
    results = {}
    for run in ("two", "one"):
        for kind in ("hf", "checkpoints/step_000007"):
            out = tmp_path / f"{run}_{kind[:2]}.json"
            assert command(evaluation, "--model", tmp_path / run / kind, *given, "--out", out) == 0
            results[run, kind[:2]] = json.loads(out.read_text())
    assert len(list((tmp_path / "two/checkpoints/step_000007/policy").glob("*.distcp"))) == 2
    for run in ("two", "one"):
        assert results[run, "ch"]["results"] == results[run, "hf"]["results"]
    assert results["two", "ch"]["results"] != results["one", "ch"]["results"]
    assert len({result["head"]["model"]["files"] for result in results.values()}) == 4
    step = tmp_path / "one/checkpoints/step_000007"
    refuses(f"{step} is a checkpoint, not a Hugging Face folder; .*python learner.py", find_model, str(step))
    part = step / "policy" / "__0_0.distcp"
    part.write_bytes(b"?" + part.read_bytes()[1:])
    assert command(evaluation, "--model", step, *given) == 2
    assert f"{step} is not a whole checkpoint: policy/__0_0.distcp is not as it was" in capsys.readouterr().err


def test_an_export_can_be_read_by_whom_the_umask_lets(tmp_path, tiny):
    before = os.umask(0o027)
    try:
        export(load(tiny), tiny, tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "hf").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o640}


def test_a_path_may_begin_with_a_tilde(tmp_path, monkeypatch, command, capsys):
    """In settings, in data and in arguments: no shell writes it out behind --set or in a yaml file."""
    report = pytest.importorskip("report")
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tiny(tmp_path / "model")
    (tmp_path / "few.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    (tmp_path / "math500.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    (tmp_path / "own.py").write_text("def reward(text, gold, tokens):\n    return 0.0\n")
    (tmp_path / "own.yaml").write_text("base: ~/base.yaml\n")
    (tmp_path / "base.yaml").write_text("base: cppo_toy.yaml\nmodel: {path: ~/model}\nout: ~/run\n")
    cfg = config.load("~/own.yaml", ["reward.custom_file=~/own.py", "reward.custom=1", "data.train=~/few.jsonl",
                                     "data.eval=~/few.jsonl"])
    assert (cfg.out, cfg.reward.custom_file) == (str(tmp_path / "run"), str(tmp_path / "own.py"))
    assert find_model(cfg.model.path) == tmp_path / "model"
    assert len(data.load_problems(cfg.data.train)) == len(data.load_problems("math500", "~")) == 1
    assert command(evaluation, "--model", "~/model", "--data", "~/few.jsonl", "--out", "~/out.json",
                   *sets("eval.max_new_tokens=4")) == 0
    assert (tmp_path / "out.json").is_file()
    begun(tmp_path / "run", cfg, 1)
    assert command(report, "~/run", "--out", "~/page") == 0 and (tmp_path / "page" / "report.html").is_file()


def test_shipped_configs_work_from_any_folder(tmp_path, monkeypatch):
    """A path is looked for from the current folder, then from the repository; `out` is of the current folder."""
    monkeypatch.chdir(tmp_path)
    cfg = config.load("cppo_toy.yaml", ["data.limit=4"])
    task = train.load_task(cfg)
    assert task.source == TOY and len(task.problems) == 4 and len(task.sets[0].problems) == 500
    assert runfolder.require_free_folder(cfg, "never").absolute() == tmp_path / "runs" / "cppo_toy"
    assert config.load(ROOT / "configs" / "cppo_toy.yaml") == config.load("cppo_toy.yaml")
    Path("toy").mkdir()
    Path("toy/train.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    cfg = config.load("cppo_toy.yaml", ["data.limit=4"])
    assert [problem.question for problem in train.load_task(cfg).problems] == ["q"]


def test_paths_are_looked_up_beside_the_config_too_and_an_error_names_that_place(tmp_path, monkeypatch):
    """Beside the one that is given and beside its bases; a saved config has the paths themselves."""
    own, files = tmp_path / "own", ["train.jsonl", "reward.py", "chat.jinja", "tool.py", "sys.txt", "d/one.jsonl"]
    for folder in (own / "arms", own / "d", tmp_path / "work"):
        folder.mkdir(parents=True)
    for name in files:
        (own / name).write_text(json.dumps({"question": f"Is it {name}?", "answer": "1"}))
    write_tiny(own / "model")
    (own / "base.yaml").write_text("base: cppo_toy.yaml\nmodel: {path: ./model}\ndata: {train: [train.jsonl, d/*]}\n")
    (own / "arms" / "a.yaml").write_text("base: ../base.yaml\n")
    monkeypatch.chdir(tmp_path / "work")
    cfg = config.load("../own/arms/a.yaml", ["data.eval=train.jsonl", "data.chat_template=chat.jinja",
                      "reward={custom_file: reward.py, custom: 1}", "environment={file: tool.py, max_context: 999}",
                      "data.system_prompt.file=sys.txt"])
    found = [*cfg.data.train.split(",", 1), cfg.data.eval, cfg.data.chat_template, cfg.reward.custom_file,
             cfg.environment.file, cfg.model.path]
    names = ("train.jsonl", "d/*", "train.jsonl", "chat.jinja", "reward.py", "tool.py", "model")
    assert found == [f"{own}/{name}" for name in names]
    assert "Is it sys.txt?" in cfg.data.system_prompt and len(data.load_problems(cfg.data.train)) == 2
    Path("run.yaml").write_text(config.dump(cfg))
    assert config.load("run.yaml") == cfg
    shutil.copy(own / "train.jsonl", "train.jsonl")
    cfg = config.load("../own/arms/a.yaml", ["data.train=train.jsonl,tarin.jsonl"])
    with pytest.raises(ConfigError, match=f"data file tarin.jsonl not found .*work, {own}/arms, {own}, .*"
                                          f"{ROOT}.; give a .jsonl, .*or a hub name .*Did you mean 'train.jsonl'"):
        assert cfg.data.train.startswith("train.jsonl,") and data.load_problems(cfg.data.train)


def test_a_pattern_of_runs_makes_one_page_and_says_what_is_no_run(tmp_path, monkeypatch, command, capsys):
    """The page of before lies among them, by its default, and is no run."""
    report = pytest.importorskip("report")
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        begun(tmp_path / "runs" / f"s{seed}", toy_config(tmp_path / "run", f"seed={seed}"), 1)
    for words in (["runs/*"], ["runs/report", "runs/s0", "runs/s1"]):
        assert command(report, *words) == 0
        page = Path("runs/report/report.html").read_text()
        assert "runs/s0" in page and "runs/s1" in page
    assert capsys.readouterr().err.count("runs/report is left out: it has no config.yaml") == 1  # of the second time
    assert command(report, "runs/s0", "runs/typo") == 2  # not left out
    assert "runs/typo is not a run folder" in capsys.readouterr().err
    assert command(report, "runs/report") == 2
    assert command(report, "run/*") == 2 and "RUN_DIR run/* matches nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pattern_of_models_is_evaluated_one_by_one(tmp_path, monkeypatch, command, capsys):
    for seed, name in enumerate(("a", "b")):
        write_tiny(tmp_path / name / "hf", seed=seed)
    write_tiny(tmp_path / "c" / "hf", num_hidden_layers=1)
    (tmp_path / "few.jsonl").write_text("".join((ROOT / "toy" / "test.jsonl").read_text().splitlines(True)[:4]))
    given = ("--data", tmp_path / "few.jsonl", *sets("eval.max_new_tokens=4", "eval.limit=3"))
    started, start = [], evaluation.start_engine
    monkeypatch.setattr(evaluation, "start_engine", lambda *given: started.append(1) or start(*given))
    assert command(evaluation, "--model", tmp_path / "*" / "hf", tmp_path / "a" / "hf", *given, "--out",
                   tmp_path / "out") == 0
    assert len(started) == 2  # a and b differ in their weights alone
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("/")] == [str(tmp_path / name / "hf") for name in "abc"]
    for name in "abc":
        result = json.loads((tmp_path / "out" / f"{name}_hf.json").read_text())
        assert result["head"]["model"]["path"] == str(tmp_path / name / "hf")
        assert result["results"]["few"]["count"] == 3
    alone = tmp_path / "b.json"
    assert command(evaluation, "--model", tmp_path / "b" / "hf", *given, "--out", alone) == 0
    assert json.loads(alone.read_text()) == json.loads((tmp_path / "out" / "b_hf.json").read_text())
    for out, said in ((alone, "b.json must be a folder for the results of 2 models"),
                      (tmp_path / "no" / "x", f"--out: folder {tmp_path / 'no'} not found")):
        capsys.readouterr()
        assert command(evaluation, "--model", tmp_path / "a/hf", tmp_path / "b/hf", *given, "--out", out) == 2
        assert said in capsys.readouterr().err
    assert command(evaluation, "--model", tmp_path / "x*", *given) == 2
    assert "matches nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_a_set_to_evaluate_on(tmp_path, command, capsys):
    report = pytest.importorskip("report")
    yaml = written(toy_config(tmp_path / "run", "steps=1", "eval.every=1", *SHORT))
    none = ("--config", yaml, "--set", "data.eval=null")
    assert command(train, *none, "--check") == 0
    capsys.readouterr()
    assert command(train, *none) == 0
    printed = capsys.readouterr().out
    assert "after 1 steps, without a set to evaluate on (data.eval)\n" in printed and "hf --data SET\n" in printed
    assert [line["step"] for line in runfolder.read_log(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert command(report, tmp_path / "run") == 0
    assert command(evaluation, "--model", TOY, "--config", tmp_path / "run" / "config.yaml") == 2
    assert "--data must be given" in capsys.readouterr().err


def test_a_limit_evaluates_on_the_first_problems_and_leaves_all_out_of_training(tmp_path):
    cfg = toy_config(tmp_path / "run", "eval.limit=2", f"data.train={tmp_path / 'both.jsonl'}")
    held_out = (tmp_path / "few.jsonl").read_text().splitlines(True)
    own = '{"question": "mine?", "answer": "1"}\n'
    (tmp_path / "both.jsonl").write_text("".join([*held_out, own]))
    task = train.load_task(cfg)
    assert [problem.question for problem in task.problems] == ["mine?"]
    assert [p.question for p in task.sets[0].problems] == [json.loads(row)["question"] for row in held_out[:2]]
    assert [p.id for p in task.sets[0].prompts] == [p.id for p in task.sets[0].problems]
