"""Damaged or hostile files: each ends in one line that names the file, the key and what to do. Nothing is silent."""

import errno
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TOY, write_tiny
from safetensors.torch import load_file, save_file
from test_data import edit
from test_eval import written

import config
import data
import eval as evaluation
from config import ConfigError
from infra import dist, export, lines, results, trial, weights
from infra.runfolder import RunLog
from infra.signals import exit_status
from infra.tokenizer import Tokenizer
from infra.trial import try_first
from model import load_model
from records import Problem

LIMIT = 1500  # characters of a line: a value that is longer is shortened
LONG_HEADER = b'{"a":"' + b"x" * 9_992 + b'"}'  # of 10,000 bytes; the library's error quotes it


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """Programs close the process group, which the tests behind them need."""
    monkeypatch.setattr(dist, "close", lambda: None)


def said_by(function, *given) -> str:
    with pytest.raises(ConfigError) as raised:
        function(*given)
    said = str(raised.value)
    assert "\n" not in said and len(said) < LIMIT, said
    return said


def use(folder: Path) -> None:
    """Load a model and its tokenizer as training does, and render a prompt."""
    source = weights.find_model(str(folder))
    tokenizer = Tokenizer(source)
    load_model(source, torch.float32, torch.device("cpu"))
    tokenizer.encode([tokenizer.render("1+1", None)])


@pytest.fixture
def model(tmp_path) -> Path:
    return shutil.copytree(TOY, tmp_path / "model")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", {"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
    ("config.json", {"num_key_value_heads": 3}, "num_attention_heads=4, no multiple of num_key_value_heads=3"),
    ("config.json", {"hidden_size": 10**9}, r"weights do not match config.json: .*, 1000000000\]"),
    ("config.json", {"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000 must be in \[1, 10000\]"),
    ("config.json", {"num_hidden_layers": 10**4}, "layers.9999.mlp.down_proj.weight is nothing, where it says"),
    ("config.json", {"vocab_size": 100}, "weights do not match config.json"),
    ("config.json", {"tie_word_embeddings": False}, "lm_head.weight: nothing there"),
    ("config.json", {"rms_norm_eps": None}, "missing key 'rms_norm_eps'|rms_norm_eps=None must be"),
    ("config.json", {"head_dim": 3}, "a head_dim of 3, which is odd"),
    ("config.json", {"rope_scaling": {"rope_type": "llama3"}}, "missing key 'factor'"),
    ("config.json", {"rope_scaling": [1]}, "rope_scaling="),
    ("config.json", {"model_type": ["qwen2"]}, "model_type="),
    ("config.json", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
    ("config.json", {"eos_token_id": 477}, "eos_token_id=477 must be one or several of the 477 tokens"),
    ("model.safetensors", b"", "cannot be read .header too small|cannot be read"),
    ("model.safetensors", None, "model.safetensors cannot be read"),  # its first half
    ("model.safetensors", (10_000).to_bytes(8, "little") + LONG_HEADER,
     "model.safetensors cannot be read .*x{100}[)]; download"),
    ("model.safetensors.index.json", b"{}", "weight_map=None must be a mapping"),
    ("model.safetensors.index.json", b'{"weight_map": {}}', "index.json names no weights; download it again"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "weight_map.a=1 must be a text"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": "../model/model.safetensors"}}', "names ../.* missing"),
    ("config.json", b"[]", "holds no JSON object"), ("config.json", b"\xff{}", "config.json: not valid JSON"),
    ("config.json", b"[" * 100_000, "config.json: not valid JSON"),
    ("tokenizer_config.json", b"[]", "holds no JSON object"),
    ("tokenizer.json", b"[]", "is not a tokenizer"), ("tokenizer.json", b"\xff", "is not a tokenizer"),
    ("generation_config.json", b'{"eos_token_id": "a"}', "eos_token_id='a' must be one or several of the 477 tokens"),
    ("generation_config.json", b'{"eos_token_id": -1}', "eos_token_id=-1 must be one")])
def test_a_file_of_a_model_that_is_damaged_is_named(name, content, message, model):
    """A mapping changes the file's settings; None leaves its first half."""
    path = model / name
    if name.endswith("index.json"):
        (model / "model.safetensors").rename(model / "model-1.safetensors")
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2] if content is None else content)
    said = said_by(use, model)
    assert re.search(message, said) and str(model) in said and name in said, said


@pytest.mark.parametrize("template", ["{{1/0}}", "{{raise_exception('no')}}", "{% for i in range(10**9) %}{% endfor %}",
                                      "{% macro f() %}{{f()}}{% endmacro %}{{f()}}", "{% include 'a' %}",
                                      "{% import 'a' as b %}"])
def test_a_chat_template_that_fails_says_how(template, model):
    edit(model, "tokenizer_config.json", chat_template=template)
    assert "the chat template fails: " in said_by(use, model)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "hf"
    export.export(load_model(TOY, torch.float32, torch.device("cpu")), TOY, out)
    return out


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "files.json"])
def test_a_file_of_an_export_that_is_not_as_it_was_written_is_named(name, exported, tmp_path):
    model = shutil.copytree(exported, tmp_path / "model")
    use(model)
    content = bytearray((model / name).read_bytes())
    content[-3] ^= 1
    (model / name).write_bytes(content)
    said = said_by(use, model)
    assert f"{model}: {name}" in said and "export it again, or remove files.json to take it as it is" in said, said


def test_a_link_out_of_a_model_folder_is_refused_but_for_the_hubs_cache(model, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(model, snapshot)
    (snapshot / "tokenizer.json").rename(blobs / "c0ffee")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/c0ffee")
    use(snapshot)
    (model / "circle.txt").symlink_to("circle.txt")  # which has no content that could lie elsewhere
    use(model)
    (model / "notes.txt").symlink_to("/etc/passwd")
    assert f"{model}/notes.txt is a link to /etc/passwd, outside of its folder" in said_by(use, model)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda file: file["model"].update(vocab={}, merges=[]), "loses text|cuts up|has no tokens"),
    (lambda file: file["model"]["vocab"].update(dict.fromkeys([*file["model"]["vocab"]][10:200], 5)), "loses text"),
    (lambda file: file.update(added_tokens=[]), r"its tokenizer cuts up '<\|im_(start|end)\|>'"),
    (lambda file: file.update(normalizer={"type": "Replace", "pattern": {"String": "1"}, "content": ""}), None),
], ids=["empty", "twice", "no special tokens", "a normalizer"])
def test_a_tokenizer_that_loses_text_is_refused(damage, message, model):
    """A normalizer may: it is part of the tokenizer that the model was trained with."""
    path = model / "tokenizer.json"
    file = json.loads(path.read_text())
    damage(file)
    path.write_text(json.dumps(file))
    problems = [Problem("q", "What is 31 + 15?", "46")]
    if message is None:
        prompt, = data.to_prompts(problems, Tokenizer(model), None, 512)
        assert prompt.ids
    else:
        said = said_by(lambda: data.to_prompts(problems, Tokenizer(model), None, 512))
        assert re.search(message, said) and str(model) in said, said


# Ten lists, each of nine of the one before it.
LISTS = ["&a0 [x, x, x, x, x, x, x, x, x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]


@pytest.mark.parametrize(("text", "message"), [
    (f"base: grpo_toy.yaml\nseed: [{', '.join(LISTS)}]\n".encode(), r"seed=\[.*\.\.\.\] must be a whole number"),
    (f"base: grpo_toy.yaml\ndata: {{template: {{k: [{', '.join(LISTS)}]}}}}\n".encode(),
     "data.template.k stands for more than 10000 values; write fewer, or fewer aliases"),
    (b"# \xe9\n", "is not valid yaml: unacceptable character"),
    (b"a: " + b"[" * 3_000, "is not valid yaml: maximum recursion"),
    (b"steps: " + b"1" * 5000, "is not valid yaml: Exceeds the limit"),
    (b"base: grpo_toy.yaml\nsteps: [" + b"xxxxxxxxxx, " * 1000 + b"]\n", r"steps=\[.*\.\.\.\] must be a whole")])
def test_a_config_that_is_hostile_is_named(text, message, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    assert re.search(message, said_by(config.load, path))


def spoil(path: Path, keys: tuple, value: object) -> None:
    """Change a value of the last line of a log, under these keys; None removes it."""
    log = lines.read_log(path)
    inner = log[-1]
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    lines.rewrite_log(path, log)


COMPLETION = {"text": "a", "tokens": 1, "finished": True, "reward": 1.0, "components": {"accuracy": 1.0},
              "advantage": 0.0, "kept": True, "prob": 1.0, "weight": 1.0}
PROBLEM = {"set": "few", "id": "a", "question": "q", "gold": "4", "responses": [{"text": "x", "verdict": "right"}]}


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> Path:
    """A run folder with a line or two in each of its logs."""
    report = pytest.importorskip("report")
    write_run = pytest.importorskip("leaves.page.test_report").write_run
    folder = write_run(tmp_path_factory.mktemp("logged") / "run", [0.2, 0.4])
    lines.rewrite_log(folder / "samples.jsonl", [{"step": 1, "id": "a", "prompt": "p", "gold": "1",
                                                  "completions": [COMPLETION]}])
    lines.rewrite_log(folder / "decisions.jsonl", [{"step": 1, "prompts": [{"right": [1, 0],
                                                                            "completion_weight": [1.0, 0]}]}])
    report.write_report([folder], folder.parent / "page")  # as it is, it has a page
    return folder


@pytest.mark.parametrize(("name", "keys", "value", "message"), [
    ("metrics.jsonl", ("step",), None, ":3: 'step' is missing"),
    ("metrics.jsonl", ("step",), "1", ":3: 'step' is '1' and must be a number"),
    ("metrics.jsonl", ("time/eval",), "x", ":3: 'time/eval' is 'x' and must be a number"),
    ("metrics.jsonl", ("eval/few/low",), None, ":3: 'eval/few/low' is missing"),
    ("samples.jsonl", ("completions", 0, "reward"), None, ":1: 'reward' is missing"),
    ("samples.jsonl", ("completions",), 3, " holds a value that no run writes .TypeError: 'int' object"),
    ("decisions.jsonl", ("prompts", 0, "completion_weight"), [1.0], " holds a value that no run writes .ValueError")])
def test_a_line_of_a_log_that_was_edited_is_named(name, keys, value, message, logged, tmp_path, monkeypatch):
    report, charts = pytest.importorskip("report"), pytest.importorskip("leaves.page.charts")
    monkeypatch.setattr(charts, "draw_svg", lambda rows, score="": "")  # most of the time of a page
    folder = shutil.copytree(logged, tmp_path / "run")
    spoil(folder / name, keys, value)
    said = said_by(report.write_report, [folder], tmp_path / "page")
    assert re.search(f"^{folder / name}{message}", said) and "bring it back, or do without" in said, said


def test_a_run_does_not_go_on_from_a_log_without_steps(logged, tmp_path):
    folder = shutil.copytree(logged, tmp_path / "run")
    spoil(folder / "samples.jsonl", ("step",), "1")
    said = said_by(RunLog(folder).resume, 1, config.load(folder / "config.yaml", [f"out={folder}"]))
    assert said.startswith(f"{folder / 'samples.jsonl'} holds a value that no run writes (TypeError: ")


@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b'{"step": 3, "rew\n', b"\0\0\0\0\n\0\0", b"\n", b"[1]\n",
                                  b'{"step": "\xff"}\n'])
def test_what_is_torn_at_the_end_of_a_log_is_left_out_and_in_the_middle_named(torn, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert lines.read_log(path) == lines.mend_log(path) == [{"step": 1}, {"step": 2}]
    lines.append(path, {"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    path.write_bytes(b'{"step": 1}\n' + (torn.strip() or b"{") + b'\n{"step": 3}\n')
    assert f"{path}:2 is no JSON object, though lines behind it are" in said_by(lines.read_log, path)


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path):
    """A surrogate cannot be written: as on a full disk, the write fails when it has begun."""
    path = tmp_path / "config.yaml"
    path.write_text("steps: 1")
    with pytest.raises(UnicodeEncodeError):
        lines.replace(path, "steps: 2\ud800")
    assert path.read_text() == "steps: 1"


@pytest.mark.parametrize("name", ["EIO", "ENOENT", "ESTALE", "EBUSY", "ENOTEMPTY", "EXDEV", "EROFS"])
def test_any_error_of_the_file_system_is_one_line_with_the_file(name, tmp_path, capsys, monkeypatch):
    number = getattr(errno, name)

    def failing(old, new):
        raise OSError(number, os.strerror(number), str(old), None, str(new))

    monkeypatch.setattr(os, "replace", failing)
    assert exit_status(lambda: lines.rewrite_log(tmp_path / "metrics.jsonl", [{"step": 1}]), lambda: "go on") == 2
    said, = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {os.strerror(number)}: '{tmp_path}/") and said.endswith("make room there; go on")


def test_an_error_of_reading_names_the_file_though_python_does_not(tmp_path, capsys, monkeypatch):
    def failing(path, *given, **settings):
        raise OSError(errno.EIO, "Input/output error")  # as of read(), which has no name

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(Path, "read_bytes", failing)
    assert exit_status(lambda: lines.read_log(tmp_path / "metrics.jsonl")) == 2
    assert f"error: Input/output error: '{tmp_path}/metrics.jsonl'" in capsys.readouterr().err


def test_a_disk_that_is_full_in_an_export_is_one_line_and_what_was_there_stays(tmp_path, capsys):
    policy, out = load_model(TOY, torch.float32, torch.device("cpu")), tmp_path / "hf"
    export.export(policy, TOY, out)
    before = (out / "model.safetensors").read_bytes()
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
    try:
        assert exit_status(lambda: export.export(policy, TOY, out)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    said, = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and f"{out}.unfinished" in said
    assert (out / "model.safetensors").read_bytes() == before


def test_a_bug_has_its_traceback_and_before_it_how_to_go_on(capsys):
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: 1 / 0, lambda: "go on")
    assert capsys.readouterr().err == "once what follows is mended: go on\n"


def test_control_characters_of_texts_are_written_out_and_bars_still_move(capsys):

    def program():
        print("é name\ud83d\0 \x1b]0;owned\x07 \x9b2J \u202egnp\u2066 \x7f over\rwritten\ttab")
        for move in ("\r", "\n", "\x1b[A", "\n\x1b[A\r  5%"):
            print(move, end="", file=sys.stderr)
        raise ConfigError("id '\x1b[2J'")

    assert exit_status(program) == 2
    out, err = capsys.readouterr()
    assert out == "é name\\ud83d\\x00 \\x1b]0;owned\\x07 \\x9b2J \\u202egnp\\u2066 \\x7f over\\rwritten\ttab\n"
    assert err == "\r\n\x1b[A\n\\x1b[A\\r  5%error: id '\\x1b[2J'\n"


@pytest.mark.parametrize(("keys", "value", "message"), [
    (("results", "few", "problems", 0, "responses", 0, "tokens"), None, "KeyError: 'tokens'"),
    (("results", "few", "problems", 0, "responses", 0, "tokens"), "x", "holds a value that no run writes"),
    (("results", "few", "problems", 0, "responses"), [], "all problems of few must have as many responses"),
    (("results", "few", "problems", 0, "responses", 0, "text"), 3, "judged alike, and texts"),
    (("results", "few", "problems", 1, "gold"), 3, "judged alike, and texts"),
    (("results", "few", "problems"), [], "few has 0 problems and its head 2"),
    (("head", "sets", "few", "count"), 3, "few has 2 problems and its head 3"),
    (("head", "sets", "few", "count"), [4] * 1000, "its head [4, 4, 4, 4, 4, 4, ...]; the file was damaged"),
    (("head", "sets", "few", "count"), None, "few has 2 problems and its head None"),
    (("head",), None, "is not a result of eval.py --out"), (("head",), [], "is not a result of eval.py --out"),
    (("results", "few"), 3, "holds a value that no run writes")])
def test_a_result_that_was_edited_is_named(keys, value, message, tmp_path):
    path = Path(written(tmp_path / "result.json", "right", "wrong"))
    assert results.read_finished(path, head := json.loads(path.read_text())["head"])["results"]["few"]["count"] == 2
    lines.rewrite_log(path, [json.loads(path.read_text())])
    spoil(path, keys, value)
    said = said_by(results.read_finished, path, head)
    assert message in said and str(path) in said and "bring it back" in said, said


@pytest.mark.parametrize("spoilt", [lambda t: t.masked_fill(t == t.max(), torch.inf),
                                    lambda t: t.mul(100).to(torch.int8), lambda t: t.to(torch.float8_e4m3fn)],
                         ids=["inf", "int8", "float8"])
def test_weights_that_are_no_numbers_are_not_evaluated(spoilt, tmp_path, command, capsys):
    model = shutil.copytree(TOY, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: spoilt(tensors[name])}, model / "model.safetensors")
    assert command(evaluation, "--model", model, "--data", ROOT / "toy" / "test.jsonl") == 2
    assert f"error: {model}: {name}, of " in capsys.readouterr().err


@pytest.mark.slow
def test_a_tokenizer_that_explodes_is_one_line(tmp_path, monkeypatch):
    """Three replacements, each of a letter by a thousand of them."""
    more = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    folder = write_tiny(tmp_path / "model")
    edit(folder, "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [more] * 4})
    monkeypatch.setattr(trial, "GIB", 1)
    with pytest.raises(ConfigError, match="takes more than 15 s of computing or 1 GiB of memory, or ends the process"):
        data.to_prompts([Problem("q", "a banana", "1")], data.Tokenizer(folder), None, 512)


def test_a_trial_frees_nothing_of_the_program():
    """Rubbish of the program's may own threads, a process group say, and its end would wait for them for ever."""
    program = os.getpid()

    class Rubbish:
        def __init__(self):
            self.itself = self

        def __del__(self):
            if os.getpid() != program:
                os._exit(9)

    gc.collect()
    gc.disable()
    try:
        Rubbish()
        gc.enable()
        assert len(try_first("a list", lambda: [[] for _ in range(10**5)])) == 10**5
    finally:
        gc.enable()
