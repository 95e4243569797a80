"""One run is one thing: what it is made of is the same on every rank and at every resume, or what differs is named."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import ROOT, refuses, toy_config
from test_invariance import on_ranks
from test_lost import FEW, go_on, steps
from test_lost import original as original  # a fixture
from test_lost import run as run

import config
import train
from config import ConfigError
from infra import checkpoint, dist, results, runfolder, user_files

REWARD = "import helper\nfrom tools.inner import one\ndef reward(text):\n    return helper.worth(text) * one()\n"
HELPERS = {"helper.py": "import deep, math\ndef worth(text): return deep.WORTH", "deep.py": "WORTH = 0.5",
           "tools/__init__.py": "", "tools/inner.py": "from . import last\ndef one(): return 1", "tools/last.py": ""}


def write_reward(folder: Path) -> Path:
    """A reward file, the helpers that it imports, and a module that it does not."""
    for name, text in {"mine.py": REWARD, "other.py": "WORTH = 1", **HELPERS}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "mine.py"


FILES_OF = runfolder.files_of
SPOILT = {"code": (checkpoint, "hash_file", str),
          "helper": (runfolder, "files_of", lambda *given: FILES_OF(*given) | {"deep.py": "WORTH = 1"})}
NAMED = {"seed": "seed was 0 and is 5", "code": "code of ", "helper": "deep.py",
         "resume": "--resume was 'never' and is 'auto'"}


def differ_on_ranks(folder: Path) -> None:
    """Change one thing after another that a run is made of, on one rank alone."""
    mine = dist.rank() == 1
    for what, named in NAMED.items():
        cfg = config.load(folder / "run.yaml", ["seed=5"] if mine and what == "seed" else [])
        spoilt = patch.object(*SPOILT[what]) if mine and what in SPOILT else nullcontext()
        with spoilt, pytest.raises(ConfigError, match=f"the ranks differ, from 0 to 1: .*{named}"):
            train.prepare(cfg, "auto" if what == "resume" and mine else "never")


def test_what_is_not_the_same_on_all_ranks_is_named_by_each_before_the_first_step(tmp_path):
    pytest.importorskip("leaves.own_rewards")
    cfg = toy_config(tmp_path / "run", *FEW, "reward.custom=1", f"reward.custom_file={write_reward(tmp_path / 'own')}")
    (tmp_path / "run.yaml").write_text(config.dump(cfg))
    on_ranks(2, tmp_path, differ_on_ranks, tmp_path)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_config_that_was_edited_in_the_run_folder_is_compared_with_the_checkpoint(run):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1", 1))
    refuses("step_000004 was made with other settings: seed .0 there, 1 now.", go_on, run)
    assert steps(run) == [1, 2, 3, 4]


def test_the_code_of_a_run_is_all_of_ours_but_tests():
    code = {name.removeprefix("code of ") for name in checkpoint.describe_code() if name.startswith("code of ")}
    assert {"loss.py", "infra/dist.py", "leaves/__init__.py"} <= code and not any("test_" in name for name in code)


@pytest.mark.slow
def test_other_code_and_libraries_are_named_and_the_run_goes_on(run, monkeypatch, capsys):
    go_on(run)
    assert "was made with another" not in capsys.readouterr().err
    monkeypatch.setattr(checkpoint, "versions", lambda: runfolder.versions() | {"torch": "1.0"})
    real = checkpoint.hash_file
    monkeypatch.setattr(checkpoint, "hash_file", lambda path: "x" if path == ROOT / "loss.py" else real(path))
    go_on(run, "steps=6")
    assert "step_000005 was made with another ['code of loss.py', 'version of torch']" in capsys.readouterr().err


@pytest.mark.slow
def test_helpers_of_a_reward_file_are_found_copied_and_compared(tmp_path, capsys):
    from leaves.own_rewards import calls
    reward = write_reward(tmp_path / "own")
    cfg = toy_config(tmp_path / "run", *FEW, "steps=1", "reward.custom=1", f"reward.custom_file={reward}")
    train.train(cfg)
    assert dict(calls.RewardFile.of(cfg.reward).source.helpers) == HELPERS
    for name, text in HELPERS.items():
        assert (tmp_path / "run" / name).read_text() == text
    assert not (tmp_path / "run" / "other.py").exists()
    (tmp_path / "own" / "deep.py").write_text("WORTH = 0.25")
    with pytest.raises(ConfigError, match=f"the file of deep.py has changed .*restore it from {tmp_path}/run/deep.py"):
        train.train(config.replace(cfg, steps=2), "always")
    head = results.reward_head(config.replace(cfg.reward, accuracy=0.0))
    shutil.copyfile(tmp_path / "run" / "deep.py", tmp_path / "own" / "deep.py")
    user_files.read_file.cache_clear()
    assert head != results.reward_head(config.replace(cfg.reward, accuracy=0.0))
    train.train(config.replace(cfg, steps=2), "always")


def test_a_helper_that_changes_during_a_run_ends_it(tmp_path):
    """Else the workers that are started later would reward by another file than the first ones."""
    from leaves.own_rewards import calls
    reward = write_reward(tmp_path)
    own = calls.RewardFile.of(config.Reward(accuracy=0.0, custom=1.0, custom_file=str(reward)))
    reward.with_name("helper.py").write_text("def worth(text): return 1")
    with pytest.raises(ConfigError, match="helper.py, which it imports, has changed since the run began; restore it"):
        own.first_value(calls.start_once(own, calls.RewardCall(("a",), "", 1, {}, 0)))
