"""The settings: a frozen dataclass per section, with a comment beside each field as its documentation.

A config file is a difference from the one that it names as `base:`, and `--set a.b=c` comes on top. A file or
command line that names another `kind` of a section starts it empty. The bound of a setting is in its type;
what settings ask of one another stands in infra/rules.py. settings.py turns yaml into all this.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

import settings
from infra.paths import find_path, user_path
from infra.rules import all_rules
from settings import ConfigError, Count, CountOrZero, Positive, PositiveOrZero, ZeroToOne, at_least, flatten

CONFIGS = Path(__file__).parent / "configs"
Kept = Annotated[int, at_least(1, " and at most rollout.group_size; to train on all set "
                                  "prune.completions.kind=none")]
Column = Literal["question", "answer", "id", "solution", "level", "subject"]
DropProb = Annotated[float, settings.within("[0, 1)", ": no weight makes up for what is always dropped")]


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA (arXiv:2106.09685): train low-rank adapters beside frozen linear layers (methods/lora.py)."""
    rank: Count | None = None      # of an adapter; null: there is none, and all weights are trained
    alpha: Positive = 32.0         # adapters count alpha / rank, so that the best rate hardly depends on rank
    targets: Literal["all", "attention", "mlp"] = "all"  # layers of each block: q, k, v, o; gate, up, down
    path: str | None = None        # a folder in PEFT's format with the initial adapter; null: one that adds 0


@dataclass(frozen=True, slots=True)
class Model:
    path: str                      # Hugging Face folder or hub name
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # to compute in; auto: bfloat16 on CUDA
    attention: Literal["auto", "flash", "varlen", "sdpa"] = "auto"     # the kernel; sdpa runs anywhere
    # what backward computes again. selective: norms and SwiGLU; all: blocks; auto: as little as memory allows
    checkpoint_blocks: Literal["auto", "none", "selective", "all"] = "auto"
    compile: bool = False          # fuse elementwise work by torch.compile
    logp_chunk: Count = 1024       # positions whose logits over the vocabulary are in memory at once
    lora: Lora = Lora()


@dataclass(frozen=True, slots=True)
class Data:
    train: str                     # .jsonl, .csv, .parquet, a named set or user/set:config:split on the hub
    eval: str | None               # one or several of the same, separated by commas; null: train without
    dir: str | None = None         # folder that holds the named sets; null: from the hub
    # our name -> the file's column, where that is another (reward_model.ground_truth: one inside a column);
    # null: none. Named sets have their own.
    columns: dict[Column, str | None] | None = None
    system_prompt: str | None = None  # put before every question; null: what the chat template has
    chat_template: str | None = None  # a jinja file in place of the model's own; base models have none
    template: dict[str, Any] | None = None  # arguments of the chat template: {enable_thinking: false}
    prompt: str | None = None      # in place of any template: "Question: {question}\nAnswer:"
    max_prompt_tokens: Count = 512  # a longer prompt is an error, never cut
    drop_longer: bool = False      # longer training prompts are left out, and their number is printed
    limit: Count | None = None     # train on the first so many problems; null: on all


@dataclass(frozen=True, slots=True)
class Rollout:
    group_size: Annotated[int, at_least(1, ", or 2 to compare them")]  # G, completions per prompt
    prompts_per_step: Count        # N, prompts offered per step, over all ranks
    max_new_tokens: Count          # tokens after which a completion is cut
    # texts that end a completion, as an end-of-sequence token does; trained on up to where they are whole
    stop: list[str] | None = None
    # When a step has enough. offered: after N prompts. informative: after N groups whose rewards differ; the
    # others are replaced (DAPO). full: when what is kept fills pack.budget, N prompts at a time.
    until: Literal["offered", "informative", "full"] = "offered"
    max_rounds: Count = 10         # informative, full: rollouts after which a step goes on with what it has
    # informative: what must differ within a group. accuracy: whatever the other components add (DAPO)
    differ_in: Literal["reward", "accuracy"] = "reward"
    # informative: prompts of a round over prompts_per_step; GRESO has 1.5, DAPO 3
    oversample: Annotated[float, at_least(1, ", and left out unless rollout.until=informative")] = 1.5
    window: int | None = None      # new tokens of a completion per step, more in the next (T-PPO); null: all
    engine: Literal["auto", "torch", "vllm"] = "auto"  # torch: the embedded one; auto: vllm on CUDA if there
    # divides the logits here and in every training pass
    temperature: Annotated[float, settings.above(0, ": greedy groups have no advantage")] = 1.0
    slots: Count = 256             # sequences decoded at once, per engine; fewer where memory is short
    tensor_parallel: Count = 1     # vllm: neighbouring ranks that hold one engine together
    cache_gib: Positive | None = None  # vllm: KV cache per rank; null: room for every slot at full length


@dataclass(frozen=True, slots=True)
class Reward:
    """Weight of each named component (reward.COMPONENTS); the reward is their weighted sum."""
    accuracy: float = 1.0          # the marked answer is right
    wrong: float = 0.0             # 1 where it is not, so a punishment has a weight below 0
    boxed: float = 0.0             # an answer is in a box, right or not
    format: float = 0.0            # think and answer tags as CPPO asks for them
    tag_exact: float = 0.0         # the last answer tag holds the gold answer, commas aside (CPPO)
    tag_number: float = 0.0        # the last answer tag holds the gold answer's one number (CPPO)
    overlong: float = 0.0          # 0 to -1 over the overlong_tokens before rollout.max_new_tokens (DAPO)
    overlong_tokens: int | None = None  # tokens over which `overlong` falls
    # what reward(text, gold, tokens, row) of custom_file returns; {name: weight}: several functions of it
    custom: float | dict[str, float] = 0.0
    custom_file: str | None = None  # a Python file of your own (docs/evaluation.md)
    custom_seconds: Positive = 3.0  # of computing for a completion, and 10 times that by the clock
    custom_gib: Positive = 2.0     # memory for a completion
    # what all functions count as for a completion whose call is ended
    custom_ended: Annotated[float, settings.within("[-1, 1]")] = 0.0
    custom_workers: Count | None = None  # processes on each rank; null: half of its cores, at most 8

    @property
    def functions(self) -> dict[str, str]:
        """Map the components that count and are the user's own to the functions of custom_file."""
        if not isinstance(self.custom, dict):
            return {"custom": "reward"} if self.custom else {}
        return {name: name for name, weight in self.custom.items() if weight}

    @property
    def weights(self) -> dict[str, float]:
        """Name the components that count, with their weights."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.type is float}
        named |= self.custom if isinstance(self.custom, dict) else {"custom": self.custom}
        return {name: weight for name, weight in named.items() if weight}

    @property
    def needs_answers(self) -> bool:
        """Tell whether a component that counts must have the gold answer; `custom` gets "" without one."""
        return not self.weights.keys().isdisjoint(("accuracy", "wrong", "tag_exact", "tag_number"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNorm:
    """GRPO (arXiv:2402.03300): the reward less its group's mean, over the group's standard deviation."""
    kind: Literal["group_norm"] = "group_norm"
    correction: Literal[0, 1] = 1  # of the standard deviation: 1 in the released codes, 0 in the papers
    eps: Positive = 1e-4           # added to the deviation; verl has 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Centred:
    """Dr. GRPO (arXiv:2503.20783): the reward less its group's mean."""
    kind: Literal["centred"] = "centred"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut:
    """RLOO (arXiv:2402.14740): the reward less the mean of the others in its group."""
    kind: Literal["leave_one_out"] = "leave_one_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoupled:
    """GDPO (arXiv:2601.05242): components standardised one by one, then their weighted sum."""
    kind: Literal["decoupled"] = "decoupled"
    correction: Literal[0, 1] = 1  # of both standard deviations, as with group_norm
    eps: Positive = 1e-4           # added to the deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftValue:
    """A*-PO (arXiv:2505.20686): the reward less V*, the soft value of its prompt under the initial policy."""
    kind: Literal["soft_value"] = "soft_value"
    beta: Positive = 0.5           # weight of the KL term in the problem that V* solves
    samples: Count = 8             # of the initial policy per training prompt, before the first step
    residual: Positive | None = None  # beta of its squared loss (methods/soft_value.py); 1e-3 in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class Gae:
    """PPO (arXiv:1707.06347), VAPO (arXiv:2504.05118), T-PPO (arXiv:2506.15050): with a critic."""
    kind: Literal["gae"] = "gae"
    lam: ZeroToOne = 0.95          # lambda of the policy's advantage
    alpha: Positive | None = None  # in place of lam, 1 - 1 / (alpha x length); VAPO has 0.05
    lam_critic: ZeroToOne = 1.0    # lambda of the critic's target; 1: the reward itself
    bootstrap: Literal["prev", "true"] = "prev"  # value behind a cut: of the state before (EGAE), or its own


Advantage = GroupNorm | Centred | LeaveOneOut | Decoupled | SoftValue | Gae


@dataclass(frozen=True, slots=True)
class Critic:
    """The critic of advantage.kind=gae, a value head on the policy's backbone; all else is as in `optim`."""
    lr: float | None = None        # learning rate, constant after the warm-up
    warmup_steps: CountOrZero = 0  # steps in which the rate rises from 0
    epochs: Count = 1              # passes over each rollout
    minibatches: Count = 1         # optimizer steps per pass
    bounded: bool = False          # values within the range of rewards, by a sigmoid
    pretrain_steps: int = 0        # first steps of the run, in which the critic alone learns


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAll:
    """Train on every completion."""
    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """CPPO (arXiv:2503.22342): train on the completions of the largest |advantage|. Biased."""
    kind: Literal["topk"] = "topk"
    keep: Kept                     # per group, of rollout.group_size
    scope: Literal["group", "batch"] = "group"  # batch: keep x groups of the whole step


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottom:
    """Dynamic Pruning as listed (arXiv:2603.04135): drop those of the smallest |advantage|. Biased."""
    kind: Literal["bottom"] = "bottom"
    drop_prob: DropProb            # share of each group


@dataclass(frozen=True, slots=True, kw_only=True)
class Bernoulli:
    """Dynamic Pruning as proved (arXiv:2603.04135): drop small ones at random, weigh up others. Unbiased."""
    kind: Literal["bernoulli"] = "bernoulli"
    drop_prob: DropProb            # of a completion whose |advantage| is below its group's mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Pps:
    """Draw a given number with probability in proportion to size, and weigh by its inverse. Unbiased."""
    kind: Literal["pps"] = "pps"
    keep: Kept                     # per group, of rollout.group_size
    scope: Literal["group", "batch"] = "group"  # batch: keep x groups of the whole step
    size: Literal["adv", "norm"] = "norm"  # |advantage|, or a guess at the gradient's norm
    by_cost: bool = False          # size over sqrt(length), for a budget of tokens instead of completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """PODS (arXiv:2504.13818): train on those of a group whose rewards vary most. Biased."""
    kind: Literal["pods"] = "pods"
    keep: Kept                     # per group, of rollout.group_size
    compare: Literal["kept", "all"] = "kept"  # advantages among those kept, as released, or among all


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceShare:
    """RAGEN-2 (arXiv:2604.06268): train on the groups that hold most of the reward variance. Biased."""
    kind: Literal["variance"] = "variance"
    share: Annotated[float, settings.within("(0, 1]")] = 0.9  # of the sum of the groups' variances
    slack: PositiveOrZero = 0.01   # taken off the share: a step of hardly any variance is left out


Completions = KeepAll | TopK | Bottom | Bernoulli | Pps | Pods | VarianceShare


@dataclass(frozen=True, slots=True, kw_only=True)
class AllPrompts:
    """Roll out every prompt."""
    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """Dynamic Pruning as proved (arXiv:2603.04135): skip small ones at random, weigh up others. Unbiased."""
    kind: Literal["bernoulli"] = "bernoulli"
    drop_prob: DropProb            # of a prompt whose mean |advantage| was below that of all seen


@dataclass(frozen=True, slots=True, kw_only=True)
class LowestRank:
    """Dynamic Pruning as listed (arXiv:2603.04135): skip those of the smallest mean |advantage|. Biased."""
    kind: Literal["rank"] = "rank"
    drop_prob: DropProb            # share of a step
    # turns in a row at which a prompt may be skipped
    max_skips: Annotated[int, at_least(1, ": a prompt that is never rolled out is never measured again")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Greso:
    """GRESO (arXiv:2506.02177): roll out with probability max(p^z, 0.01) after z flat groups. Biased."""
    kind: Literal["greso"] = "greso"
    explore: Annotated[float, settings.within("[0.05, 0.95]", ", where it is kept")] = 0.5  # p at first
    target: Annotated[float, settings.within("(0, 1)")] = 0.25  # share of flat groups that p is steered to


@dataclass(frozen=True, slots=True, kw_only=True)
class InProportion:
    """Roll out with probability in proportion to the mean |advantage| of the newest group. Unbiased."""
    kind: Literal["pps"] = "pps"
    # of the prompts rolled out before, how many are expected to be again
    share: Annotated[float, settings.within("(0, 1]")]
    floor: Annotated[float, settings.within("(0, 1]")] = 0.1  # least size of a prompt, over their mean


Prompts = AllPrompts | Thinned | LowestRank | Greso | InProportion


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCompletions:
    """Train on every token of what is kept."""
    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """NAT (arXiv:2603.06619): train on the tokens before a random cut, weighed up. Unbiased."""
    kind: Literal["prefix"] = "prefix"
    # chance that nothing is cut off, above 0; no token weighs more than one over it
    whole: Annotated[float, settings.within("(0, 1]")] = 0.5
    least: Count = 1               # tokens that no cut takes


Tokens = WholeCompletions | Prefix


@dataclass(frozen=True, slots=True)
class Prune:
    completions: Completions = KeepAll()
    prompts: Prompts = AllPrompts()
    tokens: Tokens = WholeCompletions()
    # completions cut at rollout.max_new_tokens are no candidates and not in the loss's denominators (DAPO)
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Pack:
    capacity: Count | Literal["auto"] = "auto"  # most tokens of a row, a prompt counted once; auto: what fits
    window: Count | None = None    # groups to choose from, oldest first; null: all, longest first
    budget: int | None = None      # rollout.until=full: tokens of a step, each completion with its prompt


@dataclass(frozen=True, slots=True)
class Loss:
    per: Literal["token", "sequence", "constant", "sum"] = "sequence"  # what counts the same (token_weight)
    count: Literal["all", "kept"] = "all"  # divide by all that was offered, or by what pruning kept
    # How far the policy may move. clip: PPO, GRPO, DAPO; clip_sequence: GSPO; clamp: CISPO;
    # total_variation, binary_kl: Divergence PPO; none: no bound (loss.TRUST)
    trust: Literal["clip", "clip_sequence", "clamp", "total_variation", "binary_kl", "none"] = "clip"
    clip_low: ZeroToOne = 0.2      # the ratio counts from 1 - clip_low
    clip_high: PositiveOrZero = 0.2  # the ratio counts up to 1 + clip_high
    dual_clip: float | None = None  # upper bound on the ratio where the advantage is negative; verl has 10
    divergence: float | None = None  # its bound; in the paper total_variation 0.15, binary_kl 0.05
    # total_variation, binary_kl: upper bound on the ratio
    ratio_cap: Annotated[float, settings.above(1, ", and left out with other kinds of loss.trust")] = 20.0
    kl: PositiveOrZero = 0.0       # beta, weight of the k3 KL to the initial model
    kl_corrected: bool = False     # k3 times the ratio: its mean gradient is the KL's (TRL's default)
    entropy: PositiveOrZero = 0.0  # weight of a bonus, the mean entropy over all tokens
    likelihood: PositiveOrZero = 0.0  # weight of -log pi of correct completions; VAPO has 0.1
    old_logp: Literal["recompute", "engine"] = "recompute"  # whose log-probs the ratio is taken against
    tis_cap: Annotated[float, at_least(1)] | None = None  # weigh tokens by min(pi_old / pi_engine, cap)
    # weigh a completion 0 when its mean ratio is outside [1 / mask_ratio, mask_ratio]
    mask_ratio: Annotated[float, settings.above(1)] | None = None


@dataclass(frozen=True, slots=True)
class Update:
    epochs: Count = 1              # passes over each rollout
    minibatches: int = 1           # optimizer steps per pass, each on whole groups


@dataclass(frozen=True, slots=True)
class Optim:
    lr: Positive                   # learning rate of AdamW
    schedule: Literal["constant", "cosine"] = "constant"  # after the warm-up; cosine: down to 0 at the end
    warmup_steps: CountOrZero = 0  # steps in which the rate rises from 0
    beta1: settings.BelowOne = 0.9          # decay of the mean of gradients
    beta2: settings.BelowOne = 0.999        # decay of the mean of their squares
    weight_decay: PositiveOrZero = 0.0  # of every parameter, as verl: norms, biases and embeddings too
    clip_norm: Positive = 1.0      # on the norm of the whole gradient, over all ranks
    offload: bool = False          # CUDA: weights, gradients and moments stay and step in the host's memory


@dataclass(frozen=True, slots=True)
class Eval:
    max_new_tokens: Count          # tokens after which an answer is cut
    every: Annotated[int, at_least(0, " (0: only before and after)")] = 0  # steps between evaluations
    limit: Count | None = None     # evaluate on the first so many problems of each set; null: on all
    n: Count = 1                   # answers to each problem: accuracy is their mean (avg@n)
    temperature: PositiveOrZero = 0.0  # 0: greedy
    top_p: Annotated[float, settings.within("(0, 1]")] = 1.0  # from the likeliest tokens of this probability


@dataclass(frozen=True, slots=True)
class Checkpoint:
    every: Annotated[int, at_least(0, " (0: only at the end)")] = 0  # steps between checkpoints
    keep: Count | Literal["all"] = 1  # how many of the newest stay on disk


@dataclass(frozen=True, slots=True)
class Log:
    wandb: str | None = None       # project on Weights & Biases that gets the metrics too; null: none
    groups: CountOrZero = 2        # groups of each step that are kept as text in samples.jsonl


@dataclass(frozen=True, slots=True)
class Config:
    out: str                       # the run folder; runs/<config name> unless set
    steps: Count                   # steps of the whole run
    model: Model
    data: Data
    rollout: Rollout
    optim: Optim
    eval: Eval
    seed: int = 0                  # of everything that is drawn
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a GPU
    reward: Reward = Reward()
    advantage: Advantage = GroupNorm()
    critic: Critic = Critic()
    prune: Prune = Prune()
    pack: Pack = Pack()
    loss: Loss = Loss()
    update: Update = Update()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()


def load(name: str | Path, overrides: list[str] = ()) -> Config:
    """Read a config by path, or by its name in configs/, and apply "a.b=c" overrides. Raises ConfigError."""
    path = settings.locate(name, Path(), CONFIGS)
    changes = reduce(settings.merge, [settings.override(text, Config) for text in overrides], {})
    raw = reduce(settings.merge, [*settings.layers(path, CONFIGS), changes], settings.first_kinds(Config))
    cfg = settings.build(Config, {"out": f"runs/{path.stem}"} | raw)
    names = (cfg.reward.custom_file, cfg.data.chat_template, cfg.model.lora.path)
    own, template, adapter = (name and str(find_path(name)) for name in names)
    cfg = replace(cfg, out=str(user_path(cfg.out)), reward=replace(cfg.reward, custom_file=own),
                  data=replace(cfg.data, chat_template=template),
                  model=replace(cfg.model, lora=replace(cfg.model.lora, path=adapter)))
    for key, fine, allowed in all_rules(cfg):
        if not fine:
            raise ConfigError(f"{key}={flatten(cfg)[key]} must be {allowed}")
    return cfg


def dump(cfg: Config) -> str:
    """Write a config as yaml that `load` reads back to the same config."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)
