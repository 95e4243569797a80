"""Environments: turn by turn on scripted turns, in workers on hostile files, and in whole runs of the toy model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TOY, toy_config, weights
from test_invariance import on_ranks, step_metrics, trained_unchecked

import config
import data
import eval as evaluation
import replay
import train
from infra import runfolder
from infra.user_files import read_file
from leaves.environment.file import EnvironmentFile, open_environment
from leaves.environment.join import EnvironmentEngine, join
from leaves.environment.replies import Splicer
from leaves.environment.settings import Environment
from leaves.environment.worker import Reply, Turn, reply_to
from records import Problem, Prompt, Request, Sample
from rollout import tokens_before
from settings.loader import ConfigError

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
CLOSING = TOKENIZER.closing_token()


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
    """An environment's file, called in this process."""

    tools = ()

    def __init__(self, reply, **settings):
        self.settings = Environment("inline.py", **{"turns": 8, "max_context": 200} | settings)
        self.reply, self.seen = reply, []

    def ask(self, text, newest, row):
        self.seen.append((text, newest))
        return reply_to({"reply": self.reply}, Turn(text, newest, row, "plain", 10_000))

    def wait(self, call, row_id):
        return call


def converse(scripts: dict[str, list], reply, requests: list[Request], **settings) -> tuple[list[Sample], Scripted]:
    engine = Scripted({name: [encode(turn) if isinstance(turn, str) else turn for turn in script]
                       for name, script in scripts.items()})
    whole = EnvironmentEngine(engine, TOKENIZER, Inline(reply, **settings), lock_step=False)
    return whole.generate(requests, 1.0), engine


def one(script: list, reply, limit: int = 100, so_far: Sample | None = None, row: dict | None = None, **settings):
    request = Request(Prompt("q", (5, 6, 7), "1", row or {}), 11, limit, so_far)
    (sample,), engine = converse({"q": script}, reply, [request], **settings)
    return sample, engine


def test_replies_follow_turns_as_context_and_own_tokens_are_as_sampled():
    script = ["2 + 3 =", ". 8 + 1 =", [*encode(".\n#### 12"), CLOSING]]
    sample, engine = one(script, functions_of(SUMS)["reply"])
    assert TOKENIZER.decode(sample.ids) == "2 + 3 = 8. 8 + 1 = 12.\n#### 12"
    parts = [encode("2 + 3 ="), encode(" 8"), encode(". 8 + 1 ="), encode(" 12"), script[2]]
    assert sample.ids.tolist() == sum(parts, [])
    assert [sample.ids[a:b].tolist() for a, b in sample.turns] == parts
    assert [sum(sample.logp[a:b]) for a, b in sample.replies] == [0, 0]
    assert (sample.calls, sample.failures, sample.finished, sample.cut) == (2, 0, True, False)
    assert sample.own == sum(map(len, parts[::2]))
    # Each turn reads all that is before it, and has a seed of its own.
    asked = [request for requests in engine.asked for request in requests]
    assert [list(tokens_before(request)) for request in asked] == [
        [5, 6, 7, *sum(parts[:2 * k], [])] for k in range(3)]
    assert len({request.seed for request in asked}) == 3 and asked[0].seed == 11
    assert [request.limit for request in asked] == [100 - sum(map(len, parts[:2 * k:2])) for k in range(3)]


def test_the_environment_sees_the_row_of_its_own_prompt_though_prompts_are_equal():
    prompts = [Prompt(name, (5, 6), "1", {"secret": name}) for name in "ab"]
    samples, engine = converse(
        {name: ["? =", [CLOSING]] for name in "ab"}, lambda text, row: f" {row['secret']}" if text == "? =" else None,
        [Request(prompt, 1, 50) for prompt in prompts])
    assert [TOKENIZER.decode(sample.ids) for sample in samples] == ["? = a", "? = b"]
    assert [len(requests) for requests in engine.asked] == [2, 2]


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
    most = settings.get("max_context", 200)
    assert 3 + sample.length <= most and len(sample.replies) < settings.get("turns", 8)
    filled, engine = one(["1 + 1 + 1 + 1 + 1 + 1"], lambda text, row: " 2", max_context=8)
    assert (filled.length, filled.cut, filled.finished, len(engine.asked)) == (5, True, False, 1)


def test_windows_give_the_completion_that_one_call_gives():
    """But for seeds: the same turns, cut anywhere, have the same replies at the same places."""
    script = [encode("20 + 30 ="), encode(". 53 + 1 ="), [*encode(".\n#### 57"), CLOSING]]
    reply = functions_of(SUMS)["reply"]
    whole, _ = one(list(script), reply)
    for size in range(1, 7):
        engine = Scripted({"q": list(script)})
        through = EnvironmentEngine(engine, TOKENIZER, Inline(reply), lock_step=False)
        so_far = None
        while so_far is None or not so_far.finished:
            piece, = through.generate([Request(Prompt("q", (5, 6, 7), "1"), 1, size, so_far)], 1.0)
            so_far = join(so_far, piece)
        assert so_far == whole


@pytest.mark.parametrize(("last", "asked"), [(CLOSING, True), (TOKENIZER.rust.token_to_id("<|endoftext|>"), False)])
def test_a_turn_ends_with_a_stop_or_the_token_that_closes_an_answer(last, asked):
    tokenizer = data.Tokenizer(TOY)
    tokenizer.eos_ids = frozenset({CLOSING, TOKENIZER.rust.token_to_id("<|endoftext|>")})
    assert Splicer(tokenizer).ends_turn(last) == asked and Splicer(tokenizer).ends_turn(9)
    special = data.Tokenizer(TOY, stop=["<|endoftext|>"])
    assert Splicer(special).ends_turn(TOKENIZER.rust.token_to_id("<|endoftext|>"))


def test_a_text_behind_a_closed_answer_is_a_message_of_the_user():
    turns = [[*encode("#### 5"), CLOSING], [*encode("#### 6"), CLOSING]]
    sample, _ = one(turns, lambda text, row: None if "6" in text else "higher")
    shown = TOKENIZER.decode(sample.ids, special=True)
    assert shown == "#### 5<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n#### 6<|im_end|>"
    messages, _ = one(turns, lambda text, row: None if "6" in text else [{"role": "user", "content": "higher"}])
    assert messages == sample
    answer = [{"role": "tool", "content": "2"}]  # messages behind a stop close the answer
    sample, _ = one(["1 + 1 =", [CLOSING]], lambda text, row: None if "2" in text else answer)
    assert TOKENIZER.decode(sample.ids, special=True) == (
        "1 + 1 =<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n<|im_end|>")
    assert sample.own == len(encode("1 + 1 =")) + 1


def test_ranks_that_share_an_engine_sample_equally_many_turns(monkeypatch):
    most = iter([2, 2, 1, 0])
    monkeypatch.setattr("leaves.environment.join.dist.max_over_ranks", lambda count: next(most))
    engine = Scripted({"q": [[CLOSING]]})
    through = EnvironmentEngine(engine, TOKENIZER, Inline(lambda text, row: None), lock_step=True)
    through.generate([Request(Prompt("q", (5,), "1"), 1, 9)], 1.0)
    assert [len(requests) for requests in engine.asked] == [1, 0, 0]


ADD = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

def fail(text: str):
    raise ValueError("no " + text)

def tools():
    return [add, fail]
'''


def opened(tmp_path: Path, source: str, **settings) -> EnvironmentFile:
    (tmp_path / "mine.py").write_text(source)
    given = {"max_context": 100, "seconds": 1} | settings
    return open_environment(Environment(str(tmp_path / "mine.py"), **given))


def ask(file: EnvironmentFile, newest: str, row: dict | None = None) -> Reply:
    return file.wait(file.ask(newest, newest, row or {}), "q")


@pytest.mark.parametrize(("form", "turn", "calls"), [
    ("qwen", 'So <tool_call>\n{"name": "add"}\n</tool_call> <tool_call>x</tool_call>', 2),
    ("qwen", '{"name": "add"}', 0), ("plain", 'I add {"name": "add", "arguments": {"a": 1}}', 1),
    ("llama", '<|python_tag|>{ "name" : "add", "parameters": {}}', 1),
    ("llama", '{"answer": 5}', 0), ("plain", "#### 5", 0)])
def test_calls_are_found_as_each_format_writes_them(form, turn, calls):
    assert reply_to(functions_of(ADD), Turn(turn, turn, {}, form, 100)).calls == calls


@pytest.mark.parametrize(("call", "content", "failures"), [
    ('{"name": "add", "arguments": {"a": 2, "b": 3}}', "5", 0), ('{"name": "add", "parameters": {"a": 2}}', "3", 0),
    ('{"name": "add", "arguments": "{\\"a\\": 4}"}', "5", 0), ('{"name": "add", "arguments": {"a": "2"}}', "3", 0),
    ('{"name": "add", "arguments": {"a": "x"}}', "error: a: Input should be a valid integer", 1),
    ('{"name": "add", "arguments": {}}', "error: a: Missing required argument", 1),
    ('{"name": "add", "arguments": {"a": 1, "c": 2}}', "error: c: Unexpected keyword argument", 1),
    ('{"name": "mul", "arguments": {}}', "error: there is no tool 'mul'; there are add, fail", 1),
    ('{"name": "fail", "arguments": {"text": "way"}}', "error: ValueError: no way", 1),
    ('{"name": "add", "arguments": ', "error: JSONDecodeError", 1),
    ('{"name": "add", "arguments": 5}', "error: TypeError", 1)])
def test_errors_of_calls_are_handed_back_as_text(call, content, failures, tmp_path):
    file = replace(opened(tmp_path, ADD), format="qwen")
    reply = ask(file, f"<tool_call>{call}</tool_call>")
    message, = reply.content
    assert message["role"] == "tool" and message["content"].startswith(content)
    assert (reply.calls, reply.failures) == (1, failures)
    plain = ask(replace(file, format="plain"), f"Then {call}")
    assert plain.content.startswith(f"\n{content}") and plain.content.endswith("\n")


def test_a_template_with_a_place_for_tools_gets_them_and_names_the_format(tmp_path):
    """Tools are described by their types and docstrings."""
    file, tokenizer = opened(tmp_path, ADD), data.Tokenizer(TOY)
    assert {tool["type"] for tool in file.tools} == {"function"}
    add, fail = (tool["function"] for tool in file.tools)
    assert (add["name"], add["description"]) == ("add", "Add two numbers.")
    given = add["parameters"]
    assert given["properties"]["a"]["type"] == "integer" and given["required"] == ["a"]
    assert fail["parameters"]["properties"]["text"]["type"] == "string"
    assert file.fitted(tokenizer).format == "plain"
    with pytest.raises(ConfigError, match="environment.format=qwen: the chat template of .* has no place for tools"):
        replace(file, settings=replace(file.settings, format="qwen")).fitted(tokenizer)
    template = tmp_path / "own.jinja"
    template.write_text("{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call>{% endif %}"
                        + TOKENIZER.source)
    own = data.Tokenizer(TOY, config.Data("x", None, chat_template=str(template)))
    own.describe_tools(file.tools)
    assert file.fitted(own).format == "qwen"
    first, *_ = own.render("2 + 3?", None).splitlines()
    assert json.loads(first) == file.tools[0]


HOSTILE = {
    "os._exit": ("import os; os._exit(0)", r"before the run, a call (took|ended|asked)"),
    "memory": ("return 'x' * 10**13", r"before the run, a call (took|ended|asked)"),
    "number": ("return 5", r"reply\(\) returns 5; it must be a text, a list of messages, or None"),
    "empty": ("return ''", r"reply\(\) returns ''; it must be a text"),
    "message": ("return [{'role': 'user'}]", r"returns the message \{'role': 'user'\}; each must have a role"),
    "raises": ("return row['nothing']", "it raises KeyError in line 2: 'nothing'; the row has question"),
    "prints": ("print('x' * 10**8); return None", None),
    "surrogate": ("return '\\ud800'", "it raises UnicodeEncodeError"),
    "message's": ("return [{'role': 'user', 'content': '\\ud800'}]", "it raises UnicodeEncodeError"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_end_in_one_line_or_do_no_harm(case, tmp_path, capfd):
    """What their processes may do is that of a reward's (leaves/own_rewards)."""
    body, message = HOSTILE[case]
    seconds = 60 if message is None else 1  # to print or return so much takes a slow machine seconds
    file = opened(tmp_path, f"def reply(text, row):\n    {body}\n", seconds=seconds)
    problems = [Problem("q", "q?", "1", row={"question": "q?"})]
    if message is None:
        file.try_rows(problems)
        reply = ask(file, "x")
        assert reply.content is None or len(reply.content) <= 200 * 100
    else:
        with pytest.raises(ConfigError, match=f"^environment.file={tmp_path}/mine.py: [^\n]*{message}"):
            file.try_rows(problems)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err and "xxx" not in out + err and len(err.splitlines()) <= 1


@pytest.mark.parametrize(("source", "message"), [
    ("", r"it must have one of the functions reply\(text, row\) and tools\(\)"),
    (SUMS + ADD, r"it must have one of the functions"),
    ("def tools():\n    return []", r"tools\(\) returns \[\]; it must be a list of functions"),
    ("def tools():\n    return [5]", r"tools\(\) returns \[5\]; it must be a list of functions"),
    ("def reply(text:", "it raises SyntaxError"), ("import nowhere_at_all", "it raises ModuleNotFoundError in line 1"),
    ("while True: pass", "before the run, a call took more than 1 s of computing")])
def test_a_file_that_is_none_is_one_line(source, message, tmp_path):
    with pytest.raises(ConfigError, match=f"^environment.file={tmp_path}/mine.py: [^\n]*{message}"):
        opened(tmp_path, source)


def test_a_call_that_is_ended_ends_its_completion_and_is_said_once(tmp_path, capfd):
    file = opened(tmp_path, "def reply(text, row):\n    while text: pass\n")
    replies = [file.wait(file.ask(text, text, {}), row) for text, row in (("a", "q7"), ("b", "q8"))]
    assert replies == [Reply(None, failures=1)] * 2
    assert capfd.readouterr().err.splitlines() == [
        f"environment.file={tmp_path}/mine.py: a call took more than 1 s of computing or 10 times that by the clock "
        "(environment.seconds), and was ended (row q7); its completion ends there, as of all that end so "
        "(environment/failures)"]
    read_file.cache_clear()
    file = opened(tmp_path, "def loop(n: int):\n    while n: pass\n\ndef tools():\n    return [loop]\n")
    reply = ask(file, 'Now {"name": "loop", "arguments": {"n": 1}}')  # an error that the model reads
    assert reply.content.startswith("\nerror: the call took more than 1 s") and reply.failures == 1


@pytest.mark.parametrize(("settings", "message"), [
    (["environment.turns=3"], "environment.turns=3 must be left out, or 8, unless environment.file"),
    (["environment.file=FILE"], "environment.max_context=None must be at least 192 with environment.file"),
    (["environment.file=FILE", "environment.max_context=191"], "environment.max_context=191 must be at least 192"),
    (["environment.file=FILE", "environment.max_context=4000"], "pack.capacity=1024 must be at least 4000 tokens"),
    (["environment.file=FILE", "environment.max_context=300", "rollout.stop=['=']", "windows.tokens=8",
      "windows.in_flight=2", "windows.max_age=2"], "rollout.stop=.* must be null with windows.tokens"),
    (["environment.file=nowhere.py", "environment.max_context=300"], "nowhere.py")])
def test_settings_that_do_not_go_together(settings, message, tmp_path):
    (tmp_path / "mine.py").write_text(SUMS)
    with pytest.raises(ConfigError, match=message):
        cfg = toy_config(tmp_path / "run", *(x.replace("FILE", str(tmp_path / "mine.py")) for x in settings),
                         name="grpo_toy.yaml")
        open_environment(cfg.environment)


def with_sums(tmp_path: Path, *settings: str) -> list[str]:
    (tmp_path / "mine.py").write_text(SUMS)
    return [f"environment.file={tmp_path}/mine.py", "environment.max_context=200", "rollout.stop=['=']", *settings]


VARIANTS = {
    "cppo": [],
    "pps+nat": ["prune.completions={kind: pps, keep: 2}", "loss.denominator=all",
                "prune.tokens={kind: prefix, whole: 0.5}"],
    "lora": ["model.lora.rank=2"],
    "votes": ["labels.kind=votes", "labels.most=12"],
    "dapo": ["rollout.until=informative", "rollout.max_rounds=2", "prune.completions.kind=none",
             "loss.denominator=all"],
    "critic": ["advantage.kind=gae", "critic.lr=1e-3", "prune.completions.kind=none", "loss.denominator=all"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_is_the_same_on_two_ranks_and_resumes_as_itself(name, tmp_path):
    few = ["steps=2", "eval.limit=2"] if name == "cppo" else ["steps=3", "eval.limit=8"]
    settings = with_sums(tmp_path, *few, "checkpoint.every=1", *VARIANTS[name])
    cfg = toy_config(tmp_path / "one", *settings)
    alone = trained_unchecked(cfg)
    lines = runfolder.read_log(tmp_path / "one" / "metrics.jsonl")
    assert any(line.get("environment/calls", 0) > 0.2 for line in lines)
    assert all(line["mismatch/logp_abs_mean"] < 1e-9 for line in lines if "mismatch/logp_abs_mean" in line)
    for other in on_ranks(2, tmp_path, trained_unchecked, replace(cfg, out=str(tmp_path / "two"))):
        for key, p in alone.items():
            torch.testing.assert_close(other[key], p, rtol=0, atol=1e-9)
    assert step_metrics(tmp_path / "two") == pytest.approx(step_metrics(tmp_path / "one"), rel=1e-8, abs=1e-11)
    trained_unchecked(replace(cfg, out=str(tmp_path / "cut"), steps=cfg.steps - 1))
    resumed = weights(train.train(replace(cfg, out=str(tmp_path / "cut")), resume="always"))
    assert all(torch.equal(resumed[key], p) for key, p in alone.items())
    texts = [(tmp_path / run / "decisions.jsonl").read_text() for run in ("one", "cut")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_step_is_replayed_and_its_texts_show_turns(tmp_path, capsys):
    cfg = toy_config(tmp_path / "run", *with_sums(tmp_path, "steps=2", "data.eval=null", "checkpoint.every=1",
                                                  "checkpoint.keep=all", "log.groups=4", "rollout.group_size=4",
                                                  "prune.completions.keep=2"))
    trained_unchecked(cfg)
    groups = runfolder.read_log(tmp_path / "run" / "samples.jsonl")
    completions = [x for group in groups for x in group["completions"]]
    talked = [x for x in completions if "turns" in x]
    assert talked and all("".join(x["turns"]) == x["text"] for x in talked)
    assert all(x["turns"][0].endswith("=") for x in talked)
    read_file.cache_clear()
    (tmp_path / "mine.py").unlink()  # the copy in the run folder is read
    replay.replay(tmp_path / "run", 2, [], draws=0)
    assert "the same bit for bit" in capsys.readouterr().out


def test_an_evaluation_converses_and_its_result_names_the_environment(tmp_path, command):
    cfg = toy_config(tmp_path / "run", *with_sums(tmp_path, "eval.limit=6"), name="grpo_toy.yaml")
    (tmp_path / "own.yaml").write_text(config.dump(cfg))
    out = tmp_path / "result.json"
    assert command(evaluation, "--config", tmp_path / "own.yaml", "--model", TOY, "--out", out) == 0
    named = json.loads(out.read_text())["head"]["environment"]
    assert named["max_context"] == 200 and len(named["file"]) == 64


@pytest.mark.slow
def test_an_error_in_the_file_in_mid_run_is_one_line_and_the_run_goes_on_from_its_checkpoint(tmp_path):
    raises = "    if text and row['id'].endswith('7'): raise ValueError('seven')\n"
    source = SUMS.replace("    found =", f"{raises}    found =")
    settings = with_sums(tmp_path, "steps=4", "data.eval=null", "checkpoint.every=1")
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=r"it raises ValueError in line 4: seven \(row toy/train/\d*7\)$"):
        trained_unchecked(toy_config(tmp_path / "run", *settings))


@pytest.mark.slow
def test_arrays_of_a_pool_keep_replies(tmp_path):
    """Groups that go on over steps, with an environment that answers messages."""
    (tmp_path / "mine.py").write_text("def reply(text, row):\n    return None if text.count('again') else 'again'\n")
    settings = [f"environment.file={tmp_path}/mine.py", "environment.max_context=200", "windows.tokens=4",
                "windows.in_flight=2", "windows.max_age=2", "rollout.prompts_per_step=2", "rollout.group_size=4",
                "data.eval=null", "checkpoint.every=1", "data.limit=16"]
    cfg = toy_config(tmp_path / "whole", *settings, "checkpoint.keep=all", "steps=4", name="flight_toy.yaml")
    whole = trained_unchecked(cfg)
    cut = tmp_path / "cut"
    for step in range(1, 4):  # the first checkpoint with replies in its pool
        saved = torch.load(tmp_path / "whole" / "checkpoints" / f"step_00000{step}" / "extra.pt", weights_only=True)
        if any(len(sample[3]) for group in saved["history"]["pool"] for sample in group[-1]):
            break
    trained_unchecked(replace(cfg, out=str(cut), steps=step))
    resumed = weights(train.train(replace(cfg, out=str(cut)), resume="always"))
    assert all(torch.equal(resumed[key], p) for key, p in whole.items()) and step < 4
