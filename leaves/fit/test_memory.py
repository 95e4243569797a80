"""What fits: bytes counted by hand, and what `auto` chooses on machines that are only described here."""

from dataclasses import replace
from pathlib import Path

import pytest
import shapes
from conftest import PUBLISHED
from test_device import CPU, GIB, gpu, small

import config
from infra import choices, device
from infra.device import Machine
from leaves.fit import counts, fit
from leaves.fit import join as memory
from model import BLOCK_CALLS
from settings.loader import locate

FREE = {24: 23.5, 80: 79.0}  # GB of a GPU -> GiB that are free on it
# 64 groups of 16, in which a full row has room for 262,144 tokens and more.
MANY = ["rollout.prompts_per_step=64", "loss.kl=0"]


def load(name: str, *settings: str) -> config.Config:
    return config.load(f"{name}.yaml", [*settings])


def test_a_pass_is_counted_by_hand():
    """Two tables of 40 and two blocks of 120. Of 7 tokens and 9 keys, in halves; chunks of 5 or 500."""
    root, block = (80 + 40) * 2, 120 * (2 * 2 + 4)
    whole, some, inputs = (7 * (4 * 4 + 2 * 4 + 4 * 6) + 9 * 2 * 2) * 2, 7 * (3 * 4 + 2 * 4 + 2 * 2 + 2 * 6) * 2, 7 * 4 * 2
    padded = (7 * (6 * 4 + 4 * 4 + 4 * 6) + 9 * 4 * 2) * 2

    def counted(*settings: str) -> int:
        cfg = load("grpo_toy", "model.dtype=bfloat16", "model.attention=varlen", "model.checkpoint_blocks=none",
                   "model.logp_chunk=5", *settings)
        return sum(counts.row_parts(cfg, small(), 7, 9).values())

    for expected, *settings in (
            (root + 2 * whole + block + whole // 2,),
            (root + 2 * padded + block + padded // 2, "model.attention=sdpa"),
            (root + 2 * some + block + whole // 2 + whole - some, "model.checkpoint_blocks=selective"),
            (root + 2 * inputs + block + whole // 2 + whole - inputs, "model.checkpoint_blocks=all"),
            (root + 2 * whole + 40 * 4 + 500 * 10 * 12, "model.logp_chunk=500"),
            (80 * 2 + 2 * whole + block + whole // 2, "model.lora.rank=1", "model.checkpoint_blocks=selective")):
        assert counted(*settings) == expected, settings


@pytest.mark.parametrize(("name", "settings", "ranks", "expected"), [  # bytes a weight, and a weight of an adapter
    ("grpo_toy", [], 1, (12, 0)), ("grpo_toy", [], 4, (3, 0)), ("grpo_toy", ["loss.kl=0.1"], 1, (14, 0)),
    ("ppo_gsm8k", [], 1, (24, 0)), ("apo_gsm8k", ["advantage.residual=1e-3"], 2, (7, 0)),
    ("grpo_toy", ["optim.offload=true", "device=cuda"], 1, (0, 0)),
    ("grpo_toy", ["model.lora.rank=3", "loss.kl=0.1"], 2, (1, 6)), ("ppo_gsm8k", ["model.lora.rank=3"], 1, (4, 24))])
def test_weights_and_moments_are_counted_once_for_each_model_and_spread_over_the_ranks(name, settings, ranks, expected):
    """Frozen ones under an adapter in halves, without a reference."""
    cfg = load(name, "device=cpu", "model.dtype=bfloat16", "pack.capacity=4096", "rollout.engine=torch", *settings)
    parts = counts.phases(cfg, small(), ranks)["rollout"]
    held = sum(parts.get(key, 0) for key in ("weights", "moments", "reference", "critic and its moments"))
    adapter = 2 * 3 * (4 * 4 + 2 * 6 + 3 * 10)  # two blocks, rank 3
    assert held == device.parameters(small()) * expected[0] + adapter * expected[1]


def decided(cfg: config.Config, size: str, gib: float, ranks: int = 1, saved: dict | None = None, machine=None):
    machine = machine or gpu(gib, ranks)
    return memory.decide(cfg, choices.choose_kernels(cfg, machine, shapes.shape_of(size), saved or {}))


def on(cfg: config.Config, size: str, gib: float, ranks: int = 1, saved: dict | None = None) -> config.Config:
    return decided(cfg, size, gib, ranks, saved).cfg


def test_blocks_are_recomputed_only_as_far_as_memory_asks():
    """And what does not fit at all is tried with everything recomputed: a line then says so."""
    cfg = load("cppo_gsm8k", "pack.capacity=16384", "rollout.engine=torch")
    here = decided(cfg, "1.5B", 999)
    needed = [memory.used(memory.with_rows(here.cfg, how, 16384), here, "update") / GIB for how in BLOCK_CALLS]
    assert needed[0] > needed[1] > needed[2]
    for how, gib in zip(BLOCK_CALLS, needed, strict=True):
        assert on(cfg, "1.5B", gib / device.USABLE_SHARE * 1.001).model.checkpoint_blocks == how
    none = decided(cfg, "1.5B", 1)
    assert none.cfg.model.checkpoint_blocks == "all"
    assert none.remarks[-1].startswith(f"an update with rows of 16384 tokens is counted to need {needed[2]:.1f} GiB on a "
                                       "rank, and 1.0 are free: train an adapter")


def test_fewer_slots_are_said_with_the_memory_that_is_short():
    here = decided(load("divppo_math"), "4B", 79, 8)
    slots = here.cfg.rollout.slots
    assert 1 < slots < 256 and here.remarks == (f"rollout.slots={slots}, not 256: 79.0 GiB have no room for more",)
    fits = [memory.used(choices.with_value(here.cfg, "rollout.slots", n), here, "rollout") <= memory.room(here)
            for n in (slots, slots + 1)]
    assert fits == [True, False]


@pytest.mark.parametrize(("name", "settings", "size", "gib", "ranks", "sleep"), [
    ("cppo_gsm8k", [], "1.5B", 79, 8, "never"), ("cppo_gsm8k", [], "1.5B", 22, 8, "always"),
    ("cppo_math", ["rollout.tensor_parallel=1"], "7B", 79, 8, "always"), ("cppo_math_lora", [], "7B", 79, 8, "never"),
    ("dapo_math", [], "32B", 79, 16, "always"), ("cppo_gsm8k", ["rollout.engine=torch"], "1.5B", 79, 8, "always"),
    ("cppo_gsm8k", ["rollout.engine=vllm", "rollout.sleep=never"], "1.5B", 24, 8, "never"),
    ("cppo_gsm8k", ["rollout.engine=vllm", "rollout.sleep=always"], "1.5B", 79, 8, "always")])
def test_an_engine_sleeps_only_where_memory_asks_for_it_or_as_it_is_named(name, settings, size, gib, ranks, sleep):
    here = decided(load(name, *settings), size, gib, ranks)
    assert here.cfg.rollout.sleep == sleep
    asleep, awake = (memory.used(choices.with_value(here.cfg, "rollout.sleep", how), here, "update")
                     for how in ("always", "never"))
    engine = counts.sampling_parts(here.cfg, here.shape)
    staying = engine["engine's weights"] + engine["KV cache"]
    assert awake - asleep == (staying if here.cfg.rollout.engine == "vllm" else 0)


@pytest.mark.parametrize("gib", [33, 40, 60, 79, 139])
def test_rows_are_the_longest_that_fit(gib):
    """One grain more would not, and blocks are recomputed no more than leaves rows of 4,096 tokens."""
    cfg = load("cppo_gsm8k", *MANY)
    here = decided(cfg, "1.5B", gib)
    tokens, how, room = here.cfg.pack.capacity, here.cfg.model.checkpoint_blocks, memory.room(here)
    assert tokens >= choices.ENOUGH_TOKENS and how in BLOCK_CALLS

    def needed(how: str, tokens: int) -> float:
        return memory.used(memory.with_rows(here.cfg, how, tokens), here, "update")

    assert needed(how, tokens) <= room < needed(how, tokens + memory.ROW_STEP)
    for less in list(BLOCK_CALLS)[:list(BLOCK_CALLS).index(how)]:
        assert needed(less, choices.ENOUGH_TOKENS + memory.ROW_STEP) > room
    assert on(cfg, "1.5B", 139).model.checkpoint_blocks == "none"
    named = load("cppo_gsm8k", *MANY, "model.checkpoint_blocks=all")
    assert on(named, "1.5B", 139).pack.capacity > on(cfg, "1.5B", 139).pack.capacity
    assert on(load("cppo_gsm8k", "rollout.prompts_per_step=1"), "0.5B", 1).pack.capacity == 1536  # of one sequence


def test_a_run_that_goes_on_takes_the_same_choices_or_chooses_again():
    cfg = load("cppo_gsm8k", *MANY)
    first = on(cfg, "1.5B", 60)
    assert (first.model.checkpoint_blocks, first.rollout.sleep) == ("none", "never")
    saved = config.flatten(first) | {choices.REQUESTED: cfg.rollout.slots}
    for gib in (60, 139):
        again = decided(cfg, "1.5B", gib, saved=saved)
        assert again.cfg == first and again.remarks == ()
    asleep = on(cfg, "1.5B", 45, saved=saved)  # makes room for the same rows
    assert asleep == replace(first, rollout=replace(first.rollout, sleep="always"))
    assert on(cfg, "1.5B", 30, saved=saved).pack.capacity < first.pack.capacity
    assert on(load("cppo_gsm8k", *MANY, "pack.capacity=32768"), "1.5B", 139, saved=saved).pack.capacity == 32768
    fewer = on(load("divppo_math"), "4B", 79, 8)
    again = decided(load("divppo_math"), "4B", 139, 8, saved=config.flatten(fewer))
    assert again.cfg == fewer and again.remarks == (f"rollout.slots={fewer.rollout.slots}, not 256: as before",)
    on_cpu = decided(cfg, "1.5B", 0, saved=saved, machine=Machine(CPU, 999 * GIB, 1, "none on a CPU")).cfg
    assert (on_cpu.model.dtype, on_cpu.model.attention, on_cpu.rollout.engine) == ("bfloat16", "sdpa", "torch")


def test_what_cannot_be_taken_again_is_said(tmp_path, monkeypatch, capsys):
    folder, cfg = shapes.write_config("1.5B", tmp_path), load("cppo_gsm8k", "device=cpu", "pack.capacity=16384")
    monkeypatch.setattr(Machine, "here", staticmethod(lambda device: gpu(20, 8)))
    choices.resolve_auto(cfg, folder, {"model.checkpoint_blocks": "none", "rollout.sleep": "never"})
    assert ("from here on not the same run bit for bit: model.checkpoint_blocks=none before, which is not the choice here"
            in capsys.readouterr().out.splitlines())


def fitted(name: str, size: int, ranks: int):
    cfg = config.load(name)
    return fit.try_on(cfg, fit.find_shape(cfg.model.path), gpu(FREE[size], ranks))


def head_line(name: str) -> str:
    """A config's head: on how many GPUs, of 80 GB or for an adapter of 24, it fits, and what `auto` takes."""
    cfg, said = config.load(name), []
    adapter = counts.adapter(cfg) is not None
    small = fitted(name, 24, 1)
    size = 24 if adapter and fit.fits(small) and small.cfg.rollout.slots >= cfg.rollout.group_size else 80
    for ranks in (1, 8, 16, 32, 64):
        tried = fitted(name, size, ranks)
        if fit.fits(tried):
            line = f"{ranks} with {memory.used(tried.cfg, tried) / GIB:.0f} GiB"
            if cfg.pack.capacity == "auto":
                line += f", rows of {tried.cfg.pack.capacity:,} tokens"
            if tried.cfg.rollout.slots < cfg.rollout.slots:
                line += f", {tried.cfg.rollout.slots} slots"
            line += ", engine awake" * (tried.cfg.rollout.sleep == "never")
            line += {"none": "", "selective": ", blocks recomputed in part",
                     "all": ", blocks recomputed"}[tried.cfg.model.checkpoint_blocks]
            said.append(line)
        elif ranks <= 8:
            said.append(f"not {ranks}")
        if fit.fits(tried) and (ranks >= 8 or adapter):
            break
    return f"# fits: {size} GB GPUs (train.py --fit): {'; '.join(said)}."


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_says_in_its_head_what_it_fits(name):
    assert head_line(name) in locate(name, Path(), config.CONFIGS).read_text().splitlines(), head_line(name)
