"""Find Hugging Face folders, read their weights into a decoder, and write them, of whole and of sharded
models."""

import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor, nn

from config import ConfigError
from infra import dist
from settings import read_json

WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors")


def find_model(path: str) -> Path:
    """Return the folder of a model given as a folder or as a hub name, which is downloaded. Raises
    ConfigError."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise ConfigError(f"model.path={path!r} is neither a folder nor a model that the hub gives: "
                          f"{str(error).splitlines()[0]}") from error


def hf_name(name: str) -> str:
    """Name a decoder's parameter as Hugging Face does."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder with one safetensors file or with an index and shards."""
    index, single = (Path(folder) / name for name in WEIGHT_FILES)
    if index.is_file():
        shards = sorted(set(read_json(index)["weight_map"].values()))
    elif single.is_file():
        shards = [single.name]
    else:
        raise ConfigError(f"{folder} has no {' or '.join(WEIGHT_FILES)}; download the weights as safetensors")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        path = Path(folder) / shard
        if not path.is_file():
            raise ConfigError(f"{index} names {shard}, which is missing; download it again")
        tensors |= load_file(path)
    return tensors


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Fill a decoder, whole or sharded, from a folder.

    Raises ConfigError when a tensor is missing, left over or of another shape than config.json says.
    """
    tensors = read_weights(folder)
    if model.shape.tied:
        tensors.pop("lm_head.weight", None)  # some exports repeat the embedding
    expected = {hf_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    stored = {name: tuple(t.shape) for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    names = expected.keys() | stored.keys()
    differing = sorted(name for name in names if expected.get(name) != stored.get(name))
    if differing:
        name = differing[0]
        raise ConfigError(f"{folder}: weights do not match config.json at {len(differing)} tensors, e.g. "
                          f"{name}: file has {stored.get(name, 'nothing')}, config.json implies "
                          f"{expected.get(name, 'nothing')}")
    for name, p in model.named_parameters():
        p.copy_(dist.sharded_like(tensors[hf_name(name)], p))


def export(model: nn.Module, source: Path, folder: Path) -> None:
    """Write a Hugging Face folder: the weights, and everything else (config, tokenizer, template) as in
    `source`.

    All ranks of a sharded model must call it; rank 0 writes.
    """
    if dist.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(source).iterdir():
            copied = path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in WEIGHT_FILES
            if path.is_file() and copied:
                shutil.copyfile(path, folder / path.name)
    save_weights(model, folder)


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write safetensors in the dtype that config.json names, sharded with an index above 5 GB."""
    tensors = {}
    for name, t in model.named_hf_tensors():
        tensor = dist.full(t)
        if dist.rank() == 0:
            # A gathered tensor may be a view of padded memory, hence the copy.
            tensors[name] = tensor.to("cpu", model.shape.dtype, copy=True)
    if dist.rank() == 0:
        save_torch_state_dict(tensors, folder)
