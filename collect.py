"""What a step trains on: draw prompts, sample groups, score, compare and prune, in rounds until it has enough.

Dimension key:  N prompts (groups) rolled out in one step,  G completions per prompt.
"""

from dataclasses import asdict

import torch
from torch import Tensor

import data
import dist
import metrics
from advantage import group_norm
from config import Config, Prune
from exchange import gather
from prune import COMPLETIONS, REFILLING, Offer, Pruned, next_round
from reward import score
from rollout import Engine
from runfolder import Log
from sample import Batch, Group, Prompt, Rolled, Turn, lengths


def collect(engine: Engine, tokenizer: data.Tokenizer, prompts: list[Prompt], history: data.PromptHistory, cfg: Config,
            step: int, clock: metrics.Clock, log: Log) -> tuple[Rolled, Batch]:
    """Roll out until the step is complete (rollout.until, rollout.max_rounds), and prune what it trains on.

    Under `informative` and `full` how many prompts a step takes depends on what they gave: the estimator is another one
    then, and stands outside the proof of unbiased pruning.
    """
    pruning = cfg.prune if step < cfg.steps - cfg.prune.unpruned_steps else Prune()
    N, refill = cfg.rollout.prompts_per_step, cfg.rollout.until == "informative"
    most = count = 3 * N // 2 if refill else N  # GRESO and its baseline as released: 384 for 256
    rolled, last = None, False
    while True:
        turns = history.draw(prompts, pruning.prompts, cfg.seed, count)
        kept = [turn for turn in turns if turn.kept]
        groups, parts = rollout(engine, tokenizer, kept, cfg, clock, log.bar("rollout"))
        reward_NG = sum(getattr(cfg.reward, name) * part_NG for name, part_NG in parts.items())
        adv_NG = group_norm(reward_NG, cfg.advantage.correction, cfg.advantage.eps)  # from all G, before pruning
        history.record(kept, reward_NG, adv_NG, middle(cfg))
        newest = Rolled(turns, groups, parts, reward_NG, adv_NG)
        rolled = newest if rolled is None else rolled + newest
        batch = choose(rolled, cfg, pruning, dist.seed_for(cfg.seed, step, "prune"))
        missing = shortfall(batch, cfg)
        if missing == 0 or last or rolled.rounds == cfg.rollout.max_rounds:
            break
        if refill and pruning.prompts.kind in REFILLING:
            count, last = next_round(missing, 1 - informative(adv_NG).double().mean().item(), most)
    if missing:
        log.say(f"step {step + 1}: {missing} {'groups' if refill else 'tokens'} short after {rolled.rounds} rounds; "
                f"training on the {len(batch.groups)} groups there are")
    if pruning.prompts.kind in REFILLING and rolled.turns[-1].epoch > 0:
        history.adapt(rolled.reward_NG, middle(cfg), pruning.prompts.target)
    return rolled, batch


def middle(cfg: Config) -> float:
    """Of the scale of rewards: equal ones above it are those of an easy prompt, below it of a hard one."""
    return sum(asdict(cfg.reward).values()) / 2


def rollout(engine: Engine, tokenizer: data.Tokenizer, turns: list[Turn], cfg: Config, clock: metrics.Clock,
            progress: str | None) -> tuple[list[Group], dict[str, Tensor]]:
    """o_1..o_G ~ pi_old(.|q) for these turns, and their rewards. Each rank samples and scores its share.

    Returns their groups in order, on every rank as far as exchange.gather brings them, and each reward component as a
    float64 [N, G].
    """
    G, weights = cfg.rollout.group_size, asdict(cfg.reward)
    share = dist.mine([(turn, g) for turn in turns for g in range(G)])
    with clock.phase("rollout"):
        seeds = [data.sample_seed(cfg.seed, turn.epoch, turn.prompt.id, g) for turn, g in share]
        samples = engine.generate([turn.prompt.ids for turn, _ in share], seeds, cfg.rollout.max_new_tokens,
                                  cfg.rollout.temperature, progress=progress)
    with clock.phase("reward"):
        names = [name for name, weight in weights.items() if weight]
        scores = [score(tokenizer.decode(sample.ids), turn.prompt.answer, weights)
                  for sample, (turn, _) in zip(samples, share, strict=True)]
        mine = torch.tensor([[part[name] for name in names] for part in scores], dtype=torch.float64)
        part_NG = torch.cat(dist.gather_rows(mine.view(-1, len(names)))).T.unflatten(1, (-1, G))
        whole, owners = gather(samples, cfg.rollout.gather_limit)
    groups = [Group(turn.prompt, tuple(whole[n * G:(n + 1) * G]), owners and tuple(owners[n * G:(n + 1) * G]))
              for n, turn in enumerate(turns)]
    return groups, dict(zip(names, part_NG, strict=True))


def informative(adv_NG: Tensor) -> Tensor:
    """bool [N]: groups whose rewards differ."""
    return (adv_NG != 0).any(dim=1)


def choose(rolled: Rolled, cfg: Config, pruning: Prune, seed: int) -> Batch:
    """The groups that the step trains on, pruned, with the weights of both levels multiplied."""
    turns, groups, adv_NG = rolled.kept, rolled.groups, rolled.adv_NG
    if cfg.rollout.until == "informative":
        chosen = informative(adv_NG).nonzero()[:, 0].tolist()[:cfg.rollout.prompts_per_step]
        turns, groups, adv_NG = [turns[n] for n in chosen], [groups[n] for n in chosen], adv_NG[chosen]
    if cfg.rollout.until == "informative" or pruning.prompts.kind in REFILLING:
        # Others have taken the place of what was dropped, so only those that stay count as offered.
        slots, offered = list(range(len(groups))), len(groups)
    else:
        slots, offered = [i for i, turn in enumerate(rolled.turns) if turn.kept], len(rolled.turns)
    weight_N1, prob_N1 = (torch.tensor([[getattr(turn, name)] for turn in turns], dtype=adv_NG.dtype).view(-1, 1)
                          for name in ("weight", "prob"))
    offer = Offer(adv_NG, lengths(groups, adv_NG.shape[1]), cfg.loss.per, cfg.loss.kl == 0, seed, weight_N1)
    pruned = COMPLETIONS[pruning.completions.kind if groups else "none"](offer, pruning.completions)
    both = Pruned(pruned.keep_NG, pruned.weight_NG * weight_N1, pruned.prob_NG * prob_N1)
    return Batch(turns, groups, adv_NG, both, slots, offered, seed)


def shortfall(batch: Batch, cfg: Config) -> int:
    """What the step still lacks: groups (rollout.until=informative) or tokens (full)."""
    if cfg.rollout.until == "offered":
        return 0
    if cfg.rollout.until == "informative":
        return cfg.rollout.prompts_per_step - len(batch.groups)
    tokens = sum(len(batch.groups[n].prompt.ids) + batch.groups[n].samples[g].length
                 for n, g in batch.pruned.keep_NG.nonzero().tolist())
    return max(0, cfg.pack.budget - tokens)
