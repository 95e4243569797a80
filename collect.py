"""What a step trains on: draw prompts, sample groups, score, compare and prune, in rounds until it has enough.

Dimension key:  N prompts (groups) rolled out in one step,  G completions per prompt.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import data
import dist
import metrics
import runfolder
from advantage import ESTIMATORS, Scores, adaptive_lambda, flat, soft_value
from config import Config, Prune, Rollout
from exchange import gather
from prune import COMPLETIONS, REFILLING, Offer, Pruned, next_round
from reward import OF_LENGTH, measured, score, span
from rollout import Engine
from runfolder import Log
from sample import Batch, Group, Prompt, Rolled, Sample, Turn, lengths, pending

ROUNDS_OF_SLOTS = 8  # how often the slots are filled between two writes of the table of V*


@dataclass(frozen=True, slots=True)
class Request:
    """A completion to sample, or to go on with."""

    turn: Turn
    seed: int                    # of the completion, whichever rank and step sample it
    begun: Sample | None = None

    @property
    def window_seed(self) -> int:
        """Of what comes next: an engine draws from the start of a seed."""
        return dist.seed_for(self.seed, self.begun.length) if self.begun else self.seed

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.turn.prompt.ids, *self.begun.ids) if self.begun else self.turn.prompt.ids

    def room(self, roll: Rollout) -> int:
        """Tokens that it may get now."""
        left = roll.max_new_tokens - (self.begun.length if self.begun else 0)
        return min(roll.window or left, left)


def collect(engine: Engine, tokenizer: data.Tokenizer, prompts: list[Prompt], history: data.PromptHistory, cfg: Config,
            step: int, clock: metrics.Clock, log: Log) -> tuple[Rolled, Batch]:
    """Roll out until the step is complete (rollout.until, rollout.max_rounds), and prune what it trains on.

    Under `informative` and `full` how many prompts a step takes depends on what they gave: the estimator is another one
    then, and stands outside the proof of unbiased pruning.
    """
    pruning = cfg.prune if step < cfg.steps - cfg.prune.unpruned_steps else Prune(truncated=cfg.prune.truncated)
    N, refill = cfg.rollout.prompts_per_step, cfg.rollout.until == "informative"
    most = count = int(cfg.rollout.oversample * N) if refill else N
    rolled, last = None, False
    while True:
        if cfg.rollout.window:
            newest = windowed(engine, tokenizer, prompts, history, cfg, clock, log)
        else:
            newest = whole(engine, tokenizer, history.draw(prompts, pruning.prompts, cfg.seed, count), history, cfg,
                           clock, log)
        rolled = newest if rolled is None else rolled + newest
        batch = choose(rolled, cfg, pruning, dist.seed_for(cfg.seed, step, "prune"))
        missing = shortfall(batch, cfg)
        if missing == 0 or last or rolled.rounds == cfg.rollout.max_rounds:
            break
        if refill and pruning.prompts.kind in REFILLING:
            count, last = next_round(missing, 1 - informative(newest, cfg).double().mean().item(), most)
    if missing:
        log.say(f"step {step + 1}: {missing} {'groups' if refill else 'tokens'} short after {rolled.rounds} rounds; "
                f"training on the {len(batch.groups)} groups there are")
    if step == 0 and cfg.advantage.alpha:
        warn_of_short(batch, cfg, log)
    if pruning.prompts.kind in REFILLING and rolled.turns[-1].epoch > 0:
        history.adapt(compared(rolled, cfg), middle(cfg), pruning.prompts.target)
    return rolled, batch


def whole(engine: Engine, tokenizer: data.Tokenizer, turns: list[Turn], history: data.PromptHistory, cfg: Config,
          clock: metrics.Clock, log: Log) -> Rolled:
    """One round of whole groups, compared and remembered."""
    kept = [turn for turn in turns if turn.kept]
    groups, parts = rollout(engine, tokenizer, kept, cfg, clock, log.bar("rollout"))
    weights = cfg.reward.weights
    reward_NG = weighted(parts, weights)
    value_N1 = torch.tensor([[history.values.get(turn.prompt.id, torch.nan)] for turn in kept], dtype=torch.float64)
    scores = Scores(reward_NG, parts, weights, value_N1.view(-1, 1))
    adv_NG = ESTIMATORS[cfg.advantage.kind](scores, cfg.advantage)  # from all G, before pruning
    rolled = Rolled(turns, groups, parts, reward_NG, adv_NG)
    history.record(kept, compared(rolled, cfg), adv_NG, middle(cfg))
    return rolled


def windowed(engine: Engine, tokenizer: data.Tokenizer, prompts: list[Prompt], history: data.PromptHistory,
             cfg: Config, clock: metrics.Clock, log: Log) -> Rolled:
    """T-PPO's successive batching (arXiv:2506.15050): at most rollout.window tokens of every completion. What does not
    end with them goes on in the next step, and new prompts take the places of what has ended; fewer than a group's
    worth of places may stay empty. Every completion is a group of its own, since those of a prompt end in different
    steps.
    """
    G = cfg.rollout.group_size
    begun = history.pool
    drawn = history.draw(prompts, cfg.prune.prompts, cfg.seed,
                         (cfg.rollout.prompts_per_step * G - len(begun)) // G)
    fresh = [(replace(turn, copy=copy), None) for turn in drawn for copy in range(G)]
    requests = [Request(turn, data.sample_seed(cfg.seed, turn.epoch, turn.prompt.id, turn.copy), sample)
                for turn, sample in interleaved(begun, fresh)]
    turns = [request.turn for request in requests]
    samples, _, parts = sample_and_score(engine, tokenizer, requests, cfg, clock, log.bar("rollout"))
    groups = [Group(turn.prompt, (sample,)) for turn, sample in zip(turns, samples, strict=True)]
    history.pool = [(turn, sample) for turn, sample in zip(turns, samples, strict=True) if sample.pending]
    parts = {name: part_R[:, None] for name, part_R in parts.items()}
    reward_N1 = weighted(parts, cfg.reward.weights)
    return Rolled(turns, groups, parts, reward_N1, torch.zeros_like(reward_N1))


def warn_of_short(batch: Batch, cfg: Config, log: Log) -> None:
    """Say so where advantage.alpha leaves most responses the least lambda."""
    alpha, lowest = cfg.advantage.alpha, cfg.advantage.lam_min
    length_S = torch.tensor([s.length for group in batch.groups for s in group.samples], dtype=torch.float64)
    floored = int((adaptive_lambda(length_S, alpha, lowest) <= lowest).sum())
    if floored > len(length_S) / 2:
        log.say(f"advantage.alpha={alpha} gives {floored} of {len(length_S)} responses no more than advantage.lam_min="
                f"{lowest}: they are too short for it, and see hardly further than the next value; 1 to 1.5 suit them")


def interleaved(one: list, other: list) -> list:
    """Both lists, each in its order and spread evenly: ranks share out long prefixes and new prompts alike."""
    places = [((i + 0.5) / len(part), item) for part in (one, other) for i, item in enumerate(part)]
    return [item for _, item in sorted(places, key=lambda pair: pair[0])]


def middle(cfg: Config) -> float:
    """Of the scale that groups are compared on: equal values above it are those of an easy prompt, below it of a hard
    one. How long an answer may be has no part in it."""
    by_text = {name: weight for name, weight in cfg.reward.weights.items() if name not in OF_LENGTH}
    return sum(span(by_text if cfg.rollout.differ_in == "reward" else {"accuracy": 1.0})) / 2


def rollout(engine: Engine, tokenizer: data.Tokenizer, turns: list[Turn], cfg: Config, clock: metrics.Clock,
            progress: str | None) -> tuple[list[Group], dict[str, Tensor]]:
    """o_1..o_G ~ pi_old(.|q) for these turns, and their rewards.

    Returns their groups in order, on every rank as far as exchange.gather brings them, and each reward component as a
    float64 [N, G] (reward.measured).
    """
    G = cfg.rollout.group_size
    requests = [Request(turn, data.sample_seed(cfg.seed, turn.epoch, turn.prompt.id, g))
                for turn in turns for g in range(G)]
    samples, owners, parts = sample_and_score(engine, tokenizer, requests, cfg, clock, progress)
    groups = [Group(turn.prompt, tuple(samples[n * G:(n + 1) * G]), owners and tuple(owners[n * G:(n + 1) * G]))
              for n, turn in enumerate(turns)]
    return groups, {name: part_R.view(-1, G) for name, part_R in parts.items()}


def sample_and_score(engine: Engine, tokenizer: data.Tokenizer, requests: list[Request], cfg: Config,
                     clock: metrics.Clock, progress: str | None,
                     ) -> tuple[list[Sample], list[int] | None, dict[str, Tensor]]:
    """Completions of R requests, as exchange.gather brings them, and each reward component as a float64 [R]. Each rank
    samples and scores its share. What goes on in the next step is not scored yet: 0.
    """
    roll, share = cfg.rollout, dist.mine(requests)
    with clock.phase("rollout"):
        pieces = engine.generate([r.tokens for r in share], [r.window_seed for r in share],
                                 [r.room(roll) for r in share], roll.temperature, progress=progress)
        samples = [continued(*pair, cfg) for pair in zip(share, pieces, strict=True)]
    with clock.phase("reward"):
        names, done = measured(cfg.reward), [i for i, sample in enumerate(samples) if not sample.pending]
        mine = torch.zeros(len(samples), len(names), dtype=torch.float64)
        found = score([(tokenizer.decode(samples[i].ids), share[i].turn.prompt.answer,
                        samples[i].length) for i in done],
                      roll.max_new_tokens, cfg.reward)
        mine[done] = torch.tensor(found, dtype=torch.float64).view(-1, len(names))
        parts = dict(zip(names, torch.cat(dist.gather_rows(mine)).T, strict=True))
        if roll.window:  # all ranks keep the pool, so what is new travels to all
            pieces, _ = gather(pieces, sys.maxsize)
            return [continued(*pair, cfg) for pair in zip(requests, pieces, strict=True)], None, parts
        return *gather(samples, roll.gather_limit), parts


def weighted(parts: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """The reward."""
    return sum(weight * parts[name] for name, weight in weights.items())


def continued(request: Request, piece: Sample, cfg: Config) -> Sample:
    """What was sampled of the completion before, and now."""
    done = piece.length + (request.begun.length if request.begun else 0)
    goes_on = cfg.rollout.window is not None and not piece.finished and done < cfg.rollout.max_new_tokens
    return request.begun.joined(piece, goes_on) if request.begun else replace(piece, pending=goes_on)


def compared(rolled: Rolled, cfg: Config) -> Tensor:
    """[N, G] what rollout.differ_in names."""
    return rolled.reward_NG if cfg.rollout.differ_in == "reward" else rolled.parts["accuracy"]


def informative(rolled: Rolled, cfg: Config) -> Tensor:
    """bool [N]: groups whose completions differ in it."""
    return ~flat(compared(rolled, cfg))


def choose(rolled: Rolled, cfg: Config, pruning: Prune, seed: int) -> Batch:
    """The groups that the step trains on, pruned, with the weights of both levels multiplied."""
    turns, groups, reward_NG, adv_NG = rolled.kept, rolled.groups, rolled.reward_NG, rolled.adv_NG
    correct_NG = rolled.parts["accuracy"] == 1
    if cfg.rollout.until == "informative":
        chosen = informative(rolled, cfg).nonzero()[:, 0].tolist()[:cfg.rollout.prompts_per_step]
        turns, groups = [turns[n] for n in chosen], [groups[n] for n in chosen]
        reward_NG, correct_NG, adv_NG = reward_NG[chosen], correct_NG[chosen], adv_NG[chosen]
    if cfg.rollout.until == "informative" or pruning.prompts.kind in REFILLING:
        # Others have taken the place of what was dropped, so only those that stay count as offered.
        slots, offered = list(range(len(groups))), len(groups)
    else:
        slots, offered = [i for i, turn in enumerate(rolled.turns) if turn.kept], len(rolled.turns)
    weight_N1, prob_N1 = (torch.tensor([[getattr(turn, name)] for turn in turns], dtype=adv_NG.dtype).view(-1, 1)
                          for name in ("weight", "prob"))
    # Advantage 0 is no gradient at all only where nothing else has one.
    inert = not (cfg.loss.kl or cfg.loss.likelihood or cfg.loss.residual or cfg.advantage.kind == "gae")
    offer = Offer(adv_NG, lengths(groups, adv_NG.shape[1]), cfg.loss.per, inert, seed, weight_N1)
    pruned = COMPLETIONS[pruning.completions.kind if groups else "none"](offer, pruning.completions)
    left_NG = weight_N1 * (without_truncated(groups, adv_NG.shape[1]) if pruning.truncated else 1)
    both = Pruned(pruned.keep_NG & (left_NG > 0), pruned.weight_NG * left_NG, pruned.prob_NG * prob_N1)
    return Batch(turns, groups, reward_NG, correct_NG, adv_NG, both, slots, offered, seed)


def without_truncated(groups: list[Group], G: int) -> Tensor:
    """bool [N, G]: completions that ended, or go on."""
    ended = [[s.finished for s in group.samples] for group in groups]
    return torch.tensor(ended, dtype=torch.bool).view(-1, G) | pending(groups, G)


def shortfall(batch: Batch, cfg: Config) -> int:
    """What the step still lacks: groups (rollout.until=informative) or tokens (full)."""
    if cfg.rollout.until == "offered":
        return 0
    if cfg.rollout.until == "informative":
        return cfg.rollout.prompts_per_step - len(batch.groups)
    tokens = sum(len(batch.groups[n].prompt.ids) + batch.groups[n].samples[g].length
                 for n, g in batch.pruned.keep_NG.nonzero().tolist())
    return max(0, cfg.pack.budget - tokens)


def soft_values(engine: Engine, tokenizer: data.Tokenizer, prompts: list[Prompt], cfg: Config, folder: Path,
                log: Log, asked_to_stop: Callable[[], bool]) -> dict[str, float]:
    """A*-PO's V* of every training prompt (arXiv:2505.20686), from advantage.samples completions by the policy that the
    engine holds: the initial one, before the first step.

    Rewards are written to soft_values.jsonl as they come, so that a run that was interrupted (KeyboardInterrupt, where
    it is asked to stop) goes on with the rest.
    """
    K, path = cfg.advantage.samples, folder / "soft_values.jsonl"
    known, = dist.gather([runfolder.mended(path)] if dist.rank() == 0 else [])
    known = {line["id"]: line["rewards"] for line in known}
    rest = [prompt for prompt in prompts if prompt.id not in known]
    chunk = max(1, ROUNDS_OF_SLOTS * cfg.rollout.slots * dist.world_size() // K)
    for start in tqdm(range(0, len(rest), chunk), "soft values", unit="batch", disable=log.bar("") is None):
        if asked_to_stop():
            raise KeyboardInterrupt
        part = rest[start:start + chunk]
        requests = [Request(Turn(prompt, 0), dist.seed_for(cfg.seed, prompt.id, k, "reference"))
                    for prompt in part for k in range(K)]
        parts = sample_and_score(engine, tokenizer, requests, cfg, metrics.Clock(), log.bar("rollout"))[2]
        reward_NK = weighted(parts, cfg.reward.weights).view(-1, K)
        for prompt, rewards in zip(part, reward_NK.tolist(), strict=True):
            known[prompt.id] = rewards
            log.write(path.name, {"id": prompt.id, "rewards": rewards})
    table_NK = torch.tensor([known[prompt.id] for prompt in prompts], dtype=torch.float64)
    return dict(zip((prompt.id for prompt in prompts), soft_value(table_NK, cfg.advantage.beta).tolist(), strict=True))
