"""Must a teacher read everything? Distillation on the testbed, whole and pruned, at equal cost.

    python experiments/toy_models.py teacher    # the teacher
    python experiments/compare_opd.py           # 17 arms, 5 seeds; what is kept is not run again (kept_runs)

docs/experiments.md has what was written down before.
"""

import sys
from pathlib import Path
from statistics import mean

from kept_runs import ROOT, Run, area_gap, experiment_status, keep_all, parser, read, table

RECIPE, RESULTS = ROOT / "experiments" / "opd_hard.yaml", Path(__file__).parent / "opd.jsonl.xz"
RATE, SEEDS = "1e-4", range(5)  # 3e-4 learnt less on a seed of its own
AGAIN = {"whole": (6, 1)}  # evaluated after each of its first steps: others' whole budgets lie there
COSTS = ("teacher tokens", "all tokens", "seconds", "steps")
KEPT = (4, 2, 1)  # of 8


def drawn(keep: int, size: str, by_cost: bool = True) -> str:
    cost = str(by_cost).lower()
    return f"prune.completions={{kind: pps, keep: {keep}, scope: batch, size: {size}, by_cost: {cost}}}"


ARMS = {
    "whole": (),
    **{f"{size} {keep}/8": (drawn(keep, size),) for size in ("surprise", "nats") for keep in KEPT},
    **{f"length {keep}/8": (drawn(keep, "length", False),) for keep in KEPT},  # over its cost it is random
    **{f"random {keep}/8": (drawn(keep, "adv", False),) for keep in KEPT},
    "surprise 4/8, then 2/8": (drawn(4, "surprise"), "teacher.keep=2"),
    "prefix of 24": ("rollout.max_new_tokens=24",),  # biased: what lies behind is never taught
    "bound of 1": ("advantage.bound=1",),            # biased
    "with rewards": ("advantage.reward=1",),
}


def report() -> None:
    """Print the differences of areas to `whole`, each pair at the most that both have spent."""
    kept, rows = read(RESULTS), []
    arms = {name: {seed: kept[run.name] for seed in SEEDS if (run := run_of(name, seed)).name in kept}
            for name in ARMS}
    for name, by_seed in arms.items():
        if len(by_seed) < 2:
            continue
        share = mean(line["teacher/share"] for record in by_seed.values() for line in record.lines
                     if "teacher/share" in line)
        seconds = mean(record.about["cpu_seconds"] for record in by_seed.values())
        rows.append([name, str(len(by_seed)), f"{share:.2f}", f"{seconds:.0f}",
                     *(str(area_gap(by_seed, arms["whole"], cost, len(ARMS) - 1)) for cost in COSTS)])
    print(*table(["area less whole's, points; evaluations", "runs", "read", "CPU s", *COSTS], rows), sep="\n")


def run_of(name: str, seed: int) -> Run:
    return Run(name.replace("/", "of"), ARMS[name], RATE, seed, recipe=str(RECIPE), again=AGAIN.get(name))


def experiment() -> None:
    keep_all([run_of(name, seed) for seed in SEEDS for name in ARMS], RESULTS)
    report()


if __name__ == "__main__":
    parser(__doc__).parse_args()
    sys.exit(experiment_status(experiment))
