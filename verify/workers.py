"""Call functions in worker processes that are bounded in time and memory and may be killed at any time.

A worker is a fork of a host (host.py), a process that has loaded all that its calls need. Hosts are forks of
one that has done the slow imports. A thread of this program waits for each call.
"""

import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from socket import (
    AF_UNIX,
    SHUT_WR,
    SO_RCVTIMEO,
    SOCK_SEQPACKET,
    SOCK_STREAM,
    SOL_SOCKET,
    fromfd,
    send_fds,
    socket,
    socketpair,
)
from struct import pack
from threading import Lock, Thread
from time import monotonic

from verify.errors import VerifyError

WORKERS = max(1, min(32, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
LOADING = 30.0  # seconds of computing, and of waiting, in which a host must be ready
STALLED = 5     # seconds in which no more comes of half an answer
LIBRARIES = 8 << 30  # bytes that a host may take beside a call's: CUDA's libraries map many
HOSTS = 8       # beyond them the oldest ends
HOST, WORKER = "h", "w"
TIME, MEMORY = "too long", "too much memory"
# A fork has no threads of these libraries; and a call lists a set in the same order in every run.
FIXED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class OverLimit(Exception):
    """A limit ended a worker, or it ended itself; the text says how: TIME, MEMORY, or another."""


class Killed(Exception):
    """A worker or its host was killed, and it may be another call that has done it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The time and memory of a call, and the workers for the calls that share a host."""

    size: int     # bytes of memory beyond a new worker's
    workers: int
    seconds: float = field(compare=False)  # of computing, and of waiting; calls of any length share a host
    prepare: tuple = (os.getpid,)  # a function and its arguments, called in the host before any call
    ahead: str = __name__  # a module that takes long to import; a fork takes the longer the more there is
    once: bool = False   # each call has a worker of its own, and sees nothing of another call


def call(function: Callable, *given: object, limits: Limits) -> Future:
    """Call a function of a module in a worker, as soon as one is free.

    The future raises OverLimit, RuntimeError for an exception of the function's, and VerifyError if no worker
    can be started.
    """
    if limits not in POOLS:
        if len(POOLS) == HOSTS:
            POOLS.pop(next(iter(POOLS))).asked.put(None)  # its threads end after all that is asked
        POOLS[limits] = Pool(limits)
    return POOLS[limits].call(function, given, limits.seconds)


class Pool:
    """A host, and threads that wait for a worker of it each."""

    def __init__(self, limits: Limits):
        self.limits, self.host = limits, None
        self.lock, self.asked, self.threads = Lock(), SimpleQueue(), []

    def call(self, *asked: object) -> Future:
        future = Future()
        self.asked.put((future, asked))
        if len(self.threads) < self.limits.workers:
            self.threads.append(Thread(target=self.answer, daemon=True))
            self.threads[-1].start()
        return future

    def answer(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited by what it starts; others get them
        worker = None
        while waiting := self.asked.get():
            future, asked = waiting
            try:
                try:
                    worker = worker or Fork(self.living_host(), WORKER, self.limits.size)
                    future.set_result(worker.ask(*asked))
                except Killed:
                    worker = worker and worker.close()
                    future.set_result(self.ask_alone(*asked))
            except BaseException as error:  # is raised where the result is read
                future.set_exception(error)
            if worker and (self.limits.once or future.exception()):
                worker = worker.close()
        if worker:
            worker.close()
        self.threads.pop()
        if self.threads:
            self.asked.put(None)
        elif self.host:
            self.host.close()

    def ask_alone(self, *asked: object) -> object:
        """Make a call once more, in a host that has no other."""
        try:
            with closing(start_host(self.limits)) as host:
                return Fork(host, WORKER, self.limits.size).ask(*asked)
        except Killed:
            raise OverLimit("signal 9") from None

    def living_host(self) -> "Fork":
        with self.lock:
            if self.host and wait([self.host.fate], 0):  # it has ended
                self.host = self.host.close()
            self.host = self.host or start_host(self.limits)
            return self.host


class Fork:
    """A process that a host has forked. The host says in `fate` how it ends, and ends it when that closes."""

    def __init__(self, parent: "Fork", kind: str, size: int):
        self.channel, self.fate, *theirs = connect()
        control = fromfd(parent.channel.fileno(), AF_UNIX, SOCK_STREAM)
        with theirs[0], theirs[1], control, suppress(OSError):  # the parent has ended, as the next line sees
            send_fds(control, [f"{kind}{size}".encode()], [place.fileno() for place in theirs])
        if not (pid := self.fate.recv(64)):
            self.close()
            raise Killed
        self.pid = int(pid)

    def ask(self, function: Callable, given: tuple, seconds: float) -> object:
        """Call a function there, and return its value. Raises OverLimit, RuntimeError and Killed."""
        try:
            self.channel.send((function, given, seconds))
            if not is_ready(seconds, self.pid, self.channel, self.fate):
                raise OverLimit(TIME)
            if not self.channel.poll():
                raise EOFError  # it has ended, and a child of it holds the channel
            answer = self.channel.recv_bytes()
        except BlockingIOError as error:
            raise OverLimit("half an answer") from error
        except (EOFError, OSError):
            self.fate.shutdown(SHUT_WR)  # asks the host to end it, if it has closed the channel and lives on
            status = int(self.fate.recv(64) or -signal.SIGKILL)
            if status == -signal.SIGKILL:
                raise Killed from None
            raise OverLimit(how(status)) from None
        try:
            good, value = pickle.loads(answer)
        except Exception as error:  # the function has written to the channel itself
            raise OverLimit("an answer that cannot be read") from error
        if good:
            return value
        raise OverLimit(MEMORY) if value == MEMORY else RuntimeError(value)

    def close(self) -> None:
        """End it, and all that it has started."""
        self.channel.close()
        self.fate.close()


class Root(Fork):
    """The process that forks the hosts which need the same module. It ends when this program does."""

    def __init__(self, ahead: str):
        self.channel, self.fate, *theirs = connect()
        files = [place.fileno() for place in theirs]
        start = ("import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from verify import host; "
                 f"host.serve(*{files})")
        with theirs[0], theirs[1]:
            process = subprocess.Popen(  # in a session of its own, so no signal to ours reaches it
                [sys.executable, "-c", start], env=os.environ | FIXED, stdin=subprocess.PIPE, stdout=2,
                pass_fds=files, start_new_session=True)
        with suppress(BrokenPipeError), process.stdin as given:
            pickle.dump([*sys.path, str(Path(__file__).parents[1])], given)
        self.pid, self.process = process.pid, process
        self.ask(import_ahead, (ahead,), LOADING)


def fork_root(limits: Limits) -> Fork:
    """Fork the first process, which is started anew if it has been killed."""
    ahead = limits.ahead
    if ahead not in ROOTS or wait([ROOTS[ahead].fate], 0):
        try:
            ROOTS[ahead] = Root(ahead)
        except (OverLimit, Killed, RuntimeError) as error:
            raise VerifyError(f"no worker can be started: {str(error) or 'it is killed'}") from None
    return Fork(ROOTS[ahead], HOST, limits.size + LIBRARIES)


def start_host(limits: Limits) -> Fork:
    """Start a host, and let it get ready. Raises as `call` does, and Killed."""
    with STARTING:
        try:
            host = fork_root(limits)
        except Killed:  # before it was asked
            del ROOTS[limits.ahead]
            host = fork_root(limits)
    function, *given = limits.prepare
    try:
        host.ask(function, given, LOADING)
        return host
    except OverLimit as error:
        why = f"taking more than {LOADING:g} s to load" if str(error) == TIME else str(error)
        raise OverLimit(why) from None


POOLS: dict[Limits, Pool] = {}
ROOTS: dict[str, Root] = {}  # a module -> the process that has imported it
STARTING = Lock()
for started in (POOLS, ROOTS):  # a fork starts anew, because threads and processes are the parent's
    os.register_at_fork(after_in_child=started.clear)


def import_ahead(name: str) -> None:
    importlib.import_module(name)  # no module can be sent back


def connect() -> tuple[Connection, socket, socket, socket]:
    """Make two pairs of sockets, for calls and for the end of a process: our ends, and its ends."""
    (ours, theirs), (fate, told) = socketpair(), socketpair(AF_UNIX, SOCK_SEQPACKET)
    ours.setsockopt(SOL_SOCKET, SO_RCVTIMEO, pack("ll", STALLED, 0))
    return Connection(ours.detach()), fate, theirs, told


def how(status: int) -> str:
    """Say how a process ended by itself."""
    if status == -signal.SIGPROF:
        return TIME
    return f"signal {-status}" if status < 0 else "an exit of its own"


def is_ready(seconds: float, pid: int, *places: object) -> bool:
    """Wait until there is something to read in one of the places. False if the process has waited for so many
    seconds, at least one, or has computed for longer than them in spite of its alarm.

    To queue for a processor is neither, so a busy machine changes nothing.
    """
    start, most, waited = monotonic(), max(1.0, seconds), 0.0
    had_before, queued_before, _ = measure(pid)
    while not wait(places, max(0.01, most - waited)):
        had, queued, runs = measure(pid)
        had, queued = had - had_before, queued - queued_before
        waited = monotonic() - start - had - queued
        if waited >= most and not runs or had >= seconds + 1:
            return bool(wait(places, 0))
    return True


def measure(pid: int) -> tuple[float, float, bool]:
    """Measure the seconds that a process and its descendants had a processor and that they queued for one,
    and tell whether one does now."""
    had, queued, runs, family = 0, 0, False, [pid]
    for member in family:  # which grows
        for task in Path(f"/proc/{member}/task").glob("*"):
            with suppress(OSError):  # it has ended
                times = (task / "schedstat").read_text().split()
                had, queued = had + int(times[0]), queued + int(times[1])
                runs |= ") R " in (task / "stat").read_text()
                family += (task / "children").read_text().split()
    return had / 1e9, queued / 1e9, runs


# ---- in a worker

def prepare_worker(size: int, lasting: bool = True) -> None:
    """Limit this process, for good if `lasting`, to `size` bytes beside those it has.

    It ignores the signals that stop the program, which decides by itself when to stop.
    """
    for ending in STOP_SIGNALS:
        signal.signal(ending, lambda *_: None)  # unlike SIG_IGN not inherited by a child process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = used + size if allowed == resource.RLIM_INFINITY else min(used + size, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most if lasting else allowed))


def set_alarm(seconds: float) -> None:
    """Allow this process so many more seconds of computing; 0: no limit.

    An alarm without a handler ends it at once, even in the middle of a power of integers.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
