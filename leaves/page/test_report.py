"""The report: its figures by hand, and its charts read back from the page."""

import json
import re
from html.parser import HTMLParser
from itertools import product

import pytest
from conftest import toy_config

import config
import report
from infra import runfolder
from leaves.page import charts, pruning
from leaves.page.compare import make_tables
from leaves.page.pruning import kept_by_difficulty, kept_weights
from leaves.page.runs import group_runs, read_run
from leaves.page.summary import scores_of
from settings.loader import ConfigError


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
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state:
        (folder / "state.json").write_text(json.dumps({"state": state}) + "\n")
    return folder


class Tables(HTMLParser):
    """All tables of a page by the heading above them: lists of rows, the head first."""

    def __init__(self, text: str):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.heading, self.inside = "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.inside = tag
        if tag == "h3":
            self.heading = ""
        elif tag == "table":
            self.tables[self.heading] = []
        elif tag == "tr":
            self.tables[self.heading].append([])
        elif tag in ("td", "th"):
            self.tables[self.heading][-1].append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "h3":
            self.heading += data
        elif self.inside in ("td", "th"):
            self.tables[self.heading][-1][-1] += data


def page_of(runs, out, **options) -> tuple[str, dict[str, list[list[str]]]]:
    text = report.write_report(runs, out, **options).read_text()
    return text, Tables(text).tables


def tables_of(folders, level=None) -> dict[str, list[list[str]]]:
    """The tables of a report by their titles, without the page around them."""
    groups = group_runs(list(map(read_run, folders)))
    scores = scores_of([line for group in groups.values() for run in group for line in run.evals])
    return {table.title: [table.head, *table.rows] for table in make_tables(groups, scores, level)}


@pytest.fixture
def uncharted(monkeypatch):
    """Pages without their charts, which take most of a page's time."""
    for module in (charts, pruning):
        monkeypatch.setattr(module, "draw_svg", lambda plot, integer_x=True: "")


def test_a_sweep_is_told_apart_by_its_settings_and_every_cell_is_right(tmp_path, uncharted):
    """3 rates x 2 seeds: one rate learns nothing, one run was killed half-way, one has a single evaluation."""
    def run(rate: str, seed: int, curve: list[float], **more):
        return write_run(tmp_path / f"{rate}-seed{seed}", curve, f"optim.lr={rate}", f"seed={seed}", **more)

    good = [run("1e-4", 0, [0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.87, 0.88, 0.9, 0.9]),
            run("1e-4", 1, [0.2, 0.25, 0.4, 0.5, 0.65, 0.7, 0.8, 0.85, 0.9, 0.9, 0.88], tokens=120)]
    none = [run("1e-5", seed, [0.2, 0.21, 0.2, 0.19, 0.2, 0.2, 0.22, 0.2, 0.2, 0.21, 0.2]) for seed in (0, 1)]
    fast = run("3e-4", 0, [0.2, 0.6, 0.85], every=5, seconds=3.0)
    killed = run("3e-4", 1, [0.2, 0.7, 0.95, 0.99], total=10, state=None)
    young = run("3e-4", 2, [0.2], total=10, state=None)
    folders = [*good, *none, fast, killed, young]
    text, tables = page_of(folders, tmp_path / "out")
    kinds = ["10 steps", "1.05k generated tokens", "500 trained tokens", "20 seconds"]
    assert tables["few: accuracy in %, at the budget that every run reached"] == [
        ["run", "runs", "before", *kinds, "at its end"],
        ["optim.lr=1e-4", "2", "20.0", "89.0", "90.0", "90.0", "89.0", "89.0"],
        ["optim.lr=1e-5", "2", "20.0", *["20.0"] * 5],
        ["optim.lr=3e-4", "1", "20.0", "85.0", "85.0", "85.0", "60.0 to 85.0", "85.0"]]
    assert tables["few: accuracy in %, at half of that budget"] == [
        ["run", "5 steps", "528 generated tokens", "250 trained tokens", "10 seconds"],
        ["optim.lr=1e-4", "75.0", "73.5", "72.9", "75.0"], ["optim.lr=1e-5", "20.0", "20.2", "20.0", "20.0"],
        ["optim.lr=3e-4", "60.0", "60.0 to 85.0", "60.0", "20.0 to 60.0"]]
    assert tables["few: cost to reach 82.1%"] == [  # 20 and 0.9 of the best gain
        ["run", "steps", "generated tokens", "trained tokens", "seconds"],
        ["optim.lr=1e-4", "5.92", "677", "328", "11.8"], ["optim.lr=1e-5", *["not reached"] * 4],
        ["optim.lr=3e-4", "5 to 10", "515 to 1.05k", "250 to 500", "15 to 30"]]
    assert tables["What differs"] == [["run", "seeds", "optim.lr"], ["optim.lr=1e-4", "0, 1", "1e-4"],
                                      ["optim.lr=1e-5", "0, 1", "1e-5"], ["optim.lr=3e-4", "0, 1, 2", "3e-4"]]
    for folder, step in ((killed, 3), (young, 0)):
        assert f"{folder} is left out of the tables: died after {step} of 10 steps." in text
    assert "[nan" not in text and "±" not in text  # two seeds have no interval
    assert tables_of(folders, level=60)["few: cost to reach 60.0%"][2] == ["optim.lr=1e-5", *["not reached"] * 4]


def test_three_runs_have_an_interval_that_stays_within_what_is_possible(tmp_path):
    """Student's: 80 and 4.303 x 20 / sqrt 3 around it, cut at 100."""
    folders = [write_run(tmp_path / f"run{seed}", [0.2, 0.5, 0.6 + 0.2 * seed], f"seed={seed}") for seed in range(3)]
    row = tables_of(folders, level=50)["few: accuracy in %, at the budget that every run reached"][1]
    assert row[-1] == "80.0 [30.3, 100.0]"


def test_a_level_is_not_read_off_where_evaluations_are_far_apart(tmp_path):
    curve = [0.3, 0.4, 0.6, 0.8, 0.9, 0.95, 0.96, 0.97, 0.97]
    dense = write_run(tmp_path / "dense", curve, every=5)
    falling = write_run(tmp_path / "falling", [0.3, 0.9, 0.5, 0.4, 0.97], "seed=1", every=10)
    both = tables_of([dense, falling])["few: cost to reach 90.3%"][1]  # 20 to 25 and 30 to 40, in the mean
    assert both == ["dense", "25 to 32.5", "2.84k to 3.82k", "1.25k to 1.62k", "50 to 65"]
    ends_only = write_run(tmp_path / "ends", [curve[0], curve[-1]], every=40)
    reach = "few: cost to reach 90.3%"
    assert tables_of([dense])[reach][1][:2] == ["dense", "20 to 25"]
    assert tables_of([ends_only])[reach][1] == ["ends", *["not known"] * 4]
    every_step = write_run(tmp_path / "every", [0.3, 0.5, 0.9, 0.95, *[0.97] * 7])
    assert tables_of([every_step])[reach][1][1] == f"{2 + (90.3 - 90) / 5:.3g}"


def test_a_gain_within_the_noise_of_one_evaluation_is_no_level(tmp_path, uncharted):
    runs = [write_run(tmp_path / rate, [0.2, 0.24], f"optim.lr={rate}") for rate in ("1e-4", "1e-5")]
    text, tables = page_of(runs, tmp_path / "out")
    assert "The best row gains 4.0 points, and one evaluation is known to ±8.0" in text
    assert "few: cost to reach 23.6%" not in tables


def test_the_cost_of_runs(tmp_path):
    a, b = (write_run(tmp_path / name, [0.2, 0.5, 0.8], f"optim.lr={lr}", seconds=s)
            for name, lr, s in (("a", "1e-4", 2.0), ("b", "1e-5", 4.0)))
    tables = tables_of([a, b])
    assert tables["Cost of a whole run"] == [
        ["run", "steps", "generated tokens", "trained tokens", "eval s", "step s", "update s", "rollout s", "other s"],
        ["optim.lr=1e-4", "2", "203", "100", "3.0", "4.0", "1.0", "2.0", "1.0"],
        ["optim.lr=1e-5", "2", "203", "100", "3.0", "8.0", "2.0", "4.0", "2.0"]]


POINT = re.compile(r"[ML] ([-\d.]+) ([-\d.]+)")


class Drawn:
    """What a chart draws, in the units of its axes: grid lines and their labels give the scale."""

    def __init__(self, page: str, title: str, section: str = ""):
        page = page[page.index(f'<section id="{section}">'):] if section else page
        self.svg = next(f for f in page.split("<figure>") if f"<b>{title}</b>" in f).partition("</figure>")[0]
        ticks = re.findall(r'd="M ([\d.]+) ([\d.]+) \nL ([\d.]+) ([\d.]+) \n"[^>]*--grid.*?<text[^>]*>([^<]+)</text>',
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

    def lines(self, colour: int, width: float | None = None) -> list[list[tuple[float, float]]]:
        style = r'style="fill: none; stroke: var\(--line-(\d)\); stroke-width: ([\d.]+)'
        return [self.at(POINT.findall(d)) for d, c, w in re.findall(rf'<path d="([^"]*)"[^>]*{style}', self.svg)
                if int(c) == colour and width in (None, float(w))]


def number(label: str) -> float:
    """A label of an axis; matplotlib writes another minus."""
    unit = {"k": 1e3, "M": 1e6}.get(label[-1], 1)
    return unit * float(label.rstrip("kM").replace("\N{MINUS SIGN}", "-"))


def near(points) -> list:
    return [pytest.approx(point, abs=0.02 * max(1, abs(point[1]) / 10)) for point in points]


def logged(folder, key: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]


def test_curves_go_through_the_values_of_the_log(tmp_path):
    folder = write_run(tmp_path / "run", [0.2] * 9)
    text, _ = page_of([folder], tmp_path / "out")
    for title, key in (("Reward", "reward/mean"), ("Entropy", "rollout/entropy"), ("Length", "rollout/length"),
                       ("Spread of the rewards", "reward/std"), ("eval/few/length", "eval/few/length")):
        line, = Drawn(text, title).lines(0)
        assert line == near(logged(folder, key)), title
    phases = Drawn(text, "Tokens generated and trained")
    for colour, key in enumerate(("rollout/tokens", "train/tokens")):
        assert phases.lines(colour) == [near(logged(folder, key))]


def test_runs_without_a_step_and_before_their_first_evaluation_have_a_page(tmp_path, uncharted):
    folder = write_run(tmp_path / "new", [0.2], total=3, state=None)
    assert "No step is done yet." in page_of([folder], tmp_path / "out")[0]
    (folder / "metrics.jsonl").unlink()
    text, tables = page_of([folder], tmp_path / "out")
    assert "step 0 of 3" in text and ">died<" in text and not tables


def test_what_is_no_run_or_is_given_twice_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a run folder: it has no config.yaml"):
        report.write_report([tmp_path / "nowhere"], tmp_path / "out")
    run = write_run(tmp_path / "run", [0.1, 0.2])
    with pytest.raises(ConfigError, match="a run folder is given twice; give each once"):
        report.write_report([run, run / ".." / "run"], tmp_path / "out")
    twin = write_run(tmp_path / "twin", [0.1, 0.2])
    with pytest.raises(ConfigError, match="two have the same config and seed; give each run once"):
        report.write_report([run, twin], tmp_path / "out")
    with pytest.raises(ConfigError, match="config.yaml is a file; give a folder"):
        report.write_report([run], run / "config.yaml")
    (run / "config.yaml").write_text("steps: many\n")
    with pytest.raises(ConfigError, match="run/config.yaml: steps='many' must be a whole number"):
        report.write_report([run], tmp_path / "out")


def test_markdown_shows_what_was_written(tmp_path, uncharted):
    """Of a label with bars, tags and marks of its own each is one cell, and no tag is left."""
    runs = [write_run(tmp_path / str(i), [0.1, 0.9], f"data.system_prompt={text}") for i, text in
            enumerate(("a|b <b>*c*</b>", "</table>`d` $e$"))]
    report.write_report(runs, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "<b>" not in text and "</table>" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    heads = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert len(set(heads[:4])) == 1 and r"a\|b &lt;b>\*c\*&lt;/b>" in text


def test_what_was_kept_by_difficulty():
    prompts = [{"right": [1, 0, 0, 0], "completion_weight": [2.0, 0, 1.5, 0]}, {"right": [0, 0, 0, 0]},
               {"right": [1, None, 1, 1], "completion_weight": [0, 0, 1.0, 0]}, {"id": "skipped"}]
    right, wrong = kept_by_difficulty([{"prompts": prompts}])
    assert right[:, 2].tolist() == [1, 1] and wrong[:, 2].tolist() == [1, 3]  # a quarter: bin 2 of 10
    assert wrong[:, 0].tolist() == [0, 4] and right[:, 10].tolist() == [1, 3]
    assert right.sum() + wrong.sum() == 1 + 1 + 1 + 3 + 4 + 1 + 3
    assert kept_weights([{"prompts": prompts}]).tolist() == [2.0, 1.5, 1.0]
    nearly = [{"right": [1] + [0] * 30}, {"right": [0] + [1] * 30}]  # not of the bins of 0 and 1 alone
    right, wrong = kept_by_difficulty([{"prompts": nearly}])
    assert right[1, [0, 1, 9, 10]].tolist() == [0, 1, 30, 0] and wrong[1, [0, 1, 9, 10]].tolist() == [0, 30, 1, 0]


def test_a_page_of_a_long_run_stays_small_and_says_what_it_leaves_out(tmp_path):
    folder = write_run(tmp_path / "run", [0.2] * 301)
    words = " ".join(f"{a}{b}" for a, b in product("abcdefgh", range(100)))
    completion = {"text": words, "tokens": 9, "finished": True, "reward": 1.0, "components": {"accuracy": 1.0},
                  "advantage": 0.5, "kept": True, "prob": 1.0, "weight": 1.0}
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, 301):
            line = {"step": step, "id": "x", "prompt": words, "gold": "1", "completions": [completion] * 16}
            file.write(json.dumps(line) + "\n")
    for step in (0, 300):
        answer = {"k": 0, "text": words * 4, "verdict": "right" if step else "wrong"}
        problem = {"set": "few", "question": words, "gold": "1", "responses": [answer]}
        lines = [problem | {"id": f"p{i}"} for i in range(900)]
        (folder / f"eval_{step:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = report.write_report([folder], tmp_path / "out")
    assert path.stat().st_size < 5e6
    data = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])["runs"][0]
    steps, every = [step["step"] for step in data["samples"]["steps"]], data["samples"]["every"]
    assert every > 1 and steps == list(range(300, 0, -every))[::-1]
    (pair,), left_out = data["held_out"]["pairs"], data["held_out"]["left_out"]
    assert (pair["from"], pair["to"], pair["better"], left_out) == (0, 300, 900, 0) and 0 < len(pair["rows"]) < 900
    assert "more characters in the run folder)" in pair["rows"][0]["after"] or pair["rows"][0]["after"] == words * 4


def test_a_watch_that_is_stopped_leaves_a_page_that_waits_for_nothing(tmp_path, monkeypatch, uncharted):
    folder, pages = write_run(tmp_path / "run", [0.2, 0.3]), []

    def interrupt(seconds):
        pages.append((folder / "report.html").read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(runfolder, "state_of", lambda folder: {"state": "running"})
    monkeypatch.setattr(report, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.watch([folder], folder, None, 7)
    pages.append((folder / "report.html").read_text())
    assert [bool(re.search('<body data-refresh="7">', page)) for page in pages] == [True, False]
