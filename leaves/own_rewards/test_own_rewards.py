"""Reward functions of one's own: what they are given, what they may return, what is said of those that fail."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOY, as_rewards, refuses, steps_of, toy_config

import config
import eval as evaluation
import train
from collect import describe_missing
from config import ConfigError, Reward
from data import load_problems
from infra import results
from leaves.own_rewards import calls, worker
from records import Problem, Prompt
from reward import list_components, reward_range, score

ROW = {"question": "q", "tests": [1, 2], "deep": {"a": [3]}}
PROBLEM = Problem("q", "q?", "1", row=ROW)


def file_of(tmp_path: Path, source: str, name: str = "mine.py") -> str:
    path = tmp_path / name
    path.write_text(source)
    return str(path)


def own(path: str, custom: float | dict = 1.0, **settings: object) -> Reward:
    return Reward(**({"accuracy": 0.0, "custom": custom, "custom_file": path} | settings))


def parts(cfg: Reward, *texts: str, gold: str = "42", tokens: int = 3) -> list[dict[str, float]]:
    prompt = Prompt("q", (1,), gold, ROW)
    scores = score([((text,), prompt, tokens) for text in texts], 10, cfg)
    return [dict(zip(list_components(cfg), values, strict=True)) for values in scores]


@pytest.mark.parametrize(("parameters", "seen"), [
    ("text, gold, tokens, row", "(text, gold, tokens, len(row['tests']))"), ("text", "(text,)"),
    ("row, text", "(text, len(row['tests']))"), ("*, row", "(len(row['tests']),)"), ("**given", "tuple(given)"),
    ("text, other=5", "(text, other)"), ("", "()")])
def test_a_function_gets_what_its_parameters_ask_for(parameters, seen):
    scope: dict = {}
    exec(f"def reward({parameters}):\n    global seen\n    seen = {seen}\n    return 0.5", scope)
    known = {"text": "good", "gold": "42", "tokens": 3, "row": ROW, "turns": ("good",)}
    assert worker.call_one(scope, "reward", known) == 0.5
    assert scope["seen"] == eval(seen, known | {"given": known, "other": 5})


@pytest.mark.parametrize("value", [0, True, -1, None, np.float32(0.5), torch.tensor(0.25)])
def test_what_counts_as_a_number(value):
    assert worker.call_one({"reward": lambda text: value}, "reward", {"text": ""}) == value


def test_functions_of_one_file_are_components_with_weights_and_none_adds_nothing(tmp_path):
    path = file_of(tmp_path, "def brief(tokens):\n    return -1 if tokens > 5 else tokens / 10\n"
                             "def tested(text, row):\n    return None if 'x' in text else row['tests'][0]\n")
    cfg = own(path, {"brief": 0.5, "tested": 2.0})
    one, none = parts(cfg, "a", "x")
    assert (one["brief"], one["tested"]) == (0.3, 1.0) and none["brief"] == 0.3
    assert none["tested"] != none["tested"] and (one["timed_out"], one["died"]) == (0, 0)
    components = {name: torch.tensor([[one[name], none[name]]], dtype=torch.float64) for name in list_components(cfg)}
    assert as_rewards(components, cfg.weights).total_NG.tolist() == [[0.15 + 2.0, 0.15]]
    assert reward_range(cfg.weights) == (-2.5, 2.5)
    assert parts(own(path, {"brief": 0.5, "tested": 0}), "a")[0].keys() >= {"brief"}
    nothing, = as_rewards(components, {"tested": 1.0}).total_NG.tolist()
    assert nothing[0] == 1 and nothing[1] != nothing[1]


def test_a_function_sees_the_text_up_to_its_end_and_a_row_that_no_other_call_has_changed(tmp_path):
    path = file_of(tmp_path, "def first(text, row):\n    row['tests'].append(9)\n    return -1 if '<' in text else 0\n"
                             "def second(row):\n    return len(row['tests']) / 4\n")
    results = parts(own(path, {"first": 1, "second": 1}, custom_workers=1), "a", "b", "c")
    assert [(p["first"], p["second"]) for p in results] == [(0, 0.5)] * 3
    assert ROW["tests"] == [1, 2]


def test_a_completion_is_judged_once_and_by_its_problem(tmp_path):
    path = file_of(tmp_path, "from pathlib import Path\ndef reward(text, row):\n"
                             "    with (Path(__file__).parent / 'calls').open('a') as file:\n"
                             "        file.write(text + row['id'])\n    return 0\n")
    cfg = own(path, custom_workers=1)
    one, other = {"id": "1"}, {"id": "2"}
    for row in (one, one, other):  # of two sets, perhaps: nothing but the row tells them apart
        score([(("a",), Prompt("0", (1,), "", row), 3)] * 2, 10, cfg)
    assert (tmp_path / "calls").read_text() == "a1a2"


def test_helpers_beside_a_file_may_have_the_names_of_our_modules_and_of_another_files_helpers(tmp_path):
    """And of the file itself: a dataclass looks its module up."""
    source = ("from __future__ import annotations\nfrom dataclasses import dataclass\nimport config, helper\n@dataclass\n"
              "class Two:\n    worth: float = config.WORTH\ndef reward(text):\n    return Two().worth + helper.WORTH\n")
    for folder, worth in (("one", 0.25), ("two", 0.125)):
        (tmp_path / folder).mkdir()
        file_of(tmp_path / folder, f"WORTH = {worth}", "helper.py")
        file_of(tmp_path / folder, "WORTH = 0.5", "config.py")
        assert parts(own(file_of(tmp_path / folder, source, "reward.py")), "a")[0]["custom"] == 0.5 + worth


def test_a_mistake_in_a_helper_is_named_there(tmp_path):
    file_of(tmp_path, "def check(text):\n    x = 1\n\n    raise ValueError('bad row')", "helper37.py")
    path = file_of(tmp_path, "from helper37 import check\ndef reward(text):\n    return check(text)", "any.txt")
    refuses(f"{path}: it raises ValueError in line 4 of helper37.py: bad row .row q.$", parts, own(path), "a")


def test_a_problem_without_an_answer_has_no_accuracy(tmp_path):
    with_gold, = parts(own(file_of(tmp_path, "def reward(text):\n    return 1")), "#### 42")
    without, = parts(own(str(tmp_path / "mine.py")), "#### 42", gold="")
    assert (with_gold["accuracy"], without["custom"], without["disagree"]) == (1, 1, 0)
    assert without["accuracy"] != without["accuracy"] and without["unparsed"] != without["unparsed"]


@pytest.mark.parametrize(("custom", "message"), [
    ("{accuracy: 1}", "reward.custom={'accuracy': 1.0} must be weights of functions whose names are none of accuracy,"),
    ("{timed_out: 1}", "none of accuracy"), ("{custom: 1}", "none of accuracy"),
    ("{mine: .nan}", "reward.custom.mine=nan must be a finite number"),
    ("{}", "reward.custom={} must be 1 or {name: weight} to call functions of reward.custom_file="),
    ("{a: 1}\nreward.custom_seconds=0", "reward.custom_seconds=0 must be above 0"),
    ("{a: 1}\nreward.custom_file=null\nreward.custom_gib=3", "={'a': 1.0} must be left out, or null, unless "),
    ("null\nreward.custom_file=null\nreward.custom_workers=3", "custom_workers=3 must be left out, or null, unless ")])
def test_wrong_settings_are_named(custom, message, tmp_path):
    path = file_of(tmp_path, "")
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")):
        toy_config(tmp_path / "run", f"reward.custom_file={path}", *f"reward.custom={custom}".split("\n"))


def small(tmp_path: Path, path: str, *settings: str) -> config.Config:
    return toy_config(tmp_path / "run", "steps=2", f"reward.custom_file={path}", "reward.accuracy=0", "reward.custom=1",
                      "reward.custom_workers=1", "prune.completions.kind=none", "rollout.group_size=2",
                      "rollout.prompts_per_step=2", "rollout.max_new_tokens=4", "data.eval=null", *settings)


def test_a_call_that_is_slow_is_told_apart_from_one_that_dies_and_its_worth_is_the_users_to_say(tmp_path, capfd):
    path = file_of(tmp_path, "import os, signal\ndef reward(text):\n    while 'slow' in text: pass\n"
                             "    if 'kill' in text: os.kill(os.getpid(), signal.SIGKILL)\n"
                             "    if 'big' in text: bytearray(10**13)\n    return 1")
    cfg = own(path, custom_seconds=0.2, custom_workers=1, custom_ended=-1)
    assert [(p["custom"], p["timed_out"], p["died"]) for p in parts(cfg, "slow", "kill", "big", "good", "slow 2")] == [
        (-1, 1, 0), (-1, 0, 1), (-1, 0, 1), (1, 0, 0), (-1, 1, 0)]
    assert [re.search("a call (.*); its value is -1 ", line)[1] for line in capfd.readouterr().err.splitlines()] == [
        "took more than 0.2 s of computing or of waiting (reward.custom_seconds), and was ended (row q)", "ended its process by signal 9 (row q)",
        "asked for more than 2 GiB of memory (reward.custom_gib) (row q)"]


def test_a_step_of_which_every_process_dies_is_an_error(tmp_path):
    """On the two rows before the run it lives."""
    path = file_of(tmp_path, "import os\ndef reward(text, tokens):\n    return 0 if tokens == 1 else os._exit(0)")
    cfg = small(tmp_path, path, "rollout.temperature=0.1", "data.limit=2")
    refuses(f"reward.custom_file={path}: the process of each of 4 completions died or", train.train, cfg)


def test_a_step_that_some_process_outlives_is_none_and_one_reward_is_enough():
    some = {"custom": torch.tensor([[0.0, torch.nan]]), "died": torch.tensor([[1.0, 0.0]])}
    calls.require_lives(as_rewards(some, {"custom": 1.0}), own("x.py"))
    assert describe_missing(as_rewards(some, {"custom": 1.0}), own("x.py")) == ""
    none = {"custom": torch.full((1, 2), torch.nan), "died": torch.zeros(1, 2)}
    said = describe_missing(as_rewards(none, {"custom": 1.0}), own("x.py"))
    assert said.startswith("none of 2 completions has a reward: every component is None")
    one = as_rewards(none | {"accuracy": torch.zeros(1, 2)}, {"custom": 1.0, "accuracy": 1.0})
    assert describe_missing(one, own("x.py")) == "custom: None for all of 2 completions"
    assert describe_missing(one, Reward()) == ""


@pytest.mark.slow
def test_a_resume_asks_for_the_file_that_the_run_began_with(tmp_path):
    path = file_of(tmp_path, "def reward(text):\n    return len(text) % 2")
    cfg = small(tmp_path, path, "checkpoint.every=1", "steps=1")
    train.train(cfg)
    copy = tmp_path / "run" / "custom_reward.py"
    assert copy.read_text() == Path(path).read_text()
    cfg = config.replace(cfg, steps=2)
    file_of(tmp_path, "def reward(text):\n    return 1")
    refuses("the file of reward.custom_file has changed since .* restore it from "
            f"{copy}, write .*, or start a new run with --set out=", train.train, cfg, resume="always")
    file_of(tmp_path, copy.read_text(), "moved.py")  # the same file at another place is the same
    Path(path).unlink()
    train.train(small(tmp_path, str(tmp_path / "moved.py"), "checkpoint.every=1"), resume="always")
    with pytest.raises(ConfigError, match=f"reward.custom_file={path} cannot be read: .*No such file"):
        train.train(small(tmp_path, path, "checkpoint.every=1", "steps=3"), resume="always")


@pytest.mark.slow
def test_an_evaluation_says_that_the_file_is_not_the_runs(tmp_path, command, capsys):
    path = file_of(tmp_path, "def reward(text):\n    return 0.25")
    cfg = small(tmp_path, path, f"data.eval={tmp_path / 'few.jsonl'}", "eval.limit=2", "eval.max_new_tokens=2",
                "steps=1")
    train.train(cfg)
    given = "--config", tmp_path / "run" / "config.yaml", "--model", tmp_path / "run" / "hf", "--out"
    assert command(evaluation, *given, tmp_path / "before.json") == 0
    assert "has changed" not in capsys.readouterr().err
    file_of(tmp_path, "def reward(text):\n    return 0.5")
    assert command(evaluation, *given, tmp_path / "after.json") == 0
    out, err = capsys.readouterr()
    assert "0.500" in out and f"reward.custom_file has changed since the run began: it was {tmp_path}/run/custom" in err


def test_an_evaluation_tries_the_file_before_it_samples(tmp_path, monkeypatch, command, capsys):
    path = file_of(tmp_path, "def reward(text, row):\n    return row['worth']")
    (tmp_path / "one.jsonl").write_text('{"question": "1 + 1?", "worth": 0.5}\n')
    (tmp_path / "own.yaml").write_text(config.dump(small(tmp_path, path, f"data.train={tmp_path}/one.jsonl")))
    monkeypatch.setattr(evaluation, "sample_responses", None)
    (tmp_path / "two.jsonl").write_text('{"question": "1 + 1?"}\n')
    assert command(evaluation, "--config", tmp_path / "own.yaml", "--model", TOY, "--data", tmp_path / "two.jsonl") == 2
    assert f"reward.custom_file={path}: it raises KeyError in line 2: 'worth'" in capsys.readouterr().err


def test_a_result_is_of_the_rows_that_the_reward_reads(tmp_path):
    """Without a reward, other columns may change."""
    def identified(worth: float, reward: Reward | None) -> dict:
        problem = Problem("0", "q", "", row={"worth": worth})
        return results.identify_set(evaluation.EvalSet("one", [problem], [Prompt("0", (1,), "")], reward))

    reward = own(file_of(tmp_path, "def reward(text):\n    return 0"))
    assert identified(0.5, reward) != identified(0.25, reward) == identified(0.25, reward)
    assert identified(0.5, None) == identified(0.25, None)


def test_the_time_that_loading_takes_is_not_taken_from_the_first_call_of_a_process(tmp_path):
    """Else rewards would depend on which process a completion came to."""
    path = file_of(tmp_path, "import time\ndef work():\n    until = time.process_time() + 0.4\n"
                             "    while time.process_time() < until: pass\nwork()\ndef reward(text):\n"
                             "    work()\n    return 1")
    results = parts(own(path, custom_seconds=0.6, custom_workers=2), *"abcdef")
    assert [(p["custom"], p["timed_out"]) for p in results] == [(1, 0)] * 6


def test_a_change_while_a_run_is_under_way_is_not_seen(tmp_path):
    cfg = own(file_of(tmp_path, "def reward(text):\n    return 0.25"))
    calls.try_functions(cfg, [PROBLEM])
    file_of(tmp_path, "def reward(text):\n    return 0.5")
    assert parts(cfg, "new")[0]["custom"] == 0.25
    calls.try_functions(cfg, [PROBLEM])
    assert parts(cfg, "new")[0]["custom"] == 0.5


def test_check_and_a_run_say_what_is_wrong_with_a_file_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "load_models", None)
    path = file_of(tmp_path, "def score(text):\n    return 1")
    for run in (train.load_task, lambda cfg: train.train(cfg)):
        refuses(r"it has no function 'reward' \(reward.custom\); it has score", run, small(tmp_path, path))


def test_a_child_of_a_function_does_not_answer_for_it(tmp_path):
    path = file_of(tmp_path, "import os, time\ndef reward(text):\n    if os.fork() == 0:\n        return -1\n"
                             "    os.wait()\n    return len(text) / 10")
    texts = ["a" * n for n in range(1, 9)]
    assert [p["custom"] for p in parts(own(path, custom_workers=1), *texts)] == [n / 10 for n in range(1, 9)]


END = "def reward(text, gold, tokens, row):\n    "
# body or whole file -> what is said before the run; None: the run ends well
HOSTILE = {
    "sys.exit": (END + "import sys; sys.exit(0)", r"a call ended its process by an exit of its own \(row toy"),
    "os._exit": (END + "import os; os._exit(0)", r"a call ended its process by an exit of its own \(row toy/train/0\)"),
    "sleeps": (END + "import time; time.sleep(10**6)", "3 s of computing or of waiting"),
    "threads": ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\n" + END + "return 1",
                "it starts threads when it is loaded, which no call would have; start them in the function"),
    "nan": (END + "return float('nan')", r"reward\(\) returns nan; it must be a number in \[-1, 1\]"),
    "2.0": (END + "return 2.0", r"reward\(\) returns 2.0; it must be a number in \[-1, 1\], whose weight is rew"),
    "none": (END + "return None", None),
    "stdout": (END + "import os; os.write(1, b'mine\\n'); return len(text) % 2", None),
    "raises": (END + "return 1 / len(row['nothing'])",
               "it raises KeyError in line 2: 'nothing'; the row has id, question, answer"),
    "own key": (END + "return {}['id']", r"it raises KeyError in line 2: 'id' \(row toy/train/0\)$"),
    "verl's": ("def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return 1",
               r"reward\(\) asks for data_source, solution_str, ground_truth; it can have text, gold, tokens, row, turns"),
    "unpicklable": ("class Odd(Exception):\n    def __init__(self, a, b):\n        self.f = lambda: a\n"
                    "    def __str__(self):\n        raise self\n" + END + "raise Odd(1, 2)",
                    "raises Odd in line 7: a Odd"),
    "row": (END + "row.clear(); row['x'] = row; return len(text) % 2", None),
    "deletes": (END + "import shutil, pathlib\n    shutil.rmtree(pathlib.Path(__file__).parent, ignore_errors=True)\n"
                      "    return len(text) % 2", None),
    "star": ("def reward(*given):\n    return 1", r"reward\(\*given\) must take what it asks for by name"),
    "syntax": ("def reward(text:\n    return 1", "it raises SyntaxError"),
    "import": ("import nowhere_to_be_found", "it raises ModuleNotFoundError in line 1: No module named 'nowhere")}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_end_in_one_line_or_do_no_harm(case, tmp_path, capfd):
    source, message = HOSTILE[case]
    (tmp_path / "own").mkdir()
    path = file_of(tmp_path / "own", source)
    cfg = small(tmp_path, path, "steps=1", "reward.custom_seconds=0.3")
    if message is not None:
        problems = load_problems(cfg.data.train, training=True)[:2]
        refuses(f"^reward.custom_file={path}: [^\n]*{message}", calls.try_functions, cfg.reward, problems)
        return
    train.train(cfg)
    line, = steps_of(tmp_path / "run")
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err and "mine" not in out and "xxx" not in out
    if case == "none":
        assert line["rollout/unscored"] == 4 and "reward/mean" not in line and line["prune/kept"] == 0
        assert "step 1: none of 4 completions has a reward: every component is None" in err
    else:
        assert line["rollout/unscored"] == line["reward/died"] == line["reward/timed_out"] == 0
        assert 0 <= line["reward/mean"] <= 1
