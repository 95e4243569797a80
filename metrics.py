"""Compute a step's metrics. Sums and counts are added up over rows and ranks first; means are computed last.

Dimension key:  N groups,  G completions per group,  C completion tokens of one packed row.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from time import perf_counter

import torch
from torch import Tensor

from advantage import flat_groups, has_comparison
from config import Pack
from infra import dist
from infra.device import used_bytes
from loss import RowLoss
from pack import row_cost
from records import Batch, Metrics, PreparedRow, Rolled, pending, plain

Decode = Callable[[Iterable[int], bool], str]  # decode(token ids, keep special tokens) -> text


@dataclass(slots=True)
class Clock:
    """Seconds by phase of one step. A phase waits for CUDA, so it pays for the work that it launched."""

    seconds: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        if torch.cuda.is_initialized():  # else a CPU run would open the device
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def metrics(self) -> Metrics:
        """Return the seconds of each phase, and of the step so far."""
        phases = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return phases | {"time/step": perf_counter() - self.start}


def rollout_metrics(rolled: Rolled, batch: Batch) -> Metrics:
    """Compute the metrics of rollout and pruning, from records that every rank holds. A mean over zero items
    is omitted."""
    reward_NG = rolled.rewards.total_NG
    weight_NG = batch.pruned.weight_NG
    samples = [s for group in rolled.groups for s in group.samples]
    ended = [s for s in samples if not s.pending]
    tokens = sum(s.fresh for s in samples)
    ended_NG = ~pending(rolled.groups, reward_NG.shape[1])
    metrics = {
        "rollout/rounds": len(rolled.sizes),
        "rollout/prompts": sum(draw.age == 0 for draw in rolled.kept),
        "rollout/tokens": tokens,
        "rollout/pending": len(samples) - len(ended),
        "rollout/unscored": int((reward_NG.isnan() & ended_NG).sum()),
        "prune/skipped": len(rolled.draws) - len(rolled.groups),
        "prune/offered": batch.offered * weight_NG.shape[1] - int(batch.reward_NG.isnan().sum()),
        "prune/kept": int(batch.pruned.keep_NG.sum()),
        "prune/weight_max": max(weight_NG.flatten().tolist(), default=0.0),
        "prune/ess": (weight_NG.sum() ** 2 / weight_NG.square().sum()).nan_to_num().item()
    }
    if batch.error is not None:
        metrics["prune/error"] = batch.error
    if tokens:
        metrics["rollout/entropy"] = -sum(sum(s.logp[s.fresh_from:]) for s in samples) / tokens
    comparable_N = has_comparison(reward_NG)
    if comparable_N.any() and reward_NG.shape[1] > 1:
        metrics["advantage/flat_groups"] = flat_groups(reward_NG[comparable_N]).double().mean().item()
    if not ended:
        return metrics
    components = rolled.rewards.components | {"mean": reward_NG}
    for name, value_NG in components.items():
        value = value_NG[ended_NG].nanmean().item()
        if not math.isnan(value):
            metrics[f"reward/{name}"] = value
    if "reward/mean" in metrics:
        metrics["reward/std"] = reward_NG[ended_NG & ~reward_NG.isnan()].std(correction=0).item()
    metrics["rollout/length"] = fmean(s.own for s in ended)
    metrics["rollout/truncated"] = fmean(not s.finished for s in ended)
    return metrics


def list_decisions(rolled: Rolled, batch: Batch) -> dict:
    """List the prompts and completions offered and kept, with probability and weight: enough to compute the
    gradient again from the step's rollouts, which are a function of prompt, epoch and policy.

    {"seed", "offered", "rounds": number of groups in each round, "prompts": [...]}, each prompt with "id",
    "epoch", "prob", "weight", and what a leaf's draw has `noted`.
    A prompt that was rolled out also has "tokens", a hash of its completions, and "right": [G] of 1, 0, or
    null for a pending completion; without gold answers "reward": [G] instead. A prompt that is trained on
    has "place", its index among the prompts offered, "completion_prob": [G] and "completion_weight": [G].
    Both cover the two levels of pruning together; the weight of a dropped completion is 0. With prune.tokens,
    "completion_tokens" counts its tokens before the cut.
    """
    trained = {}
    pruned = batch.pruned
    for n, draw in enumerate(batch.draws):
        trained[draw] = {
            "place": batch.places[n],
            "completion_prob": pruned.prob_NG[n].tolist(),
            "completion_weight": pruned.weight_NG[n].tolist()
        }
        if batch.tokens:
            trained[draw]["completion_tokens"] = list(map(len, batch.tokens[n]))
    name, value_NG = "reward", rolled.rewards.total_NG
    if "accuracy" in rolled.rewards.components:
        name, value_NG = "right", (rolled.rewards.components["accuracy"] == 1).int()
    rolled_out = zip(rolled.groups, value_NG.tolist(), strict=True)
    prompts = []
    for draw in rolled.draws:
        line = {"id": draw.prompt.id, "epoch": draw.epoch, "prob": draw.prob, "weight": draw.weight}
        line |= draw.noted
        if draw.kept:
            group, values = next(rolled_out)
            line[name] = [None if s.pending or math.isnan(value) else value
                          for s, value in zip(group.samples, values, strict=True)]
            tokens = b"/".join(s.ids.tobytes() for s in group.samples)
            line["tokens"] = hashlib.sha256(tokens).hexdigest()[:16]
        prompts.append(line | trained.get(draw, {}))
    return {"seed": batch.seed, "offered": batch.offered, "rounds": rolled.sizes, "prompts": prompts}


def sample_lines(rolled: Rolled, batch: Batch, decode: Decode, count: int) -> list[dict]:
    """Write the first groups of ended completions as lines of samples.jsonl."""
    trained = {id(group): n for n, group in enumerate(batch.groups)}
    lines = []
    for n, group in enumerate(rolled.groups):
        if len(lines) < count and not any(sample.pending for sample in group.samples):
            completions = list(describe_completions(rolled, n, batch, trained.get(id(group)), decode))
            lines.append({"id": group.prompt.id, "prompt": decode(group.prompt.ids, True),
                          "gold": group.prompt.answer, "completions": completions})
    return lines


def describe_completions(rolled: Rolled, n: int, batch: Batch, place: int | None, decode: Decode,
                         ) -> Iterator[dict]:
    """Yield the completions of the n-th group, which is trained on at `place` of the batch; None: not at all.

    The advantage comes from the rewards, before a critic or a reference changes it. A completion that is
    trained on has its advantage there: PODS compares only the completions kept.
    """
    pruned, components = batch.pruned, rolled.rewards.components

    def drawn(x_NG):
        return None if place is None or x_NG is None else x_NG[place, g].item()

    for g, sample in enumerate(rolled.groups[n].samples):
        kept = bool(drawn(pruned.keep_NG))
        trained = 0
        turns = [decode(sample.ids[start:to], True) for start, to in sample.turns]
        if drawn(batch.trained_NG):
            trained = len(batch.tokens[place][g]) if batch.tokens else sample.trained
        yield {
            "text": decode(sample.ids, True),
            "tokens": sample.own,
            "finished": sample.finished,
            "reward": plain(rolled.rewards.total_NG[n, g]),
            "components": {name: plain(value_NG[n, g]) for name, value_NG in components.items()},
            "advantage": plain(batch.adv_NG[place, g] if kept else rolled.adv_NG[n, g]),
            "kept": kept,
            "trained": trained,
            "size": drawn(pruned.size_NG),
            "prob": drawn(pruned.prob_NG),
            "weight": drawn(pruned.weight_NG) or 0.0
        } | ({"turns": turns} if len(turns) > 1 else {})


# By line: of all passes, of the first pass of each row, and of tokens with a log-prob before the update.
SUMS = """
    loss passed clipped k3
    rows tokens packed cost factor masked
    compared mismatch ratio ratio_squared
""".split()


@dataclass(slots=True)
class PassSums:
    """Sums over the rows that this rank passed through the policy in one step."""

    pack: Pack
    quadratic: float = 0.0  # for pack.row_cost
    sums: dict[str, Tensor | float] = field(default_factory=partial(dict.fromkeys, SUMS, 0.0))
    mismatch_max: Tensor | float = 0.0

    def add(self, prepared: PreparedRow, terms: RowLoss, first_pass: bool) -> None:
        """Add one row in one pass. A row that only keeps its rank in step is not counted."""
        row = prepared.row
        sums = self.sums
        sums["loss"] += terms.loss
        if first_pass:
            sums["rows"] += 1
        if not row.counts:
            return
        sums["passed"] += len(row.target_C)  # once for each pass
        sums["clipped"] += (terms.f_C == 0).sum()
        if terms.k3_C is not None:
            sums["k3"] += terms.k3_C.sum()
        if first_pass:
            sums["tokens"] += len(row.target_C)
            sums["packed"] += len(row.ids_T)
            sums["cost"] += row_cost(row.segments.queries, row.segments.keys, self.quadratic)
            sums["factor"] += terms.factor_C.sum()
            sums["masked"] += (terms.factor_C == 0).sum()
        if first_pass and prepared.old_logp_C is not None:
            # log pi_trainer - log pi_engine of tokens that the engine drew
            gap_C = (prepared.old_logp_C - row.sampled_logp_C).double()
            sums["compared"] += len(gap_C)
            sums["mismatch"] += gap_C.abs().sum()
            sums["ratio"] += gap_C.exp().sum()
            sums["ratio_squared"] += (2 * gap_C).exp().sum()
            self.mismatch_max = gap_C.abs().max().clamp(min=self.mismatch_max)

    def metrics(self, updates: int) -> Metrics:
        """Compute means over all ranks and `updates` optimizer steps. Collective: once per step."""
        total = dist.sum_over_ranks(self.sums)
        highest_cost = dist.max_over_ranks(self.sums["cost"])
        highest_mismatch = dist.max_over_ranks(float(self.mismatch_max))
        tokens = max(total["tokens"], 1)
        passed = max(total["passed"], 1)
        compared = max(total["compared"], 1)
        ess, imbalance = 1.0, 0.0
        if total["compared"]:
            ess = total["ratio"] ** 2 / (compared * total["ratio_squared"])
        if total["cost"]:
            imbalance = highest_cost * dist.world_size() / total["cost"] - 1
        return {
            "train/loss": total["loss"] / updates,
            "train/tokens": int(total["tokens"]),
            "train/clipped": total["clipped"] / passed,
            "train/kl": total["k3"] / passed,
            "mismatch/logp_abs_mean": total["mismatch"] / compared,
            "mismatch/logp_abs_max": highest_mismatch,
            "mismatch/ess": ess,
            "mismatch/weight_mean": total["factor"] / tokens,
            "mismatch/masked": total["masked"] / tokens,
            "pack/tokens": int(total["packed"]),
            "pack/rows": int(total["rows"]),
            "pack/density": total["packed"] / max(total["rows"] * self.pack.capacity, 1),
            "pack/imbalance": imbalance
        }


# ---- memory in use

def memory_metrics(device: torch.device, engine: object) -> Metrics:
    """Measure the most memory of a GPU, or else of a process, that was in use so far. Collective."""
    held = max(used_bytes(device), getattr(engine, "peak_bytes", 0))
    return {"memory/peak_gib": dist.max_over_ranks(held) / 2**30}
