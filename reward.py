"""Rewards: named components of a completion, summed by weight (`reward.<component>` in the config).

    python reward.py --cases FILE.jsonl

The command grades labelled completions, {"gold", "completion", "correct"} per line, and prints how often the
verifier is right. A component is a function of a `Completion` and an entry in COMPONENTS.
"""

import argparse
import functools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from config import ConfigError, Reward
from verify.answer import number
from verify.cases import count_outcomes, read_cases
from verify.extract import NUMBER, last_boxed, last_tag, until_end
from verify.grade import VERIFY_SECONDS, Call, OverLimit, grade


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion and its gold answer, as a component reads them."""

    text: str         # up to the first end-of-sequence token that is spelled out
    gold: str
    tokens: int       # sampled, the EOS among them
    longest: int      # tokens that were allowed
    right: bool       # the marked final answer equals the gold one
    settings: Reward  # of the components that have some


def accuracy(c: Completion) -> float:
    """Return 1 if the marked final answer equals the gold one, else 0."""
    return float(c.right)


def wrong(c: Completion) -> float:
    """Return 1 where accuracy is 0.

    With weight -1 beside accuracy's 1 it is DAPO's reward of 1 and -1 (arXiv:2503.14476).
    """
    return float(not c.right)


def boxed(c: Completion) -> float:
    """Return 1 for an answer in a box, right or not: GRESO's release pays 0.1 for it (arXiv:2506.02177)."""
    return float(bool((last_boxed(c.text) or "").strip()))


def think_format(c: Completion) -> float:
    """Return 1 for <think>...</think>, a new line, <answer>...</answer> and the end of a line.

    CPPO (arXiv:2503.22342) asks for it. Text on further lines passes, as in the released code. The pattern
    there is quadratic in hostile texts; this is not.
    """
    middle = c.text.find("</think>\n<answer>", len("<think>"))
    if middle < 0 or not c.text.startswith("<think>"):
        return 0.0
    return float(re.search(r"</answer>$", c.text[middle + 9:], re.MULTILINE) is not None)


def tag_exact(c: Completion) -> float:
    """Return 1 if the last answer tag holds the gold answer, commas aside (CPPO's GSM8K reward)."""
    answer = last_tag(c.text)
    return float(answer is not None and answer.replace(",", "") == c.gold.replace(",", ""))


def tag_number(c: Completion) -> float:
    """Return 1 if the last answer tag and the gold answer hold one number each, the same (CPPO, as above)."""
    answers = NUMBER.findall((last_tag(c.text) or "").replace(",", ""))
    golds = NUMBER.findall(c.gold.replace(",", ""))
    return float(len(answers) == len(golds) == 1 and float(answers[0]) == float(golds[0]))


def overlong(c: Completion) -> float:
    """Punish length as DAPO does (arXiv:2503.14476, eq. 13).

    0 up to longest - overlong_tokens, from there falling to -1 at `longest`.
    """
    room = c.longest - c.settings.overlong_tokens - c.tokens
    return min(max(room / c.settings.overlong_tokens, -1.0), 0.0)


def custom(c: Completion) -> float:
    """Return what reward(text, gold, tokens) of the file reward.custom_file does, a number in [-1, 1].

    It runs in a worker. Where the worker has to be ended the reward is 0, and counts as timed out. Raises
    ConfigError for anything else that goes wrong.
    """
    path = c.settings.custom_file
    try:
        value = custom_call(path, c.text, c.gold, c.tokens).result()
    except OverLimit:
        return 0.0
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"reward.custom_file={path}: reward() raises {type(error).__name__}: "
                          f"{error}") from error
    if not isinstance(value, int | float) or not -1 <= value <= 1:
        raise ConfigError(f"reward.custom_file={path}: reward() returns {value!r}; it must be a number in "
                          "[-1, 1], and reward.custom is its weight")
    return float(value)


@functools.lru_cache(maxsize=20_000)
def custom_call(path: str, text: str, gold: str, tokens: int) -> Call:
    """Start a user's reward function on a completion."""
    return Call(call_file, path, text, gold, tokens)


def call_file(path: str, text: str, gold: str, tokens: int) -> float:
    return load_file(path)(text, gold, tokens)


@functools.cache
def load_file(path: str) -> Callable[[str, str, int], float]:
    scope: dict = {"__name__": Path(path).stem, "__file__": path}
    exec(compile(Path(path).read_text(), path, "exec"), scope)
    return scope["reward"]


def over_limit(call: Call) -> bool:
    try:
        call.result()
    except OverLimit:
        return True
    return False


# name -> (function, least value, largest value)
COMPONENTS = {
    "accuracy": (accuracy, 0, 1),
    "wrong": (wrong, 0, 1),
    "boxed": (boxed, 0, 1),
    "format": (think_format, 0, 1),
    "tag_exact": (tag_exact, 0, 1),
    "tag_number": (tag_number, 0, 1),
    "overlong": (overlong, -1, 0),
    "custom": (custom, -1, 1),
}
OF_LENGTH = ("overlong",)
NOTES = ("unparsed", "timed_out", "disagree")  # rates that every step logs beside the components


def measured(cfg: Reward) -> list[str]:
    """Name what `score` computes for every completion: accuracy, components with a weight, the notes."""
    return [*dict.fromkeys(("accuracy", *cfg.weights)), *NOTES]


def score(completions: list[tuple[str, str, int]], longest: int, cfg: Reward) -> list[list[float]]:
    """Compute what `measured` names, for each (text, gold answer, tokens); `longest` tokens were allowed.

    The components are unweighted. NOTES are 1 or 0: an answer that is missing or cannot be read; a verifier
    or a user's function that had to be ended; a strict and a lenient grade that disagree, where the gold
    answer is a number.
    """
    if cfg.custom:
        for text, gold, tokens in completions:
            custom_call(cfg.custom_file, until_end(text), gold, tokens)  # all start before one is waited for
    grades = grade([(gold, text) for text, gold, _ in completions])
    names = [name for name in measured(cfg) if name not in NOTES]
    scores = []
    for (text, gold, tokens), graded in zip(completions, grades, strict=True):
        c = Completion(until_end(text), gold, tokens, longest, graded["verdict"] == "right", cfg)
        values = [COMPONENTS[name][0](c) for name in names]
        timed_out = graded["verdict"] == "timed_out"
        if "custom" in names:
            timed_out = timed_out or over_limit(custom_call(cfg.custom_file, c.text, gold, tokens))
        disagree = number(gold) is not None and graded["last_number"] != c.right
        notes = (graded["verdict"] == "unparsed", timed_out, disagree)
        scores.append([*values, *map(float, notes)])
    return scores


def span(weights: dict[str, float]) -> tuple[float, float]:
    """Return the least and the most that a reward can be."""
    least = greatest = 0.0
    for name, weight in weights.items():
        _, low, high = COMPONENTS[name]
        least += min(weight * low, weight * high)
        greatest += max(weight * low, weight * high)
    return least, greatest


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cases", type=Path, required=True,
                        help="labelled completions, one JSON object per line")
    try:
        cases = read_cases(parser.parse_args().cases)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    grades = grade([(case["gold"], case["completion"]) for case in cases])
    seconds = time.perf_counter() - start
    counts = count_outcomes(cases, grades)
    print(f"{'category':<24} {'cases':>6} {'accuracy':>9} {'false positives':>16} {'false negatives':>16}")
    for name, outcomes in counts.items():
        fraction_right = (outcomes["true positive"] + outcomes["true negative"]) / outcomes.total()
        print(f"{name:<24} {outcomes.total():>6} {fraction_right:>9.1%} {outcomes['false positive']:>16} "
              f"{outcomes['false negative']:>16}")
    killed = sum(graded["verdict"] == "timed_out" for graded in grades)
    print(f"{len(cases)} cases in {seconds:.1f} s; {killed} took the verifier more than "
          f"{VERIFY_SECONDS:g} s, and count as wrong")

    return 0


if __name__ == "__main__":
    sys.exit(main())
