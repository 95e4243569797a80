"""What do rounded products (model.products: bfloat16) gain on this CPU, and what do they change?

    python bench/products.py [--shapes 1M,10M] [--rounds 5] [--model FOLDER] [--profile] [--also a.b=c ...]

For a random model of each shape (1M: the toy's weights), or of a folder, in turns, CPU seconds of one thread;
`--also` measures the update under other settings too:

update   of 16 completions of 64 tokens to each of some prompts, in rows of 2,048 tokens. `gradient` is the
         distance to the float32 gradient over its norm.
decode   16 answers of 64 tokens to each of some prompts, all at once, in tokens a second.
forward  log-probs of these completions without a gradient: `gap` is the mean distance to float32's, in nats,
         and `engine` the mean distance between engine and trainer, both rounded.

Rates are medians with the least and the largest. For evaluation, `alone` is decoding with a prompt of 40
tokens of its own for each answer, and `read` the share of its seconds that reads prompts.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from unittest.mock import patch

import torch
from common import ROOT, parser, print_json, show
from shapes import engine_spec, random_model, write_config

import config
import rollout
import update as updating
from advantage import advantage
from collect import Selection, choose
from infra import dist
from infra.weights import export
from learner import Learner, build_learner
from metrics import Clock
from model import load_model
from preflight import memory
from preflight.checks import pack_in_order
from records import Group, Prompt, PromptDraw, Request, Rewards, Rolled, Sample
from rollout import TorchEngine, start_engine

G, NEW, READ = 16, 64, 40
PROMPTS = {"1M": 16, "10M": 4}  # of a step; 1 of a folder
ROUNDED = "model.products=bfloat16"
ARMS = ("float32", ROUNDED)
CPU = torch.device("cpu")


def folder_of(shape: str, folder: Path) -> Path:
    """Write a random model of a shape; the toy for 1M."""
    if shape == "1M":
        return ROOT / "toy" / "model"
    made = random_model(write_config(shape, folder), torch.float32, CPU)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((ROOT / "toy" / "model" / name).read_bytes())
    export(made, folder, folder / "hf", {})
    return folder / "hf"


def learner_of(folder: Path, arm: str, prompts: int) -> tuple[config.Config, Learner]:
    cfg = config.load("grpo_toy.yaml", [
        f"model.path={folder}", "model.dtype=float32", "device=cpu", "optim.lr=1e-12", "optim.warmup_steps=0",
        "pack.capacity=2048", f"rollout.group_size={G}", f"rollout.prompts_per_step={prompts}",
        f"rollout.max_new_tokens={NEW}", *([] if arm == "float32" else [arm])])
    cfg = memory.resolve_auto(cfg, folder)
    return cfg, build_learner(cfg, folder, CPU)


def made_groups(prompts: int, vocab_size: int) -> list[Group]:
    draw = torch.Generator().manual_seed(0)
    groups = []
    for n in range(prompts):
        ids = torch.randint(3, vocab_size, (READ + G * NEW,), generator=draw).tolist()
        samples = [Sample(ids[i:i + NEW], [-6.0] * NEW, False) for i in range(READ, len(ids), NEW)]
        groups.append(Group(Prompt(str(n), tuple(ids[:READ]), ""), tuple(samples)))
    return groups


def take_update(cfg: config.Config, learner: Learner, groups: list[Group]) -> tuple[float, torch.Tensor]:
    """Return CPU seconds of an update, and its gradient."""
    draw = torch.Generator().manual_seed(1)
    reward_NG = torch.rand(len(groups), G, dtype=torch.float64, generator=draw)
    rewards = Rewards({"accuracy": reward_NG}, {"accuracy": 1.0}, torch.full((len(groups), G), NEW))
    draws = [PromptDraw(group.prompt, 0) for group in groups]
    rolled = Rolled() + Rolled(draws, groups, rewards, advantage(rewards, cfg.advantage))
    batch = choose(rolled, Selection.of(cfg), seed=0)
    seen, true_step = [], updating.optimizer_step

    def watched(model: torch.nn.Module, *given: object) -> float:
        parts = [dist.local_shard(p.grad).flatten() for p in model.parameters()]
        seen.append((process_time(), torch.cat(parts)))
        return true_step(model, *given)

    with patch.object(updating, "optimizer_step", watched):
        start = process_time()
        updating.update(learner, batch, 0, Clock())
    return process_time() - start, seen[0][1]


def log_probs(learner: Learner, groups: list[Group]) -> torch.Tensor:
    rows = pack_in_order(groups, learner, learner.pack.capacity)
    with torch.no_grad():
        return torch.cat([learner.log_probs(learner.policy, row) for row in rows])


def decode(engine: TorchEngine, groups: list[Group], copies: int) -> tuple[float, float, list[Sample]]:
    """Answer with `copies` to a prompt; return tokens a CPU second, the share that reads prompts, samples."""
    prompts = [group.prompt for group in groups]
    if copies == 1:
        prompts = [Prompt("", tuple(sample.ids[:READ]), "") for group in groups for sample in group.samples]
    requests = [Request(prompt, i, NEW) for i, prompt in enumerate(p for p in prompts for _ in range(copies))]
    reading, true_prefill = [0.0], rollout.Cache.prefill

    def timed_prefill(cache: rollout.Cache, placed: list) -> None:
        start = process_time()
        true_prefill(cache, placed)
        reading[0] += process_time() - start

    with patch.object(rollout.Cache, "prefill", timed_prefill):
        start = process_time()
        samples = engine.generate(requests, 1.0)
    seconds = process_time() - start
    return sum(s.length for s in samples) / seconds, reading[0] / seconds, samples


def measure(name: str, folder: Path, prompts: int, rounds: int, arms: Sequence[str] = ARMS) -> list[dict]:
    learners = {arm: learner_of(folder, arm, prompts) for arm in arms}
    policy = load_model(folder, torch.float32, CPU)
    groups = made_groups(prompts, min(policy.shape.vocab_size, 400))
    engines = {}
    for arm in arms:
        spec = engine_spec(folder, CPU, prompts * G, READ + NEW)
        engines[arm] = start_engine("torch", replace(spec, rounds=arm == ROUNDED))
        engines[arm].sync(policy)
        engines[arm].eos_ids = frozenset()
    measured = ("update s", "decode", "alone", "read")
    cells = {arm: {key: [] for key in measured} for arm in arms}
    gradients, logps = {}, {arm: log_probs(learner, groups) for arm, (_, learner) in learners.items()}
    for i in range(rounds + 1):
        for arm in arms if i % 2 else reversed(arms):
            seconds, gradients[arm] = take_update(*learners[arm], groups)
            rate, _, samples = decode(engines[arm], groups, G)
            alone, share, _ = decode(engines[arm], groups, 1)
            if i:  # the first warms up
                for key, value in zip(measured, (seconds, rate, alone, share), strict=True):
                    cells[arm][key].append(value)
            else:
                asked = [Group(group.prompt, tuple(samples[n * G:(n + 1) * G]))
                         for n, group in enumerate(groups)]
                sampled = torch.tensor([x for s in samples for x in s.logp])
                gap = log_probs(learners[arm][1], asked) - sampled
                cells[arm]["engine"] = gap.abs().mean().item()
    exact = gradients["float32"]
    for arm, row in cells.items():
        row["gap"] = (logps[arm] - logps["float32"]).abs().mean().item()
        row["gradient"] = ((gradients[arm] - exact).norm() / exact.norm()).item()
        row["speed"] = [a / b for a, b in zip(cells["float32"]["update s"], row["update s"], strict=True)]
        row["of decode"] = [b / a for a, b in zip(cells["float32"]["decode"], row["decode"], strict=True)]
    return [{"model": name, "arm": arm} | row for arm, row in cells.items()]


def profile(folder: Path, prompts: int) -> list[dict]:
    """List the operations that take most of an update's and of decoding's own time, the second time."""
    cfg, learner = learner_of(folder, "float32", prompts)
    policy = load_model(folder, torch.float32, CPU)
    groups = made_groups(prompts, min(policy.shape.vocab_size, 400))
    engine = start_engine("torch", engine_spec(folder, CPU, prompts * G, READ + NEW))
    engine.sync(policy)
    engine.eos_ids = frozenset()
    rows = []
    for phase, work in (("update", lambda: take_update(cfg, learner, groups)),
                        ("decode", lambda: decode(engine, groups, G))):
        work()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            work()
        taken = sorted(seen.key_averages(), key=lambda op: -op.self_cpu_time_total)
        total = sum(op.self_cpu_time_total for op in taken)
        for op in taken[:8]:
            rows.append({"phase": phase, "operation": op.key, "calls": op.count,
                         "share": op.self_cpu_time_total / total})
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", default="1M,10M", help="of bench/shapes.py")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--model", type=Path, help="a folder, in place of shapes")
    options.add_argument("--profile", action="store_true", help="what float32's time goes to, and no rates")
    options.add_argument("--also", action="append", default=[], help="a setting, as one more arm")
    args = options.parse_args()
    dist.init("cpu")
    arms = (*ARMS, *args.also)
    rows = []
    if args.profile:
        with tempfile.TemporaryDirectory() as folder:
            shape = args.shapes.split(",")[-1]
            made = args.model or folder_of(shape, Path(folder))
            rows = profile(made, 1 if args.model else PROMPTS.get(shape, 2))
    elif args.model:
        rows = measure(args.model.name, args.model, 1, args.rounds, arms)
    else:
        for shape in args.shapes.split(","):
            with tempfile.TemporaryDirectory() as folder:
                made = folder_of(shape, Path(folder))
                rows += measure(shape, made, PROMPTS.get(shape, 2), args.rounds, arms)
    show("products", rows)
    dist.close()
    print_json("products", rows=rows)


if __name__ == "__main__":
    main()
