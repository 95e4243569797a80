"""A user's own data and model: columns, messages, no answers, base models, template arguments, stop texts."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from conftest import TOY, ask, load, refuses, toy_config, write_tiny
from test_data import edit, write
from test_eval import sets
from test_rollout import prompts, spec

import config
import data
import eval as evaluation
import learner
import train
from config import ConfigError, Data
from infra import results, runfolder
from infra.rows import all_have_answers
from records import Problem
from rollout import TorchEngine

SHOTS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1?"},
         {"role": "assistant", "content": "2"}, {"role": "user", "content": "2 + 3?"}]


def test_other_columns_and_what_lies_inside_one(tmp_path, capsys):
    """verl's sets have the answer inside a column. What a file has under our own names needs no other."""
    row = {"prompt": "q", "reward_model": {"ground_truth": 7}, "extra": [1], "uid": 3, "a.b": "hard"}
    path = str(write(tmp_path / "own.jsonl", row))
    columns = {"question": "prompt", "answer": "reward_model.ground_truth", "id": "uid", "level": "a.b"}
    first, = data.load_problems(path, columns=columns)
    assert first == Problem("3", "q", "7", level="hard") and first.row == row
    ours = str(write(tmp_path / "ours.jsonl", {"question": "r", "answer": "8"}))
    assert data.load_problems(ours, columns=columns) == [Problem("ours/0", "r", "8")]
    no_row = f"{ours}: no row has the column {{!r}} that data.columns names for {{}}; the column that has one of our"
    for line, given in zip(capsys.readouterr().err.splitlines()[:2], columns.items(), strict=False):
        assert line.startswith(no_row.format(*given[::-1]))
    bare = str(write(tmp_path / "bare.jsonl", {"question": "r"}))  # a reward may need no answer
    assert data.load_problems(bare, columns={"answer": "Ergebniss"}, answers=False) == [Problem("bare/0", "r", "")]
    assert capsys.readouterr().err == f"{bare}: no row has the column 'Ergebniss' that data.columns names for answer\n"
    # A row that lacks what others have is not given what stands under our name.
    without = {"answer": "5", "reward_model": {}, "uid": 4}
    with pytest.raises(ConfigError, match=r"mixed.jsonl:2: there is no column 'reward_model.ground_truth' for the ans"):
        data.load_problems(str(write(tmp_path / "mixed.jsonl", row | {"answer": "4"}, row | without)), columns=columns)


def test_verls_columns_need_no_setting_and_the_content_of_a_message_may_be_parts(tmp_path):
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?", "image": None}]
    row = {"data_source": "x", "prompt": [{"role": "user", "content": parts}], "extra_info": {"index": 1},
           "reward_model": {"style": "rule", "ground_truth": "5"}}
    problem, = data.load_problems(str(write(tmp_path / "verl.jsonl", row)))
    assert (problem.question, problem.answer) == ("2 + 3?", "5") and problem.messages[0]["content"] == "2 + 3?"
    parts[0] = {"type": "image", "image": "x.png"}
    with pytest.raises(ConfigError, match=r"verl.jsonl:1: a message must be an object with 'role', .* 'content', a te"):
        data.load_problems(str(write(tmp_path / "verl.jsonl", row)))


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path, capsys):
    path = str(write(tmp_path / "own.jsonl", {"promt": "q", "label": "1"}))
    with pytest.raises(ConfigError, match=r"own.jsonl:1: there is no column 'prompt' for the question among promt, "
                                          r"label \(Did you mean 'promt'\?\); set data.columns=\{question: ...\} to"):
        data.load_problems(path, columns={"question": "prompt"})
    columns = {"question": "promt", "answer": "label", "level": "hardness"}
    assert data.load_problems(path, columns=columns)[0].answer == "1"
    assert "no row has the column 'hardness' that data.columns names for level" in capsys.readouterr().err
    write(tmp_path / "own.jsonl", {"promt": "q", "label": "1"}, {"promt": "r", "label": "1", "hardness": 2})
    assert data.load_problems(path, columns=columns)[1].level == "2" and not capsys.readouterr().err


def test_a_question_may_be_messages_or_messages_as_json(tmp_path):
    rows = [{"question": question, "answer": "5"} for question in (SHOTS, json.dumps(SHOTS), "2 + 3?", "[1, 2] is?")]
    listed, as_json, plain, text = data.load_problems(str(write(tmp_path / "few.jsonl", *rows)))
    assert listed.messages == as_json.messages == tuple(SHOTS) and listed.question == "2 + 3?"
    assert plain.messages == text.messages == () and text.question == "[1, 2] is?"
    tokenizer = data.Tokenizer(TOY)
    theirs = transformers.AutoTokenizer.from_pretrained(TOY)
    for problem, system, messages in ((listed, "Other.", SHOTS), (listed, None, SHOTS), (plain, "Other.", [
            {"role": "system", "content": "Other."}, SHOTS[3]])):
        prompt, = data.to_prompts([problem], tokenizer, system, 200)
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(prompt.ids, special=True) == text
    prompt, = data.to_prompts([Problem("x", "2 + 3?", "5", messages=tuple(SHOTS[1:]))], tokenizer, "Be short.", 200)
    assert prompt.ids == data.to_prompts([listed], tokenizer, None, 200)[0].ids
    named = (SHOTS[1] | {"name": "Ann"}, *SHOTS[2:])  # Arrow gives every message all keys that one of them has
    table = pyarrow.Table.from_pylist([{"question": named, "answer": "5"}])
    pyarrow.parquet.write_table(table, tmp_path / "few.parquet")
    assert data.load_problems(str(tmp_path / "few.parquet"))[0].messages == named


def test_answers_are_asked_for_where_the_reward_reads_them(tmp_path, capsys):
    rows = [{"question": "q"}, {"question": "r", "answer": "1"}, {"question": "s", "answer": {"x": 1}}]
    path = str(write(tmp_path / "own.jsonl", *rows[:2]))
    refuses(r"own.jsonl:1: there is no column 'answer'.*; without answers give weight", data.load_problems, path)
    problems = data.load_problems(path, answers=False)
    assert [p.answer for p in problems] == ["", "1"]
    assert not all_have_answers(problems, "own") and not all_have_answers(problems[:1], "own")
    assert all_have_answers(problems[1:], "own")
    assert capsys.readouterr().err == "own: 1 of 2 problems have no answer, so accuracy is not measured\n"
    write(tmp_path / "own.jsonl", rows[2])
    with pytest.raises(ConfigError, match=r"'answer' must be .* or go without: data.columns=\{answer: null\}"):
        data.load_problems(path, answers=False)
    assert data.load_problems(path, columns={"answer": None}, answers=False)[0].answer == ""
    reads = {name: config.Reward(**{"accuracy": 0.0, name: 1.0}).needs_answers
             for name in ("accuracy", "wrong", "tag_exact", "tag_number", "boxed", "format", "overlong", "custom")}
    assert [name for name, needs in reads.items() if needs] == ["accuracy", "wrong", "tag_exact", "tag_number"]


def test_a_named_set_has_its_own_columns_and_null_is_no_answer_even_of_a_solution(tmp_path):
    write(tmp_path / "gsm8k_test.jsonl", {"question": "q", "answer": "1", "label": "2"})
    assert data.load_problems("gsm8k", str(tmp_path), columns={"answer": "label"})[0].answer == "1"
    path = str(write(tmp_path / "own.jsonl", {"question": "q", "solution": r"\boxed{1}"}))
    assert data.load_problems(path)[0].answer == "1"
    assert data.load_problems(path, columns={"answer": None}, answers=False)[0].answer == ""


def test_results_tell_messages_apart():
    problems = [Problem("a", "2 + 3?", "5", messages=tuple(messages)) for messages in (SHOTS, (), SHOTS[1:])]
    sets = [evaluation.EvalSet("few", [problem], []) for problem in problems]
    assert len({results.identify_set(s)["data"] for s in sets}) == 3


QWEN3 = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


def base_model(folder: Path) -> Path:
    """A model whose tokenizer has no chat template."""
    edit(write_tiny(folder), "tokenizer_config.json", chat_template=None)
    return folder


def asking(**settings) -> Data:
    return Data(train="", eval="", **settings)


def test_template_arguments_reach_the_template_as_in_transformers_and_one_that_cannot_be_read_is_an_error(tmp_path):
    folder, template = base_model(tmp_path / "model"), tmp_path / "qwen3.jinja"
    template.write_text(QWEN3)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for arguments in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        ours = data.Tokenizer(folder, asking(chat_template=str(template), template=arguments or None))
        for question, messages in (("1 + 1?", [{"role": "user", "content": "1 + 1?"}]), (SHOTS, SHOTS)):
            text = theirs.apply_chat_template(messages, chat_template=QWEN3, add_generation_prompt=True, tokenize=False,
                                              **arguments)
            assert ours.render(question, None) == text
            assert text.endswith("</think>\n\n") == (arguments == {"enable_thinking": False})
    template.write_bytes(b"\xff\xfe")
    for path in (template, tmp_path / "none.jinja"):
        refuses(f"the chat template {path} cannot be read: ", data.Tokenizer, TOY, asking(chat_template=str(path)))


@pytest.mark.slow
def test_a_run_goes_on_with_the_template_that_it_began_with(tmp_path, command):
    """Wherever it lies now; the model exported from a checkpoint has it too."""
    template = tmp_path / "own.jinja"
    template.write_text(QWEN3)
    given = ["steps=1", "checkpoint.every=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "data.eval=null",
             "rollout.max_new_tokens=4", "prune.completions.kind=none"]
    train.train(toy_config(tmp_path / "run", *given, f"data.chat_template={template}"))
    assert (tmp_path / "run" / "chat_template.jinja").read_text() == QWEN3
    given[0] = "steps=2"
    template.write_text(QWEN3.replace("assistant", "helper"))
    with pytest.raises(ConfigError, match=f"of data.chat_template has changed .* {tmp_path}/run/chat_template"):
        train.train(toy_config(tmp_path / "run", *given, f"data.chat_template={template}"), resume="always")
    (tmp_path / "moved.jinja").write_text(QWEN3)
    train.train(toy_config(tmp_path / "run", *given, f"data.chat_template={tmp_path}/moved.jinja"), resume="always")
    assert command(learner, str(tmp_path / "run" / "checkpoints" / "step_000002"), "--out", str(tmp_path / "hf")) == 0
    assert data.Tokenizer(tmp_path / "hf").source == QWEN3 == data.Tokenizer(tmp_path / "run" / "hf").source


def test_an_argument_that_a_template_does_not_read_is_an_error(tmp_path):
    """jinja itself would pass over it."""
    (tmp_path / "qwen3.jinja").write_text(QWEN3)
    for name, advice in (("enable_thinkin", "it reads enable_thinking"), ("x", "it reads enable_thinking"),
                         ("messages", "it reads enable_thinking"), ("message", "it reads")):
        with pytest.raises(ConfigError, match=rf"data.template.{name}=0: the chat template of .*{re.escape(advice)}"):
            data.Tokenizer(TOY, asking(chat_template=str(tmp_path / "qwen3.jinja"), template={name: 0}))
    with pytest.raises(ConfigError, match=f"the chat template of {TOY} has no argument of that name; it reads none"):
        data.Tokenizer(TOY, asking(template={"enable_thinking": False}))


def test_a_plain_prompt_gets_what_the_tokenizer_adds_by_itself(tmp_path):
    """Llama's tokenizers begin a text with a BOS, which a template writes out."""
    folder = base_model(tmp_path / "model")
    tokenizer = data.Tokenizer(folder, asking(prompt="Q: {question}\nA{{}}:"))
    text = tokenizer.render("1 {x}?", None)
    assert text == "Q: 1 {x}?\nA{}:" and tokenizer.closing_token() is None
    ids, = tokenizer.encode([text])
    assert tokenizer.decode(ids, special=True) == text
    bos = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                                                    {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
           "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}}
    edit(folder, "tokenizer.json", post_processor=bos)
    with_bos = data.Tokenizer(folder, asking(prompt="Q: {question}\nA{{}}:"))
    assert with_bos.encode([text]) == [(1, *ids)]
    assert list(with_bos.encode([text])[0]) == transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    (folder / "chat_template.jinja").write_text(QWEN3)
    assert data.Tokenizer(folder).encode([text]) == [ids]
    with pytest.raises(ConfigError, match="prompt few: data.prompt takes one question, and a row has several messages"):
        data.to_prompts([Problem("few", "q", "1", messages=tuple(SHOTS))], tokenizer, None, 100)


def stopping(folder: Path, *texts: str, slots: int = 3, dtype: torch.dtype = torch.float64) -> TorchEngine:
    tokenizer = data.Tokenizer(folder, stop=texts)
    return TorchEngine(load(folder, dtype), spec(folder, slots, dtype, tokenizer.eos_ids, stops=tokenizer.stops))


@pytest.mark.slow
def test_a_sample_ends_with_the_token_that_completes_a_stop_text(tiny):
    """It begins as the one without stop texts, of which some lie in several tokens; slots are refilled and dropped."""
    tokenizer, limits = data.Tokenizer(tiny), [40, 7, 40, 25, 40, 1, 40, 40] * 2
    asked, seeds = prompts() * 2, list(range(16))
    whole = stopping(tiny).generate(ask(asked, seeds, limits), 1.0)
    pairs = [[tokenizer.decode([i]) for i in s.ids[n:n + 2]] for s in whole for n in range(0, s.length - 2, 3)]
    texts = sorted({left[-2:] + right[:2] for left, right in pairs if left.isalpha() and right.isalpha()})[::4]
    stopped = stopping(tiny, *texts).generate(ask(asked, seeds, limits), 1.0)
    across = 0
    for long, short in zip(whole, stopped, strict=True):
        ends = [n for n in range(1, long.length + 1) if any(x in tokenizer.decode(long.ids[:n]) for x in texts)]
        assert short.ids == long.ids[:(ends or [long.length])[0]]
        assert short.logp == pytest.approx(long.logp[:short.length], abs=1e-12)
        assert short.finished == (bool(ends) or long.finished)
        across += bool(ends) and not any(x in tokenizer.decode(short.ids[-1:]) for x in texts)
    assert across > 2 and sum(s.finished for s in stopped) > 2 + sum(s.finished for s in whole)
    twice = {2 * tokenizer.decode(s.ids[:1]) for s in whole if tokenizer.decode(s.ids[:1]).isalpha()}  # not said twice
    again = stopping(tiny, *twice).generate(ask(asked, seeds, limits), 1.0)
    assert twice and [s.ids for s in again if s.length == 1] == [s.ids for s in whole if s.length == 1]


def test_a_stop_text_that_is_a_special_token_is_one_more_eos(tiny):
    tokenizer = data.Tokenizer(tiny, stop=["<|im_start|>", "Q:", "a"])
    assert tokenizer.eos_ids == data.Tokenizer(tiny).eos_ids | {1}  # "a" is a token too, but one that is decoded
    assert tokenizer.stops == data.Tokenizer(tiny, stop=["Q:", "a"]).stops  # by which eval.py keeps its engine
    assert tokenizer.stops.texts == ("Q:", "a") and data.Tokenizer(tiny, stop=["<|im_start|>"]).stops is None


REWARD = """def reward(text, gold, tokens):
    assert gold == ""
    return min(1.0, text.count("e") / 4)
"""


def own_task(folder: Path, *overrides: str) -> config.Config:
    """A base model, questions without answers, and a reward that asks for none."""
    rows = [{"prompt": f"Tell me of {i} and {i * i}.", "kind": f"{i % 2}"} for i in range(12)]
    write(folder / "train.jsonl", *rows[:6])
    write(folder / "held_out.jsonl", *rows[6:])
    (folder / "reward.py").write_text(REWARD)
    return toy_config(folder / "run", f"model.path={base_model(folder / 'model')}", f"data.train={folder}/train.jsonl",
                      f"data.eval={folder}/held_out.jsonl", "data.columns={question: prompt, level: kind}",
                      "data.prompt=Question: {question}\nAnswer:", "reward.accuracy=0", "reward.custom=1",
                      f"reward.custom_file={folder / 'reward.py'}", 'rollout.stop=["ee", "\\n"]', "eval.n=2",
                      "eval.temperature=1", "eval.max_new_tokens=32", *overrides)


def test_a_base_model_without_a_way_to_prompt_it_is_told_its_remedies(tmp_path, command, monkeypatch, capsys):
    folder = str(base_model(tmp_path / "model"))
    given = ["--model", folder, "--data", write(tmp_path / "few.jsonl", {"prompt": "q", "label": "1"}),
             *sets("eval.max_new_tokens=4", "data.columns={question: prompt, answer: label}")]
    for program, *words in ((evaluation, *given), (train, "--config", "cppo_toy.yaml", "--check",
                                                   *sets(f"model.path={folder}", f"out={tmp_path / 'run'}"))):
        assert command(program, *words) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "set data.prompt to a plain text such as \"Question: {question}" in said
        assert "data.chat_template to a jinja file" in said
    (tmp_path / "qwen3.jinja").write_text(QWEN3)
    seen, generate = [], TorchEngine.generate
    monkeypatch.setattr(TorchEngine, "generate", lambda self, requests, *rest: seen.append(requests) or generate(
        self, requests, *rest))
    for end, *changes in (("Q: q", "data.prompt=Q: {question}", "rollout.stop=[a, e]"), (
            "<think>\n\n</think>\n\n", f"data.chat_template={tmp_path / 'qwen3.jinja'}",
            "data.template.enable_thinking=false")):
        assert command(evaluation, *given, *sets(*changes)) == 0
        assert data.Tokenizer(TOY).decode(seen[-1][0].prompt.ids).endswith(end)


@pytest.mark.slow
def test_a_base_model_trains_and_evaluates_on_questions_without_answers(tmp_path, command, capsys):
    """Everything speaks of the reward: metrics, files, closing table, eval.py and the page."""
    report = pytest.importorskip("report")
    cfg = own_task(tmp_path)
    train.train(cfg)
    printed, run = capsys.readouterr(), Path(cfg.out)
    first, *steps, last = runfolder.read_log(run / "metrics.jsonl")
    scores = [last[f"eval/held_out/{key}"] for key in ("reward", "reward_low", "reward_high")]
    assert scores[0] > 0 and -1 <= scores[1] < scores[0] < scores[2] <= 1
    assert not [key for key in {key for line in (first, *steps, last) for key in line} if key.rpartition("/")[2] in (
        "accuracy", "low", "high", "lenient", "unparsed", "disagree", "pass", "majority")]
    assert all(step["reward/mean"] == pytest.approx(step["reward/custom"]) for step in steps)
    bounds = f"reward {scores[0]:.3f} [{scores[1]:.3f}, {scores[2]:.3f}]"
    assert f"step 2: held_out {bounds}" in printed.err and bounds in printed.out
    answers = [r for p in runfolder.read_log(run / "eval_000002.jsonl") for r in p["responses"]]
    assert {"verdict", "answer"}.isdisjoint(answers[0]) and answers[0]["components"] == {"custom": answers[0]["reward"]}
    assert scores[0] == pytest.approx(np.mean([r["reward"] for r in answers]))
    assert all(r["finished"] == ("ee" in r["text"] or "\n" in r["text"] or r["tokens"] < 32) for r in answers)
    line = runfolder.read_log(run / "samples.jsonl")[0]
    assert line["prompt"].startswith("Question: Tell me of") and line["prompt"].endswith("\nAnswer:")
    assert "accuracy" not in line["completions"][0]["components"]
    offered = [p for d in runfolder.read_log(run / "decisions.jsonl") for p in d["prompts"]]
    assert all(len(p["reward"]) == 8 and "right" not in p for p in offered)

    out = tmp_path / "out.json"
    again = ["--model", str(run / "hf"), "--config", str(run / "config.yaml"), "--out", str(out)]
    assert command(evaluation, *again) == 0
    found = json.loads(out.read_text())["results"]["held_out"]
    assert [found[key] for key in ("reward", "reward_low", "reward_high")] == scores
    assert found["groups"]["level"].keys() == {"0", "1"} and f"{scores[0]:.3f}" in capsys.readouterr().out

    report.write_report([run], tmp_path / "page")
    page, tables = ((tmp_path / "page" / name).read_text() for name in ("report.html", "report.md"))
    assert "eval/held_out/reward at the budget that every run reached" in tables
    assert "accuracy" not in tables and "eval/held_out/reward against steps" in page and bounds in page


@pytest.mark.slow
def test_accuracy_stays_beside_the_reward_where_there_are_answers(tmp_path, capsys):
    """CPPO's reward on GSM8K gives accuracy no weight, and its papers' figures are accuracies."""
    report = pytest.importorskip("report")
    train.train(toy_config(tmp_path / "run", "steps=1", "reward.accuracy=0", "reward.tag_number=1", "reward.boxed=0.5"))
    last = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")[-1]
    assert {"eval/few/accuracy", "eval/few/reward", "eval/few/low", "eval/few/reward_low"} <= last.keys()
    assert -1e-9 <= last["eval/few/reward_low"] <= last["eval/few/reward"] <= last["eval/few/reward_high"] <= 1.5
    table = capsys.readouterr().out
    assert table.count("few ") == 2 and "held-out" in table
    report.write_report([tmp_path / "run"], tmp_path / "page")
    tables = (tmp_path / "page" / "report.md").read_text()
    assert all(f"## eval/few/{score} at the budget" in tables for score in ("accuracy", "reward"))
