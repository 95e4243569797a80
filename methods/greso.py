"""Skip prompts whose groups were flat, all easy or all hard, and draw others in their place: GRESO
(arXiv:2506.02177).

Dimension key:  K prompts that come up.
"""

import torch
from torch import Tensor


def explored(easy_K: Tensor, hard_K: Tensor, explore: tuple[float, float]) -> Tensor:
    """Compute each prompt's probability of a rollout, [K]: max(p^z, 0.01) after z rollouts in a row that were
    all easy, or all hard; p, in `explore`, differs for the two. Biased on purpose: every weight stays 1.
    """
    easy, hard = explore
    return torch.where(easy_K > 0, easy ** easy_K, hard ** hard_K).clamp(min=0.01)


def adapt_p(explore: tuple[float, float], easy: float, hard: float, target: float) -> tuple[float, float]:
    """Move GRESO's p for easy and for hard prompts by the fractions of a step's prompts that were easy and
    hard: 0.01 down where a fraction has reached its limit, a third of `target` for easy prompts and two
    thirds for hard ones, else 0.01 up.
    """
    def moved(p: float, fraction: float, limit: float) -> float:
        return min(max(p - 0.01 if fraction >= limit else p + 0.01, 0.05), 0.95)

    return moved(explore[0], easy, target / 3), moved(explore[1], hard, target * 2 / 3)


def next_round(missing: int, flat_share: float, largest: int) -> tuple[int, bool]:
    """Size GRESO's next round for `missing` informative groups when `flat_share` of the last round's groups
    were flat: a number of prompts within [largest / 6, largest] as released, and whether it is estimated to
    be enough.
    """
    estimate = 1.25 * missing / (1 - flat_share) if flat_share < 1 else float("inf")
    return max(int(min(estimate, largest)), largest // 6, 1), estimate <= largest
