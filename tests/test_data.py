"""Data files in every layout, templates, and the order of prompts."""

import csv
import gzip
import io
import json
import math

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import ROOT, TOY, as_rewards, refuses, write_tiny

import config
import data
from collect import Sampler
from config import ConfigError
from history import PromptHistory, epoch_order
from infra import checkpoint
from infra.named_sets import NAMED_SETS
from records import Problem, Prompt, PromptDraw, Rolled, Sample
from settings.kinds import AllPrompts, BernoulliPrompts, Greso, LowestRank, Prompts
from verify.errors import VerifyError
from verify.grade import begin_verdict, finish_verdict, name_unreadable


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_the_columns_of_gsm8k_math_and_the_hubs_evaluation_sets_are_understood(tmp_path):
    path = write(
        tmp_path / "mixed.jsonl",
        {"id": "mine", "question": "q", "answer": "2,125", "solution": "s"},
        {"id": None, "question": "q", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
        {"problem": "q", "solution": r"so \boxed{\frac{1}{2}}.", "level": "Level 1"},
        {"question": "q\u2028\x85", "answer": 7},  # both end a line for str.splitlines, neither does in JSON lines
        {"problem": "q", "answer": 27.0, "type": "Algebra", "level": "Level ?"},
        {"question": "q", "final_answer": ["$1$", "$2$"], "subfield": "x"})
    path.write_text("\ufeff" + path.read_text())  # the mark of the byte order is no part of the first row
    assert data.load_problems(str(path)) == [
        Problem("mine", "q", "2,125", "s"),
        Problem("mixed/1", "q", "42", "6 * 7 = <<6*7=42>>42\n#### 42"),
        Problem("mixed/2", "q", r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}.", level="1"),
        Problem("mixed/3", "q\u2028\x85", "7"), Problem("mixed/4", "q", "27", level="?", subject="Algebra"),
        Problem("mixed/5", "q", "$1$, $2$")]


def test_hub_rows_are_read_like_lines(monkeypatch):
    rows = [{"question": f"q{i}", "answer": f"...\n#### {i}"} for i in range(3)]
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **split: asked.append((names, split)) or rows)
    assert [p.answer for p in data.load_problems("gsm8k")] == ["0", "1", "2"]
    data.load_problems("user/set:default:train")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"}), (("user/set", "default"), {"split": "train"})]


ROWS = [{"question": 'How many, "then"?\nTell; please.', "answer": "1"}, {"question": "q\té", "answer": "2"}]
LINES, ARRAY = "\n".join(map(json.dumps, ROWS)), json.dumps(ROWS, indent=1, ensure_ascii=False)


def table(separator: str, end: str = "\r\n") -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ROWS[0], delimiter=separator, lineterminator=end)
    writer.writeheader()
    writer.writerows([*ROWS, {}])  # an office ends a sheet with empty cells
    return text.getvalue()


def parquet(rows: list[dict]) -> bytes:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", LINES), ("a.JSONL", LINES), ("a.jsonl.gz", gzip.compress(LINES.encode())), ("a.jsonl", LINES + "\n\n"),
    ("a.jsonl", LINES.encode("utf-16")), ("a.json", ARRAY), ("a.json", '{"data": ' + ARRAY + ', "version": 1}'),
    ("a.json", LINES), ("a.json.gz", gzip.compress(ARRAY.encode())), ("a.json", LINES.replace("\n", "\r\n") + "\r\n"),
    ("a.csv", table(",")), ("a.csv", table(";").replace("\r\n", ";;\r\n") + " ;\r\n"),
    ("a.csv", table(";")), ("a.csv", table("\t", "\n")), ("a.csv", "sep=|\r\n" + table("|")),
    ("a.tsv", table("\t")), ("a.csv", table(";").encode("utf-8-sig")), ("a.csv", table("\t").encode("utf-16")),
    ("a.csv", table(";").encode("utf-16-le")), ("a.jsonl", b"\xfe\xff" + LINES.encode("utf-16-be")),
    ("a.csv.gz", gzip.compress(table(",").encode())), ("a.csv", table(",", "\r")), ("a.parquet", parquet(ROWS)),
], ids=lambda x: x if str(x).startswith("a.") else "")
def test_a_file_of_any_kind_holds_the_same_problems(name, content, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    problems = data.load_problems(str(tmp_path / name))
    assert [p.row for p in problems] == ROWS and [p.answer for p in problems] == ["1", "2"]
    assert len({p.id for p in problems}) == 2


GOOD = b'{"id": "a", "question": "q", "answer": "1"}\n'


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.xlsx", b"PK", " is there, but no file with the ending '.xlsx' is read; unpack it, save it as one of .jsonl, "),
    ("a.arrow", b"", ".*the ending '.arrow'"), ("a.yaml.gz", gzip.compress(b""), ".*the ending '.yaml'"),
    ("a.txt", b"q", ".*the ending '.txt'"), ("data", b"q", ".*the ending ''"),
    ("a.jsonl.gz", b"{}", " cannot be unpacked .Not a gz"), ("a.csv.gz", gzip.compress(b"q" * 99)[:-9], ".*unpack"),
    ("a.json", b'[{"question": "q"},\n bad]', ": not valid JSON .Expecting value: line 2 column 2"),
    ("a.json", b"[[1]]", ": row 0: a row must be an object"), ("a.json", b"3", ": row 0: a row must be an object"),
    ("a.csv", b"question,answer\nq,1,2\n", ":2: more cells than the 2 columns of line 1; a text with ',' needs double"),
    ("a.csv", b"sep=;\nquestion;answer\n\nq;1;2\n", ":4: more cells than the 2 columns"),
    ("a.csv", b'"the, question";answer\n\n', " holds no problems"),
    ("a.jsonl", b"version https://git-lfs.github.com\n", ":1: not valid JSON .*fetched by git lfs pull"),
    ("a.csv", b"question,question\nq,1\n", ":1: a column is named twice in question, question"),
    ("a.csv", b'question,answer\n"q,1\n', r":\d: not valid CSV .*; look for a double quote"),
    ("a.csv", b"", " holds no problems"), ("a.csv", b"question,answer\nq\n", ":2: column 'answer' is empty"),
    ("a.csv", b"question,answer\nq,nan\n", ":2: column 'answer' is empty, or nan"),
    *(("a.csv", b"question;answer\nq;0.125\np;%b\n" % number, ":3: a number can be read in two ways; write 1.234,5 as")
      for number in (b"3,5", b"1.234", b"-1.234.567,8")),
    ("a.csv", "question,answer\ncaf\xe9,1\n".encode("latin-1"), " is not UTF-8 text .*; save it as UTF-8"),
    ("a.json", b'[{"question": "q", "question": "p"}]', ": not valid JSON .'question' is given twice, behind"),
    ("a.parquet", b"text", " cannot be read as parquet"),
    ("a.parquet", parquet([{"question": "a", "answer": 1.5}, {"question": "b", "answer": math.nan}]),
     ": row 1: column 'answer' is empty, or nan; mend or remove the line"),
    *(("a.jsonl", GOOD + row, f":2: {message}") for row, message in (
        (b"{not json", "not valid JSON"), (b"[1]", "a row must be an object"),
        (b'{"answer": "1"}', "there is no column 'question' for the question among answer; set data.columns="),
        (b'{"question": "q"}', "there is no column 'answer' for the answer among question; .*; without answers"),
        (b'{"question": null, "answer": "1"}', "column 'question' is empty, or nan; mend or remove the line"),
        (b'{"question": "q", "answer": true}', "'answer' must be a non-empty text, not True"),
        (b'{"question": "q", "answer": "1", "solution": 3}', "'solution' must be a"),
        (b'{"question": "q", "answer": ' + b"1" * 5001 + b"}", "not valid JSON .Exceeds the limit"),
        (b"[" * 100_000, "not valid JSON .maximum recursion"),
        *((b'{"question": "q", "answer": "1", "more": [%b]}' % number, "not valid JSON .Out of .*number finite")
          for number in (b"NaN", b"-Infinity", b"1e999")),
        (b'{"question": "q", "answer": "1", "answer": "1"}', "not .*'answer' is given twice"),
        (b'{"question": "q", "answer": "1", "more": [{"a": {"a": 1}, "b": 1, "a": 2}]}', "not .*'a' is given twice"),
        (b'{"answer": "1", "question": "[{\\"content\\": \\"a\\", \\"content\\": \\"b\\"}]"}', "not .*'content'"))),
    ("a.jsonl", GOOD + GOOD, ".*id 'a' occurs twice"), ("a.jsonl", b"", " holds no problems"),
    ("a.jsonl", '{"question": "caf\xe9", "answer": "1"}'.encode("latin-1"), " is not UTF-8 text"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_a_file_or_a_line_that_cannot_be_read_is_named_with_the_remedy(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path / name}{message}") as raised:
        data.load_problems(str(tmp_path / name))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500


def test_several_files_are_one_set_whose_ids_differ_and_whose_rows_a_checkpoint_knows(tmp_path, monkeypatch):
    """Separated by commas, in a folder, by a pattern; a folder's _SUCCESS is none of its files."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("a").mkdir()
    tmp_path.joinpath("b").mkdir()
    write(tmp_path / "a" / "part.jsonl", {"id": "x", "question": "q", "answer": "1"})
    write(tmp_path / "b" / "part.jsonl", {"id": "x", "question": "q", "answer": "2"})
    tmp_path.joinpath("b", "more.csv").write_text("id,question,answer\nx,q,3\n")
    tmp_path.joinpath("b", "_SUCCESS").touch()
    digests = set()
    for names, golds in (("a/part.jsonl, b/part.jsonl", "12"), ("b", "32"), ("*/*.jsonl,b/*.csv", "123"), (".", "132")):
        problems = data.load_problems(names)
        assert [(p.id, p.answer) for p in problems] == [(f"{i}/x", gold) for i, gold in enumerate(golds)]
        asked = [Prompt(p.id, (1,), p.answer, p.row) for p in problems]
        digests.add(checkpoint.inputs_of(TOY, asked, {})["data.train"])
    assert len(digests) == 4
    for name in ("c/train-00000-of-00003", "c/train-00002-of-00003", "d/test-00000-of-00001", "e/a-of-0", "e/b-of-0"):
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}.jsonl", {"question": "q", "answer": "1"})
    assert len(data.load_problems("e")) == 2
    for names, message in (("a,b/mroe.csv", "mroe.csv not found .*Did you mean 'more.csv'"), ("a,", "'' is not known"),
                           ("x*y", r"x\*y matches nothing \(looked for in "), ("a,b/_*", "with the ending ''"),
                           ("c", "c holds 2 files, .*fewer than"), ("[cd]/*", "holds 3 files, .*of several splits")):
        refuses(message, data.load_problems, names)


def test_columns_of_several_types_and_lost_characters_are_counted_and_the_run_goes_on(tmp_path, capsys):
    """Half a character comes as an escape of JSON, of JSON inside a text or of Python inside a text, also in a key."""
    asked = '[{"role": "user", "content": "\\ud83d\\ude00\\ud83d"}]'
    rows = [{"question": "a\ud83d", "answer": 3, "meta": {"n": 1, "\ude00": True}, "id": "\ud83d"},
            {"question": asked, "answer": "3", "meta": {"n": "1"}},
            {"question": "q", "answer": "['\\ude00']", "meta": {"n": 2.5}, "level": None, "options": ["A"]}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second, third = data.load_problems(str(tmp_path))
    assert (first.question, first.id, first.row["meta"]) == ("a\ufffd", "\ufffd", {"n": 1, "\ufffd": True})
    assert (second.messages[0]["content"], third.answer, third.id) == ("\U0001f600\ufffd", "\ufffd", "a/2")
    columns = ("'answer' holds 1 numbers such as 3 and 2 texts such as '3'",
               "'meta.n' holds 2 numbers such as 1 and 1 texts such as '1'",
               "'options' is not asked: a question must hold its choices, and the answer be that of a completion")
    assert capsys.readouterr().err == "".join(f"{path}: column {said}\n" for said in columns) + (
        f"{path}: 1 of 3 rows hold U+FFFD in the place of a character that was cut or lost: {path}:1\n")
    assert data.Tokenizer(TOY).render("a\ud83d", "\ude00") == data.Tokenizer(TOY).render("a\ufffd", "\ufffd")


def test_rows_that_repeat_and_questions_with_several_answers_are_counted_in_one_line(tmp_path, capsys):
    rows = [{"question": f"q{i // 2}", "answer": f"{max(i, 2)}"} for i in range(6)]
    path = str(write(tmp_path / "a.jsonl", *rows, rows[0], rows[0]))
    for training, said in ((True, f"{path}: of 8 rows 3 repeat another one, and 2 have another answer to the same "
                                  "question; all are trained on\n"), (False, "")):
        assert len(data.load_problems(path, training=training)) == 8 and capsys.readouterr().err == said


def test_rows_of_the_hub_that_box_nothing_are_counted(monkeypatch, capsys):
    rows = [{"problem": "q", "solution": s} for s in (r"$\boxed{1}$", r"$\boxed{}$", r"$\boxed 2$", "")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **split: rows)
    assert [p.answer for p in data.load_problems("math_train")] == ["1", "2"]
    assert "2 of 4 rows box no answer and are left out" in capsys.readouterr().err


def edit(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_tokenizer_that_cannot_prompt_is_an_error(tmp_path):
    folder = write_tiny(tmp_path / "a")
    edit(folder, "tokenizer_config.json", chat_template=None)
    refuses("without a chat template, as base models do; set data.prompt to a plain", data.Tokenizer, folder)
    for template, said in (("{% for %}", "the chat template is not valid"),
                           ("{{ '\\ud83d' }}", "its chat template writes half a character; mend it")):
        (folder / "chat_template.jinja").write_text(template)
        refuses(said, data.Tokenizer, folder)
    (folder / "tokenizer.json").unlink()
    refuses("tokenizer.json not found; the model folder must hold the tokenizer", data.Tokenizer, folder)


def test_the_closing_token_is_the_first_special_one_behind_the_answer(tmp_path):
    folder = write_tiny(tmp_path)
    for behind, expected in (("<|im_end|>\\n", 2), (" .\\n<|im_end|><|endoftext|>", 2), (" .\\n", None)):
        edit(folder, "tokenizer_config.json",
             chat_template="{% for m in messages %}{{ m.content }}{{ '" + behind + "' }}{% endfor %}")
        assert data.Tokenizer(folder).closing_token() == expected


def test_every_epoch_is_a_permutation_and_no_prompt_is_skipped_at_its_end():
    history = PromptHistory(list(range(7)), AllPrompts(), seed=0, middle=0.5)
    drawn = [pair for _ in range(10) for pair in history.coming(3)]
    draws = PromptHistory(list(range(7)), AllPrompts(), seed=0, middle=0.5).draw(30)
    assert [(draw.epoch, draw.prompt) for draw in draws] == drawn == [(d.epoch, d.number) for d in draws]
    for epoch in range(4):
        assert sorted(i for e, i in drawn if e == epoch) == list(range(7))
    assert drawn == sorted(drawn, key=lambda place: place[0])
    assert len({tuple(epoch_order(7, 0, epoch)) for epoch in range(4)}) == 4
    assert tuple(epoch_order(7, 1, 0)) != tuple(epoch_order(7, 0, 0))


PROMPTS = [Prompt(f"q{i}", (1,), "1") for i in range(6)]


def history_of(pruning: Prompts, seed: int = 0) -> PromptHistory:
    return PromptHistory(PROMPTS, pruning, seed, middle=0.5)


def rolled(*rewards: list[float], prompts: list[Prompt] = PROMPTS, epoch: int = 0) -> Rolled:
    """One rollout of the first prompts with these rewards, 0 to 1; |A| stands for itself here."""
    reward_NG = torch.tensor(rewards, dtype=torch.float64)
    draws = [PromptDraw(p, epoch, number=PROMPTS.index(p)) for p in prompts[:len(rewards)]]
    adv_NG = reward_NG - reward_NG.mean(dim=1, keepdim=True)
    return Rolled() + Rolled(draws, [], as_rewards({"accuracy": reward_NG}, {"accuracy": 1.0}), adv_NG)


def remember(history: PromptHistory, *rewards: list[float], **given) -> None:
    history.record(rolled(*rewards, **given))


def test_the_history_counts_rollouts_in_a_row_without_difference():
    history = history_of(Greso())
    remember(history, [1, 1], [0, 0], [0, 1])
    remember(history, [1, 1], [0.1, 0.1], [1, 1], epoch=1)
    remember(history, [0, 0], [0, 1], [1, 1], epoch=2)
    first = history.remembered([0, 1, 2])
    easy, hard, size = (x_K.tolist() for x_K in (first.easy_K, first.hard_K, first.size_K))
    assert (easy, hard, size) == ([0, 0, 2], [1, 0, 0], [0, 0.5, 0])
    recall = history.remembered([1, 3])
    assert recall.mean == pytest.approx(0.5 / 3) and recall.size_K[0] == 0.5 and recall.size_K[1].isnan()
    assert not len(history_of(AllPrompts()).records)  # nobody asks, so checkpoints stay small


def test_a_rollout_that_shows_nothing_is_as_if_it_had_not_come_up():
    """One reward, or none, tells neither that a prompt is easy nor that it is hard."""
    nan = float("nan")
    history = history_of(Greso())
    nothing = rolled([nan, nan], [1, nan], epoch=1)
    history.record(nothing)
    history.adapt(nothing)
    assert np.isnan(history.records["size"]).all() and history.explore == pytest.approx((0.51, 0.51))
    told, alike = rolled([nan, nan], [1, nan], [1, 1], [0, 0], epoch=1), history_of(Greso())
    history.explore = (0.5, 0.5)
    for each, seen in ((history, told), (alike, rolled([1, 1], [0, 0], epoch=1))):
        each.record(seen)
        each.adapt(seen)
    assert history.explore == alike.explore and np.isnan(history.records["size"]).tolist() == [1, 1, 0, 0, 1, 1]


def test_a_turn_skipped_leaves_the_trace_and_is_counted():
    history = history_of(LowestRank(drop_prob=0.2, max_skips=2))
    remember(history, [1, 1], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1])
    passed = []
    for _ in range(3):
        draws = history.draw(6)
        passed += [draw.prompt.id for draw in draws if not draw.kept]
        assert len(draws) == 6 and {draw.weight for draw in draws} == {0.0, 1.0}
    assert passed[:2] == ["q0", "q0"] and len(passed) == 3 and passed[2] != "q0"
    assert history.records[0].item() == (0.0, 1, 2)
    remember(history, [0, 1])
    assert history.records[0].item()[1:] == (0, 0)


def test_prompts_are_kept_with_their_probability_and_the_weights_make_up_for_it():
    """z-tests over 3,000 epochs of 6 prompts, two of them below the mean; q5 was never rolled out."""
    history = history_of(BernoulliPrompts(drop_prob=0.7), seed=3)
    remember(history, [1, 1], [0, 1], [0, 1], [0, 0.2], [0, 1])
    draws = history.draw(18_000)
    weight = {prompt.id: [t.weight for t in draws if t.prompt is prompt] for prompt in PROMPTS}
    for i, expected in (("q0", 0.3), ("q1", 1), ("q2", 1), ("q3", 0.3), ("q4", 1), ("q5", 1)):
        assert {round(t.prob, 12) for t in draws if t.prompt.id == i} == {expected}
        share = sum(w > 0 for w in weight[i]) / 3000
        assert abs(share - expected) <= 4 * (expected * (1 - expected) / 3000) ** 0.5
        assert max(weight[i]) == pytest.approx(1 / expected)
    assert history.place == 18_000
    pairs = zip(weight["q0"], weight["q3"], strict=True)
    both = sum(a > 0 and b > 0 for a, b in pairs) / 3000
    assert abs(both - 0.09) < 4 * (0.09 * 0.91 / 3000) ** 0.5  # independent of one another


def test_greso_replaces_what_it_passes_over():
    """Skip frequencies against 1 - max(p^z, 0.01), and as many kept as were asked for, at weight 1."""
    history = history_of(Greso())
    for i, prompt in enumerate(PROMPTS):
        for _ in range(2 * i):
            remember(history, [1, 1], prompts=[prompt])
    draws = history.draw(6000)
    assert sum(t.kept for t in draws) == 6000 and {t.weight for t in draws} == {0.0, 1.0}
    for i, prompt in enumerate(PROMPTS):
        mine, expected = [t for t in draws if t.prompt is prompt], max(0.5 ** (2 * i), 0.01)
        assert len(mine) > 3000 and abs(sum(t.kept for t in mine) / len(mine) - expected) <= (
            4 * (expected * (1 - expected) / len(mine)) ** 0.5)
    assert history.place == len(draws) and draws[-1].kept


def test_a_history_survives_a_checkpoint():
    from leaves.windows.join import Piece, Pool, Turn
    from leaves.windows.settings import Windows
    history, other = (history_of(LowestRank(drop_prob=0.5, max_skips=2)) for _ in range(2))
    remember(history, [1, 1], [0, 1])
    history.draw(4)
    history.explore = (0.3, 0.4)
    sampler = Sampler(None, None, config.Rollout(4, 2, 8), None, 0)
    pool, other_pool = (Pool(history_of(AllPrompts()), sampler, Windows(2, 2, 2)) for _ in range(2))
    pool.draw(1)
    so_far = Piece(Sample((5, 6), (-0.1, -1 / 3), False)), Piece(Sample((5,), (-0.5,), True))
    pool.begun = [Turn(PROMPTS[1], 3, 0.5, 2.0, number=1, copy=2, age=1, so_far=so_far)]
    for saved, loaded in ((history, other), (pool, other_pool)):
        fields_of = [vars(one) | {"records": one.records.tobytes()} for one in (saved, loaded)]
        assert fields_of[0] != fields_of[1]
        file = io.BytesIO()
        torch.save(saved.state(), file)
        file.seek(0)
        loaded.restore(torch.load(file, weights_only=True))
        assert vars(loaded) | {"records": loaded.records.tobytes()} == fields_of[0]


def test_longer_prompts_are_left_out_only_where_that_is_asked_for(capsys):
    tokenizer = data.Tokenizer(TOY)
    problems = [Problem("a", "One?", "1"), Problem("b", "One and " * 40, "2"), Problem("c", "Two?", "2")]
    with pytest.raises(ConfigError, match=r"prompt b has \d+ tokens, more than data.max_prompt_tokens=40 \(1 of 3"):
        data.to_prompts(problems, tokenizer, None, 40)
    assert [p.id for p in data.to_prompts(problems, tokenizer, None, 40, drop_longer=True)] == ["a", "c"]
    assert "1 of 3 prompts have more than data.max_prompt_tokens=40 and are left out" in capsys.readouterr().err
    refuses("1 of 1 prompts do", data.to_prompts, problems[1:2], tokenizer, None, 40, drop_longer=True)
    tokenizer.render = lambda *_: ""
    with pytest.raises(ConfigError, match=r"prompt a has no tokens \(1 of 1 prompts do\): the chat template"):
        data.to_prompts(problems[:1], tokenizer, None, 40)


SHARED = ROOT.parent / "shared" / "data"


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data sets in {SHARED}")
@pytest.mark.parametrize("name", NAMED_SETS)
def test_every_named_set_is_whole(name, capsys):
    if not (SHARED / NAMED_SETS[name][1]).is_file():
        pytest.skip(f"no {NAMED_SETS[name][1]} in {SHARED}")
    problems = data.load_problems(name, str(SHARED))
    assert len(problems) == NAMED_SETS[name][0] and not capsys.readouterr().err
    assert all(p.level in ("1", "2", "3", "4", "5", "none", None) for p in problems)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data sets in {SHARED}")
@pytest.mark.parametrize(("name", "held_out", "expected"), [
    ("gsm8k_train", "gsm8k,math500,minerva", []), ("math_train", "math500,gsm8k,aime24", []),
    ("math_train", "olympiad", [f"math/train/intermediate_algebra/{n}.json" for n in (753, 1087)])])
def test_no_problem_of_gsm8k_or_math_is_taken_for_another(name, held_out, expected):
    """Two of MATH are OlympiadBench's, but for a comma and for how LaTeX is spelled."""
    problems, evaluated = (data.load_problems(names, str(SHARED)) for names in (name, held_out))
    kept = {p.id for p in data.drop_overlap(problems, evaluated)}
    assert [p.id for p in problems if p.id not in kept] == expected


def test_marked_rows_are_left_out_of_training_alone(tmp_path, capsys):
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(4)]
    rows[1]["overlaps_eval"], rows[2]["all_boxed"], rows[3]["all_boxed"] = ["other"], ["1", "2"], None
    path = str(write(tmp_path / "marked.jsonl", *rows))
    assert [p.id for p in data.load_problems(path, training=True)] == ["marked/0", "marked/3"]
    assert "1 of 4 problems are problems of an evaluation set and are left out" in capsys.readouterr().err
    assert len(data.load_problems(path)) == 4


ASKED = r'A train leaves at 9 and goes 1,240 km at $x^2 - 3$ km/h, $\frac12 \le x$; "when" does it arrive?'
PLEASE = "Please reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize("dressed", [
    ASKED, ASKED.upper(), ASKED.replace(" ", "  "), f"{ASKED} {PLEASE}", f"{PLEASE}\n\n{ASKED}", f"{ASKED}\n{PLEASE}",
    f"Question: {ASKED}\nAnswer:", f"Q: 1 + 1?\nA: 2\nQ: {ASKED}\nA:", f"<question>{ASKED}</question>", f"**{ASKED}**",
    f"“{ASKED}”", f"'{ASKED}'", f"## Problem\n{ASKED}", ASKED.replace('"', "''").replace("when", "``when"), ASKED[:-1],
    ASKED.replace("?", "."), ASKED.replace(";", "; ;"), ASKED.replace("km at", "km, at"), ASKED.replace("$", r"\(", 1),
    ASKED.replace("- 3", r"\,-\;3\!"), ASKED.replace("-", "−"), ASKED.replace("x^2", "x²"), ASKED.replace("9", "９"),
    ASKED.replace("?", "？"), ASKED.replace("a", "a\u200b"), ASKED.replace(" ", "\u00a0"),
    ASKED.replace("x^2 - 3", r"\left x^2 -3\right"), ASKED.replace("e", "ｅ"), ASKED.replace("1,240", "1240"),
    ASKED.replace("x^2", "x^{2}"), f"> {ASKED}", f"[INST] {ASKED} [/INST]", f"<｜User｜>{ASKED}<｜Assistant｜>",
    ASKED.replace(r"\frac", r"\dfrac"), ASKED.replace(r"\le", r"\leqslant")], ids=range(35))
def test_problems_that_are_evaluated_on_are_not_trained_on_however_they_are_dressed(dressed, capsys):
    """Whichever of the two is dressed, and whatever messages come before it."""
    other = Problem("o", f"{PLEASE} How many legs have 3 cats?", "12")
    for own, held_out in ((dressed, ASKED), (ASKED, dressed)):
        messages = tuple({"role": role, "content": text} for role, text in (
            ("system", PLEASE), ("user", "1 + 1?"), ("assistant", "2"), ("user", own)))
        problems = [Problem("a", own, "1"), other, Problem("b", own, "1", messages=messages)]
        assert data.drop_overlap(problems, [Problem("x", held_out, "2")]) == [other]
        assert "2 of 3 training problems are evaluated on and are left out" in capsys.readouterr().err
    refuses("data.train holds no problem that data.eval does not hold too", data.drop_overlap, problems[:1], problems)


@pytest.mark.parametrize(("one", "other"), [
    ("Compute 12 - 5.", "Compute 125."), ("Compute 1 + 2.", "Compute 1 + 2 + 3."), ("Compute 1.5.", "Compute 15."),
    ("Compute 5!", "Compute 5."), ("Compute 2³.", "Compute 23."), ("Find f'(2).", "Find f(2)."), ("Why?", "So? Why?"),
    ("Find (1,2).", "Find (12)."), ("Compute 2*3.", "Compute 2/3."), ("Find f''(2).", "Find f'(2)."), ("A", "A B")])
def test_problems_that_differ_in_a_sign_are_not_the_same(one, other):
    for own, held_out in ((one, other), (other, one)):
        assert data.drop_overlap([Problem("a", own, "1")], [Problem("x", held_out, "1")])


def test_a_named_set_that_is_not_whole_is_said_to_be_so(tmp_path, capsys):
    write(tmp_path / "aime24.jsonl", {"question": "q", "answer": "1"})
    assert [p.id for p in data.load_problems("aime24", str(tmp_path))] == ["aime24/0"]
    assert "aime24 holds 1 problems here, not 30" in capsys.readouterr().err


def test_gold_answers_that_cannot_be_read_are_named_and_only_their_spelling_is_right(capsys):
    """Without one that can be read, it is an error if accuracy counts."""
    problems = [Problem("fine", "q", r"\frac{1}{2}"), Problem("odd", "q", r"\frac{1}{"), Problem("n", "q", "7"),
                Problem("text", "q", "east"), Problem("code", "q", "1,2,?!")]
    name_unreadable("few", {p.id: p.answer for p in problems}, needed=True)
    assert capsys.readouterr().err == ("few: 2 of 5 gold answers cannot be read, and only the same spelling counts as "
                                       "right: odd, code\n")
    unread = {"a": "\\boxed{", "b": "\\frac{1}{"}
    with pytest.raises(VerifyError, match="own: none of the 2 gold answers can be read, for example .* of a"):
        name_unreadable("own", unread, needed=True)
    name_unreadable("own", unread, needed=False)
    respelt, *others = (finish_verdict(begin_verdict(r"\frac{1}{", answer)) for answer in (r"\frac{1}{ ", "1", ""))
    assert respelt == "right" and "right" not in others
