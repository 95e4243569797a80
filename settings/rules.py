"""Rules across settings. The bounds of a single setting stand beside it.

A rule has the name of a setting, whether its value is allowed, and which values are; config.load raises an
error for the first broken rule. A choice is written as in a config, "loss.normalize=token or sum", or is
the name of a setting that is not null, "loss.tis_cap"; " without " and another choice may follow.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import reduce
from itertools import chain
from operator import or_
from string import Formatter
from typing import Any

from settings import leaves
from settings.loader import flatten

Rule = tuple[str, bool, str]

# A choice -> the settings that only it uses, and why; without it they must keep their defaults.
ONLY_WITH = {
    "rollout.engine=vllm": ["rollout.tensor_parallel", "rollout.cache_gib", "rollout.sleep",
                            "rollout.quantization"],
    "rollout.until=informative": ["rollout.oversample", "rollout.differ_in"],
    "rollout.until=full": ["pack.budget"],
    "reward.custom_file": ["reward.custom_seconds", "reward.custom_gib", "reward.custom_ended",
                           "reward.custom_workers"],
}
# A choice -> the name of another setting, the values that this may have then, and why.
REQUIRES = {
    "rollout.engine=vllm": [("model.dtype", "auto, float32 or bfloat16", "vLLM does not compute in float64")],
    "model.products": [("model.dtype", "auto or float32", "it rounds what is multiplied in float32")],
    "model.products without loss.tis_cap": [
        ("rollout.engine", "auto or torch", "vLLM does not round like this; loss.tis_cap corrects for it")],
    "rollout.group_size=1": [
        ("prune.completions.kind", "none", "there is nothing to compare a completion with"),
        ("prune.prompts.kind", "none", "one completion has no |advantage| to remember a prompt by"),
        ("rollout.until", "offered or full", "the rewards of one completion never differ"),
    ],
    "advantage.kind=decoupled": [
        ("rollout.until", "offered", "its scale is computed over one round"),
        ("prune.prompts.kind", "none", "its scale would come from the prompts rolled out only")],
    "advantage.kind=shrinkage": [
        ("rollout.until", "offered", "flat groups have advantages, so none may be replaced"),
        ("prune.prompts.kind", "none", "its baseline would come from the prompts rolled out only")],
    "loss.trust.kind=clip_sequence": [("prune.tokens.kind", "none", "its ratio is over all tokens")],
    "prune.completions.compare=kept": [
        ("advantage.kind", "group_norm, centred or leave_one_out", "only these compare a group with itself")],
    "rollout.until=full": [("prune.tokens.kind", "none", "pack.budget counts whole completions")],
    "prune.completions.kind=bernoulli or pps": [
        ("loss.denominator", "all", "its weights restore the full batch, not a mean over the kept")],
    "prune.prompts.kind=bernoulli or pps": [
        ("loss.denominator", "all", "its weights restore the full batch, not a mean over the kept"),
        ("rollout.until", "offered or full", "a prompt that is replaced must not be weighed for too")],
    "loss.mask_ratio": [
        ("loss.old_logp", "recompute", "a ratio to the engine holds the correction already"),
        ("prune.tokens.kind", "none", "its mean ratio is over all tokens")],
}

# As reward/<name>, beside the components.
LOGGED_NAMES = {"mean", "std", "unparsed", "timed_out", "died", "disagree"}


PLAIN_PROMPT = "a text with {question} and nothing else in braces; a brace of the text itself is doubled"


def prompt_rules(cfg: Any) -> Iterator[Rule]:
    data, own = cfg.data, cfg.data.prompt
    yield "data.prompt", own is None or has_question_only(own), PLAIN_PROMPT
    yield ("data.prompt", own is None or "\\n" not in own,
           "in double quotes if it has a new line, and after --set in single quotes as well: "
           "'data.prompt=\"Question: {question}\\nAnswer:\"'; without them \\n is a backslash and an n")
    for name in ("system_prompt", "chat_template", "template"):
        yield f"data.{name}", own is None or getattr(data, name) is None, "null with data.prompt"
    yield "rollout.stop", all(cfg.rollout.stop or [" "]), "texts that are not empty"


def has_question_only(text: str) -> bool:
    """Tell whether {question} is all that str.format fills in, and without a format of its own."""
    try:
        fields_of_text = {tuple(names) for _, *names in Formatter().parse(text) if names[0] is not None}
    except ValueError:
        return False
    return fields_of_text == {("question", "", None)}  # name, format, conversion


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
    yield ("pack.budget", cfg.pack.budget is not None or roll.until != "full", "set with rollout.until=full")
    yield ("pack.budget", cfg.pack.budget is None or 1 <= cfg.pack.budget <= most,
           f"in 1..{most} tokens, all that rollout.max_rounds rounds can give")
    yield ("rollout.group_size", G >= 2 or not cfg.advantage.compares,
           f"at least 2 with advantage.kind={cfg.advantage.kind}, which compares completions of one prompt")
    yield ("update.minibatches", N % cfg.update.minibatches == 0,
           f"a divisor of {N} (rollout.prompts_per_step): a mini-batch holds whole groups")
    yield ("eval.n", cfg.eval.n == 1 or cfg.eval.temperature > 0,
           "1 at eval.temperature=0: greedy answers are all the same")
    yield ("model.checkpoint_blocks", not cfg.model.compile or cfg.model.checkpoint_blocks != "selective",
           "auto, none or all with model.compile=true, which by itself recomputes what is cheap")
    low = "at least 0.01 unless rollout.engine=torch: vLLM takes a lower one as 0.01"
    yield "rollout.temperature", roll.engine == "torch" or roll.temperature >= 0.01, low
    yield "eval.temperature", roll.engine == "torch" or not 0 < cfg.eval.temperature < 0.01, f"0 or {low}"


def pruning_rules(cfg: Any) -> Iterator[Rule]:
    completions, prompts = cfg.prune.completions, cfg.prune.prompts
    G, N = cfg.rollout.group_size, cfg.rollout.prompts_per_step
    if hasattr(completions, "keep"):
        yield ("prune.completions.keep", completions.keep <= G,
               f"in 1..{G} (rollout.group_size); to train on all set prune.completions.kind=none")
    if completions.kind == "bottom":
        yield ("prune.completions.drop_prob", drops_any(completions.drop_prob, G),
               f"0 or enough to drop one of {G} (rollout.group_size): the product is rounded down")
    if prompts.kind == "rank":
        yield ("prune.prompts.drop_prob", drops_any(prompts.drop_prob, N),
               f"0 or enough to skip one of {N} (rollout.prompts_per_step): the product is rounded down")
    counted = cfg.loss.denominator == "kept" or cfg.rollout.until == "informative"
    if prompts.kind in ("bernoulli", "pps", "rank") and not counted:
        why = (f"with prune.prompts.kind={prompts.kind} and loss.denominator=all: a mean over all tokens "
               "needs the lengths of completions that a skipped prompt never got")
        yield "loss.normalize", cfg.loss.normalize != "token", f"sequence, constant or sum {why}"
        for name in ("likelihood", "entropy"):
            yield f"loss.{name}", getattr(cfg.loss, name) == 0, f"0 {why}"
        yield ("prune.truncated", not cfg.prune.truncated, f"false with prune.prompts.kind={prompts.kind}: "
               "nobody knows how many answers of a skipped prompt would have been cut")


def drops_any(share: float, count: int) -> bool:
    """Tell whether a share of `count` items, rounded down, is at least one item, or the share is 0."""
    return share == 0 or int(share * count + 1e-9) >= 1


def reward_rules(cfg: Any) -> Iterator[Rule]:
    reward, most = cfg.reward, cfg.rollout.max_new_tokens
    yield "reward.accuracy", bool(reward.weights), "other than 0: no other component has a weight"
    for name, used in (("overlong", reward.overlong is not None), ("custom", bool(reward.functions))):
        beside = "overlong_tokens" if name == "overlong" else "custom_file"
        yield (f"reward.{beside}", (getattr(reward, beside) is not None) == used,
               f"set with reward.{name}, and null without")
    yield ("reward.overlong_tokens", reward.overlong_tokens is None or 1 <= reward.overlong_tokens <= most,
           f"in 1..{most} (rollout.max_new_tokens)")
    taken = {f.name for f in fields(reward)} | LOGGED_NAMES
    own = reward.custom if isinstance(reward.custom, dict) else {}
    yield ("reward.custom", not own.keys() & taken, "weights of functions whose names are none of "
           f"{', '.join(sorted(taken))}: a component or a metric is called so")
    if reward.accuracy == 0:
        tells = "unless reward.accuracy has a weight, which tells what is correct"
        yield "loss.likelihood", cfg.loss.likelihood == 0, f"0 {tells}"
        yield "rollout.differ_in", cfg.rollout.differ_in == "reward", f"reward {tells}"


def loss_rules(cfg: Any) -> Iterator[Rule]:
    loss = cfg.loss
    yield "loss.kl_corrected", loss.kl > 0 or not loss.kl_corrected, "false, or left out, unless loss.kl > 0"
    yield ("loss.tis_cap", loss.tis_cap is None or loss.old_logp == "recompute" or loss.trust.kind != "none",
           "null with loss.old_logp=engine and loss.trust.kind=none, which has no ratio to cap")
    dual = getattr(loss.trust, "dual", None)
    if dual is not None:
        yield "loss.trust.dual", dual > 1 + loss.trust.high, "above 1 + loss.trust.high, or null"


def is_chosen(flat: dict[str, Any], choice: str) -> bool:
    """Tell whether a flat config makes a choice."""
    choice, _, without = choice.partition(" without ")
    if without and is_chosen(flat, without):
        return False
    key, named, values = choice.partition("=")
    value = "null" if flat.get(key) is None else str(flat[key])
    return value in re.split(", | or ", values) if named else value != "null"


def table_rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules of the tables ONLY_WITH and REQUIRES, and of those that leaves have."""
    flat = flatten(cfg)
    only_with = reduce(or_, leaves.stated(cfg, "ONLY_WITH"), ONLY_WITH)
    requires = reduce(or_, leaves.stated(cfg, "REQUIRES"), REQUIRES)
    for choice, entries in only_with.items():
        for entry in entries if not is_chosen(flat, choice) else ():
            key, _, why = entry.partition(": ")
            if key in flat:
                *sections, name = key.split(".")
                default = type(reduce(getattr, sections, cfg)).__dataclass_fields__[name].default
                shown = "null" if default is None else default
                yield key, flat[key] == default, f"left out, or {shown}, unless {choice}{why and ': ' + why}"
    for choice, requirements in requires.items():
        chosen = re.split("[= ]", choice)[0]
        for key, allowed, why in requirements if is_chosen(flat, choice) else ():
            yield key, is_chosen(flat, f"{key}={allowed}"), f"{allowed} with {chosen}={flat[chosen]}: {why}"


def all_rules(cfg: Any) -> Iterator[Rule]:
    """Yield every rule for a config.Config."""
    own = leaves.stated(cfg, "rules")
    parts = prompt_rules, size_rules, pruning_rules, *own, reward_rules, loss_rules, table_rules
    return chain.from_iterable(rules(cfg) for rules in parts)
