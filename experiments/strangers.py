"""Take a method that one file brings into the atlas's tables, as the entry MINE (atlas.py --method)."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from enumeration import SKIPPING
from estimators import ADVANTAGES, MINE, PRUNERS, REGIONS, WEIGHING, Estimator
from torch import Tensor
from try_method import KINDS, check_chosen, checked_weigh, find_method, load, name_of, plug_in_kinds

import config
from config import ConfigError
from prune import Candidates, Memory
from records import LogProbs, Pruned
from settings.loader import flatten

OURS = {"ADVANTAGES": ("advantage", ADVANTAGES), "COMPLETIONS": ("completions", PRUNERS),
        "PROMPTS": ("prompts", SKIPPING), "TRUST": ("trust", REGIONS)}
RECIPE = str(Path(__file__).with_name("long_sums.yaml"))


def checked(function: Callable, name: str, given: Any, settings: Any) -> Any:
    """Call a stranger's function. Raises ConfigError for whatever it raises, and for a wrong shape or nan."""
    try:
        result = function(given, settings)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}".partition("\n")[0]) from error
    field = {Candidates: "adv_NG", LogProbs: "logp_C", Memory: "size_K"}.get(type(given), "total_NG")
    like = given[1] if isinstance(given, tuple) else getattr(given, field)
    pruned = isinstance(result, Pruned)
    chances = result.prob_NG if pruned else result if isinstance(given, Memory) else None
    keeps = isinstance(given, Candidates)
    if keeps and getattr(getattr(result, "keep_NG", None), "dtype", None) != torch.bool:
        raise ConfigError(f"{name} must return a records.Pruned whose keep_NG is bool")
    for part in (result.keep_NG, result.weight_NG, result.prob_NG) if pruned else (result,):
        got = [*part.shape] if isinstance(part, Tensor) else type(part).__name__
        if got != [*like.shape]:
            raise ConfigError(f"{name} returned {got}, and must return a tensor of {[*like.shape]}")
        if not (part.isfinite() | like.isnan() & (not pruned)).all():
            raise ConfigError(f"{name} returned nan or inf: {part.tolist()}")
        if part is chances and ((part < 0) | (part > 1)).any():
            raise ConfigError(f"{name} returned {part.tolist()}, and must return probabilities")
    if field == "logp_C" and not result.equal(function(replace(given, adv_C=2 * given.adv_C), settings)):
        raise ConfigError(f"{name}: the atlas has no region that reads more of advantages than their sign")
    if field == "logp_C" and not result.allclose(torch.cat([
            function(completion, settings) for completion in completions_of(given)]), rtol=1e-9):
        raise ConfigError(f"{name}: the atlas has no region that reads other completions of a row")
    return result if pruned else result.double()


def completions_of(row: LogProbs) -> Iterator[LogProbs]:
    """Take a row apart."""
    for s in row.segment_C.unique():
        parts = (x_C[row.segment_C == s] for x_C in (row.logp_C, row.old_logp_C, row.adv_C))
        yield LogProbs(*parts, row.segment_C[row.segment_C == s] * 0)


def take(name: str, recipe: str | None, settings: list[str]) -> tuple[Estimator, str]:
    """Plug a method's file in; return its row's choices, and the one that is its own. What its config has of
    the court's recipe is as on the atlas's page. Raises ConfigError."""
    path = find_method(name)
    method = load(path)
    if hasattr(method, "OPTIMIZERS"):
        raise ConfigError(f"{path.name}: the atlas cannot express OPTIMIZERS: it has no update; court.py can")
    plug_in_kinds(method)
    own, beside = [key for key in OURS if hasattr(method, key)], path.with_suffix(".yaml")
    theirs = config.load(RECIPE)
    cfg = config.load(recipe or (str(beside) if beside.is_file() else RECIPE), settings)
    check_chosen(method, cfg)
    if wraps(method, cfg):
        raise ConfigError(f"{path.name}: the atlas cannot express wrap: it replaces the sampler, and decides "
                          "by hashes of seeds; rows have aborts, refills, allocations; court.py --method can")
    if cfg.prune.prompts.refills:
        raise ConfigError(f"the atlas cannot express prune.prompts.kind={cfg.prune.prompts.kind}: it has no "
                          "prompts to draw in place of those skipped; rows have refills")
    choices = {}
    for field in ("normalize", "denominator"):
        chosen = getattr(cfg.loss, field)
        if chosen != getattr(theirs.loss, field) or is_set(f"loss.{field}", settings):
            choices[field] = chosen
    for key, (field, known) in OURS.items():
        _, setting, table = KINDS[key]
        section = attrgetter(setting)(cfg)
        if section.kind not in table:
            raise ConfigError(f"the atlas cannot express {setting}.kind={section.kind}")
        if section != attrgetter(setting)(theirs) or is_set(setting, settings):
            known[MINE] = section
            choices[field] = MINE
    pruner = PRUNERS[MINE] if "completions" in choices else None
    if (getattr(pruner, "keep", None) or 0) > 2 or getattr(pruner, "error", None):
        raise ConfigError(f"{pruner} keeps all of the atlas's groups of 2, or is by no number: give --set "
                          "prune.completions.keep=2 or .drop_prob")
    if hasattr(method, "weigh"):
        choices["weigh"] = MINE
        page = Estimator(**choices)
        loss = replace(cfg.loss, normalize=page.normalize, denominator=page.denominator)
        WEIGHING[MINE] = partial(checked, lambda given, loss: checked_weigh(method)(
            *([x] for x in given), loss)[0], f"{path.name}: weigh", settings=loss)
    for key in own:
        table = KINDS[key][2]
        for kind, function in getattr(method, key).items():
            table[name_of(kind)] = partial(checked, function, f"{path.name}: {name_of(kind)}")
    if "weigh" in choices and "trust" in choices or "prompts" in choices and choices.keys() & {
            "advantage", "completions", "weigh"}:
        raise ConfigError(f"{path.name}: the atlas cannot express {' with '.join(choices)}")
    print_left_out(cfg, theirs)
    return Estimator(**choices), next((OURS[key][0] for key in own if OURS[key][0] in choices), "weigh")


def is_set(setting: str, settings: list[str]) -> bool:
    """Tell whether --set names a setting, by itself or within its section."""
    section, _, field = setting.partition(".")
    return any(re.match(rf"{section}\b", text) and field in text for text in settings)


def print_left_out(cfg: config.Config, theirs: config.Config) -> None:
    """Say which settings are others than the testbed's, change a gradient, and are not in the atlas."""
    of_gradients = ("loss.", "prune.", "update.", "reward.", "rollout.until", "teacher.")
    here = ("loss.normalize", "loss.denominator", *(setting for _, setting, _ in KINDS.values()))
    left = [f"{key}={value}" for key, value in flatten(cfg).items() if key.startswith(of_gradients)
            and not key.startswith(here) and flatten(theirs).get(key) != value]
    if left:
        print(f"The atlas leaves out {', '.join(left)}.\n")


def wraps(method: ModuleType, cfg: config.Config) -> bool:
    """Tell whether a method replaces the history or the sampler; a `wrap` may check the config alone."""
    parts = object(), object()
    try:
        return hasattr(method, "wrap") and [*method.wrap(cfg, *parts)] != [*parts]
    except ConfigError:
        raise
    except Exception:  # it has looked into one of them
        return True
