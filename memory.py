"""Count the bytes of a training step and of the rollout from shapes, and measure those of the machine."""

import os
import resource

import torch

from infra import dist
from infra.weights import Shape
from model import Decoder


def peak_bytes(shape: Shape, tokens: int, recompute: bool, element: int, chunk: int = 1024, ranks: int = 1,
               ) -> int:
    """Count the peak of a training step on one rank, in bytes, all tokens of the row completion tokens.

    Args:    tokens    of the row;  ranks  that the weights are spread over
             recompute model.checkpoint_blocks
             element   bytes of a computed number
             chunk     model.logp_chunk
    Counted: state     weights, gradients and two moments in float32, spread over the ranks
             gathered  the embedding (and head), one block, and the gradients of both, in the computation's
                       dtype and as float32
             blocks    what backward needs of each block, and one block's gradients; with `recompute` the
                       input of each alone, and all of one
             loss      logits of a chunk, as float32, and again as their gradient
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(shape).parameters())
    root = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    block = (parameters - root) // shape.layers
    state = 16 * parameters // ranks
    gathered = (root + block) * (2 * element + 4)
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # What autograd keeps of a block, per token: of each norm its input and two stages; queries, keys and
    # values as they are and padded; what attention gives, likewise; four products of the MLP.
    attended = 2 * heads + 2 * shape.heads * shape.head_dim
    inside = 6 * shape.hidden_size + attended + 4 * shape.intermediate_size
    kept = shape.layers * shape.hidden_size + 2 * inside if recompute else (shape.layers + 1) * inside
    return state + gathered + tokens * kept * element + 2 * chunk * shape.vocab_size * 4


def cache_bytes(model: Decoder, slots: int, max_len: int, tensor_parallel: int = 1) -> int:
    """Count one rank's KV cache in vLLM: room for every slot at full length, in blocks of up to 128 tokens,
    and one block more."""
    block, heads = 128, max(1, model.shape.kv_heads // tensor_parallel)
    return (slots * -(-max_len // block) + 1) * block * token_bytes(model, heads)


def embedded_cache_bytes(model: Decoder, slots: int, new_tokens: int, prompts: int, prompt_tokens: int,
                         ) -> int:
    """Count the KV cache of rollout.TorchEngine: so many new tokens of every slot, and each prompt once."""
    return (slots * new_tokens + prompts * prompt_tokens) * token_bytes(model, model.shape.kv_heads)


def token_bytes(model: Decoder, heads: int) -> int:
    """Count the keys and values of one token in all layers."""
    return 2 * model.shape.layers * heads * model.shape.head_dim * model.embed_tokens.weight.element_size()


def in_use(device: torch.device) -> float:
    """Return the bytes that this rank has taken; torch gives nothing back, so this is a peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fullest(bytes_here: float, device: torch.device) -> float:
    """Return the bytes of the fullest rank, or of all ranks of a CPU machine, which share its memory.
    Collective."""
    ranks = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ranks * dist.max_over_ranks(bytes_here)


def total_bytes(device: torch.device) -> float:
    """Return the bytes of the smallest GPU, or of the smallest machine's memory. Collective."""
    cuda = device.type == "cuda"
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return -dist.max_over_ranks(-(torch.cuda.mem_get_info(device)[1] if cuda else host))
