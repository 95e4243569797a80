"""DEPO: the estimator's loss, the band, and state that is the same on every rank and after a resume."""

import itertools
import math

import pytest
import torch
from conftest import TOY, as_rolled, make_groups, refuses
from safetensors.torch import load_file, save_file
from torch import nn

import config
import data
from history import PromptHistory
from leaves.depo import join as depo
from leaves.depo.settings import Depo
from records import Group, Prompt, Rolled, Sample


def prompts_of(count: int) -> list[Prompt]:
    return data.to_prompts(data.load_problems(str(TOY.parent / "train.jsonl"))[:count], data.Tokenizer(TOY), None, 128)


def filtered(count: int = 12, seed: int = 0, **settings) -> depo.FilteredHistory:
    pruning = Depo(**({"warmup_steps": 0, "lr": 1e-2} | settings))
    return depo.FilteredHistory(PromptHistory(prompts_of(count), pruning, seed, middle=0.5), TOY)


def rolled(history, share: dict[str, float], count: int = 4, G: int = 4) -> Rolled:
    """The next `count` prompts, answered right as often as `share` says of their id."""
    draws = history.draw(count)
    kept = [draw for draw in draws if draw.kept]
    groups = [type(group)(draw.prompt, group.samples) for draw, group in
              zip(kept, make_groups([[3] * G] * len(kept), [2] * len(kept)), strict=True)]
    reward_NG = torch.tensor([[float(g < share[draw.prompt.id] * G) for g in range(G)] for draw in kept],
                             dtype=torch.float64)
    one = as_rolled(groups, reward_NG)
    return Rolled() + Rolled(draws, groups, one.rewards, one.adv_NG)


def step(history, share: dict[str, float]) -> Rolled:
    done = rolled(history, share)
    history.record(done)
    history.adapt(done)
    return done


def test_features_are_mean_embeddings_standardised_over_the_prompts(tmp_path):
    prompts = prompts_of(6)
    tensors = load_file(TOY / "model.safetensors")
    embedding_VD = tensors.pop("model.embed_tokens.weight")
    mean_KD = torch.stack([torch.stack([embedding_VD[i] for i in p.ids]).mean(0) for p in prompts])
    expected = (mean_KD - mean_KD.mean(0)) / mean_KD.std(0, correction=0)
    torch.testing.assert_close(depo.mean_embeddings(TOY, prompts), expected, rtol=1e-4, atol=1e-4)
    (tmp_path / "config.json").write_text((TOY / "config.json").read_text())
    save_file(tensors | {"lm_head.weight": embedding_VD}, tmp_path / "model.safetensors")  # tied, under its other name
    assert torch.equal(depo.mean_embeddings(tmp_path, prompts), depo.mean_embeddings(TOY, prompts))
    one = depo.mean_embeddings(TOY, prompts[:1])
    assert not one.any() and one.isfinite().all()


def test_the_loss_is_that_of_the_release_written_out():
    logit_M2 = torch.tensor([[0.3, -1.0], [0.1, 2.0], [-0.4, 0.5]], dtype=torch.float64)
    right, confidence = [0.75, 0.25, 0.22], [0.4, 1.0, 0.0]
    def bce(logit, target):
        p = 1 / (1 + math.exp(-logit))
        return -target * math.log(p) - (1 - target) * math.log(1 - p)

    score = logit_M2[:, 0].tolist()
    pairs = [(i, j) for i, j in itertools.product(range(3), repeat=2) if right[i] > right[j] + 0.05]
    assert pairs == [(0, 1), (0, 2)]  # 0.25 and 0.22 are too near
    expected = sum(bce(s, t) for s, t in zip(score, right, strict=True)) / 3
    expected += 0.5 * sum(bce(s, min(max(t, 1e-4), 1 - 1e-4)) for s, t in
                          zip(logit_M2[:, 1].tolist(), confidence, strict=True)) / 3
    alone = depo.estimator_loss(logit_M2[:1], torch.tensor([0.75]), torch.tensor([0.4]))
    expected += 3.0 * sum(max(0.5 - (score[i] - score[j]), 0) for i, j in pairs) / 2
    found = depo.estimator_loss(logit_M2, torch.tensor(right, dtype=torch.float64), torch.tensor(confidence))
    assert float(found) == pytest.approx(expected, rel=1e-6)
    assert float(alone) == pytest.approx(bce(0.3, 0.75) + 0.5 * bce(-1.0, 0.4), rel=1e-6)


def test_prompts_within_the_band_come_up_and_others_are_refilled(monkeypatch):
    history = filtered(low=0.2, high=0.7)
    numbers = [k for _, k in PromptHistory(history.prompts, history.pruning, 0, 0.5).coming(12)]
    order = [history.prompts[k].id for k in numbers]
    guess = dict(zip(numbers, [0.1, 0.2, 0.7, 0.71, 0.5, 0.9, 0.3, 0.0, 0.4, 1.0, 0.6, 0.5], strict=True))
    monkeypatch.setattr(depo.FilteredHistory, "estimates", lambda self, numbers: torch.tensor(
        [guess[k] for k in numbers], dtype=torch.float64))
    draws = history.draw(4)
    assert [draw.prompt.id for draw in draws if draw.kept] == [order[i] for i in (1, 2, 4, 6)]
    assert [draw.prob for draw in draws] == [0, 1, 1, 0, 1, 0, 1][:len(draws)]
    assert all(draw.weight in (0, 1) for draw in draws)
    history.steps = -1  # one more step of warm-up
    assert all(draw.prob == 1 for draw in history.draw(4))


def test_the_share_to_explore_is_the_chance_outside(monkeypatch):
    history = filtered(count=400, explore=0.25)
    monkeypatch.setattr(depo.FilteredHistory, "estimates", lambda self, prompts: torch.zeros(len(prompts)))
    draws = history.draw(60)
    assert history.outside < 400 and {draw.prob for draw in draws} == {0.25}
    tried = [draw for draw in draws if draw.prob == 0.25]
    assert 0.15 < sum(draw.kept for draw in tried) / len(tried) < 0.35
    assert all(draw.weight == 1 for draw in draws if draw.kept)


def test_where_everything_is_outside_a_run_goes_on_and_says_so(capsys):
    history = filtered()
    history.head[2].bias.data.fill_(9.0)
    capsys.readouterr()
    draws = history.draw(4)
    assert sum(draw.kept for draw in draws) == 4 and len(draws) >= 12
    said = "the estimates of 12 prompts in a row lie outside prune.prompts.low=0.15 to high=0.85"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_estimator_learns_which_prompts_are_hard():
    """Long questions are answered wrong and short ones right: what a mean of embeddings can tell apart."""
    history = filtered(count=64, low=0.0, high=1.0)
    longest = sorted(history.prompts, key=lambda p: len(p.ids))[32:]
    share = {p.id: 0.0 if p in longest else 1.0 for p in history.prompts}
    before = history.estimates([*range(len(history.prompts))])
    for _ in range(120):
        step(history, share)
    after = history.estimates([*range(len(history.prompts))])
    hard = torch.tensor([share[p.id] == 0 for p in history.prompts])
    assert ((before - 0.5).abs() < 0.02).all()
    assert ((after < 0.5) == hard).double().mean() > 0.9


def test_completions_that_were_not_graded_teach_nothing():
    history = filtered()
    done = rolled(history, dict.fromkeys([p.id for p in history.prompts], 0.5))
    done.rewards.components["accuracy"][:] = math.nan
    before = [p.clone() for p in history.head.parameters()]
    history.record(done)
    history.adapt(done)
    assert history.steps == 1
    assert all(p.equal(b) for p, b in zip(history.head.parameters(), before, strict=True))


def test_the_heads_weights_depend_on_the_seed_alone():
    one, other = (nn.utils.parameters_to_vector(depo.make_head(4, seed).parameters()) for seed in (0, 1))
    torch.manual_seed(5)
    assert one.equal(nn.utils.parameters_to_vector(depo.make_head(4, 0).parameters())) and not one.equal(other)


@pytest.mark.parametrize(("changes", "said"), [
    (["prune.prompts.low=0.9"], "prune.prompts.high=0.85 must be above prune.prompts.low=0.9"),
    (["prune.prompts.explore=1.5"], "prune.prompts.explore=1.5 must be in"),
    (["reward={accuracy: 0, format: 1}"], "prune.prompts.kind=depo must be another kind unless reward.accuracy")])
def test_what_the_filter_cannot_go_with_is_refused(changes, said):
    refuses(said, config.load, "depo_toy.yaml", changes)


def test_the_confidence_is_that_of_the_release_exp_of_a_mean_over_completions(monkeypatch):
    """Not the mean of exps, which is larger: log-probs of -0.1 and -2 on average give exp(-1.05)."""
    given = []
    loss = depo.estimator_loss
    monkeypatch.setattr(depo, "estimator_loss", lambda *args: given.append(args[2]) or loss(*args))
    history = filtered(4)
    prompt = history.prompts[0]
    samples = Sample((5, 6), (-0.1, -0.1), True), Sample((5, 6, 7), (-2.0, -1.0, -3.0), True)
    history.adapt(as_rolled([Group(prompt, samples)], torch.tensor([[1.0, 0.0]], dtype=torch.float64)))
    assert given[0].tolist() == pytest.approx([math.exp(-1.05)])
