"""A*-PO: the soft value of a prompt, its table, and the squared loss as an advantage."""

import math
from unittest.mock import Mock

import pytest
import torch
from conftest import refuses, toy_config
from outcomes import REWARD_NG
from test_collect import TOKENIZER, Script, prompts_of
from test_unbiased import padded

import train
from collect import Sampler
from infra import runfolder
from infra.stopping import Stopped
from leaves.soft_value import join
from leaves.soft_value.join import soft_value


def test_the_soft_value_lies_between_mean_and_maximum_of_the_rewards_that_there_are():
    """(1, 0, 0, 0) at beta 0.5 by hand, and its limits."""
    reward_NK = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert soft_value(reward_NK, 0.5).item() == pytest.approx(0.5 * math.log((math.exp(2) + 3) / 4))
    assert soft_value(reward_NK, 1e-3).item() == pytest.approx(1, abs=0.01)
    assert soft_value(reward_NK, 1e3).item() == pytest.approx(0.25, abs=0.01)
    assert soft_value(torch.full((1, 8), 0.7), 0.5).item() == pytest.approx(0.7)
    # Samples without a reward do not count.
    torch.testing.assert_close(soft_value(padded(REWARD_NG), 0.5), soft_value(REWARD_NG, 0.5))
    assert soft_value(torch.full((1, 3), torch.nan), 0.5).isnan().all()


def test_a_table_of_soft_values_is_built_once_and_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    """A torn line is sampled again, whole ones are not; a run that has trained since asks nobody again."""
    monkeypatch.setattr(join, "ROUNDS_A_WRITE", 1)
    cfg = toy_config(tmp_path / "run", "advantage.samples=4", "rollout.slots=8", "advantage.beta=0.25",
                     name="apo_gsm8k.yaml toy.yaml")
    prompts = prompts_of("eihiie")
    script = Script(prompts)
    sampler = Sampler(script, TOKENIZER, cfg.rollout, cfg.reward, cfg.seed)

    def table(sampled: bool = False) -> dict[str, float]:
        return join.estimate_table(sampler, prompts, cfg.advantage, tmp_path, sampled)

    whole = table()
    assert ["".join(kinds) for kinds in script.rounds] == ["ei", "hi", "ie"]
    some = 0.25 * math.log((math.exp(4) + 3) / 4)
    assert [whole[p.id] for p in prompts] == pytest.approx([1, some, 0, some, some, 1])
    file = tmp_path / "soft_values.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4]) + lines[4][:9])
    script.rounds = []
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(script, "generate", Mock(side_effect=Stopped))
        table()
    assert file.read_text() == "".join(lines[:4])
    refuses(r"soft_values.jsonl lacks 2 of 6 prompts, which only the initial policy", table, sampled=True)
    assert script.rounds == []
    assert table() == whole
    assert ["".join(kinds) for kinds in script.rounds] == ["ie"] and file.read_text() == "".join(lines)
    assert table(sampled=True) == whole and len(script.rounds) == 1


@pytest.mark.slow
def test_a_run_with_soft_values_trains_on_what_its_table_leaves(tmp_path):
    """The advantages that are logged are rewards less V* of the file, which a resumed run reads too (test_train.py)."""
    cfg = toy_config(tmp_path / "run", "data.limit=4", "advantage.samples=2", "steps=1", "rollout.group_size=1",
                     "update.minibatches=1", "data.eval=null", name="apo_gsm8k.yaml toy.yaml")
    train.train(cfg)
    lines = {line["id"]: torch.tensor([line["rewards"]], dtype=torch.float64)
             for line in runfolder.read_log(tmp_path / "run" / "soft_values.jsonl")}
    for line in runfolder.read_log(tmp_path / "run" / "samples.jsonl"):
        value = soft_value(lines[line["id"]], 0.5).item()
        completion, = line["completions"]
        assert completion["advantage"] == pytest.approx(completion["reward"] - value)
