"""Let an environment speak within completions: a tool, a game, a simulated user (environment.file).

A turn of the policy ends with a stop text (rollout.stop) or with the token by which the chat template closes
an answer. The environment's reply follows as tokens that are context and no action: no gradient, no log-prob,
in no denominator. A reply is a function of the text so far and the data row, so a run resumes and replays as
without it. The policy's own tokens are never made again from text (README.md).

`EnvironmentEngine` stands in for the engine, so rollouts, votes and evaluations go through it alike.
"""

from concurrent.futures import Future
from dataclasses import asdict, replace
from itertools import chain, pairwise
from statistics import fmean
from typing import Any

import numpy as np

from infra import dist
from infra.digests import hash_files
from infra.stored import once_a_node
from infra.tokenizer import Tokenizer
from infra.user_files import read_file
from leaves.environment.file import EnvironmentFile, open_environment
from leaves.environment.replies import Splicer
from records import Batch, Metrics, Request, Rolled, Sample, frozen
from rollout import Engine


def tokenizer(cfg: Any, plain: Tokenizer) -> Tokenizer:
    """Let prompts describe the tools of an environment, and the tokenizer hold it."""
    if file := open_environment(cfg.environment):
        plain.tools = [*file.tools] or None
        plain.opened = plain.find_opened()
        plain.file = file.fitted(plain)
        if file.tools and plain.file.format == "plain" and not cfg.data.system_prompt:
            dist.say("environment.format=plain: the chat template has no place for tools, so no prompt "
                     "describes them; data.system_prompt can")
        plain.own_files |= {"environment.file": file.source.text} | dict(file.source.helpers)
    return plain


def task(cfg: Any, loaded: Any) -> Any:
    """Ask the environment for a reply to rows of the data, before models are loaded. Raises ConfigError."""
    if cfg.environment.file:
        sets = [s.problems for s in loaded.sets]
        once_a_node(lambda: ([], loaded.tokenizer.file.try_rows(*filter(len, [loaded.problems, *sets]))))
    return loaded


def engine(cfg: Any, pair: tuple[Engine, Tokenizer]) -> tuple[Engine, Tokenizer]:
    """Let the environment that a tokenizer holds reply within the completions of an engine."""
    engine, tokenizer = pair
    if cfg.environment.file:
        engine = EnvironmentEngine(
            engine, tokenizer, tokenizer.file, lock_step=cfg.rollout.tensor_parallel > 1)
    return engine, tokenizer


def head(cfg: Any, known: dict) -> dict:
    """Identify an evaluation's environment by the hash of its file and its limits."""
    if not cfg.environment.file:
        return known
    own = read_file(cfg.environment.file, "environment.file")
    return known | {"environment": asdict(cfg.environment) | {"file": hash_files(own.files)}}


def parts(cfg: Any, run: Any) -> Any:
    """Measure replies."""
    return replace(run, measures=(*run.measures, environment_metrics)) if cfg.environment.file else run


@frozen
class Dialogue(Sample):
    """A completion with replies in it."""

    # Places in `ids`, from and to, of each reply of the environment, which is context and has log-prob 0
    replies: tuple[tuple[int, int], ...] = ()
    calls: int = 0         # of tools and of reply(), and how many of them failed
    failures: int = 0
    cut: bool = False      # it ends because of environment.turns or max_context

    @property
    def own(self) -> int:
        return len(self.ids) - sum(to - start for start, to in self.replies)

    trained = fresh = own

    @property
    def scored(self) -> np.ndarray:
        own = np.ones(len(self.ids), dtype=bool)
        for start, to in self.replies:
            own[start:to] = False
        return own.nonzero()[0]

    @property
    def turns(self) -> list[tuple[int, int]]:
        return [*pairwise([0, *chain.from_iterable(self.replies), len(self.ids)])]

    def is_whole(self, limit: int) -> bool:
        return self.cut or Sample.is_whole(self, limit)

    def joined(self, piece: "Dialogue") -> "Dialogue":
        """Append a new piece, with replies in it or without, to this unfinished completion."""
        length = len(self.ids)
        return replace(
            Sample.joined(self, piece),
            replies=self.replies + tuple((length + start, length + to) for start, to in piece.replies),
            calls=self.calls + piece.calls,
            failures=self.failures + piece.failures,
            cut=piece.cut
        )

    def first(self, count: int) -> "Dialogue":
        first = Sample.first(self, count)
        return replace(first, replies=tuple(reply for reply in self.replies if reply[1] < first.length))


def join(so_far: Dialogue | None, piece: Dialogue) -> Dialogue:
    """Append a new piece to an unfinished completion, if there is one."""
    return so_far.joined(piece) if so_far else piece


def environment_metrics(rolled: Rolled, batch: Batch) -> Metrics:
    """Compute means over completions that have ended; nothing if none has."""
    samples = [s for group in rolled.groups for s in group.samples if not s.pending]
    if not samples:
        return {}
    return {
        "environment/turns": 1 + fmean(len(s.replies) for s in samples),
        "environment/calls": fmean(s.calls for s in samples),
        "environment/failures": fmean(s.failures for s in samples),
        "environment/tokens": fmean(s.length - s.own for s in samples),
        "environment/cut": fmean(s.cut for s in samples),
    }


class EnvironmentEngine:
    """An engine with completions that have replies in them."""

    sample_class = Dialogue

    def __init__(self, engine: Engine, tokenizer: Tokenizer, file: EnvironmentFile, lock_step: bool):
        self.engine, self.tokenizer, self.file = engine, tokenizer, file
        self.splicer = Splicer(tokenizer)
        if file.tools and file.format != "plain":  # else it is known when the file replies
            self.splicer.require_fit(("tool",))
        self.lock_step = lock_step  # ranks share an engine, so all sample as many turns (tensor_parallel)

    def __getattr__(self, name: str) -> Any:  # all but `generate` is the engine's
        return getattr(self.engine, name)

    def generate(self, requests: list[Request], *given: Any, **named: Any) -> list[Dialogue]:
        """Sample the new tokens of each request, in order, turn by turn, with the replies between turns. The
        engine gets all other arguments as they are.

        A request's limit counts the policy's tokens. A completion is `finished` if the environment does not
        reply to its last turn, and `cut` if the reply would go beyond environment.turns or max_context.
        """
        pieces = [None] * len(requests)
        going_on = list(range(len(requests)))
        while dist.max_over_ranks(len(going_on)) if self.lock_step else going_on:
            asked = [self.continued(requests[i], pieces[i]) for i in going_on]
            for i, s in zip(going_on, self.engine.generate(asked, *given, **named), strict=True):
                pieces[i] = join(pieces[i], Dialogue(s.ids, s.logp, s.finished))
            calls = [self.ask(requests[i], pieces[i]) for i in going_on]  # the workers take them in parallel
            for i, call in zip(going_on, calls, strict=True):
                pieces[i] = self.answered(requests[i], pieces[i], call)
            going_on = [i for i in going_on if not pieces[i].is_whole(requests[i].limit)]
        return pieces

    def continued(self, request: Request, piece: Dialogue | None) -> Request:
        """Ask for the next turn, behind all that there is."""
        limit = request.limit
        if piece:
            limit -= piece.own
            seed = dist.seed_for(request.seed, len(piece.replies), "turn")
            request = replace(request, seed=seed, so_far=join(request.so_far, piece))
        return replace(request, limit=min(limit, self.room(request)))

    def room(self, request: Request) -> int:
        """Count the tokens that still fit into environment.max_context."""
        return self.file.settings.max_context - len(request.tokens_before)

    def ask(self, request: Request, piece: Dialogue) -> Future | None:
        """Ask for the reply to a turn; None if it has not ended, or has ended the completion.

        A call of a tool is answered behind any token that ends a sequence.
        """
        if not piece.finished or not (self.file.tools or self.splicer.ends_turn(piece.ids[-1])):
            return None
        prompt, turns = request.prompt, self.tokenizer.read(join(request.so_far, piece))
        return self.file.ask(self.tokenizer.decode(prompt.ids), turns, prompt.row)

    def answered(self, request: Request, piece: Dialogue, call: Future | None) -> Dialogue:
        """Append the reply to a turn if it fits, and count its calls."""
        whole = join(request.so_far, piece)
        room = self.room(replace(request, so_far=whole))
        if call is None:
            return replace(piece, cut=not piece.finished and not room)
        reply = self.file.wait(call, request.prompt.id)
        piece = replace(piece, calls=piece.calls + reply.calls, failures=piece.failures + reply.failures)
        if reply.content is None:
            return piece
        ids = self.splicer.tokens(reply.content, whole.ids)
        last = len(whole.replies) + 1 >= self.file.settings.turns
        if last or len(ids) >= room:
            return replace(piece, finished=False, cut=True)
        return join(piece, Dialogue(ids, [0.0] * len(ids), finished=False, replies=((0, len(ids)),)))
