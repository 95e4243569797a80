"""train.py --fit: what fits, what would make it fit, and what a step would take, on machines that are only named."""

import json
import re
import runpy
import sys

import pytest
import torch
from conftest import ROOT, TOY
from test_memory import footprint, gpu
from test_train import main

import config
from preflight import counts, fit
from preflight.memory import FILLED, Machine

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
    whole = counts.parameters(shapes.shape_of("1.5B"))
    assert parts["weights"] == [pytest.approx(4 * whole / 8 / GIB, abs=0.01)] * 3
    assert parts["moments"] == [pytest.approx(8 * whole / 8 / GIB, abs=0.01)] * 3
    assert parts["reference"] == parts["weights"]
    assert parts["gradients"] == parts["weights"][:1]
    assert parts["engine's weights"] == [pytest.approx(2 * whole / GIB, abs=0.01)] * 2
    for name in ("activations of a row", "log-prob head, or a block at work", "weights held twice", "KV cache"):
        assert len(parts[name]) == 1 and parts[name][0] > 0
    for column in range(3):
        of_phase = [cells for name, cells in parts.items() if len(cells) == 3 and name != "together"]
        assert parts["together"][column] >= sum(cells[column] for cells in of_phase)
    assert "auto takes" in text and "rollout.engine=vllm" in text and "pack.capacity=" in text
    seconds = [float(x) for x in re.findall(r"(?:rollout|score|update|sync)\s(\d+\.\d\d)", text)]
    assert len(seconds) == 4 and min(seconds) > 0
    assert re.search(r"MFU of the\s+update \d+%, of the step \d+%", text)


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
    assert "MFU" not in text  # of no known card


def test_recomputation_and_capacity_are_named_where_they_were_set_too_high(folders, monkeypatch, capsys):
    named = ["--config", "cppo_gsm8k.yaml", "--fit", "--memory", "44", "--set", f"model.path={folders['1.5B']}",
             "--set", "pack.capacity=16384", "--set", "loss.kl=0", "--set", "model.checkpoint_blocks=none"]
    assert main(monkeypatch, *named) == 2
    text = capsys.readouterr().out
    assert "model.checkpoint_blocks=all" in text and "pack.capacity=auto" in text
    fixed = ["--config", "cppo_gsm8k.yaml", "--fit", "--memory", "79", "--gpus", "8", "--set",
             f"model.path={folders['0.5B']}", "--set", "rollout.engine=vllm", "--set", "rollout.cache_gib=75"]
    assert main(monkeypatch, *fixed) == 2
    assert "rollout.cache_gib=null" in capsys.readouterr().out


def test_nothing_helps_a_model_that_is_too_large_for_any_number_tried(folders, monkeypatch, capsys):
    named = ["--config", "grpo_math.yaml", "--fit", "--memory", "2", "--set", f"model.path={folders['7B']}"]
    assert main(monkeypatch, *named) == 2
    assert "No single change makes it fit" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--config", "grpo_math.yaml"], "error: model.path='Qwen/Qwen2.5-7B-Instruct' is not on this machine, and --fit "
                                     "downloads nothing; a folder with its config.json is enough, "),
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
    assert "on 1 CPU: 3.0 GiB are free on each, of which 2.7" in text and "MFU" not in text
    monkeypatch.setattr(fit, "find_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(monkeypatch, "--config", "cppo_toy.yaml", "--fit", "--set", f"model.path={TOY}") == 0
    text = capsys.readouterr().out
    assert "on 4 x H100: 3.0 GiB" in text and "A step on H100" in text


def with_lora(cfg: config.Config) -> config.Config:
    return fit.with_setting(cfg, "model.lora.rank=32")


def test_a_step_takes_longer_where_there_is_more_to_do():
    """And a card's peak is never passed."""
    shape, cfg = shapes.shape_of("1.5B"), config.load("grpo_gsm8k.yaml", ["rollout.prompts_per_step=64", "loss.kl=0"])
    base = fit.try_on(cfg, shape, gpu(139)).cfg

    def seconds(changed, name="H200", ranks=1):
        return fit.step_seconds(changed, shape, fit.CARDS[name], ranks)[0]

    first = seconds(base)
    assert set(first) == {"rollout", "score", "update", "sync"} and first["score"] == 0
    assert seconds(fit.with_setting(base, "loss.kl=0.1"))["score"] > 0
    assert seconds(fit.with_setting(base, "update.epochs=4"))["update"] == pytest.approx(2 * first["update"])
    assert seconds(fit.with_setting(base, "model.checkpoint_blocks=all"))["update"] > 1.1 * first["update"]
    assert seconds(fit.with_setting(base, "optim.offload=true"))["update"] > first["update"]
    assert seconds(with_lora(base))["update"] < first["update"]
    assert seconds(fit.with_setting(base, "rollout.engine=torch"))["rollout"] > first["rollout"]
    assert seconds(fit.with_setting(base, "rollout.slots=8"))["rollout"] > 4 * first["rollout"]
    assert seconds(base, "A100")["update"] > 2 * first["update"] > seconds(base, "H200", 8)["update"] * 8
    for name, card in fit.CARDS.items():
        for ranks in (1, 8):
            taken, flop = fit.step_seconds(base, shape, card, ranks)
            assert 0.05 < flop / taken["update"] / card.flops < fit.PRODUCTS, (name, ranks)


def test_the_table_of_the_page_is_what_the_script_prints():
    script = runpy.run_path(str(ROOT / "bench" / "cards.py"))
    page = (ROOT / "docs" / "running.md").read_text()
    assert script["with_table"](page) == page, "python bench/cards.py --write"
    table = script["table"]()
    assert table in page and len(table.splitlines()) == 2 + 4 * 2 * 4
    one = fit.try_on(config.load("grpo_gsm8k.yaml", script["SETTINGS"]), shapes.shape_of("7B"), gpu(79, 8))
    assert f"| 7B | 80 | - | - | - | - | {one.cfg.pack.capacity:,} | {one.cfg.rollout.slots} |" in table


def test_the_bench_measures_what_fit_counts(monkeypatch, capsys):
    """Of the shapes that it trains here in processes of their own; here one is said to have taken so many bytes."""
    bench = footprint()
    monkeypatch.setattr(bench, "in_own_process", lambda *given: GIB)
    row = bench.counted_and_measured("10M", 2048, "none", None)
    shape = shapes.shape_of("10M")
    expected = 16 * counts.parameters(shape) + counts.pass_bytes(counts.Pass(shape, 2048, 2048, 4, "none", 1024))
    assert row["computed"] == expected and row["measured"] == GIB
    adapter = bench.counted_and_measured("10M", 2048, "none", 8)
    assert adapter["computed"] < expected
    assert json.dumps([row, adapter])


def test_a_rank_may_fill_so_much_of_what_is_free():
    shape, cfg = shapes.shape_of("0.5B"), config.load("cppo_gsm8k.yaml")
    large = fit.try_on(cfg, shape, gpu(999))
    for factor, fits in ((1.001, True), (0.999, False)):
        assert fit.try_on(large.cfg, shape, gpu(large.peak / GIB / FILLED * factor)).fits == fits
