"""Seconds of a training step beside TRL's GRPOTrainer, phase by phase.

    .venv/bin/python bench/peers.py [--regimes fixed,natural] [--arms grpo,cppo4] [--rounds 8]

`make bench-peers` runs all of it. Both trainers run in this process on one thread of the CPU in float32, on
the same model folder, the same prompts in each round, 16 completions of a prompt and at most 64 tokens a
completion, at temperature 1, without a reference, with AdamW and one optimizer step a rollout. Steps are
taken in turns, in the reverse order every other round, and a ratio is that of two steps of one round.
Regimes:

    fixed    toy/model, every completion has 64 tokens
    natural  toy/model as it is
    flat     as fixed, and all rewards are equal in half of the groups

Both have each completion graded by Winnow's verifier and then train on the same random rewards; the learning
rate is 1e-12, so that no length drifts. `generate` lasts until the tokens are there; `score` is rewards;
`update` is the rest of the step: choosing, packing or padding, both passes and the optimizer step, and in
Winnow the engine's sync. Neither writes logs or checkpoints. `tokens` went through the policy in the update,
padding included.
"""

import gc
import importlib.metadata
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time

if __name__ == "__main__":  # before torch and transformers are imported, which read them
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

from common import ROOT, count, listed, parser, print_json, show
from step import drawn_rewards, prepare, take_step
from tqdm import tqdm

import config
import data
import train
from history import PromptHistory
from infra import dist
from records import Problem
from reward import score
from verify.grade import grade

G, LONGEST, WARM = 16, 64, 2
PHASES = ("generate", "score", "update")
ARMS = {
    "grpo": ("Winnow GRPO 16/16", "grpo_toy.yaml", []),
    "cppo4": ("Winnow CPPO 4/16", "cppo_toy.yaml", ["prune.completions.keep=4"]),
    "cppo2": ("Winnow CPPO 2/16", "cppo_toy.yaml", ["prune.completions.keep=2"]),
}
REGIMES = ["fixed", "natural", "flat"]
MICRO = 64  # completions that TRL passes at once: 32 to 128 are alike, and all 256 a tenth slower
# Else as fast as could be found on a CPU. TRL's own default recomputes activations.
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
    flat: int        # groups of equal rewards
    temporary: Path  # where runs write


def toy(name: str, regime: Regime, *changes: str) -> config.Config:
    """Load a toy config on the regime's model."""
    return config.load(name, [
        f"model.path={regime.folder}", f"out={regime.temporary / 'run'}", "data.eval=null",
        f"data.train={ROOT / 'toy' / 'train.jsonl'}", "device=cpu", f"rollout.group_size={G}",
        f"rollout.prompts_per_step={regime.prompts}", f"rollout.max_new_tokens={LONGEST}",
        "optim.lr=1e-12", "optim.warmup_steps=0", *changes])


class Winnow:
    def __init__(self, regime: Regime, arm: str, task: data.Task):
        self.label, name, changes = ARMS[arm]
        self.cfg = cfg = toy(name, regime, *changes)
        self.learner, self.sampler, self.history = prepare(cfg, task)
        self.flat = regime.flat

    def step(self) -> dict[str, float]:
        draws = self.history.draw(self.cfg.rollout.prompts_per_step)
        measured, batch = take_step(self.learner, self.sampler, draws, self.cfg, self.flat)
        generate, scored = measured["time/rollout"], measured["time/reward"]
        lengths = [sample.length for group in batch.groups for sample in group.samples]
        return {"generate": generate, "score": scored, "update": measured["time/step"] - generate - scored,
                "length": mean(lengths), "tokens": measured["pack/tokens"]}

    def close(self) -> None:
        pass


class Peer:
    """GRPOTrainer in a thread of its own, which stands still between the steps that it is asked for.

    Its libraries are imported here, because the verifier's workers import what stands above.
    """

    label = "TRL GRPO 16/16"

    def __init__(self, regime: Regime, task: data.Task):
        from transformers import PrinterCallback
        from trl import GRPOConfig, GRPOTrainer

        self.measured, self.last, self.error, self.over = {}, 0.0, None, False
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        passes = max(1, regime.prompts * G // MICRO)
        settings = {"output_dir": str(regime.temporary / "trl"), "gradient_accumulation_steps": passes,
                    "per_device_train_batch_size": regime.prompts * G // passes}
        if regime.fixed:
            settings["generation_kwargs"] = {"eos_token_id": None}
        self.trainer = GRPOTrainer(
            str(regime.folder), self.reward_function(regime), GRPOConfig(**TRL | settings),
            self.dataset(regime, task), callbacks=[self.callback(regime.fixed)])
        self.trainer.remove_callback(PrinterCallback)
        if regime.fixed:
            self.trainer.eos_token_ids = [-1]  # no completion is cut where it has an EOS
        self.watch("_prepare_inputs", "update", "score")
        self.watch("_generate", "score", "generate")
        self.thread = threading.Thread(target=self.train, daemon=True)
        self.thread.start()

    def dataset(self, regime: Regime, task: data.Task):
        """Put the prompts in the order in which Winnow draws them."""
        from datasets import Dataset

        cfg = toy("grpo_toy.yaml", regime)
        questions = {problem.id: problem.question for problem in task.problems}
        draws = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, middle=0.5).draw(len(task.prompts))
        return Dataset.from_list([
            {"prompt": [{"role": "user", "content": questions[draw.prompt.id]}], "gold": draw.prompt.answer}
            for draw in draws])

    def reward_function(self, regime: Regime):
        """Score completions for the time it takes, and return drawn rewards, as `take_step` does."""
        settings = toy("grpo_toy.yaml", regime).reward

        def reward(completions, completion_ids, gold, **columns) -> list[float]:
            texts = [completion[0]["content"] for completion in completions]
            problems = [Problem("", "", answer) for answer in gold]
            answers = zip([(text,) for text in texts], problems, map(len, completion_ids), strict=True)
            score(list(answers), LONGEST, settings)
            return drawn_rewards(regime.prompts, G, regime.flat).flatten().tolist()

        return reward

    def end(self, phase: str) -> None:
        now = perf_counter()
        self.measured[phase] += now - self.last
        self.last = now

    def watch(self, name: str, before: str, after: str) -> None:
        """Let a method of the trainer's end a phase where it begins and where it ends."""
        method = getattr(self.trainer, name)

        def timing(*given):
            self.end(before)
            result = method(*given)
            self.end(after)
            if name == "_generate":
                self.measured["length"] = mean(map(len, result[1]))
            else:
                self.measured["tokens"] += result["prompt_ids"].numel() + result["completion_ids"].numel()
            return result

        setattr(self.trainer, name, timing)

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
                self.end("update")
                self.done.release()
                self.go.acquire()
                control.should_training_stop = self.over

        return Pause()

    def step(self) -> dict[str, float]:
        self.measured = dict.fromkeys((*PHASES, "length", "tokens"), 0)
        self.last = perf_counter()
        self.go.release()
        self.done.acquire()
        if self.error:
            raise self.error
        return self.measured

    def close(self) -> None:
        self.over = True
        self.go.release()
        self.thread.join()


def compare(chosen: Regime, arms: list[str], rounds: int) -> list[dict]:
    """Take the steps of all arms in turns; returns a row for each, TRL first."""
    task = train.load_task(toy("grpo_toy.yaml", chosen))
    if chosen.fixed:
        task.tokenizer.eos_ids = frozenset()  # nothing ends Winnow's completions but their limit
    taking = [Peer(chosen, task), *(Winnow(chosen, arm, task) for arm in arms)]
    taken = {arm.label: [] for arm in taking}
    for number in tqdm(range(WARM + rounds), chosen.name, unit="round"):
        for arm in taking if number % 2 else taking[::-1]:
            gc.collect()  # so that nobody pays for what another has left
            cpu = process_time()
            measured = arm.step()
            measured |= {"step": sum(measured[phase] for phase in PHASES), "cpu": process_time() - cpu}
            taken[arm.label].append(measured)
    for arm in taking:
        arm.close()
    taken = {label: steps[WARM:] for label, steps in taken.items()}
    if chosen.fixed:
        assert {step["length"] for steps in taken.values() for step in steps} == {LONGEST}
    rows = [row_of(label, steps, taken[taking[0].label]) for label, steps in taken.items()]
    return show(f"{chosen.name}: {chosen.prompts} x {G} completions, {rounds} rounds after {WARM}", rows)


def row_of(label: str, steps: list[dict], of_peer: list[dict]) -> dict:
    """Return an arm's seconds, and the ratios of TRL's to them."""
    row = {"arm": label}
    row |= {f"{name} s": median(step[name] for step in steps) for name in ("step", "cpu", *PHASES)}
    row |= {name: mean(step[name] for step in steps) for name in ("length", "tokens")}
    for name, title in (("step", "TRL / this"), ("cpu", "TRL / this, CPU")):
        row[title] = [theirs[name] / ours[name] for theirs, ours in zip(of_peer, steps, strict=True)]
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--regimes", type=listed(REGIMES), default=REGIMES, help=",".join(REGIMES))
    options.add_argument("--arms", type=listed(list(ARMS)), default=list(ARMS), help=",".join(ARMS))
    options.add_argument("--rounds", type=count, default=8, help=f"measured, after {WARM} that are not")
    args = options.parse_args()
    libraries = ("trl", "transformers", "accelerate", "torch")
    versions = {name: importlib.metadata.version(name) for name in libraries}
    settings = ", ".join(f"{name}={value!r}" for name, value in TRL.items())
    print(f"{versions}\nTRL with {MICRO} completions a pass, {settings}", flush=True)
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        dist.init("cpu")
        grade([("2", r"\boxed{\sqrt{4}}")])  # starts the verifier's workers
        for name in args.regimes:
            regime = Regime(name, ROOT / "toy" / "model", 16, name != "natural", 8 if name == "flat" else 0,
                            Path(temporary))
            results[name] = compare(regime, args.arms, args.rounds)
        dist.close()
    print_json("peers", versions=versions, trl=TRL, micro=MICRO, results=results)


if __name__ == "__main__":
    main()
