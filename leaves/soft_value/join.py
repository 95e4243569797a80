"""Compare rewards with V*, their soft maximum under the initial policy, instead of with a group: A*-PO
(arXiv:2505.20686).

V* of every training prompt is estimated before the first step, from samples of the initial policy; the
advantage of a completion is r - V*, and the loss is a squared one (`residual_advantage`).

Dimension key:  N prompts,  K samples of the initial policy per prompt,  G completions per prompt,
C completion tokens of one packed row.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collect import Sampler
from infra import dist, runfolder
from infra.lines import append, mend_log
from leaves.soft_value.settings import SoftValue
from loss import segment_sum
from records import Group, PreparedRow, Prompt, PromptDraw, Rewards
from settings.loader import ConfigError

ROUNDS_A_WRITE = 8  # all decoding slots are filled so often between two writes of the table


def parts(cfg: Any, run: Any) -> Any:
    """Give a run's loss the squared error, if advantage.residual asks for it."""
    if cfg.advantage.residual is None:
        return run
    change = partial(residual_advantage, beta=cfg.advantage.residual)
    return replace(run, learner=replace(run.learner, in_pass=(*run.learner.in_pass, change)))


def begin(cfg: Any, run: Any) -> Any:
    """Estimate V* of all prompts and compare rewards with it."""
    values = estimate_table(run.sampler, run.task.prompts, cfg.advantage, Path(cfg.out), run.first > 0)
    return replace(run, advantage=partial(subtract_values, values))


def subtract_values(values: dict[str, float], groups: list[Group], rewards: Rewards, _: SoftValue) -> Tensor:
    """Subtract V* of the prompt, by its id, from each reward, [N, G]."""
    value_N = torch.tensor([values[group.prompt.id] for group in groups], dtype=torch.float64)
    return rewards.total_NG - value_N[:, None]


def residual_advantage(logp_C: Tensor, prepared: PreparedRow, adv_C: Tensor, beta: float) -> Tensor:
    """Write the squared loss (beta log(pi / pi_ref) + V* - r)^2 of a completion as an advantage.

    With f = 1 and loss.normalize=sum, -2 beta (r - V* - beta log(pi / pi_ref)) logp has its gradient; it is
    all but logp. adv_C is r - V*, and the log-ratio is the sum over the completion.
    """
    segment_C = prepared.row.segment_C
    return 2 * beta * (adv_C - beta * segment_sum(logp_C - prepared.ref_logp_C, segment_C)[segment_C])


def soft_value(reward_NK: Tensor, beta: float) -> Tensor:
    """Estimate V*(x) = beta log mean exp(r / beta) over samples of the reference policy, [N].

    It is the value of the best policy under a KL of weight beta: the largest reward as beta goes to 0, the
    mean as it grows. Samples without a reward, nan, are left out; a prompt without any reward has nan.
    """
    count_N = (~reward_NK.isnan()).to(reward_NK.dtype).sum(dim=1)
    scaled_NK = (reward_NK / beta).nan_to_num(nan=-torch.inf)
    return beta * (torch.logsumexp(scaled_NK, dim=1) - count_N.log())


def estimate_table(
    sampler: Sampler,
    prompts: list[Prompt],
    settings: SoftValue,
    folder: Path,
    sampled: bool
) -> dict[str, float]:
    """Estimate V* of all prompts, by id, by the initial policy, which the engine holds.

    Rewards are appended to soft_values.jsonl, so that an interrupted run samples only missing prompts. After
    the first step all were `sampled`, and are only read. Raises ConfigError if some are missing then. Seeds
    are of no epoch.
    """
    path = folder / runfolder.SOFT_VALUES
    rewards = {line["id"]: line["rewards"] for line in dist.on_first(mend_log, path)}
    missing = [prompt for prompt in prompts if prompt.id not in rewards]
    if missing and sampled:
        raise ConfigError(
            f"{path} lacks {len(missing)} of {len(prompts)} prompts, which only the initial policy can be "
            "asked for; restore the file, or begin another run with --set out=...")
    chunk = max(1, ROUNDS_A_WRITE * sampler.sampling.slots * dist.world_size() // settings.samples)
    for start in range(0, len(missing), chunk):
        dist.say(f"soft values: {len(rewards)} of {len(prompts)} prompts")
        draws = [PromptDraw(prompt, epoch=-1) for prompt in missing[start:start + chunk]]
        own = sampler.score(sampler.rollout(draws, range(settings.samples))).total_NG.tolist()
        newest = {draw.prompt.id: reward_K for draw, reward_K in zip(draws, own, strict=True)}
        rewards |= newest
        if dist.is_first():
            append(path, *({"id": id, "rewards": reward_K} for id, reward_K in newest.items()))
    reward_NK = torch.tensor([rewards[prompt.id] for prompt in prompts], dtype=torch.float64)
    value_N = soft_value(reward_NK, settings.beta).tolist()
    values = {prompt.id: value for prompt, value in zip(prompts, value_N, strict=True)}
    if unknown := [id for id, value in values.items() if math.isnan(value)]:
        raise ConfigError(
            f"advantage.kind=soft_value: no sample of {len(unknown)} prompts has a reward, {unknown[0]} "
            "among them; leave them out, or set another advantage.kind")
    return values
