"""Rewards: named components of a completion, summed by weight (`reward.<component>` in the config).

    python reward.py --cases FILE.jsonl

The command grades labelled completions, {"gold", "completion", "correct"} per line, and prints how often the
verifier is right. A component is a function of a `Completion` and an entry in COMPONENTS; the user's own are
called by leaves/own_rewards. A component that is nan for a completion adds nothing to its reward.
"""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from config import NEED_ANSWER, Reward
from infra.terminal import new_parser
from records import Problem, Prompt, frozen
from settings import leaves
from verify.extract import NUMBER, last_boxed, last_tag
from verify.grade import grade
from verify.number import number


@frozen
class Completion:
    """A completion and its gold answer, as a component reads them."""

    text: str         # the policy's last turn, before the token that ends it
    gold: str
    tokens: int       # sampled, the EOS among them
    longest: int      # tokens that were allowed
    right: bool       # the marked final answer equals the gold one; False if nothing is graded
    settings: Reward  # some components have settings


def accuracy(c: Completion) -> bool:
    """Return 1 if the marked final answer equals the gold one, else 0."""
    return c.right


def wrong(c: Completion) -> bool:
    """Return 1 if accuracy is 0.

    With weight -1 beside accuracy's 1 it is DAPO's reward of 1 and -1 (arXiv:2503.14476).
    """
    return not c.right


def boxed(c: Completion) -> bool:
    """Return 1 for an answer in a box, right or not: GRESO's release pays 0.1 for it (arXiv:2506.02177)."""
    return bool((last_boxed(c.text) or "").strip())


def think_format(c: Completion) -> bool:
    """Return 1 for <think>...</think>, a new line, <answer>...</answer> and the end of a line.

    CPPO (arXiv:2503.22342) asks for it. Text on further lines passes, as in the released code. The pattern
    there is quadratic in hostile texts; this is not.
    """
    middle = c.text.find("</think>\n<answer>", len("<think>"))
    opened = c.text.startswith("<think>") and middle >= 0
    return opened and bool(re.search(r"</answer>$", c.text[middle + 9:], re.MULTILINE))


def tag_exact(c: Completion) -> bool:
    """Return 1 if the last answer tag holds the gold answer, commas aside (CPPO's GSM8K reward)."""
    answer = last_tag(c.text)
    return answer is not None and answer.replace(",", "") == c.gold.replace(",", "")


def tag_number(c: Completion) -> bool:
    """Return 1 if the last answer tag and the gold answer hold one number each, the same (CPPO, as above)."""
    answer = last_tag(c.text) or ""
    answers = NUMBER.findall(answer.replace(",", ""))
    golds = NUMBER.findall(c.gold.replace(",", ""))
    return len(answers) == len(golds) == 1 and float(answers[0]) == float(golds[0])


def overlong(c: Completion) -> float:
    """Punish length as DAPO does (arXiv:2503.14476, eq. 13).

    0 up to longest - overlong_tokens, from there falling to -1 at `longest`.
    """
    room = c.longest - c.settings.overlong_tokens - c.tokens
    return min(max(room / c.settings.overlong_tokens, -1.0), 0.0)


# name -> (function, least value, largest value)
COMPONENTS = {
    "accuracy": (accuracy, 0, 1),
    "wrong": (wrong, 0, 1),
    "boxed": (boxed, 0, 1),
    "format": (think_format, 0, 1),
    "tag_exact": (tag_exact, 0, 1),
    "tag_number": (tag_number, 0, 1),
    "overlong": (overlong, -1, 0),
}
REPORTED_RATES = ("unparsed", "timed_out", "disagree")  # rates that every step logs beside the components


def own_rewards() -> ModuleType:
    """Import what calls the user's own functions, if there is a reward.custom_file."""
    return leaves.file_of("own_rewards", "calls")


def list_components(cfg: Reward, graded: bool = True) -> list[str]:
    """Name the values that `score` computes for every completion: components that have a weight, if only 0,
    and notes.

    Without gold answers nothing is `graded`: there is neither accuracy nor a note of the verifier's.
    """
    names = [name for name in cfg.components if graded or name not in NEED_ANSWER]
    names += REPORTED_RATES if graded else ["timed_out"]
    if cfg.custom_file:
        names.append("died")
    return names


def score(
    completions: list[tuple[Sequence[str], Problem | Prompt, int]],
    longest: int,
    cfg: Reward,
    graded: bool = True
) -> list[list[float]]:
    """Compute the values of `list_components` for each (turns, problem, tokens) of up to `longest` tokens.

    The last turn is the policy's, which is graded. The user's functions may ask for those before it too.

    The components are unweighted; accuracy is nan if the problem has no answer. REPORTED_RATES are 1 or 0: an
    answer is missing or cannot be read; a verifier or a user's function took too long; a strict and a lenient
    grade disagree on a gold answer that is a number. The last one is 1 if a user's function died.
    """
    # The user's functions and the verifier work in other processes: all calls start before one is awaited.
    calls = [None] * len(completions)
    own = own_rewards() if cfg.custom_file else None
    if own:
        file = own.RewardFile.of(cfg)
        calls = [own.start_call(file, problem, turns, tokens) for turns, problem, tokens in completions]
    grades = [{}] * len(completions)
    if graded:
        asked = [(problem.answer, turns[-1] if problem.answer else "") for turns, problem, _ in completions]
        grades = grade(asked)
    names = list_components(cfg, graded)
    rows = []
    for (turns, problem, tokens), call, judged in zip(completions, calls, grades, strict=True):
        verdict = judged.get("verdict")
        c = Completion(turns[-1], problem.answer, tokens, longest, verdict == "right", cfg)
        values = {name: COMPONENTS[name][0](c) for name in names if name in COMPONENTS}
        values["unparsed"] = verdict == "unparsed"
        values["timed_out"] = verdict == "timed_out"
        values["disagree"] = number(c.gold) is not None and judged.get("last_number") != c.right
        if own:
            values |= own.read_values(file, cfg, call, problem.id, values["timed_out"])
        if not c.gold:  # components that compare with an answer say nothing here
            values |= dict.fromkeys((*NEED_ANSWER, "unparsed"), math.nan)
        rows.append([float(values[name]) for name in names])
    return rows


def reward_range(weights: dict[str, float]) -> tuple[float, float]:
    """Return the least and the greatest reward that these weights allow."""
    least = greatest = 0.0
    for name, weight in weights.items():
        _, low, high = COMPONENTS.get(name, (None, -1, 1))  # of the user's own
        least += min(weight * low, weight * high)
        greatest += max(weight * low, weight * high)
    return least, greatest


def main() -> int:
    from verify.cases import grade_cases  # of this command alone

    parser = new_parser(__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="labelled completions, in JSON lines")
    return grade_cases(parser.parse_args().cases)


if __name__ == "__main__":
    sys.exit(main())
