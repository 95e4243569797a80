"""The parts of bench/gpu.py. Each runs in a process of its own, on one rank, and computes in bfloat16.

Dimension key:  N groups,  G completions per group,  C completion tokens of one packed row,  V vocabulary,
D width.
"""

import gc
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from common import ROOT, cell, timed
from shapes import PEAKS, ask, draw_weights, engine_spec, flop, predict_sync, write_config
from step import seconds_of, take_step, weights_of
from torch import Tensor

import config
import train
from collect import Sampler
from history import PromptHistory
from infra import checks, dist
from infra import device as hardware
from infra.choices import resolve_auto
from infra.lines import append
from infra.weights import read_shape
from learner import Learner, build_learner, load_sharded
from leaves.fit import counts, fit
from metrics import Clock, memory_metrics
from model import BACKENDS, ChunkedLogProb, Decoder, log_prob, logits_gradient
from prune import keep_largest
from records import Batch, Group, Prompt, Row, Sample
from rollout import Engine, start_engine
from update import make_minibatch, update

HALF, GIB, G = torch.bfloat16, 2**30, 16
TOLERANCE = 0.02  # relative, of a kernel's results and of a gradient's norm


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work a device is given."""

    matrix: int              # rows and columns of the product that shows the device's speed
    capacity: int            # pack.capacity
    groups: int              # of an update, and of a step
    prompt: int              # tokens; a step has the toy's prompts
    longest: int             # tokens of a completion of an update; the shortest has a quarter of them
    new: int                 # tokens sampled
    slots: tuple[int, ...]   # sequences sampled at once
    times: int = 2           # that each thing is timed, behind once to warm up


LARGE = Sizes(8192, 16_384, 16, 150, 360, 256, (8, 64, 256))
BELOW_100_GB = replace(LARGE, capacity=8192, groups=8)
OF_CPU = Sizes(256, 512, 2, 20, 24, 8, (4, 16, 32))
# Completions kept of each group, model.checkpoint_blocks, model.compile, model.lora.rank
UPDATES = [(keep, "none", False, None) for keep in (16, 8, 4, 2, 1)]
UPDATES += [(16, "selective", False, None), (16, "all", False, None)]
UPDATES += [(16, "none", True, None), (16, "all", True, None)]
UPDATES += [(16, how, False, 32) for how in ("none", "selective", "all")] + [(4, "none", False, 32)]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a part is given."""

    part: str
    shape: str
    out: Path            # of results
    device: torch.device
    folder: Path         # a model of this shape without weights, with the toy's tokenizer

    @property
    def engine(self) -> str:
        return "vllm" if self.part.startswith("vllm_") else "torch"

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.cuda else "CPU"

    @property
    def sizes(self) -> Sizes:
        if not self.cuda:
            return OF_CPU
        return LARGE if torch.cuda.mem_get_info(self.device)[1] > 100e9 else BELOW_100_GB

    def add(self, way: object, **figures: object) -> None:
        """Write a line of results, and show it, on the first rank."""
        if dist.rank() > 0:
            return
        append(self.out, {"part": self.part, "shape": self.shape, "way": str(way)} | figures)
        shown = [f"{key} {cell(value)}" for key, value in figures.items() if value is not None]
        print(f"  {way}: {', '.join(shown)}", flush=True)

    def settings(self, *changes: str, name: str | list[str] = "grpo_gsm8k.yaml") -> config.Config:
        """Load a shipped config with a model of the shape, and decide what it leaves to auto."""
        size = self.sizes
        planned = 5 * size.longest // 2  # memory counts on completions of a quarter, here the mean of a batch
        cfg = config.load(name, [
            f"model.path={self.folder}", "model.dtype=bfloat16", f"pack.capacity={size.capacity}",
            f"data.max_prompt_tokens={size.prompt}", f"rollout.max_new_tokens={planned}",
            "eval.max_new_tokens=8", "rollout.engine=torch", "loss.kl=0", "update.epochs=1",
            "update.redraw=false", "optim.warmup_steps=0", *changes])
        here = fit.try_on(cfg, read_shape(self.folder), hardware.Machine.here(self.device))
        print("".join(f"  {line}\n" for line in here.remarks), end="", flush=True)
        return here.cfg

    def learner(self, cfg: config.Config) -> Learner:
        return build_learner(cfg, self.folder, self.device, weights_of(cfg))

    def forget_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / GIB if self.cuda else None

    def peak_with(self, engine: Engine) -> float | None:
        """Return the same of a step: torch counts the memory of an engine that sleeps."""
        return memory_metrics(self.device, engine)["memory/peak_gib"] if self.cuda else None

    def speed(self, work: float, seconds: float) -> dict[str, float | None]:
        """Compute TFLOP/s, and MFU where the device's peak is known."""
        known = [flops for word, (flops, _) in PEAKS.items() if word in self.name]
        return {"MFU": work / seconds / known[0] if known else None, "TFLOP/s": work / seconds / 1e12}


def run(part: str, shape: str, out: Path) -> None:
    """Do one part."""
    device = dist.init(hardware.find_device("auto"))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary) / "model"
        shutil.copytree(ROOT / "toy" / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
        if shape:
            write_config(shape, folder)
            for module in ("policy", "leaves.lora.join"):  # all else is as in training
                stack.enter_context(patch(f"{module}.load_weights", draw_weights))
        try:
            FUNCTIONS[part.removeprefix("vllm_")](Bench(part, shape, out, device, folder))
        finally:
            dist.close()


def each(bench: Bench, ways: dict[str, Callable[[], dict]]) -> None:
    """Measure one way after another. One that runs out of memory, or fails otherwise, ends alone: it builds
    all that it needs, and what it has left is freed."""
    for way, measure in ways.items():
        try:
            bench.add(way, **measure())
        except config.ConfigError as error:
            bench.add(way, skipped=str(error))
        except Exception as error:
            traceback.print_exc()
            bench.add(way, failed=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA


def repeated(work: Callable[[], object], times: int) -> list[float]:
    """Measure the seconds of each call. CUDA is waited for."""
    def wait_for_it() -> None:
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return [timed(wait_for_it) for _ in range(times)]


def failure(reasons: dict[str, bool]) -> dict[str, str]:
    """Name the reasons that hold, if any does, as the failure of a way."""
    named = "; ".join(reason for reason, holds in reasons.items() if holds)
    return {"failed": named} if named else {}


def random_batch(bench: Bench, keep: int) -> Batch:
    """Draw groups of completions of unequal length and advantage, of which the largest are kept."""
    size, generator = bench.sizes, torch.Generator().manual_seed(0)

    def drawn(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(3, 400, (length,), generator=generator).tolist()

    groups = []
    for n in range(size.groups):
        answers = [drawn(size.longest // 4, size.longest) for _ in range(G)]
        samples = tuple(Sample(ids, [-1.0] * len(ids), True) for ids in answers)
        groups.append(Group(Prompt(str(n), tuple(drawn(size.prompt, size.prompt)), "1"), samples))
    adv_NG = torch.randn(size.groups, G, dtype=torch.float64, generator=generator)
    return Batch([], groups, adv_NG, adv_NG > 0, adv_NG, keep_largest(adv_NG, keep, "group"),
                 list(range(size.groups)), size.groups, seed=0)


# ---- the parts

def machine(bench: Bench) -> None:
    """Name the device and what runs on it, and measure the speed of a product of matrices."""
    width, times = bench.sizes.matrix, 10
    x = torch.randn(width, width, dtype=HALF, device=bench.device)
    _, *seconds = repeated(lambda: [x @ x for _ in range(times)], 3)
    speed = 2 * width**3 * times / min(seconds)
    details = [f"{hardware.Machine.here(bench.device).free / GIB:.1f} GiB free"]
    if bench.cuda:
        details.append("driver " + said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))
    details += [f"{os.cpu_count()} cores", f"torch {torch.__version__}",
                f"Python {platform.python_version()}",
                f"{speed / 1e12:.3g} TFLOP/s in a product of {width:,} x {width:,} in bfloat16"]
    commit = said("git", "log", "-1", "--abbrev=7", "--format=%h of %cs") or "unknown"
    bench.add("", device=bench.name, cuda=bench.cuda, gpus=torch.cuda.device_count(),
              details=", ".join(details), commit=commit)


def said(*command: str) -> str:
    """Return the first line that a program prints; empty where there is no such program, or it fails."""
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return process.stdout.partition("\n")[0]


def kernels(bench: Bench) -> None:
    """Compare attention by each backend, and the head's log-probs, with the same in float32."""
    learner, batch = bench.learner(bench.settings()), random_batch(bench, G)
    row = rows_of(learner, batch)[0]
    shape, generator = learner.policy.shape, torch.Generator(bench.device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, dtype=HALF, device=bench.device, generator=generator)

    def head(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
        passes = log_prob, logits_gradient
        return ChunkedLogProb.apply(hidden_CD, head_VD, row.target_C, 1.0, learner.policy.logp_chunk, passes)

    def of_head() -> dict:
        V, D = learner.policy.head_VD.shape
        return compared(bench, head, head, [drawn(len(row.target_C), D), 0.05 * drawn(V, D)])

    def of_attention(backend: str) -> dict:
        hardware.choose_backend(backend, bench.device, HALF)
        def attend(name: str, *qkv_THE: Tensor) -> Tensor:
            return BACKENDS[name](row.segments)(0, *qkv_THE, None)

        kernel, exact = partial(attend, backend), partial(attend, "sdpa")
        heads = shape.heads, shape.kv_heads, shape.kv_heads
        return compared(bench, kernel, exact, [drawn(len(row.ids_T), n, shape.head_dim) for n in heads])

    each(bench, {name: partial(of_attention, name) for name in BACKENDS} | {"head": of_head})


def compared(bench: Bench, kernel: Callable, exact: Callable, inputs: list[Tensor]) -> dict:
    """Time a kernel with its gradients, and compute their errors relative to `exact` in float32."""
    def results(function: Callable, given: list[Tensor]) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in given]
        out = function(*given)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), given)]

    pairs = zip(results(kernel, inputs), results(exact, [x.float() for x in inputs]), strict=True)
    errors = [float((ours.float() - wanted).norm() / wanted.norm()) for ours, wanted in pairs]
    _, *seconds = repeated(lambda: results(kernel, inputs), 1 + bench.sizes.times)
    return {"seconds": seconds, "error": errors[0], "error of gradients": max(errors[1:]),
            **failure({f"an error is not below {TOLERANCE}": not max(errors) < TOLERANCE})}


def check(bench: Bench, *changes: str) -> None:
    """Try all that a run needs, as train.py --check does."""
    cfg = config.load("cppo_toy.yaml", ["model.dtype=bfloat16", f"rollout.engine={bench.engine}",
                                        f"device={bench.device.type}", *changes])
    task = train.load_task(cfg)
    decided = resolve_auto(cfg, task.source)
    ready = checks.Ready(decided, *train.load_models(decided, task, weights_of(cfg)), task)
    for result in checks.before_run(cfg, ready).checks:
        bench.add(result.name, passed=result.passed, figures=result.figures,
                  **failure({result.remedy: not result.passed}))


def tests(bench: Bench) -> None:
    """Run the tests that want a GPU, in a process of their own: they open the device's group themselves."""
    if not bench.cuda:
        return bench.add("pytest -m gpu", skipped="there is no CUDA device")
    code = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "tests"], cwd=ROOT).returncode
    return bench.add("pytest -m gpu", passed=code == 0, **failure({f"it ended with {code}": code != 0}))


def updates(bench: Bench) -> None:
    """Time updates by what is kept, recomputed, compiled and trained, measure their memory, and compare their
    gradients."""
    norms: dict[tuple[int, int | None], float] = {}

    def measure(keep: int, recomputed: str, compiled: bool, rank: int | None) -> dict:
        adapted = [f"model.lora.rank={rank}"] if rank else []
        cfg = bench.settings(f"model.checkpoint_blocks={recomputed}",
                             f"model.compile={str(compiled).lower()}", *adapted)
        figures = one_update(bench, cfg, keep)
        norm = figures["gradient norm"]
        expected = norms.setdefault((keep, rank), norm)  # of the first way that keeps so many
        wrong = not abs(norm / expected - 1) < TOLERANCE
        return figures | failure({f"the gradient's norm is {norm:.4g}, not {expected:.4g}": wrong})

    def named(keep: int, recomputed: str, compiled: bool, rank: int | None) -> str:
        adapter = f", LoRA of rank {rank}" if rank else ""
        return f"keep {keep}, recompute {recomputed}{', compiled' * compiled}{adapter}"

    each(bench, {named(*way): partial(measure, *way) for way in UPDATES})


def one_update(bench: Bench, cfg: config.Config, keep: int) -> dict:
    """Time an update, and measure its memory and count it."""
    learner, batch = bench.learner(cfg), random_batch(bench, keep)
    bench.forget_peak()
    measured: list[dict] = []

    def once() -> None:
        measured.append(update(learner, batch, 0, Clock()))

    first, *seconds = repeated(once, 1 + bench.sizes.times)
    rows, scored = rows_of(learner, batch), measured[0]["train/tokens"]
    segments = [row.segments for row in rows]
    # Counted for rows as long as the longest of these.
    longest = replace(cfg, pack=config.Pack(max(len(row.ids_T) for row in rows)))
    counted = sum(counts.phases(longest, learner.policy.shape, dist.world_size())["update"].values())
    tokens = measured[0]["pack/tokens"]
    return {"rows": len(rows), "tokens": tokens, "first s": first, "seconds": seconds,
            "tokens/s": tokens / median(seconds),
            **bench.speed(flop(learner.policy, segments, scored), median(seconds)),
            "GiB": bench.peak_gib(), "GiB counted": counted / GIB,
            "gradient norm": measured[0]["train/grad_norm"]}


def rows_of(learner: Learner, batch: Batch) -> list[Row]:
    return learner.rows(make_minibatch(learner, batch, batch.places))


def step(bench: Bench) -> None:
    """Time whole steps of GRPO, CPPO, PPS and CPPO with an adapter; completions all have the full length."""
    size = bench.sizes
    cfgs = [bench.settings(f"rollout.engine={bench.engine}", f"rollout.group_size={G}",
                           f"rollout.prompts_per_step={size.groups}", f"rollout.slots={size.groups * G}",
                           f"rollout.max_new_tokens={size.new}", "data.max_prompt_tokens=128", name=name)
            for name in ("grpo_toy.yaml", "cppo_toy.yaml", ["pps_gsm8k.yaml", "toy.yaml"], "lora_toy.yaml")]
    task = train.load_task(cfgs[0])
    task.tokenizer.eos_ids = frozenset()
    learner, engine = train.load_models(cfgs[0], task, weights_of(cfgs[0]))
    engine.sync(learner.policy)
    for cfg in cfgs:
        if counts.adapter(cfg):
            learner = with_loss = None  # makes room
            learner = bench.learner(cfg)
            engine.sync(learner.policy)
        sampler = Sampler(engine, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed)
        history = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, middle=0.5)
        with_loss = replace(learner, loss=cfg.loss)
        take_step(with_loss, sampler, history.draw(size.groups), cfg)  # warm up
        bench.forget_peak()
        measured, batch = take_step(with_loss, sampler, history.draw(size.groups), cfg)
        segments = [row.segments for row in rows_of(learner, batch)]
        work, seconds = flop(learner.policy, segments, measured["train/tokens"]), seconds_of(measured)
        rate = size.groups * G * size.new / seconds["rollout s"]
        bench.add(Path(cfg.out).name, kept=int(batch.pruned.keep_NG.sum()), tokens=measured["pack/tokens"],
                  mismatch=measured["mismatch/logp_abs_mean"], **seconds, **{"sampled tokens/s": rate},
                  GiB=bench.peak_with(engine), **bench.speed(work, seconds["update s"]))


def rollout(bench: Bench) -> None:
    """Time an engine's sleep and the sync after it, and the tokens that it samples by the slots filled."""
    size, cfg = bench.sizes, bench.settings()
    policy, new = load_sharded(cfg, bench.folder, bench.device, HALF, weights_of(cfg)), size.new // 2
    spec = engine_spec(bench.folder, bench.device, max(size.slots), size.prompt + new)
    engine = start_engine(bench.engine, replace(spec, sleeps=True))
    engine.sync(policy)
    bench.add("sleep and sync", **sync_seconds(bench, engine, policy),
              **{"sync predicted s": predict_sync(policy.shape, bench.name)})

    def measure(slots: int) -> dict:
        prompts = [tuple(range(3 + i // G, 3 + i // G + size.prompt)) for i in range(slots)]
        engine.generate(ask(prompts, list(range(slots)), [2] * slots), 1.0)  # warm up
        requests = ask(prompts, list(range(slots)), [new] * slots)
        seconds = repeated(partial(engine.generate, requests, 1.0), size.times)
        return {"ms a token": [1000 * spent / new for spent in seconds],
                "sampled tokens/s": [slots * new / spent for spent in seconds],
                "GiB in use": hardware.used_bytes(bench.device) / GIB}

    each(bench, {f"{slots} sequences": partial(measure, slots) for slots in size.slots})


def sync_seconds(bench: Bench, engine: Engine, policy: Decoder) -> dict[str, list[float]]:
    """Time an engine's sleep and the sync after it; of vLLM's sync its calls as well."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timing(name: str, method: Callable) -> Callable:
        def call(*given: object, **named: object) -> object:
            results: list[object] = []
            seconds[name] += repeated(lambda: results.append(method(*given, **named)), 1)
            return results[0]

        return call

    if bench.engine == "vllm":
        weights, cache = (timing(name, engine.llm.wake_up) for name in ("wake weights s", "wake cache s"))
        engine.llm.wake_up = lambda tags: (weights if tags == ["weights"] else cache)(tags)
        engine.llm.apply_model = timing("load s", engine.llm.apply_model)
    for _ in range(1 + bench.sizes.times):
        timing("sleep s", engine.sleep)()
        timing("sync s", engine.sync)(policy)
    return {name: measured[1:] for name, measured in seconds.items()}


FUNCTIONS = {part.__name__: part for part in (
    machine, kernels, check, updates, step, rollout, tests)}
# The same on two ranks: with an engine each, and with one together.
FUNCTIONS |= {"ranks": check, "tensor_parallel": lambda bench: check(bench, "rollout.tensor_parallel=2")}
