"""Say whether a run fits, part by part, and list the changes that would make it fit.

    train.py --config NAME.yaml --fit [--memory 24] [--gpus 8] [--card H100]

Nothing is loaded but config.json. Bytes are those that `auto` goes by (leaves/fit/counts.py).
"""

import argparse
import os
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from config import Config, ConfigError, build
from infra import dist
from infra.choices import list_choices
from infra.commands import CARDS
from infra.device import USABLE_SHARE, Machine, Parts, find_device, parameters
from infra.families import Shape, shape_of
from infra.weights import read_shape
from leaves.fit import counts
from leaves.fit.memory import choose_settings
from records import frozen
from settings import loader as settings
from settings.loader import read_json
from settings.paths import REPOSITORY, find_path
from settings.rules import all_rules

GIB, WIDTH = 2**30, 100  # WIDTH: columns of the report
SHAPES = REPOSITORY / "leaves" / "fit" / "shapes.json"  # hub name -> the shape in its config.json


# ---- does it fit

@frozen
class Fit:
    """The choices of a config on a machine, and the bytes of each phase on each rank."""

    cfg: Config
    remarks: list[str]
    phases: dict[str, Parts]
    room: float

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.room


def try_on(cfg: Config, shape: Shape, machine: Machine) -> Fit:
    """Choose what is left to `auto`, and count. A rank may use USABLE_SHARE of what is free."""
    decided, remarks = choose_settings(cfg, shape, machine, {})
    return Fit(decided, remarks, counts.phases(decided, shape, machine.ranks), USABLE_SHARE * machine.free)


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


def changes(cfg: Config, shape: Shape, machine: Machine) -> Iterator[tuple[str, Fit, str]]:
    """Try one change of the config, or of the number of ranks, at a time; yields those that make it fit."""
    for change, cost in CHANGES.items():
        changed = cfg
        with suppress(ConfigError):  # the leaf of that setting may be gone
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
    return build(settings.merge(asdict(cfg), settings.override(text, Config)))


# ---- the report

def parts_table(found: Fit) -> str:
    """Write the GiB of each part in each phase, and their sum."""
    names = dict.fromkeys(name for parts in found.phases.values() for name, size in parts.items() if size)
    lines = [f"{'GiB on each rank':<38}" + "".join(f"{phase:>10}" for phase in found.phases)]
    for name in names:
        cells = [parts.get(name, 0) for parts in found.phases.values()]
        lines.append(f"{name:<38}" + "".join(map(cell, cells)).rstrip())
    sums = [sum(parts.values()) for parts in found.phases.values()]
    return "\n".join([*lines, f"{'together':<38}" + "".join(map(cell, sums))])


def cell(size: float) -> str:
    return f"{size / GIB:>10.2f}" if size else f"{'':>10}"


def described_machine(cfg: Config, args: argparse.Namespace) -> tuple[Machine, str | None]:
    """Return the machine that the arguments name, or this one, and its card. Raises ConfigError."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("--fit needs no torchrun: --gpus says on how many")
    if args.memory or args.card:
        if cfg.device == "cpu":
            raise ConfigError("--memory and --card name GPUs, and device=cpu; leave one of them out")
        gib = args.memory or CARDS[args.card]
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
    """Read the shape of a model from its config.json, without loading or downloading any weights. SHAPES has
    those of the published configs' models. Raises ConfigError where there is none on this machine."""
    folder = find_path(path)
    if not folder.is_dir():
        with suppress(HFValidationError):
            if isinstance(known := try_to_load_from_cache(path, "config.json"), str):
                return read_shape(Path(known).parent)
        shipped = read_json(SHAPES)
        if path not in shipped:
            raise ConfigError(f"model.path={path!r} is not on this machine, and --fit downloads nothing; a "
                              "folder with its config.json is enough, of a model on the hub by hf download "
                              "NAME config.json --local-dir DIR, then --set model.path=DIR")
        return shape_of(shipped[path], lambda: False)
    return read_shape(folder)


def report(cfg: Config, args: argparse.Namespace) -> int:
    """Print whether a config fits, and changes that would make it fit. The status is 2 if it does not."""
    shape = find_shape(cfg.model.path)
    machine, card = described_machine(cfg, args)
    if machine.ranks % cfg.rollout.tensor_parallel:
        raise ConfigError(f"rollout.tensor_parallel={cfg.rollout.tensor_parallel} must be a divisor of the "
                          f"number of GPUs, {machine.ranks}; set --gpus or it")
    if cfg.model.attention == "flash":  # the same kernel, from a package that need not be here
        cfg = with_setting(cfg, "model.attention=varlen")
    found, free = try_on(cfg, shape, machine), machine.free / GIB
    kind = "CPU" if machine.device.type == "cpu" else "GPU"
    where = f"{machine.ranks} x {card}" if card else f"{machine.ranks} {kind}{'s' * (machine.ranks > 1)}"
    print(f"{cfg.model.path}, {parameters(shape) / 1e9:.2f} billion weights, on {where}: {free:.1f} "
          f"GiB are free on each, of which {USABLE_SHARE * free:.1f} are planned with\n")
    named = [f"{key}={value}" for key, value in list_choices(cfg, found.cfg).items() if key != "device"]
    said = [f"auto takes {', '.join(named)}"] * bool(named) + found.remarks
    print("".join(f"{textwrap.fill(line, WIDTH, subsequent_indent='  ')}\n" for line in said))
    print(parts_table(found))
    verdict = "fits" if found.fits else "does not fit"
    print(f"\nIt {verdict}: {found.peak / GIB:.1f} of {found.room / GIB:.1f} GiB\n")
    if not found.fits:
        helping = [f"  {name:<36} {tried.peak / GIB:>6.1f} GiB  {cost}"
                   for name, tried, cost in changes(cfg, shape, machine)]
        print("One of these makes it fit:" if helping else
              "No single change makes it fit; take several, or a smaller model")
        print("".join(f"{textwrap.fill(line, WIDTH, subsequent_indent=' ' * 51)}\n" for line in helping))
    return 0 if found.fits else 2
