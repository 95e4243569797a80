"""A system prompt from a file of a release that is made up here: the text that its program sees, or an error."""

import hashlib
import json

import pytest
import yaml
from conftest import refuses

import config

TEXT = "Think first.\nThen write \\boxed{{ANSWER}} (without quotes). "  # its last blank is part of it
HASH = hashlib.sha256(TEXT.encode()).hexdigest()
SETTING = "data.system_prompt"


@pytest.fixture
def release(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"data": {"prompts": {"system": TEXT, "tokens": 512}}}))
    (tmp_path / "recipe.json").write_text(json.dumps({"data": {"prompts": {"system": TEXT}}}))
    (tmp_path / "recipe.py").write_text(f"import absent\n\nif True:\n    SYSTEM = {TEXT[:9]!r} {TEXT[9:]!r}\n"
                                        "OTHER = f'{SYSTEM}'\n")
    (tmp_path / "prompt.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize(("file", "field"), [
    ("recipe.yaml", "data.prompts.system"), ("recipe.json", "data.prompts.system"), ("recipe.py", "SYSTEM"),
    ("prompt.txt", None)])
def test_a_config_and_set_read_the_text_and_a_saved_config_holds_it(file, field, release):
    section = {"file": str(release / file), "sha256": HASH} | ({"field": field} if field else {})
    own = release / "own.yaml"
    own.write_text(yaml.safe_dump({"base": "cppo_toy.yaml", "data": {"system_prompt": section}}))
    by_set = config.load("cppo_toy.yaml", [f"{SETTING}.{key}={value}" for key, value in section.items()])
    for cfg in (config.load(own), by_set):
        assert cfg.data.system_prompt == TEXT
        (release / "saved.yaml").write_text(config.dump(cfg))
    (release / file).unlink()
    assert config.load(release / "saved.yaml").data.system_prompt == TEXT


@pytest.mark.parametrize(("section", "message"), [
    ({"file": "absent.yaml", "field": "a"}, r"file=.*absent.yaml cannot be read \(.*give a file of a checkout"),
    ({"file": "recipe.yaml", "field": "data.system"}, r"field=data.system: .*recipe.yaml has no text of that name"),
    ({"file": "recipe.py", "field": "OTHER"}, "a variable of a .py file with a plain text"),
    ({"file": "prompt.txt", "sha256": "0" * 64}, f"sha256=0{{64}} must be {HASH}, which the text in"),
    ({"field": "a"}, r"missing key 'data.system_prompt.file'"),
    ({"file": "prompt.txt", "fild": "a"}, r"unknown key 'data.system_prompt.fild'. Did you mean .*field'")])
def test_another_text_or_none_is_an_error_that_names_the_setting(section, message, release):
    section = {key: release / value if key == "file" else value for key, value in section.items()}
    refuses(message, config.load, "cppo_toy.yaml", [f"{SETTING}.{key}={value}" for key, value in section.items()])
