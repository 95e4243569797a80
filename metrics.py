"""Compute a step's metrics. Sums and counts are added up over rows and ranks first; means are computed last.

Dimension key:  N groups,  G completions per group,  C completion tokens of one packed row.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from advantage import comparable, flat
from config import Pack
from infra import dist
from loss import RowLoss
from pack import cost
from records import Batch, Group, PreparedRow, Rolled, pending


@dataclass(slots=True)
class Clock:
    """Seconds by phase of one step. CUDA is waited for, so a phase pays for the work that it launched."""

    seconds: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        if torch.cuda.is_initialized():  # else a CPU run would open the device
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def metrics(self) -> dict[str, float]:
        phases = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return phases | {"time/step": perf_counter() - self.start}


def of_rollout(rolled: Rolled, batch: Batch) -> dict[str, float]:
    """Compute the metrics of records that every rank holds. Means of nothing are left out."""
    reward_NG, weight_NG = rolled.rewards.total_NG, batch.pruned.weight_NG
    samples = [s for group in rolled.groups for s in group.samples]
    ended = [s for s in samples if not s.pending]
    ended_NG = ~pending(rolled.groups, reward_NG.shape[1])
    tokens = sum(s.fresh for s in samples)
    counts = {
        "rollout/rounds": len(rolled.sizes),
        "rollout/prompts": len(rolled.groups),
        "rollout/tokens": tokens,
        "rollout/pending": len(samples) - len(ended),
        "rollout/unscored": int(reward_NG.isnan().sum()),
        "prune/skipped": len(rolled.turns) - len(rolled.groups),
        "prune/offered": batch.offered * weight_NG.shape[1] - int(batch.reward_NG.isnan().sum()),
        "prune/kept": int(batch.pruned.keep_NG.sum()),
        "prune/weight_max": weight_NG.max().item() if weight_NG.numel() else 0.0,
        "prune/ess": (weight_NG.sum() ** 2 / weight_NG.square().sum()).item() if weight_NG.any() else 0.0,
    }
    counts |= vote_metrics(rolled.groups)
    if samples:
        counts["rollout/entropy"] = -sum(sum(s.logp[s.start:]) for s in samples) / tokens
    if comparable(reward_NG).any() and reward_NG.shape[1] > 1:
        counts["advantage/flat_groups"] = flat(reward_NG[comparable(reward_NG)]).double().mean().item()
    if not ended:
        return counts
    components = rolled.rewards.components | {"mean": reward_NG}
    means = {f"reward/{name}": x_NG[ended_NG].nanmean().item() for name, x_NG in components.items()
             if not x_NG[ended_NG].isnan().all()}
    if "reward/mean" in means:
        means["reward/std"] = reward_NG[ended_NG & ~reward_NG.isnan()].std(correction=0).item()
    return counts | means | {
        "rollout/length": sum(s.length for s in ended) / len(ended),
        "rollout/truncated": sum(not s.finished for s in ended) / len(ended),
    }


def vote_metrics(groups: list[Group]) -> dict[str, float]:
    """Compute means over the groups of a step that were voted on, and the tokens of all completions that
    voted, which were all sampled; without votes nothing."""
    votes = [group.vote for group in groups if group.vote]
    if not votes:
        return {}
    means = {"votes/completions": [vote.completions for vote in votes],
             "votes/lead": [vote.lead for vote in votes],
             "votes/label_accuracy": [vote.label_right for vote in votes if vote.label_right is not None],
             "votes/accuracy": [vote.accuracy for vote in votes if vote.accuracy is not None]}
    return {"rollout/tokens": sum(vote.tokens for vote in votes),
            **{name: sum(values) / len(values) for name, values in means.items() if values}}


def decisions(rolled: Rolled, batch: Batch) -> dict:
    """List the prompts and completions offered and kept, with probability and weight: enough to compute the
    gradient again from the step's rollouts, which are a function of prompt, epoch and policy.

    {"seed", "offered", "rounds": groups of each, "prompts": [{"id", "epoch", "prob", "weight", "copy" where
    Turn's is not 0; of a prompt that was rolled out also "tokens": a hash of them, and "right": [G], 1, 0, or
    null of a completion that goes on, and without gold answers "reward": [G] instead; of one that is trained
    on "place": which of those offered it is, "completion_prob": [G], "completion_weight": [G]}]}; a
    completion's are those of both levels together, and its weight is 0 where it is dropped; with prune.tokens
    "completion_tokens" are those before its cut.
    """
    kept = zip(batch.turns, batch.places, batch.pruned.prob_NG, batch.pruned.weight_NG, strict=True)
    trained = {turn: {
        "place": place, "completion_prob": prob_G.tolist(), "completion_weight": weight_G.tolist()}
        for turn, place, prob_G, weight_G in kept}
    for turn, weights_G in zip(batch.turns, batch.tokens or (), strict=False):
        trained[turn]["completion_tokens"] = list(map(len, weights_G))
    name, value_NG = "reward", rolled.rewards.total_NG
    if "accuracy" in rolled.rewards.components:
        name, value_NG = "right", (rolled.rewards.components["accuracy"] == 1).int()
    prompts, values = [], zip(rolled.groups, value_NG.tolist(), strict=True)
    for turn in rolled.turns:
        line = {"id": turn.prompt.id, "epoch": turn.epoch, "prob": turn.prob, "weight": turn.weight}
        line |= {"copy": turn.copy} if turn.copy else {}
        if turn.kept:
            group, value_G = next(values)
            line[name] = [None if s.pending or math.isnan(value) else value
                          for s, value in zip(group.samples, value_G, strict=True)]
            tokens = b"/".join(s.ids.tobytes() for s in group.samples)
            line["tokens"] = hashlib.sha256(tokens).hexdigest()[:16]
        prompts.append(line | trained.get(turn, {}))
    return {"seed": batch.seed, "offered": batch.offered, "rounds": rolled.sizes, "prompts": prompts}


SUMS = ("loss", "tokens", "passed", "clipped", "k3", "packed", "rows", "room", "cost", "corrected", "masked",
        "compared", "mismatch", "engine_kl", "ratio", "ratio_squared", "probability")


@dataclass(slots=True)
class PassSums:
    """Sums over the rows that this rank passed through the policy in one step."""

    pack: Pack
    quadratic: float = 0.0  # of pack.cost
    sums: dict[str, Tensor | float] = field(default_factory=partial(dict.fromkeys, SUMS, 0.0))
    mismatch_max: Tensor | float = 0.0

    def add(self, prepared: PreparedRow, terms: RowLoss, first_pass: bool) -> None:
        """Add one row in one pass. A row that only keeps its rank in step is not counted."""
        row = prepared.row
        self.sums["loss"] += terms.loss
        self.sums["rows"] += first_pass
        self.sums["room"] += first_pass * self.pack.capacity
        if not row.counts:
            return
        self.sums["passed"] += len(row.target_C)  # once for each pass
        self.sums["clipped"] += (terms.f_C == 0).sum()
        if terms.k3_C is not None:
            self.sums["k3"] += terms.k3_C.sum()
        if first_pass:
            self.sums["tokens"] += len(row.target_C)
            self.sums["packed"] += len(row.ids_T)
            self.sums["cost"] += cost(row.segments.queries, row.segments.keys, self.quadratic)
            self.sums["corrected"] += terms.factor_C.sum()
            self.sums["masked"] += (terms.factor_C == 0).sum()
            self.sums["probability"] += row.sampled_logp_C.exp().sum()
        if first_pass and prepared.old_logp_C is not None:
            # log pi_trainer - log pi_engine of tokens that the engine drew
            gap_C = (prepared.old_logp_C - row.sampled_logp_C).double()
            self.sums["compared"] += len(gap_C)
            self.sums["mismatch"] += gap_C.abs().sum()
            self.sums["engine_kl"] += (gap_C.exp() - gap_C - 1).sum()
            self.sums["ratio"] += gap_C.exp().sum()
            self.sums["ratio_squared"] += (2 * gap_C).exp().sum()
            self.mismatch_max = gap_C.abs().max().clamp(min=self.mismatch_max)

    def metrics(self, updates: int) -> dict[str, float]:
        """Compute means over all ranks and `updates` optimizer steps. Collective: once per step."""
        total = dist.sum_over_ranks({name: float(value) for name, value in self.sums.items()})
        highest_cost = dist.max_over_ranks(self.sums["cost"])
        tokens, passed, compared = (max(total[name], 1) for name in ("tokens", "passed", "compared"))
        return {
            "train/loss": total["loss"] / updates,
            "train/tokens": int(total["tokens"]),
            "train/clipped": total["clipped"] / passed,
            "train/kl": total["k3"] / passed,
            "train/probability": total["probability"] / tokens,
            "mismatch/logp_abs_mean": total["mismatch"] / compared,
            "mismatch/logp_abs_max": dist.max_over_ranks(float(self.mismatch_max)),
            "mismatch/kl": total["engine_kl"] / compared,
            "mismatch/ess": (total["ratio"] ** 2 / (compared * total["ratio_squared"]) if total["compared"]
                             else 1.0),
            "mismatch/weight_mean": total["corrected"] / tokens,
            "mismatch/masked": total["masked"] / tokens,
            "pack/tokens": int(total["packed"]),
            "pack/rows": int(total["rows"]),
            "pack/density": total["packed"] / max(total["room"], 1),
            "pack/imbalance": highest_cost * dist.world_size() / total["cost"] - 1 if total["cost"] else 0.0,
        }
