"""What a step reports. Sums and counts are added up over rows and ranks first; means are computed last.

Dimension key:  N groups,  G completions per group,  C completion tokens of one packed row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

import dist
from pack import Row
from prune import Pruned
from sample import Group


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


def of_rollout(groups: list[Group], reward_NG: Tensor, parts: dict[str, Tensor], adv_NG: Tensor,
               pruned: Pruned) -> dict[str, float]:
    """Metrics of records that every rank holds."""
    samples = [s for group in groups for s in group.samples]
    tokens = sum(len(s.ids) for s in samples)
    weight_NG = pruned.weight_NG
    return {
        "reward/mean": reward_NG.mean().item(),
        "reward/std": reward_NG.std(correction=0).item(),
        **{f"reward/{name}": part_NG.mean().item() for name, part_NG in parts.items()},
        "rollout/tokens": tokens,
        "rollout/length": tokens / len(samples),
        "rollout/truncated": sum(not s.finished for s in samples) / len(samples),
        "rollout/entropy": -sum(sum(s.logp) for s in samples) / tokens,
        "advantage/flat_groups": (adv_NG == 0).all(dim=1).double().mean().item(),
        "prune/offered": pruned.keep_NG.numel(),
        "prune/kept": int(pruned.keep_NG.sum()),
        "prune/weight_max": weight_NG.max().item(),
        "prune/ess": (weight_NG.sum() ** 2 / weight_NG.square().sum()).item(),
    }


class PassSums:
    """Sums over the rows that this rank passed through the policy in one step."""

    NAMES = ("loss", "tokens", "seen", "clipped", "k3", "packed", "rows", "corrected", "masked",
             "compared", "mismatch", "engine_kl", "ratio", "ratio_squared")

    def __init__(self):
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
            self.sums["corrected"] += correction_C[on_C].sum()
            self.sums["masked"] += (on_C & (correction_C == 0)).sum()
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
        tokens, seen, compared = (max(total[name], 1) for name in ("tokens", "seen", "compared"))
        return {
            "train/loss": total["loss"] / updates,
            "train/tokens": int(total["tokens"]),
            "train/clipped": total["clipped"] / seen,
            "train/kl": total["k3"] / seen,
            "mismatch/logp_abs_mean": total["mismatch"] / compared,
            "mismatch/logp_abs_max": dist.max_over_ranks(float(self.mismatch_max)),
            "mismatch/kl": total["engine_kl"] / compared,
            "mismatch/ess": total["ratio"] ** 2 / (compared * total["ratio_squared"]) if total["compared"] else 1.0,
            "mismatch/weight_mean": total["corrected"] / tokens,
            "mismatch/masked": total["masked"] / tokens,
            "pack/tokens": int(total["packed"]),
            "pack/rows": int(total["rows"]),
            "pack/density": total["packed"] / max(total["rows"] * capacity, 1),
        }
