"""Let an environment speak within completions: a tool, a game, a simulated user (environment.file).

A turn of the policy ends with a stop text (rollout.stop) or with the token by which the chat template closes
an answer. The environment's reply follows as tokens that are context and no action: no gradient, no log-prob,
in no denominator. A reply is a function of the text so far and the data row, so a run resumes and replays as
without it. The policy's own tokens are never made again from text (leaves/environment).

`EnvironmentEngine` stands in for the engine, so rollouts, votes and evaluations go through it alike.
"""

from dataclasses import replace

from config import Config
from infra import dist
from infra.environment import EnvironmentFile
from infra.replies import Splicer
from infra.tokenizer import Tokenizer
from model import Decoder
from records import Request, Sample, join
from rollout import Engine
from verify.workers import Call


class EnvironmentEngine:
    """An engine with completions that have replies in them."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, file: EnvironmentFile, lock_step: bool):
        self.engine, self.tokenizer, self.file = engine, tokenizer, file
        self.splicer = Splicer(tokenizer)
        if file.tools and file.format != "plain":  # else it is known when the file replies
            self.splicer.require_fit(("tool",))
        self.lock_step = lock_step  # ranks share an engine, so all sample as many turns (tensor_parallel)
        self.eos_ids = engine.eos_ids

    def sync(self, policy: Decoder) -> None:
        self.engine.sync(policy)

    def sleep(self) -> None:
        self.engine.sleep()

    @property
    def peak_bytes(self) -> int:
        return getattr(self.engine, "peak_bytes", 0)

    def generate(
        self,
        requests: list[Request],
        temperature: float,
        top_p: float = 1.0,
        progress: str | None = None,
    ) -> list[Sample]:
        """Sample the new tokens of each request, in order, turn by turn, with the replies between turns.

        A request's limit counts the policy's tokens. A completion is `finished` if the environment does not
        reply to its last turn, and `cut` if the reply would go beyond environment.turns or max_context.
        """
        pieces = [None] * len(requests)
        going_on = list(range(len(requests)))
        while dist.max_over_ranks(len(going_on)) if self.lock_step else going_on:
            asked = [self.continued(requests[i], pieces[i]) for i in going_on]
            sampled = self.engine.generate(asked, temperature, top_p, progress)
            for i, piece in zip(going_on, sampled, strict=True):
                pieces[i] = join(pieces[i], piece)
            calls = [self.ask(requests[i], pieces[i]) for i in going_on]  # the workers take them in parallel
            for i, call in zip(going_on, calls, strict=True):
                pieces[i] = self.answered(requests[i], pieces[i], call)
            going_on = [i for i in going_on if not pieces[i].is_whole(requests[i].limit)]
        return pieces

    def continued(self, request: Request, piece: Sample | None) -> Request:
        """Ask for the next turn, behind all that there is."""
        if piece is None:
            return replace(request, limit=min(request.limit, self.room(request, request.so_far)))
        whole = join(request.so_far, piece)
        seed = dist.seed_for(request.seed, len(piece.replies), "turn")
        limit = min(request.limit - piece.own, self.room(request, whole))
        return replace(request, seed=seed, limit=limit, so_far=whole)

    def room(self, request: Request, so_far: Sample | None) -> int:
        """Count the tokens that environment.max_context leaves."""
        length = so_far.length if so_far else 0
        return self.file.settings.max_context - len(request.prompt.ids) - length

    def ask(self, request: Request, piece: Sample) -> Call | None:
        """Ask for the reply to a turn; None if it has not ended, or has ended the completion."""
        if not (piece.finished and self.splicer.ends_turn(piece.ids[-1])):
            return None
        whole = join(request.so_far, piece)
        start, _ = whole.turns[-1]
        text = self.tokenizer.read(whole.ids)
        newest = self.tokenizer.read(whole.ids[start:])
        return self.file.ask(text, newest, request.prompt.row)

    def answered(self, request: Request, piece: Sample, call: Call | None) -> Sample:
        """Append the reply to a turn if it fits, and count its calls."""
        whole = join(request.so_far, piece)
        room = self.room(request, whole)
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
        return join(piece, Sample(ids, [0.0] * len(ids), finished=False, replies=((0, len(ids)),)))


def with_environment(engine: Engine, tokenizer: Tokenizer, file: EnvironmentFile | None, cfg: Config,
                     ) -> Engine:
    """Let an environment reply within the completions of an engine; without one the engine stays as it is."""
    if file is None:
        return engine
    return EnvironmentEngine(engine, tokenizer, file, cfg.rollout.tensor_parallel > 1)
