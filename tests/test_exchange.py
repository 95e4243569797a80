"""Completions arrive where they are needed, whole and in order, and nowhere else."""

import pytest
from conftest import make_groups, toy_config, weights
from test_invariance import on_ranks

import dist
import exchange
import train
from sample import Elsewhere, Group

LENGTHS = [[3, 30, 7, 1], [12, 2, 9, 25], [8, 8, 8, 8]]
SHARES = [0, 2, 9, 12]  # of the twelve completions, by rank: two groups lie on several ranks
HANDS = [[(0, 0), (2, 3), (1, 1)], [(0, 0), (0, 1), (0, 0)], []]  # one by two ranks, one twice, nothing


def gathered(limit: int) -> tuple[list, list | None]:
    groups = make_groups(LENGTHS, [5, 17, 1])
    samples = [s for group in groups for s in group.samples]
    return exchange.gather(samples[SHARES[dist.rank()]:SHARES[dist.rank() + 1]], limit)


def fetched(limit: int) -> list[Group]:
    samples, owners = gathered(limit)
    groups = [Group(group.prompt, tuple(samples[n * 4:n * 4 + 4]), owners and tuple(owners[n * 4:n * 4 + 4]))
              for n, group in enumerate(make_groups(LENGTHS, [5, 17, 1]))]
    return exchange.fetch(groups, HANDS)


def test_a_small_step_is_gathered_whole(tmp_path):
    true = [s for group in make_groups(LENGTHS, [5, 17, 1]) for s in group.samples]
    assert sum(s.length for s in true) == 121
    for samples, owners in on_ranks(3, tmp_path, gathered, 121):
        assert samples == true and owners is None


def test_of_a_large_step_each_rank_gets_what_it_trains_on(tmp_path):
    true = make_groups(LENGTHS, [5, 17, 1])
    for rank, groups in enumerate(on_ranks(3, tmp_path, fetched, 120)):
        for n, group in enumerate(groups):
            for g, sample in enumerate(group.samples):
                whole = true[n].samples[g]
                here = (n, g) in HANDS[rank] or SHARES[rank] <= 4 * n + g < SHARES[rank + 1]
                described = Elsewhere(whole.length, whole.finished, whole.logp_sum)
                assert sample == (whole if here else described)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cppo_toy.yaml", "vapo_toy.yaml", "greso_toy.yaml"])
def test_how_tokens_travel_changes_nothing(name, tmp_path):
    """Bit for bit, with several mini-batches and rounds, on two ranks and on one that always has all."""
    found, more = [], ["critic.pretrain_steps=0"] if name == "vapo_toy.yaml" else []
    for limit in (0, 10**6):
        cfg = toy_config(tmp_path / f"{limit}", "update.minibatches=2", "data.limit=5", f"rollout.gather_limit={limit}",
                         "rollout.max_rounds=2", *more, name=name)
        (tmp_path / f"ranks{limit}").mkdir()
        found += [on_ranks(2, tmp_path / f"ranks{limit}", trained, cfg)[0]]
    assert all((found[0][key] == p).all() for key, p in found[1].items())
    decisions = [(tmp_path / run / "decisions.jsonl").read_text() for run in ("0", "1000000")]
    assert decisions[0] == decisions[1]


def trained(cfg) -> dict:
    return weights(train.train(cfg))
