"""Statistics, files that are resumed and graded again, the same numbers alone and inside training."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import survive
import torch
from conftest import ROOT, TOY, toy_config

import data
import eval as evaluation
import train
from config import ConfigError
from infra import dist, runfolder
from infra.results import differences
from preflight import memory
from records import Problem, Prompt, Sample
from rollout import TorchEngine
from verify import statistics


def answers(right: int, n: int) -> list[float]:
    return [1.0] * right + [0.0] * (n - right)


@pytest.mark.parametrize(("correct", "count", "low", "high"), [
    (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (1, 1319, 0.000134, 0.004280)])
def test_wilson_by_the_published_table(correct, count, low, high):
    """Values of the closed form; the first rows stand in Brown, Cai and DasGupta (2001)."""
    assert statistics.wilson(answers(correct, count)) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.7])
def test_wilson_covers_the_truth_at_its_rate(share):
    """Exact coverage over all outcomes of 200 draws, at most 3 points off 95%."""
    def chance(k: int) -> float:
        n = torch.tensor(200.0, dtype=torch.float64)
        return torch.distributions.Binomial(n, torch.tensor(share, dtype=torch.float64)).log_prob(
            torch.tensor(float(k), dtype=torch.float64)).exp().item()
    intervals = [statistics.wilson(answers(k, 200)) for k in range(201)]
    covered = sum(chance(k) for k, (low, high) in enumerate(intervals) if low <= share <= high)
    assert 0.92 < covered < 0.98


@pytest.mark.parametrize(("count", "a", "b"), [
    (30, 0.4, 1.2), (500, 2.0, 1.0), (40, 5.0, 5.0), (8, 2.0, 2.0)])
def test_intervals_of_several_answers_cover_the_truth_at_their_rate(count, a, b):
    """A simulation: problems of Beta-distributed difficulty, 16 answers each.

    The answers to one are not independent, and an interval that took them to be would cover 40 to 80%.
    """
    draw = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(3000):
        mean_N = draw.binomial(16, draw.beta(a, b, count)) / 16
        low, high = statistics.wilson(mean_N, 16)
        covered += low <= a / (a + b) <= high
        low, high = statistics.wilson(answers(round(mean_N.sum() * 16), count * 16))
        naive += low <= a / (a + b) <= high
    assert 0.93 < covered / 3000 < 0.975 and naive / 3000 < 0.85


@pytest.mark.parametrize("n", [1, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(answers(right, n), k))
            share = sum(map(any, subsets)) / len(subsets)
            assert statistics.pass_at(k, right, n) == pytest.approx(share, abs=1e-12)


def voted(*given: str, gold: str = "7") -> list[str | None]:
    verdicts = ["right" if answer == gold else "wrong" for answer in given]
    return [statistics.vote({"answer": answer or None, "verdict": verdict})
            for answer, verdict in zip(given, verdicts, strict=True)]


@pytest.mark.parametrize(("given", "value"), [
    (["7", "7", "8"], 1), (["7", "8", "8"], 0), (["7", "8"], 0.5), (["7", "8", "9"], 1 / 3),
    (["8", "8.0", "7"], 0), (["", "", "7"], 1), (["", " "], 0), (["x", "$x$", "7"], 0),
    (["right", "right", "7"], 0)])
def test_majority(given, value):
    assert statistics.majority(voted(*given)) == pytest.approx(value)


def test_majority_at_k_is_over_blocks():
    votes = voted("7", "7", "8", "7", "8", "8", "7")
    assert statistics.majority_at(2, votes) == pytest.approx((1 + 0.5 + 0) / 3)


@pytest.mark.parametrize(("first", "second", "p"), [(0, 0, 1), (5, 5, 1), (0, 6, 2 / 64), (1, 8, 20 / 512),
                                                    (10, 2, 158 / 4096)])
def test_mcnemar_by_hand(first, second, p):
    assert statistics.mcnemar(first, second) == statistics.mcnemar(second, first) == pytest.approx(p)


def test_paired_intervals_cover_the_truth_at_their_rate(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    draw = np.random.default_rng(1)
    bounds = [statistics.paired_interval(draw.choice([-1, 0, 1], 200, p=[0.1, 0.7, 0.2])) for _ in range(300)]
    assert 0.91 < np.mean([low <= 0.1 <= high for low, high in bounds]) < 0.98


def held_out(path, count: int) -> str:
    rows = (ROOT / "toy" / "test.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(random.Random(0).sample(rows, count)))
    return str(path)


def evaluated(tmp_path, *arguments: str) -> tuple[dict, str]:
    command = [sys.executable, "eval.py", *arguments, "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "out.json").read_text()), done.stdout


@pytest.mark.parametrize("sampled", [[], pytest.param(["eval.n=4", "eval.temperature=0.8", "eval.top_p=0.9"],
                                                      marks=pytest.mark.slow)])
def test_training_and_the_command_give_identical_numbers(sampled, tmp_path):
    """The exported model, evaluated with the run's config by eval.py, repeats the run's last evaluation."""
    data_file = held_out(tmp_path / "held_out.jsonl", 40)
    prompt = "Only the number."
    train.train(toy_config(tmp_path / "run", "model.dtype=float32", "steps=1", f"data.eval={data_file}",
                           f"data.system_prompt={prompt}", *sampled))
    last = runfolder.read(tmp_path / "run" / "metrics.jsonl")[-1]
    result, printed = evaluated(tmp_path, "--model", str(tmp_path / "run" / "hf"), "--config",
                                str(tmp_path / "run" / "config.yaml"))
    assert result["head"]["system_prompt"] == prompt
    result = result["results"]["held_out"]
    for key in ("accuracy", "low", "high", "lenient", "length", "truncated", "unparsed"):
        assert result[key] == last[f"eval/held_out/{key}"]
    if sampled:
        assert (result["pass"]["4"], result["majority"]["4"]) == (last["eval/held_out/pass"],
                                                                  last["eval/held_out/majority"])
    assert f"{result['accuracy']:.1%}" in printed


@pytest.mark.slow
def test_sixteen_answers_to_each_problem(tmp_path):
    """pass@k of the file is the share of all subsets of its responses; graded again it is the same file.

    Accuracy by level is that of the problems of each level.
    """
    rows = list(map(json.loads, Path(held_out(tmp_path / "few.jsonl", 12)).read_text().splitlines()))
    levels = [json.dumps(row | {"level": f"Level {i % 2}"}) + "\n" for i, row in enumerate(rows)]
    (tmp_path / "few.jsonl").write_text("".join(levels))
    result, printed = evaluated(tmp_path, "--model", str(TOY), "--data", str(tmp_path / "few.jsonl"), "--n",
                                "16", "--temperature", "1", "--max-new-tokens", "48")
    found = result["results"]["few"]
    right_NK = [[r["verdict"] == "right" for r in p["responses"]] for p in found["problems"]]
    assert len({r["text"] for p in found["problems"] for r in p["responses"]}) > 16
    for k in (1, 2, 4, 8, 16):
        subsets = [[any(s) for s in itertools.combinations(right_K, k)] for right_K in right_NK]
        assert found["pass"][str(k)] == pytest.approx(sum(sum(x) / len(x) for x in subsets) / 12, abs=1e-12)
    assert found["accuracy"] == found["pass"]["1"] == pytest.approx(sum(map(sum, right_NK)) / 192)
    assert (found["low"], found["high"]) == statistics.wilson([sum(right_K) / 16 for right_K in right_NK], 16)
    assert found["groups"]["level"]["1"]["accuracy"] == pytest.approx(sum(map(sum, right_NK[1::2])) / 96)
    again, _ = evaluated(tmp_path, "--rescore", str(tmp_path / "out.json"))
    assert again == result and "few by level: 0 " in printed
    compared = subprocess.run([sys.executable, "eval.py", "--compare", *[str(tmp_path / "out.json")] * 2],
                              cwd=ROOT, capture_output=True, text=True)
    assert "+0.0%" in compared.stdout and compared.returncode == 0


def test_math_verifys_verdicts_stand_beside_ours(tmp_path):
    """It reads the argument of a logarithm over the sign of multiplication."""
    problems = [{"id": str(i), "gold": gold, "question": "q", "level": None, "subject": None, "responses": [{
        "id": str(i), "k": 0, "text": rf"\boxed{{{text}}}", "tokens": 1, "finished": True}]}
        for i, (gold, text) in enumerate([("5", "5"), (r"\ln 6", r"\ln 2 \cdot 3"), ("6", "7")])]
    for problem in problems:
        problem["responses"][0] |= evaluation.grade([(problem["gold"], problem["responses"][0]["text"])])[0]
    result = {"few": evaluation.summarise(problems)}
    both = evaluation.with_math_verify(result)
    assert "math_verify" not in result["few"] and both["few"]["math_verify"] == 2 / 3
    head, row, *differ = evaluation.results_table(both).splitlines()
    assert head.endswith("math-verify") and row.endswith("66.7%") and row.split()[3] == "33.3%"
    assert len(differ) == 1
    assert differ[0].startswith(r"few 1: '\\ln 2 \\cdot 3' for '\\ln 6' is wrong; math-verify reads ")
    assert "math-verify" not in evaluation.results_table(result)


def written(path, *rights: str, other: str = "") -> str:
    """A result in which each problem's first answer is right or not."""
    problems = [{"id": str(i), "gold": "1", "responses": [{
        "id": str(i), "k": 0, "text": "", "answer": "1", "tokens": 1, "finished": True, "verdict": right,
        "lenient": True, "last_number": True}]} for i, right in enumerate(rights)]
    path.write_text(json.dumps({"head": {"sets": {"few": {"data": other, "count": len(rights)}}},
                                "results": {"few": evaluation.summarise(problems)}}))
    return str(path)


def test_two_results_are_compared_problem_by_problem(tmp_path):
    """Eight got better and one worse: a difference of 7 of 20, p = 20/512."""
    first = written(tmp_path / "a.json", *["wrong"] * 8, *["right"] * 12)
    second = written(tmp_path / "b.json", *["right"] * 19, "wrong")
    lines = evaluation.comparison_table(*(evaluation.read_result(Path(p)) for p in (first, second))).splitlines()
    cells = lines[1].replace("[", " ").replace(",", "").replace("]", "").split()
    name, count, a, b, difference, low, high, p = cells
    assert (name, count, a, b, difference) == ("few", "20", "60.0%", "95.0%", "+35.0%")
    assert float(p) == pytest.approx(20 / 512, abs=1e-4) and 0 < float(low[:-1]) < 35 < float(high[:-1])
    with pytest.raises(ConfigError, match="few holds other problems in the two results"):
        evaluation.comparison_table(evaluation.read_result(Path(first)), evaluation.read_result(
            Path(written(tmp_path / "c.json", "right", other="x"))))


def test_heads_are_compared_key_by_key_and_a_head_names_its_sets(tmp_path):
    old, new = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 2, "d": 4}, "e": 5}
    expected = ["b.d was 3 and is 4", "e was None and is 5", "a was 1 and is None"]
    assert list(differences(old, new)) == expected
    (tmp_path / "x.json").write_text('{"head": {}, "results": {}}')
    with pytest.raises(ConfigError, match="x.json is not a result of eval.py --out"):
        evaluation.read_result(tmp_path / "x.json")


@pytest.mark.slow
def test_an_evaluation_goes_on_on_another_number_of_ranks_after_kill_9(tmp_path):
    """On one rank, on two, and killed on two and continued on one: one file, but for rounding."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "2"]
    data_file = held_out(tmp_path / "few.jsonl", 60)

    def command(name: str) -> list[str]:
        return ["eval.py", "--model", str(TOY), "--data", data_file, "--samples", "4", "--temperature", "1",
                "--slots", "8", "--max-new-tokens", "24", "--out", str(tmp_path / name)]

    def text(name: str) -> list[str]:
        found = json.loads((tmp_path / name).read_text())["results"]["few"]
        return [r["text"] for p in found["problems"] for r in p["responses"]]

    assert subprocess.run([sys.executable, *command("one")], cwd=ROOT, capture_output=True).returncode == 0
    assert subprocess.run([*torchrun, *command("two")], cwd=ROOT, capture_output=True).returncode == 0
    begun = subprocess.Popen([*torchrun, *command("cut")], cwd=ROOT, stderr=subprocess.DEVNULL)
    partial = tmp_path / "cut.partial"
    while not (partial.is_file() and partial.read_text().count("\n") > 70):
        with pytest.raises(subprocess.TimeoutExpired):
            begun.wait(0.02)
    for pid in survive.family(begun.pid):
        os.kill(pid, signal.SIGKILL)
    begun.wait()
    assert 64 <= partial.read_text().count("\n") - 1 < 240
    other = [*torchrun, *command("cut"), "--seed", "1"]
    refused = subprocess.run(other, cwd=ROOT, capture_output=True, text=True)
    assert "cut.partial holds responses of other settings: sampling.seed was 0 and is 1" in refused.stderr
    assert refused.returncode and "Timeout" not in refused.stderr
    assert subprocess.run([sys.executable, *command("cut")], cwd=ROOT, capture_output=True).returncode == 0
    assert text("cut") == text("one") == text("two")


def test_what_a_verifier_judges_anew_is_judged_by_rescore(tmp_path):
    result, _ = evaluated(tmp_path, "--model", str(TOY), "--data", held_out(tmp_path / "few.jsonl", 3))
    for problem in result["results"]["few"]["problems"]:
        problem["responses"][0] |= {"text": rf"\boxed{{{problem['gold']}}}", "verdict": "wrong"}
    again = evaluation.rescore(result)
    assert again["results"]["few"]["accuracy"] == 1 and again["head"]["sets"] == result["head"]["sets"]


def test_the_verifiers_version_is_that_of_its_code(tmp_path, monkeypatch):
    """Another text or another name of a file of verify/ is another version."""
    copy = tmp_path / "verify"
    shutil.copytree(ROOT / "verify", copy, ignore=shutil.ignore_patterns("__pycache__"))
    true = evaluation.verifier_version()
    monkeypatch.setattr(evaluation.verify, "__file__", str(copy / "__init__.py"))
    assert evaluation.verifier_version() == true
    (copy / "extract.py").write_text((copy / "extract.py").read_text() + "MARKS = 1\n")
    edited = evaluation.verifier_version()
    (copy / "extract.py").rename(copy / "find.py")
    assert len({true, edited, evaluation.verifier_version()}) == 3


class Interrupted(Exception):
    pass


def test_an_interrupted_evaluation_goes_on_to_the_same_file(tmp_path, monkeypatch, capsys):
    """Killed in its third chunk of five, with a line half written."""
    monkeypatch.setattr(dist, "close", lambda: None)  # the suite's own group
    monkeypatch.setattr(evaluation, "ROUNDS_OF_SLOTS", 1)
    data_file, generate, calls = held_out(tmp_path / "few.jsonl", 10), TorchEngine.generate, []

    def dies(self, prompts, *rest):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise Interrupted
        return generate(self, prompts, *rest)

    def run(name: str, *more: str) -> int:
        monkeypatch.setattr(sys, "argv", [
            "eval.py", "--model", str(TOY), "--data", data_file, "--n", "2", "--slots", "4",
            "--temperature", "1", "--out", str(tmp_path / name), *more])
        return evaluation.main()

    run("whole.json")
    monkeypatch.setattr(TorchEngine, "generate", dies)
    with pytest.raises(Interrupted):
        run("cut.json")
    partial = tmp_path / "cut.json.partial"
    partial.write_text(partial.read_text() + '{"set": "few", "resp')
    assert run("cut.json", "--seed", "1") == 2
    said = capsys.readouterr().err
    assert "cut.json.partial holds responses of other settings: sampling.seed was 0 and is 1" in said
    calls.clear()
    calls.extend([0] * 3)
    run("cut.json")
    assert sum(calls) == 12 and not partial.exists()
    assert (tmp_path / "cut.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    run("cut.json")
    assert sum(calls) == 12
    assert run("cut.json", "--top-p", "0.5") == 2
    said = capsys.readouterr().err
    assert "cut.json holds responses of other settings: sampling.top_p was 1.0 and is 0.5" in said


def test_scores_count_what_the_engine_wrote():
    tokenizer, texts, asked = data.Tokenizer(TOY), ["#### 1", "#### 2 2 2", "#### 1"], []

    class Scribe:
        def generate(self, prompts, seeds, *rest):
            asked.extend(seeds)
            return [Sample(x, (-1.0,) * len(x), i % 3 > 0) for i, x in enumerate(tokenizer.encode(texts))]

    problems = [Problem(str(i), "q", "1") for i in range(3)]
    few = evaluation.Set("few", problems, [Prompt(p.id, (5,), p.answer) for p in problems])
    result = evaluation.evaluate(Scribe(), tokenizer, few, evaluation.Sampling(7))
    lengths = [len(x) for x in tokenizer.encode(texts)]
    scores = [result[key] for key in ("accuracy", "truncated", "length")]
    assert scores == pytest.approx([2 / 3, 1 / 3, sum(lengths) / 3])
    evaluation.evaluate(Scribe(), tokenizer, few, evaluation.Sampling(7, seed=1))
    assert len(set(asked)) == 6  # a seed for each problem and run


def test_the_command_passes_its_arguments_on(tmp_path, monkeypatch):
    asked, generate = [], TorchEngine.generate

    def spy(self, prompts, seeds, *rest):
        asked.append((data.Tokenizer(TOY).decode(prompts[0]), rest[:3], self.slots, seeds))
        return generate(self, prompts, seeds, *rest)

    monkeypatch.setattr(TorchEngine, "generate", spy)
    monkeypatch.setattr(dist, "close", lambda: None)  # the suite's own group
    (tmp_path / "few.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    for seed in "12":
        monkeypatch.setattr(sys, "argv", [
            "eval.py", "--model", str(TOY), "--data", str(tmp_path / "few.jsonl"),
            "--system-prompt", "Zebra.", "--temperature", "0.7", "--top-p", "0.9", "--seed", seed,
            "--slots", "3", "--max-new-tokens", "5"])
        evaluation.main()
    assert all("Zebra." in text and rest == (5, 0.7, 0.9) and slots == 3 for text, rest, slots, _ in asked)
    assert asked[0][3] != asked[1][3]


@pytest.mark.parametrize(("name", "expected"), [
    ("cppo_gsm8k", ("gsm8k", 1, 0.0, 1.0, 1024, "<answer> answer here </answer>")),
    ("cppo_math", ("math500", 1, 0.0, 1.0, 1024, "I hope it is correct'")),
    ("cppo_amc_aime", ("amc23,aime24", 4, 0.6, 0.95, 3072, "I hope it is correct'")),
    ("dapo", ("aime24", 32, 1.0, 0.7, 20480, "within \\boxed{}."))])
def test_protocols_are_presets_that_arguments_change(name, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", "m", "--protocol", name, "--slots", "7"])
    args = evaluation.arguments()
    assert (args.data, args.n, args.temperature, args.top_p, args.max_new_tokens) == expected[:5]
    assert expected[5] in args.system_prompt and args.slots == 7
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--n", "2", "--temperature", "0.5", "--system-prompt", "S"])
    args = evaluation.arguments()
    changed = (args.data, args.n, args.temperature, args.top_p, args.system_prompt)
    assert changed == (expected[0], 2, 0.5, expected[3], "S")


def test_all_ranks_take_the_same_kind_of_device(monkeypatch):
    """Two processes on a machine with one GPU: none takes it, and asking for it is an error on both."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert memory.find_device("auto").type == "cpu"
        shown = "device=cuda, but this machine shows 1 CUDA devices to 2 processes"
        with pytest.raises(ConfigError, match=shown):
            memory.find_device("cuda")


@pytest.mark.parametrize(("changes", "message"), [
    (["--model", "nowhere/at all"],
     "model.path='nowhere/at all' is no folder, and could not be downloaded from the hub"),
    (["--max-new-tokens", "5000"], "the prompts and --max-new-tokens allow sequences of 50"),
    (["--temperature", "-1"], "--temperature must be at least 0"), (["--n", "0"], "--n must be at least 1"),
    (["--n", "4", "--temperature", "1", "--k", "2,8"], "--k must be of numbers in 1..4 (--n)"),
    (["--n", "4"], "--n must be 1 at --temperature 0: greedy answers are all the same"),
    (["--data", "gsm9k"], "data set 'gsm9k' is not known"),
    (["--data", "no.jsonl"], "data file no.jsonl not found"),
    (["--data", "minerva", "--data-dir", "nowhere"], "data file nowhere/minerva_math.jsonl not found"),
    (["--rescore", "no.json"], "result file no.json not found"),
    (["--rescore", "toy/model/config.json"], "toy/model/config.json is not a result of eval.py --out"),
    (["--compare", "README.md", "README.md"], "README.md: not valid JSON"),
    (["--out", "nowhere/x.json"], "--out: folder nowhere not found"),
    (["--top-p", "0"], "--top-p must be in (0, 1]"),
    (["--data", "toy/test.jsonl,toy/test.jsonl"], "evaluation set 'test' is named twice"),
    (["--device", "cuda"], "device=cuda, but this machine shows"),
])
def test_bad_input_is_one_line_and_status_2(changes, message, monkeypatch, capsys):
    if "cuda" in changes and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(dist, "close", lambda: None)  # the suite's own group
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", str(TOY), "--data", "toy/test.jsonl", *changes])
    assert evaluation.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") and said.count("\n") == 1
