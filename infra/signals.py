"""Stop a run at a signal, and turn errors into exit statuses."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from infra import dist
from infra.terminal import Plain
from settings.loader import ConfigError
from verify.errors import VerifyError

SAVE_MEMORY = ("for the update lower pack.capacity or model.logp_chunk, set model.checkpoint_blocks=all or "
               "optim.offload=true (CUDA), train an adapter (model.lora.rank) or on more ranks; for the "
               "rollout lower rollout.slots or rollout.cache_gib; train.py --fit tells what helps")


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
                os.write(2, b"stopping: samples under way are dropped, a step that trains is finished; a "
                            b"second signal stops at once\n")
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
        with suppress(Stopped):  # raised by a signal to this rank
            try:
                stop.sampling = alone
                if not (alone and stop.signal):
                    samples = generate(*args, **settings)
            finally:
                stop.sampling = False
        if asked_to_stop(stop):
            raise Stopped
        return samples

    engine.generate = generate_or_stop


def find_file(error: OSError) -> object:
    """Find the file of an error. One of reading or writing does not name it, but came through a function with
    its path."""
    frames = [frame.f_locals.values() for frame, _ in traceback.walk_tb(error.__traceback__)]
    paths = [value for values in reversed(frames) for value in values if isinstance(value, Path)]
    return error.filename or next(iter(paths), "a file")


def exit_status(
    program: Callable[[], int | None],
    remedy: Callable[[], str] = lambda: "start it again",
) -> int:
    """Run a program and return its exit status: its own or 0, 2 for a user's error, 130 after a signal.

    `remedy` tells how to go on with work that was stopped.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker of the verifier that imports the main program: stop
    with redirect_stdout(Plain(sys.stdout)), redirect_stderr(Plain(sys.stderr)):
        try:
            return program() or 0
        except (ConfigError, VerifyError) as error:
            status, said, remedy = 2, f"error: {error}", lambda: ""
        except ModuleNotFoundError as error:  # of a library for names on the hub, or of a leaf that is gone
            status, said, remedy = 2, f"error: {error}, which this command needs; install it", lambda: ""
        except torch.OutOfMemoryError as error:
            why = str(error).partition("\n")[0]
            status, said = 2, f"error: out of memory ({why}); {SAVE_MEMORY}; "
        except OSError as error:
            what = f"{error.strerror or error}: {str(find_file(error))!r}"
            status, said = 2, f"error: {what}; mend it, or make room there; "
        except KeyboardInterrupt:
            status, said = 130, "interrupted; "
        except Exception as error:
            if not dist.is_lost(error):
                print(f"once what follows is mended: {remedy()}", file=sys.stderr)
                raise
            status, said = 1, f"rank {dist.rank()} has lost another one: mend what that says; "
        finally:
            dist.close()
        print(said + remedy(), file=sys.stderr)
        return status
