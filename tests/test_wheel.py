"""The wheel: its command runs the demo's config in an empty folder."""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest

from settings.paths import REPOSITORY


@pytest.mark.slow
def test_the_command_of_the_wheel_trains_in_an_empty_folder(tmp_path):
    code, site, here = (tmp_path / name for name in ("code", "site", "here"))
    shutil.copytree(REPOSITORY, code, ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "__pycache__", "build"))
    pip = [sys.executable, *"-m pip install --quiet --no-deps --no-build-isolation --target".split(), site, code]
    subprocess.run(pip, check=True)
    here.mkdir()
    for git in ("init --quiet", "-c user.name=a -c user.email=a commit --quiet --allow-empty -m a"):  # not the code's
        subprocess.run(["git", *git.split()], cwd=tmp_path, check=True)
    command = [sys.executable, "-c", "from winnow.infra.command import main; main()"]
    run = partial(subprocess.run, cwd=here, env={"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert run([*command, "train", "--config", "cppo_toy.yaml", "--set", "steps=1"]).returncode == 0
    assert "'tain' is none of train, eval, report, replay, chat" in run([*command, "tain"]).stderr
    ran_on = json.loads((here / "runs" / "cppo_toy" / "env.json").read_text())
    assert ran_on["argv"][0] == str(site / "winnow" / "train.py") and ran_on["commit"] is None
    assert (here / "runs" / "cppo_toy" / "hf").is_dir() and not [*site.glob("winnow/**/test_*.py")]
