"""Runs that are asked to stop by a signal, whatever they are doing."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT, refuses, toy_config, weights
from test_invariance import on_ranks
from test_train import RESUMED, SHORT, without_times

import config
import rollout
import train
from infra import checks, dist, runfolder, stopping
from infra.stopping import Stopped

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def own_signals():
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_in(cfg: config.Config, what: str, nth: int, rank: int) -> tuple[bool, int]:
    """Train until one rank gets SIGTERM in the nth rollout or evaluation; return if it ended, and its tokens since."""
    generate, draw = rollout.TorchEngine.generate, rollout.sample_tokens
    calls, since = {"rollout": 0, "evaluation": 0}, [-1]

    def counting(engine, requests, *rest, **settings):
        calls["evaluation" if rest[1:] else "rollout"] += 1
        return generate(engine, requests, *rest, **settings)

    def asked(*given):
        since[0] += since[0] >= 0
        if calls[what] == nth and dist.rank() == rank and since[0] < 0:
            since[0] = 0
            signal.raise_signal(signal.SIGTERM)
        return draw(*given)

    with (own_signals(), patch.object(rollout.TorchEngine, "generate", counting),
          patch.object(rollout, "sample_tokens", asked),
          patch.object(checks, "before_run", lambda cfg, ready: ready)):
        try:
            train.train(cfg, stop=stopping.Stop())
        except Stopped:
            return True, since[0]
    return False, since[0]


def gone_on(cfg: config.Config) -> dict[str, torch.Tensor]:
    with patch.object(checks, "before_run", lambda cfg, ready: ready):
        return weights(train.train(cfg, resume="auto"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), [("cppo", "evaluation"), *(
    (name, "rollout") for name in ("cppo", "greso", "tppo", "depo"))])
def test_samples_under_way_are_dropped_and_the_run_that_goes_on_is_the_same(name, what, tmp_path):
    """Bit for bit, and so are its logs: what had been drawn and learned for the step that was cut off is forgotten."""
    base = f"{name}_toy.yaml" if name in ("tppo", "depo") else "cppo_toy.yaml"
    more = RESUMED.get(name, ["data.limit=12", "prune.prompts.warmup_steps=1"])
    steps = 3 if name == "cppo" else 4
    cfg = toy_config(tmp_path / "whole", f"steps={steps}", "eval.every=1", *SHORT, *more, name=base)
    whole, cut = gone_on(cfg), replace(cfg, out=str(tmp_path / "cut"))
    nth = steps if (name, what) != ("cppo", "evaluation") else 3  # of four with the one before the first step
    assert stopped_in(cut, what, nth, rank=0) == (True, 0)
    done = runfolder.read_log(tmp_path / "cut" / "metrics.jsonl")[-1]["step"]
    assert 0 < done < steps and (tmp_path / "cut" / "checkpoints" / "latest").read_text() == f"step_{done:06d}"
    assert runfolder.state_of(tmp_path / "cut") == {"state": "stopped"}
    resumed = gone_on(cut)
    assert all(torch.equal(resumed[key], p) for key, p in whole.items())
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
    for log in ["samples.jsonl", "decisions.jsonl", *(f"eval_{step:06d}.jsonl" for step in range(steps + 1))]:
        assert (tmp_path / "cut" / log).read_text() == (tmp_path / "whole" / log).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rollout", "evaluation"])
def test_a_signal_to_one_rank_stops_all_at_the_same_place(what, tmp_path):
    cfg = toy_config(tmp_path / "whole", "steps=3", "eval.every=1", *SHORT)
    for stage in range(3):
        (tmp_path / f"{stage}").mkdir()
    whole, cut = on_ranks(2, tmp_path / "0", gone_on, cfg)[0], replace(cfg, out=str(tmp_path / "cut"))
    ended = on_ranks(2, tmp_path / "1", stopped_in, cut, what, 3, 1)
    assert [stopped for stopped, _ in ended] == [True, True] and ended[1] == (True, 0)
    assert runfolder.state_of(tmp_path / "cut") == {"state": "stopped"}
    resumed = on_ranks(2, tmp_path / "2", gone_on, cut)[0]
    assert all(torch.equal(resumed[key], p) for key, p in whole.items())
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")


@pytest.mark.slow
def test_before_the_first_step_is_done_there_is_nothing_to_save(tmp_path):
    cfg = toy_config(tmp_path / "run", "steps=2", *SHORT)
    assert stopped_in(cfg, "evaluation", 1, rank=0) == (True, 0)
    assert not (tmp_path / "run" / "checkpoints").exists()
    gone_on(cfg)
    assert runfolder.state_of(tmp_path / "run") == {"state": "finished"}


def test_what_is_sampled_in_lock_step_comes_to_its_end():
    """No rank leaves the others alone in it, and the next does not begin on one alone."""
    engine, done = type("Engine", (), {})(), []

    def generate():
        signal.raise_signal(signal.SIGTERM)
        done.append(True)

    engine.generate = generate
    with own_signals():
        stopping.stop_engine(engine, stopping.Stop(), alone=False)
        for count in (1, 2):
            with pytest.raises(Stopped):
                engine.generate()
            assert len(done) == count


PAUSING = """
import os, signal, sys, train
log_step = train.runfolder.RunLog.step
def pausing(log, step, *given):
    log_step(log, step, *given)
    if step == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
train.runfolder.RunLog.step = pausing
train.checks.before_run = lambda cfg, ready: ready
sys.exit(train.main())
"""


@pytest.mark.slow
def test_a_run_keeps_others_out_and_a_signal_ends_it_behind_its_step(tmp_path):
    """A process of its own, which pauses in its first step: there it holds the folder, and gets the signal."""
    cut = toy_config(tmp_path / "cut", *SHORT)
    (tmp_path / "cut.yaml").write_text(config.dump(cut))
    process = subprocess.Popen([sys.executable, "-c", PAUSING, "--config", str(tmp_path / "cut.yaml")], cwd=ROOT,
                               stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), process.stderr.read()
    refuses(f"is in use by process {process.pid} on", train.train, cut, resume="always")
    assert runfolder.state_of(tmp_path / "cut") == {"state": "running"}
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    rest = process.stderr.read()
    assert process.wait() == 130 and "a step that trains is finished; a" in rest, rest
    assert (tmp_path / "cut" / "checkpoints" / "latest").read_text() == "step_000001"
    assert without_times(tmp_path / "cut")[-1]["step"] == 1
    assert runfolder.state_of(tmp_path / "cut") == {"state": "stopped"}


def test_a_signal_that_is_ignored_stays_so():
    """nohup ignores SIGHUP, so that a run goes on when its terminal is closed."""
    with own_signals():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = stopping.Stop()
        signal.raise_signal(signal.SIGHUP)
        assert not stop.signal


def test_a_second_signal_stops_at_once_but_not_torchruns_echo_of_the_first(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(stopping, "monotonic", lambda: now[0])
    with own_signals():
        stop = stopping.Stop()
        for number, now[0] in ((signal.SIGINT, 5.0), (signal.SIGTERM, 5.5)):
            signal.raise_signal(number)  # an error, if either raised
        assert stop.signal == signal.SIGINT and "a second signal stops at once" in capfd.readouterr().err
        now[0] = 6.5
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
