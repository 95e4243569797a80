"""Stop a run at a signal."""

import os
import signal
from contextlib import suppress
from time import monotonic
from typing import Any

from infra import dist


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

    def generate_or_stop(*args, **settings):
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
