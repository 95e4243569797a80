"""Say how model families differ: families.yaml has a row for each model_type, by which the decoder is built.

All rows compute the same blocks: attention and an MLP, each between norms or behind one. `shape_of` reads a
config.json as transformers does: a setting that is left out has the family's default, a setting that is
neither read nor known to change no result stops the run.
"""

from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from settings.loader import (
    SHORT,
    ConfigError,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    ZeroToOne,
    build,
    convert,
    named,
    read,
)

Dtype = Literal["float32", "bfloat16", "float16"]
FULL, SLIDING = "full_attention", "sliding_attention"
LayerType = Literal["full_attention", "sliding_attention"]
Activation = Literal["silu", "gelu_pytorch_tanh"]


# ---- rotary embeddings, in the names of config.json

@named
class Rope:
    """A rotary embedding; the kinds below stretch its long waves."""

    rope_theta: Positive
    partial_rotary_factor: ZeroToOne = 1.0  # share of a head that turns


@named
class Linear(Rope):
    factor: Annotated[float, "at least 1"]


@named
class Llama3(Linear):
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count


@named
class Yarn(Linear):
    """YaRN (arXiv:2309.00071)."""

    original_max_position_embeddings: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    llama_4_scaling_beta: PositiveOrZero = 0.0      # queries grow with the log of their position (Ministral)
    max_position_embeddings: Count | None = None    # Ministral repeats it here


ROPES = {"default": Rope, "linear": Linear, "llama3": Llama3, "yarn": Yarn}


# ---- config.json

@named
class Common:
    """The settings of config.json that every family reads, in Hugging Face's names."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, "in [1, 10000]"]
    num_attention_heads: Count
    rms_norm_eps: PositiveOrZero
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    tie_word_embeddings: bool = False
    hidden_act: Activation = "silu"
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # transformers 5 has theta and scaling in here
    torch_dtype: Dtype | None = None
    dtype: Dtype | None = None


@named
class ConfigFile(Common):
    """The settings of config.json; of these a family reads the ones in the `settings` of its row."""

    attention_bias: bool | None = None
    hidden_activation: Activation | None = None
    use_sliding_window: bool | None = True
    sliding_window: Count | None = None
    max_window_layers: CountOrZero = 0
    sliding_window_pattern: Count | None = None
    layer_types: list[LayerType] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count | None = None
    partial_rotary_factor: Positive = 1.0
    rope_local_base_freq: Positive | None = None  # of layers with a window
    query_pre_attn_scalar: Positive | None = None


# ---- the table

@named
class Family:
    """The properties of a family; the defaults are Llama's."""

    # Settings that it reads besides those that all families read -> value if config.json leaves them out.
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    # Names of four norms: before and behind attention, before and behind the MLP.
    norms: list[str | None] = field(
        default_factory=lambda: ["input_layernorm", None, "post_attention_layernorm", None], hash=False)
    one_plus: bool = False      # a norm multiplies by 1 + weight
    qk_norm: Literal["head", "all heads"] | None = None  # RMSNorm over these numbers of query and key
    qkv_bias: bool | None = None    # None: as attention_bias says
    out_bias: bool | None = None
    fused_mlp: bool = False         # gate_up_proj in place of gate_proj and up_proj
    # The rotary embedding turns numbers 2i and 2i + 1, of a part of the head, not i and i + E/2.
    neighbours: bool = False
    rooted: bool = False            # embeddings are multiplied by the root of hidden_size
    theta: float = 10_000.0         # rope_theta if config.json has none
    # Layers with a window have a rope of their own, with this theta. None: all layers have one rope.
    local_theta: float | None = None
    # Without layer_types: all layers but every nth have a window. 1: none has.
    full_every: int = 1


TABLE = read(Path(__file__).with_suffix(".yaml"))
FAMILIES = {name: build(Family, row, f"{name}.") for name, row in TABLE["families"].items()}


# ---- a decoder's shape

@named
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
    activation: str       # a key of model.ACTIVATIONS
    max_positions: int
    ropes: tuple[Rope | None, ...]    # of each layer
    windows: tuple[int | None, ...]   # of each layer: so many tokens, itself included, are seen
    query_scale: float | None   # a factor of queries, beside the usual 1 / root of head_dim
    dtype: torch.dtype    # of the weights on disk; exports keep it


def shape_of(raw: dict[str, Any]) -> Shape:
    """Read the settings of a config.json. Raises ConfigError for a model that is not computed here."""
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if not family:
        raise ConfigError(f"model_type={SHORT.repr(kind)} is not supported; use one of "
                          f"{', '.join(FAMILIES)}; docs/running.md says how to add one "
                          "(\"An architecture of yours\")")
    own = family.settings.keys() | {f.name for f in fields(Common)}
    for name, value in raw.items():
        known = name in own or TABLE["harmless"].get(name, shape_of) in (None, value)
        if not known and value is not None:
            raise ConfigError(f"{name}={SHORT.repr(value)} is not supported for model_type={kind}; if it "
                              "changes no log-prob, delete it there")
    said = build(ConfigFile, family.settings | {name: raw[name] for name in own if name in raw})
    heads = said.num_attention_heads
    kv_heads = said.num_key_value_heads or heads
    head_dim = said.head_dim or said.hidden_size // heads
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
        tied=said.tie_word_embeddings,
        qkv_bias=bool(said.attention_bias) if family.qkv_bias is None else family.qkv_bias,
        out_bias=bool(said.attention_bias) if family.out_bias is None else family.out_bias,
        activation=said.hidden_activation or said.hidden_act,
        max_positions=said.max_position_embeddings,
        **read_layers(said, family),
        query_scale=said.query_pre_attn_scalar and (head_dim / said.query_pre_attn_scalar) ** 0.5,
        dtype=getattr(torch, said.dtype or said.torch_dtype or "float32")
    )
    require_computable(shape)
    return shape


def require_computable(shape: Shape) -> None:
    """Raise ConfigError for numbers that the decoder cannot compute with."""
    head_dim = shape.head_dim
    share = min((rope.partial_rotary_factor for rope in shape.ropes if rope), default=1)
    unsupported = {
        f"a head_dim of {head_dim}, which is odd,": head_dim % 2 or not head_dim,
        f"partial_rotary_factor={share}": head_dim * share % 2 or (share < 1 and not shape.family.neighbours),
        f"num_attention_heads={shape.heads}, no multiple of num_key_value_heads={shape.kv_heads},":
            shape.heads % shape.kv_heads
    }
    for name, present in unsupported.items():
        if present:
            raise ConfigError(f"{name} is not supported")


def read_layers(said: ConfigFile, family: Family) -> dict[str, tuple]:
    """Return the rope and the window of each layer."""
    layers = range(said.num_hidden_layers)
    every, pattern = said.no_rope_layer_interval, said.sliding_window_pattern or family.full_every
    turns = said.no_rope_layers or [not every or (layer + 1) % every for layer in layers]
    first = said.max_window_layers
    types = said.layer_types or [
        SLIDING if layer >= first and (layer + 1) % pattern and not (every and turn) else FULL
        for layer, turn in enumerate(turns)]
    if min(len(turns), len(types)) < len(layers):
        raise ConfigError(f"no_rope_layers or layer_types has fewer than {len(layers)} entries")
    window = said.sliding_window if said.use_sliding_window else None
    ropes = read_ropes(said, family)
    return {
        "ropes": tuple(ropes[types[layer]] if turns[layer] else None for layer in layers),
        "windows": tuple(window if types[layer] == SLIDING else None for layer in layers)
    }


def read_ropes(said: ConfigFile, family: Family) -> dict[str, Rope]:
    """Return the rope of each type of layer."""
    scaling, given = said.rope_scaling or {}, said.rope_parameters or {}
    if family.local_theta is None:
        given = dict.fromkeys((FULL, SLIDING), scaling or given)
    given = {FULL: {}, SLIDING: {}} | convert(given, dict[LayerType, dict[str, Any]], "rope_parameters")
    given[FULL] = given[FULL] | scaling
    theta = said.rope_theta or family.theta
    thetas = {FULL: theta, SLIDING: said.rope_local_base_freq or family.local_theta or theta}
    ropes = {}
    for layers, own in given.items():
        own = {"rope_theta": thetas[layers], "partial_rotary_factor": said.partial_rotary_factor} | own
        kind = own.pop("rope_type", own.pop("type", "default"))
        if str(kind) not in ROPES:
            raise ConfigError(f"rope_type={SHORT.repr(kind)} is not supported, only {', '.join(ROPES)}")
        ropes[layers] = build(ROPES[kind], own)
    return ropes
