"""A tiny random model in a Hugging Face folder, small records, and configs that point at them."""

import functools
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.overrides import TorchFunctionMode

import config
import data
import model as decoder
import train
from infra import checks, dist, runfolder, tokenizer
from infra import weights as weights_on_disk
from infra.choices import resolve_auto
from infra.export import save_weights
from policy import Weights
from records import Batch, Group, Prompt, PromptDraw, Pruned, Request, Rewards, Rolled, Sample, Segments
from settings import leaves, loader
from settings.loader import ConfigError

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs of the tests would go on, as they should

ROOT = Path(__file__).parent.parent
TOY = ROOT / "toy" / "model"
SHIPPED = sorted(path.name for folder in config.CONFIGS for path in folder.glob("*.yaml") if path.name != "toy.yaml")
PUBLISHED = [name for name in SHIPPED if not name.endswith(("_toy.yaml", "_hard.yaml"))]
# They measure by what leaves/fit counts, and go with it.
collect_ignore = [] if find_spec("leaves.fit") else ["test_bench.py", "test_fake_gpu.py", "test_vllm_arguments.py"]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Precision:
    """Where the tests of vLLM run, in what, and how far apart two right log-probs of a token may be, in nats."""

    device: str
    dtype: torch.dtype
    mean: float     # |difference|, over the tokens of a test
    largest: float

    @property
    def exact(self) -> bool:
        """Whether a sample, or a run, comes out the same again, bit for bit."""
        return self.device == "cpu"

    def agrees(self, gap_C: torch.Tensor) -> bool:
        return float(gap_C.abs().mean()) < self.mean and float(gap_C.abs().max()) < self.largest


# In bfloat16 the CPU build gave means up to 0.034 and single tokens up to 0.36; stale weights give means from 0.09.
PRECISION = (Precision("cuda", torch.bfloat16, mean=0.05, largest=1.0) if torch.cuda.is_available() else
             Precision("cpu", torch.float32, mean=1e-5, largest=1e-4))


def pytest_addoption(parser):
    parser.addoption("--vllm-model", default="qwen2", help="the model of test_vllm.py: one engine per process")
    parser.addoption("--vllm-awake", action="store_true", help="test_vllm.py: an engine that never sleeps")
    parser.addoption("--vllm-async", action="store_true", help="test_vllm.py: CUDA's scheduler in the CPU build")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Runs without the checks before them, which take as long and on which they do not depend (leaves/preflight)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "before_run", lambda cfg, ready: ready)
        yield


@pytest.fixture(scope="module", autouse=True)
def hasty():
    """Files are not flushed to the disk: no test loses power. No child process first tries the files of the toy and of
    `tiny`, which are known (test_damaged.py): the fork of a process as large as this one takes long."""
    def known(true, what: object, function, *given, **limits):
        own = str(what).endswith((str(TOY), "/tiny0", "/few.jsonl", "/first.jsonl"))
        return function(*given) if own else true(what, function, *given, **limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        for module in (data, tokenizer, weights_on_disk):
            patch.setattr(module, "try_first", functools.partial(known, module.try_first))
        yield


@pytest.fixture
def command(monkeypatch):
    """Run a program with these arguments in this process, whose group and signals are not the run's."""
    monkeypatch.setattr(dist, "close", lambda: None)
    monkeypatch.setattr(train, "Stop", lambda: None)
    monkeypatch.setattr(checks, "require_checks", lambda failed: None)

    def run(program, *words) -> int:
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, words)])
        try:
            return program.main()
        finally:
            dist.init("cpu")  # programs close the group, which the tests behind this one need

    return run


@pytest.fixture
def refused(command, capsys):
    """Run a program that ends with status 2 and one line of error, which is returned; behind argparse's usage, if
    a word is wrong."""
    def run(program, *words) -> str:
        capsys.readouterr()
        try:
            assert command(program, *words) == 2
        except SystemExit:
            return capsys.readouterr().err.splitlines()[-1]
        line, = capsys.readouterr().err.splitlines()
        return line

    return run


def refuses(message: str, function, *given, **named) -> None:
    """A call ends in a ConfigError in which this pattern is found."""
    with pytest.raises(ConfigError, match=message):
        function(*given, **named)


@pytest.fixture(scope="session", autouse=True)
def process_group():
    os.environ.pop("RANK", None)
    yield dist.init("cpu")
    dist.close()


def write_tiny(folder: Path, seed: int = 0, std: float = 0.3, **changes) -> Path:
    """A random model with the toy's tokenizer. Weights of std 0.3 make its distributions far from uniform."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TOY / name, folder / name)
    settings = json.loads((TOY / "config.json").read_text()) | SHAPE | changes
    (folder / "config.json").write_text(json.dumps(settings))
    model = decoder.Decoder(decoder.read_shape(folder))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    save_weights(model.requires_grad_(False), folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def others_slow(cases: Iterable, *fast) -> list:
    """The cases of a parametrized test, of which `make test` runs those that are named, `make test-long` all."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> decoder.Decoder:
    return decoder.load_model(folder, dtype, torch.device("cpu"))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of a whole or a sharded model."""
    return {name: dist.gather_full(p.detach()).clone() for name, p in model.named_parameters()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else dist.gather_full(p.grad)
            for name, p in model.named_parameters()}


@torch.no_grad()
def nudge(model: torch.nn.Module, size: float) -> None:
    """Move every weight that is trained at random, the same way on any number of ranks."""
    for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
        noise = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(i))
        p += dist.sharded_like(size * noise, p)


def toy_config(out: Path, *overrides: str, name: str = "cppo_toy.yaml") -> config.Config:
    """Shipped configs at the size of a test: two steps in float64 on 4 groups of 8, evaluated on 6 problems."""
    first, few = out.parent / "first.jsonl", out.parent / "few.jsonl"
    few.parent.mkdir(parents=True, exist_ok=True)
    for file, source, count in ((first, "train", 256), (few, "test", 6)):
        with (ROOT / "toy" / f"{source}.jsonl").open() as lines:
            file.write_text("".join(itertools.islice(lines, count)))
    of_critic = name.split()[0] in ("ppo_gsm8k.yaml", "tppo_toy.yaml", "vapo_toy.yaml")
    return config.load(name.split(), [
        f"model.path={TOY}", f"out={out}", f"data.train={first}", f"data.eval={few}",
        "data.limit=256", "model.dtype=float64", "steps=2", "rollout.group_size=8", "rollout.prompts_per_step=4",
        "rollout.max_new_tokens=48", "pack.capacity=1024", "optim.warmup_steps=0", "update.minibatches=1",
        *["critic.minibatches=1", "critic.warmup_steps=0"] * of_critic, *overrides])


def steps_of(run: Path) -> list[dict]:
    """What a run has logged of its steps, without evaluations."""
    return [line for line in runfolder.read_log(run / "metrics.jsonl") if "rollout/tokens" in line]


def parts_of(cfg: config.Config, folder: Path = TOY, prompts: Iterable[Prompt] = ()) -> train.Parts:
    """What a run by this config is made of, on the model in the folder, before its first step."""
    task, decided = data.Task(folder, data.Tokenizer(folder), prompts=list(prompts)), resolve_auto(cfg, folder)
    given = leaves.through("weights", decided, Weights())
    learner, engine = train.load_models(decided, task, given)
    sampler = train.Sampler(engine, task.tokenizer, decided.rollout, cfg.reward, cfg.seed)
    history = train.PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, middle=0.5)
    plain = train.Parts(decided, task, given, learner, engine, sampler, history, first=0)
    return leaves.through("parts", decided, plain)


def needed(section: type) -> dict:
    """The settings of a kind, of a fork's too, without a default: the first of some small values that each allows."""
    values = {"kind": fields(section)[0].default} | dict.fromkeys({"error"} & loader.hints(section).keys(), 0.5)
    for field in fields(section)[1:]:
        if field.default is MISSING:
            kind = loader.hints(section)[field.name]
            allowed = [x for x in (*get_args(kind), 2, 0.5, 1, True, "x") if is_allowed(x, kind)]
            values[field.name] = allowed[0]
    return values


def is_allowed(value, kind) -> bool:
    try:
        loader.convert(value, kind, "")
    except (ConfigError, TypeError, ValueError):
        return False
    return True


def example(section: type):
    """A kind with its defaults, and what is `needed`."""
    return loader.build(section, needed(section))


def make_groups(lengths: list[list[int]], prompt_lengths: list[int], seed: int = 0, vocab: int = 400) -> list[Group]:
    """Groups of random tokens with these completion lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocab, (count,), generator=generator).tolist())

    return [Group(Prompt(f"q{n}", tokens(p), "1"),
                  tuple(Sample(tokens(k), tuple(-float(i) for i in range(k)), True) for k in row))
            for n, (row, p) in enumerate(zip(lengths, prompt_lengths, strict=True))]


def ask(prompts: list[tuple[int, ...]], seeds: list[int], limits: int | list[int]) -> list[Request]:
    """Requests for a completion of each prompt."""
    limits = [limits] * len(prompts) if isinstance(limits, int) else limits
    return [Request(Prompt("", tuple(ids), ""), seed, limit)
            for ids, seed, limit in zip(prompts, seeds, limits, strict=True)]


def as_batch(groups: list[Group], adv_NG: torch.Tensor, pruned: Pruned) -> Batch:
    """A step in which every prompt offered was rolled out."""
    draws = [PromptDraw(group.prompt, 0) for group in groups]
    return Batch(draws, groups, adv_NG, adv_NG > 0, adv_NG, pruned, list(range(len(groups))), len(groups), seed=0)


def as_rewards(components: dict[str, torch.Tensor], weights: dict[str, float]) -> Rewards:
    """Rewards of completions of one token each."""
    return Rewards(components, weights, torch.ones_like(next(iter(components.values()))).long())


def as_rolled(groups: list[Group], reward_NG: torch.Tensor, adv_NG: torch.Tensor | None = None) -> Rolled:
    """One round in which every prompt offered was rolled out, scored by accuracy alone."""
    rewards = as_rewards({"accuracy": reward_NG}, {"accuracy": 1.0})
    draws = [PromptDraw(group.prompt, 0, number=n) for n, group in enumerate(groups)]
    return Rolled() + Rolled(draws, groups, rewards, torch.zeros_like(reward_NG) if adv_NG is None else adv_NG)


def attention_by_mask(q, k, v, segments: Segments, window: int | None = None) -> torch.Tensor:
    """What segments say, written out over the whole row: a query sees which of its T tokens."""
    seen_TT = torch.zeros(len(q), len(q), dtype=torch.bool, device=q.device)
    query = key = 0
    for queries, keys in zip(segments.queries, segments.keys, strict=True):
        tokens = segments.key_K[key:key + keys]
        for i in range(queries):
            seen = tokens[:keys - queries + i + 1]
            seen_TT[query + i, seen[-window:] if window else seen] = True
        query, key = query + queries, key + keys
    assert query == len(q) and key == len(segments.key_K)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    score_HTT = torch.einsum("qhe,khe->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khe->qhe", score_HTT.masked_fill(~seen_TT, float("-inf")).softmax(-1), v)


def unshared(lengths: Sequence[int], device: torch.device | None = None) -> Segments:
    """Segments that share nothing: each attends to itself."""
    return Segments.of(lengths, lengths, torch.arange(sum(lengths), device=device))


def attend_alone(layer: int, q, k, v, window=None) -> torch.Tensor:
    """Causal attention of one sequence that is all there is."""
    return attention_by_mask(q, k, v, unshared([len(q)]), window)


def logp_alone(model: torch.nn.Module, group: Group, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of one completion alone, by nothing of the training step but the model."""
    ids, first = torch.tensor([*group.prompt.ids, *sample.ids]), len(group.prompt.ids)
    predict = torch.arange(first - 1, len(ids) - 1)
    return model(ids, torch.arange(len(ids)), attend_alone, predict, ids[first:], temperature)


AS_BYTES = (torch.Tensor.view, torch.frombuffer)  # here a dtype says how a file's bytes are to be read


class Doubled(TorchFunctionMode):
    """Give float64 to whoever asks for float32: transformers, TRL and Winnow in norms, rotary tables and rewards."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wider(x):
            return torch.float64 if x is torch.float32 else x

        if func in AS_BYTES:
            return func(*args, **kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(wider, args), **{key: wider(value) for key, value in (kwargs or {}).items()})
