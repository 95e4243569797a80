"""Stop a run at a signal, and turn errors into exit statuses."""

import errno
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import torch

from config import ConfigError
from infra import dist
from verify.errors import VerifyError

SAVE_MEMORY = ("for the update lower pack.capacity or model.logp_chunk, set model.checkpoint_blocks=all or "
               "optim.offload=true (CUDA), train an adapter (model.lora.rank) or on more ranks; for the "
               "rollout lower rollout.slots or rollout.cache_gib; train.py --fit tells what helps")
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop; it ends with the last finished step."""


class Stop:
    """Ask the run to save and end at SIGTERM, Ctrl-C (SIGINT) or SIGHUP, unless nohup has SIGHUP ignored.

    A run that samples ends at once, one that trains after the step. A second signal ends it at once; torchrun
    repeats a Ctrl-C that its workers have got already, so a signal within a second of the first is no second.
    """

    def __init__(self):
        self.signal, self.since, self.sampling = 0, 0.0, False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.ask)

    def ask(self, number: int, frame: object) -> None:
        if not self.signal:
            self.signal, self.since = number, monotonic()
            with suppress(OSError):  # not by print, which cannot be called while it is at work
                os.write(2, b"stopping: samples under way are dropped, a step that trains is finished and "
                            b"saved; a second signal stops at once\n")
        elif monotonic() > self.since + 1:
            raise KeyboardInterrupt
        if self.sampling:
            self.sampling = False
            raise Stopped


def asked_to_stop(stop: Stop | None) -> bool:
    """Tell whether any rank received a stop signal. Collective."""
    return stop is not None and dist.max_over_ranks(stop.signal) > 0


def stop_engine(engine: Any, stop: Stop | None, alone: bool) -> None:
    """Make `engine.generate` raise Stopped on all ranks once one of them is asked to stop.

    Samples under way are dropped. Ranks that sample in lock-step, not each `alone`, finish it first.
    """
    if stop is None:
        return
    generate = engine.generate

    def generate_or_stop(*args: Any, **settings: Any) -> Any:
        samples = None
        try:
            try:
                stop.sampling = alone
                if not (alone and stop.signal):
                    samples = generate(*args, **settings)
            finally:
                stop.sampling = False
        except Stopped:  # raised by a signal to this rank
            pass
        if asked_to_stop(stop):
            raise Stopped
        return samples

    engine.generate = generate_or_stop


def exit_status(program: Callable[[], int | None], remedy: str = "start it again") -> int:
    """Run a program and return its exit status: its own or 0, 2 for a user's error, 130 after a signal.

    `remedy` tells how to go on with work that was stopped.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker of the verifier that imports the main program: stop
    try:
        return program() or 0
    except (ConfigError, VerifyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        why = str(error).partition("\n")[0]
        print(f"error: out of memory ({why}); {SAVE_MEMORY}; {remedy}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        print(f"error: {error}; make room or allow writing there; {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {remedy}", file=sys.stderr)
        return 130
    finally:
        dist.close()
