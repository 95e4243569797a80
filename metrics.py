"""What a step reports. Sums and counts are added up over rows and ranks first; means are computed last.

Dimension key:  N groups,  G completions per group,  C completion tokens of one packed row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

import dist
from advantage import flat
from pack import Row, cost
from sample import Batch, Rolled, pending


class Clock:
    """Seconds by phase of one step. CUDA is waited for, so a phase is charged with the work that it launched."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.begun = perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = perf_counter()
        yield
        if torch.cuda.is_initialized():  # else a CPU run would open the device
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": s for name, s in self.seconds.items()} | {"time/step": perf_counter() - self.begun}


def of_rollout(rolled: Rolled, batch: Batch) -> dict[str, float]:
    """Metrics of records that every rank holds. Where nothing was rolled out, no mean of it is given."""
    samples = [s for group in rolled.groups for s in group.samples]
    done = [s for s in samples if not s.pending]
    done_NG = ~pending(rolled.groups, rolled.reward_NG.shape[1])
    tokens = sum(s.fresh for s in samples)
    weight_NG = batch.pruned.weight_NG
    counts = {
        "rollout/rounds": rolled.rounds,
        "rollout/prompts": len(rolled.groups),
        "rollout/tokens": tokens,
        "rollout/pending": len(samples) - len(done),
        "prune/skipped": len(rolled.turns) - len(rolled.groups),
        "prune/offered": batch.offered * weight_NG.shape[1],
        "prune/kept": int(batch.pruned.keep_NG.sum()),
        "prune/weight_max": weight_NG.max().item() if weight_NG.numel() else 0.0,
        "prune/ess": (weight_NG.sum() ** 2 / weight_NG.square().sum()).item() if weight_NG.any() else 0.0,
    }
    if samples:
        counts["rollout/entropy"] = -sum(s.logp_sum for s in samples) / tokens
    if samples and rolled.reward_NG.shape[1] > 1:
        counts["advantage/flat_groups"] = flat(rolled.reward_NG).double().mean().item()
    return counts if not done else counts | {
        "reward/mean": rolled.reward_NG[done_NG].mean().item(),
        "reward/std": rolled.reward_NG[done_NG].std(correction=0).item(),
        **{f"reward/{name}": part_NG[done_NG].mean().item() for name, part_NG in rolled.parts.items()},
        "rollout/length": sum(s.length for s in done) / len(done),
        "rollout/truncated": sum(not s.finished for s in done) / len(done),
    }


def decisions(rolled: Rolled, batch: Batch) -> dict:
    """What was offered and kept, with which probability and weight: with the step's rollouts, which are a function of
    prompt, epoch and policy, enough to compute its gradient again.

    {"seed", "offered", "prompts": [{"id", "epoch", "prob", "weight"; of a prompt that is trained on also "slot": which
    of those offered it is, "completion_prob": [G], "completion_weight": [G]}]}; a completion's are those of both levels
    together, and its weight is 0 where it is dropped. "copy" is Turn.copy, where it is not 0.
    """
    trained = {(turn.epoch, turn.prompt.id, turn.copy): {
        "slot": slot, "completion_prob": prob_G.tolist(), "completion_weight": weight_G.tolist()}
        for turn, slot, prob_G, weight_G in zip(
            batch.turns, batch.slots, batch.pruned.prob_NG, batch.pruned.weight_NG, strict=True)}
    prompts = [{"id": turn.prompt.id, "epoch": turn.epoch, "prob": turn.prob, "weight": turn.weight}
               | ({"copy": turn.copy} if turn.copy else {})
               | trained.get((turn.epoch, turn.prompt.id, turn.copy), {}) for turn in rolled.turns]
    return {"seed": batch.seed, "offered": batch.offered, "prompts": prompts}


class PassSums:
    """Sums over the rows that this rank passed through the policy in one step."""

    NAMES = ("loss", "tokens", "seen", "clipped", "k3", "packed", "rows", "cost", "corrected", "masked",
             "compared", "mismatch", "engine_kl", "ratio", "ratio_squared", "probability")

    def __init__(self, quadratic: float = 0.0):
        self.quadratic = quadratic  # pack.cost
        self.sums: dict[str, Tensor | float] = dict.fromkeys(self.NAMES, 0.0)
        self.mismatch_max = torch.tensor(0.0)

    def add(self, row: Row, loss: Tensor, before_C: Tensor | None, correction_C: Tensor, f_C: Tensor,
            k3_C: Tensor | None, first_pass: bool) -> None:
        """One row in one pass. Tokens of weight 0 only keep the ranks in step, and are not counted.

        before_C      log-probs before the update, where they are known: what the engine's are compared with
        correction_C  loss.engine_weight
        """
        on_C = row.weight_C > 0
        self.sums["loss"] += loss
        self.sums["seen"] += on_C.sum()
        self.sums["clipped"] += (on_C & (f_C == 0)).sum()
        if k3_C is not None:
            self.sums["k3"] += k3_C[on_C].sum()
        if first_pass:
            self.sums["tokens"] += on_C.sum()
            self.sums["packed"] += len(row.ids_T) if on_C.any() else 0
            self.sums["rows"] += 1
            self.sums["cost"] += cost(row.offsets.diff().tolist(), self.quadratic)
            self.sums["corrected"] += correction_C[on_C].sum()
            self.sums["masked"] += (on_C & (correction_C == 0)).sum()
            self.sums["probability"] += row.sampled_logp_C[on_C].exp().sum()
            if before_C is not None:
                self.compare((before_C - row.sampled_logp_C)[on_C].double())

    def compare(self, gap_C: Tensor) -> None:
        """Add log pi_trainer - log pi_engine of tokens that the engine drew."""
        self.sums["compared"] += len(gap_C)
        self.sums["mismatch"] += gap_C.abs().sum()
        self.sums["engine_kl"] += (gap_C.exp() - gap_C - 1).sum()
        self.sums["ratio"] += gap_C.exp().sum()
        self.sums["ratio_squared"] += (2 * gap_C).exp().sum()
        if len(gap_C):
            self.mismatch_max = torch.maximum(self.mismatch_max.to(gap_C), gap_C.abs().max())

    def metrics(self, capacity: int, updates: int) -> dict[str, float]:
        """Collective: every rank calls it once per step, with the number of optimizer steps."""
        total = dist.sum_over_ranks({name: float(value) for name, value in self.sums.items()})
        most = dist.max_over_ranks(self.sums["cost"])
        tokens, seen, compared = (max(total[name], 1) for name in ("tokens", "seen", "compared"))
        return {
            "train/loss": total["loss"] / updates,
            "train/tokens": int(total["tokens"]),
            "train/clipped": total["clipped"] / seen,
            "train/kl": total["k3"] / seen,
            "train/probability": total["probability"] / tokens,
            "mismatch/logp_abs_mean": total["mismatch"] / compared,
            "mismatch/logp_abs_max": dist.max_over_ranks(float(self.mismatch_max)),
            "mismatch/kl": total["engine_kl"] / compared,
            "mismatch/ess": total["ratio"] ** 2 / (compared * total["ratio_squared"]) if total["compared"] else 1.0,
            "mismatch/weight_mean": total["corrected"] / tokens,
            "mismatch/masked": total["masked"] / tokens,
            "pack/tokens": int(total["packed"]),
            "pack/rows": int(total["rows"]),
            "pack/density": total["packed"] / max(total["rows"] * capacity, 1),
            "pack/imbalance": most * dist.world_size() / total["cost"] - 1 if total["cost"] else 0.0,
        }


class ValueSums:
    """Sums over the rows that this rank passed through the critic in one step."""

    NAMES = ("loss", "tokens", "reward", "reward_squared", "error", "error_squared")

    def __init__(self):
        self.sums: dict[str, Tensor | float] = dict.fromkeys(self.NAMES, 0.0)

    def add(self, loss: Tensor, value_C: Tensor, reward_C: Tensor, on_C: Tensor, first_pass: bool) -> None:
        """One row in one pass; tokens off only keep the ranks in step."""
        self.sums["loss"] += loss
        if first_pass:
            reward_C = reward_C[on_C].double()
            error_C = reward_C - value_C[on_C].double()
            self.sums["tokens"] += len(reward_C)
            for name, x_C in (("reward", reward_C), ("error", error_C)):
                self.sums[name] += x_C.sum()
                self.sums[f"{name}_squared"] += x_C.square().sum()

    def metrics(self, norms: list[float], rate: float) -> dict[str, float]:
        """Collective. No mean is given of a step without any token, nor a share of a variance that is 0."""
        total = dist.sum_over_ranks({name: float(value) for name, value in self.sums.items()})
        counts = {"critic/tokens": int(total["tokens"]), "critic/lr": rate}
        if not norms:
            return counts
        means = {name: value / total["tokens"] for name, value in total.items()}
        spread, left = (means[f"{name}_squared"] - means[name] ** 2 for name in ("reward", "error"))
        counts |= {"critic/loss": total["loss"] / len(norms), "critic/grad_norm": sum(norms) / len(norms),
                   "critic/value": means["reward"] - means["error"]}
        # Equal rewards leave a variance that is all rounding.
        return counts if spread <= 1e-12 * means["reward_squared"] else counts | {
            "critic/explained_variance": 1 - left / spread}
