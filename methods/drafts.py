"""Keep the newest completions of every prompt as drafts of its next ones (rollout.drafts).

The embedded engine reads a prompt's drafts in one pass, and draws each token from the policy behind them with
the number that it draws it with anyway: while that is a token of a draft, no decoding step is needed. So a
completion is the one that would be sampled without drafts, up to rounding; given the drafts, and whatever the
policy has learnt from them, it is the policy's. Speculative decoding (arXiv:2211.17192) accepts more, by the
ratio to the policy of the draft; but then a completion is the policy's only if that has not seen its drafts,
and all probabilities of the older policy are needed.
"""

from dataclasses import replace
from itertools import accumulate, chain, pairwise

import torch

from history import PromptHistory
from records import PromptDraw, Rolled


class DraftHistory(PromptHistory):
    """The history of prompts, and the tokens of each prompt's newest completions."""

    def __init__(self, history: PromptHistory):
        super().__init__(history.prompts, history.pruning, history.seed, history.middle)
        self.remembers = True  # `record` is called
        self.drafts: dict[int, tuple] = {}

    def draw(self, count: int) -> list[PromptDraw]:
        return self.attach(super().draw(count))

    def attach(self, draws: list[PromptDraw]) -> list[PromptDraw]:
        """Give draws the drafts of their prompts."""
        return [replace(draw, drafts=self.drafts.get(draw.number, ())) for draw in draws]

    def record(self, rolled: Rolled) -> None:
        for draw, group in zip(rolled.kept, rolled.groups, strict=True):
            self.drafts[draw.number] = tuple(sample.ids for sample in group.samples)
        super().record(rolled)

    def state(self) -> dict:
        """Return the state with 4 bytes a token of one epoch's completions."""
        drafts = [*chain.from_iterable(self.drafts.values())]
        tokens = [*chain.from_iterable(drafts)]
        return super().state() | {
            "drafted": torch.tensor([number for number, own in self.drafts.items() for _ in own]),
            "lengths": torch.tensor([len(ids) for ids in drafts]),
            "drafts": torch.tensor(tokens, dtype=torch.int32),
        }

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.drafts = {}
        ends = accumulate(state["lengths"].tolist(), initial=0)
        for number, (start, end) in zip(state["drafted"].tolist(), pairwise(ends), strict=True):
            ids = state["drafts"][start:end].tolist()
            self.drafts[number] = (*self.drafts.get(number, ()), ids)
