"""eval.pyz: one file, from which the figures of the repository come in any folder."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import ROOT, TOY
from test_eval import held_out, sets

import eval as evaluation
from infra import archive
from infra.unpack import unpack
from settings import leaves


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("built") / "eval.pyz"
    archive.build(path)
    return path


def run(built: Path, folder: Path, *words: object) -> subprocess.CompletedProcess:
    """Run it in an empty folder, with a cache of its own, and nothing of ours on the path."""
    (folder / "empty").mkdir(exist_ok=True)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, built, *map(str, words)], cwd=folder / "empty", text=True,
                          env=own | {"XDG_CACHE_HOME": str(folder / "cache")}, capture_output=True)


@pytest.mark.slow
def test_an_empty_folder_gets_the_figures_of_the_repository(built, tmp_path, command, capsys):
    """Greedy, byte for byte: the table, the head and every response."""
    asked = ["--model", TOY, "--data", held_out(tmp_path / "few.jsonl", 6), *sets("eval.max_new_tokens=24")]
    done = run(built, tmp_path, *asked, "--out", tmp_path / "there.json")
    assert done.returncode == 0, done.stderr
    assert command(evaluation, *asked, "--out", tmp_path / "here.json") == 0
    assert done.stdout == capsys.readouterr().out
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()


@pytest.mark.slow
def test_its_workers_know_algebra_and_the_users_own_files(built, tmp_path):
    """Answers are equal to a root by algebra alone; a tool replies, and a reward function scores."""
    if not {"environment", "own_rewards"} <= leaves.LEAVES.keys():
        pytest.skip("leaves that are not here")
    rows = [json.loads(line) for line in Path(held_out(tmp_path / "roots.jsonl", 40)).read_text().splitlines()]
    rows = [row | {"answer": rf"\sqrt{{{int(row['answer']) ** 2}}}", "solution": ""} for row in rows]
    (tmp_path / "roots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(built, tmp_path, "--model", TOY, "--data", tmp_path / "roots.jsonl", *sets("eval.max_new_tokens=48"))
    assert done.returncode == 0 and float(re.search(r"([\d.]+)%", done.stdout)[1]) > 5, done.stdout + done.stderr
    (tmp_path / "own.py").write_text("def reward(text): return 0.5")
    own = sets(f"environment.file={ROOT}/toy/calculator.py", "environment.max_context=300", "eval.max_new_tokens=8",
               "rollout.max_new_tokens=8", "data.max_prompt_tokens=200", "reward.accuracy=0", "reward.custom=1.0",
               f"reward.custom_file={tmp_path}/own.py")
    done = run(built, tmp_path, "--model", TOY, "--data", held_out(tmp_path / "two.jsonl", 2), *own)
    assert done.returncode == 0 and " 0.500 [" in done.stdout, done.stderr


def test_it_is_small_and_whole_and_the_same_files_make_the_same_bytes(built, tmp_path):
    archive.build(tmp_path / "again.pyz")
    assert (tmp_path / "again.pyz").read_bytes() == built.read_bytes() and built.stat().st_size < 400_000
    names = set(ZipFile(built).namelist())
    assert {"__main__.py", "eval.py", "rollout_vllm.py", "infra/families.yaml", "configs/grpo_gsm8k.yaml"} <= names
    chosen = {"environment": "worker", "lora": "join", "own_rewards": "worker"}
    assert {f"leaves/{leaf}/{module}.py" for leaf, module in chosen.items() if leaf in leaves.LEAVES} <= names
    assert {f"verify/{path.name}" for path in (ROOT / "verify").glob("*.py")} <= names
    assert not {"train.py", "learner.py", "leaves/critic/join.py"} & names


def test_it_unpacks_once_whole_whoever_else_does_and_what_a_clean_up_has_taken_comes_back(tmp_path):
    texts = {f"folder/{i}.py": f"{i}" * 1000 for i in range(50)}
    with ZipFile(tmp_path / "some.pyz", "w") as zipped:
        for name, text in texts.items():
            zipped.writestr(name, text)
    with ThreadPoolExecutor(8) as threads:
        folder, = set(threads.map(lambda i: unpack(tmp_path / "some.pyz", tmp_path / "cache"), range(8)))
    (folder / "folder" / "7.py").unlink()
    assert unpack(tmp_path / "some.pyz", tmp_path / "cache") == folder
    assert {name: (folder / name).read_text() for name in texts} == texts
    assert [*(tmp_path / "cache").iterdir()] == [folder]


def test_a_cache_that_cannot_be_written_is_said_in_one_line(built, tmp_path):
    (tmp_path / "cache").write_text("a file")
    done = run(built, tmp_path, "--help")
    assert done.returncode == 2 and done.stderr.startswith("error: eval.pyz cannot unpack itself: ")
    assert "set XDG_CACHE_HOME to a folder" in done.stderr and done.stderr.count("\n") == 1
