"""Count the bytes that a run takes on a rank, from shapes: a table of named parts for each phase of a step.

`auto` goes by these counts, and `train.py --fit` prints them. tests/test_fake_gpu.py holds them to what a
traced update has alive. Layers with a window are counted as if they had none: the embedded engine keeps all
of their keys, and vLLM may need less.
"""

from typing import Any

import torch

from config import Config, has_reference
from infra.choices import longest_sampled
from infra.device import Parts, block_weights, engine_parts, parameters, table_weights
from infra.families import Shape, shape_of
from infra.weights import find_model, read_shape
from settings.loader import read_json
from settings.paths import REPOSITORY

SHAPES = REPOSITORY / "leaves" / "fit" / "shapes.json"  # hub name -> the shape in its config.json
BESIDE_VLLM = 2 * 2**30  # bytes of its CUDA graphs and of prompts at work, and of NCCL's buffers: assumed


def find_shape(path: str, setting: str = "model.path") -> Shape:
    """Read the shape of a model from its config.json, the only file that is downloaded. SHAPES has those of
    the published configs' models. Raises ConfigError if there is none."""
    shipped = read_json(SHAPES)
    if path in shipped:
        return shape_of(shipped[path])
    return read_shape(find_model(path, ("config.json",), setting))


def phases(cfg: Config, shape: Shape, ranks: int) -> dict[str, Parts]:
    """Count what is in use on one rank in each phase of a step; the config has nothing left to `auto`.

    Weights, their gradients and moments are float32; frozen ones are in the dtype that is computed in.
    """
    lora, sampling = adapter(cfg), sampling_parts(cfg, shape)
    count, frozen = trained(shape, lora), parameters(shape) if lora else 0
    if cfg.optim.offload and cfg.device == "cuda":
        count = frozen = 0  # the host has them
    weights, moments = 4 * count + element_size(cfg) * frozen, 8 * count
    held = {
        "weights": weights // ranks,
        "moments": moments // ranks,
        "reference": element_size(cfg) * count // ranks * (has_reference(cfg) and not lora),
        "critic and its moments": (weights + moments) // ranks * (cfg.advantage.kind == "gae")
    }
    if teacher := getattr(getattr(cfg, "teacher", None), "path", None):
        read = parameters(find_shape(teacher, "teacher.path")) if count else 0
        held["teacher"] = element_size(cfg) * read // ranks
    staying = ()
    if cfg.rollout.engine == "vllm":
        held["CUDA graphs, and NCCL"] = BESIDE_VLLM
        if cfg.rollout.sleep == "never":
            staying = ("engine's weights", "KV cache")
    return {
        "update": held | {name: sampling[name] for name in staying} | {"gradients": 4 * count // ranks}
                  | row_parts(cfg, shape, *planned_row(cfg)),
        "rollout": held | sampling
    }


def element_size(cfg: Config) -> int:
    """Return the bytes of a computed number."""
    return getattr(torch, cfg.model.dtype).itemsize


def adapter(cfg: Config) -> Any:
    """Return the settings of a config's adapter, or None."""
    lora = getattr(cfg.model, "lora", None)
    return lora if lora and lora.rank else None


def trained(shape: Shape, lora: Any) -> int:
    """Count the weights that are trained: all, or those of an adapter with these settings."""
    if lora is None:
        return parameters(shape)
    D, inner = shape.hidden_size, shape.intermediate_size
    # Inputs and outputs of a block's layers: q, k, v, o; gate, up, down, or the first two as one.
    attention = 4 * D + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    mlp = 3 * (D + inner) - D * shape.family.fused_mlp
    return shape.layers * lora.rank * (attention + mlp)


def planned_row(cfg: Config) -> tuple[int, int]:
    """Return the tokens of a full row, and the keys that its segments attend to: of whole groups of prompts
    as long as they may be, and completions a quarter as long as they may be."""
    prompt, G, tokens = cfg.data.max_prompt_tokens, cfg.rollout.group_size, cfg.pack.capacity
    completion = -(-(cfg.longest - prompt) // 4)
    return tokens, tokens * G * (prompt + completion) // (prompt + G * completion)


def row_parts(cfg: Config, shape: Shape, tokens: int, keys: int) -> Parts:
    """Count the peak of a row's forward and backward pass beside weights, their gradients and moments.

    Counted are: what backward needs of each block; embedding and head, and the gradient of one, in the dtype
    that is computed in; and the larger of two things that are never there together. One is a chunk's logits,
    their softmax, and that again as it is multiplied, with the head's gradient in float32. The other is a
    block with its gradients, and what it computes again; half of its activations have gradients at once.
    """
    lora, element, how = adapter(cfg), element_size(cfg), cfg.model.checkpoint_blocks
    if lora and how == "selective":
        how = "none"  # what adapters add is kept too
    padded = cfg.model.attention == "sdpa"
    whole, kept = (element * kept_numbers(shape, way, tokens, keys, padded) for way in ("none", how))
    head = 0 if lora else shape.vocab_size * shape.hidden_size
    logits = 12 * cfg.model.logp_chunk * shape.vocab_size + 4 * head
    block = block_weights(shape) * (2 * element + 4) + whole // 2 + whole - kept
    return {
        "embedding and head, as computed with": element * (table_weights(shape) + head),
        "activations of a row": shape.layers * kept,
        "log-prob head, or a block at work": max(logits, block)
    }


def kept_numbers(shape: Shape, how: str, tokens: int, keys: int, padded: bool) -> int:
    """Count the numbers that one block keeps for backward, by model.checkpoint_blocks. `padded`: attention
    and norms without CUDA's kernels keep theirs twice."""
    D, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if how == "all":  # its input
        return tokens * D
    if how == "selective":  # its input and the outputs of products and attention
        return tokens * (3 * D + 2 * (query + key + inner))
    norms = sum(map(bool, shape.family.norms)) * D + bool(shape.family.qk_norm) * (query + key)
    if shape.family.one_plus:  # their inputs are float32
        norms *= 2
    # Of norms input and output; queries and attention's output; the MLP; keys and values.
    per_token = 2 * (1 + padded) * (D + query) + norms + 4 * inner
    return tokens * per_token + keys * 2 * (1 + padded) * key


def sampling_parts(cfg: Config, shape: Shape) -> Parts:
    """Count what the engine has on one rank while it samples in all slots at full length."""
    sampling, element = cfg.rollout, element_size(cfg)
    spread = sampling.tensor_parallel if sampling.engine == "vllm" else 0
    parts = engine_parts(shape, element, sampling.slots, longest_sampled(cfg), spread, sampling.cache_gib)
    if getattr(sampling, "drafts", None) and not spread:
        # A prompt's drafts are held while any of its completions is sampled: G for a slot at most.
        parts["KV cache"] *= 1 + sampling.group_size * min(1, sampling.prompts_per_step / sampling.slots)
    return parts
