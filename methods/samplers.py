"""Replace a run's history of prompts or its sampler as its method needs; the loop stays the same."""

from pathlib import Path

from collect import Sampler
from config import Config
from history import PromptHistory
from methods import depo, drafts, optpo, window


def choose_sampler(
    cfg: Config,
    source: Path,
    history: PromptHistory,
    sampler: Sampler,
) -> tuple[PromptHistory, Sampler | optpo.VotingSampler | window.WindowSampler]:
    """Choose the history and the sampler of a run by its config; `source` is the folder of the model."""
    if cfg.prune.prompts.kind == "depo":
        history = depo.FilteredHistory(history, source)
    if cfg.rollout.drafts:
        history = drafts.DraftHistory(history)
    if cfg.labels.kind == "votes":
        sampler = optpo.VotingSampler(sampler, cfg.labels)
    if cfg.rollout.window or cfg.rollout.max_age:
        history = window.Pool(history, cfg.rollout)
        sampler = window.WindowSampler(sampler, history)
    return history, sampler
