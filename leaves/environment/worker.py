"""Run the user's own environment in a worker (leaves/environment/file.py): reply(text, row) or tools().

Only plain values travel back: an exception of the user's own could not be made again in the trainer.
"""

import copy
import inspect
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError, validate_call

from infra.user_worker import Source, WrongFile, on_one_line, run_guarded

TAGGED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BARE_CALL = re.compile(r'\{\s*"name"\s*:.*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Turn:
    """The texts that a reply answers, when the policy has ended a turn."""

    text: str     # the completion so far
    newest: str   # the turn itself
    row: dict
    format: str   # of calls (environment.format)
    longest: int  # characters of a reply that may fit


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the environment: a text, messages, or None at the end of the completion."""

    content: str | list[dict] | None
    calls: int = 1
    failures: int = 0


def call_environment(source: Source, seconds: float, turn: Turn) -> Reply | str:
    """Reply to a turn. Returns an error as text."""
    silence()
    return run_guarded(source, seconds, turn.row, lambda scope: reply_to(scope, turn))


def list_schemas(source: Source, seconds: float) -> list[dict] | str:
    """Describe the tools of a file as chat templates take them; an empty list without tools()."""
    silence()
    return run_guarded(source, seconds, {}, lambda scope: [describe(f) for f in list_tools(scope)])


def silence() -> None:
    """Drop what the file prints: it would be printed for every turn."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def list_tools(scope: dict) -> list[Callable]:
    """Call tools(); an empty list if the file has reply() instead."""
    if callable(scope.get("reply")) == callable(scope.get("tools")):
        raise WrongFile("it must have one of the functions reply(text, row) and tools()")
    if callable(scope.get("reply")):
        return []
    functions = scope["tools"]()
    if not (isinstance(functions, list) and functions and all(map(inspect.isfunction, functions))):
        raise WrongFile(f"tools() returns {on_one_line(functions, repr)}; it must be a list of functions")
    return functions


def describe(function: Callable) -> dict:
    """Describe a function by its name, its docstring and the types of its parameters."""
    return {"type": "function", "function": {
        "name": function.__name__,
        "description": inspect.getdoc(function) or "",
        "parameters": TypeAdapter(function).json_schema(),
    }}


def reply_to(scope: dict, turn: Turn) -> Reply:
    functions = {function.__name__: function for function in list_tools(scope)}
    if functions:
        return answer_calls(functions, turn)
    content = scope["reply"](turn.text, copy.deepcopy(turn.row))
    if content is None:
        return Reply(None, calls=0)
    if isinstance(content, list):
        content = [check_message(message, turn) for message in content]
    elif isinstance(content, str):
        content = shorten(content, turn)
    if not content or not isinstance(content, str | list):
        raise WrongFile(f"reply() returns {on_one_line(content, repr)}; it must be a text, a list of "
                        "messages, or None at the end of a completion")
    return Reply(content)


def check_message(message: object, turn: Turn) -> dict:
    """Return a message with its role and content, both texts."""
    wanted = {"role", "content"}
    if not isinstance(message, dict) or message.keys() != wanted or not all(
            isinstance(value, str) for value in message.values()):
        raise WrongFile(f"reply() returns the message {on_one_line(message, repr)}; each must have a role "
                        "and a content, both texts, and nothing else")
    return message | {"content": shorten(message["content"], turn)}


def shorten(text: str, turn: Turn) -> str:
    """Cut off characters that cannot fit. Raises UnicodeEncodeError for half of a surrogate pair, which no
    tokenizer takes."""
    text.encode()
    return text[:turn.longest]


def answer_calls(functions: dict[str, Callable], turn: Turn) -> Reply:
    """Run the tools that a turn calls. The result of each, or the error, becomes a message or a line."""
    # Qwen's stand within tags; else the turn ends with one: 'I add {"name": "add", "arguments": {"a": 1}}'.
    calls = (TAGGED_CALL if turn.format == "qwen" else BARE_CALL).findall(turn.newest)
    if not calls:
        return Reply(None, calls=0)
    results = [run_tool(functions, call, turn) for call in calls]
    messages = [{"role": "tool", "name": name, "content": content} for name, content, _ in results]
    return make_reply(messages, turn.format, sum(failed for *_, failed in results))


def make_reply(messages: list[dict], form: str, failures: int) -> Reply:
    """Return the results of calls as messages, or in the plain format as lines."""
    content = messages
    if form == "plain":
        content = "".join(f"\n{message['content']}\n" for message in messages)
    return Reply(content, len(messages), failures)


def run_tool(functions: dict[str, Callable], call: str, turn: Turn) -> tuple[str, str, bool]:
    """Run one call; returns the name of the tool, its result as text, and whether it failed."""
    name = ""
    try:
        asked = json.loads(call)
        name = str(asked["name"])
        given = asked.get("arguments", asked.get("parameters", {}))
        given = json.loads(given) if isinstance(given, str) else given
        if name not in functions:
            return name, f"error: there is no tool {name!r}; there are {', '.join(functions)}", True
        result = validate_call(functions[name])(**given)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return name, shorten(text, turn), False
    except MemoryError:
        raise
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return name, f"error: {reasons}", True
    except Exception as error:  # a call or a tool may raise anything
        return name, f"error: {type(error).__name__}: {on_one_line(error, str)}", True
