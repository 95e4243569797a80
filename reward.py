"""Rewards: named components of a completion, summed by weight (`reward.<component>` in the config).

    python reward.py --cases FILE.jsonl     # {"gold", "completion", "correct"} per line: how often the verifier is
    right

Verification goes from cheap to costly: equal spelling, structure and numbers here (answer.py), expressions in a process
of its own (algebra.py), which the kernel ends after VERIFY_SECONDS and gives no more than VERIFY_BYTES. So no text can
hang or crash the trainer, nor outlive it. What a model writes behind an end-of-sequence token does not count.
"""

import argparse
import functools
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from answer import equal, number, readable, same_numbers
from config import ConfigError, Reward
from extract import NUMBER, extract, last_boxed, last_number, last_tag, until_end

VERIFY_SECONDS = 3.0     # of computing: a busy machine changes no reward
VERIFY_BYTES = 2 << 30   # of memory beside what it begins with, for a number of billions of digits
PATIENCE = 10            # times as long as that by the clock, for a function that waits
WORKERS = max(1, min(8, (os.cpu_count() or 1) // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))
NGRAM = 3                # words in a row that should not come again (repetition)


# ---- verification

def start_worker() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # CUDA's libraries take much
    resource.setrlimit(resource.RLIMIT_AS, (used + VERIFY_BYTES, used + VERIFY_BYTES))


def limited(function: Callable, seconds: float, *args: object) -> object:
    """Call it in the worker. An alarm without a handler ends the process at once, in the middle of a power of integers
    too, and also when the trainer has died and nobody is left to kill it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def verify_slowly(gold: str, answer: str) -> str:
    from algebra import compare

    failed = []

    def compare_or_note(a: str, b: str) -> bool:
        try:
            return compare(a, b)
        except MemoryError:
            raise
        except Exception as error:  # of whatever kind math-verify and sympy raise on texts that are no mathematics
            failed.append(error)
            return False

    return "right" if equal(gold, answer, compare_or_note) else "unparsed" if failed else "wrong"


def reads(expression: str) -> bool:
    from algebra import read

    try:
        read(expression)
        return True
    except Exception:  # as above
        return False


@functools.cache
def workers() -> ProcessPool:
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main and not Path(main).is_file():  # `python - < program`: no worker could ever begin
        raise ConfigError(f"the verifier's processes import the main program, and {main} is no file; run it from one")
    # A process that had to be killed is replaced by a fork of one that has imported what takes long.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["algebra", *({"torch"} & sys.modules.keys())])
    return ProcessPool(max_workers=WORKERS, initializer=start_worker, context=context)


class OutOfReach(Exception):
    """A worker had to be killed, or asked for too much memory."""


class Task:
    """A call in a worker."""

    def __init__(self, function: Callable, *args: object):
        self.args = function, VERIFY_SECONDS, *args
        self.begin()

    def begin(self) -> None:
        try:
            self.future = workers().schedule(limited, args=self.args, timeout=PATIENCE * VERIFY_SECONDS)
        except RuntimeError:  # an idle worker was killed from outside, and pebble gives up on the whole pool
            workers().stop()
            workers.cache_clear()
            self.future = workers().schedule(limited, args=self.args, timeout=PATIENCE * VERIFY_SECONDS)

    def result(self) -> object:
        """Raises OutOfReach, and what the function raises."""
        for _ in range(2):
            try:
                return self.future.result()
            except (ProcessExpired, TimeoutError, MemoryError) as error:
                raise OutOfReach(type(error).__name__) from error
            except BrokenProcessPool:  # likewise, with this task in it
                self.begin()
        raise OutOfReach("the workers are killed from outside")


class Undecided(Exception):
    """Only algebra can tell."""


def undecided(gold: str, answer: str) -> bool:
    raise Undecided


@functools.lru_cache(maxsize=20_000)
def verification(gold: str, answer: str | None) -> str | Task:
    """Begin to compare an answer with the gold one."""
    if answer is None or not answer.strip():
        return "unparsed"
    try:
        return "right" if equal(gold, answer, undecided) else "wrong"
    except Undecided:
        return Task(verify_slowly, gold, answer)
    except Exception:  # a text that nobody thought of must not end a run of days
        return "unparsed"


def judged(begun: str | Task) -> str:
    """"right", "wrong", "unparsed" (no answer, or one that cannot be read), or "timed_out"."""
    if isinstance(begun, str):
        return begun
    try:
        return begun.result()
    except OutOfReach:
        return "timed_out"
    except Exception:  # as in `verification`
        return "unparsed"


def unreadable(golds: Iterable[str]) -> set[str]:
    """Those of which only the very spelling can ever be rewarded."""
    begun = {gold: Task(readable, gold, reads) for gold in dict.fromkeys(golds) if number(gold) is None}

    def unread(gold: str) -> bool:
        try:
            return not begun[gold].result()
        except Exception:  # a gold answer that no worker survives
            return True

    return set(filter(unread, begun))


def last_number_equal(gold: str, text: str) -> bool:
    """CPPO's lenient grading: the text, or its last number, is the gold answer; where it has an answer tag, what is in
    it."""
    found, tag = last_number(text), last_tag(text)
    plain = (text if tag is None else tag).strip() == gold
    return plain or bool(found and same_numbers(gold, found))


def grade(pairs: list[tuple[str, str]]) -> list[dict]:
    """Of gold answers and completions: the marked answer, its verdict, whether the last number is right (lenient) and
    whether either is."""
    texts = [until_end(text) for _, text in pairs]
    answers = [extract(text) for text in texts]
    begun = [verification(gold, answer) for (gold, _), answer in zip(pairs, answers, strict=True)]
    found = []
    for (gold, _), text, answer, one in zip(pairs, texts, answers, begun, strict=True):
        verdict, last = judged(one), last_number_equal(gold, text)
        found.append({"answer": answer, "verdict": verdict, "last_number": last, "lenient": last or verdict == "right"})
    return found


# ---- components

@dataclass(frozen=True, slots=True)
class Completion:
    """What components look at."""

    text: str      # up to the first end-of-sequence token that is spelled out
    gold: str
    tokens: int    # sampled, the EOS among them
    longest: int   # tokens that were allowed
    right: bool    # the marked final answer equals the gold one


def accuracy(c: Completion, cfg: Reward) -> float:
    """1 if the marked final answer equals the gold one, else 0."""
    return float(c.right)


def wrong(c: Completion, cfg: Reward) -> float:
    """1 where accuracy is 0: with weight -1 beside accuracy's 1 it is DAPO's reward of 1 and -1 (arXiv:2503.14476)."""
    return float(not c.right)


def boxed(c: Completion, cfg: Reward) -> float:
    """1 for an answer in a box, right or not: GRESO's release pays 0.1 for it (arXiv:2506.02177)."""
    return float(bool((last_boxed(c.text) or "").strip()))


def think_format(c: Completion, cfg: Reward) -> float:
    """1 for <think>...</think>, a new line, <answer>...</answer> and the end of a line, as CPPO (arXiv:2503.22342)
    asks for: text on further lines passes, as in the released code. The pattern there is quadratic in hostile
    texts."""
    middle = c.text.find("</think>\n<answer>", len("<think>"))
    return float(c.text.startswith("<think>") and middle > 0
                 and re.search(r"</answer>$", c.text[middle + 9:], re.MULTILINE) is not None)


def tag_exact(c: Completion, cfg: Reward) -> float:
    """1 if the last answer tag holds the gold answer to the letter, commas aside (CPPO's GSM8K reward)."""
    answer = last_tag(c.text)
    return float(answer is not None and answer.replace(",", "") == c.gold.replace(",", ""))


def tag_number(c: Completion, cfg: Reward) -> float:
    """1 if the last answer tag and the gold answer each hold exactly one number, and the same (CPPO's GSM8K reward)."""
    numbers = [NUMBER.findall(x.replace(",", "")) for x in (last_tag(c.text) or "", c.gold)]
    return float(all(len(found) == 1 for found in numbers) and float(numbers[0][0]) == float(numbers[1][0]))


def tag_count(c: Completion, cfg: Reward) -> float:
    """A quarter for each of the four tags that stands there exactly once, on its line: as open-r1's
    tag_count_reward."""
    return sum(c.text.count(tag) == 1 for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")) / 4


def length(c: Completion, cfg: Reward) -> float:
    """1 for no more than reward.length_tokens."""
    return float(c.tokens <= cfg.length_tokens)


def overlong(c: Completion, cfg: Reward) -> float:
    """DAPO's punishment of length (arXiv:2503.14476, eq. 13): 0 up to longest - overlong_tokens, then falling to -1."""
    return min(max((c.longest - cfg.overlong_tokens - c.tokens) / cfg.overlong_tokens, -1.0), 0.0)


def repetition(c: Completion, cfg: Reward) -> float:
    """Minus the share of NGRAM words in a row that stood there before (arXiv:2502.03373, appendix)."""
    words = c.text.lower().split()
    grams = list(zip(*(words[i:] for i in range(NGRAM)), strict=False))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def custom(c: Completion, cfg: Reward) -> float:
    """reward(text, gold, tokens) of the file reward.custom_file, a number in [-1, 1]. It runs in a worker; where it is
    not done in time it is 0, which counts as timed out. Raises ConfigError for whatever else it does."""
    try:
        value = custom_task(cfg.custom_file, c.text, c.gold, c.tokens).result()
    except OutOfReach:
        return 0.0
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"reward.custom_file={cfg.custom_file}: reward() raises {type(error).__name__}: "
                          f"{error}") from error
    if not isinstance(value, int | float) or not -1 <= value <= 1:
        raise ConfigError(f"reward.custom_file={cfg.custom_file}: reward() returns {value!r}; it must be a number in "
                          "[-1, 1], and reward.custom is its weight")
    return float(value)


@functools.lru_cache(maxsize=20_000)
def custom_task(path: str, *args: object) -> Task:
    return Task(call_file, path, *args)


def late(task: Task) -> bool:
    try:
        task.result()
    except OutOfReach:
        return True
    return False


@functools.cache
def load_file(path: str) -> Callable[[str, str, int], float]:
    scope: dict = {"__name__": Path(path).stem, "__file__": path}
    exec(compile(Path(path).read_text(), path, "exec"), scope)
    return scope["reward"]


def call_file(path: str, text: str, gold: str, tokens: int) -> float:
    return load_file(path)(text, gold, tokens)


# name -> (function, least value, largest value)
COMPONENTS = {"accuracy": (accuracy, 0, 1), "wrong": (wrong, 0, 1), "boxed": (boxed, 0, 1),
              "format": (think_format, 0, 1), "tag_exact": (tag_exact, 0, 1), "tag_number": (tag_number, 0, 1),
              "tag_count": (tag_count, 0, 1), "length": (length, 0, 1), "overlong": (overlong, -1, 0),
              "repetition": (repetition, -1, 0), "custom": (custom, -1, 1)}
OF_LENGTH = ("length", "overlong")
NOTES = ("unparsed", "timed_out", "disagree")  # rates that every step logs beside the components


def measured(cfg: Reward) -> list[str]:
    """What `score` tells of every completion: accuracy always."""
    return [*dict.fromkeys(("accuracy", *cfg.weights)), *NOTES]


def score(completions: list[tuple[str, str, int]], longest: int, cfg: Reward) -> list[list[float]]:
    """What `measured` names, of each (text, gold answer, tokens), of `longest` tokens that were allowed.

    The components are unweighted. NOTES are 1 or 0: an answer that is missing or cannot be read, a verifier that had to
    be killed, and a strict and a lenient grader that disagree, where the gold answer is a number.
    """
    if cfg.custom:
        for text, gold, tokens in completions:
            custom_task(cfg.custom_file, until_end(text), gold, tokens)  # all begin before one is waited for
    grades = grade([(gold, text) for text, gold, _ in completions])
    return [score_one(Completion(until_end(text), gold, tokens, longest, graded["verdict"] == "right"), graded, cfg)
            for (text, gold, tokens), graded in zip(completions, grades, strict=True)]


def score_one(c: Completion, graded: dict, cfg: Reward) -> list[float]:
    parts = {name: COMPONENTS[name][0](c, cfg) for name in measured(cfg) if name not in NOTES}
    killed = graded["verdict"] == "timed_out" or (
        "custom" in parts and late(custom_task(cfg.custom_file, c.text, c.gold, c.tokens)))
    disagree = number(c.gold) is not None and graded["last_number"] != c.right
    return [*parts.values(), float(graded["verdict"] == "unparsed"), float(killed), float(disagree)]


def span(weights: dict[str, float]) -> tuple[float, float]:
    """The least and the most that a reward can be."""
    ends = [(weight * low, weight * high) for name, weight in weights.items() for _, low, high in [COMPONENTS[name]]]
    return float(sum(map(min, ends))), float(sum(map(max, ends)))


# ---- the verifier on labelled cases

def read_cases(path: Path) -> list[dict]:
    """Raises ConfigError with the line of a malformed case."""
    if not path.is_file():
        raise ConfigError(f"--cases: file {path} not found")
    cases = []
    for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{i}: not valid JSON ({error})") from None
        kinds = {"gold": str, "completion": str, "correct": bool}
        wrong = next((key for key, kind in kinds.items() if not isinstance(case, dict) or
                      not isinstance(case.get(key), kind)), None)
        if wrong:
            raise ConfigError(f"{path}:{i}: a case needs {wrong!r}, a {kinds[wrong].__name__}")
        cases.append(case)
    if not cases:
        raise ConfigError(f"{path} holds no cases")
    return cases


def shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[:width // 2]} ... {text[-width // 2:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True, help="labelled completions, one JSON object per line")
    try:
        cases = read_cases(parser.parse_args().cases)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    grades = grade([(case["gold"], case["completion"]) for case in cases])
    seconds = time.perf_counter() - began
    table: dict[str, Counter] = {}
    for case, graded in zip(cases, grades, strict=True):
        judged = graded["verdict"]
        kind = ("false" if case["correct"] != (judged == "right") else "true") + (
            " positive" if judged == "right" else " negative")
        for name in (case.get("category", "all"), "total"):
            table.setdefault(name, Counter())[kind] += 1
        if kind.startswith("false"):
            print(f"{kind}: {case.get('category', '')}: gold {shorten(case['gold'])!r}, answer "
                  f"{shorten(graded['answer'] or '')!r}, judged {judged}")
    table["total"] = table.pop("total")
    print(f"{'category':<24} {'cases':>6} {'accuracy':>9} {'false positives':>16} {'false negatives':>16}")
    for name, counts in table.items():
        right = counts["true positive"] + counts["true negative"]
        print(f"{name:<24} {counts.total():>6} {right / counts.total():>9.1%} {counts['false positive']:>16} "
              f"{counts['false negative']:>16}")
    killed = sum(graded["verdict"] == "timed_out" for graded in grades)
    print(f"{len(cases)} cases in {seconds:.1f} s; {killed} took the verifier more than {VERIFY_SECONDS:g} s, and "
          "count as wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
