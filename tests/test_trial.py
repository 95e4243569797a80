"""What a downloaded tokenizer can make a program do is bounded, and settings hold whole characters."""

import gc
import json
import os

import pytest
from conftest import toy_config, write_tiny

import data
from config import ConfigError
from infra import trial
from infra.trial import try_first
from records import Problem


def with_normalizer(folder, normalizer: dict):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    return folder


@pytest.mark.slow
def test_a_tokenizer_that_explodes_is_one_line(tmp_path, monkeypatch):
    """Three replacements, each of a letter by a thousand of them."""
    more = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    folder = with_normalizer(write_tiny(tmp_path / "model"), {"type": "Sequence", "normalizers": [more] * 4})
    monkeypatch.setattr(trial, "GIB", 1)
    with pytest.raises(ConfigError, match="takes more than 15 s of computing or 1 GiB of memory, or ends the process"):
        data.to_prompts([Problem("q", "a banana", "1")], data.Tokenizer(folder), None, 512)


def test_half_a_character_in_a_setting_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="rollout.stop.* holds half a character; write it as UTF-8"):
        toy_config(tmp_path / "run", r'rollout.stop=["\ud800"]')


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
