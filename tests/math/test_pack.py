"""Packing: nothing split, dropped or exchanged, ranks in step, and exactly the sampled tokens trained."""

import itertools
import random

import pytest
import torch
from conftest import TOY, make_groups

import model as decoder
import pack as packing
from config import Pack
from infra import dist
from loss import RowLoss
from metrics import PassSums
from pack import Minibatch, best_fit, build_row, cut_rows, deal_rows, layout, pack, row_cost, within_window
from records import PreparedRow


def lengths(kind: str, count: int, rng: random.Random) -> list[int]:
    draw = {"equal": lambda: 100, "small": lambda: rng.randint(1, 9), "wide": lambda: rng.randint(1, 1024),
            "tail": lambda: min(1024, int(rng.lognormvariate(4, 1)) + 1)}[kind]
    return [draw() for _ in range(count)]


@pytest.mark.parametrize("kind", ["equal", "small", "wide", "tail"])
@pytest.mark.parametrize(("count", "window"), [(0, None), (0, 7), (1, None), (1, 1), (2, 5000), (17, None), (17, 7),
                                               (2000, None), (2000, 1), (2000, 256)])
def test_every_item_lands_in_exactly_one_row_that_holds_it(kind, count, window):
    items = lengths(kind, count, random.Random(count))
    rows = best_fit(items, 1024) if window is None else within_window(items, 1024, window)
    assert sorted(i for row in rows for i in row) == list(range(count))
    fill = sorted(sum(items[i] for i in row) for row in rows)
    assert all(0 < tokens <= 1024 for tokens in fill)
    # Best fit opens a row only when no open row takes the item, so any two rows together overflow one.
    assert window is not None or len(fill) < 2 or fill[0] + fill[1] > 1024


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


@pytest.mark.parametrize("window", [None, 2])
def test_what_is_longer_than_a_row_is_an_error(window):
    with pytest.raises(ValueError, match=r"has 42 tokens but pack.capacity=34; raise pack.capacity or lower"):
        pack(MINIBATCH, Pack(capacity=34, window=window), ranks=1)


GROUPS = make_groups([[3, 30, 7, 1], [12, 2, 9, 25], [8, 8, 8, 8]], [5, 17, 1])
ADV_NG = torch.arange(1.0, 13).view(3, 4).double()
WEIGHT_NG = ADV_NG / 100
KEEP_NG = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
MINIBATCH = Minibatch(GROUPS, KEEP_NG, ADV_NG, WEIGHT_NG, likelihood_NG=WEIGHT_NG, bonus_NG=2 * WEIGHT_NG,
                      reward_NG=ADV_NG)


def trained_tokens(rows) -> list[tuple]:
    """(token before, token, advantage, weight, engine's log-prob) of every token that carries weight."""
    columns = [(row.ids_T[row.predict_C], row.target_C, row.adv_C, row.weight_C, row.sampled_logp_C) for row in rows]
    return sorted(token for c in columns for token in zip(*(x.tolist() for x in c), strict=True) if token[3] > 0)


@pytest.mark.parametrize("capacity", [42, 60, 1000])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_hold_exactly_the_kept_tokens_whatever_the_capacity_and_the_ranks(capacity, window, ranks):
    """What a token may see, followed from the row's segments, are its prompt and its completion up to it, in order."""
    by_rank = pack(MINIBATCH, Pack(capacity=capacity, window=window), ranks)
    assert len({len(mine) for mine in by_rank}) == 1  # every rank runs as many forward passes
    plans = [plan for mine in by_rank for plan in mine]
    rows = [build_row(MINIBATCH, plan) for plan in plans]
    expected = []
    for n, g in KEEP_NG.nonzero().tolist():
        sample, before = GROUPS[n].samples[g], (GROUPS[n].prompt.ids[-1], *GROUPS[n].samples[g].ids[:-1])
        numbers = ADV_NG[n, g].item(), WEIGHT_NG[n, g].item()
        expected += [(b, t, *numbers, x) for b, t, x in zip(before, sample.ids, sample.logp, strict=True)]
    assert trained_tokens(rows) == sorted(expected)
    for row in rows:
        assert len(row.ids_T) <= capacity and sum(row.segments.queries) == len(row.ids_T)
        assert torch.equal(row.bonus_C, 2 * row.weight_C)
        assert torch.equal(row.likelihood_C, row.weight_C)  # 0 where the row only keeps its rank in step
    for plan, row in zip(plans, rows, strict=True):
        assert layout(MINIBATCH, plan.members) == ([*row.segments.queries], [*row.segments.keys])
        first, first_query = 0, 0
        lasts = (row.segments.start_2S[0, 1:] - 1).tolist()
        for (n, g), own, seen, last in zip(plan.members, row.segments.queries, row.segments.keys, lasts, strict=True):
            key_L = row.segments.key_K[first:first + seen]
            assert row.ids_T[key_L].tolist() == [*GROUPS[n].prompt.ids, *GROUPS[n].samples[g].ids]
            assert row.position_T[key_L].tolist() == list(range(seen))
            assert key_L[seen - own:].tolist() == list(range(first_query, first_query + own)) and key_L[-1] == last
            first, first_query = first + seen, first_query + own
        assert first == len(row.segments.key_K)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 16, 100])
def test_rows_are_dealt_in_equal_numbers_and_nearly_equal_sums(count, ranks):
    """No two ranks differ by more than the most expensive row, and far less over many rounds."""
    rng = random.Random(count)
    costs = [rng.lognormvariate(0, 1) for _ in range(count)]
    hands = deal_rows(costs, ranks)
    assert sorted(row for hand in hands for row in hand) == list(range(count))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    sums = [sum(costs[row] for row in hand) for hand in hands]
    assert max(sums) - min(sums) <= max(costs, default=0)


def test_dealing_by_hand():
    """9 8 | 5 4 | 3 1: the second round gives the 5 to the 8, and at 13 to 13 the first rank gets the 3."""
    assert deal_rows([1, 9, 5, 8, 4, 3], 2) == [[1, 4, 5], [3, 2, 0]]


def test_cost_by_hand():
    """Of 10 and 20 tokens alone the half of each square is met, twice which `quadratic` counts. Of 4 behind a prefix
    of 6: 7, 8, 9 and 10 keys, and half a key less each, as in all counts."""
    assert row_cost([10, 20], [10, 20], 0.5) == 10 + 50 + 20 + 200
    assert row_cost([4], [10], 0.5) == 4 + (6.5 + 7.5 + 8.5 + 9.5)
    assert row_cost([6 + 4, 4], [10, 10], 0.5) == row_cost([10, 4], [10, 10], 0.5) == 10 + 50 + 4 + 32


def test_attention_costs_as_much_as_a_count_of_operations_says():
    """Qwen2's tiny shape: two products of heads x head_dim with half of the sequence, two operations a weight."""
    model = decoder.Decoder(decoder.read_shape(TOY))
    operations = 2 * sum(p.numel() for p in model.parameters())
    attention = model.shape.layers * 4 * model.shape.heads * model.shape.head_dim * 100 / 2
    assert row_cost([100], [100], model.quadratic) == pytest.approx(100 * (operations + attention) / operations)


def drawn_minibatch(rng: random.Random) -> Minibatch:
    """Up to 5 groups of up to 6 completions, about two thirds of them kept."""
    N, G = rng.randint(1, 5), rng.randint(1, 6)
    groups = make_groups([[rng.choice((1, rng.randint(1, 30))) for _ in range(G)] for _ in range(N)],
                         [rng.choice((1, rng.randint(1, 12))) for _ in range(N)])
    keep_NG = torch.tensor([[rng.random() < 0.7 for _ in range(G)] for _ in range(N)])
    keep_NG[0, 0] = True
    return Minibatch(groups, keep_NG, torch.zeros(N, G), torch.ones(N, G), torch.zeros(N, G))


def kept_groups(minibatch: Minibatch) -> list[packing.KeptGroup]:
    kept = {n: keep_G.nonzero()[:, 0].tolist() for n, keep_G in enumerate(minibatch.keep_NG) if keep_G.any()}
    return [packing.KeptGroup(len(minibatch.groups[n].prompt.ids), [(n, g) for g in places],
                      [minibatch.groups[n].samples[g].length for g in places]) for n, places in kept.items()]


def tokens(minibatch: Minibatch, members: list[tuple[int, int]]) -> int:
    """Tokens of a row with each of its prompts once."""
    return sum(len(minibatch.groups[n].prompt.ids) for n in {n for n, _ in members}) + sum(
        minibatch.groups[n].samples[g].length for n, g in members)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_prompt_is_in_a_row_once_and_a_group_is_split_only_where_it_is_longer(window):
    """200 small mini-batches. The pieces of a group lie in rows of their own, and no two could be one."""
    rng, split, together = random.Random(2), 0, 0
    for _ in range(200):
        minibatch = drawn_minibatch(rng)
        groups = kept_groups(minibatch)
        capacity = max(group.prompt + max(group.lengths) for group in groups) + rng.randint(0, 40)
        rows = cut_rows(groups, capacity, window)
        kept = [tuple(member) for member in minibatch.keep_NG.nonzero().tolist()]
        assert sorted(member for row in rows for member in row) == kept
        for row in rows:
            assert sum(layout(minibatch, row)[0]) == tokens(minibatch, row) <= capacity
        for group in groups:
            pieces = [[member for member in row if member in group.members] for row in rows]
            pieces = [piece for piece in pieces if piece]
            longer = group.prompt + sum(group.lengths) > capacity
            assert (len(pieces) > 1) == longer
            assert all(tokens(minibatch, a + b) > capacity for a, b in itertools.combinations(pieces, 2))
            split, together = split + longer, together + (not longer and len(group.lengths) > 1)
    assert split > 80 and together > 80


@pytest.mark.parametrize("window", [None, 3])
def test_rows_are_of_the_smallest_capacity_that_keeps_the_rounds(window):
    """Against all capacities. At an anomaly of best fit the search may stop at another that keeps the rounds too."""
    rng, smaller, anomalies = random.Random(3), 0, 0
    for _ in range(150):
        minibatch, ranks = drawn_minibatch(rng), rng.choice([1, 2, 3, 4, 8])
        groups = kept_groups(minibatch)
        least = max(group.prompt + max(group.lengths) for group in groups)
        capacity = rng.randint(least, 150)
        count = {size: len(cut_rows(groups, size, window)) for size in range(least, capacity + 1)}
        rounds = -(-count[capacity] // ranks)
        keeps = [size for size in count if count[size] <= rounds * ranks]
        plans = sum(pack(minibatch, Pack(capacity, window), ranks, quadratic=0.01), [])
        rows = sorted(plan.members for plan in plans if plan.counts)
        assert len(plans) == rounds * ranks and len(rows) <= len(plans)
        if keeps == list(range(keeps[0], capacity + 1)):
            assert rows == sorted(cut_rows(groups, keeps[0], window))
            smaller += keeps[0] < capacity
        else:
            assert any(rows == sorted(cut_rows(groups, size, window)) for size in keeps)
            anomalies += 1
    assert smaller > 75 and anomalies < 5


def test_the_cheapest_row_fills_up():
    """Rows of 34, 31 and 20 tokens on 2 ranks: the fourth is the last of them, with weight 0."""
    ones_NG = torch.ones(3, 1)
    minibatch = Minibatch(make_groups([[30], [27], [16]], [4] * 3), ones_NG.bool(), ones_NG, ones_NG, ones_NG)
    by_rank = pack(minibatch, Pack(34), ranks=2)
    assert [[(plan.members, plan.counts) for plan in mine] for mine in by_rank] == [
        [([(0, 0)], True), ([(2, 0)], False)], [([(1, 0)], True), ([(2, 0)], True)]]
    idle = build_row(minibatch, by_rank[0][1])
    assert len(idle.ids_T) == 20 and not idle.weight_C.any()


@pytest.mark.parametrize(("shape", "tokens_packed", "expected"), [
    ((1, 1), 13, 7.0), ((2, 1), 2 * 13, 3.0), ((4, 4), 8 * 23, 0.0)])
def test_ranks_without_work_are_uneven(shape, tokens_packed, expected, monkeypatch):
    """`pack/imbalance` over groups x completions of equal length: a row of weight 0 is no work."""
    ones_NG = torch.ones(shape, dtype=torch.float64)
    groups = make_groups([[10] * shape[1]] * shape[0], [3] * shape[0])
    minibatch = Minibatch(groups, ones_NG.bool(), ones_NG, ones_NG, ones_NG)
    ranks, sums = 8, []
    for mine in pack(minibatch, Pack(1000), ranks, quadratic=0.01):
        sums.append(PassSums(Pack(capacity=1000), quadratic=0.01))
        for row in (build_row(minibatch, plan) for plan in mine):
            zero_C = torch.zeros_like(row.weight_C)
            terms = RowLoss(torch.tensor(0.0), factor_C=zero_C, f_C=zero_C, k3_C=None, logp_C=zero_C)
            sums[-1].add(PreparedRow(row, row.adv_C, None, None), terms, first_pass=True)
    total = {name: sum(float(x.sums[name]) for x in sums) for name in sums[0].sums}
    monkeypatch.setattr(dist, "sum_over_ranks", lambda value: total)
    monkeypatch.setattr(dist, "max_over_ranks", lambda value: max(float(x.sums["cost"]) for x in sums))
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    assert sums[0].metrics(updates=1)["pack/imbalance"] == pytest.approx(expected)
    assert (total["rows"], total["packed"]) == (ranks, tokens_packed)


def test_nothing_kept_is_no_row_on_any_rank():
    nothing = Minibatch(GROUPS, torch.zeros_like(KEEP_NG), ADV_NG, WEIGHT_NG, ADV_NG)
    assert pack(nothing, Pack(capacity=100), ranks=2) == [[], []]
