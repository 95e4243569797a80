"""Does every objective learn? Each toy config, before and after, and the critics with and without pretraining.

    python bench/objectives.py [--out runs/objectives] [--seeds 1]      # goes on where it was interrupted

Held-out accuracy is greedy, on 500 problems, with 95% Wilson intervals; rates are those of the configs, tuned to no
method, so the table says that the pipeline learns by each objective and not which is better. The curves are of the
critic's explained variance; the runs without pretraining have as many steps of the policy.
"""

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from training import ROOT, run

import runfolder

METHODS = {name: [f"{name}_toy.yaml"] for name in (
    "grpo", "cppo", "dapo", "drgrpo", "gspo", "cispo", "divppo", "gdpo", "ppo", "vapo", "tppo", "apo")} | {
    f"{name}, critic not pretrained": [f"{name}_toy.yaml", "steps=40", "critic.pretrain_steps=0"]
    for name in ("vapo", "tppo")}
CURVE = (1, 5, 10, 15, 20, 30, 40, 50)


def interval(line: dict) -> str:
    return "{accuracy:>6.1%} [{low:.1%}, {high:.1%}]".format_map(
        {key: line[f"eval/test/{key}"] for key in ("accuracy", "low", "high")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "objectives")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS).replace(", critic", "; critic"),
                        help="some of them, separated by commas")
    args = parser.parse_args()
    results = {}
    wanted = [(name.replace(";", ","), seed) for seed in range(args.seeds) for name in args.methods.split(",")]
    bar = tqdm(wanted, unit="run")
    for name, seed in bar:
        bar.set_description(f"{name}, seed {seed}")
        where = args.out.resolve() / name.replace(",", "").replace(" ", "-") / str(seed)
        where.parent.mkdir(parents=True, exist_ok=True)
        results.setdefault(name, []).append(
            runfolder.read(run(where, METHODS[name][0], f"seed={seed}", *METHODS[name][1:]) / "metrics.jsonl"))
    print(f"{'objective':<28} {'before':>22} {'after':>22} {'steps':>6} {'tokens':>13} {'seconds':>8}")
    for name, runs in results.items():
        for lines in runs:
            first, last = (line for line in lines if "eval/test/accuracy" in line)
            steps = [line for line in lines if "time/step" in line]
            lengths = f"{first['eval/test/length']:.1f} -> {last['eval/test/length']:.1f}"
            print(f"{name:<28} {interval(first):>22} {interval(last):>22} {len(steps):>6} {lengths:>13} "
                  f"{sum(line['time/step'] for line in steps):>8.0f}")
    print(f"\nexplained variance of the critic, after step\n{'':<36}" + "".join(f"{step:>7}" for step in CURVE))
    for name, runs in results.items():
        for lines in runs:
            curve = {line["step"]: line["critic/explained_variance"] for line in lines
                     if "critic/explained_variance" in line}
            if curve:
                print(f"{name:<36}" + "".join(f"{curve[step]:>7.2f}" if step in curve else " " * 7 for step in CURVE))
    print(json.dumps({"bench": "objectives", "results": {
        name: [[line for line in lines if "eval/test/accuracy" in line] for lines in runs]
        for name, runs in results.items()}}))


if __name__ == "__main__":
    main()
