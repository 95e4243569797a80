"""How far is the pruned gradient from the full batch's? Mean squared error at equal numbers of kept tokens.

    python bench/prune.py

GRPO trains the toy for 3 steps and for 8; at both policies a few rollouts of 16 x 16 completions are taken. Every
completion's part of the full-batch gradient comes from the training step's own loss, and from their inner products the
error of any weighting is exact: |sum_i (w_i - 1) g_i|^2, here over |sum_i g_i|^2. It is averaged over 150 draws of the
masks at each of 15 settings of a pruner, and between the settings interpolated (in logarithms) at four shares of kept
tokens. The interval is 95% over the rollouts. An error above 1 is worse than no step at all.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import collect
import config
import data
import dist
import metrics
import train
import update
from advantage import group_norm
from config import Completions
from prune import COMPLETIONS, Offer, Pruned, pps
from sample import Batch, lengths

STEPS = {"early": 3, "late": 8}
ROLLOUTS, DRAWS, BUDGETS = 6, 150, (0.5, 0.25, 0.125, 0.0625)
STUDENT = 2.571  # t of 95% for 5 degrees of freedom

Draw = Callable[[Offer, float], Tensor]  # (offer, share) -> weights [N, G] of one draw, relative to the full batch's


def arm(kind: str, scope: str = "batch", size: str = "norm", by_cost: bool = False) -> Draw:
    """A pruner of prune.py. `share` is what it keeps of every 16, or bernoulli's drop_prob."""
    def draw(offer: Offer, share: float) -> Tensor:
        settings = Completions(kind, round(share * offer.adv_NG.shape[1]), scope, share, size, by_cost)
        return COMPLETIONS[kind](offer, settings).weight_NG

    return draw


def at_random(offer: Offer, share: float) -> Tensor:
    return pps(torch.ones_like(offer.adv_NG), round(share * offer.adv_NG.shape[1]), "batch", offer.seed).weight_NG


def kept_mean(draw: Draw) -> Draw:
    """With loss.count=kept: divided by what is kept instead of by all."""
    def scaled(offer: Offer, share: float) -> Tensor:
        weight_NG = draw(offer, share)
        return weight_NG * weight_NG.numel() / weight_NG.count_nonzero()

    return scaled


ARMS = {
    "topk, group, kept mean": kept_mean(arm("topk", scope="group")),
    "topk, batch, kept mean": kept_mean(arm("topk")),
    "topk, batch, full batch": arm("topk"),
    "random, batch": at_random,
    "bernoulli": arm("bernoulli"),
    "pps |A|, group": arm("pps", scope="group", size="adv"),
    "pps |A|, batch": arm("pps", size="adv"),
    "pps norm, batch": arm("pps"),
    "pps norm, batch, by cost": arm("pps", by_cost=True),
}


def inner_products(learner: update.Learner, groups: list, adv_NG: Tensor) -> Tensor:
    """[NG, NG] between the completions' parts of the full-batch gradient."""
    N, G = adv_NG.shape
    one_NG = torch.ones_like(adv_NG)
    parts = []
    for n, g in ((n, g) for n in range(N) for g in range(G)):
        if adv_NG[n, g] == 0:
            parts.append(None)
            continue
        only_NG = torch.zeros_like(one_NG, dtype=torch.bool)
        only_NG[n, g] = True
        pruned = Pruned(only_NG, only_NG.to(one_NG), one_NG)
        alone = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, pruned, list(range(N)), N, seed=0)
        rows = update.pack_batch(learner, alone, list(range(N)))
        update.accumulate(learner, rows, [None] * len(rows), [None] * len(rows), [row.adv_C for row in rows],
                          metrics.PassSums(), True, unmoved=True)
        parts.append(torch.cat([dist.full(p.grad).flatten() for p in learner.policy.parameters()]))
        learner.policy.zero_grad()
    some = next(part for part in parts if part is not None)
    whole = torch.stack([torch.zeros_like(some) if part is None else part for part in parts])
    return (whole @ whole.T).double()


def errors(draw: Draw, offer: Offer, product: Tensor, share: float, draws: int) -> tuple[float, float]:
    """(share of the tokens kept, mean relative squared error) over draws of the masks."""
    tokens = offer.len_NG.flatten().double()
    kept, error = [], []
    for seed in range(draws):
        weight = draw(Offer(offer.adv_NG, offer.len_NG, offer.per, offer.inert, seed), share).flatten()
        kept.append(float(tokens[weight > 0].sum() / tokens.sum()))
        error.append(float((weight - 1) @ product @ (weight - 1) / product.sum()))
    return mean(kept), mean(error)


def at_budget(curve: list[tuple[float, float]], budget: float) -> float | None:
    """The error at this share of tokens, between the settings on either side; none beyond them."""
    curve = sorted(curve)
    for (a, low), (b, high) in zip(curve, curve[1:], strict=False):
        if a <= budget <= b and low > 0 and high > 0:
            t = (math.log(budget) - math.log(a)) / (math.log(b) - math.log(a)) if b > a else 0.0
            return math.exp((1 - t) * math.log(low) + t * math.log(high))
    return None


def cell(errors: list[float | None]) -> str:
    """Mean and interval; nothing where a rollout could not be pruned to this budget."""
    if None in errors:
        return "-"
    return f"{mean(errors):.3f} +- {STUDENT * stdev(errors) / len(errors) ** 0.5:.3f}"


def main() -> None:
    dist.init("cpu")
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for when, steps in STEPS.items():
            cfg = config.load("grpo_toy.yaml", [f"steps={steps}", f"out={temporary}/{when}"])
            train.train(cfg)
            source = Path(temporary) / when / "hf"
            _, tokenizer, _, prompts, _ = train.load(cfg)
            learner, engine = train.set_up(cfg, source, tokenizer)
            engine.sync(learner.policy)
            found = {name: {budget: [] for budget in BUDGETS} for name in ARMS}
            history = data.PromptHistory(0.5)
            for _ in range(ROLLOUTS):
                turns = history.draw(prompts, cfg.prune.prompts, cfg.seed + 1, cfg.rollout.prompts_per_step)
                groups, parts = collect.rollout(engine, tokenizer, turns, cfg, metrics.Clock(), None)
                adv_NG = group_norm(parts["accuracy"], cfg.advantage.correction, cfg.advantage.eps)
                offer = Offer(adv_NG, lengths(groups, cfg.rollout.group_size), cfg.loss.per, inert=True, seed=0)
                product = inner_products(learner, groups, adv_NG)
                for name, draw in ARMS.items():
                    draws = 1 if name.startswith("topk") else DRAWS
                    curve = [errors(draw, offer, product, k / 16, draws) for k in range(1, 16)]
                    for budget in BUDGETS:
                        found[name][budget].append(at_budget(curve, budget))
            print(f"\n{when}: after {steps} steps; squared error over |full gradient|^2, {ROLLOUTS} rollouts\n"
                  f"{'share of tokens kept':<25}" + "".join(f"{f'1/{round(1 / b)}':>18}" for b in BUDGETS))
            for name, by_budget in found.items():
                print(f"{name:<25}" + "".join(f"{cell(by_budget[budget]):>18}" for budget in BUDGETS), flush=True)
                results += [{"when": when, "arm": name, "budget": budget, "errors": by_budget[budget]}
                            for budget in BUDGETS]
    print(json.dumps({"bench": "prune", "results": results}))
    dist.close()


if __name__ == "__main__":
    main()
