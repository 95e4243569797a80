"""The model card of a run, and its way to the hub."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import TOY, toy_config
from huggingface_hub import ModelCard

import config
import report
import train
from infra import runfolder
from leaves.page import card
from settings.loader import ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of a base model that has a card."""
    folder = tmp_path_factory.mktemp("card")
    base = shutil.copytree(TOY, folder / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The toy\n")
    train.train(toy_config(folder / "run", f"model.path={base}", "rollout.max_new_tokens=8", "eval.max_new_tokens=8"))
    return folder / "run"


@pytest.mark.slow
def test_the_card_has_figures_settings_code_that_runs_and_the_licence_of_the_base(run, monkeypatch, capsys):
    path = card.write_card(run)
    read = ModelCard.load(path)  # by the hub's own reader, which checks the head
    assert (read.data.license, read.data.library_name, read.data.base_model) == ("apache-2.0", "transformers", None)
    assert "apache-2.0, that of the base model." in read.text
    lines = runfolder.read_log(run / "metrics.jsonl")
    for line in (line for line in lines if "eval/few/accuracy" in line):
        assert f"{line['eval/few/accuracy']:.1%} [{line['eval/few/low']:.1%}, {line['eval/few/high']:.1%}]" in read.text
    assert config.dump(config.load(run / "config.yaml")) in read.text
    assert f"those with a gradient {sum(line.get('train/tokens', 0) for line in lines):,}" in read.text
    monkeypatch.chdir(run / "hf")
    exec(re.search(r"```python\n(.*?)```", read.text, re.DOTALL)[1].replace("new_tokens=256", "new_tokens=4"), {})
    assert "<|im_start|>user\n" in capsys.readouterr().out

    mine = f"{path.read_text()}My own words.\n"
    path.write_text(mine)
    with pytest.raises(ConfigError, match="README.md has been edited, or is another's; move it away to have it"):
        card.write_card(run)
    assert path.read_text() == mine
    path.unlink()


def test_without_a_card_of_the_base_no_licence_is_claimed(run, monkeypatch):
    monkeypatch.setattr(card, "licence_of", lambda base: None)
    path = card.write_card(run)
    read = ModelCard.load(path)
    path.unlink()
    assert read.data.license is None and "states no licence where the run found it" in read.text


def test_a_run_without_a_model_has_no_card(tmp_path, run, command, capsys):
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    assert command(report, tmp_path, "--card") == command(report, run, tmp_path, "--card") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("(died) has no model for a card (hf/); let it finish first"), first
    assert "--card describes one run" in second
