"""What does a rollout gain that waits for nobody? A prediction for GPUs, and a measurement on this machine.

    python bench/flight.py [--parts predicted,measured] [--engine torch|vllm] [--rounds 3] [--steps 6]

predicted  A step of published configs on 8 H100s, at 1, 2 and 4 groups in flight for each that is trained on.
           Training's own pool decides who goes on; an engine that stands in for vLLM counts the seconds. A
           token step costs what its bytes or FLOP do and 2.5 ms. Lengths are lognormal, cut at the limit,
           with a share of completions that run into it, as loops do. The engine stays awake through the
           update, so that a sync is a reload. All of that is assumed, and none of it measured.
measured   Steps of a model of 1M random weights with either engine, at 1, 1.5, 2 and 4 in flight, in
           turns. Lengths are given, from the same kind of distribution: 40 in the mean, and 3% run into the
           limit of 512. Random rewards; the update is training's. The first steps fill the pool and are not
           counted. Seconds are CPU seconds of this process, since the machine may be shared: set
           OMP_NUM_THREADS=1.

`slots busy` is the share of an engine's slots that had a token to sample, over the token steps of a rollout.
Figures are medians over the rounds, with the least and the largest.
"""

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from time import process_time
from unittest.mock import patch

import numpy as np
import torch
from common import ROOT, listed, parser, print_json, show
from shapes import MEMORY, PEAKS, PRODUCTS, draw_weights, shape_of, write_config

import config
import train
from advantage import advantage
from collect import Sampler, Selection, choose
from history import PromptHistory
from infra import dist
from infra.device import parameters
from infra.weights import Shape
from learner import Learner
from methods.window import Pool, WindowSampler
from metrics import Clock
from preflight import memory
from records import Prompt, Request, Rolled, Sample
from rollout import Engine, tokens_before
from settings.kinds import AllPrompts
from update import update

FLOPS, BANDWIDTH = (share * peak for share, peak in zip((PRODUCTS, MEMORY), PEAKS["H100"], strict=True))
TOKEN_STEP = 2.5e-3  # s of vLLM's own for each token step
SYNC = 0.25          # s of a reload with the engine awake
GPUS = 8
STEPS = 60           # predicted, the first third of them to fill the pool


@dataclass(frozen=True)
class Case:
    """How long prompts and completions of a config are assumed to be."""

    config: str
    prompt: int
    mean: float      # of a completion, before those that run into the limit
    sigma: float     # of the lognormal
    runaway: float   # share that runs into the limit


CASES = [
    Case("cppo_gsm8k.yaml", 250, 190, 0.45, 0.01),
    Case("dppo_gsm8k.yaml", 250, 190, 0.45, 0.01),
    Case("grpo_math.yaml", 350, 380, 0.6, 0.02),
    Case("cppo_math.yaml", 350, 380, 0.6, 0.02),
]
# in flight -> most steps that a group goes on
PREDICTED = {1.0: 1, 2.0: 3, 4.0: 8}
MEASURED = {1.0: 1, 1.5: 3, 2.0: 3, 4.0: 8}


def draw_length(case: Case, limit: int, rng: np.random.Generator) -> int:
    """Draw the tokens of a completion."""
    if rng.random() < case.runaway:
        return limit
    mu = np.log(case.mean) - case.sigma ** 2 / 2
    return int(min(max(1, round(rng.lognormal(mu, case.sigma))), limit))


# ---- predicted

@dataclass
class TimedSampler:
    """Engines on GPUS, by a model of their seconds, in the place of collect.Sampler."""

    case: Case
    sampling: config.Rollout
    shape: Shape
    seed: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    lengths: list[int] = field(default_factory=list)  # of each completion, whose tokens are its place here
    seconds: float = 0.0
    token_steps: float = 0.0
    tokens: int = 0

    def complete(self, requests: list[Request]) -> list[Sample]:
        """Give each completion its next tokens, and count the seconds of the slowest engine."""
        pieces, work = [], []
        for request in requests:
            ids, limit = tokens_before(request), request.limit
            if len(ids) == 1:  # a prompt: its completion begins
                length = draw_length(self.case, self.sampling.max_new_tokens, self.rng)
                self.lengths.append(length)
                number = len(self.lengths) - 1
            else:
                number = ids[1]
            left = self.lengths[number] - (len(ids) - 1)
            made = min(left, limit)
            piece = Sample([number] * made, [0.0] * made, made == left)
            pieces.append(piece)
            work.append((made, len(ids)))
        shares = np.array_split(np.array(work), GPUS)
        engines = [part for part in shares if len(part)]
        self.seconds += max(self.decode_seconds(part) for part in engines)
        self.token_steps += max(part[:, 0].max() for part in engines)
        self.tokens += sum(made for made, _ in work)
        return pieces

    def decode_seconds(self, part: np.ndarray) -> float:
        """Compute the seconds of one engine: all its sequences decode in lock-step, each until its end."""
        seconds, before = 0.0, 0
        context = self.case.prompt + float(part[:, 1].mean())
        ends = np.sort(part[:, 0])
        for i, end in enumerate(ends):
            seconds += (end - before) * self.token_seconds(len(ends) - i, context)
            before = end
        return float(seconds)

    def token_seconds(self, busy: int, context: float) -> float:
        """Compute the seconds of one token step: weights and keys are read, logits and softmax written."""
        shape = self.shape
        size = parameters(shape)
        keys = 4 * shape.layers * shape.kv_heads * shape.head_dim
        read = 2 * size
        read += busy * context * keys
        read += 16 * busy * shape.vocab_size
        flop = 2 * size * busy
        return max(read / BANDWIDTH, flop / FLOPS) + TOKEN_STEP


def update_seconds(cfg: config.Config, shape: Shape, tokens: float) -> float:
    """Compute the seconds of an update on so many tokens, a third of them prompts, at 50% of the peak."""
    G = cfg.rollout.group_size
    kept = getattr(cfg.prune.completions, "keep", G) / G
    flop = 6 * parameters(shape) * tokens * kept * 1.5
    return cfg.update.epochs * flop / (GPUS * 0.5 * PEAKS["H100"][0])


def predict(case: Case, in_flight: float, window: int, steps: int = STEPS) -> dict:
    """Predict the seconds of a step, and how old its groups are."""
    cfg = config.load(case.config)
    shape = shape_of(cfg.model.path)
    sampling = replace(
        cfg.rollout,
        in_flight=in_flight,
        max_age=PREDICTED[in_flight],
        window=window if in_flight > 1 else None,
        until="offered",
    )
    prompts = [Prompt(str(n), (0,), "") for n in range(10_000)]
    history = PromptHistory(prompts, AllPrompts(), 0, middle=0.5)
    pool = Pool(history, sampling)
    timed = TimedSampler(case, sampling, shape)
    sampler = WindowSampler(timed, pool)
    seconds, busy = [], []
    trained, ages = [], []
    asked = int(in_flight * sampling.prompts_per_step) * sampling.group_size
    slots = GPUS * -(-asked // GPUS)
    for step in range(steps):
        timed.seconds = timed.token_steps = 0.0
        timed.tokens = 0
        draws = pool.draw(sampling.prompts_per_step)
        groups = sampler.rollout(draws)
        pool.record(Rolled(draws, groups))
        if step >= steps // 3:
            seconds.append(timed.seconds)
            busy.append(timed.tokens / (timed.token_steps * slots))
            for draw, group in zip(draws, groups, strict=True):
                if not group.samples[0].pending:
                    ages.append(draw.age)
                    trained.append(sum(sample.length for sample in group.samples))
    updated = update_seconds(cfg, shape, sum(trained) / len(seconds))
    return {
        "config": case.config.removesuffix(".yaml"),
        "in flight": in_flight,
        "window": window,
        "rollout s": mean(seconds),
        "update s": updated,
        "sync s": SYNC,
        "step s": mean(seconds) + updated + SYNC,
        "slots busy": mean(busy),
        "age": mean(ages),
        "oldest": max(ages),
    }


def predictions(windows: list[int], steps: int = STEPS) -> list[dict]:
    rows = []
    for case in CASES:
        base = None
        for in_flight in PREDICTED:
            for window in windows if in_flight > 1 else windows[:1]:
                row = predict(case, in_flight, window, steps)
                base = base or row["step s"]
                rows.append(row | {"times faster": base / row["step s"]})
    return show(f"Predicted: seconds of a step on {GPUS} H100s", rows)


# ---- measured

class Tailed:
    """An engine with completions of given lengths, which counts its token steps and those that sample."""

    case = Case("", 0, 40, 0.5, 0.03)

    def __init__(self, engine: Engine, limit: int):
        self.engine, self.limit = engine, limit
        self.taken = self.busy = 0  # all samples asked for have a slot
        self.left: dict[tuple[int, ...], int] = {}  # tokens that are missing, by prompt and tokens so far
        self.rng = np.random.default_rng(0)

    def generate(self, requests: list[Request], *given: object, **named: object) -> list[Sample]:
        prompts, left = [tokens_before(request) for request in requests], []
        for ids in prompts:
            missing = self.left.pop(ids, 0)
            left.append(missing or draw_length(self.case, self.limit, self.rng))
        asked = [replace(request, limit=min(request.limit, missing))
                 for request, missing in zip(requests, left, strict=True)]
        made = [request.limit for request in asked]
        self.taken += max(made)
        self.busy += sum(made)
        samples = []
        pieces = self.engine.generate(asked, *given, **named)
        for ids, piece, missing in zip(prompts, pieces, left, strict=True):
            ended = piece.length == missing
            samples.append(replace(piece, finished=ended))
            if not ended:
                self.left[*ids, *piece.ids] = missing - piece.length
        return samples


@dataclass
class Arm:
    """A run at so many groups in flight, with a pool of its own and the models of all."""

    cfg: config.Config
    learner: Learner
    engine: Tailed
    sampler: Sampler | WindowSampler
    history: PromptHistory

    def step(self, number: int) -> dict:
        """Take a step as train.train does; returns its seconds and counts."""
        self.engine.taken = self.engine.busy = 0
        start = process_time()
        draws = self.history.draw(self.cfg.rollout.prompts_per_step)
        groups = self.sampler.rollout(draws)
        sampling = process_time() - start
        rewards = self.sampler.score(groups)
        generator = torch.Generator().manual_seed(number)
        accuracy_NG = rewards.components["accuracy"]
        drawn_NG = torch.rand(accuracy_NG.shape, dtype=accuracy_NG.dtype, generator=generator)
        drawn_NG = drawn_NG.where(~accuracy_NG.isnan(), torch.nan)
        components = rewards.components | {"accuracy": drawn_NG}
        rewards = replace(rewards, components=components)
        adv_NG = advantage(rewards, self.cfg.advantage)
        rolled = Rolled() + Rolled(draws, groups, rewards, adv_NG)
        if self.history.remembers:
            self.history.record(rolled)
        batch = choose(rolled, Selection.of(self.cfg), seed=0)
        update(self.learner, batch, 0, Clock())
        seconds = process_time() - start
        tokens = sum(sample.fresh for group in groups for sample in group.samples)
        trained = sum(sample.length for group in batch.groups for sample in group.samples)
        settings = self.cfg.rollout
        slots = int(settings.in_flight * settings.prompts_per_step) * settings.group_size
        return {
            "tokens/s": tokens / sampling,
            "rollout s": sampling,
            "step s": seconds,
            "trained tokens/s": trained / seconds,
            "slots busy": self.engine.busy / (self.engine.taken * slots),
            "age": mean(draw.age for draw in batch.draws),
        }


def arms(folder: Path, engine_kind: str, window: int, prompts: int) -> list[Arm]:
    """Make the arms, with one learner and one engine for all."""
    made = []
    learner = engine = None
    limit = 512
    for in_flight, max_age in MEASURED.items():
        settings = [
            f"model.path={folder}",
            "optim.lr=1e-12",
            f"rollout.engine={engine_kind}",
            "rollout.group_size=8",
            f"rollout.max_new_tokens={limit}",
            f"rollout.prompts_per_step={prompts}",
        ]
        if in_flight > 1:
            settings += [
                f"rollout.in_flight={in_flight}",
                f"rollout.max_age={max_age}",
                f"rollout.window={window}",
                "loss.tis_cap=2",
            ]
        cfg = config.load("grpo_toy.yaml", settings)
        task = train.load_task(cfg)
        cfg = memory.resolve_auto(cfg, task.source)
        if learner is None:
            learner, engine = train.load_models(cfg, task)
            engine.sync(learner.policy)
            engine.eos_ids = frozenset()
        history = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, middle=0.5)
        tailed = Tailed(engine, limit)
        sampler = Sampler(tailed, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed)
        history, sampler = train.samplers.choose_sampler(cfg, task.source, history, sampler)
        made.append(Arm(cfg, learner, tailed, sampler, history))
    return made


def measurements(engine_kind: str, rounds: int, steps: int, window: int, prompts: int) -> list[dict]:
    """Measure the arms in turns, `steps` steps of each a round."""
    dist.init("cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(ROOT / "toy" / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
        write_config("1M", folder)
        with patch("lora.load_weights", draw_weights):
            made = arms(folder, engine_kind, window, prompts)
            for arm in made:
                for number in range(steps):
                    arm.step(number)
            measured: list[list[dict]] = [[] for _ in made]
            for i in range(rounds):
                for arm, of_arm in zip(made, measured, strict=True):
                    taken = [arm.step((i + 1) * steps + number) for number in range(steps)]
                    means = {key: mean(each[key] for each in taken) for key in taken[0]}
                    of_arm.append(means)
    rows = []
    for arm, of_arm in zip(made, measured, strict=True):
        row = {"in flight": arm.cfg.rollout.in_flight}
        row |= {key: [of_round[key] for of_round in of_arm] for key in of_arm[0]}
        pairs = zip(measured[0], of_arm, strict=True)
        row["times faster"] = [first["step s"] / of_round["step s"] for first, of_round in pairs]
        rows.append(row)
    dist.close()
    title = f"Measured, {engine_kind}: a step of {prompts} groups of 8, windows of {window} tokens"
    return show(title, rows)


def main() -> None:
    options = parser(__doc__)
    parts = ["predicted", "measured"]
    options.add_argument("--parts", type=listed(parts), default=parts, help=",".join(parts))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=6, help="measured: of each arm in a round")
    options.add_argument("--windows", default="32,128", help="predicted: rollout.window, tokens")
    options.add_argument("--window", type=int, default=64, help="measured: rollout.window, tokens")
    options.add_argument("--prompts", type=int, default=4, help="measured: groups in a step")
    engines = ["torch", "vllm"]
    options.add_argument("--engine", choices=engines, default="torch", help="measured: rollout.engine")
    args = options.parse_args()
    windows = [int(window) for window in args.windows.split(",")]
    shown = {}
    if "predicted" in args.parts:
        shown["predicted"] = predictions(windows)
    if "measured" in args.parts:
        shown["measured"] = measurements(args.engine, args.rounds, args.steps, args.window, args.prompts)
    print_json("flight", **shown)


if __name__ == "__main__":
    main()
