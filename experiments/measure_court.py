"""How large is the variance of a step's gradient under the methods of court/, at equal generated tokens?

    python experiments/measure_court.py [--keep FOLDER]

GRPO trains the testbed (docs/experiments.md) for 20 steps and for 120; then 20 rollouts of 16 prompts x 16
completions are taken. Every completion's score gradient comes from the training step's own loss, and from the
inner products of these gradients all variances follow. 8 of a prompt's completions are its step, the other 8
its history, and then the other way round.

The anchor is leave-one-out (RLOO) in groups of 8; its variance, given the prompts, is estimated without bias
from the step's pairs of completions. A method's error is its squared distance to the anchor's mean: variance,
and squared bias if there is any. The mean in that distance comes from the other 8 completions. Over the
anchor's are printed:

    error      given the prompts
    tokens     that are generated
    sampling   error x tokens: at equal tokens, given the prompts
    step       the same with the variance that comes from drawing the prompts, on both sides: at equal tokens
               of a step, if tokens that are saved pay for more prompts

Groups of another size are printed too: drawing the prompts is a part of a step's variance, so that smaller
groups of more prompts may be better at equal tokens, and a method must win against them. Intervals are 95%,
by a jackknife over the rollouts. With `--keep` the inner products are stored in a folder, and read from there
the next time. The optimal token baseline has a script of its own, measure_otb.py.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from kept_runs import ROOT, quantile
from torch import Tensor
from try_method import load

sys.path.append(str(ROOT / "bench"))

from common import parser, print_json, show  # noqa: E402
from court.abort import Abort, go_on_prob  # noqa: E402
from court.abort_controls import balanced  # noqa: E402
from court.allocation import share_out, size_of  # noqa: E402
from court.pass_rates import Rate  # noqa: E402
from court.survivors import leave_one_out_weighted  # noqa: E402

import config  # noqa: E402
import train  # noqa: E402
from advantage import leave_one_out, shrinkage  # noqa: E402
from collect import Sampler  # noqa: E402
from history import PromptHistory  # noqa: E402
from infra import dist  # noqa: E402
from learner import Learner  # noqa: E402
from preflight import memory  # noqa: E402
from records import lengths  # noqa: E402

RECIPE = "grpo_hard.yaml"
POINTS = {"early": 20, "late": 120}  # steps of training before the rollouts
ROLLOUTS = 20
G = 8
MARKS = (8, 16)  # tokens after which rollouts are aborted
MASKS = 32  # draws of who goes on
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6)
WAYS = ((slice(G, None), slice(G)), (slice(G), slice(G, None)))  # step and history


# ---- rollouts and their gradients


@dataclass(frozen=True, slots=True)
class Scene:
    """One rollout: N prompts with 2 G completions each."""

    product: Tensor  # between score gradients, each over its length, [2NG, 2NG]
    reward_NG: Tensor
    len_NG: Tensor
    prompt_tokens: list[int]
    logp: list[list[list[float]]]  # of each prompt, completion and token


def trained(steps: int, folder: Path) -> tuple[Learner, Sampler, PromptHistory, int]:
    """Train so many steps; return policy, sampler, history, and the number of prompts in a step."""
    train.train(
        config.load(RECIPE, [f"steps={steps}", f"out={folder}", "data.eval=null"])
    )
    cfg = config.load(RECIPE, [f"out={folder}", f"rollout.group_size={2 * G}"])
    task = replace(train.load_task(cfg), source=folder / "hf")
    learner, engine = train.load_models(memory.resolve_auto(cfg, task.source), task)
    engine.sync(learner.policy)
    sampler = Sampler(engine, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed)
    history = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed + 1, middle=0.5)
    return learner, sampler, history, cfg.rollout.prompts_per_step


def take_scenes(steps: int, folder: Path) -> list[Scene]:
    """Train so many steps, and measure rollouts."""
    errors = load(ROOT / "bench" / "prune.py")
    learner, sampler, history, prompts = trained(steps, folder)
    scenes = []
    for i in range(ROLLOUTS):
        groups = sampler.rollout(history.draw(prompts))
        reward_NG = sampler.score(groups).total_NG
        product = errors.inner_products(learner, groups, torch.ones_like(reward_NG))
        logp = [[list(s.logp) for s in group.samples] for group in groups]
        prompt_tokens = [len(group.prompt.ids) for group in groups]
        scenes.append(
            Scene(product, reward_NG, lengths(groups, 2 * G), prompt_tokens, logp)
        )
        print(f"rollout {i + 1} of {ROLLOUTS}", file=sys.stderr, flush=True)
    return scenes


def products(scene: Scene, normalize: str) -> np.ndarray:
    """Return the inner products as [N, 2G, N, 2G]; under `sum` a completion's tokens add up."""
    product = scene.product
    if normalize == "sum":
        len_R = scene.len_NG.flatten().double()
        product = product * len_R[:, None] * len_R
    N = len(scene.reward_NG)
    return product.view(N, 2 * G, N, 2 * G).numpy()


@dataclass(frozen=True, slots=True)
class Half:
    """A prompt's step of G completions, and its history."""

    scene: int
    rate: Rate  # of the history
    prompt_tokens: int
    reward_G: np.ndarray
    len_G: np.ndarray
    logp: list[list[float]]
    product: np.ndarray  # between the step's gradients, [G, G]
    across: np.ndarray  # of them with the history's leave-one-out gradient, [G]
    moments: tuple[float, float, float]
    between: float  # variance that comes from drawing the prompts


def halves(scenes: list[Scene], normalize: str) -> list[Half]:
    """Cut each prompt of each scene into a step and a history, in both ways."""
    cut = []
    for number, scene in enumerate(scenes):
        product = products(scene, normalize)
        mean_square = cross_product(scene, product)
        for n, reward_G in enumerate(scene.reward_NG):
            own = product[n, :, n, :]
            for now, before in WAYS:
                right = reward_G[before].sum().item()
                tokens = scene.len_NG[n, before].double().mean().item()
                now_G = reward_G[now].double().numpy()
                moments = pair_moments(own[now, now], now_G)
                half = Half(
                    scene=number,
                    rate=Rate(right, G, tokens, right, G),
                    prompt_tokens=scene.prompt_tokens[n],
                    reward_G=now_G,
                    len_G=scene.len_NG[n, now].double().numpy(),
                    logp=scene.logp[n][now],
                    product=own[now, now],
                    across=own[now, before] @ mean_weights(reward_G[before]),
                    moments=moments,
                    between=moments[2] - mean_square,
                )
                cut.append(half)
    return cut


def mean_weights(reward_K: Tensor | np.ndarray) -> np.ndarray:
    """Compute the weights of gradients in the leave-one-out gradient of a prompt, [K]."""
    adv_1K = leave_one_out(torch.as_tensor(reward_K).double()[None])
    return adv_1K[0].numpy() / len(reward_K)


def cross_product(scene: Scene, product: np.ndarray) -> float:
    """Estimate the squared norm of the mean gradient over all prompts, by pairs of different prompts."""
    adv_NG = leave_one_out(scene.reward_NG.double()).numpy() / (2 * G)
    inner_NN = np.einsum("ng,ngmh,mh->nm", adv_NG, product, adv_NG, optimize=True)
    N = len(adv_NG)
    return (inner_NN.sum() - inner_NN.trace()) / (N * (N - 1))


# ---- the anchor's variance


def pair_moments(
    product: np.ndarray, reward_K: np.ndarray
) -> tuple[float, float, float]:
    """Estimate E h_ij h_ik, E h_ij^2 and E h_ij h_kl for h_ij = (r_i - r_j)(S_i - S_j) / 2. Its mean over
    pairs is the leave-one-out gradient."""
    pairs = np.array(list(combinations(range(len(reward_K)), 2)))
    half_P = (reward_K[pairs[:, 0]] - reward_K[pairs[:, 1]]) / 2
    weight_PK = np.zeros((len(pairs), len(reward_K)))
    weight_PK[np.arange(len(pairs)), pairs[:, 0]] = half_P
    weight_PK[np.arange(len(pairs)), pairs[:, 1]] = -half_P
    shared_PP = (pairs[:, None, :, None] == pairs[None, :, None, :]).sum(axis=(2, 3))
    inner_PP = weight_PK @ product @ weight_PK.T
    return (
        inner_PP[shared_PP == 1].mean(),
        inner_PP[shared_PP == 2].mean(),
        inner_PP[shared_PP == 0].mean(),
    )


def variance(moments: tuple[float, float, float], n: float) -> float:
    """Compute the variance of the leave-one-out gradient of n completions (of a U-statistic, Hoeffding 1948);
    between two integers the mean of both, as for a number that is rounded at random."""
    if n != int(n):
        return (1 - n % 1) * variance(moments, int(n)) + n % 1 * variance(
            moments, int(n) + 1
        )
    one, two, mean_square = moments
    return 2 / (n * (n - 1)) * (2 * (n - 2) * (one - mean_square) + two - mean_square)


# ---- sums over rollouts, and their ratios

# rollout -> error, tokens, the anchor's error and tokens, and the variance that comes from drawing prompts
Sums = dict[int, list[float]]


def add(sums: Sums, scene: int, *values: float) -> None:
    sums[scene] = [
        a + b for a, b in zip(sums.get(scene, [0.0] * 5), values, strict=True)
    ]


def ratios(sums: Sums) -> dict:
    """Compute the figures of a row (above), two of them with an interval."""
    rows = np.array(list(sums.values()))
    total = rows.sum(axis=0)
    figures = {"error": total[0] / total[2], "tokens": total[1] / total[3]}
    for name, drawn in (("sampling", 0.0), ("step", 1.0)):
        without = np.array([equal_tokens(total - row, drawn) for row in rows])
        half = quantile(0.05, len(rows) - 1) * math.sqrt(
            (len(rows) - 1) * without.var()
        )
        middle = equal_tokens(total, drawn)
        figures |= {
            name: middle,
            f"{name} low": middle - half,
            f"{name} high": middle + half,
        }
    return {name: round(float(value), 4) for name, value in figures.items()}


def equal_tokens(total: np.ndarray, drawn: float) -> float:
    error, tokens, anchor, anchor_tokens, between = total
    return (
        (error + drawn * between) / (anchor + drawn * between) * tokens / anchor_tokens
    )


# ---- allocation


def allocation(cut: list[Half], rule: str) -> Sums:
    """Share the tokens of each step out among its prompts."""
    sums: Sums = {}
    steps: dict[tuple[int, int], list[Half]] = {}
    for place, half in enumerate(cut):
        steps.setdefault((half.scene, place % 2), []).append(half)
    for (scene, _), step in steps.items():
        number_N = np.full(len(step), float(G))
        if rule != "uniform":
            size_N = torch.tensor(
                [size_of(half.rate, rule) for half in step], dtype=torch.float64
            )
            cost_N = torch.tensor(
                [half.rate.tokens for half in step], dtype=torch.float64
            )
            number_N = share_out(size_N, cost_N, G * cost_N.sum().item(), 2, 64).numpy()
        for half, n in zip(step, number_N, strict=True):
            tokens = half.len_G.mean()
            anchor = variance(half.moments, G)
            add(
                sums,
                scene,
                variance(half.moments, n),
                n * tokens,
                anchor,
                G * tokens,
                half.between,
            )
    return sums


# ---- aborts

Prob = Callable[[Half, int, int], float]  # of completion i to go on at a mark


def abort(cut: list[Half], mark: int, prob_of: Prob, masks: int = MASKS) -> Sums:
    """Draw which completions go on, so many times, and weigh the survivors by the inverse probability."""
    sums, generator = {}, np.random.default_rng(0)
    for half in cut:
        prob_G = np.array(
            [prob_of(half, i, mark) if half.len_G[i] > mark else 1.0 for i in range(G)]
        )
        goes_DG = generator.random((masks, G)) < prob_G
        reward_DG = torch.tensor(np.broadcast_to(half.reward_G, goes_DG.shape).copy())
        adv_DG = leave_one_out_weighted(
            reward_DG, torch.tensor(goes_DG / prob_G)
        ).numpy()
        tokens = (
            prob_G * half.len_G + (1 - prob_G) * np.minimum(half.len_G, mark)
        ).sum()
        add_error(sums, half, goes_DG / prob_G * adv_DG / G, tokens)
    return sums


def add_error(sums: Sums, half: Half, weight_DG: np.ndarray, tokens: float) -> None:
    """Add the mean squared distance of sum_i weight_i S_i to the anchor's mean, over D draws."""
    anchor_G, anchor = mean_weights(half.reward_G), variance(half.moments, G)
    square_D = ((weight_DG @ half.product) * weight_DG).sum(axis=1)
    moved_G = weight_DG.mean(axis=0) - anchor_G
    further = square_D.mean() - anchor_G @ half.product @ anchor_G
    further -= 2 * moved_G @ half.across
    add(
        sums,
        half.scene,
        anchor + further,
        tokens,
        anchor,
        half.len_G.sum(),
        half.between,
    )


def biased_abort(cut: list[Half], mark: int, rule: str) -> Sums:
    """Drop half of the unfinished completions at random, or in balance; a mean over survivors."""
    sums, generator = {}, np.random.default_rng(0)
    for half in cut:
        long_G = half.len_G > mark
        goes_DG = ~long_G | (generator.random((MASKS, G)) < 0.5)
        if rule == "balanced":
            places = np.flatnonzero(long_G)
            goes_DG = np.ones((1, G), dtype=bool)
            goes_DG[0, places] = balanced(
                [sum(half.logp[i][:mark]) for i in places], 0.5
            )
        weight_DG = torch.tensor(goes_DG.astype(float))
        reward_DG = torch.tensor(np.broadcast_to(half.reward_G, goes_DG.shape).copy())
        adv_DG = leave_one_out_weighted(reward_DG, weight_DG).numpy()
        adv_DG[goes_DG.sum(axis=1) < 2] = (
            0.0  # a lone survivor has nothing to compare with
        )
        on_G = goes_DG.mean(axis=0)
        tokens = (on_G * half.len_G + (1 - on_G) * np.minimum(half.len_G, mark)).sum()
        add_error(
            sums,
            half,
            goes_DG * adv_DG / goes_DG.sum(axis=1, keepdims=True).clip(1),
            tokens,
        )
    return sums


FEATURES = {
    "spread": lambda half, logp: math.log(half.rate.mean * (1 - half.rate.mean)),
    "rate": lambda half, logp: math.log(half.rate.mean),
    "prompt": lambda half, logp: math.log(half.prompt_tokens),
    "confidence": lambda half, logp: sum(logp) / len(logp),
}


FITS = {
    "pass rate": ["spread"],
    "pass rate, prompt": ["spread", "rate", "prompt"],
    "all": ["spread", "rate", "prompt", "confidence"],
    "log-probs alone": ["confidence"],
}


def fit(cut: list[Half], mark: int, names: list[str]) -> Abort:
    """Fit P ~ sqrt(E[A^2 |S|^2] / E[tokens left]), log-linear in these features; the factor is the best of
    SCALES for a step at equal tokens, on the same rollouts."""
    feature_K, square_K, left_K = [], [], []
    for half in cut:
        adv_G = G * mean_weights(half.reward_G)
        for i in np.flatnonzero(half.len_G > mark):
            feature_K.append(
                [1.0, *(FEATURES[name](half, half.logp[i][:mark]) for name in names)]
            )
            square_K.append(adv_G[i] ** 2 * half.product[i, i])
            left_K.append(half.len_G[i] - mark)
    features = np.array(feature_K)
    slope = (
        log_linear(features, np.array(square_K))
        - log_linear(features, np.array(left_K))
    ) / 2
    center = (features @ slope).mean()
    fitted = dict(zip(names, map(float, slope[1:]), strict=True))
    rules = [
        Abort(
            mark=mark,
            **{"spread": 0.0} | fitted,
            bias=float(slope[0] - center + math.log(scale)),
        )
        for scale in SCALES
    ]
    return min(
        rules, key=lambda rule: ratios(abort(cut, mark, by_rule(rule), masks=8))["step"]
    )


def log_linear(features: np.ndarray, value_K: np.ndarray) -> np.ndarray:
    """Fit log E[value] = features @ slope by Newton's steps of a Poisson likelihood, with a slight ridge."""
    value_K, slope = value_K / value_K.mean(), np.zeros(features.shape[1])
    for _ in range(60):
        mean_K = np.exp(np.clip(features @ slope, -10, 10)) + 1e-9
        target_K = features @ slope + (value_K - mean_K) / mean_K
        ridge = 1e-2 * np.eye(len(slope))
        slope = np.linalg.solve(
            features.T @ (mean_K[:, None] * features) + ridge,
            features.T @ (mean_K * target_K),
        )
    return slope


def by_rule(rule: Abort) -> Prob:
    return lambda half, i, mark: go_on_prob(
        rule, half.rate.mean, half.prompt_tokens, half.logp[i][:mark]
    )


def fitted_abort(cut: list[Half], mark: int, names: list[str]) -> Sums:
    """Fit on the rollouts of even numbers and use the rule on the odd ones, and the other way round."""
    sums: Sums = {}
    for odd in (0, 1):
        rule = fit([half for half in cut if half.scene % 2 != odd], mark, names)
        sums |= abort(
            [half for half in cut if half.scene % 2 == odd], mark, by_rule(rule)
        )
    return sums


# ---- baselines of a completion


def shrunk(scenes: list[Scene], normalize: str, n: int) -> Sums:
    """Measure shrinkage baselines over the mean, both in groups of n, on whole steps: they tie the prompts of
    a step together."""
    sums: Sums = {}
    for number, scene in enumerate(scenes):
        product = products(scene, normalize)
        cut = halves([scene], normalize)
        anchor = sum(variance(half.moments, n) for half in cut)
        between = sum(half.between for half in cut)
        further = 0.0
        for now, before in WAYS:
            first = now.start or 0
            step = slice(first, first + n)
            reward_NG = scene.reward_NG[:, step].double()
            plain_NG = leave_one_out(reward_NG).numpy() / n
            new_NG = shrinkage(reward_NG).numpy() / n
            other_NG = leave_one_out(scene.reward_NG[:, before].double()).numpy() / G
            inner = product[:, step, :, step]
            moved_NG = new_NG - plain_NG
            further += square(new_NG, inner, new_NG) - square(plain_NG, inner, plain_NG)
            further -= 2 * square(moved_NG, product[:, step, :, before], other_NG)
        add(sums, number, anchor + further, 1.0, anchor, 1.0, between)
    return sums


def square(left_NG: np.ndarray, product: np.ndarray, right_NG: np.ndarray) -> float:
    """Multiply two sums of weighted gradients."""
    return np.einsum("ng,ngmh,mh->", left_NG, product, right_NG, optimize=True).item()


# ---- tables


def measured(scenes: list[Scene], normalize: str) -> dict[str, dict]:
    """Measure all methods under one loss.normalize."""
    cut = halves(scenes, normalize)
    rows = {f"groups of {n}": group_size(cut, n) for n in (2, 4, 6, 16)}
    for rule in ("cost", "spread", "posterior", "length"):
        rows[f"allocation, {rule}"] = allocation(cut, rule)
    for mark in MARKS:
        for name, names in FITS.items():
            rows[f"abort at {mark}, fitted: {name}"] = fitted_abort(cut, mark, names)
        rows[f"abort at {mark}, all with P = 0.7"] = abort(cut, mark, lambda *_: 0.7)
        for rule in ("dropped", "balanced"):
            name = f"abort at {mark}, {rule}, P = 0.5 (biased)"
            rows[name] = biased_abort(cut, mark, rule)
    rows["shrinkage"] = shrunk(scenes, normalize, G)
    rows["shrinkage in groups of 4, over groups of 4"] = shrunk(scenes, normalize, 4)
    return {name: ratios(sums) for name, sums in rows.items()}


def group_size(cut: list[Half], n: int) -> Sums:
    """Compare leave-one-out in groups of n."""
    sums: Sums = {}
    for half in cut:
        error, anchor = variance(half.moments, n), variance(half.moments, G)
        add(sums, half.scene, error, n, anchor, G, half.between)
    return sums


def share_of_prompts(cut: list[Half]) -> float:
    """Compute the share of a step's variance that comes from drawing the prompts."""
    between, anchor = (
        sum(half.between for half in cut),
        sum(variance(half.moments, G) for half in cut),
    )
    return between / (between + anchor)


def printed(name: str, figures: dict) -> dict:
    """Write a row of a table."""
    row = {
        "method": name,
        "error": f"{figures['error']:.3f}",
        "tokens": f"{figures['tokens']:.3f}",
    }
    for key in ("sampling", "step"):
        interval = f"[{figures[f'{key} low']:.3f}, {figures[f'{key} high']:.3f}]"
        row[key] = f"{figures[key]:.3f} {interval}"
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--keep", type=Path, help="a folder for the inner products")
    keep = options.parse_args().keep
    dist.init("cpu")
    results = []
    for when, steps in POINTS.items():
        stored = keep / f"{when}.pt" if keep else None
        if stored and stored.is_file():
            scenes = [Scene(**of) for of in torch.load(stored, weights_only=False)]
        else:
            with tempfile.TemporaryDirectory() as folder:
                scenes = take_scenes(steps, Path(folder) / "run")
            if stored:
                keep.mkdir(parents=True, exist_ok=True)
                torch.save([asdict(scene) for scene in scenes], stored)
        for normalize in ("sequence", "sum"):
            rows = []
            for name, figures in measured(scenes, normalize).items():
                rows.append(printed(name, figures))
                about = {"when": when, "normalize": normalize, "method": name}
                results.append(about | figures)
            cut = halves(scenes, normalize)
            show(
                f"{when}: after {steps} steps, loss.normalize={normalize}; {len(scenes)} rollouts; drawing "
                f"prompts is {share_of_prompts(cut):.2f} of a step's variance",
                rows,
            )
            for mark in MARKS:
                rule = fit(cut, mark, FITS["pass rate, prompt"])
                print(f"fitted on all rollouts: {rule}", flush=True)
    print_json("court", results=results)
    dist.close()


if __name__ == "__main__":
    main()
