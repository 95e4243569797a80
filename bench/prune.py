"""How far is the pruned gradient from the full batch's? Mean squared error at equal numbers of kept tokens.

    python bench/prune.py [--task hard]

GRPO trains the toy for 3 steps and for 8, or the hard toy task for 20 and for 120 (docs/experiments.md has
that testbed), or SmolLM2 for 10 (`--task real`, after `make real`); then rollouts of 16 x 16 completions are
taken. Every completion's share of the full-batch gradient comes from the training step's own loss, and from
their inner products the error of any weighting is exact: |sum_i (w_i - 1) g_i|^2, here over |sum_i g_i|^2
(gradients of more than 4M numbers are folded first, which keeps it to a thousandth). It is averaged over 40
draws of the masks at each of 15 or 16 settings of a pruner, and between the settings interpolated (in
logarithms) at five shares of kept tokens. The interval is 95% over the rollouts. An error above 1 is worse
than no step.

Cuts of NAT are drawn for each completion by itself, so they add sum_i w_i^2 V_i, and V_i over all cuts is
exact too: sum_t (1 / P_t - 1 / P_(t - 1)) |gradient of the tokens from t on|^2, P_t the chance that token t
is kept. It is measured on every sixteenth completion. Prompts are pruned by another rollout of theirs under
the same policy, so what they are pruned by is never out of date here.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from common import parser, print_json, show
from step import prepare
from torch import Tensor

import config
import train
from advantage import advantage
from collect import Sampler
from infra import dist
from learner import Learner
from prune import (
    COMPLETIONS,
    PROMPTS,
    Candidates,
    Memory,
    gradient_size,
    max_variance,
    pps,
    prefix_prob,
    rewards_of_kept,
    similar_order,
)
from records import Batch, Group, PromptDraw, Pruned, Rewards
from settings import kinds
from settings.kinds import Completions, Pps, Prompts, TopK
from update import add_gradient, minibatch, prepare_rows
from verify.statistics import half_width

# task -> its config, after how many steps it is looked at, and how many rollouts are taken
TASKS = {"toy": ("grpo_toy.yaml", {"early": 3, "late": 8}, 20),
         "hard": ("grpo_hard.yaml", {"early": 20, "late": 120}, 20),
         "real": ("experiments/smollm2.yaml", {"after 10": 10}, 5)}
DRAWS, BUDGETS = 40, (0.75, 0.5, 0.25, 0.125, 0.0625)
SPARSE = 16      # every so many-th completion's tokens are measured
SKETCH = 2**22   # numbers that a longer gradient is folded to


@dataclass(frozen=True, eq=False)
class Scene:
    """One rollout, and what the error of any weighting is computed from."""

    candidates: Candidates
    rewards: Rewards
    last_N: Tensor          # mean |A| of another rollout of each prompt
    product: Tensor         # between the completions' terms of the full gradient, [NG, NG]
    suffix: dict[int, Tensor]  # of every SPARSE-th completion: |gradient of the tokens from t on|^2, [L]


# (scene, seed, k) -> weights [N, G] of one draw, relative to the full batch's
Draw = Callable[[Scene, int, int], Tensor]


def arm(settings_of: Callable[[int], Completions]) -> Draw:
    """Make a pruner of prune.py whose settings depend on k: how many are kept of 16, or 16 x a share."""
    def draw(scene: Scene, seed: int, k: int) -> Tensor:
        settings = settings_of(k)
        return COMPLETIONS[settings.kind](replace(scene.candidates, seed=seed), settings).weight_NG

    return draw


def by_size(size_of: Callable[[Scene], Tensor], order: str = "similar") -> Draw:
    """Draw of the whole step in proportion to a size over sqrt(length), in the order of `pps` or shuffled."""
    def draw(scene: Scene, seed: int, k: int) -> Tensor:
        size_NG, order_K = sizes(size_of, scene), order_of(scene)
        if order == "shuffled":
            order_K = torch.randperm(len(order_K), generator=torch.Generator().manual_seed(seed))
        return pps(size_NG, order_K, k, "batch", seed).weight_NG

    return draw


@cache
def sizes(size_of: Callable[[Scene], Tensor], scene: Scene) -> Tensor:
    """Compute the sizes once for all draws, over sqrt(length)."""
    return size_of(scene) / scene.candidates.len_NG.sqrt()


@cache
def order_of(scene: Scene) -> Tensor:
    return similar_order(scene.candidates)


def token_weight(scene: Scene) -> Tensor:
    """Weigh the tokens of each completion up to a common factor, times |A|, [N, G]."""
    candidates = scene.candidates
    return candidates.adv_NG.abs() / (candidates.len_NG if candidates.normalize == "sequence" else 1)


def norm(scene: Scene) -> Tensor:
    """Guess the norm of a gradient from its length, as if its tokens were alike and independent."""
    return token_weight(scene) * scene.candidates.len_NG.sqrt()


def surprise(scene: Scene) -> Tensor:
    return gradient_size(scene.candidates, "surprise", by_cost=False)


def oracle(scene: Scene) -> Tensor:
    """Measure the norm of each completion's gradient, which takes a backward pass of its own."""
    return scene.product.diagonal().clamp(min=0).sqrt().view_as(scene.candidates.adv_NG)


def by_prompt(settings_of: Callable[[int], Prompts]) -> Draw:
    """Skip prompts by another rollout of theirs."""
    def draw(scene: Scene, seed: int, k: int) -> Tensor:
        none_N, settings = torch.zeros_like(scene.last_N), settings_of(k)
        memory = Memory(scene.last_N, none_N, none_N, none_N, scene.last_N.mean().item(), (0.5, 0.5),
                        [{}] * len(none_N))
        prob_N = PROMPTS[settings.kind](memory, settings)
        point_N = torch.rand(prob_N.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return ((point_N < prob_N) / prob_N)[:, None].expand_as(scene.candidates.adv_NG)

    return draw


def compared_anew(scene: Scene, seed: int, k: int) -> Tensor:
    """PODS: the weight of a term is the ratio of its advantage among the kept to that among all."""
    keep_NG = max_variance(scene.candidates.reward_NG, k)
    groups = list(range(len(keep_NG)))
    own_NG = advantage(rewards_of_kept(scene.rewards, groups, keep_NG), kinds.GroupNorm())
    ratio_NG = (own_NG / scene.candidates.adv_NG).nan_to_num(nan=1.0)  # 0 / 0 in a flat group
    return torch.where(keep_NG, ratio_NG, 0.0)


def kept_mean(draw: Draw) -> Draw:
    """Divide by the completions kept instead of by all, as loss.denominator=kept."""
    def scaled(scene: Scene, seed: int, k: int) -> Tensor:
        weight_NG = draw(scene, seed, k)
        return weight_NG * weight_NG.numel() / weight_NG.count_nonzero().clamp(min=1)

    return scaled


BY_COST = by_size(surprise)  # as Pps(keep=k, scope="batch", by_cost=True) draws
ARMS = {
    "topk, group, kept mean": kept_mean(arm(lambda k: TopK(keep=k))),
    "topk, batch, kept mean": kept_mean(arm(lambda k: TopK(keep=k, scope="batch"))),
    "topk, batch, full batch": arm(lambda k: TopK(keep=k, scope="batch")),
    "pods, kept mean": kept_mean(compared_anew),
    "pods |A| of all, kept mean": kept_mean(arm(lambda k: kinds.Pods(keep=k))),
    "variance share, kept mean": kept_mean(arm(lambda k: kinds.VarianceShare(share=k / 16))),
    "random, batch": by_size(lambda scene: scene.candidates.len_NG.sqrt(), "shuffled"),
    "bernoulli": arm(lambda k: kinds.Bernoulli(drop_prob=k / 16)),
    "pps |A|, shuffled": by_size(lambda scene: scene.candidates.adv_NG.abs(), "shuffled"),
    "pps norm, shuffled": by_size(norm, "shuffled"),
    "pps norm": by_size(norm),
    "pps surprise, shuffled": by_size(surprise, "shuffled"),
    "pps surprise": BY_COST,
    "pps surprise, not by cost": arm(lambda k: Pps(keep=k, scope="batch")),
    "pps surprise, group": arm(lambda k: Pps(keep=k, by_cost=True)),
    "pps oracle, shuffled": by_size(oracle, "shuffled"),
    "pps oracle": by_size(oracle),
    "pps surprise, cuts, whole 1/2": BY_COST,
    "cuts alone": lambda scene, seed, k: torch.ones_like(scene.candidates.adv_NG),
    "prompts, bernoulli": by_prompt(lambda k: kinds.BernoulliPrompts(drop_prob=k / 16)),
    "prompts, pps": by_prompt(lambda k: kinds.ProportionalPrompts(share=k / 16)),
}
# arm -> prune.tokens.whole by k
WHOLE = {"pps surprise, cuts, whole 1/2": lambda k: 0.5, "cuts alone": lambda k: k / 16}
CERTAIN = ("topk", "pods", "variance")  # nothing is left to chance
FEWEST = 0.5  # of 16 that arms of one draw for the whole step keep at least; others keep 1


def gradient_from(start: int, learner: Learner, groups: list[Group], adv_NG: Tensor, member: tuple[int, int],
                  ) -> Tensor:
    """Compute one completion's term of the full-batch gradient, of its tokens from `start` on, [P]."""
    N = len(groups)
    only_NG = torch.zeros_like(adv_NG, dtype=torch.bool)
    only_NG[member] = True
    pruned = Pruned(only_NG, only_NG.to(adv_NG), torch.ones_like(adv_NG))
    single = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, pruned, list(range(N)), N, seed=0)
    for row in learner.rows(minibatch(learner, single, list(range(N)))):
        row.weight_C[:start] = 0.0
        add_gradient(learner, prepare_rows(learner, [row], extra_pass=False)[0], unmoved=True)
    gradient = torch.cat([dist.gather_full(p.grad).flatten() for p in learner.policy.parameters()])
    learner.policy.zero_grad()
    return gradient


def inner_products(learner: Learner, groups: list[Group], adv_NG: Tensor) -> Tensor:
    """Compute the inner products of the completions' terms of the full-batch gradient, [NG, NG]."""
    terms, G = [], adv_NG.shape[1]
    place_K = adv_NG.flatten().nonzero()[:, 0]
    for place in place_K.tolist():
        terms.append(fold(gradient_from(0, learner, groups, adv_NG, divmod(place, G))))
    product = torch.zeros(adv_NG.numel(), adv_NG.numel(), dtype=torch.float64)
    columns = torch.stack(terms).split(2**16, dim=1)
    product[place_K[:, None], place_K] = sum((x @ x.T).double() for x in columns)
    return product


def fold(gradient: Tensor) -> Tensor:
    """Add up the parts of a long gradient with random signs, the same for all: a sketch that keeps each inner
    product in the mean, with a deviation of about the product of both norms over sqrt(SKETCH)."""
    if len(gradient) <= SKETCH:
        return gradient
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(SKETCH)
    for part in gradient.split(SKETCH):
        sign = torch.randint(2, part.shape, generator=generator) * 2 - 1
        total[:len(part)] += sign * part
    return total


def suffix_norms(learner: Learner, groups: list[Group], adv_NG: Tensor) -> dict[int, Tensor]:
    """Measure |gradient of the tokens from t on|^2 of every SPARSE-th completion's term, [L]."""
    norms = {}
    for i in range(0, adv_NG.numel(), SPARSE):
        n, g = divmod(i, adv_NG.shape[1])
        length = groups[n].samples[g].length
        norms[i] = torch.zeros(length, dtype=torch.float64)
        for t in range(length) if adv_NG[n, g] else ():
            gradient = gradient_from(t, learner, groups, adv_NG, (n, g))
            norms[i][t] = gradient.double().square().sum()
    return norms


def cut_errors(scene: Scene, whole: float) -> tuple[Tensor, Tensor]:
    """Compute how many tokens of each completion are kept on average, and V_i: SPARSE times its value for
    those that are measured."""
    mean, variance = [], torch.zeros(scene.candidates.adv_NG.numel(), dtype=torch.float64)
    for i, length in enumerate(scene.candidates.len_NG.flatten().tolist()):
        prob_L = prefix_prob(length, whole, 1)
        mean.append(prob_L.sum())
        if i in scene.suffix:
            rises_L = (1 / prob_L).diff(prepend=torch.ones(1, dtype=torch.float64))
            variance[i] = SPARSE * (rises_L * scene.suffix[i]).sum()
    return torch.stack(mean), variance


def errors(name: str, scene: Scene, k: int) -> tuple[float, float]:
    """Average (share of the tokens kept, relative squared error) over draws of the masks."""
    lengths, product = scene.candidates.len_NG.flatten().double(), scene.product
    tokens, variance = cut_errors(scene, WHOLE[name](k)) if name in WHOLE else (lengths, lengths * 0)
    seeds = range(1 if name.startswith(CERTAIN) else DRAWS)
    weight_DK = torch.stack([ARMS[name](scene, seed, k).flatten() for seed in seeds]).double()
    kept_D = (weight_DK > 0).double() @ tokens / lengths.sum()
    missing_DK = weight_DK - 1
    error_D = (missing_DK @ product * missing_DK).sum(dim=1).clamp(min=0) / product.sum()
    error_D += weight_DK.square() @ variance / product.sum()
    return kept_D.mean().item(), error_D.mean().item()


def at_budget(curve: list[tuple[float, float]], budget: float) -> float | None:
    """Interpolate the error at this share of tokens between the settings on either side; None beyond them."""
    curve = sorted(curve)
    for (a, low), (b, high) in pairwise(curve):
        if 0 < a <= budget <= b and low > 0 and high > 0:
            t = math.log(budget / a) / math.log(b / a) if b > a else 0.0
            return math.exp((1 - t) * math.log(low) + t * math.log(high))
    return None


def interval(errors: list[float | None]) -> str:
    """Write mean and interval over the rollouts that can be pruned to this budget, and their number if it is
    not all; "-" if fewer than half can."""
    values = np.array([error for error in errors if error is not None])
    if len(values) < len(errors) / 2:
        return "-"
    some = f" ({len(values)})" * (len(values) < len(errors))
    return f"{values.mean():.3f} +- {half_width(values):.3f}{some}"


def repeated(scene: Scene) -> float:
    """Estimate how much of |full gradient|^2 other rollouts of other prompts would repeat, |mean gradient|^2:
    by the inner products between different groups, whose noise is independent."""
    N, G = scene.candidates.adv_NG.shape
    between_NN = scene.product.view(N, G, N, G).sum(dim=(1, 3))
    pairs = between_NN.sum() - between_NN.trace()
    return (pairs * N / (N - 1) / between_NN.sum()).item()


def look(learner: Learner, sampler: Sampler, draws: list[PromptDraw], cfg: config.Config, tokens: bool,
         ) -> Scene:
    """Roll prompts out twice: the first time to prune them by, the second to measure, `tokens` too."""
    before = [replace(draw, epoch=draw.epoch + 1000) for draw in draws]
    last_N = advantage(sampler.score(sampler.rollout(before)), cfg.advantage).abs().mean(dim=1)
    groups = sampler.rollout(draws)
    rewards = sampler.score(groups)
    adv_NG = advantage(rewards, cfg.advantage)
    candidates = Candidates(
        adv_NG, groups, cfg.loss.normalize, advantage_only=True, seed=0, reward_NG=rewards.total_NG)
    suffix = suffix_norms(learner, groups, adv_NG) if tokens else {}
    return Scene(candidates, rewards, last_N, inner_products(learner, groups, adv_NG), suffix)


def after_training(task: str, steps: int, out: Path,
                   ) -> tuple[dict[str, dict[float, list[float | None]]], list[float]]:
    """Train so many steps; then measure each arm's error on each rollout, by the share of tokens kept, and
    how much of the full gradient is `repeated`."""
    recipe, _, rollouts = TASKS[task]
    train.train(config.load(recipe, [f"steps={steps}", f"out={out}", "data.eval=null"]))
    cfg = config.load(recipe, [f"out={out}", "rollout.group_size=16"])
    loaded = replace(train.load_task(cfg), source=out / "hf")
    learner, sampler, history = prepare(cfg, loaded, seed=1)  # other prompts than it was trained on
    names = [name for name in ARMS if task != "real" or name not in WHOLE]
    by_arm = {name: {budget: [] for budget in BUDGETS} for name in names}
    signal = []
    for i in range(rollouts):
        scene = look(learner, sampler, history.draw(cfg.rollout.prompts_per_step), cfg, task != "real")
        signal.append(repeated(scene))
        for name in names:
            fewest = [FEWEST] * name.startswith(("pps norm", "pps surprise", "pps oracle"))
            fewest = [] if name.endswith(("group", "not by cost")) else fewest
            curve = [errors(name, scene, k) for k in (*fewest, *range(1, 16))]
            for budget, of_rollouts in by_arm[name].items():
                of_rollouts.append(at_budget(curve, budget))
        print(f"rollout {i + 1} of {rollouts}", file=sys.stderr, flush=True)
    return by_arm, signal


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--task", choices=TASKS, default="toy")
    task = options.parse_args().task
    _, points, rollouts = TASKS[task]
    dist.init("cpu")
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for when, steps in points.items():
            by_arm, signal = after_training(task, steps, Path(temporary) / when)
            rows = []
            for name, by_budget in by_arm.items():
                rows.append({"share of tokens kept": name})
                for budget, errors in by_budget.items():
                    rows[-1][str(Fraction(budget))] = interval(errors)
                    results.append({"when": when, "arm": name, "budget": budget, "errors": errors})
            show(f"{task}, {when}: after {steps} steps; squared error over |full gradient|^2, "
                 f"{rollouts} rollouts; {interval(signal)} of it is repeated by other rollouts", rows)
            results.append({"when": when, "arm": "repeated", "budget": 1, "errors": signal})
    print_json("prune", task=task, results=results)
    dist.close()


if __name__ == "__main__":
    main()
