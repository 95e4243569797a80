"""Choose the settings that a config leaves to `auto` by the memory there is (leaves/fit/counts.py)."""

from collections.abc import Iterator
from dataclasses import replace

from config import Config, with_value
from infra.choices import ENOUGH_TOKENS, Choice, choose_simply, row_range, sequences_asked
from infra.device import USABLE_SHARE, largest_that_fits
from leaves.fit.counts import phases
from model import BLOCK_CALLS

ROW_STEP = 256    # tokens; rows grow in steps of it


def used(cfg: Config, choice: Choice, *names: str) -> float:
    """Count the bytes on a rank at the peak of the phases named, or of all."""
    counted = phases(cfg, choice.shape, choice.machine.ranks)
    return max(sum(counted[name].values()) for name in names or counted)


def room(choice: Choice) -> float:
    """Return the bytes that are planned with."""
    return USABLE_SHARE * choice.machine.free


def decide(cfg: Config, choice: Choice) -> Choice:
    """Choose rows, recomputation, sleep and slots. A run that goes on takes those of its checkpoint again if
    memory has room for them, so that it stays the same run; it may sleep now."""
    again = [choose_simply(choice)] if choice.saved else []
    if cfg.rollout.sleep == "auto":
        again += [with_value(same, "rollout.sleep", "always") for same in again]
    here = next((same for same in again if used(same, choice) <= choice.machine.free), None)
    if here is None:
        here = choose_sleep(choice)
        slots = largest_that_fits(
            range(1, here.rollout.slots + 1), room(choice),
            lambda slots: used(with_value(here, "rollout.slots", slots), choice, "rollout"))
        here = with_value(here, "rollout.slots", slots or 1)
    return replace(choice, cfg=here, remarks=(*choice.remarks, *explain_choice(cfg, here, choice)))


def choose_sleep(choice: Choice) -> Config:
    """Choose rollout.sleep, and with it the rows.

    vLLM stays awake if it fits beside an update that hardly takes longer for it: with rows that are as long,
    or long enough, and blocks recomputed no more. The embedded engine's memory is free once it has
    sampled.
    """
    if choice.cfg.rollout.sleep != "auto":
        return choose_rows(choice.cfg, choice)
    asleep, awake = (choose_rows(with_value(choice.cfg, "rollout.sleep", sleep), choice)
                     for sleep in ("always", "never"))
    alike = (awake.pack.capacity >= min(asleep.pack.capacity, ENOUGH_TOKENS)
             and awake.model.checkpoint_blocks == asleep.model.checkpoint_blocks)
    fits = choice.cfg.rollout.engine == "vllm" and alike and used(awake, choice) <= room(choice)
    return awake if fits else asleep


def choose_rows(cfg: Config, choice: Choice) -> Config:
    """Choose pack.capacity and model.checkpoint_blocks, if they are `auto`: the least recomputation that
    leaves room for rows of ENOUGH_TOKENS, and then the longest rows that fit."""
    ways, (least, most) = list(BLOCK_CALLS), row_range(cfg, choice.machine.ranks)
    if cfg.model.checkpoint_blocks != "auto":
        ways = [cfg.model.checkpoint_blocks]
    if choice.machine.device.type == "cpu":  # longer rows gain nothing there, and memory is not ours alone
        most = max(least, min(most, ENOUGH_TOKENS))
    if cfg.pack.capacity != "auto":
        least = most = cfg.pack.capacity
    sizes = [*range(least, most, ROW_STEP), most]
    longest = 0
    for how in ways:  # from no recomputation to all
        tokens = largest_that_fits(
            sizes, room(choice), lambda tokens, how=how: used(with_rows(cfg, how, tokens), choice, "update"))
        if tokens >= longest:
            chosen, longest = with_rows(cfg, how, tokens or least), tokens
        if longest >= min(ENOUGH_TOKENS, most):
            break
    return chosen


def with_rows(cfg: Config, how: str, capacity: int) -> Config:
    return with_value(with_value(cfg, "model.checkpoint_blocks", how), "pack.capacity", capacity)


def explain_choice(cfg: Config, here: Config, choice: Choice) -> Iterator[str]:
    """Say why a choice is not the expected one."""
    machine, slots = choice.machine, here.rollout.slots
    if slots < min(cfg.rollout.slots, sequences_asked(here, machine.ranks)):
        before = slots == choice.saved.get("rollout.slots")
        why = "as before" if before else f"{machine.free / 2**30:.1f} GiB have no room for more"
        yield f"rollout.slots={slots}, not {cfg.rollout.slots}: {why}"
    needed = used(here, choice, "update")
    if needed > machine.free:
        yield (f"an update with rows of {here.pack.capacity} tokens is counted to need {needed / 2**30:.1f} "
               f"GiB on a rank, and {machine.free / 2**30:.1f} are free: train an adapter (model.lora.rank) "
               "or on more ranks, set optim.offload=true (CUDA), or lower pack.capacity, or for a shorter "
               "sequence rollout.max_new_tokens or data.max_prompt_tokens; train.py --fit tells what helps")
