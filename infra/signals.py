"""How a program ends: by a signal that asks it to stop, and with which exit status."""

import errno
import io
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

LESS_MEMORY = ("for the update lower pack.capacity or model.logp_chunk, set model.checkpoint_blocks=all or "
               "optim.offload=true (CUDA), train an adapter (model.lora.rank) or on more ranks; for the "
               "rollout lower rollout.slots or rollout.cache_gib; train.py --fit tells what helps")
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and ends as of the last step that was done."""


class Stop:
    """SIGTERM, Ctrl-C or the end of its terminal (SIGHUP, unless nohup has it ignored) asks the run to save
    and end: at once while it samples, and after the step while it trains. A second signal ends it at once.

    torchrun passes on a Ctrl-C that the terminal has sent to its workers already, so what follows within a
    second is still the first.
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
    """Make `engine.generate`, which all ranks call, raise Stopped on all once any is asked to stop; what they
    have sampled is dropped. Ranks that sample in lock-step, not each `alone`, come to the end of it first."""
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


class Terminal(io.FileIO):
    """A terminal that may be closed: what is written to it from then on goes nowhere, and is no error."""

    def write(self, text: Any) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(text)


def outlive_terminal() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty():
            lasting = io.BufferedWriter(Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(lasting, stream.encoding, stream.errors, line_buffering=True))


def exit_status(program: Callable[[], int | None], remedy: str = "start it again") -> int:
    """Run a program to its exit status: its own or 0, 2 after what the user can mend, 130 after a signal,
    141 where nobody reads its output any more. `remedy` says what goes on with work that was stopped.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker of the verifier, and its import of the main program has come here
    outlive_terminal()
    try:
        status = program() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has gone: `--show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        return 128 + signal.SIGPIPE
    except (ConfigError, VerifyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        why = str(error).partition("\n")[0]
        print(f"error: out of memory ({why}); {LESS_MEMORY}; {remedy}", file=sys.stderr)
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
