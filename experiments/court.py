"""The court: do methods of 2025 and 2026 keep what they claim, on one testbed?

    python experiments/court.py                        # the tables, of the runs that are kept
    python experiments/court.py --train [--hours 3]    # the runs that are missing first; 12 CPU hours at most
    python experiments/court.py --train grpo,pps       # those of some arms
    python experiments/court.py --method my_method.py  # a method of yours against the kept arms

docs/court.md has the claims, written down before most runs. Every run is a difference from
experiments/long_sums.yaml. An arm's learning rate is the best of a grid on the validation split.

With --method, a file as try_method.py takes it is tried in the same way: three or four rates on the
validation split, then five seeds, half an hour on 2 cores. Its config is the yaml file beside it, or else
the testbed's, or --config; --set changes settings, but for those that the kept arms share. Its runs are kept
in runs/court/, under a name that changes with the file and the config, though not with what the file imports;
the same command goes on after Ctrl-C.
"""

import argparse
import hashlib
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import kept_runs
from compare import Arms, kept_arms, tell_area, validated
from kept_runs import LEAST_EVALUATIONS, Gap, Run, area_gap, curve, experiment_status, judge, keep, table
from tqdm import tqdm
from try_method import COURT, check_chosen, find_method, load, plug_in

import config
from leaves.page.runs import COSTS, format_value
from settings.loader import flatten

RESULTS = Path(__file__).parent / "court.jsonl.xz"
RECIPE, ANCHOR = str(Path(__file__).with_name("long_sums.yaml")), "grpo"
SEEDS, TUNING_SEED = range(5), 100
GRID = ("5e-5", "1e-4", "2e-4")
NEXT = {"5e-5": "2.5e-5", "2e-4": "4e-4"}  # a best rate at an end of the grid has this neighbour tried too
ON_VALIDATION = ("eval.n=1",)
VALIDATION = "experiments/long_sums/validation.jsonl"
# Kept arms have one value of these settings, so a method is compared with them at the same. The kept runs are
# evaluated every 20 steps and at those of AGAIN.
SHARED = re.compile(r"model\.path|data\..*|rollout\.max_new_tokens|eval\.(?!every$).*|optim\.lr|seed")

FOUR_STEPS = ("update.minibatches=4",)  # optimizer steps on a rollout: the ratios leave 1
OF_4 = ("rollout.group_size=4", "rollout.prompts_per_step=16")
STAGES = ("steps=4", "rollout.prompts_per_step=120", "update.minibatches=15", "eval.every=1",
          "optim.warmup_steps=0", "loss.trust={low: 0.5, high: 1}", "update.rate_by_ess=true")
# A prompt without a right completion in the epoch before has pass rate 0.1: its completions fail at the mark.
# A right answer of level 6 or above is longer, so such a prompt stays without one.
ESPO = ("prune.completions={kind: biased_abort, mark: 48, aborted: failed, cut: 0.15, bias: 0, spread: 0, "
        "rate: 1}")


@dataclass(frozen=True, slots=True)
class Arm:
    """What makes GRPO on long sums another method: settings, and a file, with its config beside it."""

    settings: tuple[str, ...] = ()
    method: str = ""  # a path, or the name of a file in court/
    config: str = ""  # in place of the one beside it
    rate: str = ""    # in place of the best on the validation split

    @property
    def file(self) -> str:
        return str(find_method(self.method).resolve()) if self.method else ""

    @property
    def recipe(self) -> str:
        return self.config or (str(Path(self.file).with_suffix(".yaml")) if self.method else RECIPE)


ARMS = {
    "grpo": Arm(),
    "leave-one-out": Arm(("advantage={kind: leave_one_out}",)),
    "leave-one-out-of-4": Arm(("advantage={kind: leave_one_out}", *OF_4)),
    "grpo-4-steps": Arm(FOUR_STEPS),
    "cppo": Arm(("prune.completions={kind: topk, keep: 2}", "loss.denominator=kept")),
    "pps": Arm(("prune.completions={kind: pps, keep: 2, scope: batch, by_cost: true}",)),
    "pps-adv": Arm(("prune.completions={kind: pps, keep: 2, scope: batch, by_cost: true, size: adv}",)),
    "otb": Arm(method="otb"), "otb-released": Arm(method="otb_released"),
    "shrinkage": Arm(("advantage={kind: shrinkage}",)),
    "shrinkage-of-4": Arm(("advantage={kind: shrinkage}", *OF_4)), "abort": Arm(method="abort"),
    "abort-arrol": Arm(method="abort_controls"),
    "abort-espo": Arm((ESPO, "loss.denominator=all"), "abort_controls"),
    "allocation": Arm(method="allocation"),
    "allocation-vip": Arm(("advantage.rule=spread",), "allocation"),
    "allocation-cero": Arm(("advantage.rule=posterior",), "allocation"), "forks": Arm(method="forks"),
    "nsr": Arm(("advantage.right=0",), "signs"),
    "psr": Arm(("advantage.right=1", "advantage.wrong=0"), "signs"),
    "w-reinforce": Arm(method="signs"),
    "ipo": Arm((*FOUR_STEPS, "loss.trust={kind: total_variation, divergence: 0.3, sides: both, cap: 1e4}")),
    "ctpo": Arm(method="ctpo"), "sapo": Arm(method="sapo"),
    "vcpo": Arm((*FOUR_STEPS, "update.rate_by_ess=true")), "stages": Arm(STAGES),
}
# Added when three seeds were there: is a difference one of rates? Anchors at those that were not their best.
AFTERWARDS = ("1e-4", "2e-4")
ARMS |= {f"{name}-{rate}": replace(ARMS[name], rate=rate)
         for name in ("grpo", "leave-one-out", "leave-one-out-of-4") for rate in AFTERWARDS}


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as a difference of areas: it holds if `arm` less `other` lies above `bound` points."""

    number: int
    text: str
    arm: str
    other: str
    cost: str
    bound: float = 0.0


CLAIMS = (
    Claim(1, "PPS by surprise teaches more per trained token", "pps", "grpo", "trained tokens"),
    Claim(1, "... and more than CPPO", "pps", "cppo", "trained tokens"),
    Claim(2, "a baseline for every token teaches more", "otb", "leave-one-out", "generated tokens"),
    Claim(2, "... as released", "otb-released", "leave-one-out", "generated tokens"),
    Claim(3, "shrunk baselines teach more", "shrinkage", "leave-one-out", "generated tokens"),
    Claim(3, "... in groups of 4", "shrinkage-of-4", "leave-one-out-of-4", "generated tokens"),
    Claim(4, "weighed aborts teach more per generated token", "abort", "leave-one-out", "generated tokens"),
    Claim(4, "... than smaller groups", "abort", "leave-one-out-of-4", "generated tokens"),
    Claim(4, "balanced aborts (ARRoL) do", "abort-arrol", "leave-one-out", "generated tokens"),
    Claim(4, "aborts as failures (ESPO) do", "abort-espo", "leave-one-out", "generated tokens"),
    Claim(5, "allocation by cost teaches more per generated token", "allocation", "leave-one-out",
          "generated tokens"),
    Claim(5, "by spread (VIP)", "allocation-vip", "leave-one-out", "generated tokens"),
    Claim(5, "by posterior variance (CERO)", "allocation-cero", "leave-one-out", "generated tokens"),
    Claim(6, "IPO teaches more than a clip", "ipo", "grpo-4-steps", "steps"),
    Claim(7, "CTPO's ratio teaches more than a token's", "ctpo", "grpo-4-steps", "steps"),
    Claim(8, "large stages cost nothing per generated token", "stages", "grpo", "generated tokens", -2.0),
    Claim(9, "VCPO's rate teaches more", "vcpo", "grpo-4-steps", "steps"),
    Claim(10, "wrong completions alone (NSR) teach as much as GRPO", "nsr", "grpo", "steps", -2.0),
    Claim(10, "W-REINFORCE teaches more than GRPO", "w-reinforce", "grpo", "steps"),
    Claim(10, "right completions alone (PSR) teach less than wrong ones", "nsr", "psr", "steps"),
    Claim(11, "a fifth of the tokens teaches as much as all", "forks", "grpo", "steps", -2.0),
    Claim(11, "... and more", "forks", "grpo", "steps"),
    Claim(12, "SAPO teaches more than a clip", "sapo", "grpo-4-steps", "steps"),
    Claim(13, "surprise teaches more than A / sqrt(cost)", "pps", "pps-adv", "trained tokens"),
)
# First steps of an arm that are evaluated more often, and how often: over tokens three evaluations must lie
# within a budget that the other arm sets. GRPO trains in 14 steps on as many tokens as PPS in 60.
AGAIN = dict.fromkeys((name for name in ARMS if name != "stages"), (10, 10))
AGAIN |= dict.fromkeys(("grpo", "grpo-1e-4", "grpo-2e-4"), (16, 4))
AGAIN |= dict.fromkeys(("leave-one-out", "leave-one-out-1e-4", "leave-one-out-2e-4"), (15, 5))
BESIDE = (("cppo", ANCHOR, "trained tokens"), ("grpo-4-steps", ANCHOR, "steps"))  # no claim: the controls


# ---- runs

def run_of(name: str, arm: Arm, rate: str, seed: int, tuning: bool = False) -> Run:
    often = ("eval.every=20",) if name in ARMS else ()
    data, more = (VALIDATION, ON_VALIDATION) if tuning else (None, ())
    again = None if tuning else AGAIN.get(name)
    return Run(name, (*often, *arm.settings, *more), rate, seed, name, data, arm.recipe, arm.file, again)


def chosen_rate(name: str, results: Path) -> str | None:
    """Return the rate given to an arm, else that of the largest area, or None until the grid is run."""
    if name in ARMS and ARMS[name].rate:
        return ARMS[name].rate
    areas = validated(results).get(name, {})
    return max(areas, key=areas.get) if areas.keys() >= set(GRID) else None


def runs_of(arms: dict[str, Arm], seeds: Iterable[int], results: Path) -> Iterator[Run]:
    """Yield the runs of arms: first each at the rates of the grid, and at the best one's neighbour if that is
    an end; then all in turns, seed by seed. A run is named once those before it are kept."""
    for name, arm in arms.items():
        if arm.rate:
            continue
        for rate in GRID:
            yield run_of(name, arm, rate, TUNING_SEED, tuning=True)
        if end := NEXT.get(chosen_rate(name, results)):
            yield run_of(name, arm, end, TUNING_SEED, tuning=True)
    for seed in seeds:
        for name, arm in arms.items():
            yield run_of(name, arm, chosen_rate(name, results), seed)


def train(arms: dict[str, Arm], seeds: range, results: Path, until: float) -> None:
    """Make the runs that are missing, until a moment of time.monotonic."""
    tuning = sum(len(GRID) for arm in arms.values() if not arm.rate)  # one more where the best is an end
    with tqdm(unit="run", total=tuning + len(arms) * len(seeds)) as bar:
        for run in runs_of(arms, seeds, results):
            if time.monotonic() > until:
                break
            keep(run, results, bar)


# ---- tables

def paired_gap(arms: Arms, name: str, other: str, cost: str, comparisons: int) -> Gap | None:
    """Compare the areas of two arms at a cost, up to what both have spent, paired by seed. None: there are no
    two seeds of both, or steps are compared and the two have different numbers of them."""
    both = [arms.get(name, {}), arms.get(other, {})]
    seeds = sorted(both[0].keys() & both[1].keys())
    steps = {by_seed[seed].about["settings"]["steps"] for by_seed in both for seed in seeds}
    if len(seeds) < 2 or cost == "steps" and len(steps) > 1:
        return None
    return area_gap(*both, cost, comparisons)


def gap_text(gap: Gap | None) -> str:
    return str(gap) if gap else ""


def claim_rows(arms: Arms) -> list[list[str]]:
    """Judge every claim; the rows of one number are a family."""
    rows = []
    for claim in CLAIMS:
        family = sum(other.number == claim.number for other in CLAIMS)
        gap = paired_gap(arms, claim.arm, claim.other, claim.cost, family)
        test = f"{claim.arm} less {claim.other}, area over {claim.cost}"
        if claim.bound:
            test += f", above {claim.bound:.0f}"
        here = judge(gap.difference, claim.bound) if gap else "not run"
        rows.append([str(claim.number), claim.text, test, gap_text(gap), here])
    return rows


def rate_rows(arms: Arms) -> list[list[str]]:
    """Compare the arms of claims, and of BESIDE, with their anchor at each of its rates."""
    rows = []
    compared = dict.fromkeys((claim.arm, claim.other, claim.cost) for claim in CLAIMS)
    for arm, other, cost in [*compared, *BESIDE]:
        if f"{other}-{AFTERWARDS[0]}" in ARMS:
            anchors = (other, *(f"{other}-{rate}" for rate in AFTERWARDS))
            gaps = [gap_text(paired_gap(arms, arm, anchor, cost, 1)) for anchor in anchors]
            rows.append([f"{arm} less {other}, area over {cost}", *gaps])
    return rows


def arm_table(arms: Arms, rates: dict[str, str], costs: Iterable[str]) -> list[str]:
    """Tabulate each arm: its rate, its optimizer steps on a rollout, its last accuracy, and what it spent."""
    spent, rows = [cost for cost in costs if cost != "steps"], []
    head = ["arm", "rate", "updates a rollout", "runs", "last, %", *spent]
    for name, by_seed in arms.items():
        curves = [curve(record) for record in by_seed.values()]
        last = mean(float(run.accuracy_E[-1]) for run in curves)
        settings = next(iter(by_seed.values())).about["settings"]
        updates = settings["update.epochs"] * settings["update.minibatches"]
        cells = [name, rates[name], str(updates), str(len(curves)), f"{last:.1f}"]
        cells += [f"{mean(float(run.spent[cost][-1]) for run in curves):,.0f}" for cost in spent]
        rows.append(cells)
    return table(head, rows)


def validation_table(arms: dict[str, Arm], results: Path) -> list[str]:
    """Tabulate the areas that rates were chosen by."""
    rows, tried = [], validated(results)
    for name, arm in arms.items():
        if not arm.rate:
            areas = tried.get(name, {})
            rows.append([name, ", ".join(tell_area(rate, areas[rate]) for rate in sorted(areas, key=float))])
    return table(["arm", "rate: area on the validation split, one seed"], rows)


def kept(results: Path, names: Iterable[str]) -> tuple[Arms, dict[str, str]]:
    """Read the arms that are kept, at the rates that were chosen."""
    rates = {name: rate for name in names if (rate := chosen_rate(name, results))}
    return kept_arms(rates, SEEDS, results), rates


def report(results: Path) -> None:
    """Print the table of claims, of arms and of rates."""
    arms, rates = kept(results, ARMS)
    claims = claim_rows(arms)
    print(*table(["", "claim", "test", "points, evaluations", "here"], claims), "", sep="\n")
    if ANCHOR in arms:
        print(*arm_table(arms, rates, COSTS), "", sep="\n")
        gaps = [[name, *(gap_text(paired_gap(arms, name, ANCHOR, cost, 1)) for cost in COSTS)]
                for name in arms if name != ANCHOR]
        print(*table([f"area less {ANCHOR}, evaluations, over", *COSTS], gaps), "", sep="\n")
    print(*table(["test", "as claimed", *(f"the other at {rate}" for rate in AFTERWARDS)], rate_rows(arms)),
          "", sep="\n")
    print(*validation_table(ARMS, results), "", sep="\n")
    seconds = [record.about["cpu_seconds"] for record in kept_runs.read(results).values()]
    print(f"{len(seconds)} runs, {sum(seconds) / 3600:.1f} CPU hours\n")
    kept_runs.print_json("court", claims=claims, rates=rates)


# ---- a method of somebody's own

UNTIMED = tuple(cost for cost in COSTS if cost != "seconds")  # of another machine than the kept arms'
WORDS = {"holds": "ahead", "does not": "behind"}
NOTE = """Points of accuracy, averaged over training up to the cost that both arms have spent, in pairs by
seed, with Student's 95% intervals. One cell in twenty excludes 0 by chance. One seed has chosen each rate, so
compare at equal rates too, and with arms of as many updates a rollout. Empty: the numbers of steps differ."""


def try_own(name: str, arm: Arm, seeds: range, until: float, results: Path) -> None:
    """Train a method, and compare it with the kept arms."""
    train({name: arm}, seeds, results, until)
    others, rates = kept(RESULTS, sorted(ARMS, key=place))
    mine, my_rates = kept(results, [name])
    arms, rates = mine | others, my_rates | rates
    if name not in mine:
        sys.exit("no run on the test problems has ended yet; the same command goes on")
    print(NOTE, "", f"{name} at {rates[name]}, less each arm", "", sep="\n")
    print(*table(["less", "at", *UNTIMED, "by generated tokens"], own_rows(arms, name, rates)), "", sep="\n")
    print(*arm_table(arms, rates, UNTIMED), "", sep="\n")
    print(*validation_table({name: arm}, results), "", results, sep="\n")


def place(name: str) -> int:
    """Sort an anchor at other rates behind it."""
    return list(ARMS).index(name.removesuffix(f"-{ARMS[name].rate}"))


def own_rows(arms: Arms, name: str, rates: dict[str, str]) -> list[list[str]]:
    """Compare a method with each other arm, at each cost that does not depend on the machine."""
    rows = []
    for other in arms:
        if other == name:
            continue
        gaps = {cost: paired_gap(arms, name, other, cost, 1) for cost in UNTIMED}
        gap = gaps["generated tokens"]
        here = judge(gap.difference) if gap else ""
        rows.append([other, rates[other], *map(gap_text, gaps.values()), WORDS.get(here, here)])
    return rows


def check_shared(cfg: config.Config) -> None:
    """Raise ConfigError for a setting that all arms share and this config has otherwise."""
    theirs, mine = flatten(config.load(RECIPE)), flatten(cfg)
    for key in filter(SHARED.fullmatch, theirs):
        if mine[key] != theirs[key]:
            why = "the court chooses it" if key in ("optim.lr", "seed") else "the kept arms have it"
            raise config.ConfigError(f"{key}={format_value(mine[key])} must be {format_value(theirs[key])}, "
                                     f"as in {RECIPE}: {why}")


def load_own(file: str, chosen: str | None, settings: list[str], out: Path) -> tuple[str, Arm, Path]:
    """Load a method; return its name, its arm, and the file of its results. Raises ConfigError."""
    path = find_method(file)
    beside = path.with_suffix(".yaml")
    named = chosen or (str(beside) if beside.is_file() else RECIPE)
    config_file = Path(named).resolve()
    arm = Arm(tuple(settings), str(path), str(config_file) if config_file.is_file() else named)
    plug_in(load(path))
    cfg = config.load(arm.recipe, arm.settings)
    check_chosen(load(path), cfg)
    check_shared(cfg)
    most = cfg.steps // LEAST_EVALUATIONS
    if not 1 <= cfg.eval.every <= most:
        raise config.ConfigError(f"eval.every={cfg.eval.every} must be in 1..{most}: a comparison needs "
                                 f"{LEAST_EVALUATIONS} evaluations in the {cfg.steps} steps")
    name = f"my {path.stem}" if path.stem in ARMS else path.stem
    version = hashlib.sha256(path.read_bytes() + config.dump(cfg).encode()).hexdigest()[:8]
    out.mkdir(parents=True, exist_ok=True)
    return name, arm, out.resolve() / f"{name}-{version}.jsonl.xz"


def main() -> int:
    options = kept_runs.parser(__doc__)
    what = options.add_mutually_exclusive_group()
    what.add_argument("--train", nargs="?", type=kept_runs.listed([*ARMS]), const=[*ARMS], metavar="ARMS",
                      help="make the runs that are missing")
    what.add_argument("--method", help="a Python file, or the name of one in experiments/court/")
    options.add_argument("--hours", type=float, help="begin no run after so long")
    options.add_argument("--seeds", type=int, choices=range(2, len(SEEDS) + 1), help="5 if not given")
    options.add_argument("--config", help="of --method: a yaml file, or the name of one in configs/")
    options.add_argument("--set", action="append", help="of --method: change one setting")
    options.add_argument("--out", type=Path, help="of --method: a folder in place of runs/court")
    args = options.parse_args()
    ignored = [] if args.method else ["config", "set", "out"]
    ignored += [] if args.method or args.train else ["hours", "seeds"]
    for name in ignored:
        if getattr(args, name) is not None:
            options.error(f"--{name} needs --method" + " or --train" * (name in ("hours", "seeds")))
    return experiment_status(lambda: experiment(args))


def experiment(args: argparse.Namespace) -> None:
    """Make the runs that are asked for, and print the tables."""
    until = time.monotonic() + 3600 * (math.inf if args.hours is None else args.hours)
    seeds = SEEDS[:args.seeds]
    if args.method:
        out = args.out or kept_runs.ROOT / "runs" / "court"
        name, arm, results = load_own(args.method, args.config, args.set or [], out)
        try_own(name, arm, seeds, until, results)
        return
    for method in sorted({arm.method for arm in ARMS.values() if arm.method}):
        plug_in(load(COURT / f"{method}.py"))
    if args.train:
        train({name: ARMS[name] for name in args.train}, seeds, RESULTS, until)
    report(RESULTS)


if __name__ == "__main__":
    sys.exit(main())
