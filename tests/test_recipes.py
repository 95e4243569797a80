"""The recipes of docs/fork.md are followed to the letter: apply the diff, train its config."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from infra import runfolder

RECIPES = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "fork.md").read_text(), re.DOTALL)
SMALL = ("steps=2", "data.limit=8", "rollout.group_size=8", "rollout.prompts_per_step=2",
         "rollout.max_new_tokens=16", "eval.max_new_tokens=16", "data.eval=few.jsonl")


def copy_repository(folder: Path) -> Path:
    """The files that git tracks, as they are in the working tree, and a few problems to evaluate on."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), tracked.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    test = (ROOT / "toy" / "test.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(test[:4]))
    return folder


def can_apply(recipe: str) -> bool:
    """Not where a method of a fork has changed the same lines."""
    return not subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=recipe, text=True,
                              capture_output=True).returncode


def run(folder: Path, *command: str, stdin: str | None = None) -> str:
    """What a command prints in this folder; red with its errors where it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=env, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_the_readme_shows_lines_of_the_first_recipe():
    shown, = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    added = [line[1:] for line in RECIPES[0].splitlines() if line[:1] in ("+", " ")]
    assert all(line in added for line in shown.splitlines())


def medians(samples: list[dict], decisions: list[dict]) -> None:
    """The advantages are rewards less the lower median of their group."""
    for line in samples:
        rewards, advantages = ([c[key] for c in line["completions"]] for key in ("reward", "advantage"))
        median = sorted(rewards)[(len(rewards) - 1) // 2]
        assert advantages == [reward - median for reward in rewards]
    assert any(c["advantage"] for line in samples for c in line["completions"])


def half_of_each(samples: list[dict], decisions: list[dict]) -> None:
    """Four of eight completions of each group are kept at weight 2, not the same ones everywhere."""
    places = set()
    for line in samples:
        kept, weights = ([c[key] for c in line["completions"]] for key in ("kept", "weight"))
        step, = (step for step in decisions if step["step"] == line["step"])
        assert [weights] == [p["completion_weight"] for p in step["prompts"] if p["id"] == line["id"]]
        assert sum(kept) == 4 and weights == [2.0 * k for k in kept]
        assert {c["prob"] for c in line["completions"]} == {0.5}
        places.add(tuple(kept))
    assert len(places) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "check"), list(zip(RECIPES, (medians, half_of_each), strict=True)),
                         ids=["advantage", "pruner"])
def test_a_recipe_applies_trains_and_does_what_it_says(recipe, check, tmp_path):
    if not can_apply(recipe):
        pytest.skip("this fork has changed the lines that the recipe changes")
    folder = copy_repository(tmp_path / "copy")
    run(folder, "git", "apply", "-", stdin=recipe)
    name, = re.findall(r"^\+\+\+ b/configs/(\w+\.yaml)$", recipe, re.MULTILINE)
    sets = [part for setting in SMALL for part in ("--set", setting)]
    printed = run(folder, sys.executable, "train.py", "--config", name, *sets, "--set", "out=run")
    assert "after 2 steps" in printed
    kinds = set(re.findall(r'@kind\("(\w+)"\)', recipe))
    assert len(kinds) == 1 and f"kind: {kinds.pop()}\n" in (folder / "run" / "config.yaml").read_text()
    check(*(runfolder.read_log(folder / "run" / f"{log}.jsonl") for log in ("samples", "decisions")))
