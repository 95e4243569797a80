"""The report: its figures are computed again here, from metrics.jsonl and by code that is not the report's."""

import json
import re
from html.parser import HTMLParser
from itertools import product
from statistics import mean, stdev

import pytest
import yaml
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

KINDS = {"steps": None, "generated tokens": "rollout/tokens", "trained tokens": "train/tokens", "seconds": "time/step"}
STUDENT = {3: 4.303}


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


# ---- the same figures, from metrics.jsonl alone

def curve_of(folder, kind: str) -> list[tuple[int, float, float]]:
    """(step, spent until then, accuracy in percent) of every evaluation."""
    points, spent = [], 0.0
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "eval/few/accuracy" in line:
            points.append((line["step"], spent, 100 * line["eval/few/accuracy"]))
        else:
            spent += 1 if KINDS[kind] is None else line.get(KINDS[kind], 0)
    return points


def ends(folder, a, b, x, i, j) -> tuple[float, float] | None:
    """Column j where column i is x, between two evaluations a and b."""
    total = yaml.safe_load((folder / "config.yaml").read_text())["steps"]
    if x == a[i]:
        return a[j], a[j]
    if b[0] - a[0] > total / 2:
        return None
    if b[0] - a[0] > total / 10:
        return min(a[j], b[j]), max(a[j], b[j])
    value = a[j] + (x - a[i]) / (b[i] - a[i]) * (b[j] - a[j])
    return value, value


def written(value: float, percent: bool) -> str:
    if percent:
        return f"{value:.1f}"
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def cell_of(pairs, percent: bool) -> str:
    if None in pairs:
        return "not known"
    low, high = (mean(pair[i] for pair in pairs) for i in (0, 1))
    if any(a != b for a, b in pairs):
        return f"{written(low, percent)} to {written(high, percent)}"
    if len(pairs) < 3:
        return written(low, percent)
    half = STUDENT[len(pairs)] * stdev(pair[0] for pair in pairs) / len(pairs) ** 0.5
    bounds = max(0, low - half), min(100 if percent else float("inf"), low + half)
    return f"{written(low, percent)} [{written(bounds[0], percent)}, {written(bounds[1], percent)}]"


def at_budget(folders, kind: str, share: float, everybody) -> tuple[str, str]:
    """The head of a column, and the cell of these runs in it."""
    budget = share * min(curve_of(folder, kind)[-1][1] for folder in everybody)
    pairs = []
    for folder in folders:
        curve = curve_of(folder, kind)
        a = max((p for p in curve if p[1] <= budget), key=lambda p: p[1])
        b = min((p for p in curve if p[1] > budget), key=lambda p: p[1], default=a)
        pairs.append(ends(folder, a, b, budget, 1, 2))
    return f"{written(budget, percent=False)} {kind}", cell_of(pairs, percent=True)


def spent_to_reach(folders, kind: str, level: float) -> str:
    pairs = []
    for folder in folders:
        curve = curve_of(folder, kind)
        i = next((i for i, point in enumerate(curve) if point[2] >= level), None)
        if i is not None:
            pairs.append((curve[0][1],) * 2 if i == 0 else ends(folder, curve[i - 1], curve[i], level, 2, 1))
    if not pairs:
        return "not reached"
    return f"reached by {len(pairs)} of {len(folders)}" if len(pairs) < len(folders) else cell_of(pairs, percent=False)


def check_tables(tables, rows, level) -> None:
    """Every cell of the tables of accuracy and of what was spent. rows: label -> finished runs."""
    everybody = [folder for folders in rows.values() for folder in folders]
    accuracy = tables["few: accuracy in %, at the budget that every run reached"]
    halves = tables["few: accuracy in %, at half of that budget"]
    columns = [at_budget(everybody[:1], kind, 1.0, everybody)[0] for kind in KINDS]
    assert accuracy[0] == ["run", "runs", "before", *columns, "at its end"]
    assert halves[0] == ["run", *(at_budget(everybody[:1], kind, 0.5, everybody)[0] for kind in KINDS)]
    for (label, folders), whole, half in zip(rows.items(), accuracy[1:], halves[1:], strict=True):
        first, last = ([curve_of(folder, "steps")[i][2] for folder in folders] for i in (0, -1))
        assert whole == [label, str(len(folders)), cell_of([(x, x) for x in first], percent=True),
                         *(at_budget(folders, kind, 1.0, everybody)[1] for kind in KINDS),
                         cell_of([(x, x) for x in last], percent=True)]
        assert half == [label, *(at_budget(folders, kind, 0.5, everybody)[1] for kind in KINDS)]
    reach = tables[f"few: cost to reach {level:.1f}%"]
    assert reach == [["run", *KINDS],
                     *([label, *(spent_to_reach(folders, kind, level) for kind in KINDS)] for label, folders in
                       rows.items())]


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
    rows = {"optim.lr=1e-4": good, "optim.lr=1e-5": none, "optim.lr=3e-4": [fast]}
    check_tables(tables, rows, level=20 + 0.9 * (mean([90, 88]) - 20))
    assert tables["What differs"] == [["run", "seeds", "optim.lr"], ["optim.lr=1e-4", "0, 1", "1e-4"],
                                      ["optim.lr=1e-5", "0, 1", "1e-5"], ["optim.lr=3e-4", "0, 1, 2", "3e-4"]]
    for folder, step in ((killed, 3), (young, 0)):
        assert f"{folder} is left out of the tables: died after {step} of 10 steps." in text
    assert "[nan" not in text and "±" not in text  # two seeds have no interval
    assert tables_of(folders, level=60)["few: cost to reach 60.0%"][2] == ["optim.lr=1e-5", *["not reached"] * 4]


def test_three_runs_have_an_interval_that_stays_within_what_is_possible(tmp_path):
    folders = [write_run(tmp_path / f"run{seed}", [0.2, 0.5 + 0.2 * seed, 0.6 + 0.2 * seed], f"seed={seed}")
               for seed in range(3)]
    tables = tables_of(folders, level=50)
    check_tables(tables, {"run": folders}, level=50)
    cell = tables["few: accuracy in %, at the budget that every run reached"][1][-1]
    low, high = re.findall(r"\[(.*), (.*)\]", cell)[0]
    assert 0 <= float(low) < float(high) == 100


def test_a_level_is_not_read_off_where_evaluations_are_far_apart(tmp_path):
    curve = [0.3, 0.4, 0.6, 0.8, 0.9, 0.95, 0.96, 0.97, 0.97]
    dense = write_run(tmp_path / "dense", curve, every=5)
    falling = write_run(tmp_path / "falling", [0.3, 0.9, 0.5, 0.4, 0.97], "seed=1", every=10)
    check_tables(tables_of([dense, falling]), {"dense": [dense, falling]}, level=90.3)
    ends_only = write_run(tmp_path / "ends", [curve[0], curve[-1]], every=40)
    reach = "few: cost to reach 90.3%"
    assert tables_of([dense])[reach][1][:2] == ["dense", "20 to 25"]
    assert tables_of([ends_only])[reach][1] == ["ends", *["not known"] * 4]
    every_step = write_run(tmp_path / "every", [0.3, 0.5, 0.9, 0.95, *[0.97] * 7])
    assert tables_of([every_step])[reach][1][1] == f"{2 + (90.3 - 90) / 5:.3g}"


def test_a_level_that_some_seeds_reach_says_how_many(tmp_path):
    runs = [write_run(tmp_path / f"run{seed}", [0.1, top], f"seed={seed}") for seed, top in enumerate((0.8, 0.4))]
    tables = tables_of(runs, level=60)
    check_tables(tables, {"run": runs}, level=60)
    assert tables["few: cost to reach 60.0%"][1] == ["run", *["reached by 1 of 2"] * 4]


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

    def bands(self) -> list[list[tuple[float, float]]]:
        """The outlines of shaded intervals, which stand in <defs> and are used 158.4 further down."""
        shaded = r'<path id="[^"]*" d="([^"]*z\s*)"/>\s*</defs>\s*<g[^>]*>\s*<use [^>]*fill-opacity'
        return [self.at([(x, str(float(y) + 158.4)) for x, y in POINT.findall(d)])
                for d in re.findall(shaded, self.svg)]

    def bars(self, colour: int) -> list[tuple[float, float]]:
        """The middle and the height of each bar."""
        outlines = [self.at(POINT.findall(d)) for d in re.findall(
            rf'<path d="([^"]*)"[^>]*style="fill: var\(--line-{colour}\)', self.svg)]
        return [(mean({x for x, _ in outline}), max(y for _, y in outline)) for outline in outlines]


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


def test_a_row_of_several_runs_has_its_mean_and_from_three_on_its_interval(tmp_path):
    """The mean of those that finished; its interval is cut to what is possible."""
    curves = [[0.2, 0.02, 0.99], [0.2, 0.3, 0.6], [0.2, 0.05, 0.9]]
    runs = [write_run(tmp_path / f"run{seed}", curve, f"seed={seed}", tokens=100 * (seed + 1))
            for seed, curve in enumerate(curves)]
    died = write_run(tmp_path / "died", [0.2, 0.0], "seed=9", total=2, state=None)
    text, _ = page_of([*runs, died], tmp_path / "out")
    for kind, key in KINDS.items():
        chart = Drawn(text, f"Accuracy against {kind}")
        spent = [mean(curve_of(run, kind)[i][1] for run in runs) for i in range(3)]
        middle = [(x, 100 * mean(column)) for x, column in zip(spent, zip(*curves, strict=True), strict=True)]
        line, = chart.lines(0, 1.8)
        assert line == [pytest.approx(point, rel=0.01, abs=0.05) for point in middle]
        assert len(chart.lines(0, 0.6)) == 4
        halves = [STUDENT[3] * stdev(column) * 100 / 3 ** 0.5 for column in zip(*curves, strict=True)]
        band, = chart.bands()
        for (x, y), half in zip(middle, halves, strict=True):
            ends = [v for u, v in band if u == pytest.approx(x, rel=0.01, abs=0.05)]
            assert (min(ends), max(ends)) == pytest.approx((max(0, y - half), min(100, y + half)), abs=0.3), key
    assert [f(y for _, y in band) for f in (min, max)] == pytest.approx([0, 100], abs=0.3)
    reward = Drawn(text, "Reward")
    assert len(reward.lines(0, 0.6)) == 4 and len(reward.lines(0, 1.8)) == 1
    assert not Drawn(page_of(runs[:2], tmp_path / "two")[0], "Accuracy against steps").bands()


def test_what_pruning_did_is_drawn_as_it_was_decided(tmp_path):
    folder = write_run(tmp_path / "run", [0.2, 0.5, 0.9])
    decided = [{"step": 1, "prompts": [{"right": [1, 0, 0, 0, 0], "completion_weight": [2.0, 1.0, 0, 0, 0]},
                                       {"right": [1, 1, 1, 1, 0], "completion_weight": [0, 0, 1.0, 0, 1.0]}]}]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decided))
    text, _ = page_of([folder], tmp_path / "out")
    shares = Drawn(text, "Share kept against difficulty", "pruning")
    assert shares.bars(2) == near([(0.18, 1.0), (0.78, 0.25)])   # of right completions
    assert shares.bars(1) == near([(0.22, 0.25), (0.82, 1.0)])   # of wrong ones
    weights = [bar for bar in Drawn(text, "Weights of kept completions", "pruning").bars(0) if bar[1] > 0.01]
    assert weights == [pytest.approx((1.0, 0.75), abs=0.06), pytest.approx((2.0, 0.25), abs=0.06)]
    tokens = Drawn(text, "Tokens generated and trained", "pruning")
    assert tokens.lines(0) == [[pytest.approx(p, rel=0.01) for p in ((1, 101), (2, 203))]]
    assert tokens.lines(1) == [[pytest.approx(p, rel=0.01) for p in ((1, 50), (2, 100))]]
    said = ("25.0% of 32 completions offered were kept", "49.3% of 203 tokens generated were trained on",
            "3 prompts were skipped and 5 rolled out.")
    assert " · ".join(said) in text
    assert Drawn(text, "Prompts skipped").lines(0) == [near([(1, 1), (2, 2)])]


def test_a_long_curve_is_drawn_by_means_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "PAGE_POINTS", 1000)
    folder = write_run(tmp_path / "run", [0.2] * 201)
    text, _ = page_of([folder], tmp_path / "out")
    most = int(re.search(r"Of more than (\d+) steps a point is the mean over neighbouring ones", text)[1])
    figure = next(f for f in text.split("<figure>") if "<b>Reward</b>" in f)
    line = next(d for d, style in re.findall(r'<path d="([^"]*)"[^>]*?style="([^"]*)"', figure) if "--line-0" in style)
    assert line.count("L ") == most - 1 < 200


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


def test_long_labels_give_way_to_the_names_of_folders_which_never_hide_a_run(tmp_path):
    long = [f"{tmp_path}/{'very-' * 12}{i}.jsonl" for i in range(3)]
    runs = [write_run(tmp_path / where / name, [0.1, 0.2], f"seed={seed}", f"data.train={long[i]}")
            for where, name, seed, i in (("x", "run1", 0, 0), ("x", "run2", 1, 0), ("y", "run3", 0, 1),
                                         ("y", "run4", 1, 1), ("x", "s5", 0, 2))]
    tables = tables_of(runs)
    assert [row[0] for row in tables["Cost of a whole run"][1:]] == ["run", str(runs[2]), "s5"]


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


def test_samples_of_an_older_version_and_numbers_that_are_none_leave_the_page_whole(tmp_path, uncharted):
    folder = write_run(tmp_path / "run", [0.2, 0.3])
    completion = {"text": "a", "tokens": 1, "finished": True, "reward": float("nan"), "components": {"accuracy": 0.0},
                  "advantage": 0.0, "kept": True, "prob": 1.0, "weight": 1.0}
    lines = [{"step": 1, "id": "a", "texts": ["b"]},
             {"step": 1, "id": "a", "prompt": "p", "gold": "1", "completions": [completion]}]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, _ = page_of([folder], tmp_path / "out")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0], parse_constant=pytest.fail)
    (group,), = (step["groups"] for step in data["runs"][0]["samples"]["steps"])
    assert group["completions"][0]["reward"] is None


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
