"""Make models of known shapes with random weights, and count what a pass through one computes and moves.

Nothing is downloaded and no weights are written. tests/test_fake_gpu.py holds the counts to a traced update.
"""

import json
import tempfile
from pathlib import Path

import torch

from infra import dist
from infra.device import choose_backend, parameters
from infra.weights import Shape, read_shape
from model import Decoder
from records import EngineSpec, Prompt, Request, Segments

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "eos_token_id": 2,
}
SHAPES = {  # width, width within the MLP, layers, heads, key heads, vocabulary
    "1M": (128, 384, 4, 4, 2, 477),                    # toy/model
    "10M": (384, 1024, 6, 6, 2, 2048), "50M": (512, 1536, 15, 8, 2, 8192),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),           # Qwen2.5-0.5B
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),          # Qwen2.5-1.5B
    "3B": (2048, 11008, 36, 16, 2, 151_936),           # Qwen2.5-3B
    "7B": (3584, 18944, 28, 28, 4, 152_064),           # Qwen2.5-7B
    "32B": (5120, 27648, 64, 40, 8, 152_064),          # Qwen2.5-32B
    "4B": (2560, 9728, 36, 32, 8, 151_936),            # Qwen3-4B
    "gemma": (2560, 10240, 34, 8, 4, 262_208),         # Gemma 3 4B, its text model
    "olmo": (4096, 11008, 32, 32, 32, 100_278),        # OLMo 3 7B
    "glm": (4096, 13696, 40, 32, 2, 151_552),          # GLM-4-9B
}
OF_FAMILY = {
    "4B": {"model_type": "qwen3", "head_dim": 128},
    "gemma": {"model_type": "gemma3_text", "head_dim": 256, "sliding_window": 1024},
    "olmo": {"model_type": "olmo3"}, "glm": {"model_type": "glm4", "head_dim": 128},
}
UNTIED = ("7B", "32B", "olmo", "glm")
# By a word of a GPU's name: FLOP/s in bfloat16, dense, and bytes/s of its memory, as its maker gives them.
PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.04e12)}
MEMORY = 0.85  # the share of a memory's peak that elementwise work is assumed to reach
# Seconds for vLLM to fall asleep and to map its weights and its cache: of a log in its issue 29341.
SLEEP, WAKE_WEIGHTS, WAKE_CACHE = 0.05, 0.07, 0.02


def ask(prompts: list[tuple[int, ...]], seeds: list[int], limits: list[int]) -> list[Request]:
    """Ask for a completion of each prompt, given by its tokens."""
    return [Request(Prompt("", ids, ""), seed, limit)
            for ids, seed, limit in zip(prompts, seeds, limits, strict=True)]


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


@torch.no_grad()
def draw_weights(model: Decoder, folder: Path | None = None) -> None:
    """Fill a decoder on one rank, whole or sharded, at random; takes a folder as `load_weights` does, whose
    place it can take."""
    generator = torch.Generator(model.norm.weight.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        p = dist.local_shard(parameter)
        if p.ndim > 1:
            p.normal_(std=0.02, generator=generator)
        else:
            p.fill_(0.0 if name.endswith("bias") else 1.0)


def engine_spec(folder: Path, device: torch.device, slots: int, max_len: int, halves: bool = False,
                ) -> EngineSpec:
    """Describe an engine in bfloat16 on CUDA or if `halves`, else float32, whose completions have no EOS."""
    dtype = torch.bfloat16 if halves or device.type == "cuda" else torch.float32
    backend = choose_backend("auto", device, dtype)
    return EngineSpec(folder, dtype, device, backend, frozenset(), slots, max_len)


# ---- what a pass computes and moves

def product_flop(policy: Decoder, tokens: int, scored: int) -> float:
    """Count the FLOP of products with weights, forward and backward, with `scored` tokens projected to
    logits: 6 for each parameter and token that passes it, 4 for one that is frozen. What is computed again
    does not count. Under adapters the first layer's input wants no gradient."""
    head = policy.shape.vocab_size * policy.shape.hidden_size
    blocks = sum(p.numel() * (6 if p.requires_grad else 4) for p in policy.layers.parameters())
    if policy.head_VD.requires_grad:
        return blocks * tokens + 6 * head * scored
    reading = [f"{name}_proj.{factor}" for name in "qkv" for factor in ("weight", "lora_A")]
    first = policy.layers[0].self_attn.named_parameters()
    blocks -= 2 * sum(p.numel() for name, p in first if name in reading)
    return blocks * tokens + 4 * head * scored


def attention_flop(policy: Decoder, rows: list[Segments]) -> float:
    """Count the FLOP of causal attention over rows, forward and backward, with no regard to windows."""
    pairs = [pair for row in rows for pair in zip(row.queries, row.keys, strict=True)]
    met = sum(queries * (2 * keys - queries) / 2 for queries, keys in pairs)
    return 12 * policy.shape.layers * policy.shape.heads * policy.shape.head_dim * met


def flop(policy: Decoder, rows: list[Segments], scored: int) -> float:
    tokens = sum(sum(row.queries) for row in rows)
    return product_flop(policy, tokens, scored) + attention_flop(policy, rows)


def predict_sync(shape: Shape, name: str) -> float | None:
    """Predict the seconds of vLLM's sleep and the sync after it on one GPU; None if PEAKS does not know it.
    A weight is read in float32, and cast, read and written in bfloat16."""
    known = [bandwidth for word, (_, bandwidth) in PEAKS.items() if word in name]
    if not known:
        return None
    copied = (4 + 3 * 2) * parameters(shape)
    return SLEEP + WAKE_WEIGHTS + WAKE_CACHE + copied / (MEMORY * known[0])
