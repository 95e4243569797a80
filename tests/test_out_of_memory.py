"""Where memory runs out: the run ends with a whole checkpoint and one line that says what to set."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, as_batch, make_groups, toy_config
from test_objectives import learner_on
from test_train import SHORT, without_times

import config
import model as decoder
import train
import update
from config import ConfigError
from infra import checkpoint, dist
from metrics import Clock
from prune import keep_all

LESS = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSecond line")
# So that rows are long: with a likelihood term every completion has a gradient.
ALL = ["prune.completions={kind: none}", "loss.denominator=all", "loss.likelihood=0.1"]
LENGTHS = [[30, 9, 25, 12], [14, 21, 7, 28], [26, 6, 32, 13], [9, 22, 14, 35]]


@contextmanager
def short_of_memory(rows: set[int], where: str):
    """Let memory run out in these passes with gradient, counted from 0, of a row through the first block."""
    passed, attention = [], decoder.BACKENDS["sdpa"]

    def refuse(*given) -> None:
        raise LESS

    def backend(segments):
        attend = attention(segments)

        def attend_or_not(layer, q, k, v, window):
            out = attend(layer, q, k, v, window)
            again = torch._C._current_graph_task_id() != -1  # in backward, where blocks are recomputed
            if layer == 0 and torch.is_grad_enabled() and not again:
                passed.append(layer)
                if len(passed) - 1 in rows and where == "forward":
                    refuse()
                if len(passed) - 1 in rows:
                    out.register_hook(refuse)
            return out

        return attend_or_not

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decoder.BACKENDS, "sdpa", backend)
        yield passed


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("row", [0, 1])
def test_an_update_out_of_memory_names_rank_row_and_a_capacity_below_it(row, where, tiny, tmp_path):
    learner = learner_on(tiny, toy_config(tmp_path / "run", "pack.capacity=240"))
    groups = make_groups(LENGTHS, [11, 5, 9, 7])
    adv_NG = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = as_batch(groups, adv_NG, keep_all(adv_NG))
    longest = max(len(row.ids_T) for row in learner.rows(update.make_minibatch(learner, batch, [0, 1, 2, 3])))
    said = (rf"out of memory in an update with rows of up to {longest} tokens on rank 0: go on "
            rf"with --resume auto and .*--set model.checkpoint_blocks=all .* "
            r"\(CUDA out of memory. Tried to allocate 2.00 GiB. Second line\)$")
    with short_of_memory({row}, where), pytest.raises(ConfigError, match=said):
        update.update(learner, batch, 0, Clock())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_so_does_the_critics(where, tiny, tmp_path):
    from leaves.critic.test_critic import fit, rolled_out
    learner = learner_on(tiny, toy_config(tmp_path / "run", "pack.capacity=176", "critic.lr=1e-2",
                                          name="ppo_gsm8k.yaml toy.yaml"))
    said = "out of memory in an update .* --resume auto and "
    with short_of_memory({0}, where), pytest.raises(ConfigError, match=said):
        fit(learner, rolled_out())


DRILL = """
import sys
sys.path[:0] = ["tests", "tests/math", "."]
import torch, train
from infra import checks, dist
from test_out_of_memory import short_of_memory
true = train.update
def second(learner, batch, step, *given):
    with short_of_memory({0} if step == 1 and dist.rank() == 1 and "--resume" not in sys.argv else set(), "backward"):
        return true(learner, batch, step, *given)
checks.before_run = lambda cfg, ready: ready
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
    capacity = re.search(r"--resume auto and --set (pack.capacity=\d+), or --set", line)[1]
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


def test_memory_that_runs_out_while_models_load_is_one_line(tmp_path, monkeypatch, refused):
    def refuse(*given):
        raise LESS

    monkeypatch.setattr(train, "build_learner", refuse)
    (tmp_path / "test.yaml").write_text(config.dump(toy_config(tmp_path / "run", *SHORT)))
    for more in ([], ["--check"]):
        line = refused(train, "--config", tmp_path / "test.yaml", *more)
        assert line.startswith("error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB. Second line); ")
        assert "model.lora.rank" in line and "optim.offload=true" in line
    assert dist.world_size() == 1
