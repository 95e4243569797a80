"""Find Hugging Face folders, and read their shape and weights, whole or sharded."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from infra import dist
from infra.digests import LIST, find_changed, read_list
from infra.families import Shape, shape_of
from infra.trial import try_first
from settings.loader import ConfigError, convert, in_short, read_json
from settings.paths import find_path, searched

WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def find_model(path: str, files: tuple[str, ...] = ("*.json", "*.jinja", "*.safetensors"),
               setting: str = "model.path") -> Path:
    """Return the folder of a model that a setting names. If `path` is a hub name, these files are downloaded.
    Raises ConfigError."""
    folder = find_path(path)
    if (folder / "extra.pt").is_file():
        raise ConfigError(f"{setting}={path} is a checkpoint, not a Hugging Face folder; make one of it by "
                          f"python learner.py {path} --out DIR")
    ours = folder.is_dir()
    if not ours:
        folder = download(path, files, setting)
    if not (folder / "config.json").is_file():
        remedy = "give a Hugging Face folder or a hub name"
        if (folder / "adapter_config.json").is_file():
            remedy = "it is an adapter: set model.lora.path to it, and model.path to its base, or merge both"
        raise ConfigError(f"{setting}={path} has no config.json; {remedy}")
    if ours:
        require_own_files(folder)
        if any((folder / name).is_file() for name in WEIGHT_FILES):
            try_first(folder, check_sizes, folder)
    return folder


def download(path: str, files: tuple[str, ...], setting: str) -> Path:
    """Download these files of a model on the hub. Raises ConfigError."""
    from huggingface_hub import snapshot_download  # for names alone
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=files))
    except HFValidationError:
        raise ConfigError(f"{setting}={path} is no folder ({searched()}), nor a name on the hub") from None
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise ConfigError(f"{setting}={path!r} is no folder, and could not be downloaded from the hub: "
                          f"{in_short(error)}") from error


def require_own_files(folder: Path, weights: bool = False) -> None:
    """Raise ConfigError for a link that leaves a folder, but for the hub's cache, or a file that is not as
    its export wrote it (files.json). Weights alone are compared with that list, or all others."""
    root = folder.resolve()
    for path in folder.iterdir():
        file = Path(os.path.realpath(path))  # resolve() raises RuntimeError for links in a circle
        if not file.is_relative_to(root) and not file.is_relative_to(root.parent.parent / "blobs"):
            raise ConfigError(f"{path} is a link to {file}, outside of its folder; put the file there itself")
    names = [name for name in read_list(folder) if name.endswith(".safetensors") == weights]
    damage = find_changed(folder, names)
    if (folder / LIST).exists() and damage:
        raise ConfigError(f"{folder}: {damage}; export it again, or remove {LIST} to take it as it is")


def read_shape(folder: Path) -> Shape:
    """Read config.json. Raises ConfigError for a model that this decoder does not compute."""
    path = folder / "config.json"
    try:
        return shape_of(read_json(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; mend it, download it again, or take another model") from None


def check_positions(folder: Path, tokens: int, settings: str) -> None:
    """Raise ConfigError if `settings` allow sequences of more `tokens` than the model takes."""
    limit = read_shape(folder).max_positions
    if tokens > limit:
        raise ConfigError(f"{settings} allow sequences of {tokens} tokens, but {folder} has "
                          f"max_position_embeddings={limit}; lower them")


def check_sizes(folder: Path) -> None:
    """Raise ConfigError if the weights have other sizes than config.json says: memory for these might not be
    there, or loading take days. Reads only the headers of the files."""
    shape = read_shape(folder)
    slices = read_weights(folder, shape.tied, whole=False)
    last = f"model.layers.{shape.layers - 1}."
    expected = {
        EMBEDDING: [shape.vocab_size, shape.hidden_size],
        f"{last}mlp.down_proj.weight": [shape.hidden_size, shape.intermediate_size],
        f"{last}self_attn.q_proj.weight": [shape.head_dim * shape.heads, shape.hidden_size],
    }
    for name, size in expected.items():
        stored = slices[name].get_shape() if name in slices else "nothing"
        if stored != size:
            raise ConfigError(
                f"{folder}: weights do not match config.json: {name} is {stored}, where it says {size}")


def weight_files(folder: Path) -> list[Path]:
    """List the weights of a folder: one safetensors file, or the shards that its index names. Raises
    ConfigError."""
    index, single = (folder / name for name in WEIGHT_FILES)
    if index.is_file():
        named = read_json(index).get("weight_map")
        try:
            shards = sorted(set(convert(named, dict[str, str], "weight_map").values()))
        except ConfigError as error:
            raise ConfigError(f"{index}: {error}; mend it, or download it again") from None
        if not shards:
            raise ConfigError(f"{index} names no weights; download it again")
    elif single.is_file():
        shards = [single.name]
    else:
        raise ConfigError(f"{folder} has no {' or '.join(WEIGHT_FILES)}; download the weights as safetensors")
    for shard in shards:
        if Path(shard).name != shard or not os.path.isfile(folder / shard):
            raise ConfigError(f"{index} names {shard[:200]}, which is missing there; download it again")
    others = [path.name for path in sorted(folder.glob("*.safetensors"))
              if path.name not in shards and not path.name.startswith("consolidated")]  # Mistral's own copy
    if (folder / "adapter_config.json").is_file():  # transformers would add it
        others.append("adapter_config.json")
    if others:
        raise ConfigError(f"{folder} holds {shards[0]} and {others[0]}, and a model has one set of weights; "
                          "keep those that are meant in a folder of their own")
    return [folder / shard for shard in shards]


def read_tensors(files: list[Path], whole: bool = True) -> dict[str, Any]:
    """Read all tensors of safetensors files, or only the headers, as slices with a `get_shape`. Raises
    ConfigError."""
    tensors = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name in tensors:
                        raise ConfigError(
                            f"{path}: {name} is in another file too; download the weights again")
                    tensors[name] = file.get_tensor(name) if whole else file.get_slice(name)
        except SafetensorError as error:
            raise ConfigError(
                f"{path} cannot be read ({in_short(error)}); download or write it again") from None
    return tensors


def compare_shapes(stored: Iterable[tuple[str, Tensor]], expected: Iterable[tuple[str, Tensor]]) -> str:
    """Say in which tensors two lists differ, by name and shape; empty if in none."""
    there, here = ({name: tuple(t.shape) for name, t in tensors} for tensors in (stored, expected))
    wrong = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if not wrong:
        return ""
    name = wrong[0]
    return (f"{len(wrong)} tensors, e.g. {name}: {there.get(name, 'nothing')} there and "
            f"{here.get(name, 'nothing')} here")


def read_weights(folder: Path, tied: bool, whole: bool = True) -> dict[str, Any]:
    """Read the tensors of a folder, as `read_tensors`. A tied matrix may be stored under either name."""
    tensors = read_tensors(weight_files(folder), whole)
    if tied and EMBEDDING not in tensors and HEAD in tensors:
        tensors[EMBEDDING] = tensors.pop(HEAD)
    return tensors


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Fill a decoder, whole or sharded, from a folder.

    Raises ConfigError when a tensor is missing, left over, of another shape than config.json says or
    not finite.
    """
    require_own_files(folder, weights=True)
    tied = read_shape(folder).tied
    tensors = read_weights(folder, tied)
    # Some exports repeat a tied head, and a critic has none.
    head = tensors.pop(HEAD, None) if model.shape.tied else None
    if tied and head is not None and not torch.equal(head, tensors[EMBEDDING]):
        raise ConfigError(f"{folder}: lm_head.weight is not {EMBEDDING}, and config.json ties them; set "
                          "tie_word_embeddings to false there if the head is its own")
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:  # of older exports
        stored = tensors.pop(name).float()
        ours = [freq.cpu() for freq, _ in model.frequencies.values()]
        if not any(freq.shape == stored.shape and torch.allclose(freq, stored) for freq in ours):
            raise ConfigError(f"{folder}: {name} has other rotary frequencies than config.json implies; mend "
                              "rope_theta or rope_scaling there")
    weights = dict(model.named_hf_tensors(merged=False))
    if wrong := compare_shapes(tensors.items(), weights.items()):
        raise ConfigError(f"{folder}: weights do not match config.json at {wrong}, by config.json")
    for name, p in weights.items():
        t = tensors[name]
        if not t.is_floating_point() or t.itemsize < 2 or not t.isfinite().all():
            raise ConfigError(
                f"{folder}: {name}, of {t.dtype}, has infinite or quantized values or nan, which are no "
                "weights; take a model without")
        p.copy_(dist.sharded_like(t, p))
