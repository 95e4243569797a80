"""Call functions in worker processes that are bounded in time and memory and may be killed at any time."""

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.synchronize import Event
from multiprocessing.util import Finalize
from pathlib import Path

from pebble import CONSTS, ProcessExpired, ProcessPool

from verify.errors import VerifyError

PATIENCE = 10            # a call may take so many times its seconds by the clock, if it waits
WORKERS = max(1, min(32, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
CONSTS.term_timeout = 0.1  # seconds that pebble leaves a worker to end by SIGTERM, before it kills it
LIVENESS_SECONDS = 1.0               # seconds between two checks that the workers of a call live
RESTARTS = 10            # of a call, if workers die and it is not known which call they had


class OverLimit(Exception):
    """A limit ended a worker, or it ended itself; the text says how: TIME, MEMORY, or another."""


TIME, MEMORY = "too long", "too much memory"


@dataclass(frozen=True, slots=True)
class Limits:
    """The time and memory of a call, and the number of workers for the calls of one purpose."""

    purpose: str
    size: int     # bytes of memory beyond a new worker's
    workers: int
    seconds: float = field(compare=False)  # of computing; calls of any length share the workers
    settings: tuple[str, str] = ("", "")   # the names of those that set seconds and size


POOLS: dict[Limits, ProcessPool] = {}


def workers(limits: Limits) -> ProcessPool:
    """Return the workers for calls under these limits; the first call starts them."""
    if limits in POOLS:
        return POOLS[limits]
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker that imports the main program: stop; Call.awaited says why to the user
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main and not Path(main).is_file():  # `python - < program`: no worker could ever start
        raise VerifyError(f"the verifier's processes import the main program, and {main} is no file; "
                          "run it from one")
    # A killed worker is replaced by a fork of a process that has done the slow imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verify.algebra", *({"torch"} & sys.modules.keys())])
    before, path = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), os.environ.get("PYTHONPATH")
    # The process that starts the workers imports from the current folder and PYTHONPATH alone.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), path]))
    try:  # so that a signal to the process group does not end it
        started = context.Event()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the event's helper process has lifted it
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    pool = ProcessPool(max_workers=limits.workers, context=context, initializer=prepare_worker,
                       initargs=(started, limits.size))
    pool.started = started
    if not POOLS:  # before their semaphores, and not by atexit, which no child process calls
        Finalize(None, stop_workers, exitpriority=1)
    return POOLS.setdefault(limits, pool)


def stop_workers() -> None:
    """End all workers. A process that ends waits for them, and they heed no signal to stop."""
    while POOLS:
        _, pool = POOLS.popitem()
        pool.stop()
        pool.join()


def prepare_worker(started: Event, size: int) -> None:
    """Limit this worker to `size` bytes beside those it has: CUDA's libraries alone take many.

    It prints to stderr, because stdout belongs to the program. It ignores the signals that stop the program:
    else its call would count as dead, and the program decides by itself when to stop.
    """
    started.set()
    import verify.algebra  # noqa: F401, which takes a second of a call if nothing was preloaded (`python -I`)
    for ending in STOP_SIGNALS:
        signal.signal(ending, lambda *_: None)  # unlike SIG_IGN not inherited by a child process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = used + size if allowed == resource.RLIM_INFINITY else min(used + size, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(2, 1)
    leave = os._exit
    os._exit = lambda status: leave(status or 1)  # pebble would wait for ever for a worker that exits with 0


def call_with_alarm(function: Callable, seconds: float, *args: object) -> object:
    """Call a function in this worker, and end the worker after `seconds` of computing.

    An alarm without a handler ends the process at once, even in the middle of a power of integers, and even
    if the trainer has died and cannot kill its workers.
    """
    set_alarm(seconds)
    try:
        return function(*args)
    finally:
        set_alarm(0)


def set_alarm(seconds: float) -> None:
    """Allow this worker so many more seconds of computing; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class Call:
    """Call a function in a worker. The call starts at once, and `result` waits for it."""

    def __init__(self, function: Callable, *args: object, limits: Limits):
        self.limits = limits
        self.args = function, limits.seconds, *args
        self.start()

    def start(self) -> None:
        self.pool = workers(self.limits)
        timeout = PATIENCE * max(1, self.limits.seconds)
        try:
            self.future = self.pool.schedule(call_with_alarm, args=self.args, timeout=timeout)
        except RuntimeError:  # an idle worker was killed from outside, and pebble gives up the whole pool
            del POOLS[self.limits]
            self.pool.stop()
            self.pool.join()  # else its threads and semaphores stay
            self.start()

    def result(self) -> object:
        """Return the function's value. Raises its exceptions, OverLimit, and VerifyError if no worker lives
        long enough to take the call."""
        try:
            return self.awaited()
        finally:
            self.pool = None  # the cache of verdicts must not keep a pool that has been replaced

    def awaited(self) -> object:
        for _ in range(RESTARTS):
            try:
                while not wait([self.future], LIVENESS_SECONDS).done:
                    if not self.pool.active:  # it has forgotten this call
                        raise BrokenProcessPool
                return self.future.result()
            except ProcessExpired as error:
                how = f"signal {-error.exitcode}" if error.exitcode < 0 else "an exit of its own"
                raise OverLimit(TIME if error.exitcode == -signal.SIGPROF else how) from error
            except (TimeoutError, MemoryError) as error:
                raise OverLimit(MEMORY if isinstance(error, MemoryError) else TIME) from error
            except BrokenProcessPool:  # a worker has died, and it is not known which call it had
                if self.pool and not self.pool.started.is_set():
                    main = getattr(sys.modules["__main__"], "__file__", "the main program")
                    raise VerifyError(f"no process of the {self.limits.purpose} lives to take a call: each "
                                      f"imports {main}, which must run what it runs under "
                                      "`if __name__ == \"__main__\":`") from None
                self.start()
        raise OverLimit("its workers are ended from outside")
