"""Read the tool calls in a turn, in whatever notation the model has written them.

A call is JSON. It stands behind a tag, wherever that is, or the turn ends with it; a list holds several. What
looks like a call and cannot be read as one becomes an error that the model reads. So does a call in a turn of
nothing but a thought; beside an answer a thought is not read at all.
"""

import json
import re
from typing import Literal

from pydantic import AliasChoices, BaseModel, Field, Json

WANTED = {
    "qwen": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "llama": 'a turn that ends in {"name": ..., "parameters": {...}}',
    "plain": 'a turn that ends in {"name": ..., "arguments": {...}}'
}
THOUGHT = re.compile(r"""(?isx)
    [<\[] (think(?:ing)?|thought|reasoning) [>\]] .*? (?: [<\[]/\1[>\]] | \Z)
    | \A (?: (?![<\[]think) . )*? </think>        # the prompt has opened it""")
# Of Qwen, Hermes, Llama, Mistral, DeepSeek, GLM, Kimi, MiniMax, Phi, Gemma, LFM, Cohere, InternLM, gpt-oss
TAGS = re.compile(r"""(?imx) (?: (?:
    < [|｜]? (?! [^<>]* (?: [_▁]end[|｜] | argument | (?<![|｜])l\|> ) ) (?:\w+[:｜])?
        (?: (?:tool|function).?call | tools> | tools_prefix | tool_use | function[=\ >] | invoke\  | recipient
        | python_(?:tag|start) | action_start | plugin | start_action ) [^<>]* >
    | \[TOOL_CALLS?\] | to=functions\. | ```tool | \A>>>(?=\w+\s*\{) | \A\s*\[(?=\w+\() | ^\[(?=\w+\(\w+=)
    ) \s* )+""")
# In a turn with a name and arguments, or with a tool's name: all from the first object that may be a call
OBJECTS = r"""(?isx) \A (?: (?= .* ["']name["']\s*: ) (?= .* ["'](?:arguments|parameters)["']\s*: )
    | (?= .* ["'](?:(?:\w+_)?name|tool|function|action)["']\s*:\s*["'](?:functions\.)?(?:TOOLS)["'] ) )
    .*? ( (?:\[\s*)? \{ \s*
        ["'] (?:(?:\w+_)?name|type|id|index|tool|function|action|arguments|parameters) ["']\s*: .* )
    | </tool_call>"""
STRING = re.compile(r'(?<=[:,\[{])\s*"[^"\\]*(?:\\.[^"\\]*)*"(?=\s*[\]},:])', re.DOTALL)
BETWEEN = re.compile(r"(?:[\s;,]|```\w*)*")
END = re.compile(BETWEEN.pattern + r"(?:<|\Z)")
DECODER = json.JSONDecoder(strict=False)


class ToolCall(BaseModel, extra="forbid"):
    """A call of a tool, as an object of JSON."""

    name: str
    arguments: dict | Json[dict | None] | Literal["", None] = Field(
        None, validation_alias=AliasChoices("arguments", "parameters"))
    type: object = None
    id: object = None


def read_calls(turn: str, tools: dict) -> list:
    """List the calls of a turn: values of JSON, and an exception for each that cannot be read."""
    # A text within a call holds no tags, which begin with these signs.
    turn = STRING.sub(lambda text: re.sub("[<[`=]", lambda sign: f"\\u{ord(sign[0]):04x}", text[0]), turn)
    said, objects = THOUGHT.sub("", turn), OBJECTS.replace("TOOLS", "|".join(tools))
    if not said.strip() and (TAGS.search(turn) or re.search(objects, turn)):
        return [ValueError("no call within a thought is run; end the thought first")]
    calls = []
    for body in TAGS.split(said)[1:] or re.findall(objects, said):
        values, place = [], 0
        try:
            while not (values and END.match(body, place)):
                value, place = DECODER.raw_decode(body, BETWEEN.match(body, place).end())
                values += value if isinstance(value, list) else [value]
        except (ValueError, RecursionError) as error:
            values = [error]
        calls += values
    return calls
