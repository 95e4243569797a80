"""The settings: a frozen dataclass per section, with a comment beside each field as its documentation.

A config file is a difference from the one that it names as `base:`, and `--set a.b=c` comes on top. A file or
command line that names another `kind` of a section starts it empty; settings/kinds.py has the kinds. The
bound of a setting is in its type, constraints between settings are in settings/rules.py, and
settings/loader.py turns yaml into all this.
"""

from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from settings import kinds, leaves
from settings import loader as settings
from settings.loader import (
    AboveOne,
    ConfigError,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Share,
    flatten,
    frozen,
)
from settings.paths import PLACES, settle, user_path
from settings.rules import all_rules

ROOT = Path(__file__).parent
CONFIGS = (ROOT / "configs", *sorted(ROOT.glob("leaves/*/configs")))
NEED_ANSWER = ("accuracy", "wrong", "tag_exact", "tag_number")  # reward components that compare with it
Column = Literal["question", "answer", "id", "solution", "level", "subject"]


@frozen
class Model:
    path: str                      # Hugging Face folder or hub name
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # to compute in; auto: bfloat16 on CUDA
    attention: Literal["auto", "flash", "varlen", "sdpa"] = "auto"     # the kernel; sdpa runs anywhere
    # recomputed in backward. selective: norms and SwiGLU; all: blocks; auto: as little as memory allows
    checkpoint_blocks: Literal["auto", "none", "selective", "all"] = "auto"
    compile: bool = False          # fuse elementwise work by torch.compile
    logp_chunk: Count = 1024       # positions with logits in memory at once


@frozen
class Data:
    # files (.jsonl, .json, .csv, .tsv, .parquet, these as .gz), folders or patterns of them, named sets or
    # user/set:config:split on the hub; several in a list, or separated by commas
    train: str | list[str]
    eval: str | list[str] | None   # the same; null: train without
    dir: str | None = None         # folder that holds the named sets; null: from the hub
    # Winnow's name: your column's name; a dot reaches into a nested column (reward_model.ground_truth).
    # Named sets ignore it.
    columns: dict[Column, str | None] | None = None
    # put before every question; null: the chat template's own. {file: F, field: a.b, sha256: H}: as a release
    # has it (leaves/released)
    system_prompt: str | None = None
    chat_template: str | None = None  # a jinja file in place of the model's own; base models have none
    template: dict[str, Any] | None = None  # arguments of the chat template: {enable_thinking: false}
    date: str | None = None        # YYYY-MM-DD that a template may write as today's; null: it gets none
    prompt: str | None = None      # in place of any template: "Question: {question}\nAnswer:"
    max_prompt_tokens: Count = 512  # a longer prompt is an error, never cut
    drop_longer: bool = False      # longer training prompts are left out, and their number is printed
    limit: Count | None = None     # train on the first N problems; null: on all


@frozen
class Rollout:
    group_size: Annotated[int, "at least 1, or 2 to compare them"]  # G, completions per prompt
    prompts_per_step: Count        # N, prompts offered per step, over all ranks
    max_new_tokens: Count          # tokens after which a completion is cut
    # texts that end a completion, as an end-of-sequence token does; trained on, up to their last token
    stop: list[str] | None = None
    # When a step has enough. offered: after N prompts. informative: after N groups of unequal rewards; the
    # others are replaced (DAPO). full: when the survivors fill pack.budget, N prompts at a time.
    until: Literal["offered", "informative", "full"] = "offered"
    max_rounds: Count = 10         # informative, full: train after so many rounds, even if groups are missing
    # informative: the value that must differ within a group. accuracy: without other components (DAPO)
    differ_in: Literal["reward", "accuracy"] = "reward"
    # informative: prompts of a round over prompts_per_step; GRESO has 1.5, DAPO 3
    oversample: Annotated[float, "at least 1, and left out unless rollout.until=informative"] = 1.5
    engine: Literal["auto", "torch", "vllm"] = "auto"  # torch: the embedded one; auto: vllm on CUDA if there
    # divides the logits here and in every training pass
    temperature: Annotated[float, "above 0: greedy groups have no advantage"] = 1.0
    # sequences decoded at once, per engine; fewer if no more are asked for, or memory is short
    slots: Count = 256
    tensor_parallel: Count = 1     # vllm: neighbouring ranks that hold one engine together
    cache_gib: Positive | None = None  # vllm: KV cache per rank; null: room for every slot at full length
    # vllm: give the engine's memory up for an update; auto: only if the two do not fit beside each other
    sleep: Literal["auto", "always", "never"] = "auto"
    quantization: Literal["none", "fp8"] = "none"  # vllm: sample with 8-bit weights; loss.tis_cap corrects it


Weight = Annotated[float, "in [-1e6, 1e6]"]


@frozen
class Reward:
    """Weight of each named component (reward.COMPONENTS); the reward is their weighted sum. A component of
    weight 0 is measured and logged, but not rewarded; one of null is not measured."""
    accuracy: Weight = 1.0         # the marked answer is right
    wrong: Weight | None = None  # 1 if the answer is wrong; a punishment has a weight below 0
    boxed: Weight | None = None  # an answer is in a box, right or not
    format: Weight | None = None  # think and answer tags as CPPO asks for them
    tag_exact: Weight | None = None  # the last answer tag holds the gold answer, commas aside (CPPO)
    tag_number: Weight | None = None  # the last answer tag holds the gold answer's one number (CPPO)
    overlong: Weight | None = None  # 0 to -1 over the overlong_tokens before rollout.max_new_tokens (DAPO)
    overlong_tokens: int | None = None  # tokens over which `overlong` falls
    # weight of reward(text, gold, tokens, row) in custom_file; {name: weight}: of several functions
    custom: Weight | dict[str, Weight] | None = None
    custom_file: str | None = None  # a Python file of your own (leaves/own_rewards)
    custom_seconds: Positive = 3.0  # of computing, and of waiting, for a completion
    custom_gib: Positive = 2.0     # memory for a completion
    # value of all functions if the call of a completion is ended
    custom_ended: Annotated[float, "in [-1, 1]"] = 0.0
    custom_workers: Count | None = None  # processes on each rank; null: 64

    @property
    def functions(self) -> dict[str, str]:
        """Map the components that are the user's own to the functions of custom_file."""
        if isinstance(self.custom, dict):
            return {name: name for name in self.custom}
        return {} if self.custom is None else {"custom": "reward"}

    @property
    def components(self) -> dict[str, float]:
        """Map the components that are measured to their weights."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.type in (Weight, Weight | None)}
        named |= self.custom if isinstance(self.custom, dict) else {"custom": self.custom}
        return {name: weight for name, weight in named.items() if weight is not None}

    @property
    def weights(self) -> dict[str, float]:
        """Map the components that count to their weights."""
        return {name: weight for name, weight in self.components.items() if weight}

    @property
    def needs_answers(self) -> bool:
        """Tell whether a component that counts must have the gold answer; `custom` gets "" without one."""
        return not self.weights.keys().isdisjoint(NEED_ANSWER)


@frozen
class Prune:
    completions: kinds.Completions = kinds.KeepAll()
    prompts: kinds.Prompts = kinds.AllPrompts()
    tokens: kinds.Tokens = kinds.WholeCompletions()
    # completions cut at rollout.max_new_tokens are no candidates and not in the loss's denominators (DAPO)
    truncated: bool = False


@frozen
class Pack:
    capacity: Count | Literal["auto"] = "auto"  # most tokens of a row; auto: as memory allows
    window: Count | None = None    # groups to choose from, oldest first; null: all, longest first
    budget: int | None = None      # rollout.until=full: tokens of a step, each completion with its prompt


@frozen
class Loss:
    normalize: Literal["token", "sequence", "constant", "sum"] = "sequence"  # the mean (loss.token_weight)
    denominator: Literal["all", "kept"] = "all"  # divide by all candidates, or by the survivors
    trust: kinds.Trust = kinds.Clip()  # how far the policy may move (loss.TRUST)
    kl: PositiveOrZero = 0.0       # beta, weight of the k3 KL to the initial model
    kl_corrected: bool = False     # k3 times the ratio: its mean gradient is the KL's (TRL's default)
    entropy: PositiveOrZero = 0.0  # weight of a bonus, the mean entropy over all tokens
    likelihood: PositiveOrZero = 0.0  # weight of -log pi of correct completions; VAPO has 0.1
    old_logp: Literal["recompute", "engine"] = "recompute"  # source of the ratio's denominator
    # Weigh tokens by min(pi_old / pi_engine, cap); with old_logp: engine it bounds the trust region's ratio.
    # pi_engine is the policy that drew the token, also if that was in an earlier step
    tis_cap: Annotated[float, "at least 1"] | None = None
    # weigh a completion 0 when its mean ratio is outside [1 / mask_ratio, mask_ratio]
    mask_ratio: AboveOne | None = None


@frozen
class Update:
    epochs: Count = 1              # passes over each rollout
    minibatches: Count = 1         # optimizer steps per pass, each on whole groups
    # draw survivors anew for each pass: its gradient is then unbiased at its own weights, as the first one's
    redraw: bool = False
    # the learning rate times sqrt(ESS / n), the effective share of an optimizer step's n completions (VCPO)
    rate_by_ess: bool = False


@frozen
class Eval:
    max_new_tokens: Count          # tokens after which an answer is cut
    every: Annotated[int, "at least 0 (0: only before and after)"] = 0  # steps between evaluations
    limit: Count | None = None     # evaluate on the first N problems of each set; null: on all
    n: Count = 1                   # answers to each problem: accuracy is their mean (avg@n)
    temperature: PositiveOrZero = 0.0  # 0: greedy
    top_p: Share = 1.0  # from the likeliest tokens of this probability


@frozen
class Checkpoint:
    every: Annotated[int, "at least 0 (0: only at the end)"] = 0  # steps between checkpoints
    keep: Count | Literal["all"] = 1  # how many of the newest stay on disk


@frozen
class Log:
    groups: CountOrZero = 2        # groups of each step that are kept as text in samples.jsonl


@frozen
class Config:
    out: str                       # the run folder; runs/<config name> unless set
    steps: Count                   # steps of the whole run
    model: Model
    data: Data
    rollout: Rollout
    optim: kinds.Optim
    eval: Eval
    seed: int = 0                  # of everything that is drawn
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a GPU
    labels: kinds.Labels = kinds.Gold()
    reward: Reward = Reward()
    advantage: kinds.Advantage = kinds.GroupNorm()
    prune: Prune = Prune()
    pack: Pack = Pack()
    loss: Loss = Loss()
    update: Update = Update()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    def __reduce__(self) -> tuple:  # pickle does not find the class of a config with leaves by its name
        return build, (asdict(self),)

    @property
    def longest(self) -> int:
        """Count the tokens of the longest sequence of training: of a prompt and its completion."""
        return self.own_longest or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def own_longest(self) -> int | None:
        """Count the tokens of the longest sequence of an environment, if there is one."""
        return getattr(getattr(self, "environment", None), "max_context", None)


def has_reference(cfg: Config) -> bool:
    """Tell whether the loss needs the initial policy beside the one that is trained."""
    return bool(cfg.loss.kl or cfg.advantage.needs_reference)


def with_leaves(names: Iterable[str]) -> type:
    """Return Config with the kinds, sections and settings of these leaves."""
    added = (leaves.settings_of(leaf).CHOICES.items() for leaf in names)
    return settings.extended(Config, tuple(chain.from_iterable(added)))


def type_of(raw: dict) -> type:
    """Return Config with all that the leaves add which nested dicts name."""
    return with_leaves(leaves.chosen(raw))


def build(raw: dict) -> Config:
    """Make a config of nested dicts, with the sections of the leaves that it names. Raises ConfigError."""
    try:
        return settings.build(type_of(raw), raw)
    except ConfigError as error:
        from settings.hints import with_hint

        raise with_hint(error, with_leaves(leaves.LEAVES), raw) from None


def load(names: str | Path | list[str], overrides: list[str] = ()) -> Config:
    """Read configs by path, or by their names in configs/, and apply "a.b=c" overrides. Raises ConfigError.

    Of several configs each one, with its bases, lies over those before it.
    """
    given = names if isinstance(names, list) else [names]
    paths = [settings.locate(name, Path(), CONFIGS) for name in given]
    layers = [layer for path in paths for layer in settings.read_layers(path, CONFIGS).items()]
    PLACES[:-1] = dict.fromkeys(file.parent for file, _ in reversed(layers))
    changes = reduce(settings.merge, [settings.override(text, type_of) for text in overrides], {})
    raw = reduce(settings.merge, [*(raw for _, raw in layers), changes], settings.first_kinds(Config))
    raw = leaves.through("read", raw, raw)
    cfg = build({"out": f"runs/{'_'.join(path.stem for path in paths)}"} | raw)
    for key in ("model.path", "data.train", "data.eval", "data.dir", "data.chat_template",
                "reward.custom_file", *chain.from_iterable(leaves.stated(cfg, "PATHS"))):
        given = flatten(cfg)[key]
        cfg = with_value(cfg, key, given if given is None else settle(given))
    cfg = replace(cfg, out=str(user_path(cfg.out)))
    for key, fine, allowed in all_rules(cfg):
        if not fine:
            raise ConfigError(f"{key}={flatten(cfg)[key]} must be {allowed}")
    return cfg


def with_value(section: Any, key: str, value: Any) -> Any:
    """Replace a setting by its dotted name: with_value(cfg, "model.path", "toy/model")."""
    name, _, inner = key.partition(".")
    if inner:
        value = with_value(getattr(section, name), inner, value)
    return replace(section, **{name: value})


def dump(cfg: Config) -> str:
    """Write a config as yaml that `load` reads back to the same config."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)
