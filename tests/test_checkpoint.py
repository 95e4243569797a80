"""Saved on some ranks and loaded on others, bit for bit; whatever dies on the way, a whole checkpoint is there."""

import json
import random
import re
import shutil
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, TOY, load, nudge, refuses, toy_config, weights
from test_invariance import on_ranks

import data
import learner
import train
from config import ConfigError
from infra import checkpoint, digests, dist
from infra.checkpoint import Checkpoints, find
from infra.export import export
from infra.weights import read_shape
from model import Decoder
from policy import Weights
from settings import leaves

CPU = torch.device("cpu")


def moments(model, optimizers) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": dist.gather_full(t).clone() for name, p in model.named_parameters()
            if p.requires_grad for key, t in optimizers[0].state[p].items()}


def learn(model, optimizers) -> None:
    """One step of the optimizer on a gradient of its own for every weight."""
    optimizer, = optimizers
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        noise = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(i))
        p.grad = dist.sharded_like(noise, p)
    optimizer.step()


def sharded(*settings: str):
    cfg = toy_config(ROOT / "runs" / "unused", *settings)
    model = learner.load_sharded(cfg, TOY, CPU, torch.float32, leaves.through("weights", cfg, Weights()))
    return model, learner.make_optimizers(model, cfg.optim)


@pytest.fixture
def role(tiny):
    model = load(tiny).requires_grad_(True)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1)]
    learn(model, optimizers)
    return model, optimizers


def saved(folder, role, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep, {"policy": role}, CPU)
    for step in steps:
        checkpoints.reach(step, {"name": f"extra of {step}"})
        checkpoints.save()
    checkpoints.wait()
    return checkpoints


def go_on(checkpoints: Checkpoints) -> dict:
    """Load the newest as a run that goes on does; returns what lies beside the tensors."""
    path, extra = find(checkpoints.folder)
    checkpoints.load(path)
    return extra


def save_on_ranks(folder, *settings: str) -> list:
    model, optimizer = sharded(*settings)
    learn(model, optimizer)
    saved(folder, (model, optimizer), 7)
    export(model, TOY, folder / "hf")
    whole = {name: dist.gather_full(p).clone() for name, p in model.named_hf_tensors()}
    return [weights(model), moments(model, optimizer), whole]


def load_on_ranks(folder, *settings: str) -> list:
    model, optimizer = sharded(*settings)
    extra = go_on(Checkpoints(folder, 2, {"policy": (model, optimizer)}, CPU))
    return [weights(model), moments(model, optimizer), extra]


def gathered_on_ranks() -> list:
    """Of every weight: is it gathered in halves what it is as a whole, in halves?"""
    model, _ = sharded()
    weights = [p.detach() for p in model.parameters()]
    pairs = [(dist.gather_full(p, CPU, torch.bfloat16), dist.gather_full(p)) for p in weights]
    return [(half.dtype == torch.bfloat16 and torch.equal(half, p.bfloat16()), p.dtype) for half, p in pairs]


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_are_cast_before_they_travel_and_arrive_whole(ranks, tmp_path):
    """On 3 ranks too, by which no size of the toy's can be divided."""
    assert on_ranks(ranks, tmp_path, gathered_on_ranks) == [[(True, torch.float32)] * len(weights(load(TOY)))] * ranks


@pytest.mark.parametrize("settings", [[], ["model.lora.rank=3"]], ids=["full", "lora"])
def test_what_two_ranks_saved_is_bit_equal_on_any_number_of_ranks(settings, tmp_path):
    (*expected, whole), _ = on_ranks(2, tmp_path, save_on_ranks, tmp_path / "saved", *settings)
    trained = [name for name in expected[0] if not settings or "lora" in name]
    assert {name.rpartition(".")[0] for name in expected[1]} == {*trained}
    assert all((expected[1][f"{name}.exp_avg"] != 0).any() for name in trained)
    assert len(list((tmp_path / "saved" / "step_000007" / "policy").glob("*.distcp"))) == 2
    exported = weights(load(tmp_path / "saved" / "hf"))
    assert all(torch.equal(exported[name.removeprefix("model.")], p) for name, p in whole.items())
    for ranks in (1, 3):
        for *found, extra in on_ranks(ranks, tmp_path, load_on_ranks, tmp_path / "saved", *settings):
            assert extra == {"step": 7, "name": "extra of 7"}
            for one, other in zip(expected, found, strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_save_holds_the_weights_of_its_moment(role, tmp_path):
    """Training goes on as soon as they are copied, while the copies are still being written."""
    before = [weights(role[0]), moments(*role)]
    checkpoints = Checkpoints(tmp_path, 1, {"policy": role}, CPU)
    checkpoints.reach(1, {})
    checkpoints.save()
    waited = []
    copied = SimpleNamespace(result=lambda: waited.append(True))
    checkpoints.saves.append(SimpleNamespace(staging_completion=copied, upload_completion=copied))
    checkpoints.wait_for_copies()
    assert waited == [True]
    nudge(role[0], 1.0)
    learn(*role)
    checkpoints.wait()
    assert checkpoints.metrics()["time/checkpoint"] > 0 == checkpoints.metrics()["time/checkpoint"]
    assert go_on(checkpoints) == {"step": 1}
    for one, other in zip(before, (weights(role[0]), moments(*role)), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_only_the_newest_checkpoints_stay(role, tmp_path):
    saved(tmp_path, role, 1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000002", "step_000003"]
    saved(tmp_path, role, 2, keep=1)  # by a run that has gone back; what comes after is its past
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000002", "step_000003"]
    assert find(tmp_path)[0].name == "step_000002"
    saved(tmp_path, role, 4, 5, keep="all")
    assert len(checkpoint.step_folders(tmp_path)) == 4


@pytest.mark.parametrize(("name", "damage", "said"), [
    ("", lambda newest: newest.rename(f"{newest}.unfinished"), None),
    ("policy/__0_0.distcp", lambda part: part.write_bytes(part.read_bytes()[:-1]),
     r"is not as it was written: it has \d+ of \d+ bytes"),
    ("policy/__0_0.distcp", lambda part: part.unlink(), "cannot be read: .*No such file"),
    ("files.json", lambda path: path.unlink(), ", which lists the files, is missing"),
    ("files.json", lambda path: path.write_text("[" * 100_000 + "]" * 100_000), ""),
    ("policy/.metadata", lambda path: path.unlink() or path.mkdir(), "cannot be read: .*Is a directory")],
    ids=["unfinished", "cut off", "missing", "no list", "deep list", "unreadable"])
def test_a_checkpoint_that_is_not_whole_is_never_loaded_but_the_one_before(name, damage, said, role, tmp_path, capsys):
    checkpoints, newest = saved(tmp_path, role, 1, 2), tmp_path / "step_000002"
    damage(newest / name)
    assert go_on(checkpoints)["step"] == 1
    err = capsys.readouterr().err
    assert "is not whole" not in err if said is None else re.search(f"step_000002 is not whole: {name} ?{said}", err)
    assert not list(tmp_path.glob("*.unfinished"))
    assert go_on(saved(tmp_path, role, 2))["step"] == 2


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_no_flipped_byte_and_no_lost_end_of_any_file_is_loaded(adapter, role, tmp_path, capsys):
    """40 times, in every file of the newest (tests/fuzz.py: more); the one before is loaded, and it is said."""
    role = sharded("model.lora.rank=3") if adapter else role
    checkpoints, rng, named = saved(tmp_path, role, 1, 2), random.Random(0), Counter()
    newest = tmp_path / "step_000002"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    for i in range(40):
        path = files[i % len(files)]
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ rng.randrange(1, 256)]) + whole[at + 1:]
        path.write_bytes(rng.choice((flipped, whole[:at])))
        assert find(checkpoints.folder)[1]["step"] == 1
        path.write_bytes(whole)
        named[path] += f"step_000002 is not whole: {path.relative_to(newest)}" in capsys.readouterr().err
    assert set(named) == set(files) and named.total() == 40
    assert go_on(checkpoints)["step"] == 2


def test_each_rank_reads_its_part_of_a_checkpoint_and_all_take_the_one_before(tmp_path):
    on_ranks(2, tmp_path, save_on_ranks, tmp_path / "saved")
    shutil.copytree(tmp_path / "saved" / "step_000007", tmp_path / "saved" / "step_000009")
    (tmp_path / "saved" / "latest").write_text("step_000009")
    part = tmp_path / "saved" / "step_000009" / "policy" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    (tmp_path / "again").mkdir()
    for ranks in (1, 2, 3):
        said = on_ranks(ranks, tmp_path / "again", read_on_ranks, tmp_path / "saved")
        assert {name for name, _ in said} == {"step_000007"}
        mine = [{"__0_0.distcp", ".metadata"}, {"__1_0.distcp"}, set()]
        assert [names - {"extra.pt"} for _, names in said] == (mine[:ranks] if ranks > 1 else [mine[0] | mine[1]])


def read_on_ranks(folder) -> list:
    """The checkpoint that is taken, and the files of it that this rank has read."""
    read, contents = set(), digests.hash_file
    digests.hash_file = lambda path: read.add(path) or contents(path)
    path, _ = find(folder)
    digests.hash_file = contents
    return [path.name, {file.name for file in read if file.is_relative_to(path)}]


def test_the_newest_is_found_without_a_pointer_and_among_files_that_others_leave(role, tmp_path):
    saved(tmp_path, role, 1, 2)
    for name in (".DS_Store", "policy/.nfs0001"):
        (tmp_path / "step_000002" / name).write_text("?")
    (tmp_path / "step_000003 (copy)").mkdir()
    for pointer in (b"", b"\xff\x00", b"step_0000"):
        (tmp_path / "latest").write_bytes(pointer)
        assert find(tmp_path)[1]["step"] == 2
    (tmp_path / "latest").unlink()
    assert find(tmp_path)[1]["step"] == 2
    assert find(tmp_path / "none") is None
    model = shutil.copytree(TOY, tmp_path / "checkpoints" / "model")  # whose folder has the name of a run's
    assert checkpoint.original_model(model) == model


def test_a_folder_of_a_run_that_is_no_model_names_those_of_the_run(role, tmp_path):
    assert checkpoint.read_extra(tmp_path / "elsewhere") == {}
    saved(tmp_path / "checkpoints", role, 1)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step_000009"):
        refuses(r"of that run there are: [^,]*/checkpoints/step_000001$", checkpoint.read_extra, path)


@pytest.mark.parametrize("target", [(checkpoint.os, "replace"), (checkpoint, "format_list")], ids=["pointer", "list"])
def test_a_run_that_dies_while_it_publishes_goes_on_and_saves_again(target, role, tmp_path, monkeypatch):
    """`latest` is replaced last but for the removal of old checkpoints, which are there until then."""
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "publish", full)
        refuses("No space left.*make room; --resume auto begins it again", saved, tmp_path / "first", role, 1)
    checkpoints = saved(tmp_path, role, 1, keep=1)
    monkeypatch.setattr(*target, full)
    refuses(r"step_000002.unfinished could not be written.*No space left.*--resume", saved, tmp_path, role, 2, keep=1)
    monkeypatch.undo()
    assert go_on(checkpoints)["step"] == 1
    assert go_on(saved(tmp_path, role, 2, keep=1))["step"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "latest", "step_000002"]


def test_checkpoints_none_of_which_is_whole_are_not_begun_again(role, tmp_path):
    checkpoints = saved(tmp_path, role, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step_{step:06d}" / "extra.pt").unlink()
    refuses("has checkpoints, but none is whole .of the newest "
            "extra.pt cannot be read: .*; restore that file", go_on, checkpoints)


def test_a_save_on_its_way_is_written_before_a_run_ends_by_an_error(role, tmp_path):
    checkpoints, waited = Checkpoints(tmp_path, 1, {"policy": role}, CPU), []
    with pytest.raises(RuntimeError), checkpoints.finished():
        checkpoints.reach(1, {})
        checkpoints.save()
        written = checkpoints.written
        checkpoints.written = SimpleNamespace(result=lambda: waited.append(written.result()))
        raise RuntimeError
    assert waited and find(tmp_path)[0].name == "step_000001"


@pytest.mark.parametrize(("change", "message"), [
    ({"hidden_size": 64}, r"weights.embed_tokens.weight: \(477, 32\) there and .*477, 64"),
    ({"num_hidden_layers": 1}, "weights.layers.1.*and nothing here"),
    ({"num_hidden_layers": 3}, "weights.layers.2.*: nothing there")])
def test_a_checkpoint_of_another_model_is_named(change, message, role, tiny, tmp_path):
    saved(tmp_path / "saved", role, 1)
    shutil.copytree(tiny, tmp_path / "other")
    shape = json.loads((tiny / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(shape | change))
    other = Decoder(read_shape(tmp_path / "other"))
    with pytest.raises(ConfigError, match=f"is of another model: .*{message}"):
        go_on(Checkpoints(tmp_path / "saved", 1, {"policy": (other, ())}, CPU))


@pytest.mark.slow
def test_a_checkpoint_becomes_a_hugging_face_folder(tmp_path, command, refused):
    few = ["steps=1", "model.dtype=float32", "rollout.max_new_tokens=8", "eval.max_new_tokens=8"]
    final = weights(train.train(toy_config(tmp_path / "run", *few)))
    before = weights(load(TOY))
    assert not torch.equal(final["layers.0.mlp.up_proj.weight"], before["layers.0.mlp.up_proj.weight"])
    path = tmp_path / "run" / "checkpoints" / "step_000001"
    assert command(learner, path, "--out", tmp_path / "hf") == 0
    exported = weights(load(tmp_path / "hf"))
    assert all(torch.equal(exported[name], p) for name, p in final.items())
    assert data.Tokenizer(tmp_path / "hf").eos_ids == data.Tokenizer(TOY).eos_ids
    assert not (tmp_path / "hf_adapter").exists() and not (tmp_path / "run" / "hf_adapter").exists()
    (tmp_path / "new_adapter").touch()
    for out, there in (("hf", "hf"), ("new", "new_adapter")):
        said = refused(learner, path, "--out", tmp_path / out)
        assert f"--out {tmp_path / there} is a file, or a folder with something in it" in said
    (path / "extra.pt").unlink()
    assert "is not a whole checkpoint" in refused(learner, path, "--out", tmp_path / "other")
