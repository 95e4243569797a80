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

from matplotlib.figure import Figure
from tqdm import tqdm
from training import ROOT, cpu_seconds, run_script, train_once

import config
from infra import runfolder
from page.evaluations import count_right

# Methods on the hard toy task: GRPO's config, and the settings that make it another method.
METHODS = {
    "grpo": [],
    "dppo": ["prune.prompts={kind: bernoulli, drop_prob: 0.5}",
             "prune.completions={kind: bernoulli, drop_prob: 0.5}"],
    "greso": ["prune.prompts={kind: greso}", "rollout.until=informative"],
}
RUNS = [("grpo", 0), ("dppo", 0), ("greso", 0), ("grpo", 1)]
ANSWERS = 64  # to each problem at each time
BINS = 8      # of the pass rate; 0 and 1 have bins of their own
FATES = ("skipped", "all wrong", "all right", "informative")
EPOCHS = 4    # that a line of the table sums up


def train(out: Path, method: str, seed: int) -> Path:
    half = config.load("grpo_hard.yaml").steps // 2
    return train_once(out / f"{method}-seed{seed}", "grpo_hard.yaml", *METHODS[method], f"seed={seed}",
                      f"checkpoint.every={half}", "checkpoint.keep=all")


def answered(model: Path, out: Path, answers: int) -> dict:
    """Answer every training problem so many times, unless that was done; return the result of eval.py."""
    cfg = config.load("grpo_hard.yaml")
    if not out.is_file():
        run_script("eval.py", "--model", str(model), "--data", cfg.data.train,
                   "--set", f"eval.temperature={cfg.rollout.temperature}", "--set", f"eval.n={answers}",
                   "--set", f"eval.max_new_tokens={cfg.rollout.max_new_tokens}", "--out", str(out))
    result, = json.loads(out.read_text())["results"].values()
    return result


def by_level(result: dict) -> dict[str, list[dict]]:
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


def draw(results: dict[str, dict], path: Path) -> None:
    """Draw how many problems have which pass rate, a panel for each time, the levels on top of each other."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True)
    labels = ["0", *(f"to {(i + 1) / BINS:.2f}" for i in range(BINS - 1)), "below 1", "1"]
    for axes, (when, result) in zip(panels, results.items(), strict=True):
        below, levels = [0] * (BINS + 2), by_level(result)
        for i, (level, problems) in enumerate(levels.items()):
            counts = bins(problems)
            colour = (0.1, 0.25 + 0.1 * i, 0.95 - 0.15 * i)
            axes.bar(range(BINS + 2), counts, bottom=below, color=colour, label=f"level {level}")
            below = [a + b for a, b in zip(below, counts, strict=True)]
        axes.set_title(when, fontsize=10)
        axes.set_xticks(range(BINS + 2), labels, rotation=60, fontsize=7)
        axes.set_xlabel(f"pass rate, {ANSWERS} answers", fontsize=8)
    panels[0].set_ylabel("training problems", fontsize=8)
    panels[-1].legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def level_table(results: dict[str, dict]) -> list[str]:
    """Write pass rate and tokens of each level, at each time."""
    head = [f"{what}, {when}" for what in ("pass rate", "tokens") for when in results]
    rows = []
    for level in by_level(next(iter(results.values()))):
        of_level = [by_level(result)[level] for result in results.values()]
        rates = [mean(count_right(p) / ANSWERS for p in problems) for problems in of_level]
        tokens = [mean(r["tokens"] for p in problems for r in p["responses"]) for problems in of_level]
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


def run_table(runs: list[tuple[str, int, Path]]) -> list[str]:
    """Write each run's seconds, and its held-out accuracy over the steps where it is GRPO."""
    rows = []
    for method, seed, folder in runs:
        lines = runfolder.read_log(folder / "metrics.jsonl")
        curve = [line["eval/hard_test/accuracy"] for line in lines if "eval/hard_test/accuracy" in line]
        accuracy = ", ".join(f"{value:.1%}" for value in curve) if method == "grpo" else "not looked at"
        rows.append([method, str(seed), f"{cpu_seconds(folder):.0f}", accuracy])
    return table(["method", "seed", "CPU seconds", "held-out accuracy, step by step"], rows)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "testbed")
    out = parser.parse_args().out.resolve()
    runs = [(method, seed, train(out, method, seed)) for method, seed in tqdm(RUNS, unit="run")]
    cfg = config.load("grpo_hard.yaml")
    checkpoints = runs[0][2] / "checkpoints"
    models = {"start": ROOT / cfg.model.path, "middle": checkpoints / f"step_{cfg.steps // 2:06d}",
              "end": checkpoints / f"step_{cfg.steps:06d}"}
    results = {when: answered(model, out / f"{when}.json", ANSWERS) for when, model in tqdm(models.items())}
    draw(results, ROOT / "assets" / "testbed.png")
    first = {method: folder for method, seed, folder in runs if seed == 0}
    for lines in (run_table(runs), level_table(results), fate_table(first)):
        print(*lines, "", sep="\n")
    never = {when: bins(result["problems"])[0] for when, result in results.items()}
    print(json.dumps({"bench": "testbed", "accuracy": {w: r["accuracy"] for w, r in results.items()},
                      "never_right": never, "of": len(results["start"]["problems"])}))


if __name__ == "__main__":
    main()
