"""Try a file of unknown origin in a child process first: what it asks for is bounded in time and memory."""

import faulthandler
import gc
import os
import signal
from collections.abc import Callable
from typing import Any

from settings.loader import ConfigError
from verify.workers import prepare_worker, set_alarm

SECONDS, GIB = 15, 4  # of computing, and of memory beside what the program has
PATIENCE = 10  # times as many seconds by the clock


def try_first(what: object, function: Callable, *given: object, seconds: float = SECONDS) -> Any:
    """Call a function in a child process, whose result and errors are dropped, and then here.

    Raises ConfigError if the child needs more time or memory (PATIENCE times as long by the clock), or the
    call ends it.
    """
    child = os.fork()
    if child == 0:
        status = 3
        try:
            faulthandler.disable()  # a child that has to be ended is no crash of the program's
            gc.disable()  # to free what owns threads is to wait for them, and they have stayed behind
            signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            prepare_worker(GIB << 30)
            os.dup2(2, 1)
            set_alarm(seconds)
            function(*given)
            status = 1
        except MemoryError:
            pass
        except Exception:  # the caller meets it too
            status = 1
        finally:
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 1:
        raise ConfigError(f"{what} takes more than {seconds:.0f} s of computing or {GIB} GiB of memory, or "
                          "ends the process that reads it; take another one")
    return function(*given)
