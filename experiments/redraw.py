"""Compute the comparison's numbers, and draw it, from what is kept alone: redraw.py RESULTS FIGURES"""
import gzip
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

COSTS = {"steps": "", "generated tokens": "rollout/tokens", "trained tokens": "train/tokens",
         "seconds": "time/step"}
def load(path):
    run, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    tests = [line for line in lines if "accuracy" in line]
    run["accuracy"] = 100 * np.array([test["accuracy"] for test in tests])
    share = run["cpu_seconds"] / run["wall_seconds"]
    for cost, key in COSTS.items():  # a step is one step; without one of the other keys it spent none
        spent = np.cumsum([0.0, *(line.get(key, cost == "steps") for line in lines if line not in tests)])
        run[cost] = spent[[test["step"] for test in tests]] * (share if cost == "seconds" else 1)
    run["spent"] = {key: sum(line.get(key, 0) for line in lines) * (share if key.startswith("time/") else 1)
                    for key in lines[0] | lines[1]}
    return run

def area(run, cost, low, high):
    x = np.unique(np.clip([*run[cost], low, high], low, high))
    return np.trapezoid(np.interp(x, run[cost], run["accuracy"]), x) / (high - low)

def paired(gaps, family):  # Student's law is an integral over powers of a cosine
    df, angle = len(gaps) - 1, np.linspace(0, np.pi / 2, 100_001)
    law = np.cumsum(np.cos(angle) ** (df - 1)) - np.cos(angle) ** (df - 1) / 2 - 0.5
    mean, unit = np.mean(gaps), max(np.std(gaps, ddof=1) / (df + 1) ** 0.5, 1e-12) * df ** 0.5
    half = unit * np.tan(np.interp(1 - 0.05 / family, law / law[-1], angle))
    return [mean, mean - half, mean + half, 1 - np.interp(np.arctan(abs(mean) / unit), angle, law / law[-1])]

def column(runs, cost, start, family):  # {arm: [mean, and the difference to GRPO: mean, low, high, Holm's p]}
    most = min(run[cost][-1] for of_arm in runs.values() for run in of_arm)
    y = {arm: {run["seed"]: area(run, cost, start * most, most) for run in runs[arm]} for arm in runs}
    gaps = {arm: [y[arm][seed] - y["grpo"][seed] for seed in y[arm].keys() & y.get("grpo", {})] for arm in y}
    tests = {arm: paired(gaps[arm], family) for arm in y if arm != "grpo" and len(gaps[arm]) > 1}
    cells, p = {arm: [np.mean(list(y[arm].values()))] for arm in y}, 0.0
    for rank, arm in enumerate(sorted(tests, key=lambda arm: tests[arm][3])):
        cells[arm] += [*tests[arm][:3], p := max(p, min(1.0, (len(tests) - rank) * tests[arm][3]))]
    return {"budget": most, **cells}

def main(results, figures):  # parts.json says which runs are compared: {part: {arm: [file]}}
    for part, arms in json.loads((results / "parts.json").read_text()).items():
        runs = {arm: [load(results / name) for name in names] for arm, names in arms.items()}
        numbers = {f"{kind}, {cost}": column(runs, cost, start, len(runs) - 1)
                   for cost in COSTS for kind, start in (("area", 0.0), ("end", 0.75))}
        numbers["spent"] = {arm: [run["spent"] for run in of] for arm, of in runs.items()}
        print(json.dumps({"part": part} | numbers, default=float))
        for axes, cost in zip(plt.subplots(1, 4, figsize=(16, 3.4), sharey=True)[1], COSTS, strict=True):
            for arm, of in runs.items():
                axes.plot(*(np.mean([run[key] for run in of], 0) for key in (cost, "accuracy")), label=arm)
            axes.set(xlabel=cost, ylabel="held-out accuracy, %" if cost == "steps" else "")
        plt.legend(fontsize=7)
        if part != "validation":  # the runs that chose rates: numbers alone
            plt.savefig(figures / f"compare_{part}.png", bbox_inches="tight", metadata={"Software": None})
if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
