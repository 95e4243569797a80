"""Hosts, which have loaded all that calls need, and their forks (workers.py).

All that a call has started ends with its worker, and everything with the program.
"""

import ctypes
import gc
import os
import pickle
import resource
import signal
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from selectors import EVENT_READ, PollSelector
from socket import recv_fds, socket

from verify.workers import HOST, MEMORY, WORKER, prepare_worker, set_alarm

PDEATHSIG, SUBREAPER = 1, 36  # of prctl(2)


def serve(channel: int, *kept: int) -> None:
    """Be a host: answer a first call, which gets it ready, then fork for the program. No fork gets the files
    that are `kept`."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    ctypes.CDLL(None).prctl(SUBREAPER, 1)  # it inherits the children of a fork that ends
    allowed, program = resource.getrlimit(resource.RLIMIT_AS), Connection(channel)
    answer(program)
    resource.setrlimit(resource.RLIMIT_AS, (allowed[1], allowed[1]))
    gc.freeze()  # memory stays shared with the forks
    Forks(channel, kept).run()


def answer(program: Connection) -> None:
    """Answer one call. Raises EOFError if the program has ended."""
    process, asked = os.getpid(), program.recv_bytes()
    try:
        function, given, seconds = pickle.loads(asked)
        set_alarm(seconds)
        said = True, function(*given)
    except MemoryError:
        said = False, MEMORY
    except BaseException as error:  # the program may not have its class
        said = False, f"{type(error).__name__}: {error}"
    if os.getpid() != process:  # the function has forked: its child must not answer too
        os._exit(0)
    program.send(said)
    set_alarm(0)


class Forks:
    """The workers of a host, or the hosts that the first one has forked."""

    def __init__(self, program: int, kept: tuple[int, ...]):
        self.program, self.kept = socket(fileno=program), kept
        self.place = Path(f"/proc/self/task/{os.getpid()}/children")
        self.known = self.children()  # forks, and processes started while this got ready
        self.selector = PollSelector()
        self.selector.register(self.program, EVENT_READ, self.fork)

    def children(self) -> set[int]:
        return {*map(int, self.place.read_text().split())}

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fd in self.selector.get_map():  # no fork that has just been buried
                    key.data()

    def fork(self) -> None:
        kind, files, *_ = recv_fds(self.program, 64, 2)
        if not files:  # the program has ended, or needs this host no more
            self.known.clear()
            self.end_strays()
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            try:
                self.be(kind.decode(), *files)
            finally:
                os._exit(1)
        self.known.add(pid)
        os.close(files[0])
        fate, ended = socket(fileno=files[1]), os.pidfd_open(pid)
        self.selector.register(fate, EVENT_READ, partial(os.kill, pid, signal.SIGKILL))
        self.selector.register(ended, EVENT_READ, partial(self.bury, pid, fate, ended))
        with suppress(OSError):  # the program has ended
            fate.send(str(pid).encode())

    def be(self, kind: str, channel: int, fate: int) -> None:
        """Be a worker or a host, in a fork."""
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
        os.setsid()
        for file in (fate, *self.kept, *self.selector.get_map()):
            os.close(file)
        prepare_worker(int(kind[1:]), lasting=kind[0] == WORKER)
        if kind[0] == HOST:
            serve(channel)
        program = Connection(channel)
        while True:
            answer(program)

    def bury(self, pid: int, fate: socket, ended: int) -> None:
        """Tell the program how a fork has ended, and end all that it has started."""
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.known.remove(pid)
        self.end_strays()
        for place in (fate, ended):
            self.selector.unregister(place)
        os.close(ended)
        with fate, suppress(OSError):
            fate.send(str(status).encode())

    def end_strays(self) -> None:
        while strays := self.children() - self.known:
            for pid in strays:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
