"""Each objective of the mission against its textbook loss, written out completion by completion and token by token.

Both gradients are of the policy's weights, in float64: by the functions of the training step, on packed rows whose
completions share their prompts, and by autograd of the formula, on completions that run through the model alone with
their prompts, under a causal mask. The policy has moved since the rollout.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import conftest
import pytest
import torch
from conftest import as_batch, as_rewards, attend_alone, gradients, logp_alone, make_groups, nudge, parts_of, toy_config
from torch import Tensor

import update
from config import Config
from learner import Learner
from metrics import PassSums
from prune import keep_all
from records import Batch, Group, Rewards, Sample
from settings import leaves
from train import Parts

LENGTHS, PROMPTS, G = [[3, 9, 5, 2], [4, 1, 7, 8]], [5, 1], 4
CORRECT_NG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
SHORT_NG = torch.tensor([[0.0, -1.0, -0.5, 0.0], [0.0, 0.0, -0.75, -1.0]], dtype=torch.float64)
VALUES = {"q0": 0.6, "q1": 0.8}


@dataclass
class Answer:
    """One completion under the policy now and before, the engine and the reference; values with a critic."""

    now_T: Tensor
    old_T: Tensor
    beh_T: Tensor
    ref_T: Tensor
    teacher_T: Tensor
    entropy_T: Tensor   # of the distributions now
    value_T: Tensor     # of the states before each token
    after: Tensor       # and behind the last
    reward: float
    rewards_G: Tensor   # of its group
    correct: bool
    start: int
    pending: bool
    n: int
    g: int

    @property
    def ratio_T(self) -> Tensor:
        return (self.now_T - self.old_T).exp()

    @property
    def group_norm(self) -> float:
        return float((self.reward - self.rewards_G.mean()) / (self.rewards_G.std() + 1e-4))

    @property
    def centred(self) -> float:
        return float(self.reward - self.rewards_G.mean())


def clipped(ratio_T: Tensor, A, low: float, high: float) -> Tensor:
    return torch.minimum(ratio_T * A, ratio_T.clamp(1 - low, 1 + high) * A)


def tokens(answers: list[Answer]) -> int:
    return sum(len(x.now_T) - x.start for x in answers)


def grpo(answers: list[Answer], cfg: Config) -> Tensor:
    return -sum(clipped(x.ratio_T, x.group_norm, 0.2, 0.2).mean() for x in answers) / len(answers)


def dapo(answers, cfg):
    return -sum(clipped(x.ratio_T, x.group_norm, 0.2, 0.28).sum() for x in answers) / tokens(answers)


def drgrpo(answers, cfg):
    total = -sum(clipped(x.ratio_T, x.centred, 0.2, 0.2).sum() for x in answers)
    return total / len(answers) / cfg.rollout.max_new_tokens


def gspo(answers, cfg):
    return -sum(clipped(x.ratio_T.log().mean().exp(), x.group_norm, 0.01, 0.02) for x in answers) / len(answers)


def cispo(answers, cfg):
    return -sum((x.ratio_T.clamp(0, 1.2).detach() * x.group_norm * x.now_T).sum() for x in answers) / tokens(answers)


def divppo(answers, cfg):
    """The ratio is to the engine, and a token drops out where its probability has moved too far the way of A."""
    total, limit = 0.0, cfg.loss.trust.divergence
    for x in answers:
        for now, beh in zip(x.now_T, x.beh_T, strict=True):
            p, q = beh.exp().item(), now.exp().item()
            kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            far = abs(q - p) > limit if cfg.loss.trust.kind == "total_variation" else kl > limit
            if not (far and (q - p) * x.centred > 0):
                total -= (now - beh).exp() * x.centred
    return total / len(answers) / cfg.rollout.max_new_tokens


def ipo(answers, cfg):
    """prime-rl's loss: the ratio to the engine, and no token that has moved too far, whatever its advantage."""
    kept = [(now - beh).exp() * x.centred for x in answers for now, beh in zip(x.now_T, x.beh_T, strict=True)
            if abs(now.exp().item() - beh.exp().item()) <= cfg.loss.trust.divergence]
    return -sum(kept) / tokens(answers)


def engine_ratio(answers, cfg):
    """The ratio is to the engine. The clip stops as ever, and the cap bounds what it leaves."""
    total = 0.0
    for x in answers:
        ratio_T = (x.now_T - x.beh_T).exp().detach()
        stopped_T = ratio_T > 1.1 if x.group_norm > 0 else ratio_T < 0.9
        total -= (torch.where(stopped_T, 0.0, ratio_T.clamp(max=1.05)) * x.group_norm * x.now_T).mean()
    return total / len(answers)


def gdpo(answers, cfg):
    def norm(part_NG: Tensor) -> Tensor:
        return (part_NG - part_NG.mean(1, keepdim=True)) / (part_NG.std(1, keepdim=True) + 1e-4)

    adv_NG = norm(CORRECT_NG) + 0.5 * norm(SHORT_NG)
    adv_NG = adv_NG / (adv_NG.std() + 1e-4)
    return -sum(clipped(x.ratio_T, adv_NG[x.n, x.g], 0.2, 0.2).mean() for x in answers) / len(answers)


def estimated(x: Answer, lam: float, bootstrap: str) -> Tensor:
    """Sums of deltas, each written out: A_t = sum_k lam^k (r + V(s_{t+k+1}) - V(s_{t+k}))."""
    last, values = len(x.now_T), [*x.value_T.tolist()]
    end = {"prev": values[-1], "true": float(x.after)}[bootstrap] if x.pending else x.reward
    deltas = [(values[t + 1] if t + 1 < last else end) - values[t] for t in range(last)]
    return torch.tensor([sum(lam ** k * deltas[t + k] for k in range(last - t)) for t in range(last)],
                        dtype=torch.float64)


def ppo(answers, cfg):
    return -sum(clipped(x.ratio_T, estimated(x, 0.95, "prev"), 0.2, 0.2).mean() for x in answers) / len(answers)


def vapo(answers, cfg):
    right = [x for x in answers if x.correct]
    policy = -sum(clipped(x.ratio_T, estimated(x, 1 - 1 / (cfg.advantage.alpha * len(x.now_T)), "prev"),
                          0.2, 0.28).sum() for x in answers) / tokens(answers)
    return policy - 0.1 * sum(x.now_T.sum() for x in right) / tokens(right)


def tppo(answers, cfg):
    """Of every completion the tokens of this window alone."""
    total = -sum(clipped(x.ratio_T, estimated(x, 0.95, cfg.advantage.bootstrap), 0.2, 0.2)[x.start:].sum()
                 for x in answers)
    return total / tokens(answers)


def apo(answers, cfg):
    squared = sum((1e-3 * (x.now_T - x.ref_T).sum() + VALUES[f"q{x.n}"] - x.reward) ** 2 for x in answers)
    return squared / len(answers) - 1e-3 * sum(x.entropy_T.sum() for x in answers) / tokens(answers)


def with_entropy(answers, cfg):
    return grpo(answers, cfg) - 0.1 * torch.cat([x.entropy_T for x in answers]).mean()


def with_kl(answers, cfg):
    def kl(x: Answer) -> Tensor:
        k3_T = (x.ref_T - x.now_T).exp() - (x.ref_T - x.now_T) - 1
        return (x.ratio_T * k3_T if cfg.loss.kl_corrected else k3_T).mean()

    return grpo(answers, cfg) + 0.5 * sum(kl(x) for x in answers) / len(answers)


def with_weights(answers, cfg):
    """Each token's whole term, by its ratio to the engine up to a cap; 0 where a completion's mean ratio is far off."""
    total, right = 0.0, tokens([x for x in answers if x.correct])
    for x in answers:
        gap_T, length = x.old_T - x.beh_T, len(x.now_T)
        weight_T = gap_T.exp().clamp(max=cfg.loss.tis_cap) * (abs(gap_T.mean()) <= math.log(cfg.loss.mask_ratio))
        k3_T = (x.ref_T - x.now_T).exp() - (x.ref_T - x.now_T) - 1
        term_T = (clipped(x.ratio_T, x.group_norm, 0.2, 0.2) - 0.5 * k3_T) / length / len(answers)
        total -= (weight_T * (term_T + 0.1 * x.entropy_T / tokens(answers) + 0.2 * x.correct * x.now_T / right)).sum()
    return total


def reinforce(answers, cfg):
    return -sum((x.centred * x.now_T).sum() for x in answers) / len(answers)


def rloo(answers, cfg):
    def others(x: Answer) -> float:
        return float((x.rewards_G.sum() - x.reward) / (G - 1))

    return -sum(clipped(x.ratio_T, x.reward - others(x), 0.2, 0.2).mean() for x in answers) / len(answers)


def by_pairs(answers: list[Answer], cfg: Config) -> Tensor:
    """-w log sigma(beta ((now_w - ref_w) - (now_l - ref_l))) then RPO's line, over groups of pairs (w, r).

    The authors of RPO write `losses -= policy_chosen_logps * self.beta * self.eta`."""
    settings, total = cfg.advantage, 0.0
    for n in range(len(LENGTHS)):
        group = [x for x in answers if x.n == n]
        pairs = [(w, r) for w in group for r in group if w.reward > r.reward]
        for w, r in pairs:
            margin = (w.now_T - w.ref_T).sum() - (r.now_T - r.ref_T).sum()
            loss = madpo_weight(w.reward - r.reward, settings) * -torch.nn.functional.logsigmoid(settings.beta * margin)
            policy_chosen_logps, eta = w.now_T.sum(), settings.likelihood
            loss -= policy_chosen_logps * settings.beta * eta
            total += loss / len(pairs)
    return total / len(LENGTHS)


def madpo_weight(h: float, settings) -> float:
    """sigma(c h) / sigma(h), c between c_min and c_max: its release's `utils/loss_functions.py`, in scalars."""
    if settings.gap is None:
        return 1.0
    low, high = settings.c_min, settings.c_max
    c = low + (high - low) / (1 + (high - 1) / (1 - low) * math.exp(settings.steepness * (abs(h) - settings.gap)))
    return (1 / (1 + math.exp(-c * h))) / (1 / (1 + math.exp(-h)))


def dgpo(answers, cfg):
    beta, total = cfg.advantage.beta, 0.0
    for n in range(len(LENGTHS)):
        apart = sum(x.centred * (x.now_T - x.ref_T).sum() for x in answers if x.n == n) / G
        total -= torch.nn.functional.logsigmoid(beta * apart) / beta
    return total / len(LENGTHS)


def opd(answers, cfg):
    """Clipped surrogates of log teacher - log engine, within a bound, and of the group's advantage beside it."""
    total = 0.0
    for x in answers:
        gap_T = (x.teacher_T - x.beh_T).clamp(-cfg.advantage.bound, cfg.advantage.bound)
        total -= clipped(x.ratio_T, gap_T + cfg.advantage.reward * x.group_norm, 0.2, 0.2).sum()
    return total / tokens(answers)


TEACHER = conftest.TOY.parent / "hard_model"  # larger than the students
GRADED = ["reward.overlong=1", "reward.overlong_tokens=16"]
# name -> (textbook loss, configs, changes to them)
OBJECTIVES = {
    "grpo": (grpo, "grpo_toy.yaml", []), "dapo": (dapo, "dapo_toy.yaml", ["advantage.eps=1e-4"]),
    "drgrpo": (drgrpo, "drgrpo_math.yaml toy.yaml", []),
    "gspo": (gspo, "gspo_math.yaml toy.yaml", ["loss.trust.low=0.01", "loss.trust.high=0.02"]),
    "cispo": (cispo, "cispo_math.yaml toy.yaml", []),
    "divppo": (divppo, "divppo_math.yaml toy.yaml", ["loss.trust.divergence=1e-3"]),
    "divppo-kl": (divppo, "divppo_math.yaml toy.yaml", ["loss.trust.kind=binary_kl", "loss.trust.divergence=1e-5"]),
    "ipo": (ipo, "ipo_math.yaml toy.yaml", ["loss.trust.divergence=1e-3"]),
    "engine-ratio": (engine_ratio, "grpo_toy.yaml", ["loss.old_logp=engine", "loss.tis_cap=1.05",
                                                     "loss.trust={low: 0.1, high: 0.1}"]),
    "gdpo": (gdpo, "gdpo_toy.yaml", []), "ppo": (ppo, "ppo_gsm8k.yaml toy.yaml", []),
    "vapo": (vapo, "vapo_toy.yaml", []),
    "tppo": (tppo, "tppo_toy.yaml", []), "tppo-true": (tppo, "tppo_toy.yaml", ["advantage.bootstrap=true"]),
    "apo": (apo, "apo_gsm8k.yaml toy.yaml", []),
    "kl": (with_kl, "grpo_toy.yaml", ["loss.kl=0.5"]),
    "kl-corrected": (with_kl, "grpo_toy.yaml", ["loss.kl=0.5", "loss.kl_corrected=true"]),
    "entropy": (with_entropy, "grpo_toy.yaml", ["loss.entropy=0.1"]),
    "weights": (with_weights, "grpo_toy.yaml", ["loss.tis_cap=1.05", "loss.mask_ratio=1.03", "loss.kl=0.5",
                                                "loss.entropy=0.1", "loss.likelihood=0.2"]),
    "reinforce": (reinforce, "grpo_toy.yaml", ["advantage.kind=centred", "loss.trust.kind=none",
                                               "loss.normalize=sum"]),
    "odpo": (by_pairs, "odpo_gsm8k.yaml toy.yaml", []),
    "odpo-graded": (by_pairs, "odpo_gsm8k.yaml toy.yaml", GRADED),
    "rpo": (by_pairs, "rpo_gsm8k.yaml toy.yaml", []), "madpo": (by_pairs, "madpo_toy.yaml", []),
    "dgpo": (dgpo, "dgpo_gsm8k.yaml toy.yaml", GRADED),
    "rloo": (rloo, "grpo_toy.yaml", ["advantage.kind=leave_one_out"]),
    "opd": (opd, "opd_toy.yaml", ["prune.completions.kind=none", f"teacher={{path: {TEACHER}, keep: null}}",
                                  "advantage.reward=0.5", "advantage.bound=3"])}


def windowed(groups: list[Group]) -> list[Group]:
    """Some completions begun in earlier steps, some that go on."""
    from leaves.windows.join import Piece

    def cut(sample: Sample, g: int) -> Piece:
        return Piece(replace(sample, finished=g < 2), start=sample.length // 2 if g % 2 else 0, pending=g > 1)

    return [Group(group.prompt, tuple(cut(s, g) for g, s in enumerate(group.samples))) for group in groups]


def learner_on(folder, cfg: Config) -> Learner:
    """What an update by this config works with, on the model in the folder."""
    return parts_of(cfg, folder).learner


def compare(parts: Parts, groups: list[Group], rewards: Rewards) -> Tensor:
    """Advantages as a run has them; V* is not estimated, but VALUES."""
    if parts.cfg.advantage.kind == "soft_value":
        from leaves.soft_value.join import subtract_values
        parts = replace(parts, advantage=partial(subtract_values, VALUES))
    return parts.advantage(groups, rewards, parts.cfg.advantage)


def critic_of(learner: Learner):
    """The critic beside a policy (leaves/critic)."""
    return learner.before_update[0].args[0]


def gradient_of(learner: Learner, batch: Batch, moved: float) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradient and metrics of a pass by the training step, behind a nudge of the policy; by 0, one pass does both."""
    weighed = update.make_minibatch(learner, batch, list(range(batch.offered)))
    scored = update.prepare_rows(learner, weighed, learner.rows(weighed), extra_pass=moved > 0)
    nudge(learner.policy, moved)
    sums = PassSums(learner.pack, learner.policy.quadratic)
    for passed in update.add_gradients(learner, weighed, scored, unmoved=moved == 0):
        sums.add(*passed, first_pass=True)
    return gradients(learner.policy), sums.metrics(updates=1)


class Case:
    """A learner in the middle of an update by one objective, and the completions that it is on."""

    def __init__(self, name: str, folder, out, *more: str, lengths=LENGTHS, prompts=PROMPTS):
        self.textbook, configs, changes = OBJECTIVES[name]
        self.cfg = cfg = toy_config(out, f"model.path={folder}", f"rollout.group_size={G}",
                                    "rollout.prompts_per_step=2", "steps=50", *changes, *more, name=configs)
        parts = parts_of(cfg, folder)
        self.learner = parts.learner
        for model, _ in self.learner.roles.values():
            nudge(model, 0.3)
        self.old, self.now, self.ref = (conftest.load(folder, torch.float64) for _ in range(3))
        self.teacher = conftest.load(TEACHER, torch.float64)
        nudge(self.old, 0.02)
        groups = self.with_engine(make_groups(lengths, prompts))
        self.groups = windowed(groups) if "windows" in leaves.chosen(cfg) else groups
        pending_NG = torch.tensor([[s.pending for s in group.samples] for group in self.groups])
        components = {"accuracy": CORRECT_NG * ~pending_NG, "wrong": (1 - CORRECT_NG) * ~pending_NG,
                      "overlong": SHORT_NG * ~pending_NG}
        rewards = as_rewards(components, cfg.reward.weights)
        self.reward_NG = rewards.total_NG
        adv_NG = compare(parts, groups, rewards)
        self.batch = replace(as_batch(self.groups, adv_NG, keep_all(adv_NG)), reward_NG=self.reward_NG,
                             correct_NG=components["accuracy"] == 1)

    def with_engine(self, groups: list[Group]) -> list[Group]:
        """The groups with log-probs that an engine near the policy before the update would give."""
        generator = torch.Generator().manual_seed(1)

        def noisy(group: Group, sample: Sample) -> Sample:
            logp_T = logp_alone(self.old, group, sample).detach()
            noise_T = 0.1 * torch.randn(sample.length, dtype=torch.float64, generator=generator)
            return replace(sample, logp=(logp_T + noise_T).clamp(max=0).tolist())

        return [Group(group.prompt, tuple(noisy(group, s) for s in group.samples)) for group in groups]

    @staticmethod
    def entropies(model, group: Group, sample: Sample) -> Tensor:
        ids, first = torch.tensor([*group.prompt.ids, *sample.ids]), len(group.prompt.ids)
        hidden_TD = model.hidden(ids, torch.arange(len(ids)), attend_alone)
        logp_TV = (hidden_TD[first - 1:-1] @ model.head_VD.T).log_softmax(dim=-1)
        return -(logp_TV.exp() * logp_TV).sum(dim=-1)

    def values(self, group: Group, sample: Sample) -> Tensor:
        """Before each token and behind the last; nothing without a critic."""
        if "critic" not in self.learner.roles:
            return torch.zeros(sample.length + 1)
        ids, first = torch.tensor([*group.prompt.ids, *sample.ids]), len(group.prompt.ids)
        place = torch.arange(first - 1, len(ids))
        with torch.no_grad():
            return self.learner.roles["critic"][0](ids, torch.arange(len(ids)), attend_alone, place)

    def by_formula(self, moved: float = 0.03) -> dict[str, Tensor]:
        with torch.no_grad():
            for mine, theirs in zip(self.now.parameters(), self.old.parameters(), strict=True):
                mine.copy_(theirs)
        nudge(self.now, moved)
        answers = []
        for n, group in enumerate(self.groups):
            for g, s in enumerate(group.samples):
                value_T = self.values(group, s)
                own = [t for start, to in s.turns[::2] for t in range(start, to)]  # not in replies (test_replies.py)
                answers.append(Answer(
                    logp_alone(self.now, group, s)[own], logp_alone(self.old, group, s)[own].detach(),
                    torch.tensor(s.logp.tolist(), dtype=torch.float64)[own],
                    logp_alone(self.ref, group, s)[own].detach(), logp_alone(self.teacher, group, s)[own].detach(),
                    self.entropies(self.now, group, s)[own],
                    value_T[own], value_T[-1], float(self.reward_NG[n, g]),
                    self.reward_NG[n], bool(self.batch.correct_NG[n, g]), len(own) - s.trained, s.pending, n, g))
        self.textbook(answers, self.cfg).backward()
        return gradients(self.now)

    def by_training(self, moved: float = 0.03) -> dict[str, Tensor]:
        nudge(self.learner.policy, 0.02)
        gradient, measured = gradient_of(self.learner, self.batch, moved)
        self.stopped = measured["train/clipped"]
        return gradient


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_textbook_loss(name, tiny, tmp_path):
    case = Case(name, tiny, tmp_path / "run")
    expected, ours = case.by_formula(), case.by_training()
    assert (0 < case.stopped < 1) == (case.cfg.loss.trust.kind not in ("clamp", "none"))
    assert_same(ours, expected)


def test_so_it_is_where_one_pass_weighs_tokens_and_computes_the_gradient(tiny, tmp_path):
    case = Case("weights", tiny, tmp_path / "run")
    assert_same(case.by_training(moved=0.0), case.by_formula(moved=0.0))


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, grad in expected.items():
        size = float(grad.abs().max())
        assert size > 1e-8
        torch.testing.assert_close(ours[key], grad, rtol=0, atol=1e-10 * size, msg=key)
