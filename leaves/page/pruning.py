"""Draw the pruning of a run: the completions kept, their weights, and the tokens saved."""

import numpy as np
from matplotlib.axes import Axes

from infra.lines import blame_file, read_log
from leaves.page.charts import COLOURS, Chart, draw_svg, thin_points
from leaves.page.compare import format_amount
from leaves.page.runs import LoggedRun

LINE_POINTS = 500       # of a line; longer ones are drawn by means of neighbouring steps
BINS = 10          # of the accuracy of a group; 0 and 1 have bins of their own
RIGHT, WRONG = COLOURS[2], COLOURS[1]


def pruning_charts(run: LoggedRun) -> tuple[list[str], list[Chart]]:
    """Say in numbers and draw what pruning kept. Empty before the first step."""
    path = run.folder / "decisions.jsonl"
    decided = read_log(path)
    if not decided:
        return [], []
    with blame_file(path):
        right, wrong = kept_by_difficulty(decided)
        weights = kept_weights(decided)
        by_reward = any("reward" in prompt for line in decided for prompt in line["prompts"])
    value, well, badly = "accuracy", "right completions", "wrong completions"
    if by_reward:
        value, well, badly = "mean reward", "rewards above the group's mean", "others"
    charts = [
        Chart("Share kept against difficulty", f"by the {value} of the group, from hard to easy\n"
              "With CPPO and PPS: the right ones of hard groups, the wrong ones of easy groups.",
              [(well, 2), (badly, 1)],
              draw_svg(lambda axes: plot_shares(axes, right, wrong), integer_x=False)),
        Chart("Weights of kept completions",
              "share of them\n1 is no correction; large weights make the gradient noisy.", [],
              draw_svg(lambda axes: plot_weights(axes, weights), integer_x=False)),
        Chart("Tokens generated and trained",
              "added up over the steps\nThe lower the trained line, the more pruning saved.",
              [("generated", 0), ("trained", 1)],
              draw_svg(lambda axes: plot_tokens(axes, run))),
    ]
    return describe_pruning(run), charts


def describe_pruning(run: LoggedRun) -> list[str]:
    """Say what pruning kept of completions and tokens, and how many prompts it skipped."""
    total = {key: run.series(key)[1].sum() for key in (
        "prune/kept", "prune/offered", "train/tokens", "rollout/tokens", "prune/skipped", "rollout/prompts")}
    texts = []
    for used, of, what in (("prune/kept", "prune/offered", "completions offered were kept"),
                           ("train/tokens", "rollout/tokens", "tokens generated were trained on")):
        if total[of]:
            texts.append(f"{total[used] / total[of]:.1%} of {format_amount(total[of])} {what}")
    skipped, rolled = format_amount(total["prune/skipped"]), format_amount(total["rollout/prompts"])
    return [*texts, f"{skipped} prompts were skipped and {rolled} rolled out"]


def kept_by_difficulty(decided: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Count right and wrong completions by the accuracy of their group: (kept, all) of each, [2, BINS + 1].

    Bin i is of groups whose accuracy is i / BINS, rounded; only 0 and 1 themselves are in the outer bins.
    Without gold answers it is rewards above their group's mean and others, by `ease`.
    """
    counts = np.zeros((2, 2, BINS + 1))
    prompts = [prompt for line in decided for prompt in line["prompts"]]
    rewards = [reward for prompt in prompts for reward in drop_unknown(prompt.get("reward", ()))]
    for prompt in (prompt for prompt in prompts if "right" in prompt or "reward" in prompt):
        value_G = prompt.get("right", prompt.get("reward"))
        place = float(np.mean(drop_unknown(value_G) or [0]))
        if "reward" in prompt:
            value_G = [None if value is None else int(value > place) for value in value_G]
            place = scale_reward(place, rewards)
        inner = min(max(round(BINS * place), 1), BINS - 1)
        i = {0.0: 0, 1.0: BINS}.get(place, inner)
        weight_G = prompt.get("completion_weight", [0.0] * len(value_G))
        for verdict, weight in zip(value_G, weight_G, strict=True):
            if verdict is not None:
                counts[1 - verdict, :, i] += (weight > 0, 1)
    return counts[0], counts[1]


def drop_unknown(value_G: list[float | None]) -> list[float]:
    return [value for value in value_G if value is not None]


def scale_reward(reward: float, rewards: list[float]) -> float:
    """Place a mean reward between the least (0) and the most (1) that a completion of the run got."""
    least, most = min(rewards, default=0.0), max(rewards, default=0.0)
    return (reward - least) / (most - least) if most > least else 0.0


def kept_weights(decided: list[dict]) -> np.ndarray:
    """List the weights of all completions that were kept."""
    return np.array([weight for line in decided for prompt in line["prompts"]
                     for weight in prompt.get("completion_weight", ()) if weight > 0])


def plot_shares(axes: Axes, right: np.ndarray, wrong: np.ndarray) -> None:
    """Draw the share kept of right and of wrong completions, for each accuracy that a group had."""
    place = np.arange(BINS + 1) / BINS
    for (kept, offered), shift, colour in ((right, -0.02, RIGHT), (wrong, 0.02, WRONG)):
        some = offered > 0
        axes.bar(place[some] + shift, kept[some] / offered[some], width=0.036, color=colour)
    axes.set(xlim=(-0.06, 1.06), ylim=(0, 1.05))


def plot_weights(axes: Axes, weights: np.ndarray) -> None:
    """Draw the distribution of the weights."""
    if len(weights):
        edges = np.linspace(0, 1.02 * weights.max(), 40)
        axes.hist(weights, edges, weights=np.full(len(weights), 1 / len(weights)), color=COLOURS[0])


def plot_tokens(axes: Axes, run: LoggedRun) -> None:
    """Draw the tokens generated and trained until each step."""
    step_S = np.array([step["step"] for step in run.steps])
    for kind, colour in (("generated tokens", COLOURS[0]), ("trained tokens", COLOURS[1])):
        axes.plot(*thin_points(step_S, run.spent(kind, step_S), LINE_POINTS), color=colour)
    axes.set_ylim(bottom=0)
