"""OptPO: votes, the sequential test, and labels that are never read."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import ROOT, TOY, make_groups, parts_of, refuses, steps_of, toy_config, weights

import config
import data
import train
from leaves.votes import join as optpo
from leaves.votes.settings import Votes
from records import Rolled
from settings.loader import ConfigError


@pytest.mark.parametrize("settings", [Votes(), Votes(right=0.5, other=0.3), Votes(right=0.9, other=0.1, threshold=9),
                                      Votes(threshold=1.01), Votes(right=0.4, other=0.1, threshold=1e4)])
def test_the_lead_that_is_needed_is_the_bayes_factors(settings):
    """Likelihoods of all ballots of up to 9 votes for 3 answers, under the hypotheses that each is the true one."""
    needed = optpo.count_needed(settings)
    decided = set()
    for counts in product(range(10), repeat=3):
        if sum(counts) > 9:
            continue
        under = sorted(settings.right ** counts[j] * math.prod(
            settings.other ** count for c, count in enumerate(counts) if c != j) for j in range(3))
        ballot = [answer for answer, count in zip("abc", counts, strict=True) for _ in range(count)]
        enough = under[2] / under[1] >= settings.threshold * (1 - 1e-9)
        assert (optpo.find_leader(ballot)[1] >= needed) == enough, counts
        decided.add(enough)
    assert decided == {True, False} or needed > 9 or needed == 0


@pytest.mark.parametrize(("ballot", "leader"), [
    ([], (None, 0)), ([None, None], (None, 0)), (["a"], ("a", 1)), (["b", "a", "a"], ("a", 1)),
    (["b", "a", None, "a", "b"], ("b", 0)), (["c", "a", "b", "a", "a"], ("a", 2))])
def test_the_leader_is_who_has_most_votes_and_of_equals_the_first(ballot, leader):
    assert optpo.find_leader(ballot) == leader


def test_equal_answers_are_one_class_by_number_spelling_and_the_verifier():
    given = [r"\frac{1}{2}", "0.5", None, "7", r"x+1", "1/2", "1+x", "07", "", r"$7$"]
    ballot = [r"\frac{1}{2}", r"\frac{1}{2}", None, "7", "x+1", r"\frac{1}{2}", "x+1", "7", None, "7"]
    assert optpo.classify(given) == ballot
    for count in range(len(given)):  # more completions change no vote
        assert optpo.classify(given[:count]) == ballot[:count]
    assert optpo.first_equal(["y", "1+x", r"\frac{2x+2}{2}"], "x+1") == "1+x"
    assert optpo.first_equal(["y"], "x+1") is None


def test_a_spelling_is_compared_once_and_with_few_classes(monkeypatch):
    """A pair may take the verifier seconds."""
    asked = []
    given = ["a", "a", "b", "c", "d", "e", "e", "f", "f"]
    monkeypatch.setattr(optpo, "first_equal", lambda leaders, answer: asked.append((leaders, answer)))
    assert optpo.classify(given) == given
    assert asked == [([], "a"), (["a"], "b"), (["a", "b"], "c"), (["a", "b", "c"], "d"), (["a", "b", "c", "d"], "e"),
                     (["a", "e", "b", "c"], "f")]


def test_votes_are_summed_up_and_the_labels_of_the_data_only_compared():
    group, = make_groups([[3, 4]], [2])
    samples = [*group.samples, *group.samples]
    ballot = ["1", "2", "2", None]
    vote = optpo.sum_up_votes(group, ballot, samples)  # its answer is 1
    assert vote == optpo.Vote("2", 1, completions=4, tokens=14, label_accuracy=False, accuracy=0.5)
    unlabelled = optpo.sum_up_votes(replace(group, prompt=replace(group.prompt, answer="")), ballot, samples)
    assert unlabelled == replace(vote, label_accuracy=None, accuracy=None)
    nobody = optpo.sum_up_votes(group, [None] * 4, samples)
    assert (nobody.label, nobody.lead, nobody.label_accuracy, nobody.accuracy) == (None, 0, False, 0)

    def measured(*votes: optpo.Vote) -> dict[str, float]:
        groups = [optpo.VotedGroup(group.prompt, group.samples, vote) for vote in votes]
        return optpo.vote_metrics(Rolled(groups=groups), batch=None)

    assert measured(vote, unlabelled, nobody) == {
        "rollout/tokens": 42, "votes/completions": 4, "votes/lead": pytest.approx(2 / 3), "votes/label_accuracy": 0,
        "votes/accuracy": 0.25}
    assert measured() == {"rollout/tokens": 0}
    assert "votes/accuracy" not in measured(unlabelled)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Eight prompts of the toy as OptPO samples them, and in groups as large as it may go."""
    cfg = toy_config(tmp_path_factory.mktemp("sampled") / "run", "labels.most=16", "labels.chunk=3",
                     "rollout.group_size=5", name="optpo_gsm8k.yaml toy.yaml")
    parts = parts_of(cfg, TOY, data.to_prompts(data.load_problems(cfg.data.train), data.Tokenizer(TOY), None, 128))
    parts.engine.sync(parts.learner.policy)
    draws, voting = parts.history.draw(12), parts.sampler
    most = replace(voting.sampler, sampling=replace(cfg.rollout, group_size=16)).rollout(draws)
    return voting, voting.rollout(draws), most


@pytest.mark.slow
def test_sampling_stops_where_brute_force_does(sampled):
    """Of the completions that a larger group has, in their order: looked at after 5, 8, 11, ... of them."""
    voting, groups, most = sampled
    stops = []
    for group, large in zip(groups, most, strict=True):
        answers = [optpo.extract(voting.sampler.tokenizer.decode(s.ids)) for s in large.samples]
        for count in (5, 8, 11, 14, 16):
            votes = [answers[:count].count(answer) for answer in set(answers[:count]) - {None}]
            ahead = max(votes, default=0) - max(sorted(votes)[:-1], default=0)
            if ahead >= 2:
                break
        stops.append(count)
        assert (group.vote.completions, group.vote.lead) == (count, ahead)
        assert votes == [] or answers[:count].count(group.vote.label) == max(votes)
        assert [s.ids for s in group.samples] == [s.ids for s in large.samples[:5]]
        assert group.vote.tokens == sum(s.length for s in large.samples[:count])
    assert len(set(stops)) > 2


def test_a_model_may_learn_from_what_it_is_evaluated_on(tmp_path):
    """Test-time training: with labels that would be an error."""
    cfg = toy_config(tmp_path / "run", "steps=1", name="optpo_gsm8k.yaml toy.yaml")
    same = [f"data.train={cfg.data.eval}", "labels.most=8"]
    assert len(train.load_task(toy_config(tmp_path / "run", *same, name="optpo_gsm8k.yaml toy.yaml")).prompts) == 6
    with pytest.raises(ConfigError, match="data.train holds no problem that data.eval does not hold too"):
        train.load_task(toy_config(tmp_path / "run", same[0], name="grpo_toy.yaml"))


@pytest.mark.slow
def test_rewards_are_agreement_with_the_label(sampled):
    voting, groups, _ = sampled
    reward_NG = voting.score(groups).components["accuracy"]
    for group, reward_G in zip(groups, reward_NG.tolist(), strict=True):
        answers = [optpo.extract(voting.sampler.tokenizer.decode(s.ids)) for s in group.samples]
        assert reward_G == [float(answer == group.vote.label) for answer in answers]
    assert 0 < reward_NG.mean() < 1


@pytest.mark.slow
def test_no_label_of_the_training_data_is_read(tmp_path):
    """Without them, and with wrong ones, every weight and decision is the same bit for bit."""
    few = (ROOT / "toy" / "train.jsonl").read_text().splitlines()[:16]
    wrong, none = ("".join(json.dumps(edit(json.loads(line))) + "\n" for line in few)
                   for edit in (lambda row: row | {"answer": "12345", "solution": "#### 12345"},
                                lambda row: {key: row[key] for key in ("id", "question")}))
    (tmp_path / "right.jsonl").write_text("\n".join(few))
    (tmp_path / "wrong.jsonl").write_text(wrong)
    (tmp_path / "none.jsonl").write_text(none)
    policies, logs = {}, {}
    for name in ("right", "wrong", "none"):
        cfg = toy_config(tmp_path / name, f"data.train={tmp_path / name}.jsonl", "steps=3", "labels.most=12",
                         name="optpo_gsm8k.yaml toy.yaml")
        policies[name] = weights(train.train(cfg))
        logs[name] = steps_of(tmp_path / name)
    for name in ("wrong", "none"):
        assert all(p.equal(policies["right"][key]) for key, p in policies[name].items())
        assert ((tmp_path / name / "decisions.jsonl").read_text() ==
                (tmp_path / "right" / "decisions.jsonl").read_text())
    told = {name: [line.get("votes/label_accuracy") for line in logs[name]] for name in logs}
    assert told["none"] == [None] * 3 and told["wrong"] == [0] * 3 and min(told["right"]) > 0
    assert [line["votes/lead"] for line in logs["none"]] == [line["votes/lead"] for line in logs["right"]]


@pytest.mark.slow
@pytest.mark.parametrize("reward", [{}, pytest.param({"tag_exact": 1, "tag_number": 1}, marks=pytest.mark.slow)])
def test_a_prompt_without_an_answer_has_no_reward(reward, tmp_path, monkeypatch):
    """There is no label, so no gradient, and the run goes on. The tokens of all who vote are counted."""
    monkeypatch.setattr(optpo, "extract", lambda text: None)
    cfg = toy_config(tmp_path / "run", "steps=1", "labels.most=12", f"reward={reward}", name="optpo_gsm8k.yaml toy.yaml")
    policy = train.train(cfg)
    line, = steps_of(tmp_path / "run")
    assert line["rollout/unscored"] == 32 and line["prune/kept"] == 0 and line["votes/completions"] == 12
    assert line["rollout/tokens"] > 1.2 * line["rollout/length"] * 8 * 4
    assert torch.isfinite(next(policy.parameters())).all()


@pytest.mark.parametrize(("changes", "said"), [
    (["labels.other=0.7"], r"labels.other=0.7 must be below labels.right=0.6"),
    (["labels.most=4"], r"labels.most=4 must be at least 16 \(rollout.group_size\)"),
    (["labels.threshold=1"], "labels.threshold=1(.0)? must be above 1"),
    (["reward={accuracy: 0, format: 1}"], "labels.kind=votes must be gold if no component"),
    (["advantage.kind=soft_value"], "labels.kind=votes must be gold with advantage.kind=soft_value: V"),
    (["windows.tokens=8", "advantage.kind=gae", "critic.lr=1e-4", "loss.normalize=token"],
     "windows.tokens=8 must be null"),
    (["labels.kind=gold", "labels.most=8"], "labels.most belongs to votes; this is gold")])
def test_what_votes_cannot_go_with_is_refused(changes, said):
    refuses(said, config.load, ["optpo_gsm8k.yaml", "toy.yaml"], changes)
