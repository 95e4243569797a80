"""The critic: what it starts from, what it learns from and how well it does."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import as_batch, gradients, load, make_groups, nudge, toy_config

import collect
import critic
import data
import dist
import metrics
import model as decoder
import runfolder
import train
import update
from prune import keep_all
from sample import Rolled

LENGTHS, PROMPTS = [[3, 9, 5, 2], [4, 1, 7, 8]], [5, 3]
REWARD_NG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.5, 0.0]], dtype=torch.float64)


def set_up(folder, out, *settings: str):
    cfg = toy_config(out, f"model.path={folder}", "steps=50", "rollout.group_size=4", "rollout.prompts_per_step=2",
                     "critic.minibatches=1", *settings, name="vapo_toy.yaml")
    return train.set_up(cfg, folder, data.Tokenizer(folder))[0]


def rolled_out() -> Rolled:
    groups = make_groups(LENGTHS, PROMPTS)
    return Rolled([], groups, {"accuracy": REWARD_NG}, REWARD_NG, torch.zeros_like(REWARD_NG))


def fit(learner: update.Learner, rolled: Rolled, step: int = 0) -> dict[str, float]:
    return critic.fit(learner, rolled, step, metrics.Clock())


def test_a_new_critic_says_the_middle_of_the_rewards_everywhere(tiny, tmp_path):
    for bounded in ("true", "false"):
        learner = set_up(tiny, tmp_path / bounded, f"critic.bounded={bounded}", "reward.accuracy=2",
                         "reward.overlong=1", "reward.overlong_tokens=8")
        rows = critic.rows_of(learner, rolled_out().groups, torch.ones(2, 4, dtype=torch.bool), REWARD_NG)
        value_C, after_S = learner.values(rows[0])
        assert (value_C == 0.5).all() and (after_S == 0.5).all()  # of [-1, 2]
        nudge(learner.critic, 5.0)
        value_C, _ = learner.values(rows[0])
        assert (value_C.min() < -1.5 or value_C.max() > 2.5) == (bounded == "false")
        assert bounded == "false" or ((value_C >= -1) & (value_C <= 2)).all()


def test_a_value_sees_what_stands_before_its_token_and_nothing_else(tiny, tmp_path):
    """Changing a token changes no value up to and with its own state; the packed row says what each says alone."""
    learner = set_up(tiny, tmp_path / "run")
    nudge(learner.critic, 0.3)
    groups = make_groups(LENGTHS, PROMPTS)
    row, = critic.rows_of(learner, groups, torch.ones(2, 4, dtype=torch.bool), REWARD_NG)
    value_C, after_S = learner.values(row)
    at = 0
    for segment in range(8):
        here = (row.segment_C == segment).nonzero()[:, 0]
        ids = row.ids_T[row.offsets[segment]:row.offsets[segment + 1]]
        first = len(ids) - len(here)
        attend = decoder.sdpa_padded(torch.tensor([0, len(ids)]), len(ids))
        alone = learner.critic(ids, torch.arange(len(ids)), attend, torch.arange(first - 1, len(ids)))
        torch.testing.assert_close(torch.cat([value_C[here], after_S[segment][None]]), alone)
        changed = ids.clone()
        changed[-1] = (ids[-1] + 1) % 400
        other = learner.critic(changed, torch.arange(len(ids)), attend, torch.arange(first - 1, len(ids)))
        torch.testing.assert_close(other[:-1], alone[:-1], rtol=0, atol=0)
        assert other[-1] != alone[-1]
        at += len(here)
    assert at == sum(map(sum, LENGTHS))


def test_it_learns_from_all_that_is_done_whatever_the_policy_is_trained_on(tiny, tmp_path):
    """Half the mean squared error over the tokens, by autograd; its explained variance by hand; all, not the pruned."""
    learner, rolled = set_up(tiny, tmp_path / "run"), rolled_out()
    nudge(learner.critic, 0.3)
    row, = critic.rows_of(learner, rolled.groups, torch.ones(2, 4, dtype=torch.bool), REWARD_NG)
    target_C = row.reward_S[row.segment_C]
    value_C, _ = learner.values(row)
    expected = 0.5 * (value_C - target_C).square().mean()
    expected.backward()
    grads = gradients(learner.critic)
    learner.critic.zero_grad()
    norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
    error_C = (target_C - value_C).detach()
    explained = 1 - (error_C.var(correction=0) / target_C.var(correction=0)).item()
    before = {name: dist.full(p).clone() for name, p in learner.critic.named_parameters()}
    measured = fit(learner, rolled)
    assert measured == pytest.approx({"critic/tokens": 39, "critic/lr": 3e-4, "critic/loss": expected.item(),
                                      "critic/grad_norm": norm, "critic/value": value_C.mean().item(),
                                      "critic/explained_variance": explained})
    assert any((dist.full(p) != before[name]).any() for name, p in learner.critic.named_parameters())
    policy = load(tiny, torch.float64)
    for mine, theirs in zip(learner.policy.parameters(), policy.parameters(), strict=True):
        assert torch.equal(dist.full(mine), theirs)


@pytest.mark.parametrize("settings", [[], ["critic.minibatches=3", "critic.epochs=2"], ["advantage.lam_critic=0.9"]])
def test_it_comes_to_explain_the_rewards(settings, tiny, tmp_path):
    """But for what the first tokens get: their state is the prompt, the same for right and wrong."""
    learner, rolled = set_up(tiny, tmp_path / "run", "critic.lr=3e-3", *settings), rolled_out()
    curve = [fit(learner, rolled, step)["critic/explained_variance"] for step in range(60)]
    assert curve[0] < 0.05 and curve[-1] > 0.7


def test_minibatches_share_out_what_is_done(tmp_path):
    cfg = toy_config(tmp_path / "run", "critic.minibatches=3", "steps=50", name="vapo_toy.yaml")
    done_NG = torch.tensor([[True, True, False, True], [True, False, True, True]])
    parts = critic.split(done_NG, cfg, 0)
    assert torch.equal(sum(part.int() for part in parts), done_NG.int())
    assert [int(part.sum()) for part in parts] == [2, 2, 2]
    assert any(not torch.equal(a, b) for a, b in zip(parts, critic.split(done_NG, cfg, 1), strict=True))
    assert len(critic.split(torch.tensor([[True, False]]), cfg, 0)) == 1


def test_targets_are_lambda_returns(tiny, tmp_path):
    learner = set_up(tiny, tmp_path / "run", "advantage.lam_critic=0.7")
    nudge(learner.critic, 0.3)
    row, = critic.rows_of(learner, rolled_out().groups, torch.ones(2, 4, dtype=torch.bool), REWARD_NG)
    value_C, target_C = learner.values(row)[0].detach(), critic.target(learner, row)
    for segment, reward in enumerate(row.reward_S.tolist()):
        value_T, target_T = (x[row.segment_C == segment] for x in (value_C, target_C))
        later = reward
        for t in reversed(range(len(value_T))):  # G_t = lam G_{t+1} + (1 - lam) V(s_{t+1}), the reward behind the last
            after = value_T[t + 1].item() if t + 1 < len(value_T) else reward
            later = 0.7 * later + 0.3 * after
            assert target_T[t].item() == pytest.approx(later)
    one = replace(learner, cfg=replace(learner.cfg, advantage=replace(learner.cfg.advantage, lam_critic=1.0)))
    assert torch.equal(critic.target(one, row), row.reward_S[row.segment_C])


def test_too_few_are_no_step(tiny, tmp_path):
    learner, rolled = set_up(tiny, tmp_path / "run", "critic.min_samples=9"), rolled_out()
    assert fit(learner, rolled) == {"critic/tokens": 0, "critic/lr": 3e-4}
    assert "critic/loss" in fit(replace(learner, cfg=toy_config(
        tmp_path / "run", "critic.min_samples=8", "steps=50", name="vapo_toy.yaml")), rolled)


def test_equal_rewards_leave_no_variance_to_explain(tiny, tmp_path):
    rolled = replace(rolled_out(), reward_NG=torch.full((2, 4), 0.3, dtype=torch.float64))
    assert "critic/explained_variance" not in fit(set_up(tiny, tmp_path / "run"), rolled)


def test_pretraining_leaves_the_policy_and_ends_by_steps_or_by_what_is_explained(tmp_path):
    """The policy's rate warms up from the first step in which it learns."""
    cfg = toy_config(tmp_path / "run", "steps=4", "critic.pretrain_steps=2", "optim.warmup_steps=2",
                     "critic.warmup_steps=4", name="vapo_toy.yaml")
    train.train(cfg)
    lines = [line for line in runfolder.read(tmp_path / "run" / "metrics.jsonl") if "rollout/tokens" in line]
    rates = [line.get("train/lr") for line in lines]
    assert rates == [None, None, cfg.optim.lr / 2, cfg.optim.lr]
    assert [line["critic/lr"] for line in lines] == pytest.approx([cfg.critic.lr * k / 4 for k in (1, 2, 3, 4)])
    assert "train/loss" not in lines[1] and "critic/loss" in lines[0]
    early = replace(cfg, critic=replace(cfg.critic, pretrain_until=0.2))
    for step, explained, expected in ((1, 0.19, None), (1, 0.2, 1), (2, -1.0, 2), (0, math.nan, None)):
        assert train.pretrained(early, step, {"critic/explained_variance": explained}) == expected
    assert train.pretrained(early, 1, {}) is None


def test_short_responses_are_warned_of_once(tiny, tmp_path):
    class Saying(runfolder.Log):
        said = ""

        def say(self, text):
            self.said += text

    groups = make_groups([[30, 9], [5, 2]], PROMPTS)
    batch = as_batch(groups, REWARD_NG[:, :2], keep_all(REWARD_NG[:, :2]))
    for alpha, told in ((0.05, True), (1.0, False)):
        log = Saying(None)
        cfg = toy_config(tmp_path / "run", f"advantage.alpha={alpha}", "steps=50", name="vapo_toy.yaml")
        collect.warn_of_short(batch, cfg, log)
        assert ("advantage.alpha=0.05 gives 3 of 4 responses" in log.said) == told
