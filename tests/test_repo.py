"""The repository keeps its own promises: imports, settings, messages, configs, metrics, README."""

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import is_dataclass
from typing import get_type_hints

import pytest
from conftest import ROOT, toy_config

import config
import reward
import runfolder
import train

FILES = {path.stem: path for path in ROOT.glob("*.py")}
# What each file may import of the others: data flows one way.
IMPORTS = {
    "config": set(), "advantage": set(), "prune": set(), "answer": set(), "extract": set(),
    "sample": {"prune"},
    "dist": {"config"},
    "loss": {"prune"},
    "algebra": {"answer"},
    "reward": {"algebra", "answer", "config", "extract"},
    "pack": {"sample"},
    "model": {"config", "dist"},
    "data": {"config", "dist", "extract", "prune", "reward", "sample"},
    "rollout": {"config", "dist", "model", "sample"},
    "exchange": {"dist", "sample"},
    "collect": {"advantage", "config", "data", "dist", "exchange", "metrics", "prune", "reward", "rollout",
                "runfolder", "sample"},
    "update": {"advantage", "config", "dist", "exchange", "loss", "metrics", "model", "pack", "prune", "sample"},
    "critic": {"advantage", "config", "dist", "loss", "metrics", "pack", "sample", "update"},
    "preflight": {"config", "data", "dist", "extract", "model", "pack", "reward", "rollout", "sample", "update"},
    "metrics": {"advantage", "dist", "pack", "sample"},
    "checkpoint": {"config", "dist", "model"},
    "runfolder": {"config"},
    "report": {"config", "runfolder"},
    "eval": {"answer", "config", "data", "dist", "model", "reward", "rollout", "runfolder", "sample"},
    "train": {"checkpoint", "collect", "config", "critic", "data", "dist", "eval", "metrics", "model", "preflight",
              "reward", "rollout", "runfolder", "sample", "update"},
}


def imported(path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_imports_are_those_of_the_drawing_and_shadow_nothing():
    assert {name: imported(path) & FILES.keys() for name, path in FILES.items()} == IMPORTS
    assert not FILES.keys() & sys.stdlib_module_names
    for name in ("advantage", "prune", "loss"):
        assert {module.split(".")[0] for module in imported(FILES[name])} <= {"torch", "dataclasses", "prune"}
    callers = [name for name, path in FILES.items() if "torch.distributed" in imported(path)]
    assert callers == ["dist"]


def leaves(cls, prefix=""):
    for name, kind in get_type_hints(cls).items():
        yield from leaves(kind, f"{prefix}{name}.") if is_dataclass(kind) else [prefix + name]


def test_every_setting_is_read_somewhere():
    code = [path.read_text() for name, path in FILES.items() if name != "config"]
    read = {node.attr for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    dead = [key for key in leaves(config.Config) if key.split(".")[-1] not in read | reward.COMPONENTS.keys()]
    assert not dead, f"settings that nobody reads: {dead}. Delete them or use them."
    assert set(get_type_hints(config.Reward)) == {*reward.COMPONENTS, "overlong_tokens", "length_tokens", "custom_file"}


def test_messages_name_only_real_settings():
    """Anything that looks like section.setting in a text of the code or the README is one."""
    known = set(leaves(config.Config))
    sections = {key.split(".")[0] for key in known if "." in key}
    partial = {key.rsplit(".", i)[0] for key in known for i in (1, 2)}
    attributes = {"model.BACKENDS", "reward.COMPONENTS", "reward.measured", "loss.token_weight", "loss.engine_weight",
                  "advantage.ESTIMATORS", "advantage.gae", "loss.TRUST", "loss.likelihood_weight",
                  *(path.name for path in FILES.values())}
    texts = [node.value for path in FILES.values() for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts.append((ROOT / "README.md").read_text())
    named = {match for text in texts for match in re.findall(rf"\b(?:{'|'.join(sections)})\.\w+(?:\.\w+)*", text)}
    assert {name for name in named - known - partial - attributes if not name.startswith("model.safetensors")} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads(path):
    cfg = config.load(path)
    assert cfg.out == f"runs/{path.stem}"
    # Dynamic completion allocation (CPPO): completions trained on per update are those of the GRPO baseline.
    if path.stem in ("cppo_gsm8k", "cppo_math"):
        base = config.load(path.with_name(path.name.replace("cppo", "grpo"))).rollout
        assert cfg.rollout.prompts_per_step * cfg.prune.completions.keep == base.prompts_per_step * base.group_size


def test_functions_are_short():
    long = [f"{path.name}:{node.name}" for path in FILES.values() for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60]
    assert not long


def test_every_metric_has_a_glossary_entry_and_every_entry_a_metric(tmp_path):
    train.train(toy_config(tmp_path / "run", "steps=1", "eval.n=2", "eval.temperature=1", "reward.format=0.1",
                           "reward.tag_exact=0.1", "reward.tag_number=0.1"))
    train.train(toy_config(tmp_path / "with_critic", "steps=2", "critic.pretrain_steps=0", "critic.minibatches=1",
                           "reward.overlong=1", "reward.overlong_tokens=40", name="vapo_toy.yaml"))
    logged = {re.sub(r"(eval/)\w+/", r"\1<set>/", key) for run in ("run", "with_critic")
              for line in runfolder.read(tmp_path / run / "metrics.jsonl") for key in line}
    logged = {f"{'reward/<component>' if key.removeprefix('reward/') in reward.COMPONENTS else key}" for key in logged}
    glossary = (ROOT / "README.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    keys = re.findall(r"^\| (`.*?) \|", glossary, re.MULTILINE)
    assert logged == {name for key in keys for name in re.findall("`(.*?)`", key)}


def commands() -> list[str]:
    """Every line of the README's shell blocks, comments dropped and continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.split("#")[0].strip()]


def test_the_readmes_commands_exist():
    """make targets are in the Makefile and in CI's reach, scripts exist, configs load with the overrides given."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands()
    for command in commands():
        words = command.split()
        if words[0] == "make":
            assert set(words[1:]) <= targets, command
        for script in (word for word in words if word.endswith(".py")):
            assert (ROOT / script).is_file(), command
        if "--config" in words and not words[words.index("--config") + 1].startswith("runs/"):
            sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
            config.load(words[words.index("--config") + 1], sets)
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(f"make {target}" in ci for target in ("lint", "test", "test-slow", "test-vllm"))


def test_the_readmes_files_exist_and_all_files_are_in_it():
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("## Files")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+\.py)`", table)) == {path.name for path in FILES.values()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", readme):
        assert link in tracked or (ROOT / link).exists(), link
