"""Whole runs with the real vLLM, each in a process of its own: training, ranks, faults, resuming.

`make test-vllm` runs them in float32 with its CPU build; `make test-gpu` on CUDA in bfloat16 (`device` and
`model.dtype` are auto), where what is equal on the CPU is equal up to rounding.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PRECISION, ROOT, write_tiny
from test_vllm import MODELS, SIZE

from infra import runfolder

pytestmark = pytest.mark.vllm

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "2"]
two_ranks = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="on CUDA two ranks need two devices")


def run(*command: str | Path) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_WORLD_SIZE")}
    return subprocess.run([str(c) for c in command], cwd=ROOT, env=env, capture_output=True, text=True)


def toy(*settings: str) -> list[str]:
    return ["--config", "cppo_toy.yaml", *(word for s in ("rollout.engine=vllm", *settings) for word in ("--set", s))]


def after(patch: str, *settings: str) -> list[str]:
    """train.py, after a patch of the code."""
    code = f"import sys, rollout_vllm, train\n{patch}\nsys.exit(train.main())"
    return [sys.executable, "-c", code, *toy(*settings)]


def steps_of(folder: Path) -> list[dict]:
    """What was logged for each step, without the times."""
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))}
            for line in runfolder.read_log(folder / "metrics.jsonl") if "train/loss" in line]


def is_in_step(line: dict) -> bool:
    """Whether the engine sampled from the policy that is trained. A step has rarer tokens than test_vllm.py."""
    return line["mismatch/logp_abs_mean"] < PRECISION.mean and line["mismatch/logp_abs_max"] < 10 * PRECISION.largest


ADAPTER = ["model.lora.rank=8", "optim.lr=1e-3"]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "settings", "steps"), [
    pytest.param([sys.executable], [], 15, id="1 rank"),
    pytest.param([sys.executable], ["rollout.sleep=always"], 15, id="1 rank, asleep"),
    pytest.param(TORCHRUN, [], 40, id="2 ranks", marks=two_ranks),
    pytest.param([sys.executable], ADAPTER, 40, id="lora, 1 rank"),
    pytest.param(TORCHRUN, [*ADAPTER, "rollout.sleep=always"], 15, id="lora, 2 ranks, asleep", marks=two_ranks)])
def test_the_toy_learns(launcher, settings, steps, tmp_path):
    done = run(*launcher, "train.py", *toy(f"out={tmp_path / 'run'}", f"steps={steps}", *settings))
    assert done.returncode == 0, done.stderr
    lines = runfolder.read_log(tmp_path / "run" / "metrics.jsonl")
    before, *_, learnt = (line for line in lines if "eval/test/accuracy" in line)
    assert before["eval/test/high"] < 0.4 and learnt["eval/test/low"] > 0.8
    assert len(steps_of(tmp_path / "run")) == steps
    chosen = json.loads((tmp_path / "run" / "env.json").read_text())["chosen"]
    assert chosen.get("rollout.sleep") == (None if "rollout.sleep=always" in settings else "never")
    for line in steps_of(tmp_path / "run"):
        assert is_in_step(line) and line["mismatch/logp_abs_mean"] > 0
        assert line["mismatch/ess"] > 0.99
    print(json.dumps({key: learnt[f"eval/test/{key}"] for key in ("accuracy", "low", "high")}))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_sharded_weights_arrive_whole_and_two_ranks_can_hold_one_engine(kind, tmp_path):
    """Policies under FSDP2. The same samples from one engine per rank as from one engine over both."""
    size = {"std": 0.15, "hidden_size": 128, "tie_word_embeddings": kind == "tied"}
    folders = [write_tiny(tmp_path / str(seed), seed=seed, **size) for seed in (1, 2)]
    alone, together = (json.loads(run(*TORCHRUN, "tests/vllm_ranks.py", *folders, ranks).stdout.splitlines()[-1])
                       for ranks in (1, 2))
    assert all(rank["agrees"] for rank in alone + together)
    if PRECISION.exact:
        assert [rank["tokens"] for rank in alone] == [rank["tokens"] for rank in together]


def test_the_preflight_passes():
    right = run(sys.executable, "train.py", *toy(), "--check")
    assert right.returncode == 0 and "FAIL" not in right.stdout, right.stdout + right.stderr


LATE = """
from model import Decoder
sync = rollout_vllm.VLLMEngine.sync
def late(self, policy):
    sync(self, getattr(self, "last", policy))
    self.last = Decoder(policy.shape)
    full = rollout_vllm.dist.gather_full
    self.last.load_state_dict({name: full(p.detach()).clone() for name, p in policy.named_parameters()})
rollout_vllm.VLLMEngine.sync = late
"""


def test_preflight_and_metric_see_an_engine_one_update_behind_and_the_correction_weighs(tmp_path):
    """It has the weights of the sync before. For the metric the preflight, which would stop the run, is off."""
    checks = run(*after(LATE), "--check")
    assert checks.returncode == 2 and "FAIL  engine's log-probs" in checks.stdout, checks.stdout + checks.stderr
    done = run(*after(LATE + """
train.checks.before_run = lambda cfg, ready: ready
""", f"out={tmp_path / 'run'}", "steps=3", "optim.lr=1e-3", "optim.warmup_steps=0", "loss.tis_cap=1.05",
                      "loss.mask_ratio=1.02"))
    assert done.returncode == 0, done.stderr
    first, second, third = steps_of(tmp_path / "run")
    assert is_in_step(first) and first["mismatch/weight_mean"] == pytest.approx(1, abs=max(1e-4, PRECISION.mean))
    for line in (second, third):
        assert line["mismatch/logp_abs_mean"] > 0.1 and line["mismatch/ess"] < 0.99
        assert 0 < line["mismatch/masked"] < 1 and line["mismatch/weight_mean"] < 1


FROM_ENGINE = ("mismatch/", "rollout/entropy")
WHOLE = ["steps=4", "checkpoint.every=2", "rollout.prompts_per_step=4"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict]:
    """The steps of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run(sys.executable, "train.py", *toy(*WHOLE, f"out={folder}"))
    assert done.returncode == 0, done.stderr
    return steps_of(folder)


AHEAD = """
import atexit
sys.path.insert(0, "tests")
import vllm_async
lengths = vllm_async.switch_on()
atexit.register(lambda: print("steps with a queue:", len(lengths)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sleep", ["always", "never"])
def test_an_engine_gives_the_same_samples_whether_it_sleeps_or_not(sleep, whole, tmp_path):
    """And under CUDA's scheduler, which leaves a step in its queue at each sleep and sync. auto took `never`.

    That scheduler computes other batches, so on some CPUs the engine's log-probs differ in their last bits;
    `is_in_step` bounds them. Tokens, and what the trainer computes of them, are the same.
    """
    done = run(*after(AHEAD * PRECISION.exact, f"out={tmp_path / 'run'}", f"rollout.sleep={sleep}", *WHOLE))
    assert done.returncode == 0, done.stderr
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 4 and all(map(is_in_step, steps))
    if PRECISION.exact:
        ours, expected = ([{key: value for key, value in line.items() if not key.startswith(FROM_ENGINE)}
                           for line in lines] for lines in (steps, whole))
        assert ours == expected and int(done.stdout.rpartition("steps with a queue:")[2]) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status", "says"), [
    ("1 / 0", 1, ["vLLM failed while sampling: division by zero", "--resume auto goes on from"]),
    ("signal.raise_signal(signal.SIGTERM)", 130,
     ["stopping: samples under way are dropped", "interrupted; --resume"])], ids=["failed", "stopped"])
def test_an_engine_that_fails_or_is_stopped_in_the_middle_of_a_step_leaves_a_run_to_resume(
        how, status, says, whole, tmp_path):
    done = run(*after(f"""
import signal
generate, calls = rollout_vllm.VLLMEngine.generate, []
def failing(self, *arguments, **named):
    calls.append(self)
    if len(calls) == 7:  # two of the preflight, one evaluation, then the fourth step
        step, tokens = self.llm.llm_engine.step, iter(range(5))
        self.llm.llm_engine.step = lambda: {how} if next(tokens, None) is None else step()
    return generate(self, *arguments, **named)
rollout_vllm.VLLMEngine.generate = failing
""", f"out={tmp_path / 'cut'}", *WHOLE))
    assert done.returncode == status and all(text in done.stderr for text in says), done.stderr
    newest = (tmp_path / "cut" / "checkpoints" / "latest").read_text()
    assert len(steps_of(tmp_path / "cut")) == 3 and newest == ("step_000002" if status == 1 else "step_000003")
    resumed = run(sys.executable, "train.py", *toy(*WHOLE, f"out={tmp_path / 'cut'}"), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    steps = steps_of(tmp_path / "cut")
    assert len(steps) == len(whole) == 4 and all(map(is_in_step, steps))
    assert steps == whole or not PRECISION.exact


def test_a_cache_too_small_for_one_sequence_is_one_line_with_the_remedy(tmp_path):
    done = run(sys.executable, "train.py", *toy(f"out={tmp_path / 'run'}", "rollout.cache_gib=0.0001"))
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: rollout.engine=vllm cannot start")
    assert "GiB of KV cache (rollout.cache_gib)" in error and "memory" in error
    assert not (tmp_path / "run").exists()


STILL = ["rollout.engine=vllm", "data.eval=null", "rollout.group_size=8", "optim.warmup_steps=0"]


def run_twice(tmp_path: Path, command: list, name: str, *settings: str) -> list[dict]:
    """The steps of a run, and a second run that has the same tokens."""
    decided = []
    for folder in ("run", "again"):
        chosen = [word for s in (*STILL, *settings, f"out={tmp_path / folder}") for word in ("--set", s)]
        done = run(*command, "--config", name, *chosen)
        assert done.returncode == 0, done.stderr
        decided.append(runfolder.read_log(tmp_path / folder / "decisions.jsonl"))
    assert decided[0] == decided[1] or not PRECISION.exact
    lines = steps_of(tmp_path / "run")
    assert all(map(is_in_step, lines))
    return lines


@two_ranks
def test_groups_go_on_with_vllm_on_two_ranks(tmp_path):
    """With weights that stand still, tokens of earlier steps have the log-probs of now."""
    lines = run_twice(tmp_path, [*TORCHRUN, "train.py"], "flight_toy.yaml", "steps=4", "rollout.prompts_per_step=4",
                      "data.limit=64", "windows.max_age=2", "optim.lr=1e-12")
    assert sum(line.get("age/old_tokens", 0) for line in lines) > 0
    assert max(line.get("age/most", 0) for line in lines) <= 2 and lines[0]["rollout/pending"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "more"), [
    ([sys.executable], []), pytest.param(TORCHRUN, ["rollout.tensor_parallel=2"], marks=two_ranks),
    pytest.param(TORCHRUN, [], marks=two_ranks)], ids=["1 rank", "2 ranks, 1 engine", "2 ranks"])
def test_an_environment_replies_to_vllm(launcher, more, tmp_path):
    """Ranks that share an engine take equally many turns."""
    from leaves.environment.test_environment import with_sums
    lines = run_twice(tmp_path, [*launcher, "train.py"], "grpo_toy.yaml", *with_sums(tmp_path), "steps=3",
                      "rollout.prompts_per_step=4", "optim.lr=1e-12", *more)
    assert all(line["environment/calls"] > 0.2 for line in lines)


TWICE = """
import sys
sys.path.append("bench")
import config, train
from leaves.drafts.proposals import Steps, attach
from records import Request
from step import prepare
cfg = config.load("grpo_hard.yaml", ["rollout.engine=vllm", "rollout.drafts=true", "rollout.stop=['=1', '=7']",
                                     "model.dtype=float32", *sys.argv[2:]])
_, sampler, history = prepare(cfg, train.load_task(cfg))
drafts, draws = {}, history.draw(int(sys.argv[1]))
attach(sampler.engine.llm, drafts)
def sample(first, temperature, top_p):
    asked = [Request(draw.prompt, first + 100 * n + g, 64) for n, draw in enumerate(draws) for g in range(8)]
    return sampler.engine.generate(asked, temperature, top_p)
others = sample(10**6, 1.0, 1.0)
for law in ((1.0, 1.0), (0.7, 0.9), (0.0, 1.0)):
    drafts.clear()
    before = Steps.saved
    plain = sample(0, *law)
    assert Steps.saved == before
    known = plain if sys.argv[2:] else others  # samples of a random model have nothing in common
    drafts |= {draw.prompt.ids: [s.ids for s in known[8 * n:8 * n + 8]] for n, draw in enumerate(draws)}
    for one, other in zip(plain, sample(0, *law), strict=True):
        assert one.ids == other.ids and one.finished == other.finished
        assert max((abs(a - b) for a, b in zip(one.logp, other.logp, strict=True)), default=0) < 1e-4
    assert Steps.saved - before > 0.3 * sum(len(s.ids) for s in plain), law
    by_a_text = [s.finished and s.ids[-1] not in sampler.tokenizer.eos_ids for s in plain]
    assert any(by_a_text) or law[0] == 0 or sys.argv[2:]
"""


@pytest.mark.skipif(not PRECISION.exact, reason="in bfloat16 two tokens may be equally likely")
@pytest.mark.parametrize(("family", "prompts"), [
    ("qwen2", 8), *(pytest.param(family, 110, marks=pytest.mark.slow) for family in ("qwen2", "qwen3"))])
def test_drafts_change_no_sample_of_vllm(family, prompts, tmp_path):
    of_family = [f"model.path={write_tiny(tmp_path, **SIZE | MODELS[family])}"] if family != "qwen2" else []
    done = run(sys.executable, "-c", TWICE, str(prompts), *of_family)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "more"), [
    ([sys.executable], []), pytest.param(TORCHRUN, ["rollout.tensor_parallel=2"], marks=two_ranks),
    ([sys.executable], ["rollout.stop=['=']", "environment={file: toy/calculator.py, max_context: 256}"])],
    ids=["1 rank", "2 ranks", "tools"])
def test_a_run_with_drafts_of_vllm_is_the_run_without_and_goes_on_as_itself(launcher, more, tmp_path):
    tokens = {}
    for folder, drafts, *own in (("plain", "false"), ("run", "true"), ("cut", "true", "--set", "steps=3"),
                                 ("cut", "true", "--resume")):
        settings = [*STILL, "optim.lr=1e-3", "steps=5", "data.limit=16", "checkpoint.every=1",
                    f"out={tmp_path / folder}", f"rollout.drafts={drafts}", *more]
        sets = [word for s in settings for word in ("--set", s)]
        done = run(*launcher, "train.py", "--config", "grpo_toy.yaml", *sets, *own)
        assert done.returncode == 0, done.stderr
        lines = runfolder.read_log(tmp_path / folder / "decisions.jsonl")
        tokens[folder] = [prompt["tokens"] for line in lines for prompt in line["prompts"]]
    assert tokens["plain"] == tokens["run"] == tokens["cut"] or not PRECISION.exact
    drafted = [line.get("rollout/drafted", 0) for line in steps_of(tmp_path / "run")]
    assert drafted[0] == 0 and drafted[-1] > 0.2
    assert not any("rollout/drafted" in line for line in steps_of(tmp_path / "plain"))


@pytest.mark.slow
def test_the_bench_of_drafts_counts_fewer_steps():
    done = run(sys.executable, "bench/drafts.py", "--arms", "pps", "--epochs", "2")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert first["with"] == first["steps without"] and max(first["tokens without a step"]) == 0
    assert sum(second["with"]) < sum(second["steps without"]) and min(second["tokens without a step"]) > 0.1


@pytest.mark.slow
def test_rollouts_that_are_aborted_go_on_with_vllm(tmp_path):
    """experiments/court/abort.py: what goes on has the log-probs of the policy."""
    lines = run_twice(tmp_path, [sys.executable, "experiments/try_method.py", "abort"], "grpo_toy.yaml", "steps=3",
                      "data.limit=8", "rollout.prompts_per_step=8", "advantage={kind: survivors}",
                      "prune.completions={kind: abort, mark: 8, bias: -0.5}")
    assert lines[0]["rollout/pending"] == 0 and all(0 < line["rollout/pending"] < 64 for line in lines[1:])
    assert all(line["prune/offered"] == 64 for line in lines)


def test_both_engines_evaluate_to_the_same_answers(tmp_path):
    """Greedy: every text, grade and score. In bfloat16, where two tokens may be equally likely, most of them."""
    results = {}
    for engine in ("torch", "vllm"):
        done = run(sys.executable, "eval.py", "--model", "toy/model", "--data", "toy/test.jsonl", "--set",
                   f"rollout.engine={engine}", "--set", "eval.max_new_tokens=64", "--out", tmp_path / f"{engine}.json")
        assert done.returncode == 0, done.stderr
        results[engine] = json.loads((tmp_path / f"{engine}.json").read_text())
    theirs, ours = (results[engine]["results"]["test"] for engine in ("vllm", "torch"))
    equal = [a == b for a, b in zip(theirs["problems"], ours["problems"], strict=True)]
    assert theirs == ours if PRECISION.exact else sum(equal) > 0.8 * len(equal)
    heads = [results[engine]["head"] for engine in ("torch", "vllm")]
    assert [key for key in heads[0] if heads[0][key] != heads[1][key]] == ["engine"]
