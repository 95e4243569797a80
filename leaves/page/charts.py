"""Draw metrics as SVG, in colours that are variables of style.css: a chart is light or dark as its page is.

Of one run a chart may hold several metrics. Of several runs each metric has a chart of its own, in which a
row of the comparison has a colour, a run a thin line and the mean over seeds a thick one.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from io import StringIO

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from leaves.page.compare import LEAST_RUNS, format_amount
from leaves.page.runs import COSTS, Groups, LoggedRun
from leaves.page.summary import Score
from records import frozen
from verify.statistics import half_width

# section -> charts: title, metrics, note (Chart.note)
CHARTS = {
    "Reward": [
        ("Reward", "reward/mean", "mean over the completions of a step\nIt should rise, then level off."),
        ("Spread of the rewards", "reward/std",
         "their standard deviation\nAt 0 all rewards are equal and nothing is learnt."),
        ("Components of the reward", "reward/*",
         "means before their weights\nEach component with a weight should rise."),
        ("Flat groups", "advantage/flat_groups",
         "share of groups of equal rewards\nNo gradient: all their answers are right, or all wrong."),
    ],
    "Completions": [
        ("Length", "rollout/length", "tokens per completion\nSteady, or rising with the reward, is good."),
        ("Truncated", "rollout/truncated",
         "share of completions\nNear 0 is good; else raise rollout.max_new_tokens."),
        ("Entropy", "rollout/entropy",
         "nats per sampled token\nA slow fall is good. A fall to 0 ends exploration."),
    ],
    "Pruning": [
        ("Completions offered and kept", "prune/offered prune/kept",
         "of a step\nThe gap is what pruning left out."),
        ("Largest weight", "prune/weight_max",
         "of a kept completion\n1 is no correction; a large weight makes the gradient noisy."),
        ("Effective sample size", "prune/ess",
         "of the weights, (sum w)² / sum w²\nClose to the number of kept completions is good."),
        ("Prompts skipped", "prune/skipped",
         "before they were rolled out\nSkipped prompts cost no tokens."),
    ],
    "Update": [
        ("KL to the initial model", "train/kl",
         "nats per trained token\nA slow rise is good; a jump shows that the policy has drifted."),
        ("Clipped", "train/clipped",
         "share of tokens stopped by the trust region\nA few percent is good; a first update has 0."),
        ("Gradient norm", "train/grad_norm", "before clipping\nSpikes are a bad sign."),
        ("Learning rate", "train/lr", "\nIt should follow optim.schedule."),
    ],
    "Trainer against engine": [
        ("Mismatch", "mismatch/logp_abs_mean",
         "mean |difference| of log-probs\nSmall and steady is good; train.py --check prints its bound."),
        ("Largest mismatch", "mismatch/logp_abs_max", "of one token\nIt should not grow over the run."),
        ("Mismatch KL", "mismatch/kl", "nats per token\nIt should stay near 0."),
    ],
    "Critic": [
        ("Explained variance", "critic/explained_variance",
         "of the rewards, by the critic's values\nAbove 0 is useful, 1 is perfect."),
        ("Critic's loss", "critic/loss", "\nIt should fall."),
        ("Critic's gradient norm", "critic/grad_norm", "\nSpikes are a bad sign."),
    ],
    "Cost": [
        ("Tokens generated and trained", "rollout/tokens train/tokens",
         "of a step\nThe gap is what pruning and flat groups saved."),
        ("Seconds by phase", "time/*",
         "of a step, on rank 0\nRollout and update should take most of a step."),
        ("Memory", "memory/peak_gib",
         "GiB, the most that a rank has held so far\nFlat after the first steps is good."),
    ],
    "All others": [("", "*", "")],
}
SEPARATE_CHARTS = ("step", "eval/*/accuracy", "eval/*/low", "eval/*/high", "eval/*/reward*")  # of the scores
COLOURS = [f"#c0{i:02x}01" for i in range(8)]  # stand for --line-0 to --line-7 in style.css
INK, GRID = "#c0ff01", "#c0fe01"
PAGE_POINTS = 60_000  # of all lines of a page; longer ones are drawn by the means of neighbouring steps
EVALUATIONS = 4_000  # likewise, of the points of all charts of accuracy
SIZE = (3.7, 2.2)  # inches; a page has several beside each other, a phone one

Curve = tuple[np.ndarray, np.ndarray]  # x and y of its points


@frozen
class Chart:
    title: str
    note: str                      # a line above the chart and, below it, one on what good looks like
    legend: list[tuple[str, int]]  # label, number of its colour
    svg: Markup


def draw_curves(groups: Groups) -> tuple[dict[str, list[Chart]], list[str]]:
    """Draw the metrics of all steps, section by section, and say what is not drawn as it was logged."""
    runs = sum(groups.values(), [])
    keys = sorted({key for run in runs for line in run.lines for key in line})
    keys = [key for key in keys if not any(fnmatch(key, pattern) for pattern in SEPARATE_CHARTS)]
    zero = [key for key in keys if not any(line.get(key) for run in runs for line in run.lines)]
    left = [key for key in keys if key not in zero]
    most = max(30, PAGE_POINTS // max(1, len(left) * len(runs)))
    remarks = [f"0 throughout, and not drawn: {', '.join(zero)}."] if zero else []
    if any(len(run.steps) > most for run in runs):
        remarks.append(f"Of more than {most} steps a point is the mean over neighbouring ones.")
    sections = {}
    for section, charts in CHARTS.items():
        for title, patterns, note in charts:
            drawn = [key for pattern in patterns.split() for key in left if fnmatch(key, pattern)]
            left = [key for key in left if key not in drawn]
            for together in split_into_charts(drawn, title, len(runs)):
                name = title if title and (len(runs) == 1 or len(drawn) == 1) else ", ".join(together)
                sections.setdefault(section, []).append(draw_chart(name, note, groups, together, most))
    return sections, remarks


def split_into_charts(keys: list[str], title: str, runs: int) -> list[list[str]]:
    """Put metrics of one run into one chart of at most 8 lines; metrics of several runs, or without a title,
    each into its own."""
    if runs > 1 or not title:
        return [[key] for key in keys]
    return [keys[i:i + len(COLOURS)] for i in range(0, len(keys), len(COLOURS))]


def draw_chart(title: str, note: str, groups: Groups, keys: list[str], most: int) -> Chart:
    """Draw metrics against steps, in at most so many points each."""
    def plot(axes: Axes) -> None:
        runs = sum(groups.values(), [])
        for i, key in enumerate(keys if len(runs) == 1 else []):
            axes.plot(*thin_points(*runs[0].series(key), most), color=COLOURS[i], linewidth=1.3)
        for i, group in enumerate(groups.values() if len(runs) > 1 else []):
            plot_group(axes, group, [thin_points(*run.series(keys[0]), most) for run in group], i)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))

    labels = [key.partition("/")[2] for key in keys] if len(keys) > 1 else []
    labels = labels if len(set(labels)) == len(labels) else keys
    return Chart(title, note, [(label, i) for i, label in enumerate(labels)], draw_svg(plot))


def plot_group(axes: Axes, group: list[LoggedRun], lines: list[Curve], i: int) -> list[Curve]:
    """Draw a thin line per run, and a thick one, the mean of the finished runs, if their steps are alike.

    A single finished run is drawn thick. Returns the lines of finished runs.
    """
    style = {"color": COLOURS[i % len(COLOURS)], "linestyle": ("-", "--", ":")[i // len(COLOURS) % 3]}
    finished = [line for run, line in zip(group, lines, strict=True) if run.finished]
    for line in lines if len(group) > 1 or not finished else []:
        axes.plot(*line, linewidth=0.6, **style)
    if finished and len({len(x) for x, _ in finished}) == 1:
        x, y = (np.mean([line[axis] for line in finished], axis=0) for axis in (0, 1))
        axes.plot(x, y, linewidth=1.8, **style)
    return finished


def thin_points(x: np.ndarray, y: np.ndarray, most: int) -> Curve:
    """Take means over neighbours, so that at most so many points are left."""
    blocks = np.array_split(np.arange(len(x)), most) if len(x) > most else np.arange(len(x))[:, None]
    return np.array([x[block].mean() for block in blocks]), np.array([y[block].mean() for block in blocks])


# ---- scores

def score_charts(groups: Groups, score: Score) -> list[Chart]:
    """Draw a score against each kind of cost; a single run has its intervals."""
    kinds = COSTS if len(sum(groups.values(), [])) > 1 else ["steps"]
    note = "in %" * score.percent + "\nIt should rise by more than its intervals."
    return [Chart(f"{score.kind.capitalize()} against {kind}", note, [],
                  draw_svg(partial(plot_score, groups=groups, score=score, kind=kind))) for kind in kinds]


def plot_score(axes: Axes, groups: Groups, score: Score, kind: str) -> None:
    """Draw each evaluation as a point, and lines and intervals of rows."""
    runs = sum(groups.values(), [])
    most = max(20, EVALUATIONS // (len(COSTS) * len(runs)))
    bounds = score.bounds
    for i, group in enumerate(groups.values()):
        lines = []
        for run in group:
            step_E, value_E = run.held_out(score)
            lines.append(thin_points(run.spent(kind, step_E), value_E, most))
            axes.plot(*lines[-1], ".", color=COLOURS[i % len(COLOURS)], markersize=4)
        finished = plot_group(axes, group, lines, i)
        plot_interval(axes, finished, i, bounds)
    if len(runs) == 1:
        plot_own_interval(axes, runs[0], score, most)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bounds[0] - 2, bottom), min(bounds[1] + 2, top))


def plot_own_interval(axes: Axes, run: LoggedRun, score: Score, most: int) -> None:
    """Draw each evaluation's own interval."""
    step_E, low_E, high_E = run.intervals(score)
    few_E, low_E = thin_points(step_E, low_E, most)
    few_E, high_E = thin_points(step_E, high_E, most)
    axes.vlines(few_E, low_E, high_E, color=COLOURS[0], linewidth=0.8)
    for end_E in (low_E, high_E):
        axes.plot(few_E, end_E, "_", color=COLOURS[0], markersize=4)


def plot_interval(axes: Axes, lines: list[Curve], i: int, bounds: tuple[float, float]) -> None:
    """Shade the 95% interval of the mean over 3 and more runs, cut to what is possible."""
    if len(lines) >= LEAST_RUNS and len({len(x) for x, _ in lines}) == 1:
        value_RE = np.array([y for _, y in lines])
        middle, half = value_RE.mean(axis=0), half_width(value_RE)
        low, high = np.clip(middle - half, *bounds), np.clip(middle + half, *bounds)
        axes.fill_between(np.mean([x for x, _ in lines], axis=0), low, high, color=COLOURS[i % len(COLOURS)],
                          alpha=0.15, linewidth=0)


# ---- SVG

def draw_svg(plot: Callable[[Axes], None], integer_x: bool = True) -> Markup:
    """Let a function draw on axes, and return them as SVG that takes its colours from style.css."""
    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "path.simplify": False}):
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.16, right=0.97, bottom=0.13, top=0.96)
        axes = figure.subplots()
        plot(axes)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=INK, length=0, labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=integer_x))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: format_amount(value, 4)))
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return Markup(as_part_of_a_page(text.getvalue()))


def as_part_of_a_page(svg: str) -> str:
    """Leave out what a page has already, and put the variables of style.css in place of colours."""
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"; font-family: [^;\"]*| id=\"[\w.]+_\d+\"", "", svg)
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)  # style.css gives its size
    for i, colour in enumerate(COLOURS):
        svg = svg.replace(colour, f"var(--line-{i})")
    return re.sub(r"\n\s*", "\n", svg.replace(INK, "var(--muted)").replace(GRID, "var(--grid)"))
