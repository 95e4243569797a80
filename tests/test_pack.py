"""Packing: nothing split, dropped or exchanged, ranks in step, and exactly the sampled tokens trained."""

import random

import pytest
import torch
from conftest import TOY, make_groups

import model as decoder
from config import Pack
from pack import Minibatch, best_fit, build_row, cost, deal, pack, within_window


def lengths(kind: str, count: int, rng: random.Random) -> list[int]:
    draw = {"equal": lambda: 100, "small": lambda: rng.randint(1, 9), "wide": lambda: rng.randint(1, 1024),
            "tail": lambda: min(1024, int(rng.lognormvariate(4, 1)) + 1)}[kind]
    return [draw() for _ in range(count)]


@pytest.mark.parametrize("kind", ["equal", "small", "wide", "tail"])
@pytest.mark.parametrize("count", [0, 1, 2, 17, 2000])
@pytest.mark.parametrize("window", [None, 1, 7, 256, 5000])
def test_every_item_lands_in_exactly_one_row_that_holds_it(kind, count, window):
    items = lengths(kind, count, random.Random(count))
    rows = best_fit(items, 1024) if window is None else within_window(items, 1024, window)
    assert sorted(i for row in rows for i in row) == list(range(count))
    assert all(0 < sum(items[i] for i in row) <= 1024 for row in rows)


def test_no_two_rows_could_be_merged():
    """Best fit opens a row only when no open row takes the item, so any two rows together overflow one."""
    items = lengths("tail", 500, random.Random(0))
    fill = sorted(sum(items[i] for i in row) for row in best_fit(items, 1024))
    assert fill[0] + fill[1] > 1024


def test_best_fit_by_hand():
    """6, 5, 4, 3, 2 in rows of 10: 4 goes behind 6 (exactly full), 3 and 2 behind 5."""
    assert best_fit([2, 4, 6, 3, 5], 10) == [[2, 1], [4, 3, 0]]


def test_a_window_by_hand():
    """Rows of 10. In sight 5 4 7: behind 5 the 4 fits, 1 comes in sight and fills the row; 7 then leads, and takes the
    later of 2 and 3, for it is longer."""
    assert within_window([5, 4, 7, 1, 2, 3, 9], 10, 3) == [[0, 1, 3], [2, 5], [4], [6]]
    assert within_window([5, 4, 7, 1, 2, 3], 10, 1) == [[0, 1], [2, 3, 4], [5]]  # nothing to choose from: next fit
    assert within_window([3, 3, 3, 3], 6, 3) == [[0, 1], [2, 3]]                 # of equal ones the older


@pytest.mark.parametrize("window", [1, 3, 20, 300])
def test_a_window_starves_nobody_and_leaves_no_room_that_it_saw_a_use_for(window):
    """Every row begins with the oldest item that no earlier row has, and an item skipped while in sight did not fit."""
    items = lengths("tail", 300, random.Random(1))
    left = list(range(300))
    for row in within_window(items, 1024, window):
        assert row[0] == left[0]
        for i in row:
            assert i in left[:window]
            left.remove(i)
        room = 1024 - sum(items[i] for i in row)
        assert all(items[i] > room for i in left[:window])


@pytest.mark.parametrize("how", [best_fit, lambda items, capacity: within_window(items, capacity, 2)])
def test_an_item_longer_than_a_row_is_an_error(how):
    with pytest.raises(ValueError, match=r"item 1 has 11 tokens but pack.capacity=10; raise pack.capacity or lower"):
        how([3, 11], 10)


GROUPS = make_groups([[3, 30, 7, 1], [12, 2, 9, 25], [8, 8, 8, 8]], [5, 17, 1])
ADV_NG = torch.arange(1.0, 13).view(3, 4).double()
WEIGHT_NG = ADV_NG / 100
KEEP_NG = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
MINIBATCH = Minibatch(GROUPS, KEEP_NG, ADV_NG, WEIGHT_NG, likelihood_NG=WEIGHT_NG, reward_NG=ADV_NG)


def trained_tokens(rows) -> list[tuple]:
    """(token before, token, advantage, weight, engine's log-prob) of every token that carries weight."""
    columns = [(row.ids_T[row.predict_C], row.target_C, row.adv_C, row.weight_C, row.sampled_logp_C) for row in rows]
    return sorted(token for c in columns for token in zip(*(x.tolist() for x in c), strict=True) if token[3] > 0)


@pytest.mark.parametrize("capacity", [42, 60, 1000])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_hold_exactly_the_kept_tokens_whatever_the_capacity_and_the_ranks(capacity, window, ranks):
    by_rank = [[build_row(MINIBATCH, plan) for plan in hand]
               for hand in pack(MINIBATCH, Pack(capacity=capacity, window=window), ranks)]
    assert len({len(rows) for rows in by_rank}) == 1  # every rank runs as many forward passes
    expected = []
    for n, g in KEEP_NG.nonzero().tolist():
        sample, before = GROUPS[n].samples[g], (GROUPS[n].prompt.ids[-1], *GROUPS[n].samples[g].ids[:-1])
        numbers = ADV_NG[n, g].item(), WEIGHT_NG[n, g].item()
        expected += [(b, t, *numbers, x) for b, t, x in zip(before, sample.ids, sample.logp, strict=True)]
    assert trained_tokens([row for rows in by_rank for row in rows]) == sorted(expected)
    for row in (row for rows in by_rank for row in rows):
        assert len(row.ids_T) <= capacity and row.offsets[-1] == len(row.ids_T)
        assert row.max_len == row.offsets.diff().max()
        assert torch.equal(row.likelihood_C, row.weight_C)  # 0 where the row only keeps its rank in step
        for start, end in zip(row.offsets, row.offsets[1:], strict=False):
            assert row.position_T[start:end].tolist() == list(range(end - start))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 16, 100])
def test_rows_are_dealt_in_equal_numbers_and_nearly_equal_sums(count, ranks):
    """No two ranks differ by more than the most expensive row, and far less over many rounds."""
    rng = random.Random(count)
    costs = [rng.lognormvariate(0, 1) for _ in range(count)]
    hands = deal(costs, ranks)
    assert sorted(row for hand in hands for row in hand) == list(range(count))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    sums = [sum(costs[row] for row in hand) for hand in hands]
    assert max(sums) - min(sums) <= max(costs, default=0)


def test_dealing_by_hand():
    """9 8 | 5 4 | 3 1: the second round gives the 5 to the 8, and at 13 to 13 the first rank gets the 3."""
    assert deal([1, 9, 5, 8, 4, 3], 2) == [[1, 4, 5], [3, 2, 0]]
    assert cost([10, 20], 0.5) == 10 + 50 + 20 + 200


def test_attention_costs_as_much_as_a_count_of_operations_says():
    """Qwen2's tiny shape: per token and layer two products of heads x head_dim with half of the sequence, against two
    operations for every weight."""
    model = decoder.Decoder(decoder.read_shape(TOY))
    operations = 2 * sum(p.numel() for p in model.parameters())
    attention = model.shape.layers * 4 * model.shape.heads * model.shape.head_dim * 100 / 2
    assert cost([100], model.quadratic) == pytest.approx(100 * (operations + attention) / operations)


def test_nothing_kept_is_no_row_on_any_rank():
    nothing = Minibatch.plain(GROUPS, torch.zeros_like(KEEP_NG), ADV_NG, WEIGHT_NG)
    assert pack(nothing, Pack(capacity=100), ranks=2) == [[], []]
