"""Measure before a run what an update and a rollout take, and let rows grow to the memory that is there."""

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

import torch

from config import Config, ConfigError
from infra import dist
from infra.checks import Check, Ready
from infra.choices import row_range, with_rows
from infra.device import USABLE_SHARE, total_bytes
from infra.signals import SAVE_MEMORY
from learner import Learner, checkpoint_roles
from leaves.fit.counts import held_parts, planned_lengths, sampling_parts, update_bytes
from leaves.fit.memory import OVERCOUNT, longest_row
from metrics import fullest, used_bytes
from model import BACKENDS
from pack import Minibatch, Plan, build_row, layout
from records import Group, Prompt, Row, Sample


def before_run(cfg: Config, ready: Ready) -> Ready:
    """Lengthen the rows, and check that an update and a rollout fit. The engine has not sampled yet, and is
    awake in the end."""
    decided, learner = lengthen_rows(cfg, ready.cfg, ready.learner)
    device, shape = learner.device, learner.policy.shape
    update_peak = fullest(peak_of_update(decided, learner), device)
    ready.engine.sync(learner.policy)
    rollout_peak = fullest(peak_of_rollout(decided, learner), device)
    counted = update_bytes(decided, shape, dist.world_size())
    fits = check_memory(update_peak, rollout_peak, total_bytes(device), counted)
    return replace(ready, cfg=decided, learner=learner, checks=(*ready.checks, fits))


def check_memory(update: float, rollout: float, total: float, counted_update: float) -> Check:
    GiB = 2**30
    figures = (f"update {update / GiB:.1f} (counted {counted_update / GiB:.1f} a rank), "
               f"rollout {rollout / GiB:.1f} of {total / GiB:.1f} GiB at their peaks")
    return Check("memory", max(update, rollout) <= total, figures, SAVE_MEMORY)


def peak_of_update(cfg: Config, learner: Learner) -> float:
    """Measure the bytes in use at the peak of a full row of training, of groups of counts.planned_lengths.

    Raises ConfigError if memory runs out: the other ranks would wait in vain for this one.
    """
    models = [model for model, _ in checkpoint_roles(learner).values()]
    row = full_row(cfg, learner)
    try:
        (learner.log_probs(learner.policy, row) * 0).sum().backward()
        learner.policy.zero_grad()  # training never holds both gradients
        for model, _ in learner.roles.values():
            attend = BACKENDS[learner.backend](row.segments)
            (model(row.ids_T, row.position_T, attend, row.predict_C) * 0).sum().backward()
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"out of memory on a full row of {learner.pack.capacity} tokens; "
                          f"{SAVE_MEMORY}") from error
    finally:
        for model in models:
            model.zero_grad()
    in_use = used_bytes(learner.device)
    if learner.device.type != "cuda":
        # A checkpoint is written from a copy, on the CPU in the same memory: weights and two moments.
        trained = [p for model in models for p in model.parameters() if p.requires_grad]
        in_use += 3 * sum(dist.local_shard(p).nbytes for p in trained)
    return in_use


def full_row(cfg: Config, learner: Learner) -> Row:
    """Build a row of as many groups of planned lengths as it has room for, at least one."""
    prompt, completion = planned_lengths(cfg)
    G, capacity = cfg.rollout.group_size, learner.pack.capacity
    sample = Sample([0] * completion, [0.0] * completion, finished=True)
    group = Group(Prompt("", (0,) * prompt, ""), (sample,) * G)
    groups = [group] * (capacity // (prompt + G * completion) + 1)
    ones = torch.ones(len(groups), G, dtype=torch.float64)
    minibatch, members = Minibatch(groups, ones.bool(), ones, ones, ones), ones.nonzero().tolist()
    queries, _ = layout(minibatch, members)
    count = max(1, bisect_right([*accumulate(queries)], capacity))
    return build_row(minibatch, Plan(members[:count])).to(learner.device, learner.trained_dtype)


def lengthen_rows(asked: Config, cfg: Config, learner: Learner) -> tuple[Config, Learner]:
    """Make the rows of pack.capacity=auto as long on CUDA as memory is measured to have room for.

    Counted memory is above what an update takes. So one full row of the counted capacity is measured beside
    what lies in memory, and rows grow by the difference. Returns the config and the learner with longer rows.
    """
    device, shape, ranks = learner.device, learner.policy.shape, dist.world_size()
    if asked.pack.capacity != "auto" or device.type != "cuda":
        return cfg, learner
    torch.cuda.empty_cache()  # what models were loaded with, rows could take as well
    held = fullest(used_bytes(device), device)

    def counted(tokens: int) -> float:
        longer = with_rows(cfg, cfg.model.checkpoint_blocks, tokens)
        still = held_parts(longer, shape, ranks)
        return update_bytes(longer, shape, ranks) - sum(still.values())

    first, (_, most) = cfg.pack.capacity, row_range(cfg, ranks)
    real = fullest(peak_of_update(cfg, learner), device) - held
    real = max(real, counted(first) / OVERCOUNT)  # less has never been seen
    room = USABLE_SHARE * total_bytes(device) - held
    capacity = longest_row(first, most, room * counted(first) / real, counted) or first
    torch.cuda.empty_cache()  # the checks before the run measure a row of the new capacity
    longer = with_rows(cfg, cfg.model.checkpoint_blocks, capacity)
    dist.say(f"measured here: pack.capacity={capacity}")
    return longer, replace(learner, pack=longer.pack)


def peak_of_rollout(cfg: Config, learner: Learner) -> float:
    """Estimate the bytes in use while the engine, which is awake now, samples at full length."""
    needed = 0  # vLLM has all that it samples with already
    if cfg.rollout.engine == "torch":
        parts = sampling_parts(cfg, learner.policy.shape, cfg.rollout.slots)
        needed = sum(parts.values()) - parts["engine's weights"]
    if learner.device.type == "cuda":
        torch.cuda.empty_cache()  # what torch still holds of the update, the cache takes first
    return used_bytes(learner.device) + needed
