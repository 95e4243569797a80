"""Does pruning save time on a GPU? GRPO, CPPO and PPS on GSM8K, 100 steps each, about an hour on a card.

    python experiments/gpu_hour.py [--model Qwen/Qwen2.5-0.5B-Instruct] [--out runs/gpu_hour] [--set a.b=c]
    python experiments/gpu_hour.py --tiny --out runs/tiny    # two steps of the toy on a CPU, to see it work

`make gpu-hour` does the first. No GPU has run it, so the hour is a guess. All methods see the same 16 prompts
x 16 completions a step, and CPPO and PPS train on a quarter of these, PPS by |advantage| and by surprise.
Settings are those of CPPO's release (configs/base/cppo_gsm8k.yaml), with one update a rollout and a rate for
256 completions. Accuracy is that of greedy answers to the test set, before and after. It goes on where it was
interrupted. Other settings need another folder.
"""

import sys
from pathlib import Path

from kept_runs import ROOT, experiment_status, parser, table, train_once
from tqdm import tqdm

import report
from infra.lines import is_evaluation, phase_seconds, read_metrics
from leaves.page.summary import score_cell, scores_of

CONFIG = "experiments/gpu_hour.yaml"
METHODS = {
    "GRPO": (),
    "CPPO": ("prune.completions={kind: topk, keep: 4, scope: batch}", "loss.denominator=kept"),
    "PPS": ("prune.completions={kind: pps, keep: 4, scope: batch, by_cost: true, size: adv}",),
    "PPS by surprise": ("prune.completions={kind: pps, keep: 4, scope: batch, by_cost: true}",),
}
TINY = ("model.path=toy/model", "data.train=toy/train.jsonl", "data.eval=toy/test.jsonl", "eval.limit=16",
        "rollout.prompts_per_step=2", "rollout.max_new_tokens=48", "eval.max_new_tokens=48",
        "pack.capacity=4096", "data.system_prompt=null", "reward.accuracy=1", "steps=2")
PHASES = ("rollout", "reward", "update", "sync", "step", "eval")


def row(method: str, folder: Path, anchor: dict[str, float] | None) -> tuple[list[str], dict[str, float]]:
    """Write accuracy before and after, seconds by phase, and the anchor's seconds over these."""
    lines = read_metrics(folder / "metrics.jsonl")
    evals = [line for line in lines if is_evaluation(line)]
    (score, *_), seconds = scores_of(evals), phase_seconds(lines)
    trained = sum(line.get("train/tokens", 0) for line in lines)
    cells = [method, score_cell(evals[0], score), score_cell(evals[-1], score), f"{trained:,.0f}"]
    cells += [f"{seconds[phase]:,.1f}" for phase in PHASES]
    cells += [f"{anchor[phase] / seconds[phase]:.2f}" if anchor else "1" for phase in ("update", "step")]
    return cells, seconds


def experiment(out: Path, settings: list[str]) -> None:
    rows, folders, anchor = [], [], None
    for method, of_method in tqdm(METHODS.items(), unit="run"):
        name = method.lower().replace(" ", "_")
        folders.append(train_once(out / name, CONFIG, *of_method, *settings, resume=True))
        cells, seconds = row(method, folders[-1], anchor)
        anchor = anchor or seconds
        rows.append(cells)
    head = ["method", "before", "after", "trained tokens", *(f"{phase} s" for phase in PHASES)]
    head += ["GRPO's update over it", "GRPO's step over it"]
    print(*table(head, rows), "", report.write_report(folders, out / "report"), sep="\n")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", help="a folder or a hub name")
    options.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_hour")
    options.add_argument("--tiny", action="store_true", help="two steps of the toy")
    options.add_argument("--set", action="append", default=[], help="change one setting of every run")
    args = options.parse_args()
    settings = [*(TINY if args.tiny else ()), *args.set]
    settings += [f"model.path={args.model}"] if args.model else []
    return experiment_status(lambda: experiment(args.out.resolve(), settings))


if __name__ == "__main__":
    sys.exit(main())
