"""docs/atlas.md says what its program computes, and the program computes what sampling shows.

Sampled: completions token by token, prompts, aborts and refills as they come, and seeded draws of the real pruners.
"""

import itertools
import re
from functools import cache
from statistics import mean
from typing import NamedTuple

import atlas
import enumeration
import estimators
import pytest
import torch
from atlas import EXACT, LITERATURE, TABLES, Row, measure, problem_of
from conftest import ROOT, others_slow
from enumeration import AWAY, BEHIND, OWN, THETA, TREES, Problem, Steps
from estimators import ADVANTAGES, CONTROLS, PRUNERS, REGIONS, Estimator
from torch import Tensor

from advantage import advantage
from loss import TRUST, token_weight
from prune import COMPLETIONS, Candidates, rewards_of_kept
from records import LogProbs, Pruned

CHANCE = ("bernoulli", "pps")  # kinds that draw


@pytest.mark.house
def test_the_page_has_the_numbers_of_the_program():
    text = (ROOT / "docs" / "atlas.md").read_text()
    computed = atlas.tables()
    assert "\n".join(computed["Pruned completions"]) in text, "python experiments/atlas.py"
    in_tables = set(re.findall(r"\d\.\d+", "\n".join(line for lines in computed.values() for line in lines)))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    assert not set(re.findall(r"\b\d\.\d{2,3}\b", prose)) - in_tables


def meets_the_conditions(normalize, advantage, completions, denominator, prompts, behind, trust, **_) -> bool:
    """The conditions of the page's section "When a combination is exact"."""
    fixed = completions.startswith("pps") and advantage in ("soft_value", "shrinkage")  # completions kept
    return (normalize in ("sum", "constant")
            and advantage in ("reward", "soft_value", "leave_one_out", "centred", "shrinkage")
            and (completions == "none" or completions.split()[0] in CHANCE and (denominator == "all" or fixed))
            and (prompts in ("all", "bernoulli", "pps")
                 or prompts == "refill" and advantage in ("leave_one_out", "centred"))
            and (behind == "on-policy" or trust == "ratio of the completion"))


@pytest.mark.slow
def test_the_exact_combinations_are_those_that_meet_the_conditions():
    rows = atlas.all_rows()
    assert not [row for row in rows if EXACT <= row["bias"] <= 1e-3]
    combined = [row for row in rows if row["problem"] == "main" and "advantage" in row]
    exact = [row for row in combined if row["bias"] < EXACT]
    assert f"{len(combined):,} combinations" in (ROOT / "docs" / "atlas.md").read_text()
    assert len(exact) == 65
    assert exact == [row for row in combined if meets_the_conditions(**row)]


def test_the_target_is_the_gradient_of_the_mean_reward():
    theta, problem = THETA.clone().requires_grad_(), problem_of("main")
    logp_QKL, _ = enumeration.policy(TREES["unequal"], theta + OWN)
    mean_reward = (logp_QKL.sum(dim=2).exp() * problem.reward_QK).sum(dim=1).mean()
    torch.testing.assert_close(torch.autograd.grad(mean_reward, theta)[0], problem.target(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", others_slow(
    ["bernoulli", "pps", "pps of the step", "pps of the step by surprise"], "pps"))
def test_an_unbiased_pruner_keeps_the_bias_of_what_it_prunes(kind):
    for name in ("group_norm", "decoupled", "reward"):
        full, pruned = (measure(Row("", Estimator(name, "sequence", completions=which))) for which in ("none", kind))
        assert full["bias"] > 0.1
        assert (pruned["bias"], pruned["scale"]) == pytest.approx((full["bias"], full["scale"]), abs=1e-12)


def test_a_second_epoch_is_unbiased_if_it_has_a_draw_of_its_own():
    for name in ("bernoulli", "pps", "pps of the step"):
        same, own = (estimators.second_epoch_bias(problem_of("main"), Estimator(completions=name), redrawn)
                     for redrawn in (False, True))
        assert own < EXACT and same > 5e-3


@pytest.mark.parametrize("name", [*REGIONS, *CONTROLS])
def test_on_policy_every_trust_region_is_1(name):
    problem = problem_of("main")
    pull_QK3P = estimators.pulls(problem, name, "on-policy")
    torch.testing.assert_close(pull_QK3P, problem.full_QKP[:, :, None].expand_as(pull_QK3P), rtol=0, atol=1e-14)


def sample_ids(problem: Problem, behind: str, prompt_SN: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Choose a token at every prefix by its logit; the completion is the one that these choices lead to."""
    tree = TREES["unequal" if problem.len_K.unique().numel() > 1 else "equal"].values()
    first = 0 if len(problem.logp_QKL) == 2 or problem.reward_QK.unique().numel() > 2 else 1  # prompt of OWN
    logit_SNP = THETA + BEHIND[behind] * AWAY + OWN[prompt_SN + first]
    point_SNGP = torch.rand(*prompt_SN.shape, size, 3, dtype=torch.float64, generator=generator)
    choice_SNGP = point_SNGP < logit_SNP.sigmoid()[:, :, None]
    match = [torch.stack([choice_SNGP[..., prefix] == choice for prefix, choice in path]).all(dim=0) for path in tree]
    return torch.stack(match, dim=-1).int().argmax(dim=-1)


@cache
def sample_steps(problem: Problem, behind: str, prompts: str, count: int) -> Steps:
    generator, Q = torch.Generator().manual_seed(len(prompts) + count), len(problem.logp_QKL)
    prompt_SN = torch.arange(Q).expand(count, Q)
    ones_SN = torch.ones(count, Q, dtype=torch.float64)
    size = 4 if prompts == "ragged" else problem.size
    id_SNG = sample_ids(problem, behind, prompt_SN, size, generator)
    there_SNG, weight_SN = torch.ones_like(id_SNG, dtype=torch.bool), ones_SN
    if "refill" in prompts:
        prompt_SN, id_SNG = refilled(problem, behind, prompts, count, generator)
    if prompts in enumeration.SKIPPING:
        prob_N, weight_N = map(torch.tensor, enumeration.prompt_chances(prompts))
        weight_SN = (torch.rand(ones_SN.shape, generator=generator) < prob_N) * weight_N * ones_SN
    if prompts in enumeration.SURVIVAL:
        chances = enumeration.SURVIVAL[prompts][prompt_SN[..., None], id_SNG]
        there_SNG = torch.rand(id_SNG.shape, generator=generator) < chances
    if prompts == "ragged":
        there_SNG = torch.arange(4) < torch.tensor([[2], [4]]).expand(count, 2, 1)
    return Steps(torch.full((count,), 1 / count, dtype=torch.float64), prompt_SN, id_SNG, there_SNG, weight_SN)


def refilled(problem: Problem, behind: str, prompts: str, count: int, generator) -> tuple[Tensor, Tensor]:
    """Roll out prompts one after the other, drop groups of equal rewards, and fill steps with the others in order."""
    Q, more = len(problem.logp_QKL), 6 * count
    kept = []
    for n in range(Q):
        q_M = torch.full((more,), n) if prompts == "same refill" else torch.randint(Q, (more,), generator=generator)
        id_MG = sample_ids(problem, behind, q_M[:, None], problem.size, generator)[:, 0]
        reward_MG = problem.reward_QK[q_M[:, None], id_MG]
        informative_M = (reward_MG != reward_MG[:, :1]).any(dim=1)
        assert informative_M.sum() >= count
        kept.append((q_M[informative_M][:count], id_MG[informative_M][:count]))
    return tuple(torch.stack(fields, dim=1) for fields in zip(*kept, strict=True))


def train_on(problem: Problem, steps: Steps, s: int, chosen: Estimator) -> Tensor:
    """Compute one step's gradient without the atlas: real functions, the seed of the draw is the step's number."""
    prompt_N1, id_NG, weight_N1 = steps.prompt_SN[s][:, None], steps.id_SNG[s], steps.weight_SN[s][:, None]
    rewards = estimators.rewards_of(problem, steps, s)
    adv_NG = one_advantage(problem, rewards, prompt_N1, chosen.advantage)
    len_NG = problem.len_K[id_NG] * steps.there_SNG[s]
    settings = PRUNERS[chosen.completions]
    groups = estimators.groups_of(problem, chosen.behind, steps, s)
    given = Candidates(adv_NG, groups, chosen.normalize, True, s, reward_NG=rewards.total_NG)
    drawn = COMPLETIONS[settings.kind](given, settings)
    keep_NG = drawn.keep_NG & (weight_N1 > 0)
    pruned = Pruned(keep_NG, drawn.weight_NG * weight_N1, drawn.prob_NG)
    if getattr(settings, "compare", "all") == "kept":
        adv_NG = advantage(rewards_of_kept(rewards, [*range(len(adv_NG))], keep_NG), ADVANTAGES[chosen.advantage])
    weight_NG = token_weight(len_NG, pruned, chosen.normalize, chosen.denominator, 3, len(len_NG))
    total = torch.zeros(3, dtype=torch.float64)
    for n, g in keep_NG.nonzero().tolist():
        q, k = prompt_N1[n, 0], id_NG[n, g]
        length = len_NG[n, g]
        new_C, old_C = problem.logp_QKL[q, k, :length], problem.sampled[chosen.behind][q, k, :length]
        logps = LogProbs(new_C, old_C, adv_NG[n, g].expand(length), torch.zeros(length, dtype=torch.int64))
        trust = chosen.trust
        f_C = CONTROLS[trust](logps) if trust in CONTROLS else TRUST[REGIONS[trust].kind](logps, REGIONS[trust])
        total += weight_NG[n, g] * adv_NG[n, g] * (f_C @ problem.score_QKLP[q, k, :length])
    return total


def one_advantage(problem: Problem, rewards, prompt_N1: Tensor, kind: str) -> Tensor:
    if kind == "reward":
        return rewards.total_NG
    if kind == "soft_value":
        value_Q = 0.5 * (problem.reward_QK / 0.5).exp().mean(dim=1).log()
        return rewards.total_NG - value_Q[prompt_N1]
    return advantage(rewards, ADVANTAGES[kind])


def by_step(problem: Problem, steps: Steps, row: Row) -> Tensor:
    """Compute the program's gradient of each step, [S, P], in the mean over all draws of completions."""
    if isinstance(row.chosen, str):
        return atlas.gradients_by(LITERATURE[row.chosen][0](problem, steps), problem, steps)
    drawn = estimators.draw(problem, steps, row.chosen)
    part_RP = estimators.gradients(problem, drawn, row.chosen) * drawn.steps.chance_S[:, None]
    sums_SP = torch.zeros(len(steps.chance_S), 3, dtype=torch.float64).index_add(0, drawn.of_R, part_RP)
    return sums_SP / steps.chance_S[:, None]


def directions(problem: Problem) -> Tensor:
    """The true gradient and a direction at a right angle to it, [2, P]."""
    along = problem.target() / problem.target().norm()
    across = torch.linalg.cross(along, torch.tensor([0.6, 0.64, 0.48], dtype=torch.float64))
    return torch.stack([along, across / across.norm()])


def require_zero_mean(x_SP: Tensor, problem: Problem, row: Row) -> None:
    x_S2 = x_SP @ directions(problem).T
    error_2 = x_S2.std(dim=0) / len(x_S2) ** 0.5
    assert (x_S2.mean(dim=0).abs() <= 4 * error_2 + 1e-12).all(), f"{row}: z {x_S2.mean(dim=0) / error_2}"


def check(row: Row, steps_sampled: int, steps_drawn: int) -> None:
    """Compare a row with sampled steps: their mean with the exact one, and each with the same step trained on."""
    problem = problem_of(row.problem)
    own = isinstance(row.chosen, str)
    behind, prompts = ("on-policy", LITERATURE[row.chosen][1]) if own else (row.chosen.behind, row.chosen.prompts)
    steps = sample_steps(problem, behind, prompts, steps_sampled)
    mean_SP = by_step(problem, steps, row)
    if own:
        every = enumeration.all_steps(problem, behind, prompts)
        exact_P = every.chance_S @ by_step(problem, every, row)
    else:
        drawn = estimators.all_draws(problem, row.chosen)
        exact_P = drawn.steps.chance_S @ estimators.gradients(problem, drawn, row.chosen)
    require_zero_mean(mean_SP - exact_P, problem, row)
    if own and row.chosen not in BASELINES:
        return
    chance, train = not own and PRUNERS[row.chosen.completions].kind in CHANCE, by_hand if own else train_on
    trained = [train(problem, steps, s, row.chosen) for s in range(steps_drawn if chance else 15)]
    apart_SP = torch.stack(trained) - mean_SP[:len(trained)]
    assert chance == bool(apart_SP.abs().max() > 1e-12), row
    require_zero_mean(apart_SP, problem, row)


class Member(NamedTuple):
    reward: float
    there: bool
    prob: float       # of going on
    score_LP: Tensor


def quotient(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


def otb(group: list[Member], t: int) -> float:
    reach = [(m.reward, m.score_LP[:t + 1].square().sum().item()) for m in group if len(m.score_LP) > t]
    return quotient(sum(reward * energy for reward, energy in reach), sum(energy for _, energy in reach))


def weighed(group: list[Member]) -> list[float]:
    return [m.there * m.reward / m.prob for m in group]


BASELINES = {  # of one completion, from it, the others of its group, those of other prompts, and the token
    "OTB, own sample in its baseline": lambda me, others, _, t: otb([me, *others], t),
    "OTB, leave-one-out": lambda me, others, _, t: otb(others, t),
    "mean of all others of the step": lambda me, others, elsewhere, t: mean(m.reward for m in others + elsewhere),
    "survivors 1/p, others weighed 1/p": lambda me, others, *_: mean(weighed(others)),
    "survivors 1/p, others weighed and normalised": lambda me, others, *_: quotient(
        sum(weighed(others)), sum(m.there / m.prob for m in others)),
    "survivors 1/p, plain mean with the own reward": lambda me, others, *_: quotient(
        sum(m.there * m.reward for m in [me, *others]), sum(m.there for m in [me, *others]))}


def by_hand(problem: Problem, steps: Steps, s: int, name: str) -> Tensor:
    """Compute one step of an estimator with a baseline, completion by completion and token by token."""
    groups = []
    for q, id_G, there_G in zip(steps.prompt_SN[s], steps.id_SNG[s], steps.there_SNG[s], strict=True):
        groups.append([Member(problem.reward_QK[q, k].item(), bool(there), enumeration.GO_ON[q, k].item(),
                              problem.score_QKLP[q, k, :problem.len_K[k]])
                       for k, there in zip(id_G, there_G, strict=True)])
    total = torch.zeros(3, dtype=torch.float64)
    for n, g in itertools.product(range(2), range(3)):
        me, others, elsewhere = groups[n][g], groups[n][:g] + groups[n][g + 1:], groups[1 - n]
        weight = me.there / me.prob if "1/p" in name else 1
        for t, score_P in enumerate(me.score_LP):
            total += weight * (me.reward - BASELINES[name](me, others, elsewhere, t)) * score_P / 6
    return total


@pytest.mark.slow
@pytest.mark.parametrize("title", TABLES)
def test_every_row_agrees_with_a_monte_carlo_run(title):
    for row in dict.fromkeys(TABLES[title]):
        check(row, steps_sampled=3000, steps_drawn=300)
