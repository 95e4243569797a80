"""What every kind keeps to: those that are shipped, and a fork's, which the tables name and which are tested too.

Nothing is to be added here for a new advantage, pruner or trust region. One whose dataclass says "Unbiased" is held to
it: the weights of what it keeps are one over the probabilities, and it draws by these.
"""

from itertools import product

import pytest
import torch
from conftest import as_rewards, example, make_groups

import prune
from advantage import ESTIMATORS, advantage
from loss import TRUST
from prune import COMPLETIONS, Candidates, Memory
from records import LogProbs
from settings import kinds
from settings.loader import choices

ADVANTAGES, PRUNERS, PROMPTS, BOUNDS = map(choices, (kinds.Advantage, kinds.Completions, kinds.Prompts, kinds.Trust))
NAN = torch.nan
# Graded, 0/1, all equal, one without a reward, only one with a reward, none.
REWARD_NG = torch.tensor([[0.5, -1, 2, 0.25], [1, 0, 0, 1], [1, 1, 1, 1], [0, NAN, 1, 0], [NAN, NAN, 1, NAN],
                          [NAN] * 4], dtype=torch.float64)


def test_every_kind_of_the_config_has_its_function():
    assert set(COMPLETIONS) == set(PRUNERS) and set(TRUST) == set(BOUNDS)
    assert set(ESTIMATORS) == set(ADVANTAGES) and set(prune.PROMPTS) == set(PROMPTS)


@pytest.mark.house
def test_the_kinds_that_are_shipped():
    assert set(ESTIMATORS) == {"group_norm", "centred", "leave_one_out", "shrinkage", "decoupled"}
    assert set(COMPLETIONS) == {"none", "topk", "bottom", "bernoulli", "pps", "pods", "variance"}
    assert set(prune.PROMPTS) == {"none", "bernoulli", "rank", "pps", "greso"}
    assert set(TRUST) == {"clip", "clip_sequence", "clamp", "total_variation", "binary_kl", "none"}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_advantage_is_a_number_for_each_completion_with_a_reward(kind):
    rewards = as_rewards({"accuracy": REWARD_NG.clone(), "other": REWARD_NG.flip(1)}, {"accuracy": 1.0, "other": 0.5})
    adv_NG = advantage(rewards, example(ADVANTAGES[kind]))
    assert adv_NG.shape == REWARD_NG.shape and torch.equal(adv_NG.isnan(), rewards.total_NG.isnan())
    assert not adv_NG.isinf().any() and torch.equal(rewards.components["accuracy"].nan_to_num(), REWARD_NG.nan_to_num())


def is_unbiased(section: type) -> bool:
    return "Unbiased" in section.__doc__


def offer_of(seed: int, advantage_only: bool) -> Candidates:
    """Advantages of the sizes 0 to 3, some equal, and lengths of 1 to 60."""
    generator = torch.Generator().manual_seed(seed)
    adv_NG = torch.randn(6, 4, dtype=torch.float64, generator=generator).masked_fill(REWARD_NG.isnan(), NAN)
    adv_NG[2], len_NG = 0.0, torch.randint(1, 60, (6, 4), generator=generator)
    groups = make_groups(len_NG.tolist(), [1] * 6)
    return Candidates(adv_NG, groups, "sequence", advantage_only, seed, reward_NG=REWARD_NG)


@pytest.mark.parametrize("kind", COMPLETIONS)
def test_a_pruner_keeps_candidates_alone_and_weighs_what_it_keeps(kind):
    """The same offer is pruned the same way again. With a KL an unbiased one may drop no candidate for ever."""
    settings = example(PRUNERS[kind])
    for seed, advantage_only in product(range(10), (True, False)):
        candidates = offer_of(seed, advantage_only)
        pruned, again = (COMPLETIONS[kind](candidates, settings) for _ in range(2))
        keep_NG, weight_NG, prob_NG = pruned.keep_NG, pruned.weight_NG, pruned.prob_NG
        assert {keep_NG.shape, weight_NG.shape, prob_NG.shape} == {REWARD_NG.shape} and keep_NG.dtype == torch.bool
        assert not (keep_NG | (prob_NG != 0))[candidates.adv_NG.isnan()].any()
        assert torch.equal(weight_NG > 0, keep_NG) and weight_NG.isfinite().all()
        assert ((prob_NG >= 0) & (prob_NG <= 1)).all() and (prob_NG[keep_NG] > 0).all()
        assert torch.equal(keep_NG, again.keep_NG) and torch.equal(weight_NG, again.weight_NG)
        if is_unbiased(PRUNERS[kind]):
            torch.testing.assert_close(weight_NG[keep_NG], 1 / prob_NG[keep_NG])
            none_NG = candidates.adv_NG.isnan()
            assert (prob_NG > 0)[(candidates.adv_NG.nan_to_num() != 0) | ~(advantage_only | none_NG)].all()


UNBIASED = [example(section) for section in PRUNERS.values() if is_unbiased(section)]


@pytest.mark.parametrize("settings", [
    *UNBIASED, pytest.param(kinds.Pps(keep=5), marks=pytest.mark.slow), kinds.Pps(keep=5, scope="batch")], ids=str)
def test_what_the_seed_draws_has_the_probabilities_that_it_is_weighed_by(settings):
    """z-test over 1,000 seeds at G = 16: how often each completion is kept, and a projection of the weights."""
    generator = torch.Generator().manual_seed(0)
    adv_NG, value_NG = torch.randn(2, 2, 16, dtype=torch.float64, generator=generator)
    groups = make_groups(torch.randint(1, 60, (2, 16), generator=generator).tolist(), [1, 1])
    drawn = [COMPLETIONS[settings.kind](Candidates(adv_NG, groups, "sequence", True, seed, reward_NG=adv_NG), settings)
             for seed in range(1000)]
    prob_NG = drawn[0].prob_NG
    share_NG = torch.stack([d.keep_NG.double() for d in drawn]).mean(dim=0)
    assert ((share_NG - prob_NG).abs() <= 4.5 * (prob_NG * (1 - prob_NG) / 1000).sqrt() + 1e-12).all()
    estimate = torch.stack([(d.weight_NG * value_NG).sum() for d in drawn])
    assert abs(estimate.mean() - value_NG.sum()) < 4 * estimate.std() / 1000 ** 0.5


@pytest.mark.parametrize("kind", prune.PROMPTS)
def test_a_prompts_chance_of_a_rollout_is_a_probability(kind):
    """Which an unbiased kind leaves at 0 for none. Some were never rolled out, and none was at the first step."""
    for seed in range(20):
        size_K, skipped_K, easy_K, hard_K = torch.rand(4, 9, dtype=torch.float64,
                                                       generator=torch.Generator().manual_seed(seed)) * 3
        size_K[:3 if seed else 9], mean = NAN, size_K[3:].mean().item() if seed else NAN
        memory = Memory(size_K, skipped_K.long(), easy_K.long(), hard_K.long(), mean, explore=(0.5, 0.6),
                        rows=[{}] * len(size_K))
        prob_K = prune.PROMPTS[kind](memory, example(PROMPTS[kind]))
        assert prob_K.shape == (9,) and ((prob_K >= 0) & (prob_K <= 1)).all()
        assert (prob_K > 0).all() or not is_unbiased(PROMPTS[kind])


@pytest.mark.parametrize("kind", TRUST)
def test_a_trust_region_is_a_factor_for_each_token_without_gradient(kind):
    """A token's own move and those of its completion decide it, no other completion's."""
    generator = torch.Generator().manual_seed(0)
    old_C = -torch.rand(8, dtype=torch.float64, generator=generator)
    adv_C = torch.tensor([1, 1, 1, 1, -2, -2, -2, -2], dtype=torch.float64)
    logp_C = (old_C + 0.3 * torch.randn(8, dtype=torch.float64, generator=generator)).clamp(max=-0.01).requires_grad_()
    segment_C, settings = torch.tensor([0] * 3 + [1] * 5), example(BOUNDS[kind])
    f_C = TRUST[kind](LogProbs(logp_C, old_C, adv_C, segment_C), settings)
    assert f_C.shape == (8,) and f_C.isfinite().all() and not f_C.requires_grad
    other_C = TRUST[kind](LogProbs(logp_C * (1 + segment_C), old_C, adv_C, segment_C), settings)
    assert torch.equal(f_C[:3], other_C[:3])
