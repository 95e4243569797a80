"""One decoder for the families of infra/families.py: Hugging Face folder in, log-probs out.

Tokens are always packed: sequences lie one behind the other in a single [T] axis, so there is no batch
dimension and no padding. The function `attend`, an argument of `forward`, decides which tokens a token sees:
training attends within segments (BACKENDS), decoding to a KV cache (rollout.py). All else is the same.

Dimension key:  T packed tokens,  C tokens with a target,  D width,  H heads (fewer for keys and values than
for queries),  E head width,  V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import call
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from infra.families import Linear, Llama3, Rope, Shape, Yarn
from infra.weights import load_weights, read_shape
from records import Segments

# (layer, q_THE, k_THE, v_THE, window) -> out_THE. A token sees the last `window` tokens, itself included, by
# position; without a window all. None ends the pass. The functions of this type do not repeat it in their
# signatures.
Attend = Callable[[int, Tensor, Tensor, Tensor, int | None], Tensor | None]
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}  # by hidden_act
# Selective recomputation keeps the results of these operations, which take most of a block's time.
KEPT_PRODUCTS = {
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_varlen_attn",
    "_scaled_dot_product_efficient_attention",
    "_flash_attn_varlen_forward"
}


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Compute radians per position of the planes that turn, and the factor of cosines and sines. Scaling
    stretches the waves that turn seldom within the old context, and the others partly or not at all."""
    width = int(head_dim * rope.partial_rotary_factor)
    plane_E = torch.arange(0, width, 2, device="cpu").float()
    freq = rope.rope_theta ** -(plane_E / width)
    if not isinstance(rope, Linear):
        return freq, 1.0
    kept, size = 0, 1.0
    if isinstance(rope, Llama3):
        # How often the wave turns within the old context.
        turns = rope.original_max_position_embeddings * freq / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    elif isinstance(rope, Yarn):
        length = rope.original_max_position_embeddings / (2 * math.pi)
        # The planes that turn so often within the old context.
        low, high = (width / 2 * math.log(length / turns, rope.rope_theta)
                     for turns in (rope.beta_fast, rope.beta_slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        kept = 1 - ((plane_E / 2 - low) / (high - low or 0.001)).clamp(0, 1)
        growth, both = 0.1 * math.log(rope.factor), rope.mscale and rope.mscale_all_dim
        above, below = (rope.mscale, rope.mscale_all_dim) if both else (1, 0)
        size = rope.attention_factor or (above * growth + 1) / (below * growth + 1)
    return kept * freq + (1 - kept) * freq / rope.factor, size


def rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Apply the rotary embedding in Hugging Face's layout: plane i is (x[i], x[i + E/2])."""
    left, right = x_THE.chunk(2, dim=-1)
    turned_THE = torch.cat([-right, left], dim=-1)
    return x_THE * cos_TE[:, None] + turned_THE * sin_TE[:, None]


def rotate_neighbours(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate the first numbers of each head alone; plane i is (x[2i], x[2i + 1]). The numbers change places
    first: they do so in queries and keys, so no score changes."""
    width = cos_TE.shape[-1]
    planes_THE = x_THE[..., :width].unflatten(-1, (-1, 2)).mT.flatten(-2)
    return torch.cat([rotate(planes_THE, cos_TE, sin_TE), x_THE[..., width:]], dim=-1)


class OnePlusNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x), self.normalized_shape, weight, self.eps).to(x.dtype)


class NormOverHeads(nn.RMSNorm):
    """RMSNorm over the numbers of all heads together."""

    def forward(self, x_THE: Tensor) -> Tensor:
        return super().forward(x_THE.flatten(1)).view_as(x_THE)


class Attention(nn.Module):
    """The linear layers around attention; `forward` computes its queries, keys and values."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head_dim
        width = shape.hidden_size
        query, key = (heads * shape.head_dim for heads in (shape.heads, shape.kv_heads))
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, size, bias=shape.qkv_bias) for size in (query, key, key))
        self.o_proj = nn.Linear(query, width, bias=shape.out_bias)
        self.q_norm = self.k_norm = nn.Identity()
        if shape.family.qk_norm == "head":
            self.q_norm = make_norm(shape, shape.head_dim)
            self.k_norm = make_norm(shape, shape.head_dim)
        elif shape.family.qk_norm:
            self.q_norm = NormOverHeads(query, eps=shape.norm_eps)
            self.k_norm = NormOverHeads(key, eps=shape.norm_eps)
        self.rotate = rotate_neighbours if shape.family.neighbours else rotate

    def forward(self, x_TD: Tensor, rotation: tuple) -> tuple[Tensor, Tensor, Tensor]:
        cos_TE, sin_TE, scale = rotation
        by_head = -1, self.head_dim
        q_THE = self.q_norm(self.q_proj(x_TD).unflatten(-1, by_head))
        k_THE = self.k_norm(self.k_proj(x_TD).unflatten(-1, by_head))
        v_THE = self.v_proj(x_TD).unflatten(-1, by_head)
        if cos_TE is not None:
            q_THE = self.rotate(q_THE, cos_TE, sin_TE)
            k_THE = self.rotate(k_THE, cos_TE, sin_TE)
        if scale is not None:
            q_THE = q_THE * scale
        return q_THE, k_THE, v_THE


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.activate = ACTIVATIONS[shape.activation]
        self.fused = shape.family.fused_mlp
        if self.fused:
            self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        else:
            self.gate_proj = nn.Linear(width, inner, bias=False)
            self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x_TD), self.up_proj(x_TD)
        return self.down_proj(self.activate(gate) * up)


class Block(nn.Module):
    """Attention and an MLP, each between two norms, of which families leave some out."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.layer = layer
        self.window = shape.windows[layer]
        names = shape.family.norms
        self.norms = [make_norm(shape, shape.hidden_size) if name else nn.Identity() for name in names]
        first, second, third, fourth = zip(names, self.norms, strict=True)
        attention, mlp = ("self_attn", Attention(shape)), ("mlp", MLP(shape))
        for name, module in (first, attention, second, third, mlp, fourth):
            if name:
                self.add_module(name, module)

    def forward(self, x_TD: Tensor, rotation: tuple, attend: Attend) -> Tensor:
        q_THE, k_THE, v_THE = self.before(x_TD, rotation)
        attended_THE = attend(self.layer, q_THE, k_THE, v_THE, self.window)
        return x_TD if attended_THE is None else self.after(x_TD, attended_THE)

    def before(self, x_TD: Tensor, rotation: tuple) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn(self.norms[0](x_TD), rotation)

    def after(self, x_TD: Tensor, attended_THE: Tensor) -> Tensor:
        _, behind_attention, before_mlp, behind_mlp = self.norms
        x_TD = x_TD + behind_attention(self.self_attn.o_proj(attended_THE.flatten(1)))
        return x_TD + behind_mlp(self.mlp(before_mlp(x_TD)))


def make_norm(shape: Shape, width: int) -> nn.RMSNorm:
    kind = OnePlusNorm if shape.family.one_plus else nn.RMSNorm
    return kind(width, eps=shape.norm_eps)


def keep_products(context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op._schema.name.split("::")[1] in KEPT_PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# No random number is drawn in a block.
checkpoint_block = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
selective = partial(create_selective_checkpoint_contexts, keep_products)
# model.checkpoint_blocks -> how a block is called. Backward computes again the results that forward dropped.
BLOCK_CALLS = {
    "none": call,
    "selective": partial(checkpoint_block, context_fn=selective),
    "all": checkpoint_block
}


class Decoder(nn.Module):
    """The whole model: embedding, blocks, last norm and head. `forward` is the pass of training, and decoding
    calls `hidden` and `logits`. Parameters have Hugging Face's names without the leading "model."."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.checkpoint_blocks = "none"  # a key of BLOCK_CALLS
        self.logp_chunk = 1024           # positions with [V] logits in memory at once
        self.elementwise = log_prob, logits_gradient
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, i) for i in range(shape.layers))
        self.norm = make_norm(shape, shape.hidden_size)
        if not shape.tied:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        # Not buffers: a cast of the model must not round them.
        self.frequencies = {rope: rope_frequencies(rope, shape.head_dim) for rope in shape.ropes if rope}

    @property
    def head_VD(self) -> Tensor:
        return self.embed_tokens.weight if self.shape.tied else self.lm_head.weight

    @property
    def quadratic(self) -> float:
        """Compute the cost of attention over a sequence's squared length, in units of one token through all
        linear layers: a query meets half of its sequence on average, with two operations per key and head
        dimension for the score and two for the value; a weight takes two operations per token. Layers with a
        window are taken as if they had none.
        """
        weights = sum(p.numel() for p in self.parameters())
        return self.shape.layers * self.shape.heads * self.shape.head_dim / weights

    def forward(
        self,
        ids_T: Tensor,
        position_T: Tensor,
        attend: Attend,
        predict_C: Tensor,
        target_C: Tensor,
        temperature: float
    ) -> Tensor:
        """Compute log softmax(logits / temperature)[target] after the tokens at predict_C, in nats, [C].
        Training calls the module, so that weights spread over the ranks are gathered."""
        hidden_TD = self.hidden(ids_T, position_T, attend)
        return ChunkedLogProb.apply(
            hidden_TD[predict_C], self.head_VD, target_C, temperature, self.logp_chunk, self.elementwise)

    def hidden(self, ids_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Compute final hidden states, [T, D], for `logits` or for log-probs of targets."""
        x_TD = self.embed_tokens(ids_T)
        if self.shape.family.rooted:  # Gemma's factor, rounded as the embedding is
            x_TD = x_TD * torch.tensor(self.shape.hidden_size ** 0.5, dtype=x_TD.dtype)
        rotations = self.rotations(position_T, x_TD.dtype)
        call_block = BLOCK_CALLS[self.checkpoint_blocks if torch.is_grad_enabled() else "none"]
        for block in self.layers:
            x_TD = call_block(block, x_TD, rotations[self.shape.ropes[block.layer]], attend)
        return self.norm(x_TD)

    def rotations(self, position_T: Tensor, dtype: torch.dtype) -> dict[Rope | None, tuple]:
        """Compute each rope's rotation of queries and keys at these positions: cos_TE, sin_TE and a factor of
        queries. None in its place leaves them as they are; a layer without a rope has the rope None."""
        scale = self.shape.query_scale
        rotations = {None: (None, None, scale)}
        for rope, (freq, size) in self.frequencies.items():
            freq = freq.to(position_T.device)
            self.frequencies[rope] = freq, size
            angle_TE = (position_T[:, None].float() * freq).repeat(1, 2)
            if isinstance(rope, Yarn) and rope.llama_4_scaling_beta:
                contexts_T11 = (position_T[:, None, None] / rope.original_max_position_embeddings).floor()
                scale = (1 + rope.llama_4_scaling_beta * (1 + contexts_T11).log()).to(dtype)
            rotations[rope] = (angle_TE.cos() * size).to(dtype), (angle_TE.sin() * size).to(dtype), scale
        return rotations

    def compile_passes(self) -> None:
        """Fuse elementwise work by torch.compile, in blocks before and after attention, and in the head."""
        fused = partial(torch.compile, dynamic=True)  # the same kernels for rows of all lengths
        for block in self.layers:
            block.before = fused(block.before)
            block.after = fused(block.after)
        self.elementwise = fused(log_prob), fused(logits_gradient)

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Compute logits [C, V], at least float32, for a decoding step; training calls `forward`."""
        return matmul_float32(hidden_CD, self.head_VD.T)

    def named_hf_tensors(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its Hugging Face name. Adapters (leaves/lora) are merged into theirs, or
        left out, for no folder has them."""
        for path, module in self.named_modules():
            adapted = merged and hasattr(module, "merged")
            own = module.merged() if adapted else module.named_parameters(recurse=False)
            for name, tensor in own:
                if not name.endswith(("_A", "_B")):
                    yield hf_name(f"{path}.{name}"), tensor.detach()


def hf_name(name: str) -> str:
    """Name a decoder's parameter as Hugging Face does."""
    return name if name.startswith("lm_head.") else f"model.{name}"


class ChunkedLogProb(torch.autograd.Function):
    """Log-probs of the targets from hidden states, with the logits of one chunk at a time in memory.

    Backward recomputes each chunk's logits, so neither pass stores [C, V]. Products of 16-bit
    numbers stay float32.
    """

    @staticmethod
    def forward(ctx, hidden_CD, head_VD, target_C, temperature, chunk, elementwise):
        log_prob, ctx.logits_gradient = elementwise
        pieces = []
        for hidden, target in zip(hidden_CD.split(chunk), target_C.split(chunk), strict=True):
            logits_CV = divide_by_temperature(matmul_float32(hidden, head_VD.T), temperature)
            pieces.append(log_prob(logits_CV, target))
            del logits_CV  # before the next chunk's are made
        logp_C = torch.cat(pieces)
        ctx.save_for_backward(hidden_CD, head_VD, target_C, logp_C)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logp_C

    @staticmethod
    def backward(ctx, grad_C):
        hidden_CD, head_VD, target_C, logp_C = ctx.saved_tensors
        scale_C = divide_by_temperature(grad_C.clone(), ctx.temperature)
        grad_hidden_CD = torch.empty_like(hidden_CD)
        grad_head_VD = None  # of a frozen head
        if ctx.needs_input_grad[1]:
            grad_head_VD = torch.zeros_like(head_VD, dtype=logp_C.dtype)
        columns = hidden_CD, target_C, logp_C, scale_C, grad_hidden_CD
        pieces = [column.split(ctx.chunk) for column in columns]
        for hidden, target, logp, scale, grad_hidden in zip(*pieces, strict=True):
            logits_CV = divide_by_temperature(matmul_float32(hidden, head_VD.T), ctx.temperature)
            grad_CV = ctx.logits_gradient(logits_CV, target, logp, scale).to(hidden.dtype)
            torch.mm(grad_CV, head_VD, out=grad_hidden)
            if grad_head_VD is not None:
                matmul_float32(grad_CV.T, hidden, onto=grad_head_VD)
            del logits_CV, grad_CV  # before the next chunk's are made
        if grad_head_VD is not None:
            grad_head_VD = grad_head_VD.to(head_VD.dtype)
        return grad_hidden_CD, grad_head_VD, None, None, None, None


def log_prob(logits_CV: Tensor, target_C: Tensor) -> Tensor:
    """Compute log softmax(logits)[target], [C]."""
    logp_CV = logits_CV.log_softmax(dim=-1)
    return logp_CV.gather(1, target_C[:, None])[:, 0]


def logits_gradient(logits_CV: Tensor, target_C: Tensor, logp_C: Tensor, scale_C: Tensor) -> Tensor:
    """Compute the gradient of scale x log_prob, scale (onehot(target) - softmax): [C, V].

    The target's entry 1 - p comes from its log-prob: the difference itself would lose digits.
    """
    grad_CV = logits_CV.softmax(dim=-1).mul_(-scale_C[:, None])
    of_target_C = -scale_C * logp_C.expm1()
    return grad_CV.scatter_(1, target_C[:, None], of_target_C[:, None])


def with_entropy(logits_CV: Tensor, target_C: Tensor) -> Tensor:
    """Compute log softmax(logits)[target] and the entropy of softmax(logits), in nats, [C, 2]."""
    logp_CV = logits_CV.log_softmax(dim=-1)
    entropy_C = -logp_CV.exp().mul_(logp_CV).sum(dim=-1)
    logp_C = logp_CV.gather(1, target_C[:, None])[:, 0]
    return torch.stack([logp_C, entropy_C], dim=1)


def entropy_gradient(logits_CV: Tensor, target_C: Tensor, out_C2: Tensor, scale_C2: Tensor) -> Tensor:
    """Compute the gradient of both, each times its scale, [C, V]; overwrites the logits. The gradient of the
    entropy H = -sum p log p is -p (log p + H).
    """
    total_CV = logits_gradient(logits_CV, target_C, out_C2[:, 0], scale_C2[:, 0])
    logp_CV = logits_CV.sub_(logits_CV.logsumexp(dim=-1, keepdim=True))
    grad_CV = logp_CV.exp()
    grad_CV.mul_(logp_CV.add_(out_C2[:, 1:]))
    return total_CV.sub_(grad_CV.mul_(scale_C2[:, 1:]))


WITH_ENTROPY = with_entropy, entropy_gradient  # for Decoder.elementwise


def divide_by_temperature(x: Tensor, temperature: float) -> Tensor:
    """Divide in place by the sampling temperature, unless it is 1."""
    return x if temperature == 1 else x.div_(temperature)


def matmul_float32(left: Tensor, right: Tensor, onto: Tensor | None = None) -> Tensor:
    """Compute left @ right in at least float32, or add it to `onto` in place. A product of 16-bit matrices is
    never rounded to 16 bits: on the CPU, which has no such kernel, they are widened first."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.device.type == "cpu":
        left, right = left.to(wide), right.to(wide)
    late = {} if left.dtype == wide else {"out_dtype": wide}
    if onto is None:
        return torch.mm(left, right, **late)
    return torch.addmm(onto, left, right, out=onto, **late)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sdpa_padded(segments: Segments) -> Attend:
    """Pad segments to batches of like lengths. All without a prefix are one batch, which needs no mask."""
    batches: dict[int, list[int]] = defaultdict(list)
    for i, (queries, keys) in enumerate(zip(segments.queries, segments.keys, strict=True)):
        batches[queries.bit_length() if keys > queries else 0].append(i)
    padded = [pad_batch(segments, members) for members in batches.values()]
    back_T = torch.cat([query_Q for query_Q, _ in padded]).argsort()

    def attend(*given):
        out = torch.cat([attend_batch(*given) for _, attend_batch in padded])
        return out.index_select(0, back_T)

    return attend


def pad_batch(segments: Segments, members: list[int]) -> tuple[Tensor, Attend]:
    """Make the attention of some segments; returns the tokens that are its queries, in order, and itself.

    Keys of a prefix are padded on the left and a segment's own on the right: query i sees the own keys 0 to i
    in every segment.
    """
    device = segments.key_K.device
    queries = [segments.queries[i] for i in members]
    prefixes = [segments.keys[i] - segments.queries[i] for i in members]
    query_S, prefix_S = torch.tensor([queries, prefixes], device=device)[:, :, None]
    first_S, first_key_S = segments.start_2S[:, members, None]
    place_M = torch.arange(max(queries), device=device)
    place_L = torch.arange(-max(prefixes), len(place_M), device=device)
    query_SM = first_S + place_M.minimum(query_S - 1)
    key_place_SL = (place_L + prefix_S).clamp(min=0).minimum(query_S + prefix_S - 1)
    key_SL = segments.key_K[first_key_S + key_place_SL]
    real_Q = (place_M < query_S).flatten().nonzero()[:, 0]

    def pad(x: Tensor, index_SL: Tensor) -> Tensor:
        return x.index_select(0, index_SL.flatten()).unflatten(0, index_SL.shape).transpose(1, 2)

    @cache
    def mark_seen(window):  # None: all keys up to a query's own, without a prefix
        reach = window or math.inf
        if len(place_M) == len(place_L) <= reach:
            return None
        back_ML = place_M[:, None] - place_L  # how far a key is behind a query
        seen_SML = (place_L >= -prefix_S)[:, None] & (back_ML >= 0) & (back_ML < reach)
        return seen_SML[:, None]

    def attend(layer, q, k, v, window):
        seen_SML = mark_seen(window)
        out = F.scaled_dot_product_attention(
            pad(q, query_SM),
            pad(k, key_SL),
            pad(v, key_SL),
            attn_mask=seen_SML,
            is_causal=seen_SML is None,
            enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, real_Q)

    return query_SM.flatten()[real_Q], attend


def attend_by_kernel(segments: Segments, kernel: Callable[..., Tensor]) -> Attend:
    """Make the attention that a kernel computes from q, each segment's keys and values, their places, and how
    many keys a query sees before and behind its own. A segment's keys lie in the order of their positions."""
    places = *segments.start_2S, max(segments.queries), max(segments.keys)

    def attend(layer, q, k, v, window):
        k, v = k.index_select(0, segments.key_K), v.index_select(0, segments.key_K)
        return kernel(q, k, v, *places, window_size=((window or 0) - 1, 0))  # -1: all

    return attend


def flash_varlen(segments: Segments) -> Attend:
    """Attend by flash-attn's kernel. Untested until a machine that has it has run `pytest -m gpu`."""
    from flash_attn import flash_attn_varlen_func
    return attend_by_kernel(segments, partial(flash_attn_varlen_func, causal=True))


BACKENDS = {  # model.attention -> function that makes the attention of segments
    "sdpa": sdpa_padded,
    "varlen": partial(attend_by_kernel, kernel=partial(varlen_attn, enable_gqa=True)),  # torch's own, on CUDA
    "flash": flash_varlen,
}


def empty_model(folder: Path, dtype: torch.dtype) -> Decoder:
    """Build the decoder that config.json describes on the meta device: shapes without weights."""
    shape = read_shape(folder)
    with torch.device("meta"):
        return Decoder(shape).to(dtype)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load the decoder of a folder, unsharded, on one device. Raises ConfigError as `load_weights`."""
    model = empty_model(folder, dtype).to_empty(device=device)
    load_weights(model, folder)
    return model
