"""What tests call in workers: a module that imports nothing slow."""

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path


def ancestors() -> list[int]:
    """This process, its parent, and the parent of that."""
    line = [os.getpid()]
    for _ in range(2):
        line.append(int(Path(f"/proc/{line[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
    return line


def state() -> tuple:
    """What a call finds: folder, environment, a signal, threads, limits and files."""
    return (os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGPROF), threading.active_count(),
            resource.getrlimit(resource.RLIMIT_NOFILE), sys.getrecursionlimit(), len(os.listdir("/proc/self/fd")))


def leave_behind() -> tuple[int, int]:
    """Start a process in a session of its own, whose parent has ended; returns its pid and that of the host."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            time.sleep(600)
        os.write(writer, str(pid).encode())
        os._exit(0)
    return int(os.read(reader, 64)), os.getppid()
