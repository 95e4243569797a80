"""Learn from a frozen teacher that reads the completions of the policy, its student: on-policy distillation.

The advantage of a token is A_t = log pi_teacher(o_t) - log pi_student(o_t), with the log-prob of the student
that sampled it. At a state that the student has reached, the mean of A_t grad log pi over its own tokens is
minus the gradient of KL(student, teacher) there: on-policy distillation (arXiv:2306.13649) by reverse KL, as
a policy gradient (Thinking Machines, 2025). How a token changes later states is left out.

The teacher is the larger model, so completions are drawn before it reads them (prune.completions), by sizes
that only need the student's log-probs, and again before the student's update (teacher.keep), by the norms of
gradients that the advantages, now known, let us guess. Weights multiply, so the mean over both draws is the
full gradient.

Dimension key:  N groups,  G completions per group,  S completions of one row,  C completion tokens of it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advantage import group_norm
from config import Config, ConfigError, Data
from data import Tokenizer
from infra import dist
from infra.weights import check_positions, find_model, weight_files
from learner import Learner, load_sharded
from leaves.distill.settings import Distill
from metrics import Clock
from model import Decoder
from pack import Minibatch
from policy import Weights, hash_weights
from prune import LEAST_SURPRISE, SIZE_FLOOR, fewest, pps, predicted_error
from records import Group, Metrics, PreparedRow, Rewards, Rolled

COLUMNS = ("adv_C", "ref_logp_C", "old_logp_C", "factor_C")  # of a prepared row


def inputs(cfg: Config, hashes: dict[str, str]) -> dict[str, str]:
    """Identify the teacher's weights."""
    files = weight_files(find_model(cfg.teacher.path, setting="teacher.path"))
    return hashes | {"teacher.path (weights)": hash_weights(files)}


def require_same_tokens(student: Tokenizer, source: Path) -> None:
    """Raise ConfigError for the first token of the student that is another one of the teacher."""
    teacher = Tokenizer(source, Data(train="", eval=None, prompt="{question}"))
    known, own = teacher.rust.get_vocab(), student.rust.get_vocab()
    for text in sorted(own, key=own.get):
        if known.get(text) != own[text]:
            raise ConfigError(
                f"teacher.path={source} needs the token ids of the student: token {own[text]}, {text!r}, is "
                f"{known.get(text, 'none')} there; take a teacher of the student's family")


def parts(cfg: Config, run: Any) -> Any:
    """Load the teacher, spread over the ranks, and let it give the advantages."""
    learner, source = run.learner, find_model(cfg.teacher.path, setting="teacher.path")
    require_same_tokens(run.task.tokenizer, source)
    check_positions(source, cfg.longest, "data.max_prompt_tokens and rollout.max_new_tokens")
    model = load_sharded(cfg, source, learner.device, learner.dtype, Weights(), frozen=True)
    known, own = model.shape.vocab_size, learner.policy.shape.vocab_size
    if known < own:
        raise ConfigError(f"teacher.path={source} has {known} embeddings and must have the student's {own}, "
                          "padding included: take another teacher, or pad it")
    teacher = Teacher(model, cfg)
    return replace(
        run,
        learner=replace(learner, before_update=(*learner.before_update, teacher.advise)),
        advantage=guess_size,
        after_update=(*run.after_update, teacher.measure))


def guess_size(groups: list[Group], rewards: Rewards, settings: Distill) -> Tensor:
    """Compute the advantages that pruning reads before the teacher, [N, G]: 1, which stands for the
    teacher's, and the known size of the rewards'. Any size above 0 leaves the estimate unbiased."""
    return 1 + settings.reward * group_norm(rewards.total_NG, 1, 1e-4).abs()


class Teacher:
    """The teacher, and sums over the rows that it has read on this rank in a step."""

    def __init__(self, model: Decoder, cfg: Config):
        self.model, self.settings, self.second = model, cfg.advantage, cfg.teacher
        self.clock, self.sums = Clock(), Counter()

    @torch.no_grad()
    def advise(self, learner: Learner, minibatch: Minibatch, prepared: list[PreparedRow],
               ) -> list[PreparedRow]:
        """Put the advantages of all tokens into prepared rows, and draw those that the student passes."""
        own_NG = self.settings.reward * group_norm(minibatch.reward_NG, 1, 1e-4)
        bound, changed = self.settings.bound or torch.inf, []
        with self.clock.phase("teacher"):
            for given in prepared:
                row = given.row
                gap_C = learner.log_probs(self.model, row) - row.sampled_logp_C
                self.sums.update(read=row.counts * len(row.ids_T), scored=row.counts * len(gap_C),
                                 weight=row.weight_C.sum(), gap=(row.weight_C * gap_C).sum())
                own_C = row.of_members(own_NG)[row.segment_C]
                changed.append(replace(given, adv_C=gap_C.clamp(-bound, bound) + own_C))
        drawn = prepared and (self.second.keep or self.second.error)
        return self.draw(learner, minibatch, changed) if drawn else changed

    def draw(self, learner: Learner, minibatch: Minibatch, prepared: list[PreparedRow]
             ) -> list[PreparedRow]:
        """Draw completions by the sizes of their gradients, and pack those that are kept anew. Collective."""
        names = [name for name in COLUMNS if getattr(prepared[0], name) is not None]
        pieces = dict(dist.gather([
            piece for given in prepared if given.row.counts for piece in pieces_of(given, names)]))
        read_NG, size_NG = minibatch.keep_NG, torch.zeros_like(minibatch.weight_NG)
        for place, piece in pieces.items():
            size_NG[place] = piece[0].norm()
        if not size_NG.isfinite().all():
            return prepared  # their loss is not finite either
        # No weight makes up for a candidate that is never kept, and the loss may have a KL.
        size_NG = size_NG.clamp(min=SIZE_FLOOR * size_NG[read_NG].mean() + 1e-30) * read_NG
        size_K = size_NG.flatten()
        keep = self.second.keep or fewest(size_K, size_K, self.second.error) / len(size_NG)
        drawn = pps(size_NG, torch.arange(len(size_K)), keep, "batch", minibatch.seed)
        self.sums.update(draws=1, error=predicted_error(size_K, drawn.prob_NG.flatten()))
        left = replace(minibatch, keep_NG=drawn.keep_NG, weight_NG=minibatch.weight_NG * drawn.weight_NG)
        values = [(row, torch.cat([pieces[place][1:] for place in row.members], dim=1).to(row.weight_C))
                  for row in learner.rows(left)]
        return [PreparedRow(row, **dict(zip(names, x_XC, strict=True))) for row, x_XC in values]

    def measure(self, learner: Learner, rolled: Rolled, step: int, clock: Clock) -> Metrics:
        """Compute the step's metrics, and begin the next step's. Collective."""
        total = dist.sum_over_ranks(self.sums)
        self.sums.clear()
        if not total:
            return {}
        offered = sum(sample.trained for group in rolled.groups for sample in group.samples if group.offered)
        drawn = {"teacher/error": total["error"] / total["draws"]} if "draws" in total else {}
        return drawn | {"teacher/tokens": int(total["read"]), "teacher/share": total["scored"] / offered,
                "teacher/kl": -total["gap"] / total["weight"],
                "time/teacher": self.clock.seconds.pop("teacher")}


def pieces_of(given: PreparedRow, names: list[str]) -> Iterator[tuple]:
    """Take a prepared row apart: of each completion its place in the mini-batch, and the sizes of its tokens'
    gradients above their values of these names, [1 + X, tokens], on the CPU."""
    row = given.row
    size_C = row.weight_C * given.adv_C * (1 - row.sampled_logp_C.exp()).clamp(min=LEAST_SURPRISE)
    values_XC = torch.stack([size_C, *(getattr(given, name) for name in names)]).cpu()
    parts = values_XC.split(row.segment_C.bincount().tolist(), dim=1)
    return zip(row.members, map(Tensor.clone, parts), strict=True)  # a view would send all of the row
