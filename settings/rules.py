"""Rules across settings. The bounds of a single setting stand beside it.

A rule has the name of a setting, whether its value is allowed, and which values are; config.load raises an
error for the first broken rule. A choice is written as in a config, "loss.normalize=token or sum", or is
the name of a setting that is neither null nor 0, "loss.tis_cap"; " without " and another choice may follow.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from settings import leaves
from settings.loader import flatten

Rule = tuple[str, bool, str]

# A choice -> the settings that only it uses, and why; without it they must keep their defaults.
ONLY_WITH = {
    "rollout.engine=vllm": [
        "rollout.tensor_parallel",
        "rollout.cache_gib",
        "rollout.sleep",
        "rollout.quantization",
    ],
    "rollout.until=informative": ["rollout.oversample", "rollout.differ_in"],
    "rollout.until=full": ["pack.budget"],
    "rollout.until=informative or full": ["rollout.max_rounds"],
    "eval.temperature": ["eval.n: at 0 answers are greedy, and all the same"],
    "loss.kl": ["loss.kl_corrected: at 0 there is no KL to correct"],
    "reward.accuracy": [
        "loss.likelihood: at 0 nothing tells what is correct",
        "rollout.differ_in: at 0 nothing tells what is correct",
    ],
    "reward.custom_file": [
        "reward.custom: the file that has the functions",
        "reward.custom_seconds",
        "reward.custom_gib",
        "reward.custom_ended",
        "reward.custom_workers",
    ],
}

UNBIASED = "bernoulli or pps"  # kinds of prune.completions that weigh for chance

SKIPPED = ("with loss.denominator=all a mean over all tokens needs the lengths of completions that a skipped "
           "prompt never got")
# A choice -> other settings, each with the values that it may have then, and why.
REQUIRES = {
    "data.prompt": [
        "data.system_prompt=null: it is in place of any template",
        "data.chat_template=null: it is in place of any template",
        "data.template=null: it is in place of any template",
        "data.date=null: it is in place of any template",
    ],
    "rollout.engine=vllm": ["model.dtype=auto, float32 or bfloat16: vLLM does not compute in float64"],
    "model.compile=true": [
        "model.checkpoint_blocks=auto, none or all: by itself it recomputes what is cheap",
    ],
    "rollout.group_size=1": [
        "prune.completions.kind=none: there is nothing to compare a completion with",
        "prune.prompts.kind=none: one completion has no |advantage| to remember a prompt by",
        "rollout.until=offered or full: the rewards of one completion never differ",
    ],
    "advantage.kind=decoupled": [
        "rollout.until=offered: its scale is computed over one round",
        "prune.prompts.kind=none: its scale would come from the prompts rolled out only",
    ],
    "advantage.kind=shrinkage": [
        "rollout.until=offered: flat groups have advantages, so none may be replaced",
        "prune.prompts.kind=none: its baseline would come from the prompts rolled out only",
    ],
    "loss.trust.kind=clip_sequence": ["prune.tokens.kind=none: its ratio is over all tokens"],
    "prune.completions.compare=kept": [
        "advantage.kind=group_norm, centred or leave_one_out: only these compare a group with itself",
    ],
    "update.epochs=1": ["update.redraw=false: there is no second draw"],
    "update.rate_by_ess=true": ["prune.tokens.kind=none: its ratios are over all tokens"],
    "update.redraw=true without prune.tokens.kind=prefix": [
        f"prune.completions.kind={UNBIASED}: without chance every draw is the same",
    ],
    "rollout.until=full": ["prune.tokens.kind=none: pack.budget counts whole completions"],
    f"prune.completions.kind={UNBIASED}": [
        "loss.denominator=all: its weights restore the full batch, not a mean over the kept",
    ],
    "prune.prompts.kind=bernoulli or pps": [
        "loss.denominator=all: its weights restore the full batch, not a mean over the kept",
        "rollout.until=offered or full: a prompt that is replaced must not be weighed for too",
    ],
    ("prune.prompts.kind=bernoulli, pps or rank without loss.denominator=kept "
     "without rollout.until=informative"): [
        f"loss.normalize=sequence, constant or sum: {SKIPPED}",
        f"loss.likelihood=0.0: {SKIPPED}",
        f"loss.entropy=0.0: {SKIPPED}",
        "prune.truncated=false: nobody knows how many answers of a skipped prompt would be cut",
    ],
    "loss.trust.kind=none without loss.old_logp=recompute": [
        "loss.tis_cap=null: with loss.old_logp=engine there is no ratio to cap",
    ],
    "loss.mask_ratio": [
        "loss.old_logp=recompute: a ratio to the engine holds the correction already",
        "prune.tokens.kind=none: its mean ratio is over all tokens",
    ],
}
# As reward/<name>, beside the components.
LOGGED_NAMES = {"mean", "std", "unparsed", "timed_out", "died", "disagree"}
QUESTION_ONLY = re.compile(r"(([^{}]|\{\{|\}\})*\{question\})+([^{}]|\{\{|\}\})*")  # for str.format


def prompt_rules(cfg: Any) -> Iterator[Rule]:
    data = cfg.data
    yield ("data.prompt", data.prompt is None or QUESTION_ONLY.fullmatch(data.prompt),
           "a text with {question} and nothing else in braces; a brace of the text itself is doubled")
    yield ("data.system_prompt", not re.fullmatch(r"[\w./~-]+\.[a-z]\w{1,5}", data.system_prompt or ""),
           "the text itself; to read it from a file, set data.system_prompt.file")
    yield "rollout.stop", all(cfg.rollout.stop or [" "]), "texts that are not empty"


def size_rules(cfg: Any) -> Iterator[Rule]:
    roll = cfg.rollout
    G, N, new = roll.group_size, roll.prompts_per_step, roll.max_new_tokens
    longest = cfg.longest
    most = roll.max_rounds * N * G * longest
    parts = f"data.max_prompt_tokens={cfg.data.max_prompt_tokens} + rollout.max_new_tokens={new}"
    if longest != cfg.data.max_prompt_tokens + new:
        parts = f"environment.max_context={longest}"
    yield ("pack.capacity", cfg.pack.capacity == "auto" or cfg.pack.capacity >= longest,
           f"at least {longest} tokens, one sequence ({parts}), or auto; raise it or lower those")
    yield ("pack.budget", roll.until != "full" or 1 <= (cfg.pack.budget or 0) <= most,
           f"in 1..{most} tokens, all that rollout.max_rounds rounds can give, with rollout.until=full")
    yield ("rollout.group_size", G >= 2 or not cfg.advantage.compares,
           f"at least 2 with advantage.kind={cfg.advantage.kind}, which compares completions of one prompt")
    yield ("update.minibatches", N % cfg.update.minibatches == 0,
           f"a divisor of {N} (rollout.prompts_per_step): a mini-batch holds whole groups")
    yield ("prune.completions.keep", (getattr(cfg.prune.completions, "keep", 0) or 0) <= G,
           f"in 1..{G} (rollout.group_size); to train on all set prune.completions.kind=none")
    for part in ("completions", "prompts"):
        own = getattr(cfg.prune, part)
        if hasattr(own, "error"):
            name = next(name for name in ("keep", "drop_prob", "share") if hasattr(own, name))
            yield (f"prune.{part}.{name}", (getattr(own, name) is None) != (own.error is None),
                   f"null with prune.{part}.error, which is in its place" if own.error else
                   f"a number, unless prune.{part}.error gives the error of the gradient in its place")
    for part, kind, count, whole in (("completions", "bottom", G, "drop one of {} (rollout.group_size)"),
                                     ("prompts", "rank", N, "skip one of {} (rollout.prompts_per_step)")):
        prune = getattr(cfg.prune, part)
        yield (f"prune.{part}.drop_prob", prune.kind != kind or not 0 < prune.drop_prob * count < 1 - 1e-9,
               f"0 or enough to {whole.format(count)}: the product is rounded down")
    dual = getattr(cfg.loss.trust, "dual", None)
    yield ("loss.trust.dual", dual is None or dual > 1 + cfg.loss.trust.high,
           "above 1 + loss.trust.high, or null")
    low = "at least 0.01 unless rollout.engine=torch: vLLM takes a lower one as 0.01"
    yield "rollout.temperature", roll.engine == "torch" or roll.temperature >= 0.01, low
    yield "eval.temperature", roll.engine == "torch" or not 0 < cfg.eval.temperature < 0.01, f"0 or {low}"


def reward_rules(cfg: Any) -> Iterator[Rule]:
    reward, most = cfg.reward, cfg.rollout.max_new_tokens
    yield "reward.accuracy", bool(reward.weights), "other than 0: no other component has a weight"
    yield ("reward.custom", reward.functions or not reward.custom_file,
           f"1 or {{name: weight}} to call functions of reward.custom_file={reward.custom_file}")
    span, punished = reward.overlong_tokens, reward.overlong is not None
    yield ("reward.overlong_tokens", 1 <= (span or 0) <= most if punished else span is None,
           f"in 1..{most} (rollout.max_new_tokens) with reward.overlong, and null without")
    taken = {f.name for f in fields(reward)} | LOGGED_NAMES
    own = reward.custom if isinstance(reward.custom, dict) else {}
    yield ("reward.custom", not own.keys() & taken, "weights of functions whose names are none of "
           f"{', '.join(sorted(taken))}: a component or a metric is called so")


def spelled(value: Any) -> str:
    """Write a value as a config does."""
    return json.dumps(value) if value in (None, True, False) else str(value)


def is_chosen(flat: dict[str, Any], choice: str) -> bool:
    """Tell whether a flat config makes a choice."""
    choice, *without = choice.split(" without ")
    key, named, values = choice.partition("=")
    value = flat.get(key)
    if named:
        value = spelled(value) in re.split(", | or ", values)
    return bool(value) and not any(is_chosen(flat, other) for other in without)


def table_rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules of the tables ONLY_WITH and REQUIRES, and of those that leaves have."""
    flat = flatten(cfg)
    only_with, requires = ([pair for table in (own, *leaves.stated(cfg, name)) for pair in table.items()]
                           for name, own in (("ONLY_WITH", ONLY_WITH), ("REQUIRES", REQUIRES)))
    for choice, entries in only_with:
        for key, _, why in (entry.partition(": ") for entry in entries):
            if key in flat and not is_chosen(flat, choice):
                section, _, name = key.rpartition(".")
                default = type(leaves.look_up(cfg, section)).__dataclass_fields__[name].default
                why = why and f": {why}"
                yield key, flat[key] == default, f"left out, or {spelled(default)}, unless {choice}{why}"
    for choice, requirements in requires:
        chosen = re.split("[= ]", choice)[0]
        for demand, _, why in (entry.partition(": ") for entry in requirements if is_chosen(flat, choice)):
            key, _, allowed = demand.partition("=")
            yield key, is_chosen(flat, demand), f"{allowed} with {chosen}={flat[chosen]}: {why}"


def all_rules(cfg: Any) -> Iterator[Rule]:
    """Yield every rule for a config.Config."""
    for rules in (prompt_rules, size_rules, *leaves.stated(cfg, "rules"), reward_rules, table_rules):
        yield from rules(cfg)
