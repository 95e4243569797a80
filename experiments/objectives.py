"""Does every method learn? Each toy config, before and after, and critics with and without pretraining.

    python experiments/objectives.py [--out runs/objectives] [--seeds 1] [--steps N] [--methods grpo,cppo]

It goes on where it was interrupted. Held-out accuracy is greedy, on 500 problems, with 95% Wilson intervals;
rates are those of the configs, tuned to no method, so the table says that the pipeline learns by each method,
with the lowest bound after above the highest before, and not which is better. --steps are those of the
policy; a critic's pretraining comes before them. The curves are of the critic's explained variance; the runs
without pretraining have as many steps of the policy.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from tqdm import tqdm
from training import ROOT, train_once

import config
from infra import runfolder

METHODS = {path.stem.removesuffix("_toy"): [path.name] for path in sorted(config.CONFIGS.glob("*_toy.yaml"))}
METHODS |= {f"{name}, critic not pretrained": [f"{name}_toy.yaml", "critic.pretrain_steps=0"]
            for name in ("vapo", "tppo")}
CURVE = (1, 5, 10, 15, 20, 30, 40, 50)
VARIANCE = "critic/explained_variance"


def steps_of(name: str, settings: list[str], of_policy: int | None) -> int:
    """Count the steps of a run: so many of the policy, or as many as the config has, behind a pretraining."""
    shipped = config.load(name)
    policy = of_policy or shipped.steps - shipped.critic.pretrain_steps
    return policy + config.load(name, settings).critic.pretrain_steps


def evaluations(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "eval/test/accuracy" in line]


def with_interval(line: dict) -> str:
    accuracy = line["eval/test/accuracy"]
    low = line["eval/test/low"]
    high = line["eval/test/high"]
    return f"{accuracy:>6.1%} [{low:.1%}, {high:.1%}]"


def row(name: str, several: list[list[dict]]) -> str:
    """Write a method's row of the table: accuracy before and, seed by seed, after, and length."""
    before = evaluations(several[0])[0]
    lasts = [evaluations(lines)[-1] for lines in several]
    low, high = min(line["eval/test/low"] for line in lasts), before["eval/test/high"]
    after = "".join(f"{with_interval(line):>22}" for line in lasts)
    length = mean(line["eval/test/length"] for line in lasts)
    return (f"{name:<28} {with_interval(before):>22}{after} {lasts[0]['step']:>6} {length:>7.1f} "
            f"{'yes' if low > high else 'no':>7}")


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
    parser.add_argument("--steps", type=int, help="of the policy (those of the config)")
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
        file, *settings = METHODS[name]
        settings += [f"steps={steps_of(file, settings, args.steps)}", f"seed={seed}", "eval.every=0"]
        folder = train_once(out, file, *settings)
        results.setdefault(name, []).append(runfolder.read_log(folder / "metrics.jsonl"))
    show(results)
    kept = {name: list(map(evaluations, several)) for name, several in results.items()}
    print(json.dumps({"bench": "objectives", "results": kept}))


def show(results: dict[str, list[list[dict]]]) -> None:
    """Print the table, and below it the curves of the critics."""
    seeds = len(next(iter(results.values())))
    after = "".join(f"{f'after, seed {seed}':>22}" for seed in range(seeds))
    print(f"{'method':<28} {'before':>22}{after} {'steps':>6} {'tokens':>7} {'learns':>7}")
    for name, several in results.items():
        print(row(name, several))
    print("\nexplained variance of the critic, after step")
    print(" " * 36 + "".join(f"{step:>7}" for step in CURVE))
    for name, several in results.items():
        for lines in several:
            if any(VARIANCE in line for line in lines):
                print(curve(name, lines))


if __name__ == "__main__":
    main()
