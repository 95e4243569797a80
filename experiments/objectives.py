"""Does every objective learn? Each toy config, before and after, and critics with and without pretraining.

    python experiments/objectives.py [--out runs/objectives] [--seeds 1]   # goes on where it was interrupted

Held-out accuracy is greedy, on 500 problems, with 95% Wilson intervals; rates are those of the configs,
tuned to no method, so the table says that the pipeline learns by each objective and not which is better.
The curves are of the critic's explained variance; the runs without pretraining have as many steps of the
policy.
"""

import argparse
import json
from pathlib import Path

from tqdm import tqdm
from training import ROOT, train_once

from infra import runfolder

OBJECTIVES = ("grpo", "cppo", "dapo", "drgrpo", "gspo", "cispo", "divppo", "gdpo", "ppo", "vapo", "tppo",
              "apo", "nat", "pods", "ragen", "prompt_pps")
METHODS = {name: [f"{name}_toy.yaml"] for name in OBJECTIVES}
METHODS |= {f"{name}, critic not pretrained": [f"{name}_toy.yaml", "steps=40", "critic.pretrain_steps=0"]
            for name in ("vapo", "tppo")}
CURVE = (1, 5, 10, 15, 20, 30, 40, 50)
VARIANCE = "critic/explained_variance"


def evaluations(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "eval/test/accuracy" in line]


def with_interval(line: dict) -> str:
    accuracy = line["eval/test/accuracy"]
    low = line["eval/test/low"]
    high = line["eval/test/high"]
    return f"{accuracy:>6.1%} [{low:.1%}, {high:.1%}]"


def row(name: str, lines: list[dict]) -> str:
    """Write a run's row of the table: accuracy and length before and after."""
    first, last = evaluations(lines)
    seconds = [line["time/step"] for line in lines if "time/step" in line]
    lengths = f"{first['eval/test/length']:.1f} -> {last['eval/test/length']:.1f}"
    return (f"{name:<28} {with_interval(first):>22} {with_interval(last):>22} {len(seconds):>6} "
            f"{lengths:>13} {sum(seconds):>8.0f}")


def curve(name: str, lines: list[dict]) -> str:
    """Write the explained variance of a run's critic after the steps of CURVE."""
    explained = {line["step"]: line[VARIANCE] for line in lines if VARIANCE in line}
    cells = [f"{explained[step]:>7.2f}" if step in explained else " " * 7 for step in CURVE]
    return f"{name:<36}" + "".join(cells)


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "objectives")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS).replace(", critic", "; critic"),
                        help="some of them, separated by commas")
    args = parser.parse_args()
    results: dict[str, list[list[dict]]] = {}
    names = [name.replace(";", ",") for name in args.methods.split(",")]
    bar = tqdm([(name, seed) for seed in range(args.seeds) for name in names], unit="run")
    for name, seed in bar:
        bar.set_description(f"{name}, seed {seed}")
        out = args.out.resolve() / name.replace(",", "").replace(" ", "-") / str(seed)
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = train_once(out, METHODS[name][0], f"seed={seed}", *METHODS[name][1:])
        results.setdefault(name, []).append(runfolder.read(folder / "metrics.jsonl"))
    show(results)
    kept = {name: list(map(evaluations, several)) for name, several in results.items()}
    print(json.dumps({"bench": "objectives", "results": kept}))


def show(results: dict[str, list[list[dict]]]) -> None:
    """Print the table, and below it the curves of the critics."""
    print(f"{'objective':<28} {'before':>22} {'after':>22} {'steps':>6} {'tokens':>13} {'seconds':>8}")
    for name, several in results.items():
        for lines in several:
            print(row(name, lines))
    print("\nexplained variance of the critic, after step")
    print(" " * 36 + "".join(f"{step:>7}" for step in CURVE))
    for name, several in results.items():
        for lines in several:
            if any(VARIANCE in line for line in lines):
                print(curve(name, lines))


if __name__ == "__main__":
    main()
