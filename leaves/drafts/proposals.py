"""Drafts in vLLM: it is told the last epoch's completions, and draws every token as it would without them.

vLLM verifies drafts by rejection, which keeps the law of a completion, and not the completion. Here its own
sampler draws a token behind each token of a draft, by the numbers that would draw it anyway, and those behind
a token that is not the draft's are forgotten. So drafts save steps of the engine and change no sample.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout import Ids

Drafts = Sequence[array]  # of numbers of 4 bytes
AT_ONCE = 8  # tokens of a draft that are verified in one step
BEFORE = 8 * chr(0x10FFFF)  # so many tokens of a completion are looked up; before the first there are others


class Steps:
    """A count of the tokens that needed no decoding step."""

    saved = 0


class Proposer:
    """vLLM's `custom_class`: it proposes what came next in a prompt's drafts."""

    def __init__(self, vllm_config: Any):
        self.drafts: dict[Ids, Drafts] = {}  # by the tokens of prompts

    def load_model(self, model: object) -> None: ...

    def propose(self, sampled: list[list[int]], length_S: Any, token_ST: Any, **rest: object,
                ) -> list[list[int]]:
        """Propose tokens for each of S slots that has sampled; so many of T are its own."""
        proposed = []
        for slot, new in enumerate(sampled):
            start = self.batch.num_prompt_tokens[slot]
            drafts = self.drafts.get(tuple(token_ST[slot, :start].tolist()), ()) if new else ()
            proposed.append(follow(drafts, token_ST[slot, start:length_S[slot]]))
        return proposed


def follow(drafts: Drafts, made: Any) -> list[int]:
    """Find the last tokens made in the drafts, and return those that come next there."""
    place = (BEFORE + to_text(made))[-len(BEFORE):]
    behind = "".join(BEFORE + to_text(draft) for draft in drafts).partition(place)[2]
    return [*map(ord, behind[:AT_ONCE].partition(BEFORE[0])[0])]


def to_text(tokens: Any) -> str:
    """Write tokens as letters: Python is fast at finding them."""
    return tokens.tobytes().decode("utf-32-le", "surrogatepass")


class Generators(dict):
    """The generators of rows, drawn from in this order; `after` has the state of each behind its row."""

    def __init__(self, of_row: dict[int, torch.Generator]):
        super().__init__(of_row)
        self.after: dict[int, Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:
        for row, generator in super().items():
            yield row, generator
            self.after[row] = generator.get_state()


def draw(self: Any, metadata: Any, draft_probs: None, logits: Tensor, sampling: Any) -> Any:
    """Stand in for RejectionSampler.forward, with R rows of logits: of each of S slots one behind every token
    of its draft and one behind its last token before."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    counts = [drafted + 1 for drafted in metadata.num_draft_tokens]
    row_SK = pad_sequence(torch.arange(len(logits)).split(counts), batch_first=True, padding_value=-1)
    slot_R = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    own = {name: x if (x := getattr(sampling, name)) is None else x[slot_R]
           for name in ("temperature", "top_p", "top_k")}
    generators = Generators({row: sampling.generators[slot] for row, slot in enumerate(slot_R.tolist())
                             if slot in sampling.generators})
    drawn = self.sampler(logits=logits, sampling_metadata=replace(sampling, generators=generators, **own))
    draft_R = torch.full_like(slot_R, -1)  # behind a slot's last row is no draft
    draft_R[metadata.target_logits_indices.cpu()] = metadata.draft_token_ids.cpu().long()
    token_SK = drawn.sampled_token_ids[:, 0].cpu()[row_SK]
    kept_S1 = 1 + (token_SK == draft_R[row_SK]).cumprod(1).sum(1, keepdim=True)
    for row in row_SK.gather(1, kept_S1 - 1).flatten().tolist():
        if row in generators.after:
            generators[row].set_state(generators.after[row])
    Steps.saved += int(kept_S1.sum()) - len(counts)
    row_K = row_SK.flatten().to(logits.device)
    logprobs = drawn.logprobs_tensors and LogprobsTensors(*(x[row_K] for x in drawn.logprobs_tensors[:3]))
    token_SK[torch.arange(token_SK.shape[1]) >= kept_S1] = -1
    return SamplerOutput(sampled_token_ids=token_SK.to(logits.device), logprobs_tensors=logprobs)


def attach(llm: Any, drafts: dict[Ids, Drafts]) -> None:
    """Tell an engine of vLLM's the drafts, which change as a run goes on, and let it draw by them."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    RejectionSampler.forward = draw
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.drafter.drafts, runner.drafter.batch = drafts, runner.input_batch
