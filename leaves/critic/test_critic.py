"""The critic: what it starts from, what it learns from and how well it does."""

from dataclasses import replace
from pathlib import Path

import conftest
import pytest
import torch
from conftest import as_rolled, attend_alone, gradients, load, make_groups, nudge, parts_of, toy_config
from test_invariance import Gradient, assert_same, change, in_other_ways, objective
from test_invariance import rolled as rolled  # a fixture
from test_objectives import critic_of, learner_on
from test_unbiased import Padded, padded

import config
import train
from infra import dist
from learner import Learner
from leaves.critic import join as critic
from leaves.windows.join import Piece
from metrics import Clock
from records import PromptDraw, Rolled, Row

LENGTHS, PROMPTS = [[3, 9, 5, 2], [4, 1, 7, 8]], [5, 3]
REWARD_NG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.5, 0.0]], dtype=torch.float64)


def set_up(folder, out, *settings: str):
    cfg = toy_config(out, f"model.path={folder}", "steps=50", "rollout.group_size=4", "rollout.prompts_per_step=2",
                     "critic.minibatches=1", *settings, name="vapo_toy.yaml")
    return parts_of(cfg, folder).learner


def rolled_out() -> Rolled:
    return as_rolled(make_groups(LENGTHS, PROMPTS), REWARD_NG)


def fit(learner: Learner, rolled: Rolled, step: int = 0) -> dict[str, float]:
    return critic.fit_values(critic_of(learner), learner, rolled, step, Clock())


def split(learner: Learner, rolled: Rolled, step: int = 0) -> list:
    return critic.split_minibatches(critic_of(learner), learner, rolled, step)


def row_of(learner: Learner, rolled: Rolled) -> tuple[Row, torch.Tensor]:
    """The one row, and the rewards of its completions."""
    minibatch, = split(learner, rolled)
    row, = learner.rows(minibatch)
    return row, row.of_members(minibatch.reward_NG)


def test_a_new_critic_says_the_middle_of_the_rewards_everywhere(tiny, tmp_path):
    learner = set_up(tiny, tmp_path / "run", "reward.accuracy=2", "reward.overlong=1", "reward.overlong_tokens=8")
    (row, _), of_critic = row_of(learner, rolled_out()), critic_of(learner)
    value_C, after_S = of_critic.values(learner, row)
    assert (value_C == 0.5).all() and (after_S == 0.5).all()  # of [-1, 2]
    nudge(of_critic.model, 5.0)
    value_C, _ = of_critic.values(learner, row)
    assert value_C.min() < -1.5 or value_C.max() > 2.5


def test_the_values_head_is_not_rounded_where_the_backbone_computes_in_halves(tiny, tmp_path):
    """1 + 2^-12 is no bfloat16."""
    learner = set_up(tiny, tmp_path / "run", "model.dtype=bfloat16")
    of_critic = critic_of(learner)
    head = of_critic.model.value
    with torch.no_grad():
        head.weight.fill_(1 + 2**-12)
    of_critic.model.middle = 0.0
    seen = []
    head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    value_C = torch.cat(of_critic.values(learner, row_of(learner, rolled_out())[0]))
    assert value_C.dtype == seen[0].dtype == torch.float32
    expected = seen[0].double().sum(dim=1) * (1 + 2**-12)
    torch.testing.assert_close(value_C.double(), expected, rtol=1e-5, atol=1e-5)
    assert (expected - seen[0].double().sum(dim=1)).abs().max() > 1e-4


def test_a_value_sees_what_stands_before_its_token_and_nothing_else(tiny, tmp_path):
    """Changing a token changes no value up to and with its own state; the packed row says what each says alone."""
    learner, rolled = set_up(tiny, tmp_path / "run"), rolled_out()
    of_critic = critic_of(learner)
    nudge(of_critic.model, 0.3)
    row, _ = row_of(learner, rolled)
    value_C, after_S = of_critic.values(learner, row)
    assert len(value_C) == sum(map(sum, LENGTHS))
    for segment in range(8):
        here = (row.segment_C == segment).nonzero()[:, 0]
        group = rolled.groups[segment // 4]
        ids = torch.tensor([*group.prompt.ids, *group.samples[segment % 4].ids])
        first = len(ids) - len(here)
        assert first == len(group.prompt.ids)
        alone = of_critic.model(ids, torch.arange(len(ids)), attend_alone, torch.arange(first - 1, len(ids)))
        torch.testing.assert_close(torch.cat([value_C[here], after_S[segment][None]]), alone)
        changed = ids.clone()
        changed[-1] = (ids[-1] + 1) % 400
        other = of_critic.model(changed, torch.arange(len(ids)), attend_alone, torch.arange(first - 1, len(ids)))
        torch.testing.assert_close(other[:-1], alone[:-1], rtol=0, atol=0)
        assert other[-1] != alone[-1]


def test_it_learns_from_all_that_is_done_whatever_the_policy_is_trained_on(tiny, tmp_path):
    """Half the mean squared error over the tokens, by autograd; its explained variance by hand; all, not the pruned."""
    learner, rolled = set_up(tiny, tmp_path / "run"), rolled_out()
    of_critic = critic_of(learner)
    nudge(of_critic.model, 0.3)
    row, reward_S = row_of(learner, rolled)
    target_C = reward_S[row.segment_C]
    value_C, _ = of_critic.values(learner, row)
    expected = 0.5 * (value_C - target_C).square().mean()
    expected.backward()
    grads = gradients(of_critic.model)
    of_critic.model.zero_grad()
    norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
    error_C = (target_C - value_C).detach()
    explained = 1 - (error_C.var(correction=0) / target_C.var(correction=0)).item()
    before = {name: dist.gather_full(p).clone() for name, p in of_critic.model.named_parameters()}
    measured = fit(learner, rolled)
    assert measured == pytest.approx({"critic/tokens": 39, "critic/lr": 3e-4, "critic/loss": expected.item(),
                                      "critic/grad_norm": norm, "critic/value": value_C.mean().item(),
                                      "critic/explained_variance": explained})
    assert any((dist.gather_full(p) != before[name]).any() for name, p in of_critic.model.named_parameters())
    policy = load(tiny, torch.float64)
    for mine, theirs in zip(learner.policy.parameters(), policy.parameters(), strict=True):
        assert torch.equal(dist.gather_full(mine), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["critic.minibatches=3", "critic.epochs=2"], ["advantage.lam_critic=0.9"]])
def test_it_comes_to_explain_the_rewards(settings, tiny, tmp_path):
    """But for what the first tokens get: their state is the prompt, the same for right and wrong."""
    learner, rolled = set_up(tiny, tmp_path / "run", "critic.lr=3e-3", *settings), rolled_out()
    curve = [fit(learner, rolled, step)["critic/explained_variance"] for step in range(40)]
    assert curve[0] < 0.05 and curve[-1] > 0.7


def ended(rolled: Rolled, *which: bool) -> Rolled:
    """The same with completions that go on where `which` is false."""
    flags = iter(which)
    groups = [replace(group, samples=tuple(Piece(replace(s, finished=f), pending=not f) for s, f in zip(
        group.samples, flags, strict=False))) for group in rolled.groups]
    return replace(rolled, groups=groups)


def test_minibatches_share_out_what_has_ended(tiny, tmp_path):
    learner = set_up(tiny, tmp_path / "run", "critic.minibatches=3")
    rolled = ended(rolled_out(), True, True, False, True, True, False, True, True)
    done_NG = torch.tensor([[True, True, False, True], [True, False, True, True]])
    one, other = ([minibatch.keep_NG for minibatch in split(learner, rolled, step)] for step in (0, 1))
    assert torch.equal(sum(keep_NG.int() for keep_NG in one), done_NG.int())
    assert [int(keep_NG.sum()) for keep_NG in one] == [2, 2, 2]
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(split(learner, ended(rolled_out(), True, *[False] * 7))) == 1


def test_targets_are_lambda_returns(tiny, tmp_path):
    learner = set_up(tiny, tmp_path / "run", "advantage.lam_critic=0.7")
    of_critic = critic_of(learner)
    nudge(of_critic.model, 0.3)
    row, reward_S = row_of(learner, rolled_out())
    value_C = of_critic.values(learner, row)[0].detach()
    target_C = critic.critic_target(of_critic, learner, row, reward_S)
    for segment, reward in enumerate(reward_S.tolist()):
        value_T, target_T = (x[row.segment_C == segment] for x in (value_C, target_C))
        later = reward
        for t in reversed(range(len(value_T))):  # G_t = lam G_{t+1} + (1 - lam) V(s_{t+1}), the reward behind the last
            after = value_T[t + 1].item() if t + 1 < len(value_T) else reward
            later = 0.7 * later + 0.3 * after
            assert target_T[t].item() == pytest.approx(later)
    one = replace(of_critic, advantage=replace(of_critic.advantage, lam_critic=1.0))
    assert torch.equal(critic.critic_target(one, learner, row, reward_S), reward_S[row.segment_C])


@pytest.mark.parametrize("settings", [[], ["advantage.lam_critic=0.7"]])
def test_a_prompt_that_makes_up_for_skipped_ones_counts_as_often(settings, tiny, tmp_path):
    """A weight of 3 is as if the group were there three times; the skipped turn has none. A mean over tokens, still."""
    learner, (one, two) = set_up(tiny, tmp_path / "run", *settings), make_groups(LENGTHS, PROMPTS)
    of_critic = critic_of(learner)
    nudge(of_critic.model, 0.3)

    def gradient(rolled: Rolled) -> list[torch.Tensor]:
        of_critic.model.zero_grad()
        row, reward_S = row_of(learner, rolled)
        critic.add_value_gradient(of_critic, learner, row, critic.critic_target(of_critic, learner, row, reward_S))
        return list(gradients(of_critic.model).values())

    plain, thrice_NG = rolled_out(), REWARD_NG[[0, 0, 0, 1]]
    skipped = PromptDraw(replace(one.prompt, id="q2"), 0, prob=0.5, weight=0.0)
    draws = [PromptDraw(one.prompt, 0, prob=1 / 3, weight=3.0), skipped, PromptDraw(two.prompt, 0)]
    weighed = gradient(replace(plain, draws=draws))
    often = gradient(as_rolled([one, one, one, two], thrice_NG))
    torch.testing.assert_close(weighed, often)
    assert all((a - b).abs().max() > 1e-6 for a, b in zip(weighed, gradient(plain), strict=True))


def test_where_nothing_has_ended_there_is_no_step(tiny, tmp_path):
    learner, rolled = set_up(tiny, tmp_path / "run"), rolled_out()
    assert fit(learner, ended(rolled, *[False] * 8)) == {"critic/tokens": 0, "critic/lr": 3e-4}
    assert "critic/loss" in fit(learner, ended(rolled, True, *[False] * 7))


def test_equal_rewards_leave_no_variance_to_explain(tmp_path):
    """Nor does a model whose head is its own have more to say: the critic leaves that out."""
    rolled = as_rolled(make_groups(LENGTHS, PROMPTS), torch.full((2, 4), 0.3, dtype=torch.float64))
    folder = conftest.write_tiny(tmp_path / "model", tie_word_embeddings=False)
    assert "critic/explained_variance" not in fit(set_up(folder, tmp_path / "run"), rolled)


@pytest.mark.slow
def test_pretraining_leaves_the_policy(tmp_path):
    """The policy's rate warms up from the first step in which it learns."""
    cfg = toy_config(tmp_path / "run", "steps=3", "critic.pretrain_steps=1", "optim.warmup_steps=2",
                     "critic.warmup_steps=3", "data.eval=null", "rollout.max_new_tokens=24", name="vapo_toy.yaml")
    train.train(cfg)
    lines = conftest.steps_of(tmp_path / "run")
    assert [line.get("train/lr") for line in lines] == [None, cfg.optim.lr / 2, cfg.optim.lr]
    assert [line["critic/lr"] for line in lines] == pytest.approx([cfg.critic.lr * k / 3 for k in (1, 2, 3)])
    assert "train/loss" not in lines[0] and "critic/loss" in lines[0]


def test_a_critic_learns_from_those_with_a_reward_alone(tiny, tmp_path):
    step = Padded(tiny, tmp_path / "run", "advantage={kind: gae}", "critic.lr=1e-4")
    rolled = as_rolled(step.groups, padded(REWARD_NG), padded(REWARD_NG))
    parts = critic.split_minibatches(critic_of(step.learner), step.learner, rolled, 0)
    times_NG = sum(part.keep_NG.int() for part in parts)
    assert torch.equal(times_NG == 1, ~padded(REWARD_NG).isnan())


def critics_gradient(cfg: config.Config, groups: list, adv_NG: torch.Tensor) -> tuple[float, Gradient]:
    learner, total = learner_on(Path(cfg.model.path), cfg), 0.0
    of_critic = critic_of(learner)
    nudge(of_critic.model, 0.1)
    minibatch, = critic.split_minibatches(of_critic, learner, as_rolled(groups, adv_NG), step=0)
    for row in learner.rows(minibatch):
        target_C = critic.critic_target(of_critic, learner, row, row.of_members(minibatch.reward_NG))
        loss, _ = critic.add_value_gradient(of_critic, learner, row, target_C)
        total += loss.item()
    return dist.sum_over_ranks({"loss": total})["loss"], gradients(of_critic.model)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["advantage.lam_critic=1", "advantage.lam_critic=0.9", "model.lora.rank=2"])
def test_the_critics_gradient_does_not_depend_on_the_cut_or_the_order(how, rolled, tiny, tmp_path):
    cfg = objective("vapo", tmp_path / "run", f"model.path={tiny}", "critic.minibatches=1", how)
    alone = critics_gradient(cfg, *rolled)
    for other in in_other_ways(critics_gradient, cfg, *rolled):
        assert_same(alone, other, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "all"])
def test_compiled_passes_have_the_same_gradient_of_the_critic(how, rolled, tiny, tmp_path):
    cfg = objective("vapo", tmp_path / "run", f"model.path={tiny}", "critic.minibatches=1", "pack.capacity=176",
                    f"model.checkpoint_blocks={how}")
    fused = change(cfg, "model.compile=true")
    assert_same(critics_gradient(cfg, *rolled), critics_gradient(fused, *rolled), rtol=1e-10)
