"""Do groups that go on, or a few large stages, teach more in equal time than GRPO whose steps wait?

    python experiments/compare_flight.py experiments/flight.jsonl.xz

RESULTS.md has the questions. Runs are kept in the file, and not made again (kept_runs.py).
"""

from pathlib import Path
from statistics import mean

from compare import compared, comparison_table, kept_arms
from kept_runs import Record, Run, curve, keep, parser, print_json, table
from tqdm import tqdm

RATE = "1e-4"
STAGE = 27  # steps of GRPO that a stage has the prompts of
TWO = ("windows.in_flight=2", "windows.max_age=3", "windows.tokens=8")
FOUR = ("windows.in_flight=4", "windows.max_age=8", "windows.tokens=8")
CAPPED = ("loss.tis_cap=2",)                            # min(pi_old / pi that drew it, 2), and the clip
ENGINE = ("loss.old_logp=engine", "loss.tis_cap=2")     # the clip's ratio is to the policy that drew it
STAGES = (
    f"rollout.prompts_per_step={16 * STAGE}",
    f"update.minibatches={STAGE}",
    "optim.warmup_steps=0",
    "loss.trust={low: 0.5, high: 1}",
    "update.rate_by_ess=true",
)
# arm -> its settings; the first is what the others are compared with
ARMS = {
    "grpo": (),
    "flight-2": TWO,
    "flight-2-capped": TWO + CAPPED,
    "flight-2-engine": TWO + ENGINE,
    "flight-4": FOUR,
    "flight-4-capped": FOUR + CAPPED,
    "flight-4-engine": FOUR + ENGINE,
    "flight-4-rate": (*FOUR, *CAPPED, "update.rate_by_ess=true"),
    "stages": STAGES,
}
COSTS = ("seconds", "generated tokens", "steps")
MEANS = ("age/mean", "age/old_tokens", "mismatch/ess")  # of a run's steps
SEEDS, STEPS = range(5), 135


def run_of(arm: str, seed: int) -> Run:
    """Make a run of the comparison, evaluated at nine moments, or after every stage."""
    steps, every = (STEPS // STAGE, 1) if arm == "stages" else (STEPS, STEPS // 9)
    return Run(arm, (*ARMS[arm], f"steps={steps}", f"eval.every={every}"), RATE, seed)


def report(results: Path) -> None:
    """Print areas at equal cost with the paired differences to GRPO, and what each arm has spent."""
    kept = kept_arms(dict.fromkeys(ARMS, RATE), SEEDS, results)
    alike = {name: of for name, of in kept.items() if name != "stages"}  # whose steps are no steps of others
    areas = compared(kept, COSTS[:2], len(ARMS) - 1) | compared(alike, COSTS[2:], len(ARMS) - 1)
    spent = []
    for name, by_seed in kept.items():
        curves = [curve(record) for record in by_seed.values()]
        costs = [f"{mean(float(of.spent[cost][-1]) for of in curves):,.0f}" for cost in COSTS]
        spent.append([name, *costs, *(f"{mean_of(by_seed, key):.3f}" for key in MEANS)])
    print(*comparison_table(areas, "area"), "", *table(["arm", *COSTS, *MEANS], spent), sep="\n")
    print_json("compare_flight", areas=areas)


def mean_of(by_seed: dict[int, Record], key: str) -> float:
    """Average a metric over the steps of all runs; a step without it counts as 0."""
    lines = [line for record in by_seed.values() for line in record.lines if "train/tokens" in line]
    return mean(line.get(key, 0.0) for line in lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("results", type=Path, help="the file of results, ending in .jsonl.xz")
    results = options.parse_args().results.resolve()
    with tqdm(unit="run") as bar:
        for seed in SEEDS:
            for arm in ARMS:
                keep(run_of(arm, seed), results, bar)
    report(results)


if __name__ == "__main__":
    main()
