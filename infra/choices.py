"""Choose the settings of a run that its config leaves to `auto`."""

from dataclasses import replace
from pathlib import Path

import torch

from config import Config, flatten, with_value
from infra import dist
from infra.device import Machine, choose_backend, find_device, list_backends
from infra.named_sets import NAMED_SETS
from infra.weights import Shape, read_shape
from records import frozen
from settings import leaves

ENOUGH_TOKENS = 4096  # tokens of a row; with fewer, launches and gathers cost more than recomputing blocks
MANY = 1_000_000_000  # sequences: more than any engine has slots for
REQUESTED = "slots asked for"  # key of a checkpoint: the config's slots, if fewer were chosen


@frozen
class Choice:
    """The settings that a config leaves to `auto`, as chosen so far."""

    cfg: Config
    machine: Machine
    shape: Shape
    saved: dict  # the flat config of the checkpoint that the run goes on from: its choices are taken again
    remarks: tuple[str, ...] = ()  # why a choice is not the expected one


def resolve_auto(cfg: Config, source: Path, saved: dict | None = None) -> Config:
    """Choose the settings that a config leaves to `auto` on this machine, and print them. Collective.

    Args:    source  folder of the model
             saved   as in Choice
    """
    device, saved = dist.init(find_device(cfg.device)), saved or {}
    choice = choose_kernels(cfg, Machine.here(device), read_shape(source), saved)
    choice = leaves.through("decide", cfg, choice)
    decided = choose_simply(choice)
    chosen = list_choices(cfg, decided)
    if chosen:
        dist.say("chosen here: " + ", ".join(f"{key}={value}" for key, value in chosen.items()))
    for line in choice.remarks:
        dist.say(line)
    was = [f"{key}={saved[key]}" for key, value in chosen.items()
           if key != "rollout.sleep" and saved.get(key, value) != value]
    if was:
        dist.say(f"from here on not the same run bit for bit: {', '.join(was)} before, "
                 "which is not the choice here")
    return decided


def choose_kernels(cfg: Config, machine: Machine, shape: Shape, saved: dict) -> Choice:
    """Choose the dtype, the attention, the engine and its slots, of which it needs no more than it is asked
    for. `saved` choices are taken again if they can run here, so that a resumed run stays the same run."""
    def pick(key, able):
        wanted = flatten(cfg)[key]
        if wanted != "auto":
            return wanted
        return saved[key] if saved.get(key) in able else able[0]

    device, remarks = machine.device, []
    name = pick("model.dtype", ["bfloat16", "float32"] if device.type == "cuda" else ["float32", "bfloat16"])
    dtype = getattr(torch, name)
    attention = choose_backend(pick("model.attention", list_backends(device, dtype)), device, dtype)
    engine = pick("rollout.engine", machine.engines(dtype))
    here = replace(cfg, device=device.type, model=replace(cfg.model, dtype=name, attention=attention))
    here = with_value(here, "rollout.engine", engine)
    slots = min(cfg.rollout.slots, sequences_asked(here, machine.ranks))
    if saved.get(REQUESTED, cfg.rollout.slots) == cfg.rollout.slots:
        slots = saved.get("rollout.slots", slots)
    if machine.no_cuda and cfg.device == "auto":
        remarks.append(f"device=cpu: {machine.no_cuda}")
    if device.type == "cuda" and cfg.rollout.engine == "auto" and (why := machine.against_vllm(dtype)):
        remarks.append(f"rollout.engine=torch, the embedded one: {why}")
    return Choice(with_value(here, "rollout.slots", slots), machine, shape, saved, tuple(remarks))


def choose_simply(choice: Choice) -> Config:
    """Choose what is still left to `auto` as the checkpoint has it, or without a count of memory
    (leaves/fit): the engine sleeps, rows are of moderate length, and a GPU recomputes every block."""
    cfg, machine = choice.cfg, choice.machine
    least, most = row_range(cfg, machine.ranks)
    simple = {
        "rollout.sleep": "always",
        "model.checkpoint_blocks": "all" if machine.device.type == "cuda" else "none",
        "pack.capacity": max(least, min(most, ENOUGH_TOKENS)),
    }
    for key, value in simple.items():
        if flatten(cfg)[key] == "auto":
            cfg = with_value(cfg, key, choice.saved.get(key, value))
    return cfg


def list_choices(cfg: Config, decided: Config) -> dict:
    """Return the settings that were chosen, flat."""
    before, after = flatten(cfg), flatten(decided)
    return {key: value for key, value in after.items() if value != before[key]}


def longest_sampled(cfg: Config) -> int:
    """Return the tokens of the longest sequence that the engine samples."""
    return max(cfg.longest, cfg.data.max_prompt_tokens + cfg.eval.max_new_tokens)


def row_range(cfg: Config, ranks: int) -> tuple[int, int]:
    """Return two lengths in tokens: one sequence at full length, which a row must hold; and a rank's part of
    the longest mini-batch, than which no row is longer."""
    sampling = cfg.rollout
    prompt, longest = cfg.data.max_prompt_tokens, cfg.longest
    group = prompt + sampling.group_size * (longest - prompt)
    tokens = sampling.prompts_per_step * group
    if sampling.until == "full":
        tokens *= sampling.max_rounds
    return longest, longest + tokens // cfg.update.minibatches // ranks


def sequences_asked(cfg: Config, ranks: int) -> int:
    """Count the most sequences that one engine is asked for at once, by a step or by an evaluation, or MANY
    if that is not known without the data."""
    sampling, limit = cfg.rollout, cfg.eval.limit or MANY
    prompts = int(sampling.prompts_per_step * getattr(getattr(cfg, "windows", None), "in_flight", 1))
    if sampling.until == "informative":
        prompts = int(sampling.oversample * prompts)
    most = prompts * max(sampling.group_size, cfg.labels.chunk)
    for name in map(str.strip, (cfg.data.eval or "").split(",")):
        most = max(most, min(NAMED_SETS.get(name, [MANY * bool(name)])[0], limit) * cfg.eval.n)
    if cfg.advantage.fills_slots:
        most = MANY
    # Ranks that hold one engine together sample for each other.
    return -(-most * sampling.tensor_parallel // ranks)
