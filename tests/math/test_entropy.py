"""The entropy bonus: entropies and their gradients against the dense formula, and what it is a mean over."""

import pytest
import torch
from conftest import load
from torch import Tensor

from model import WITH_ENTROPY, ChunkedLogProb


def case(tiny) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_CD = torch.randn(23, 32, dtype=torch.float64, generator=generator, requires_grad=True)
    head_VD = load(tiny, torch.float64).head_VD
    return hidden_CD, head_VD, torch.randint(len(head_VD), (23,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
def test_log_probs_and_entropies_with_their_gradients_equal_the_dense_formula(chunk, tiny):
    """Both at once, at a temperature other than 1, for a gradient that differs from token to token."""
    hidden_CD, head_VD, target_C = case(tiny)
    grad_C2 = torch.randn(23, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense_CV = (hidden_CD @ head_VD.T / 0.7).log_softmax(-1)
    dense_C2 = torch.stack([dense_CV.gather(1, target_C[:, None])[:, 0], -(dense_CV.exp() * dense_CV).sum(-1)], dim=1)
    expected = torch.autograd.grad(dense_C2, (hidden_CD, head_VD), grad_C2)
    out_C2 = ChunkedLogProb.apply(hidden_CD, head_VD, target_C, 0.7, chunk, WITH_ENTROPY)
    torch.testing.assert_close(out_C2, dense_C2)
    torch.testing.assert_close(torch.autograd.grad(out_C2, (hidden_CD, head_VD), grad_C2), expected)


def test_the_entropy_of_equal_logits_is_the_largest_and_has_no_gradient(tiny):
    hidden_CD, head_VD, target_C = case(tiny)
    out_C2 = ChunkedLogProb.apply(0 * hidden_CD, head_VD, target_C, 1.0, 8, WITH_ENTROPY)
    torch.testing.assert_close(out_C2[:, 1], torch.full((23,), len(head_VD), dtype=torch.float64).log())
    grad_VD, = torch.autograd.grad(out_C2[:, 1].sum(), head_VD)
    assert grad_VD.abs().max() < 1e-12


def test_no_more_is_held_than_is_counted():
    """Three tensors of a chunk's logits in float32, here the whole of it: what leaves/fit/counts.py has."""
    alive, most = {}, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if torch.is_tensor(x):
                    alive[x.untyped_storage().data_ptr()] = torch.multiprocessing.reductions.StorageWeakRef(
                        x.untyped_storage()), x.untyped_storage().nbytes()
            most = max(most, sum(size for ref, size in alive.values() if not ref.expired()))
            return out

    with_entropy, gradient = WITH_ENTROPY
    with Watch():
        logits_CV, target_C = torch.randn(64, 5000), torch.zeros(64, dtype=torch.long)
        out_C2 = with_entropy(logits_CV, target_C)
        gradient(logits_CV, target_C, out_C2, torch.ones(64, 2))
    assert 2.5 < most / logits_CV.untyped_storage().nbytes() < 3.1
