"""Seconds of a training step beside TRL's GRPOTrainer, phase by phase, and of the matrix products alone.

    .venv-peers/bin/python bench/peers.py [--regimes fixed,natural] [--arms grpo,cppo4] [--rounds 8]

`make bench-peers` runs all of it, in about 20 minutes. Both trainers run in this process on one thread of the
CPU in float32, on the same model folder, the same prompts in each round, 16 completions of a prompt and at
most 64 tokens a completion, at temperature 1, without a reference, with AdamW and one optimizer step a
rollout. Steps are taken in turns, in the reverse order every other round, and a ratio is that of two steps of
one round: the median over the rounds, with the least and the largest. Regimes:

    fixed    toy/model, every completion has 64 tokens
    trained  toy/model after 12 steps of GRPO
    natural  toy/model as it is
    10M      a random model of that size, every completion has 64 tokens

Both have each completion graded by Winnow's verifier and then train on rewards drawn at random, so that no
group is flat; the learning rate is 1e-12, so that no length drifts. `generate` is all until the tokens are
there; `score` is rewards, advantages and choosing; `update` is the rest of the step: packing or padding, both
passes and the optimizer step, logs, and of Winnow the engine's sync. `tokens` went through the policy in the
update, padding included. `floor` is what the matrix products of an update take: of the linear layers on each
prompt once and the completions trained on, and of the head on those completions, forward and backward, at the
speed of the same products on a full row, measured each round; attention and all that is no product are free.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time

# Before torch and transformers are imported, which read them.
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
               "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

import torch
import yaml
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from shapes import SHAPES, random_model

import config
import data
import train
from advantage import advantage
from collect import Sampler, Selection, choose, lacks, middle
from history import PromptHistory
from infra import dist, runfolder
from infra.checkpoint import Checkpoints
from infra.weights import export
from learner import Learner, roles
from metrics import Clock, rollout_metrics
from model import Decoder
from preflight import memory
from records import Problem, Rolled
from reward import score
from update import update
from verify.grade import grade

ROOT = Path(__file__).parent.parent
G, LONGEST, WARM, TRAINED_STEPS = 16, 64, 2, 12
PHASES = ("generate", "score", "update")
ARMS = {
    "grpo": ("Winnow GRPO 16/16", "grpo_toy.yaml", []),
    "cppo4": ("Winnow CPPO 4/16", "cppo_toy.yaml", ["prune.completions.keep=4"]),
    "cppo2": ("Winnow CPPO 2/16", "cppo_toy.yaml", ["prune.completions.keep=2"]),
    "pps4": ("Winnow PPS 4/16", "pps_toy.yaml", ["prune.completions.keep=4"]),
}
MICRO = 64  # completions that TRL passes at once: 32 to 128 are alike, and all 256 a tenth slower
# Else as fast as could be found on a CPU; --trl changes it. TRL's own default recomputes activations.
TRL = {"loss_type": "grpo", "beta": 0.0, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
       "learning_rate": 1e-12, "lr_scheduler_type": "constant", "num_generations": G,
       "max_completion_length": LONGEST, "temperature": 1.0, "num_iterations": 1, "shuffle_dataset": False,
       "max_steps": 10**6, "save_strategy": "no", "logging_strategy": "no", "report_to": [],
       "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"}}


@dataclass(frozen=True, slots=True)
class Regime:
    name: str
    folder: Path     # of the model
    prompts: int     # of a step
    fixed: bool      # every completion has LONGEST tokens
    temporary: Path  # where runs write


@dataclass(frozen=True, slots=True)
class Work:
    """What a step had to do."""

    length: float  # mean tokens of the completions sampled
    kept: int      # completions trained on
    tokens: int    # through the policy in the update, padding included
    once: int      # of the prompts, each once, and of the completions trained on
    scored: int    # of the completions trained on


class Laps:
    """Seconds of the phases of a step, wall and CPU, each from the end of the phase before."""

    def __init__(self):
        self.wall, self.cpu = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        self.last = perf_counter(), process_time()

    def end(self, phase: str) -> None:
        now = perf_counter(), process_time()
        self.wall[phase] += now[0] - self.last[0]
        self.cpu[phase] += now[1] - self.last[1]
        self.last = now


def drawn(number: int, prompts: int) -> Tensor:
    """[N, G] the rewards of a round, the same in every arm."""
    return torch.rand(prompts, G, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


# ---- Winnow

class Winnow:
    """Winnow, as train.train runs it."""

    def __init__(self, regime: Regime, arm: str, task: data.Task):
        self.label, name, changes = ARMS[arm]
        out = regime.temporary / f"{regime.name}-{arm}"
        self.cfg = cfg = toy(name, regime, out, *changes)
        self.selection = Selection.of(cfg)
        decided = memory.decide(cfg, task.source)
        learner, engine = train.set_up(decided, task)
        easy = middle(cfg.reward, cfg.rollout.differ_in)
        log = runfolder.Log(out)
        log.create(cfg, "never", learner.device, memory.choices(cfg, decided), 
                   train.files_of(cfg.reward, task.tokenizer))
        next(log.steps(0, cfg.steps))
        self.run = train.Run(
            decided, task, learner, engine,
            Sampler(engine, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed),
            PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, easy),
            Checkpoints(out / "checkpoints", 1, roles(learner), learner.device), log, first=0)
        engine.sync(learner.policy)

    def step(self, number: int, laps: Laps) -> Work:
        """One turn of the loop in train.train."""
        cfg, run, clock, rolled = self.cfg, self.run, Clock(), Rolled()
        seed = dist.seed_for(cfg.seed, number, "prune")
        while count := lacks(rolled, self.selection, seed):
            turns = run.history.draw(count)
            laps.end("score")
            groups = run.sampler.rollout(turns)
            laps.end("generate")
            rewards = run.sampler.score(groups)
            accuracy = {"accuracy": drawn(number, len(groups))}
            rewards = replace(rewards, components=rewards.components | accuracy)
            newest = Rolled(turns, groups, rewards, advantage(rewards, cfg.advantage))
            run.history.record(newest)
            rolled += newest
        batch = choose(rolled, self.selection, seed)
        run.history.adapt(rolled)
        laps.end("score")
        run.engine.sleep()
        run.checkpoints.wait_for_copies()
        measured = update(run.learner, batch, number, clock)
        run.engine.sync(run.learner.policy)
        measured |= clock.metrics() | run.checkpoints.metrics() | rollout_metrics(rolled, batch)
        train.write_down(run, number + 1, rolled, batch, measured)
        laps.end("update")
        kept = batch.pruned.keep_NG
        prompts = [len(group.prompt.ids) for group, any_kept in zip(batch.groups, kept.any(1), strict=True)
                   if any_kept]
        return Work(measured["rollout/length"], int(kept.sum()), measured["pack/tokens"],
                    sum(prompts) + measured["train/tokens"], measured["train/tokens"])


def toy(name: str, regime: Regime, out: Path, *changes: str) -> config.Config:
    """A toy config on the regime's model that evaluates next to nothing."""
    few = regime.temporary / "few.jsonl"
    few.write_text("".join((ROOT / "toy" / "test.jsonl").read_text().splitlines(keepends=True)[:8]))
    return config.load(name, [
        f"model.path={regime.folder}", f"out={out}", f"data.train={ROOT / 'toy' / 'train.jsonl'}",
        f"data.eval={few}", "device=cpu", f"rollout.group_size={G}",
        f"rollout.prompts_per_step={regime.prompts}", f"rollout.max_new_tokens={LONGEST}", "steps=1000000",
        "optim.lr=1e-12", "optim.warmup_steps=0", "checkpoint.every=0", *changes])


# ---- TRL

class Peer:
    """GRPOTrainer in a thread of its own, which stands still between the steps that it is asked for.

    Its libraries are imported here, because the verifier's workers import what stands above.
    """

    label = "TRL GRPO 16/16"

    def __init__(self, regime: Regime, task: data.Task, changes: dict):
        from datasets import Dataset
        from transformers import PrinterCallback
        from trl import GRPOConfig, GRPOTrainer

        self.laps, self.work, self.error, self.over = None, None, None, False
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        questions = {problem.id: problem.question for problem in task.problems}
        cfg = toy("grpo_toy.yaml", regime, regime.temporary / "order")
        turns = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, middle=0.5).draw(len(task.prompts))
        rows = [{"prompt": [{"role": "user", "content": questions[turn.prompt.id]}],
                 "gold": turn.prompt.answer} for turn in turns]
        passes = max(1, regime.prompts * G // MICRO)
        whole = {"output_dir": str(regime.temporary / "trl"), "gradient_accumulation_steps": passes,
                 "per_device_train_batch_size": regime.prompts * G // passes}
        if regime.fixed:
            whole["generation_kwargs"] = {"eos_token_id": None}

        def reward(completions, completion_ids, gold, trainer_state, **columns) -> list[float]:
            texts = [completion[0]["content"] for completion in completions]
            problems = [Problem("", "", answer) for answer in gold]
            score(list(zip(texts, problems, map(len, completion_ids), strict=True)), LONGEST, cfg.reward)
            return drawn(trainer_state.global_step + 1, regime.prompts).flatten().tolist()

        self.trainer = GRPOTrainer(str(regime.folder), reward, GRPOConfig(**TRL | whole | changes),
                                   Dataset.from_list(rows), callbacks=[self.callback(regime.fixed)])
        self.trainer.remove_callback(PrinterCallback)
        if regime.fixed:
            self.trainer.eos_token_ids = [-1]  # no completion is cut where it has an EOS
        self.timed("_prepare_inputs", "update", "score", self.note_batch)
        self.timed("_generate", "score", "generate", self.note_lengths)
        self.thread = threading.Thread(target=self.train, daemon=True)
        self.thread.start()

    def timed(self, name: str, before: str, after: str, note: Callable) -> None:
        """Let a method of the trainer's end a phase where it begins and where it ends."""
        method = getattr(self.trainer, name)

        def timing(*given):
            self.laps.end(before)
            result = method(*given)
            self.laps.end(after)
            note(result)
            return result

        setattr(self.trainer, name, timing)

    def note_lengths(self, generated: tuple) -> None:
        prompts, completions = ([len(ids) for ids in side] for side in generated[:2])
        self.work = Work(mean(completions), len(completions), 0, sum(prompts[::G]) + sum(completions),
                         sum(completions))

    def note_batch(self, batch: dict[str, Tensor]) -> None:
        padded = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
        self.work = replace(self.work, tokens=self.work.tokens + padded)

    def train(self) -> None:
        self.go.acquire()
        try:
            self.trainer.train()
        except Exception as error:  # the main thread raises it
            self.error = error
        self.done.release()

    def callback(self, fixed: bool):
        from transformers import TrainerCallback

        class Pause(TrainerCallback):
            def on_train_begin(callback, args, state, control, model, **others) -> None:
                if fixed:  # the trainer has just set it to the tokenizer's
                    model.generation_config.eos_token_id = None

            def on_step_end(callback, args, state, control, **others) -> None:
                self.laps.end("update")
                self.done.release()
                self.go.acquire()
                control.should_training_stop = self.over

        return Pause()

    def step(self, number: int, laps: Laps) -> Work:
        self.laps = laps
        self.go.release()
        self.done.acquire()
        if self.error:
            raise self.error
        return self.work

    def close(self) -> None:
        self.over = True
        self.go.release()
        self.thread.join()


# ---- the floor

class Floor:
    """Seconds that the matrix products of an update take, for each token."""

    def __init__(self, learner: Learner):
        policy, rows = learner.policy, learner.pack.capacity
        linear = [layer for layer in policy.layers.modules() if isinstance(layer, nn.Linear)]
        shapes = [(layer.in_features, layer.out_features) for layer in linear]
        made = {shape: operands(rows, *shape) for shape in set(shapes)}
        self.rows, self.body = rows, [made[shape] for shape in shapes]
        self.head = [operands(rows, policy.shape.hidden_size, policy.shape.vocab_size)]

    def measure(self) -> tuple[float, float]:
        """Seconds of a token in the layers, and of one in the head."""
        return tuple(timed_products(products) / self.rows for products in (self.body, self.head))


def operands(rows: int, inward: int, outward: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, inward), torch.randn(outward, inward), torch.randn(rows, outward)


def timed_products(products: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Seconds of y = x W', and of the gradients of x and W."""
    start = perf_counter()
    for x, w, grad_y in products:
        x @ w.T
        grad_y @ w
        grad_y.T @ x
    return perf_counter() - start


# ---- the regimes

def regime(name: str, prompts: int | None, temporary: Path) -> Regime:
    """Make what a regime needs. Fewer prompts for the larger model: its steps are ten times as long."""
    model = ROOT / "toy" / "model"
    if name == "10M":
        model = random_10m(temporary / "10M")
    plain = Regime(name, model, prompts or (4 if name == "10M" else 16), name in ("fixed", "10M"), temporary)
    return replace(plain, folder=trained(plain)) if name == "trained" else plain


def trained(plain: Regime) -> Path:
    """Train the toy for a few steps, as the demo does; returns the folder of the model."""
    out = plain.temporary / "trained"
    cfg = toy("grpo_toy.yaml", plain, out, "optim.lr=1e-4", f"steps={TRAINED_STEPS}",
              "rollout.prompts_per_step=16")
    with redirect_stdout(sys.stderr):
        train.train(cfg)
    return out / "hf"


def random_10m(folder: Path) -> Path:
    """Write a random model of the shape 10M of shapes.py with the toy's tokenizer and vocabulary."""
    source = folder.with_name("10M-config")
    shutil.copytree(ROOT / "toy" / "model", source, ignore=shutil.ignore_patterns("*.safetensors"))
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads")
    settings = json.loads((source / "config.json").read_text())
    settings |= dict(zip(keys, SHAPES["10M"], strict=False))
    (source / "config.json").write_text(json.dumps(settings))
    policy: Decoder = random_model(source, torch.float32, torch.device("cpu"))
    export(policy, source, folder)
    return folder


def compare(chosen: Regime, arms: list[str], rounds: int, changes: dict) -> dict:
    """Take the steps of all arms in turns; returns what the regime's table and the last line say."""
    task = train.load(toy("grpo_toy.yaml", chosen, chosen.temporary / "load"))
    if chosen.fixed:
        task.tokenizer.eos_ids = frozenset()  # nothing ends Winnow's completions but their limit
    peer = Peer(chosen, task, changes)
    taking = [peer, *(Winnow(chosen, arm, task) for arm in arms)]
    floor = Floor(taking[1].run.learner)
    steps = {arm.label: [] for arm in taking}
    speeds = []
    with tqdm(total=(WARM + rounds) * len(taking), desc=chosen.name, unit="step") as bar:
        for number in range(1, WARM + rounds + 1):
            speeds.append(floor.measure())
            for arm in taking if number % 2 else taking[::-1]:
                gc.collect()  # so that nobody pays for what another has left
                laps = Laps()
                steps[arm.label].append((laps, arm.step(number, laps)))
                bar.update()
    peer.close()
    measured = {label: several[WARM:] for label, several in steps.items()}
    lengths = {work.length for several in measured.values() for _, work in several}
    assert not chosen.fixed or lengths == {LONGEST}, lengths
    return {"regime": chosen.name, "prompts": chosen.prompts, "rounds": rounds, "warm": WARM,
            "model": "random" if chosen.name == "10M" else "toy/model",
            "arms": [summary(label, measured, speeds[WARM:]) for label in measured]}


def summary(label: str, measured: dict[str, list], speeds: list[tuple[float, float]]) -> dict:
    """Medians of one arm's steps, and the ratios of TRL's to them."""
    steps = measured[label]
    work = [each for _, each in steps]
    floors = [layers * each.once + head * each.scored
              for (layers, head), each in zip(speeds, work, strict=True)]
    row = {"arm": label, "floor": median(floors)}
    for clock in ("wall", "cpu"):
        seconds = [getattr(laps, clock) for laps, _ in steps]
        whole = [sum(each.values()) for each in seconds]
        peer = [sum(getattr(laps, clock).values()) for laps, _ in measured[Peer.label]]
        ratios = sorted(theirs / ours for theirs, ours in zip(peer, whole, strict=True))
        row[clock] = {"step": median(whole), "min": min(whole), "max": max(whole)}
        row[clock] |= {phase: median(each[phase] for each in seconds) for phase in PHASES}
        row[clock]["ratio"] = {"median": median(ratios), "min": ratios[0], "max": ratios[-1]}
    for name in ("length", "kept", "tokens", "once", "scored"):
        row[name] = mean(getattr(each, name) for each in work)
    return row


def show(result: dict) -> None:
    print(f"\n{result['regime']}: {result['model']}, {result['prompts']} prompts x {G} completions, "
          f"{result['rounds']} rounds after {result['warm']}; seconds of a step, medians\n"
          f"{'':<18}{'wall':>6}{'CPU':>7}{'generate':>10}{'score':>7}{'update':>8}{'floor':>7}{'length':>8}"
          f"{'tokens':>8}{'TRL / this, wall':>21}{'TRL / this, CPU':>21}")
    for row in result["arms"]:
        wall, cpu = row["wall"], row["cpu"]
        ratios = [f"{of['ratio']['median']:.2f} [{of['ratio']['min']:.2f}, {of['ratio']['max']:.2f}]"
                  for of in (wall, cpu)]
        print(f"{row['arm']:<18}{wall['step']:>6.2f}{cpu['step']:>7.2f}{wall['generate']:>10.2f}"
              f"{wall['score']:>7.2f}{wall['update']:>8.2f}{row['floor']:>7.2f}{row['length']:>8.1f}"
              f"{row['tokens']:>8.0f}{ratios[0]:>21}{ratios[1]:>21}", flush=True)


def listed(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Read some of the names that there are, separated by commas."""
    def read(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(known)}")
        return names

    return read


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    regimes = ("fixed", "trained", "natural", "10M")
    parser.add_argument("--regimes", type=listed(regimes), default=list(regimes), help=",".join(regimes))
    parser.add_argument("--arms", type=listed(tuple(ARMS)), default=list(ARMS), help=",".join(ARMS))
    parser.add_argument("--rounds", type=int, default=8, help=f"measured, after {WARM} that are not")
    parser.add_argument("--prompts", type=int, help="of a step (default: 16, and 4 at 10M)")
    parser.add_argument("--trl", action="append", default=[], metavar="name=value",
                        help="change a setting of GRPOConfig, e.g. gradient_checkpointing=true")
    args = parser.parse_args()
    changes = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in args.trl)}
    versions = {name: importlib.metadata.version(name)
                for name in ("trl", "transformers", "accelerate", "torch")}
    print("  ".join(f"{name} {version}" for name, version in versions.items()), end="\nTRL with ")
    print(f"{MICRO} completions a pass, "
          + ", ".join(f"{name}={value!r}" for name, value in (TRL | changes).items()), flush=True)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        dist.init("cpu")
        grade([("2", r"\boxed{\sqrt{4}}")])  # starts the verifier's workers
        for name in args.regimes:
            chosen = regime(name, args.prompts, Path(temporary))
            results.append(compare(chosen, args.arms, args.rounds, changes))
            show(results[-1])
        dist.close()
    print(json.dumps({"bench": "peers", "versions": versions, "trl": TRL | changes, "micro": MICRO,
                      "results": results}))


if __name__ == "__main__":
    main()
