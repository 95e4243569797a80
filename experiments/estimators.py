"""The estimators of the repository on all steps of enumeration.py, in all outcomes of a pruner's draw.

Advantages, pruners, trust regions and token weights are the functions that train.

Dimension key:  as in enumeration.py, and R steps with every outcome of a draw,  U distinct steps,
M completions to draw from,  C tokens of completions, end to end.
"""

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from court.ctpo import Cumulative, cumulative
from enumeration import MAX_LEN, Problem, Steps, all_steps, lengths_of, reward_of
from torch import Tensor

import prune
from advantage import advantage
from config import ConfigError
from leaves.soft_value.join import soft_value
from leaves.soft_value.settings import SoftValue
from loss import TRUST, engine_weight, segment_sum, token_weight
from pack import Minibatch, Plan, build_row
from records import Group, LogProbs, Prompt, Pruned, Rewards, Sample
from settings import kinds


class Estimator(NamedTuple):
    """Choices that make an estimator; the names are keys of the tables below."""

    advantage: str = "leave_one_out"
    normalize: str = "sum"
    denominator: str = "all"
    trust: str = "none"
    completions: str = "none"
    prompts: str = "all"   # a rule of all_steps
    behind: str = "on-policy"
    weigh: str = "none"


ADVANTAGES = {
    "reward": None, "soft_value": SoftValue(), "leave_one_out": kinds.LeaveOneOut(),
    "shrinkage": kinds.Shrinkage(), "centred": kinds.Centred(), "group_norm": kinds.GroupNorm(),
    "group_norm, correction 0": kinds.GroupNorm(correction=0),
    "decoupled": kinds.Decoupled(),
}
PRUNERS = {
    "none": kinds.KeepAll(), "topk": kinds.TopK(keep=2),
    "topk of the step": kinds.TopK(keep=2, scope="batch"), "bottom": kinds.Bottom(drop_prob=0.7),
    "bernoulli": kinds.Bernoulli(drop_prob=0.5), "pps": kinds.Pps(keep=2, size="adv"),
    "pps of the step": kinds.Pps(keep=2, scope="batch", size="adv"),
    "pps of the step by surprise": kinds.Pps(keep=2, scope="batch"),
    "pps by cost": kinds.Pps(keep=2, scope="batch", by_cost=True, size="adv"),  # Cost-Aware, arXiv:2604.28020
    "pods": kinds.Pods(keep=2),
    "pods, compared with all": kinds.Pods(keep=2, compare="all"), "variance": kinds.VarianceShare(share=0.7),
}
REGIONS = {
    "none": kinds.NoBound(), "clip": kinds.Clip(), "clip, high 0.28": kinds.Clip(high=0.28),
    "clip_sequence": kinds.ClipSequence(low=3e-4, high=4e-4), "clamp": kinds.Clamp(low=1, high=0.2),
    "total_variation": kinds.TotalVariation(divergence=0.15),
    "total_variation, both sides": kinds.TotalVariation(divergence=0.3, sides="both", cap=1e4),
    "binary_kl": kinds.BinaryKl(divergence=0.05),
}
WEIGHING: dict[str, Any] = {"none": None}  # a stranger's function, given a row, its log-probs and entropies


# ---- what the trust regions are compared with: f, as loss.TRUST returns it

def log_ratio(logps: LogProbs) -> Tensor:
    return logps.logp_C - logps.old_logp_C


def completion_ratio(logps: LogProbs) -> Tensor:
    ratio_S = segment_sum(log_ratio(logps), logps.segment_C).exp()
    return ratio_S[logps.segment_C]


def ratio_so_far(logps: LogProbs) -> Tensor:
    """Multiply the ratios up to each token: CTPO (arXiv:2605.07331), without its clip."""
    parts = [log_ratio(logps)[logps.segment_C == s].cumsum(dim=0) for s in logps.segment_C.unique()]
    return torch.cat(parts).exp()


def prefix_budget(logps: LogProbs) -> Tensor:
    """Return the ratio while probabilities have moved by less than 0.1 so far, in the mean: CPPO
    (arXiv:2606.10968). Inferred: the budget, and one threshold for all places."""
    moved_C = (logps.logp_C.exp() - logps.old_logp_C.exp()).abs()
    parts = [moved_C[logps.segment_C == s] for s in logps.segment_C.unique()]
    mean_C = torch.cat([part.cumsum(dim=0) / torch.arange(1, len(part) + 1) for part in parts])
    return torch.where(mean_C > 0.1, 0.0, log_ratio(logps).exp())


CONTROLS = {
    "CTPO": lambda logps: cumulative(logps, Cumulative()),  # of experiments/court
    "CPPO of prefixes": prefix_budget,
    "SAO": lambda logps: (r := log_ratio(logps).exp()) * ((r > 0.7) & (r < 6)),  # arXiv:2607.07508
    "ratio of the completion": completion_ratio, "ratio of the tokens so far": ratio_so_far,
    "token ratio": lambda logps: log_ratio(logps).exp(),
    "token ratio, at most 2": lambda logps: engine_weight(
        logps.logp_C, logps.old_logp_C, logps.segment_C, cap=2.0, mask_ratio=None),  # as loss.tis_cap
}


# ---- advantages

def distinct(*keys: Tensor) -> tuple[list[int], Tensor]:
    """Number equal steps alike; returns one step of each kind, [U], and the kind of each, [S]."""
    columns = [key.nan_to_num(nan=-9.0).double().flatten(start_dim=1) for key in keys]
    _, kind_S = torch.cat(columns, dim=1).unique(dim=0, return_inverse=True)
    first_U = torch.zeros(int(kind_S.max()) + 1, dtype=torch.int64)
    first_U[kind_S] = torch.arange(len(kind_S))
    return first_U.tolist(), kind_S


def rewards_of(problem: Problem, steps: Steps, s: int) -> Rewards:
    """Look up the rewards of one step, by component; nan for a completion that is not there."""
    step = steps.take(torch.tensor([s]), torch.ones(1))
    components = {f"part {c}": step.look_up(x_QK)[0].masked_fill(~step.there_SNG[0], torch.nan)
                  for c, x_QK in enumerate(problem.component_CQK)}
    weights = dict.fromkeys(components, 1 / len(components))
    return Rewards(components, weights, lengths_of(problem, step)[0])


def compare(problem: Problem, steps: Steps, kind: str) -> Tensor:
    """Compute the advantages of all steps, [S, N, G], by `advantage.advantage` on each distinct one."""
    reward_SNG = reward_of(problem, steps)
    if kind == "reward":
        return reward_SNG
    if kind == "soft_value":  # under an initial policy that has each completion equally often
        value_Q = soft_value(problem.reward_QK, ADVANTAGES[kind].beta)
        return reward_SNG - value_Q[steps.prompt_SN][..., None]
    first_U, kind_S = distinct(reward_SNG, *([steps.prompt_SN, steps.id_SNG] if kind == MINE else []))
    adv_UNG = [advantage(rewards_of(problem, steps, s), ADVANTAGES[kind]) for s in first_U]
    return torch.stack(adv_UNG)[kind_S]


# ---- pruning

Draws = list[tuple[float, Pruned]]  # the outcomes of a draw, with their probabilities
DRAWN = {"pps"}      # kinds that draw among a group's completions, whatever their places
SEEDS, MOST = 16, 400  # at least, at most: draws of a kind that is known by its draws alone
MINE = "mine"  # of a stranger's file: it may read more of a step than rewards


@cache
def group_of(problem: Problem, behind: str, q: int, id_G: tuple[int, ...]) -> Group:
    """Make the record of a group, with the log-probs of the policy that sampled it."""
    samples = []
    for k in id_G:
        logp_L = problem.sampled[behind][q, k, :problem.len_K[k]]
        samples.append(Sample([ord(letter) for letter in problem.names[k]], logp_L.tolist(), True))
    return Group(Prompt(f"prompt {q}", (0,), ""), tuple(samples))


def groups_of(problem: Problem, steps: Steps, behind: str, s: int) -> list[Group]:
    members = zip(steps.prompt_SN[s].tolist(), steps.id_SNG[s].tolist(), strict=True)
    return [group_of(problem, behind, q, tuple(id_G)) for q, id_G in members]


def combs(size_M: Tensor, order_M: Tensor, count: float) -> list[tuple[float, Tensor, Tensor]]:
    """Go through the starts of systematic sampling: chance of an outcome, probabilities, and the kept."""
    prob_M = prune.inclusion(size_M, count)
    sorted_M = prob_M[order_M]
    ends = sorted_M[sorted_M < 1].cumsum(0) % 1
    edges = sorted({0.0, 1.0, *ends.tolist()})
    return [(b - a, prob_M, prune.systematic(prob_M, order_M, (a + b) / 2))
            for a, b in itertools.pairwise(edges) if b - a > 1e-14]


def draw_proportionally(given: prune.Candidates, settings: kinds.Pps) -> Draws:
    """Go through the outcomes of pps."""
    size_NG = prune.gradient_size(given, settings.size, settings.by_cost)
    N = len(size_NG)
    parts = 1 if settings.scope == "batch" else N
    by_part = zip(size_NG.view(parts, -1), prune.similar_order(given).view(parts, -1), strict=True)
    draws = [combs(size_M, order_M % len(order_M), settings.keep * N / parts) for size_M, order_M in by_part]
    outcomes = []
    for drawn in itertools.product(*draws):
        chances, probs, keeps = zip(*drawn, strict=True)
        prob_NG, keep_NG = (torch.stack(of_parts).view_as(size_NG) for of_parts in (probs, keeps))
        outcomes.append((math.prod(chances), prune.thin(prob_NG, keep_NG)))
    return outcomes


def draw_each(given: prune.Candidates, settings: kinds.Bernoulli) -> Draws:
    """Go through all outcomes of independent draws."""
    prob_NG = prune.below_mean(given.adv_NG, settings.drop_prob)
    choices = [[True] if prob == 1 else [True, False] for prob in prob_NG.flatten().tolist()]
    outcomes = []
    for bits in itertools.product(*choices):
        keep_NG = torch.tensor(bits).view_as(prob_NG)
        chance = torch.where(keep_NG, prob_NG, 1 - prob_NG).prod().item()
        outcomes.append((chance, prune.thin(prob_NG, keep_NG)))
    return outcomes


def outcomes_of(given: prune.Candidates, settings: Any) -> Draws:
    """Go through the outcomes of one step's draw; kinds without chance have one."""
    if settings.kind == "pps":
        return draw_proportionally(given, settings)
    if settings.kind == "bernoulli":
        return draw_each(given, settings)
    drawn = prune.COMPLETIONS[settings.kind](given, settings)
    if (drawn.prob_NG % 1 > 0).any():
        return draw_by_seeds(given, settings, drawn.prob_NG)
    again = prune.COMPLETIONS[settings.kind](replace(given, seed=given.seed + 1), settings)
    if not drawn.keep_NG.equal(again.keep_NG):
        raise ConfigError(f"prune.completions.kind={settings.kind} draws, and states chances of 0 and 1")
    return [(1.0, drawn)]


def draw_by_seeds(given: prune.Candidates, settings: Any, prob_NG: Tensor) -> Draws:
    """Draw by seeds, and scale weights so that their means are by the chances that the kind states. Raises
    ConfigError if it keeps completions more or less often."""
    DRAWN.add(settings.kind)
    draws, often_NG = [], torch.zeros_like(prob_NG)
    while len(draws) < SEEDS or (often_NG[prob_NG > 0] == 0).any():
        draws.append(prune.COMPLETIONS[settings.kind](replace(given, seed=given.seed + len(draws)), settings))
        often_NG += draws[-1].keep_NG
        off = (often_NG - len(draws) * prob_NG).sum().abs()
        if len(draws) > MOST or off > 1 + 5 * (len(draws) * prob_NG * (1 - prob_NG)).sum().sqrt():
            raise ConfigError(f"prune.completions.kind={settings.kind} states chances of {prob_NG.tolist()}, "
                              f"and keeps {often_NG.tolist()} times in {len(draws)} draws")
    weight_DNG = torch.stack([drawn.weight_NG for drawn in draws])
    if ((weight_DNG > 0) & (weight_DNG != weight_DNG.amax(dim=0))).any():
        raise ConfigError(f"prune.completions.kind={settings.kind}: weights are by which others survive, and "
                          "draws do not tell the bias of that exactly")
    scale_NG = (len(draws) * prob_NG / often_NG).nan_to_num()
    return [(1 / len(draws), replace(drawn, weight_NG=drawn.weight_NG * scale_NG)) for drawn in draws]


def draw_kinds(problem: Problem, steps: Steps, adv_SNG: Tensor, chosen: Estimator,
               ) -> tuple[list[Draws], Tensor]:
    """List the draws of each distinct step, [U], and say which of these each step equals, [S]."""
    settings = PRUNERS[chosen.completions]
    reward_SNG = reward_of(problem, steps)
    keys = [adv_SNG, reward_SNG]
    if settings.kind == "pps" or chosen.completions == MINE:
        keys += [steps.prompt_SN, steps.id_SNG]
    first_U, kind_S = distinct(*keys)
    draws = []
    for s in first_U:
        groups = groups_of(problem, steps, chosen.behind, s)
        given = prune.Candidates(
            adv_SNG[s], groups, chosen.normalize, True, seed=2 * MOST * int(s), reward_NG=reward_SNG[s])
        draws.append(outcomes_of(given, settings))
    if settings.kind in DRAWN - {"pps"}:
        require_stated(settings.kind, adv_SNG[first_U], draws)
    return draws, kind_S


def require_stated(kind: str, adv_UNG: Tensor, draws: list[Draws]) -> None:
    """Raise ConfigError if over all steps those of a larger |A|, a larger A or a later place are kept more or
    less often than is stated, though their number may be right: by more than six standard deviations."""
    off, variance = torch.zeros(3), torch.zeros(3)
    for adv_NG, drawn in zip(adv_UNG, draws, strict=True):
        prob_NG = drawn[0][1].prob_NG
        often_NG = sum(outcome.keep_NG.double() for _, outcome in drawn)
        place_NG = torch.arange(adv_NG.shape[1], dtype=adv_NG.dtype).expand_as(adv_NG)
        for i, x_NG in enumerate((adv_NG.abs(), adv_NG, place_NG)):
            x_NG = (x_NG - x_NG.nanmean()).nan_to_num()
            off[i] += ((often_NG - len(drawn) * prob_NG) * x_NG).sum()
            variance[i] += (len(drawn) * prob_NG * (1 - prob_NG) * x_NG ** 2).sum()
    if (off.abs() > 6 * variance.sqrt() + 1e-9).any():
        raise ConfigError(f"prune.completions.kind={kind} keeps others than by the chances that it "
                          f"states, by {(off / variance.sqrt()).tolist()} deviations of |A|, A and place")


class Drawn(NamedTuple):
    """Steps with every outcome of the draw of completions."""

    steps: Steps         # R
    of_R: Tensor         # which step without draws each is of
    adv_RNG: Tensor      # 0 for a completion without one
    keep_RNG: Tensor
    weight_RNG: Tensor   # of both levels; 0 if not kept


def in_order(steps: Steps) -> Steps:
    """Sort the completions of every group by their numbers."""
    id_SNG, order_SNG = steps.id_SNG.sort(dim=2)
    return steps._replace(id_SNG=id_SNG, there_SNG=steps.there_SNG.gather(2, order_SNG))


def draw(problem: Problem, steps: Steps, chosen: Estimator) -> Drawn:
    """Compare and prune the completions of all steps, in all outcomes of the draw."""
    settings = PRUNERS[chosen.completions]
    own = MINE in (chosen.advantage, chosen.completions, chosen.weigh)  # they may read places
    if settings.kind in DRAWN and not own:  # permuted groups have one gradient: are one step
        steps = in_order(steps)
    adv_SNG = compare(problem, steps, chosen.advantage)
    draws, kind_S = draw_kinds(problem, steps, adv_SNG, chosen)
    chances, pruned = zip(*itertools.chain(*draws), strict=True)
    count_U = torch.tensor([len(outcomes) for outcomes in draws])
    first_U = count_U.cumsum(0) - count_U
    count_S = count_U[kind_S]
    of_R = torch.arange(len(kind_S)).repeat_interleave(count_S)
    nth_R = torch.arange(len(of_R)) - (count_S.cumsum(0) - count_S)[of_R]  # of its step's outcomes
    at_R = first_U[kind_S[of_R]] + nth_R  # of all outcomes
    chance_R = torch.tensor(chances, dtype=torch.float64)[at_R]
    drawn = steps.take(of_R, steps.chance_S[of_R] * chance_R)
    keep_RNG = torch.stack([outcome.keep_NG for outcome in pruned])[at_R]
    weight_RNG = torch.stack([outcome.weight_NG for outcome in pruned])[at_R]
    adv_RNG = adv_SNG[of_R]
    if getattr(settings, "compare", "all") == "kept":
        kept = drawn._replace(there_SNG=drawn.there_SNG & keep_RNG)
        adv_RNG = compare(problem, kept, chosen.advantage)
    weight_RN1 = drawn.weight_SN[..., None]
    return Drawn(drawn, of_R, adv_RNG.nan_to_num(), keep_RNG & drawn.there_SNG & (weight_RN1 > 0),
                 weight_RNG * weight_RN1)


def all_draws(problem: Problem, chosen: Estimator) -> Drawn:
    """Go through all steps and draws, once for all estimators that prune alike."""
    reads = chosen.completions == MINE or getattr(PRUNERS[chosen.completions], "size", "") == "surprise"
    normalize = chosen.normalize if reads else ""
    return draw_all(problem, chosen._replace(normalize=normalize, denominator="", trust=""))


@cache
def draw_all(problem: Problem, chosen: Estimator) -> Drawn:
    return draw(problem, all_steps(problem, chosen.behind, chosen.prompts), chosen)


# ---- gradients

@cache
def token_pulls(problem: Problem, trust: str, behind: str) -> Tensor:
    """Compute f grad logp of each token, [Q, K, 3, L, P], for an advantage below, at and above 0.

    A trust region reads no more of the advantage than its sign.
    """
    there_QKL = problem.logp_QKL < 0
    Q, K, L = there_QKL.shape
    segment_C = torch.arange(Q * K).view(Q, K, 1).expand(Q, K, L)[there_QKL]
    new_C = problem.logp_QKL[there_QKL]
    old_C = problem.sampled[behind][there_QKL]
    by_sign = []
    for sign in (-1, 0, 1):
        logps = LogProbs(new_C, old_C, torch.full_like(new_C, sign), segment_C)
        f_C = (CONTROLS[trust](logps) if trust in CONTROLS
               else TRUST[REGIONS[trust].kind](logps, REGIONS[trust]))
        f_QKL = torch.zeros_like(problem.logp_QKL).masked_scatter(there_QKL, f_C)
        by_sign.append(f_QKL[..., None] * problem.score_QKLP)
    return torch.stack(by_sign, dim=2)


@cache
def pulls(problem: Problem, trust: str, behind: str) -> Tensor:
    """Sum them over the tokens of each completion, [Q, K, 3, P]."""
    return token_pulls(problem, trust, behind).sum(dim=3)


def token_weights(problem: Problem, drawn: Drawn, chosen: Estimator) -> Tensor:
    """Compute w of every completion, [R, N, G], as loss.py has it."""
    def weigh(len_NG: Tensor, keep_NG: Tensor, weight_NG: Tensor) -> Tensor:
        pruned = Pruned(keep_NG, weight_NG, weight_NG)
        return token_weight(len_NG, pruned, chosen.normalize, chosen.denominator, MAX_LEN, len(len_NG))

    len_RNG = lengths_of(problem, drawn.steps)
    return torch.vmap(weigh)(len_RNG, drawn.keep_RNG, drawn.weight_RNG)


def token_factors(problem: Problem, drawn: Drawn, chosen: Estimator) -> Tensor:
    """Compute what a stranger's `weigh` multiplies each token's term by, [R, N, G, L], in a row that
    holds what a step trains on."""
    weight_RNG = token_weights(problem, drawn, chosen)
    first_U, kind_R = distinct(drawn.adv_RNG, weight_RNG, drawn.steps.prompt_SN, drawn.steps.id_SNG)
    p_QKL = problem.logp_QKL.exp()
    entropy_QKL = -(p_QKL * problem.logp_QKL + (1 - p_QKL) * (1 - p_QKL).log())  # of two tokens
    logp_RNGL, entropy_RNGL = map(drawn.steps.look_up, (problem.logp_QKL, entropy_QKL))
    trained_RNG = drawn.keep_RNG & (drawn.adv_RNG != 0)
    there_RNGL = trained_RNG[..., None] & (logp_RNGL < 0)
    factor_UNGL = torch.ones(len(first_U), *there_RNGL.shape[1:], dtype=torch.float64)
    for factor_NGL, r in zip(factor_UNGL, first_U, strict=True):
        if members := [(n, g) for n, g in trained_RNG[r].nonzero().tolist()]:
            batch = Minibatch(groups_of(problem, drawn.steps, chosen.behind, r), trained_RNG[r],
                              drawn.adv_RNG[r], weight_RNG[r], drawn.adv_RNG[r])
            there_NGL = there_RNGL[r]
            row, logp_C = build_row(batch, Plan(members)), logp_RNGL[r][there_NGL]
            factor_NGL[there_NGL] = WEIGHING[chosen.weigh]((row, logp_C, entropy_RNGL[r][there_NGL]))
    return factor_UNGL[kind_R]


def gradients(problem: Problem, drawn: Drawn, chosen: Estimator) -> Tensor:
    """Compute the gradient of every step, [R, P]: the sum of w f A grad logp."""
    known = (chosen.denominator, chosen.weigh) == ("all", "none")
    if PRUNERS[chosen.completions].kind in DRAWN - {"pps"} and not known:
        raise ConfigError("loss.denominator=kept and weigh go by which completions survive: draws do not "
                          "tell the bias of that exactly")
    term_RNG = drawn.adv_RNG * token_weights(problem, drawn, chosen)
    sign_RNG = drawn.adv_RNG.sign().long() + 1
    if chosen.weigh == "none":
        pull_RNG3P = drawn.steps.look_up(pulls(problem, chosen.trust, chosen.behind))
        pull_RNGP = pull_RNG3P.take_along_dim(sign_RNG[..., None, None], dim=3).squeeze(3)
        return torch.einsum("rng,rngp->rp", term_RNG, pull_RNGP)
    pull_RNG3LP = drawn.steps.look_up(token_pulls(problem, chosen.trust, chosen.behind))
    pull_RNGLP = pull_RNG3LP.take_along_dim(sign_RNG[..., None, None, None], dim=3).squeeze(3)
    factor_RNGL = token_factors(problem, drawn, chosen)
    return torch.einsum("rng,rngl,rnglp->rp", term_RNG, factor_RNGL, pull_RNGLP)
