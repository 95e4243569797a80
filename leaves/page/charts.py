"""Draw metrics as SVG, in colours that are read on light and on dark pages; style.css colours the texts.

A chart has rows, a colour each. Of one run a chart may hold several metrics. Of several runs each metric has
a chart of its own: a row is a row of the comparison, with a thin line for each run and a thick one for the
mean, as far as all of its runs have come. From three runs on the mean has its interval.
"""

import re
from fnmatch import fnmatch
from io import StringIO

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from infra.lines import blame_file, read_log
from leaves.page.runs import COSTS, Curve, Groups, LoggedRun
from leaves.page.summary import keys_of, scores_of
from leaves.page.tables import format_amount, mean_interval
from records import frozen

# section -> metrics of a chart -> a note on what is good
CHARTS = {
    "Reward": {
        "reward/mean": "of the completions of a step; it should rise, then level off",
        "reward/std": "at 0 all rewards are equal and nothing is learnt",
        "reward/*": "means before their weights; each component with a weight should rise",
        "advantage/flat_groups": "share of groups of equal rewards, which have no gradient"
    },
    "Completions": {
        "rollout/length": "tokens per completion; steady, or rising with the reward, is good",
        "rollout/truncated": "share of completions; if it is not near 0 raise rollout.max_new_tokens",
        "rollout/entropy": "nats per token; a slow fall is good, a fall to 0 ends exploration"
    },
    "Pruning": {
        "prune/offered prune/kept": "completions of a step; the gap is what pruning left out",
        "prune/weight_max": "of a kept completion; a large weight makes the gradient noisy",
        "prune/ess": "effective sample size; close to the number of kept completions is good",
        "prune/skipped": "prompts that were not rolled out, and cost no tokens"
    },
    "Update": {
        "train/kl": "to the initial model, nats per token; a jump shows that the policy has drifted",
        "train/clipped": "share of tokens that the trust region stops; a few percent is good",
        "train/grad_norm": "before clipping; spikes are a bad sign",
        "train/lr": "it should follow optim.schedule",
        "mismatch/logp_abs_mean": "trainer against engine; small and steady is good",
        "critic/explained_variance": "above 0 the critic is useful, 1 is perfect"
    },
    "Cost": {
        "rollout/tokens train/tokens": "of a step; the gap is what pruning and flat groups saved",
        "time/*": "seconds of a step, on rank 0; rollout and update should take most",
        "memory/peak_gib": "the most that a rank has held so far; flat after the first steps is good"
    },
    "All others": {"*": ""}
}
SIDES = ("the others", "right, or a reward above the mean of its group")
BINS = 10           # of the mean of a group, and one more
SIZE = (3.7, 2.2)   # inches; a page has several beside each other, a phone one
STYLE = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"],
         "path.simplify_threshold": 1.0}  # of many points a few are drawn

Rows = dict[str, list[Curve]]  # label -> the curve of each run


@frozen
class Chart:
    title: str
    note: str
    legend: list[str]  # labels of its rows; none where they are the page's
    svg: Markup


def draw_sections(groups: Groups) -> dict[str, list[Chart]]:
    """Draw the charts of every section. A metric that is 0 throughout is left out."""
    runs = sum(groups.values(), [])
    alone, lines = len(runs) == 1, [line for run in runs for line in run.lines]
    scores = scores_of(lines)
    left = {key for line in lines for key, value in line.items() if value}
    left = sorted(left - {"step", *(key for score in scores for key in keys_of(score))})
    sections = {"Held-out answers": [
        Chart(f"{score} against {kind}", "it should rise by more than its interval", [],
              draw_svg(rows_of(groups, keys_of(score), kind), score))
        for score in scores for kind in (["steps"] if alone else COSTS)]}
    for section, charts in CHARTS.items():
        sections[section] = []
        for names, note in charts.items():
            keys = [key for name in names.split() for key in left if fnmatch(key, name)]
            left = [key for key in left if key not in keys]
            if alone and len(keys) > 1 and names != "*":
                rows = {key: [runs[0].series(key)] for key in keys}
                sections[section].append(Chart(names, note, keys, draw_svg(rows)))
            else:
                sections[section] += [Chart(key, note, [], draw_svg(rows_of(groups, [key]))) for key in keys]
    if runs[0].steps:
        sections["Pruning"] += map(draw_difficulty, groups, groups.values())
    return {section: charts for section, charts in sections.items() if charts}


def rows_of(groups: Groups, keys: list[str], kind: str = "steps") -> Rows:
    """Read the first of these metrics of all runs against a kind of cost. A row of one run has the others,
    the ends of its interval."""
    return {label: [run.series(*keys[:None if len(group) == 1 else 1], kind=kind) for run in group]
            for label, group in groups.items()}


def draw_svg(rows: Rows, score: str = "") -> Markup:
    """Draw rows of curves."""
    text = StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(left=0.16, right=0.97, bottom=0.13, top=0.96)
        axes = figure.subplots()
        axes.margins(y=0.08)
        for i, curves in enumerate(rows.values()):
            style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3]}
            for x, y, *_ in curves if len(curves) > 1 else []:
                axes.plot(x, y, linewidth=0.6, **style)
            x, y, *ends = curves[0] if len(curves) == 1 else mean_curve(curves, score)
            axes.plot(x, y, marker="." if len(x) < 20 else "", markersize=4, linewidth=1.6, **style)
            if ends:
                axes.fill_between(x, *ends, color=style["color"], alpha=0.15, linewidth=0)
        if not score:
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.grid(color="gray", alpha=0.25, linewidth=0.6)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8)
        axes.locator_params(nbins=5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: format_amount(value))
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    own = r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>"  # of a file of its own
    return Markup(re.sub(own, "", text.getvalue(), flags=re.DOTALL))


def mean_curve(curves: list[Curve], score: str) -> Curve:
    """Average runs up to where all of them have come, with the interval of the mean if they are many."""
    n = min(len(x) for x, *_ in curves)
    x_RE, y_RE = (np.array([curve[axis][:n] for curve in curves]) for axis in (0, 1))
    return x_RE.mean(axis=0), *mean_interval(y_RE, score)


# ---- what pruning kept

def draw_difficulty(label: str, group: list[LoggedRun]) -> Chart:
    """Draw the share of completions that pruning kept against the mean accuracy or reward of their group."""
    rows = {name: [] for name in SIDES}
    for run in group:
        path = run.folder / "decisions.jsonl"
        with blame_file(path):
            counts = kept_by_difficulty(read_log(path))
        for curves, (lost_B, kept_B) in zip(rows.values(), counts, strict=True):
            with np.errstate(invalid="ignore"):  # nan where no completion is
                curves.append((np.arange(BINS + 1) / BINS, kept_B / (lost_B + kept_B)))
    return Chart(f"completions kept of {label}", "share, from hard groups (0) to easy ones (1)", [*rows],
                 draw_svg(rows))


def kept_by_difficulty(decided: list[dict]) -> np.ndarray:
    """Count completions: those not better, and better; not kept, and kept; by the mean of their group:
    [2, 2, BINS + 1].

    Bin i is of groups whose accuracy is i / BINS, rounded. Without gold answers it is the mean reward, from
    the least to the most that a completion of the run got.
    """
    groups = []  # values and weights of completions
    for prompt in (prompt for line in decided for prompt in line["prompts"]):
        value_G = np.array(prompt.get("right", prompt.get("reward", [])), float)
        weight_G = prompt.get("completion_weight", 0 * value_G)
        groups.append(np.array([value_G, weight_G])[:, ~np.isnan(value_G)])
    every, counts = np.hstack([[[0], [0]], *groups])[0], np.zeros((2, 2, BINS + 1), int)
    for value_G, weight_G in groups:
        place_G = (value_G - every.min()) / (np.ptp(every) or 1)
        mean = place_G.sum() / max(1, len(place_G))
        better_G = (place_G > mean) | (place_G == 1)
        np.add.at(counts, (better_G.astype(int), (weight_G > 0).astype(int), round(BINS * mean)), 1)
    return counts
