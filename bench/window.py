"""What a window does for the rollout: tokens per second of steps that wait for the longest answer, and of steps that
sample at most so many tokens of each and go on with the rest in the next.

    python bench/window.py               # vLLM where it is installed (`.venv-vllm` after `make test-vllm`)

64 answers at a time, whose lengths are drawn from a long-tailed distribution (lognormal, median 90, cut at 1,024) and
given to a model with random weights; both ways through the functions of training, with a sync, and so an empty cache,
before every step. Each engine runs in a process of its own, both ways in turns in one run; the first turn is not timed.
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

from shapes import random_model, write_config

import collect
import config
import data
import dist
import metrics
import runfolder
from model import choose_backend
from rollout import Engine, start_engine
from sample import Prompt, Sample

ANSWERS, STEPS, LONGEST, PROMPT, ROUNDS = 64, 4, 1024, 32, 3
WINDOWS = (512, 256, 128)
ROOT = Path(__file__).parent.parent


class Tailed:
    """An engine whose answers end at a length that is a function of the prompt."""

    def __init__(self, engine: Engine, lengths: dict[tuple[int, ...], int]):
        self.engine, self.lengths = engine, lengths

    def generate(self, prompts, seeds, limits, *rest, **named) -> list[Sample]:
        left = [self.lengths[p[:PROMPT]] - (len(p) - PROMPT) for p in prompts]
        samples = self.engine.generate(prompts, seeds, [min(pair) for pair in zip(limits, left, strict=True)], *rest,
                                       **named)
        return [replace(s, finished=s.length == n) for s, n in zip(samples, left, strict=True)]


def workload(count: int) -> tuple[list[Prompt], dict[tuple[int, ...], int]]:
    generator = np.random.default_rng(0)
    prompts = [Prompt(str(n), tuple(generator.integers(3, 400, PROMPT).tolist()), "1") for n in range(count)]
    lengths = np.clip(generator.lognormal(np.log(90), 1.0, count).astype(int), 1, LONGEST)
    return prompts, {p.ids: int(n) for p, n in zip(prompts, lengths, strict=True)}


def measure(kind: str, shape: str) -> dict[str, list[dict]]:
    """In a process of its own: tokens, seconds and the longest step of each way and round."""
    device = dist.init("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    prompts, lengths = workload(ANSWERS * STEPS * 4)
    tokenizer, log, found = data.Tokenizer(ROOT / "toy" / "model"), runfolder.Log(None), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(shape, Path(temporary))
        engine = start_engine(kind, folder, dtype, device, choose_backend("auto", device, dtype), frozenset(), ANSWERS,
                              PROMPT + LONGEST)
        policy = random_model(folder, dtype, device)
        for turn in range(ROUNDS + 1):
            for window in (None, *WINDOWS):
                cfg = config.load("tppo_toy.yaml", [
                    "rollout.group_size=1", f"rollout.prompts_per_step={ANSWERS}", f"rollout.max_new_tokens={LONGEST}",
                    f"rollout.window={window or LONGEST}", "pack.capacity=8192"])
                run = steps(Tailed(engine, lengths), policy, tokenizer, prompts, cfg, log)
                if turn:
                    found.setdefault(str(window or "whole"), []).append(run)
    return found


def steps(tailed: Tailed, policy, tokenizer, prompts, cfg, log) -> dict:
    """Steps until as many tokens are sampled as STEPS whole ones have."""
    wanted = sum(tailed.lengths[p.ids] for p in prompts[:ANSWERS * STEPS])
    prompts = prompts[:]  # in their order, so that all ways begin with the same answers
    history, tokens, seconds = data.PromptHistory(0.5), 0, []
    while tokens < wanted:
        clock = metrics.Clock()
        tailed.engine.sync(policy)
        rolled = collect.windowed(tailed, tokenizer, prompts, history, cfg, clock, log)
        tokens += sum(group.samples[0].fresh for group in rolled.groups)
        seconds.append(clock.seconds["rollout"])
    return {"tokens": tokens, "seconds": sum(seconds), "longest": max(seconds), "steps": len(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1M", help="of bench/shapes.py, separated by commas")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        data.order = lambda count, seed, epoch: range(count)
        print(json.dumps(measure(*args.child)))
        dist.close()
        return
    there = [kind for kind in ("torch", "vllm") if kind == "torch" or importlib.util.find_spec("vllm")]
    results = []
    print(f"{'shape':<6} {'engine':<7} {'window':>7} {'tokens/s':>9} {'min - max':>17} {'of whole':>9} {'steps':>6} "
          f"{'longest step, s':>16}")
    for shape in args.shapes.split(","):
        for kind in there:
            env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            done = subprocess.run([sys.executable, __file__, "--child", kind, shape], capture_output=True, text=True,
                                  env=env)
            if done.returncode:
                sys.exit(f"{kind} {shape} failed:\n{done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            whole = [run["tokens"] / run["seconds"] for run in found["whole"]]
            for window, runs in found.items():
                rates = [run["tokens"] / run["seconds"] for run in runs]
                ratio = median(a / b for a, b in zip(rates, whole, strict=True))
                results.append({"shape": shape, "engine": kind, "window": window, "runs": runs})
                longest = median(run["longest"] for run in runs)
                print(f"{shape:<6} {kind:<7} {window:>7} {median(rates):>9,.0f} {min(rates):>8,.0f} - "
                      f"{max(rates):<6,.0f} {ratio:>9.2f} {runs[0]['steps']:>6} {longest:>16.2f}", flush=True)
    print(json.dumps({"bench": "window", "answers": ANSWERS, "results": results}))


if __name__ == "__main__":
    main()
