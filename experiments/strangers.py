"""Take a method that one file brings into the atlas's tables, as the entry MINE (atlas.py --method)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from enumeration import SKIPPING
from estimators import ADVANTAGES, MINE, PRUNERS, REGIONS, WEIGHING, Estimator
from torch import Tensor
from try_method import COURT, KINDS, check_chosen, find_method, load, name_of, plug_in_kinds

import config
from config import ConfigError, Loss
from prune import Candidates, Memory
from records import LogProbs, Pruned, Row

OURS = {"ADVANTAGES": ("advantage", ADVANTAGES), "COMPLETIONS": ("completions", PRUNERS),
        "PROMPTS": ("prompts", SKIPPING), "TRUST": ("trust", REGIONS)}
RECIPE = str(COURT.parent / "long_sums.yaml")


def checked(function: Callable, name: str, given: Any, settings: Any) -> Any:
    """Call a stranger's function. Raises ConfigError for whatever it raises, and for a wrong shape or nan."""
    try:
        result = function(given, settings)
    except Exception as error:
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}".partition("\n")[0]) from error
    field = {Candidates: "adv_NG", LogProbs: "logp_C", Memory: "size_K"}.get(type(given), "total_NG")
    like = given[1] if isinstance(given, tuple) else getattr(given, field)
    pruned = isinstance(result, Pruned)
    if isinstance(given, Candidates) and not (pruned and result.keep_NG.dtype == torch.bool):
        raise ConfigError(f"{name} must return a records.Pruned whose keep_NG is bool")
    for part in (result.keep_NG, result.weight_NG, result.prob_NG) if pruned else (result,):
        got = [*part.shape] if isinstance(part, Tensor) else type(part).__name__
        if got != [*like.shape]:
            raise ConfigError(f"{name} returned {got}, and must return a tensor of {[*like.shape]}")
        if not (part.isfinite() | like.isnan() & (not pruned)).all():
            raise ConfigError(f"{name} returned nan or inf: {part.tolist()}")
        if isinstance(given, Memory) and ((part < 0) | (part > 1)).any():
            raise ConfigError(f"{name} returned {part.tolist()}, and must return probabilities")
    if field == "logp_C" and not result.equal(function(replace(given, adv_C=2 * given.adv_C), settings)):
        raise ConfigError(f"{name}: the atlas has no region that reads more of advantages than their sign")
    return result


def take(name: str, recipe: str | None, settings: list[str]) -> tuple[Estimator, str]:
    """Plug a method's file in; return its row's choices, and the one that is its own. What its config has of
    the court's recipe is as on the atlas's page. Raises ConfigError."""
    path = find_method(name)
    method = load(path)
    if hasattr(method, "OPTIMIZERS"):
        raise ConfigError(f"{path.name}: the atlas cannot express OPTIMIZERS: it has no update; court.py can")
    plug_in_kinds(method)
    own = [key for key in OURS if hasattr(method, key)]
    beside = path.with_suffix(".yaml")
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
        if chosen != getattr(theirs.loss, field) or any(s.startswith(f"loss.{field}") for s in settings):
            choices[field] = chosen
    for key, (field, known) in OURS.items():
        section = attrgetter(KINDS[key][1])(cfg)
        if section != attrgetter(KINDS[key][1])(theirs):
            known[MINE] = section
            choices[field] = MINE
    if hasattr(method, "weigh"):
        choices["weigh"] = MINE
        WEIGHING[MINE] = partial(
            checked, partial(weigh_row, method), f"{path.name}: weigh", settings=cfg.loss)
    for key in own:
        table = KINDS[key][2]
        for kind, function in getattr(method, key).items():
            table[name_of(kind)] = partial(checked, function, f"{path.name}: {name_of(kind)}")
    return Estimator(**choices), next((OURS[key][0] for key in own if OURS[key][0] in choices), "weigh")


def weigh_row(method: ModuleType, given: tuple[Row, Tensor, Tensor], settings: Loss) -> Tensor:
    """Weigh the tokens of one row, given its log-probs and entropies, [C]."""
    row, logp_C, entropy_C = given
    entropy = entropy_C if getattr(method, "ENTROPY", False) else None
    factor_C, = method.weigh([row], [logp_C], [entropy], settings)
    return factor_C


def wraps(method: ModuleType, cfg: config.Config) -> bool:
    """Tell whether a method replaces the history or the sampler; a `wrap` may check the config alone."""
    parts = object(), object()
    try:
        return hasattr(method, "wrap") and method.wrap(cfg, *parts) != parts
    except AttributeError:  # it has looked into one of them
        return True
