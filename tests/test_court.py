"""The methods of experiments/court: the unbiased ones are so over all outcomes, controls are not, and each runs through
the script that plugs it in."""

import itertools
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import try_method
from conftest import ROOT, steps_of, toy_config
from court import abort, abort_controls, allocation, ctpo, forks, otb, otb_released, pass_rates, sapo, signs, survivors
from kept_runs import append, is_kept
from test_compare import make
from torch import Tensor

import config
import learner
import loss
import pack
import train
import update
from advantage import ESTIMATORS, leave_one_out
from collect import Selection, choose
from history import PromptHistory
from infra.checkpoint import METHOD
from loss import token_weight
from prune import COMPLETIONS, PROMPTS
from records import Group, LogProbs, Prompt, PromptDraw, Rewards, Rolled, Sample, lengths
from settings import kinds, leaves, loader

EXACT, BIASED = 1e-12, 1e-3
wide = partial(torch.tensor, dtype=torch.float64)
SECTIONS = config.Config, config.Prune, config.Loss
PLUGGED = *(section.__annotations__ for section in SECTIONS), ESTIMATORS, COMPLETIONS, PROMPTS, loss.TRUST
HOOKS = (
    (leaves, "through"), (update, "weigh"), (loss, "has_token_weights"), (learner, "has_token_weights"),
    (learner, "load_sharded"))


@pytest.fixture
def plugged(monkeypatch):
    """Take every method out again that a test has plugged in."""
    for hook in HOOKS:
        monkeypatch.setattr(*hook, getattr(*hook))
    with ExitStack() as stack:
        for table in PLUGGED:
            stack.enter_context(patch.dict(table))
        yield try_method.plug_in
    loader.hints.cache_clear()


LOGITS = torch.tensor([0.3, -0.2, 0.5, 0.1, -0.4, 0.7, 0.2], dtype=torch.float64)
# A completion is token 0, which ends it, or token 1 or 2 and then one of two more; its reward.
ANSWERS = {(0,): 1.0, (1, 0): 0.0, (1, 1): 1.0, (2, 0): 0.0, (2, 1): 1.0}


def log_probs(answer: tuple[int, ...], logits: Tensor) -> list[Tensor]:
    """Of each token: 3 logits for the first token, 2 for the one behind 1, 2 for the one behind 2."""
    first = logits[:3].log_softmax(0)[answer[0]]
    return [first] if answer == (0,) else [first, logits[2 * answer[0] + 1:2 * answer[0] + 3].log_softmax(0)[answer[1]]]


def scores(answer: tuple[int, ...]) -> Tensor:
    """The gradient of each token's log-prob, [L, 7]."""
    return torch.stack([torch.autograd.functional.jacobian(lambda x, t=t: log_probs(answer, x)[t], LOGITS)
                        for t in range(len(answer))])


SCORES = {answer: scores(answer) for answer in ANSWERS}
LOGP = {answer: [float(x) for x in log_probs(answer, LOGITS)] for answer in ANSWERS}
CHANCE = {answer: math.exp(sum(logp)) for answer, logp in LOGP.items()}
WHOLE = {answer: score_L.sum(dim=0) for answer, score_L in SCORES.items()}
TRUE = sum(CHANCE[answer] * reward * SCORES[answer].sum(dim=0) for answer, reward in ANSWERS.items())


def off(mean: Tensor, scale: float = 1.0) -> float:
    """How far a mean gradient is from the true one, over its norm."""
    return ((mean - scale * TRUE).norm() / TRUE.norm()).item()


def pulls(groups: list[Group], draws: list[PromptDraw], rewards: Rewards, adv_NG: Tensor, completions) -> Tensor:
    """The weight of each completion's score in a step: the choice and the weights of the loop, under normalize=sum."""
    denominator = "kept" if getattr(completions, "aborted", "") == "dropped" else "all"
    rollout = config.Rollout(group_size=2, prompts_per_step=2, max_new_tokens=2)
    selection = Selection(rollout, config.Prune(completions=completions), "sum", None, True, None)
    batch = choose(Rolled() + Rolled(draws, groups, rewards, adv_NG), selection, 0)
    weight_NG = token_weight(lengths(groups, adv_NG.shape[1]), batch.pruned, "sum", denominator, 2, batch.offered)
    return weight_NG * adv_NG.masked_fill(~batch.pruned.keep_NG, 0.0)


PROMPT = Prompt("q", (5, 6), "1")
RULE = abort.Abort(mark=1, bias=0.2, spread=0.5, confidence=0.8, floor=0.2)


def abort_outcomes(settings: abort.Abort):
    """Every outcome of one completion with its chance: it ends, goes on with probability P, or is aborted."""
    for answer, chance in CHANCE.items():
        ids, logp = answer[:1], LOGP[answer][:1]
        prob = 1.0 if answer == (0,) else abort.go_on_prob(settings, 0.3, len(PROMPT.ids), logp)
        kind, cut = getattr(settings, "aborted", "weighed"), getattr(settings, "cut", 0.0)
        chance_on = float(prob >= cut) if kind == "failed" else prob
        weight = 1 / prob if kind == "weighed" else 1.0
        yield chance * chance_on, survivors.Drawn(answer, LOGP[answer], True, prob=prob, weight=weight)
        failed = kind == "failed"
        yield chance * (1 - chance_on), survivors.Drawn(
            ids, logp, False, pending=not failed, prob=prob, weight=float(failed), aborted=True)


def mean_over_aborts(settings: abort.Abort, size: int = 2) -> Tensor:
    each = [outcome for outcome in abort_outcomes(settings) if outcome[0]]
    assert sum(chance for chance, _ in each) == pytest.approx(1, abs=1e-12)
    total = torch.zeros_like(LOGITS)
    for joint in itertools.product(each, repeat=size):
        samples = tuple(sample for _, sample in joint)
        reward_1G = torch.tensor([[0.0 if s.aborted else ANSWERS[tuple(s.ids)] for s in samples]], dtype=torch.float64)
        groups = [Group(PROMPT, samples)]
        rewards = Rewards({"accuracy": reward_1G}, {"accuracy": 1.0}, lengths(groups, size))
        rewards = pass_rates.noted(rewards, survivors.column(groups, "weight"))
        adv_1G = survivors.survivors_advantage(rewards, survivors.Survivors())
        pull_G = pulls(groups, [PromptDraw(PROMPT, 0)], rewards, adv_1G, settings)[0]
        chance = math.prod(chance for chance, _ in joint)
        for pull, sample in zip(pull_G, samples, strict=True):
            ids = tuple(sample.ids) if tuple(sample.ids) in SCORES else (*sample.ids, 0)  # an aborted one
            total += chance * pull * SCORES[ids][:sample.length].sum(dim=0)
    return total


def test_weighed_aborts_have_the_true_gradient_over_all_outcomes_and_the_controls_do_not(plugged):
    plugged(abort)
    plugged(abort_controls)
    assert 0.2 < abort.go_on_prob(RULE, 0.3, 2, [-1.0]) < 0.9
    assert off(mean_over_aborts(RULE)) < EXACT
    for kind in ("dropped", "failed"):
        cut = abort.go_on_prob(RULE, 0.3, 2, LOGP[1, 0][:1]) + 1e-6  # token 1 is rarer: it is aborted, and 2 is not
        control = abort_controls.BiasedAbort(mark=1, bias=0.2, confidence=0.8, floor=0.2, aborted=kind, cut=cut)
        mean = mean_over_aborts(control)
        best = (mean @ TRUE / (TRUE @ TRUE)).item()  # no factor makes up for it either
        assert off(mean) > BIASED and off(mean, best) > BIASED, kind


def test_a_probability_reads_the_prompt_and_the_tokens_before_the_mark_and_the_balance_keeps_both_ends():
    rule = abort.Abort(bias=2.0, spread=0.5, rate=1.0, confidence=2.0, prompt=-1.0, floor=0.01)
    expected = math.exp(2) * (0.25 * 0.75) ** 0.5 * 0.25 * math.exp(-0.4) / 4
    assert abort.go_on_prob(rule, 0.25, 4, [-0.1, -0.3]) == pytest.approx(expected)
    assert abort.go_on_prob(abort.Abort(), 0.5, 4, [-1.0]) == 1.0  # 2.5 / 2
    assert abort.go_on_prob(abort.Abort(bias=-9.0), 0.5, 4, [-1.0]) == 0.1
    for logp, kept in {(-1.0, -5.0, -2.0, -3.0): [True, True, False, False], (-1.0, -5.0, -2.0): [True, True, False],
                       (-3.0, -1.0): [False, True], (): []}.items():
        assert abort_controls.balanced([*logp], 0.5) == kept


def test_ragged_groups_have_the_true_gradient_over_all_outcomes(plugged):
    """Of 2 and 3 copies of two prompts with one policy. Without the weights prompts count by their numbers."""
    plugged(allocation)
    prompts = [Prompt("a", (5,), "1"), Prompt("b", (6,), "1")]
    history = allocation.Allocation(PromptHistory(prompts, kinds.AllPrompts(), 0, 0.5), allocation.Allocated(), 2)
    history.numbers = lambda draws: [2 if draw.prompt.id == "a" else 3 for draw in draws]
    draws = history.draw(2)
    assert sorted(draw.copy for draw in draws) == [0, 0, 1, 1, 2] and len(draws) == 5
    prompt_N = torch.tensor([0 if draw.prompt.id == "a" else 1 for draw in draws])
    sign = {"a": 1.0, "b": -0.25}
    pull = {}  # by the rewards: the step's weights depend on nothing else
    for bits in itertools.product([0.0, 1.0], repeat=5):
        reward_N = torch.tensor([sign[draw.prompt.id] * bit for draw, bit in zip(draws, bits, strict=True)])
        groups = [Group(draw.prompt, (Sample((0,), (-1.0,), True),)) for draw in draws]
        adv_N1 = allocation.leave_one_copy_out(reward_N.double(), prompt_N)[:, None]
        rewards = Rewards({"accuracy": reward_N.double()[:, None]}, {"accuracy": 1.0}, lengths(groups, 1))
        plain = [replace(draw, weight=1.0) for draw in draws]
        pull[bits] = [pulls(groups, of, rewards, adv_N1, kinds.KeepAll())[:, 0] for of in (draws, plain)]
    means = {"weighed": torch.zeros_like(LOGITS), "plain": torch.zeros_like(LOGITS)}
    for joint in itertools.product(CHANCE, repeat=5):
        chance = math.prod(CHANCE[answer] for answer in joint)
        score_N = torch.stack([WHOLE[answer] for answer in joint])
        for mean, pull_N in zip(means.values(), pull[tuple(ANSWERS[answer] for answer in joint)], strict=True):
            mean += chance * pull_N @ score_N
    assert off(means["weighed"], (1 - 0.25) / 2) < EXACT
    assert off(means["plain"], (1 - 0.25) / 2) > BIASED


@pytest.mark.parametrize("module", [otb, otb_released])
def test_the_factors_of_a_row_turn_leave_one_out_into_the_baseline_of_every_token(module):
    generator = torch.Generator().manual_seed(0)
    groups, reward_NG = [], torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    for n, prompt in enumerate(("a", "b")):
        logp = [(-torch.rand(g + n + 1, generator=generator)).tolist() for g in range(3)]
        groups.append(Group(Prompt(prompt, (5, 6), "1"), tuple(Sample([7] * len(of), of, True) for of in logp)))
    adv_NG = leave_one_out(reward_NG)
    weighed = pack.Minibatch(groups, adv_NG != 0, adv_NG, torch.ones(2, 3), reward_NG, None, None, None)

    def rows(capacity: int):
        hand, = pack.pack(weighed, config.Pack(capacity=capacity), 1, 0.0)
        return [pack.build_row(weighed, plan) for plan in hand]

    row, = rows(64)
    factor_C, = module.weigh([row], [], [], config.Loss())
    for s, (n, g) in enumerate(row.members):
        logp_GL = otb.padded([wide(sample.logp) for sample in groups[n].samples])
        adv_GL = otb.token_advantage(reward_NG[n], otb.energy(*logp_GL), own=module is otb_released)
        mine_C = (factor_C * row.adv_C)[row.segment_C == s]
        torch.testing.assert_close(mine_C.double(), adv_GL[g, :len(mine_C)], rtol=1e-5, atol=1e-6)
    with pytest.raises(config.ConfigError, match="a row has a part of a group"):
        module.weigh(rows(9), [], [], config.Loss())


SIZES = 3, 1, 4  # tokens of three completions


def moved(seed: int, far: float) -> LogProbs:
    """Log-probs that have moved by up to `far` nats, with an advantage of each sign."""
    generator = torch.Generator().manual_seed(seed)
    old_C = -torch.rand(sum(SIZES), generator=generator, dtype=torch.float64) - 0.1
    new_C = old_C + far * (2 * torch.rand(sum(SIZES), generator=generator, dtype=torch.float64) - 1)
    segment_C = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    adv_C = torch.tensor([1.5, -0.5, 0.7], dtype=torch.float64)[segment_C]
    return LogProbs(new_C.requires_grad_(), old_C, adv_C, segment_C)


def surrogate_of_sapo(logps: LogProbs, settings: sapo.SoftGate) -> Tensor:
    total = 0.0
    for new, old, adv in zip(logps.logp_C, logps.old_logp_C, logps.adv_C, strict=True):
        tau = settings.tau_right if adv > 0 else settings.tau_wrong
        total = total + 4 / tau * torch.sigmoid(tau * ((new - old).exp() - 1)) * adv
    return total


def surrogate_of_ctpo(logps: LogProbs, settings: ctpo.Cumulative) -> Tensor:
    """Token by token, as the authors' code has it: the product so far, of which only the own ratio has a gradient."""
    total = 0.0
    for s in range(len(SIZES)):
        so_far = 0.0
        for t, c in enumerate((logps.segment_C == s).nonzero()[:, 0]):
            new, adv = logps.logp_C[c], logps.adv_C[c]
            so_far = so_far + (new - logps.old_logp_C[c]).detach()
            ratio, root = (so_far + new - new.detach()).exp(), math.sqrt(t + 1)
            bounded = ratio.clamp(math.exp(-settings.low * root), math.exp(settings.high * root))
            term = torch.minimum(ratio * adv, bounded * adv)
            total = total + (torch.maximum(term, math.exp(settings.most * root) * adv) if adv < 0 else term)
    return total


@pytest.mark.parametrize(("seed", "far"), [(0, 0.02), (1, 0.05), (2, 0.2), (3, 1.0)])
@pytest.mark.parametrize(("factor", "surrogate", "settings"), [
    (sapo.soft_gate, surrogate_of_sapo, sapo.SoftGate(tau_right=1.0, tau_wrong=1.7)),
    (ctpo.cumulative, surrogate_of_ctpo, ctpo.Cumulative())], ids=["sapo", "ctpo"])
def test_a_factor_is_the_gradient_of_its_surrogate(factor, surrogate, settings, seed, far):
    logps = moved(seed, far)
    f_C = factor(logps, settings)
    exact_C, = torch.autograd.grad(surrogate(logps, settings), logps.logp_C)
    torch.testing.assert_close(f_C * logps.adv_C, exact_C, rtol=0, atol=1e-14)
    assert bool((f_C == 0).any()) == (far > 0.05 and factor is ctpo.cumulative)


def test_signs_take_right_or_wrong_completions_and_forks_the_fifth_with_the_highest_entropy():
    rewards = Rewards({"accuracy": wide([[1.0, 0.0, math.nan]])}, {"accuracy": 1.0}, torch.ones(1, 3))
    for settings, *expected in (({}, 0.1, -1.0), ({"right": 0}, 0.0, -1.0), ({"right": 1, "wrong": 0}, 1.0, 0.0)):
        found_NG = signs.signs(rewards, signs.Signs(**settings))
        torch.testing.assert_close(found_NG, wide([[*expected, math.nan]]), equal_nan=True)
    entropy_C = torch.tensor([0.1, 2.0, 0.3, 0.0, 1.0, 0.2, 0.1, 0.4, 0.0, 0.1])
    marked_C, = forks.weigh([], [], [entropy_C], config.Loss())
    assert marked_C.nonzero()[:, 0].tolist() == [1, 4]
    assert forks.highest(entropy_C[:2], 0.2).tolist() == [0, 1]


FEW = ["data.limit=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "data.eval=null"]  # step 2 is epoch 2
ONE_ROW = "pack.capacity=4096"
METHODS = {
    "ctpo": ["loss.trust={kind: cumulative}", "update.minibatches=2"],
    "sapo": ["loss.trust={kind: soft_gate}", "update.minibatches=2"],
    "signs": ["advantage={kind: signs}"],
    "forks": [ONE_ROW],
    "otb": ["advantage={kind: leave_one_out}", ONE_ROW],
    "otb_released": ["advantage={kind: leave_one_out}", ONE_ROW],
    "allocation": ["advantage={kind: allocated}"],
    "abort": ["advantage={kind: survivors}", "prune.completions={kind: abort, mark: 8, bias: -0.5}"],
    "abort_controls": ["advantage={kind: survivors}",
                       "prune.completions={kind: biased_abort, mark: 8, aborted: balanced}"]}


def words(method: str, out, *settings: str) -> list[str]:
    plain = loader.flatten(toy_config(out, *FEW, name="grpo_toy.yaml"))
    same = ("out", "model.path", "data.train", "data.limit", "model.dtype", "steps", "rollout.group_size",
            "rollout.prompts_per_step", "rollout.max_new_tokens", "pack.capacity", "optim.warmup_steps")
    chosen = [*(f"{key}={plain[key]}" for key in same), "data.eval=null", *METHODS[method], *settings]
    return [method, "--config", "grpo_toy.yaml", *(word for setting in chosen for word in ("--set", setting))]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_through_the_script(method, plugged, command, tmp_path):
    assert command(try_method, *words(method, tmp_path / "run")) == 0
    first, second = steps_of(tmp_path / "run")
    assert first["rollout/pending"] == 0 or method == "abort_controls"
    if method.startswith("abort"):
        assert second["rollout/pending"] > 0 and second["prune/offered"] == 16
        assert second["prune/kept"] == 16 - second["rollout/pending"]
        assert second["mismatch/logp_abs_max"] < 1e-9  # of both pieces
    assert leaves.through("inputs", config.load("grpo_toy.yaml"), {}).keys() == {METHOD}
    if method == "allocation":
        assert first["rollout/prompts"] == 16
        assert 1 < second["prune/weight_max"] < 8


def test_settings_that_do_not_go_with_a_method_are_errors(plugged, command, tmp_path, capsys):
    plugged(abort)
    for setting, named in {
        "loss.normalize=token": "loss.normalize", "loss.denominator=kept": "loss.denominator=all",
        "advantage={kind: centred}": "advantage.kind=survivors",
        "prune.completions.mark=24": "rollout.max_new_tokens=24",
        "prune.prompts={kind: bernoulli, drop_prob: 0.5}": "prune.prompts.kind=bernoulli must be none",
    }.items():
        assert command(train, *words("abort", tmp_path / "run", setting)[1:]) != 0
        assert named in capsys.readouterr().err


court = try_method.load(ROOT / "experiments" / "court.py")


@pytest.fixture
def every_method(plugged):
    for name in {arm.method for arm in court.ARMS.values() if arm.method}:
        plugged(try_method.load(court.COURT / f"{name}.py"))


def test_every_arm_is_a_config_and_every_claim_is_about_two_of_them(every_method):
    for name, arm in court.ARMS.items():
        settings = court.run_of(name, arm, "1e-4", 0).plain_settings()
        assert settings["model.path"] == "experiments/long_sums/model" and settings["rollout.max_new_tokens"] == 320
        assert settings["rollout.group_size"] * settings["rollout.prompts_per_step"] * settings["steps"] == 64 * 60
        rate = court.chosen_rate(name, court.RESULTS)  # what is kept is what the arms of today would run
        assert all(is_kept(court.run_of(name, arm, rate, seed), court.RESULTS) for seed in (0, 4)), name
    assert {claim.number for claim in court.CLAIMS} == set(range(1, 14))
    assert {of for claim in court.CLAIMS for of in (claim.arm, claim.other)} <= court.ARMS.keys()
    assert {claim.cost for claim in court.CLAIMS} <= court.COSTS.keys()


def test_a_claim_is_judged_by_its_interval_and_its_bound(every_method, tmp_path, capsys):
    results = tmp_path / "results.jsonl.xz"
    gains = {"grpo": 0.2, "pps": 0.4, "cppo": 0.1, "nsr": 0.2, "psr": 0.5}
    for name, gain in gains.items():
        for rate in court.GRID:
            best = 0.05 * (rate == "1e-4")
            make(results, court.run_of(name, court.ARMS[name], rate, court.TUNING_SEED, tuning=True), gain + best)
        for seed in range(3):
            make(results, court.run_of(name, court.ARMS[name], "1e-4", seed), gain)
    court.report(results)
    out = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    verdicts = {row[2].partition(",")[0]: row[-1] for row in rows if len(row) == 5}
    assert verdicts["pps less grpo"] == "holds" == verdicts["pps less cppo"] == verdicts["nsr less grpo"]
    assert verdicts["nsr less psr"] == "does not" and verdicts["otb less leave-one-out"] == "not run"
    assert "| cppo | 1e-4 | 1 | 3 |" in out and f"{5 * 6} runs, 0.3 CPU hours" in out
    arms, _ = court.kept(results, court.ARMS)
    for record in arms["cppo"].values():
        record.about["settings"]["steps"] = 4
    assert all(court.paired_gap(arms, name, "grpo", "steps", 1) is None for name in ("cppo", "otb"))
    assert court.paired_gap(arms, "cppo", "grpo", "seconds", 1).difference.mean < 0


def test_the_page_of_the_court_quotes_tables_that_it_prints_of_what_is_kept(every_method, capsys):
    court.report(court.RESULTS)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    quoted = [line for line in (ROOT / "docs" / "court.md").read_text().splitlines() if line.startswith("| ")]
    assert not set(quoted) - set(printed)
    claims = [line for line in printed if line.split(" | ")[0].strip("| ").isdigit()]
    assert len(claims) == len(court.CLAIMS) and set(claims) <= set(quoted)


def test_rates_are_chosen_of_a_whole_grid_and_of_the_neighbour_of_an_end(every_method, tmp_path, monkeypatch):
    results, arm, made = tmp_path / "results.jsonl.xz", court.ARMS["grpo"], []

    def keep(run, results, bar):
        made.append(run.name)
        make(results, run, {"2.5e-5": 0.1, "5e-5": 0.2, "1e-4": 0.3, "2e-4": 0.4, "4e-4": 0.3}[run.rate])

    monkeypatch.setattr(court, "keep", keep)
    assert court.chosen_rate("grpo", results) is None
    court.train({"grpo": arm}, range(2), results, until=math.inf)
    assert made == [f"grpo-{rate}-validation-seed100" for rate in (*court.GRID, "4e-4")] + [
        f"grpo-2e-4-test-seed{seed}" for seed in range(2)]
    made.clear()
    court.train({"grpo": arm}, range(2), results, until=-math.inf)
    assert not made
    court.train({"grpo-1e-4": court.ARMS["grpo-1e-4"]}, range(2), results, until=math.inf)
    assert made == [f"grpo-1e-4-1e-4-test-seed{seed}" for seed in range(2)]  # at the rate that it is given
    for name in ("grpo-2e-4-validation-seed100", "grpo-4e-4-validation-seed100"):
        record = court.kept_runs.read(results)[name]
        append(name, replace(record, about=record.about | {"finite": False}, lines=record.lines[:1]), results)
    assert court.chosen_rate("grpo", results) == "1e-4"
    assert court.validation_table({"grpo": arm}, results)[2].endswith("2e-4: not finite, 4e-4: not finite |")


FORK = (ROOT / "docs" / "fork.md").read_text().partition("## To try first")[2]
MINE, MINE_CONFIG = (FORK.partition(f"```{language}\n")[2].partition("```")[0] for language in ("python", "yaml"))
SHORT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv.pop(1))
import try_method

court = try_method.load(Path(try_method.__file__).with_name("court.py"))
court.RECIPE = sys.argv.pop(1)  # a small testbed in place of its own
sys.exit(court.main())
"""


@pytest.mark.slow
def test_the_method_of_the_page_is_compared_as_far_as_it_ran_and_a_changed_one_begins_anew(tmp_path):
    short, mine = tmp_path / "short.yaml", tmp_path / "my_method.py"
    short.write_text(f"base: {court.RECIPE}\neval: {{every: 1, limit: 4, max_new_tokens: 64}}\n"
                     "rollout: {max_new_tokens: 64}\n")
    mine.write_text(MINE)
    mine.with_suffix(".yaml").write_text(MINE_CONFIG.replace("../experiments/long_sums.yaml", str(short)))
    command = [sys.executable, "-c", SHORT, str(ROOT / "experiments"), str(short), "--method", "my_method.py",
               "--seeds", "2", "--out", "own", "--set", "steps=3"]
    ran = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True,
                  env=os.environ | {"OMP_NUM_THREADS": "1"})
    before, done = ran(command), ran(command)  # the second time all runs are there
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    of_grpo, = (row[3:] for row in rows if row[0] == "grpo" and len(row) == 6)  # first evaluated after 4 steps
    assert of_grpo == ["-, 2 and 0", "-, 2 and 0", "not measured"]
    assert done.returncode == 0 and before.stdout == done.stdout and "one seed" in done.stdout
    mine.write_text(MINE.replace("centred_NG / (", "-centred_NG / ("))
    done = ran([*command, "--hours", "0"])
    assert done.returncode == 1 and "no run on the test problems has ended yet" in done.stderr


def test_a_method_that_would_not_be_tried_is_an_error(plugged, refused, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    assert "mine.py has no mine.yaml beside it" in refused(try_method, str(mine))
    why = refused(court, "--method", str(mine))
    assert "advantage.kind=group_norm is not of" in why and '--set "advantage={kind: deviation}"' in why
    why = refused(try_method, str(mine), "--config", "grpo_toy.yaml", "rloo_toy.yaml")
    assert "advantage.kind=leave_one_out is not of" in why
    for name, text, says in [("none", "ADVANTAGE = {}", "defines none of ADVANTAGES, COMPLETIONS, PROMPTS, TRUST"),
                             ("taken", MINE.replace("deviation", "centred"), "advantage.kind=centred is there already"),
                             ("empty", "ADVANTAGES = {}", "empty.py defines none of"),
                             ("text", "ADVANTAGES = {'mine': len}", "method's table has dataclasses for keys, not 'm"),
                             ("broken", "import nowhere", "broken.py raised ModuleNotFoundError: No module"),
                             ("unnamed", MINE.replace('@kind("deviation")', ""), "Deviation has no name")]:
        (tmp_path / f"{name}.py").write_text(text)
        assert says in refused(court, "--method", str(tmp_path / f"{name}.py"))
    assert "method no.py not found" in refused(court, "--method", "no.py")
    (tmp_path / "signs.py").write_text("MINE = True")  # called as one of the court's
    assert try_method.load(court.COURT / "signs.py").ADVANTAGES and try_method.load(tmp_path / "signs.py").MINE


def test_what_a_weigh_returns_is_cut_off_the_graph_in_the_dtype_of_log_probs():
    method, logp_C = SimpleNamespace(weigh=lambda _, logp, *given: [logp[0].exp().float()]), wide([-1]).requires_grad_()
    factor_C, = try_method.checked_weigh(method)([None], [logp_C], [logp_C], config.Loss())
    assert not factor_C.requires_grad and factor_C.dtype == logp_C.dtype


@pytest.mark.parametrize(("words", "says"), [
    ("--method --config grpo_toy.yaml", "model.path=toy/model must be experiments/long_sums/model"),
    ("--method --set optim.lr=7e-3", "optim.lr=0.007 must be 1e-4"), ("--method --set seed=3", "the court chooses it"),
    ("--method --set eval.limit=4", "eval.limit=4 must be null"),
    ("--method --set loss.old_logp=engine", "must be recompute: weigh of"), ("--method --seeds 6", "invalid choice: 6"),
    ("--train grpo,pqs", "--train: 'grpo,pqs': give some of grpo,leave-one-out,"),
    ("--set steps=3", "--set needs --method"), ("--hours 0", "--hours needs --method or --train")])
def test_a_comparison_that_would_be_unfair_and_options_without_effect_are_errors(
        words, says, plugged, refused, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def weigh(rows, logp, entropy, loss): return [1 + 0 * logp_C for logp_C in logp]\n")
    words = words.replace("--method", f"--method {mine}")
    assert says in refused(court, *words.split(" "))
