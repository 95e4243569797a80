"""What fits: bytes counted by hand, and what `auto` chooses on machines that are only described here."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import PUBLISHED, ROOT, TOY
from test_invariance import on_ranks

import config
import metrics
from infra import choices, dist
from infra import device as hardware
from infra.choices import resolve_auto
from infra.device import Machine
from infra.weights import read_shape
from leaves.fit import counts, fit, memory
from leaves.fit.counts import Pass
from leaves.fit.memory import choose_settings
from model import BLOCK_CALLS
from records import EngineSpec
from settings.loader import ConfigError, locate

sys.path.append(str(ROOT / "bench"))  # behind the root: some of its files have names of ours

import shapes  # noqa: E402

GIB, CPU, CUDA = 2**30, torch.device("cpu"), torch.device("cuda")
FREE = {24: fit.CARDS["4090"], 80: fit.CARDS["H100"]}  # GB of a GPU -> GiB that are free on it
SMALL = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "layers": 2, "heads": 2, "kv_heads": 1,
         "head_dim": 2, "tied": False, "qkv_bias": False, "out_bias": False, "qk_norm": None}


def small(**changes):
    return replace(read_shape(TOY), **SMALL | changes)


def gpu(gib: float = 79, ranks: int = 1, no_vllm: str = "") -> Machine:
    return Machine(CUDA, gib * GIB, ranks, no_vllm)


def pass_bytes(given: counts.Pass) -> int:
    return sum(counts.pass_parts(given).values())


def test_a_pass_is_counted_by_hand():
    """Two tables of 40, two blocks of 128 and a norm of 4. Of 7 tokens and 9 keys, in halves; chunks of 5 or 500."""
    root, block = (80 + 40) * 2, 128 * (2 * 2 + 4)
    whole = (7 * (6 * 4 + 4 * 4 + 4 * 6) + 9 * 4 * 2) * 2
    fused = (7 * (4 * 4 + 2 * 4 + 4 * 6) + 9 * 2 * 2) * 2
    some = 7 * (3 * 4 + 2 * 4 + 2 * 2 + 2 * 6) * 2
    given = Pass(small(), tokens=7, keys=9, element=2, chunk=5)
    assert pass_bytes(given) == root + 2 * whole + block + whole // 8
    assert pass_bytes(replace(given, fused=True)) == root + 2 * fused + block + fused // 2
    selective, everything = replace(given, recomputed="selective"), replace(given, recomputed="all")
    assert pass_bytes(selective) == root + 2 * some + block + whole // 8 + whole - some
    assert pass_bytes(everything) == root + 2 * 7 * 4 * 2 + block + whole // 8 + whole - 7 * 4 * 2
    assert pass_bytes(replace(given, chunk=500)) == root + 2 * whole + 40 * 4 + 500 * 10 * (8 + 2)


def test_a_frozen_base_is_counted_once_in_what_is_computed_in_and_no_reference(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    base, adapter = 2 * hardware.parameters(small()), 2 * 3 * 58
    for name, settings, ranks, expected in (
            ("grpo_toy", [], 1, base + 12 * adapter), ("grpo_toy", ["loss.kl=0.1"], 2, (base + 12 * adapter) // 2),
            ("grpo_toy", [f"model.lora.path={tmp_path}"], 1, base + 16 * adapter),
            ("ppo_gsm8k", [], 1, 2 * (base + 12 * adapter))):
        cfg = config.load(f"{name}.yaml", ["device=cpu", "model.dtype=bfloat16", "model.lora.rank=3", *settings])
        assert sum(counts.held_parts(cfg, small(), ranks).values()) == expected
        assert counts.gradient_bytes(cfg, small(), ranks) == 4 * adapter // ranks


def test_weights_and_moments_are_counted_once_for_each_model_and_spread_over_the_ranks():
    shape, per = small(), hardware.parameters(small())
    for name, settings, ranks, expected in (
            ("grpo_toy", [], 1, 12), ("grpo_toy", [], 4, 3), ("grpo_toy", ["loss.kl=0.1"], 1, 16),
            ("ppo_gsm8k", [], 1, 24), ("apo_gsm8k", ["advantage.residual=1e-3"], 2, 8)):
        cfg = config.load(f"{name}.yaml", ["device=cpu", "optim.offload=true", *settings])
        assert sum(counts.held_parts(cfg, shape, ranks).values()) == expected * per
        assert sum(counts.held_parts(replace(cfg, device="cuda"), shape, ranks).values()) == 0  # offloaded


def test_the_caches_of_both_engines_are_counted_by_hand():
    """A token is 2 x 2 x 2 numbers of 4 bytes, and 129 tokens are two blocks of vLLM's."""
    assert hardware.cache_bytes(small(), 4, slots=3, max_len=129, tensor_parallel=1) == (3 * 2 + 1) * 128 * 32
    assert hardware.cache_bytes(small(), 4, slots=3, max_len=128, tensor_parallel=1) == (3 + 1) * 128 * 32
    assert hardware.cache_bytes(small(kv_heads=2), 4, 3, 128, tensor_parallel=2) == (3 + 1) * 128 * 32  # a head each
    assert hardware.cache_bytes(small(), 4, 3, 128, tensor_parallel=2) == (3 + 1) * 128 * 32            # both have it
    assert hardware.cache_bytes(small(), 2, 3, 129, tensor_parallel=0) == 3 * 129 * (16 + 16)  # a layer in float32 too
    engine = sum(hardware.engine_parts(small(), 2, 3, 129, 0).values())
    assert engine == hardware.parameters(small()) * 2 + 3 * 129 * 32 + 24 * 3 * 10
    given = sum(hardware.engine_parts(small(), 2, 3, 129, 2, cache_gib=1000 / GIB).values())
    assert given == hardware.parameters(small()) + 1000 + 24 * 3 * 10


def chosen(cfg, machine, shape="1.5B", saved=None) -> dict:
    return choices.list_choices(cfg, choose_settings(cfg, shapes.shape_of(shape), machine, saved or {})[0])


LONG_ROWS = "pack.capacity=16384"


def test_a_gpu_gets_halves_its_kernel_and_vllm_and_a_cpu_none_of_them():
    cfg = config.load("cppo_gsm8k.yaml", [LONG_ROWS])
    on_gpu = {"model.dtype": "bfloat16", "model.attention": "varlen", "rollout.engine": "vllm", "device": "cuda"}
    awake = {"rollout.sleep": "never", "rollout.slots": 165}  # 1,319 problems on 8 ranks
    assert chosen(cfg, gpu(ranks=8)) == on_gpu | awake | {"model.checkpoint_blocks": "none"}
    on_cpu = {"model.dtype": "float32", "model.attention": "sdpa", "rollout.engine": "torch", "device": "cpu",
              "rollout.sleep": "always"}
    assert chosen(cfg, Machine(CPU, 999 * GIB, 1, "none on a CPU")) == on_cpu | {"model.checkpoint_blocks": "none"}
    in_float64 = config.load("cppo_gsm8k.yaml", ["model.dtype=float64", LONG_ROWS])
    assert chosen(in_float64, gpu(999))["rollout.engine"] == "torch"


def test_blocks_are_recomputed_only_as_far_as_memory_asks():
    """And what does not fit at all is tried with everything recomputed: the check before the run then says so."""
    cfg = config.load("cppo_gsm8k.yaml", [LONG_ROWS, "rollout.engine=torch"])
    halves = replace(cfg, model=replace(cfg.model, dtype="bfloat16", attention="varlen"), device="cuda")
    shape = shapes.shape_of("1.5B")
    needed = [counts.update_bytes(choices.with_rows(halves, how, 16384), shape, 1) for how in BLOCK_CALLS]
    assert needed[0] > needed[1] > needed[2]
    for how, needs in zip(BLOCK_CALLS, needed, strict=True):
        assert chosen(cfg, gpu(needs / GIB / hardware.USABLE_SHARE * 1.001))["model.checkpoint_blocks"] == how
    assert chosen(cfg, gpu(1))["model.checkpoint_blocks"] == "all"
    compiled = config.load("cppo_gsm8k.yaml", ["model.compile=true", LONG_ROWS, "rollout.engine=torch"])
    assert chosen(compiled, gpu(needed[1] / GIB / hardware.USABLE_SHARE * 1.001))["model.checkpoint_blocks"] == "none"


def test_fewer_slots_are_said_with_the_memory_that_is_short():
    cfg, shape = config.load("divppo_math.yaml"), shapes.shape_of("4B")
    here, said = choose_settings(cfg, shape, gpu(ranks=8), {})
    slots = here.rollout.slots
    assert 1 < slots < 256 and said == [f"rollout.slots={slots}, not 256: 79.0 GiB have no room for more"]
    fits = [sum(counts.rollout_parts(here, shape, 8, n).values()) <= hardware.USABLE_SHARE * 79 * GIB
            for n in (slots, slots + 1)]
    assert fits == [True, False]


def test_without_vllm_the_embedded_engine_samples_and_a_line_says_what_to_install():
    cfg = config.load("cppo_gsm8k.yaml")
    machine = gpu(ranks=8, no_vllm="vllm is not there; pip install it")
    here, said = choose_settings(cfg, shapes.shape_of("1.5B"), machine, {})
    assert here.rollout.engine == "torch"
    assert said == ["rollout.engine=torch, the embedded one: vllm is not there; pip install it"]
    assert not choose_settings(config.load("cppo_gsm8k.yaml", ["rollout.engine=torch"]), shapes.shape_of("1.5B"),
                      gpu(ranks=8, no_vllm="none"), {})[1]


def machine_on_ranks() -> tuple[float, str]:
    """Of two ranks the second has less memory, and no vLLM."""
    rank = dist.rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "total_bytes", lambda device: 1000.0 - rank)
        patch.setattr(hardware, "why_no_vllm", lambda device: "it is not there" * rank)
        machine = Machine.here(CPU)
    return machine.free, machine.ranks, bool(machine.no_vllm)


def test_all_ranks_choose_by_the_one_that_has_least(tmp_path):
    assert on_ranks(2, tmp_path, machine_on_ranks) == [(999.0, 2, True)] * 2


def test_only_the_tested_vllm_counts(monkeypatch):
    for version, fine in (("0.32.0", True), ("0.32.0+cu130", True), ("0.33.0", False), (None, False)):
        def installed(name, version=version):
            if version is None:
                raise hardware.importlib.metadata.PackageNotFoundError(name)
            return version
        monkeypatch.setattr(hardware.importlib.metadata, "version", installed)
        monkeypatch.setattr(hardware, "why_no_compiler", lambda: "")
        assert (hardware.why_no_vllm(CUDA) == "") == fine
        assert fine or "requirements/gpu.txt" in hardware.why_no_vllm(CUDA)
        assert hardware.why_no_vllm(CPU)


def test_vllm_is_not_chosen_without_a_c_compiler_and_pythons_headers(monkeypatch, tmp_path):
    """Triton compiles a launcher with both; a slim image has neither."""
    monkeypatch.setattr(hardware.importlib.metadata, "version", lambda name: "0.32.0")
    headers = tmp_path / "include"
    headers.mkdir()
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: str(headers))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "need a C compiler (gcc or clang)" in hardware.why_no_vllm(CUDA)
    for name in ("gcc", "mycc"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert "need Python's headers (Python.h)" in hardware.why_no_vllm(CUDA)
    (headers / "Python.h").write_text("")
    assert hardware.why_no_vllm(CUDA) == ""
    for compiler, fine in (("mycc", True), ("othercc", False)):
        monkeypatch.setenv("CC", compiler)
        assert (hardware.why_no_vllm(CUDA) == "") == fine


def on(cfg, size: str, gib: float, ranks: int, saved: dict | None = None) -> config.Config:
    return choose_settings(cfg, shapes.shape_of(size), gpu(gib, ranks), saved or {})[0]


@pytest.mark.parametrize(("name", "settings", "ranks", "slots"), [
    ("cppo_math", [], 8, 63),                                       # MATH-500; a step has 96
    ("cppo_math", ["data.eval=null"], 8, 12),
    ("cppo_math", ["eval.limit=40"], 8, 12),
    ("cppo_math", ["data.eval=null", "rollout.prompts_per_step=8"], 8, 16),
    ("cppo_math", ["data.eval=mine.jsonl"], 8, 236),                # its length is not known: as memory allows
    ("cppo_math", ["data.eval=math500,gsm8k"], 16, 83),
    ("cppo_math", ["eval.n=2", "eval.temperature=1"], 16, 63),
    ("optpo_gsm8k", ["data.eval=null"], 8, 32),                     # N x G; then 4 more of each that is not decided
    ("optpo_gsm8k", ["data.eval=null", "labels.chunk=20", "rollout.group_size=16"], 8, 40),
])
def test_an_engine_has_no_more_slots_than_a_step_or_an_evaluation_asks_it_for(name, settings, ranks, slots):
    cfg = config.load(f"{name}.yaml", settings)
    here, said = choose_settings(cfg, shapes.shape_of("7B"), gpu(79, ranks), {})
    assert here.rollout.slots == slots
    assert bool(said) == ("mine" in str(settings))  # only fewer than are asked for are worth a line


def test_an_engine_sleeps_only_where_memory_asks_for_it():
    cfg = config.load("cppo_gsm8k.yaml")
    shape, room = shapes.shape_of("1.5B"), hardware.USABLE_SHARE * 79 * GIB
    awake = on(cfg, "1.5B", 79, 8)
    assert awake.rollout.sleep == "never" and awake.model.checkpoint_blocks == "none"
    needed = counts.update_bytes(awake, shape, 8)
    assert needed <= room
    asleep = counts.update_bytes(choices.with_value(awake, "rollout.sleep", "always"), shape, 8)
    engine = hardware.engine_parts(shape, 2, 165, choices.longest_sampled(cfg), 1)
    assert needed - asleep == engine["engine's weights"] + engine["KV cache"]
    for gib, sleep in ((79, "never"), (22, "always")):
        assert on(cfg, "1.5B", gib, 8).rollout.sleep == sleep
    for name, size, ranks in (("cppo_math", "7B", 8), ("grpo_math", "7B", 8), ("cppo_math_lora", "7B", 8)):
        assert on(config.load(f"{name}.yaml"), size, 79, ranks).rollout.sleep == "never"
    assert on(config.load("dapo_math.yaml"), "32B", 79, 16).rollout.sleep == "always"
    embedded = config.load("cppo_gsm8k.yaml", ["rollout.engine=torch"])
    assert on(embedded, "1.5B", 79, 8).rollout.sleep == "always"


@pytest.mark.parametrize("sleep", ["always", "never"])
def test_a_named_sleep_is_taken_and_so_is_that_of_a_checkpoint(sleep):
    named = config.load("cppo_gsm8k.yaml", ["rollout.engine=vllm", f"rollout.sleep={sleep}"])
    assert on(named, "1.5B", 79, 8).rollout.sleep == sleep
    assert on(named, "1.5B", 24, 8).rollout.sleep == sleep
    cfg = config.load("cppo_gsm8k.yaml", ["rollout.engine=vllm"])
    saved = choices.settings_to_save(on(named, "1.5B", 79, 8), cfg)
    again, said = choose_settings(cfg, shapes.shape_of("1.5B"), gpu(79, 8), saved)
    assert again.rollout.sleep == sleep and again.pack == on(named, "1.5B", 79, 8).pack and said == []


def test_a_run_that_goes_on_takes_the_same_choices_or_says_that_it_cannot():
    cfg, shape = config.load("cppo_gsm8k.yaml", [LONG_ROWS]), shapes.shape_of("1.5B")
    first, _ = choose_settings(cfg, shape, gpu(40, ranks=8), {})
    saved = config.flatten(first)
    assert saved["model.checkpoint_blocks"] != "none"
    more, said = choose_settings(cfg, shape, gpu(139, ranks=8), saved)
    assert more == first and said == []
    on_cpu, said = choose_settings(cfg, shape, Machine(CPU, 999 * GIB, 1, "none on a CPU"), saved)
    assert on_cpu.model.dtype == "bfloat16"  # runs here too, if slowly
    assert said == ["rollout.slots=165, not 256: as before", "from here on not the same run bit for bit: "
                    "model.attention=varlen, rollout.engine=vllm before, which cannot run here"]
    long, larger = config.load("divppo_math.yaml", [LONG_ROWS]), shapes.shape_of("4B")
    fewer, _ = choose_settings(long, larger, gpu(79, ranks=8), {})
    again, said = choose_settings(long, larger, gpu(139, ranks=8), config.flatten(fewer))
    assert again == fewer and said == [f"rollout.slots={fewer.rollout.slots}, not 256: as before"]
    back, said = choose_settings(cfg, shape, gpu(139, ranks=8), config.flatten(on_cpu))
    assert (back.model.attention, back.rollout.engine) == ("sdpa", "torch") and said == []
    saved |= {"model.checkpoint_blocks": "none", "rollout.slots": 200}
    less, said = choose_settings(cfg, shape, gpu(20, ranks=8), saved)
    assert less.model.checkpoint_blocks == "all" and "model.checkpoint_blocks=none" in said[-1]


def test_what_is_named_is_never_changed():
    settings = ["model.dtype=float32", "model.attention=sdpa", "model.checkpoint_blocks=none", "rollout.engine=torch"]
    cfg = config.load("cppo_gsm8k.yaml", settings)
    saved = {"model.dtype": "bfloat16", "rollout.engine": "vllm"}
    here, _ = choose_settings(cfg, shapes.shape_of("1.5B"), gpu(30), saved)
    assert here.model == cfg.model and here.rollout.engine == "torch"


# 64 groups of 16, in which a full row has room for 262,144 tokens and more.
MANY = ["rollout.prompts_per_step=64", "loss.kl=0"]


@pytest.mark.parametrize("gib", [31, 40, 60, 79, 139])
def test_rows_are_the_longest_that_fit(gib):
    """One grain more would not, and blocks are recomputed no more than leaves rows of 4,096 tokens."""
    cfg, shape, room = config.load("cppo_gsm8k.yaml", MANY), shapes.shape_of("1.5B"), hardware.USABLE_SHARE * gib * GIB
    here, _ = choose_settings(cfg, shape, gpu(gib), {})
    tokens, how = here.pack.capacity, here.model.checkpoint_blocks
    assert tokens >= choices.ENOUGH_TOKENS and how in BLOCK_CALLS
    needed = [counts.update_bytes(choices.with_rows(here, how, longer), shape, 1) for longer in (tokens, tokens + 256)]
    assert needed[0] <= room < needed[1]
    for less in list(BLOCK_CALLS)[:list(BLOCK_CALLS).index(how)]:
        longer = choices.with_rows(here, less, choices.ENOUGH_TOKENS + memory.ROW_STEP)
        assert counts.update_bytes(longer, shape, 1) > room
    assert chosen(cfg, gpu(139))["model.checkpoint_blocks"] == "none"
    named = config.load("cppo_gsm8k.yaml", [*MANY, "model.checkpoint_blocks=all"])
    assert chosen(named, gpu(139))["pack.capacity"] > chosen(cfg, gpu(139))["pack.capacity"]


def test_rows_are_no_longer_than_a_ranks_part_of_a_mini_batch():
    """One prompt of 512 tokens and 16 completions of 1,024; a row must hold one of each."""
    cfg, shape = config.load("cppo_gsm8k.yaml", ["rollout.prompts_per_step=1"]), shapes.shape_of("0.5B")
    for ranks, whole in ((1, 16896), (8, 2112)):
        assert choices.row_range(cfg, ranks) == (1536, 1536 + whole)
        assert chosen(cfg, gpu(999, ranks), "0.5B")["pack.capacity"] == 1536 + whole
    halves = config.load("cppo_gsm8k.yaml", ["rollout.prompts_per_step=2", "update.minibatches=2"])
    assert choices.row_range(halves, 1) == choices.row_range(cfg, 1)
    full = config.load("dppo_listed_math.yaml", ["rollout.max_rounds=3"])
    of_round = full.rollout.prompts_per_step * full.rollout.group_size * full.rollout.max_new_tokens
    assert choices.row_range(full, 1)[1] > 3 * of_round // full.update.minibatches
    assert choose_settings(cfg, shape, gpu(1), {})[0].pack.capacity == 1536


def test_where_not_even_one_sequence_fits_a_run_says_what_to_change(tmp_path, monkeypatch):
    """Before anything is loaded, where what is counted is over by more than it ever was."""
    folder = shapes.write_config("7B", tmp_path)
    cfg = config.load("grpo_math.yaml", ["device=cpu"])
    for gib, fits in ((60, False), (120, True), (400, True)):
        monkeypatch.setattr(Machine, "here", staticmethod(lambda device, gib=gib: gpu(gib)))
        if fits:
            assert resolve_auto(cfg, folder).pack.capacity >= 3072
            continue
        with pytest.raises(ConfigError, match=r"pack.capacity=auto has no room for a row of one sequence \(3072 tokens"
                                              r"\): an update is counted to need \d+.\d GiB on a rank, and 60.0 are "
                                              r"free; train an adapter .* lower rollout.max_new_tokens"):
            resolve_auto(cfg, folder)
        resolve_auto(replace(cfg, pack=replace(cfg.pack, capacity=16384)), folder)  # as named, with a remark


def test_a_run_that_goes_on_has_rows_as_before_where_they_can_be():
    """Those that were measured, which may be more than what is counted has room for."""
    cfg, shape = config.load("cppo_gsm8k.yaml", MANY), shapes.shape_of("1.5B")
    first, _ = choose_settings(cfg, shape, gpu(60), {})
    assert first.model.checkpoint_blocks == "none"
    longer = first.pack.capacity + 1024
    saved = choices.settings_to_save(choices.with_rows(first, "none", longer), cfg)
    for gib in (60, 139):
        again, said = choose_settings(cfg, shape, gpu(gib), saved)
        assert again == choices.with_rows(first, "none", longer) and said == []
    assert first.rollout.sleep == "never"
    asleep, said = choose_settings(cfg, shape, gpu(45), saved)  # makes room for the same rows
    assert (asleep.pack.capacity, asleep.rollout.sleep) == (longer, "always") and said == []
    less, said = choose_settings(cfg, shape, gpu(30), saved)
    assert less.pack.capacity < longer and f"pack.capacity={longer}" in said[-1]
    other = config.load("cppo_gsm8k.yaml", [*MANY, "pack.capacity=32768"])
    assert choose_settings(other, shape, gpu(139), saved)[0].pack.capacity == 32768  # what is named is taken


def test_an_evaluation_gets_an_engine_and_slots_that_fit(monkeypatch, capsys):
    monkeypatch.setattr(Machine, "here", staticmethod(lambda device: Machine(device, 4 * GIB, 1, "none on a CPU")))
    spec = EngineSpec(TOY, torch.float32, CPU, "sdpa", frozenset(), slots=10**6, max_len=100)
    kind, fitted = hardware.fit_engine("auto", spec)
    assert kind == "torch" and 1 < fitted.slots < 10**6
    assert f"rollout.engine=torch, rollout.slots={fitted.slots}" in capsys.readouterr().out
    assert hardware.fit_engine("torch", replace(spec, slots=8)) == ("torch", replace(spec, slots=8))
    for options in ({"tensor_parallel": 4}, {"cache_gib": 2.0}):
        with pytest.raises(ConfigError, match="rollout.tensor_parallel and rollout.cache_gib are vLLM's"):
            hardware.fit_engine("auto", replace(spec, **options))
    assert capsys.readouterr().out == ""


def fitted(name: str, size: int, ranks: int) -> fit.Fit:
    cfg = config.load(name)
    return fit.try_on(cfg, fit.find_shape(cfg.model.path), gpu(FREE[size], ranks))


def head_line(name: str) -> str:
    """The line of a published config's head: on how many GPUs it fits, with the GiB of each and what `auto` takes.

    They are of 80 GB; or for an adapter one, of 24 GB where it fits with a group at a time.
    """
    cfg, said = config.load(name), []
    adapter = cfg.model.lora.rank is not None
    small = fitted(name, 24, 1)
    size = 24 if adapter and small.fits and small.cfg.rollout.slots >= cfg.rollout.group_size else 80
    for ranks in (1, 8, 16, 32, 64):
        tried = fitted(name, size, ranks)
        if tried.fits:
            line = f"{ranks} with {tried.peak / GIB:.0f} GiB"
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
        if tried.fits and (ranks >= 8 or adapter):
            break
    return f"# fits: {size} GB GPUs (train.py --fit): {'; '.join(said)}."


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_says_in_its_head_what_it_fits(name):
    assert head_line(name) in locate(name, Path(), config.CONFIGS).read_text().splitlines(), head_line(name)


class Driver:
    """Stands for the file that a driver leaves."""

    def __init__(self, there: bool):
        self.is_file = lambda: there


@pytest.fixture
def seen(monkeypatch):
    """Describe a machine to find_device: CUDA devices that torch shows, a driver's file, torch's CUDA, its start."""
    def describe(devices: int, driver: bool, built: str | None, start=lambda: None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(hardware, "DRIVER", Driver(driver))
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.cuda, "init", start)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    return describe


def said_on_cpu() -> list[str]:
    machine = Machine.here(hardware.find_device("auto"))
    assert machine.device == CPU
    return choose_settings(config.load("cppo_toy.yaml"), shapes.shape_of("1M"), machine, {})[1]


def test_a_gpu_that_torch_cannot_use_is_named_with_the_reason(seen, monkeypatch):
    seen(0, driver=True, built=None)
    line, = said_on_cpu()
    assert line.startswith("device=cpu: there is a GPU, but torch ") and "is a build without CUDA" in line
    with pytest.raises(ConfigError, match="shows 0 CUDA devices to 1 processes; there is a GPU, but .* is a build"):
        hardware.find_device("cuda")
    seen(0, driver=True, built="13.0")
    line, = said_on_cpu()
    assert "580 or newer" in line
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert said_on_cpu() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as schedulers set it
    assert len(said_on_cpu()) == 1
    seen(0, driver=False, built=None)
    assert said_on_cpu() == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    seen(4, driver=True, built="13.0")
    assert said_on_cpu() == ["device=cpu: the machine has 4 CUDA devices to 8 processes; start fewer"]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")
    seen(1, driver=True, built="13.0", start=too_old)
    for wanted in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"too old \(found version 12020\).*580 or newer.*device=cpu"):
            hardware.find_device(wanted)
    assert hardware.find_device("cpu") == CPU


@pytest.mark.parametrize(("platform", "device", "gib"), [("linux", CPU, 3.0), ("darwin", CPU, 3.0 / 1024),
                                                         ("linux", CUDA, 60.0)])
def test_the_peak_is_that_of_the_fullest_rank_whatever_the_system_counts_in(platform, device, gib, monkeypatch):
    """Resident memory in KiB, on macOS in bytes; on a GPU that of the device. torch counts what a sleeping engine has
    given up as well, more than there is."""
    monkeypatch.setattr(metrics.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2 * 2**20))
    monkeypatch.setattr(metrics.sys, "platform", platform)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 127 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(dist, "max_over_ranks", lambda held: 1.5 * held)  # another rank's
    slept = SimpleNamespace(peak_bytes=40 * GIB if device == CUDA else 0)
    assert metrics.memory_metrics(device, slept) == {"memory/peak_gib": pytest.approx(gib)}
    held = 45 if device == CUDA else gib
    assert metrics.memory_metrics(device, object()) == {"memory/peak_gib": pytest.approx(held)}


def test_flash_attention_is_asked_for_by_a_real_import(tmp_path, monkeypatch):
    """A bare folder of that name, as FlashAttention 4 is laid out, is no flash-attn."""
    assert hardware.choose_backend("auto", CUDA, torch.bfloat16) == "varlen"
    for device, dtype in ((CUDA, torch.float32), (CPU, torch.bfloat16)):
        assert hardware.choose_backend("auto", device, dtype) == "sdpa"
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="model.attention=flash, but flash-attn cannot be imported"):
        hardware.choose_backend("flash", CUDA, torch.bfloat16)
    with pytest.raises(ConfigError, match="model.attention=varlen cannot run on cuda in torch.float32"):
        hardware.choose_backend("varlen", CUDA, torch.float32)
    sys.modules.pop("flash_attn", None)
