"""Compute the exact bias and variance of corrections for completions whose tokens three policies drew.

    python assets/draw_asynchrony.py   # the table of docs/asynchrony.md, and its two pictures: a minute

A step has a pair of completions of one prompt. The policies that drew a completion's thirds are three, two
and one step behind the current one, or, as half of the pairs began a step later, two, one and one. The policy
before the update is one step behind: this is the update's last mini-batch. A token's logit depends on the
token before it, and places share the three logits.

Dimension key:  as in experiments/enumeration.py, and J completions to pair with,  D policies,  C tokens of
all completions, end to end.
"""

import itertools
import sys
from pathlib import Path
from statistics import mean, median

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "experiments")]

import torch  # noqa: E402
from enumeration import numbers, policy  # noqa: E402
from estimators import completion_ratio, ratio_so_far  # noqa: E402
from kept_runs import table  # noqa: E402
from matplotlib import rc_context  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from torch import Tensor  # noqa: E402

from advantage import leave_one_out  # noqa: E402
from loss import TRUST, engine_weight  # noqa: E402
from records import LogProbs  # noqa: E402
from settings import kinds  # noqa: E402

RATE = "update.rate_by_ess: true (VCPO)"
WHOLE = "whole completion, each token's own policy"


def chain(length: int) -> dict[str, list[tuple[int, int]]]:
    """List all completions of this length: their tokens' prefixes (0: the start, 1 or 2: behind b or a)."""
    words = itertools.product((0, 1), repeat=length)
    return {"".join("ba"[c] for c in word): [*zip((0, *(1 + c for c in word)), word, strict=False)]
            for word in words}


def corrections(now_C: Tensor, before_C: Tensor, drew_C: Tensor, mixed_C: Tensor, adv_C: Tensor,
                segment_C: Tensor) -> dict[str, Tensor]:
    """Compute what multiplies A grad logp of each token, [C], by the functions that train if there is one."""
    update, engine = (LogProbs(now_C, old_C, adv_C, segment_C) for old_C in (before_C, drew_C))
    clipped_C, own_C = TRUST["clip"](update, kinds.Clip()), TRUST["clip"](engine, kinds.Clip())
    ratio_C, whole_C = (now_C - drew_C).exp(), completion_ratio(engine)
    return {
        "no correction": torch.ones_like(now_C),
        "token ratio": ratio_C,
        "token ratio, at most 2 (TIS)": engine_weight(now_C, drew_C, segment_C, 2.0, None),
        "IPO: token ratio, or 0 at a distance": TRUST["total_variation"](
            engine, kinds.TotalVariation(divergence=0.3, sides="both", cap=1e4)),
        "GSPO: geometric mean of the ratios": TRUST["clip_sequence"](
            engine, kinds.ClipSequence(low=0.2, high=0.2)),
        "tokens so far": ratio_so_far(engine),
        WHOLE: whole_C,
        "whole completion, at most 2": whole_C.clamp(max=2),
        "whole completion, mixed policies (balance heuristic)": mixed_C,
        "no setting: clip": clipped_C,
        RATE: clipped_C,
        "loss.tis_cap: 2 (decoupled, AReaL)": clipped_C * engine_weight(
            before_C, drew_C, segment_C, 2.0, None),
        "loss.mask_ratio: 1.2": clipped_C * engine_weight(before_C, drew_C, segment_C, None, 1.2),
        "loss.old_logp: engine": own_C,
        "loss.old_logp: engine, tis_cap: 2": own_C.clamp(max=2),
    }


def drawn_by(step_QKL: Tensor, at_DQKL: Tensor) -> Tensor:
    """Look up each token's log-prob under the policy so many steps behind, [Q, K, L]."""
    return at_DQKL.take_along_dim(step_QKL.expand(at_DQKL.shape[1:])[None], dim=0)[0]


def figures(tree: dict, logit_QP: Tensor, reward_QK: Tensor, away_P: Tensor) -> dict[str, list[float]]:
    """Compute scale, bias and variance of each correction, as the atlas has them, and how far a token's
    log-prob is off in the mean, in nats. The policy three steps behind is `away_P` off."""
    at = [policy(tree, logit_QP + step / 3 * away_P) for step in range(4)]
    score_QKLP, at_DQKL = at[0][1], torch.stack([logp for logp, _ in at])
    now_QKL, there_QKL = at_DQKL[0], at_DQKL[0] < 0
    Q, K, L = now_QKL.shape
    third_KL = 3 * torch.arange(L) // there_QKL[0].sum(dim=1, keepdim=True)
    drew_JQKL = torch.stack([drawn_by((3 - late - third_KL).clamp(min=1), at_DQKL) for late in (0, 1)])
    chance_QK, chance_JQK = now_QKL.sum(dim=2).exp(), drew_JQKL.sum(dim=3).exp()
    segment_C = torch.arange(Q * K).view(Q, K, 1).expand(Q, K, L)[there_QKL]
    mixed_C = (chance_QK / chance_JQK.mean(dim=0)).flatten()[segment_C]
    pair_QKJ2 = torch.stack(torch.broadcast_tensors(reward_QK[:, :, None], reward_QK[:, None]), dim=3)
    adv_QKJ1 = leave_one_out(pair_QKJ2.flatten(end_dim=2)).view_as(pair_QKJ2)[..., :1]
    sums = {}
    for drew_QKL, drew_QK in zip(drew_JQKL, chance_JQK, strict=True):
        up, down = (corrections(now_QKL[there_QKL], at_DQKL[1][there_QKL], drew_QKL[there_QKL], mixed_C,
                                torch.full_like(mixed_C, sign), segment_C) for sign in (1, -1))
        ratio_QK = chance_QK / drew_QK
        share_QKJ = (ratio_QK[:, :, None] + ratio_QK[:, None]).square() / 2 / (
            ratio_QK.square()[:, :, None] + ratio_QK.square()[:, None])
        chance_QKJ = drew_QK[:, :, None] * drew_QK[:, None] / Q / len(drew_JQKL)
        for name in up:
            f_2QKL = torch.stack([torch.zeros_like(now_QKL).masked_scatter(there_QKL, f[name])
                                  for f in (up, down)])
            up_QKP, down_QKP = torch.einsum("vqkl,qklp->vqkp", f_2QKL, score_QKLP)
            better_QKJP = up_QKP[:, :, None] - down_QKP[:, None]
            worse_QKJP = down_QKP[:, :, None] - up_QKP[:, None]
            gradient_QKJP = adv_QKJ1 / 2 * torch.where(adv_QKJ1 > 0, better_QKJP, worse_QKJP)
            if name == RATE:
                gradient_QKJP = gradient_QKJP * share_QKJ.sqrt()[..., None]
            moments = (torch.einsum("qkj,qkjp->p", chance_QKJ, gradient_QKJP),
                       (chance_QKJ[..., None] * gradient_QKJP.square()).sum())
            sums[name] = [x + y for x, y in zip(sums.get(name, (0, 0)), moments, strict=True)]
    target_P = torch.einsum("qk,qklp->p", chance_QK * reward_QK, score_QKLP) / Q
    off_QK = (now_QKL - drew_JQKL).abs().sum(dim=3) / there_QKL.sum(dim=2)
    nats = (chance_JQK * off_QK).sum().item() / Q / len(drew_JQKL)
    return {name: [*tell(mean_P, second, target_P), nats] for name, (mean_P, second) in sums.items()}


def tell(mean_P: Tensor, second: Tensor, target_P: Tensor) -> list[float]:
    scale = mean_P @ target_P / target_P.square().sum()
    off_P, size = mean_P - scale * target_P, scale.abs() * target_P.norm()
    variance = (second - mean_P.square().sum()) / size.square()
    return torch.stack([scale, off_P.norm() / size, variance]).tolist()


def world(seed: int, length: int) -> tuple[dict, Tensor, Tensor, Tensor]:
    """Draw a world of two prompts: tree, logits, rewards (1 on one side of a plane through all sequences),
    and the direction to the old policies."""
    generator = torch.Generator().manual_seed(seed)
    tree = chain(length)
    logit_QP, away_P = (torch.randn(shape, generator=generator, dtype=torch.float64)
                        for shape in ((2, 3), (3,)))
    word_KL = numbers([[token for _, token in path] for path in tree.values()]) - 0.5
    side_QK = torch.randn((2, length), generator=generator, dtype=torch.float64) @ word_KL.T
    return tree, logit_QP, (side_QK > 0).double(), away_P / away_P.norm()


def survey(length: int, distance: float, worlds: int) -> dict[str, list[list[float]]]:
    """Compute the figures of so many worlds; the variance is over that of fresh samples."""
    told: dict[str, list] = {}
    for seed in range(worlds):
        tree, logit_QP, reward_QK, away_P = world(seed, length)
        fresh = figures(tree, logit_QP, reward_QK, 0 * away_P)["no correction"][2]
        there = figures(tree, logit_QP, reward_QK, distance * away_P)
        for name, (scale, bias, variance, nats) in there.items():
            told.setdefault(name, []).append([scale, bias, variance / fresh, nats])
    return told


def middle(told: list[list[float]], column: int) -> float:
    return median(row[column] for row in told)


SHOWN = {"no correction": "#888888", "token ratio": "#d95f02", "tokens so far": "#1b9e77",
         "loss.old_logp: engine": "#7570b3", WHOLE: "#000000"}
WORLDS, DISTANCES, LENGTHS = 60, (0.125, 0.25, 0.5, 1.0, 2.0), (1, 2, 3, 4, 5, 6)


def bias_table(surveys: dict[float, dict]) -> list[str]:
    """Tabulate each correction at a small and a large distance."""
    rows = []
    for name in surveys[0.25]:
        cells = []
        for told in (surveys[0.25], surveys[1.0]):
            none = told["no correction"]
            more = mean(mine[1] > its[1] + 1e-9 for mine, its in zip(told[name], none, strict=True))
            bias = middle(told[name], 1)
            cells += ["exact" if bias < 1e-12 else f"{bias:.3f}", f"{more:.0%}"]
            cells.append(f"{middle(told[name], 2):.2f}")
        rows.append([name, *cells])
    head = []
    for distance in (0.25, 1.0):
        nats = middle(surveys[distance]["token ratio"], 3)
        head += [f"bias at {nats:.2f} nats", "above none's", "variance"]
    return table(["", *head], rows)


def draw(name: str, across: list[float], lines: dict[str, list[float]], labels: tuple[str, str]) -> None:
    """Write a picture of lines over one another."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(figsize=(7.5, 3), layout="constrained")
        axes = figure.subplots()
        for key, values in sorted(lines.items(), key=lambda line: -line[1][-1]):
            axes.plot(across, values, label=key, color=SHOWN[key], marker=".")
        axes.set(xlabel=labels[0], ylabel=labels[1], ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(Path(__file__).with_name(name), metadata={"Date": None})


def main() -> None:
    surveys = {distance: survey(3, distance, WORLDS) for distance in DISTANCES}
    nats = [middle(told["token ratio"], 3) for told in surveys.values()]
    print(*bias_table(surveys), "", sep="\n")
    draw("asynchrony_bias.svg", nats,
         {name: [middle(told[name], 1) for told in surveys.values()] for name in SHOWN},
         ("distance: mean |log ratio| of a token, nats", "bias"))
    by_length = {length: survey(length, 2.0, WORLDS // 3) for length in LENGTHS}
    draw("asynchrony_variance.svg", [*LENGTHS],
         {name: [middle(told[name], 2) for told in by_length.values()] for name in SHOWN},
         ("tokens of a completion", "variance, over that of fresh samples"))
    for name in SHOWN:
        print(f"{name}: bias by length", *(f"{middle(told[name], 1):.3f}" for told in by_length.values()))


if __name__ == "__main__":
    main()
