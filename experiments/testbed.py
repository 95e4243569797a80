"""Does the hard toy task leave room to tell methods apart? Where its pass rates lie, and where prompts go.

    python experiments/testbed.py [--out runs/testbed]      # goes on where it was interrupted

GRPO trains on configs/grpo_hard.yaml on two seeds. The initial model and the policies halfway and at the end
of the first run each answer every training problem 64 times: assets/testbed.png shows how many problems have
which pass rate. DPPO and GRESO train once each, for a table of what became of the prompts that came up, some
epochs at a time. Final accuracies of methods are not compared here.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import mean

from compare import SIX
from kept_runs import RECIPE, ROOT, cpu_seconds, run_script, table, train_once
from matplotlib.figure import Figure
from tqdm import tqdm

import config
from infra import runfolder
from page.evaluations import count_right

RUNS = [("grpo", 0), ("dppo", 0), ("greso", 0), ("grpo", 1)]
ANSWERS = 64  # to each problem at each time
BINS = 8      # of the pass rate; 0 and 1 have bins of their own
FATES = ("skipped", "all wrong", "all right", "informative")
EPOCHS = 4    # that a line of the table sums up


def answered(model: Path, out: Path) -> dict[str, list[dict]]:
    """Answer every training problem, unless that was done; return the problems by level."""
    cfg = config.load(RECIPE)
    if not out.is_file():
        run_script("eval.py", "--model", str(model), "--data", cfg.data.train,
                   "--set", f"eval.temperature={cfg.rollout.temperature}", "--set", f"eval.n={ANSWERS}",
                   "--set", f"eval.max_new_tokens={cfg.rollout.max_new_tokens}", "--out", str(out))
    result, = json.loads(out.read_text())["results"].values()
    levels: dict[str, list[dict]] = {}
    for problem in result["problems"]:
        levels.setdefault(problem["level"], []).append(problem)
    return dict(sorted(levels.items()))


def bins(problems: list[dict]) -> list[int]:
    """Count problems by pass rate: 0, BINS equal bins between, and 1."""
    counts = [0] * (BINS + 2)
    for problem in problems:
        right = count_right(problem)
        inner = 1 + min(right * BINS // ANSWERS, BINS - 1)
        counts[{0: 0, ANSWERS: BINS + 1}.get(right, inner)] += 1
    return counts


def draw(results: dict[str, dict[str, list[dict]]], path: Path) -> None:
    """Draw how many problems have which pass rate, a panel for each time, the levels on top of each other."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True)
    labels = ["0", *(f"to {(i + 1) / BINS:.2f}" for i in range(BINS - 1)), "below 1", "1"]
    for axes, (when, levels) in zip(panels, results.items(), strict=True):
        below = [0] * len(labels)
        for i, (level, problems) in enumerate(levels.items()):
            colour = (0.1, 0.25 + 0.1 * i, 0.95 - 0.15 * i)
            counts = bins(problems)
            axes.bar(labels, counts, bottom=below, color=colour, label=f"level {level}")
            below = [a + b for a, b in zip(below, counts, strict=True)]
        axes.set_title(when, fontsize=10)
        axes.tick_params("x", labelrotation=60, labelsize=7)
        axes.set_xlabel(f"pass rate, {ANSWERS} answers", fontsize=8)
    panels[0].set_ylabel("training problems", fontsize=8)
    panels[-1].legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def level_table(results: dict[str, dict[str, list[dict]]]) -> list[str]:
    """Write pass rate and tokens of each level, at each time."""
    head = [f"{figure}, {when}" for figure in ("pass rate", "tokens") for when in results]
    rows = []
    for level in results["start"]:
        of_level = [levels[level] for levels in results.values()]
        rates = [mean(count_right(problem) / ANSWERS for problem in problems) for problems in of_level]
        tokens = [mean(response["tokens"] for problem in problems for response in problem["responses"])
                  for problems in of_level]
        rows.append([level, *(f"{rate:.1%}" for rate in rates), *(f"{length:.1f}" for length in tokens)])
    return table(["level", *head], rows)


def fate(prompt: dict) -> str:
    """Say what became of a prompt that came up, from its line of decisions.jsonl."""
    if "right" not in prompt:
        return "skipped"
    right = sum(prompt["right"])
    return {0: "all wrong", len(prompt["right"]): "all right"}.get(right, "informative")


def fate_table(runs: dict[str, Path]) -> list[str]:
    """Write which share of the prompts that came up met which fate, epochs together EPOCHS at a time."""
    rows = []
    for method, folder in runs.items():
        counts: dict[int, Counter] = {}
        for line in runfolder.read_log(folder / "decisions.jsonl"):
            for prompt in line["prompts"]:
                counts.setdefault(prompt["epoch"] // EPOCHS, Counter())[fate(prompt)] += 1
        for block, counter in counts.items():
            shares = [f"{counter[name] / counter.total():.0%}" for name in FATES]
            epochs = f"{block * EPOCHS + 1} to {(block + 1) * EPOCHS}"
            rows.append([method, epochs, str(counter.total()), *shares])
    return table(["method", "epochs", "came up", *FATES], rows)


def run_table(runs: dict[tuple[str, int], Path]) -> list[str]:
    """Write each run's seconds, and its held-out accuracy over the steps where it is GRPO."""
    rows = []
    for (method, seed), folder in runs.items():
        lines = runfolder.read_log(folder / "metrics.jsonl")
        key = "eval/hard_test/accuracy"
        accuracy = ", ".join(f"{line[key]:.1%}" for line in lines if key in line)
        rows.append([method, str(seed), f"{cpu_seconds(folder):.0f}",
                     accuracy if method == "grpo" else "not looked at"])
    return table(["method", "seed", "CPU seconds", "held-out accuracy, step by step"], rows)


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "testbed")
    out = parser.parse_args().out.resolve()
    cfg, runs = config.load(RECIPE), {}
    for method, seed in tqdm(RUNS, unit="run"):
        runs[method, seed] = train_once(out / f"{method}-seed{seed}", RECIPE, *SIX[method], f"seed={seed}",
                                        f"checkpoint.every={cfg.steps // 2}", "checkpoint.keep=all")
    checkpoints = runs["grpo", 0] / "checkpoints"
    models = {"start": ROOT / cfg.model.path, "middle": checkpoints / f"step_{cfg.steps // 2:06d}",
              "end": checkpoints / f"step_{cfg.steps:06d}"}
    results = {when: answered(model, out / f"{when}.json") for when, model in tqdm(models.items())}
    draw(results, ROOT / "assets" / "testbed.png")
    first = {method: folder for (method, seed), folder in runs.items() if seed == 0}
    for lines in (run_table(runs), level_table(results), fate_table(first)):
        print(*lines, "", sep="\n")
    never = {when: sum(bins(of)[0] for of in levels.values()) for when, levels in results.items()}
    print(json.dumps({"bench": "testbed", "never_right": never}))


if __name__ == "__main__":
    main()
