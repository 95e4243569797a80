"""Decide whether an answer is right: `grade` returns "right", "wrong", "unparsed" or "timed_out".

Cheap comparisons come first: the caller's process compares spelling, structure and numbers (answer.py). A
worker process compares expressions (algebra.py); the kernel ends it after VERIFY_SECONDS of computing and
gives it no more than VERIFY_BYTES. So no text can hang or crash the trainer, and no worker outlives it. Text
behind an end-of-sequence token does not count.
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
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.synchronize import Event
from multiprocessing.util import Finalize
from pathlib import Path

from pebble import CONSTS, ProcessExpired, ProcessPool

from verify.answer import answers_equal, is_readable
from verify.errors import VerifyError
from verify.extract import extract, last_number, last_tag, until_end
from verify.number import number, same_numbers

VERIFY_SECONDS = 3.0     # of computing: a busy machine changes no reward
VERIFY_BYTES = 2 << 30   # of memory beyond a new worker's, for a number of billions of digits
FIRST_SECONDS = 0.1      # of computing for the first try of an answer; nearly all take less
SHARED_SECONDS = 15.0    # for all second tries of a batch, or FIRST_SECONDS an answer if that is more
PATIENCE = 10            # a call may take so many times its seconds by the clock, if it waits
WORKERS = max(1, min(32, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
CONSTS.term_timeout = 0.1  # seconds that pebble leaves a worker to end by SIGTERM, before it kills it
LIVENESS_SECONDS = 1.0               # seconds between two checks that the workers of a call live
RESTARTS = 10            # of a call, if workers die and it is not known which call they had
SHOWN_IDS = 10               # ids that a warning names


# ---- calls in workers that may be killed

class OverLimit(Exception):
    """A limit ended a worker, or it ended itself; the text says how: TIME, MEMORY, or another."""


TIME, MEMORY = "too long", "too much memory"


@dataclass(frozen=True, slots=True)
class Limits:
    """The time and memory of a call, and the number of workers for the calls of one purpose."""

    purpose: str
    size: int     # bytes of memory beyond a new worker's
    workers: int
    seconds: float = field(compare=False)  # of computing; calls of any length share the workers
    settings: tuple[str, str] = ("", "")   # the names of those that set seconds and size


ALGEBRA = Limits("verifier", VERIFY_BYTES, WORKERS, VERIFY_SECONDS)
POOLS: dict[Limits, ProcessPool] = {}


def workers(limits: Limits) -> ProcessPool:
    """Return the worker processes of a purpose; the first call starts them."""
    if limits in POOLS:
        return POOLS[limits]
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a worker that imports the main program: stop; Call.awaited says why to the user
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main and not Path(main).is_file():  # `python - < program`: no worker could ever start
        raise VerifyError(f"the verifier's processes import the main program, and {main} is no file; "
                          "run it from one")
    # A killed worker is replaced by a fork of a process that has done the slow imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verify.algebra", *({"torch"} & sys.modules.keys())])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:  # so that a signal to the process group does not end the process that starts the workers
        started = context.Event()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the event's helper process has lifted it
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pool = ProcessPool(max_workers=limits.workers, context=context, initializer=prepare_worker,
                       initargs=(started, limits.size))
    pool.started = started
    if not POOLS:  # before their semaphores, and not by atexit, which no child process calls
        Finalize(None, stop_workers, exitpriority=1)
    return POOLS.setdefault(limits, pool)


def stop_workers() -> None:
    """End all workers. A process that ends waits for them, and they heed no signal to stop."""
    while POOLS:
        _, pool = POOLS.popitem()
        pool.stop()
        pool.join()


def prepare_worker(started: Event, size: int) -> None:
    """Limit this worker to `size` bytes beside those it has: CUDA's libraries alone take many.

    It prints to stderr, because stdout belongs to the program. It ignores the signals that stop the program:
    else its call would count as dead, and the program decides by itself when to stop.
    """
    started.set()
    for ending in STOP_SIGNALS:
        signal.signal(ending, lambda *_: None)  # unlike SIG_IGN not inherited by a child process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = used + size if allowed == resource.RLIM_INFINITY else min(used + size, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(2, 1)
    leave = os._exit
    os._exit = lambda status: leave(status or 1)  # pebble would wait for ever for a worker that exits with 0


def call_with_alarm(function: Callable, seconds: float, *args: object) -> object:
    """Call a function in this worker, and end the worker after `seconds` of computing.

    An alarm without a handler ends the process at once, even in the middle of a power of integers, and even
    if the trainer has died and cannot kill its workers.
    """
    set_alarm(seconds)
    try:
        return function(*args)
    finally:
        set_alarm(0)


def set_alarm(seconds: float) -> None:
    """Allow this worker so many more seconds of computing; 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class Call:
    """Call a function in a worker. The call starts at once, and `result` waits for it."""

    def __init__(self, function: Callable, *args: object, limits: Limits = ALGEBRA):
        self.limits = limits
        self.args = function, limits.seconds, *args
        self.start()

    def start(self) -> None:
        try:
            self.schedule()
        except RuntimeError:  # an idle worker was killed from outside, and pebble gives up the whole pool
            pool = POOLS.pop(self.limits)
            pool.stop()
            pool.join()  # else its threads and semaphores stay
            self.schedule()

    def schedule(self) -> None:
        self.pool = workers(self.limits)
        timeout = PATIENCE * max(1, self.limits.seconds)
        self.future = self.pool.schedule(call_with_alarm, args=self.args, timeout=timeout)

    def result(self) -> object:
        """Return the function's value. Raises its exceptions, OverLimit, and VerifyError if no worker lives
        long enough to take the call."""
        try:
            return self.awaited()
        finally:
            self.pool = None  # the cache of verdicts must not keep a pool that has been replaced

    def awaited(self) -> object:
        for _ in range(RESTARTS):
            try:
                while not wait([self.future], LIVENESS_SECONDS).done:
                    if not self.pool.active:  # it has forgotten this call
                        raise BrokenProcessPool
                return self.future.result()
            except ProcessExpired as error:
                how = f"signal {-error.exitcode}" if error.exitcode < 0 else "an exit of its own"
                raise OverLimit(TIME if error.exitcode == -signal.SIGPROF else how) from error
            except (TimeoutError, MemoryError) as error:
                raise OverLimit(MEMORY if isinstance(error, MemoryError) else TIME) from error
            except BrokenProcessPool:  # a worker has died, and it is not known which call it had
                if self.pool and not self.pool.started.is_set():
                    main = getattr(sys.modules["__main__"], "__file__", "the main program")
                    raise VerifyError(f"no process of the {self.limits.purpose} lives to take a call: each "
                                      f"imports {main}, which must run what it runs under "
                                      "`if __name__ == \"__main__\":`") from None
                self.start()
        raise OverLimit("its workers are ended from outside")


# ---- one answer

class NeedsAlgebra(Exception):
    """Spelling, structure and numbers do not tell whether two expressions are equal."""


def leave_to_algebra(gold: str, answer: str) -> bool:
    raise NeedsAlgebra


@functools.lru_cache(maxsize=20_000)
def begin_verdict(gold: str, answer: str | None, seconds: float = VERIFY_SECONDS) -> str | Call:
    """Compare an answer with the gold one. Return the verdict if cheap, else the call that computes it."""
    if answer is None or not answer.strip():
        return "unparsed"
    try:
        return "right" if answers_equal(gold, answer, leave_to_algebra) else "wrong"
    except NeedsAlgebra:
        return Call(compare_by_algebra, gold, answer, limits=replace(ALGEBRA, seconds=seconds))
    except Exception:  # an unforeseen text must not end a run of days
        return "unparsed"


def compare_by_algebra(gold: str, answer: str) -> str:
    """Return the verdict on an answer, in a worker: expressions are equal if their values are."""
    from verify.algebra import compare_expressions

    failures = []

    def compare_or_note(a: str, b: str) -> bool:
        try:
            return compare_expressions(a, b)
        except MemoryError:
            raise
        except Exception as error:  # math-verify and sympy raise many kinds on text that is no mathematics
            failures.append(error)
            return False

    if answers_equal(gold, answer, compare_or_note):
        return "right"
    return "unparsed" if failures else "wrong"


def finish_verdict(verdict: str | Call) -> str | bool:
    """Wait for a verdict, and return it; "timed_out" or "unparsed" for one that no worker lives to give."""
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
    """Return the first gold answer that an answer equals, by the rules of `grade`; None if none."""
    verdicts = [finish_verdict(verdict) for verdict in [begin_verdict(gold, answer) for gold in golds]]
    return next((gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict == "right"), None)


def last_number_equal(gold: str, text: str) -> bool:
    """Grade leniently, as CPPO does: tell whether the text, or the last number in it, is the gold answer.

    If the text has an answer tag, only the content of the tag counts.
    """
    tag, written = last_tag(text), last_number(text)
    if (text if tag is None else tag).strip() == gold:
        return True
    return bool(written and same_numbers(gold, written))


# ---- many answers

def grade(pairs: list[tuple[str, str]]) -> list[dict]:
    """Grade pairs of a gold answer and a completion; the workers take them in parallel.

    A grade holds the `answer` that the completion marks (None: it marks none) and its `verdict`: "right",
    "wrong", "unparsed" (no answer, or one that cannot be read) or "timed_out": answers that take long share
    seconds that grow with the number of answers. `last_number` tells whether
    the last number is right, and `lenient` whether that or the answer is.
    """
    golds = [gold for gold, _ in pairs]
    texts = [until_end(text) for _, text in pairs]
    answers = [extract(text) for text in texts]
    asked = list(zip(golds, answers, strict=True))
    verdicts = judge(asked, FIRST_SECONDS)
    slow = {pair for pair in asked if verdicts[pair] == "timed_out"}
    share = min(VERIFY_SECONDS, max(SHARED_SECONDS, FIRST_SECONDS * len(asked)) / max(1, len(slow)))
    if share > FIRST_SECONDS:
        verdicts |= judge(slow, share)
    grades = []
    for gold, text, answer in zip(golds, texts, answers, strict=True):
        verdict = verdicts[gold, answer]
        last_right = last_number_equal(gold, text)
        grades.append({"answer": answer, "verdict": verdict, "last_number": last_right,
                       "lenient": last_right or verdict == "right"})
    return grades


def judge(pairs: Iterable[tuple[str, str | None]], seconds: float) -> dict[tuple, str]:
    """Return the verdict on each answer that takes at most so many seconds, else "timed_out"."""
    begun = {pair: begin_verdict(*pair, seconds) for pair in pairs}
    return {pair: finish_verdict(verdict) for pair, verdict in begun.items()}


def unreadable(golds: Iterable[str]) -> set[str]:
    """Return the gold answers that the verifier cannot read; only the same spelling is right for them."""
    uncertain = [gold for gold in dict.fromkeys(golds) if number(gold) is None]
    calls = {gold: Call(is_readable, gold, algebra_can_read) for gold in uncertain}
    return {gold for gold, call in calls.items() if finish_verdict(call) is not True}


def algebra_can_read(expression: str) -> bool:
    """Tell, in a worker, whether an expression can be parsed."""
    from verify.algebra import read_formula

    try:
        read_formula(expression)
        return True
    except Exception:  # as in compare_by_algebra
        return False


def name_unreadable(name: str, golds: dict[str, str], needed: bool) -> None:
    """Warn of the gold answers {id: answer} of the data set `name` that the verifier cannot read. Raises
    VerifyError if they are `needed` and it can read none."""
    unread = unreadable(golds.values())
    ids = [i for i, gold in golds.items() if gold in unread]
    if ids and needed and len(ids) == len(golds):
        raise VerifyError(f"{name}: none of the {len(golds)} gold answers can be read, for example "
                          f"{golds[ids[0]][:200]!r} of {ids[0]}")
    if ids:
        shown = ", ".join(ids[:SHOWN_IDS]) + (" ..." if len(ids) > SHOWN_IDS else "")
        print(f"{name}: {len(ids)} of {len(golds)} gold answers cannot be read, and only the same spelling "
              f"counts as right: {shown}", file=sys.stderr)

