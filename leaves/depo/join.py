"""Roll out only prompts of an estimated difficulty within a band, and draw others in their place: DEPO
(arXiv:2602.06375).

A small network that learns beside the policy guesses how often a prompt would be answered right. Losses,
band, warm-up and refilling follow the release (recipe/depo); its text encoder, a DistilBERT, is replaced by
the mean of the policy's initial input embeddings over the prompt, which costs no forward pass, and its head
by one hidden layer.

Biased: weights stay 1. Only prompts that are rolled out are measured, so the estimator learns from its own
selection, and a prompt outside the band may never come back. The release accepts that (explore 0).

Dimension key:  K prompts of the data,  M of them in one step,  D features,  H hidden.
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from history import PromptHistory
from infra import dist
from infra.terminal import to_stderr
from infra.weights import EMBEDDING, read_shape, read_weights
from records import Prompt, PromptDraw, Rolled

HIDDEN = 64        # H
INITIAL_STD = 1e-3     # deviation of the output weights at first, as released
DISTIL_WEIGHT = 0.5       # weight of the second loss, as in the authors' code
RANKING_WEIGHT = 3.0      # weight of the third loss; the release then divides it by its micro-batches (16)
RANKED_GAP = 0.05   # prompts with targets further apart are ranked
MARGIN = 0.5       # their logits should lie at least so far apart
CONFIDENCE_FLOOR = 1e-4   # confidences lie within it and 1 - it


def parts(cfg: Any, run: Any) -> Any:
    """Give a run a history that filters prompts."""
    return replace(run, history=FilteredHistory(run.history, run.task.source))


def mean_embeddings(source: Path, prompts: list[Prompt]) -> Tensor:
    """Average the initial input embeddings over each prompt, standardised over the prompts, [K, D]."""
    embedding_VD = read_weights(source, read_shape(source).tied, whole=False)[EMBEDDING][:]
    feature_KD = torch.stack([embedding_VD[list(prompt.ids)].float().mean(dim=0) for prompt in prompts])
    std_D = feature_KD.std(dim=0, correction=0)
    return (feature_KD - feature_KD.mean(dim=0)) / torch.where(std_D > 0, std_D, 1.0)


def estimator_loss(logit_M2: Tensor, right_M: Tensor, confidence_M: Tensor) -> Tensor:
    """Compute the release's loss from the two logits of each prompt, of its score and of its confidence.

    Args:    right_M       share of right answers in its group
             confidence_M  exp of the mean over its completions of the mean log-prob of a token
    Returns: cross entropies with both, and a hinge on the scores of prompts with different shares.
    """
    score_M, distilled_M = logit_M2.unbind(dim=1)
    confidence_M = confidence_M.clamp(CONFIDENCE_FLOOR, 1 - CONFIDENCE_FLOOR)
    loss = cross_entropy(score_M, right_M) + DISTIL_WEIGHT * cross_entropy(distilled_M, confidence_M)
    above_MM = right_M[:, None] > right_M[None, :] + RANKED_GAP
    if not above_MM.any():
        return loss
    ahead_MM = score_M[:, None] - score_M[None, :]
    return loss + RANKING_WEIGHT * (MARGIN - ahead_MM).relu()[above_MM].mean()


def make_head(features: int, seed: int) -> nn.Sequential:
    """Make the estimator, in float64, from features to the logits of score and confidence."""
    head = nn.Sequential(nn.Linear(features, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 2)).double()
    generator = torch.Generator().manual_seed(dist.seed_for(seed, "depo"))
    for layer, deviation in ((head[0], features ** -0.5), (head[2], INITIAL_STD)):
        nn.init.normal_(layer.weight, std=deviation, generator=generator)
        nn.init.zeros_(layer.bias)
    return head


class FilteredHistory(PromptHistory):
    """The history of prompts; only prompts within the band are rolled out.

    Every rank trains the estimator, on records that all of them hold.
    """

    def __init__(self, history: PromptHistory, source: Path):
        vars(self).update(vars(history))
        self.steps = 0    # done
        self.outside = 0  # prompts in a row that were outside the band
        self.feature_KD = mean_embeddings(source, self.prompts)
        self.head = make_head(self.feature_KD.shape[1], self.seed)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=self.pruning.lr)
        self.trained = {"head": self.head, "optimizer": self.optimizer}

    def draw(self, count: int) -> list[PromptDraw]:
        """Draw until `count` prompts are kept.

        Once as many prompts in a row as there are were outside the band, others are taken as they come, so
        that a run goes on when its problems have become easy.
        """
        self.outside = 0
        draws = super().draw(count)
        if self.outside >= self.per_epoch and dist.is_first():
            to_stderr(
                f"step {self.steps + 1}: the estimates of {self.outside} prompts in a row lie outside "
                f"prune.prompts.low={self.pruning.low} to high={self.pruning.high}; others are taken as they "
                "come")
        return draws

    def rollout_prob(self, numbers: list[int]) -> Tensor:
        """Compute each prompt's probability of a rollout, [K]: 1 within the band, and `explore` outside."""
        everyone = torch.ones(len(numbers), dtype=torch.float64)
        if self.steps < self.pruning.warmup_steps or self.outside >= self.per_epoch:
            return everyone
        # All ranks take rank 0's estimates: machines round differently, and all must keep the same prompts.
        estimate_K = dist.on_first(self.estimates, numbers)
        outside_K = (estimate_K < self.pruning.low) | (estimate_K > self.pruning.high)
        for outside in outside_K.tolist():
            self.outside = self.outside + 1 if outside else 0
        return everyone.masked_fill(outside_K, self.pruning.explore)

    @torch.no_grad()
    def estimates(self, numbers: list[int]) -> Tensor:
        """Estimate how often each prompt would be answered right, [K]."""
        return self.logits(numbers)[:, 0].sigmoid()

    def logits(self, numbers: list[int]) -> Tensor:
        return self.head(self.feature_KD[numbers].double())

    def adapt(self, rolled: Rolled) -> None:
        """Take the estimator's one step of this step, on the prompts that were rolled out and graded."""
        self.steps += 1
        kept, right_N = rolled.kept, rolled.rewards.components["accuracy"].nanmean(dim=1)
        graded = (~right_N.isnan()).nonzero()[:, 0].tolist()
        numbers, right_M = [kept[n].number for n in graded], right_N[graded]
        if numbers:
            confidences = [[sum(sample.logp) / sample.own for sample in rolled.groups[n].samples]
                           for n in graded]
            confidence_M = torch.tensor(confidences, dtype=torch.float64).mean(dim=1).exp()
            estimator_loss(self.logits(numbers), right_M, confidence_M).backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict:
        own = {name: part.state_dict() for name, part in self.trained.items()}
        return super().state() | deepcopy({"steps": self.steps} | own)

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.steps = state["steps"]
        for name, part in self.trained.items():
            part.load_state_dict(state[name])
