"""docs/atlas.md says what its program computes, and a second program, by numpy alone, computes the same entries."""

import re
from contextlib import ExitStack
from unittest.mock import patch

import atlas
import estimators
import pytest
import recomputed
import recomputed_draws
import torch
from atlas import EXACT, LITERATURE, PROBLEMS, TABLES, Row, measure, problem_of
from conftest import ROOT, others_slow
from enumeration import SKIPPING, all_steps
from estimators import ADVANTAGES, CONTROLS, DRAWN, PRUNERS, REGIONS, WEIGHING, Estimator
from try_method import KINDS, load

from settings import loader
from settings.loader import ConfigError

CHANCE = ("bernoulli", "pps")  # kinds that draw


@pytest.mark.house
def test_the_page_has_the_numbers_of_the_program():
    text = (ROOT / "docs" / "atlas.md").read_text()
    computed = atlas.tables()
    for row in computed["Methods of 2026"][2:]:
        name, *figures = row.strip("| ").split(" | ")
        assert re.search(rf"^\|{name}, 26\d\d\.\d{{5}}\|{'.'.join(figures[:3])}\|", text, re.MULTILINE), row
    in_tables = set(re.findall(r"\d\.\d+", "\n".join(line for lines in computed.values() for line in lines)))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    assert not set(re.findall(r"\b\d\.\d{2,3}\b", prose)) - in_tables


def meets_the_conditions(normalize, advantage, completions, denominator, prompts, behind, trust, **_) -> bool:
    """The conditions of the page's section "When a combination is exact"."""
    fixed = completions.startswith("pps") and advantage in ("soft_value", "shrinkage")  # completions kept
    return (normalize in ("sum", "constant")
            and advantage in ("reward", "soft_value", "leave_one_out", "centred", "shrinkage")
            and (completions == "none" or completions.split()[0] in CHANCE and (denominator == "all" or fixed))
            and (prompts in ("all", "bernoulli", "pps")
                 or prompts == "refill" and advantage in ("leave_one_out", "centred"))
            and (behind == "on-policy" or trust == "ratio of the completion"))


@pytest.mark.slow
def test_the_exact_combinations_are_those_that_meet_the_conditions():
    rows = atlas.all_rows()
    assert not [row for row in rows if EXACT <= row["bias"] <= 1e-3]
    combined = [row for row in rows if row["problem"] == "main" and "advantage" in row]
    exact = [row for row in combined if row["bias"] < EXACT]
    assert f"{len(combined):,} combinations" in (ROOT / "docs" / "atlas.md").read_text() and len(exact) == 74
    assert exact == [row for row in combined if meets_the_conditions(**row)]


@pytest.mark.parametrize("name", [*REGIONS, *CONTROLS])
def test_on_policy_every_trust_region_is_1(name):
    problem = problem_of("main")
    pull_QK3P = estimators.pulls(problem, name, "on-policy")
    torch.testing.assert_close(pull_QK3P, problem.full_QKP[:, :, None].expand_as(pull_QK3P), rtol=0, atol=1e-14)


def again(row: Row) -> tuple[float, float, float]:
    """Compute a row by the second program."""
    w, chosen = recomputed.World(**PROBLEMS[row.problem]), row.chosen
    if isinstance(chosen, str):
        rule = LITERATURE[chosen][1]
        if rule == "ragged":
            s = w.steps("ragged")
            adv = recomputed.loo(recomputed.look(s, w.r), s["t"])
            return recomputed.estimate(w, s, adv * 3 / recomputed.total(s["t"]))
        by_rule = {"recent": recomputed.recent, "turns": recomputed.turns, "taught": recomputed.distilled,
                   "drawn": recomputed.distilled}
        return by_rule.get(rule, recomputed.baseline)(w, chosen)
    if chosen.completions != "none" and row.problem == "main":
        return recomputed_draws.pruned(w, chosen.completions, chosen.denominator)
    if chosen.behind != "on-policy":
        return recomputed.stale(w, chosen.trust, chosen.behind, chosen.normalize)
    s = w.steps(chosen.prompts)
    adv, kept = recomputed.advantages(w, s, chosen.advantage), None
    if chosen.completions == "topk":
        kept = recomputed_draws.largest(adv, 2)
        adv = adv * kept
    return recomputed.estimate(w, s, adv, chosen.normalize, kept if chosen.denominator == "kept" else None)


@pytest.mark.parametrize("title", others_slow([*TABLES], "Methods of 2026", "Two turns", "Baselines", "Trust regions"))
def test_every_entry_is_that_of_a_second_program(title):
    for row in dict.fromkeys(TABLES[title]):
        figures = measure(row)
        told = (figures["scale"], figures["bias"], figures["variance"])
        assert again(row) == pytest.approx(told, abs=1e-7, nan_ok=True), row


@pytest.mark.parametrize("seed", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_asynchrony_is_that_of_a_second_program(seed):
    drawn = load(ROOT / "assets" / "draw_asynchrony.py")
    tree, *made = drawn.world(seed, 3)
    told = drawn.figures(tree, *made)
    mine = recomputed_draws.flight([*tree.values()], *(x.numpy() for x in made), recomputed.policy)
    assert mine.keys() == told.keys()
    assert told[drawn.WHOLE][1] < EXACT
    for name, (scale, bias, variance, _) in told.items():
        assert mine[name] == pytest.approx([scale, bias, variance], abs=1e-10), name


@pytest.fixture
def tried(tmp_path, capsys):
    """Write a method's file, and its config beside it, and print it beside the atlas's entries."""
    def run(text: str, setting: str = "", *settings: str) -> str:
        (folder := tmp_path / str(hash(text))).mkdir()  # a path is imported once
        for cached in (measure, all_steps, estimators.draw_all, estimators.pulls, estimators.token_pulls):
            cached.cache_clear()
        (folder / "mine.py").write_text(text)
        (folder / "mine.yaml").write_text(f"base: {ROOT}/experiments/long_sums.yaml\n{setting}\n")
        atlas.try_own(str(folder / "mine.py"), None, [*settings])
        return capsys.readouterr().out

    with ExitStack() as stack:
        for section, _, table in KINDS.values():
            stack.enter_context(patch.dict(table))
            stack.enter_context(patch.dict(section.__annotations__))
        for table in (ADVANTAGES, PRUNERS, REGIONS, SKIPPING, WEIGHING):
            stack.enter_context(patch.dict(table))
        yield run
    for cached in (measure, all_steps, estimators.draw_all, estimators.pulls, estimators.token_pulls, loader.hints,
                   loader.extended):
        cached.cache_clear()
    DRAWN.intersection_update({"pps"})


def test_the_file_of_the_page_is_biased_in_a_world_that_one_can_add_up(tried):
    text = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "fork.md").read_text(), re.DOTALL)[1]
    said = tried(text, "advantage: {kind: deviation, eps: 1e-13}")
    assert re.search(r"mine \| 1.9\d \| 0.099 \| 1.61 ", said) and "| group_norm | 1.47 | 0.081 | 1.59 |" in said
    assert "True gradient, sum of chance x reward x grad logp by prompts: (3/16, -1/16, 0)" in said
    assert "| ae:1 e:-1 | 1/4 | (1/2, -1/4, 0) |" in said  # 1/2 (1/2, -1/2) - 1/2 (-1/2, 0)
    assert "| aa:1 e:-1 | 1/4 | (1/2, 1/4, 0) |" in said and "| aa:-1 ae:1 | 1/8 | (0, -1/2, 0) |" in said
    assert "Mean, the sum of chance x gradient: (1/4, -1/16, 0)" in said
    assert "The mean is 1.3000 times the true gradient, and 0.0769 of that off." in said


HEAD = """
import torch
from prune import thin
from settings.kinds import Comparison, Draw
from settings.loader import kind
@kind("{}")
class Mine({}):
    "Mine."
"""
SKIPPED = HEAD.format("small", "Draw") + """
    refills = False
PROMPTS = {Mine: lambda memory, settings: memory.size_K}
"""
RANDOM = HEAD.format("random", "") + """
def draw(given, settings):
    point = torch.rand(given.adv_NG.shape, generator=torch.Generator().manual_seed(given.seed))
    chance_NG = torch.full_like(given.adv_NG, 0.5)
    return thin(STATED, point < chance_NG)
COMPLETIONS = {Mine: draw}
"""
ADVANTAGE = HEAD.format("strange", "Comparison") + "ADVANTAGES = {Mine: lambda rewards, settings: RESULT}"
STRANGE = "advantage: {kind: strange}"


def test_a_pruner_of_prompts_is_exact_if_each_may_be_rolled_out(tried):
    said = tried(SKIPPED, chosen := "prune: {prompts: {kind: small}}")
    assert "| mine | 1.00 | exact |" in said and "| rank | 0.41 | 1.212 |" in said
    said = tried(SKIPPED.replace("_K}", "_K > 0.4}").replace('"small"', '"hard"'), chosen.replace("small", "hard"))
    assert "Biased in a world of two prompts, one or two tokens, rewards 0/1" in said
    with pytest.raises(ConfigError, match=r"returned \[1.1.*, 0.8.*, and must return probabilities"):
        tried(SKIPPED.replace("_K}", "_K + 0.5}").replace('"small"', '"more"'), chosen.replace("small", "more"))
    with pytest.raises(ConfigError, match="cannot express prune.prompts.kind=easy: it has no prompts to draw"):
        tried(SKIPPED.replace("False", "True").replace('"small"', '"easy"'), chosen.replace("small", "easy"))


@pytest.mark.slow
def test_a_pruner_that_draws_is_exact_by_the_chances_that_it_states_and_these_are_tested(tried):
    said = tried(RANDOM.replace("STATED", "chance_NG"), chosen := "prune: {completions: {kind: random}}")
    assert "| mine | 1.00 | exact |" in said and f"Exact in all {len(atlas.WORLDS)} worlds tried" in said
    with pytest.raises(ConfigError, match="states chances of .* and keeps .* times in"):
        tried(RANDOM.replace("STATED", "chance_NG / 3").replace('"random"', '"bad"'), chosen.replace("random", "bad"))
    with pytest.raises(ConfigError, match="kind=sly draws, and states chances of 0 and 1"):
        tried(RANDOM.replace("STATED", "1.0 * (point < .5)").replace("random", "sly"), chosen.replace("random", "sly"))
    by_size = RANDOM.replace("STATED", "chance_NG * 0 + 1 / point.shape[1]").replace('"random"', '"worse"').replace(
        "point < chance_NG", "(r := point.log() / (1 + given.adv_NG.abs())) == r.amax(dim=1, keepdim=True)")
    with pytest.raises(ConfigError, match="keeps others than by the chances that it states, by"):
        tried(by_size, chosen.replace("random", "worse"))  # one of a group, as often as it says, but not which


WEIGH = """
from loss import engine_weight
ENTROPY = True
def weigh(rows, logp, entropy, loss):
    return [FACTOR for row, logp_C, entropy_C in zip(rows, logp, entropy, strict=True)]
"""


def test_token_weights_are_those_of_a_trust_region_of_the_same_factors(tried):
    ratio = "engine_weight(logp_C, row.sampled_logp_C, row.segment_C, 2.0, None)"
    assert "| mine | 1.00 | exact |" in tried(WEIGH.replace("FACTOR", ratio))  # 1 where the policy is the same
    for completions in ("bernoulli", "topk", "pods"):
        mine, known = (measure(Row("", Estimator(behind="near", completions=completions, **way), "", "one prompt, 0/1"))
                       for way in ({"weigh": "mine"}, {"trust": "token ratio, at most 2"}))
        assert mine == pytest.approx(known, abs=1e-12) and mine["bias"] > 0.01


@pytest.mark.slow
def test_token_weights_get_entropies_and_a_wrap_may_check_the_config(tried):
    said = tried(WEIGH.replace("FACTOR", "entropy_C / torch.tensor(2).log()").replace("from loss", "import torch #"))
    assert "| none | 1.00 | exact |" in said and "| mine | 0." in said
    assert "Exact in all 5 worlds tried" in said  # where every chance is 1/2
    otb, compared = (ROOT / "experiments/court/otb.py").read_text(), "advantage: {kind: leave_one_out}"
    assert "| mine | 1.00 | exact | 5.82 |" in tried(otb, compared)
    said = tried(otb.replace("own: bool = False", "own: bool = True"), compared)
    assert "| ae:1 e:-1 | 1/4 | (1/4, -1/12, 0) |" in said  # baselines of 1/2, and of 2/3 behind the end of e
    with pytest.raises(ConfigError, match="otb needs advantage.kind=leave_one_out"):
        tried(otb + "# as the recipe has it")


@pytest.mark.parametrize(("text", "setting", "said"), [
    ("x =", "", "mine.py raised SyntaxError: invalid syntax"),
    ("def wrap(cfg, history, sampler): ...", "", "cannot express wrap: it replaces the sampler, .* hashes of seeds"),
    ("def weigh(rows, logp, entropy, loss): return [entropy[0], logp[0]]", "", "returned .'None', .2.., and must"),
    (WEIGH, "loss: {tis_cap: 2}", "loss.tis_cap=2.0 must be null: weigh of .*mine.py is in its place"),
    (WEIGH, "loss: {trust: {kind: none}}", "cannot express trust with weigh"),
    (WEIGH, "advantage: {kind: soft_value}", "cannot express advantage.kind=soft_value"),
    (WEIGH, "prune: {completions: {kind: pps, keep: 4}}", "keeps all of the atlas's groups of 2"),
    (WEIGH, "prune: {completions: {kind: pps, error: 0.1}}", "or is by no number: give --set prune.completions.keep=2"),
    ("TRUST = [1]", "", "TRUST of .*mine.py must be a dict"),
    (HEAD.format("far", "") + "TRUST = {Mine: lambda x, _: x.logp_C.cumsum(0)}", "loss: {trust: {kind: far}}", "a row"),
    (ADVANTAGE.replace("RESULT", "rewards.total_NG[0]"), STRANGE, r"strange returned \[2\], and must .* of \[1, 2\]"),
    (ADVANTAGE.replace("RESULT", "rewards.total_NG.log()"), STRANGE, "strange returned nan or inf"),
    (ADVANTAGE.replace("RESULT", "rewards.best"), STRANGE, "strange raised AttributeError: 'Rewards' object has no"),
    (ADVANTAGE.replace("RESULT", "rewards.total_NG"), "", "is not of .*: give --set"),
    (HEAD.format("odd", "object") + "TRUST = {Mine: lambda x, _: x.adv_C}", "loss: {trust: {kind: odd}}", "than their"),
])
def test_a_file_that_is_no_method_is_refused_in_one_line(tried, text, setting, said):
    with pytest.raises(ConfigError, match=rf"\A(?=.*{said}).*\Z"):  # `.` is of one line
        tried(text, setting)
