"""How a program ends: by a signal that asks it to stop, and with which exit status."""

import errno
import os
import signal
import stat
import sys
from collections.abc import Callable
from time import monotonic

import torch

from config import ConfigError
from infra import dist

LESS_MEMORY = ("for the update lower pack.capacity or model.logp_chunk, set model.checkpoint_blocks=all or "
               "optim.offload=true (CUDA), train an adapter (model.lora.rank) or on more ranks; for the "
               "rollout lower rollout.slots or rollout.cache_gib; train.py --fit tells what helps")
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class Stop:
    """SIGTERM, Ctrl-C or the end of its terminal (SIGHUP, unless nohup has it ignored) asks the run to finish
    its step, save and end; a second signal ends it at once.

    torchrun passes on a Ctrl-C that the terminal has sent to its workers already, so what follows within a
    second is still the first.
    """

    def __init__(self):
        self.signal, self.since = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.ask)

    def ask(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if not self.signal:
            self.signal, self.since = number, monotonic()
            print("stopping after this step, with a checkpoint; a second signal stops at once",
                  file=sys.stderr)
        elif monotonic() > self.since + 1:
            raise KeyboardInterrupt


def leave_terminal() -> None:
    """Write no more to a terminal: one that is closed makes an error of every line."""
    for stream in (sys.stdout, sys.stderr):
        if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def asked_to_stop(stop: Stop | None) -> bool:
    """Tell whether any rank received a stop signal. Collective."""
    return stop is not None and dist.max_over_ranks(stop.signal) > 0


def exit_status(program: Callable[[], int | None], remedy: str = "start it again") -> int:
    """Run a program to its exit status: its own or 0, 2 after what the user can mend, 130 after a signal,
    141 where nobody reads its output any more.

    `remedy` says what goes on with work that was stopped.
    """
    try:
        status = program() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has gone: `--show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its end
        return 128 + signal.SIGPIPE
    except ConfigError as error:
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
