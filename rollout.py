"""Rollout engines: prompts in, completions out, each with the engine's own log-probs.

`TorchEngine` is embedded: our own decoder with a KV cache, on the CPU or on CUDA. `VLLMEngine`
(rollout_vllm.py) is vLLM inside the trainer's process. Both have the three methods of `Engine`, and want a
sync before they generate.

Dimension key:  N samples asked for,  S slots (sequences decoded at once),  V vocabulary,  T prompt tokens,
L length of a slot's cache in tokens,  M new tokens at most.
"""

from time import perf_counter
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from infra import dist
from model import BACKENDS, Decoder, empty_model
from records import EngineSpec, Sample, Segments

PREFILL_TOKENS = 32_768  # of TorchEngine's prompts, padded, computed at once


class Engine(Protocol):
    """What the trainer asks of a rollout engine."""

    eos_ids: frozenset[int]

    def sync(self, policy: Decoder) -> None:
        """Take over the policy's weights."""

    def generate(self, prompts: list[tuple[int, ...]], seeds: list[int], max_new_tokens: int | list[int],
                 temperature: float, top_p: float = 1.0, progress: str | None = None) -> list[Sample]:
        """Sample one completion per prompt."""

    def sleep(self) -> None:
        """Give up the weights until the next sync."""


def sample_tokens(logits_SV: Tensor, uniform_S: Tensor, temperature: float, top_p: float,
                  ) -> tuple[Tensor, Tensor]:
    """Draw one token per row; its log-prob is in nats, before top-p. Temperature 0 takes the likeliest.

    The token is where the cumulative probability passes uniform_S in [0, 1), so the draw is a function of the
    number alone. Sums run in float64: in float32 the tail of a large vocabulary is lost.
    """
    logp_SV = F.log_softmax(logits_SV / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token_S1 = logp_SV.argmax(dim=-1, keepdim=True)
    else:
        prob_SV = logp_SV.double().exp()
        if top_p < 1:
            prob_SV = nucleus(prob_SV, top_p)
        cumulative_SV = prob_SV.cumsum(dim=-1)
        point_S1 = uniform_S[:, None] * cumulative_SV[:, -1:]
        token_S1 = torch.searchsorted(cumulative_SV, point_S1, right=True).clamp_(max=logits_SV.shape[1] - 1)
    return token_S1[:, 0], logp_SV.gather(1, token_S1)[:, 0]


def nucleus(prob_SV: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities reach top_p (arXiv:1904.09751); others get 0."""
    sorted_SV, place_SV = prob_SV.sort(dim=-1, descending=True, stable=True)
    sorted_SV[sorted_SV.cumsum(dim=-1) - sorted_SV >= top_p] = 0
    return torch.zeros_like(prob_SV).scatter_(1, place_SV, sorted_SV)


class Cache:
    """Keys and values of S slots, per layer [S, heads, L, head width], and how many tokens each holds."""

    def __init__(self, model: Decoder, slots: int, length: int):
        shape, weight = model.shape, model.embed_tokens.weight
        size = (slots, shape.kv_heads, length, shape.head_dim)
        self.keys, self.values = ([weight.new_zeros(size) for _ in range(shape.layers)] for _ in range(2))
        self.used_S = torch.zeros(slots, dtype=torch.long, device=weight.device)

    def prefill(self, model: Decoder, prompts: list[tuple[int, ...]], slots: list[int], attention: str,
                ) -> None:
        """Fill `slots` with prompts, each without its last token: the next decoding step reads that one.

        A prompt that several slots share is computed once.
        """
        device = self.used_S.device
        unique = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        which = torch.tensor([unique[p] for p in prompts], device=device)
        slot_S = torch.tensor(slots, device=device)
        lengths = torch.tensor([len(p) - 1 for p in unique], device=device)
        self.used_S[slot_S] = lengths[which]
        longest = int(lengths.max())
        if longest == 0:
            return
        ids_T = torch.tensor([i for p in unique for i in p[:-1]], device=device)
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        position_T = torch.arange(len(ids_T), device=device) - offsets[:-1].repeat_interleave(lengths)
        row_T = torch.arange(len(unique), device=device).repeat_interleave(lengths)
        within = BACKENDS[attention](Segments.plain([len(p) - 1 for p in unique], device))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, x in ((self.keys[layer], k), (self.values[layer], v)):
                rows = x.new_zeros(len(unique), longest, *x.shape[1:])
                rows[row_T, position_T] = x
                cache[slot_S, :, :longest] = rows.transpose(1, 2)[which]
            return within(layer, q, k, v)

        model.hidden(ids_T, position_T, attend)

    def decode(self, model: Decoder, token_S: Tensor) -> Tensor:
        """Append one token to every slot and return the logits [S, V] of the next."""
        row_S = torch.arange(len(token_S), device=token_S.device)
        longest = int(self.used_S.max()) + 1
        seen_SL = torch.arange(longest, device=token_S.device) <= self.used_S[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[row_S, :, self.used_S], values[row_S, :, self.used_S] = k, v
            # The query heads of one key head stand where a longer query would: no copy for grouped attention.
            grouped = q.unflatten(1, (k.shape[1], -1))
            out = F.scaled_dot_product_attention(
                grouped, keys[:, :, :longest], values[:, :, :longest], attn_mask=seen_SL[:, None, None])
            return out.flatten(1, 2)

        logits_SV = model.logits(model.hidden(token_S, self.used_S, attend))
        self.used_S += 1
        return logits_SV

    def select(self, slots: Tensor) -> None:
        """Keep only these slots, in this order."""
        for side in (self.keys, self.values):
            for layer, x in enumerate(side):  # one layer at a time, so that only one is held twice
                side[layer] = x[slots]
        self.used_S = self.used_S[slots]


class Decoding:
    """Which sample each slot works on and how far it has come, and every sample's tokens so far."""

    def __init__(self, model: Decoder, slots: int, prompts: list[tuple[int, ...]], limits: list[int]):
        device, count, max_new_tokens = model.embed_tokens.weight.device, len(prompts), max(limits)
        self.model, self.count = model, count
        longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        self.cache = Cache(model, slots, longest)
        self.owner_S = torch.full((slots,), count, device=device)  # `count`: the slot is idle
        self.token_S, self.step_S = torch.zeros(2, slots, dtype=torch.long, device=device)
        self.limit_N = torch.tensor([*limits, max_new_tokens], device=device)
        self.uniform_SM = torch.zeros(slots, max_new_tokens, dtype=torch.float64, device=device)
        # One row more than there are samples: idle slots decode on, and write there.
        self.ids_NM = torch.zeros(count + 1, max_new_tokens, dtype=torch.long, device=device)
        self.logp_NM = torch.zeros(count + 1, max_new_tokens, dtype=torch.float64, device=device)
        self.made_N = torch.zeros(count + 1, dtype=torch.long, device=device)
        self.ended_N = torch.zeros(count + 1, dtype=torch.bool, device=device)

    def idle(self) -> list[int]:
        return (self.owner_S == self.count).nonzero()[:, 0].tolist()

    def admit(self, slots: list[int], samples: range, prompts: list[tuple[int, ...]], seeds: list[int],
              attention: str) -> None:
        """Start `samples` in `slots`."""
        device = self.owner_S.device
        for part in runs([prompts[i] for i in samples], PREFILL_TOKENS):
            self.cache.prefill(self.model, [prompts[samples[i]] for i in part], [slots[i] for i in part],
                               attention)
        self.owner_S[slots] = torch.tensor(samples, device=device)
        self.token_S[slots] = torch.tensor([prompts[i][-1] for i in samples], device=device)
        self.step_S[slots] = 0
        drawn_SM = np.stack([uniforms(seeds[i], self.uniform_SM.shape[1]) for i in samples])
        self.uniform_SM[slots] = torch.from_numpy(drawn_SM).to(device)

    def shrink(self, idle: list[int]) -> None:
        """Drop idle slots, so that the last long samples do not pay for all that have ended."""
        busy_S = torch.tensor(sorted(set(range(len(self.owner_S))) - set(idle)), device=self.owner_S.device)
        self.cache.select(busy_S)
        for name in ("owner_S", "token_S", "step_S", "uniform_SM"):
            setattr(self, name, getattr(self, name)[busy_S])

    def step(self, temperature: float, top_p: float, eos: Tensor) -> None:
        """One token for every slot; slots whose sample has ended become idle."""
        logits_SV = self.cache.decode(self.model, self.token_S)
        uniform_S = self.uniform_SM.gather(1, self.step_S[:, None])[:, 0]
        self.token_S, logp_S = sample_tokens(logits_SV, uniform_S, temperature, top_p)
        self.ids_NM[self.owner_S, self.step_S] = self.token_S
        self.logp_NM[self.owner_S, self.step_S] = logp_S.double()
        self.step_S += 1
        eos_S = torch.isin(self.token_S, eos)
        self.made_N[self.owner_S], self.ended_N[self.owner_S] = self.step_S, eos_S
        over_S = eos_S | (self.step_S == self.limit_N[self.owner_S])
        self.owner_S = torch.where(over_S, self.count, self.owner_S)
        # Idle slots stay at their first token: their place in the cache must not run over.
        working_S = self.owner_S < self.count
        self.step_S *= working_S
        self.cache.used_S *= working_S

    def samples(self) -> list[Sample]:
        made, ended = self.made_N.tolist(), self.ended_N.tolist()
        ids, logp = self.ids_NM.tolist(), self.logp_NM.tolist()
        return [Sample(ids[i][:made[i]], logp[i][:made[i]], ended[i]) for i in range(self.count)]


class TorchEngine:
    """Batched decoding with our own decoder. It owns a copy of the weights; `sync` brings it up to date.

    A sample is a function of the weights, its prompt and its seed: of neither its batch, its slot nor the
    number of ranks. That holds up to rounding: matrix products of another batch size differ in the last bits,
    which turns a draw about once in a million float32 tokens, and never in practice in float64.
    """

    def __init__(self, model: Decoder, spec: EngineSpec):
        self.model, self.device = model.requires_grad_(False), spec.device
        self.eos_ids, self.slots, self.attention = spec.eos_ids, spec.slots, spec.backend

    @torch.no_grad()
    def sync(self, policy: Decoder) -> None:
        """Take over the policy's weights, in this engine's dtype."""
        if self.model.norm.weight.is_meta:
            self.model.to_empty(device=self.device)
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.copy_(dist.full(theirs))

    def sleep(self) -> None:
        """Give up the weights, to make room for the update. The KV cache lives within `generate` anyway."""
        self.model.to("meta")

    @torch.inference_mode()
    def generate(self, prompts: list[tuple[int, ...]], seeds: list[int], max_new_tokens: int | list[int],
                 temperature: float, top_p: float = 1.0, progress: str | None = None) -> list[Sample]:
        """One completion per prompt, in order. A finished slot takes the next prompt at once.

        max_new_tokens is one for all or one for each. Several completions of one prompt are that prompt
        several times, each with a seed of its own. top_p below 1 is for evaluation: the log-probs are those
        before it. `progress` names a bar of the samples done, with tokens per second; none is shown without
        it. Raises RuntimeError before the first `sync` and after `sleep`.
        """
        if self.model.norm.weight.is_meta:
            raise RuntimeError("the engine has no weights; sync it first")
        if not prompts:
            return []
        eos = torch.tensor(sorted(self.eos_ids), device=self.device)
        count, started, tokens, begun = len(prompts), 0, 0, perf_counter()
        state = Decoding(self.model, min(self.slots, count), prompts, for_each(max_new_tokens, count))
        hidden = True if progress is None else None  # None: unless there is a terminal
        with tqdm(desc=progress, total=count, unit="sample", leave=False, disable=hidden) as bar:
            while True:
                idle = state.idle()
                bar.update(started - len(state.owner_S) + len(idle) - bar.n)
                slots = idle[:count - started]
                if slots:
                    state.admit(slots, range(started, started + len(slots)), prompts, seeds, self.attention)
                    started += len(slots)
                elif len(idle) == len(state.owner_S):
                    return state.samples()
                elif len(idle) * 4 > len(state.owner_S):
                    state.shrink(idle)
                tokens += len(state.owner_S) - len(idle) + len(slots)
                state.step(temperature, top_p, eos)
                bar.set_postfix_str(f"{tokens / (perf_counter() - begun):,.0f} tok/s", refresh=False)


def runs(prompts: list[tuple[int, ...]], tokens: int) -> list[list[int]]:
    """Places of the prompts, cut into runs that take at most so many tokens when padded to their longest, or
    are one prompt; copies behind each other count once."""
    found, count, longest, before = [], 0, 0, None
    for i, prompt in enumerate(prompts):
        if prompt != before or not found:
            count, longest = count + 1, max(longest, len(prompt))
            if not found or count * longest > tokens:
                found.append([])
                count, longest = 1, len(prompt)
        found[-1].append(i)
        before = prompt
    return found


def for_each(max_new_tokens: int | list[int], count: int) -> list[int]:
    return [max_new_tokens] * count if isinstance(max_new_tokens, int) else max_new_tokens


def uniforms(seed: int, count: int) -> np.ndarray:
    """Numbers in [0, 1) for the tokens of one sample. Counter-based: one seed gives one stream anywhere."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


def start_engine(kind: str, spec: EngineSpec) -> Engine:
    """An engine of this kind (rollout.engine) that waits for its first `sync`. Raises ConfigError."""
    if kind == "vllm":
        from rollout_vllm import VLLMEngine  # its tests and its libraries are its own

        return VLLMEngine(spec)
    return TorchEngine(empty_model(spec.folder, spec.dtype), spec)
