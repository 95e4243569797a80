"""Choose the settings that a config leaves to `auto`: compare the machine's memory with the bytes that
leaves/fit/counts.py counts."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from config import Config, ConfigError, with_value
from infra.choices import (
    ENOUGH_TOKENS,
    Choice,
    choose_kernels,
    list_choices,
    row_range,
    sequences_asked,
    with_rows,
)
from infra.device import USABLE_SHARE, Machine, slots_that_fit
from infra.weights import Shape
from leaves.fit.counts import phases, planned_share, rollout_parts, update_bytes
from model import BLOCK_CALLS

OVERCOUNT = 1.3  # the count is at most so many times an update's bytes (tests/test_fake_gpu.py)
ROW_STEP = 256    # tokens; rows grow in steps of it


def decide(cfg: Config, choice: Choice) -> Choice:
    """Choose by counted bytes. Raises ConfigError if one sequence has by far no room."""
    shape, machine = choice.shape, choice.machine
    decided, remarks = choose_settings(cfg, shape, machine, choice.saved)
    needed = update_bytes(decided, shape, machine.ranks)
    if cfg.pack.capacity == "auto" and needed > OVERCOUNT * machine.free:
        raise ConfigError(
            f"pack.capacity=auto has no room for a row of one sequence ({decided.pack.capacity} tokens): an "
            f"update is counted to need {needed / 2**30:.1f} GiB on a rank, and {machine.free / 2**30:.1f} "
            "are free; train an adapter (model.lora.rank) or on more ranks, set optim.offload=true (CUDA), "
            "or lower rollout.max_new_tokens or data.max_prompt_tokens; train.py --fit tells what helps")
    return replace(choice, cfg=decided, remarks=(*remarks, *choice.remarks))


def choose_settings(cfg: Config, shape: Shape, machine: Machine, saved: dict) -> tuple[Config, list[str]]:
    """Replace every `auto` by a value, and slots by fewer if memory asks for it; returns remarks too.

    `saved` choices are taken again if they can run here, so that a resumed run stays the same run.
    """
    here = choose_kernels(cfg, machine, saved)
    slots = here.rollout.slots
    here = choose_sleep(here, shape, machine, saved)
    room = USABLE_SHARE * machine.free
    needed = partial(rollout_parts, here, shape, machine.ranks)
    most = slots_that_fit(slots, room, lambda count: sum(needed(count).values()))
    here = with_value(here, "rollout.slots", most)
    return here, list(explain_choice(cfg, here, shape, machine, saved))


def choose_sleep(cfg: Config, shape: Shape, machine: Machine, saved: dict) -> Config:
    """Choose rollout.sleep, and with it the rows.

    vLLM stays awake if it fits beside an update that hardly takes longer for it: one of a single row, or of
    rows that are long enough and recompute no more. The embedded engine's memory is free once it has sampled.
    """
    wanted, before = cfg.rollout.sleep, saved.get("rollout.sleep", "always" if saved else "auto")
    asleep, awake = (choose_rows(with_value(cfg, "rollout.sleep", sleep), shape, machine, saved)
                     for sleep in ("always", "never"))
    if cfg.rollout.engine != "vllm" or wanted == "always" or (wanted == "auto" and before == "always"):
        return asleep
    if wanted == "never":
        return awake
    room = USABLE_SHARE * machine.free * (OVERCOUNT if before == "never" else 1)  # rows may be measured ones
    needed = max(sum(parts.values()) for parts in phases(awake, shape, machine.ranks).values())
    rows, how = awake.pack.capacity, awake.model.checkpoint_blocks
    one_row = rows >= planned_share(cfg, machine.ranks) and how != "all"
    alike = rows >= min(asleep.pack.capacity, ENOUGH_TOKENS) and how == asleep.model.checkpoint_blocks
    return awake if needed <= room and (one_row or alike) else asleep


def explain_choice(cfg: Config, here: Config, shape: Shape, machine: Machine, saved: dict) -> Iterator[str]:
    """Say why a choice is not the expected one."""
    slots, free = here.rollout.slots, machine.free / 2**30
    if slots < min(cfg.rollout.slots, sequences_asked(here, machine.ranks)):
        why = "as before" if slots == saved.get("rollout.slots") else f"{free:.1f} GiB have no room for more"
        yield f"rollout.slots={slots}, not {cfg.rollout.slots}: {why}"
    needed = update_bytes(here, shape, machine.ranks) / 2**30
    if needed > free:
        yield (f"an update is counted to need {needed:.1f} GiB on a rank, and {free:.1f} are free: train an "
               "adapter (model.lora.rank) or on more ranks, lower pack.capacity or set optim.offload=true "
               "(CUDA)")
    if machine.no_cuda and cfg.device == "auto":
        yield f"device=cpu: {machine.no_cuda}"
    if machine.device.type == "cuda" and cfg.rollout.engine == "auto" and machine.no_vllm:
        yield f"rollout.engine=torch, the embedded one: {machine.no_vllm}"
    was = [f"{key}={saved[key]}" for key, value in list_choices(cfg, here).items()
           if key not in ("device", "rollout.sleep") and saved.get(key, value) != value]
    if was:
        yield f"from here on not the same run bit for bit: {', '.join(was)} before, which cannot run here"


def choose_rows(cfg: Config, shape: Shape, machine: Machine, saved: dict) -> Config:
    """Choose pack.capacity and model.checkpoint_blocks, if they are `auto`.

    Rows are as long as memory has room for, and blocks recomputed as little as leaves rows that are long
    enough. A run that goes on takes both again.
    """
    room, capacity, before = USABLE_SHARE * machine.free, cfg.pack.capacity, saved.get("pack.capacity")
    ways, how_before = list(BLOCK_CALLS), saved.get("model.checkpoint_blocks")
    if cfg.model.checkpoint_blocks != "auto":
        ways = [cfg.model.checkpoint_blocks]

    def needed(how: str, tokens: int) -> int:
        return update_bytes(with_rows(cfg, how, tokens), shape, machine.ranks)

    if capacity != "auto":
        fitting = [how for how in ways if needed(how, capacity) <= room] or ways[-1:]
        return with_rows(cfg, how_before if how_before in fitting else fitting[0], capacity)
    # A measured row may be longer than the count allows.
    if before and how_before in ways and needed(how_before, before) <= OVERCOUNT * room:
        return with_rows(cfg, how_before, before)
    least, most = row_range(cfg, machine.ranks)
    if machine.device.type == "cpu":  # longer rows gain nothing there, and memory is not ours alone
        most = max(least, min(most, ENOUGH_TOKENS))
    chosen, longest = ways[-1], 0
    for how in ways:  # from no recomputation to all
        tokens = longest_row(least, most, room, partial(needed, how))
        if tokens >= min(ENOUGH_TOKENS, most):
            return with_rows(cfg, how, tokens)
        if tokens >= longest:
            chosen, longest = how, tokens
    return with_rows(cfg, chosen, longest or least)


def longest_row(least: int, most: int, room: float, needed: Callable[[int], float]) -> int:
    """Return the longest capacity that there is room for, in bytes; 0 if there is none."""
    sizes = [*range(least, most, ROW_STEP), most]
    fitting = bisect_right(sizes, room, key=needed)
    return sizes[fitting - 1] if fitting else 0
