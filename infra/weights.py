"""Hugging Face folders: find them, read their shape and weights, and write them back, whole or sharded."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from config import ConfigError
from infra import dist
from infra.paths import find_path
from settings import read_json

WEIGHT_FILES = ("model.safetensors.index.json", "model.safetensors")
MODEL_TYPES = ("qwen2", "qwen3", "llama")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "rms_norm_eps", "max_position_embeddings")


def find_model(path: str) -> Path:
    """Return the folder of a model given as a folder or as a hub name, which is downloaded. Raises
    ConfigError."""
    folder = find_path(path)
    if (folder / "extra.pt").is_file():
        raise ConfigError(f"model.path={path} is a checkpoint, not a Hugging Face folder; make one of it by "
                          f"python learner.py {path} --out DIR")
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise ConfigError(f"model.path={path!r} is neither a folder nor a model that the hub gives: "
                          f"{str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of config.json that decides what is computed."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool            # the LM head is the embedding
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool         # Qwen3: RMSNorm on every head's query and key
    max_positions: int
    rope_theta: float
    rope_scaling: dict | None   # llama3 only
    dtype: torch.dtype    # of the weights on disk; exports keep it


def read_shape(folder: Path) -> Shape:
    """Read config.json. Raises ConfigError for what is missing or not computed by this decoder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} not found; model.path must be a Hugging Face folder or a hub name")
    raw = read_json(path)
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(f"{path}: model_type={kind!r} is not supported; use one of "
                          f"{', '.join(MODEL_TYPES)}")
    rope = raw.get("rope_parameters") or {}  # transformers 5 moved rope_theta and rope_scaling in here
    scaling = raw.get("rope_scaling") or rope
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    layers = raw.get("layer_types") or (
        ["sliding_attention"] if raw.get("max_window_layers", 0) < raw.get("num_hidden_layers", 0) else [])
    unsupported = {
        f"rope_type={rope_type!r}": rope_type not in ("default", "llama3"),
        f"hidden_act={raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "sliding-window attention": bool(raw.get("use_sliding_window")) and "sliding_attention" in layers,
        "mlp_bias=true": bool(raw.get("mlp_bias")),
    }
    for what, present in unsupported.items():
        if present:
            raise ConfigError(f"{path}: {what} is not supported; use a checkpoint without it")
    missing = [key for key in REQUIRED if key not in raw]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; download it again")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"{path}: dtype={dtype!r} must be float32, bfloat16 or float16")
    bias = bool(raw.get("attention_bias", False))
    return Shape(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        norm_eps=raw["rms_norm_eps"],
        tied=raw.get("tie_word_embeddings", False),
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias and kind != "qwen2",
        qk_norm=kind == "qwen3",
        max_positions=raw["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=scaling if rope_type == "llama3" else None,
        dtype=getattr(torch, dtype),
    )


def check_positions(folder: Path, tokens: int, settings: str) -> None:
    """Raise ConfigError where `settings` allow sequences of more `tokens` than the model takes."""
    limit = read_shape(folder).max_positions
    if tokens > limit:
        raise ConfigError(f"{settings} allow sequences of {tokens} tokens, but {folder} has "
                          f"max_position_embeddings={limit}; lower them")


def hf_name(name: str) -> str:
    """Name a decoder's parameter as Hugging Face does."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter under its Hugging Face name, but for an adapter's, which no folder has."""
    for name, p in model.named_parameters():
        if not name.endswith(("_A", "_B")):  # methods/lora.py
            yield hf_name(name), p


def weight_files(folder: Path) -> list[Path]:
    """List the weights of a folder: one safetensors file, or the shards that its index names. Raises
    ConfigError."""
    index, single = (Path(folder) / name for name in WEIGHT_FILES)
    if index.is_file():
        shards = sorted(set(read_json(index)["weight_map"].values()))
    elif single.is_file():
        shards = [single.name]
    else:
        raise ConfigError(f"{folder} has no {' or '.join(WEIGHT_FILES)}; download the weights as safetensors")
    for shard in shards:
        if not (Path(folder) / shard).is_file():
            raise ConfigError(f"{index} names {shard}, which is missing; download it again")
    return [Path(folder) / shard for shard in shards]


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Read all tensors of safetensors files. Raises ConfigError."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read ({error}); download or write it again") from None
    return tensors


def differing(expected: dict[str, tuple], found: dict[str, tuple]) -> list[str]:
    """Name the tensors that one of two tables of shapes lacks or has in another shape, sorted."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Fill a decoder, whole or sharded, from a folder.

    Raises ConfigError when a tensor is missing, left over, of another shape than config.json says or
    not finite.
    """
    tensors = read_tensors(weight_files(folder))
    if model.shape.tied:
        tensors.pop("lm_head.weight", None)  # some exports repeat the embedding
    expected = {name: tuple(p.shape) for name, p in named_weights(model)}
    stored = {name: tuple(t.shape) for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if wrong := differing(expected, stored):
        name = wrong[0]
        raise ConfigError(f"{folder}: weights do not match config.json at {len(wrong)} tensors, e.g. "
                          f"{name}: file has {stored.get(name, 'nothing')}, config.json implies "
                          f"{expected.get(name, 'nothing')}")
    for name, p in named_weights(model):
        if not tensors[name].is_floating_point() or not tensors[name].isfinite().all():
            raise ConfigError(f"{folder}: {name}, of {tensors[name].dtype}, has infinite or quantized values "
                              "or nan, which are no weights; take a model without")
        p.copy_(dist.sharded_like(tensors[name], p))


def export(model: nn.Module, source: Path, folder: Path, template: str | None = None) -> None:
    """Write a Hugging Face folder: the weights, and everything else (config, tokenizer, template) as in
    `source`, but for the text of a `template` of the user's (data.chat_template).

    All ranks of a sharded model must call it; rank 0 writes.
    """
    if dist.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(source).iterdir():
            copied = path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in WEIGHT_FILES
            if path.is_file() and copied:
                shutil.copyfile(path, folder / path.name)
        if template:
            (folder / "chat_template.jinja").write_text(template)
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
        for path in Path(folder).glob("*.safetensors"):  # which the library keeps from all but their owner
            shutil.copymode(Path(folder) / "config.json", path)
