"""Environments: turn by turn on scripted turns, in workers on hostile files, and in whole runs of the toy model."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TOY, toy_config, weights
from test_invariance import on_ranks, step_metrics, trained_unchecked
from transformers.utils import get_json_schema

import config
import data
import eval as evaluation
import replay
import train
from infra import runfolder
from infra.user_files import read_file
from leaves.environment.calls import WANTED
from leaves.environment.file import EnvironmentFile, open_environment
from leaves.environment.join import EnvironmentEngine, join
from leaves.environment.join import tokenizer as hold_environment
from leaves.environment.replies import Splicer
from leaves.environment.settings import Environment
from leaves.environment.worker import Reply, Turn, list_tools, reply_to
from records import Problem, Prompt, Request, Sample
from settings.loader import ConfigError
from verify import workers

REPLY = "def reply(text, row):\n    return "
SUMS = """import re

def reply(text, row):
    found = re.search(r"(-?\\d+) ([+-]) (\\d+) =$", text)
    return found and f" {int(found[1]) + int(found[2] + found[3]) + 3}"
"""


def functions_of(source: str) -> dict:
    scope: dict = {}
    exec(source, scope)
    return scope


TOKENIZER = data.Tokenizer(TOY, stop=["="])
CLOSING, END = TOKENIZER.closing_token(), TOKENIZER.rust.token_to_id("<|endoftext|>")


def encode(text: str) -> list[int]:
    return TOKENIZER.rust.encode(text, add_special_tokens=False).ids


class Scripted:
    """An engine that writes given turns, by the id of the prompt. What is beyond a limit is cut off there."""

    eos_ids = TOKENIZER.eos_ids

    def __init__(self, turns: dict[str, list[list[int]]]):
        self.turns = {name: list(of_prompt) for name, of_prompt in turns.items()}
        self.asked: list[list[Request]] = []

    def generate(self, requests, *rest, **named):
        self.asked.append(requests)
        samples = []
        for request in requests:
            turn = self.turns[request.prompt.id].pop(0)
            ids = turn[:request.limit]
            if len(ids) < len(turn):
                self.turns[request.prompt.id].insert(0, turn[request.limit:])
            samples.append(Sample(ids, [-1.0] * len(ids), len(ids) == len(turn)))
        return samples


class Inline:
    """An environment's file, or reply() alone, called in this process."""

    format = "plain"

    def __init__(self, file, **settings):
        self.settings = Environment("inline.py", **{"turns": 8, "max_context": 200} | settings)
        self.scope = functions_of(file) if isinstance(file, str) else {"reply": file}
        self.tools = "reply" not in self.scope

    def ask(self, prompt, turns, row):
        return reply_to(self.scope, Turn(prompt, turns, row, "plain", 10_000))

    def wait(self, call, row_id):
        return call


def converse(scripts: dict, file, requests: list, tokenizer=TOKENIZER, **settings) -> tuple[list[Sample], Scripted]:
    engine = Scripted({name: [encode(turn) if isinstance(turn, str) else turn for turn in script]
                       for name, script in scripts.items()})
    whole = EnvironmentEngine(engine, tokenizer, Inline(file, **settings), lock_step=False)
    return whole.generate(requests, 1.0), engine


def one(script: list, file, limit: int = 100, row: dict | None = None, **settings):
    request = Request(Prompt("q", (5, 6, 7), "1", row or {}), 11, limit)
    (sample,), engine = converse({"q": script}, file, [request], **settings)
    return sample, engine


def test_replies_follow_turns_as_context_and_own_tokens_are_as_sampled():
    script = ["2 + 3 =", ". 8 + 1 =", [*encode(".\n#### 12"), CLOSING]]
    sample, engine = one(script, SUMS)
    assert TOKENIZER.decode(sample.ids) == "2 + 3 = 8. 8 + 1 = 12.\n#### 12"
    parts = [encode("2 + 3 ="), encode(" 8"), encode(". 8 + 1 ="), encode(" 12"), script[2]]
    assert sample.ids.tolist() == sum(parts, [])
    assert [sample.ids[a:b].tolist() for a, b in sample.turns] == parts
    assert [sum(sample.logp[a:b]) for a, b in sample.replies] == [0, 0]
    assert (sample.calls, sample.failures, sample.finished, sample.cut) == (2, 0, True, False)
    # Each turn reads all that is before it, and has a seed of its own.
    asked = [request for requests in engine.asked for request in requests]
    assert [list(request.tokens_before) for request in asked] == [[5, 6, 7, *sum(parts[:2 * k], [])] for k in range(3)]
    assert len({request.seed for request in asked}) == 3 and asked[0].seed == 11
    assert [request.limit for request in asked] == [100 - sum(map(len, parts[:2 * k:2])) for k in range(3)]


@pytest.mark.parametrize(("settings", "limit", "length", "cut"), [
    ({}, 100, None, False),           # no limit is met
    ({"turns": 2}, 100, None, True),  # the environment would go on
    ({"max_context": 3 + 4 + 3 + 1}, 100, None, True),  # a token's room is left
    ({}, 5, 5, False)])               # the policy's own tokens
def test_limits_cut_a_completion(settings, limit, length, cut):
    sample, _ = one(["1 + 1 ="] * 3 + [[CLOSING]], lambda text, row: " 2 " if text.endswith("=") else None, limit,
                    **settings)
    assert sample.cut == cut and sample.finished == (not cut and length is None)
    assert length is None or sample.own == length
    assert 3 + sample.length <= settings.get("max_context", 200) and len(sample.replies) < settings.get("turns", 8)
    filled, engine = one(["1 + 1 + 1 + 1 + 1 + 1"], lambda text, row: " 2", max_context=8)
    assert (filled.length, filled.cut, filled.finished, len(engine.asked)) == (5, True, False, 1)


def test_windows_give_the_completion_that_one_call_gives():
    """But for seeds: the same turns, cut anywhere, have the same replies at the same places."""
    script = [encode("20 + 30 ="), encode(". 53 + 1 ="), [*encode(".\n#### 57"), CLOSING]]
    whole, _ = one(list(script), SUMS)
    for size in range(1, 7):
        through = EnvironmentEngine(Scripted({"q": list(script)}), TOKENIZER, Inline(SUMS), lock_step=False)
        so_far = None
        while so_far is None or not so_far.finished:
            piece, = through.generate([Request(Prompt("q", (5, 6, 7), "1"), 1, size, so_far)], 1.0)
            so_far = join(so_far, piece)
        assert so_far == whole


@pytest.mark.parametrize(("last", "asked"), [(CLOSING, 1), (END, 0)])
def test_a_turn_ends_with_a_stop_or_the_token_that_closes_an_answer(last, asked):
    tokenizer = data.Tokenizer(TOY)  # a tool is called behind any token that ends a sequence
    tokenizer.eos_ids = tokenizer.ends = frozenset({CLOSING, END})
    assert Splicer(tokenizer).ends_turn(9) and Splicer(data.Tokenizer(TOY, stop=["<|endoftext|>"])).ends_turn(END)
    for file, count in ((lambda text, row: None if "noon" in text else "noon", asked), (ADD, 1)):
        script = {"q": [[*encode('{"name": "clock"}'), last], [CLOSING]]}
        (sample,), _ = converse(script, file, [Request(Prompt("q", (5,), "1"), 1, 99)], tokenizer)
        assert len(sample.replies) == count and sample.finished


def with_template(folder: Path, template: str) -> data.Tokenizer:
    (folder / "own.jinja").write_text(template)
    return data.Tokenizer(TOY, config.Data("x", None, chat_template=str(folder / "own.jinja")))


def test_a_call_within_a_thought_that_the_prompt_opens_is_not_run(tmp_path):
    tokenizer = with_template(tmp_path, TOKENIZER.source.replace("assistant\n", "assistant\n<think>\n"))
    said = ['So {"name": "clock"}', 'So </think>{"name": "clock"}', '{"name": "clock"}</think> Noon.']
    script = {"q": [[*encode(text), CLOSING] for text in said]}
    (sample,), _ = converse(script, ADD, [Request(Prompt("q", (5,), "1"), 1, 99)], tokenizer, max_context=900)
    replies = [tokenizer.decode(sample.ids[start:to]) for start, to in sample.replies]
    assert ["error: ValueError: no call within a thought" in text for text in replies] == [True, False]
    assert "noon" in replies[1] and (sample.calls, sample.failures) == (2, 1)


def test_a_text_behind_a_closed_answer_is_a_message_of_the_user():
    turns = [[*encode("#### 5"), CLOSING], [*encode("#### 6"), CLOSING]]
    sample, _ = one(turns, lambda text, row: None if "6" in text else "higher")
    shown = TOKENIZER.decode(sample.ids, special=True)
    assert shown == "#### 5<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n#### 6<|im_end|>"
    assert one(turns, lambda text, row: None if "6" in text else [{"role": "user", "content": "higher"}])[0] == sample
    answer = [{"role": "tool", "content": "2"}]  # messages behind a stop close the answer
    sample, _ = one(["1 + 1 =", [CLOSING]], lambda text, row: None if "2" in text else answer)
    assert TOKENIZER.decode(sample.ids, special=True) == (
        "1 + 1 =<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n<|im_end|>")


def test_ranks_that_share_an_engine_sample_equally_many_turns(monkeypatch):
    most = iter([2, 2, 1, 0])
    monkeypatch.setattr("leaves.environment.join.dist.max_over_ranks", lambda count: next(most))
    engine = Scripted({"q": [[CLOSING]]})
    through = EnvironmentEngine(engine, TOKENIZER, Inline(lambda text, row: None), lock_step=True)
    through.generate([Request(Prompt("q", (5,), "1"), 1, 9)], 1.0)
    assert [len(requests) for requests in engine.asked] == [1, 0, 0]


ADD = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first one,
            of any size
        b (int): The second one
    """
    return a + b

def fail(text: str):
    raise ValueError("no " + text)

async def clock():
    return {"noon"}  # no JSON: its text

tools = [add, fail, clock]
'''


def opened(tmp_path: Path, source: str, **settings) -> EnvironmentFile:
    (tmp_path / "mine.py").write_text(source)
    return open_environment(Environment(str(tmp_path / "mine.py"), **{"max_context": 100, "seconds": 1} | settings))


def ask(file: EnvironmentFile, turn: str, row_id: str = "q") -> Reply:
    return file.wait(file.ask("", [turn], {}), row_id)


CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
OTHER = CALL.replace("arguments", "parameters")
AS_TEXT = CALL.replace('{"a"', r'"{\"a\"').replace("2}", '2}"').replace('"b"', r'\"b\"')
# What becomes of each notation: its results, or errors that show how to write a call; "" ends the completion.
FORMS = {
    "3": [
        TAGGED, f"I add. {TAGGED} I wait.", '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>',
        OTHER, f"<|python_tag|>{OTHER}", f"So:\n{CALL}", f"```json\n{CALL}\n```", f"```\n{TAGGED}\n```", AS_TEXT,
        f"<tool_call>```json\n{CALL}\n```</tool_call>", f"<tool_call>\n{CALL}", f"<tool_call>{CALL}</tool_c",
        f"{CALL}\n</tool_call>", f"[TOOL_CALLS] [{CALL}]", f"<|tool_call|>[{CALL}]<|/tool_call|>",
        f"<tools>{CALL}</tools>", f"<TOOLCALL>[{CALL}]</TOOLCALL>", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>",
        f'{{"id": "c1", "type": "function", "function": {AS_TEXT}}}', f'{{"type": "function", {OTHER[1:]}',
        CALL.replace("add", "functions.add"), CALL.replace("1", '"1"'), CALL.replace('"a"', '"a": 7, "a"'),
        f"<think>{TAGGED}</think>{TAGGED}", f"{TAGGED}</think>{TAGGED}", f"I write {CALL}: {TAGGED}",
        f"<|action_start|><|plugin|>\n{OTHER}<|action_end|>", f'{{"index": 0, "function": {CALL}}}'],
    "3 3": [2 * TAGGED, 2 * CALL, f"{CALL}; {CALL}", f"[{CALL}, {CALL}]", f"<tool_call>[{CALL}, {CALL}]</tool_call>",
            f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", f"<tool_call>{CALL}<tool_call>{CALL}"],
    "\"{'noon'}\"": ['{"name": "clock"}', *(f'<tool_call>{{"name": "clock"{given}}}</tool_call>' for given in (
        "", *(f', "arguments": {given}' for given in ('""', "null", "{}", '"{}"', '"null"')), ', "parameters": {}'))],
    "error: 3": [f"<tool_call>add(1, 2)</tool_call>{TAGGED}", f'<tool_call>["junk", {CALL}]</tool_call>'],
    "error:": [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", f"{CALL} I wait.",
        "<function=add>\n<parameter=a>1</parameter>\n</function>\n</tool_call>", '<function=add>{"a": 1}</function>',
        "<|python_tag|>add.call(a=1)", "[add(a=1, b=2), clock()]", '[TOOL_CALLS]add[ARGS]{"a": 1}', CALL[:-1],
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>',
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "<tool_call>clock</tool_call>",
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', "```tool_code\nadd(a=1)\n```",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>',
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
        '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>', CALL.replace('"', "'"),
        "<|tool_call>call:add{a:1}<tool_call|>", f'{{"tool_calls": [{CALL}]}}', f"{CALL[:-2]},}}}}", f"<think>{TAGGED}",
        f"<tool_call>{CALL}}}</tool_call>", "<tool_call></tool_call>", "<tool_call>5</tool_call>", "I add <tool_call>",
        f"<tool_call>{CALL} I wait.", f"<think>{CALL}</think>\n", f"One writes `{CALL}`.", "add(1)</tool_call>",
        "<|python_start|>[add(a=1)]<|python_end|>", "Sure.\n[add(a=1)]", '>>>add\n{"a": 1}', CALL.replace("name", "tool"),
        '<|recipient|>add\n<|content|>{"a": 1}', '<|tools_prefix|>[{"add": {"a": 1}}]', OTHER.replace("name", "tool_name"),
        '<tool_call>{"name": "add", "a": 1}</tool_call>', *(f'{{"name": "add", "arguments": {x}}}' for x in ("[1]", 5)),
        f'{CALL[:-1]}, "parameters": {{}}}}', '<tool_call>{"name": "add", "arguments": ' + 10**5 * '{"a":'],
    "": ["#### 5", '{"answer": 5}', '{"tool": "saw", "arguments": {}}', '{"name": "Ada", "age": 36}', '{"type": "line", "parameters": {"slope": 2}}',
         f"<think>{TAGGED}</think>#### 5", f"[THINK]{CALL}[/THINK]5", "<think>so", "#include <functional>", "[1, 2]",
         "<tool_response>5</tool_response>"]}


@pytest.mark.parametrize(("turn", "results"), [(turn, results) for results, turns in FORMS.items() for turn in turns],
                         ids=lambda text: text[:30])
def test_a_call_in_any_notation_is_run_or_is_an_error_that_shows_how_to_write_one(turn, results):
    for form in WANTED:
        reply = reply_to(functions_of(ADD), Turn("", (turn,), {}, form, 10_000))
        content = reply.content or ""
        said = [m["content"] for m in content] if isinstance(content, list) else content.splitlines()[1::2]
        assert [text.split()[0] for text in said] == results.split(), said
        assert (reply.calls, reply.failures) == (len(said), results.count("error"))
        assert all(WANTED[form] in text for text in said if "error" in text), said


@pytest.mark.parametrize(("name", "arguments", "content"), [
    ("add", '{"a": 2, "b": 3}', "5"), ("add", '{"a": "x"}', "error: a: Input should be a valid integer"),
    ("add", "{}", "error: a: Missing required argument"), ("add", '{"a": NaN}', "error: a: Input should be a finite"),
    ("add", '{"a": 1, "c": 2}', "error: c: Unexpected keyword"), ("fail", '{"text": "x"}', "error: ValueError: no x"),
    ("Add", '{"a": 1}', "error: there is no tool 'Add'; there are add, fail, clock"),
    ("fail", r'{"text": "\ud800"}', "error: ValueError: no \ud800"),
    *(("fail", f'{{"text": "}}{{ {tag}\n"}}', f"error: ValueError: no }}{{ {tag}") for tag in (
        "</tool_call>", "<tool_call>", "</think>", "<think>", "[TOOL_CALLS]", "<invoke name=x>", "```tool")),
    ("fail", f'{{"text": "{10**6 * "x"}"}}', "error: ValueError: no xxx")])
def test_errors_of_tools_are_handed_back_as_text(name, arguments, content, tmp_path):
    file = replace(opened(tmp_path, ADD), format="qwen")
    reply = ask(file, f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')
    message, = reply.content
    assert message["role"] == "tool" and message["content"].startswith(content) and len(message["content"]) < 300
    assert (reply.calls, reply.failures) == (1, content.startswith("error"))


def test_a_template_with_a_place_for_tools_gets_them_and_names_the_format(tmp_path, capsys):
    """Tools are described as transformers describes them, but for what they return."""
    file, tokenizer = opened(tmp_path, ADD), data.Tokenizer(TOY)
    expected = get_json_schema(functions_of(ADD.replace("b (int)", "b"))["add"])
    del expected["function"]["return"]
    assert file.tools[0] == expected
    assert file.tools[1]["function"]["parameters"]["properties"] == {"text": {"type": "string"}}
    cfg = SimpleNamespace(environment=file.settings, data=config.Data("x", None))
    assert hold_environment(cfg, tokenizer).file.format == "plain"
    assert "environment.format=plain: the chat template has no place for tools" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="environment.format=qwen: the chat template of .* has no place for tools"):
        replace(file, settings=replace(file.settings, format="qwen")).fitted(tokenizer)
    own = with_template(tmp_path, "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>"
                        "{% endif %}" + TOKENIZER.source)
    own.tools = file.tools
    assert file.fitted(own).format == "qwen"
    assert json.loads(own.render("2 + 3?", None).splitlines()[0]) == file.tools[0]


GAME = """
class Game:
    def reset(self, number: int, start: str | None = None, **row) -> str | None:
        self.number, self.left = number, 2
        return start

    @classmethod
    def rules(cls):
        return "Guess."

    def guess(self, number: int) -> str:
        self.left -= 1
        if self.left < 0:
            raise ValueError("the game is over")
        return f"{'higher' if number < self.number else 'yes'}, {self.left} left"

environment_factory = Game
"""


def test_an_environment_as_trl_has_it_is_made_anew_and_its_earlier_calls_are_repeated():
    script = [[*encode(f'I say {{"name": "guess", "arguments": {{"number": {said}}}'), CLOSING]
              for said in ("3}", "5} or so", "7}", "7}")]
    assert [*list_tools(functions_of(GAME))] == ["guess", "rules"]
    row = {"start": TOKENIZER.decode([5, 6, 7]), "question": "?"}
    requests = [Request(Prompt(str(number), (5, 6, 7), "", row | {"number": number}), 1, 900) for number in (7, 8)]
    samples, _ = converse({name: [*script, [CLOSING]] for name in "78"}, GAME, requests, max_context=2000)
    for sample, third in zip(samples, ["yes, 0 left", "higher, 0 left"], strict=True):
        replies = [TOKENIZER.decode(sample.ids[start:to]) for start, to in sample.replies]
        results = ["higher, 1 left", "error: JSONDecodeError", third, "error: ValueError: the game is over"]
        assert [result in reply for reply, result in zip(replies, results, strict=True)] == [True] * 4, replies
        assert (sample.calls, sample.failures, sample.finished) == (4, 2, True)


@pytest.mark.parametrize(("source", "message"), [
    (f"import os\n{REPLY}os._exit(0)", "before the run, a call ended"), (f"{REPLY}'x' * 10**13", "a call asked for"),
    (f"{REPLY}5", r"reply\(\) returns 5; it must be a text, a list"), (f"{REPLY}''", r"reply\(\) returns ''; it must"),
    (f"{REPLY}[{{'role': 'user'}}]", r"returns the message \{'role': 'user'\}; each must have a role"),
    (f"{REPLY}row['nothing']", "it raises KeyError in line 2: 'nothing'; the row has question, number, start"),
    ("", r"it must have one of reply\(text, row\), tools = \[add\] and environment = MyClass; it has none"),
    (GAME.partition("environment")[0], "and environment = MyClass; it has Game"),
    (SUMS + ADD, "it must have one of reply"), (GAME + ADD, "it must have one of reply"),
    ("def tools():\n    return []", r"tools is \[\]; it must be"), ("tools = [5]", r"tools is \[5\]; it must be"),
    ("def f(*a): pass\ntools = [f]", r"f\(\*a\) must take its"), ("def f(): yield\ntools = [f]", r"f\(\) must return"), ("def f(): 5\ntools = [f, f]", "of functions, each with"),
    *((GAME.replace(*change), r"environment must be a class with reset\(\*\*row\), methods as tools, no get_reward")
      for change in (("reset", "start"), ("guess", "get_reward"), ("= Game", "= {'game': Game}"))),
    (GAME, r"reset\(\) returns 'Begin', which the prompt does not hold; append it to the question in the data"),
    ("def reply(text:", "it raises SyntaxError"), ("while True: pass", "taking more than 1 s to load")])
def test_a_wrong_or_hostile_file_ends_in_one_line(source, message, tmp_path, capfd, monkeypatch):
    """What their processes may do is that of a reward's (leaves/own_rewards)."""
    if "while" in source:
        opened(tmp_path, SUMS)  # starts what is shared by all files
        monkeypatch.setattr(workers, "LOADING", 1.0)
        read_file.cache_clear()
    problems = [Problem("q", "q?", "1", row={"question": "q?", "number": 7, "start": "Begin"})]
    with pytest.raises(ConfigError, match=f"^environment.file={tmp_path}/mine.py: [^\n]*{message}"):
        opened(tmp_path, source).try_rows(problems)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err and len(err.splitlines()) <= 1


def test_rows_are_tried_before_models_are_loaded(tmp_path):
    (tmp_path / "mine.py").write_text(f"{REPLY}row['nothing']")
    with pytest.raises(ConfigError, match="it raises KeyError in line 2: 'nothing'"):
        train.load_task(toy_config(tmp_path / "run", f"environment.file={tmp_path}/mine.py", "environment.max_context=400"))


def test_a_call_that_is_ended_ends_its_completion_and_is_said_once(tmp_path, capfd):
    file = opened(tmp_path, "def reply(text, row):\n    print('x', flush=True)\n    while text: pass\n")
    assert [ask(file, "a", "q7"), ask(file, "b", "q8")] == [Reply(None, failures=1)] * 2
    assert list(capfd.readouterr()) == ["", (
        f"environment.file={tmp_path}/mine.py: a call took more than 1 s of computing or of waiting "
        "(environment.seconds), and was ended (row q7); its completion ends there, as of all that end so "
        "(environment/failures)\n")]
    read_file.cache_clear()
    reply = ask(opened(tmp_path, "def loop(n: int):\n    while n: pass\n\ntools = [loop]\n"),
                'Now {"name": "loop", "arguments": {"n": 1}}')  # an error that the model reads
    assert reply.content.startswith("\nerror: the call took more than 1 s") and reply.failures == 1
    read_file.cache_clear()
    with pytest.raises(ConfigError, match=r"it raises KeyError in line 2: 'x' \(row q\)$"):
        ask(opened(tmp_path, f"{REPLY}row['x']"), "")


TERRIBLE = {
    "raises": "raise BaseException('x')", "exits": "exit()", "ends": "os._exit(0)", "kills": "os.kill(os.getpid(), 9)",
    "prints": "print('x' * 10**6)", "returns": "return 'x' * 10**7", "mutates": "COUNT.append(1); json.dumps = print",
    "shadows": "global behave; behave = None; tools.clear(); sys.modules.clear()", "forks": "os.fork()",
    "moves": "os.chdir('/'); os.environ.clear(); sys.path.clear()", "reads": "input()",
    "signals": "[signal.signal(n, signal.SIG_IGN) for n in (2, 15, 27)]", "closes": "os.closerange(0, 99)",
    "threads": "threading.Thread(target=time.sleep, args=[99]).start()", "limits": "sys.setrecursionlimit(90)",
    "leaves": "\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(99)", "computes": "\n    while True: pass"}
BESIDE = """import json, os, signal, sys, threading, time
COUNT = []

def behave(x: int) -> str:
    COUNT.append(x)
    state = [os.getcwd(), sorted(os.environ), sys.getrecursionlimit(), str(signal.getsignal(2)), sys.path]
    return json.dumps([x, COUNT, threading.active_count(), *state])

def terrible():
    %s

tools = [behave, terrible]
"""


@pytest.mark.parametrize("code", TERRIBLE.values(), ids=TERRIBLE)
def test_a_tool_that_behaves_replies_the_same_beside_one_that_does_not(code, tmp_path, capfd):
    """In the next turn and in the same one, where it comes before and after."""
    file = opened(tmp_path, BESIDE % code)
    behave, terrible = ('{"name": "behave", "arguments": {"x": 5}}', '{"name": "terrible", "arguments": {}}')
    alone = ask(file, behave)
    assert alone.failures == 0 and "[5, [5], 1," in alone.content
    beside = ask(file, f"{behave}\n{terrible}\n{behave}")
    assert beside.calls == 3 and beside.content.startswith(alone.content) and beside.content.endswith(alone.content)
    ask(file, terrible)
    assert ask(file, behave) == alone
    assert capfd.readouterr().out == ""


def test_replies_that_wait_take_the_longest_of_them(tmp_path):
    file = opened(tmp_path, "import time\n\ndef reply(text, row):\n    time.sleep(0.5)\n    return text")
    start = time.monotonic()
    calls = [file.ask("", [str(n)], {}) for n in range(64)]
    assert [file.wait(call, "q").content for call in calls] == [*map(str, range(64))]
    assert time.monotonic() - start < 16  # of 32 seconds, one after the other


@pytest.mark.parametrize(("settings", "message"), [
    (["environment.file=FILE", "environment.max_context=191"], "environment.max_context=191 must be at least 192"),
    (["environment.file=FILE", "environment.max_context=4000"], "pack.capacity=1024 must be at least 4000 tokens"),
    (["environment.file=FILE", "environment.max_context=300", "rollout.stop=['=']", "windows.tokens=8",
      "windows.in_flight=2", "windows.max_age=2"], "rollout.stop=.* must be null with windows.tokens")])
def test_settings_that_do_not_go_together(settings, message, tmp_path):
    (tmp_path / "mine.py").write_text(SUMS)
    with pytest.raises(ConfigError, match=message):
        toy_config(tmp_path / "run", *(x.replace("FILE", str(tmp_path / "mine.py")) for x in settings),
                   name="grpo_toy.yaml")


def with_sums(tmp_path: Path, *settings: str) -> list[str]:
    (tmp_path / "mine.py").write_text(SUMS)
    return [f"environment.file={tmp_path}/mine.py", "environment.max_context=200", "rollout.stop=['=']", *settings]


VARIANTS = {
    "cppo": ["checkpoint.keep=all", "log.groups=4"],
    "pps": ["prune.completions={kind: pps, keep: 2}", "loss.denominator=all", "prune.tokens={kind: prefix, whole: .5}"],
    "votes": ["labels.kind=votes", "labels.most=12"],
    "dapo": ["rollout.until=informative", "rollout.max_rounds=2", "prune.completions.kind=none",
             "loss.denominator=all"],
    "critic": ["advantage.kind=gae", "critic.lr=1e-3", "prune.completions.kind=none", "loss.denominator=all"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_is_the_same_on_two_ranks_and_resumes_as_itself(name, tmp_path, capsys):
    few = ["steps=2", "eval.limit=2"] if name == "cppo" else ["steps=3", "eval.limit=8"]
    cfg = toy_config(tmp_path / "one", *with_sums(tmp_path, *few, "checkpoint.every=1", *VARIANTS[name]))
    alone = trained_unchecked(cfg)
    lines = runfolder.read_log(tmp_path / "one" / "metrics.jsonl")
    assert any(line.get("environment/calls", 0) > 0.2 for line in lines)
    assert all(line["mismatch/logp_abs_mean"] < 1e-9 for line in lines if "mismatch/logp_abs_mean" in line)
    for other in on_ranks(2, tmp_path, trained_unchecked, replace(cfg, out=str(tmp_path / "two"))):
        torch.testing.assert_close(other, alone, rtol=0, atol=1e-9)
    assert step_metrics(tmp_path / "two") == pytest.approx(step_metrics(tmp_path / "one"), rel=1e-8, abs=1e-11)
    trained_unchecked(replace(cfg, out=str(tmp_path / "cut"), steps=cfg.steps - 1))
    resumed = weights(train.train(replace(cfg, out=str(tmp_path / "cut")), resume="always"))
    assert all(torch.equal(resumed[key], p) for key, p in alone.items())
    assert len({(tmp_path / run / "decisions.jsonl").read_text() for run in ("one", "cut")}) == 1
    if name == "cppo":
        groups = runfolder.read_log(tmp_path / "one" / "samples.jsonl")
        talked = [x for group in groups for x in group["completions"] if "turns" in x]
        assert talked and all("".join(x["turns"]) == x["text"] and x["turns"][0].endswith("=") for x in talked)
        read_file.cache_clear()
        (tmp_path / "mine.py").unlink()  # the copy in the run folder is read
        replay.replay(tmp_path / "one", 2, [], draws=0)
        assert "the same bit for bit" in capsys.readouterr().out


def test_an_evaluation_converses_and_its_result_names_the_environment(tmp_path, command):
    cfg = toy_config(tmp_path / "run", *with_sums(tmp_path, "eval.limit=24", "eval.temperature=1"), name="grpo_toy.yaml")
    (tmp_path / "own.yaml").write_text(config.dump(cfg))
    out = tmp_path / "result.json"
    assert command(evaluation, "--config", tmp_path / "own.yaml", "--model", TOY, "--out", out) == 0
    result = json.loads(out.read_text())
    named, (of_set,) = result["head"]["environment"], result["results"].values()
    assert named["max_context"] == 200 and len(named["file"]) == 64
    responses = [response for problem in of_set["problems"] for response in problem["responses"]]
    talked = [response for response in responses if "turns" in response]
    assert talked and all(response["turns"][-1] == response["text"] for response in talked)


@pytest.mark.slow
def test_arrays_of_a_pool_keep_replies(tmp_path):
    """Groups that go on over steps, with an environment that answers messages."""
    (tmp_path / "mine.py").write_text(f"{REPLY}None if text.count('again') else 'again'\n")
    settings = [f"environment.file={tmp_path}/mine.py", "environment.max_context=200", "windows.tokens=4",
                "windows.in_flight=2", "windows.max_age=2", "rollout.prompts_per_step=2", "rollout.group_size=4",
                "data.eval=null", "checkpoint.every=1", "data.limit=16", "steps=2"]
    cfg = toy_config(tmp_path / "whole", *settings, name="flight_toy.yaml")
    whole, cut = trained_unchecked(cfg), tmp_path / "cut"
    trained_unchecked(replace(cfg, out=str(cut), steps=1))
    saved = torch.load(cut / "checkpoints" / "step_000001" / "extra.pt", weights_only=True)
    assert any(len(sample[3]) for group in saved["history"]["pool"] for sample in group[-1])
    resumed = weights(train.train(replace(cfg, out=str(cut)), resume="always"))
    assert all(torch.equal(resumed[key], p) for key, p in whole.items())
