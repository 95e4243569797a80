"""Settings: yaml -> frozen dataclasses, one per stage. Unknown, missing, mistyped and out-of-range keys are errors.

A config file is a difference from the one it names as `base:` (one level deep); `--set a.b=c` comes on top.
The comment beside a field is its documentation.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import types
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

CONFIGS = Path(__file__).parent / "configs"


class ConfigError(ValueError):
    """A setting, or a file it names, that the user must mend; the message says which, what is allowed and how."""


@dataclass(frozen=True, slots=True)
class Model:
    path: str                      # Hugging Face folder or hub name
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # of the computation; auto: bfloat16 on CUDA
    attention: Literal["auto", "flash", "varlen", "sdpa"] = "auto"     # model.BACKENDS
    checkpoint_blocks: bool = False  # recompute activations in backward: less memory, a third more time
    logp_chunk: int = 1024         # positions whose [V] logits are in memory at once


@dataclass(frozen=True, slots=True)
class Data:
    train: str                     # .jsonl, .parquet, a named set or user/set:config:split on the hub
    eval: str                      # one or several of the same, separated by commas
    dir: str | None = None         # folder that holds the named sets; none: from the hub
    system_prompt: str | None = None
    max_prompt_tokens: int = 512   # a longer prompt is an error, never cut
    drop_longer: bool = False      # training prompts that are longer are left out, and their number is printed
    limit: int | None = None       # train on the first so many problems; null: on all


@dataclass(frozen=True, slots=True)
class Rollout:
    group_size: int                # G, completions per prompt
    prompts_per_step: int          # N, prompts offered per step, over all ranks
    max_new_tokens: int
    # When a step has enough. offered: after N prompts. informative: after N groups whose rewards differ, the others
    # dropped and replaced (DAPO's dynamic sampling). full: when what is kept fills pack.budget, N prompts at a time.
    until: Literal["offered", "informative", "full"] = "offered"
    max_rounds: int = 10           # informative, full: rollouts after which a step goes on with what it has
    # informative: what must differ within a group. accuracy: whatever the other components add (DAPO)
    differ_in: Literal["reward", "accuracy"] = "reward"
    oversample: float = 1.5        # informative: prompts of a round over prompts_per_step; GRESO has 1.5, DAPO 3
    window: int | None = None      # new tokens of a completion per step; the rest comes in the next (T-PPO); null: all
    engine: Literal["torch", "vllm"] = "torch"
    temperature: float = 1.0       # divides the logits here and in every training pass
    slots: int = 256               # sequences decoded at once, per engine; decides the size of the KV cache
    tensor_parallel: int = 1       # vllm: neighbouring ranks that hold one engine together
    cache_gib: float | None = None  # vllm: KV cache per rank; null: room for every slot at full length
    # Tokens of a round up to which each rank gets all; above, those it trains on alone. With a window always all.
    gather_limit: int = 4_000_000


@dataclass(frozen=True, slots=True)
class Reward:
    """Weight of each named component (reward.COMPONENTS); the reward is their weighted sum."""

    accuracy: float = 1.0          # the marked answer is right
    wrong: float = 0.0             # 1 where it is not, so a punishment has a weight below 0
    boxed: float = 0.0             # an answer is in a box, right or not
    format: float = 0.0            # think and answer tags as CPPO asks for them
    tag_exact: float = 0.0         # CPPO's two grades of a GSM8K answer
    tag_number: float = 0.0
    tag_count: float = 0.0         # a quarter for each of the four tags
    length: float = 0.0            # 1 for no more than length_tokens
    length_tokens: int | None = None
    overlong: float = 0.0          # from 0 to -1 over the last overlong_tokens before rollout.max_new_tokens (DAPO)
    overlong_tokens: int | None = None
    repetition: float = 0.0        # from 0 to -1
    custom: float = 0.0            # what reward(text, gold, tokens) of custom_file returns, in [-1, 1]
    custom_file: str | None = None

    @property
    def weights(self) -> dict[str, float]:
        """Of the components that count."""
        return {f.name: getattr(self, f.name) for f in fields(self)
                if f.type is float and getattr(self, f.name)}


@dataclass(frozen=True, slots=True)
class Advantage:
    # GRPO; Dr. GRPO; RLOO; REINFORCE; GDPO; A*-PO; PPO, VAPO and T-PPO, with a critic. See advantage.ESTIMATORS
    kind: Literal["group_norm", "centred", "leave_one_out", "reward", "decoupled", "soft_value", "gae"] = "group_norm"
    correction: Literal[0, 1] = 1  # of the group's standard deviation: 1 in the released codes, 0 in the papers
    eps: float = 1e-4              # added to it; verl has 1e-6
    lam: float = 0.95              # gae: lambda of the policy's advantage
    alpha: float | None = None     # gae: in place of lam, 1 - 1 / (alpha x length); VAPO: 0.05, at thousands of tokens
    lam_min: float = 0.0           # gae: where alpha gives less
    lam_critic: float = 1.0        # gae: lambda of the critic's target; 1: the reward itself
    bootstrap: Literal["prev", "true"] = "prev"  # gae: value behind a cut: of the state before (EGAE), or its own
    beta: float = 0.5              # soft_value: KL weight that V* is of
    samples: int = 8               # soft_value: of the initial policy per training prompt, before the first step


@dataclass(frozen=True, slots=True)
class Critic:
    """Of advantage.kind=gae: a value head on a copy of the policy's backbone. What is not here is as in `optim`."""

    lr: float | None = None
    warmup_steps: int = 0          # then constant
    epochs: int = 1                # passes over each rollout
    minibatches: int = 1           # optimizer steps per pass
    bounded: bool = False          # values within the range of rewards, by a sigmoid
    min_samples: int = 1           # no step on fewer completions that are done
    pretrain_steps: int = 0        # first steps of the run, in which the critic alone learns
    pretrain_until: float | None = None  # explained variance that ends them sooner


@dataclass(frozen=True, slots=True)
class Completions:
    kind: Literal["none", "topk", "bernoulli", "bottom", "pps"] = "none"  # topk: CPPO; the next two: Dynamic Pruning
    keep: int | None = None        # topk, pps: completions kept per group, of rollout.group_size
    scope: Literal["group", "batch"] = "group"  # topk, pps; batch: keep x groups of the whole step
    drop_prob: float | None = None  # bernoulli, bottom: of a completion whose |advantage| is below its group's mean
    size: Literal["adv", "norm"] = "norm"  # pps: probability in proportion to |A| or to a guess at the gradient's norm
    by_cost: bool = False          # pps: and to 1 / sqrt(length), for a budget of tokens instead of completions


@dataclass(frozen=True, slots=True)
class Prompts:
    # bernoulli, rank: Dynamic Pruning, as proved and as listed
    kind: Literal["none", "bernoulli", "rank", "greso"] = "none"
    drop_prob: float | None = None  # bernoulli: of a prompt below the mean |A| of those seen; rank: the lowest share
    max_skips: int | None = None   # rank: turns in a row at which a prompt may be skipped
    explore: float = 0.5           # greso: p at first; a prompt is rolled out with max(p^z, 0.01) after z flat groups
    target: float = 0.25           # greso: share of flat groups among those rolled out that p is steered to


@dataclass(frozen=True, slots=True)
class Prune:
    completions: Completions = field(default_factory=Completions)
    prompts: Prompts = field(default_factory=Prompts)
    truncated: bool = False        # drop completions cut at rollout.max_new_tokens (DAPO's overlong filtering)
    unpruned_steps: int = 0        # at the end of the run, without pruning at either level; rollout.until stays


@dataclass(frozen=True, slots=True)
class Pack:
    capacity: int                  # tokens per row, prompts included
    window: int | None = None      # sequences to choose from at a time, oldest first; null: all, longest first
    budget: int | None = None      # rollout.until=full: tokens of a step, prompts included


@dataclass(frozen=True, slots=True)
class Loss:
    per: Literal["token", "sequence", "constant", "sum"] = "sequence"  # what counts the same, see loss.token_weight
    count: Literal["all", "kept"] = "all"     # divide by all that was offered, or by what pruning kept
    # How far the policy may move: PPO, GRPO, DAPO; GSPO; CISPO; Divergence PPO twice; without bound. See loss.TRUST
    trust: Literal["clip", "clip_sequence", "clamp", "total_variation", "binary_kl", "none"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None  # upper bound on the ratio where the advantage is negative; verl has 10
    divergence: float | None = None  # total_variation: 0.15, binary_kl: 0.05 in the paper
    ratio_cap: float = 20.0        # total_variation, binary_kl: upper bound on the ratio
    kl: float = 0.0                # beta, weight of the k3 KL to the initial model
    residual: float | None = None  # beta of A*-PO's squared loss, see loss.residual; 1e-3 in the paper
    likelihood: float = 0.0        # weight of -log pi of correct completions; VAPO has 0.1
    old_logp: Literal["recompute", "engine"] = "recompute"  # whose log-probs the ratio is taken against
    tis_cap: float | None = None   # weigh each token by min(pi_old / pi_engine, cap); 2 is usual
    mask_ratio: float | None = None  # weigh a completion 0 when its mean ratio is outside [1 / mask_ratio, mask_ratio]


@dataclass(frozen=True, slots=True)
class Update:
    epochs: int = 1                # skips each rollout
    minibatches: int = 1           # optimizer steps per pass, each on whole groups


@dataclass(frozen=True, slots=True)
class Optim:
    lr: float
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    clip_norm: float = 1.0         # on the norm of the whole gradient, over all ranks
    offload: bool = False          # CUDA: weights, gradients and moments stay in the host's memory, and step there


@dataclass(frozen=True, slots=True)
class Eval:
    max_new_tokens: int
    every: int = 0                 # steps between evaluations; 0: only before and after
    n: int = 1                     # answers to each problem: accuracy is their mean (avg@n)
    temperature: float = 0.0       # 0: greedy
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    every: int = 0                 # steps between checkpoints; 0: only at the end
    keep: int = 1                  # how many of the newest stay on disk


@dataclass(frozen=True, slots=True)
class Config:
    out: str                       # the run folder; runs/<config name> unless set
    steps: int
    model: Model
    data: Data
    rollout: Rollout
    pack: Pack
    optim: Optim
    eval: Eval
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    reward: Reward = field(default_factory=Reward)
    advantage: Advantage = field(default_factory=Advantage)
    critic: Critic = field(default_factory=Critic)
    prune: Prune = field(default_factory=Prune)
    loss: Loss = field(default_factory=Loss)
    update: Update = field(default_factory=Update)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


ALONE = ("reward", "soft_value", "gae")  # kinds of advantage.kind that do with one completion per prompt


def rules(cfg: Config) -> list[tuple[str, bool, str]]:
    """(setting, whether it is in range, what is allowed and what to do)."""
    roll = cfg.rollout
    trained = cfg.data.max_prompt_tokens + roll.max_new_tokens
    return [
        ("steps", cfg.steps >= 1, "at least 1"),
        ("model.logp_chunk", cfg.model.logp_chunk >= 1, "at least 1"),
        ("data.max_prompt_tokens", cfg.data.max_prompt_tokens >= 1, "at least 1"),
        ("data.limit", cfg.data.limit is None or cfg.data.limit >= 1, "at least 1, or null"),
        ("rollout.group_size", roll.group_size >= (1 if cfg.advantage.kind in ALONE else 2),
         f"at least 2 with advantage.kind={cfg.advantage.kind}, which compares completions of one prompt"),
        ("rollout.prompts_per_step", roll.prompts_per_step >= 1, "at least 1"),
        ("rollout.max_new_tokens", roll.max_new_tokens >= 1, "at least 1"),
        ("rollout.temperature", roll.temperature > 0, "above 0: greedy groups have no advantage"),
        ("rollout.temperature", roll.engine == "torch" or roll.temperature >= 0.01,
         "at least 0.01 with rollout.engine=vllm, which takes a lower one for 0.01"),
        ("rollout.slots", roll.slots >= 1, "at least 1"),
        ("rollout.tensor_parallel", roll.tensor_parallel >= 1, "at least 1"),
        ("rollout.tensor_parallel", roll.engine == "vllm" or roll.tensor_parallel == 1, "1 unless rollout.engine=vllm"),
        ("rollout.cache_gib", roll.cache_gib is None or roll.cache_gib > 0, "above 0, or null"),
        ("rollout.cache_gib", roll.engine == "vllm" or roll.cache_gib is None, "null unless rollout.engine=vllm"),
        ("model.dtype", roll.engine == "torch" or cfg.model.dtype != "float64",
         "other than float64 with rollout.engine=vllm, which does not compute in it"),
        *reward_rules(cfg),
        ("advantage.eps", cfg.advantage.eps >= 0, "at least 0"),
        *completion_rules(cfg),
        *prompt_rules(cfg),
        *critic_rules(cfg),
        *window_rules(cfg),
        *objective_rules(cfg),
        ("pack.capacity", cfg.pack.capacity >= trained,
         f"at least {trained} tokens, one sequence (data.max_prompt_tokens={cfg.data.max_prompt_tokens} + "
         f"rollout.max_new_tokens={roll.max_new_tokens}); raise it or lower those"),
        ("pack.window", cfg.pack.window is None or cfg.pack.window >= 1, "at least 1, or null"),
        ("loss.tis_cap", cfg.loss.tis_cap is None or cfg.loss.tis_cap >= 1, "at least 1, or null"),
        ("loss.mask_ratio", cfg.loss.mask_ratio is None or cfg.loss.mask_ratio > 1, "above 1, or null"),
        ("loss.old_logp", cfg.loss.old_logp == "recompute" or (cfg.loss.tis_cap or cfg.loss.mask_ratio) is None,
         "recompute with loss.tis_cap or loss.mask_ratio: a ratio to the engine holds the correction already"),
        ("update.epochs", cfg.update.epochs >= 1, "at least 1"),
        ("update.minibatches", cfg.update.minibatches >= 1 and roll.prompts_per_step % cfg.update.minibatches == 0,
         f"a divisor of {roll.prompts_per_step} (rollout.prompts_per_step): a mini-batch holds whole groups"),
        ("rollout.gather_limit", roll.gather_limit >= 0, "at least 0 (0: never all)"),
        ("optim.lr", cfg.optim.lr > 0, "above 0"),
        ("optim.warmup_steps", cfg.optim.warmup_steps >= 0, "at least 0"),
        ("optim.beta1", 0 <= cfg.optim.beta1 < 1, "in [0, 1)"),
        ("optim.beta2", 0 <= cfg.optim.beta2 < 1, "in [0, 1)"),
        ("optim.weight_decay", cfg.optim.weight_decay >= 0, "at least 0"),
        ("optim.clip_norm", cfg.optim.clip_norm > 0, "above 0"),
        ("eval.max_new_tokens", cfg.eval.max_new_tokens >= 1, "at least 1"),
        ("eval.n", cfg.eval.n >= 1 and (cfg.eval.n == 1 or cfg.eval.temperature > 0),
         "at least 1, and 1 at eval.temperature=0: greedy answers are all the same"),
        ("eval.temperature", cfg.eval.temperature >= 0, "at least 0"),
        ("eval.temperature", roll.engine == "torch" or not 0 < cfg.eval.temperature < 0.01,
         "0 or at least 0.01 with rollout.engine=vllm, which takes a lower one for 0.01"),
        ("eval.top_p", 0 < cfg.eval.top_p <= 1, "in (0, 1]"),
        ("eval.every", cfg.eval.every >= 0, "at least 0 (0: only before and after)"),
        ("checkpoint.every", cfg.checkpoint.every >= 0, "at least 0 (0: only at the end)"),
        ("checkpoint.keep", cfg.checkpoint.keep >= 1, "at least 1"),
    ]


def reward_rules(cfg: Config) -> list[tuple[str, bool, str]]:
    done = cfg.reward
    return [
        ("reward", bool(done.weights), "given at least one weight other than 0"),
        ("reward.overlong_tokens", (done.overlong_tokens is not None) == (done.overlong != 0),
         "set with reward.overlong, and null without"),
        ("reward.overlong_tokens", done.overlong_tokens is None or
         1 <= done.overlong_tokens <= cfg.rollout.max_new_tokens,
         f"in 1..{cfg.rollout.max_new_tokens} (rollout.max_new_tokens)"),
        ("reward.length_tokens", (done.length_tokens is not None) == (done.length != 0),
         "set with reward.length, and null without"),
        ("reward.length_tokens", done.length_tokens is None or done.length_tokens >= 1, "at least 1"),
        ("reward.custom_file", (done.custom_file is not None) == (done.custom != 0),
         "set with reward.custom, and null without"),
        ("reward.custom_file", done.custom_file is None or Path(done.custom_file).is_file(),
         "a Python file with a function reward(text, gold, tokens)"),
    ]


def completion_rules(cfg: Config) -> list[tuple[str, bool, str]]:
    roll, done = cfg.rollout, cfg.prune.completions
    counted, rated = done.kind in ("topk", "pps"), done.kind in ("bernoulli", "bottom")
    return [
        ("prune.completions.keep", not counted or (done.keep is not None and 1 <= done.keep <= roll.group_size),
         f"in 1..{roll.group_size} (rollout.group_size); to train on all set prune.completions.kind=none "
         "and prune.completions.keep=null"),
        ("prune.completions.keep", counted or done.keep is None,
         f"null while prune.completions.kind={done.kind}; it belongs to topk and pps"),
        ("prune.completions.scope", counted or done.scope == "group",
         f"left out while prune.completions.kind={done.kind}; it belongs to topk and pps"),
        ("prune.completions.drop_prob", not rated or (done.drop_prob is not None and 0 <= done.drop_prob < 1),
         "in [0, 1): no weight makes up for what is always dropped"),
        ("prune.completions.drop_prob", done.kind != "bottom" or drops(done.drop_prob or 0, roll.group_size),
         f"0 or enough to drop one of {roll.group_size} (rollout.group_size), for their product is rounded down"),
        ("prune.completions.drop_prob", rated or done.drop_prob is None,
         f"null while prune.completions.kind={done.kind}; it belongs to bernoulli and bottom"),
        ("loss.count", cfg.loss.count == "all" or done.kind not in ("bernoulli", "pps"),
         f"all with prune.completions.kind={done.kind}: its weights restore the full batch, not a mean over the kept"),
        ("prune.completions.kind", done.kind == "none" or roll.group_size >= 2,
         "none with rollout.group_size=1: there is nothing to compare a completion with"),
    ]


def prompt_rules(cfg: Config) -> list[tuple[str, bool, str]]:
    roll, done = cfg.rollout, cfg.prune.prompts
    rated, full = done.kind in ("bernoulli", "rank"), roll.until == "full"
    most = roll.max_rounds * roll.prompts_per_step * roll.group_size * (
        cfg.data.max_prompt_tokens + roll.max_new_tokens)
    return [
        ("prune.prompts.drop_prob", not rated or (done.drop_prob is not None and 0 <= done.drop_prob < 1),
         "in [0, 1): no weight makes up for what is always dropped"),
        ("prune.prompts.drop_prob", done.kind != "rank" or drops(done.drop_prob or 0, roll.prompts_per_step),
         f"0 or enough to skip one of {roll.prompts_per_step} (rollout.prompts_per_step), for their product is rounded "
         "down"),
        ("prune.prompts.drop_prob", rated or done.drop_prob is None,
         f"null while prune.prompts.kind={done.kind}; it belongs to bernoulli and rank"),
        ("prune.prompts.max_skips", done.kind != "rank" or (done.max_skips is not None and done.max_skips >= 1),
         "at least 1 with prune.prompts.kind=rank: a prompt that is never rolled out is never measured again"),
        ("prune.prompts.max_skips", done.kind == "rank" or done.max_skips is None,
         f"null while prune.prompts.kind={done.kind}; it belongs to rank"),
        ("prune.prompts.kind", done.kind == "none" or roll.group_size >= 2,
         "none with rollout.group_size=1: one completion has no |advantage| to remember a prompt by"),
        ("prune.prompts.explore", 0.05 <= done.explore <= 0.95, "in [0.05, 0.95], where it is kept"),
        ("prune.prompts.target", 0 < done.target < 1, "in (0, 1)"),
        *((f"prune.prompts.{name}", done.kind == "greso" or getattr(done, name) == getattr(Prompts(), name),
           f"left out while prune.prompts.kind={done.kind}; it belongs to greso") for name in ("explore", "target")),
        ("prune.unpruned_steps", 0 <= cfg.prune.unpruned_steps <= cfg.steps, f"in 0..{cfg.steps} (steps)"),
        ("loss.count", cfg.loss.count == "all" or done.kind != "bernoulli",
         "all with prune.prompts.kind=bernoulli: its weights restore the full batch, not a mean over the kept"),
        *((key, mean or cfg.loss.count == "kept" or not rated or roll.until == "informative",
           f"{other} with prune.prompts.kind={done.kind} and loss.count=all: a mean over all tokens needs the length "
           "of what a prompt that is skipped would have got")
          for key, mean, other in (("loss.per", cfg.loss.per != "token", "sequence or constant"),
                                   ("loss.likelihood", not cfg.loss.likelihood, "0"))),
        ("rollout.until", roll.until != "informative" or done.kind != "bernoulli",
         "offered (or full) with prune.prompts.kind=bernoulli: a prompt that is replaced must not be weighed for too"),
        ("rollout.max_rounds", roll.max_rounds >= 1, "at least 1"),
        ("rollout.oversample", roll.oversample >= 1 and (roll.until == "informative" or roll.oversample == 1.5),
         "at least 1, and left out unless rollout.until=informative"),
        ("rollout.differ_in", roll.differ_in == "reward" or (roll.until == "informative" and cfg.reward.accuracy != 0),
         "reward unless rollout.until=informative and reward.accuracy has a weight"),
        ("pack.budget", (cfg.pack.budget is not None) == full, "set with rollout.until=full, and null without"),
        ("pack.budget", cfg.pack.budget is None or 1 <= cfg.pack.budget <= most,
         f"in 1..{most} tokens, all that rollout.max_rounds rounds can give"),
    ]


def critic_rules(cfg: Config) -> list[tuple[str, bool, str]]:
    adv, critic, used = cfg.advantage, cfg.critic, cfg.advantage.kind == "gae"
    others = {"lam": "gae", "alpha": "gae", "lam_min": "gae", "lam_critic": "gae", "bootstrap": "gae",
              "beta": "soft_value", "samples": "soft_value"}
    return [
        ("critic", used or critic == Critic(), "left out unless advantage.kind=gae, which alone has a critic"),
        ("critic.lr", not used or (critic.lr is not None and critic.lr > 0), "above 0 with advantage.kind=gae"),
        ("critic.warmup_steps", critic.warmup_steps >= 0, "at least 0"),
        ("critic.epochs", critic.epochs >= 1, "at least 1"),
        ("critic.minibatches", critic.minibatches >= 1, "at least 1"),
        ("critic.min_samples", critic.min_samples >= 1, "at least 1"),
        ("critic.pretrain_steps", 0 <= critic.pretrain_steps < cfg.steps, f"in 0..{cfg.steps - 1}, below steps"),
        ("critic.pretrain_until", critic.pretrain_until is None or
         (critic.pretrain_steps > 0 and 0 < critic.pretrain_until < 1),
         "in (0, 1), with critic.pretrain_steps as the most that it may take; or null"),
        *((f"advantage.{name}", adv.kind == kind or getattr(adv, name) == getattr(Advantage(), name),
           f"left out while advantage.kind={adv.kind}; it belongs to {kind}") for name, kind in others.items()),
        *((f"advantage.{name}", 0 <= getattr(adv, name) <= 1, "in [0, 1]")
          for name in ("lam", "lam_min", "lam_critic")),
        ("advantage.alpha", adv.alpha is None or adv.alpha > 0, "above 0, or null"),
        ("advantage.lam", adv.alpha is None or adv.lam == Advantage().lam, "left out with advantage.alpha"),
        ("advantage.lam_min", adv.alpha is not None or adv.lam_min == 0, "left out without advantage.alpha"),
        ("advantage.beta", adv.beta > 0, "above 0"),
        ("advantage.samples", adv.samples >= 1, "at least 1"),
    ]


def window_rules(cfg: Config) -> list[tuple[str, bool, str]]:
    roll, windowed = cfg.rollout, cfg.rollout.window is not None
    return [
        ("rollout.window", not windowed or 1 <= roll.window <= roll.max_new_tokens,
         f"in 1..{roll.max_new_tokens} (rollout.max_new_tokens), or null"),
        ("advantage.kind", not windowed or cfg.advantage.kind == "gae",
         "gae with rollout.window: completions of one prompt end in different steps, so no group is whole to compare"),
        ("advantage.bootstrap", windowed or cfg.advantage.bootstrap == "prev",
         "left out without rollout.window: nothing is cut"),
        ("prune.completions.kind", not windowed or cfg.prune.completions.kind == "none",
         "none with rollout.window: what is cut has no |advantage| in a group yet to be pruned by"),
        ("prune.prompts.kind", not windowed or cfg.prune.prompts.kind == "none",
         "none with rollout.window: a prompt's group is never in one step, so there is nothing to remember of it"),
        ("rollout.until", not windowed or roll.until == "offered", "offered with rollout.window"),
        ("loss.per", not windowed or cfg.loss.per != "sequence",
         "token, constant or sum with rollout.window: a step has only a part of a sequence"),
        ("loss.trust", not windowed or cfg.loss.trust != "clip_sequence",
         "other than clip_sequence with rollout.window: a step has only a part of a sequence"),
    ]


def objective_rules(cfg: Config) -> list[tuple[str, bool, str]]:
    loss, divergent = cfg.loss, cfg.loss.trust in ("total_variation", "binary_kl")
    return [
        ("advantage.kind", cfg.advantage.kind != "decoupled" or cfg.rollout.until == "offered",
         "another than decoupled unless rollout.until=offered: its scale is that of one round"),
        ("loss.clip_low", 0 <= loss.clip_low <= 1, "in [0, 1]"),
        ("loss.clip_high", loss.clip_high >= 0, "at least 0"),
        ("loss.dual_clip", loss.dual_clip is None or loss.dual_clip > 1 + loss.clip_high,
         "above 1 + loss.clip_high, or none"),
        ("loss.dual_clip", loss.dual_clip is None or loss.trust in ("clip", "clip_sequence"),
         f"null with loss.trust={loss.trust}; it belongs to clip and clip_sequence"),
        *((f"loss.{name}", loss.trust in ("clip", "clip_sequence", "clamp") or getattr(loss, name) == 0.2,
           f"left out with loss.trust={loss.trust}") for name in ("clip_low", "clip_high")),
        ("loss.divergence", loss.divergence > 0 and divergent if loss.divergence is not None else not divergent,
         "above 0 with loss.trust=total_variation or binary_kl, and null without"),
        ("loss.ratio_cap", loss.ratio_cap > 1 and (divergent or loss.ratio_cap == 20),
         "above 1, and left out unless loss.trust is total_variation or binary_kl"),
        ("loss.kl", loss.kl >= 0, "at least 0"),
        ("loss.likelihood", loss.likelihood >= 0, "at least 0"),
        ("loss.likelihood", not loss.likelihood or cfg.reward.accuracy != 0,
         "0 unless reward.accuracy has a weight, which tells what is correct"),
        ("loss.residual", loss.residual is None or loss.residual > 0, "above 0, or null"),
        ("loss.residual", loss.residual is None or cfg.advantage.kind == "soft_value",
         "null unless advantage.kind=soft_value: the squared loss is of r - V*"),
        ("loss.residual", loss.residual is None or (loss.trust, loss.per) == ("none", "sum"),
         "null unless loss.trust=none and loss.per=sum, which make its gradient that of the squared loss"),
    ]


def drops(share: float, count: int) -> bool:
    """Whether a share of so many, rounded down, is at least one, or is meant to be none."""
    return share == 0 or int(share * count + 1e-9) >= 1


def load(name: str | Path, overrides: list[str] = ()) -> Config:
    """Read a config by path, or by its name in configs/, and apply "a.b=c" overrides. Raises ConfigError."""
    path = find(name)
    raw = read(path)
    base = raw.pop("base", None)
    if base is not None:
        parent = read(path.parent / str(base))
        if "base" in parent:
            raise ConfigError(f"{path}: base {base} has a base itself; only one level is allowed")
        raw = merge(parent, raw)
    for override in overrides:
        raw = merge(raw, parse_override(override))
    raw.setdefault("out", f"runs/{path.stem}")
    cfg = build(Config, raw)
    for key, fine, allowed in rules(cfg):
        if not fine:
            raise ConfigError(f"{key}={get(cfg, key)} must be {allowed}")
    return cfg


def find(name: str | Path) -> Path:
    path = next((p for p in (Path(name), CONFIGS / name) if p.is_file()), None)
    if path is None:
        shipped = sorted(p.name for p in CONFIGS.glob("*.yaml"))
        near = difflib.get_close_matches(Path(name).name, shipped, n=1)
        advice = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(shipped)}."
        raise ConfigError(f"config '{name}' not found, neither as given nor in {CONFIGS}. {advice}")
    return path


def read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config '{path}' not found")
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid yaml: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold 'setting: value' lines")
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """A model folder's JSON file. Raises ConfigError."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}; download it again") from None


def parse_override(text: str) -> dict[str, Any]:
    """ "a.b=c" -> {"a": {"b": c}}, with c read as yaml."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text!r} must have the form setting=value")
    try:
        nested = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text!r}: the value is not valid yaml; put quotes around a text") from None
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def merge(old: dict, new: dict) -> dict:
    """`new` over `old`, key by key at every depth."""
    out = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def build(cls: type, raw: dict[str, Any], path: str = "") -> Any:
    """Fill a frozen dataclass (and those inside it) from nested dicts.

    Raises ConfigError on an unknown key, a missing key or a wrong type, naming the full dotted path.
    """
    hints = get_type_hints(cls)
    for key in raw:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            valid = ", ".join(path + hint for hint in hints)
            advice = f"Did you mean '{path}{near[0]}'?" if near else f"Valid keys: {valid}."
            raise ConfigError(f"unknown key '{path}{key}'. {advice}")
    missing = [f.name for f in fields(cls)
               if f.default is MISSING and f.default_factory is MISSING and f.name not in raw]
    if missing:
        raise ConfigError(f"missing key '{path}{missing[0]}' ({describe(hints[missing[0]])}); it has no default")
    return cls(**{key: convert(value, hints[key], path + key) for key, value in raw.items()})


def convert(value: Any, kind: Any, path: str) -> Any:
    """`value` as `kind`, or ConfigError. yaml reads 1e-6 as a text, so a float may be written as one."""
    if is_dataclass(kind):
        if isinstance(value, dict):
            return build(kind, value, path + ".")
    elif get_origin(kind) in (Union, types.UnionType):
        with contextlib.suppress(ConfigError):  # the error below says that null is allowed too
            return None if value is None else convert(value, get_args(kind)[0], path)
    elif get_origin(kind) is Literal:
        word = str(value).lower() if isinstance(value, bool) else value  # yaml reads true as no word
        if word in get_args(kind):
            return word
    elif kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # what is no number meets the error below
            number = float(value)
            if math.isfinite(number):
                return number
    elif type(value) is kind:
        return value
    raise ConfigError(f"{path}={value!r} must be {describe(kind)}")


def describe(kind: Any) -> str:
    if is_dataclass(kind):
        return f"a section with {', '.join(f.name for f in fields(kind))}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, types.UnionType):
        return f"{describe(get_args(kind)[0])} or null"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}[kind]


def get(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def flatten(cfg: Any, path: str = "") -> dict[str, Any]:
    """Every setting under its dotted name."""
    flat: dict[str, Any] = {}
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        flat |= flatten(value, f"{path}{f.name}.") if is_dataclass(value) else {path + f.name: value}
    return flat


def dump(cfg: Config) -> str:
    """The resolved config as yaml that `load` reads back to the same config."""
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False, allow_unicode=True)
