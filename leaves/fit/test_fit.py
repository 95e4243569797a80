"""train.py --fit: what fits, and what would make it fit, on machines that are only named."""

import json
import re
from unittest.mock import Mock

import huggingface_hub
import pytest
import shapes
import torch
from conftest import SHIPPED, TOY
from huggingface_hub.errors import LocalEntryNotFoundError

import config
import train
from infra.device import Machine, parameters
from leaves.fit import counts, fit

GIB = 2**30


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    """Of models that are not there: each has its config.json alone."""
    return {size: str(shapes.write_config(size, tmp_path_factory.mktemp(size))) for size in ("0.5B", "1.5B", "7B")}


def figures(text: str) -> dict[str, list[float]]:
    """The table's rows: a part and its GiB in each phase."""
    rows = re.findall(r"^(\S.{37})((?: +\d+\.\d\d)+)$", text, re.MULTILINE)
    return {name.strip(): [float(x) for x in cells.split()] for name, cells in rows}


def test_a_run_that_fits_is_told_part_by_part(folders, command, capsys):
    """A card is enough to ask for it."""
    status = command(train, "--config", "cppo_gsm8k.yaml", "--memory", "79", "--gpus", "8",
                  "--set", f"model.path={folders['1.5B']}")
    text = capsys.readouterr().out
    assert status == 0 and "It fits:" in text and "makes it fit" not in text
    parts = figures(text)
    whole = parameters(shapes.shape_of("1.5B"))
    for name, size in (("weights", 4), ("reference", 2), ("moments", 8)):
        assert parts[name] == [pytest.approx(size * whole / 8 / GIB, abs=0.01)] * 2
    assert parts["gradients"] == [parts["weights"][0], 0]
    assert parts["engine's weights"] == [pytest.approx(2 * whole / GIB, abs=0.01)] * 2
    assert parts["KV cache"][0] > 0 and parts["CUDA graphs, and NCCL"] == [2.0] * 2
    for name in ("activations of a row", "log-prob head, or a block at work"):
        assert parts[name][0] > 0 == parts[name][1]
    assert parts["what tokens are drawn from"][1] > 0
    for column in range(2):
        together = sum(cells[column] for name, cells in parts.items() if name != "together")
        assert parts["together"][column] == pytest.approx(together, abs=0.1)
    for chosen in ("rollout.sleep=never", "rollout.slots=165", "rollout.engine=vllm", "pack.capacity="):
        assert chosen in text.partition("auto takes")[2]


def test_one_that_does_not_names_each_single_change_that_makes_it_fit(folders, command, capsys):
    """With what it needs then, and what it costs. Each does as it says."""
    named = ["--config", "grpo_math.yaml", "--fit", "--memory", "79", "--set", f"model.path={folders['7B']}"]
    assert command(train, *named) == 2
    text = capsys.readouterr().out
    assert "It does not fit:" in text and "One of these makes it fit:" in text
    helping = dict(re.findall(r"^  (\S+=\S+|\d+ ranks) +(\d+\.\d) GiB  \S", text, re.MULTILINE))
    assert helping.keys() == {"model.lora.rank=32", "optim.offload=true", "4 ranks"}
    for change, needed in helping.items():
        more = ["--gpus", change.split()[0]] if "ranks" in change else ["--set", change]
        assert command(train, *named, *more) == 0
        assert f"It fits: {needed} of 71.1 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "memory", "settings", "said"), [
    ("1.5B", "44", ["pack.capacity=16384", "loss.kl=0", "model.checkpoint_blocks=none"],
     ["model.checkpoint_blocks=all", "pack.capacity=auto"]),
    ("0.5B", "79", ["rollout.engine=vllm", "rollout.cache_gib=75"], ["rollout.cache_gib=null"]),
    ("7B", "2", [], ["No single change makes it fit"])])
def test_settings_that_are_too_high_are_named_or_that_nothing_helps(size, memory, settings, said, folders, command,
                                                                    capsys):
    sets = [word for setting in [f"model.path={folders[size]}", *settings] for word in ("--set", setting)]
    assert command(train, "--config", "cppo_gsm8k.yaml", "--fit", "--memory", memory, *sets) == 2
    text = capsys.readouterr().out
    assert all(words in text for words in said)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--config", "grpo_math.yaml", "--set", "model.path=Qwen/Qwen2.5-14B"],
     "error: model.path='Qwen/Qwen2.5-14B' is no folder, and could not be downloaded from the hub: no network"),
    (["--config", "cppo_toy.yaml", "--gpus", "8"], "error: --gpus needs --memory: this machine shows no GPU"),
    (["--config", "cppo_toy.yaml", "--memory", "79", "--set", "pack.capacity=10"], "error: pack.capacity=10 must be"),
    # vLLM refuses it too, after minutes.
    (["--config", "cppo_math.yaml", "--memory", "79", "--gpus", "8", "--set", "rollout.tensor_parallel=8"],
     "error: rollout.tensor_parallel=8 does not divide this model, which has 28 heads, 4 of keys: it can be [1, 2, 4]"),
])
def test_what_cannot_be_told_is_one_line(arguments, message, monkeypatch, refused):
    unreachable = Mock(side_effect=LocalEntryNotFoundError("no network"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert refused(train, "--fit", *arguments).startswith(message)


def test_of_a_model_on_the_hub_its_config_is_downloaded_alone(folders, monkeypatch):
    def download(path: str, allow_patterns) -> str:
        assert (path, allow_patterns) == ("mine/0.5B", ("config.json",))
        return folders["0.5B"]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fit.find_shape("mine/0.5B") == shapes.shape_of("0.5B")


@pytest.mark.parametrize("option", ["--memory 0", "--memory much", "--memory inf", "--gpus 0", "--gpus 1.5"])
def test_options_that_make_no_sense_are_refused(option, command, capsys):
    with pytest.raises(SystemExit) as ended:
        command(train, "--config", "cppo_toy.yaml", "--fit", *option.split())
    assert ended.value.code == 2


def test_the_devices_of_this_machine_are_taken_where_none_are_named(monkeypatch, command, capsys):
    monkeypatch.setattr(Machine, "here", staticmethod(lambda device: Machine(device, 3 * GIB, 1, "no")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    asked = ("--config", "cppo_toy.yaml", "--fit", "--set", f"model.path={TOY}")
    for device, count, said in (("cpu", 0, "on 1 x CPU: 3.0 GiB are free on each, of which 2.7"),
                                ("cuda", 4, "on 4 x NVIDIA H100 80GB HBM3: 3.0 GiB")):
        monkeypatch.setattr(fit, "find_device", lambda wanted, device=device: torch.device(device))
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert command(train, *asked) == 0
        assert said in capsys.readouterr().out


def test_the_shapes_of_all_published_configs_are_shipped():
    """So that --fit needs no network; a size that the benches know too is the same there."""
    cfgs = [config.load(name) for name in SHIPPED]
    paths = {cfg.model.path for cfg in cfgs} | {cfg.teacher.path for cfg in cfgs if cfg.advantage.kind == "distill"}
    shipped = {path for path in paths if "/" in path and not path.startswith(("toy/", "runs/"))}
    assert shipped == set(json.loads(counts.SHAPES.read_text())) and len(shipped) == 11
    for path in shipped:
        found = fit.find_shape(path)
        size = next((part for part in path.split("-") if part in shapes.SHAPES and path != "Qwen/Qwen3-32B"), None)
        known = found if size is None else shapes.shape_of(size)
        names = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "tied")
        assert [getattr(found, name) for name in names] == [getattr(known, name) for name in names], path
    assert parameters(fit.find_shape("Qwen/Qwen3-8B")) == pytest.approx(8.19e9, rel=1e-3)  # "8.2B"
    assert parameters(fit.find_shape("Qwen/Qwen3-32B")) == pytest.approx(32.76e9, rel=1e-3)  # "32.8B"
