"""The page: what is read off at equal cost, by hand."""

import json

import pytest
from conftest import toy_config

import config
import report
from config import ConfigError
from infra import runfolder


def write_run(folder, seed: int, keep: int, curve: list[float], tokens: int = 100, seconds: float = 2.0):
    """A run folder: a step before each evaluation but the first; half of its generated tokens are trained."""
    folder.mkdir(parents=True)
    cfg = toy_config(folder, f"seed={seed}", f"prune.completions.keep={keep}")
    (folder / "config.yaml").write_text(config.dump(cfg))
    lines = [{"step": 0, "eval/few/accuracy": curve[0]}]
    for step, accuracy in enumerate(curve[1:], start=1):
        lines += [{"step": step, "rollout/tokens": tokens, "train/tokens": tokens // 2, "time/step": seconds,
                   "time/update": seconds / 4, "time/rollout": seconds / 2},
                  {"step": step, "eval/few/accuracy": accuracy}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def cells(page: str, label: str) -> list[str]:
    """Of this label's row in the table of accuracies."""
    table = page.partition("| accuracy in %")
    line = next(line for line in (table[1] + table[2]).splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_runs_of_one_config_are_one_row_read_off_at_equal_cost(tmp_path):
    """Four steps of 100 tokens against two of 400: least is 2 steps, 400 tokens, 200 trained, 6 seconds."""
    runs = [write_run(tmp_path / "slow-seed0", 0, 4, [0.1, 0.2, 0.3, 0.4, 0.5]),
            write_run(tmp_path / "slow-seed1", 1, 4, [0.1, 0.4, 0.5, 0.6, 0.7]),
            write_run(tmp_path / "fast", 0, 2, [0.1, 0.5, 0.9], tokens=400, seconds=3.0)]
    page = report.write_report(runs, tmp_path / "out")
    head = cells(page, "accuracy in %")
    assert head[2:10] == ["1 steps", "2 steps", "200 generated tokens", "400 generated tokens",
                          "100 trained tokens", "200 trained tokens", "3 seconds", "6 seconds"]
    slow, fast = cells(page, "slow"), cells(page, "fast")
    assert fast == ["1", "10.0", "50.0", "90.0", "30.0", "50.0", "30.0", "50.0", "50.0", "90.0", "90.0"]
    assert slow[0] == "2" and slow[-1] == "60.0 ± 127.1"  # t of 1 degree of freedom x 14.14 / sqrt(2)
    means = [float(cell.split()[0]) for cell in slow[1:]]
    assert means == pytest.approx([10, 30, 40, 40, 60, 40, 60, 35, 50, 60])
    # Every run reaches 50%, so the level is 10 + 0.9 x 40 = 46%:
    # at 3.6 steps of seed 0 and 1.6 of seed 1; 0.9 of fast.
    assert "| to reach 46.0% | steps | generated, 1000 | trained, 1000 | seconds |" in page
    assert "| fast | 0.9 | 0.4 | 0.2 | 2.7 |" in page
    assert "| slow | 2.6 ± 12.7 | 0.3 ± 1.3 | 0.1 ± 0.6 | 5.2 ± 25.4 |" in page
    assert "| slow | 4 | 0.4 ± 0.0 | 0.2 ± 0.0 |" in page and page.endswith("![](seconds.png)\n")
    assert (tmp_path / "out" / "report.md").read_text() == page
    for name in ("accuracy", "seconds"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes()[1:4] == b"PNG"


def test_what_is_no_run_or_has_no_curve_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a run folder: it has no config.yaml"):
        report.write_report([tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(ConfigError, match="young has 1 evaluations, and a curve needs two"):
        report.write_report([write_run(tmp_path / "young", 0, 4, [0.1])], tmp_path / "out")
    other = write_run(tmp_path / "other", 0, 4, [0.1, 0.2])
    lines = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(lines.replace("eval/few", "eval/many"))
    with pytest.raises(ConfigError, match="share no evaluation set"):
        report.write_report([other, write_run(tmp_path / "mine", 0, 2, [0.1, 0.2])], tmp_path / "out")


def test_labels_are_the_names_without_seeds_and_never_hide_a_run(tmp_path):
    runs = [write_run(tmp_path / where / name, seed, keep, [0.1, 0.2]) for where, name, seed, keep in (
        ("x", "run1", 0, 1), ("x", "run2", 1, 1), ("x", "run3", 0, 2), ("x", "run4", 1, 2), ("x", "s5", 0, 3),
        ("x", "wide-seed-0", 0, 4), ("x", "wide-seed-1", 1, 4))]
    groups = report.group_runs([report.read_run(folder) for folder in runs])
    assert [(label, len(group)) for label, group in groups.items()] == [
        ("run", 2), (str(runs[2]), 2), ("s5", 1), ("wide", 2)]
    with pytest.raises(ConfigError, match="two have the same config and seed; give each run once"):
        report.write_report([runs[0], runs[0]], tmp_path / "out")


def test_steps_in_which_a_critic_learns_alone_train_the_policy_on_nothing(tmp_path):
    folder = write_run(tmp_path / "run", 0, 4, [0.1, 0.5, 0.9])
    lines = runfolder.read(folder / "metrics.jsonl")
    del lines[1]["train/tokens"]
    runfolder.rewrite(folder / "metrics.jsonl", lines)
    assert report.read_run(folder).spent["trained tokens"].tolist() == [0, 0, 50]
