"""The loop against a plain one written out here, every setting followed to where it acts, and what a fork relies on."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import TOY, as_batch, load, logp_alone, make_groups, parts_of, steps_of, toy_config, weights
from test_checkpoint import saved
from test_objectives import gradient_of, learner_on
from torch import nn

import data
import rollout
import train
import update
from history import epoch_order
from infra import dist, runfolder
from infra.checkpoint import tensors
from learner import NotFinite, optimizer_step
from metrics import Clock
from prune import COMPLETIONS, keep_all, keep_largest
from records import Group, Pruned, Sample
from verify.extract import last_tag
from verify.grade import grade


def plain_epoch(model, optimizer, groups, adv_NG, old, ref, weight, batches, max_len) -> dict[str, float]:
    """One pass by the textbook: Dr. GRPO's constant, dual clip 1.3, clip 0.2 / 0.25, KL 0.3, times `weight`."""
    total = dict.fromkeys(("k3", "stopped", "seen", "norm", "loss"), 0.0)
    for members in batches:
        kept = [(n, g) for n, g in old if n in members]
        optimizer.zero_grad()
        for n, g in kept:
            A, now = adv_NG[n, g], logp_alone(model, groups[n], groups[n].samples[g], 0.8)
            ratio = (now - old[n, g]).exp()
            surrogate = torch.minimum(ratio * A, ratio.clamp(0.8, 1.25) * A)
            surrogate = torch.maximum(surrogate, 1.3 * A) if A < 0 else surrogate
            drift = (ref[n, g] - now).exp() - (ref[n, g] - now) - 1
            (weight[n, g] * (-surrogate + 0.3 * drift) / (max_len * len(kept))).sum().backward()
            stopped = (A > 0) & (ratio > 1.25) | (A < 0) & ((ratio < 0.8) | (ratio > 1.3))
            linear = -torch.where(stopped, 0.0, ratio) * A * now + 0.3 * drift
            total["loss"] += ((weight[n, g] * linear).sum() / (max_len * len(kept))).item()
            total["k3"] += drift.sum().item()
            total["stopped"] += stopped.sum().item()
            total["seen"] += len(now)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        total["norm"] += torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
    return total


def near(groups: list[Group], model, temperature: float) -> list[Group]:
    """The groups with an engine's log-probs near the model's, completion by completion lower and higher."""
    generator = torch.Generator().manual_seed(5)

    def moved(n: int, g: int) -> Sample:
        noise = torch.randn(2, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            logp_C = logp_alone(model, groups[n], groups[n].samples[g], temperature)
        engine_C = logp_C + 0.1 * noise[0] + 0.2 * noise[1] * logp_C.cos()
        return replace(groups[n].samples[g], logp=tuple(engine_C.tolist()))

    return [replace(group, samples=tuple(moved(n, g) for g in range(len(group.samples))))
            for n, group in enumerate(groups)]


HOW = {"recompute": (), "engine": ("loss.old_logp=engine",), "corrected": ("loss.tis_cap=1.1", "loss.mask_ratio=1.1")}


@pytest.mark.parametrize("how", HOW)
def test_two_updates_are_those_of_a_plain_loop(how, tiny, tmp_path):
    """Two epochs of two mini-batches, twice: right groups, own denominators, old and reference policy kept apart."""
    cfg = toy_config(tmp_path / "run", "update.epochs=2", "update.minibatches=2", "loss.kl=0.3",
                     "loss.normalize=constant", "loss.trust.dual=1.3", "loss.trust.high=0.25", "optim.lr=0.06",
                     "optim.warmup_steps=2", "optim.beta1=0.5", "optim.beta2=0.7", "optim.weight_decay=0.1",
                     "rollout.temperature=0.8", "pack.capacity=176", *HOW[how])
    groups = make_groups([[3, 9, 5, 2], [4, 1, 7, 8], [6, 6, 2, 3], [9, 2, 4, 5]], [5, 3, 9, 1])
    adv_NG = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pruned = keep_largest(adv_NG, 2, "batch")
    assert pruned.keep_NG.sum(dim=1).unique().numel() > 1
    learner = learner_on(tiny, cfg)
    policy, initial = load(tiny, torch.float64).requires_grad_(True), load(tiny, torch.float64)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.5, 0.7), weight_decay=0.1)
    for step in (0, 1):  # the second step tells the policy before the update from the reference
        groups = near(groups, policy, 0.8)
        optimizer.param_groups[0]["lr"] = (0.03, 0.06)[step]
        measured = update.update(learner, as_batch(groups, adv_NG, pruned), step, Clock())
        with torch.no_grad():
            old, ref = ({(n, g): logp_alone(model, groups[n], groups[n].samples[g], 0.8)
                         for n, g in pruned.keep_NG.nonzero().tolist()} for model in (policy, initial))
        engine = {(n, g): torch.tensor(groups[n].samples[g].logp, dtype=torch.float64) for n, g in old}
        ratio = {key: (old[key] - engine[key]).exp() for key in old}
        weight = {key: torch.ones_like(x) for key, x in ratio.items()}
        if how == "corrected":
            weight = {key: x.clamp(max=1.1) * (1 / 1.1 <= x.log().mean().exp() <= 1.1) for key, x in ratio.items()}
            assert any(w.any() for w in weight.values()) and not all(w.all() for w in weight.values())
        batches = update.split_prompts(cfg.seed, step, 4, cfg.update.minibatches)
        epochs = [plain_epoch(policy, optimizer, groups, adv_NG, engine if how == "engine" else old, ref, weight,
                              batches, cfg.rollout.max_new_tokens) for _ in range(2)]
        # Without an extra pass the mini-batches after the first meet a policy that has moved.
        compared = [key for key in old if how != "engine" or key[0] in batches[0]]
        ratio_C = torch.cat([ratio[key] for key in compared])
        assert {key: measured[f"mismatch/{key}"] for key in ("logp_abs_mean", "logp_abs_max", "ess")} == (
            pytest.approx({
                "logp_abs_mean": ratio_C.log().abs().mean().item(), "logp_abs_max": ratio_C.log().abs().max().item(),
                "ess": (ratio_C.sum() ** 2 / ratio_C.square().sum() / len(ratio_C)).item()}))
        weight_C = torch.cat(list(weight.values()))
        assert measured["mismatch/weight_mean"] == pytest.approx(weight_C.mean().item())
        assert measured["mismatch/masked"] == pytest.approx((weight_C == 0).double().mean().item())
        total = {key: sum(epoch[key] for epoch in epochs) for key in epochs[0]}
        torch.testing.assert_close(weights(learner.policy), weights(policy), rtol=0, atol=1e-8)
        assert {key: measured[f"train/{key}"] for key in ("tokens", "kl", "clipped", "loss", "grad_norm")} == (
            pytest.approx({"tokens": sum(map(len, old.values())), "kl": total["k3"] / total["seen"],
                           "clipped": total["stopped"] / total["seen"], "loss": total["loss"] / 4,
                           "grad_norm": total["norm"] / 4}))
    assert 0 < total["stopped"] < total["seen"]


def test_a_run_samples_scores_and_evaluates_as_its_config_says(tmp_path, monkeypatch):
    """What the engine is asked, and what becomes of rewards 2, 0, 2.5, 0, whatever the model would have written."""
    for name in ("gsm8k_train", "gsm8k_test"):
        # Questions hold the answer: only the completion may be scored.
        rows = [{"question": f"{name} {n} + {n}? #### {2 * n}", "answer": f"#### {2 * n}"} for n in range(1, 9)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = toy_config(tmp_path / "run", "data.system_prompt=Zebra.", "data.train=gsm8k_train", "data.eval=gsm8k",
                     f"data.dir={tmp_path}", "seed=3", "reward.accuracy=2", "reward.tag_exact=0.5",
                     "advantage.correction=0", "advantage.eps=0.5", "steps=1", "eval.max_new_tokens=9",
                     "rollout.temperature=0.7")
    asked, tokenizer, generate = [], data.Tokenizer(TOY), rollout.TorchEngine.generate

    def spy(self, requests, temperature, *rest, **named):
        limit, = {request.limit for request in requests}
        asked.append(([tokenizer.decode(request.prompt.ids) for request in requests], limit, temperature))
        if temperature == 0:
            return generate(self, requests, temperature, *rest, **named)
        golds = [2 * int(text.partition("gsm8k_train ")[2].split()[0]) for text in asked[-1][0]]
        texts = [(f"#### {gold}", "x", f"<answer>{gold}</answer>", "#### 99")[i % 4] for i, gold in enumerate(golds)]
        return [Sample(ids, (-1.0,) * len(ids), True) for ids in tokenizer.encode(texts)]

    monkeypatch.setattr(rollout.TorchEngine, "generate", spy)
    train.train(cfg)
    before, rolled, after = asked
    assert all("Zebra." in text for texts, _, _ in asked for text in texts)
    assert all("gsm8k_test" in text for text in before[0] + after[0])
    assert (before[1:], rolled[1:], after[1:]) == ((9, 0.0), (48, 0.7), (9, 0.0))
    expected = [f"gsm8k_train {i + 1} +" in text for i, text in zip(epoch_order(8, 3, 0), rolled[0][::8], strict=False)]
    assert expected == [True] * 4
    line, _ = runfolder.read_log(tmp_path / "run" / "samples.jsonl")
    texts = [c["text"] for c in line["completions"]]
    grades = grade([(line["gold"], text) for text in texts])
    total = [2 * (graded["verdict"] == "right") + 0.5 * (last_tag(text) == line["gold"])
             for graded, text in zip(grades, texts, strict=True)]
    assert [c["reward"] for c in line["completions"]] == total == [2, 0, 2.5, 0] * 2
    reward_G = torch.tensor(total, dtype=torch.float64)
    adv_G = (reward_G - reward_G.mean()) / (reward_G.std(correction=0) + 0.5)
    assert [c["advantage"] for c in line["completions"]] == pytest.approx(adv_G.tolist())
    assert runfolder.read_log(tmp_path / "run" / "metrics.jsonl")[1]["reward/mean"] == pytest.approx(4.5 / 4)


def test_a_pruner_is_offered_the_whole_step_and_a_seed_of_its_own(tmp_path, monkeypatch):
    """And the engine gives up its weights for the update."""
    offers, set_up, true_update, engines, asleep = [], train.load_models, train.update, [], []
    monkeypatch.setitem(COMPLETIONS, "none", lambda given, settings: offers.append(given) or keep_all(given.adv_NG))
    monkeypatch.setattr(train, "load_models", lambda *given: engines.append(set_up(*given)) or engines[0])
    monkeypatch.setattr(train, "update", lambda *given: asleep.append(
        engines[0][1].model.norm.weight.is_meta) or true_update(*given))
    train.train(toy_config(tmp_path / "run", "seed=1", "loss.kl=0.1", "loss.normalize=token", "data.limit=16",
                           "rollout.max_new_tokens=8", "data.eval=null", name="grpo_toy.yaml"))
    sizes = [(o.normalize, o.advantage_only, *o.adv_NG.shape, *o.len_NG.shape) for o in offers]
    assert sizes == [("token", False, 4, 8, 4, 8)] * 2
    assert [candidates.seed for candidates in offers] == [dist.seed_for(1, step, "prune") for step in (0, 1)]
    assert len({dist.seed_for(seed, step, "prune") for seed in (0, 1) for step in (0, 1)}) == 4
    assert asleep == [True, True]


def test_half_precision_keeps_float32_weights(tiny, tmp_path):
    cfg = toy_config(tmp_path / "run", "model.dtype=bfloat16", "model.checkpoint_blocks=all", "loss.kl=0.1")
    parts = parts_of(cfg, tiny)
    learner, engine = parts.learner, parts.engine
    assert {p.dtype for p in learner.policy.parameters()} == {torch.float32}
    for model in (engine.model, learner.reference):  # the frozen one holds no more than is computed with
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert learner.policy.checkpoint_blocks == "all"
    one_NG = torch.ones(1, 2, dtype=torch.float64) / 3
    batch = as_batch(make_groups([[3, 2]], [4]), one_NG, Pruned(one_NG > 0, one_NG, one_NG))
    row, = learner.rows(update.make_minibatch(learner, batch, [0]))
    logp_C = learner.log_probs(learner.policy, row)
    assert row.adv_C.dtype == row.weight_C.dtype == logp_C.dtype == torch.float32
    assert logp_C.equal(learner.log_probs(learner.reference, row))
    exact_C = learner.log_probs(load(tiny), row)
    assert 1e-6 < (logp_C - exact_C).abs().max() < 0.5


def test_a_learning_rate_of_1e_6_moves_weights_that_compute_in_half_precision(tiny, tmp_path):
    """By 1e-6 each, as Adam's first step does; bfloat16 has no number that near to 0.3."""
    cfg = toy_config(tmp_path / "run", "model.dtype=bfloat16", "optim.lr=1e-6")
    learner = learner_on(tiny, cfg)
    before = weights(learner.policy)
    one_NG = torch.ones(1, 2, dtype=torch.float64)
    update.update(learner, as_batch(make_groups([[30, 20]], [40]), one_NG, keep_all(one_NG)), 0, Clock())
    gradient_seen = {name: learner.optimizers[0].state[p]["exp_avg"] for name, p in learner.policy.named_parameters()}
    for name, p in weights(learner.policy).items():
        moved = (p - before[name]).double().abs()[dist.gather_full(gradient_seen[name]).abs() > 1e-6]
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-6), rtol=0.1, atol=0, msg=name)


def test_a_loss_that_is_not_finite_stops_the_run_though_its_gradient_is():
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1)).backward()
    before = weights(model)
    with pytest.raises(NotFinite, match="the loss in step 1 is not finite"):
        optimizers = [torch.optim.SGD(model.parameters())]
        optimizer_step(model, optimizers, 0.1, 1.0, float("inf"), lambda what: NotFinite(what, 1, None))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_flat_groups_leave_the_policy_as_it_is(tiny, tmp_path):
    learner = learner_on(tiny, toy_config(tmp_path / "run", "rollout.prompts_per_step=1"))
    flat_NG = torch.zeros(1, 2, dtype=torch.float64)
    batch = as_batch(make_groups([[3, 2]], [4]), flat_NG, keep_largest(flat_NG, 1, "batch"))
    for state in learner.optimizers[0].state.values():  # of steps before, which momentum alone would go on with
        state["exp_avg"].fill_(1)
    for advantage_only in (False, True):
        measured = update.update(learner, replace(batch, advantage_only=advantage_only), 0, Clock())
        assert measured["train/grad_norm"] == 0 and measured["train/loss"] == 0
        before, after = weights(load(tiny, torch.float64)), weights(learner.policy)
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("normalize", ["sequence", "token", "constant", "sum"])
def test_completions_without_a_gradient_leave_the_rows_and_the_gradient_stays(normalize, tiny, tmp_path):
    """A flat group, and one completion of advantage 0: denominators count them, rows do not hold them."""
    learner = learner_on(tiny, toy_config(tmp_path / "run", f"loss.normalize={normalize}"))
    adv_NG = torch.tensor([[1.0, -1, 0], [0, 0, 0]], dtype=torch.float64)
    batch = as_batch(make_groups([[3, 2, 7], [4, 5, 1]], [4, 4]), adv_NG, keep_all(adv_NG))
    (whole, all_rows), (same, fewer) = (gradient_of(learner, each, moved=0.02)
                                        for each in (batch, replace(batch, advantage_only=True)))
    assert all_rows["train/tokens"] == 22 and fewer["train/tokens"] == 5
    torch.testing.assert_close(same, whole, rtol=1e-12, atol=1e-14)


def test_every_group_is_trained_on_wherever_it_stood_among_those_offered(tiny, tmp_path):
    learner = learner_on(tiny, toy_config(tmp_path / "run", "rollout.prompts_per_step=8", "update.minibatches=2"))
    adv_NG = torch.tensor([[1.0, -1], [-1, 1]], dtype=torch.float64)
    batch = as_batch(make_groups([[3, 2], [4, 5]], [4, 4]), adv_NG, keep_all(adv_NG))
    assert update.update(learner, replace(batch, places=[1, 6], offered=8), 0, Clock())["train/tokens"] == 14


def test_a_model_that_is_frozen_as_a_whole_is_saved_whole_and_one_without_weights_is_an_error(tiny, tmp_path):
    frozen = load(tiny).requires_grad_(False)
    before = {name: p.clone() for name, p in frozen.named_parameters()}
    checkpoints = saved(tmp_path, (frozen, ()), 1)
    with torch.no_grad():
        for p in frozen.parameters():
            p.zero_()
    checkpoints.load(tmp_path / "step_000001")
    assert before and all(torch.equal(p, before[name]) for name, p in frozen.named_parameters())
    with pytest.raises(ValueError, match="cannot hold a Module, which has no weights"):
        tensors(nn.Module())


def test_every_group_of_parameters_of_every_optimizer_steps_at_the_rate_and_no_others_gradient_stays():
    """It would add up over the steps, and count in the norm that gradients are clipped by."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    model.other = nn.Parameter(torch.ones(()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model.other * model(torch.ones(1, 3, dtype=torch.float64))).sum().backward()
    groups = [{"params": [model.weight], "lr_scale": 0.5}]
    optimizers = [torch.optim.SGD(groups, lr=9.0), torch.optim.SGD([model.bias], lr=9.0)]
    optimizer_step(model, optimizers, 0.1, 100.0, 0.0, lambda what: AssertionError(what))
    torch.testing.assert_close(before["weight"] - model.weight, torch.full((2, 3), 0.05, dtype=torch.float64))
    torch.testing.assert_close(before["bias"] - model.bias, torch.full((2,), 0.1, dtype=torch.float64))
    assert model.other.grad is None


def test_a_reward_of_weight_0_is_logged_and_adds_nothing(tmp_path):
    (tmp_path / "own.py").write_text("def brief(tokens):\n    return -tokens / 1000\n\ndef one():\n    return 1\n")
    cfg = toy_config(tmp_path / "run", "steps=1", "data.eval=null", "rollout.max_new_tokens=8",
                     f"reward.custom_file={tmp_path / 'own.py'}", "reward.custom={brief: 0}", "reward.boxed=0")
    assert cfg.reward.weights == {"accuracy": 1}
    train.train(cfg)
    line, = steps_of(tmp_path / "run")
    assert line["reward/brief"] < 0 and line["reward/boxed"] == 0 and "reward/format" not in line
    assert line["reward/mean"] == line["reward/accuracy"]
