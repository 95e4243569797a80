"""How far is the pruned gradient from the full batch's? Mean squared error at equal numbers of kept tokens.

    python bench/prune.py [--task hard]     # or another of TASKS; opd*: a teacher's gradient

The task is trained for the steps in TASKS (docs/experiments.md has the testbeds); then rollouts are taken,
ROLLOUTS of them; of `smollm2`, which needs the runs of `make real`, as LARGE has it.
Every completion's share of the full-batch gradient comes from the training step's own loss, and from their
inner products the error of any weighting is exact: |sum_i (w_i - 1) g_i|^2, here over |sum_i g_i|^2. It is
averaged over 40 draws of the masks at each of 15 or 16 settings of a pruner, and between the settings
interpolated (in logarithms) at five shares of the kept tokens among those with a gradient. The interval is
95% over the rollouts. An error above 1 is worse than no step. Prompts are pruned by another rollout of theirs
under the same policy, so what they are pruned by is never out of date here. A second table has the errors
that PPS by an error was asked for (prune.completions.error) beside those that it had.
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
from step import prepare, weights_of
from torch import Tensor

import config
import train
from infra import dist
from learner import Learner
from leaves.page.tables import half_width
from prune import COMPLETIONS, PROMPTS, Candidates, Memory, keep_all, pps, similar_order
from records import Batch, Group, Pruned, Rewards
from settings import kinds, leaves
from settings.kinds import Completions, Pps, Prompts, TopK
from update import add_gradient, make_minibatch, prepare_rows

# task -> its config, and after how many steps it is looked at
TASKS = {"toy": ("grpo_toy.yaml", {"early": 3, "late": 8}),
         "hard": ("grpo_hard.yaml", {"early": 20, "middle": 60, "late": 120}),
         "long_sums": ("experiments/long_sums.yaml", {"early": 5, "middle": 30, "late": 60}),
         "smollm2": ("experiments/smollm2.yaml", {"early": 1, "middle": 10, "late": 25}),
         "opd": ("opd_toy.yaml", {"early": 3, "late": 20}),
         "opd_hard": ("experiments/opd_hard.yaml", {"early": 4, "late": 40}),
         "opd_smollm2": ("experiments/smollm2.yaml", {"early": 2})}
BY_ITSELF = ["advantage.kind=distill", "teacher.path=runs/smollm2/grpo/hf"]  # trained; no larger one is here
TAUGHT = ["prune.completions.kind=none", "teacher.keep=null"]  # all are read, and all are measured
ROLLOUTS, DRAWS, BUDGETS, ERRORS = 20, 40, (0.75, 0.5, 0.25, 0.125, 0.0625), (0.03, 0.1, 0.3, 1.0)
LARGE = (6, 4)  # rollouts, and prompts of each
SKETCH = 2**22  # numbers that a longer gradient is folded into


@dataclass(frozen=True, eq=False)
class Scene:
    """One rollout, and what the error of any weighting is computed from."""

    candidates: Candidates
    rewards: Rewards
    last_N: Tensor          # mean |A| of another rollout of each prompt
    product: Tensor         # between the completions' terms of the full gradient, [NG, NG]
    known_NG: Tensor | None  # sizes that need a teacher's log-probs


# (scene, seed, k) -> weights [N, G] of one draw, relative to the full batch's
Draw = Callable[[Scene, int, int], Tensor]


def arm(settings_of: Callable[[int], Completions]) -> Draw:
    """Make a pruner of prune.py whose settings depend on k: how many are kept of 16, or 16 x a share."""
    def draw(scene: Scene, seed: int, k: int) -> Tensor:
        settings = settings_of(k)
        return COMPLETIONS[settings.kind](replace(scene.candidates, seed=seed), settings).weight_NG

    return draw


def by_size(size_of: Callable[[Scene], Tensor], shuffled: bool = False) -> Draw:
    """Make a pruner that draws over the step by a size over sqrt(length), in `pps`'s order or shuffled."""
    def draw(scene: Scene, seed: int, k: int) -> Tensor:
        order_K = order_of(scene)
        if shuffled:
            order_K = torch.randperm(len(order_K), generator=torch.Generator().manual_seed(seed))
        return pps(sizes(size_of, scene), order_K, k, "batch", seed).weight_NG

    return draw


@cache
def sizes(size_of: Callable[[Scene], Tensor], scene: Scene) -> Tensor:
    """Compute the sizes once for all draws, over sqrt(length)."""
    return size_of(scene) / scene.candidates.len_NG.sqrt()


@cache
def order_of(scene: Scene) -> Tensor:
    return similar_order(scene.candidates)


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


def kept_mean(draw: Draw) -> Draw:
    """Divide by the completions kept instead of by all, as loss.denominator=kept."""
    def scaled(scene: Scene, seed: int, k: int) -> Tensor:
        weight_NG = draw(scene, seed, k)
        return weight_NG * weight_NG.numel() / weight_NG.count_nonzero().clamp(min=1)

    return scaled


ARMS = {
    "topk, group, kept mean": kept_mean(arm(lambda k: TopK(keep=k))),
    "topk, batch, full batch": arm(lambda k: TopK(keep=k, scope="batch")),
    "random, batch": by_size(lambda scene: scene.candidates.len_NG.sqrt(), shuffled=True),
    **{f"pps {size}": arm(lambda k, size=size: Pps(keep=k, scope="batch", size=size, by_cost=True))
       for size in ("adv", "surprise")},
    "pps oracle": by_size(oracle),
    "prompts, pps": by_prompt(lambda k: kinds.ProportionalPrompts(share=k / 16)),
}
ARMS_TAUGHT = {
    "random, batch": ARMS["random, batch"],
    **{f"pps {size}": arm(lambda k, size=size: Pps(keep=k, scope="batch", size=size, by_cost=True))
       for size in ("length", "surprise", "nats")},
    "pps known": lambda scene, seed, k: pps(  # as teacher.keep draws
        scene.known_NG, torch.arange(scene.known_NG.numel()), k, "batch", seed).weight_NG,
    "pps oracle": ARMS["pps oracle"],
}
BY_ERROR = arm(lambda error: Pps(error=error, by_cost=True))
FEWEST = 0.5  # of 16 that arms of one draw for the whole step keep at least; others keep 1


def gradient_of(learner: Learner, groups: list[Group], adv_NG: Tensor, member: tuple[int, int]) -> Tensor:
    """Compute one completion's term of the full-batch gradient, [P]."""
    N = len(groups)
    only_NG = torch.zeros_like(adv_NG, dtype=torch.bool)
    only_NG[member] = True
    pruned = Pruned(only_NG, only_NG.to(adv_NG), torch.ones_like(adv_NG))
    single = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, pruned, list(range(N)), N, seed=0)
    weighed = make_minibatch(learner, single, list(range(N)))
    for prepared in prepare_rows(learner, weighed, learner.rows(weighed), extra_pass=False):
        add_gradient(learner, prepared, unmoved=True)
    gradient = torch.cat([dist.gather_full(p.grad).flatten() for p in learner.policy.parameters()])
    learner.policy.zero_grad()
    return folded(gradient)


def folded(gradient: Tensor) -> Tensor:
    """Add up the parts of a long gradient under fixed random signs: a count sketch. Inner products
    stay what they are in the mean, with a deviation of |x| |y| / sqrt(SKETCH) or so."""
    if len(gradient) <= SKETCH:
        return gradient
    padded = torch.nn.functional.pad(gradient, (0, -len(gradient) % SKETCH))
    return (padded * signs(len(padded))).view(-1, SKETCH).sum(dim=0)


@cache
def signs(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0)).sub(0.5).sign()


def inner_products(learner: Learner, groups: list[Group], adv_NG: Tensor) -> Tensor:
    """Compute the inner products of the completions' terms of the full-batch gradient, [NG, NG]."""
    G = adv_NG.shape[1]
    place_K = adv_NG.flatten().nonzero()[:, 0]
    terms = [gradient_of(learner, groups, adv_NG, divmod(place, G)) for place in place_K.tolist()]
    product = torch.zeros(adv_NG.numel(), adv_NG.numel(), dtype=torch.float64)
    columns = torch.stack(terms).split(2**16, dim=1)
    product[place_K[:, None], place_K] = sum((x @ x.T).double() for x in columns)
    return product


def known_sizes(learner: Learner, groups: list[Group], adv_NG: Tensor) -> Tensor | None:
    """Compute the sizes that a teacher's log-probs give, [N, G]; None without a teacher."""
    if not learner.before_update:
        return None
    from leaves.distill.join import pieces_of

    every, places = keep_all(adv_NG), list(range(len(groups)))
    batch = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, every, places, len(groups), seed=0)
    weighed = make_minibatch(learner, batch, places)
    size_NG = torch.zeros_like(adv_NG)
    for prepared in prepare_rows(learner, weighed, learner.rows(weighed), extra_pass=False):
        for place, (size_T, *_) in pieces_of(prepared, []):
            size_NG[place] = size_T.norm()
    return size_NG


def errors(name: str, draw: Draw, scene: Scene, k: int) -> tuple[float, float]:
    """Average (share kept of the tokens with a gradient, relative squared error) over draws of the masks."""
    product, length_K = scene.product, scene.candidates.len_NG.flatten().double()
    lengths = length_K * (product.diagonal() > 0)
    seeds = range(1 if name.startswith("topk") else DRAWS)  # topk leaves nothing to chance
    weight_DK = torch.stack([draw(scene, seed, k).flatten() for seed in seeds]).double()
    kept_D = (weight_DK > 0).double() @ lengths / lengths.sum()
    missing_DK = weight_DK - 1
    error_D = (missing_DK @ product * missing_DK).sum(dim=1).clamp(min=0) / product.sum()
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
    return ((between_NN.sum() - between_NN.trace()) * N / (N - 1) / between_NN.sum()).item()


def look(parts: train.Parts, prompts: int, cfg: config.Config) -> Scene:
    """Roll prompts out twice: the first time to prune them by, the second to measure. Others are drawn if no
    completion has a gradient."""
    learner, sampler, draws = parts.learner, parts.sampler, parts.history.draw(prompts)
    groups = sampler.rollout([replace(draw, epoch=draw.epoch + 1000) for draw in draws])
    last_N = parts.advantage(groups, sampler.score(groups), cfg.advantage).abs().mean(dim=1)
    groups = sampler.rollout(draws)
    rewards = sampler.score(groups)
    adv_NG = parts.advantage(groups, rewards, cfg.advantage)
    if not adv_NG.any():
        return look(parts, prompts, cfg)
    candidates = Candidates(
        adv_NG, groups, cfg.loss.normalize, advantage_only=True, seed=0, reward_NG=rewards.total_NG)
    return Scene(candidates, rewards, last_N, inner_products(learner, groups, adv_NG),
                 known_sizes(learner, groups, adv_NG))


def after_training(task: str, steps: int, out: Path) -> tuple[dict[str, dict], list[float], dict]:
    """Train so many steps; then measure each arm's error on each rollout, by the share of tokens kept, how
    much of the full gradient is `repeated`, and (share, error) by the error that was asked for."""
    recipe, _ = TASKS[task]
    taught, large = task.startswith("opd"), task.endswith("smollm2")
    arms, more = ARMS_TAUGHT if taught else ARMS, BY_ITSELF * (taught and large)
    train.train(config.load(recipe, [
        f"steps={steps}", f"out={out}", "data.eval=null", f"checkpoint.every={steps}", *more]), resume="auto")
    cfg = config.load(recipe, [f"out={out}", "rollout.group_size=16", *TAUGHT * taught, *more])
    rollouts, prompts = LARGE if large else (ROLLOUTS, cfg.rollout.prompts_per_step)
    loaded = replace(train.load_task(cfg), source=out / "hf")
    learner, sampler, history = prepare(cfg, loaded, seed=1)  # other prompts than it was trained on
    plain = train.Parts(cfg, loaded, weights_of(cfg), learner, sampler.engine, sampler, history, first=0)
    parts = leaves.through("parts", cfg, plain)
    by_arm = {name: {budget: [] for budget in BUDGETS} for name in arms}
    signal, by_error = [], {error: [] for error in ERRORS}
    for i in range(rollouts):
        scene = look(parts, prompts, cfg)
        signal.append(repeated(scene))
        for error, of_rollouts in by_error.items():
            of_rollouts.append(errors("", BY_ERROR, scene, error))
        for name, draw in arms.items():
            fewest = [FEWEST] * name.startswith("pps")
            curve = [errors(name, draw, scene, k) for k in (*fewest, *range(1, 16))]
            for budget, of_rollouts in by_arm[name].items():
                of_rollouts.append(at_budget(curve, budget))
        print(f"rollout {i + 1} of {rollouts}", file=sys.stderr, flush=True)
    return by_arm, signal, by_error


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--task", choices=TASKS, default="toy")
    task, results = options.parse_args().task, []
    _, points = TASKS[task]
    dist.init("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        for when, steps in points.items():
            by_arm, signal, by_error = after_training(task, steps, Path(temporary))  # goes on from before
            rows = []
            for name, by_budget in by_arm.items():
                rows.append({"share of tokens kept": name})
                for budget, errors in by_budget.items():
                    rows[-1][str(Fraction(budget))] = interval(errors)
                    results.append({"when": when, "arm": name, "budget": budget, "errors": errors})
            show(f"{task}, {when}: after {steps} steps; squared error over |full gradient|^2, "
                 f"{len(signal)} rollouts; {interval(signal)} of it is repeated by other rollouts", rows)
            results.append({"when": when, "arm": "repeated", "budget": 1, "errors": signal})
            show("error asked for, and measured", [
                {"asked for": asked, "measured": interval([error for _, error in pairs]),
                 "tokens": [share for share, _ in pairs]} for asked, pairs in by_error.items()])
    print_json("prune", task=task, results=results)
    dist.close()


if __name__ == "__main__":
    main()
