"""Turn the errors and signals that end a program into its exit status."""

import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from infra import dist
from infra.terminal import Plain, to_stderr
from settings.loader import ConfigError, in_short
from verify.errors import VerifyError

SAVE_MEMORY = ("for the update lower pack.capacity or model.logp_chunk, set model.checkpoint_blocks=all or "
               "rollout.sleep=always (vLLM) or optim.offload=true (CUDA), train an adapter (model.lora.rank) "
               "or on more ranks; for the rollout lower rollout.slots or rollout.cache_gib; train.py --fit "
               "tells what helps")


def find_file(error: OSError) -> object:
    """Find the file of an error. One of reading or writing does not name it, but came through a function with
    its path."""
    frames = [frame.f_locals.values() for frame, _ in traceback.walk_tb(error.__traceback__)]
    paths = [value for values in reversed(frames) for value in values if isinstance(value, Path)]
    return error.filename or next(iter(paths), "a file")


def exit_status(
    program: Callable[[], int | None],
    remedy: Callable[[], str] = lambda: "start it again"
) -> int:
    """Run a program and return its exit status: its own or 0, 2 for a user's error, 130 after a signal.

    `remedy` tells how to go on with work that was stopped.
    """
    with redirect_stdout(Plain(sys.stdout)), redirect_stderr(Plain(sys.stderr)):
        try:
            return program() or 0
        except (ConfigError, VerifyError) as error:
            status, said, remedy = 2, f"error: {error}", str
        except ModuleNotFoundError as error:  # of a library for names on the hub, or of a leaf that is gone
            missing = "put that folder back" if str(error.name).startswith("leaves.") else "install it"
            status, said, remedy = 2, f"error: {error}, which this command needs; {missing}", str
        except torch.OutOfMemoryError as error:
            status, said = 2, f"error: out of memory ({in_short(error)}); {SAVE_MEMORY}; "
        except OSError as error:
            what = f"{error.strerror or error}: {str(find_file(error))!r}"
            status, said = 2, f"error: {what}; mend it, or make room there; "
        except KeyboardInterrupt:
            status, said = 130, "interrupted; "
        except Exception as error:
            if not dist.is_lost(error):
                to_stderr(f"once what follows is mended: {remedy()}")
                raise
            status, said = 1, f"rank {dist.rank()} has lost another one: mend what that says; "
        finally:
            dist.close()
        to_stderr(said + remedy())
        return status
