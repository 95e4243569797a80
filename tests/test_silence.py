"""Nothing goes wrong in silence: other inputs than a run began with, and weights or rows that are no numbers."""

import json
import math
import shutil
import sys

import pyarrow.parquet
import pytest
import torch
from conftest import ROOT, TOY, toy_config, weights
from safetensors.torch import load_file, save_file

import eval as evaluation
import train
from config import ConfigError
from data import load_problems
from infra import dist, lines

SHORT = ["steps=1", "rollout.max_new_tokens=8", "eval.max_new_tokens=8"]


# ---- a run goes on with what it began with

@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of one step in a folder of its own, with its model and data."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(TOY, folder / "model")
    for name in ("train", "test"):
        lines = (ROOT / "toy" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:12]))
    train.train(going(folder))
    return folder


def going(folder, *settings: str):
    return toy_config(folder / "run", *SHORT, f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}",
                      f"data.eval={folder / 'test.jsonl'}", *settings)


def in_another_order(text: str) -> str:
    return "".join(reversed(text.splitlines(keepends=True)))


def with_one_more_word(text: str) -> str:
    return json.dumps(json.loads(text) | {"one_more": 1})


@pytest.mark.parametrize(("name", "change", "setting"), [
    ("train.jsonl", in_another_order, r"12 prompts of sha256 \w{16} at data.train, where there are now 12 prompts"),
    ("train.jsonl", lambda text: text[:text.rindex("{")], "12 prompts .* at data.train, where there are now 11"),
    ("test.jsonl", in_another_order, r"12 prompts of sha256 \w{16} at data.eval .test., where"),
    ("model/generation_config.json", with_one_more_word, r"json and jinja files of sha256 \w{16} at model.path, where"),
    ("model/tokenizer_config.json", with_one_more_word, "json and jinja files .* at model.path, where"),
])
def test_a_run_that_finds_other_inputs_does_not_go_on(name, change, setting, begun):
    path = begun / name
    before = path.read_text()
    path.write_text(change(before))
    try:
        with pytest.raises(ConfigError, match=f"step_000001 was trained with {setting}.*or begin another run"):
            train.train(going(begun, "steps=2"), resume="always")
    finally:
        path.write_text(before)


def test_a_run_goes_on_from_copies_and_with_less_to_evaluate_on(begun, tmp_path):
    shutil.copytree(begun / "run", tmp_path / "run")
    cfg = toy_config(tmp_path / "run", *SHORT, f"model.path={begun / 'model'}", f"data.train={begun / 'train.jsonl'}",
                     f"data.eval={begun / 'test.jsonl'}", "steps=2", "eval.limit=3")
    went_on = weights(train.train(cfg, resume="always"))
    assert went_on.keys() and json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "finished"


# ---- what is no number

@pytest.mark.parametrize("spoilt", [lambda t: t.mul(torch.nan), lambda t: t.masked_fill(t == t.max(), torch.inf),
                                    lambda t: t.mul(100).to(torch.int8)], ids=["nan", "inf", "int8"])
def test_weights_that_are_no_numbers_are_not_evaluated(spoilt, tmp_path, monkeypatch, capsys):
    model = shutil.copytree(TOY, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: spoilt(tensors[name])}, model / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", str(model), "--data", str(ROOT / "toy" / "test.jsonl")])
    monkeypatch.setattr(dist, "close", lambda: None)
    assert evaluation.main() == 2
    assert f"error: {model}: {name}, of " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_answer_that_is_not_a_number_is_an_empty_cell(name, tmp_path):
    """As pandas writes one where the others of its column are numbers."""
    rows, path = [{"question": "a", "answer": 1.5}, {"question": "b", "answer": math.nan}], tmp_path / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert "NaN" in path.read_text()
    with pytest.raises(ConfigError, match="rows.*[1-2]: .*column 'answer' is empty; mend or remove the line"):
        load_problems(str(path))


# ---- files that a dying process or machine has left

@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b'{"step": 3, "rew\n', b"\0\0\0\0\n\0\0", b"\n", b"[1]\n",
                                  b'{"step": "\xff"}\n'])
def test_what_is_torn_at_the_end_of_a_log_is_left_out(torn, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert lines.read(path) == lines.mended(path) == [{"step": 1}, {"step": 2}]
    lines.append(path, {"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("torn", [b"\0\0", b"{", b"[1]"])
def test_a_line_that_is_torn_in_the_middle_is_named(torn, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn + b'\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=f"{path}:2 is no JSON object, though lines behind it are"):
        lines.read(path)


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path):
    """A surrogate cannot be written: as on a full disk, the write fails when it has begun."""
    path = tmp_path / "config.yaml"
    path.write_text("steps: 1")
    with pytest.raises(UnicodeEncodeError):
        lines.replace(path, "steps: 2\ud800")
    assert path.read_text() == "steps: 1"


def test_a_run_whose_folder_is_removed_says_so(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path / 'run'} is gone, though a run was writing there"):
        lines.append(tmp_path / "run" / "metrics.jsonl", {"step": 1})
