"""Where memory runs out: the mini-batch is repeated in smaller rows, nothing counts twice, and the run goes on."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TOY, as_batch, make_groups, nudge, toy_config, weights
from shortage import LESS, short_of_memory
from test_critic import fit, rolled_out
from test_objectives import learner_on
from test_train import SHORT, main, without_times

import config
import memory
import train
import update
from config import ConfigError
from infra import checkpoint, dist
from methods.smaller_rows import Packing
from metrics import Clock
from prune import keep_all

ALL = ["prune.completions={kind: none}", "loss.count=all"]  # so that rows are long
LENGTHS = [[30, 9, 25, 12], [14, 21, 7, 28], [26, 6, 32, 13], [9, 22, 14, 35]]


def updated(tiny, out, capacity: int, *settings: str, rows: set[int] = frozenset(), where: str = "forward"):
    """Learner, weights and metrics after two updates, of which memory runs out in the first."""
    cfg = toy_config(out, "loss.kl=0.3", "optim.lr=0.01", *settings)
    learner, groups = learner_on(tiny, cfg), make_groups(LENGTHS, [11, 5, 9, 7])
    adv_NG = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = as_batch(groups, adv_NG, keep_all(adv_NG))
    learner.pack.capacity, learner.pack.least = capacity, 48  # of these groups, not of all that the config allows
    nudge(learner.policy, 0.01)  # so that the reference is another
    with short_of_memory(rows, where):
        measured = [update.update(learner, batch, 0, Clock())]
    measured.append(update.update(learner, batch, 1, Clock()))
    return learner, weights(learner.policy), measured


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_first_mini_batch_repeated_is_that_of_the_lower_capacity_bit_for_bit(where, tiny, tmp_path, capsys):
    """Its rows are the same then, and so are all metrics. Memory runs out in the second row of two."""
    _, expected, metrics = updated(tiny, tmp_path / "lower", 120, "loss.kl=0")
    assert metrics[0]["pack/rows"] >= 3
    learner, found, again = updated(tiny, tmp_path / "halved", 240, "loss.kl=0", rows={1}, where=where)
    assert learner.pack.capacity == 120 and again == metrics
    assert all(torch.equal(found[name], p) for name, p in expected.items())
    said = (r"out of memory in an update with rows of up to \d+ tokens on rank 0: the mini-batch is repeated, from "
            r"here on with pack.capacity=120 \(CUDA out of memory. Tried to allocate 2.00 GiB.\)\n")
    assert re.fullmatch(said, capsys.readouterr().err)


@pytest.mark.parametrize("settings", [
    ("update.epochs=2", "update.minibatches=2"), ("update.epochs=2",), ("loss.old_logp=engine", "update.minibatches=2"),
    ("loss.tis_cap=1.1", "loss.mask_ratio=1.1", "update.epochs=3"), ("model.checkpoint_blocks=all", "update.epochs=2")])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("row", [1, 2, 3])
def test_memory_that_runs_out_in_any_row_changes_no_parameter_and_no_metric(row, where, settings, tiny, tmp_path):
    """But how rows are cut, and what is measured of that. The second update has its old log-probs of its own."""
    _, expected, metrics = updated(tiny, tmp_path / "whole", 120, *settings)
    learner, found, again = updated(tiny, tmp_path / "halved", 120, *settings, rows={row}, where=where)
    assert learner.pack.capacity == 60 and learner.pack.halved == 1
    for name, p in expected.items():
        torch.testing.assert_close(found[name], p, rtol=0, atol=1e-10, msg=name)
    for one, other in zip(metrics, again, strict=True):
        assert {k: v for k, v in other.items() if not k.startswith("pack/")} == pytest.approx(
            {k: v for k, v in one.items() if not k.startswith("pack/")}, rel=1e-9, abs=1e-12)
        assert 0 < other["pack/density"] <= 1 and other["pack/rows"] >= one["pack/rows"]


def test_later_mini_batches_of_the_step_are_cut_again_before_memory_runs_out_in_them_too(tiny, tmp_path):
    """Rows of all four mini-batches were made before the first pass."""
    cfg = toy_config(tmp_path / "run", "pack.capacity=176", "update.minibatches=4")
    learner, groups = learner_on(tiny, cfg), make_groups([[30, 30, 30, 30]] * 4, [6] * 4)
    learner.pack.least = 40  # of these groups, not of all that the config allows
    ones = torch.ones(4, 4, dtype=torch.float64)
    longest, true = [], update.add_gradient

    def seen(learner, prepared, unmoved):
        longest.append(len(prepared.row.ids_T))
        return true(learner, prepared, unmoved)

    with short_of_memory({0}, "forward"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "add_gradient", seen)
        update.update(learner, as_batch(groups, ones, keep_all(ones)), 0, Clock())
    assert longest[0] == 126 and max(longest[1:]) <= learner.pack.capacity == 88 and learner.pack.halved == 1


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("lam", [1, 0.9])
def test_the_critics_mini_batch_is_repeated_with_its_targets(lam, where, tiny, tmp_path):
    """At lambda 0.9 they depend on the critic before it has moved."""
    found = []
    for rows in ({}, {2}):
        cfg = toy_config(tmp_path / "run", "pack.capacity=176", "critic.minibatches=2", "critic.epochs=2",
                         "critic.lr=1e-2", f"advantage.lam_critic={lam}", name="ppo_toy.yaml")
        learner = learner_on(tiny, cfg)
        learner.pack.least, learner.pack.capacity = 16, 40
        nudge(learner.critic.model, 0.3)
        with short_of_memory(rows, where):
            measured = fit(learner, rolled_out())
        found.append((weights(learner.critic.model), measured))
        assert learner.pack.halved == len(rows)
    (expected, one), (other, two) = found
    for name, p in expected.items():
        torch.testing.assert_close(other[name], p, rtol=0, atol=1e-10, msg=name)
    assert one == pytest.approx(two, rel=1e-9)


def test_a_capacity_is_halved_until_it_is_below_the_row_that_was_tried_and_never_below_a_sequence():
    packing = Packing(1024, None, least=100)
    packing.halve(1000, LESS)
    assert (packing.capacity, packing.halved) == (512, 1)
    packing.halve(210, LESS)
    assert (packing.capacity, packing.halved) == (128, 2)
    packing.halve(128, LESS)
    assert (packing.capacity, packing.halved) == (100, 3)
    with pytest.raises(ConfigError, match=r"rows of up to 100 tokens on rank 0, and one sequence may have 100 "
                                          r"\(data.*tokens\): set model.checkpoint_blocks=all .* \(CUDA out"):
        packing.halve(100, LESS)
    with pytest.raises(ConfigError, match="which were halved 3 times before: go on .* --set pack.capacity=500"):
        Packing(1000, None, least=10, halved=3).halve(1000, LESS)


def test_after_three_halvings_a_run_ends_with_status_2_and_a_whole_checkpoint(tmp_path, monkeypatch, capsys):
    """Memory runs out in the second step, in every row, whatever its length."""
    cfg = toy_config(tmp_path / "run", "steps=3", "checkpoint.every=1", *ALL, "rollout.prompts_per_step=8", *SHORT)
    (tmp_path / "test.yaml").write_text(config.dump(cfg))
    true = train.update

    def second(learner, batch, step, clock):
        learner.pack.least = max(len(group.prompt.ids) + s.length for group in batch.groups for s in group.samples)
        with short_of_memory(set(range(99)) if step else set(), "backward"):
            return true(learner, batch, step, clock)

    monkeypatch.setattr(train, "update", second)
    assert main(monkeypatch, "--config", tmp_path / "test.yaml") == 2
    *lines, last = capsys.readouterr().err.splitlines()
    repeated = [re.search(r"pack.capacity=(\d+)", line)[1] for line in lines if "is repeated" in line]
    assert repeated == ["512", "256", "128"]
    assert last.startswith("error: out of memory in an update") and "halved 3 times" in last
    path, saved = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert path.name == "step_000001" and saved["config"]["pack.capacity"] == 1024


@pytest.mark.parametrize("asked", ["1024", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_the_capacity_that_it_had_come_to(asked, tmp_path, monkeypatch, capsys):
    """Memory runs out in the second of four steps; what goes on from there is the same byte for byte."""
    cfg = toy_config(tmp_path / "whole", "steps=4", "checkpoint.every=1", "checkpoint.keep=all",
                     f"pack.capacity={asked}", *SHORT)
    true, capacities = train.update, []

    def second(learner, batch, step, clock):
        with short_of_memory({0} if step == 1 else set(), "backward"):
            measured = true(learner, batch, step, clock)
        capacities.append(learner.pack.capacity)
        return measured

    with monkeypatch.context() as patch:
        patch.setattr(train, "update", second)
        whole = weights(train.train(cfg))
    assert capacities[0] > capacities[1] == capacities[2] == capacities[3]
    for step in (2, 3):
        cut = tmp_path / f"cut_{step}"
        shutil.copytree(cfg.out, cut, ignore=shutil.ignore_patterns("hf", "lock", "state.json"))
        (cut / "checkpoints" / "latest").write_text(f"step_{step:06d}")
        resumed = weights(train.train(replace(cfg, out=str(cut)), resume="always"))
        assert all(torch.equal(resumed[name], p) for name, p in whole.items())
        assert without_times(cut) == without_times(tmp_path / "whole")
        printed = capsys.readouterr().out
        assert "not the same run" not in printed
        assert f"pack.capacity={capacities[1]}" in printed
    larger = replace(cfg, pack=replace(cfg.pack, capacity=2048))  # what is asked for anew is not halved
    decided = memory.decide(larger, TOY, checkpoint.find(tmp_path / "whole" / "checkpoints")[1]["config"])
    assert decided.pack.capacity == 2048


@pytest.mark.slow
def test_rows_left_to_auto_give_the_parameters_of_rows_set_by_hand(tmp_path):
    """Two whole steps of two epochs of two mini-batches in float64, with a KL."""
    found = {}
    for capacity in ("auto", "176", "300"):
        cfg = toy_config(tmp_path / capacity, "loss.kl=0.1", "update.epochs=2", "update.minibatches=2", *ALL,
                         f"pack.capacity={capacity}", *SHORT)
        found[capacity] = weights(train.train(cfg))
    rows = {name: [line["pack/rows"] for line in without_times(tmp_path / name) if "pack/rows" in line]
            for name in found}
    assert rows["auto"] == [2, 2] and min(rows["176"]) > 2
    for name, p in found["auto"].items():
        for other in ("176", "300"):
            torch.testing.assert_close(found[other][name], p, rtol=0, atol=1e-10, msg=name)


DRILL = """
import sys
sys.path[:0] = ["tests", "."]
import torch, train, preflight
from infra import dist
from shortage import short_of_memory
true = train.update
def second(learner, batch, step, clock):
    with short_of_memory({0} if step == 1 and dist.rank() == 1 and "--resume" not in sys.argv else set(), "backward"):
        return true(learner, batch, step, clock)
preflight.run_checks = lambda *given: []
train.update = second
if __name__ == "__main__":
    sys.exit(train.main())
"""


@pytest.mark.slow
def test_of_two_ranks_the_one_whose_memory_runs_out_ends_with_status_2_and_says_what_to_set(tmp_path):
    """The checkpoint before is whole, and two runs that go on from it as they are told are the same."""
    cfg = toy_config(tmp_path / "run", "steps=3", "checkpoint.every=1", *ALL, *SHORT)
    (tmp_path / "drill.py").write_text(DRILL)

    def launch(out, *more: str) -> str:
        (tmp_path / "test.yaml").write_text(config.dump(replace(cfg, out=str(out))))
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                               str(tmp_path / "drill.py"), "--config", str(tmp_path / "test.yaml"), *more], cwd=ROOT,
                              capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return f"{done.returncode} {done.stdout}{done.stderr}"

    said = launch(tmp_path / "run")
    line, = re.findall(r"error: out of memory in an update with rows of up to \d+ tokens on rank 1: (.*)", said)
    assert re.search(r"exitcode\s+: 2\b", said), said
    capacity = re.search(r"--resume auto and --set (pack.capacity=\d+), or set", line)[1]
    path, saved = checkpoint.find(tmp_path / "run" / "checkpoints")
    assert path.name == "step_000001" and saved["config"]["pack.capacity"] == 1024
    ended = []
    for name in ("one", "other"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        assert launch(tmp_path / name, "--resume", "auto", "--set", capacity).startswith("0 ")
        lines = without_times(tmp_path / name)
        ended.append(((tmp_path / name / "hf" / "model.safetensors").read_bytes(), lines))
        assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3]
    assert ended[0] == ended[1]


def test_memory_that_runs_out_while_models_load_is_one_line(tmp_path, monkeypatch, capsys):
    def refuse(*given):
        raise LESS

    monkeypatch.setattr(train, "build_learner", refuse)
    cfg = toy_config(tmp_path / "run", *SHORT)
    (tmp_path / "test.yaml").write_text(config.dump(cfg))
    for more in ([], ["--check"]):
        assert main(monkeypatch, "--config", tmp_path / "test.yaml", *more) == 2
        line, = capsys.readouterr().err.splitlines()
        assert line.startswith("error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.); ")
        assert "model.lora.rank" in line and "optim.offload=true" in line
    assert dist.world_size() == 1
