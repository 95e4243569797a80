"""TRL's GRPOTrainer gives the gradient that Winnow gives, for every objective that both have. `make test-peers`.

TRL runs its own `_generate_and_score_completions` and `_compute_loss`, with the sampling alone replaced by fixed
tokens; Winnow runs `advantage`, `choose` and the functions of its update on packed rows. The policy has moved since the
rollout, the reference is another model again, some completions are cut and one group's rewards are all equal.
"""

import importlib.util
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Having

import pytest
import torch
from conftest import ROOT, Doubled, as_batch, as_rewards, attend_alone, gradients, load, logp_alone, toy_config
from test_objectives import TEACHER, learner_on
from torch import Tensor

import data
import update
from advantage import advantage
from collect import Selection, choose
from config import Config
from infra import dist
from infra.weights import read_tensors, weight_files
from learner import Learner
from model import hf_name
from pack import Minibatch
from prune import keep_all
from records import Group, PromptDraw, Rolled, Sample

pytestmark = [
    pytest.mark.peers, pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed; run `make test-peers`")]

N, G, LONGEST, EOS = 4, 8, 24, 2
# Of the largest entry of a tensor's gradient. Both sides compute in float64, and only the order of their sums differs:
# that leaves 8e-15 to 3e-14, and more of it where there are more tokens. One float32 step anywhere leaves 1e-7.
BOUND = 1e-12


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    from trl.kernels import ChunkedLogProbFunction

    backward = ChunkedLogProbFunction.backward

    def widely(*given):
        with Doubled():  # autograd calls it outside of the mode
            return backward(*given)

    monkeypatch.setattr(ChunkedLogProbFunction, "backward", staticmethod(widely))
    torch.set_default_dtype(torch.float64)
    with Doubled():
        yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Step:
    """A rollout, what it earned, and the weights before it, after some updates and of the reference."""

    folder: Path
    questions: list[str]
    groups: list[Group]
    reward_NG: Tensor
    brief_NG: Tensor  # a second reward
    before: dict[str, Tensor]
    moved: dict[str, Tensor]
    reference: dict[str, Tensor]


def near(weights: dict[str, Tensor], size: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: w + size * w.abs().mean() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


@torch.no_grad()
def put(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a model of either side these weights."""
    for name, p in model.named_parameters():
        p.copy_(dist.sharded_like(weights[name if name in weights else hf_name(name)], p))


def completion(generator: torch.Generator) -> Sample:
    """Random tokens; one in four is cut at LONGEST, the others end."""
    length = int(torch.randint(4, LONGEST + 1, (1,), generator=generator))
    cut = bool(torch.rand(1, generator=generator) < 0.25)
    ids = torch.randint(3, 470, (LONGEST if cut else length,), generator=generator).tolist()
    return Sample(ids if cut else [*ids[:-1], EOS], [0.0] * len(ids), finished=not cut)


@pytest.fixture
def step(tiny) -> Step:
    generator = torch.Generator().manual_seed(0)
    problems = data.load_problems(str(ROOT / "toy" / "train.jsonl"))[:N]
    prompts = data.to_prompts(problems, data.Tokenizer(tiny), None, 128)
    groups = [Group(prompt, tuple(completion(generator) for _ in range(G))) for prompt in prompts]
    reward_NG = (torch.rand(N, G, generator=generator) < 0.4).double()
    reward_NG[2] = 1
    brief_NG = -torch.randint(3, (N, G), generator=generator).double() / 2
    before = {name: w.double() for name, w in read_tensors(weight_files(tiny)).items()}
    moved, reference = near(before, 0.03, seed=1), near(before, 0.05, seed=2)
    return Step(tiny, [p.question for p in problems], groups, reward_NG, brief_NG, before, moved, reference)


def one_row(learner: Learner, groups: list[Group], n: int, g: int) -> Tensor:
    """Log-probs of one completion, in a row of its own."""
    keep_NG = torch.zeros(N, G, dtype=torch.bool)
    keep_NG[n, g] = True
    row, = learner.rows(Minibatch(groups, keep_NG, torch.zeros(N, G), torch.ones(N, G), torch.zeros(N, G)))
    with torch.no_grad():
        return learner.log_probs(learner.policy, row)


def with_engine(step: Step, learner: Learner) -> list[Group]:
    """The groups with log-probs of an engine that is near the policy before the update."""
    generator = torch.Generator().manual_seed(3)
    put(learner.policy, step.before)

    def heard(n: int, g: int, sample: Sample) -> Sample:
        logp_T = one_row(learner, step.groups, n, g)
        return replace(sample, logp=(logp_T + 0.4 * torch.randn(len(logp_T), generator=generator)).tolist())

    return [Group(group.prompt, tuple(heard(n, g, sample) for g, sample in enumerate(group.samples)))
            for n, group in enumerate(step.groups)]


def by_winnow(step: Step, learner: Learner, cfg: Config) -> dict[str, Tensor]:
    rewards = as_rewards({"accuracy": step.reward_NG, "overlong": step.brief_NG}, cfg.reward.weights)
    draws = [PromptDraw(group.prompt, 0) for group in step.groups]
    rolled = Rolled() + Rolled(draws, step.groups, rewards, advantage(rewards, cfg.advantage))
    batch = choose(rolled, Selection.of(cfg), seed=0)
    put(learner.policy, step.before)
    if learner.reference:
        put(learner.reference, step.reference)
    weighed = update.make_minibatch(learner, batch, list(range(N)))
    prepared = update.prepare_rows(learner, weighed, learner.rows(weighed), extra_pass=True)
    put(learner.policy, step.moved)
    for row in prepared:
        update.add_gradient(learner, row, unmoved=False)
    return {hf_name(name): grad for name, grad in gradients(learner.policy).items()}


def trainer(step: Step, out: Path, settings: dict):
    """GRPOTrainer on the step's prompts. Two iterations a rollout make it score the policy before the update."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **columns):
        return step.reward_NG.flatten().tolist()

    def brief(completions, **columns):
        return step.brief_NG.flatten().tolist()

    fixed = {"output_dir": str(out), "use_cpu": True, "bf16": False, "report_to": [], "max_steps": 1,
             "per_device_train_batch_size": N * G, "num_generations": G, "max_completion_length": LONGEST,
             "num_iterations": 2, "shuffle_dataset": False, "gradient_checkpointing": False, "disable_tqdm": True}
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(step.folder, dtype=torch.float64),
        [reward, brief][:len(settings.get("reward_weights", [1]))], GRPOConfig(**fixed | settings),
        Dataset.from_list([{"prompt": messages(q)} for q in step.questions]),
        processing_class=AutoTokenizer.from_pretrained(step.folder))


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def by_trl(step: Step, peer) -> dict[str, Tensor]:
    samples = [sample for group in step.groups for sample in group.samples]

    def sampled(prompt_ids, *others):
        assert [tuple(ids) for ids in prompt_ids] == [group.prompt.ids for group in step.groups for _ in range(G)]
        logp = [s.logp.tolist() for s in samples] if peer.use_vllm else None
        return [s.ids.tolist() for s in samples], logp

    peer._generate_single_turn = sampled
    peer.current_gradient_accumulation_steps = 1
    peer.model.train()
    put(peer.model, step.before)
    if peer.ref_model is not None:
        put(peer.ref_model, step.reference)
    inputs = peer._generate_and_score_completions([{"prompt": messages(q)} for q in step.questions for _ in range(G)])
    put(peer.model, step.moved)
    peer._compute_loss(peer.model, inputs).backward()
    return {name: p.grad for name, p in peer.model.named_parameters()}


PLAIN_KL = {"beta": 0.04, "use_bias_correction_kl": False}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02}
OF_SEQUENCE = ["loss.trust.kind=clip_sequence", "loss.trust.low=0.01", "loss.trust.high=0.02"]
CUT = {"mask_truncated_completions": True}
TOKEN_RATIO = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
# name -> (GRPOConfig, changes to grpo_toy.yaml)
OBJECTIVES = {
    "grpo": ({"loss_type": "grpo"}, []),
    "temperature": ({"loss_type": "grpo", "temperature": 0.7}, ["rollout.temperature=0.7"]),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, ["loss.normalize=token", "loss.trust.high=0.28"]),
    "bnpo": ({"loss_type": "bnpo"}, ["loss.normalize=token"]),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"},
                ["loss.normalize=constant", "advantage.kind=centred"]),
    "gspo": ({"loss_type": "grpo", **SEQUENCE}, OF_SEQUENCE),
    "luspo": ({"loss_type": "luspo", **SEQUENCE}, [*OF_SEQUENCE, "loss.normalize=sum"]),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2},
              ["loss.normalize=token", "loss.trust.kind=clamp", "loss.trust.low=1", "loss.trust.high=0.2"]),
    "two-sided": ({"loss_type": "grpo", "delta": 1.5}, ["loss.trust.dual=1.5"]),
    "grpo-kl": ({"loss_type": "grpo", **PLAIN_KL}, ["loss.kl=0.04"]),
    "dapo-kl": ({"loss_type": "dapo", **PLAIN_KL}, ["loss.normalize=token", "loss.kl=0.04"]),
    "grpo-kl-corrected": ({"loss_type": "grpo", "beta": 0.04}, ["loss.kl=0.04", "loss.kl_corrected=true"]),
    "dapo-kl-corrected": ({"loss_type": "dapo", "beta": 0.04},
                          ["loss.normalize=token", "loss.kl=0.04", "loss.kl_corrected=true"]),
    "entropy": ({"loss_type": "grpo", "entropy_coef": 0.05}, ["loss.entropy=0.05"]),
    "gdpo": ({"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
             ["advantage.kind=decoupled", "reward={overlong: 0.5, overlong_tokens: 8}"]),
    "grpo-truncated": ({"loss_type": "grpo", **CUT}, ["prune.truncated=true"]),
    "dapo-truncated": ({"loss_type": "dapo", **CUT}, ["loss.normalize=token", "prune.truncated=true"]),
    "engine-ratio": ({"loss_type": "grpo", **TOKEN_RATIO}, ["loss.tis_cap=2"])}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """How far each tensor's gradient is off, over its largest entry."""
    assert ours.keys() == theirs.keys()
    return {name: float((ours[name] - grad).abs().max() / grad.abs().max()) for name, grad in theirs.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_trls_trainer(name, step, tmp_path):
    settings, changes = OBJECTIVES[name]
    cfg = toy_config(tmp_path / "run", f"model.path={step.folder}", f"rollout.group_size={G}",
                     f"rollout.prompts_per_step={N}", f"rollout.max_new_tokens={LONGEST}", *changes,
                     name="grpo_toy.yaml")
    learner, peer = learner_on(step.folder, cfg), trainer(step, tmp_path / "trl", settings)
    peer.use_vllm = "vllm_importance_sampling_mode" in settings
    step = replace(step, groups=with_engine(step, learner))
    ours, theirs = by_winnow(step, learner, cfg), by_trl(step, peer)
    if name == "grpo-truncated":  # TRL's mean over completions still counts those that it masks
        ended = [s.finished for group in step.groups for s in group.samples]
        ours = {key: grad * sum(ended) / len(ended) for key, grad in ours.items()}
    off = apart(ours, theirs)
    worst = max(off, key=off.get)
    assert off[worst] < BOUND, (worst, off[worst])


def test_distillation_has_the_gradient_of_trls_loss_of_sampled_tokens(step, tmp_path):
    """IW-OPD, whose gamma of 0 leaves the teacher's log-prob less the rollout's, and the mean over tokens."""
    from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
    cfg = toy_config(tmp_path / "run", f"model.path={step.folder}", f"teacher={{path: {TEACHER}, keep: null}}",
                     "prune.completions.kind=none", "loss.trust.kind=none", name="opd_toy.yaml")
    learner, now = learner_on(step.folder, cfg), load(step.folder, torch.float64)
    groups, ones_NG = with_engine(step, learner), torch.ones(N, G)
    weighed = update.make_minibatch(learner, as_batch(groups, ones_NG, keep_all(ones_NG)), list(range(N)))
    prepared = update.prepare_rows(learner, weighed, learner.rows(weighed), extra_pass=False)
    for model in (learner.policy, now):
        put(model, step.moved)
    update.add_gradients(learner, weighed, prepared, unmoved=False)
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    logits, tokens, given, own = [], [], [], []
    for of, sample in ((group, s) for group in groups for s in group.samples):
        ids, first = torch.tensor([*of.prompt.ids, *sample.ids]), len(of.prompt.ids)
        logits.append((now.hidden(ids, torch.arange(len(ids)), attend_alone) @ now.head_VD.T)[first - 1:-1])
        tokens.append(ids[first:])
        given.append(logp_alone(load(TEACHER, torch.float64), of, sample).detach())
        own.append(torch.tensor(sample.logp.tolist()))
    trl = Having(temperature=1, iw_opd_gamma=0, iw_opd_epsilon=1e-8, model=now, _metrics={"train": defaultdict(list)})
    IWOPDTrainer._compute_iw_opd_loss(trl, pad(logits), pad(tokens), pad(tokens, padding_value=-100), pad(given),
                                      pad(own)).backward()
    expected = gradients(now)
    for name, grad in gradients(learner.policy).items():
        assert (grad - expected[name]).abs().max() < BOUND * expected[name].abs().max(), name
