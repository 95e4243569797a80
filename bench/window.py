"""What does rollout.window gain? Tokens per second of steps that wait for the longest answer, and of steps
that sample at most so many tokens of each answer and go on with the unfinished ones in the next step.

    python bench/window.py [--shapes 1M]         # and vLLM where it is installed
    .venv-vllm/bin/python bench/window.py        # after `make test-vllm`

64 answers at a time, whose lengths are drawn from a long-tailed distribution (lognormal, median 90, cut at
1,024) and given to a model with random weights; both ways through the functions of training, with a sync, and
so an empty cache, before every step. Each engine runs in a process of its own, both ways in turns in one run;
the first turn is not timed.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from shapes import engine_spec, random_model, write_config

import config
from collect import Sampler
from data import Tokenizer
from history import order
from infra import dist
from methods.window import Pool, WindowSampler
from metrics import Clock
from model import Decoder
from preflight.memory import find_device
from records import Prompt, Rolled, Sample
from rollout import Engine, start_engine

ANSWERS, STEPS, LONGEST, PROMPT, ROUNDS = 64, 4, 1024, 32, 3
WINDOWS = (512, 256, 128)
ROOT = Path(__file__).parent.parent


class Tailed:
    """An engine whose answers end at a length that is a function of the prompt."""

    def __init__(self, engine: Engine, lengths: dict[tuple[int, ...], int]):
        self.engine, self.lengths = engine, lengths

    def generate(self, prompts, seeds, limits, temperature, progress=None) -> list[Sample]:
        remaining = [self.lengths[p[:PROMPT]] - (len(p) - PROMPT) for p in prompts]
        limits = [min(pair) for pair in zip(limits, remaining, strict=True)]
        samples = self.engine.generate(prompts, seeds, limits, temperature)
        return [replace(s, finished=s.length == n) for s, n in zip(samples, remaining, strict=True)]


def workload(count: int) -> tuple[list[Prompt], dict[tuple[int, ...], int]]:
    generator = np.random.default_rng(0)
    prompts = [Prompt(str(n), tuple(generator.integers(3, 400, PROMPT).tolist()), "1") for n in range(count)]
    lengths = np.clip(generator.lognormal(np.log(90), 1.0, count).astype(int), 1, LONGEST)
    return prompts, {p.ids: int(n) for p, n in zip(prompts, lengths, strict=True)}


def measure(kind: str, shape: str) -> dict[str, list[dict]]:
    """Measure, in a process of its own, tokens, seconds and the longest step of each window and round."""
    device = dist.init(find_device("auto"))
    prompts, lengths = workload(ANSWERS * STEPS * 4)
    by_window: dict[str, list[dict]] = {str(window): [] for window in ("whole", *WINDOWS)}
    with tempfile.TemporaryDirectory() as temporary:
        spec = engine_spec(write_config(shape, Path(temporary)), device, ANSWERS, PROMPT + LONGEST)
        tailed = Tailed(start_engine(kind, spec), lengths)
        policy = random_model(spec.folder, spec.dtype, device)
        for turn in range(ROUNDS + 1):
            for window, runs in by_window.items():
                limit = LONGEST if window == "whole" else int(window)
                run = steps(tailed, policy, prompts, limit)
                if turn:
                    runs.append(run)
    return by_window


def steps(tailed: Tailed, policy: Decoder, prompts: list[Prompt], window: int) -> dict:
    """Sample by windows until there are as many tokens as STEPS whole steps have."""
    cfg = config.load("tppo_toy.yaml", [
        "rollout.group_size=1",
        f"rollout.prompts_per_step={ANSWERS}",
        f"rollout.max_new_tokens={LONGEST}",
        f"rollout.window={window}",
        "pack.capacity=8192",
    ])
    # So arranged, the shuffled prompts of the first epoch come up in the order of `prompts`.
    arranged = [prompts[i] for i in order(len(prompts), cfg.seed, epoch=0).argsort()]
    pool = Pool(arranged, cfg.prune.prompts, cfg.seed, group_size=1)
    tokenizer = Tokenizer(ROOT / "toy" / "model")
    sampler = WindowSampler(Sampler(tailed, tokenizer, cfg.rollout, cfg.reward, cfg.seed), pool)
    enough = sum(tailed.lengths[prompt.ids] for prompt in prompts[:ANSWERS * STEPS])
    tokens, seconds = 0, []
    while tokens < enough:
        clock, turns = Clock(), pool.draw(ANSWERS)
        tailed.engine.sync(policy)
        with clock.phase("rollout"):
            groups = sampler.rollout(turns)
        pool.record(Rolled(turns, groups, None, torch.empty(0, 0)))  # it does not read the rewards
        tokens += sum(group.samples[0].fresh for group in groups)
        seconds.append(clock.seconds["rollout"])
    return {"tokens": tokens, "seconds": sum(seconds), "longest": max(seconds), "steps": len(seconds)}


def child(kind: str, shape: str) -> dict[str, list[dict]]:
    """Run `measure` in a process of its own and return its result."""
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, __file__, "--child", kind, shape]
    process = subprocess.run(command, capture_output=True, text=True, env=env)
    if process.returncode:
        sys.exit(f"{kind} {shape} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def rates_of(runs: list[dict]) -> list[float]:
    """Compute the tokens per second of each run."""
    return [run["tokens"] / run["seconds"] for run in runs]


def compared(shape: str, kind: str) -> list[dict]:
    """Print and return the runs of one engine by window, beside those of whole answers."""
    by_window = child(kind, shape)
    for window, runs in by_window.items():
        rates = rates_of(runs)
        ratio = median(a / b for a, b in zip(rates, rates_of(by_window["whole"]), strict=True))
        longest = median(run["longest"] for run in runs)
        print(f"{shape:<6} {kind:<7} {window:>7} {median(rates):>9,.0f} {min(rates):>8,.0f} - "
              f"{max(rates):<6,.0f} {ratio:>9.2f} {runs[0]['steps']:>6} {longest:>16.2f}", flush=True)
    return [{"shape": shape, "engine": kind, "window": window, "runs": runs}
            for window, runs in by_window.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1M", help="of bench/shapes.py, separated by commas")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*args.child)))
        dist.close()
        return
    installed = [kind for kind in ("torch", "vllm") if kind == "torch" or importlib.util.find_spec("vllm")]
    print(f"{'shape':<6} {'engine':<7} {'window':>7} {'tokens/s':>9} {'min - max':>17} {'of whole':>9} "
          f"{'steps':>6} {'longest step, s':>16}")
    results = [row for shape in args.shapes.split(",") for kind in installed for row in compared(shape, kind)]
    print(json.dumps({"bench": "window", "answers": ANSWERS, "results": results}))


if __name__ == "__main__":
    main()
