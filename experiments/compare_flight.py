"""Do groups that go on, or a few large stages, teach more in equal time than GRPO whose steps wait?

    python experiments/compare_flight.py FILE.jsonl.xz [--seeds 5] [--steps 135] [--arms grpo,flight-2]

docs/experiments.md has the questions. Runs are kept in the file, and not made again (kept_runs.py). With
--steps a run is shorter, by 27 steps or a multiple of it, since a stage takes the prompts of 27 steps.
"""

from pathlib import Path
from statistics import mean

from compare import kept_arms
from kept_runs import Record, Run, area_and_end, curve, difference, keep, least, parser, print_json, table
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


def run_of(arm: str, seed: int, steps: int, more: tuple[str, ...] = ()) -> Run:
    """Make a run of the comparison, evaluated at nine moments, or after every stage."""
    every = max(1, steps // 9)
    if arm == "stages":
        steps, every = steps // STAGE, 1
    return Run(arm, (*ARMS[arm], f"steps={steps}", f"eval.every={every}", *more), RATE, seed)


def report(results: Path, arms: list[str], seeds: range) -> None:
    """Print areas at equal cost with the paired differences to the first arm, and what each arm has spent."""
    kept = kept_arms(dict.fromkeys(arms, RATE), seeds, results)
    printed = {}
    for cost in COSTS:
        # A step of a stage is no step of the others.
        among = {name: of for name, of in kept.items() if name != "stages" or cost != "steps"}
        printed[cost] = compare(among, cost)
    spent = []
    for name, by_seed in kept.items():
        curves = [curve(record) for record in by_seed.values()]
        means = [mean_of(by_seed, key) for key in MEANS]
        costs = [f"{mean(float(of.spent[cost][-1]) for of in curves):,.0f}" for cost in COSTS]
        spent.append([name, *costs, *(f"{value:.3f}" for value in means)])
    print(*table(["arm", *COSTS, *MEANS], spent), sep="\n")
    print_json("compare_flight", areas=printed)


def compare(kept: dict[str, dict[int, Record]], cost: str) -> dict:
    """Print and return the areas of arms over a cost, up to the least that a run has spent."""
    curves = {name: {seed: curve(record) for seed, record in of.items()} for name, of in kept.items()}
    budget = least([of for by_seed in curves.values() for of in by_seed.values()], cost)
    rows, areas = [], {}
    first = next(iter(curves))
    for name, by_seed in curves.items():
        areas[name] = {seed: area_and_end(of, cost, budget)[0] for seed, of in by_seed.items()}
        shared = sorted(areas[name].keys() & areas[first].keys())
        gap = ""
        if name != first and len(shared) > 1:
            pairs = [[areas[arm][seed] for seed in shared] for arm in (name, first)]
            gap = str(difference(*pairs, len(ARMS) - 1))
        rows.append([name, str(len(by_seed)), f"{mean(areas[name].values()):.2f}", gap])
    head = ["arm", "runs", f"area over {budget:,.0f} {cost}, %", f"less {first}"]
    print(*table(head, rows), "", sep="\n")
    return {"budget": budget, "arms": areas}


def mean_of(by_seed: dict[int, Record], key: str) -> float:
    """Average a metric over the steps of all runs; a step without it counts as 0."""
    lines = [line for record in by_seed.values() for line in record.lines if "train/tokens" in line]
    return mean(line.get(key, 0.0) for line in lines)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("results", type=Path, help="the file of results, ending in .jsonl.xz")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--steps", type=int, default=135)
    options.add_argument("--arms", default=",".join(ARMS))
    options.add_argument("--set", action="append", default=[], help="change one setting of every run")
    args = options.parse_args()
    arms = args.arms.split(",")
    seeds = range(args.seeds)
    results = args.results.resolve()
    with tqdm(unit="run") as bar:
        for seed in seeds:
            for arm in arms:
                keep(run_of(arm, seed, args.steps, tuple(args.set)), results, bar)
    report(results, arms, seeds)


if __name__ == "__main__":
    main()
