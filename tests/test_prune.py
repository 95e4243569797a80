"""CPPO as the paper writes it (per question) and as it was released (over the batch), ties and flat groups included."""

import pytest
import torch

from loss import token_weight
from prune import COMPLETIONS, keep_all, keep_largest

# A group with a rare outcome, a flat group, a group of ties in |A|.
ADV_NG = torch.tensor([[3.0, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)


def kept(adv_NG, keep, scope) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in keep_largest(adv_NG, keep, scope).keep_NG]


def test_per_question_every_group_keeps_k_and_ties_keep_the_earlier():
    assert kept(ADV_NG, 1, "group") == [[0], [0], [0]]
    assert kept(ADV_NG, 2, "group") == [[0, 1], [0, 1], [0, 1]]
    assert kept(ADV_NG, 3, "group") == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]


def test_over_the_batch_flat_groups_go_first_and_others_keep_more():
    assert kept(ADV_NG, 1, "batch") == [[0], [], [0, 1]]           # 3 of 12: |A| = 3, 1, 1
    assert kept(ADV_NG, 2, "batch") == [[0, 1], [], [0, 1, 2, 3]]  # 6 of 12: 3, 1 x 4, the first 0.5
    assert kept(ADV_NG, 3, "batch") == [[0, 1, 2, 3], [0], [0, 1, 2, 3]]


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_the_kept_dominate_the_dropped(keep, scope):
    adv_NG = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(keep))
    pruned = keep_largest(adv_NG, keep, scope)
    assert pruned.keep_NG.sum() == keep * 5
    whole = [(adv_NG.abs(), pruned.keep_NG)]
    for size, keep_ in zip(*whole[0], strict=True) if scope == "group" else whole:
        assert keep_.all() or size[keep_].min() >= size[~keep_].max()
    assert torch.equal(pruned.weight_NG, pruned.keep_NG.double())


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_keeping_all_is_no_pruning_bit_for_bit(scope):
    everything, pruned = keep_all(ADV_NG), keep_largest(ADV_NG, 4, scope)
    assert torch.equal(everything.keep_NG, pruned.keep_NG) and torch.equal(everything.weight_NG, pruned.weight_NG)


def test_the_paper_divides_by_k_the_release_by_the_tokens_of_the_survivors():
    """Gradients of sum_t w A logp with respect to logp, by hand: (1/N)(1/k)(1/|o|) A, and A over the kept tokens."""
    len_NG = torch.tensor([[4, 2, 8, 6], [1, 2, 3, 4], [5, 10, 20, 40]])
    paper = keep_largest(ADV_NG, 2, "group")
    weight_NG = token_weight(len_NG, paper, "sequence", "kept", max_len=40)
    expected_NG = torch.tensor([[3 / 4, -0.5 / 2, 0, 0], [0, 0, 0, 0], [1 / 5, -1 / 10, 0, 0]]).double() / 3 / 2
    torch.testing.assert_close(weight_NG * ADV_NG, expected_NG)

    released = keep_largest(ADV_NG, 2, "batch")
    weight_NG = token_weight(len_NG, released, "token", "kept", max_len=40)
    expected_NG = torch.tensor([[3, -0.5, 0, 0], [0, 0, 0, 0], [1, -1, 1, -1]]).double() / (4 + 2 + 5 + 10 + 20 + 40)
    torch.testing.assert_close(weight_NG * ADV_NG, expected_NG)


@pytest.mark.parametrize("keep", [0, 5, -1])
def test_keep_out_of_range_is_an_error(keep):
    with pytest.raises(ValueError, match=r"must be in 1\.\.4 \(rollout.group_size\); to train on all"):
        keep_largest(ADV_NG, keep, "group")


def test_kinds_are_those_of_the_config():
    from typing import get_args, get_type_hints

    import config
    assert set(COMPLETIONS) == set(get_args(get_type_hints(config.Completions)["kind"]))
