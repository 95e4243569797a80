"""How much to prune: what other errors of a draw would have cost and gained, from a run's own steps.

A draw of squared error e (prune.predicted_error) gives a gradient of 1 + e times the full one's mean square.
Where one rate is kept, Adam's progress per step goes with (1 + e)^-1/2; where noise is the limit, with
(1 + e)^-1. These are predictions; docs/experiments.md has how they are tried.
"""

import math
from statistics import mean

import torch

from config import Config, with_value
from infra.figures import align
from infra.lines import is_evaluation, phase_seconds
from prune import Candidates, fewest, gradient_size, inclusion
from records import Batch, Metrics, Rolled
from settings.kinds import Pps
from settings.loader import ConfigError
from settings.rules import all_rules

ERRORS = (0.05, 0.1, 0.3)
BY_TOKENS = ("pack", "score", "update")  # phases that take seconds in proportion to trained tokens


def may_draw(cfg: Config) -> bool:
    """Tell whether PPS by an error can take the place of a run's own pruning."""
    if cfg.rollout.until == "full" or getattr(cfg.prune.completions, "compare", "all") == "kept":
        return False  # a step is as long as before, or the advantages of those left out are of other groups
    drawn = with_value(with_value(cfg, "loss.denominator", "all"), "prune.completions", Pps(error=ERRORS[0]))
    # A run has chosen settings of its rollout by itself, against their rules.
    return all(fine for key, fine, _ in all_rules(drawn) if not key.startswith("rollout."))


def share_of_tokens(cfg: Config, rolled: Rolled, batch: Batch) -> Metrics:
    """Compute the share of the tokens with a gradient that this step trains on, and those that `pps` would be
    expected to by each error. Empty without a gradient, or if a model changes the advantages.
    """
    if not batch.groups or not cfg.advantage.compares:
        return {}
    weight_N1 = torch.tensor([[draw.weight] for draw in batch.draws], dtype=torch.float64)
    candidates = Candidates(
        batch.adv_NG, batch.groups, cfg.loss.normalize, batch.advantage_only, batch.seed, weight_N1)
    size_K, norm_K = (gradient_size(candidates, "surprise", by_cost).flatten() for by_cost in (True, False))
    tokens_K = candidates.len_NG.flatten() * (norm_K > 0)
    if not tokens_K.any():
        return {}
    drawn = {f"_{error}": inclusion(size_K, fewest(size_K, norm_K, error)) for error in ERRORS}
    drawn[""] = batch.trained_NG.flatten()
    return {f"prune/share{name}": ((prob_K * tokens_K).sum() / tokens_K.sum()).item()
            for name, prob_K in drawn.items()}


def advice(lines: list[dict], seconds: dict[str, float]) -> list[str]:
    """Tabulate what a step costs and gains by the error of its draw, and say which setting is best.

    seconds   of phases of one step, in place of those that the run took; other phases then take none
    Progress is per second, over the progress of keeping all, by both exponents. A setting is advised if it
    gains by both. Empty for a run without such shares. Raises ConfigError for seconds of other phases, or
    that a run without shares cannot use.
    """
    steps = [line for line in lines if line.get("prune/share")]
    if not steps:
        if seconds:
            raise ConfigError("--seconds: no step of the run has logged prune/share, which it needs")
        return []
    done = [line for line in lines if not is_evaluation(line)]  # those without a gradient take seconds too
    took = {phase: spent / len(done) for phase, spent in phase_seconds(done).items()}
    phases = took.keys() - {"step"}
    if not (seconds.keys() <= phases and all(0 < value < math.inf for value in seconds.values())):
        raise ConfigError(
            f"--seconds {seconds} must give some of {', '.join(sorted(phases))} seconds above 0")
    took = seconds or took
    share = {error: mean(line[f"prune/share_{error}"] for line in steps) for error in ERRORS} | {0.0: 1.0}
    by_tokens = sum(took.get(phase, 0.0) for phase in BY_TOKENS)
    rest = (took.get("step") or sum(took.values())) - by_tokens
    full = by_tokens / mean(line["prune/share"] for line in steps)
    gains, rows = {}, [["PPS by an error of (0: all)", "tokens", "seconds", "progress per second, predicted"]]
    for error in sorted(share):
        spent = rest + full * share[error]
        gains[error] = [(rest + full) / spent * (1 + error) ** -power for power in (1, 0.5)]
        rows.append([f"{error:g}", f"{share[error]:.2f}", f"{spent:.3g}",
                     "{:.2f} to {:.2f}".format(*gains[error])])
    best = max(gains, key=gains.get)
    drawn = f"'prune.completions={{kind: pps, size: surprise, keep: null, error: {best}, by_cost: true}}'"
    pays = f"pays, as predicted: --set {drawn} --set loss.denominator=all"
    return ["", *align(rows), pays if best else "pruning does not pay here"]
