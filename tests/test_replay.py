"""A step of a run done again is that step, and gradients under other prunings are those that training has."""

import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import others_slow, refuses, steps_of, toy_config
from test_invariance import on_ranks, trained_unchecked

import config
import replay
import train
from config import ConfigError
from infra import dist, runfolder

KEPT = ["steps=3", "checkpoint.every=1", "checkpoint.keep=all", "data.limit=8", "eval.limit=2",
        "rollout.max_new_tokens=32"]
# One of each thing that a step is made by: what has to be there before it, and which passes its gradient takes.
RUNS = {
    "cppo": ("cppo_toy.yaml", ["rollout.max_new_tokens=48"]),
    "dppo": ("dppo_toy.yaml", ["seed=2", "data.limit=5", "prune.prompts.drop_prob=0.6", "update.minibatches=2",
                               "update.epochs=2"]),
    "lora": ("pps_gsm8k.yaml toy.yaml", ["model.lora.rank=2", "loss.kl=0.1", "prune.completions.keep=2"]),
    "rounds": ("greso_math.yaml toy.yaml", ["rollout.max_rounds=3", "rollout.oversample=1", "rollout.group_size=4",
                                            "prune.completions={kind: topk, keep: 3}", "update.minibatches=1",
                                            "loss.denominator=kept"]),
    "critic": ("vapo_toy.yaml", ["critic.pretrain_steps=1", "update.minibatches=2", "critic.minibatches=2"]),
    "window": ("tppo_toy.yaml", ["windows.tokens=12", "critic.pretrain_steps=1"]),
    "flight": ("flight_toy.yaml", ["seed=3", "windows.max_age=2", "optim.lr=1e-3", "data.limit=32",
                                   "rollout.max_new_tokens=48"]),
    "surplus": ("surplus_toy.yaml", ["seed=4", "rollout.prompts_per_step=2", "rollout.oversample=4", "data.limit=32",
                                     "update.minibatches=2"]),
    "drafts": ("drafts_toy.yaml", ["data.limit=5"]),
    "pairs": ("odpo_gsm8k.yaml toy.yaml", ["optim.lr=1e-3", "update.minibatches=1"]),
    "table": ("apo_gsm8k.yaml toy.yaml", ["data.limit=16", "update.minibatches=1"])}


def run_config(name: str, out: Path, *settings: str) -> config.Config:
    base, own = RUNS[name]
    return toy_config(out, *KEPT, *own, *settings, name=base)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "run"
            train.train(run_config(name, made[name]))
        return made[name]

    return run


def shown(capsys, folder: Path, step: int, *changes: str, draws: int = 0) -> str:
    capsys.readouterr()
    replay.replay(folder, step, list(changes), draws)
    return capsys.readouterr().out


def row(text: str, name: str) -> list[float]:
    """A line of the table of gradients: kept, tokens, norm, cosine, squared error, predicted error if it weighs."""
    line, = re.findall(rf"^ *{re.escape(name)} +([-\d. e+a-z]+)$", text.partition("predicted")[2], re.MULTILINE)
    return [float(word) for word in line.split() if word != "-"]


def norms(text: str) -> tuple[float, float]:
    """In the update that was done again, and as logged."""
    return tuple(map(float, re.search(r"own update (\S+), logged (\S+):", text).groups()))


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", others_slow(RUNS, "cppo"))
def test_a_step_done_again_has_the_gradient_that_was_logged_bit_for_bit(name, run_of, capsys):
    """First and last step, of rows that are cut, drawn, skipped, in rounds, with adapters, critics and pools."""
    folder = run_of(name)
    before, decided = contents(folder), runfolder.read_log(folder / "decisions.jsonl")
    for step in (1, 3):
        text = shown(capsys, folder, step)
        if name in ("critic", "window") and step == 1:
            assert text.endswith("the policy does not learn in this step\n")
            continue
        assert text.endswith(": the same bit for bit\n"), text
        again, logged = norms(text)
        assert again == logged > 0 < row(text, "the run's")[2]
        if name not in ("dppo", "lora", "critic", "surplus"):  # which take several optimizer steps
            assert row(text, "the run's")[2] == pytest.approx(logged, rel=1e-4)  # five digits are printed
    assert contents(folder) == before
    assert name != "dppo" or any(p["weight"] == 0 for line in decided for p in line["prompts"])
    assert name not in ("flight", "surplus") or any(p.get("age") for p in decided[-1]["prompts"])
    assert name != "rounds" or any(len(line["rounds"]) > 1 for line in decided)


@pytest.mark.slow
def test_what_another_pruning_would_have_done_is_what_it_does(run_of, tmp_path, capsys):
    """The first step of a run with that pruning has the same rollouts, so its logged norm is the one told here."""
    changes = ["prune.completions={kind: pps, keep: 2, scope: batch}", "loss.denominator=all"]
    train.train(run_config("cppo", tmp_path / "other", "steps=1", *changes))
    text = shown(capsys, run_of("cppo"), 1, *changes)
    line, = steps_of(tmp_path / "other")
    kept, tokens, norm, *_, predicted = row(text, "--set")
    assert norm == pytest.approx(line["train/grad_norm"], rel=1e-4)
    assert (kept, tokens) == (line["prune/kept"], line["train/tokens"])
    assert predicted == pytest.approx(line["prune/error"], abs=1e-4) != 0
    text = shown(capsys, run_of("cppo"), 1, "prune.completions.kind=none", "loss.denominator=all")
    assert row(text, "--set")[2:] == row(text, "full batch")[2:] and row(text, "--set")[3:] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cppo", "dppo"])
def test_each_draw_is_one_pass_of_the_training_step(name, run_of, monkeypatch, capsys):
    """Its figures are the mean over them."""
    seen, compare_gradients = [], replay.compare_gradients
    monkeypatch.setattr(replay, "compare_gradients", lambda *given: seen.append(compare_gradients(*given)) or seen[-1])
    text = shown(capsys, run_of(name), 3, "prune.completions={kind: pps, keep: 2, scope: batch}",
                 "loss.denominator=all", draws=5)
    drawn = 2 if name == "dppo" else 1  # its own pruning draws too, that of cppo does not
    assert text.count("mean of 5 draws") == drawn and len(seen) == 3 + drawn * 5
    *printed, _ = re.findall(r"mean of 5 draws +(.+)", text)[-1].split()[2:]
    assert list(map(float, printed)) == pytest.approx(torch.stack(seen[-5:]).mean(dim=0).tolist(), rel=1e-3)


def test_a_gradient_is_compared_by_norm_cosine_and_squared_error():
    own, full = torch.randn(2, 3_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dist.init("cpu")
    norm, cosine, error = replay.compare_gradients(own + full, full).tolist()
    assert norm == pytest.approx(float((own + full).norm()))
    assert cosine == pytest.approx(float(torch.cosine_similarity(own + full, full, dim=0)))
    assert error == pytest.approx(float(own.norm() ** 2 / full.norm() ** 2))
    assert replay.compare_gradients(full, full).tolist()[1:] == [pytest.approx(1), 0]


def test_another_step_or_model_than_the_logged_one_is_an_error(run_of, tiny, tmp_path):
    folder = shutil.copytree(run_of("cppo"), tmp_path / "changed")
    for n, change, said in (
            (2, {"tokens": "0" * 16}, r"1 of 4 groups have come out with other tokens than .*, the first that of "
                                      r"toy/train/\d+, .*rollout.engine=torch"),
            (1, {"completion_weight": [0.5] * 8}, r"the completions of toy/train/\d+ have the tokens .* but other wei"),
            (0, {"id": "elsewhere/3"}, r"data.train=.*first.jsonl is not what it was: there is no elsewhere/3")):
        lines = runfolder.read_log(run_of("cppo") / "decisions.jsonl")
        lines[1]["prompts"][n] |= change
        runfolder.rewrite_log(folder / "decisions.jsonl", lines)
        refuses(said, replay.replay, folder, 2, [], 0)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"path: .*toy/model", f"path: {tiny}", text))
    refuses("4 of 4 groups have come out with other tokens", replay.replay, folder, 1, [], 0)


@pytest.mark.parametrize(("step", "changes", "said"), [
    (2, [], r"--step 2 needs the policy before it, checkpoints/step_000001, which .* does not have; it can replay "
            "1, 3; a run keeps every step's with checkpoint.every=1 and checkpoint.keep=all"),
    (4, [], r"--step 4: .* has done 3 steps"),
    (1, ["rollout.temperature=0.5"], r"--set rollout.temperature \(1.0 there, 0.5 now\): the step has been rolled out"),
    (1, ["prune.completions={kind: pps, keep: 2}"], "loss.denominator=kept must be all"),
    (1, ["prune.prompts={kind: bernoulli, drop_prob: 0.5}", "loss.denominator=all"], "--set prune.prompts.kind")])
def test_what_cannot_be_done_is_one_line(step, changes, said, run_of, tmp_path):
    folder = shutil.copytree(run_of("cppo"), tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step_000001")
    with pytest.raises(ConfigError, match=said) as error:
        replay.replay(folder, step, changes, 0)
    assert "\n" not in str(error.value)


def test_a_run_that_went_on_with_other_settings_has_the_step_its_own(tmp_path):
    """Settings that a run may change on the way: each step is done by those that it had."""
    for name, limit in (("config_until_000002.yaml", 11), ("config_until_000010.yaml", 12), ("config.yaml", 13)):
        (tmp_path / name).write_text(config.dump(toy_config(tmp_path, f"eval.limit={limit}", "steps=20")))
    assert [replay.step_config(tmp_path, step, []).eval.limit for step in (1, 2, 3, 10, 11)] == [11, 11, 12, 12, 13]


@pytest.mark.slow
def test_the_users_own_reward_is_the_one_that_the_run_began_with(tmp_path, capsys):
    reward = tmp_path / "own.py"
    reward.write_text("import own_help\n\ndef reward(text):\n    return own_help.size(text) % 7 / 7\n")
    (tmp_path / "own_help.py").write_text("size = len\n")
    train.train(run_config("cppo", tmp_path / "run", "steps=2", "checkpoint.every=1", "reward.accuracy=0",
                           "reward.custom=1", f"reward.custom_file={reward}"))
    reward.write_text("def reward(text):\n    return 0.5\n")
    assert all("the same bit for bit" in shown(capsys, tmp_path / "run", step) for step in (1, 2))


def replayed(folder: Path) -> str:
    """What is printed of the last step."""
    said: list[str] = []
    with patch.object(replay, "say", said.append):
        replay.replay(folder, 3, [], 4)
    return "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "began"), [
    ("dppo", 1), ("dppo", 2), ("cppo", 1), ("cppo", 2), ("lora", 1), ("lora", 2), ("critic", 2), ("window", 2)])
def test_ranks_that_a_run_had_give_its_bits_and_others_the_same_gradient(name, began, tmp_path):
    """In float32, as runs are. In float64 where rounding comes to more than 1e-6: in the gradient of few weights (lora)
    and in the mean over several optimizer steps (dppo): Adam's first steps are as long by a gradient that is small."""
    folder = tmp_path / "run"
    cfg = run_config(name, folder, f"model.dtype={'float64' if name in ('lora', 'dppo') else 'float32'}")
    tables = {}
    for ranks in (None, 1, 2):
        place = tmp_path / f"on_{ranks}"  # a store of its own
        place.mkdir()
        work, given = (trained_unchecked, cfg) if ranks is None else (replayed, folder)
        first, *_ = on_ranks(ranks or began, place, work, given)
        if ranks:
            again, logged = norms(first)
            assert again == pytest.approx(logged, rel=1e-6) and logged > 0
            assert (again == logged) == ("bit for bit" in first)
            assert ranks != began or again == logged
            assert f"again on {ranks} ranks" in first
            tables[ranks] = [row(first, "the run's"), row(first, "full batch")]
    for mine, theirs in zip(tables[1], tables[2], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-4)
