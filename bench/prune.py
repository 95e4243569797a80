"""How far is the pruned gradient from the full batch's? Mean squared error at equal numbers of kept tokens.

    python bench/prune.py

GRPO trains the toy for 3 steps and for 8; at both policies a few rollouts of 16 x 16 completions are taken.
Every completion's share of the full-batch gradient comes from the training step's own loss, and from their
inner products the error of any weighting is exact: |sum_i (w_i - 1) g_i|^2, here over |sum_i g_i|^2. It is
averaged over 150 draws of the masks at each of 15 settings of a pruner, and between the settings
interpolated (in logarithms) at four shares of kept tokens. The interval is 95% over the rollouts. An error
above 1 is worse than no step at all.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import config
import memory
import train
from advantage import advantage
from collect import Sampler
from config import Bernoulli, Completions, Pps, TopK
from history import PromptHistory
from infra import dist
from learner import Learner
from prune import COMPLETIONS, Offer, pps
from records import Batch, Group, Pruned, lengths
from update import add_gradient, minibatch, prepare_row

STEPS = {"early": 3, "late": 8}
ROLLOUTS, DRAWS, BUDGETS = 6, 150, (0.5, 0.25, 0.125, 0.0625)
STUDENT = 2.571  # t of 95% for 5 degrees of freedom

# (offer, k) -> weights [N, G] of one draw, relative to the full batch's
Draw = Callable[[Offer, int], Tensor]


def arm(settings_of: Callable[[int], Completions]) -> Draw:
    """Make a pruner of prune.py whose settings depend on k: the completions kept of every 16, or 16 x
    bernoulli's drop_prob.
    """
    def draw(offer: Offer, k: int) -> Tensor:
        settings = settings_of(k)
        return COMPLETIONS[settings.kind](offer, settings).weight_NG

    return draw


def at_random(offer: Offer, k: int) -> Tensor:
    return pps(torch.ones_like(offer.adv_NG), k, "batch", offer.seed).weight_NG


def kept_mean(draw: Draw) -> Draw:
    """Divide by the completions kept instead of by all, as loss.count=kept."""
    def scaled(offer: Offer, k: int) -> Tensor:
        weight_NG = draw(offer, k)
        return weight_NG * weight_NG.numel() / weight_NG.count_nonzero()

    return scaled


ARMS = {
    "topk, group, kept mean": kept_mean(arm(lambda k: TopK(keep=k))),
    "topk, batch, kept mean": kept_mean(arm(lambda k: TopK(keep=k, scope="batch"))),
    "topk, batch, full batch": arm(lambda k: TopK(keep=k, scope="batch")),
    "random, batch": at_random,
    "bernoulli": arm(lambda k: Bernoulli(drop_prob=k / 16)),
    "pps |A|, group": arm(lambda k: Pps(keep=k, size="adv")),
    "pps |A|, batch": arm(lambda k: Pps(keep=k, size="adv", scope="batch")),
    "pps norm, batch": arm(lambda k: Pps(keep=k, scope="batch")),
    "pps norm, batch, by cost": arm(lambda k: Pps(keep=k, scope="batch", by_cost=True)),
}


def inner_products(learner: Learner, groups: list[Group], adv_NG: Tensor) -> Tensor:
    """Compute inner products between the completions' terms of the full-batch gradient, [NG, NG]."""
    size = sum(p.numel() for p in learner.policy.parameters())
    gradients = torch.zeros(adv_NG.numel(), size)  # 0 where the advantage is
    for i in adv_NG.flatten().nonzero()[:, 0].tolist():
        gradients[i] = gradient_of(learner, groups, adv_NG, divmod(i, adv_NG.shape[1]))
    return (gradients @ gradients.T).double()


def gradient_of(learner: Learner, groups: list[Group], adv_NG: Tensor, member: tuple[int, int]) -> Tensor:
    """Compute one completion's term of the full-batch gradient, all parameters behind one another."""
    N = len(groups)
    only_NG = torch.zeros_like(adv_NG, dtype=torch.bool)
    only_NG[member] = True
    pruned = Pruned(only_NG, only_NG.to(adv_NG), torch.ones_like(adv_NG))
    single = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, pruned, list(range(N)), N, seed=0)
    for row in learner.rows(minibatch(learner, single, list(range(N)))):
        add_gradient(learner, prepare_row(learner, row, extra_pass=False), unmoved=True)
    gradient = torch.cat([dist.full(p.grad).flatten() for p in learner.policy.parameters()])
    learner.policy.zero_grad()
    return gradient


def errors(draw: Draw, offer: Offer, product: Tensor, k: int, draws: int) -> tuple[float, float]:
    """Average (share of the tokens kept, relative squared error) over draws of the masks."""
    tokens = offer.len_NG.flatten().double()
    kept, error = [], []
    for seed in range(draws):
        weight = draw(replace(offer, seed=seed), k).flatten()
        kept.append(float(tokens[weight > 0].sum() / tokens.sum()))
        error.append(float((weight - 1) @ product @ (weight - 1) / product.sum()))
    return mean(kept), mean(error)


def at_budget(curve: list[tuple[float, float]], budget: float) -> float | None:
    """Interpolate the error at this share of tokens between the settings on either side; None beyond them."""
    curve = sorted(curve)
    for (a, low), (b, high) in pairwise(curve):
        if a <= budget <= b and low > 0 and high > 0:
            t = math.log(budget / a) / math.log(b / a) if b > a else 0.0
            return math.exp((1 - t) * math.log(low) + t * math.log(high))
    return None


def cell(errors: list[float | None]) -> str:
    """Write mean and interval, or "-" where a rollout could not be pruned to this budget."""
    if None in errors:
        return "-"
    return f"{mean(errors):.3f} +- {STUDENT * stdev(errors) / len(errors) ** 0.5:.3f}"


def line(name: str, cells: list[str]) -> str:
    return f"{name:<25}" + "".join(f"{text:>18}" for text in cells)


def after_training(steps: int, out: Path) -> dict[str, dict[float, list[float | None]]]:
    """Train so many steps; then measure each arm's error on each rollout, by the share of tokens kept."""
    cfg = config.load("grpo_toy.yaml", [f"steps={steps}", f"out={out}"])
    train.train(cfg)
    task = replace(train.load(cfg), source=out / "hf")
    learner, engine = train.set_up(memory.decide(cfg, task.source), task)
    engine.sync(learner.policy)
    sampler = Sampler(engine, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed)
    history = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed + 1, middle=0.5)
    by_arm = {name: {budget: [] for budget in BUDGETS} for name in ARMS}
    for _ in range(ROLLOUTS):
        groups = sampler.rollout(history.draw(cfg.rollout.prompts_per_step))
        adv_NG = advantage(sampler.score(groups), cfg.advantage)
        len_NG = lengths(groups, cfg.rollout.group_size)
        offer = Offer(adv_NG, len_NG, cfg.loss.per, inert=True, seed=0)
        product = inner_products(learner, groups, adv_NG)
        for name, draw in ARMS.items():
            draws = 1 if name.startswith("topk") else DRAWS
            curve = [errors(draw, offer, product, k, draws) for k in range(1, 16)]
            for budget, of_rollouts in by_arm[name].items():
                of_rollouts.append(at_budget(curve, budget))
    return by_arm


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    dist.init("cpu")
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for when, steps in STEPS.items():
            by_arm = after_training(steps, Path(temporary) / when)
            print(f"\n{when}: after {steps} steps; squared error over |full gradient|^2, "
                  f"{ROLLOUTS} rollouts")
            print(line("share of tokens kept", [f"1/{round(1 / budget)}" for budget in BUDGETS]))
            for name, by_budget in by_arm.items():
                print(line(name, [cell(errors) for errors in by_budget.values()]), flush=True)
                results += [
                    {"when": when, "arm": name, "budget": budget, "errors": errors}
                    for budget, errors in by_budget.items()
                ]
    print(json.dumps({"bench": "prune", "results": results}))
    dist.close()


if __name__ == "__main__":
    main()
