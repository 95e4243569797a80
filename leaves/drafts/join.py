"""Keep the newest completions of every prompt as drafts of its next ones (rollout.drafts).

The embedded engine reads a prompt's drafts in one pass, and draws each token from the policy behind them with
the number that it draws it with anyway: while that is a token of a draft, no decoding step is needed. So a
completion is the one that would be sampled without drafts, up to rounding; given the drafts, and whatever the
policy has learnt from them, it is the policy's. Speculative decoding (arXiv:2211.17192) accepts more, by the
ratio to the policy of the draft; but then a completion is the policy's only if that has not seen its drafts,
and all probabilities of the older policy are needed. proposals.py does the same with vLLM.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from history import PromptHistory
from infra import dist
from leaves.drafts.proposals import AT_ONCE, Drafts, Proposer, Steps, attach
from model import BACKENDS
from records import Batch, EngineSpec, Metrics, Rolled, Segments
from rollout import Cache, Decoding, Ids

Paths = dict[int, list[int]]  # slot -> places of its tokens in a Tree


def spec(cfg: Any, given: EngineSpec) -> EngineSpec:
    """Start vLLM with room for the tokens that are verified at once."""
    if not cfg.rollout.drafts or cfg.rollout.engine != "vllm":
        return given
    return replace(given, max_len=given.max_len + AT_ONCE, speculation={
        "method": "custom_class", "model": f"{Proposer.__module__}.{Proposer.__name__}",
        "num_speculative_tokens": AT_ONCE})


def parts(cfg: Any, run: Any) -> Any:
    """Give a run a history that keeps drafts, and its engine a decoding that follows them."""
    if not cfg.rollout.drafts:
        return run
    history = DraftHistory(run.history)
    if cfg.rollout.engine == "vllm":
        attach(run.engine.llm, history.drafts)
    else:
        # Of the engine itself, if an environment is around it.
        getattr(run.engine, "engine", run.engine).decoding = partial(DraftDecoding, history.drafts)
    return replace(run, history=history,
                   measures=(*run.measures, partial(share_drafted, cfg.rollout.tensor_parallel)))


def share_drafted(sharing: int, rolled: Rolled, batch: Batch) -> Metrics:
    """Compute the share of tokens that needed no decoding step; nothing if there is none. So many ranks share
    an engine. Collective."""
    saved, Steps.saved = sum(dist.gather([Steps.saved])) / sharing, 0
    tokens = sum(s.fresh for group in rolled.groups for s in group.samples)
    return {"rollout/drafted": saved / tokens} if saved else {}


class DraftHistory(PromptHistory):
    """The history of prompts, and the tokens of each prompt's newest completions."""

    def __init__(self, history: PromptHistory):
        vars(self).update(vars(history))
        self.drafts: dict[Ids, Drafts] = {}  # by the tokens of prompts

    def record(self, rolled: Rolled) -> None:
        for draw, group in zip(rolled.kept, rolled.groups, strict=True):
            self.drafts[draw.prompt.ids] = [sample.ids for sample in group.samples]
        super().record(rolled)

    def state(self) -> dict:
        """Return the state with the drafts of every prompt, about 5 bytes a token on disk."""
        return super().state() | {"drafts": [
            [ids.tobytes() for ids in self.drafts.get(prompt.ids, ())] for prompt in self.prompts]}

    def restore(self, state: dict) -> None:
        super().restore(state)
        for prompt, written in zip(self.prompts, state["drafts"], strict=True):
            self.drafts[prompt.ids] = [array("i", ids) for ids in written]


class Tree:
    """Prompts and their drafts, computed in one pass. A prefix that several drafts share is computed once."""

    def __init__(self):
        self.child: dict[tuple[int, int], int] = {}  # place of a token, and the next token -> its place
        self.ids, self.positions, self.rows = [], [], []  # as Cache.compute takes them
        self.queries, self.keys, self.key = [], [], []    # as Segments has them
        self.pairs: list[Tensor] = []  # of each layer, keys and values: [2, T, key heads, width]

    def grow(self, prompt: Ids, row: int, drafts: Drafts) -> int:
        """Append a prompt, to be kept in a row, and its drafts. Returns the place of its last token, which is
        read for drafts alone."""
        start, last = len(self.ids), len(prompt) - 1
        root = start + last
        read = prompt if drafts else prompt[:-1]
        self.ids += read
        self.positions += range(len(read))
        self.rows += [row] * last + [-1] * (len(read) - last)
        self.branch(range(start, len(self.ids)), len(read))
        for draft in sorted(drafts):
            path, before = [root], len(self.ids)
            for token in draft[:-1]:  # nothing is drawn behind a last token
                place = self.child.setdefault((path[-1], token), len(self.ids))
                if place == len(self.ids):
                    self.ids.append(token)
                    self.positions.append(last + len(path))
                    self.rows.append(-1)
                path.append(place)
            if new := len(self.ids) - before:
                self.branch([*range(start, root), *path], new)
        return root

    def branch(self, seen: Sequence[int], new: int) -> None:
        """Let the last `new` of these places see all before them."""
        self.queries.append(new)
        self.keys.append(len(seen))
        self.key += seen


class DraftCache(Cache):
    """A cache that holds trees of drafts beside prompts."""

    def __init__(self, drafts: dict[Ids, Drafts], *given: Any):
        super().__init__(*given)
        self.drafts = [drafts.get(prompt, ()) for prompt in self.prompts]
        # Of prompts that are held, by number: its drafts, and the place of its last token among them.
        self.trees: dict[int, tuple[Tree, int]] = {}

    def size(self, number: int) -> int:
        return len(self.prompts[number]) + sum(map(len, self.drafts[number]))

    def admit(self, prompt_S: list[int]) -> None:
        super().admit(prompt_S)
        self.trees = {number: tree for number, tree in self.trees.items() if number in self.held}

    def prefill(self, numbers: list[int]) -> None:
        """Compute prompts together, each into its row, and behind each the tree of its drafts."""
        if not any(self.drafts[number] for number in numbers):
            super().prefill(numbers)
            return
        tree = Tree()
        for number in numbers:
            root = tree.grow(self.prompts[number], self.row_of[number], self.drafts[number])
            if self.drafts[number]:
                self.trees[number] = tree, root
        key_K = torch.tensor(tree.key, device=self.device)
        within = BACKENDS[self.attention](Segments.of(tree.queries, tree.keys, key_K))

        def attend(layer, q, k, v, window):
            tree.pairs.append(torch.stack([k, v]))
            return within(layer, q, k, v, window)

        tree.hidden_TD = self.compute(tree.ids, tree.positions, tree.rows, attend)


class DraftDecoding(Decoding):
    """Decoding that follows drafts as far as they go."""

    def __init__(self, drafts: dict[Ids, Drafts], *given: Any):
        self.make_cache = partial(DraftCache, drafts)
        super().__init__(*given)

    def admit(self, slots: list[int], samples: range) -> bool:
        """Start `samples` in `slots`, and follow their drafts; some may have ended then."""
        super().admit(slots, samples)
        paths: dict[Tree, Paths] = {}
        for slot, sample in zip(slots, samples, strict=True):
            number = self.prompt_N[sample]
            if number in self.cache.trees:
                tree, root = self.cache.trees[number]
                paths.setdefault(tree, {})[slot] = [root]
        for tree, followed in paths.items():
            self.follow(tree, followed)
        return bool(self.cache.trees)

    def follow(self, tree: Tree, paths: Paths) -> None:
        """Draw the tokens of some slots as long as the ones before are a draft's; `paths` begin with the last
        token of the prompt. A token is drawn as in a decoding step, so drafts change no sample."""
        moving = [*paths]
        begun_K = self.owner_S[moving]
        while moving:
            hidden_KD = tree.hidden_TD[[paths[slot][-1] for slot in moving]]
            self.take(moving, self.cache.model.logits(hidden_KD))
            tokens, owners = self.token_S.tolist(), self.owner_S.tolist()
            places = {slot: tree.child.get((paths[slot][-1], tokens[slot])) for slot in moving}
            moving = [slot for slot, place in places.items() if place and owners[slot] < self.count]
            for slot in moving:
                paths[slot].append(places[slot])
        Steps.saved += int(self.made_N[begun_K].sum())
        for pair, computed in zip(self.cache.of_slots, tree.pairs, strict=True):
            for slot, path in paths.items():  # the keys and values of the tokens that it has followed
                pair[:, slot, :, :len(path)] = computed[:, path].transpose(1, 2)
