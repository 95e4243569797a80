"""The loop: it resumes as the same run, keeps its records, refuses bad input in one line, and takes real GSM8K rows."""

import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
import torch
from conftest import PUBLISHED, ROOT, TOY, load, others_slow, refuses, steps_of, toy_config, weights, write_tiny
from test_invariance import change

import config
import loss
import train
from config import ConfigError
from infra import dist, runfolder
from learner import learning_rate
from update import split_prompts

# Where short texts prove as much.
SHORT = ["rollout.max_new_tokens=24", "eval.max_new_tokens=8"]


@pytest.mark.parametrize(("words", "module"), [
    (["--settings"], "leaves.page.show"), (["--config", "cppo_toy.yaml", "--show"], "leaves.page.show"),
    (["--config", "cppo_toy.yaml", "--fit"], "leaves.fit.fit")])
def test_a_command_of_a_leaf_that_is_gone_is_one_line(words, module, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, module, None)
    line = refused(train, *words)
    assert module in line and line.endswith("which this command needs; put that folder back")


def without_times(folder) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
            for line in runfolder.read_log(folder / "metrics.jsonl")]


def run_and_copy(cfg: config.Config, copy: Path, last: int, monkeypatch) -> dict[str, torch.Tensor]:
    """Weights of a whole run, and in `copy` what it would leave behind if it died in a step, counted from 0."""
    true_update, latest = train.update, Path(cfg.out) / "checkpoints" / "latest"

    def copying(learner, batch, step, *rest):
        if step == last:
            while not latest.exists():  # the first save may be on its way
                sleep(0.01)
            shutil.copytree(cfg.out, copy)
        return true_update(learner, batch, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "update", copying)
        return weights(train.train(cfg))


RESUMED = {
    "cppo": ["optim.schedule=cosine", "loss.kl=0.1", "update.epochs=2", "rollout.prompts_per_step=2"],
    "dppo": ["data.limit=6", "loss.denominator=all", "prune.prompts={kind: bernoulli, drop_prob: 0.6}",
             "prune.completions={kind: bernoulli, drop_prob: 0.7}"],
    "rank": ["data.limit=6", "prune.prompts={kind: rank, drop_prob: 0.5, max_skips: 2}"],
    "greso": ["data.limit=6", "prune.prompts.kind=greso", "rollout.until=informative", "rollout.max_rounds=2"],
    # A critic, a pool of completions that go on, and pretraining; a table of V*.
    "tppo": ["critic.pretrain_steps=3", "windows.tokens=12", "update.minibatches=2", "critic.epochs=2",
             "optim.warmup_steps=3"],
    "apo": ["data.limit=8", "update.minibatches=2"],
    "lora": ["model.lora.rank=2", "optim.lr=1e-3", "loss.kl=0.1", "update.epochs=2", "rollout.prompts_per_step=2"]}


@pytest.mark.parametrize("name", others_slow(RESUMED, "cppo"))
def test_a_resumed_run_is_the_same_run_bit_for_bit(name, tmp_path, monkeypatch):
    """4 steps in one go = 3 steps, dead in the middle of the fourth, resumed from the checkpoint after the second."""
    base = {"tppo": "tppo_toy.yaml", "apo": "apo_gsm8k.yaml toy.yaml"}.get(name, "cppo_toy.yaml")
    cfg = toy_config(tmp_path / "whole", "steps=4", "checkpoint.every=2", "eval.every=1", *SHORT,
                     *RESUMED[name], name=base)
    whole = run_and_copy(cfg, tmp_path / "cut", 3, monkeypatch)
    assert without_times(tmp_path / "whole")[-2]["train/grad_norm"] > 0
    assert [line["step"] for line in without_times(tmp_path / "cut")][-1] == 3
    assert (tmp_path / "cut" / "checkpoints" / "latest").read_text() == "step_000002"
    resumed = weights(train.train(replace(cfg, out=str(tmp_path / "cut")), resume="always"))
    assert all(torch.equal(resumed[name], p) for name, p in whole.items())
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
    logs = ["samples.jsonl", "decisions.jsonl", *(f"eval_{step:06d}.jsonl" for step in range(5))]
    for log in logs:
        assert (tmp_path / "cut" / log).read_text() == (tmp_path / "whole" / log).read_text()


@pytest.mark.slow
def test_what_was_left_to_auto_is_printed_written_down_saved_and_taken_again(tmp_path, monkeypatch, capsys):
    """On a machine whose memory had room for 3 slots, and where blocks had to be recomputed; then on this one."""
    memory = pytest.importorskip("leaves.fit.join")
    cfg = toy_config(tmp_path / "run", "checkpoint.every=1", "model.dtype=auto", *SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "used", lambda cfg, choice, *phases: 1e18 * (
            cfg.model.checkpoint_blocks == "none" or phases == ("rollout",) and cfg.rollout.slots > 3))
        patch.setattr(train, "asked_to_stop", lambda stop: True)
        with pytest.raises(KeyboardInterrupt):
            train.train(cfg)
    chosen = {"model.dtype": "float32", "model.attention": "sdpa", "model.checkpoint_blocks": "selective",
              "rollout.engine": "torch", "rollout.slots": 3, "rollout.sleep": "always", "device": "cpu"}
    printed = capsys.readouterr().out
    assert all(f"{key}={value}" in printed for key, value in chosen.items()) and "have no room for more" in printed
    assert json.loads((tmp_path / "run" / "env.json").read_text())["chosen"] == chosen
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step_000001" / "extra.pt", weights_only=True)["config"]
    assert saved.items() >= chosen.items()
    engines, start = [], train.start_engine
    monkeypatch.setattr(train, "start_engine", lambda *given: engines.append(start(*given)) or engines[0])
    train.train(cfg, resume="always")
    assert engines[0].slots == 3 and "checkpoint_blocks=selective" in capsys.readouterr().out


@pytest.mark.slow
def test_weights_change_only_after_they_have_been_copied(tmp_path, monkeypatch):
    order = []
    for owner, name in ((train.Checkpoints, "save"), (train.Checkpoints, "wait_for_copies"), (train, "update")):
        true = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, name=name, true=true: order.append(name) or true(*given))
    train.train(toy_config(tmp_path / "run", "checkpoint.every=1", "data.eval=null", "rollout.group_size=2", *SHORT,
                           name="grpo_toy.yaml"))
    assert order == ["update", "save", "wait_for_copies", "update", "save"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """Where a run of one step lies, and its policy: two evaluation sets, and two mini-batches."""
    place = tmp_path_factory.mktemp("finished")
    cfg = toy_config(place / "run", "steps=1", "update.minibatches=2", "optim.lr=1e-2", "optim.warmup_steps=4",
                     "rollout.temperature=0.7")
    (place / "more.jsonl").write_text((place / "few.jsonl").read_text())
    cfg = change(cfg, f"data.eval={place / 'few.jsonl'}, {place / 'more.jsonl'}")
    (place / "test.yaml").write_text(config.dump(cfg))
    return place, train.train(cfg)


@pytest.mark.slow
def test_the_run_folder_tells_what_ran(finished):
    summary = pytest.importorskip("leaves.page.summary").summary
    place, _ = finished
    folder = place / "run"
    assert config.load(folder / "config.yaml") == config.load(place / "test.yaml")
    assert json.loads((folder / "env.json").read_text()).keys() >= {"argv", "commit", "diff", "device", "libraries"}
    first, step, last = runfolder.read_log(folder / "metrics.jsonl")
    assert (first["step"], step["step"], last["step"]) == (0, 1, 1)
    assert "eval/few/accuracy" in last
    assert (step["prune/offered"], step["prune/kept"], step["train/lr"]) == (32, 16, 0.0025)
    assert 0 <= step["mismatch/logp_abs_mean"] <= step["mismatch/logp_abs_max"] < 1e-9  # float64
    sample, _ = runfolder.read_log(folder / "samples.jsonl")
    assert len(sample["completions"]) == 8
    assert {"few", "more"} <= set(summary(folder).split()) and str(folder) in summary(folder)


def test_each_answer_of_an_evaluation_is_kept(finished):
    place, _ = finished
    problems = [json.loads(line) for line in (place / "few.jsonl").read_text().splitlines()]
    for step, line in zip((0, 1), runfolder.read_log(place / "run" / "metrics.jsonl")[::2], strict=True):
        answered = runfolder.read_log(place / "run" / f"eval_{step:06d}.jsonl")
        assert [(a["set"], a["question"], a["gold"]) for a in answered] == [
            (name, p["question"], p["answer"]) for name in ("few", "more") for p in problems]
        few = [response for a in answered if a["set"] == "few" for response in a["responses"]]
        assert [r["k"] for r in few] == [0] * 6 and all(r["text"] for r in few)
        assert sum(r["verdict"] == "right" for r in few) / 6 == line["eval/few/accuracy"]
        assert sum(r["tokens"] for r in few) / 6 == line["eval/few/length"]


def test_the_learning_rate_is_a_pure_function_of_the_step(tmp_path):
    cfg = toy_config(tmp_path / "run", "steps=10", "optim.lr=1", "optim.warmup_steps=4")
    assert [learning_rate(step, cfg.optim, 10) for step in range(10)] == [0.25, 0.5, 0.75, 1] + [1] * 6
    cosine = change(cfg, "optim.schedule=cosine")
    expected = [0.25, 0.5, 0.75, 1, *((1 + math.cos(math.pi * i / 6)) / 2 for i in range(6))]
    assert [learning_rate(step, cosine.optim, 10) for step in range(10)] == pytest.approx(expected)


def test_minibatches_split_the_groups_and_differ_by_step():
    splits = [split_prompts(seed=0, step=step, offered=12, count=4) for step in range(5)]
    assert all(sorted(n for part in parts for n in part) == list(range(12)) for parts in splits)
    assert all([len(part) for part in parts] == [3] * 4 for parts in splits)
    assert len({str(parts) for parts in splits}) == 5
    assert splits[0] != split_prompts(seed=1, step=0, offered=12, count=4)


def test_an_exported_policy_is_the_policy_that_was_trained(finished):
    place, policy = finished
    exported, before = weights(load(place / "run" / "hf")), weights(load(TOY))
    for name, p in weights(policy).items():
        assert torch.equal(exported[name], p.float()) and not torch.equal(exported[name], before[name]), name


GSM8K = [
    {"question": f"Tom’s {n} hens lay {n} eggs each on Monday — and ½ as many on Tuesday. How many eggs in all?",
     "answer": f"On Monday {n} * {n} = <<{n}*{n}={n * n}>>{n * n}, so {n * n * 3 // 2:,}.\n#### {n * n * 3 // 2:,}"}
    for n in (4, 6, 8, 40)]
SMALLER = {"vapo_math.yaml": ["critic.pretrain_steps=1"], "dapo_math.yaml": ["reward.overlong_tokens=8"],
           "depo_math.yaml": ["reward.overlong_tokens=8"], "dppo_listed_math.yaml": ["pack.budget=3000"],
           "tppo_math.yaml": ["critic.pretrain_steps=1", "windows.tokens=10"], "opd_math.yaml": [f"teacher.path={TOY}"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configs_run_on_rows_in_their_layout(name, tmp_path):
    """Every setting as shipped but the sizes: two steps, evaluation, checkpoint, export."""
    rows = GSM8K if "gsm8k" in name else [
        {"problem": f"Compute ${n}^2$.", "solution": rf"It is $\boxed{{{n * n}}}$."} for n in (4, 6, 8, 40)]
    data, held_out = tmp_path / "rows.jsonl", tmp_path / "others.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out.write_text(json.dumps({"question": "Compute $5^2$.", "answer": "25"}) + "\n")
    count = max(4, config.load(name).update.minibatches)
    cfg = config.load(name, [
        f"model.path={TOY}", f"out={tmp_path / 'run'}", f"data.train={data}", f"data.eval={held_out}", "steps=2",
        "data.max_prompt_tokens=1024", "rollout.max_new_tokens=24", "eval.max_new_tokens=24",
        f"rollout.prompts_per_step={count}", "pack.capacity=4096", "rollout.engine=torch", "rollout.tensor_parallel=1",
        "rollout.cache_gib=null", *SMALLER.get(name, [])])
    train.train(cfg)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_000002"
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    step = steps_of(tmp_path / "run")[-1]
    pruning = cfg.prune.completions
    if pruning.kind in ("none", "topk") and cfg.rollout.until == "offered" and not hasattr(cfg, "windows"):
        assert step["prune/kept"] == count * getattr(pruning, "keep", cfg.rollout.group_size)
    assert step["train/kl"] >= 0
    assert "eval/others/accuracy" in runfolder.read_log(tmp_path / "run" / "metrics.jsonl")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(PUBLISHED, "cppo_gsm8k.yaml", "prompt_pps_gsm8k.yaml"))
def test_the_published_configs_train_at_toy_size(name, tmp_path):
    """As `--config NAME.yaml toy.yaml` does; six need more than that, which their own toy config says."""
    names = [f"{name.removesuffix('_math.yaml')}_toy.yaml"] if name in SMALLER else [name, "toy.yaml"]
    sizes = config.flatten(config.load(names))
    few = [f"rollout.prompts_per_step={max(4, sizes['update.minibatches'])}", "steps=2", "eval.limit=2",
           *["critic.pretrain_steps=1"] * (sizes.get("critic.pretrain_steps", 0) > 0),
           *[f"teacher.path={TOY}"] * ("teacher.path" in sizes)]
    train.train(config.load(names, [f"out={tmp_path / 'run'}", *few]))
    steps = [line for line in steps_of(tmp_path / "run") if "train/grad_norm" in line]
    assert steps and all(math.isfinite(line["train/grad_norm"]) for line in steps)
    assert any(line["train/tokens"] > 0 for line in steps)


BROKEN = {
    "no such data": (["data.train=nowhere.jsonl", "out={new}"], "data file nowhere.jsonl not found"),
    "prompt too long": (["data.max_prompt_tokens=20", "out={new}"], "prompt toy/"),
    "longer than the model": (["eval.max_new_tokens=9999", "out={new}"], "allow sequences of 10127 tokens, but"),
    "another run": (["seed=5"], "already holds a run with another config: seed (0 there, 5 now); start this one with"),
    "no folder": (["out={folder}/few.jsonl/run"], "few.jsonl is no folder or not writable; set `out` to a place that"),
    "not a run folder": (["out={folder}"], "exists and is not a run folder; set `out` to a new folder"),
    "no weights": (["model.path={empty}", "out={new}"], "{empty} has no model.safetensors.index.json or"),
    "kernel without CUDA": (["model.attention=varlen", "out={new}"], "model.attention=varlen cannot run on cpu"),
    "no CUDA": (["device=cuda", "out={new}"], "device=cuda: this machine shows no CUDA")}


@pytest.mark.parametrize("case", BROKEN)
def test_bad_input_is_one_line_with_the_remedy_and_status_2(case, finished, tmp_path, command, capfd):
    if case == "no CUDA" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    overrides, message = BROKEN[case]
    places = {"folder": finished[0], "new": tmp_path / "new", "empty": write_tiny(tmp_path / "tiny0")}
    (places["empty"] / "model.safetensors").unlink()
    sets = [word for override in overrides for word in ("--set", override.format_map(places))]
    status = command(train, "--config", places["folder"] / "test.yaml", *sets)
    said = capfd.readouterr().err
    assert (status, said.count("\n")) == (2, 1), said
    assert said.startswith("error: ") and message.format_map(places) in said
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_resume_without_a_run_or_a_checkpoint_is_refused_and_auto_begins_again(tmp_path):
    cfg = toy_config(tmp_path / "run", "steps=1", "rollout.prompts_per_step=2", *SHORT)
    train.train(cfg)
    with pytest.raises(ConfigError, match="config.yaml not found, so there is no run to resume"):
        train.train(replace(cfg, out=str(tmp_path / "nowhere")), resume="always")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refuses("no whole checkpoint, so no step of this run is left", train.train, cfg, resume="always")
    before = without_times(tmp_path / "run")
    (tmp_path / "run" / "eval_000009.jsonl").touch()
    train.train(cfg, resume="auto")  # begins again
    assert without_times(tmp_path / "run") == before and not (tmp_path / "run" / "eval_000009.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("every", "how"), [
    (1, "--resume auto goes on from the newest checkpoint, step_000001"),
    pytest.param(0, "--resume auto begins it again, since no checkpoint is there", marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_leaves_the_policy_and_the_batch(
        every, how, tmp_path, monkeypatch, command, capsys):
    """Nothing of the step is applied, and its records lie in the run folder. Status 1 and one line, not a traceback."""
    cfg = toy_config(tmp_path / "run", "steps=2", f"checkpoint.every={every}", "pack.capacity=8192", *SHORT)
    (tmp_path / "test.yaml").write_text(config.dump(cfg))
    true, seen = loss.TRUST["clip"], []

    def spoil(*given):
        seen.append(None)
        return true(*given) * (float("inf") if len(seen) > 1 else 1.0)

    monkeypatch.setitem(loss.TRUST, "clip", spoil)
    assert command(train, "--config", tmp_path / "test.yaml") == 1
    batch = torch.load(tmp_path / "run" / "not_finite_step_000002.pt", weights_only=True)
    assert len(batch["groups"]) == 4 and batch["adv_NG"].shape == (4, 8)
    assert runfolder.state_of(tmp_path / "run") == {
        "state": "failed", "error": "NotFinite: the loss in step 2 is not finite"}
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: the loss in step 2 is not finite; the step's batch is in ") and said.endswith(how)
    if every:
        assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_000001"


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch):
    """Files may grow to 4 MB: the second checkpoint cannot be written, and the run goes on from the first."""
    cfg = toy_config(tmp_path / "run", "steps=3", "checkpoint.every=1", "checkpoint.keep=2")
    (tmp_path / "test.yaml").write_text(config.dump(cfg))
    whole = run_and_copy(replace(cfg, out=str(tmp_path / "whole")), tmp_path / "run", 1, monkeypatch)
    resume = [sys.executable, "train.py", "--config", str(tmp_path / "test.yaml"), "--resume"]
    done = subprocess.run(resume, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000)))
    assert done.returncode == 2
    assert re.search(r"error: .*step_000002.unfinished could not be written, with [\d,]+ MiB free there: .*; make "
                     "room; --resume auto goes on from the newest checkpoint, step_000001", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    resumed = weights(train.train(cfg, resume="always"))
    assert all(torch.equal(resumed[name], p) for name, p in whole.items())
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "offload"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_step_on_cuda(dtype, offload, tmp_path):
    """Sampling, both kernels, mixed precision, update, checkpoint and export; engine and learner agree."""
    dist.close()  # the suite's group is gloo alone
    try:
        train.train(toy_config(tmp_path / "run", "device=cuda", "rollout.engine=torch", f"model.dtype={dtype}",
                               f"optim.offload={str(offload).lower()}", "checkpoint.every=1", "update.epochs=2",
                               "model.checkpoint_blocks=all", "loss.kl=0.1"))
    finally:
        dist.close()
        dist.init("cpu")
    step = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")[1]
    assert step["mismatch/logp_abs_mean"] < {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    assert step["train/grad_norm"] > 0 and (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("cppo_toy", 2), ("lora_toy", 1)])
def test_cppo_learns_to_reason(name, ranks, tmp_path):
    """The promise of the README: at least 40 points on held-out problems, 95% intervals apart, longer answers."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run([*(launch if ranks > 1 else [sys.executable]), "train.py", "--config", f"{name}.yaml",
                           "--set", f"out={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")
    first, last = lines[0], lines[-1]
    assert last["eval/test/accuracy"] - first["eval/test/accuracy"] >= 0.4
    assert last["eval/test/low"] > first["eval/test/high"]
    assert last["eval/test/length"] > 2 * first["eval/test/length"]


REPORT = ["report --help"] if (ROOT / "report.py").exists() else []  # with the page's leaf


@pytest.mark.parametrize("command", ["train --help", "eval --help", "replay --help", "chat --help", *REPORT,
                                     "train --config cppo_toy.yaml --set rollout.group_size=1"])
def test_help_and_a_mistake_in_the_config_come_before_torch(command):
    """Which takes seconds to import."""
    name, *words = command.split()
    code = (f"import runpy, sys; sys.argv = {[f'{name}.py', *words]}\n"
            f"try: runpy.run_path('{name}.py', run_name='__main__')\n"
            "except SystemExit as end: print(end.code, [n for n in ('torch', 'numpy') if n in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    wrong = "group_size" in command
    assert done.stdout.splitlines()[-1] == f"{2 if wrong else 0} []", done.stderr
    assert not wrong or done.stderr.startswith("error: rollout.group_size=1") and done.stderr.count("\n") == 1
