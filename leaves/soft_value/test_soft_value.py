"""The squared loss of A*-PO as an advantage."""

from types import SimpleNamespace

import torch

from leaves.soft_value.join import residual_advantage


def test_the_residual_has_the_gradient_of_the_squared_loss():
    old_C = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
    logp_C = torch.tensor([-0.7, -2.2, -0.4, -3.5], dtype=torch.float64, requires_grad=True)
    segment_C, adv_S, beta = torch.tensor([0, 0, 1, 1]), torch.tensor([0.3, -0.8], dtype=torch.float64), 0.1
    gap_C = logp_C - old_C
    squared = sum((beta * part.sum() - A) ** 2 for part, A in zip(gap_C.split(2), adv_S, strict=True))
    expected, = torch.autograd.grad(squared, logp_C)
    given = SimpleNamespace(row=SimpleNamespace(segment_C=segment_C), ref_logp_C=old_C)
    adv_C = residual_advantage(logp_C.detach(), given, adv_S[segment_C], beta)
    ours, = torch.autograd.grad(-(adv_C * logp_C).sum(), logp_C)
    torch.testing.assert_close(ours, expected)
