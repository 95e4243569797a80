"""Make the runs that the papers' claims need beyond the comparison's. See claims.py."""

import json
from pathlib import Path

from compare import EVALUATED, GRID, LISTED, OTHERS, SEEDS, SIX, SOME_SEEDS, arm, rates_of_six
from rates import tune
from stored import Run, keep, write
from tqdm import tqdm
from training import run_script

# Groups of 16: (prompts a step, completions kept of each), so that every step trains on as many and every
# run rolls out as many prompts. CPPO prunes 50, 75, 87.5 and 93.75%.
ALLOCATED = {"groups-of-16": (8, 16), "cppo-50": (16, 8), "cppo-75": (32, 4), "cppo-87": (64, 2),
             "cppo-94": (128, 1)}
PROMPTS, EVALUATIONS = 1024, 8  # of a run
HIGHER = ("1e-4", "2e-4", "4e-4", "8e-4")  # rates of the arms that take few steps
GRIDS = {name: HIGHER if prompts > 32 else (*GRID[1:], "4e-4") for name, (prompts, _) in ALLOCATED.items()}
TUNING_SEEDS = (100,)
KEPT = "loss.count=kept"
# Rivals nearer to a method than those of the comparison: whose learning rate, and settings.
CONTROLS = {
    "topk-step": ("pps", ("prune.completions={kind: topk, keep: 2, scope: batch}", KEPT)),  # PPS's scope
    "dppo-biased": ("dppo", LISTED),  # does not refill
    "grpo-4-prompts": ("cppo", ("rollout.prompts_per_step=4",)),  # trains on 32 in a step, as CPPO does
}
# Arms at GRPO's rate whose gradient's error is known: settings (none: an arm of the comparison), and the row
# and budget of bench/prune.py.
PRUNED = {
    "cppo": ((), "topk, group, kept mean", 0.25),
    "pps": ((), "pps norm, batch", 0.25),
    "pps-cost": ((), "pps norm, batch, by cost", 0.25),
    "pods": ((), "pods, kept mean", 0.25),
    "pps-prompts": ((), "prompts, pps", 0.5),
    "nat": ((), "cuts alone", 0.75),
    "cppo-keep1": (("prune.completions={kind: topk, keep: 1}", KEPT), "topk, group, kept mean", 0.125),
    "cppo-keep4": (("prune.completions={kind: topk, keep: 4}", KEPT), "topk, group, kept mean", 0.5),
    "topk-all-keep1": (("prune.completions={kind: topk, keep: 1, scope: batch}",),
                       "topk, batch, full batch", 0.125),
    "topk-all-keep2": (("prune.completions={kind: topk, keep: 2, scope: batch}",),
                       "topk, batch, full batch", 0.25),
    "pps-keep1": (("prune.completions={kind: pps, keep: 1, scope: batch}",), "pps norm, batch", 0.125),
    "pps-adv": (("prune.completions={kind: pps, keep: 2, size: adv}",), "pps |A|, group", 0.25),
    "pods-keep4": (("prune.completions={kind: pods, keep: 4}", KEPT), "pods, kept mean", 0.5),
    "pps-prompts-quarter": (("prune.prompts={kind: pps, share: 0.25}",), "prompts, pps", 0.25),
}
GROUPS = {f"group-{size}": (f"rollout.group_size={size}",) for size in (2, 4, 16)}
SAMPLING = ("rollout.until=informative", "rollout.differ_in=accuracy", "rollout.oversample=2",
            "rollout.max_rounds=3")
LENGTH = ("reward.overlong=1", "reward.overlong_tokens=8")
TOKENS, CLIP = ("loss.per=token",), ("loss.clip_high=0.28",)
ALWAYS = ("reward.accuracy=2", "update.minibatches=2", "steps=90")
DAPO = {
    "dapo": (*ALWAYS, *SAMPLING, *LENGTH, *TOKENS, *CLIP),
    "dapo-without-clip-higher": (*ALWAYS, *SAMPLING, *LENGTH, *TOKENS),
    "dapo-without-sampling": (*ALWAYS, *LENGTH, *TOKENS, *CLIP),
    "dapo-without-token-mean": (*ALWAYS, *SAMPLING, *LENGTH, *CLIP),
    "dapo-without-length": (*ALWAYS, *SAMPLING, *TOKENS, *CLIP),
}
PRETRAINED = 15  # steps of the critic alone, a multiple of those between evaluations
CRITIC = ("advantage={kind: gae, alpha: 1}", "critic.lr=3e-4", "critic.minibatches=2", "update.minibatches=2",
          "loss.likelihood=0.1", *TOKENS, *CLIP)
VAPO = {"vapo": (*CRITIC, f"critic.pretrain_steps={PRETRAINED}", f"steps={90 + PRETRAINED}"),
        "vapo-without-pretraining": (*CRITIC, "steps=90")}
AT_GRPOS_RATE = {name: settings for name, (settings, _, _) in PRUNED.items() if settings}
AT_GRPOS_RATE |= GROUPS | DAPO | VAPO


def allocated(name: str, rate: str, seed: int) -> Run:
    """Make a run of groups of 16, of PROMPTS prompts in all."""
    prompts, kept = ALLOCATED[name]
    steps = PROMPTS // prompts
    pruning = (f"prune.completions={{kind: topk, keep: {kept}}}", KEPT) if kept < 16 else ()
    settings = ("rollout.group_size=16", f"rollout.prompts_per_step={prompts}", f"steps={steps}", *pruning,
                f"eval.every={steps // EVALUATIONS}", f"optim.warmup_steps={steps // 32}")
    return Run(name, settings, rate, seed)


def control(name: str, rate_of: dict[str, str], seed: int) -> Run:
    family, settings = CONTROLS[name]
    return Run(name, (*settings, EVALUATED), rate_of[family], seed)


def at_grpos_rate(name: str, rate: str, seed: int) -> Run:
    if name in SIX or name in OTHERS:
        return arm(name, rate, seed)
    return Run(name, (*AT_GRPOS_RATE[name], EVALUATED), rate, seed)


def keep_errors(results: Path) -> None:
    """Run bench/prune.py and keep its errors, unless that was done; one that was cut off starts anew."""
    path = results / "gradient_errors.jsonl.gz"
    if path.is_file():
        return
    printed = run_script("bench/prune.py", "--task", "hard")
    measured = json.loads(printed.splitlines()[-1])["results"]
    write([{"bench": "bench/prune.py --task hard"}, *measured], path)


def run_all(results: Path, bar: tqdm) -> None:
    """Make the runs, the most important claim first."""
    best = tune(allocated, GRIDS, TUNING_SEEDS, results, bar)
    for seed in SEEDS:
        for name in ALLOCATED:
            keep(allocated(name, best[name], seed), results, bar)
    rate_of = rates_of_six(results)
    for seed in SEEDS:
        for name in CONTROLS:
            keep(control(name, rate_of, seed), results, bar)
    keep_errors(results)
    pruned, claimed = ("grpo", *PRUNED), (GROUPS, DAPO, VAPO)
    for arms, seeds in ((pruned, SOME_SEEDS), *((arms, SEEDS) for arms in claimed)):
        for seed in seeds:
            for name in arms:
                keep(at_grpos_rate(name, rate_of["grpo"], seed), results, bar)
