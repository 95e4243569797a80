"""Hold many records outside of Python's objects, in one file that the ranks of a node share."""

import ctypes
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import numpy as np

from infra import dist
from settings.loader import ConfigError
from verify.errors import VerifyError


class Stored(Sequence):
    """Records in a file, mapped into memory. Each is read where it is asked for."""

    def __init__(self, path: str):
        self.bytes = np.memmap(path, mode="r")
        count, = self.bytes[-8:].view(np.int64)
        self.ends = self.bytes[-8 * count - 8:-8].view(np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int | slice) -> Any:
        place = range(len(self.ends))[place]
        if isinstance(place, range):
            return [self[i] for i in place]
        start = self.ends[place - 1] if place else 0
        return pickle.loads(self.bytes[start:self.ends[place]])


def store(records: Iterable) -> IO[bytes]:
    """Write records into a file that goes when it is closed: their bytes, where each ends, and how many."""
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115  others open it too
    ends = []
    for record in records:
        file.write(pickle.dumps(record, protocol=5))
        ends.append(file.tell())
    file.write(np.array([*ends, len(ends)], np.int64).tobytes())
    file.flush()
    return file


def once_a_node(make: Callable[[], tuple[list[Iterable], Any]]) -> tuple[list[Stored], Any]:
    """Call a function on the first rank of each node alone. All get its lists of records, stored, and all
    else that it returns; or its error, if the user can mend it. Collective."""
    files, made = [], []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            lists, others = make()
            files = [store(records) for records in lists]
            del lists
            getattr(ctypes.CDLL(None), "malloc_trim", abs)(0)  # else glibc keeps what the lists took
            made = [(dist.rank(), [file.name for file in files], others)]
        except (ConfigError, VerifyError, OSError) as error:
            made = [(dist.rank(), error, None)]
    # A node's ranks follow its first one.
    *_, (_, names, others) = (node for node in dist.gather(made) if node[0] <= dist.rank())
    if isinstance(names, Exception):
        raise names
    stored = list(map(Stored, names))
    dist.barrier()  # before the files are closed
    return stored, others
