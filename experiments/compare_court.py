"""Do the methods of court/ learn more from equally many generated tokens than plain leave-one-out?

    python experiments/compare_court.py FILE.jsonl.xz [--seeds 5] [--arms leave-one-out,abort]

docs/experiments.md has the questions. Runs are kept in the file, and not made again (kept_runs.py).
"""

import argparse
import json
from pathlib import Path
from statistics import mean

import kept_runs
from compare import EVALUATED, kept_arms
from kept_runs import Run, area_and_end, curve, difference, keep, least, table
from tqdm import tqdm
from try_method import COURT, load, plug_in

RATE, COST = "1e-4", "generated tokens"
ABORT = "{kind: abort, mark: 16, bias: 14.75, spread: 0.43, rate: -0.07, prompt: -5.11}"
OF_4 = ("rollout.group_size=4", "rollout.prompts_per_step=32")
# arm -> the file that brings it, if there is one, and its settings
ARMS = {
    "leave-one-out": ("", ("advantage={kind: leave_one_out}",)),
    "abort": ("abort", ("advantage={kind: survivors}", f"prune.completions={ABORT}")),
    "groups-of-4": ("", ("advantage={kind: leave_one_out}", *OF_4)),
    "allocation": ("allocation", ("advantage={kind: allocated, rule: cost}",)),
    "shrinkage": ("", ("advantage={kind: shrinkage}",)),
    "shrinkage-of-4": ("", ("advantage={kind: shrinkage}", *OF_4)),
}


def train(arm: str, seed: int, results: Path, bar: tqdm) -> None:
    """Make a run of an arm, through the script that plugs its file in if it has one, unless it is kept."""
    method, settings = ARMS[arm]
    run_script = kept_runs.run_script

    def through_the_court(script: str, *words: str) -> str:
        return run_script("experiments/try_method.py", method, *words)

    if method:
        kept_runs.run_script = through_the_court  # in place of train.py
    try:
        keep(Run(arm, (*settings, EVALUATED), RATE, seed), results, bar)
    finally:
        kept_runs.run_script = run_script


def report(results: Path, arms: list[str], seeds: range) -> None:
    """Print areas at equal generated tokens, and the paired differences to the first arm."""
    curves = {}
    for name, by_seed in kept_arms(dict.fromkeys(arms, RATE), seeds, results).items():
        curves[name] = {seed: curve(record) for seed, record in by_seed.items()}
    budget = least([of for by_seed in curves.values() for of in by_seed.values()], COST)
    first, rows, printed = arms[0], [], {}
    for name, by_seed in curves.items():
        areas = {seed: area_and_end(of, COST, budget)[0] for seed, of in by_seed.items()}
        tokens = mean(float(of.spent[COST][-1]) for of in by_seed.values())
        printed[name] = {"areas": areas, "tokens": tokens}
        shared = sorted(areas.keys() & printed[first]["areas"].keys())
        gap = ""
        if name != first and len(shared) > 1:
            those = [printed[first]["areas"][seed] for seed in shared]
            of = difference([areas[seed] for seed in shared], those, len(ARMS) - 1)
            gap = f"{of.mean:+.2f} [{of.low:+.2f}, {of.high:+.2f}]"
        rows.append([name, str(len(areas)), f"{tokens:,.0f}", f"{mean(areas.values()):.2f}", gap])
    head = ["arm", "runs", "generated tokens", f"area over {budget:,.0f}, %", f"less {first}"]
    print(*table(head, rows), sep="\n")
    print(json.dumps({"bench": "compare_court", "budget": budget, "arms": printed}))


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("results", type=Path, help="the file of results, ending in .jsonl.xz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", default=",".join(ARMS))
    args = parser.parse_args()
    arms, seeds = args.arms.split(","), range(args.seeds)
    for method in sorted({method for method, _ in ARMS.values() if method}):
        plug_in(load(COURT / f"{method}.py"))
    with tqdm(unit="run") as bar:
        for seed in seeds:
            for arm in arms:
                train(arm, seed, args.results.resolve(), bar)
    report(args.results.resolve(), arms, seeds)


if __name__ == "__main__":
    main()
