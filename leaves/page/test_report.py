"""The report: its figures by hand, and its charts read back from the page."""

import math
import re
import shlex

import pytest
import torch
from conftest import as_rolled, make_groups, refuses, toy_config

import config
import report
from collect import Selection, choose
from infra import runfolder
from infra.lines import read_log, rewrite_log
from leaves.page import advice, charts
from leaves.page.charts import kept_by_difficulty
from leaves.page.runs import choose_completions, group_runs, read_run
from leaves.page.tables import AT_BUDGET, format_mean, make_tables


def write_run(folder, curve: list[float], *changes: str, every=1, total=None, state="finished", tokens=100,
              seconds=2.0):
    """A run folder: evaluations `every` so many steps with these accuracies; half of its tokens are trained."""
    folder.mkdir(parents=True)
    last = every * (len(curve) - 1)
    cfg = toy_config(folder, f"steps={last if total is None else total}", "pack.window=null", *changes)
    (folder / "config.yaml").write_text(config.dump(cfg))
    lines = []
    for step in range(last + 1):
        if step:
            lines.append({"step": step, "reward/mean": 0.5 + step % 5 / 10, "rollout/tokens": tokens + step,
                          "train/tokens": tokens // 2, "time/step": seconds, "time/update": seconds / 4,
                          "time/rollout": seconds / 2, "rollout/entropy": 1 / step, "rollout/length": 20.0 - step % 3,
                          "reward/std": 0.1 + step % 2 / 5, "train/loss": -2.5e-4 * step, "prune/offered": 16,
                          "prune/kept": 4, "prune/skipped": step, "rollout/prompts": 4 - step})
        if step % every == 0:
            share = curve[step // every]
            lines.append({"step": step, "time/eval": 1.0, "eval/few/length": 9.0 + step, "eval/few/accuracy": share,
                          "eval/few/low": max(0, share - 0.08), "eval/few/high": min(1, share + 0.08)})
    rewrite_log(folder / "metrics.jsonl", lines)
    if state:
        rewrite_log(folder / "state.json", [{"state": state}])
    return folder


def tables_of(folders) -> dict[str, list[list[str]]]:
    return make_tables(group_runs(list(map(read_run, folders))))


@pytest.fixture
def uncharted(monkeypatch):
    """Pages without their charts, which take most of a page's time."""
    monkeypatch.setattr(charts, "draw_svg", lambda rows, score="": "")


def test_a_sweep_is_told_apart_by_its_settings_and_every_cell_is_right(tmp_path, uncharted):
    """3 rates x 2 seeds: one rate learns nothing, one run was killed half-way, two have too few evaluations."""
    def run(rate: str, seed: int, curve: list[float], **more):
        return write_run(tmp_path / f"{rate}-{seed}", curve, f"optim.lr={rate}", f"seed={seed}", **more)

    good = [run("1e-4", 10, [0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.87, 0.88, 0.9, 0.9]),
            run("1e-4", 11, [0.2, 0.25, 0.4, 0.5, 0.65, 0.7, 0.8, 0.85, 0.9, 0.9, 0.88], tokens=120)]
    none = [run("1e-5", seed, [0.2, 0.21, 0.2, 0.19, 0.2, 0.2, 0.22, 0.2, 0.2, 0.21, 0.2]) for seed in (0, 1)]
    fast = run("3e-4", 0, [0.2, 0.6, 0.85], every=5, seconds=3.0)
    killed = run("3e-4", 1, [0.2, 0.7, 0.95, 0.99], total=10, state=None)
    young = run("3e-4", 2, [0.2], total=10, state=None)
    folders = [*good, *none, fast, killed, young]
    text = report.write_report(folders, tmp_path / "out").read_text()
    assert tables_of(folders) == {
        "What differs": [["run", "seeds", "optim.lr"], ["1e-4-10", "10, 11", "1e-4"],
                         ["1e-5-0", "0, 1", "1e-5"], ["3e-4-0", "0, 1, 2", "3e-4"]],
        f"eval/few/accuracy {AT_BUDGET}": [
            ["run", "runs", "before", "10 steps", "1.055k generated tokens", "500 trained tokens", "20 seconds",
             "at its end"],
            ["1e-4-10", "2", "20.0%", "89.0%", "90.0%", "90.0%", "89.0%", "89.0%"], ["1e-5-0", "2", *["20.0%"] * 6],
            ["3e-4-0", "1", "20.0% [12.0%, 28.0%]", *["-"] * 4, "85.0% [77.0%, 93.0%]"]],  # two evaluations and the start are no verdict
        "Cost of a whole run": [
            ["run", "runs", "steps", "generated tokens", "trained tokens", "eval s", "step s", "update s", "rollout s"],
            ["1e-4-10", "2", "10", "1.155k", "550", "11", "20", "5", "10"],
            ["1e-5-0", "2", "10", "1.055k", "500", "11", "20", "5", "10"],
            ["3e-4-0", "1", "10", "1.055k", "500", "3", "30", "7.5", "15"]]}
    written = (tmp_path / "out" / "report.md").read_text()
    for folder, step in ((killed, 3), (young, 0)):
        left_out = f"{folder} is left out of the tables: died after {step} of 10 steps."
        assert left_out in text and left_out in written
    cells = re.findall("<td[^>]*>([^<]*)</td>", text)
    assert all({*row} <= {*cells} and all(cell in written for cell in row)
               for rows in tables_of(folders).values() for row in rows[1:])
    assert "nan" not in written


def test_three_runs_have_an_interval_that_stays_within_what_is_possible(tmp_path):
    """Student's: 80 and 4.303 x 20 / sqrt 3 around it, cut at 100."""
    folders = [write_run(tmp_path / f"run{seed}", [0.2, 0.5, 0.6 + 0.2 * seed], f"seed={seed}") for seed in range(3)]
    row = tables_of(folders)[f"eval/few/accuracy {AT_BUDGET}"][1]
    assert (row[2], row[-1]) == ("20.0%", "80.0% [30.3%, 100.0%]")  # equal scores have none
    assert format_mean([1.0, 2.0, 30.0]) == "11 [0, 51.9]"  # seconds; no run took less than none


POINT = re.compile(r"[ML] ([-\d.]+) ([-\d.]+)")


class Drawn:
    """What a chart draws, in the units of its axes: grid lines and their labels give the scale."""

    def __init__(self, page: str, title: str):
        self.svg = next(f for f in page.split("<figure>") if f"<b>{title}</b>" in f).partition("</figure>")[0]
        ticks = re.findall(r'd="M ([\d.]+) ([\d.]+) \nL ([\d.]+) ([\d.]+) \n"[^>]*#808080.*?<text[^>]*>([^<]+)</text>',
                           self.svg, re.DOTALL)
        self.marks = [[(float(x), number(label)) for x, _, end, _, label in ticks if x == end],
                      [(float(y), number(label)) for _, y, _, end, label in ticks if y == end]]

    def at(self, pixels: list[tuple[str, str]]) -> list[tuple[float, float]]:
        values = []
        for pair in pixels:
            read = []
            for pixel, marks in zip(map(float, pair), self.marks, strict=True):
                (p, low), (q, high) = marks[0], marks[-1]
                read.append(low + (pixel - p) / (q - p) * (high - low))
            values.append(tuple(read))
        return values

    def lines(self, colour: str, width: float = 1.6) -> list[list[tuple[float, float]]]:
        style = rf'style="fill: none; stroke: {colour}; stroke-width: {width}'
        return [self.at(POINT.findall(d)) for d in re.findall(rf'<path d="([^"]*)"[^>]*{style}', self.svg)]


def number(label: str) -> float:
    return {"k": 1e3, "M": 1e6}.get(label[-1], 1) * float(label.rstrip("kM"))


def near(points) -> list:
    return [pytest.approx(point, abs=0.02 * max(1, abs(point[1]) / 10)) for point in points]


def logged(folder, key: str) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in read_log(folder / "metrics.jsonl") if key in line]


BLUE, ORANGE = "#1f77b4", "#ff7f0e"


@pytest.mark.slow
def test_curves_go_through_the_values_of_the_log_and_the_mean_as_far_as_all_runs_have_come(tmp_path):
    folder = write_run(tmp_path / "run", [0.2] * 9)
    text = report.write_report([folder], tmp_path / "out").read_text()
    for key in ("reward/mean", "rollout/entropy", "rollout/length", "reward/std", "eval/few/length"):
        assert Drawn(text, key).lines(BLUE) == [near(logged(folder, key))], key
    both = Drawn(text, "rollout/tokens train/tokens")
    for colour, key in ((BLUE, "rollout/tokens"), (ORANGE, "train/tokens")):
        assert both.lines(colour) == [near(logged(folder, key))]
    score = Drawn(text, "eval/few/accuracy against steps")
    assert score.lines(BLUE) == [near(logged(folder, "eval/few/accuracy"))] and "fill-opacity: 0.15" in score.svg

    other = write_run(tmp_path / "other", [0.4] * 5, "seed=7", tokens=300, total=8, state=None)
    text = report.write_report([folder, other], tmp_path / "out").read_text()
    against = Drawn(text, "eval/few/accuracy against trained tokens")
    assert against.lines(BLUE) == [near([(100 * step, 0.3) for step in range(5)])]
    assert [len(line) for line in against.lines(BLUE, 0.6)] == [9, 5] and "fill-opacity" not in against.svg


def test_runs_without_a_step_and_before_their_first_evaluation_have_a_page(tmp_path, uncharted):
    folder = write_run(tmp_path / "new", [0.2], total=3, state=None)
    assert "eval/few/accuracy against steps" in report.write_report([folder], tmp_path / "out").read_text()
    (folder / "metrics.jsonl").unlink()
    text = report.write_report([folder], tmp_path / "out").read_text()
    assert "No step is done yet." in text and "step 0 of 3" in text and ">died<" in text and "<table" not in text


def test_what_is_no_run_or_is_given_twice_is_named(tmp_path):
    run, twin, broken = (write_run(tmp_path / name, [0.1, 0.2]) for name in ("run", "twin", "broken"))
    (broken / "config.yaml").write_text("steps: many\n")
    for folders, out, said in (
            ([tmp_path / "nowhere"], tmp_path, "nowhere is not a run folder: it has no config.yaml"),
            ([run, run / ".." / "run"], tmp_path, "two have the same config and seed; give each run once"),
            ([run, twin], tmp_path, "two have the same config and seed; give each run once"),
            ([run], run / "config.yaml", "config.yaml is a file; give a folder"),
            ([broken], tmp_path, "broken/config.yaml: steps='many' must be a whole number")):
        refuses(said, report.write_report, folders, out)


def test_what_was_kept_by_difficulty():
    prompts = [{"right": [1, 0, 0, 0], "completion_weight": [2.0, 0, 1.5, 0]}, {"right": [0, 0, 0, 0]},
               {"right": [1, None, 1, 1], "completion_weight": [0, 0, 1.0, 0]}, {"id": "skipped"}]
    wrong, right = kept_by_difficulty([{"prompts": prompts}])
    assert right[:, 2].tolist() == [0, 1] and wrong[:, 2].tolist() == [2, 1]  # a quarter: bin 2 of 10
    assert wrong[:, 0].tolist() == [4, 0] and right[:, 10].tolist() == [2, 1]
    assert right.sum() + wrong.sum() == 1 + 3 + 4 + 3
    # Without answers by the reward, whose range is that of the run, wherever it lies.
    kept = {"completion_weight": [1.0, 2.0, 0, 0]}
    for low in (0, -1):
        prompts = [kept | {"reward": [low + r for r in (0, 1, 0.5, 0.5)]}, {"reward": [low + 2, low + 2, None, low + 2]},
                   {"reward": [low] * 4, "completion_weight": [1.0, 0, 0, 0]}, {"id": "skipped"}]
        others, above = kept_by_difficulty([{"prompts": prompts}])
        assert above[:, 2].tolist() == [0, 1] and others[:, 2].tolist() == [2, 1]
        assert above[:, 10].tolist() == [3, 0] and others[:, 0].tolist() == [3, 1] and above.sum() == 4


def test_a_page_of_a_long_run_has_every_kth_step_and_says_so(tmp_path):
    folder = write_run(tmp_path / "run", [0.2] * 31)
    line = {"id": "x", "prompt": "some words " * 20, "gold": "1", "completions": [{"text": "a", "reward": 1.0}]}
    rewrite_log(folder / "samples.jsonl", [{"step": step} | line for step in range(1, 31)])
    samples = choose_completions(read_run(folder), 2000)
    assert samples["every"] > 1
    assert [step["step"] for step in samples["steps"]] == [*range(30, 0, -samples["every"])][::-1]


def test_a_page_is_read_again_while_a_run_goes_on(tmp_path, monkeypatch, uncharted):
    folder = write_run(tmp_path / "run", [0.2, 0.3])
    for state, body in (("running", "<body data-live>"), ("died", "<body>")):
        monkeypatch.setattr(runfolder, "state_of", lambda folder, state=state: {"state": state})
        assert body in report.write_report([folder], folder).read_text()


@pytest.mark.parametrize("own", ["{kind: none}", "{kind: topk, keep: 1}"])
def test_shares_of_tokens_are_those_of_the_draw_that_is_advised(own, tmp_path):
    """A flat group has no token with a gradient. A step's own share is that of its own pruner, biased or not."""
    groups, adv_NG = make_groups([[3, 9, 20, 5]] * 6, [4] * 6), torch.randn(6, 4, dtype=torch.float64) * (torch.arange(6)[:, None] > 0)
    rolled, (cfg, *drawn) = as_rolled(groups, adv_NG, adv_NG), (
        toy_config(tmp_path / "run", f"prune.completions={pruner}", name="grpo_toy.yaml")
        for pruner in (own, *(f"{{kind: pps, error: {error}, by_cost: true}}" for error in advice.ERRORS)))
    batch, *drawn = (choose(rolled, Selection.of(settings), 0) for settings in (cfg, *drawn))
    length_NG = torch.tensor([[3.0, 9, 20, 5]]) * (adv_NG != 0)
    expected = [(batch.pruned.keep_NG * length_NG).sum(), *((one.pruned.prob_NG * length_NG).sum() for one in drawn)]
    shares = advice.share_of_tokens(cfg, rolled, batch)
    assert [shares["prune/share"], *(shares[f"prune/share_{error}"] for error in advice.ERRORS)] == pytest.approx(
        (torch.stack(expected) / length_NG.sum()).tolist())


def test_the_advice_by_hand():
    """A quarter of the tokens took 0.5 s of 2: all take 3.5 s, 60% of them 2.7."""
    lines = [{"step": 1, "prune/share": 0.25, "prune/share_0.05": 0.8, "prune/share_0.1": 0.6, "prune/share_0.3": 0.5,
              "time/step": 2.0, "time/update": 0.5, "time/rollout": 1.4}, {"step": 1, "eval/few/accuracy": 0.5}]
    _, head, *rows, said = advice.advice(lines, {})
    assert [row.split() for row in rows] == [
        ["0", "1.00", "3.5", "1.00", "to", "1.00"], ["0.05", "0.80", "3.1", "1.08", "to", "1.10"],
        ["0.1", "0.60", "2.7", "1.18", "to", "1.24"], ["0.3", "0.50", "2.5", "1.08", "to", "1.23"]]
    advised = shlex.split(said.partition("--set ")[2])
    assert advised[0] == "prune.completions={kind: pps, size: surprise, keep: null, error: 0.1, by_cost: true}"
    for name in ("cppo_toy", "pps_gsm8k", "ragen_toy"):
        assert advice.may_draw(config.with_value(config.load(f"{name}.yaml"), "rollout.sleep", "always"))  # as chosen
        assert config.load(f"{name}.yaml", advised[::2]).prune.completions.error == 0.1
    for name in ("madpo_toy", "dppo_listed_toy"):  # learns from pairs; a step is filled up
        assert not advice.may_draw(config.load(f"{name}.yaml"))
    assert advice.advice(lines, {"rollout": 9.0, "update": 0.01})[-1] == "pruning does not pay here"
    assert advice.advice(lines[1:], {}) == []
    refuses("--seconds: no step of the run has logged prune/share", advice.advice, lines[1:], {"update": 1.0})
    for wrong in ({"updates": 1.0}, {"step": 9.0}, {"update": 0.0}, {"update": math.nan}):
        refuses(r"--seconds .* must give some of rollout, update seconds above 0", advice.advice, lines, wrong)
