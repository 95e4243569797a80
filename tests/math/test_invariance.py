"""How the batch is cut, ordered, recomputed or spread over ranks must not change the gradient."""

import functools
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import TOY, as_batch, load, make_groups, nudge, others_slow, parts_of, toy_config, weights
from test_objectives import OBJECTIVES as TEXTBOOK
from test_objectives import gradient_of, learner_on, windowed

import config
import data
import train
from advantage import group_norm
from infra import checks, dist, runfolder
from pack import Minibatch
from prune import COMPLETIONS, Candidates
from settings import leaves
from settings import loader as settings
from verify import workers

CONFIGS = {
    "cppo": [],
    "cppo-kl-batch": ["loss.kl=0.1", "loss.kl_corrected=true", "loss.normalize=token", "prune.completions.scope=batch",
                      "pack.window=2"],
    "grpo": ["prune.completions.kind=none", "loss.denominator=all", "loss.normalize=constant"],
    "lora": ["model.lora.rank=2", "loss.kl=0.1"]}
# Every objective, each on the same rollouts of the toy model.
OBJECTIVES = ("dapo", "drgrpo", "gspo", "cispo", "divppo", "gdpo", "ppo", "vapo", "tppo", "apo", "odpo", "rpo",
              "madpo", "dgpo", "opd")
Gradient = dict[str, torch.Tensor]


def objective(name: str, out, *settings: str) -> config.Config:
    """The config of an objective at a test's size; its completions in windows are those of test_objectives."""
    pretrained = ["critic.pretrain_steps=0"] if name in ("vapo", "tppo") else []
    more = {"divppo": ["loss.trust.divergence=1e-3"], "gspo": ["loss.trust.low=0.01", "loss.trust.high=0.02"],
            "apo": ["data.limit=16", "loss.entropy=0.1"], "opd": TEXTBOOK["opd"][2]}
    return toy_config(out, *pretrained, *more.get(name, []), *settings, name=TEXTBOOK[name][1])


def change(cfg: config.Config, *overrides: str) -> config.Config:
    raw = config.yaml.safe_load(config.dump(cfg))
    for override in overrides:
        raw = settings.merge(raw, settings.override(override, config.type_of))
    return config.build(raw)


def roll_out(cfg: config.Config) -> tuple[list, torch.Tensor]:
    """Real groups of the toy model and their advantages. Some rewards are equal, the lengths are not."""
    parts = parts_of(cfg, prompts=data.to_prompts(data.load_problems(cfg.data.train), data.Tokenizer(TOY), None, 128))
    parts.engine.sync(parts.learner.policy)
    groups = parts.sampler.rollout(parts.history.draw(cfg.rollout.prompts_per_step))
    adv_NG = group_norm(parts.sampler.score(groups).components["accuracy"], 1, 1e-4)
    assert (adv_NG.abs().amax(dim=1) > 0).sum() >= 2
    assert len({len(s.ids) for group in groups for s in group.samples}) > 4
    return groups, adv_NG


def gradient(cfg: config.Config, groups: list, adv_NG: torch.Tensor) -> tuple[float, Gradient]:
    """Loss and gradient of the second pass: the policy has moved, so clips are active and the KL is not 0."""
    learner = learner_on(Path(cfg.model.path), cfg)
    for model, _ in learner.roles.values():
        nudge(model, 0.1)
    if "windows" in leaves.chosen(cfg):
        groups = windowed(groups)
    candidates = Candidates(adv_NG, groups, cfg.loss.normalize, cfg.loss.kl == 0, seed=0)
    pruned = COMPLETIONS[cfg.prune.completions.kind](candidates, cfg.prune.completions)
    grad, measured = gradient_of(learner, as_batch(groups, adv_NG, pruned), moved=0.02)
    free = cfg.loss.trust.kind in ("clamp", "none")
    assert cfg.model.dtype != "float64" or 0 < measured["train/clipped"] < 1 or free
    return measured["train/loss"], grad


def assert_same(one: tuple[float, Gradient], other: tuple[float, Gradient], rtol: float) -> None:
    """Relative to the largest entry of each tensor: sums of both signs leave entries that are all rounding."""
    assert one[0] == pytest.approx(other[0], rel=rtol, abs=rtol)
    assert any(g.abs().max() > 1e-4 for g in one[1].values())
    for name, expected in one[1].items():
        torch.testing.assert_close(other[1][name], expected, rtol=0, atol=rtol * float(expected.abs().max()), msg=name)


@pytest.fixture(scope="module")
def rolled(tmp_path_factory):
    return roll_out(toy_config(tmp_path_factory.mktemp("rolled") / "run"))


def in_other_ways(by, cfg: config.Config, groups: list, adv_NG: torch.Tensor) -> Iterator[tuple[float, Gradient]]:
    """The same loss and gradient from small rows and from a large one, recomputed, in chunks, in another order."""
    order = [2, 0, 3, 1]
    yield by(change(cfg, "pack.capacity=176", "model.checkpoint_blocks=all", "model.logp_chunk=7"), groups, adv_NG)
    yield by(change(cfg, "pack.capacity=100000", "model.checkpoint_blocks=selective"), [groups[n] for n in order],
             adv_NG[order])


@pytest.mark.parametrize("name", others_slow([*CONFIGS, *OBJECTIVES], "cppo-kl-batch", "dapo", "tppo", "apo", "dgpo"))
def test_gradient_does_not_depend_on_how_the_batch_is_cut_or_ordered(name, rolled, tiny, tmp_path):
    if name in CONFIGS:
        cfg = toy_config(tmp_path / "run", *CONFIGS[name])
    else:
        cfg = objective(name, tmp_path / "run", f"model.path={tiny}")
    alone = gradient(cfg, *rolled)
    for other in in_other_ways(gradient, cfg, *rolled):
        assert_same(alone, other, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["none", "all"])
def test_compiled_passes_have_the_same_gradient(how, rolled, tiny, tmp_path):
    """Of a policy that is sharded as in training."""
    how = f"model.checkpoint_blocks={how}"
    cfg = objective("dapo", tmp_path / "run", f"model.path={tiny}", "pack.capacity=176", how)
    assert_same(gradient(cfg, *rolled), gradient(change(cfg, "model.compile=true"), *rolled), rtol=1e-10)


def test_a_token_of_one_completion_changes_nothing_in_another(tiny, tmp_path):
    """Nor does one of another group: log-probs in a row, bit for bit, of all but the completion that was changed."""
    learner = learner_on(tiny, toy_config(tmp_path / "run"))
    groups, ones_NG = make_groups([[3, 25, 1, 2], [4, 1, 7, 8]], [1, 12]), torch.ones(2, 4, dtype=torch.float64)
    row, = learner.rows(Minibatch(groups, ones_NG.bool(), ones_NG, ones_NG, ones_NG))
    with torch.no_grad():
        before_C = learner.log_probs(learner.policy, row)
        for segment, last in enumerate((row.segments.start_2S[0, 1:] - 2).tolist()):
            if (row.segment_C == segment).sum() > 1:  # the last token but one, which the last is predicted from
                ids_T = row.ids_T.index_fill(0, torch.tensor(last), int(row.ids_T[last] + 1) % 400)
                after_C = learner.log_probs(learner.policy, replace(row, ids_T=ids_T))
                assert (after_C != before_C).nonzero()[:, 0].tolist() == [int((row.segment_C <= segment).sum()) - 1]


def in_rank(rank: int, ranks: int, folder: str, work, *arguments) -> None:
    """Join a gloo group of `ranks`, do the work and leave its result behind."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, workers.STOP_SIGNALS)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    torch.set_num_threads(1)  # an environment variable comes too late in a spawned process
    store = f"file://{folder}/store{ranks}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.save(work(*arguments), f"{folder}/{ranks}.{rank}.pt")
    dist.close()


@functools.cache
def process(rank: int) -> ProcessPoolExecutor:
    """The one process that is this rank in every test, because a new one imports for seconds. Never another rank:
    torch remembers what it has computed of a rank's place among others. It is forked by the process that forks the
    verifier's workers too, and has imported torch (verify/grade.py)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verify.algebra", "torch"])
    return ProcessPoolExecutor(1, context)


def on_ranks(ranks: int, folder, work, *arguments) -> list:
    """The work's result on every rank."""
    jobs = [process(rank).submit(in_rank, rank, ranks, str(folder), work, *arguments) for rank in range(ranks)]
    ended, _ = wait(jobs, return_when=FIRST_EXCEPTION)
    failed = sorted((job for job in ended if job.exception()), key=lambda job: "by peer" in str(job.exception()))
    if failed:  # first by its own fault, and not because another rank had ended
        for child in multiprocessing.active_children():  # the other ranks wait for this one
            child.kill()
        process.cache_clear()
        failed[0].result()
    return [torch.load(folder / f"{ranks}.{rank}.pt", weights_only=False) for rank in range(ranks)]


def trained(cfg: config.Config) -> Gradient:
    return weights(train.train(cfg))


def trained_unchecked(cfg: config.Config) -> Gradient:
    """Without the checks before a run, which would take most of the time."""
    with patch.object(checks, "before_run", lambda cfg, ready: ready):
        return trained(cfg)


def step_metrics(folder) -> dict[str, float]:
    """Everything logged but what does depend on the ranks: times, memory, and how rows are shared out."""
    shared_out = ("time/", "memory/", "pack/rows", "pack/tokens", "pack/density", "pack/imbalance", "teacher/tokens")
    return {f"{i}/{key}": value for i, line in enumerate(runfolder.read_log(folder / "metrics.jsonl"))
            for key, value in line.items() if not key.startswith(shared_out)}


PRUNED = {
    "cppo": ["steps=5", "prune.completions.scope=batch", "prune.completions.keep=1"],
    # At most 4 completions for 3 ranks and 2 mini-batches, so ranks run empty; later steps pass prompts over.
    "dppo": ["seed=3", "data.limit=4", "loss.denominator=all", "prune.prompts={kind: bernoulli, drop_prob: 0.6}",
             "prune.completions={kind: pps, error: 0.5}", "pack.window=2",
             "prune.tokens={kind: prefix, whole: 0.5}"],
    "greso": ["data.limit=5", "prune.prompts.kind=greso", "rollout.until=informative", "rollout.max_rounds=2"],
    # 3 ranks share out a pool; lambda-returns, so that the critic's targets depend on values too.
    "tppo": ["windows.tokens=12", "advantage.lam_critic=0.9", "critic.pretrain_steps=1", "critic.minibatches=2",
             "optim.warmup_steps=4", "data.limit=64"],
    # On 3 ranks one has no row of an A.
    "lora": ["steps=2", "data.limit=8", "loss.denominator=all", "model.lora.rank=2",
             "prune.completions={kind: pps, keep: 3}"]}
# A group's completions lie on several ranks, and prompts are skipped.
PRUNED["madpo"] = ["prune.prompts={kind: bernoulli, drop_prob: 0.6}", "data.limit=6"]
PRUNED["dgpo"] = ["data.limit=6", "model.lora.rank=2"]
# Some prompts lie outside the band, and some are decided by their first completions.
PRUNED["depo"] = ["prune.prompts.warmup_steps=1", "prune.prompts.low=0.495", "prune.prompts.lr=0.1", "data.limit=12"]
PRUNED |= {"opd": ["data.limit=8", f"teacher.path={TOY.parent}/hard_model"],
           "optpo": ["labels.most=12", "rollout.group_size=4", "data.limit=6"]}
PRUNED["tppo-lora"] = [*PRUNED["tppo"], "model.lora.rank=2", "optim.lr=1e-3", "critic.lr=1e-2"]


def pruned_config(name: str, out, *settings: str) -> config.Config:
    own = name.split("-")[0]
    others = {"dgpo": "dgpo_gsm8k.yaml toy.yaml", "optpo": "optpo_gsm8k.yaml toy.yaml"}
    base = own if own in ("tppo", "madpo", "depo", "opd") else "cppo"
    return toy_config(out, *settings, *PRUNED[name], name=others.get(own, f"{base}_toy.yaml"))


def read_decisions(folder: Path) -> str:
    """Sizes come from log-probs, so probabilities are the same up to rounding: to 9 digits here."""
    text = (folder / "decisions.jsonl").read_text()
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda number: f"{float(number[0]):.9g}", text)


@pytest.mark.parametrize("name", others_slow(PRUNED, "lora"))
def test_any_number_of_ranks_gives_the_same_parameters_metrics_and_decisions(name, tmp_path):
    """Whole steps in float64, three or five: sampling, scoring, pruning, two mini-batches in two epochs, KL."""
    cfg = pruned_config(name, tmp_path / "one", "steps=3", "loss.kl=0.1", "update.epochs=2", "update.minibatches=2",
                        "pack.capacity=200", "eval.limit=2", "eval.max_new_tokens=8")
    run = trained if name == "cppo" else trained_unchecked
    alone = run(cfg)
    for ranks in (2, 4) if name == "cppo" else (3,):
        spread = replace(cfg, out=str(tmp_path / f"{ranks}"))
        for other in on_ranks(ranks, tmp_path, run, spread):
            torch.testing.assert_close(other, alone, rtol=0, atol=1e-9)
        assert step_metrics(tmp_path / f"{ranks}") == pytest.approx(step_metrics(tmp_path / "one"), rel=1e-9, abs=1e-12)
        decisions = [read_decisions(tmp_path / run) for run in ("one", f"{ranks}")]
        assert decisions[0] == decisions[1] and ('"weight": 0}' in decisions[0]) == (name in ("dppo", "madpo", "depo"))
    before = weights(load(TOY, torch.float64))
    moved = {key: p - before.get(key, 0.0) for key, p in alone.items() if not key.endswith("lora_A")}
    assert max(p.abs().max() for p in moved.values()) > 1e-5
    assert "lora" not in name or all(not moved[key].any() for key in before)


def resumed(cfg: config.Config) -> Gradient:
    return weights(train.train(cfg, resume="always"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after"), [
    ("dppo", 1, 2), ("tppo", 2, 3), ("greso", 2, 3), ("tppo-lora", 2, 3), ("madpo", 1, 2), ("depo", 1, 2),
    ("optpo", 2, 1), ("opd", 1, 2)])
def test_a_run_goes_on_on_another_number_of_ranks_with_the_same_prompts_and_masks(name, before, after, tmp_path):
    cfg = pruned_config(name, tmp_path / "run", "steps=4", "checkpoint.every=2", "checkpoint.keep=2", "data.eval=null")
    alone, folder = on_ranks(before, tmp_path, trained_unchecked, cfg)[0], tmp_path / "run"
    decisions, measured = read_decisions(folder), step_metrics(folder)
    (folder / "checkpoints" / "latest").write_text("step_000002")
    for other in on_ranks(after, tmp_path, resumed, cfg):
        torch.testing.assert_close(other, alone, rtol=0, atol=1e-9)
    assert read_decisions(folder) == decisions
    assert step_metrics(folder) == pytest.approx(measured, rel=1e-9, abs=1e-12)


def test_pairs_that_lie_on_several_ranks_have_the_same_gradient(rolled, tiny, tmp_path):
    """A rank without a row of a pair is kept in step by one of weight 0, of a completion that another rank has."""
    cfg = objective("madpo", tmp_path / "run", f"model.path={tiny}", "pack.capacity=176")
    groups, adv_NG = rolled
    n = int(adv_NG.abs().sum(dim=1).argmax())
    best, worst = int(adv_NG[n].argmax()), int(adv_NG[n].argmin())
    two = replace(groups[n], samples=(groups[n].samples[best], groups[n].samples[worst]))
    pair = [two], adv_NG[n:n + 1, [best, worst]]
    for ranks, given in ((2, rolled), (3, pair)):
        alone = gradient(cfg, *given)
        for other in on_ranks(ranks, tmp_path, gradient, cfg, *given):
            assert_same(alone, other, rtol=1e-10)
