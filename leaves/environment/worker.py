"""Run the user's own environment in a worker (leaves/environment/file.py): reply(text, row), tools or a
class.

Only plain values travel back: an exception of the user's own could not be made again in the trainer.
"""

import asyncio
import inspect
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait

from pydantic import TypeAdapter, ValidationError, validate_call

from infra.user_worker import Source, WrongFile, on_one_line, run_guarded
from leaves.environment.calls import WANTED, ToolCall, read_calls
from verify.workers import how, set_alarm


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy that is to be answered, and all before it."""

    prompt: str
    turns: Sequence[str]  # of the policy, and after each but the last one the reply to it
    row: dict
    format: str   # of calls (environment.format)
    longest: int  # characters of a reply that may fit


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the environment: a text, messages, or None at the end of the completion."""

    content: str | list[dict] | None
    calls: int = 1
    failures: int = 0


def run_silently(source: Source, work: Callable, row: dict) -> object:
    """Do some work with the names of a file, and drop what it prints: that would be printed for every turn.

    Returns an error as text.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    return run_guarded(source, row, work)


def list_schemas(scope: dict) -> list[dict]:
    """Describe the tools of a file as chat templates take them; an empty list with reply()."""
    return [describe(name, tool) for name, tool in list_tools(scope).items()]


def list_tools(scope: dict, turn: Turn | None = None) -> dict[str, Callable]:
    """List the tools of a file by their names: functions, or the methods of an instance that has been through
    the turns before this one. Empty if the file has reply() instead."""
    kinds = scope.keys() & {"reply", "tools", "environment", "environment_factory"}
    if len(kinds) != 1:
        own = [name for name, value in scope.items() if inspect.isroutine(value) or inspect.isclass(value)]
        raise WrongFile("it must have one of reply(text, row), tools = [add] and environment = MyClass; "
                        f"it has {', '.join(own) or 'none'}")
    kind, = kinds
    if kind == "reply":
        return {}
    if kind != "tools":
        return play(scope[kind], turn)
    tools = scope["tools"]() if callable(scope["tools"]) else scope["tools"]
    listed = tools if isinstance(tools, list) else []
    named = {tool.__name__: tool for tool in listed if inspect.isfunction(tool)}
    if not named or listed[len(named):]:
        raise WrongFile(f"tools is {on_one_line(tools, repr)}; it must be a list of functions, each with "
                        "a name of its own")
    return named


def play(factory: Callable, turn: Turn | None) -> dict[str, Callable]:
    """Make an environment as TRL's environment_factory does, repeat the calls of all turns but the last, and
    return its methods."""
    made = factory() if callable(factory) else None
    tools = {name: getattr(made, name) for name, _ in inspect.getmembers(type(made), inspect.isroutine)
             if name[0] != "_"}
    reset = tools.pop("reset", None)
    if not reset or not tools or "get_reward" in tools:
        raise WrongFile("environment must be a class with reset(**row), methods as tools, no get_reward(); "
                        "a reward is a function of reward.custom_file")
    if turn:
        shown = reset(**turn.row)
        if shown is not None and str(shown).strip() not in turn.prompt:
            raise WrongFile(f"reset() returns {on_one_line(shown, repr)}, which the prompt does not hold; "
                            "append it to the question in the data, as TRL does, or return None")
        for said in turn.turns[:-1:2]:
            for call in read_calls(said, tools):
                run_tool(tools, call, turn)
    return tools


def describe(name: str, tool: Callable) -> dict:
    """Describe a function by its types and its docstring, as transformers' get_json_schema does."""
    written, schema = inspect.getdoc(tool) or "", TypeAdapter(tool).json_schema()
    schema.pop("additionalProperties", None)
    if schema["type"] == "array":
        raise WrongFile(f"{name}{inspect.signature(tool)} must take its arguments by name")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise WrongFile(f"{name}() must return its result, and not yield it")
    for argument, about in schema["properties"].items():
        for key in ("title", "default"):
            about.pop(key, None)
        if found := re.search(rf"(?m)^( +){argument}\b[^:\n]*:(.*(?:\n\1 +.*)*)", written):
            about["description"] = " ".join(found[2].split())
    summary = re.split(r"\s*\n(?:Args|Returns|Raises|Yields|Examples?):", written)[0]
    return {"type": "function", "function": {
        "name": name, "description": summary, "parameters": {"type": "object"} | schema}}


def reply_to(scope: dict, turn: Turn) -> Reply:
    """Reply to a turn."""
    if tools := list_tools(scope, turn):
        calls = read_calls(turn.turns[-1], tools)
        run = run_apart if "tools" in scope and len(calls) > 1 else run_tool
        return make_reply([run(tools, call, turn) for call in calls], turn.format)
    content = scope["reply"]("".join(turn.turns), turn.row)
    match content:
        case None:
            return Reply(None, calls=0)
        case str() if content:
            return Reply(shorten(content, turn))
        case list() if content:
            return Reply([check_message(message, turn) for message in content])
    raise WrongFile(f"reply() returns {on_one_line(content, repr)}; it must be a text, a list of messages, "
                    "or None at the end of a completion")


def check_message(message: object, turn: Turn) -> dict:
    """Return a message with its role and content, both texts."""
    match message:
        case {"role": str(role), "content": str(content), **others} if not others:
            return {"role": role, "content": shorten(content, turn)}
    raise WrongFile(f"reply() returns the message {on_one_line(message, repr)}; each must have a role and a "
                    "content, both texts, and nothing else")


def shorten(text: str, turn: Turn) -> str:
    """Cut off characters that cannot fit. A class of the user's own for texts stays behind."""
    return str.__str__(text)[:turn.longest]


def make_reply(results: list[tuple], form: str) -> Reply:
    """Return the results of calls as messages, or in the plain format as lines."""
    content = [{"role": "tool", "name": name, "content": text} for name, text, _ in results]
    if form == "plain":
        content = "".join(f"\n{text}\n" for _, text, _ in results)
    return Reply(content or None, len(results), sum(failed for *_, failed in results))


def run_apart(tools: dict, call: object, turn: Turn) -> tuple[str, str, bool]:
    """Run one of several calls in a fork, so that it leaves nothing behind for the next one."""
    seconds, (receive, send) = signal.getitimer(signal.ITIMER_PROF)[0], Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            set_alarm(seconds)
            send.send(run_tool(tools, call, turn))
        finally:
            os._exit(0)
    wait([receive, os.pidfd_open(pid)])
    result = receive.recv() if receive.poll() else None
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return result or ("", f"error: the call was ended: {how(status)}", True)


def run_tool(tools: dict, call: object, turn: Turn) -> tuple[str, str, bool]:
    """Run one call; returns the name of the tool, its result as text, and whether it failed."""
    name, advice = "", f"; write a call as {WANTED[turn.format]}"
    try:
        if isinstance(call, Exception):
            raise call
        if isinstance(call, dict):
            call = call.get("function", call)  # as OpenAI nests it
        asked = ToolCall.model_validate(call)
        called = asked.name.removeprefix("functions.")
        if called not in tools:
            there = f"there is no tool {on_one_line(called, repr)}; there are {', '.join(tools)}"
            return "", f"error: {there}", True
        name, advice = called, ""
        result = validate_call(tools[name])(**asked.arguments or {})
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return name, shorten(text, turn), False
    except MemoryError:
        raise
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    except BaseException as error:  # SystemExit too: a call or a tool may raise anything
        reason = f"{type(error).__name__}: {on_one_line(error, str)}"
    return name, shorten(f"error: {reason}{advice}", turn), True
