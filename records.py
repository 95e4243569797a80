"""The records that pass from stage to stage. Frozen and complete when made: no later stage fills one in.

Dimension key:  N prompts (groups) in one step,  G completions per prompt,  T tokens of one packed row
(prompts included),  C completion tokens among them, the only ones that are projected and scored,
S completions in one row.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from settings.loader import frozen

Metrics = dict[str, float]  # by their names in metrics.jsonl


@frozen
class Stops:
    """Texts that end a completion (rollout.stop), however they are cut into tokens."""

    texts: tuple[str, ...]
    decode: Callable[[list[list[int]]], list[str]] = field(compare=False)  # many at once

    @property
    def tokens(self) -> int:
        """Count the tokens that a text can lie in: one a byte, and one since decoders drop a space."""
        return max(len(text.encode()) for text in self.texts) + 1

    def reached(self, tails: list[list[int]]) -> list[bool]:
        """Tell of each completion, by its last `tokens` or more, whether a text is in it."""
        return [any(text in tail for text in self.texts) for tail in self.decode(tails)]


@frozen
class Problem:
    """One line of a data set."""

    id: str
    question: str
    answer: str          # the gold final answer alone; "" if the data has none
    solution: str = ""   # worked gold solution, if the data has one
    level: str | None = None
    subject: str | None = None
    row: dict = field(default_factory=dict, compare=False)  # the whole line, as the data file has it
    # In place of a question that is a text; `question` is then the last one.
    messages: tuple[dict, ...] = field(default=(), hash=False)


@frozen
class Prompt:
    """A problem rendered through the model's chat template."""

    id: str
    ids: tuple[int, ...]   # up to and including the generation prompt
    answer: str
    row: dict = field(default_factory=dict, compare=False)  # Problem.row


@frozen
class PromptDraw:
    """A prompt drawn in a step, to be rolled out or skipped."""

    prompt: Prompt
    epoch: int
    prob: float = 1.0     # of being rolled out
    weight: float = 1.0   # of its whole group: 1 / prob if pruning is unbiased, else 1; 0 if skipped
    number: int = 0       # of the prompt among all to train on

    age = 0               # steps since it was drawn

    @property
    def kept(self) -> bool:
        return self.weight > 0

    @property
    def noted(self) -> dict:
        """Return the values that decisions.jsonl has of a leaf's own draw."""
        return {}


@frozen
class Sample:
    """One completion, exactly as the behaviour policy produced it.

    A leaf's sample is a subclass, or stands for one, and may say otherwise than the properties do here.
    """

    ids: Sequence[int]     # sampled tokens, with the EOS, or all that a stop text lies in, when `finished`
    logp: Sequence[float]  # log pi(ids[t] | prompt, ids[:t]), nats, at the sampling temperature, before top-p
    finished: bool         # True: ended by an EOS or a stop. False: cut at rollout.max_new_tokens, or pending

    pending = False        # it has no reward yet: it, or another one of its group, goes on in the next step
    fresh_from = 0         # place of the first token that this step has sampled
    scored: ClassVar = slice(None)  # the places in `ids` of the tokens that this step trains on

    def __post_init__(self):
        # Flat, as they travel and are packed: lists of Python's numbers take five times the room and time.
        object.__setattr__(self, "ids", array("i", self.ids))
        object.__setattr__(self, "logp", array("d", self.logp))
        if not self.ids or len(self.ids) != len(self.logp):
            raise ValueError(f"a Sample needs at least one token and one logp each, "
                             f"not {len(self.ids)} ids and {len(self.logp)} logp")

    @property
    def length(self) -> int:
        return len(self.ids)

    # Tokens of the policy: all, those that this step trains on, and those that it has sampled.
    own = trained = fresh = length

    @property
    def turns(self) -> list[tuple[int, int]]:
        """List the places in `ids`, from and to, of the policy's turns, by turns with others' replies."""
        return [(0, len(self.ids))]

    @property
    def whole(self) -> "Sample":
        """Return it with all of the policy's tokens to train on."""
        return self

    def is_whole(self, limit: int) -> bool:
        """Tell whether it has ended, or has as many tokens of the policy as it may have."""
        return self.finished or self.own >= limit

    def joined(self, piece: "Sample") -> "Sample":
        """Append a new piece to this unfinished completion."""
        return replace(self, ids=self.ids + piece.ids, logp=self.logp + piece.logp, finished=piece.finished)

    def first(self, count: int) -> "Sample":
        """Return the completion up to its count-th token that is trained on."""
        end = int(np.arange(len(self.ids))[self.scored][count - 1]) + 1
        return replace(self, ids=self.ids[:end], logp=self.logp[:end])


@frozen
class Request:
    """A completion to sample, or to go on with."""

    prompt: Prompt
    seed: int
    limit: int                    # tokens to sample at most, replies apart
    so_far: Sample | None = None  # sampled before

    @property
    def tokens_before(self) -> tuple[int, ...]:
        """Return the tokens that new ones follow: the prompt's, and those of the completion so far."""
        return (*self.prompt.ids, *self.so_far.ids) if self.so_far else self.prompt.ids


@frozen
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    offered = True  # to this step; False: to a later one, since it goes on


def lengths(groups: list[Group], G: int) -> Tensor:
    """Count the tokens of each completion that this step trains on, [N, G]; N may be 0."""
    counts = [[sample.trained for sample in group.samples] for group in groups]
    return torch.tensor(counts, dtype=torch.int64).view(-1, G)


def pending(groups: list[Group], G: int) -> Tensor:
    """Mark completions that go on in the next step and have no reward yet, bool [N, G]."""
    flags = [[s.pending for s in group.samples] for group in groups]
    return torch.tensor(flags, dtype=torch.bool).view(-1, G)


@frozen
class Rewards:
    """The rewards of the completions of N groups; nan without a reward."""

    components: dict[str, Tensor]  # each that reward.list_components names, float64 [N, G]
    weights: dict[str, float]   # 0: of a component that is logged alone
    tokens_NG: Tensor           # of each completion, to compare lengths within a group
    differ_in: str = "reward"   # the value that differs in an informative group (rollout.differ_in)

    @property
    def total_NG(self) -> Tensor:
        """Compute the reward: the weighted sum of the components that are not nan; nan if all are."""
        parts_NG = [weight * self.components[name] for name, weight in self.weights.items() if weight]
        none_NG = torch.stack(parts_NG).isnan().all(dim=0)
        total_NG = sum(part_NG.nan_to_num() for part_NG in parts_NG)
        # Rewards that differ by the rounding of a sum are equal: such a group is flat and makes no pairs.
        return total_NG.round(decimals=12).masked_fill(none_NG, torch.nan)

    @property
    def compared_NG(self) -> Tensor:
        """Return the values that must differ within an informative group (rollout.differ_in)."""
        return self.total_NG if self.differ_in == "reward" else self.components["accuracy"]

    def __add__(self, newest: "Rewards") -> "Rewards":
        joined = {name: torch.cat([x_NG, newest.components[name]]) for name, x_NG in self.components.items()}
        return replace(self, components=joined, tokens_NG=torch.cat([self.tokens_NG, newest.tokens_NG]))


def plain(number: Tensor) -> float | None:
    """Return a number for JSON, which has no nan: None in its place."""
    return None if number.isnan() else number.item()


@frozen
class Rolled:
    """All rounds of a step, the same on every rank: `Rolled() + Rolled(a round) + Rolled(the next)`."""

    draws: list[PromptDraw] = field(default_factory=list)    # in order, those skipped included
    groups: list[Group] = field(default_factory=list)  # of the draws kept
    rewards: Rewards | None = None
    adv_NG: Tensor = torch.empty(0, 0)                 # from all G, before pruning
    sizes: tuple[int, ...] = ()                        # groups of each round that was added

    @property
    def kept(self) -> list[PromptDraw]:
        return [draw for draw in self.draws if draw.kept]

    def __add__(self, newest: "Rolled") -> "Rolled":
        sizes = (*self.sizes, len(newest.groups))
        if not self.sizes:
            return replace(newest, sizes=sizes)
        return Rolled(self.draws + newest.draws, self.groups + newest.groups, self.rewards + newest.rewards,
                      torch.cat([self.adv_NG, newest.adv_NG]), sizes)


@frozen
class Pruned:
    """The completions that a pruner keeps, with their weights and the chances that they had."""

    keep_NG: Tensor     # bool
    weight_NG: Tensor   # 0 if not kept
    prob_NG: Tensor     # of being kept; 0 or 1 without chance
    size_NG: Tensor | None = None  # that the probability follows (pps), over its mean of the step


@frozen
class Batch:
    """The groups that a step trains on, the same on every rank, perhaps fewer than were rolled out."""

    draws: list[PromptDraw]
    groups: list[Group]
    reward_NG: Tensor
    correct_NG: Tensor   # bool
    adv_NG: Tensor       # from the rewards alone: pruning reads it
    pruned: Pruned       # weight and probability, of prompts and completions together
    places: list[int]    # which of the prompts offered each group is of
    offered: int         # prompts, those skipped before rollout included
    seed: int            # of the draw of completions
    tokens: list[list[Tensor]] | None = None  # weights of each one's tokens before its cut (prune.py)
    advantage_only: bool = False  # the loss has no other gradient, so an advantage of 0 has none
    error: float | None = None    # prune.predicted_error of the draw of completions, if it weighs them

    @property
    def trained_NG(self) -> Tensor:
        """Mark the survivors that have a gradient, bool [N, G]: the rows hold them alone."""
        return self.pruned.keep_NG & ((self.adv_NG != 0) | (not self.advantage_only))


@frozen
class Segments:
    """The attention of a row of T packed tokens: each segment's queries attend to its keys, causally.

    Both lie end to end. A segment's last query meets its last key, the query before it all keys but that one,
    and so on. A segment may have more keys than queries: the keys of a shared prefix come first.
    """

    queries: tuple[int, ...]  # of each segment; they add up to T
    keys: tuple[int, ...]     # of each segment, at least as many
    key_K: Tensor             # which of the T tokens each key is of
    start_2S: Tensor          # int32 [2, S + 1]: first query and first key of each; last the totals

    @staticmethod
    def of(queries: Sequence[int], keys: Sequence[int], key_K: Tensor) -> "Segments":
        starts = [[*accumulate(queries, initial=0)], [*accumulate(keys, initial=0)]]
        start_2S = torch.tensor(starts, dtype=torch.int32, device=key_K.device)
        return Segments(tuple(queries), tuple(keys), key_K, start_2S)


@frozen
class Row:
    """One forward pass over packed groups: each prompt is followed by its kept completions, and each attends
    to the prompt and to itself. The first completion is one segment with the prompt."""

    ids_T: Tensor
    position_T: Tensor  # from 0 in each prompt, and on from its end in each of its completions
    segments: Segments  # S, one for each completion
    predict_C: Tensor   # place in T of the token before each completion token
    target_C: Tensor    # the completion token itself, EOS included
    segment_C: Tensor   # which of the row's completions it belongs to
    sampled_logp_C: Tensor  # the engine's log-prob of it, in nats
    adv_C: Tensor       # as completions were compared
    weight_C: Tensor    # > 0 for kept completions, 0 in the rows that only keep ranks in step
    members: tuple[tuple[int, int], ...]  # (n, g) of each completion
    counts: bool        # False: of weight 0, to keep the rank in step
    likelihood_C: Tensor | None = None  # loss.likelihood_weight, if the loss has that term
    bonus_C: Tensor | None = None       # weight of the entropy, if the loss has a bonus

    def of_members(self, x_NG: Tensor) -> Tensor:
        """Take the values of this row's completions, [S], in the dtype of its weights."""
        n_S, g_S = torch.tensor(self.members).T
        return x_NG[n_S, g_S].to(self.weight_C)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Row":
        """Move the row to `device`, with the floating-point fields in `dtype`."""
        old = self.segments
        moved = {"segments": replace(old, key_K=old.key_K.to(device), start_2S=old.start_2S.to(device))}
        for f in fields(self):
            if isinstance(x := getattr(self, f.name), Tensor):
                moved[f.name] = x.to(device, dtype if x.is_floating_point() else None)
        return replace(self, **moved)


@frozen
class PreparedRow:
    """A row with the values that passes without gradient have computed for it before the update."""

    row: Row
    adv_C: Tensor                      # the row's, or a leaf's in its place
    ref_logp_C: Tensor | None = None   # log-probs under the reference, if the loss needs them
    old_logp_C: Tensor | None = None   # under the policy before the update; None until a pass computes them
    factor_C: Tensor | None = None     # of each token's whole term (loss.weigh); None: 1


@frozen
class LogProbs:
    """The log-probs of one row's tokens before and after the policy moved."""

    logp_C: Tensor      # log-probs in nats under the current policy
    old_logp_C: Tensor  # and under the one before the update, or under the engine (loss.old_logp)
    adv_C: Tensor
    segment_C: Tensor   # which completion each token belongs to: 0, 1, ...


@frozen
class EngineSpec:
    """The arguments that a rollout engine is started with."""

    folder: Path                 # of the model
    dtype: torch.dtype           # of weights and computation
    device: torch.device
    backend: str                 # a key of model.BACKENDS
    eos_ids: frozenset[int]      # every id that ends a completion
    slots: int                   # sequences decoded at once
    max_len: int                 # tokens of the longest, prompt included
    tensor_parallel: int = 1     # vllm: ranks that hold one engine together
    cache_gib: float | None = None  # vllm: KV cache per rank; None: room for every slot at full length
    stops: Stops | None = None
    sleeps: bool = False            # vllm: it gives its memory up when told to sleep
    quantization: str = "none"      # vllm: of the weights that it samples with
    speculation: dict | None = None  # vllm: how drafts are made
