"""Make models of known shapes with random weights for the benches: nothing is downloaded and no weights are
written.
"""

import json
import tempfile
from pathlib import Path

import torch

from infra import dist
from infra.weights import Shape, read_shape
from model import Decoder, empty_model
from preflight.memory import choose_backend
from records import EngineSpec

CARDS = {24: "4090", 48: "L40S", 80: "H100", 141: "H200"}  # GB -> a card of fit.CARDS that has them
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
SHAPES = {  # width, width within the MLP, layers, heads, key heads, vocabulary
    "1M": (128, 384, 4, 4, 2, 477),                    # toy/model
    "10M": (384, 1024, 6, 6, 2, 2048),
    "50M": (512, 1536, 15, 8, 2, 8192),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),           # Qwen2.5-0.5B
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),          # Qwen2.5-1.5B
    "3B": (2048, 11008, 36, 16, 2, 151_936),           # Qwen2.5-3B
    "7B": (3584, 18944, 28, 28, 4, 152_064),           # Qwen2.5-7B
    "32B": (5120, 27648, 64, 40, 8, 152_064),          # Qwen2.5-32B
    "4B": (2560, 9728, 36, 32, 8, 151_936),            # Qwen3-4B
}
OF_FAMILY = {"4B": {"model_type": "qwen3", "head_dim": 128}}
UNTIED = ("7B", "32B")


def write_config(shape: str, folder: Path) -> Path:
    """Write a model folder that holds config.json alone."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "vocab_size")
    sizes = dict(zip(keys, SHAPES[shape], strict=True)) | {"tie_word_embeddings": shape not in UNTIED}
    (folder / "config.json").write_text(json.dumps(QWEN | sizes | OF_FAMILY.get(shape, {})))
    return folder


def shape_of(name: str) -> Shape:
    """Return a shape by its key here, or by the hub name of a model of it: Qwen/Qwen2.5-7B-Instruct."""
    sizes = [part for part in name.split("-") if part in SHAPES]
    with tempfile.TemporaryDirectory() as folder:
        return read_shape(write_config(sizes[0], Path(folder)))


def random_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    model = empty_model(folder, dtype).to_empty(device=device)
    draw_weights(model)
    return model


@torch.no_grad()
def draw_weights(model: Decoder, folder: Path | None = None) -> None:
    """Fill a decoder on one rank, whole or sharded, at random; takes a folder as `load_weights` does, whose
    place it can take."""
    generator = torch.Generator(model.norm.weight.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        p = dist.local(parameter)
        if p.ndim > 1:
            p.normal_(std=0.02, generator=generator)
        else:
            p.fill_(0.0 if name.endswith("bias") else 1.0)


def engine_spec(folder: Path, device: torch.device, slots: int, max_len: int) -> EngineSpec:
    """Describe an engine in bfloat16 on CUDA, float32 on the CPU, whose completions never end by an EOS."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = choose_backend("auto", device, dtype)
    return EngineSpec(folder, dtype, device, backend, frozenset(), slots, max_len)
