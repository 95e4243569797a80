"""Rollout engines: prompts in, completions out, each with the engine's own log-probs.

`TorchEngine` is embedded: our own decoder with a KV cache, on the CPU or on CUDA. `VLLMEngine`
(rollout_vllm.py) is vLLM inside the trainer's process. Both want a sync before they generate.

Begin with the loop of `TorchEngine.generate`: it gives idle slots the next requests (`Decoding.admit`),
computes logits (`Cache.decode`), and draws a token for every slot (`Decoding.take`).

Dimension key:  N samples asked for,  S slots (sequences decoded at once),  P prompts held,  V vocabulary,
T prompt tokens,  M new tokens at most.
"""

from collections import Counter
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from infra import dist
from model import BACKENDS, Attend, Decoder, at_least_float32, empty_model
from records import EngineSpec, Request, Sample, Segments

Ids = tuple[int, ...]  # the tokens of a prompt or a draft
Engine = Any           # it has `eos_ids`, `sync`, `generate` and `sleep`, as TorchEngine has them
PREFILL_TOKENS = 4096  # prompt tokens, padded, that TorchEngine computes at once


def sample_tokens(logits_SV: Tensor, uniform_S: Tensor, temperature: float, top_p: float,
                  ) -> tuple[Tensor, Tensor]:
    """Draw one token per row; its log-prob is in nats, before top-p. Temperature 0 takes the likeliest.

    The token is the first with a cumulative probability above uniform_S in [0, 1): the draw is a function of
    the number alone. Sums run in float64: in float32 the tail of a large vocabulary is lost.
    """
    if temperature not in (0, 1):
        logits_SV = logits_SV / temperature
    logp_SV = F.log_softmax(logits_SV, dim=-1)
    if temperature == 0:
        token_S1 = logp_SV.argmax(dim=-1, keepdim=True)
    else:
        prob_SV = logp_SV.double().exp()
        if top_p < 1:
            prob_SV = keep_nucleus(prob_SV, top_p)
        cumulative_SV = prob_SV.cumsum(dim=-1)
        point_S1 = uniform_S[:, None] * cumulative_SV[:, -1:]
        token_S1 = torch.searchsorted(cumulative_SV, point_S1, right=True)
        token_S1.clamp_(max=logits_SV.shape[1] - 1)
    return token_S1[:, 0], logp_SV.gather(1, token_S1)[:, 0]


def keep_nucleus(prob_SV: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens with a total probability of top_p (arXiv:1904.09751); others get 0."""
    sorted_SV, place_SV = prob_SV.sort(dim=-1, descending=True, stable=True)
    before_SV = sorted_SV.cumsum(dim=-1) - sorted_SV
    sorted_SV[before_SV >= top_p] = 0
    return sorted_SV.scatter(1, place_SV, sorted_SV)


class Cache:
    """The keys and values of each layer, [2, prompts or slots, key heads, tokens, head width].

    A prompt has its own once, however many of the S slots answer it; a slot has those of the tokens that it
    has read since. One product multiplies the queries of all slots that answer a prompt by its keys (as in
    arXiv:2402.05099), and one softmax runs over these scores and the scores of the slot's own keys.
    """

    def __init__(
        self,
        model: Decoder,
        attention: str,
        slots: int,
        prompts: list[Ids],
        max_new_tokens: int
    ):
        self.model = model
        self.attention = attention  # a key of BACKENDS, for prompts
        shape = model.shape
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.arange = partial(torch.arange, device=weight.device)
        self.prompts = prompts
        self.heads = shape.kv_heads
        self.held: list[int] = []  # the prompt of each row
        longest = max(map(len, prompts)) - 1
        no_prompt = weight.new_zeros(2, 0, self.heads, longest or 1, shape.head_dim)
        sizes = 2, slots, self.heads, max_new_tokens, shape.head_dim
        self.of_prompts = [no_prompt] * shape.layers  # layer -> keys and values; `admit` makes room
        self.of_slots = [weight.new_zeros(sizes) for _ in range(shape.layers)]

    def admit(self, prompt_S: list[int]) -> None:
        """Give every slot the prompt of this number, or none if the number is -1. New prompts are computed
        without their last token, which the next decoding step reads, and take the rows that no slot needs
        any longer."""
        slots_of = Counter(prompt_S)
        missing = slots_of.keys() - {-1, *self.held}
        new = sorted(missing, key=lambda number: (slots_of[number], number))
        rows = [row for row, number in enumerate(self.held) if number not in slots_of]
        added = len(new) - len(rows)
        if added > 0:
            rows += range(len(self.held), len(self.held) + added)
            self.held += [-1] * added
            for layer, pair in enumerate(self.of_prompts):
                self.of_prompts[layer] = F.pad(pair, (*[0] * 7, added))
        for number, row in zip(new, rows, strict=False):
            self.held[row] = number
        self.row_of = {number: row for row, number in enumerate(self.held)}
        sizes = {number: size for number in new if (size := self.size(number)) > 1}
        for together in group_by_size(sizes):
            self.prefill(together)
        self.arrange([self.row_of.get(number, 0) for number in prompt_S])

    def size(self, number: int) -> int:
        """Count the tokens of a prompt. A single one needs no `prefill`: the next step reads the last."""
        return len(self.prompts[number])

    def prefill(self, numbers: list[int]) -> None:
        """Compute prompts together, each into its row."""
        ids, positions, rows, lengths = [], [], [], []
        for number in numbers:
            read = self.prompts[number][:-1]
            ids += read
            positions += range(len(read))
            rows += [self.row_of[number]] * len(read)
            lengths.append(len(read))
        within = BACKENDS[self.attention](Segments.of(lengths, lengths, self.arange(len(ids))))
        last = self.model.shape.layers - 1

        def attend(layer, *given):  # of the last layer only keys and values are needed
            return None if layer == last else within(layer, *given)

        self.compute(ids, positions, rows, attend)

    def compute(self, ids: list[int], positions: list[int], rows: list[int], attend: Attend) -> Tensor:
        """Compute tokens together, those with a row (none: -1) into it. Returns their final hidden states."""
        ids_T, position_T, row_T = torch.tensor([ids, positions, rows], dtype=torch.long, device=self.device)
        place_P = (row_T >= 0).nonzero()[:, 0]
        row_P, position_P = row_T[place_P], position_T[place_P]

        def keep(layer, q, k, v, window):
            pair = self.of_prompts[layer]
            pair[0, row_P, :, position_P] = k[place_P]
            pair[1, row_P, :, position_P] = v[place_P]
            return attend(layer, q, k, v, window)

        return self.model.hidden(ids_T, position_T, keep)

    def arrange(self, rows: list[int]) -> None:
        """Lay out the queries of slots by the rows of their prompts: one place in each row before the first
        row that several slots answer, and from there on as many places as the most popular prompt needs."""
        self.rows = rows
        lengths = [len(self.prompts[number]) - 1 for number in self.held]
        self.longest = max(lengths) or 1
        self.length_S = torch.tensor([lengths[row] for row in rows], device=self.device)
        slots_of = Counter(rows)
        most = max(slots_of.values())
        first_shared = min((row for row in slots_of if slots_of[row] > 1), default=0)
        widths = [1 if row < first_shared else most for row in range(len(lengths))]
        starts = [*accumulate(widths, initial=0)]
        places, before = [], Counter()  # before: slots of the same prompt
        for row in rows:
            first = self.heads * starts[row] + before[row]
            places += range(first, first + self.heads * widths[row], widths[row])
            before[row] += 1
        self.place = torch.tensor(places, device=self.device)
        self.slot = self.place.new_zeros(starts[-1] * self.heads)  # 0 without a slot
        self.slot[self.place] = self.arange(len(places))
        self.cut = first_shared * self.heads
        self.alone = rows == [*range(len(lengths))]  # one slot a row, in order

    def by_prompt(self, x: Tensor, cache: Tensor) -> Tensor:
        """Multiply the tensor of each slot by the cached tensor of its prompt."""
        if self.alone:
            return torch.bmm(x, cache)
        products = []
        lefts = x.index_select(0, self.slot).tensor_split([self.cut])
        for left, right in zip(lefts, cache.tensor_split([self.cut]), strict=True):
            if len(left):
                out = torch.bmm(left.view(len(right), -1, x.shape[-1]), right)
                products.append(out.view(len(left), x.shape[1], -1))
        return torch.cat(products).index_select(0, self.place)

    def decode(self, token_S: Tensor, used_S: Tensor) -> Tensor:
        """Append one token to every slot, behind used_S others; return the logits [S, V] of the next."""
        longest = self.longest
        own = int(used_S.max()) + 1
        position_S = self.length_S + used_S
        # How far a key is behind the new token; -1: it is none.
        of_prompt = position_S[:, None] - self.arange(longest)
        of_prompt = of_prompt.where(of_prompt > used_S[:, None], -1)
        of_slot = used_S[:, None] - self.arange(own)
        back = torch.cat([of_prompt, of_slot], dim=1)
        bias_of = {}
        for window in set(self.model.shape.windows):
            seen = (back >= 0) & (back < (window or torch.inf))
            bias = torch.where(seen, 0.0, -torch.inf)
            bias_of[window] = bias.repeat_interleave(self.heads, 0)[:, None]
        slot_S = self.arange(len(token_S))

        def attend(layer, q, k, v, window):
            pair = self.of_slots[layer]
            pair[0, slot_S, :, used_S] = k
            pair[1, slot_S, :, used_S] = v
            # 16-bit keys and values are widened: products rounded to 16 bits would lose too much.
            of_prompts = at_least_float32(self.of_prompts[layer][..., :longest, :])
            of_slots = at_least_float32(pair[..., :own, :])
            prompt_keys, prompt_values = of_prompts.flatten(1, 2)
            keys, values = of_slots.flatten(1, 2)
            # The query heads of one key head are laid out as one longer query: no copy for grouped attention.
            width = q.shape[-1]
            grouped = q.reshape(len(keys), -1, width)
            grouped = grouped.to(keys.dtype) * width ** -0.5
            prompt_scores = self.by_prompt(grouped, prompt_keys.mT)
            own_scores = torch.bmm(grouped, keys.mT)
            scores = torch.cat([prompt_scores, own_scores], dim=-1)
            weight = scores.add_(bias_of[window]).softmax(dim=-1)
            out = torch.bmm(weight[..., longest:], values)
            out += self.by_prompt(weight[..., :longest], prompt_values)
            return out.view(q.shape).to(q.dtype)

        return self.model.logits(self.model.hidden(token_S, position_S, attend))

    def select(self, slots: list[int]) -> None:
        """Keep only these slots, in this order, and the prompts that they answer."""
        answered = [self.rows[slot] for slot in slots]
        rows = sorted(set(answered))
        for layer in range(len(self.of_slots)):  # one at a time, so that only one is held twice
            self.of_slots[layer] = self.of_slots[layer][:, slots]
            self.of_prompts[layer] = self.of_prompts[layer][:, rows]
        self.held = [self.held[row] for row in rows]
        self.arrange([rows.index(row) for row in answered])


class Decoding:
    """The sample that each slot works on and its progress, and every sample's tokens so far."""

    def __init__(self, engine: "TorchEngine", requests: list[Request], temperature: float, top_p: float):
        count = len(requests)
        limits = [request.limit for request in requests]
        longest = max(limits)
        slots = min(engine.slots, count)
        self.stops = engine.stops
        self.sampling = temperature, top_p
        self.count = count
        prompts = [request.tokens_before for request in requests]
        number_of = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        self.cache = self.make_cache(engine.model, engine.attention, slots, [*number_of], longest)
        self.prompt_N = [*map(number_of.get, prompts), -1]
        # In all that follows, one row more than there are samples: idle slots decode on, and write there.
        draws = [draw_uniforms(seed, longest) for seed in (*(request.seed for request in requests), 0)]
        self.uniform_NM = torch.from_numpy(np.stack(draws)).to(engine.device)
        with torch.device(engine.device):
            self.eos = torch.tensor(sorted(engine.eos_ids))
            self.owner_S = torch.full((slots,), count)  # `count`: the slot is idle
            self.token_S = torch.zeros(slots, dtype=torch.long)
            self.step_S = torch.zeros(slots, dtype=torch.long)  # 0 if the slot is idle
            self.limit_N = torch.tensor([*limits, longest])
            self.ids_NM = torch.zeros(count + 1, longest, dtype=torch.long)
            self.logp_NM = torch.zeros(count + 1, longest, dtype=torch.float64)
            self.made_N = torch.zeros(count + 1, dtype=torch.long)
            self.ended_N = torch.zeros(count + 1, dtype=torch.bool)

    make_cache = Cache  # or a leaf's own

    def admit(self, slots: list[int], samples: range) -> bool:
        """Start `samples` in `slots`. Tells whether some may have ended already: here none."""
        device = self.owner_S.device
        self.owner_S[slots] = torch.tensor(samples, device=device)
        self.cache.admit([self.prompt_N[i] for i in self.owner_S.tolist()])
        last_tokens = [self.cache.prompts[self.prompt_N[i]][-1] for i in samples]
        self.token_S[slots] = torch.tensor(last_tokens, device=device)
        return False

    def shrink(self) -> None:
        """Drop idle slots, so that the last long samples do not pay for all that have ended."""
        busy_S = (self.owner_S < self.count).nonzero()[:, 0]
        self.cache.select(busy_S.tolist())
        self.owner_S = self.owner_S[busy_S]
        self.token_S = self.token_S[busy_S]
        self.step_S = self.step_S[busy_S]

    def take(self, slots: list[int] | slice, logits_KV: Tensor) -> None:
        """Sample the next token of K slots; a slot becomes idle when its sample ends."""
        owner_K = self.owner_S[slots]
        step_K = self.step_S[slots]
        token_K, logp_K = sample_tokens(logits_KV, self.uniform_NM[owner_K, step_K], *self.sampling)
        self.token_S[slots] = token_K
        self.ids_NM[owner_K, step_K] = token_K
        self.logp_NM[owner_K, step_K] = logp_K.double()
        made_K = step_K + 1
        ended_K = torch.isin(token_K, self.eos)
        if self.stops:  # or does the newest token complete a text?
            back_T = torch.arange(-self.stops.tokens, 0, device=made_K.device)
            place_KT = (made_K[:, None] + back_T).clamp(min=0)
            recent = self.ids_NM[owner_K[:, None], place_KT].tolist()
            tails = [ids[-count:] for ids, count in zip(recent, made_K.tolist(), strict=True)]
            ended_K |= torch.tensor(self.stops.reached(tails), device=made_K.device)
        self.made_N[owner_K] = made_K
        self.ended_N[owner_K] = ended_K
        over_K = ended_K | (made_K == self.limit_N[owner_K])
        owner_K = torch.where(over_K, self.count, owner_K)
        self.owner_S[slots] = owner_K
        # Idle slots stay at their first token: their place in the cache must not run over.
        self.step_S[slots] = made_K * (owner_K < self.count)

    def samples(self) -> list[Sample]:
        """Return all samples, in the order that they were asked for."""
        columns = self.made_N, self.ids_NM, self.logp_NM, self.ended_N
        rows = zip(*(column[:-1].tolist() for column in columns), strict=True)
        return [Sample(ids[:made], logp[:made], ended) for made, ids, logp, ended in rows]


class TorchEngine:
    """Decode in batches by our own decoder. It owns a copy of the weights; `sync` brings it up to date.

    A sample is a function of the weights, its prompt and its seed, but not of its batch, its slot or the
    number of ranks. That holds up to rounding: matrix products of another batch size differ in the last bits,
    which turns a draw about once in a million float32 tokens, and never in practice in float64.
    """

    def __init__(self, model: Decoder, spec: EngineSpec):
        self.model = model.requires_grad_(False)
        self.device = spec.device
        self.eos_ids = spec.eos_ids
        self.slots = spec.slots
        self.attention = spec.backend
        self.stops = spec.stops
        self.decoding = Decoding  # a leaf may put its own here

    @torch.no_grad()
    def sync(self, policy: Decoder) -> None:
        """Take over the policy's weights, in this engine's dtype."""
        if self.model.norm.weight.is_meta:
            self.model.to_empty(device=self.device)
        for mine, (_, theirs) in zip(self.model.parameters(), policy.named_hf_tensors(), strict=True):
            mine.copy_(dist.gather_full(theirs, mine.device, mine.dtype))

    def sleep(self) -> None:
        """Give up the weights, to make room for the update. The KV cache lives within `generate` anyway."""
        self.model.to("meta")

    @torch.inference_mode()
    def generate(
        self,
        requests: list[Request],
        temperature: float,
        top_p: float = 1.0,
        progress: str | None = None
    ) -> list[Sample]:
        """Sample the new tokens of each request, in order. A finished slot takes the next request at once.

        Several completions of a prompt have a seed each. top_p below 1 is for evaluation: the log-probs are
        taken before it. `progress` names a bar of samples done; without a name there is none. Raises
        RuntimeError before the first `sync` and after `sleep`.
        """
        if self.model.norm.weight.is_meta:
            raise RuntimeError("the engine has no weights; sync it first")
        if not requests:
            return []
        count = len(requests)
        state = self.decoding(self, requests, temperature, top_p)
        started = 0
        hidden = True if progress is None else None  # None: tqdm looks for a terminal
        with tqdm(desc=progress, total=count, unit="sample", leave=False, disable=hidden) as bar:
            while True:
                idle = [slot for slot, owner in enumerate(state.owner_S.tolist()) if owner == count]
                busy = len(state.owner_S) - len(idle)
                bar.update(started - busy - bar.n)
                free = idle[:count - started]  # as many as requests wait
                if free:
                    samples = range(started, started + len(free))
                    started += len(free)
                    if state.admit(free, samples):
                        continue  # some have ended, so look for idle slots again
                elif not busy:
                    return state.samples()
                elif len(idle) * 4 > len(state.owner_S):  # no request waits, and slots decode for nobody
                    state.shrink()
                # Logits have no name here: it would hold them until the next ones are computed.
                state.take(slice(None), state.cache.decode(state.token_S, state.step_S))


def group_by_size(sizes: dict[int, int]) -> list[list[int]]:
    """Cut prompts, the smallest first, into runs of at most PREFILL_TOKENS when padded, or of one."""
    runs = []
    for number in sorted(sizes, key=sizes.get):
        if not runs or sizes[number] * (len(runs[-1]) + 1) > PREFILL_TOKENS:
            runs.append([])
        runs[-1].append(number)
    return runs


def draw_uniforms(seed: int, count: int) -> np.ndarray:
    """Draw numbers in [0, 1) for the tokens of a sample; a seed gives the same ones anywhere (Philox)."""
    return np.random.Generator(np.random.Philox(seed)).random(count)


def start_engine(kind: str, spec: EngineSpec) -> Engine:
    """Make an engine of this kind (rollout.engine), which waits for its first `sync`. Raises ConfigError."""
    if kind == "vllm":
        from rollout_vllm import VLLMEngine  # a CPU run has no vLLM
        return VLLMEngine(spec)
    return TorchEngine(empty_model(spec.folder, spec.dtype), spec)
