"""Rollout engines: prompts in, completions out, each with the engine's own log-probs.

`TorchEngine` is embedded: our own decoder with a KV cache, on the CPU or on CUDA. `VLLMEngine`
(rollout_vllm.py) is vLLM inside the trainer's process. Both have the three methods of `Engine`, and want a
sync before they generate.

Dimension key:  N samples asked for,  S slots (sequences decoded at once),  P prompts held,  V vocabulary,
T prompt tokens,  M new tokens at most.
"""

from collections import Counter
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from infra import dist
from model import BACKENDS, Decoder, at_least_float32, empty_model
from records import EngineSpec, Sample, Segments, Stops

PREFILL_TOKENS = 4096  # of TorchEngine's prompts, padded, computed at once


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
    logp_SV = F.log_softmax(logits_SV if temperature in (0, 1) else logits_SV / temperature, dim=-1)
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
    """Keys and values, a pair per layer: of each prompt once, however many of the S slots answer it, and of
    what each slot has read since. The first axis of both counts the key heads of all prompts or slots. The
    queries of all slots that answer a prompt meet its keys in one product (as in arXiv:2402.05099), and one
    softmax runs over these scores and those of the slot's own keys."""

    def __init__(self, model: Decoder, slots: int, prompts: list[tuple[int, ...]], max_new_tokens: int):
        weight, layers, width = model.embed_tokens.weight, range(model.shape.layers), model.shape.head_dim
        self.prompts, self.heads, self.held = prompts, model.shape.kv_heads, []  # held: each row's prompt
        prompt, own = (0, max(map(len, prompts)) - 1 or 1, width), (slots * self.heads, max_new_tokens, width)
        self.of_prompts = [(weight.new_zeros(prompt), weight.new_zeros(prompt)) for _ in layers]
        self.of_slots = [(weight.new_zeros(own), weight.new_zeros(own)) for _ in layers]
        self.used_S = torch.zeros(slots, dtype=torch.long, device=weight.device)

    def admit(self, model: Decoder, prompt_S: list[int], attention: str) -> None:
        """Give every slot the prompt of this number, or none where it is -1. New ones are computed, in rows
        that no slot needs any longer, without the last token: the next decoding step reads that one."""
        slots_of = Counter(prompt_S)
        new = sorted(slots_of.keys() - {-1, *self.held}, key=lambda number: (slots_of[number], number))
        rows = [row for row, number in enumerate(self.held) if number not in slots_of][:len(new)]
        more = len(new) - len(rows)
        for layer, pair in enumerate(self.of_prompts if more else ()):
            self.of_prompts[layer] = [F.pad(x, (0, 0, 0, 0, 0, more * self.heads)) for x in pair]
        rows += range(len(self.held), len(self.held) + more)
        row_of = {number: row for row, number in enumerate(self.held) if row not in rows}
        row_of |= dict(zip(new, rows, strict=True))
        self.held = sorted(row_of, key=row_of.get)
        placed = [(self.prompts[number], row_of[number]) for number in new if len(self.prompts[number]) > 1]
        for run in runs(placed):
            self.prefill(model, run, attention)
        self.arrange(torch.tensor([row_of.get(number, 0) for number in prompt_S], device=self.used_S.device))

    def prefill(self, model: Decoder, placed: list[tuple[tuple[int, ...], int]], attention: str) -> None:
        """Compute prompts together, each into its row."""
        device, sizes = self.used_S.device, [len(prompt) - 1 for prompt, _ in placed]
        ids_T = torch.tensor([i for prompt, _ in placed for i in prompt[:-1]], device=device)
        position_T = torch.cat([torch.arange(size, device=device) for size in sizes])
        row_T = torch.tensor([row for prompt, row in placed for _ in prompt[:-1]], device=device)
        within = BACKENDS[attention](Segments.plain(sizes, device))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, x in zip(self.of_prompts[layer], (k, v), strict=True):
                cache.unflatten(0, (-1, self.heads))[row_T, :, position_T] = x
            return within(layer, q, k, v)

        model.hidden(ids_T, position_T, attend)

    def arrange(self, row_S: Tensor) -> None:
        """Lay out the queries by the rows of their prompts: one place in each row before the first that
        several slots answer, and from there on as many as the slots of one need."""
        lengths, rows = [len(self.prompts[number]) - 1 for number in self.held], len(self.held)
        self.row_S, self.longest = row_S, max(lengths) or 1
        self.length_S = torch.tensor(lengths, device=row_S.device)[row_S]
        rank_S = (row_S[:, None] == row_S).tril(-1).sum(dim=1)  # among the slots of the same prompt
        count_P = row_S.bincount(minlength=rows)
        cut = int((count_P > 1).int().argmax())
        row_P, head_H = (torch.arange(n, device=row_S.device) for n in (rows, self.heads))
        width_P = torch.where(row_P < cut, 1, count_P.max())
        start_P = (width_P.cumsum(0) - width_P) * self.heads
        place = start_P[row_S, None] + head_H * width_P[row_S, None] + rank_S[:, None]
        self.place, self.slot = place.flatten(), row_S.new_zeros(int(width_P.sum()) * self.heads)
        self.slot[self.place] = torch.arange(len(self.place), device=row_S.device)  # 0 where no slot is
        self.cut, self.alone = cut * self.heads, torch.equal(row_S, row_P)  # alone: one slot a row, in order

    def by_prompt(self, x: Tensor, cache: Tensor) -> Tensor:
        """Multiply what each slot has by what is kept of its prompt."""
        if self.alone:
            return torch.bmm(x, cache)
        pairs = zip(*(t.tensor_split([self.cut]) for t in (x.index_select(0, self.slot), cache)), strict=True)
        products = [torch.bmm(left.view(len(right), -1, x.shape[-1]), right).view(len(left), x.shape[1], -1)
                    for left, right in pairs if len(left)]
        return torch.cat(products).index_select(0, self.place)

    def decode(self, model: Decoder, token_S: Tensor) -> Tensor:
        """Append one token to every slot and return the logits [S, V] of the next."""
        longest, own, device = self.longest, int(self.used_S.max()) + 1, token_S.device
        column = torch.arange(max(longest, own), device=device)
        seen = column[:longest] < self.length_S[:, None], column[:own] <= self.used_S[:, None]
        bias = torch.where(torch.cat(seen, dim=1), 0.0, -torch.inf).repeat_interleave(self.heads, 0)[:, None]
        row, used = torch.arange(len(bias), device=device), self.used_S.repeat_interleave(self.heads)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, x in zip(self.of_slots[layer], (k, v), strict=True):
                cache[row, used] = x.flatten(0, 1)
            # Halves are only kept: products of theirs that are rounded to halves again lose too much.
            prompt_keys, prompt_values = (at_least_float32(x[:, :longest]) for x in self.of_prompts[layer])
            keys, values = (at_least_float32(x[:, :own]) for x in self.of_slots[layer])
            # The query heads of one key head stand where a longer query would: no copy for grouped attention.
            grouped = q.reshape(len(row), -1, q.shape[-1]).to(keys.dtype) * q.shape[-1] ** -0.5
            scores = self.by_prompt(grouped, prompt_keys.mT), torch.bmm(grouped, keys.mT)
            weight = torch.cat(scores, dim=-1).add_(bias).softmax(dim=-1)
            out = torch.bmm(weight[..., longest:], values)
            out += self.by_prompt(weight[..., :longest], prompt_values)
            return out.view(q.shape).to(q.dtype)

        logits_SV = model.logits(model.hidden(token_S, self.length_S + self.used_S, attend))
        self.used_S += 1
        return logits_SV

    def select(self, slots: Tensor) -> None:
        """Keep only these slots, in this order, and the prompts that they answer."""
        rows, row_S = self.row_S[slots].unique(return_inverse=True)
        for side, kept in ((self.of_slots, slots), (self.of_prompts, rows)):
            for layer, pair in enumerate(side):  # one layer at a time, so that only one is held twice
                side[layer] = [x.unflatten(0, (-1, self.heads))[kept].flatten(0, 1) for x in pair]
        self.used_S, self.held = self.used_S[slots], [self.held[row] for row in rows.tolist()]
        self.arrange(row_S)


class Decoding:
    """Which sample each slot works on and how far it has come, and every sample's tokens so far."""

    def __init__(self, model: Decoder, slots: int, prompts: list[tuple[int, ...]], limits: list[int]):
        device, count, max_new_tokens = model.embed_tokens.weight.device, len(prompts), max(limits)
        self.model, self.count = model, count
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        self.cache = Cache(model, slots, list(number), max_new_tokens)
        self.prompt_N = [*(number[prompt] for prompt in prompts), -1]
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
        self.owner_S[slots] = torch.tensor(samples, device=device)
        self.cache.admit(self.model, [self.prompt_N[i] for i in self.owner_S.tolist()], attention)
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

    def step(self, temperature: float, top_p: float, eos: Tensor, stops: Stops | None) -> None:
        """Sample one token for every slot; slots whose sample has ended become idle."""
        logits_SV = self.cache.decode(self.model, self.token_S)
        uniform_S = self.uniform_SM.gather(1, self.step_S[:, None])[:, 0]
        self.token_S, logp_S = sample_tokens(logits_SV, uniform_S, temperature, top_p)
        self.ids_NM[self.owner_S, self.step_S] = self.token_S
        self.logp_NM[self.owner_S, self.step_S] = logp_S.double()
        self.step_S += 1
        ended_S = torch.isin(self.token_S, eos)
        if stops:
            ended_S |= self.reached(stops)
        self.made_N[self.owner_S], self.ended_N[self.owner_S] = self.step_S, ended_S
        over_S = ended_S | (self.step_S == self.limit_N[self.owner_S])
        self.owner_S = torch.where(over_S, self.count, self.owner_S)
        # Idle slots stay at their first token: their place in the cache must not run over.
        working_S = self.owner_S < self.count
        self.step_S *= working_S
        self.cache.used_S *= working_S

    def reached(self, stops: Stops) -> Tensor:
        """Mark the slots whose newest token completes a stop text."""
        place_ST = self.step_S[:, None] + torch.arange(-stops.tokens, 0, device=self.step_S.device)
        recent_ST = self.ids_NM[self.owner_S[:, None], place_ST.clamp(min=0)].tolist()
        tails = [ids[-made:] for ids, made in zip(recent_ST, self.step_S.tolist(), strict=True)]
        return torch.tensor(stops.reached(tails), device=self.step_S.device)

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
        self.stops = spec.stops

    @torch.no_grad()
    def sync(self, policy: Decoder) -> None:
        """Take over the policy's weights, in this engine's dtype."""
        if self.model.norm.weight.is_meta:
            self.model.to_empty(device=self.device)
        for mine, (_, theirs) in zip(self.model.parameters(), policy.named_hf_tensors(), strict=True):
            mine.copy_(dist.full(theirs, mine.device, mine.dtype))

    def sleep(self) -> None:
        """Give up the weights, to make room for the update. The KV cache lives within `generate` anyway."""
        self.model.to("meta")

    @torch.inference_mode()
    def generate(self, prompts: list[tuple[int, ...]], seeds: list[int], max_new_tokens: int | list[int],
                 temperature: float, top_p: float = 1.0, progress: str | None = None) -> list[Sample]:
        """Sample one completion per prompt, in order. A finished slot takes the next prompt at once.

        max_new_tokens is a number for all, or a list of one for each. Several completions of a prompt are
        that prompt several times, each with a seed of its own. top_p below 1 is for evaluation: the log-probs
        are those before it. `progress` names a bar, of samples done and tokens per second; without a name
        there is none. Raises RuntimeError before the first `sync` and after `sleep`.
        """
        if self.model.norm.weight.is_meta:
            raise RuntimeError("the engine has no weights; sync it first")
        if not prompts:
            return []
        eos = torch.tensor(sorted(self.eos_ids), device=self.device)
        count, started, tokens, start = len(prompts), 0, 0, perf_counter()
        limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else max_new_tokens
        state = Decoding(self.model, min(self.slots, count), prompts, limits)
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
                state.step(temperature, top_p, eos, self.stops)
                bar.set_postfix_str(f"{tokens / (perf_counter() - start):,.0f} tok/s", refresh=False)


def runs(placed: list[tuple[tuple[int, ...], int]]) -> list[list[tuple[tuple[int, ...], int]]]:
    """Cut (prompt, row)s, the shortest first, into runs of at most PREFILL_TOKENS when padded, or of one."""
    cut = []
    for prompt, row in sorted(placed, key=lambda pair: len(pair[0])):
        if not cut or (len(cut[-1]) + 1) * len(prompt) > PREFILL_TOKENS:
            cut.append([])
        cut[-1].append((prompt, row))
    return cut


def uniforms(seed: int, count: int) -> np.ndarray:
    """Draw numbers in [0, 1) for the tokens of a sample; a seed gives the same ones anywhere (Philox)."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


def start_engine(kind: str, spec: EngineSpec) -> Engine:
    """Make an engine of this kind (rollout.engine), which waits for its first `sync`. Raises ConfigError."""
    if kind == "vllm":
        from rollout_vllm import VLLMEngine  # its tests and its libraries are its own
        return VLLMEngine(spec)
    return TorchEngine(empty_model(spec.folder, spec.dtype), spec)
