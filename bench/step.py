"""Where does a step's time go, what does pruning save, and what do its stages cost by themselves?

    python bench/step.py [--parts step,pack,rollout,ranks] [--rounds 5]

step        Steps of the toy (16 prompts x 16 completions) at keep = 16, 8, 4, 2, 1 of 16, in turns, since the
            machine's speed drifts: seconds by phase, and the update's over that of keep 16 in the same round.
            `tokens` went through the policy, prompts included.
pack        How much of the ranks' time is work: a step's tokens, each prompt once, over the number of ranks
            times the tokens of the busiest one. 10 draws of a step a round.
rollout     Tokens a second of the embedded engine, and of vLLM if it is installed: as Winnow runs it, and as
            it is installed (compiled, without seeds and log-probs). 16 answers to a prompt, random weights,
            float32 on the CPU and bfloat16 on CUDA. Lengths are given: fixed, 64 tokens in every slot; or
            tailed, three samples a slot of exponentially drawn lengths, 256 at most. Each engine has its own
            process.
ranks       Runs of train.py, six steps of the toy on 1, 2 and 4 ranks, in turns: seconds of a step behind the
            first, and over those of one rank in the same round.

Figures are medians over the rounds, with the least and the largest.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from common import ROOT, count, in_own_process, listed, parser, print_json, show, timed
from shapes import SHAPES, ask, draw_weights, engine_spec, write_config

import config
import data
import train
from advantage import advantage
from collect import Sampler, Selection, choose
from history import PromptHistory
from infra import device as hardware
from infra import dist
from infra.choices import resolve_auto
from infra.lines import read_log
from learner import Learner
from metrics import Clock, memory_metrics
from model import empty_model
from pack import Minibatch, layout, pack
from policy import Weights
from records import Batch, Group, Prompt, PromptDraw, Rolled, Sample
from rollout import start_engine
from rollout_vllm import engine_options, undisturbed
from settings import leaves
from update import update

CAPACITY, G, NEW = 16_384, 16, 64
# step -> ranks, prompts, how many of their 16 completions are kept, of all together or of each group
KEPT = {"cppo_gsm8k": (8, 4, 16, "batch"), "cppo_gsm8k, 64 ranks": (64, 4, 16, "batch"),
        "cppo_math": (8, 6, 48, "batch"), "128 x 16, keep 4": (8, 128, 4, "group"),
        "128 x 16, keep 4, 64 ranks": (64, 128, 4, "group"), "128 x 16, keep 1": (8, 128, 1, "group")}
PLAIN_CACHE = 2**31  # bytes of vLLM's keys and values, as it is installed


# ---- whole steps

def weights_of(cfg: config.Config) -> Weights:
    """Choose how models come by their weights, as training does: with adapters or without."""
    return leaves.through("weights", cfg, Weights())


def prepare(cfg: config.Config, task: data.Task, seed: int = 0) -> tuple[Learner, Sampler, PromptHistory]:
    """Load policy, engine and history; `seed` draws the prompts."""
    learner, engine = train.load_models(resolve_auto(cfg, task.source), task, weights_of(cfg))
    engine.sync(learner.policy)
    history = PromptHistory(task.prompts, cfg.prune.prompts, seed, middle=0.5)
    return learner, Sampler(engine, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed), history


def drawn_rewards(prompts: int, completions: int, flat: int = 0) -> torch.Tensor:
    """Draw rewards, the same in every step, [N, G]; the first `flat` groups have equal ones."""
    generator = torch.Generator().manual_seed(0)
    rewards_NG = torch.rand(prompts, completions, dtype=torch.float64, generator=generator)
    rewards_NG[:flat] = 1
    return rewards_NG


def take_step(learner: Learner, sampler: Sampler, draws: list[PromptDraw], cfg: config.Config, flat: int = 0,
              ) -> tuple[dict, Batch]:
    """Take a step as train.train does, but for its log and checkpoint; returns metrics and seconds by phase.

    Rewards are computed, and then others are drawn in their place.
    """
    clock = Clock()
    with clock.phase("rollout"):
        groups = sampler.rollout(draws)
    with clock.phase("reward"):
        rewards = sampler.score(groups)
    drawn = {"accuracy": drawn_rewards(len(groups), cfg.rollout.group_size, flat)}
    rewards = replace(rewards, components=rewards.components | drawn)
    rolled = Rolled() + Rolled(draws, groups, rewards, advantage(rewards, cfg.advantage))
    batch = choose(rolled, Selection.of(cfg), seed=0)
    with clock.phase("sync"):
        sampler.engine.sleep()
    measured = update(learner, batch, 0, clock)
    with clock.phase("sync"):
        sampler.engine.sync(learner.policy)
    return measured | clock.metrics(), batch


def seconds_of(measured: dict) -> dict[str, float]:
    """Take the seconds of each phase out of a step's metrics, those of the whole step last."""
    phases = [name for name in measured if name.startswith("time/")]
    return {f"{name.removeprefix('time/')} s": measured[name] for name in phases}


def steps(rounds: int, keeps: tuple[int, ...] = (16, 8, 4, 2, 1)) -> list[dict]:
    """Measure steps of the toy by what is kept, in turns. No update moves the policy: all have equal work."""
    of_keep = [config.load("cppo_toy.yaml", [f"prune.completions.keep={keep}", "optim.lr=1e-12"])
               for keep in keeps]
    cfg = of_keep[0]
    learner, sampler, history = prepare(cfg, train.load_task(cfg))
    draws = history.draw(cfg.rollout.prompts_per_step)
    taken = [[take_step(learner, sampler, draws, changed)[0] for changed in of_keep]
             for _ in range(rounds + 1)]
    rows = []
    for i, keep in enumerate(keeps):
        measured = [of_round[i] for of_round in taken[1:]]  # the first warms up
        row = {"keep": keep, "tokens": measured[0]["pack/tokens"], "rows": measured[0]["pack/rows"],
               "density": measured[0]["pack/density"]}
        seconds = [seconds_of(each) for each in measured]
        row |= {phase: median(each[phase] for each in seconds) for phase in seconds[0]}
        unpruned = [of_round[0] for of_round in taken[1:]]
        row["update of unpruned"] = [some["time/update"] / whole["time/update"]
                                     for some, whole in zip(measured, unpruned, strict=True)]
        rows.append(row)
    return show("Seconds of a step of the toy by what is kept", rows)


# ---- packing

def drawn_step(step: str, seed: int) -> Minibatch:
    """Draw prompts of 180 tokens in the median, completions of 230, and which of them are kept."""
    _, prompts, kept, scope = KEPT[step]
    draw = np.random.default_rng(seed)
    prompt_N = draw.lognormal(np.log(180), 0.2, prompts).astype(int).clip(60, 512).tolist()
    length_NG = draw.lognormal(np.log(230), 0.45, (prompts, G)).astype(int).clip(30, 1024).tolist()
    chance_NG = torch.from_numpy(draw.random((prompts, G)))
    flat_NG = chance_NG.view(1, -1) if scope == "batch" else chance_NG
    keep_NG = (flat_NG.argsort(dim=1).argsort(dim=1) < kept).view(prompts, G)
    groups = []
    for n in range(prompts):
        samples = tuple(Sample([0] * length, [0.0] * length, True) for length in length_NG[n])
        groups.append(Group(Prompt(str(n), (0,) * prompt_N[n], ""), samples))
    return Minibatch(groups, keep_NG, *torch.zeros(3, prompts, G))


def utilisation(step: str, seed: int) -> float:
    """Compute a step's tokens, each prompt once, over what all ranks could do while the busiest one works."""
    minibatch, ranks = drawn_step(step, seed), KEPT[step][0]
    busiest = max(sum(sum(layout(minibatch, plan.members)[0]) for plan in mine if plan.counts)
                  for mine in pack(minibatch, config.Pack(capacity=CAPACITY), ranks))
    members = minibatch.keep_NG.nonzero().tolist()
    tokens = sum(len(minibatch.groups[n].prompt.ids) for n in {n for n, _ in members})
    tokens += sum(minibatch.groups[n].samples[g].length for n, g in members)
    return tokens / (ranks * busiest)


def packing(rounds: int) -> list[dict]:
    rows = [{"step": step, "ranks": ranks,
             "utilisation": [utilisation(step, seed) for seed in range(10 * rounds)]}
            for step, (ranks, *_) in KEPT.items()]
    return show(f"Share of the ranks' time that is work, rows of {CAPACITY:,} tokens", rows)


# ---- rollouts

def requests(slots: int, lengths: str) -> tuple[list[tuple[int, ...]], list[int]]:
    """Draw prompts, repeat each G times, and choose the length of each completion."""
    count = slots if lengths == "fixed" else 3 * slots
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in torch.randint(20, 80, (count // G,), generator=generator).tolist():
        prompts += [tuple(torch.randint(3, 400, (length,), generator=generator).tolist())] * G
    drawn = np.random.default_rng(0).exponential(NEW, count).astype(int) + 1
    return prompts, [NEW] * count if lengths == "fixed" else drawn.clip(max=4 * NEW).tolist()


def rates(sample: Callable[[list, list[int], int], int], rounds: int, **about: object) -> list[dict]:
    """Measure an engine's tokens a second, a row for each kind of lengths; `sample` returns their number."""
    rows = []
    for lengths in ("fixed", "tailed"):
        prompts, limits = requests(about["slots"], lengths)
        measured = []
        for draw in range(rounds + 1):  # the first warms up
            start = perf_counter()
            tokens = sample(prompts, limits, draw)
            measured.append(tokens / (perf_counter() - start))
        rows.append(about | {"lengths": lengths, "tokens": tokens, "tokens/s": measured[1:]})
    return rows


def generate(kind: str, shape: str, slots: int, rounds: int, halves: bool) -> list[dict]:
    """Measure an engine's tokens a second, its sync from a policy on one rank, and its memory."""
    device = dist.init(hardware.find_device("auto"))
    with tempfile.TemporaryDirectory() as temporary:
        spec = engine_spec(write_config(shape, Path(temporary)), device, slots, 80 + 4 * NEW, halves)
        engine = start_engine(kind, spec)
        policy = empty_model(spec.folder, spec.dtype).to_empty(device=device)
        draw_weights(policy)
        engine.sync(policy)

        def sample(prompts: list, limits: list[int], draw: int) -> int:
            seeds = [draw * len(prompts) + i for i in range(len(prompts))]
            return sum(len(s.ids) for s in engine.generate(ask(prompts, seeds, limits), 1.0))

        measured = {"sync s": [timed(lambda: engine.sync(policy)) for _ in range(rounds)]}
        name = f"{kind}, bfloat16" if halves else kind
        rows = rates(sample, rounds, shape=shape, slots=slots, engine=name)
        measured |= memory_metrics(device, engine)
    dist.close()
    return [row | measured for row in rows]


def generate_plainly(shape: str, slots: int, rounds: int, halves: bool) -> list[dict]:
    """Measure vLLM as it is installed: compiled, with packed weights, without seeds and log-probs."""
    from vllm import LLM, SamplingParams

    device = dist.init(hardware.find_device("auto"))
    same = ("model", "load_format", "skip_tokenizer_init", "generation_config", "dtype", "max_model_len",
            "max_num_seqs", "kv_cache_memory_bytes")
    with tempfile.TemporaryDirectory() as temporary, undisturbed(device):
        spec = engine_spec(write_config(shape, Path(temporary)), device, slots, 80 + 4 * NEW, halves)
        options = engine_options(spec, cache=PLAIN_CACHE)
        engine = LLM(**{key: options[key] for key in same})

        def sample(prompts: list, limits: list[int], draw: int) -> int:
            asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
            params = [SamplingParams(max_tokens=limit, ignore_eos=True, detokenize=False) for limit in limits]
            outputs = engine.generate(asked, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        name = "vllm as installed, bfloat16" if halves else "vllm as installed"
        rows = rates(sample, rounds, shape=shape, slots=slots, engine=name)
    dist.close()
    return rows


def rollouts(shapes: list[str], slots: list[int], rounds: int, halves: bool) -> list[dict]:
    engines = ["torch", "vllm"] if importlib.util.find_spec("vllm") else ["torch"]
    rows = []
    for shape, number, half in product(shapes, slots, (False, True) if halves else (False,)):
        for kind in engines:
            rows += in_own_process(generate, kind, shape, number, rounds, half)
        if "vllm" in engines:
            rows += in_own_process(generate_plainly, shape, number, rounds, half)
    return show("Tokens a second of each engine", rows)


# ---- ranks

def on_ranks(rounds: int) -> list[dict]:
    seconds = {ranks: [] for ranks in (1, 2, 4)}
    for _, ranks in product(range(rounds), seconds):
        with tempfile.TemporaryDirectory() as folder:
            sets = ["steps=6", "eval.every=0", "checkpoint.every=0", f"out={folder}/run"]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
                       str(ranks), "train.py", "--config", "cppo_toy.yaml"]
            command += [word for setting in sets for word in ("--set", setting)]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            spent = [line["time/step"] for line in read_log(Path(folder, "run", "metrics.jsonl"))
                     if "time/rollout" in line]
        seconds[ranks].append(median(spent[1:]))
    rows = [{"ranks": ranks, "step s": spent,
             "of one rank's": [a / b for a, b in zip(spent, seconds[1], strict=True)]}
            for ranks, spent in seconds.items()]
    return show(f"Six steps of cppo_toy on {os.cpu_count()} cores, one thread a rank", rows)


def main() -> None:
    options = parser(__doc__)
    parts = ["step", "pack", "rollout", "ranks"]
    options.add_argument("--parts", type=listed(parts), default=parts, help=",".join(parts))
    options.add_argument("--rounds", type=count, default=5)
    options.add_argument("--shapes", type=listed([*SHAPES]), default="1M,10M", help=",".join(SHAPES))
    options.add_argument("--slots", default="64,256", help="rollout: of an engine, by sixteens")
    options.add_argument("--halves", action="store_true", help="rollout: bfloat16 on the CPU as well")
    args = options.parse_args()
    slots = [int(count) for count in args.slots.split(",")]
    measure = {"step": lambda: steps(args.rounds), "pack": lambda: packing(args.rounds),
               "ranks": lambda: on_ranks(args.rounds),
               "rollout": lambda: rollouts(args.shapes, slots, args.rounds, args.halves)}
    results = {part: measure[part]() for part in args.parts}
    dist.close()
    print_json("step", **results)


if __name__ == "__main__":
    main()
