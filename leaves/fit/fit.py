"""Say whether a run fits, part by part, and list the changes that would make it fit.

    train.py --config NAME.yaml --fit [--memory 24] [--gpus 8]

Nothing is loaded but config.json. Bytes are those that `auto` goes by (leaves/fit/counts.py).
"""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace

import torch

from config import Config, ConfigError, build, type_of
from infra import dist
from infra.choices import Choice, choose_kernels, list_choices
from infra.device import Machine, Parts, find_device, parameters
from infra.families import Shape
from leaves.fit.counts import find_shape, phases
from leaves.fit.join import decide, room, used
from settings import loader as settings
from settings.rules import all_rules

GIB = 2**30
# A change -> what it costs.
CHANGES = {
    "model.checkpoint_blocks=selective": "norms and SwiGLU are computed again: a few percent more time",
    "model.checkpoint_blocks=all": "every block is computed again: a third more time in the update",
    "pack.capacity=auto": "shorter rows: slower only where they become short",
    "rollout.sleep=always": "the engine gives its memory up for an update: some tenths of a second a step",
    "rollout.cache_gib=null": "as many slots as fit in place of a cache of that size: a longer rollout",
    "model.lora.rank=32": "an adapter is trained, not all weights; its best rate is about 10 times theirs",
    "optim.offload=true": "weights come from the host in every row, and AdamW steps there: far slower",
}


def try_on(cfg: Config, shape: Shape, machine: Machine) -> Choice:
    """Choose what is left to `auto` on a machine that may be another one."""
    return decide(cfg, choose_kernels(cfg, machine, shape, {}))


def fits(choice: Choice) -> bool:
    return used(choice.cfg, choice) <= room(choice)


def changes(cfg: Config, shape: Shape, machine: Machine) -> Iterator[tuple[str, float, str]]:
    """Try one change of the config, or of the number of ranks, at a time. Yields those that make it fit, with
    the bytes that it then takes and what it costs."""
    for change, cost in CHANGES.items():
        changed = cfg
        with suppress(ConfigError):  # the leaf of that setting may be gone
            changed = build(settings.merge(asdict(cfg), settings.override(change, type_of)))
        if changed != cfg and all(fine for _, fine, _ in all_rules(changed)):
            tried = try_on(changed, shape, machine)
            if fits(tried):
                yield change, used(tried.cfg, tried), cost
    for ranks in (2, 4, 8, 16, 32, 64):
        if ranks > machine.ranks and ranks % cfg.rollout.tensor_parallel == 0:
            tried = try_on(cfg, shape, replace(machine, ranks=ranks))
            if fits(tried):
                yield (f"{ranks} ranks", used(tried.cfg, tried),
                       "weights and moments are spread over them: sent in every row")
                return


def parts_table(counted: dict[str, Parts]) -> Iterator[str]:
    """Yield the GiB of each part in each phase, and their sum."""
    yield f"{'GiB on each rank':<38}" + "".join(f"{phase:>10}" for phase in counted)
    names = dict.fromkeys(name for parts in counted.values() for name, size in parts.items() if size)
    sums = [parts | {"together": sum(parts.values())} for parts in counted.values()]
    for name in (*names, "together"):
        yield f"{name:<38}" + "".join(f"{parts.get(name, 0) / GIB:>10.2f}" for parts in sums)


def described_machine(cfg: Config, args: argparse.Namespace) -> tuple[Machine, str]:
    """Return the machine that the arguments name, or this one, and its name. Raises ConfigError."""
    if args.memory:
        return Machine(torch.device("cuda"), args.memory * GIB, args.gpus or 1), "GPU"
    dist.init("cpu")
    device = find_device(cfg.device)
    if device.type == "cpu" and args.gpus:
        raise ConfigError("--gpus needs --memory: this machine shows no GPU")
    ranks = args.gpus or max(1, torch.cuda.device_count())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return replace(Machine.here(device), ranks=ranks), name


def report(cfg: Config, args: argparse.Namespace) -> int:
    """Print whether a config fits, and changes that would make it fit. The status is 2 if it does not."""
    shape = find_shape(cfg.model.path)
    machine, name = described_machine(cfg, args)
    choice, free = try_on(cfg, shape, machine), machine.free / GIB
    print(f"{cfg.model.path}, {parameters(shape) / 1e9:.2f} billion weights, on {machine.ranks} x {name}: "
          f"{free:.1f} GiB are free on each, of which {room(choice) / GIB:.1f} are planned with\n")
    chosen = [f"{key}={value}" for key, value in list_choices(cfg, choice.cfg).items() if key != "device"]
    table = parts_table(phases(choice.cfg, shape, machine.ranks))
    print(f"auto takes {', '.join(chosen)}", *choice.remarks, "", *table, "", sep="\n")
    fine = fits(choice)
    print(f"It {'fits' if fine else 'does not fit'}: {used(choice.cfg, choice) / GIB:.1f} of "
          f"{room(choice) / GIB:.1f} GiB")
    if fine:
        return 0
    helping = [f"  {change:<36} {needed / GIB:>6.1f} GiB  {cost}"
               for change, needed, cost in changes(cfg, shape, machine)]
    print("", "One of these makes it fit:" if helping else
          "No single change makes it fit; take several, or a smaller model", *helping, sep="\n")
    return 2
