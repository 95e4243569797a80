"""Inputs that nobody meant: each ends in one line that names the file, the key and what to do."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TOY

import config
import data
from config import ConfigError
from infra import formats, lines, results, weights
from infra.tokenizer import Tokenizer
from model import load_model

LIMIT = 1500  # characters of a line: a value that is longer is shortened


def said_by(function, *given) -> str:
    with pytest.raises(ConfigError) as raised:
        function(*given)
    said = str(raised.value)
    assert "\n" not in said and len(said) < LIMIT, said
    return said


# ---- model folders

def use(folder: Path) -> None:
    """Load a model and its tokenizer as training does, and render a prompt."""
    source = weights.find_model(str(folder))
    tokenizer = Tokenizer(source)
    load_model(source, torch.float32, torch.device("cpu"))
    tokenizer.encode([tokenizer.render("1+1", None)])


@pytest.fixture
def model(tmp_path) -> Path:
    return shutil.copytree(TOY, tmp_path / "model")


@pytest.mark.parametrize(("change", "message"), [
    ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4, no multiple of num_key_value_heads=3"),
    ({"hidden_size": -4}, "hidden_size=-4 must be at least 1"),
    ({"hidden_size": "a"}, "hidden_size='a' must be a whole number"),
    ({"hidden_size": None}, "hidden_size=None must be a whole number"),
    ({"num_hidden_layers": 1.5}, "num_hidden_layers=1.5 must be a whole number"),
    ({"vocab_size": True}, "vocab_size=True must be a whole number"),
    ({"hidden_size": 10**9}, r"weights do not match config.json: they have 4 layers and .*, 1000000000\)"),
    ({"intermediate_size": 10**12}, "weights do not match config.json"),
    ({"num_hidden_layers": 10**9}, "weights do not match config.json: they have 4 layers .* it says 1000000000 and"),
    ({"vocab_size": 100}, "weights do not match config.json"), ({"head_dim": 3}, "a head_dim of 3, which is odd"),
    ({"rope_theta": "abc"}, "rope_theta='abc' must be a finite number"),
    ({"rope_theta": -1}, "rope_theta=-1 must be above 0"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "missing key 'factor'"), ({"rope_scaling": [1]}, "rope_scaling="),
    ({"rope_parameters": [1]}, "rope_parameters="), ({"layer_types": 3}, "layer_types=3 must be a list"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' must be a finite number"),
    ({"torch_dtype": [1]}, "torch_dtype="), ({"model_type": ["qwen2"]}, "model_type="),
    ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a finite number"),
    ({"max_position_embeddings": "x"}, "max_position_embeddings='x' must be a whole number"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
    ({"eos_token_id": 477}, "eos_token_id=477 must be one or several of the 477 tokens"),
])
def test_a_config_of_a_model_that_says_nonsense_is_named(change, message, model):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert re.search(message, said := said_by(use, model)) and str(model) in said, said


@pytest.mark.parametrize(("name", "content", "message"), [
    ("model.safetensors", b"", "cannot be read .header too small|cannot be read"),
    ("model.safetensors", b"garbage" * 100, "model.safetensors cannot be read"),
    ("model.safetensors", None, "model.safetensors cannot be read"),  # its first half
    ("model.safetensors.index.json", b"{}", "missing key 'weight_map'"),
    ("model.safetensors.index.json", b"[]", "holds no JSON object"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": 1}}', "weight_map.a=1 must be a text"),
    ("model.safetensors.index.json", b'{"weight_map": [1]}', "weight_map=.* must be a mapping"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": "../model/model.safetensors"}}', "names ../.* missing"),
    ("config.json", b"[]", "holds no JSON object"), ("config.json", b"\xff{}", "config.json: not valid JSON"),
    ("config.json", b"[" * 100_000, "config.json: not valid JSON"),
    ("tokenizer_config.json", b"[]", "holds no JSON object"),
    ("tokenizer.json", b"[]", "is not a tokenizer"), ("tokenizer.json", b"\xff", "is not a tokenizer"),
    ("generation_config.json", b'{"eos_token_id": "a"}', "eos_token_id='a' must be one or several of the 477 tokens"),
    ("generation_config.json", b'{"eos_token_id": [[1]]}', "eos_token_id=.* must be one"),
    ("generation_config.json", b'{"eos_token_id": -1}', "eos_token_id=-1 must be one"),
    ("generation_config.json", b'{"eos_token_id": 1.5}', "eos_token_id=1.5 must be one"),
])
def test_a_file_of_a_model_that_is_damaged_is_named(name, content, message, model):
    path = model / name
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2] if content is None else content)
    assert re.search(message, said := said_by(use, model)) and name in said, said


@pytest.mark.parametrize("template", ["{{1/0}}", "{{1+'a'}}", "{% for i in range(10**9) %}{% endfor %}",
                                      "{% macro f() %}{{f()}}{% endmacro %}{{f()}}", "{% include 'a' %}",
                                      "{% import 'a' as b %}"])
def test_a_chat_template_that_fails_says_how(template, model):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    assert "the chat template fails: " in said_by(use, model)


# ---- rows, configs and results

@pytest.mark.parametrize(("line", "message"), [
    (b'{"question": "q", "answer": ' + b"1" * 5001 + b"}", "not valid JSON .Exceeds the limit"),
    (b'{"question": "\\ud800", "answer": "1"}', "not valid JSON .*surrogates not allowed"),
    (b'{"question": "q", "answer": "1", "id": "\\ud800"}', "not valid JSON .*surrogates not allowed"),
    (b"[" * 100_000, "not valid JSON .maximum recursion"),
    (b'{"question": "q", "answer": Infinity}', "column 'answer' is empty"),
])
def test_a_row_that_is_none_is_named_by_its_line(line, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "1"}\n' + line + b"\n")
    assert re.search(f"{path}:2: {message}", said_by(data.load_problems, str(path)))


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}\n')
    assert [problem.answer for problem in data.load_problems(str(path))] == ["1"]


@pytest.mark.parametrize(("text", "message"), [
    (b"# \xe9\n", "is not valid yaml: unacceptable character"),
    (b"a: " + b"[" * 20_000, "is not valid yaml: maximum recursion"),
    (b"steps: " + b"1" * 5000, "is not valid yaml: Exceeds the limit"),
    (b"base: grpo_toy.yaml\nsteps: [" + b"xxxxxxxxxx, " * 1000 + b"]\n", r"steps=\[.*\.\.\.\] must be a whole"),
])
def test_a_config_that_is_hostile_is_named(text, message, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    assert re.search(message, said_by(config.load, path))


def test_a_value_that_stands_for_gigabytes_is_shortened(tmp_path):
    """Ten lists, each of nine of the one before it."""
    lists = ["&a0 [x, x, x, x, x, x, x, x, x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
    (tmp_path / "run.yaml").write_text(f"base: grpo_toy.yaml\nseed: [{', '.join(lists)}]\n")
    assert re.search(r"seed=\[.*\.\.\.\] must be a whole number", said_by(config.load, tmp_path / "run.yaml"))


@pytest.mark.parametrize("content", [
    b'{"head": null, "results": {}}', b'{"head": {"sets": {}}, "results": {"a": {}}}', b"[]", b"\xff\xfe{",
    b'{"head": {"sets": {}}, "results": []}'])
def test_what_is_no_result_is_named(content, tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    assert str(path) in said_by(results.read_result, path)


def test_an_evaluation_is_not_written_over_a_folder(tmp_path):
    assert "is a folder; name the file" in said_by(results.places, ["model"], tmp_path)


# ---- logs

GROUP = {"step": 1, "id": "a", "prompt": "p", "gold": None}
PROBLEM = {"set": "few", "id": "a", "question": "q", "gold": "4"}


@pytest.mark.parametrize(("require", "line", "message"), [
    (formats.ended, {"state": 3}, "state is 3 and must be str"),
    (formats.stepped, {"step": "1"}, "step is '1' and must be int"),
    (formats.stepped, {"step": 2**63}, "step is 9223372036854775808 and must be int"),
    (formats.measured, {"loss": 1.0}, "step is missing and must be int"),
    (formats.measured, {"step": 1, "loss": "1"}, "loss is '1' and must be int or float or NoneType"),
    (formats.sampled, GROUP | {"completions": [3]}, r"completions\[0\]: text is missing and must be str"),
    (formats.evaluated, PROBLEM | {"responses": []}, r"responses\[0\] is None and must be dict"),
    (formats.evaluated, PROBLEM | {"responses": [{"text": "x"}]}, r"responses\[0\]: reward is missing"),
    (formats.evaluated, PROBLEM | {"responses": [{"text": "x", "verdict": "right"}, {"text": "x"}]},
     r"responses\[1\]: verdict is missing"),
    (formats.decided, {"step": 1, "prompts": [{"right": [1, 0], "completion_weight": [1.0]}]},
     r"prompts\[0\] has 1 weights and not as many rewards"),
    (formats.decided, {"step": 1, "prompts": [{"right": [1, "a"]}]}, r"right\[1\] is 'a' and must be int or float"),
])
def test_a_line_of_a_log_that_lacks_something_is_named(require, line, message, tmp_path):
    path = tmp_path / "log.jsonl"
    lines.append(path, line)
    said = said_by(lines.read, path, require)
    assert re.search(message, said) and said.startswith(f"{path}:1: ") and "bring it back, or do without" in said, said


def test_a_result_whose_problems_are_not_alike_is_named(tmp_path):
    def write(*counts: int, of: dict | None = None, **more) -> Path:
        response = {"id": "a", "k": 0, "tokens": 1, "finished": True, "text": "x", "reward": 0.5}
        problems = [{"id": "a", "gold": None, "responses": [response] * count} for count in counts]
        path = tmp_path / "result.json"
        sets = {"few": {"data": "0", "count": len(counts)} if of is None else of}
        path.write_text(json.dumps({"head": {"sets": sets}, "results": {"few": {"problems": problems} | more}}))
        return path

    results.read_result(write(2, 2, reward_range=[0, 1]))
    for path in (write(2, 1), write(), write(0)):
        assert "results.few" in said_by(results.read_result, path)
        assert "bring it back" in said_by(results.read_result, path)
    assert "head.sets.few: data is missing" in said_by(results.read_result, write(1, of={}))
    assert "head.sets.few: data is missing" in said_by(results.read_result, write(1, of="data"))
    other = {"data": "0", "count": 3}
    assert "few has 1 problems and its head 3" in said_by(results.read_result, write(1, of=other))
    assert "reward_range must be two numbers" in said_by(results.read_result, write(1, reward_range=[1]))
