"""Where memory runs out in an update: halve the rows and repeat the mini-batch.

The cut of a mini-batch into rows cannot change its gradient, and its optimizer step has not run. So rows may
be made smaller in the middle of a run. One rank alone can do it: of several, the others wait in a collective
for the one that failed, which ends with what to set.

Only torch.OutOfMemoryError counts, by which a device's allocator refuses what then is not taken. On the CPU
an allocation hardly ever fails: Linux grants it and kills the process when the pages are used.

Dimension key:  C completion tokens of one packed row.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from config import Config, ConfigError
from infra import dist
from records import Row

HALVINGS = 3  # of one process
MORE_ROOM = "set model.checkpoint_blocks=all or optim.offload=true (CUDA), or train on more ranks"


@dataclass(slots=True)
class Packing:
    """The settings of `pack` as they are now: the capacity is halved where memory runs out."""

    capacity: int
    window: int | None
    least: int             # tokens of a prompt and a completion as long as they may be
    halved: int = 0        # times, in this process

    @staticmethod
    def of(cfg: Config) -> "Packing":
        least = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
        return Packing(cfg.pack.capacity, cfg.pack.window, least)

    def halve(self, longest: int, error: torch.OutOfMemoryError) -> None:
        """Halve the capacity until it is below the longest row that was tried, and say so.

        Raises ConfigError where that cannot help, has been done too often, or is for one of several ranks.
        """
        smaller, alone, why = self.capacity, dist.world_size() == 1, str(error).split("\n")[0]
        while smaller >= longest:
            smaller //= 2
        smaller = max(smaller, self.least)
        what = f"out of memory in an update with rows of up to {longest} tokens on rank {dist.rank()}"
        if smaller >= longest:
            raise ConfigError(f"{what}, and one sequence may have {self.least} (data.max_prompt_tokens + "
                              f"rollout.max_new_tokens): {MORE_ROOM}, and go on with --resume auto ({why})")
        if not alone or self.halved == HALVINGS:
            already = f", which were halved {HALVINGS} times before" * alone
            raise ConfigError(f"{what}{already}: go on from the newest checkpoint with --resume auto and "
                              f"--set pack.capacity={smaller}, or {MORE_ROOM} ({why})")
        self.capacity, self.halved = smaller, self.halved + 1
        print(f"{what}: the mini-batch is repeated, from here on with pack.capacity={smaller} ({why})",
              file=sys.stderr, flush=True)


def pass_minibatch(learner: Any, model: nn.Module, minibatch: Any, prepared: list, gradient: Callable,
                   ) -> list:
    """Make the passes of one mini-batch; where memory runs out, all of them again in smaller rows.

    Args:    learner   a Learner, which cuts a Minibatch into rows by its Packing
             model     whose gradient the passes add to; it must have none yet
             prepared  the rows of the mini-batch, with what was computed for their tokens, as PreparedRow
             gradient  makes the pass of one of them and returns something
    Returns: what `gradient` returned for each row. Raises ConfigError as Packing.halve.
    """
    while True:
        if longest_of(prepared) > learner.pack.capacity:
            prepared = carried_over(prepared, learner.rows(minibatch))
        try:
            return [gradient(given) for given in prepared]
        except torch.OutOfMemoryError as error:
            learner.pack.halve(longest_of(prepared), error)
        drop_gradient(model)  # not in the handler, where the error still holds what the pass had in memory


def longest_of(prepared: list) -> int:
    return max((len(given.row.ids_T) for given in prepared), default=0)


def drop_gradient(model: nn.Module) -> None:
    """Drop the gradient of passes of which the last broke off, and what FSDP2 remembers of that."""
    model.zero_grad()  # first: the reset keeps what a block's gathered weights have got
    model.reset_iter_state()
    model.zero_grad()


def carried_over(prepared: list, rows: list[Row]) -> list:
    """Give rows of the same completions what others have had computed for each token."""
    values: dict[tuple, Tensor] = {}
    for old in prepared:
        lengths = old.row.segment_C.bincount().tolist()
        for name in names_of(old):
            pieces = getattr(old, name).split(lengths)
            values |= {(name, *member): piece for member, piece in zip(old.row.members, pieces, strict=True)}
    return [replace(prepared[0], row=row, **{
        name: torch.cat([values[name, *member] for member in row.members]) for name in names_of(prepared[0])})
        for row in rows]


def names_of(prepared: object) -> list[str]:
    """Name the fields that hold a number for each token of the row, [C]."""
    return [f.name for f in fields(prepared) if isinstance(getattr(prepared, f.name), Tensor)]
