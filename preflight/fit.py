"""Say whether a run fits, part by part, what would make it fit, and how long a step would take.

    train.py --config NAME.yaml --fit [--memory 24] [--gpus 8] [--card H100]

Nothing is loaded but config.json. Bytes are those that `auto` goes by (preflight/counts.py). Seconds are
predicted for cards of known peak figures, from FLOP and from bytes that kernels read and write, at shares of
the peaks that are assumed to be reached; tests/test_fake_gpu.py holds both to a traced update. They are meant
to tell which phase takes most of a step: no GPU has measured them.

Dimension key:  T tokens of a row,  C completion tokens among them.
"""

import argparse
import math
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from config import Config, ConfigError, Lora
from infra import dist
from infra.weights import Shape, read_shape
from preflight import counts
from preflight.memory import FILLED, Machine, choose_settings, find_device, list_choices
from settings import loader as settings
from settings.kinds import Gae, is_preference
from settings.paths import find_path
from settings.rules import all_rules

GIB, WIDTH = 2**30, 100  # WIDTH: columns of the report


@dataclass(frozen=True, slots=True)
class Card:
    """Peak figures of a GPU as its maker gives them."""

    flops: float      # in bfloat16 with float32 sums, dense
    bandwidth: float  # bytes a second of its memory
    link: float       # bytes a second to and from its neighbours, each way
    gib: float        # assumed to be free on an empty one


CARDS = {
    "4090": Card(165e12, 1.01e12, 32e9, 23.5),     # PCIe 4
    "L40S": Card(362e12, 0.864e12, 32e9, 44.0),    # PCIe 4
    "A100": Card(312e12, 2.04e12, 300e9, 79.0),    # NVLink 3
    "H100": Card(989e12, 3.35e12, 450e9, 79.0),    # NVLink 4
    "H200": Card(989e12, 4.8e12, 450e9, 139.0),
}
HOST_LINK = 32e9  # bytes a second between a GPU and the host: PCIe 4
# Shares of a peak that are reached: by large products, attention's kernels, elementwise work, and sending.
PRODUCTS, ATTENTION, MEMORY, LINK = 0.8, 0.3, 0.85, 0.7
LAUNCH = 7e-6     # seconds to launch a kernel
# Of a row, forward and backward (tests/test_fake_gpu.py).
KERNELS = {"layer": 70, "adapters": 55, "chunk": 16}
VLLM_STEP, EMBEDDED_KERNELS = 2.5e-3, 38  # seconds a token that vLLM schedules for; kernels of a layer
VLLM_SYNC = 1.5   # seconds to sleep, wake up and reload


# ---- work of a row

@dataclass(frozen=True, slots=True)
class Work:
    """What a forward and backward pass of one row computes and moves beside matrix products."""

    products: float   # FLOP that a gradient needs
    again: float      # FLOP of products that backward computes again
    attention: float  # FLOP that a gradient needs
    attention_again: float
    moved: float      # bytes
    kernels: float


def layer_bytes(shape: Shape, lora: Lora, tokens: int, keys: int, element: int) -> tuple[float, float]:
    """Count the bytes that a layer's kernels beside products and attention read and write, forward and
    backward."""
    D, inner = tokens * shape.hidden_size, tokens * shape.intermediate_size
    rotated = tokens * (shape.heads + shape.kv_heads) * shape.head_dim
    gathered = keys * shape.kv_heads * shape.head_dim
    forward = 10 * D + 5 * inner + 10 * rotated + 4 * gathered
    backward = 25 * D + 9 * inner + 10 * rotated + 8 * gathered
    if lora.rank:  # the gradient of what a layer reads is a sum of two; norms are frozen
        backward += 3 * tokens * sum(inputs for inputs, _ in counts.adapted_sizes(shape, lora)) - 4 * D
    return element * forward, element * backward


def head_bytes(shape: Shape, tokens: int, element: int) -> tuple[float, float]:
    """Count the same of the log-probs of so many tokens: of their logits in float32."""
    logits = tokens * shape.vocab_size
    return 16 * logits, (16 + 8 + 4 + element) * logits


def gradient_flop(shape: Shape, lora: Lora, tokens: float, scored: float, met: float) -> tuple[float, float]:
    """Count the FLOP that a row's gradient needs, of products and of attention; `met` are pairs of a query
    and a key. Frozen weights need no gradient of their own: two products each, not three."""
    blocks, head = shape.layers * counts.block_weights(shape), shape.vocab_size * shape.hidden_size
    passed = blocks * tokens + head * scored
    of_adapters = 6 * counts.trained(shape, lora) * tokens if lora.rank else 0
    return (4 if lora.rank else 6) * passed + of_adapters, 3 * attention_flop(shape, met)


def attention_flop(shape: Shape, met: float) -> float:
    """Count the FLOP of one forward pass of attention: a product for the score, and one for the value."""
    return 4 * shape.layers * shape.heads * shape.head_dim * met


def row_work(cfg: Config, shape: Shape, tokens: int) -> Work:
    """Count the work of a row of so many tokens, of groups of planned lengths and what pruning keeps."""
    prompt, completion, kept = planned(cfg)
    of_group = prompt + kept * completion
    groups, element = tokens / of_group, getattr(torch, cfg.model.dtype).itemsize
    scored = tokens * kept * completion / of_group
    # A query meets the keys up to its own; the first completion has the prompt among its queries.
    met = groups * (prompt ** 2 / 2 + kept * completion * (2 * prompt + completion) / 2)
    lora, of_head = cfg.model.lora, shape.vocab_size * shape.hidden_size
    products, attention = gradient_flop(shape, lora, tokens, scored, met)
    blocks = 2 * shape.layers * counts.block_weights(shape) * tokens
    forward, backward = layer_bytes(shape, lora, tokens, groups * kept * (prompt + completion), element)
    chunks, again = scored / cfg.model.logp_chunk, cfg.model.checkpoint_blocks
    moved = shape.layers * (forward * (1 if again == "none" else 2) + backward)
    moved += sum(head_bytes(shape, scored, element)) + (0 if lora.rank else 8 * of_head * chunks)
    kernels = KERNELS["layer"] + KERNELS["adapters"] * bool(lora.rank)
    return Work(
        products, 2 * of_head * scored + blocks * (again == "all"),
        attention, attention / 3 * (0.5 + (again == "all")), moved,
        kernels * shape.layers * (1 if again == "none" else 1.4) + KERNELS["chunk"] * chunks)


def planned(cfg: Config) -> tuple[int, int, float]:
    """Return the tokens of prompts and completions that are planned with, and completions kept of a group."""
    prompt, completion = counts.planned_lengths(cfg)
    pruning, G = cfg.prune.completions, cfg.rollout.group_size
    kept = getattr(pruning, "keep", G)
    if pruning.kind == "bottom":
        kept = G - int(pruning.drop_prob * G)
    if pruning.kind == "bernoulli":
        kept = G * (1 - pruning.drop_prob / 2)  # half of them are below their mean: assumed
    return prompt, completion, kept


# ---- seconds of a step

def row_seconds(work: Work, card: Card, shape: Shape, cfg: Config, ranks: int) -> float:
    """Predict the seconds of a row's passes: of its kernels, or of launching them, or of sending weights."""
    products = (work.products + work.again) / (PRODUCTS * card.flops)
    attention = (work.attention + work.attention_again) / (ATTENTION * card.flops)
    computed = products + attention + work.moved / (MEMORY * card.bandwidth)
    # Gathered in the computed dtype for both passes, and gradients summed in float32.
    size, element = counts.parameters(shape), getattr(torch, cfg.model.dtype).itemsize
    gradients = 4 * counts.trained(shape, cfg.model.lora)
    sent = (2 * element * size + gradients) * (ranks - 1) / ranks / (LINK * card.link)
    hosted = (2 * 4 * size + gradients) / ranks / (LINK * HOST_LINK) if counts.is_offloaded(cfg) else 0
    return max(computed, work.kernels * LAUNCH, sent, hosted)


def step_seconds(cfg: Config, shape: Shape, card: Card, ranks: int) -> tuple[dict[str, float], float]:
    """Predict the seconds of each phase of a step, and the FLOP of a rank that its gradients need."""
    prompt, completion, kept = planned(cfg)
    tokens = cfg.rollout.prompts_per_step * (prompt + kept * completion) / cfg.update.minibatches
    rows = max(1, round(tokens / ranks / cfg.pack.capacity + 0.499))  # of a mini-batch, on each rank
    work = row_work(cfg, shape, tokens / ranks / rows)
    row = row_seconds(work, card, shape, cfg, ranks)
    passes = rows * cfg.update.minibatches * cfg.update.epochs
    scored = counts.has_reference(cfg) + (cfg.update.minibatches > 1 and cfg.loss.old_logp == "recompute")
    scored += cfg.update.epochs * is_preference(cfg.advantage)
    steps = cfg.update.minibatches * cfg.update.epochs
    # Clipping reads and writes gradients; AdamW reads four numbers of a weight and writes three.
    stepping = 40 * counts.trained(shape, cfg.model.lora) / ranks / (MEMORY * card.bandwidth)
    if counts.is_offloaded(cfg):
        stepping *= MEMORY * card.bandwidth / HOST_LINK
    critic = 2 if isinstance(cfg.advantage, Gae) else 1
    return {"rollout": rollout_seconds(cfg, shape, card, ranks),
            "score": scored * rows * cfg.update.minibatches * row / 3,
            "update": critic * (passes * row + steps * stepping),
            "sync": sync_seconds(cfg, shape, card, ranks)}, critic * passes * (work.products + work.attention)


def rollout_seconds(cfg: Config, shape: Shape, card: Card, ranks: int) -> float:
    """Predict the seconds of a rollout: steps of all slots, and the longest completion, twice the mean, alone
    at the end. A step reads the weights, the slots' keys and what tokens are drawn from."""
    prompt, completion = counts.planned_lengths(cfg)
    roll, element, size = cfg.rollout, getattr(torch, cfg.model.dtype).itemsize, counts.parameters(shape)
    engines = ranks / (roll.tensor_parallel if roll.engine == "vllm" else 1)
    spread = ranks / engines
    asked = roll.prompts_per_step * getattr(cfg.labels, "most", roll.group_size) / engines
    busy = min(roll.slots * spread, asked)
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * element
    read = size * element + busy * (prompt + completion / 2) * token + 2 * 24 * busy * shape.vocab_size
    computed = 2 * size * busy / (PRODUCTS * card.flops)
    waiting = VLLM_STEP if roll.engine == "vllm" else EMBEDDED_KERNELS * shape.layers * LAUNCH
    one = max(read / (MEMORY * card.bandwidth), computed) / spread + waiting
    prefill = 2 * size * prompt * roll.prompts_per_step / ranks / (PRODUCTS * card.flops)
    return one * (asked * completion / busy + completion) + prefill


def sync_seconds(cfg: Config, shape: Shape, card: Card, ranks: int) -> float:
    size, element = counts.parameters(shape), getattr(torch, cfg.model.dtype).itemsize
    copied = (4 + 3 * element) * size / (MEMORY * card.bandwidth)
    sent = element * size * (ranks - 1) / ranks / (LINK * card.link)
    return copied + sent + (VLLM_SYNC if cfg.rollout.engine == "vllm" else 0)


# ---- does it fit

@dataclass(frozen=True, slots=True)
class Fit:
    """What a config chooses on a machine, and the bytes of each phase on each rank."""

    cfg: Config
    remarks: list[str]
    phases: dict[str, counts.Parts]
    fits: bool

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())


def try_on(cfg: Config, shape: Shape, machine: Machine) -> Fit:
    """Choose what is left to `auto`, and count. A rank may use FILLED of what is free."""
    decided, remarks = choose_settings(cfg, shape, machine, {})
    phases = {"update": counts.update_parts(decided, shape, machine.ranks),
              "sync": counts.sync_parts(decided, shape, machine.ranks),
              "rollout": counts.rollout_parts(decided, shape, machine.ranks, decided.rollout.slots)}
    found = Fit(decided, remarks, phases, False)
    return replace(found, fits=found.peak <= FILLED * machine.free)


# A change -> what it costs.
CHANGES = {
    "model.checkpoint_blocks=selective": "norms and SwiGLU are computed again: a few percent more time",
    "model.checkpoint_blocks=all": "every block is computed again: a third more time in the update",
    "pack.capacity=auto": "shorter rows: slower only where they become short",
    "rollout.cache_gib=null": "as many slots as fit in place of a cache of that size: a longer rollout",
    "model.lora.rank=32": "an adapter is trained, not all weights; its best rate is about 10 times theirs",
    "optim.offload=true": "weights come from the host in every row, and AdamW steps there: far slower",
}


def changes(cfg: Config, shape: Shape, machine: Machine) -> Iterator[tuple[str, Fit, str]]:
    """Try one change of the config, or of the number of ranks, at a time; yields those that make it fit."""
    for change, cost in CHANGES.items():
        changed = with_setting(cfg, change)
        if changed != cfg and all(fine for _, fine, _ in all_rules(changed)):
            tried = try_on(changed, shape, machine)
            if tried.fits:
                yield change, tried, cost
    for ranks in (2, 4, 8, 16, 32, 64):
        if ranks > machine.ranks and ranks % cfg.rollout.tensor_parallel == 0:
            tried = try_on(cfg, shape, replace(machine, ranks=ranks))
            if tried.fits:
                yield f"{ranks} ranks", tried, "weights and moments are spread over them: sent in every row"
                return


def with_setting(cfg: Config, text: str) -> Config:
    return settings.build(Config, settings.merge(asdict(cfg), settings.override(text, Config)))


# ---- the report

def parts_table(found: Fit) -> str:
    """Write the GiB of each part in each phase, and what they come to."""
    names = dict.fromkeys(name for parts in found.phases.values() for name, size in parts.items() if size)
    lines = [f"{'GiB on each rank':<38}" + "".join(f"{phase:>10}" for phase in found.phases)]
    for name in names:
        cells = [parts.get(name, 0) for parts in found.phases.values()]
        lines.append(f"{name:<38}" + "".join(map(cell, cells)).rstrip())
    sums = [sum(parts.values()) for parts in found.phases.values()]
    return "\n".join([*lines, f"{'together':<38}" + "".join(map(cell, sums))])


def cell(size: float) -> str:
    return f"{size / GIB:>10.2f}" if size else f"{'':>10}"


def prediction(found: Fit, shape: Shape, card: Card, name: str, ranks: int) -> str:
    """Write the predicted seconds of a step by phase, and how much of the card's peak that is."""
    seconds, flop = step_seconds(found.cfg, shape, card, ranks)
    whole = sum(seconds.values())
    phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
    prompt, completion, kept = planned(found.cfg)
    of_update, of_step = flop / seconds["update"] / card.flops, flop / whole / card.flops
    return (f"A step on {name}, predicted and not measured: {whole:.2f} s, of which {phases}. MFU of the "
            f"update {of_update:.0%}, of the step {of_step:.0%}. "
            f"Prompts of {prompt} tokens and completions of {completion} are planned with, of which {kept:g} "
            f"of {found.cfg.rollout.group_size} are kept; rewards, on the CPU, are not predicted.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fit", action="store_true",
                        help="say whether the run fits, and how long a step takes; status 2 if it does not")
    parser.add_argument("--memory", type=gibibytes, metavar="GIB", help="--fit: that is free on each GPU")
    parser.add_argument("--gpus", type=count, metavar="N", help="--fit: how many")
    parser.add_argument("--card", choices=CARDS, help="--fit: which GPU")


def gibibytes(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be a finite number above 0")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def described(cfg: Config, args: argparse.Namespace) -> tuple[Machine, str | None]:
    """Return the machine that the arguments name, or this one, and its card. Raises ConfigError."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("--fit needs no torchrun: --gpus says on how many")
    if args.memory or args.card:
        if cfg.device == "cpu":
            raise ConfigError("--memory and --card name GPUs, and device=cpu; leave one of them out")
        gib = args.memory or CARDS[args.card].gib
        return Machine(torch.device("cuda"), gib * GIB, args.gpus or 1), args.card
    dist.init("cpu")
    device = find_device(cfg.device)
    if device.type == "cpu" and args.gpus:
        raise ConfigError("--gpus needs --memory or --card: this machine shows no GPU")
    ranks = args.gpus or max(1, torch.cuda.device_count())
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return (replace(Machine.here(device), ranks=ranks if device.type == "cuda" else 1),
            next((card for card in CARDS if card in named), None))


def find_shape(path: str) -> Shape:
    """Read the shape of a model from its config.json, without loading or downloading any weights. Raises
    ConfigError where there is none on this machine."""
    folder = find_path(path)
    if not folder.is_dir():
        try:
            known = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            known = None
        if not isinstance(known, str):
            raise ConfigError(f"model.path={path!r} is not on this machine, and --fit downloads nothing; a "
                              "folder with its config.json is enough, of a model on the hub by hf download "
                              "NAME config.json --local-dir DIR, then --set model.path=DIR")
        folder = Path(known).parent
    return read_shape(folder)


def report(cfg: Config, args: argparse.Namespace) -> int:
    """Print whether a config fits, and what would make it fit; returns the exit status, 2 if it does not."""
    shape = find_shape(cfg.model.path)
    machine, card = described(cfg, args)
    if machine.ranks % cfg.rollout.tensor_parallel:
        raise ConfigError(f"rollout.tensor_parallel={cfg.rollout.tensor_parallel} must be a divisor of the "
                          f"number of GPUs, {machine.ranks}; set --gpus or it")
    if cfg.model.attention == "flash":  # the same kernel, from a package that need not be here
        cfg = with_setting(cfg, "model.attention=varlen")
    found, free = try_on(cfg, shape, machine), machine.free / GIB
    kind = "CPU" if machine.device.type == "cpu" else "GPU"
    where = f"{machine.ranks} x {card}" if card else f"{machine.ranks} {kind}{'s' * (machine.ranks > 1)}"
    print(f"{cfg.model.path}, {counts.parameters(shape) / 1e9:.2f} billion weights, on {where}: {free:.1f} "
          f"GiB are free on each, of which {FILLED * free:.1f} are planned with\n")
    named = [f"{key}={value}" for key, value in list_choices(cfg, found.cfg).items() if key != "device"]
    said = [f"auto takes {', '.join(named)}"] * bool(named) + found.remarks
    print("".join(f"{textwrap.fill(line, WIDTH, subsequent_indent='  ')}\n" for line in said))
    print(parts_table(found))
    needed = found.peak / GIB
    print(f"\nIt {'fits' if found.fits else 'does not fit'}: {needed:.1f} of {FILLED * free:.1f} GiB\n")
    if not found.fits:
        helping = [f"  {name:<36} {tried.peak / GIB:>6.1f} GiB  {cost}"
                   for name, tried, cost in changes(cfg, shape, machine)]
        print("One of these makes it fit:" if helping else
              "No single change makes it fit; take several, or a smaller model")
        print("".join(f"{textwrap.fill(line, WIDTH, subsequent_indent=' ' * 51)}\n" for line in helping))
    if card:
        print(textwrap.fill(prediction(found, shape, CARDS[card], card, machine.ranks), WIDTH))
    return 0 if found.fits else 2
