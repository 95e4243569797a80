"""What the lines of a run's files and of a result must have: whoever reads them relies on it.

A function takes a line and the place it is from, and raises ConfigError where something is missing or of
another type. What else a line has is let through.
"""

from typing import Any

from config import ConfigError
from settings.loader import SHORT

DAMAGED = "the file was damaged; bring it back, or do without it"
NUMBER, TEXT, FLAG = (int, float), (str,), (bool,)
NOTHING = (type(None),)
STATE = {"state": TEXT}
STEP = {"step": (int,)}
SAMPLED = {"id": TEXT, "prompt": TEXT, "gold": TEXT + NOTHING, "completions": (list,)}
COMPLETION = {"text": TEXT, "tokens": (int,), "finished": FLAG, "kept": FLAG, "reward": NUMBER + NOTHING,
              "components": (dict,), "advantage": NUMBER + NOTHING, "prob": NUMBER + NOTHING,
              "weight": NUMBER}
ANSWERED = {"id": TEXT, "gold": TEXT + NOTHING, "responses": (list,)}
LABELS = {"level": TEXT + NOTHING, "subject": TEXT + NOTHING}
RESPONSE = {"tokens": (int,), "finished": FLAG, "text": TEXT}
GRADED = {"gold": TEXT, "answer": TEXT + NOTHING, "verdict": TEXT, "lenient": FLAG, "last_number": FLAG}
SCORED = {"reward": NUMBER + NOTHING}
DECIDED = STEP | {"prompts": (list,)}
DRAWN = {"id": TEXT, "epoch": (int,), "prob": NUMBER, "weight": NUMBER}


def require(line: Any, place: str, needed: dict[str, tuple[type, ...]]) -> None:
    """Raise ConfigError where a line has not all that is needed, of these types; integers have 64 bits."""
    for name, allowed in needed.items():
        missing = not isinstance(line, dict) or name not in line
        value = None if missing else line[name]
        if missing or not isinstance(value, allowed) or isinstance(value, int) and abs(value) >= 2**63:
            found = "is missing" if missing else f"is {SHORT.repr(value)}"
            kinds = " or ".join(kind.__name__ for kind in allowed)
            raise ConfigError(f"{place}: {name} {found} and must be {kinds}; {DAMAGED}")


def numbers(values: Any, place: str, name: str, allowed: tuple[type, ...] = NUMBER) -> list:
    require({name: values}, place, {name: (list,)})
    for i, value in enumerate(values):
        require({f"{name}[{i}]": value}, place, {f"{name}[{i}]": allowed})
    return values


def ended(line: dict, place: str) -> None:
    require(line, place, STATE)


def stepped(line: dict, place: str) -> None:
    require(line, place, STEP)


def measured(line: dict, place: str) -> None:
    require(line, place, STEP | dict.fromkeys(line, NUMBER + NOTHING) | STEP)


def sampled(line: dict, place: str) -> None:
    """Of samples.jsonl; those of versions that kept no completions one by one have nothing else in common."""
    require(line, place, STEP | (SAMPLED if "completions" in line else {}))
    for g, completion in enumerate(line.get("completions", [])):
        require(completion, f"{place}: completions[{g}]", COMPLETION)
        require(completion["components"], place, dict.fromkeys(completion["components"], NUMBER + NOTHING))


def answered(line: dict, place: str, graded: dict = RESPONSE | GRADED, other: dict = RESPONSE) -> None:
    """Of a problem of a result: its responses are graded, all or none of them, and likewise scored."""
    require(line, place, ANSWERED)
    require({"level": None, "subject": None} | line, place, LABELS)
    responses = line["responses"] or [None]
    require({"responses[0]": responses[0]}, place, {"responses[0]": (dict,)})
    needed = graded if "verdict" in responses[0] else other
    needed = needed | (SCORED if "reward" in responses[0] else {})
    for k, response in enumerate(responses):
        whole = {"gold": line["gold"]} | response if isinstance(response, dict) else response
        require(whole, f"{place}: responses[{k}]", needed)


def evaluated(line: dict, place: str) -> None:
    """Of eval_*.jsonl."""
    require(line, place, {"set": TEXT, "question": TEXT})
    answered(line, place, {"text": TEXT, "verdict": TEXT}, {"text": TEXT} | SCORED)


def decided(line: dict, place: str) -> None:
    """Of decisions.jsonl: prompts with as many rewards as weights, where they have both."""
    require(line, place, DECIDED)
    for n, prompt in enumerate(line["prompts"]):
        where = f"{place}: prompts[{n}]"
        require({"prompt": prompt}, where, {"prompt": (dict,)})
        known = [numbers(prompt[name], where, name, NUMBER + NOTHING)
                 for name in ("right", "reward") if name in prompt]
        weights = numbers(prompt.get("completion_weight", []), where, "completion_weight")
        if weights and any(len(values) != len(weights) for values in known):
            raise ConfigError(f"{where} has {len(weights)} weights and not as many rewards; {DAMAGED}")
