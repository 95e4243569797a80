"""Keep the newest completions of every prompt as drafts of its next ones (rollout.drafts).

The embedded engine reads a prompt's drafts in one pass, and draws each token from the policy behind them with
the number that it draws it with anyway: while that is a token of a draft, no decoding step is needed. So a
completion is the one that would be sampled without drafts, up to rounding; given the drafts, and whatever the
policy has learnt from them, it is the policy's. Speculative decoding (arXiv:2211.17192) accepts more, by the
ratio to the policy of the draft; but then a completion is the policy's only if that has not seen its drafts,
and all probabilities of the older policy are needed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from history import PromptHistory
from model import BACKENDS
from records import Batch, Metrics, PromptDraw, Request, Rolled, Sample, Segments, frozen
from rollout import Asked, Cache, Decoding, Ids, TorchEngine

Drafts = tuple[Ids, ...]
Offered = dict[Ids, Drafts]   # the drafts of prompts, by their tokens
Paths = dict[int, list[int]]  # slot -> places of its tokens in a Tree


def parts(cfg: Any, run: Any) -> Any:
    """Give a run a history that keeps drafts, and its engine a decoding that follows them."""
    if not cfg.rollout.drafts:
        return run
    offered: Offered = {}
    run.engine.decoding = partial(DraftDecoding, offered)
    return replace(run, history=DraftHistory(run.history, offered), measures=(*run.measures, share_drafted))


def share_drafted(rolled: Rolled, batch: Batch) -> Metrics:
    """Compute the share of tokens that needed no decoding step; nothing if there is none."""
    samples = [s for group in rolled.groups for s in group.samples]
    drafted = sum(s.drafted for s in samples)
    return {"rollout/drafted": drafted / sum(s.fresh for s in samples)} if drafted else {}


@frozen
class DraftedSample(Sample):
    """A completion that begins as a draft does."""

    drafted: int = 0       # so many of the first, which needed no decoding step


class DraftHistory(PromptHistory):
    """The history of prompts, and the tokens of each prompt's newest completions."""

    def __init__(self, history: PromptHistory, offered: Offered):
        super().__init__(history.prompts, history.pruning, history.seed, history.middle)
        self.offered = offered  # to the engine, for the prompts that are being rolled out
        self.drafts: dict[int, tuple[Sequence[int], ...]] = {}

    def draw(self, count: int) -> list[PromptDraw]:
        return self.offer(super().draw(count))

    def recall(self, lines: list[dict]) -> list[PromptDraw]:
        return self.offer(super().recall(lines))

    def offer(self, draws: list[PromptDraw]) -> list[PromptDraw]:
        """Offer the drafts of the prompts that are drawn."""
        for draw in draws:
            self.offered[draw.prompt.ids] = tuple(map(tuple, self.drafts.get(draw.number, ())))
        return draws

    def record(self, rolled: Rolled) -> None:
        self.offered.clear()
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


@frozen
class Drafted(Asked):
    """A prompt to compute with its drafts."""

    drafts: Drafts

    @property
    def size(self) -> int:
        return len(self.ids) + sum(map(len, self.drafts))


class Tree:
    """Drafts of some prompts, computed in one pass. A prefix that several share is computed once."""

    def __init__(self):
        self.child: dict[tuple[int, int], int] = {}  # place of a token, and the next token -> its place
        self.pairs: list[Tensor] = []  # of each layer, keys and values: [2, T, key heads, width]
        self.hidden_TD = torch.empty(0)

    def grow(self, asked: Asked, ids: list[int], positions: list[int]) -> list[tuple[list[int], int]]:
        """Append a prompt's drafts to a pass that ends with the prompt. Return its branches: the places that
        each sees, its own last, and how many are its own."""
        root = len(ids) - 1
        prompt = [*range(len(ids) - len(asked.ids), root)]
        branches = []
        path, before = [root], ()
        for draft in sorted(asked.drafts):
            common = len(commonprefix([before, draft]))
            path = path[:common + 1]
            new = draft[len(path) - 1:-1]  # nothing is drawn behind a last token
            for token in new:
                self.child[path[-1], token] = len(ids)
                positions.append(positions[root] + len(path))
                path.append(len(ids))
                ids.append(token)
            if new:
                branches.append((prompt + path, len(new)))
            before = draft
        return branches


class DraftCache(Cache):
    """A cache that holds trees of drafts beside prompts."""

    def __init__(self, offered: Offered, *given: Any):
        super().__init__(*given)
        self.offered = offered
        # Of prompts that are held, by number: its drafts, and the place of its last token among them.
        self.trees: dict[int, tuple[Tree, int]] = {}

    def ask(self, number: int, row: int) -> Drafted:
        return Drafted(number, row, self.prompts[number], self.offered.get(self.prompts[number], ()))

    def admit(self, prompt_S: list[int]) -> None:
        super().admit(prompt_S)
        self.trees = {number: tree for number, tree in self.trees.items() if number in self.held}

    def prefill(self, placed: list[Asked]) -> None:
        """Compute prompts together, each into its row, and behind each the tree of its drafts."""
        ids, positions = [], []
        rows, places = [], []  # of the tokens of prompts
        queries, keys, key = [], [], []
        tree = Tree()
        for asked in placed:
            start, last = len(ids), len(asked.ids) - 1
            rows += [asked.row] * last
            places += range(start, start + last)
            read = last + 1 if asked.drafts else last
            ids += asked.ids[:read]
            positions += range(read)
            branches = [(range(start, len(ids)), read)]
            if asked.drafts:
                self.trees[asked.number] = tree, start + last
                branches += tree.grow(asked, ids, positions)
            for seen, new in branches:
                queries.append(new)
                keys.append(len(seen))
                key += seen
        columns = ids, positions, key, rows, places
        ids_T, position_T, key_K, row_P, place_P = (
            torch.tensor(x, dtype=torch.long, device=self.device) for x in columns)
        within = BACKENDS[self.attention](Segments.of(queries, keys, key_K))
        drafted = any(asked.drafts for asked in placed)

        def attend(layer, q, k, v, window):
            pair = self.of_prompts[layer]
            pair[0, row_P, :, position_T[place_P]] = k[place_P]
            pair[1, row_P, :, position_T[place_P]] = v[place_P]
            if drafted:
                tree.pairs.append(torch.stack([k, v]))
            elif layer == self.model.shape.layers - 1:
                return None  # of a prompt alone only keys and values are needed
            return within(layer, q, k, v, window)

        tree.hidden_TD = self.model.hidden(ids_T, position_T, attend)

    def copy_paths(self, tree: Tree, paths: Paths) -> None:
        """Give slots the keys and values of the tree's tokens that they have followed."""
        slots, columns, places = [], [], []
        for slot, path in paths.items():
            slots += [slot] * len(path)
            columns += range(len(path))
            places += path
        for pair, computed in zip(self.of_slots, tree.pairs, strict=True):
            pair[:, slots, :, columns] = computed[:, places].transpose(0, 1)


class DraftDecoding(Decoding):
    """Decoding that follows drafts as far as they go."""

    def __init__(self, offered: Offered, engine: TorchEngine, requests: list[Request], *given: float):
        self.make_cache = partial(DraftCache, offered)
        super().__init__(engine, requests, *given)
        self.drafted_N = torch.zeros_like(self.made_N)

    def admit(self, slots: list[int], samples: range) -> bool:
        """Start `samples` in `slots`, and follow their drafts; some may have ended then."""
        super().admit(slots, samples)
        paths: dict[Tree, Paths] = {}
        owners = self.owner_S.tolist()
        for slot in slots:
            number = self.prompt_N[owners[slot]]
            if number in self.cache.trees:
                tree, root = self.cache.trees[number]
                paths.setdefault(tree, {})[slot] = [root]
        for tree, followed in paths.items():
            self.follow(tree, followed)
        return bool(self.cache.trees)

    def follow(self, tree: Tree, paths: Paths) -> None:
        """Draw the tokens of some slots as long as the ones before are a draft's; `paths` begin with the last
        token of the prompt. A token is drawn as in `step`, so drafts change no sample."""
        moving = [*paths]
        begun_K = self.owner_S[moving]
        while moving:
            hidden_KD = tree.hidden_TD[[paths[slot][-1] for slot in moving]]
            self.take(torch.tensor(moving), self.cache.model.logits(hidden_KD))
            tokens = self.token_S[moving].tolist()
            owners = self.owner_S[moving].tolist()
            asked, moving = moving, []
            for slot, token, owner in zip(asked, tokens, owners, strict=True):
                place = tree.child.get((paths[slot][-1], token))
                if owner < self.count and place is not None:
                    paths[slot].append(place)
                    moving.append(slot)
        self.drafted_N[begun_K] = self.made_N[begun_K]
        self.cache.copy_paths(tree, paths)

    def samples(self) -> list[Sample]:
        plain = super().samples()
        return [DraftedSample(s.ids, s.logp, s.finished, drafted)
                for s, drafted in zip(plain, self.drafted_N[:-1].tolist(), strict=True)]
