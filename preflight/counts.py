"""Count the bytes of training from shapes: of what lies on a rank, of an update's passes, of a rollout.

Every count is a table of named parts, which `train.py --fit` prints; its sum is what has to fit. P are the
weights of a model, A those of its adapters (lora.py).
"""

from dataclasses import dataclass, replace

import torch

from config import Config, Lora, has_reference
from infra.weights import Shape
from rollout_vllm import cache_bytes
from settings.kinds import Gae

Parts = dict[str, float]  # bytes by name


@dataclass(frozen=True, slots=True)
class Pass:
    """What the memory of a forward and backward pass of one row depends on."""

    shape: Shape
    tokens: int            # of the row
    keys: int              # that its segments attend to; those of a prompt count once per completion
    element: int           # bytes of a computed number
    recomputed: str = "none"  # model.checkpoint_blocks
    chunk: int = 1024      # model.logp_chunk
    fused: bool = False    # CUDA's kernels: a norm keeps its input alone, and attention pads nothing
    lora: Lora = Lora()    # with a rank, no weight of the model has a gradient
    entropy: bool = False  # it is computed beside each log-prob (loss.entropy)


def parameters(shape: Shape) -> int:
    """Count the weights of a decoder of this shape."""
    return tables(shape) + shape.layers * of_block(shape) + shape.hidden_size


def tables(shape: Shape) -> int:
    """Count the weights of embedding and head."""
    return shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)


def linear_sizes(shape: Shape) -> dict[str, list[tuple[int, int]]]:
    """Return inputs and outputs of a block's linear layers: q, k, v, o, and gate, up, down."""
    D, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {"attention": [(D, query), (D, key), (D, key), (query, D)],
            "mlp": [(D, inner), (D, inner), (inner, D)]}


def of_block(shape: Shape) -> int:
    """Count the weights of one block."""
    D, query, key = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    biases = (query + 2 * key) * shape.qkv_bias + D * shape.out_bias
    norms = 2 * D + 2 * shape.head_dim * shape.qk_norm
    products = sum(rows * columns for sizes in linear_sizes(shape).values() for rows, columns in sizes)
    return products + biases + norms


def adapted(shape: Shape, lora: Lora) -> list[tuple[int, int]]:
    """List the inputs and outputs of the layers of a block that have an adapter."""
    chosen = [name for name in ("attention", "mlp") if lora.rank and lora.targets in (name, "all")]
    return [size for name in chosen for size in linear_sizes(shape)[name]]


def trained(shape: Shape, lora: Lora) -> int:
    """Count the weights that have a gradient and moments."""
    return shape.layers * lora.rank * sum(map(sum, adapted(shape, lora))) if lora.rank else parameters(shape)


# ---- an update

def pass_bytes(given: Pass) -> int:
    return sum(pass_parts(given).values())


def pass_parts(given: Pass) -> Parts:
    """Count the peak of a forward and backward pass beside weights, their gradients and moments.

    Counted: what backward needs of each block; embedding and head, and the gradient of one, in the dtype that
    is computed in; and the larger of two that are never there together: the head's gradient in float32 with a
    chunk's logits, their softmax, and that again as it is multiplied, or as the entropy's gradient needs it;
    or a block with its gradients, and what it computes again. Frozen weights have no gradient.
    tests/test_fake_gpu.py holds it to what a traced update has alive.
    """
    shape, element = given.shape, given.element
    of_head = 0 if given.lora.rank else shape.vocab_size * shape.hidden_size
    kept, whole = block_bytes(given), block_bytes(replace(given, recomputed="none"))
    head = 4 * of_head + given.chunk * shape.vocab_size * (8 + max(element, 4 * given.entropy))
    block = of_block(shape) * (2 * element + 4)  # with its gradient, again as it is summed
    if given.lora.rank:  # no gradient hides what else there is: the last norm's input and output, what of it
        # is scored, and its gradient; and the block that is gathered ahead
        head += 4 * given.tokens * shape.hidden_size * element + of_block(shape) * element
        block = 2 * of_block(shape) * element + trained(shape, given.lora) // shape.layers * (2 * element + 4)
    # What an adapter is added to is kept too, and no part of what is computed again.
    again = whole - kept + adapter_bytes(given) * (given.recomputed == "selective")
    # Of activations' gradients some: tests/test_fake_gpu.py measures how much it comes to.
    block += whole // (2 if given.fused else 4 if given.lora.rank else 8) + again
    return {"embedding and head, as computed with": element * (tables(shape) + of_head),
            "activations of a row": shape.layers * kept,
            "log-prob head, or a block at work": max(head, block)}


def block_bytes(given: Pass) -> int:
    """Count what is kept of one block for backward."""
    shape = given.shape
    D, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if given.recomputed == "all":  # its input
        return given.tokens * D * given.element
    layers = adapted(shape, given.lora)
    if given.recomputed == "selective":  # its input and what products and attention give
        per_token, per_key = 3 * D + 2 * query + 2 * key + 2 * inner, 0
    elif given.fused:  # of each norm input and output; queries, keys, values, what attention gives; the MLP
        per_token, per_key = 4 * D + 2 * query + 4 * inner, 2 * key
    else:  # norms have two stages more unless frozen; queries, keys, values and the output, also padded
        per_token, per_key = (4 if layers else 6) * D + 4 * query + 4 * inner, 4 * key
    per_token += len(layers) * (given.lora.rank or 0)  # between the factors of an adapter
    added = adapter_bytes(given) if given.recomputed == "selective" else 0
    return (given.tokens * per_token + given.keys * per_key) * given.element + added


def adapter_bytes(given: Pass) -> int:
    """Count what adapters of one block give."""
    outputs = sum(outputs for _, outputs in adapted(given.shape, given.lora))
    return given.tokens * outputs * given.element


def planned_lengths(cfg: Config) -> tuple[int, int]:
    """Return the tokens of prompts and completions for which memory is planned: prompts as long as they may
    be, and completions a quarter as long as they may be."""
    return cfg.data.max_prompt_tokens, -(-cfg.rollout.max_new_tokens // 4)


def row_of(cfg: Config) -> tuple[int, int]:
    """Return the tokens of a full row of whole groups, and the keys that its segments attend to."""
    (prompt, completion), G, tokens = planned_lengths(cfg), cfg.rollout.group_size, cfg.pack.capacity
    return tokens, tokens * G * (prompt + completion) // (prompt + G * completion)


def row_range(cfg: Config, ranks: int) -> tuple[int, int]:
    """Return the tokens of one sequence at full length, which a row must hold, and of a rank's part of the
    longest mini-batch, than which no row is longer."""
    prompt, new, groups = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens, cfg.rollout.prompts_per_step
    rounds = cfg.rollout.max_rounds if cfg.rollout.until == "full" else 1
    tokens = groups * rounds * (prompt + cfg.rollout.group_size * new)
    return prompt + new, prompt + new + tokens // cfg.update.minibatches // ranks


def held_bytes(cfg: Config, shape: Shape, ranks: int) -> int:
    return sum(held_parts(cfg, shape, ranks).values())


def held_parts(cfg: Config, shape: Shape, ranks: int) -> Parts:
    """Count what lies on one rank between passes: weights and moments in float32, but for what is frozen."""
    if is_offloaded(cfg):
        return {}
    lora, learnt, base = cfg.model.lora, trained(shape, cfg.model.lora), 0
    initial = 4 * learnt if has_reference(cfg) else 0
    if lora.rank:  # the frozen base, in what is computed in; an adapter that was read lies there twice
        base = getattr(torch, cfg.model.dtype).itemsize * parameters(shape)
        initial = 4 * learnt if lora.path else 0
    critic = base + 12 * learnt + (initial if lora.rank else 0)
    parts = {"weights": 4 * learnt + base, "moments": 8 * learnt, "reference": initial,
             "critic and its moments": critic if isinstance(cfg.advantage, Gae) else 0}
    return {name: size // ranks for name, size in parts.items()}




def gradient_bytes(cfg: Config, shape: Shape, ranks: int) -> int:
    """Count the gradients of one model on one rank."""
    return 0 if is_offloaded(cfg) else 4 * trained(shape, cfg.model.lora) // ranks


def is_offloaded(cfg: Config) -> bool:
    return cfg.optim.offload and cfg.device == "cuda"


def update_bytes(cfg: Config, shape: Shape, ranks: int) -> int:
    return sum(update_parts(cfg, shape, ranks).values())


def update_parts(cfg: Config, shape: Shape, ranks: int) -> Parts:
    """Count the peak of an update on one rank of a config in which nothing is `auto`."""
    # torch.compile computes what is cheap again by itself: assumed, until a GPU has shown how much.
    how = "selective" if cfg.model.compile and cfg.model.checkpoint_blocks == "none" else (
        cfg.model.checkpoint_blocks)
    element, fused = getattr(torch, cfg.model.dtype).itemsize, cfg.model.attention != "sdpa"
    given = Pass(shape, *row_of(cfg), element, how, cfg.model.logp_chunk, fused, cfg.model.lora,
                 cfg.loss.entropy > 0)
    beside = held_parts(cfg, shape, ranks) | {"gradients": gradient_bytes(cfg, shape, ranks)}
    return beside | pass_parts(given)


# ---- a rollout

def rollout_bytes(cfg: Config, shape: Shape, ranks: int, slots: int) -> int:
    return sum(rollout_parts(cfg, shape, ranks, slots).values())


def rollout_parts(cfg: Config, shape: Shape, ranks: int, slots: int) -> Parts:
    """Count what is in use on one rank while the engine samples in so many slots at full length."""
    roll, element = cfg.rollout, getattr(torch, cfg.model.dtype).itemsize
    spread = roll.tensor_parallel if roll.engine == "vllm" else 0
    return held_parts(cfg, shape, ranks) | engine_parts(
        shape, element, slots, longest(cfg), spread, roll.cache_gib)


def sync_parts(cfg: Config, shape: Shape, ranks: int) -> Parts:
    """Count what is in use on one rank while the engine takes over the weights: its own, of which the largest
    lies gathered beside, and with an adapter was made in float32."""
    element, lora = getattr(torch, cfg.model.dtype).itemsize, cfg.model.lora
    spread = cfg.rollout.tensor_parallel if cfg.rollout.engine == "vllm" else 1
    merged = [inputs * outputs for inputs, outputs in adapted(shape, lora)]
    # A rank casts its own part, and gathers the rest.
    twice = [shape.vocab_size * shape.hidden_size * element * (1 + 1 / ranks),
             max(merged, default=0) * (element * (1 + 1 / ranks) + 2 * max(4, element) / ranks)]
    return held_parts(cfg, shape, ranks) | {
        "engine's weights": parameters(shape) * element // spread, "weights held twice": int(max(twice))}


def longest(cfg: Config) -> int:
    """Return the tokens of the longest sequence that the engine samples."""
    new = max(cfg.rollout.window or cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    return cfg.data.max_prompt_tokens + new


def engine_bytes(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int,
                 cache_gib: float | None = None) -> int:
    return sum(engine_parts(shape, element, slots, max_len, tensor_parallel, cache_gib).values())


def engine_parts(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int,
                 cache_gib: float | None = None) -> Parts:
    """Count an engine's weights, its cache, of a given size or with room for every slot, and what it draws
    from; tensor_parallel=0 is the embedded one."""
    cache = (int(cache_gib * 2**30) if cache_gib else
             cache_bytes(shape, element, slots, max_len, tensor_parallel))
    # Logits and log-probs in float32; probabilities and their sums in float64.
    return {"engine's weights": parameters(shape) * element // max(1, tensor_parallel),
            "KV cache": cache, "what tokens are drawn from": 24 * slots * shape.vocab_size}


def sampling_bytes(shape: Shape, element: int, slots: int, max_len: int, tensor_parallel: int,
                   cache_gib: float | None = None) -> int:
    """Count what an engine samples with beside its weights."""
    parts = engine_parts(shape, element, slots, max_len, tensor_parallel, cache_gib)
    return sum(size for name, size in parts.items() if name != "engine's weights")


