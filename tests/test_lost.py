"""Nothing is lost beside the checkpoints: what `latest` names, the logs, copies of a run folder."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from conftest import refuses, steps_of, toy_config

import config
import learner
import train
from config import ConfigError
from infra import runfolder
from infra.export import replace_folder

FEW = ("rollout.group_size=4", "rollout.prompts_per_step=2", "prune.completions.keep=2", "rollout.max_new_tokens=8",
       "eval.max_new_tokens=4", "pack.capacity=512", "model.dtype=float32", "steps=4", "checkpoint.every=2",
       "checkpoint.keep=2", "eval.every=2")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A run of four steps with checkpoints of two and of four."""
    out = tmp_path_factory.mktemp("lost") / "run"
    train.train(toy_config(out, *FEW))
    return out


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy that is a run of its own."""
    folder = tmp_path / "run"
    shutil.copytree(original, folder, symlinks=True)
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace(f"out: {original}\n", f"out: {folder}\n"))
    return folder


def go_on(folder: Path, *settings: str, resume: str = "always") -> None:
    train.train(config.load(folder / "config.yaml", ["steps=5", *settings]), resume)


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in steps_of(folder)]


class Planted:
    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.slow
def test_pickled_metadata_is_compared_with_its_digest_before_it_is_read(run, tmp_path, capsys):
    """torch.distributed.checkpoint unpickles it, which runs code."""
    metadata = run / "checkpoints" / "step_000004" / "policy" / ".metadata"
    size, planted = metadata.stat().st_size, pickle.dumps(Planted(tmp_path / "planted"))
    metadata.write_bytes(planted + bytes(size - len(planted)))
    with pytest.raises(ConfigError, match="step_000004 is not a whole checkpoint: policy/.metadata is not as it was"):
        learner.export_checkpoint(metadata.parents[1], tmp_path / "hf")
    go_on(run)
    assert "step_000004 is not whole: policy/.metadata is not as it was written" in capsys.readouterr().err
    assert steps(run) == [1, 2, 3, 4, 5] and not (tmp_path / "planted").exists()
    pickle.loads(planted)
    assert (tmp_path / "planted").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("named", "begun", "said"), [
    ("step_000001", 5, "names 'step_000001', and the newest that is there is step_000004: step_000004 is taken"),
    ("step_000002\n", 3, "names 'step_000002', and the newest that is there is step_000004: step_000002 is taken"),
    (None, 5, None)])
def test_a_pointer_to_another_step_than_the_newest_loses_nothing_and_is_said(named, begun, said, run, capsys):
    """As after `cp -r` of a run that goes on. An earlier checkpoint goes on from the logs that are left."""
    pointer = run / "checkpoints" / "latest"
    pointer.unlink() if named is None else pointer.write_text(named)
    without(run / "metrics.jsonl", lambda line: line["step"] >= begun)
    go_on(run)
    err = capsys.readouterr().err
    assert f"going on from step {begun - 1}" in err and steps(run) == [1, 2, 3, 4, 5]
    assert re.search(f"{pointer} {said}", err) if said else "latest" not in err


def test_a_damaged_checkpoint_that_the_pointer_names_is_replaced_by_a_later_one_if_none_is_before_it(run, capsys):
    (run / "checkpoints" / "latest").write_text("step_000002")
    (run / "checkpoints" / "step_000002" / "extra.pt").write_bytes(b"")
    go_on(run)
    assert "going on from step 4" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["latest is a folder", "checkpoints is a file", "checkpoints is a dead link",
                                  "checkpoints is a circle"])
def test_what_hides_the_checkpoints_begins_no_run_anew(what, run, tmp_path):
    """As when the disk with the checkpoints is not mounted."""
    name, kind = what.split(" is a ")
    path = run / "checkpoints" / "latest" if name == "latest" else run / "checkpoints"
    path.rename(tmp_path / "elsewhere")
    {"folder": path.mkdir, "file": path.touch, "dead link": lambda: path.symlink_to(tmp_path / "gone"),
     "circle": lambda: path.symlink_to(path.name)}[kind]()
    refuses(f"{path} is of another kind, or a link to nothing; bring it back", go_on, run, resume="auto")
    assert steps(run) == [1, 2, 3, 4]


def without(path: Path, gone) -> None:
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if not gone(json.loads(line))))


@pytest.mark.parametrize(("name", "damage"), [
    ("metrics.jsonl", lambda p: without(p, lambda line: line["step"] > 2)),
    ("metrics.jsonl", lambda p: without(p, lambda line: line["step"] in (2, 3))),
    ("metrics.jsonl", lambda p: p.unlink()), ("decisions.jsonl", lambda p: p.unlink()),
    ("samples.jsonl", lambda p: without(p, lambda line: line["step"] == 1)),
    ("eval_000002.jsonl", lambda p: p.unlink()),
    ("metrics.jsonl", lambda p: p.write_text(re.sub(r'(rollout/tokens": )\d', r"\g<1>7", p.read_text()))),
    ("decisions.jsonl", lambda p: p.write_bytes(p.read_bytes()[:-1]))])
def test_a_log_that_is_not_as_the_checkpoint_knows_it_is_named_and_stays(name, damage, run):
    path = run / name
    damage(path)
    left = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file() and p.name != "lock"}
    refuses(f"{path} is not as it was when step 4 was saved, with .* write the name", go_on, run)
    assert left == {p.name: p.read_bytes() for p in run.iterdir() if p.is_file() and p.name != "lock"}


def test_logs_are_flushed_and_their_hashes_go_on_where_they_were(tmp_path, monkeypatch):
    log, flushed = runfolder.RunLog(tmp_path), []
    monkeypatch.setattr(runfolder.os, "fsync", flushed.append)
    for step in (1, 2):
        log.write("metrics.jsonl", {"step": step})
        length, digest = log.seal()["logs"]["metrics.jsonl"]
        text = (tmp_path / "metrics.jsonl").read_bytes()
        assert (length, digest) == (len(text), runfolder.hashlib.sha256(text).hexdigest())
    assert len(flushed) == 2


@pytest.mark.parametrize(("name", "change", "kept"), [
    ("metrics.jsonl", lambda p: None, []), ("metrics.jsonl", lambda p: p.write_text('{"step": 1}\n{"st'), [1]),
    ("metrics.jsonl", lambda p: p.write_text('{"step": 1}\n{"step": 2}\n\0'), [1, 2]),
    ("metrics.jsonl", lambda p: p.symlink_to("gone"), []), ("samples.jsonl", os.mkfifo, [])])  # it had not begun
def test_a_log_that_another_program_changes_says_so_and_the_run_goes_on(name, change, kept, tmp_path, capsys):
    for at_save in (False, True):
        log = runfolder.RunLog(tmp_path / str(at_save))
        log.folder.mkdir()
        path = log.folder / name
        for step in (1, 2) if name == "metrics.jsonl" else ():
            log.write(name, {"step": step})
        path.unlink(missing_ok=True)
        change(path)
        if at_save:
            log.seal()
        log.write(name, {"step": 3})
        log.seal()
        assert [line["step"] for line in runfolder.read_log(path)] == [*kept, 3]
        said, = capsys.readouterr().err.splitlines()
        assert re.match(f"{path} was changed by .*: it goes on with {len(kept)} whole lines, and a report lacks", said)


def test_a_log_with_a_broken_line_inside_ends_the_run_and_stays(tmp_path):
    log, path, text = runfolder.RunLog(tmp_path), tmp_path / "metrics.jsonl", '{"step": 1}\n{"st\n{"step": 2}\n'
    path.write_text(text)
    refuses(f"{path}:2 is no JSON object", log.write, path.name, {"step": 3})
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["hf", "hf_adapter", "checkpoints"])
def test_the_places_of_a_run_are_tried_before_it(name, run, tmp_path, monkeypatch):
    place, far, cfg = run / name, tmp_path / "far", config.load(run / "config.yaml")
    place.rename(far) if place.exists() else far.mkdir()
    for make in (Path.touch, os.mkfifo, lambda p: p.symlink_to("gone"), lambda p: p.symlink_to(p.name)):
        make(place)
        with pytest.raises(ConfigError, match=f"{place} is of another kind, or a link to nothing"):
            runfolder.require_free_folder(config.replace(cfg, out=str(run)), "auto")
        place.unlink()
    place.symlink_to(far)
    runfolder.require_place(run, name)
    for closed in (far, tmp_path)[:1 if name == "checkpoints" else 2]:
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: path != closed)
        refuses(f"out={place} cannot be written, because {closed} is no folder or", runfolder.require_place, run, name)


def test_an_export_goes_where_its_link_points(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "hf").symlink_to("far")
    os.mkfifo(tmp_path / "far.unfinished")
    with replace_folder(tmp_path / "hf") as fresh:
        (fresh / "a").touch()
    assert (tmp_path / "hf").is_symlink() and (tmp_path / "far" / "a").is_file() and not fresh.exists()


def test_a_report_names_the_steps_that_a_log_lacks(run, tmp_path, monkeypatch):
    report = pytest.importorskip("report")
    monkeypatch.setattr("leaves.page.charts.draw_svg", lambda rows, score="": "")  # most of the time of a page
    report.write_report([run], tmp_path / "page")
    assert "lacks" not in (tmp_path / "page" / "report.md").read_text()
    without(run / "metrics.jsonl", lambda line: line["step"] in (1, 2))
    report.write_report([run], tmp_path / "page")
    assert "lacks the steps [1, 2]: its costs are too low" in (tmp_path / "page" / "report.md").read_text()


@pytest.mark.slow
def test_a_copy_that_does_not_say_which_run_it_is_changes_neither(original, tmp_path, command, refused):
    fork = shutil.copytree(original, tmp_path / "fork")
    before = (original / "metrics.jsonl").read_bytes()
    for config_file in ("config.yaml", "config_until_000002.yaml"):
        shutil.copyfile(original / "config.yaml", fork / config_file)
        said = refused(train, "--config", fork / config_file, "--resume", "--set", "steps=5")
        assert f"lies in the run folder {fork}, says out={original}, and both are there" in said
    assert (original / "metrics.jsonl").read_bytes() == before == (fork / "metrics.jsonl").read_bytes()
    assert command(train, "--config", fork / "config.yaml", "--resume", "--set", "steps=5", "--set", f"out={fork}") == 0
    assert steps(fork) == [1, 2, 3, 4, 5] and (original / "metrics.jsonl").read_bytes() == before
    assert config.load(fork / "config.yaml").out == str(fork)  # it has its own now


@pytest.mark.slow
def test_a_run_that_was_moved_goes_on_in_itself(run, command):
    moved, link = run.with_name("moved"), run.with_name("link")
    run.rename(moved)
    more = moved.with_name("more.yaml")
    for text, out in (("out: other", "other"), ("steps: 5", str(moved))):
        more.write_text(text)
        names = [str(moved / "config.yaml"), str(more)]
        assert runfolder.own_folder(config.load(names), names).out == out
    assert command(train, "--config", moved / "config.yaml", more, "--resume") == 0
    assert steps(moved) == [1, 2, 3, 4, 5] and not run.exists()
    link.symlink_to(moved)
    assert command(train, "--config", link / "config.yaml", "--resume", "--set", "steps=6") == 0
    assert steps(moved)[-1] == 6


def test_a_copy_with_a_link_to_the_checkpoints_of_the_original_does_not_go_on(original, run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(original / "checkpoints")
    refuses(f"is a link into another run, {original}; put a copy in its place", go_on, run)
    apart = run.with_name("disk")
    shutil.copytree(original / "checkpoints", apart)
    (run / "checkpoints").unlink()
    (run / "checkpoints").symlink_to(apart)  # as on a larger disk
    go_on(run)
    assert (apart / "latest").read_text() == "step_000005"
