"""Generalised advantages of a critic's values."""

import math

import pytest
import torch

from leaves.critic.gae import adaptive_lambda, gae

LENGTHS = [1, 7, 2, 33, 64, 5]
SEGMENT_C = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
VALUE_C = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
END_S = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 1.0], dtype=torch.float64)


def by_recursion(lam_S: torch.Tensor, end_S: torch.Tensor) -> torch.Tensor:
    """A_t = d_t + lam A_{t+1}, backwards from the last token of each completion."""
    out = []
    for s, value_T in enumerate(VALUE_C.split(LENGTHS)):
        adv, later, after = [], 0.0, end_S[s]
        for value in reversed(value_T.tolist()):
            later = after - value + lam_S[s] * later
            adv.append(float(later))
            after = value
        out += adv[::-1]
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0, "each its own"])
def test_gae_is_the_backward_recursion(lam):
    lam_S = torch.linspace(0, 1, 6, dtype=torch.float64) if isinstance(lam, str) else torch.full_like(END_S, lam)
    torch.testing.assert_close(gae(VALUE_C, END_S, SEGMENT_C, lam_S), by_recursion(lam_S, END_S))


def test_lambda_by_length():
    """VAPO's 0.05: 200 tokens 0.9, up to 20 nothing. A reward reaches the first of any tokens with e^(-1 / alpha)."""
    lengths = torch.tensor([1, 20, 40, 200, 4000], dtype=torch.float64)
    assert adaptive_lambda(lengths, 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.9, 0.995])
    long = torch.tensor([10_000.0], dtype=torch.float64)
    for alpha in (0.5, 1.0, 1.5):
        assert (adaptive_lambda(long, alpha) ** long).item() == pytest.approx(math.exp(-1 / alpha), rel=1e-3)
