"""Give the models of a run their weights, and write a trained one out. A leaf may do so in its own way."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from infra.checkpoint import load_policy_into, read_extra
from infra.digests import hash_files
from infra.export import export
from infra.weights import load_weights, weight_files
from model import Decoder, load_model
from records import frozen
from settings import leaves


def hash_weights(files: list[Path]) -> str:
    """Identify weights by their files; each rank reads its own, since machines may have others. No hash is
    kept on disk: it could be older than its file."""
    return f"weights of sha256 {hash_files(files)[:16]}"


def unflatten(flat: dict[str, Any]) -> SimpleNamespace:
    """Make sections within sections of settings with dotted names, without their types."""
    whole = SimpleNamespace()
    for key, value in flat.items():
        *sections, name = key.split(".")
        section = whole
        for part in sections:
            section = vars(section).setdefault(part, SimpleNamespace())
        setattr(section, name, value)
    return whole


@frozen
class Weights:
    """How models come by their weights, and how the policy's leave the run."""

    def adapt(self, model: Decoder, dtype: torch.dtype) -> None:
        """Change an empty decoder before it is spread over the ranks: here it stays as it is."""

    def fill(self, model: Decoder, source: Path) -> None:
        """Load a folder's weights into a decoder that is spread over the ranks. Raises ConfigError."""
        load_weights(model, source)

    def initial(self, policy: Decoder) -> Callable | None:
        """Return the initial policy if it needs no weights of its own; None if it is to be loaded."""
        return None

    def identify(self, source: Path) -> dict[str, str]:
        """Identify the weights that a run begins with, by setting."""
        return {"model.path (weights)": hash_weights(weight_files(source))}

    def policy(self, path: str, folder: Path, dtype: torch.dtype) -> Decoder:
        """Load a model's folder on the CPU, and the policy of `path` if that is a checkpoint. Collective.
        Raises ConfigError."""
        return load_policy_into(path, load_model(folder, dtype, torch.device("cpu")))

    def export(self, model: nn.Module, source: Path, folder: Path, texts: dict[str, str]) -> None:
        """Write a Hugging Face folder as `infra.export` does. Collective."""
        export(model, source, folder, texts)


def weights_of(path: str | Path) -> Weights:
    """Return how the run that made a checkpoint treats weights; plainly for any other path."""
    return leaves.through("weights", unflatten(read_extra(path).get("config", {})), Weights())
