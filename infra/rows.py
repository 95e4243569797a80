"""Read the row of a data set: its question and answer, its messages and other columns."""

import ast
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from hashlib import sha256

from infra.terminal import to_stderr
from records import Problem
from settings.loader import SHORT, ConfigError, encodable, meant, parse_json
from verify.grade import name_unreadable

Columns = dict[str, str | None]  # data.columns
Rows = Iterator[tuple[str, dict]]  # each with its place
LETTERS = "ABCD"
GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
# Other names of columns, as in MATH, on the hub and in verl's sets.
OTHER_NAMES = {
    "question": ("problem", "prompt", "messages", "conversations"),
    "answer": ("final_answer", "reward_model.ground_truth", "ground_truth"),
    "subject": ("type",),
}
# A message is {"role", "content"}, or as in ShareGPT {"from", "value"}; other names of the roles.
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}


def to_object(pairs: list[tuple]) -> dict:
    """Make an object of a row from its keys and values. Raises ValueError for a key that is given twice."""
    row = {}
    for name, value in pairs:
        if name in row:
            raise ValueError(f"{name!r} is given twice, behind {SHORT.repr(row)}")
        row[name] = value
    return row


def with_letters(row: dict) -> dict:
    """Write a row of GPQA as a question with four lettered choices, in an order that its texts decide."""
    question, right, *wrong = map(row.get, GPQA)
    if "answer" in row or not all(isinstance(text, str) for text in (question, right, *wrong)):
        return row
    ordered = sorted([right, *wrong], key=lambda choice: sha256(f"{question}{choice}".encode()).digest())
    lines = [f"{letter}) {choice.strip()}" for letter, choice in zip(LETTERS, ordered, strict=True)]
    return row | {
        "question": "\n".join([question.strip(), "", *lines]),
        "answer": LETTERS[ordered.index(right)],
        "solution": row.get("Explanation") or "",
        "subject": row.get("High-level domain"),
    }


def columns_of(source: str, rows: list[dict], columns: Columns) -> Columns:
    """Keep those columns that some row of a set has. Print the others: our own names are used for them.

    A column for question or answer stays if neither name is found: an error will name it.
    """
    there = {}
    for name, column in columns.items():
        ours = any(find_cell(row, name, {}) is not None for row in rows)
        found = column is None or any(find_cell(row, name, columns) is not None for row in rows)
        if found or name in ("question", "answer") and not ours:
            there[name] = column
        if not found and (ours or name != "question"):
            to_stderr(f"{source}: no row has the column {column!r} that data.columns names for {name}"
                      + "; the column that has one of our own names for it is taken" * ours)
    return there


def find_cell(row: dict, name: str, columns: Columns) -> object:
    """Return a row's value for our `name`, or None if it has none.

    It is in the column that `columns` maps the name to, else in the column of that name or of OTHER_NAMES.
    "a.b" is b inside column a, unless a column is called "a.b".
    """
    places = (columns[name],) if name in columns else (name, *OTHER_NAMES.get(name, ()))
    for place in filter(None, places):
        value = row
        for key in [place] if place in row else place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        # pandas writes nan for an empty cell, in csv too
        empty = value == "nan" or isinstance(value, float | Decimal) and not math.isfinite(value)
        if value is not None and not empty:
            return value
    return None


def missing_column(row: dict, name: str, columns: Columns) -> str:
    """Write the error for a row that has no value for our `name`."""
    chosen = columns.get(name, name)
    if chosen is None:
        return f"data.columns={{{name}: null}} says that there is no {name}, which is needed here"
    if chosen in row:
        return f"column {chosen!r} is empty, or nan; mend or remove the line"
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, dict) for key in value]
    near = meant(chosen, [*map(str, row), *inner])
    return (f"there is no column {chosen!r} for the {name} among {', '.join(map(str, row))}"
            f"{near and f' ({near})'}; set data.columns={{{name}: ...}} to the column that has it")


def messages_of(question: object, place: str) -> tuple[tuple[dict, ...], str]:
    """Read a question that is a list of messages, or such a list as JSON, and the assistant's last message if
    there is one behind the user's: the solution. () and "" for any other text. Raises ConfigError.
    """
    looks_like = r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:"""
    if isinstance(question, str) and re.match(looks_like, question):
        question = parse_json(question, place, "the question looks like a list of messages; write it with "
                                               "json.dumps", to_object)
    if not isinstance(question, list) or not question:
        return (), ""
    messages = [read_message(message, place) for message in question]
    solution = ""
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        solution = messages.pop()["content"]
    if messages[-1]["role"] != "user":
        raise ConfigError(f"{place}: the last message, or that before the assistant's, must be the user's, "
                          f"which is to be answered, not the {messages[-1]['role']}'s")
    return tuple(messages), solution


def read_message(message: object, place: str) -> dict:
    """Read a message with our names. Raises ConfigError."""
    names = {"from": "role", "value": "content"}
    given = message if isinstance(message, dict) else {}
    named = {names.get(key, key): value for key, value in given.items() if value is not None}
    role, parts = ROLES.get(named.get("role")), named.get("content")
    with suppress(TypeError, KeyError):  # a text, or parts that are none
        named["content"] = "".join(part["text"] for part in parts)
    if role is None or not isinstance(named.get("content"), str):
        raise ConfigError(f"{place}: a message must be an object with 'role', one of {', '.join(ROLES)}, and "
                          f"'content', a text (or 'from' and 'value'), not {str(message)[:200]}")
    return named | {"role": role}


def spelled(answer: object) -> object:
    """Spell an answer as a person would: 27, not 27.0; a list of texts, or such a list as JSON, Python or
    numpy writes it, joined."""
    if isinstance(answer, str) and re.match(r"""\s*\[\s*["']""", answer):
        answer = parse_list(answer)
    if isinstance(answer, list):  # OlympiadBench's several answers
        return encodable(", ".join(str(spelled(one)) for one in answer))
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, float | Decimal) or not math.isfinite(answer):
        return answer
    if answer == int(answer):
        return str(int(answer))
    return f"{answer.normalize():f}" if isinstance(answer, Decimal) else str(answer)


def parse_list(text: str) -> object:
    with_commas = re.sub(r"'\s+'", "', '", text.strip())  # numpy writes none
    for parse, written in ((json.loads, text), (ast.literal_eval, with_commas)):
        try:
            value = parse(written)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return value if isinstance(value, list) else text
    return text


def all_have_answers(problems: list[Problem], name: str, needed: bool = False) -> bool:
    """Tell whether all problems have a gold answer, and print it if only some do, or if the verifier cannot
    read some. Raises VerifyError if they are `needed` and it can read none."""
    without = sum(not p.answer for p in problems)
    if 0 < without < len(problems):
        to_stderr(
            f"{name}: {without} of {len(problems)} problems have no answer, so accuracy is not measured")
    if not without:
        name_unreadable(name, {p.id: p.answer for p in problems}, needed)
    return not without
