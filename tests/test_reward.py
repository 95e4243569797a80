"""Extraction, verification and components, on cases written out by hand."""

import pytest

import reward
from reward import accuracy, extract, last_boxed, score


@pytest.mark.parametrize(("text", "answer"), [
    ("so it is #### 12", "12"),
    ("#### 1\nno, wait\n#### 2,125\nthat is all", "2,125"),
    (r"\boxed{\frac{1}{2}} and then \boxed{ x^{2} }", " x^{2} "),
    (r"first \boxed{3}, then \boxed{4", "3"),
    (r"#### 5, or \boxed{6}", "6"),
    ("<think>2</think>\n<answer> 7 </answer>", "7"),
    ("just 12", None),
    ("", None),
])
def test_extract(text, answer):
    assert extract(text) == answer


@pytest.mark.parametrize(("text", "gold", "right"), [
    ("#### 12", "12", True), ("#### 12.", "12", True), ("#### $12", "12", True), ("#### 12.0", "12", True),
    ("#### 2,125", "2125", True), ("#### 2125", "2,125", True), ("#### -3", "3", False), ("#### 21", "12", False),
    ("####", "12", False), ("#### ", "0", False), ("no mark 12", "12", False),
    (r"\boxed{\frac{1}{2}}", "0.5", True), (r"\boxed{\dfrac12}", r"\frac{1}{2}", True), (r"\boxed{1/2}", "0.5", True),
    (r"\boxed{\text{east}}", "east", True), (r"\boxed{west}", "east", False), (r"\boxed{}", "east", False),
    (r"\boxed{x + 1}", "1+x", True), (r"\boxed{(1, 2)}", "(2, 1)", False), (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
    (r"\boxed{3 4}", "34", False), (r"\boxed{1 1/2}", "11/2", False), (r"\boxed{(1,234)}", "(1234)", False),
    (r"\boxed{-1,234.5}", "-1234.5", True), (r"\boxed{x = 5}", "x=5", True), (r"so $\boxed 7$.", "7", True),
    (r"\boxed{1/0}", "1", False), (r"\boxed{\frac{1}{0}}", "1", False),
])
def test_accuracy(text, gold, right):
    assert accuracy(text, gold) == right


@pytest.mark.parametrize("answer", [
    "99**98**97", "9^{9^{9^{9}}}", "((((" * 5000, "{" * 100_000, "9" * 5000, "\x00", "1e999999999"])
def test_hostile_answers_are_wrong_and_end(answer, monkeypatch):
    """The limit is lowered so that the suite stays fast; what is killed is a real math-verify."""
    monkeypatch.setattr(reward, "VERIFY_SECONDS", 1.0)
    assert accuracy(rf"\boxed{{{answer}}}", "1") == 0
    monkeypatch.undo()
    name = "abcdefgh"[len(answer) % 8]  # a question that is not in the cache
    assert accuracy(rf"\boxed{{{name}+{len(answer)}}}", f"{len(answer)}+{name}") == 1  # a killed process is replaced


FULL = "<think>6*7</think>\n<answer>42</answer>"


@pytest.mark.parametrize(("text", "gold", "total"), [
    (FULL, "42", 3.0),
    ("<answer>42</answer>", "42", 2.0),
    ("<answer>42 apples</answer>", "42", 1.5),
    ("<think>6*7</think>\n<answer>$42.0</answer>", "42", 2.5),
    ("<think>6*7</think>\n<answer>41</answer>", "42", 1.0),
    ("<answer>6 or 42</answer>", "42", 0.0),
    ("<answer>1,234</answer>", "1,234", 2.0),
    ("42", "42", 0.0),
    (FULL + "\nand more", "42", 3.0),
    (FULL + " and more", "42", 2.0),
])
def test_cppos_gsm8k_reward_is_a_weighted_sum_of_components(text, gold, total):
    """2 for the exact answer, 1.5 for the same single number, 1 for the format: spec of arXiv:2503.22342's code."""
    weights = {"tag_exact": 0.5, "tag_number": 1.5, "format": 1.0}
    parts = score(text, gold, 1, weights, 1, None)
    assert parts.keys() == weights.keys()
    assert sum(weights[name] * value for name, value in parts.items()) == total


def test_edges_of_the_components():
    assert reward.last_tag("<answer>1</answer> no <answer>2</answer>") == "2"
    assert reward.think_format("so\n<think>a</think>\n<answer>b</answer>", "") == 0
    assert reward.tag_number("<answer>42 or 6</answer>", "42") == 0
    assert score("x", "1", 1, {"accuracy": -1.0}, 1, None) == {"accuracy": 0.0}
    assert accuracy(r"\boxed{(1,2)}", "1<x<2") == 1  # math-verify is not symmetric: the gold answer comes first


def test_the_soft_punishment_of_length_by_hand():
    """DAPO's own lengths: nothing up to 16,384 tokens, half of it at 18,432, all of it from 20,480 on."""
    punished = [reward.soft_overlong(tokens, 20_480, 4_096) for tokens in (1, 16_384, 18_432, 20_480, 20_481, 40_000)]
    assert punished == [0, 0, -0.5, -1, -1, -1]
    parts = score("#### 2", "2", 9, {"accuracy": 1.0, "overlong": 0.5}, longest=10, cache=4)
    assert parts == {"accuracy": 1.0, "overlong": -0.75}


def test_the_span_of_rewards():
    assert reward.span({"accuracy": 2.0, "overlong": 1.0}) == (-1, 2)
    assert reward.span({"accuracy": 1.0, "format": -0.5, "overlong": -3.0}) == (-0.5, 4)


def test_nested_boxes_and_escaped_braces():
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1 + \boxed{2}} }") == "2"
    assert last_boxed(r"{ \boxed {3}") == "3"


def test_last_boxed_reads_its_text_once():
    """Scanning once per brace would keep this test from ever ending."""
    assert last_boxed("\\boxed{" * 200_000 + "{" * 1_000_000) is None
