"""Say how model families differ: FAMILIES has a row for each model_type, and the decoder is built by its row.

All rows compute the same blocks: attention and an MLP, each between norms or behind one. `shape_of` reads a
config.json as transformers does: a setting that is left out has the family's default, a setting that is
neither read nor known to change no result stops the run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F

from config import ConfigError
from settings.loader import (
    SHORT,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    ZeroToOne,
    build,
    convert,
    within,
)

Dtype = Literal["float32", "bfloat16", "float16"]
LayerType = Literal["full_attention", "sliding_attention"]


ACTIVATIONS = {  # hidden_act -> function within the MLP
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


# ---- rotary embeddings, in the names of config.json

@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding; the kinds below stretch its long waves."""

    rope_theta: Positive
    partial_rotary_factor: ZeroToOne = 1.0  # share of a head that turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Rope):
    factor: Positive
    original_max_position_embeddings: Count  # without effect here


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Linear):
    low_freq_factor: Positive
    high_freq_factor: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn(Linear):
    """YaRN (arXiv:2309.00071)."""

    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: PositiveOrZero | None = None
    mscale_all_dim: PositiveOrZero | None = None
    truncate: bool = True
    llama_4_scaling_beta: PositiveOrZero = 0.0      # queries grow with the log of their position (Ministral)
    max_position_embeddings: Count | None = None    # Ministral repeats it here


ROPES = {"default": Rope, "linear": Linear, "llama3": Llama3, "yarn": Yarn}


# ---- config.json

@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The settings of config.json that every family reads, in Hugging Face's names."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, within("[1, 10000]")]
    num_attention_heads: Count
    rms_norm_eps: PositiveOrZero
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    tie_word_embeddings: bool | None = None
    hidden_act: str = "silu"
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # transformers 5 has theta and scaling in here
    torch_dtype: Dtype | None = None
    dtype: Dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile(Common):
    """The settings of config.json; of these a family reads the ones in the `settings` of its row."""

    attention_bias: bool | None = None
    hidden_activation: str | None = None
    use_sliding_window: bool | None = None
    sliding_window: Count | None = None
    max_window_layers: CountOrZero = 0
    sliding_window_pattern: Count = 1
    layer_types: list[LayerType] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count | None = None
    partial_rotary_factor: ZeroToOne = 1.0
    rope_local_base_freq: Positive | None = None  # of layers with a window
    query_pre_attn_scalar: Positive | None = None
    attention_multiplier: Positive | None = None
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


# Settings that change no log-prob, or that transformers does not read either.
NEVER_READ = """
    _name_or_path _sliding_window_pattern architectures bos_token_id cache_implementation do_sample
    eos_token_id id2label initializer_range is_llama_config label2id max_length max_window_layers model_type
    output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict temperature
    top_k top_p torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_cache
""".split()
HARMLESS = {  # settings that change nothing at these values; at null none does
    "attention_bias": False,
    "attention_dropout": 0,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}


# ---- the table

@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The properties of a family; the defaults are Llama's."""

    # Settings that it reads besides those that all families read -> value if config.json leaves them out.
    settings: dict[str, Any] = field(default_factory=dict)
    # Names of four norms: before and behind attention, before and behind the MLP.
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    one_plus: bool = False      # a norm multiplies by 1 + weight
    qk_norm: Literal["head", "all heads"] | None = None  # RMSNorm over these numbers of query and key
    qkv_bias: bool | None = None    # None: as attention_bias says
    out_bias: bool | None = None
    fused_mlp: bool = False         # gate_up_proj in place of gate_proj and up_proj
    neighbours: bool = False        # the rotary embedding turns numbers 2i and 2i + 1, not i and i + E/2
    rooted: bool = False            # embeddings are multiplied by the root of hidden_size
    theta: float = 10_000.0         # rope_theta if config.json has none
    # Layers with a window have a rope of their own, with this theta. None: all layers have one rope.
    local_theta: float | None = None
    # (config, layer, whether it has a rope) -> whether it has a window, if layer_types does not say it
    slides: Callable[[ConfigFile, int, bool], bool] = lambda said, layer, turns: False


BIAS = {"attention_bias": False}
WINDOW = {"sliding_window": 4096, "layer_types": None}
QWEN_WINDOW = WINDOW | {"use_sliding_window": False, "max_window_layers": 28}
BEHIND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def behind_the_first(said: ConfigFile, layer: int, turns: bool) -> bool:
    return layer >= said.max_window_layers


def all_but_every_nth(said: ConfigFile, layer: int, turns: bool) -> bool:
    return (layer + 1) % said.sliding_window_pattern != 0


FAMILIES = {  # model_type -> its properties
    "llama": Family(settings=BIAS),
    "qwen2": Family(settings=QWEN_WINDOW, qkv_bias=True, out_bias=False, slides=behind_the_first),
    "qwen3": Family(settings=BIAS | QWEN_WINDOW, qk_norm="head", slides=behind_the_first),
    "mistral": Family(
        settings={"sliding_window": 4096, "num_key_value_heads": 8},
        slides=lambda said, layer, turns: True,
    ),
    "smollm3": Family(
        settings=BIAS | WINDOW | {
            "sliding_window": None,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        theta=2e6,
        slides=lambda said, layer, turns: not turns,
    ),
    "olmo2": Family(settings=BIAS, norms=BEHIND, qk_norm="all heads"),
    "olmo3": Family(
        settings=BIAS | WINDOW | {"sliding_window_pattern": 4},
        norms=BEHIND,
        qk_norm="all heads",
        theta=5e5,
        local_theta=5e5,
        slides=all_but_every_nth,
    ),
    "gemma3_text": Family(
        settings=BIAS | WINDOW | {
            "sliding_window_pattern": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": None,
            "query_pre_attn_scalar": 256,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        norms=("input_layernorm", "post_attention_layernorm",
               "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        one_plus=True,
        qk_norm="head",
        rooted=True,
        theta=1e6,
        local_theta=1e4,
        slides=all_but_every_nth,
    ),
    "glm4": Family(
        settings={
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "head_dim": 128,
            "num_key_value_heads": 2,
        },
        norms=("input_layernorm", "post_self_attn_layernorm",
               "post_attention_layernorm", "post_mlp_layernorm"),
        out_bias=False,
        fused_mlp=True,
        neighbours=True,
    ),
    "ministral3": Family(
        settings={"sliding_window": None, "head_dim": 128, "num_key_value_heads": 8},
        slides=lambda said, layer, turns: True,
    ),
    "granite": Family(settings=BIAS | {
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }),
}


# ---- a decoder's shape

@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that the decoder computes with."""

    family: Family
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
    qk_norm: str | None   # Family.qk_norm
    activation: str       # a key of ACTIVATIONS
    max_positions: int
    ropes: tuple[Rope | None, ...]    # of each layer
    windows: tuple[int | None, ...]   # of each layer: so many tokens, itself included, are seen
    embedding_scale: float
    query_scale: float    # of queries, beside the usual 1 / root of head_dim
    residual_scale: float
    logit_scale: float
    dtype: torch.dtype    # of the weights on disk; exports keep it


def shape_of(raw: dict[str, Any], tied: Callable[[], bool]) -> Shape:
    """Read the settings of a config.json; `tied` tells by the weights whether the head is the embedding.
    Raises ConfigError for a model that this decoder does not compute."""
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(f"model_type={SHORT.repr(kind)} is not supported, only {', '.join(FAMILIES)}; "
                          f"\"An architecture of yours\" in docs/running.md says how to add one")
    read = family.settings.keys() | {f.name for f in fields(Common)}
    for name, value in raw.items():
        known = name in read or name in NEVER_READ
        if not known and value is not None and value != HARMLESS.get(name):
            raise ConfigError(f"{name}={SHORT.repr(value)} is not supported for model_type={kind}; if it "
                              "changes no log-prob, delete it there")
    given = family.settings | {name: raw[name] for name in read if name in raw}
    said = build(ConfigFile, given)
    heads = said.num_attention_heads
    kv_heads = said.num_key_value_heads or heads
    head_dim = said.head_dim or said.hidden_size // heads
    scale = (head_dim / (said.query_pre_attn_scalar or head_dim)) ** 0.5
    if said.attention_multiplier:
        scale = said.attention_multiplier * head_dim ** 0.5
    shape = Shape(
        family=family,
        vocab_size=said.vocab_size,
        hidden_size=said.hidden_size,
        intermediate_size=said.intermediate_size,
        layers=said.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=said.rms_norm_eps,
        tied=tied() if said.tie_word_embeddings is None else said.tie_word_embeddings,
        qkv_bias=bool(said.attention_bias) if family.qkv_bias is None else family.qkv_bias,
        out_bias=bool(said.attention_bias) if family.out_bias is None else family.out_bias,
        qk_norm=family.qk_norm,
        activation=said.hidden_activation or said.hidden_act,
        max_positions=said.max_position_embeddings,
        **read_layers(said, family),
        embedding_scale=said.embedding_multiplier * (said.hidden_size ** 0.5 if family.rooted else 1),
        query_scale=scale,
        residual_scale=said.residual_multiplier,
        logit_scale=1 / said.logits_scaling,
        dtype=getattr(torch, said.dtype or said.torch_dtype or "float32"),
    )
    require_computable(shape)
    return shape


def require_computable(shape: Shape) -> None:
    """Raise ConfigError for numbers that the decoder cannot compute with."""
    head_dim = shape.head_dim
    shares = {rope.partial_rotary_factor for rope in shape.ropes if rope}
    unsupported = {
        f"hidden_act={shape.activation!r}": shape.activation not in ACTIVATIONS,
        f"a head_dim of {head_dim}, which is odd,": head_dim % 2 or not head_dim,
        f"partial_rotary_factor={min(shares, default=1)}": any(head_dim * share % 2 for share in shares) or (
            "partial_rotary_factor" not in shape.family.settings and min(shares, default=1) < 1),
        f"num_attention_heads={shape.heads}, no multiple of num_key_value_heads={shape.kv_heads},":
            shape.heads % shape.kv_heads,
    }
    for name, present in unsupported.items():
        if present:
            raise ConfigError(f"{name} is not supported")


def read_layers(said: ConfigFile, family: Family) -> dict[str, tuple]:
    """Return the rope and the window of each layer."""
    layers = range(said.num_hidden_layers)
    every = said.no_rope_layer_interval
    turns = said.no_rope_layers or [not every or (layer + 1) % every for layer in layers]
    types = said.layer_types
    if types is None:
        slides = [family.slides(said, layer, bool(turn)) for layer, turn in enumerate(turns)]
        types = ["sliding_attention" if sliding else "full_attention" for sliding in slides]
    for name, listed in (("no_rope_layers", turns), ("layer_types", types)):
        if len(listed) < len(layers):
            raise ConfigError(f"{name} has {len(listed)} of {len(layers)} layers")
    window = said.sliding_window
    if "use_sliding_window" in family.settings and not said.use_sliding_window:
        window = None
    ropes = read_ropes(said, family)
    by_layer = list(zip(layers, types, turns, strict=False))
    return {
        "ropes": tuple(ropes[kind] if turn else None for _, kind, turn in by_layer),
        "windows": tuple(window if kind == "sliding_attention" else None for _, kind, _ in by_layer),
    }


def read_ropes(said: ConfigFile, family: Family) -> dict[str, Rope]:
    """Return the rope of each type of layer."""
    theta = said.rope_theta or family.theta
    scaling, parts = said.rope_scaling or {}, said.rope_parameters or {}
    if family.local_theta is None:
        rope = read_rope(scaling or parts, theta, said)
        return {"full_attention": rope, "sliding_attention": rope}
    parts = convert(parts, dict[LayerType, dict[str, Any] | None], "rope_parameters")
    full, local = (parts.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    local_theta = said.rope_local_base_freq or family.local_theta
    return {
        "full_attention": read_rope(full | scaling, theta, said),
        "sliding_attention": read_rope(local, local_theta, said),
    }


def read_rope(given: dict[str, Any], theta: float, said: ConfigFile) -> Rope:
    given = {name: value for name, value in given.items() if value is not None}
    kind = given.pop("type", "default")
    kind = given.pop("rope_type", kind)
    if str(kind) not in ROPES:
        raise ConfigError(f"rope_type={SHORT.repr(kind)} is not supported, only {', '.join(ROPES)}")
    section = ROPES[kind]
    if section is not Rope:
        given.setdefault("original_max_position_embeddings", said.max_position_embeddings)
    return build(section, {"rope_theta": theta, "partial_rotary_factor": said.partial_rotary_factor} | given)
