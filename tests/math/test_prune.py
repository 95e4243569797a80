"""What a pruner keeps and a prompt's chance of a rollout, by hand, by brute force over subsets, and as drawn."""

import math
from dataclasses import replace
from itertools import combinations, product
from statistics import pvariance

import pytest
import torch
from conftest import as_rolled, make_groups, toy_config

import config
import prune
from advantage import group_norm
from collect import Selection, choose
from config import ConfigError
from history import PromptHistory
from loss import token_weight
from records import Group, Prompt, Sample
from settings.kinds import KeepAll, ProportionalPrompts

NAN = math.nan
# A group with a rare outcome, a flat group, a group of ties in |A|.
ADV_NG = torch.tensor([[3.0, -0.5, -0.5, -0.5], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)


def kept(keep_NG: torch.Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in keep_NG]


def largest(keep: int, scope: str) -> list[list[int]]:
    return kept(prune.keep_largest(ADV_NG, keep, scope).keep_NG)


def test_per_question_every_group_keeps_k_and_ties_keep_the_earlier():
    assert [largest(keep, "group") for keep in (1, 2, 3)] == [[[0]] * 3, [[0, 1]] * 3, [[0, 1, 2]] * 3]


def test_over_the_batch_flat_groups_go_first_and_others_keep_more():
    assert largest(1, "batch") == [[0], [], [0, 1]]           # 3 of 12: |A| = 3, 1, 1
    assert largest(2, "batch") == [[0, 1], [], [0, 1, 2, 3]]  # 6 of 12: 3, 1 x 4, the first 0.5
    assert largest(3, "batch") == [[0, 1, 2, 3], [0], [0, 1, 2, 3]]


def test_keeping_all_and_a_rate_of_0_are_no_pruning_bit_for_bit():
    everything = prune.keep_all(ADV_NG)
    for pruned in (prune.keep_largest(ADV_NG, 4, "group"), prune.keep_largest(ADV_NG, 4, "batch"),
                   prune.drop_bottom(ADV_NG, 0.0),
                   prune.bernoulli(prune.Candidates(ADV_NG, [], "token", True, 3), 0.0, None)):
        assert torch.equal(everything.keep_NG, pruned.keep_NG) and torch.equal(everything.weight_NG, pruned.weight_NG)


def test_the_paper_divides_by_k_the_release_by_the_tokens_of_the_survivors():
    """Gradients of sum_t w A logp with respect to logp, by hand: (1/N)(1/k)(1/|o|) A, and A over the kept tokens."""
    len_NG = torch.tensor([[4, 2, 8, 6], [1, 2, 3, 4], [5, 10, 20, 40]])
    paper = prune.keep_largest(ADV_NG, 2, "group")
    weight_NG = token_weight(len_NG, paper, "sequence", "kept", max_len=40, offered=3)
    expected_NG = torch.tensor([[3 / 4, -0.5 / 2, 0, 0], [0, 0, 0, 0], [1 / 5, -1 / 10, 0, 0]]).double() / 3 / 2
    torch.testing.assert_close(weight_NG * ADV_NG, expected_NG)

    released = prune.keep_largest(ADV_NG, 2, "batch")
    weight_NG = token_weight(len_NG, released, "token", "kept", max_len=40, offered=3)
    expected_NG = torch.tensor([[3, -0.5, 0, 0], [0, 0, 0, 0], [1, -1, 1, -1]]).double() / (4 + 2 + 5 + 10 + 20 + 40)
    torch.testing.assert_close(weight_NG * ADV_NG, expected_NG)


@pytest.mark.parametrize("keep", [0, 5, -1])
def test_keep_out_of_range_is_an_error(keep):
    with pytest.raises(ValueError, match=r"must be in 1\.\.4 \(rollout.group_size\); to train on all"):
        prune.keep_largest(ADV_NG, keep, "group")


def test_below_the_mean_by_hand():
    """1 right of 4: the wrong ones are below. All equal, at 2 right of 4 or in a flat group: none is."""
    prob_NG = prune.below_mean(ADV_NG, 0.7)
    torch.testing.assert_close(prob_NG, torch.tensor([[1, 0.3, 0.3, 0.3], [1] * 4, [1] * 4]).double())


@pytest.mark.parametrize(("rate", "kept"), [(0.2, 4), (0.5, 3), (0.7, 2), (0.9, 1), (0.6, 2)])
def test_the_bottom_fraction_rounds_down(rate, kept):
    """G = 5, as in the paper. And 0.58 x 50 is 29, though as floats it is a little less."""
    adv_NG = torch.tensor([[5.0, -4, 3, -2, 1]])
    assert prune.drop_bottom(adv_NG, rate).keep_NG[0].tolist() == [i < kept for i in range(5)]
    assert prune.drop_bottom(torch.arange(50.0)[None], 0.58).keep_NG.sum() == 21


def test_inclusion_by_hand():
    def prob(sizes: list[float], count: float) -> list[float]:
        return pytest.approx(prune.inclusion(torch.tensor(sizes), count).tolist())

    assert prob([1, 1, 2], 2) == [0.5, 0.5, 1]
    assert prob([1, 1, 8, 2], 2) == [0.25, 0.25, 1, 0.5]     # 8 would get 4/3: it is certain, the others share one
    assert prob([0, 0, 3], 2) == [0, 0, 1]                   # fewer have a size than are wanted
    assert prob([1, 2, 1], 0.5) == [0.125, 0.25, 0.125]      # a count that is no whole number
    assert prob([1, 8, 1], 1.5) == [0.25, 1, 0.25]
    assert prob([1, 1e-17], 1) == [1, 0]                     # what rounding leaves of a difference is no size
    assert prob([3.75, 3.75, 1e-16, 1e-16], 2) == [1, 1, 0, 0]
    assert prob([1e-17, 2e-17], 1) == [1 / 3, 2 / 3]         # small ones among themselves are


def test_inclusion_and_the_comb_at_random():
    """Probabilities add up and keep the order of sizes; as many are met as they add up to, for every start."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(100):
        K, count = (int(torch.randint(1, 12, (1,), generator=generator)) for _ in range(2))
        size_K = torch.rand(K, generator=generator).double() ** 4 * (torch.rand(K, generator=generator) > 0.2)
        prob_K = prune.inclusion(size_K, count)
        wanted = min(count, int((size_K > 0).sum()))
        assert prob_K.sum().item() == pytest.approx(wanted, abs=1e-12) and prob_K.max() <= 1
        share_K = prob_K / size_K
        below = (prob_K < 1) & (prob_K > 0)
        assert below.sum() == 0 or share_K[below].max() == pytest.approx(share_K[below].min().item())
        for start in torch.rand(5, generator=generator).tolist():
            keep_K = prune.systematic(prob_K, torch.randperm(K, generator=generator), start)
            assert keep_K.sum() == wanted and not keep_K[prob_K == 0].any() and keep_K[prob_K == 1].all(), trial


def test_if_all_are_kept_their_probabilities_are_exactly_1():
    generator = torch.Generator().manual_seed(0)
    for K in range(2, 40):
        size_K = 0.1 + torch.randint(2, (K,), generator=generator).double() / 3  # many equal ones
        assert (prune.inclusion(size_K, K) == 1).all()


def one_group(*completions: tuple[str, list[float]]) -> list[Group]:
    """A group of completions, each of tokens as letters, with the engine's probabilities of them."""
    samples = [Sample([ord(x) for x in text], [math.log(p) for p in probs], True) for text, probs in completions]
    return [Group(Prompt("q", (1,), "1"), tuple(samples))]


def test_sizes_by_hand():
    adv_NG = torch.tensor([[2.0, -1.0, 0.0]])
    groups = one_group(("abcd", [0.5] * 4), ("b" * 16, [0.5] * 16), ("c" * 9, [0.25] * 9))

    def size(normalize: str, size: str, by_cost: bool = False, advantage_only: bool = True) -> list[float]:
        candidates = prune.Candidates(adv_NG, groups, normalize, advantage_only, 0)
        return pytest.approx(prune.gradient_size(candidates, size, by_cost)[0].tolist())

    assert size("sequence", "adv") == [2, 1, 0]
    assert size("sequence", "surprise") == [0.5, 0.125, 0]  # math.sqrt(4 / 4) x 2 / 4, math.sqrt(16 / 4) x 1 / 16
    assert all(size(normalize, "surprise") == [2, 2, 0] for normalize in ("token", "constant"))
    assert size("token", "surprise", by_cost=True) == [1, 0.5, 0]
    assert size("sequence", "adv", by_cost=True) == [1, 0.25, 0]
    weighed = prune.Candidates(adv_NG, groups, "token", True, 0, weight_N1=torch.tensor([[3.0]]))
    assert prune.gradient_size(weighed, "surprise", False).tolist() == [[6, 6, 0]]
    assert size("sequence", "adv", advantage_only=False) == [2, 1, prune.SIZE_FLOOR]
    flat = prune.Candidates(torch.zeros(1, 3), groups, "token", False, 0)
    assert prune.gradient_size(flat, "surprise", False).tolist() == [[1, 1, 1]]


class Begun(Sample):
    """A completion whose first token an earlier step has trained on."""

    scored = slice(1, None)


def test_surprise_is_of_the_tokens_of_this_step_and_never_0():
    whole = Sample([1, 2, 3], [0.0, math.log(0.2), math.log(0.4)], True)
    samples = whole, Begun(whole.ids, whole.logp, True), Sample([1, 2], [0.0, 0.0], True)
    groups, least = [Group(Prompt("q", (1,), "1"), samples)], prune.LEAST_SURPRISE
    by_surprise, by_nats, by_length = (prune.token_norm(groups, size).tolist() for size in prune.TOKEN_SIZES)
    assert by_surprise == [pytest.approx([math.sqrt(least ** 2 + 1), 1, math.sqrt(2) * least])]
    guessed = [0.8 * math.log(0.2), 0.6 * math.log(0.4)]
    assert by_nats == [pytest.approx([math.hypot(least, *guessed), math.hypot(*guessed), math.sqrt(2) * least])]
    assert by_length == [pytest.approx([math.sqrt(3), math.sqrt(2), math.sqrt(2)])]


def test_an_error_is_predicted_and_kept_within_by_as_few_as_can_be():
    """Sizes 3 1 0 at probabilities 1 1/4 0: what is left to chance is 1 x (4 - 1) of 10."""
    assert prune.predicted_error(torch.tensor([3.0, 1, 0]), torch.tensor([1, 0.25, 0])) == pytest.approx(0.3)
    # One of 3 1 1 is drawn at 3/5 1/5 1/5, an error of (9 x 2/3 + 4 + 4) / 11, and two at 1 1/2 1/2, 2 / 11.
    one = torch.tensor([3.0, 1.0, 1.0]).double()
    for error, count in ((14.01 / 11, 1), (13.99 / 11, 2), (2.01 / 11, 2), (1.99 / 11, 3), (1e-9, 3)):
        assert prune.fewest(one, one, error) == count
    assert prune.fewest(one * 0, one * 0, 0.1) == 1
    prob_K = 1 - prune.drop_within(one, one < 2, 0.4) * (one < 2).double()
    assert prune.predicted_error(one, prob_K) == pytest.approx(0.4)
    assert prune.drop_within(one - 1, one < 2, 0.1) == prune.MOST_DROPPED  # small ones of no size at all


def test_similar_completions_are_neighbours():
    """By group, then wrong before right, then by their tokens."""
    first, = one_group(*((text, [0.5] * len(text)) for text in ("bb", "ab", "ba", "aa", "b")))
    adv_NG = torch.tensor([[1.0, -1.0, 1.0, -1.0, float("nan")], [0.0, 2.0, 1.0, 1.0, -1.0]])
    order = prune.similar_order(prune.Candidates(adv_NG, [first, first], "token", True, 0)).tolist()
    assert order == [3, 1, 4, 2, 0, 9, 5, 8, 6, 7]


def test_pps_keeps_a_fixed_number_and_drops_what_has_no_gradient():
    order = torch.arange(12)
    group, batch = (prune.pps(ADV_NG.abs(), order, 2, scope, seed=5) for scope in ("group", "batch"))
    assert group.keep_NG.sum(dim=1).tolist() == [2, 0, 2]
    assert batch.keep_NG.sum() == 6 and batch.keep_NG[1].sum() == 0
    torch.testing.assert_close(batch.size_NG, ADV_NG.abs() * 12 / 8.5)
    nothing = prune.pps(ADV_NG[1:2].abs(), order[:4], 2, "group", seed=5)
    assert not nothing.keep_NG.any() and not nothing.size_NG.any()


def test_the_comb_runs_through_the_order_that_it_is_given():
    """Neighbours of probability 1/2 are never kept together, in a group as in a step."""
    order = torch.tensor([0, 3, 1, 2, 4, 6, 5, 7])
    for scope, pairs in (("group", order.view(4, 2)), ("batch", order.view(4, 2))):
        draws = torch.stack([prune.pps(torch.ones(2, 4), order, 2, scope, i).keep_NG.flatten() for i in range(60)])
        assert (draws[:, pairs].sum(dim=2) == 1).all() and not (draws == draws[0]).all()


def recall(size, passed=None, easy=None, hard=None, mean=0.5, explore=(0.5, 0.5)) -> prune.Memory:
    zero = [0] * len(size)
    columns = [torch.tensor(c, dtype=torch.float64) for c in (size, passed or zero, easy or zero, hard or zero)]
    return prune.Memory(*columns, mean, explore, [{}] * len(columns[0]))


def test_prompts_below_the_mean_of_those_seen_are_rare_and_new_ones_certain():
    for recalled, expected in ((recall([0.0, 0.49, 0.5, 0.9, NAN]), [0.3, 0.3, 1, 1, 1]),
                               (recall([0.0, 0.0], mean=0.0), [1, 1]),  # of equal sizes none is below
                               (recall([NAN], mean=NAN), [1])):         # the first step of all
        assert prune.bernoulli_prompts(recalled, 0.7).tolist() == pytest.approx(expected)
    small, *_ = prune.bernoulli_prompts(recall([0.0, 0.5, 1.0]), None, 0.001)  # flat ones count as a tenth of the mean
    assert small == pytest.approx(1 - 0.001 * 1.2525 / (0.001 * 1.2525 + 0.0025))


def test_the_lowest_share_of_prompts_is_skipped_but_none_forever():
    sizes = [0.5, 0.1, NAN, 0.3, 0.2]
    for drop_prob, expected in ((0.0, [1, 1, 1, 1, 1]), (0.5, [1, 0, 1, 1, 0]), (0.9, [0, 0, 1, 0, 0])):
        assert prune.skip_lowest(recall(sizes), drop_prob, 2).tolist() == expected
    assert prune.skip_lowest(recall(sizes, passed=[1, 2, 0, 1, 0]), 0.4, 2).tolist() == [1, 1, 1, 0, 0]
    assert prune.skip_lowest(recall([NAN, NAN]), 0.5, 2).tolist() == [1, 1]
    assert prune.skip_lowest(recall([0.2, 0.2, 0.2, 0.2]), 0.5, 2).tolist() == [0, 0, 1, 1]


def test_greso_skips_with_one_minus_p_to_the_streak_but_at_most_99_of_100():
    """arXiv:2506.02177: 1 - max(p^z, 0.01) for z = 0..8, with p of their own for easy and hard prompts."""
    streak, none = torch.arange(9), torch.zeros(9, dtype=torch.long)
    easy = prune.greso_prob(streak, none, (0.5, 0.9))
    assert (1 - easy).tolist() == pytest.approx([0, 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.984375, 0.99, 0.99])
    hard = prune.greso_prob(none, streak, (0.5, 0.9))
    assert (1 - hard).tolist() == pytest.approx([1 - 0.9 ** z for z in range(9)])


def test_greso_explores_less_where_too_many_gave_nothing():
    """Targets 0.25 / 3 for easy ones and 0.5 / 3 for hard ones, steps of 0.01 within [0.05, 0.95]."""
    for easy, hard, expected in ((0.09, 0.17, (0.49, 0.59)), (0.08, 0.16, (0.51, 0.61)), (0.5, 0.0, (0.49, 0.61)),
                                 (0.0, 0.5, (0.51, 0.59))):
        assert prune.adapt_p((0.5, 0.6), easy, hard, 0.25) == pytest.approx(expected)
    assert prune.adapt_p((0.05, 0.95), 1.0, 0.0, 0.25) == pytest.approx((0.05, 0.95))


def test_gresos_rounds_as_released():
    """256 wanted, 384 at most, 64 at least: 1.25 x missing / informative share; the last if that is below 384."""
    assert prune.next_round_size(103, 0.6, 384) == (321, True)    # 1.25 x 103 / 0.4 = 321.9
    assert prune.next_round_size(200, 0.9, 384) == (384, False)   # 2,500
    assert prune.next_round_size(10, 0.5, 384) == (64, True)      # 25
    assert prune.next_round_size(256, 1.0, 384) == (384, False)   # nothing informative: no estimate
    assert prune.next_round_size(1, 0.5, 1) == (1, False)


def test_what_has_no_reward_is_no_candidate():
    """Of 4 candidates, keep 2 and drop half; of 1 candidate, keep 2 keeps it; where none is one, nothing is kept."""
    adv_NG = torch.tensor([[0.1, NAN, -3.0, 0.0, NAN, 2.0], [NAN, NAN, 0.0, NAN, NAN, NAN], [NAN] * 6])
    assert prune.keep_largest(adv_NG, 2, "group").keep_NG.nonzero().tolist() == [[0, 2], [0, 5], [1, 2]]
    assert prune.keep_largest(adv_NG, 2, "batch").keep_NG.nonzero().tolist() == [[0, 0], [0, 2], [0, 3], [0, 5], [1, 2]]
    assert prune.drop_bottom(adv_NG, 0.5).keep_NG.nonzero().tolist() == [[0, 2], [0, 5], [1, 2]]
    assert prune.keep_all(adv_NG).weight_NG.tolist() == [[1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0], [0] * 6]
    mean_apart = torch.tensor([[1.0, NAN, NAN, 3.0, 2.1]])  # the mean is 2.03, and would be 1.22 of five
    assert prune.below_mean(mean_apart, 0.5).tolist() == [[0.5, 0, 0, 1, 1]]
    assert prune.below_mean(torch.tensor([[1.5, NAN, NAN, 3.0]]), 0.5).tolist() == [[0.5, 0, 0, 1]]


def test_no_subset_of_as_many_has_more_variance():
    """Graded rewards, 0/1 rewards with their ties, and completions without a reward."""
    generator = torch.Generator().manual_seed(0)
    graded_NG = torch.randn(30, 7, dtype=torch.float64, generator=generator)
    for reward_NG, keep in product((graded_NG, (graded_NG > 0.3).double(), graded_NG.round()), range(1, 8)):
        with_holes_NG = reward_NG.masked_fill(torch.rand(30, 7, generator=generator) < 0.2, NAN)
        for reward_G, kept_G in zip(with_holes_NG, prune.max_variance(with_holes_NG, keep), strict=True):
            scored = reward_G[~reward_G.isnan()].tolist()
            count = min(keep, len(scored))
            assert kept_G.sum() == count and not kept_G[reward_G.isnan()].any()
            best = max(map(pvariance, combinations(scored, count))) if count else 0.0
            assert not count or pvariance(reward_G[kept_G].tolist()) == pytest.approx(best, abs=1e-12)


def test_of_equal_variances_the_first_as_released_and_of_equal_rewards_the_earlier():
    right_and_wrong = torch.tensor([[0.0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert kept(prune.max_variance(right_and_wrong, 4)) == [[1, 2, 3, 5], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(prune.max_variance(right_and_wrong, 3)) == [[1, 2, 5], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("compare", "expected"), [
    ("kept", [[1.5, -0.5, -0.5, -0.5], [0.75 ** 0.5] * 2 + [-(0.75 ** 0.5)] * 2]),
    ("all", [[7 / 8 / 0.125 ** 0.5] + [-1 / 8 / 0.125 ** 0.5] * 3,
             [3 / 8 / (15 / 56) ** 0.5] * 2 + [-5 / 8 / (15 / 56) ** 0.5] * 2])])
def test_advantages_are_among_what_is_kept_or_among_all(compare, expected, tmp_path):
    """1 and 5 right of 8, of which 4 are kept; the others' advantages stay as they were."""
    cfg = toy_config(tmp_path / "run", f"prune.completions={{kind: pods, keep: 4, compare: {compare}}}",
                     "advantage.eps=1e-12", name="grpo_toy.yaml")
    reward_NG = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.float64)
    groups, before_NG = make_groups([[2] * 8] * 2, [1, 1]), group_norm(reward_NG, 1, 0.0)
    batch = choose(as_rolled(groups, reward_NG, before_NG), Selection.of(cfg), seed=0)
    keep_NG = batch.pruned.keep_NG
    for adv_G, keep_G, right_first in zip(batch.adv_NG, keep_NG, expected, strict=True):
        assert sorted(adv_G[keep_G].tolist(), reverse=True) == pytest.approx(right_first)
    assert torch.equal(batch.adv_NG[~keep_NG], before_NG[~keep_NG])
    assert torch.equal(batch.pruned.weight_NG, keep_NG.double())


def test_the_groups_of_the_largest_variances_by_hand():
    """Sample variances 1/3, 1/4, 0, 1/4, of a group with a hole 1/3: 7/6 in all. 0.9 of it less 0.01 is 1.04, for which
    four are needed; half of it less 0.01 is 0.57 and 0.3 of it 0.34, for which two are."""
    reward_NG = torch.tensor([[0.0, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, NAN]]).double()
    marked = {share: kept(prune.most_variance(reward_NG, share, 0.01)) for share in (0.9, 0.7, 0.5, 0.3, 0.1)}
    whole = [0, 1, 2, 3]
    assert marked == {0.9: [whole, whole, [], whole, whole], 0.7: [whole, whole, [], [], whole],
                      0.5: [whole, [], [], [], whole], 0.3: [whole, [], [], [], whole], 0.1: [whole, [], [], [], []]}
    assert kept(prune.most_variance(reward_NG, 1.0, 0.0)) == marked[0.9]     # a flat group never
    assert kept(prune.most_variance(reward_NG[2:3], 0.9, 0.0)) == [[]]
    assert kept(prune.most_variance(reward_NG[[1]], 0.9, 0.3)) == [[]]       # a step of hardly any variance
    assert not prune.most_variance(torch.full((2, 3), 0.1).double(), 1.0, 0.0).any()  # equal rewards, but for rounding


@pytest.mark.parametrize("kind", ["gae", "decoupled", "soft_value"])
def test_only_advantages_of_a_group_alone_can_be_those_of_a_part_of_it(kind):
    settings = [f"advantage={{kind: {kind}}}", *(["critic.lr=1e-4"] if kind == "gae" else [])]
    with pytest.raises(ConfigError, match="advantage.kind=.* must be group_norm, centred or leave_one_out with "
                                          "prune.completions.compare=kept: only these compare a group with itself"):
        config.load(["pods_gsm8k.yaml", "toy.yaml"], settings)
    assert config.load(["pods_gsm8k.yaml", "toy.yaml"], [*settings, "prune.completions.compare=all"])


def test_the_size_of_a_prompt_is_2_sqrt_p_1_minus_p_and_is_drawn_by():
    """1, 4, 0 and 2 right of 8, by the population's deviation; a fifth prompt has not come up yet."""
    reward_NG = torch.tensor([[float(g < right) for g in range(8)] for right in (1, 4, 0, 2)], dtype=torch.float64)
    groups = make_groups([[2] * 8] * 5, [1] * 5)
    history = PromptHistory([group.prompt for group in groups], ProportionalPrompts(share=0.5), 0, middle=0.5)
    history.record(as_rolled(groups[:4], reward_NG, group_norm(reward_NG, 0, 0.0)))
    size_K, prob_K = history.remembered([*range(5)]).size_K, dict.fromkeys(range(5), 0.0)
    assert size_K[:4].tolist() == pytest.approx([2 * (p * (1 - p)) ** 0.5 for p in (1 / 8, 1 / 2, 0, 1 / 4)])
    prob_K |= {draw.number: draw.prob for draw in history.draw(5)}  # of which test_data.py tests the weights
    assert [*prob_K.values()] == pytest.approx(prune.proportional_prob(size_K, 0.5, 0.1).tolist()) and prob_K[4] == 1


def test_probabilities_by_hand():
    """Sizes 1 1 2 0, a new one 4: of mean 1, so the fourth counts as 0.1, and 2 x 2 / 4.1 is below 1."""
    assert prune.proportional_prob(torch.tensor([1.0, 1, NAN, 2, 0]).double(), 0.5, 0.1).tolist() == pytest.approx(
        [2 / 4.1, 2 / 4.1, 1, 4 / 4.1, 0.2 / 4.1])
    assert prune.proportional_prob(torch.tensor([NAN, NAN]), 0.5, 0.1).tolist() == [1, 1]
    assert prune.proportional_prob(torch.zeros(4), 0.5, 0.1).tolist() == [0.5] * 4   # nothing tells them apart
    assert prune.proportional_prob(torch.tensor([3.0]), 0.25, 0.1).tolist() == [0.25]
    # All sizes below the mean, 11/3, count as it: 9 + 22/3 in all.
    assert prune.proportional_prob(torch.tensor([9.0, 1, 1]).double(), 0.5, 1.0).tolist() == pytest.approx(
        [1.5 * 9 / (49 / 3), *[1.5 * (11 / 3) / (49 / 3)] * 2])


def test_as_many_are_expected_as_the_share_says_and_no_weight_is_too_large():
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        K, share, floor = 1 + trial % 9, 0.1 + 0.9 * (trial % 7) / 7, (0.05, 0.3, 1.0)[trial % 3]
        size_K = torch.rand(K, generator=generator).double() ** 6 * (torch.rand(K, generator=generator) > 0.4)
        size_K[torch.rand(K, generator=generator) < 0.2] = NAN
        prob_K, seen_K = prune.proportional_prob(size_K, share, floor), ~size_K.isnan()
        assert (prob_K[~seen_K] == 1).all() and (prob_K <= 1).all()
        assert prob_K[seen_K].sum().item() == pytest.approx(share * int(seen_K.sum()), abs=1e-9)
        assert (1 / prob_K).max() <= (1 + floor) / (share * floor) * (1 + 1e-9) or not seen_K.any()
        order_K = size_K[seen_K].argsort()
        assert (prob_K[seen_K][order_K].diff() >= -1e-12).all()


@pytest.mark.parametrize(("wrong", "said"), [
    ({"keep_NG": ADV_NG[0] > 0}, "three"), ({"keep_NG": ADV_NG}, "bool"), ({"weight_NG": ADV_NG}, "at least 0"),
    ({"prob_NG": ADV_NG.abs()}, "at most 1")])
def test_what_a_pruner_of_ones_own_must_not_return_is_named(wrong, said):
    pruner = prune.checked(lambda given, settings: replace(prune.keep_all(given.adv_NG), **wrong))
    with pytest.raises(ConfigError, match=f"prune.completions.kind=none must return .*{said}"):
        pruner(prune.Candidates(ADV_NG, [], "sequence", True, 0), KeepAll())
