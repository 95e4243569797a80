"""Collect a step: sample and score groups until there are enough, and choose the completions to train on.

The loop in train.py asks `prompts_needed` how many prompts to draw, a `Sampler` samples and scores them, and
`choose` makes the batch to train on.

Dimension key:  N prompts (groups) rolled out in one step,  G completions per prompt,  R completions,
P components of a reward.
"""

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from advantage import advantage, flat_groups
from config import Config, ConfigError, Prune, Reward, Rollout, has_reference
from data import Tokenizer
from history import sample_seed
from infra import dist
from prune import (
    COMPLETIONS,
    Candidates,
    draw_cuts,
    gradient_size,
    keep_all,
    next_round_size,
    predicted_error,
    rewards_of_kept,
)
from records import Batch, Group, PromptDraw, Request, Rewards, Rolled, Sample, frozen
from reward import list_components, own_rewards, reward_range, score
from rollout import Engine
from settings import kinds


@frozen
class Sampler:
    """The engine and tokenizer that sample and score completions, and the settings that they read."""

    engine: Engine
    tokenizer: Tokenizer
    sampling: Rollout
    reward: Reward
    seed: int
    graded: bool = True  # by the verifier: every problem has an answer

    def rollout(self, draws: list[PromptDraw], numbers: range | None = None) -> list[Group]:
        """Sample o_1 .. o_G ~ pi_old(. | q) for the draws that are kept, or the completions of each that have
        other `numbers`; every rank gets all groups."""
        kept = [draw for draw in draws if draw.kept]
        numbers = numbers or range(self.sampling.group_size)
        requests = [Request(draw.prompt, sample_seed(self.seed, draw.epoch, draw.prompt.id, g),
                            self.sampling.max_new_tokens) for draw in kept for g in numbers]
        samples = iter(self.complete(requests))
        return [Group(draw.prompt, tuple(islice(samples, len(numbers)))) for draw in kept]

    def complete(self, requests: list[Request]) -> list[Sample]:
        """Sample the new tokens of each request. Each rank samples its `local_slice`, and gets all."""
        shown = "rollout" if dist.rank() == 0 else None
        return dist.gather(self.engine.generate(
            dist.local_slice(requests), self.sampling.temperature, progress=shown))

    def score(self, groups: list[Group]) -> Rewards:
        """Score the completions of whole groups. Each rank scores its `local_slice`; all get all rewards."""
        answered = [(sample, group.prompt) for group in groups for sample in group.samples]
        completions = [(self.tokenizer.read(sample), prompt, sample.own)
                       for sample, prompt in dist.local_slice(answered)]
        names = list_components(self.reward, self.graded)
        values = score(completions, self.sampling.max_new_tokens, self.reward, self.graded)
        all_RP = torch.tensor(dist.gather(values), dtype=torch.float64).view(-1, len(names))
        G = len(groups[0].samples) if groups else self.sampling.group_size
        components = {name: x_R.view(-1, G) for name, x_R in zip(names, all_RP.T, strict=True)}
        tokens_NG = torch.tensor([sample.own for sample, _ in answered], dtype=torch.int64).view(-1, G)
        rewards = Rewards(components, self.reward.components, tokens_NG, self.sampling.differ_in)
        if self.reward.custom_file:
            own_rewards().require_lives(rewards, self.reward)
        return rewards


@frozen
class Selection:
    """The settings that decide when a step has enough, and which completions are trained on."""

    rollout: Rollout
    prune: Prune
    normalize: str        # loss.normalize
    budget: int | None    # pack.budget
    advantage_only: bool  # the loss has no other gradient: a completion of advantage 0 has none
    advantage: kinds.Advantage
    draws: int = 1        # of survivors: one, or one for each epoch (update.redraw)

    @staticmethod
    def of(cfg: Config) -> "Selection":
        # A reference is there for a KL, or for advantages that change with the policy.
        with_gradient = (
            has_reference(cfg) or cfg.loss.likelihood or cfg.loss.entropy or cfg.advantage.by_model)
        return Selection(
            cfg.rollout,
            cfg.prune,
            cfg.loss.normalize,
            cfg.pack.budget,
            not with_gradient,
            cfg.advantage,
            cfg.update.epochs if cfg.update.redraw else 1
        )


def prompts_needed(rolled: Rolled, selection: Selection, seed: int) -> int:
    """Count the prompts of the next round; 0 if the step has enough, or has had all its rounds.

    offered      N prompts, once
    informative  in rounds of oversample x N until N groups differ (DAPO); with GRESO as many as are estimated
    full         N at a time until the survivors of `choose` fill pack.budget
    Under the last two the number of prompts in a step depends on their rewards: the estimator is another one
    then, and the proof of unbiased pruning does not cover it.
    """
    settings = selection.rollout
    N = settings.prompts_per_step
    rounds = len(rolled.sizes)
    if settings.until == "informative":
        return refill_count(rolled, settings, selection.prune.prompts.kind == "greso")
    if settings.until == "full" and 0 < rounds < settings.max_rounds:
        return N if missing_tokens(choose(rolled, selection, seed), selection.budget) else 0
    return 0 if rounds else N


def refill_count(rolled: Rolled, settings: Rollout, estimated: bool) -> int:
    """Count the prompts that the next round draws in search of N informative groups.

    Recomputes the size of every round so far, because each was estimated from the round before it.
    """
    count = largest = int(settings.oversample * settings.prompts_per_step)
    missing = settings.prompts_per_step
    last = False
    for informative_N in informative_groups(rolled).split(rolled.sizes):
        missing -= int(informative_N.sum())
        if missing <= 0 or last:
            return 0
        if estimated:
            count, last = next_round_size(missing, 1 - informative_N.double().mean().item(), largest)
    return count if len(rolled.sizes) < settings.max_rounds else 0


def informative_groups(rolled: Rolled) -> Tensor:
    """Mark the groups with different values of rollout.differ_in, bool [N]."""
    if rolled.rewards is None:
        return torch.empty(0, dtype=torch.bool)
    return ~flat_groups(rolled.rewards.compared_NG)


def rank_informative(rolled: Rolled) -> list[int]:
    """List the informative groups by their numbers: first those that have waited (windows.max_age)."""
    return sorted(informative_groups(rolled).nonzero()[:, 0].tolist(), key=lambda n: -rolled.kept[n].age)


def missing_tokens(batch: Batch, budget: int) -> int:
    """Count the tokens that the trained completions, with their prompts, leave of the budget."""
    for n, g in batch.trained_NG.nonzero().tolist():
        group = batch.groups[n]
        budget -= len(group.prompt.ids) + group.samples[g].length
    return max(0, budget)


def choose(rolled: Rolled, selection: Selection, seed: int, epoch: int = 0) -> Batch:
    """Choose the groups to train on and prune their completions. The weights of both levels multiply.

    Each epoch of the update may have a draw of its own. Raises ConfigError if a completion has no reward
    though prompts were skipped: the denominator is then unknown.
    """
    chosen, places, offered = choose_groups(rolled, selection)
    seed = dist.seed_for(seed, epoch, "epoch") if epoch else seed
    prune, settings = selection.prune, selection.prune.completions
    kept = [draw for draw in rolled.draws if draw.kept]
    draws = [kept[n] for n in chosen]
    groups = [rolled.groups[n] for n in chosen]
    reward_NG, adv_NG = rolled.rewards.total_NG[chosen], rolled.adv_NG[chosen]
    if prune.prompts.kind != "none" and not prune.prompts.refills:
        require_rewards(reward_NG, draws, prune.prompts.kind)
    if prune.truncated:  # a cut completion counts as one without a reward: in no denominator either
        cut = [[not (s.finished or s.pending) for s in group.samples] for group in groups]
        cut_NG = torch.tensor(cut, dtype=torch.bool).view(adv_NG.shape)
        reward_NG = reward_NG.masked_fill(cut_NG, torch.nan)
        adv_NG = adv_NG.masked_fill(cut_NG, torch.nan)

    # Level 1 has chosen the prompts: each has a probability, and a weight of its whole group.
    levels = [(draw.prob, draw.weight) for draw in draws]
    prob_N1, weight_N1 = torch.tensor(levels, dtype=adv_NG.dtype).view(-1, 2).split(1, dim=1)
    # Level 2 chooses among their completions.
    candidates = Candidates(
        adv_NG, groups, selection.normalize, selection.advantage_only, seed, weight_N1, reward_NG)
    drawn = COMPLETIONS[settings.kind](candidates, settings) if groups else keep_all(adv_NG)
    error = None
    if groups and hasattr(settings, "error"):  # a draw by chance: prune/error is logged
        norm_NG = gradient_size(candidates, getattr(settings, "size", "surprise"), by_cost=False)
        error = predicted_error(norm_NG, drawn.prob_NG)
    scored_NG = ~reward_NG.isnan()
    pruned = replace(
        drawn,
        keep_NG=drawn.keep_NG & scored_NG,
        weight_NG=drawn.weight_NG * weight_N1 * scored_NG,
        prob_NG=drawn.prob_NG * prob_N1
    )

    if groups and getattr(settings, "compare", "all") == "kept":  # PODS compares the kept alone
        reward_of_kept = rewards_of_kept(rolled.rewards, chosen, pruned.keep_NG)
        own_NG = advantage(reward_of_kept, selection.advantage)
        adv_NG = torch.where(pruned.keep_NG, own_NG, adv_NG)
    graded_NG = rolled.rewards.components.get("accuracy", torch.zeros_like(rolled.adv_NG))
    tokens = None
    if prune.tokens.kind != "none":
        tokens = draw_cuts(groups, prune.tokens, dist.seed_for(seed, "tokens"))
    return Batch(draws, groups, reward_NG, graded_NG[chosen] == 1, adv_NG, pruned, places, offered, seed,
                 tokens, selection.advantage_only, error)


def choose_groups(rolled: Rolled, selection: Selection) -> tuple[list[int], list[int], int]:
    """Choose groups by their numbers; returns too which of the prompts offered each is of, and how many were.

    If a step refills, dropped groups were replaced and only the chosen ones count as offered.
    """
    chosen, places, offered = [], [], 0
    numbered = enumerate(rolled.groups)
    for draw in rolled.draws:
        if draw.kept:
            n, group = next(numbered)
            if not group.offered:
                continue
            chosen.append(n)
            places.append(offered)
        offered += 1
    refilled = selection.prune.prompts.refills
    if selection.rollout.until == "informative":
        refilled, chosen = True, rank_informative(rolled)[:selection.rollout.prompts_per_step]
    return (chosen, list(range(len(chosen))), len(chosen)) if refilled else (chosen, places, offered)


def require_rewards(reward_NG: Tensor, draws: list[PromptDraw], kind: str) -> None:
    """Raise ConfigError for a completion without a reward if prompts are skipped and not replaced."""
    lacking = reward_NG.isnan().any(dim=1).nonzero()[:, 0].tolist()
    if lacking:
        raise ConfigError(f"prune.prompts.kind={kind} needs a reward for every completion, and one of "
                          f"{draws[lacking[0]].prompt.id} has none: each component is None; return a number, "
                          "or set prune.prompts.kind=none")


def reward_midpoint(reward: Reward, differ_in: str) -> float:
    """Compute the midpoint of the range that groups are compared in. A group of equal values is easy above
    it and hard below it. The length is left out."""
    weights = {"accuracy": 1.0}
    if differ_in == "reward":
        weights = {name: weight for name, weight in reward.weights.items() if name != "overlong"}
    return sum(reward_range(weights)) / 2


def describe_missing(rewards: Rewards, cfg: Reward) -> str:
    """Say which of the user's functions are None for every completion of a step; empty if none is."""
    count = rewards.total_NG.numel()
    if not count:
        return ""
    if rewards.total_NG.isnan().all():
        return f"none of {count} completions has a reward: every component is None, so none is trained on"
    absent = [name for name in cfg.functions if rewards.components[name].isnan().all()]
    return f"{', '.join(absent)}: None for all of {count} completions" if absent else ""


def shortage(rolled: Rolled, batch: Batch, selection: Selection) -> str:
    """Say how much a step without further rounds is short of its target; empty if nothing is missing."""
    groups = len(batch.groups)
    missing, unit = 0, "groups"
    if selection.rollout.until == "informative":
        missing = selection.rollout.prompts_per_step - groups
    elif selection.rollout.until == "full":
        missing = missing_tokens(batch, selection.budget)
        unit = "tokens"
    if not missing:
        return ""
    return (f"{missing} {unit} short after {len(rolled.sizes)} rounds; "
            f"training on the {groups} groups there are")
