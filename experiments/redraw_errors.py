"""Draw the error of a pruned gradient against what its run has learnt: redraw_errors.py RESULTS FIGURE

Reads what is kept alone; of the repository it imports redraw.py. An arm is a pruner at a budget: across, the
squared error of its gradient over the full gradient's square; up, the mean area over steps of its runs, with
each run as a dot. Arms whose gradient is another's in the mean are hollow.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from redraw import area, load


def unbiased(arms: dict[str, dict]) -> dict[str, dict]:
    return {name: arm for name, arm in arms.items() if not arm["biased"]}


def points(results: Path, arms: dict[str, dict]) -> tuple[np.ndarray, np.ndarray]:
    """Read logarithms of errors, [arms], and areas, [arms, seeds]."""
    runs = [[load(results / name) for name in arm["files"]] for arm in arms.values()]
    areas = [[area(run, "steps", 0, run["steps"][-1]) for run in of_arm] for of_arm in runs]
    return np.log10([arm["error"] for arm in arms.values()]), np.array(areas)


def correlation(error: np.ndarray, areas: np.ndarray) -> tuple[float, float, float]:
    """Correlate errors with mean areas; the interval is of a bootstrap over arms and, within them, seeds."""
    draw, (arms, seeds) = np.random.default_rng(0), areas.shape
    drawn = []
    for _ in range(5000):
        which, of_arm = draw.integers(0, arms, arms), draw.integers(0, seeds, (arms, seeds))
        means = np.take_along_axis(areas[which], of_arm, axis=1).mean(axis=1)
        if np.ptp(error[which]) and np.ptp(means):
            drawn.append(np.corrcoef(error[which], means)[0, 1])
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(np.corrcoef(error, areas.mean(axis=1))[0, 1]), float(low), float(high)


def main(results: Path, figure: Path) -> None:
    arms = json.loads((results / "errors.json").read_text())
    error, areas = points(results, arms)
    r, low, high = correlation(error, areas)
    alone, alone_low, alone_high = correlation(*points(results, unbiased(arms)))
    plot, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for (name, arm), x, of_arm in zip(arms.items(), 10 ** error, areas, strict=True):
        axes.plot([x] * len(of_arm), of_arm, ".", color="grey", markersize=4)
        axes.plot(x, of_arm.mean(), "o", color="C0", fillstyle="none" if arm["biased"] else "full")
        axes.annotate(name, (x, of_arm.mean()), fontsize=7, xytext=(4, 2), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xlabel("squared error of the gradient over its square, after 20 steps")
    axes.set_ylabel("mean accuracy over the run, %")
    axes.set_title(f"correlation {r:+.2f} [{low:+.2f}, {high:+.2f}], of the unbiased alone {alone:+.2f} "
                   f"[{alone_low:+.2f}, {alone_high:+.2f}]", fontsize=10)
    plot.savefig(figure, dpi=110, metadata={"Software": None})
    drawn = {name: {"error": arm["error"], "area": mean} for (name, arm), mean
             in zip(arms.items(), areas.mean(axis=1), strict=True)}
    print(json.dumps({"correlation": [r, low, high], "unbiased": [alone, alone_low, alone_high],
                      "arms": drawn}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
