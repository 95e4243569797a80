"""chat.py says what the model, its run and its environment say."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, TOY, refuses, toy_config

import chat
import train
from records import Prompt, Request

ROWS = [json.loads(line) for line in (ROOT / "toy" / "test.jsonl").read_text().splitlines()[:2]]
QUESTION = ROWS[0]["question"]
SHORT = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=64"]
GREEDY = ["data.eval=toy/test.jsonl", "eval.max_new_tokens=64"]


def opened(*settings: str, target: Path = TOY) -> chat.Conversation:
    return chat.Conversation(chat.open_config(str(target), None, [*GREEDY, *settings]))


def sampled_at_once(conversation: chat.Conversation, messages: list[dict], row: dict) -> str:
    tokenizer = conversation.tokenizer
    ids, = tokenizer.encode([tokenizer.render(messages, None)])
    sample, = conversation.engine.generate([Request(Prompt("q", ids, "", row), 0, 64)], 0.0)
    return "".join(tokenizer.read(sample))


def test_an_answer_is_to_the_whole_conversation():
    conversation, question = opened(), {"role": "user", "content": QUESTION}
    answer = conversation.say(QUESTION)
    assert answer == sampled_at_once(conversation, [question], {})
    again = [question, {"role": "assistant", "content": answer}, question]
    assert conversation.say(QUESTION) == sampled_at_once(conversation, again, {})
    conversation.say("/new")
    assert conversation.say(QUESTION) == answer


def test_a_problem_is_asked_with_its_row_and_its_gold_answer_is_shown():
    conversation = opened()
    for row in ROWS:
        text = conversation.say("/problem")
        assert text.startswith(f"{row['question']}\n\n") and text.endswith(f"\n\nThe gold answer is {row['answer']}.")
        assert conversation.row == row


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["['=']", "null"])
def test_an_environment_replies(stop, tmp_path):
    """Its reply is wrong by 3 and stands behind a stop text; without one only an answer's end can have a reply."""
    from leaves.environment.test_environment import with_sums
    conversation = opened(*with_sums(tmp_path), f"rollout.stop={stop}", "eval.temperature=1", *SHORT)
    sums = re.findall(r"(\d+) \+ (\d+) = (\d+)", "".join(conversation.say("/problem") for _ in range(9)))
    replies = sum(int(a) + int(b) + 3 == int(c) for a, b, c in sums)
    assert replies > len(sums) / 2 if stop != "null" else replies < len(sums) / 2


def test_samples_are_those_of_the_seed():
    hot = ["eval.temperature=1", "eval.max_new_tokens=24"]
    texts = [opened(*hot, f"seed={seed}").say(QUESTION) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_a_run_speaks_by_its_newest_policy_and_with_its_own_settings(tmp_path):
    run = tmp_path / "run"
    cfg = toy_config(run, "steps=2", "checkpoint={every: 1, keep: all}", "rollout.group_size=4",
                     "rollout.prompts_per_step=2", "prune.completions.keep=2", "rollout.max_new_tokens=24",
                     "data.eval=null", "pack.capacity=512", "data.system_prompt=Add.")
    train.train(cfg)
    newest = chat.open_config(str(run), None, [])
    assert (newest.model.path, newest.data.system_prompt) == (str(run / "checkpoints" / "step_000002"), "Add.")
    text = chat.Conversation(newest).say(QUESTION)
    (run / "checkpoints" / "latest").write_text("step_000001")  # where it goes on from, without what came later
    assert chat.open_config(str(run), None, []).model.path == str(run / "checkpoints" / "step_000001")
    shutil.rmtree(run / "checkpoints")
    export = chat.open_config(str(run), None, [])
    assert export.model.path == str(run / "hf") and chat.Conversation(export).say(QUESTION) == text
    assert chat.open_config(str(run), None, ["data.system_prompt=null"]).data.system_prompt is None
    shutil.rmtree(run / "hf")
    refuses(f"{run} has neither an export nor a checkpoint yet", chat.open_config, str(run), None, [])


def test_a_conversation_that_is_too_long_and_a_set_that_is_not_there_are_one_line(monkeypatch, capsys):
    conversation = opened("data.eval=null")
    conversation.longest = 100
    capsys.readouterr()
    lines = iter(["/problem", "/problem", "/help", QUESTION * 9, "", "/new", QUESTION])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/quit"))
    chat.talk(conversation)
    commands, first, again, unknown, second, _, new, *_, last = capsys.readouterr().out.splitlines()
    assert commands == chat.COMMANDS and unknown == f"error: /help: no such command; {chat.COMMANDS}"
    assert first == again == "error: /problem: data.eval names no set; --set data.eval=..."
    assert re.fullmatch(r"error: the conversation has \d+ of 100 tokens; begin another, /new", second)
    assert (new, last[:4]) == ("a new conversation", "####")


def test_ctrl_c_ends_an_answer_and_not_the_program(monkeypatch, capsys):
    conversation, calls = opened(), []
    generate = conversation.engine.generate

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return generate(*given)

    monkeypatch.setattr(conversation.engine, "generate", interrupted)
    lines = iter([QUESTION, "And 1 + 1?"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/quit"))
    chat.talk(conversation)
    assert " [ended]\n" in capsys.readouterr().out
    assert [message["content"] for message in conversation.messages][0] == "And 1 + 1?" and len(calls) == 2


def test_the_command_talks_in_a_terminal(command, refused, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n\n/problem\n"))
    assert command(chat, TOY, *(word for setting in GREEDY for word in ("--set", setting))) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "The gold answer is" in printed.out
    assert refused(chat, "nowhere").startswith("error: ")
