"""Count the bytes of training from shapes: what lies on a rank, passes of an update, a rollout.

Every count is a table of named parts, which `train.py --fit` prints; their sum has to fit. Layers with a
window are counted as if they had none: the embedded engine keeps all of their keys, and vLLM may need less.
"""

from dataclasses import replace
from typing import Any

import torch

from config import Config, has_reference
from infra.choices import longest_sampled
from infra.device import Parts, block_weights, engine_parts, parameters, table_weights
from infra.weights import Shape
from records import frozen
from rollout_vllm import PREFILL_TOKENS

GRAPHS = NCCL = 2**30  # bytes of vLLM's CUDA graphs, and of buffers between ranks: assumed


@frozen
class NoAdapter:
    """The settings of an adapter in a config without model.lora."""

    rank: None = None
    path: None = None


@frozen
class Pass:
    """The quantities that decide the memory of a forward and backward pass of one row."""

    shape: Shape
    tokens: int            # of the row
    keys: int              # that its segments attend to; a prompt's keys count once per completion
    element: int           # bytes of a computed number
    recomputed: str = "none"  # model.checkpoint_blocks
    chunk: int = 1024      # model.logp_chunk
    fused: bool = False    # CUDA's kernels: a norm keeps its input alone, and attention pads nothing
    lora: Any = NoAdapter()  # with a rank, no weight of the model has a gradient
    entropy: bool = False  # it is computed beside each log-prob (loss.entropy)


# ---- weights

def attention_widths(shape: Shape) -> tuple[int, int]:
    """Return how many numbers all heads have together, for queries and for keys."""
    return shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def linear_sizes(shape: Shape) -> dict[str, list[tuple[int, int]]]:
    """Return inputs and outputs of a block's linear layers: q, k, v, o, and gate, up, down, or the first two
    of these as one."""
    D, inner = shape.hidden_size, shape.intermediate_size
    query, key = attention_widths(shape)
    attention = [(D, query), (D, key), (D, key), (query, D)]
    mlp = [(D, 2 * inner)] if shape.family.fused_mlp else [(D, inner), (D, inner)]
    mlp.append((inner, D))
    return {
        "attention": attention,
        "mlp": mlp,
        "all": attention + mlp,
    }


def norms(shape: Shape) -> int:
    """Count the norms of a block beside attention and the MLP."""
    return sum(name is not None for name in shape.family.norms)


def adapter(cfg: Config) -> Any:
    """Return the settings of a config's adapter."""
    return getattr(cfg.model, "lora", NoAdapter())


def adapted_sizes(shape: Shape, lora: Any) -> list[tuple[int, int]]:
    """List the inputs and outputs of the layers of a block that have an adapter."""
    return linear_sizes(shape)[lora.targets] if lora.rank else []


def trained(shape: Shape, lora: Any) -> int:
    """Count the weights that have a gradient and moments."""
    if not lora.rank:
        return parameters(shape)
    sides = sum(inputs + outputs for inputs, outputs in adapted_sizes(shape, lora))
    return shape.layers * lora.rank * sides


# ---- an update

def pass_parts(given: Pass) -> Parts:
    """Count the peak of a forward and backward pass beside weights, their gradients and moments.

    Counted are: what backward needs of each block; embedding and head, and the gradient of one, in the dtype
    that is computed in; and the larger of two things that are never there together. One is the head's
    gradient in float32 with a chunk's logits, their softmax, and that again as it is multiplied, or as the
    entropy's gradient needs it. The other is a block with its gradients, and what it computes again. Frozen
    weights have no gradient. tests/test_fake_gpu.py holds the count to what a traced update has alive.
    """
    shape, element = given.shape, given.element
    head = 0 if given.lora.rank else shape.vocab_size * shape.hidden_size
    return {
        "embedding and head, as computed with": element * (table_weights(shape) + head),
        "activations of a row": shape.layers * block_bytes(given),
        "log-prob head, or a block at work": max(head_bytes(given), working_bytes(given)),
    }


def head_bytes(given: Pass) -> int:
    """Count the bytes of a chunk's log-probs."""
    shape, element = given.shape, given.element
    again = max(element, 4) if given.entropy else element
    logits = given.chunk * shape.vocab_size * (8 + again)
    if not given.lora.rank:
        return 4 * shape.vocab_size * shape.hidden_size + logits
    # No gradient hides what else is there: the last norm's input and output, the scored part of it, and its
    # gradient; and the block that is gathered ahead.
    return logits + 4 * given.tokens * shape.hidden_size * element + block_weights(shape) * element


def working_bytes(given: Pass) -> int:
    """Count a block in backward: its gradients in both dtypes, and what it computes again."""
    element, weights = given.element, block_weights(given.shape)
    kept = block_bytes(given)
    whole = block_bytes(replace(given, recomputed="none"))
    working = weights * (2 * element + 4)  # with its gradient, again as it is summed
    share = 2 if given.fused else 8
    if given.lora.rank:
        adapters = trained(given.shape, given.lora) // given.shape.layers
        working = 2 * weights * element + adapters * (2 * element + 4)
        share = 2 if given.fused else 4
    # Of activations' gradients some: tests/test_fake_gpu.py measures how much it comes to.
    working += whole // share + whole - kept
    if given.recomputed == "selective":  # an adapter's output is kept too, and not computed again
        working += adapter_bytes(given)
    return working


def block_bytes(given: Pass) -> int:
    """Count the bytes that one block keeps for backward."""
    shape, layers = given.shape, adapted_sizes(given.shape, given.lora)
    D, inner = shape.hidden_size, shape.intermediate_size
    query, key = attention_widths(shape)
    if given.recomputed == "all":  # its input
        return given.tokens * D * given.element
    if given.recomputed == "selective":  # its input and the outputs of products and attention
        per_token = 3 * D + 2 * query + 2 * key + 2 * inner
        per_key = 0
    elif given.fused:  # of each norm input and output; queries, keys, values, attention's output; the MLP
        per_token = (2 + norms(shape)) * D + 2 * query + 4 * inner
        per_key = 2 * key
    else:  # norms have two stages more unless frozen; queries, keys, values and the output, also padded
        stages = 4 if layers else 6
        stages += (norms(shape) - 2) * stages // 3
        per_token = stages * D + 4 * query + 4 * inner
        per_key = 4 * key
    if shape.qk_norm and given.recomputed == "none":  # the inputs of these norms
        per_token += query + key
    if shape.family.one_plus and given.recomputed == "none":  # inputs of norms are float32
        per_token += (norms(shape) * D + query + key) * 2 // given.element
    if given.lora.rank:
        per_token += len(layers) * given.lora.rank  # between the factors of an adapter
    kept = (given.tokens * per_token + given.keys * per_key) * given.element
    if given.recomputed == "selective":
        kept += adapter_bytes(given)
    return kept


def adapter_bytes(given: Pass) -> int:
    """Count the outputs of one block's adapters."""
    outputs = sum(outputs for _, outputs in adapted_sizes(given.shape, given.lora))
    return given.tokens * outputs * given.element


def planned_lengths(cfg: Config) -> tuple[int, int]:
    """Return the tokens of prompts and completions to plan memory for: prompts as long as they may
    be, and completions a quarter as long as they may be."""
    return cfg.data.max_prompt_tokens, -(-(cfg.longest - cfg.data.max_prompt_tokens) // 4)


def planned_row(cfg: Config) -> tuple[int, int]:
    """Return the tokens of a full row of whole groups, and the keys that its segments attend to."""
    prompt, completion = planned_lengths(cfg)
    G = cfg.rollout.group_size
    tokens = cfg.pack.capacity
    return tokens, tokens * G * (prompt + completion) // (prompt + G * completion)


def planned_share(cfg: Config, ranks: int) -> int:
    """Count a rank's tokens of a mini-batch of planned lengths, of the completions that are kept."""
    prompt, completion = planned_lengths(cfg)
    kept = getattr(cfg.prune.completions, "keep", cfg.rollout.group_size)
    group = prompt + kept * completion
    return cfg.rollout.prompts_per_step * group // cfg.update.minibatches // ranks


def held_parts(cfg: Config, shape: Shape, ranks: int) -> Parts:
    """Count what lies on one rank between passes: weights and moments in float32, but for frozen ones; and
    the parts of vLLM's that stay while it samples nothing."""
    engine = idle_parts(cfg, shape, ranks)
    if is_offloaded(cfg):
        return engine
    lora, learnt = adapter(cfg), trained(shape, adapter(cfg))
    weights, moments = 4 * learnt, 8 * learnt
    base = initial = critic = 0
    if lora.rank:
        base = element_size(cfg) * parameters(shape)  # frozen, in the computed dtype
        if lora.path:  # an adapter that was read lies there twice
            initial = 4 * learnt
    elif has_reference(cfg):
        initial = weights
    if cfg.advantage.kind == "gae":
        critic = base + weights + moments
        if lora.rank:
            critic += initial
    return {
        "weights": (weights + base) // ranks,
        "moments": moments // ranks,
        "reference": initial // ranks,
        "critic and its moments": critic // ranks,
    } | engine


def gradient_bytes(cfg: Config, shape: Shape, ranks: int) -> int:
    """Count the gradients of one model on one rank."""
    return 0 if is_offloaded(cfg) else 4 * trained(shape, adapter(cfg)) // ranks


def is_offloaded(cfg: Config) -> bool:
    return cfg.optim.offload and cfg.device == "cuda"


def element_size(cfg: Config) -> int:
    """Return the bytes of a computed number."""
    return getattr(torch, cfg.model.dtype).itemsize


def update_bytes(cfg: Config, shape: Shape, ranks: int) -> int:
    return sum(update_parts(cfg, shape, ranks).values())


def update_parts(cfg: Config, shape: Shape, ranks: int) -> Parts:
    """Count the peak of an update on one rank of a config without `auto`."""
    model, how = cfg.model, cfg.model.checkpoint_blocks
    if model.compile and how == "none":
        how = "selective"  # torch.compile recomputes cheap things: assumed, until a GPU has shown how much
    tokens, keys = planned_row(cfg)
    given = Pass(
        shape, tokens, keys, element_size(cfg), how, model.logp_chunk,
        fused=model.attention != "sdpa",
        lora=adapter(cfg),
        entropy=cfg.loss.entropy > 0,
    )
    gradients = {"gradients": gradient_bytes(cfg, shape, ranks)}
    return held_parts(cfg, shape, ranks) | gradients | pass_parts(given)


# ---- a rollout

def rollout_parts(cfg: Config, shape: Shape, ranks: int, slots: int) -> Parts:
    """Count what is in use on one rank while the engine samples in so many slots at full length."""
    return held_parts(cfg, shape, ranks) | sampling_parts(cfg, shape, slots)


def sampling_parts(cfg: Config, shape: Shape, slots: int) -> Parts:
    sampling, element = cfg.rollout, element_size(cfg)
    spread = sampling.tensor_parallel if sampling.engine == "vllm" else 0
    parts = engine_parts(shape, element, slots, longest_sampled(cfg), spread, sampling.cache_gib)
    if getattr(sampling, "drafts", None):
        parts["KV cache"] *= 2  # drafts have at most the tokens of the slots that they serve
    if spread:
        widest = 4 * shape.hidden_size + 3 * shape.intermediate_size // spread
        parts["activations of prompts"] = PREFILL_TOKENS * widest * element
    return parts


def idle_parts(cfg: Config, shape: Shape, ranks: int) -> Parts:
    """Count the parts of vLLM's that stay on a GPU while it samples nothing."""
    if cfg.rollout.engine != "vllm" or cfg.device != "cuda":
        return {}
    staying = {"CUDA graphs, and NCCL": GRAPHS + NCCL * (ranks > 1)}
    if cfg.rollout.sleep == "never":
        parts = sampling_parts(cfg, shape, cfg.rollout.slots)
        staying |= {name: parts[name] for name in ("engine's weights", "KV cache")}
    return staying


def sync_parts(cfg: Config, shape: Shape, ranks: int) -> Parts:
    """Count what is in use on one rank while the engine takes over the weights: its own, and of these the
    largest gathered beside them. With an adapter that one was made in float32."""
    element = element_size(cfg)
    spread = cfg.rollout.tensor_parallel
    # A rank casts its own part, and gathers the rest.
    largest = shape.vocab_size * shape.hidden_size * element * (1 + 1 / ranks)
    for inputs, outputs in adapted_sizes(shape, adapter(cfg)):
        merged = inputs * outputs * (element * (1 + 1 / ranks) + 2 * max(4, element) / ranks)
        largest = max(largest, merged)
    return held_parts(cfg, shape, ranks) | {
        "engine's weights": parameters(shape) * element // spread,
        "weights held twice": int(largest),
    }


def phases(cfg: Config, shape: Shape, ranks: int) -> dict[str, Parts]:
    """Count what is in use on one rank in each phase of a step."""
    return {
        "update": update_parts(cfg, shape, ranks),
        "sync": sync_parts(cfg, shape, ranks),
        "rollout": rollout_parts(cfg, shape, ranks, cfg.rollout.slots),
    }


