"""How far is each estimator's mean from the true gradient, and how large is its variance? Exactly.

    python experiments/atlas.py [--method FILE.py]   # tables, and a JSON line with all rows: a minute or two

All groups of a step, and all outcomes of a pruner's draw, are gone through with their probabilities
(enumeration.py, estimators.py). For an estimator g and the gradient grad J of the mean reward over prompts,
or of a distillation (taught_target), a row has

    scale c = <E g, grad J> / |grad J|^2,   bias = |E g - c grad J| / |c grad J|,
    variance = tr Var(g) / |c grad J|^2 of one step.  A bias below EXACT is rounding.

Dimension key: that of enumeration.py.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import enumeration as world
import strangers
import torch
from enumeration import MAX_LEN, SKIPPING, Problem, Steps, all_steps, lengths_of, make_problem, reward_of
from estimators import ADVANTAGES, CONTROLS, PRUNERS, REGIONS, Estimator, all_draws, compare, gradients
from kept_runs import exit_status, parser, table
from torch import Tensor

EXACT, TINY = 1e-12, 1e-9


# ---- estimators of the literature: what multiplies grad logp, [S, N, G] or of each token [S, N, G, L]

def total(x: Tensor) -> Tensor:
    """Sum over the completions of a group."""
    return x.sum(dim=2, keepdim=True)


def others(x: Tensor) -> Tensor:
    """Sum over the other completions of the group."""
    return total(x) - x


def ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Divide, and return 0 for 0/0."""
    return torch.where(bottom > EXACT, top / bottom, 0.0)


def token_baseline(problem: Problem, steps: Steps, over: Callable) -> Tensor:
    """Compute OTB (arXiv:2602.07078): B_t = sum_j r_j W_jt / sum_j W_jt over the completions that reach
    token t, 0 if none does, W_jt = sum_{s <= t} |grad logp_js|^2. With two tokens the proxy of the paper,
    1 - 2p + sum p^2, is twice this square, so B_t is the same.

    over    sums over the group: its own sample included (`total`), or not (`others`)
    """
    square_QKL = problem.score_QKLP.square().sum(dim=3)
    energy_QKL = square_QKL.cumsum(dim=2) * (problem.logp_QKL < 0)
    energy_SNGL = steps.look_up(energy_QKL)
    reward_SNG1 = reward_of(problem, steps)[..., None]
    baseline_SNGL = ratio(over(reward_SNG1 * energy_SNGL), over(energy_SNGL))
    return (reward_SNG1 - baseline_SNGL) / steps.completions


def step_mean(problem: Problem, steps: Steps) -> Tensor:
    """Subtract the mean of all other completions of the step, whatever their prompt."""
    reward_SNG = reward_of(problem, steps)
    others_SNG = reward_SNG.sum(dim=(1, 2), keepdim=True) - reward_SNG
    return (reward_SNG - others_SNG / (steps.completions - 1)) / steps.completions


def survivors(problem: Problem, steps: Steps, baseline: str) -> Tensor:
    """Weigh survivors s_i by 1/p_i: s_i / p_i (r_i - b_i) / (N G). Unbiased if b_i reads the others alone.

    weighed     b_i = sum_{j != i} s_j r_j / p_j / (G - 1)
    normalised  b_i = sum_{j != i} s_j r_j / p_j / sum_{j != i} s_j / p_j, or 0 if no other survives
    with own    the plain mean of the survivors, i among them. Biased.
    """
    reward_SNG = reward_of(problem, steps).nan_to_num()
    there_SNG = steps.there_SNG.double()
    weight_SNG = there_SNG / steps.look_up(world.GO_ON)
    if baseline == "weighed":
        baseline_SNG = others(weight_SNG * reward_SNG) / (problem.size - 1)
    elif baseline == "normalised":
        baseline_SNG = ratio(others(weight_SNG * reward_SNG), others(weight_SNG))
    else:
        baseline_SNG = ratio(total(reward_SNG), total(there_SNG))
    return weight_SNG * (reward_SNG - baseline_SNG) / steps.completions


def plain_survivors(problem: Problem, steps: Steps) -> Tensor:
    """Train on the survivors at weight 1, compared with their mean. Biased."""
    adv_SNG = compare(problem, steps, "centred").nan_to_num()
    count_S11 = steps.there_SNG.sum(dim=(1, 2), keepdim=True)
    return adv_SNG / count_S11.clamp(min=1)


def failures(problem: Problem, steps: Steps) -> Tensor:
    """Count an aborted completion as reward 0 and train on its first token, all that is seen: as ESPO
    (arXiv:2605.29860) with its failure state. Biased."""
    reward_SNG = reward_of(problem, steps).nan_to_num()
    adv_SNG = reward_SNG - others(reward_SNG) / (problem.size - 1)
    seen_SNGL = steps.there_SNG[..., None] | (torch.arange(MAX_LEN) == 0)
    return adv_SNG[..., None] * seen_SNGL / steps.completions


def balanced(problem: Problem, steps: Steps) -> Tensor:
    """Keep as many right completions (reward above 1/2) as wrong ones, the earliest of each, at weight 1 and
    compared with one another: the balance that ARRoL (arXiv:2603.24840) aborts for. Biased."""
    right_SNG = reward_of(problem, steps) > 0.5
    wrong_SNG = ~right_SNG
    least_SN1 = torch.minimum(total(right_SNG), total(wrong_SNG))
    rank_SNG = torch.where(right_SNG, right_SNG.cumsum(dim=2), wrong_SNG.cumsum(dim=2))
    kept = steps._replace(there_SNG=rank_SNG <= least_SN1)
    return plain_survivors(problem, kept)


def mean_by_prompt(problem: Problem, steps: Steps) -> Tensor:
    """Take the mean over the n_q completions of each prompt, and then over prompts."""
    adv_SNG = compare(problem, steps, "leave_one_out").nan_to_num()
    N = adv_SNG.shape[1]
    return adv_SNG / total(steps.there_SNG) / N


LITERATURE = {  # name -> what multiplies grad logp, and the rule for prompts
    "OTB, own sample in its baseline": (partial(token_baseline, over=total), "all"),
    "OTB, leave-one-out": (partial(token_baseline, over=others), "all"),
    "mean of all others of the step": (step_mean, "all"),
    "survivors 1/p, others weighed 1/p": (partial(survivors, baseline="weighed"), "aborted"),
    "survivors 1/p, others weighed and normalised": (partial(survivors, baseline="normalised"), "aborted"),
    "survivors 1/p, plain mean with the own reward": (partial(survivors, baseline="with own"), "aborted"),
    "survivors at weight 1": (plain_survivors, "aborted"),
    "aborted at random, reward 0": (failures, "aborted"),
    "aborted by a threshold, reward 0 (ESPO)": (failures, "threshold"),
    "balance of right and wrong (ARRoL)": (balanced, "balance"),
    "2 and 4, mean over each prompt's": (mean_by_prompt, "ragged"),
}


# ---- distillation: the target is the mean of (log teacher - log student) grad logp, at all states

def gap(problem: Problem) -> Tensor:
    """Compute log teacher - log student of every token, [Q, K, L]; 0 behind the end."""
    taught_QKL, _ = world.policy(world.TREES["unequal"], world.THETA + world.TEACHER + world.OWN)
    return taught_QKL - problem.logp_QKL


def taught_target(problem: Problem) -> Tensor:
    """Compute the mean over rollouts and prompts of all tokens' gap times grad logp, [P]."""
    chance_QK1 = problem.logp_QKL.sum(dim=2).exp()[..., None]
    pull_QKL = chance_QK1 * gap(problem) / len(chance_QK1)
    return torch.einsum("qkl,qklp->p", pull_QKL, problem.score_QKLP)


def state_kl(problem: Problem) -> Tensor:
    """Compute KL(student, teacher) of the state before each token, which is one of two."""
    p_QKL, q_QKL = problem.logp_QKL.exp(), (problem.logp_QKL + gap(problem)).exp()
    other_QKL = ((1 - p_QKL) * ((1 - p_QKL) / (1 - q_QKL)).log()).nan_to_num()
    return p_QKL * -gap(problem) + other_QKL


def kept_tokens(problem: Problem, rule: str) -> Tensor:
    """Mark the tokens that a rule trains on, [Q, K, L], in forms as simple as they can be.

    prefix   the first of each completion
    drift    up to the first token that the teacher finds improbable: Prune-OPD (arXiv:2605.07804), inferred
    entropy  those of a student that is less sure than the median: TIP (arXiv:2604.14084)
    """
    p_QKL = problem.logp_QKL.exp()
    if rule == "prefix":
        return (torch.arange(MAX_LEN) == 0).expand_as(p_QKL)
    if rule == "drift":
        drifted_QKL = ((problem.logp_QKL + gap(problem)) < math.log(0.3)).cumsum(dim=2)
        return drifted_QKL.roll(1, dims=2).index_fill(2, torch.tensor(0), 0) == 0
    unsure_QKL = -(p_QKL - 0.5).abs()
    return unsure_QKL >= unsure_QKL[problem.logp_QKL < 0].median() - EXACT  # p and 1 - p are as unsure


def taught(problem: Problem, steps: Steps, rule: str = "") -> Tensor:
    """Multiply grad logp by the teacher's advantages, [S, N, G, L]."""
    adv_QKL = gap(problem) + state_kl(problem) * (rule == "baseline")
    if rule in ("prefix", "drift", "entropy"):
        adv_QKL = adv_QKL * kept_tokens(problem, rule)
    both_QK = world.READ * world.TRAINED
    chance_QK = {"both": both_QK, "second": world.TRAINED}.get(rule, torch.ones_like(both_QK))
    weight_SNG = steps.there_SNG / steps.look_up(chance_QK)
    return weight_SNG[..., None] * steps.look_up(adv_QKL) / steps.completions


LITERATURE |= {
    "all tokens": (taught, "taught"),
    "less the state's KL (vOPD)": (partial(taught, rule="baseline"), "taught"),
    "drawn twice, weighed by both chances": (partial(taught, rule="both"), "drawn"),
    "drawn twice, weighed by the second": (partial(taught, rule="second"), "drawn"),
    "the first token (a prefix)": (partial(taught, rule="prefix"), "taught"),
    "up to a drift (Prune-OPD)": (partial(taught, rule="drift"), "taught"),
    "tokens of high entropy (TIP)": (partial(taught, rule="entropy"), "taught"),
}


# ---- methods of 2026, in forms as simple as they can be

def recent(problem: Problem, steps: Steps, rule: str) -> Tensor:
    """Multiply grad logp as advantages of 2026 do, [S, N, G].

    median     MC-GRPO (arXiv:2601.22582): z-scores around the median. Inferred: the deviation is GRPO's
    mean       MaxRL (2602.02710): (r - mean) / mean, which is for log J of each prompt
    soft mean  OAPL (2602.19362) where the policy is the old one: r - beta log mean exp(r / beta), beta 1/2
    target     TPO (2604.06159): q - p within the group, q ~ p exp(z). Inferred: p is the group's share of pi
    posterior  AERO (2602.14338): r less the mean with one right and one wrong added. Inferred
    history    HA-DW (2601.08521): z exp(-sign(z) (mean - 1/2)). Inferred: lambda 1, a constant anchor
    pilot      Pilot-Commit (2605.26606): a third only behind two that differ. Inferred from the abstract
    """
    reward_SNG, size = reward_of(problem, steps), problem.size
    mean_SN1 = total(reward_SNG) / size
    z_SNG = (reward_SNG - mean_SN1) / (reward_SNG.std(dim=2, keepdim=True) + 1e-4)
    if rule == "pilot":
        differ_SN1 = (reward_SNG[..., :1] != reward_SNG[..., 1:2])
        there = steps._replace(there_SNG=differ_SN1 | (torch.arange(size) < 2))
        adv_SNG = compare(problem, there, "leave_one_out").nan_to_num() * size / total(there.there_SNG)
    elif rule == "target":
        logp_SNG = steps.look_up(problem.logp_QKL.sum(dim=2))
        adv_SNG = size * ((logp_SNG + z_SNG).softmax(dim=2) - logp_SNG.softmax(dim=2))
    else:
        middle_SNG = reward_SNG.median(dim=2, keepdim=True).values
        adv_SNG = {"median": (reward_SNG - middle_SNG) / (reward_SNG.std(dim=2, keepdim=True) + 1e-4),
                   "mean": ratio(reward_SNG - mean_SN1, mean_SN1),
                   "soft mean": reward_SNG - 0.5 * (total((2 * reward_SNG).exp()) / size).log(),
                   "posterior": reward_SNG - (total(reward_SNG) + 1) / (size + 2),
                   "history": z_SNG * (-z_SNG.sign() * (mean_SN1 - 0.5)).exp()}[rule]
    return adv_SNG / steps.completions


LITERATURE |= {name: (partial(recent, rule=rule), "recent") for name, rule in (
    ("MC-GRPO", "median"), ("MaxRL", "mean"), ("OAPL", "soft mean"), ("TPO", "target"), ("AERO", "posterior"),
    ("HA-DW", "history"), ("Pilot-Commit", "pilot"))}


# ---- two turns: the policy's token, an environment's reply, and the policy's token behind it

def turns(problem: Problem, steps: Steps, rule: str = "") -> Tensor:
    """Multiply grad logp of each token, [S, N, G, L]. The reply is the second; one of two was truncated."""
    def compared(rewards_QK: Tensor) -> Tensor:
        reward_SNG = steps.look_up(rewards_QK)
        return reward_SNG - others(reward_SNG) / (problem.size - 1)

    first_QK, second_QK = problem.component_CQK / 2
    adv_SNG1, count = compared(first_QK + second_QK)[..., None], steps.completions
    if rule == "dropped":  # compared with all, and in no denominator
        whole_SNG = lengths_of(problem, steps) == 3
        adv_SNG1 = adv_SNG1 * whole_SNG[..., None]
        count = whole_SNG.sum(dim=(1, 2)).clamp(min=1)[:, None, None, None]
    by_turn = {"own": first_QK, "to go": first_QK + second_QK}.get(rule)
    if by_turn is not None:
        adv_SNG1 = torch.stack([compared(by_turn), *[compared(second_QK)] * 2], dim=3)
    replied_L = torch.arange(MAX_LEN) == 1
    return adv_SNG1 * (torch.ones(MAX_LEN) if rule == "replies" else ~replied_L) / count


LITERATURE |= {
    "the outcome, replies masked": (turns, "turns"),
    "the outcome, replies trained on": (partial(turns, rule="replies"), "turns"),
    "each turn by the rewards from it on": (partial(turns, rule="to go"), "turns"),
    "each turn by its own reward": (partial(turns, rule="own"), "turns"),
    "truncated ones dropped, prune.truncated": (partial(turns, rule="dropped"), "turns"),
}


# ---- rows

class Row(NamedTuple):
    """A line of a table, or a cell of a table that has columns."""

    name: str
    chosen: Estimator | str = Estimator()  # or a name of LITERATURE
    column: str = ""
    problem: str = "main"


PROBLEMS = {
    "main": {"size": 3, "lengths": "unequal"},
    "one prompt, 0/1, equal lengths": {"lengths": "equal", "prompts": (1,), "size": 4},
    "one prompt, 0/1": {"prompts": (1,), "size": 4},
    "one prompt, graded, equal lengths": {"lengths": "equal", "prompts": (0,), "size": 4},
    "two prompts, 0/1, equal lengths": {"lengths": "equal", "graded": False, "size": 4},
    "two turns": {"lengths": "turns", "size": 2}, "two prompts, 0/1": {"graded": False},
}


@cache
def problem_of(name: str) -> Problem:
    first = next(other for other in PROBLEMS if PROBLEMS[other] == PROBLEMS[name])  # one has its steps
    return make_problem(**PROBLEMS[name]) if first == name else problem_of(first)


def summary(target_P: Tensor, chance_R: Tensor, gradient_RP: Tensor) -> dict[str, float]:
    """Compute scale, bias and variance."""
    mean_P = chance_R @ gradient_RP
    scale = mean_P @ target_P / target_P.square().sum()
    size = scale.abs() * target_P.norm()
    spread_R = (gradient_RP - mean_P).square().sum(dim=1)
    figures = {"scale": scale, "bias": (mean_P - scale * target_P).norm() / size,
               "variance": chance_R @ spread_R / size.square()}
    return {name: figure.item() for name, figure in figures.items()}


def outcomes(row: Row) -> tuple[Steps, Tensor, Tensor, Tensor]:
    """Go through all steps of a row: with each its gradient [R, P], its advantages or factors [R, N, G], and
    which of its completions are trained on."""
    problem = problem_of(row.problem)
    if isinstance(row.chosen, str):
        estimate, prompts = LITERATURE[row.chosen]
        steps = all_steps(problem, "on-policy", prompts)
        factor = estimate(problem, steps)
        if factor.dim() == 3:
            gradient_RP = torch.einsum("sng,sngp->sp", factor, steps.look_up(problem.full_QKP))
            return steps, gradient_RP, factor, factor != 0
        gradient_RP = torch.einsum("sngl,snglp->sp", factor, steps.look_up(problem.score_QKLP))
        told_RNG = factor.abs().amax(dim=3)
        return steps, gradient_RP, told_RNG, told_RNG != 0
    drawn = all_draws(problem, row.chosen)
    trained_RNG = drawn.keep_RNG & (drawn.adv_RNG != 0)
    return drawn.steps, gradients(problem, drawn, row.chosen), drawn.adv_RNG, trained_RNG


@cache
def measure(row: Row) -> dict[str, float]:
    """Compute a row's figures."""
    problem = problem_of(row.problem)
    taught = isinstance(row.chosen, str) and LITERATURE[row.chosen][1] in DISTILLED
    steps, gradient_RP, _, trained_RNG = outcomes(row)
    target_P = taught_target(problem) if taught else problem.target()
    trained = steps.chance_S @ trained_RNG.double().sum(dim=(1, 2))
    return summary(target_P, steps.chance_S, gradient_RP) | {"trained": trained.item()}


def each(field: str, names: Any) -> list[Row]:
    """Make a row for each value of one choice."""
    return [Row(name, Estimator(**{field: name})) for name in names]


def crossed(rows: list[Row], field: str, values: Any) -> list[Row]:
    """Put each row into several columns, by another choice."""
    return [Row(row.name, row.chosen._replace(**{field: value}), value) for row in rows for value in values]


def of_literature(*rules: str, problem: str = "main") -> list[Row]:
    return [Row(name, name, problem=problem) for name, (_, prompts) in LITERATURE.items() if prompts in rules]


DISTILLED = ("taught", "drawn")
FORMS = ("token", "sequence", "sum")
KEPT = {"denominator": "kept"}
CASES = [
    Row("leave_one_out"), Row("group_norm: z-scores", Estimator("group_norm")),
    Row("topk: 2 of 4, over the kept", Estimator(completions="topk", **KEPT)),
    Row("refill by other prompts", Estimator(prompts="refill")),
    Row("refill by the same prompt", Estimator(prompts="same refill")),
    Row("leave_one_out, normalize: sequence", Estimator(normalize="sequence")),
    Row("group_norm, normalize: sequence", Estimator("group_norm", "sequence")),
]
OVER_KEPT = ("topk", "bernoulli", "pps", "pods", "variance")
GSPO = Row("clip_sequence, normalize: sequence", Estimator(trust="clip_sequence", normalize="sequence"))
TABLES = {
    "Advantages": crossed(each("advantage", ADVANTAGES), "normalize", (*FORMS, "constant")),
    "One prompt": [Row(row.name, row.chosen, name, name) for row in CASES for name in list(PROBLEMS)[1:5]],
    "Pruned completions": [
        *each("completions", PRUNERS),
        *(Row(f"{name}, over the kept", Estimator(completions=name, **KEPT)) for name in OVER_KEPT),
    ],
    "Prompts": [
        *each("prompts", ("all", *SKIPPING)),
        Row("refill by other prompts", Estimator(prompts="refill")),
        Row("refill by other prompts, normalize: token", Estimator(prompts="refill", normalize="token")),
        Row("refill by the same prompt", Estimator(prompts="same refill")),
    ],
    "Trust regions": crossed([*each("trust", (*REGIONS, *CONTROLS)), GSPO], "behind", ("near", "far")),
    "Baselines": [
        *each("advantage", ("reward", "soft_value", "leave_one_out", "shrinkage")), *of_literature("all"),
    ],
    "Aborted rollouts": [Row("none aborted"), *of_literature("aborted", "threshold", "balance")],
    "Distillation": of_literature(*DISTILLED),
    "Methods of 2026": [
        *of_literature("recent"), Row("Cost-Aware Learning", Estimator(completions="pps by cost")),
        *(Row(name, Estimator(trust=name, behind="near")) for name in ("CTPO", "CPPO of prefixes", "SAO")),
    ],
    "Two turns": of_literature("turns", problem="two turns"),
    "Allocation": [
        Row("3 and 3"), *of_literature("ragged"),
        Row("2 and 4, mean over all", Estimator(prompts="ragged")),
    ],
}


def grid() -> list[Row]:
    """List all combinations that make sense; `constant` is `sum` over MAX_LEN, so it is left out."""
    chosen = set()
    counts = ("all", "kept")
    for kind, normalize in itertools.product(ADVANTAGES, FORMS):
        for name, count in itertools.product(PRUNERS, counts):
            chosen.add(Estimator(kind, normalize, count, completions=name))
        errors = kind in ("decoupled", "shrinkage") or normalize == "token"  # with skipped prompts
        for name in ("refill", "same refill", "ragged", *(() if errors else SKIPPING)):
            chosen.add(Estimator(kind, normalize, prompts=name))
    for behind, normalize in itertools.product(("near", "far"), FORMS):
        for kind in ("reward", "leave_one_out", "group_norm"):
            for trust in (*REGIONS, *CONTROLS):
                chosen.add(Estimator(kind, normalize, trust=trust, behind=behind))
        for trust, count, name in itertools.product(("clip", "ratio of the completion"), counts, PRUNERS):
            chosen.add(Estimator("leave_one_out", normalize, count, trust, name, behind=behind))
    return [Row("", estimator) for estimator in sorted(chosen)]


# ---- tables

def table_of(rows: list[Row]) -> list[str]:
    """Write a table; one with columns has the bias in each, and the variance in brackets."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        figures = measure(row)
        bias = "exact" if figures["bias"] < EXACT else f"{figures['bias']:.3f}"
        bias = bias if figures["scale"] > 0 else f"turned around, {bias}"
        bias = "no gradient" if math.isnan(figures["bias"]) else bias
        variance = f"{figures['variance']:.2f}"
        whole = [f"{figures['scale']:.2f}", bias, variance, f"{figures['trained']:.1f}"]
        lines.setdefault(row.name, []).extend([f"{bias} ({variance})"] if row.column else whole)
    columns = dict.fromkeys(row.column for row in rows if row.column)
    head = columns or ["scale", "bias", "variance", "trained"]
    return table(["", *head], [[name, *cells] for name, cells in lines.items()])


def tables() -> dict[str, list[str]]:
    """Compute all tables, by title."""
    return {title: table_of(rows) for title, rows in TABLES.items()}


def all_rows() -> list[dict[str, Any]]:
    """Compute every row once, those of the page first."""
    by_choices = {(row.problem, row.chosen): row for row in (*itertools.chain(*TABLES.values()), *grid())}
    return [{"problem": row.problem, **({"literature": row.chosen} if isinstance(row.chosen, str)
             else row.chosen._asdict()), **measure(row)} for row in by_choices.values()]


# ---- a method of somebody's own, and the smallest world in which one is biased

WORLDS = {f"{name}, groups of {size}": {"size": size, "lengths": lengths} | more
          for name, lengths, more, sizes in (
    ("one prompt, one token, rewards 0/1", "one", {"rewards": [[0, 1]]}, (2, 3)),
    ("one prompt, one or two tokens, rewards 0/1", "short", {"rewards": [[0, 1, 0]]}, (2, 3)),
    ("one prompt, one or two tokens, graded rewards", "short", {"rewards": [[0, 1, 0.5]]}, (2, 3)),
    ("two prompts, one or two tokens, rewards 0/1", "short", {"rewards": [[0, 1, 0], [1, 0, 0]]}, (2,)),
    ("two prompts, one to three tokens, graded rewards", "unequal", {}, (2, 3)),
) for size in sizes}
PROBLEMS |= WORLDS


def short(number: float) -> str:
    """Write a fraction if it is one, or else a decimal."""
    fraction = Fraction(number).limit_denominator(512)
    return str(fraction) if abs(fraction - number) < TINY else f"{number:.4f}"


def vector(x_P: Tensor) -> str:
    return f"({', '.join(map(short, x_P.tolist()))})"


def counterexample(row: Row) -> list[str]:
    """Tell the smallest world in which the mean points off the true gradient, with all sums."""
    worlds = [name for name in WORLDS if "0/1" in name or row.problem == "main"]
    for name in worlds:
        placed = row._replace(problem=name)
        figures = measure(placed)
        if not (figures["bias"] < TINY and figures["scale"] > 0):
            told = "The mean is {scale:.4f} times the true gradient, and {bias:.4f} of that off."
            told = told if figures["scale"] else "The mean is 0."
            return [f"Biased in a world of {name}:", "", *by_hand(placed), "", told.format(**figures)]
    return [f"Exact in all {len(worlds)} worlds tried, from one token to {name}."]


def by_hand(row: Row) -> list[str]:
    """Write down the completions of a world, and its steps, alike ones together."""
    problem, (steps, gradient_RP, told_RNG, trained_RNG) = problem_of(row.problem), outcomes(row)
    sampled_QKL = problem.sampled["on-policy" if isinstance(row.chosen, str) else row.chosen.behind]
    sums: dict[tuple[str, str], float] = {}
    fields = (steps.id_SNG, told_RNG, trained_RNG, steps.chance_S)
    for *step, chance, gradient_P in zip(*(x.tolist() for x in fields), gradient_RP, strict=True):
        groups = [sorted(f"{problem.names[k]}:{short(told) if trained else '-'}"
                  for k, told, trained in zip(*group, strict=True)) for group in zip(*step, strict=True)]
        if gradient_P.abs().max() > TINY:
            key = ", ".join(map(" ".join, groups)), vector(gradient_P)
            sums[key] = sums.get(key, 0.0) + chance
    body = []
    for q, k in itertools.product(*map(range, problem.reward_QK.shape)):
        chances = (short(logp_QKL[q, k].sum().exp().item()) for logp_QKL in (problem.logp_QKL, sampled_QKL))
        reward, score = short(problem.reward_QK[q, k].item()), vector(problem.full_QKP[q, k])
        body.append([f"{q + 1}: {problem.names[k]}", *chances, reward, score])
    lines = [[text, short(chance), gradient] for (text, gradient), chance in sums.items()]
    return [*table(["prompt: completion", "chance", "... when sampled", "reward", "grad logp"], body), "",
            f"True gradient, sum of chance x reward x grad logp by prompts: {vector(problem.target())}", "",
            *table(["completion:advantage, or - if not trained on", "chance", "gradient"], lines), "",
            f"Mean, the sum of chance x gradient: {vector(steps.chance_S @ gradient_RP)}"]


def try_own(name: str, recipe: str | None, settings: list[str]) -> None:
    """Print a method's figures beside the entries of its kind, and its counterexample."""
    known = {row.name: row for row in TABLES["Methods of 2026"]}
    if name in known:
        rows, mine = TABLES["Methods of 2026"], known[name]
    else:
        chosen, field = strangers.take(name, recipe, settings)
        chosen = chosen._replace(behind="near" if field == "trust" else "on-policy")
        names = {"advantage": ADVANTAGES, "completions": PRUNERS, "trust": REGIONS | CONTROLS,
                 "prompts": {"all": None} | SKIPPING, "weigh": ("none",)}[field]
        rows, stem = [], Path(name).stem
        # A row has no completion of advantage 0, which a `weigh` may miss where rewards are graded.
        problem = "two prompts, 0/1" if field == "weigh" else "main"
        if field == "weigh":
            rows = of_literature("all", problem=problem)
        mine = Row(f"my {stem}" if stem in {*names} - {strangers.MINE} else stem, chosen, problem=problem)
        rows += [*(mine._replace(name=key, chosen=chosen._replace(**{field: key}))
                   for key in names if key != strangers.MINE), mine]
    told = counterexample(mine)  # first: the small worlds show whether a pruner draws
    choices = mine.chosen if isinstance(mine.chosen, str) else ", ".join(
        f"{field}: {value}" for field, value in mine.chosen._asdict().items())
    print(*table_of(rows), "", f"{choices} (docs/atlas.md explains the columns)", "", *told, sep="\n")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--method", help="a Python file, one of court/, or a row of Methods of 2026")
    options.add_argument("--config", help="of --method: a yaml file, or the name of one in configs/")
    options.add_argument("--set", action="append", default=[], help="of --method: change one setting")
    args = options.parse_args()
    if (args.config or args.set) and args.method in {None, *(row.name for row in TABLES["Methods of 2026"])}:
        options.error("--config and --set are of a file given by --method")
    if args.method:
        sys.exit(exit_status(lambda: try_own(args.method, args.config, args.set), lambda: "nothing is kept"))
    for title, lines in tables().items():
        print("\n".join([f"\n{title}\n", *lines]), flush=True)
    print(json.dumps({"experiment": "atlas", "rows": all_rows()}))
