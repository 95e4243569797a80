"""train.py --fit: what fits, and what would make it fit, on machines that are only named."""

import json
import re
import sys

import pytest
import torch
from conftest import ROOT, SHIPPED, TOY
from test_train import main

import config
from infra.device import Machine, parameters
from leaves.fit import fit

sys.path.append(str(ROOT / "bench"))  # behind the root: some of its files have names of ours

import shapes  # noqa: E402

GIB = 2**30


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    """Of models that are not there: each has its config.json alone."""
    return {size: str(shapes.write_config(size, tmp_path_factory.mktemp(size))) for size in ("0.5B", "1.5B", "7B")}


def figures(text: str) -> dict[str, list[float]]:
    """The table's rows: a part and its GiB in the phases that have it."""
    rows = re.findall(r"^(\S.{37})((?: +\d+\.\d\d)+)$", text, re.MULTILINE)
    return {name.strip(): [float(x) for x in cells.split()] for name, cells in rows}


def test_a_run_that_fits_is_told_part_by_part(folders, monkeypatch, capsys):
    status = main(monkeypatch, "--config", "cppo_gsm8k.yaml", "--fit", "--card", "H100", "--gpus", "8",
                  "--set", f"model.path={folders['1.5B']}")
    text = capsys.readouterr().out
    assert status == 0 and "It fits:" in text and "makes it fit" not in text
    assert max(map(len, text.splitlines()[1:])) <= fit.WIDTH
    parts = figures(text)
    whole = parameters(shapes.shape_of("1.5B"))
    assert parts["weights"] == [pytest.approx(4 * whole / 8 / GIB, abs=0.01)] * 3
    assert parts["moments"] == [pytest.approx(8 * whole / 8 / GIB, abs=0.01)] * 3
    assert parts["reference"] == parts["weights"]
    assert parts["gradients"] == parts["weights"][:1]
    assert parts["engine's weights"] == [pytest.approx(2 * whole / GIB, abs=0.01)] * 3
    assert len(parts["KV cache"]) == 3 and parts["CUDA graphs, and NCCL"] == [2.0] * 3
    assert "rollout.sleep=never" in text and "rollout.slots=165" in text
    for name in ("activations of a row", "log-prob head, or a block at work", "weights held twice",
                 "activations of prompts", "what tokens are drawn from"):
        assert len(parts[name]) == 1 and parts[name][0] > 0
    for column in range(3):
        of_phase = [cells for name, cells in parts.items() if len(cells) == 3 and name != "together"]
        assert parts["together"][column] >= sum(cells[column] for cells in of_phase)
    assert "auto takes" in text and "rollout.engine=vllm" in text and "pack.capacity=" in text


def test_one_that_does_not_names_each_single_change_that_makes_it_fit(folders, monkeypatch, capsys):
    """With what it needs then, and what it costs. Each does as it says."""
    named = ["--config", "grpo_math.yaml", "--fit", "--memory", "79", "--set", f"model.path={folders['7B']}"]
    assert main(monkeypatch, *named) == 2
    text = capsys.readouterr().out
    assert "It does not fit:" in text and "One of these makes it fit:" in text
    helping = dict(re.findall(r"^  (\S+=\S+|\d+ ranks) +(\d+\.\d) GiB  \S", text, re.MULTILINE))
    assert helping.keys() == {"model.lora.rank=32", "optim.offload=true", "4 ranks"}
    for change, needed in helping.items():
        more = ["--gpus", change.split()[0]] if "ranks" in change else ["--set", change]
        assert main(monkeypatch, *named, *more) == 0
        assert f"It fits: {needed} of 71.1 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "memory", "settings", "said"), [
    ("1.5B", "44", ["pack.capacity=16384", "loss.kl=0", "model.checkpoint_blocks=none"],
     ["model.checkpoint_blocks=all", "pack.capacity=auto"]),
    ("0.5B", "79", ["rollout.engine=vllm", "rollout.cache_gib=75"], ["rollout.cache_gib=null"]),
    ("7B", "2", [], ["No single change makes it fit"])])
def test_settings_that_are_too_high_are_named_or_that_nothing_helps(size, memory, settings, said, folders, monkeypatch,
                                                                    capsys):
    sets = [word for setting in [f"model.path={folders[size]}", *settings] for word in ("--set", setting)]
    assert main(monkeypatch, "--config", "cppo_gsm8k.yaml", "--fit", "--memory", memory, *sets) == 2
    text = capsys.readouterr().out
    assert all(words in text for words in said)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--config", "grpo_math.yaml", "--set", "model.path=Qwen/Qwen2.5-14B"],
     "error: model.path='Qwen/Qwen2.5-14B' is not on this machine, and --fit downloads nothing; a folder with its "
     "config.json is enough, "),
    (["--config", "cppo_toy.yaml", "--set", "model.path=a/b/c"], "error: model.path='a/b/c' is not on this machine"),
    (["--config", "cppo_toy.yaml", "--gpus", "8"], "error: --gpus needs --memory or --card: this machine shows no GPU"),
    (["--config", "cppo_toy.yaml", "--card", "H100", "--set", "pack.capacity=10"], "error: pack.capacity=10 must be"),
    (["--config", "cppo_toy.yaml", "--card", "H100", "--set", "device=cpu"], "error: --memory and --card name GPUs"),
    (["--config", "cppo_toy.yaml", "--card", "H100", "--gpus", "6", "--set", "rollout.engine=vllm", "--set",
      "rollout.tensor_parallel=4"], "error: rollout.tensor_parallel=4 must be a divisor of the number of GPUs, 6"),
])
def test_what_cannot_be_told_is_one_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fit, "try_to_load_from_cache", cache_without_models)
    assert main(monkeypatch, "--fit", *arguments) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def cache_without_models(path: str, name: str) -> None:
    if path.count("/") != 1:
        raise fit.HFValidationError(path)


def test_a_model_in_the_hubs_cache_is_read_from_there(folders, monkeypatch):
    monkeypatch.setattr(fit, "try_to_load_from_cache", lambda path, name: f"{folders['0.5B']}/{name}")
    assert fit.find_shape("Qwen/Qwen2.5-0.5B-Instruct") == shapes.shape_of("0.5B")


@pytest.mark.parametrize("option", ["--memory 0", "--memory much", "--memory inf", "--card H800", "--gpus 0",
                                    "--gpus 1.5"])
def test_options_that_make_no_sense_are_refused(option, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        main(monkeypatch, "--config", "cppo_toy.yaml", "--fit", *option.split())
    assert ended.value.code == 2


def test_a_card_is_enough_to_ask_for_it_and_what_another_machine_lacks_is_no_matter(folders, monkeypatch, capsys):
    asked = ["--config", "cppo_gsm8k_lora.yaml", "--card", "4090", "--set", f"model.path={folders['1.5B']}"]
    assert main(monkeypatch, *asked) == 0
    said = capsys.readouterr().out
    assert "It fits" in said
    assert main(monkeypatch, *asked, "--fit", "--set", "model.attention=flash") == 0
    assert "It fits" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(monkeypatch, *asked) == 2
    assert capsys.readouterr().err.startswith("error: --fit needs no torchrun")


def test_the_devices_of_this_machine_are_taken_where_none_are_named(monkeypatch, capsys):
    monkeypatch.setattr(Machine, "here", staticmethod(lambda device: Machine(device, 3 * GIB, 1, "no")))
    monkeypatch.setattr(fit, "find_device", lambda wanted: torch.device("cpu"))
    assert main(monkeypatch, "--config", "cppo_toy.yaml", "--fit", "--set", f"model.path={TOY}") == 0
    text = capsys.readouterr().out
    assert "on 1 CPU: 3.0 GiB are free on each, of which 2.7" in text
    monkeypatch.setattr(fit, "find_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(monkeypatch, "--config", "cppo_toy.yaml", "--fit", "--set", f"model.path={TOY}") == 0
    text = capsys.readouterr().out
    assert "on 4 x H100: 3.0 GiB" in text


def test_the_shapes_of_all_published_configs_are_shipped(monkeypatch):
    """So that --fit needs no network; a size that the benches know too is the same there."""
    monkeypatch.setattr(fit, "try_to_load_from_cache", cache_without_models)
    paths = {config.load(name).model.path for name in SHIPPED}
    shipped = {path for path in paths if "/" in path and not path.startswith("toy/")}
    assert shipped == set(json.loads(fit.SHAPES.read_text())) and len(shipped) == 10
    for path in shipped:
        found = fit.find_shape(path)
        size = next((part for part in path.split("-") if part in shapes.SHAPES), None)
        known = found if size is None else shapes.shape_of(size)
        names = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "tied")
        assert [getattr(found, name) for name in names] == [getattr(known, name) for name in names], path
    assert parameters(fit.find_shape("Qwen/Qwen3-8B")) == pytest.approx(8.19e9, rel=1e-3)  # "8.2B"
