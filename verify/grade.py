"""Decide whether an answer is right. Text in, verdict out: "right", "wrong", "unparsed" or "timed_out".

Verification goes from cheap to costly. Equal spelling, structure and numbers are seen in the caller's process
(answer.py). Expressions are compared in a worker process (algebra.py), which the kernel ends after
VERIFY_SECONDS and gives no more than VERIFY_BYTES. So no text can hang or crash the trainer, and no worker
outlives it. What a model writes behind an end-of-sequence token does not count.
"""

import functools
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.synchronize import Event
from pathlib import Path

from pebble import CONSTS, ProcessExpired, ProcessPool

from verify.answer import equal, readable
from verify.errors import VerifyError
from verify.extract import extract, last_number, last_tag, until_end
from verify.number import number, same_numbers

VERIFY_SECONDS = 3.0     # of computing: a busy machine changes no reward
VERIFY_BYTES = 2 << 30   # of memory beside what a worker starts with, for a number of billions of digits
PATIENCE = 10            # times VERIFY_SECONDS by the clock, for a function that waits instead of computing
WORKERS = max(1, min(8, (os.cpu_count() or 1) // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
CONSTS.term_timeout = 0.1  # seconds that pebble leaves a worker to end by SIGTERM, before it kills it
LOOK = 1.0               # seconds between two looks whether the workers of a call are still there
RESTARTS = 10            # of a call whose workers die before it is known which of them had it
SHOWN = 10               # ids that a warning names


# ---- calls in workers that may be killed

class OverLimit(Exception):
    """A worker was ended by a limit, or ended itself; the text says how: TIME, MEMORY, or another."""


TIME, MEMORY = "too long", "too much memory"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a call may take, and how many workers there are for the calls of one purpose."""

    purpose: str
    size: int     # bytes of memory beside what a worker starts with
    workers: int
    seconds: float = field(compare=False)  # of computing; the workers are the same for any


POOLS: dict[Limits, ProcessPool] = {}  # one for each kind of Limits


def workers(limits: Limits) -> ProcessPool:
    """Start the worker processes of a purpose, once."""
    if limits in POOLS:
        return POOLS[limits]
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker, and its import of the main program has come here; see Call.result
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main and not Path(main).is_file():  # `python - < program`: no worker could ever start
        raise VerifyError(f"the verifier's processes import the main program, and {main} is no file; "
                          "run it from one")
    # A process that had to be killed is replaced by a fork of one that has imported what takes long.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verify.algebra", *({"torch"} & sys.modules.keys())])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:  # so that a signal to the whole process group does not end what starts the workers
        started = context.Event()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # the event's helper process has lifted it
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pool = ProcessPool(max_workers=limits.workers, context=context, initializer=prepare_worker,
                       initargs=(started, limits.size))
    pool.started = started
    return POOLS.setdefault(limits, pool)


def prepare_worker(started: Event, size: int) -> None:
    """Allow this worker so many bytes more than it has: CUDA's libraries alone take much. What it prints goes
    to stderr, since stdout is the program's own. Signals that end the program do not end it: the call in it
    would count as one that has died, and what stops the program is the program's to decide."""
    started.set()
    for ending in ENDING:
        signal.signal(ending, lambda *_: None)  # unlike SIG_IGN not handed on to what a function starts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
    os.dup2(2, 1)
    leave = os._exit
    os._exit = lambda status: leave(status or 1)  # pebble would wait for the answer of one that ends with 0


def call_with_alarm(function: Callable, seconds: float, *args: object) -> object:
    """Call a function in this worker, which ends if that takes more than `seconds` of computing.

    An alarm without a handler ends the process at once, in the middle of a power of integers too, and also
    when the trainer has died and nobody is left to kill its workers.
    """
    allow(seconds)
    try:
        return function(*args)
    finally:
        allow(0)


def allow(seconds: float) -> None:
    """Allow this worker so many seconds of computing from now on; 0: without end."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class Call:
    """Call a function in a worker. The call starts at once, and `result` waits for it."""

    def __init__(self, function: Callable, *args: object, limits: Limits | None = None):
        self.limits = limits or Limits("verifier", VERIFY_BYTES, WORKERS, VERIFY_SECONDS)
        self.args = function, self.limits.seconds, *args
        self.start()

    def start(self) -> None:
        try:
            self.schedule()
        except RuntimeError:  # an idle worker was killed from outside, and pebble gives up on the whole pool
            pool = POOLS.pop(self.limits)
            pool.stop()
            pool.join()  # else its threads and semaphores stay
            self.schedule()

    def schedule(self) -> None:
        self.pool = workers(self.limits)
        timeout = PATIENCE * self.limits.seconds
        self.future = self.pool.schedule(call_with_alarm, args=self.args, timeout=timeout)

    def result(self) -> object:
        """Return what the function returns. Raises OverLimit, what the function raises, and VerifyError where
        no worker lives long enough to take the call."""
        try:
            return self.awaited()
        finally:
            self.pool = None  # a verdict is remembered for longer than a pool lives

    def awaited(self) -> object:
        for _ in range(RESTARTS):
            try:
                while not wait([self.future], LOOK).done:
                    if not self.pool.active:  # and so forgets what it was asked
                        raise BrokenProcessPool
                return self.future.result()
            except ProcessExpired as error:
                how = f"signal {-error.exitcode}" if error.exitcode < 0 else "an exit of its own"
                raise OverLimit(TIME if error.exitcode == -signal.SIGPROF else how) from error
            except (TimeoutError, MemoryError) as error:
                raise OverLimit(MEMORY if isinstance(error, MemoryError) else TIME) from error
            except BrokenProcessPool:  # a worker has died, and it is not known of which call
                if self.pool and not self.pool.started.is_set():
                    main = getattr(sys.modules["__main__"], "__file__", "the main program")
                    raise VerifyError(f"no process of the {self.limits.purpose} lives to take a call: each "
                                      f"imports {main}, which must run what it runs under "
                                      "`if __name__ == \"__main__\":`") from None
                self.start()
        raise OverLimit("its workers are ended from outside")


# ---- one answer

class NeedsAlgebra(Exception):
    """Spelling, structure and numbers do not decide whether two expressions are equal."""


def leave_to_algebra(gold: str, answer: str) -> bool:
    raise NeedsAlgebra


@functools.lru_cache(maxsize=20_000)
def begin_verdict(gold: str, answer: str | None) -> str | Call:
    """Compare an answer with the gold one. Returns the verdict if cheap, else the call that computes it."""

    if answer is None or not answer.strip():
        return "unparsed"
    try:
        return "right" if equal(gold, answer, leave_to_algebra) else "wrong"
    except NeedsAlgebra:
        return Call(compare_by_algebra, gold, answer)
    except Exception:  # a text that nobody thought of must not end a run of days
        return "unparsed"


def compare_by_algebra(gold: str, answer: str) -> str:
    """Return the verdict on an answer, in a worker: expressions are equal when their values are."""
    from verify.algebra import compare

    failures = []

    def compare_or_note(a: str, b: str) -> bool:
        try:
            return compare(a, b)
        except MemoryError:
            raise
        except Exception as error:  # of whatever kind math-verify and sympy raise on what is no mathematics
            failures.append(error)
            return False

    if equal(gold, answer, compare_or_note):
        return "right"
    return "unparsed" if failures else "wrong"


def finish_verdict(verdict: str | Call) -> str:
    """Wait for a verdict: "right", "wrong", "unparsed" (no answer, or an unreadable one) or "timed_out"."""
    if isinstance(verdict, str):
        return verdict
    try:
        return verdict.result()
    except OverLimit:
        return "timed_out"
    except VerifyError:
        raise
    except Exception:  # as in begin_verdict
        return "unparsed"


def first_equal(golds: list[str], answer: str) -> str | None:
    """Return the first that an answer equals, as `grade` has it; the workers take them in parallel."""
    verdicts = [finish_verdict(verdict) for verdict in [begin_verdict(gold, answer) for gold in golds]]
    return next((gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict == "right"), None)


def last_number_equal(gold: str, text: str) -> bool:
    """Grade leniently, as CPPO does: whether the text, or the last number in it, is the gold answer.

    Where the text has an answer tag, only what stands in the tag counts.
    """
    tag, written = last_tag(text), last_number(text)
    if (text if tag is None else tag).strip() == gold:
        return True
    return bool(written and same_numbers(gold, written))


# ---- many answers

def grade(pairs: list[tuple[str, str]]) -> list[dict]:
    """Grade pairs of a gold answer and a completion; the workers take them in parallel.

    A grade holds the `answer` that the completion marks and its `verdict`; whether its last number is right
    (`last_number`); and whether one of the two is (`lenient`).
    """
    golds = [gold for gold, _ in pairs]
    texts = [until_end(text) for _, text in pairs]
    answers = [extract(text) for text in texts]
    verdicts = [begin_verdict(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
    grades = []
    for gold, text, answer, unfinished in zip(golds, texts, answers, verdicts, strict=True):
        verdict = finish_verdict(unfinished)
        last_right = last_number_equal(gold, text)
        grades.append({"answer": answer, "verdict": verdict, "last_number": last_right,
                       "lenient": last_right or verdict == "right"})
    return grades


def unreadable(golds: Iterable[str]) -> set[str]:
    """Return the gold answers that the verifier cannot read; only an identical spelling will be rewarded."""
    uncertain = [gold for gold in dict.fromkeys(golds) if number(gold) is None]
    calls = {gold: Call(readable, gold, algebra_reads) for gold in uncertain}
    unread = set()
    for gold, call in calls.items():
        try:
            if not call.result():
                unread.add(gold)
        except VerifyError:
            raise
        except Exception:  # a gold answer that no worker survives
            unread.add(gold)
    return unread


def algebra_reads(expression: str) -> bool:
    """Tell, in a worker, whether math-verify's parser makes sense of an expression."""
    from verify.algebra import read_formula

    try:
        read_formula(expression)
        return True
    except Exception:  # as in compare_by_algebra
        return False


def name_unreadable(name: str, golds: dict[str, str]) -> None:
    """Warn of the gold answers of a data set, {id: answer}, that the verifier cannot read."""
    unread = unreadable(golds.values())
    ids = [i for i, gold in golds.items() if gold in unread]
    if ids:
        shown = ", ".join(ids[:SHOWN]) + (" ..." if len(ids) > SHOWN else "")
        print(f"{name}: {len(ids)} of {len(golds)} gold answers cannot be read, and only the same spelling "
              f"counts as right: {shown}", file=sys.stderr)

