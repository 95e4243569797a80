"""Drafts in vLLM: it is told the last epoch's completions, and draws every token as it would without them.

vLLM verifies drafts by rejection, which keeps the law of a completion, and not the completion. Here its own
sampler draws a token behind each token of a draft, by the numbers that would draw it anyway, and those behind
a token that is not the draft's are forgotten. So drafts save steps of the engine and change no sample.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollout import Ids

Drafts = Sequence[Sequence[int]]
AT_ONCE = 8  # tokens of a draft that are verified in one step
CONTEXT = 8  # tokens before a place of a draft that a completion must have, for what follows to be proposed


class Proposer:
    """vLLM's `custom_class`: it proposes what came next in a prompt's drafts."""

    accepted = 0  # tokens, of all that were proposed

    def __init__(self, vllm_config: Any):
        self.drafts: dict[Ids, Drafts] = {}  # by the tokens of prompts
        self.nexts: dict[Ids, tuple[Drafts, dict]] = {}  # of prompts: drafts, and what came next in them

    def load_model(self, model: object) -> None: ...

    def propose(self, sampled: list[list[int]], length_S: Any, token_ST: Any, **rest: object,
                ) -> list[list[int]]:
        """Propose tokens for each of S slots that has sampled; so many of T are its own."""
        proposed = []
        for slot, new in enumerate(sampled):
            tokens = token_ST[slot, :length_S[slot]].tolist()
            start = self.batch.num_prompt_tokens[slot] if self.drafts else len(tokens)
            proposed.append(self.follow(tuple(tokens[:start]), tokens[start:]) if new else [])
        return proposed

    def follow(self, prompt: Ids, made: list[int]) -> list[int]:
        """Follow the most frequent next token in a prompt's drafts, as long as there is one."""
        drafts, count = self.drafts.get(prompt, ()), len(made)
        if self.nexts.get(prompt, ("",))[0] is not drafts:
            self.nexts[prompt] = drafts, list_nexts(drafts)
        nexts = self.nexts[prompt][1]
        while len(made) < count + AT_ONCE and (found := nexts.get(tuple(made[-CONTEXT:]))):
            made.append(found.most_common(1)[0][0])
        return made[count:]


def list_nexts(drafts: Drafts) -> dict[Ids, Counter]:
    """Count what came behind the last CONTEXT tokens of drafts, or behind all at a start."""
    nexts: dict[Ids, Counter] = defaultdict(Counter)
    for draft in drafts:
        for at in range(1, len(draft)):
            nexts[tuple(draft[max(0, at - CONTEXT):at])][draft[at]] += 1
    return nexts


def draw(self: Any, metadata: Any, draft_probs: None, logits: Tensor, sampling: Any) -> Any:
    """Stand in for RejectionSampler.forward, with R rows of logits: of each of S slots one behind every token
    of its draft and one behind its last token before."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    count_S = torch.tensor(metadata.num_draft_tokens) + 1
    end_S = count_S.cumsum(0)
    slot_R = torch.arange(len(count_S)).repeat_interleave(count_S)
    own = {name: x if (x := getattr(sampling, name)) is None else x[slot_R]
           for name in ("temperature", "top_p", "top_k")}
    before = {slot: generator.get_state() for slot, generator in sampling.generators.items()}
    own["generators"] = {row: sampling.generators[slot] for row, slot in enumerate(slot_R.tolist())
                         if slot in before}  # each draws its rows in their order
    drawn = self.sampler(logits=logits, sampling_metadata=replace(sampling, **own))
    draft_R = torch.full_like(slot_R, -1)  # behind a slot's last row is no draft
    draft_R[metadata.target_logits_indices.cpu()] = metadata.draft_token_ids.cpu().long()
    place_K = torch.arange(int(count_S.max()))
    row_SK = ((end_S - count_S)[:, None] + place_K).clamp(max=len(slot_R) - 1)
    token_SK = drawn.sampled_token_ids[:, 0].cpu()[row_SK]
    kept_S1 = 1 + (token_SK == draft_R[row_SK]).cumprod(1).sum(1, keepdim=True)
    for slot, state in before.items():
        rewind(sampling.generators[slot], state, int(kept_S1[slot]), int(count_S[slot]))
    Proposer.accepted += int(kept_S1.sum()) - len(count_S)
    row_K = row_SK.flatten().to(logits.device)
    logprobs = drawn.logprobs_tensors and LogprobsTensors(*(x[row_K] for x in drawn.logprobs_tensors[:3]))
    return SamplerOutput(sampled_token_ids=token_SK.masked_fill(place_K >= kept_S1, -1).to(logits.device),
                         logprobs_tensors=logprobs)


def rewind(generator: torch.Generator, before: Tensor, kept: int, drawn: int) -> None:
    """Leave a generator behind the first `kept` of the tokens that it has drawn since it was as `before`."""
    on_cuda = generator.device.type == "cuda"
    after = generator.get_offset() if on_cuda else 0
    generator.set_state(before)
    if on_cuda:
        generator.set_offset(generator.get_offset() + (after - generator.get_offset()) // drawn * kept)
    for _ in range(0 if on_cuda else kept):  # vLLM's sampler on the CPU draws one number a token
        torch.randint(0, 2**31, (1,), generator=generator)


def attach(llm: Any, drafts: dict[tuple[int, ...], Drafts]) -> None:
    """Tell an engine of vLLM's the drafts, which change as a run goes on, and let it draw by them."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    RejectionSampler.forward = draw
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.drafter.drafts, runner.drafter.batch = drafts, runner.input_batch
