"""Components by hand, verification in processes that are killed, a user's function, the command's table."""

import itertools
import json

import pytest

import reward
from config import Reward
from records import Prompt
from reward import COMPONENTS, Completion, reward_range, score
from verify import grade as grading

FULL = "<think>6*7</think>\n<answer>42</answer>"


def parts_of(text: str, gold: str = "42", tokens: int = 1, longest: int = 10, **settings: object) -> dict[str, float]:
    cfg = Reward(**({"accuracy": 0.0} | settings))
    problem = Prompt("q", (1,), gold)
    return dict(zip(reward.list_components(cfg), score([((text,), problem, tokens)], longest, cfg)[0], strict=True))


def total(parts: dict[str, float], cfg: Reward) -> float:
    return sum(weight * parts[name] for name, weight in cfg.weights.items())


@pytest.mark.parametrize(("text", "gold", "right"), [
    (FULL, "42", 3.0), ("<answer>42</answer>", "42", 2.0), ("<answer>42 apples</answer>", "42", 1.5),
    ("<think>6*7</think>\n<answer>$42.0</answer>", "42", 2.5), ("<think>6*7</think>\n<answer>41</answer>", "42", 1.0),
    ("<answer>6 or 42</answer>", "42", 0.0), ("<answer>1,234</answer>", "1,234", 2.0), ("42", "42", 0.0),
    (FULL + "\nand more", "42", 3.0), (FULL + " and more", "42", 2.0)])
def test_cppos_gsm8k_reward_is_a_weighted_sum_of_components(text, gold, right):
    """2 for the exact answer, 1.5 for the same single number, 1 for the format: arXiv:2503.22342's code."""
    weights = {"tag_exact": 0.5, "tag_number": 1.5, "format": 1.0}
    assert total(parts_of(text, gold, **weights), Reward(accuracy=0, **weights)) == right


@pytest.mark.parametrize(("settings", "text", "right"), [
    ({"accuracy": 2, "format": 1},
     r"<think>a</think>" "\n" r"<answer>It is $\boxed{\frac12}$.</answer>", 3),  # CPPO
    ({"accuracy": 2, "format": 1}, r"so $\boxed{0.5}$", 2),
    ({"accuracy": 0.9, "boxed": 0.1}, r"\boxed{1/2}", 1.0),
    ({"accuracy": 0.9, "boxed": 0.1}, r"\boxed{2}", 0.1),  # GRESO
    ({"accuracy": 0.9, "boxed": 0.1}, "Answer: 2", 0.0),
    ({"accuracy": 1, "wrong": -1}, "Answer: 1/2", 1), ({"accuracy": 1, "wrong": -1}, "Answer: 2", -1),  # DAPO
    ({"accuracy": 1, "wrong": -1}, "", -1)])
def test_published_rewards_are_settings(settings, text, right):
    assert total(parts_of(text, "1/2", **settings), Reward(**settings)) == pytest.approx(right)


@pytest.mark.parametrize(("name", "text", "value"), [
    ("boxed", r"\boxed{}", 0.0), ("boxed", r"\boxed{1} \boxed{", 0.0), ("boxed", "#### 1", 0.0),
    ("format", "so\n<think>a</think>\n<answer>b</answer>", 0.0), ("tag_number", "<answer>42 or 6</answer>", 0.0),
    ("tag_exact", "<answer>1</answer> no <answer>42</answer>", 1.0),
    ("accuracy", "42", 0.0), ("wrong", "#### 42", 0.0)])
def test_components_by_hand(name, text, value):
    assert COMPONENTS[name][0](Completion(text, "42", 1, 10, "#### 42" in text, Reward())) == pytest.approx(value)


def test_the_soft_punishment_of_length():
    """DAPO's own lengths: nothing up to 16,384 tokens, half of it at 18,432, all of it from 20,480 on."""
    cfg = {"overlong": 1.0, "overlong_tokens": 4096}
    lengths = (1, 16_384, 18_432, 20_480, 20_481, 40_000)
    assert [parts_of("", tokens=t, longest=20_480, **cfg)["overlong"] for t in lengths] == [0, 0, -0.5, -1, -1, -1]


def test_the_span_of_rewards_holds_every_component():
    assert reward_range({"accuracy": 2.0, "overlong": 1.0}) == (-1, 2)
    assert reward_range({"accuracy": 1.0, "wrong": -1.0}) == (-1, 1)
    assert reward_range({"accuracy": 1.0, "format": -0.5, "overlong": -3.0}) == (-0.5, 4)
    texts = ["", FULL, r"\boxed{42} a b c a b c", "<think>\na\n</think>\n<answer>\n42\n</answer>", "\ud800\x00"]
    for name, (_, low, high) in COMPONENTS.items():
        settings = {name: 1.0} | ({"overlong_tokens": 5} if name == "overlong" else {})
        for text, tokens in itertools.product(texts, (1, 7, 99)):
            assert low <= parts_of(text, tokens=tokens, **settings)[name] <= high  # so none is nan
    assert reward_range({"custom": 0.5, "mine": -2.0}) == (-2.5, 2.5)


@pytest.mark.parametrize(("text", "gold", "notes"), [
    ("#### 42", "42", (0, 0, 0)), ("#### 41", "42", (0, 0, 0)),
    ("so 42", "42", (1, 0, 1)), ("", "42", (1, 0, 0)),
    (r"\boxed{42} after 3 days", "42", (0, 0, 1)), (r"\boxed{x}", "x", (0, 0, 0)),
    (r"\boxed{\frac{1}{}}", r"\frac{1}{2}", (1, 0, 0)), (r"\boxed{9^{9^{9^{9}}}}", "1", (0, 1, 0))])
def test_notes_tell_what_could_not_be_graded(text, gold, notes, monkeypatch):
    monkeypatch.setattr(grading, "VERIFY_SECONDS", 1.0)
    grading.begin_verdict.cache_clear()
    parts = parts_of(text, gold, accuracy=1.0)
    assert tuple(parts[name] for name in reward.REPORTED_RATES) == notes


def test_the_command_counts_by_category(tmp_path, command, refused, capsys):
    row = {"gold": "1", "completion": "#### 1", "correct": True, "category": "easy"}
    rows = [row, row | {"completion": "#### 2"}, row | {"correct": False, "category": "odd"},
            row | {"completion": "", "correct": False, "category": "odd"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command(reward, "--cases", tmp_path / "c.jsonl") == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["easy", "2", "50.0%", "0", "1"] in lines and ["odd", "2", "50.0%", "1", "0"] in lines
    assert ["total", "4", "50.0%", "1", "1"] in lines
    assert "false negative: easy: gold '1', answer '2', judged wrong" in printed
    (tmp_path / "c.jsonl").write_text("[]\n")
    said = refused(reward, "--cases", tmp_path / "c.jsonl")
    assert said == f"error: {tmp_path / 'c.jsonl'}:1: the 'gold' of a case must be a str, not None"
