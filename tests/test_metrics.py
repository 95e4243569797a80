"""What is logged and printed is what happened: by hand."""

from dataclasses import replace

import pytest
import torch
from conftest import as_batch, as_rewards, as_rolled, make_groups

import metrics
from config import Pack
from infra import dist
from infra.lines import rewrite_log
from records import Batch, Group, Prompt, PromptDraw, Pruned, Rolled, Sample


def test_rollout_metrics_by_hand():
    prompt = Prompt("q", (1,), "1")
    groups = [
        Group(prompt, (Sample((1, 2), (-1.0, -2.0), True), Sample((1,), (-0.5,), False))),
        Group(prompt, (Sample((1, 2, 3), (-1.0, -1.0, -0.5), False), Sample((4,), (-2.0,), False)))]
    reward_NG = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    pruned = Pruned(torch.tensor([[True, False], [True, True]]), torch.tensor([[2.0, 0.0], [1.0, 1.0]]),
                    torch.tensor([[0.5, 0.5], [1.0, 1.0]]))
    draws = [PromptDraw(prompt, 0), PromptDraw(prompt, 0, 0.5, 0.0), PromptDraw(prompt, 0, 0.5, 2.0)]
    for adv_NG in (torch.tensor([[1.0, -1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])):
        rolled = Rolled(draws, groups, as_rewards({"format": reward_NG * 2}, {"format": 0.5}), adv_NG, sizes=(1, 1))
        batch = Batch([draws[0], draws[2]], groups, reward_NG, reward_NG == 1, adv_NG, pruned, [0, 2], 3, seed=0)
        assert metrics.rollout_metrics(rolled, batch) == pytest.approx({
            "rollout/rounds": 2, "rollout/prompts": 2, "rollout/pending": 0, "rollout/unscored": 0, "prune/skipped": 1,
            "reward/mean": 0.25, "reward/std": 0.1875 ** 0.5, "reward/format": 0.5, "rollout/tokens": 7,
            "rollout/length": 1.75, "rollout/truncated": 0.75, "rollout/entropy": 8 / 7, "advantage/flat_groups": 0.5,
            "prune/offered": 6, "prune/kept": 3, "prune/weight_max": 2.0, "prune/ess": 16 / 6})


def test_the_largest_mismatch_is_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr(dist, "max_over_ranks", lambda value: 7.0)
    assert metrics.PassSums(Pack(capacity=10)).metrics(updates=1)["mismatch/logp_abs_max"] == 7.0


def test_the_closing_table_shows_the_first_and_the_last_evaluation_and_all_seconds(tmp_path):
    """Of set `r` no answer had a reward at first; `new` came up when the run went on."""
    summary = pytest.importorskip("leaves.page.summary").summary

    def evaluation(share: float) -> dict:
        return {"eval/s/accuracy": share, "eval/s/low": share - 0.1, "eval/s/high": share + 0.1,
                "eval/s/length": 100 * share, "eval/s/truncated": 0, "eval/r/length": 100 * share}

    lines = [{"step": 0} | evaluation(0.2), {"step": 1, "time/step": 1.5, "time/update": 1.0},
             {"step": 1} | evaluation(0.4), {"step": 2, "time/step": 2.0, "time/update": 1.0},
             {"step": 2, "eval/r/reward": 0.5, "eval/r/reward_low": 0.25, "eval/r/reward_high": 0.75,
              "eval/new/accuracy": 1, "eval/new/low": 0.5, "eval/new/high": 1, "eval/new/length": 2.0}]
    lines[-1] |= evaluation(0.7)
    rewrite_log(tmp_path / "metrics.jsonl", lines)
    text = summary(tmp_path)
    assert text.index("20.0% [10.0%, 30.0%]") < text.index("70.0% [60.0%, 80.0%]")
    assert all(part in text for part in ("after 2 steps", "20.0 -> 70.0", "step 3.5", "update 2.0"))
    rows = [line.split() for line in text.splitlines()]
    assert ["r", "-", "reward", "0.500", "[0.250,", "0.750]", "20.0", "->", "70.0"] in rows
    assert ["new", "-", "100.0%", "[50.0%,", "100.0%]", "nan", "->", "2.0"] in rows


def test_completions_without_a_reward_are_counted_and_in_no_mean():
    """The second group has none at all, and a component that nobody has is left out."""
    nan, prompt = float("nan"), Prompt("a", (1,), "1")
    groups = [Group(prompt, (Sample((1,), (-1.0,), True), Sample((2,), (-1.0,), True)))] * 2
    part_NG, none_NG = torch.tensor([[1.0, 0.5], [nan, nan]]), torch.full((2, 2), nan)
    rewards = as_rewards({"mine": part_NG, "other": none_NG}, {"mine": 2.0, "other": 1.0})
    rolled = Rolled() + Rolled([PromptDraw(prompt, 0)] * 2, groups, rewards, part_NG)
    pruned = Pruned(~part_NG.isnan(), (~part_NG.isnan()).double(), (~part_NG.isnan()).double())
    batch = Batch(rolled.draws, groups, part_NG, part_NG == 1, part_NG, pruned, [0, 1], 2, seed=0)
    logged = metrics.rollout_metrics(rolled, batch)
    assert (logged["reward/mean"], logged["reward/std"], logged["reward/mine"]) == (1.5, 0.5, 0.75)
    assert (logged["rollout/unscored"], logged["advantage/flat_groups"]) == (2, 0.0) and "reward/other" not in logged
    assert (logged["prune/offered"], logged["prune/kept"]) == (2, 2)


class Unfinished(Sample):
    pending = True  # it goes on in the next step


def test_groups_as_text_say_what_was_decided_on_each_completion():
    """Of three groups one goes on, one was dropped, and of one pruning kept a completion at twice its weight."""
    groups = make_groups([[2, 3], [1, 4], [5, 6]], [3, 2, 1])
    first, second = groups[0].samples
    groups[0] = replace(groups[0], samples=(first, Unfinished(second.ids, second.logp, False)))
    reward_NG = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    adv_NG = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, -0.5]])
    pruned = Pruned(torch.tensor([[False, True]]), torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 0.5]]),
                    torch.tensor([[1.5, 0.5]]))
    batch = as_batch(groups[2:], adv_NG[2:], pruned)
    given = as_rolled(groups, reward_NG, adv_NG), batch, lambda ids, special: f"{len(ids)} {special}"
    dropped, kept = metrics.sample_lines(*given, count=5)
    assert (dropped["id"], dropped["prompt"], dropped["gold"], kept["id"]) == ("q1", "2 True", "1", "q2")
    assert [(c["kept"], c["size"], c["prob"], c["weight"]) for c in dropped["completions"]] == [
        (False, None, None, 0.0)] * 2
    assert kept["completions"] == [
        {"text": f"{tokens} True", "tokens": tokens, "finished": True, "reward": reward, "components":
         {"accuracy": reward}, "advantage": adv, "kept": weight > 0, "trained": trained, "size": size,
         "prob": 0.5, "weight": weight}
        for tokens, reward, adv, weight, trained, size in ((5, 1.0, 0.5, 0.0, 0, 1.5), (6, 0.0, -0.5, 2.0, 6, 0.5))]
    among_kept = replace(batch, adv_NG=torch.tensor([[7.0, -0.1]]), tokens=[[torch.ones(1), torch.ones(4)]])
    kept, = metrics.sample_lines(given[0], among_kept, given[2], count=2)[1:]
    assert [(c["advantage"], c["trained"]) for c in kept["completions"]] == [(0.5, 0), (pytest.approx(-0.1), 4)]
    assert metrics.sample_lines(*given, count=1) == [dropped] and metrics.sample_lines(*given, count=0) == []
