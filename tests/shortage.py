"""Let memory run out in the middle of a row, forward or backward, within a block of the model."""

from contextlib import contextmanager

import pytest
import torch

import model as decoder

LESS = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSecond line")


@contextmanager
def short_of_memory(rows: set[int], where: str):
    """Let memory run out in these passes with gradient, counted from 0, of a row through the first block."""
    passed, attention = [], decoder.BACKENDS["sdpa"]

    def refuse(*given) -> None:
        raise LESS

    def backend(segments):
        attend = attention(segments)

        def attend_or_not(layer, q, k, v, window):
            out = attend(layer, q, k, v, window)
            again = torch._C._current_graph_task_id() != -1  # in backward, where blocks are recomputed
            if layer == 0 and torch.is_grad_enabled() and not again:
                passed.append(layer)
                if len(passed) - 1 in rows and where == "forward":
                    refuse()
                if len(passed) - 1 in rows:
                    out.register_hook(refuse)
            return out

        return attend_or_not

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decoder.BACKENDS, "sdpa", backend)
        yield passed
