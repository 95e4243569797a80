"""Engine truth: log-probs are those of a full forward, and a sample is a function of its seed alone."""

import sys
import types

import numpy as np
import pytest
import torch
from conftest import ask, load, make_groups, refuses, unshared, write_tiny
from test_data import edit

import data
import rollout
import rollout_vllm
from infra import dist
from model import sdpa_padded
from pack import Minibatch, Plan, build_row
from records import EngineSpec, Group, Prompt
from rollout import TorchEngine, sample_tokens
from rollout_vllm import VLLMEngine


def spec(folder, slots=4, dtype=torch.float32, eos=frozenset({2}), max_len=100, device="cpu", **more) -> EngineSpec:
    return EngineSpec(folder, dtype, torch.device(device), "sdpa", eos, slots, max_len, **more)


def engine(folder, slots=5, dtype=torch.float32, eos=None) -> TorchEngine:
    return TorchEngine(load(folder, dtype), spec(folder, slots, dtype, eos or data.Tokenizer(folder).eos_ids))


def prompts(lengths=(7, 3, 1, 12, 7, 5, 2, 9)) -> list[tuple[int, ...]]:
    return [g.prompt.ids for g in make_groups([[1]] * len(lengths), list(lengths))]


def trainer_logp(model, prompt, sample, temperature) -> torch.Tensor:
    """Log-probs of a completion by the training path: packed row, projected positions, chunks."""
    one = torch.ones(1, 1)
    group = Group(Prompt("q", prompt, "1"), (sample,))
    row = build_row(Minibatch([group], one.bool(), one, one, one), Plan([(0, 0)]))
    assert row.target_C.tolist() == np.array(sample.ids)[sample.scored].tolist()
    row = row.to(model.embed_tokens.weight.device, torch.float32)
    model.logp_chunk = 4
    with torch.no_grad():
        attend = sdpa_padded(row.segments)
        return model(row.ids_T, row.position_T, attend, row.predict_C, row.target_C, temperature).cpu()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_equal_a_packed_forward_eos_included(kind, temperature, tmp_path):
    """Fewer slots than samples, so that slots are refilled while others are in the middle of a sample."""
    folder = write_tiny(tmp_path, model_type=kind)
    ends = frozenset(range(3, 60))  # many EOS ids, so that most samples end early
    samples = engine(folder, slots=3, eos=ends).generate(ask(prompts(), list(range(8)), 15), temperature)
    assert {s.finished for s in samples} == {True, False}
    assert len({len(s.ids) for s in samples}) > 3
    for prompt, sample in zip(prompts(), samples, strict=True):
        assert sample.finished == (sample.ids[-1] in ends)
        assert not ends & set(sample.ids[:-1])
        assert sample.finished or len(sample.ids) == 15
        torch.testing.assert_close(torch.tensor(sample.logp), trainer_logp(load(folder), prompt, sample, temperature),
                                   rtol=0, atol=1e-4)


def copies_of(lengths, counts) -> list[tuple[int, ...]]:
    """Prompts of these lengths, each so many times."""
    return [prompt for prompt, count in zip(prompts(lengths), counts, strict=True) for _ in range(count)]


@pytest.mark.parametrize("heads", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("slots", "lengths", "counts"), [
    (32, (9, 9, 9, 9), (8, 8, 8, 8)),             # whole groups side by side, until samples end
    (5, (7, 3, 1, 12), (8, 8, 8, 8)),             # refilled one by one: a group's last beside the next one's first
    (3, (1, 1, 2), (4, 4, 4)),                    # prompts of one token leave nothing to keep
    (1, (60, 1, 5), (2, 2, 2)),
    (12, (60, 2, 5, 30, 4, 1, 8), (1, 1, 1, 7, 1, 1, 1)),  # many slots for one prompt, one for the others
    (6, (5, 60, 4, 30, 2, 8), (1,) * 6),          # a prompt for every slot
])
def test_samples_that_share_a_prompt_are_those_of_each_alone(slots, lengths, counts, heads, tmp_path, monkeypatch):
    """So a sample depends on its seed alone. Slots shrink as limits are reached; log-probs agree to rounding."""
    folder = write_tiny(tmp_path, num_key_value_heads=heads)
    dropped, select = [], rollout.Cache.select
    monkeypatch.setattr(rollout.Cache, "select", lambda *arguments: dropped.append(1) or select(*arguments))
    asked = copies_of(lengths, counts)
    seeds, limits = list(range(len(asked))), [(3, 9, 24, 1)[i % 4] for i in range(len(asked))]
    ends = frozenset(range(3, 20))
    shared = engine(folder, slots, torch.float64, ends).generate(ask(asked, seeds, limits), 1.0)
    assert bool(dropped) == (slots > 1)
    assert len({s.ids[0] for s in shared}) > len(lengths) or max(counts) == 1  # another seed
    alone = engine(folder, 1, torch.float64, ends)
    for sample, prompt, seed, limit in zip(shared, asked, seeds, limits, strict=True):
        expected, = alone.generate(ask([prompt], [seed], limit), 1.0)
        assert (sample.ids, sample.finished) == (expected.ids, expected.finished)
        assert max(abs(a - b) for a, b in zip(sample.logp, expected.logp, strict=True)) < 1e-12


def test_a_prompt_is_computed_and_kept_once_however_its_slots_are_refilled(tiny, monkeypatch):
    """Room is that of the prompts that are answered at a time, and of what every slot may sample."""
    computed, answered, kept, prefill, decode = [], [], [], rollout.Cache.prefill, rollout.Cache.decode

    def note_prefill(self, numbers):
        computed.extend(self.prompts[number] for number in numbers)
        prefill(self, numbers)

    def note_bytes(self, *given):
        answered.append(len(set(self.rows)))
        kept.append(sum(x.nbytes for side in (self.of_prompts, self.of_slots) for pair in side for x in pair))
        return decode(self, *given)

    monkeypatch.setattr(rollout.Cache, "prefill", note_prefill)
    monkeypatch.setattr(rollout.Cache, "decode", note_bytes)
    asked = copies_of((7, 3, 2, 12, 5, 8), (4,) * 6)
    answering = engine(tiny, slots=4)
    answering.generate(ask(asked, list(range(24)), [1 + i * 7 % 5 for i in range(24)]), 1.0)
    assert sorted(computed) == sorted(set(asked))
    assert max(answered) == 3
    shape = answering.model.shape  # 4 slots of 5 tokens, and 3 prompts of 11
    assert max(kept) == (4 * 5 + 3 * 11) * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4


def test_greedy_takes_the_largest_logit_of_a_full_forward(tiny):
    model = load(tiny, torch.float64)
    samples = engine(tiny, 3, torch.float64).generate(ask(prompts(), [0] * 8, 10), 0.0)
    for prompt, sample in zip(prompts(), samples, strict=True):
        ids = list(prompt)
        for token in sample.ids:
            attend = sdpa_padded(unshared([len(ids)]))
            with torch.no_grad():
                hidden_TD = model.hidden(torch.tensor(ids), torch.arange(len(ids)), attend)
            assert token == int(model.logits(hidden_TD[-1:]).argmax())
            ids.append(token)


def test_sync_takes_over_the_policys_weights(tiny, tmp_path):
    policy = load(write_tiny(tmp_path, seed=9))
    stale = engine(tiny)
    greedy = ask(prompts(), [0] * 8, 10), 0.0
    before = stale.generate(*greedy)
    stale.sync(policy)
    assert stale.generate(*greedy) == engine(tmp_path).generate(*greedy) != before
    with torch.no_grad():
        policy.norm.weight.zero_()
    assert stale.model.norm.weight.abs().sum() > 0  # a copy, not the policy's own tensors


def test_each_token_is_drawn_with_its_probability():
    """The share of [0, 1) that leads to a token is its probability, found by trying a fine grid of numbers."""
    logits_V = torch.tensor([0.3, -1.0, 2.0, 0.0, -float("inf"), 1.0])
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8)):
        expected_V = (logits_V / temperature).softmax(-1).double()
        if top_p < 1:  # the two largest hold 0.57 + 0.21 < 0.8, so the third is needed and is the last
            expected_V[[1, 3]] = 0
            expected_V /= expected_V.sum()
        grid = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
        token_S, logp_S = sample_tokens(logits_V.expand(100_000, -1), grid, temperature, top_p)
        torch.testing.assert_close(token_S.bincount(minlength=6) / 100_000, expected_V.float(), rtol=0, atol=1e-4)
        torch.testing.assert_close(logp_S, (logits_V / temperature).log_softmax(-1)[token_S])
    assert rollout.keep_nucleus(torch.tensor([[0.5, 0.25, 0.25]]), 0.5).tolist() == [[0.5, 0, 0]]
    logits_V, largest = torch.tensor([0.0, 1.0, -float("inf")]), torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits_V[None], largest, 1.0, 1.0)[0].tolist() == [1]  # and no token of probability 0


def test_a_finished_slot_takes_the_next_prompt_at_once(tiny, monkeypatch):
    """As many decoding steps as a schedule that always gives the next sample to the slot that is free first."""
    steps, decode = [], rollout.Cache.decode
    monkeypatch.setattr(rollout.Cache, "decode", lambda *arguments: steps.append(1) or decode(*arguments))
    ends = frozenset(range(3, 60))
    samples = engine(tiny, slots=3, eos=ends).generate(ask(prompts([3] * 12), list(range(12)), 15), 1.0)
    busy = [0, 0, 0]
    for sample in samples:
        busy[busy.index(min(busy))] += len(sample.ids)
    assert len({len(s.ids) for s in samples}) > 3 and len(steps) == max(busy)


def test_draws_are_uniform_and_independent_of_how_many_are_asked_for():
    assert (rollout.draw_uniforms(5, 10) == rollout.draw_uniforms(5, 100)[:10]).all()
    firsts = torch.tensor([rollout.draw_uniforms(dist.seed_for(0, 0, "q", g, "rollout"), 1)[0] for g in range(2000)])
    counts = torch.histc(firsts.float(), bins=10, min=0, max=1)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-square, 9 degrees of freedom, 0.1%


def test_every_file_that_names_an_eos_counts(tmp_path):
    folder = write_tiny(tmp_path)
    edit(folder, "config.json", eos_token_id=5)
    edit(folder, "generation_config.json", eos_token_id=[7, 9])
    own = data.Tokenizer(folder).rust.token_to_id("<|im_end|>")
    assert data.Tokenizer(folder).eos_ids == {5, 7, 9, own}


def test_an_engine_without_weights_refuses_to_sample(tiny):
    asleep = engine(tiny)
    asleep.sleep()
    with pytest.raises(RuntimeError, match="no weights; sync it first"):
        asleep.generate(ask(prompts(), [0] * 8, 10), 0.0)
    asleep.sync(load(tiny))
    assert asleep.generate(ask(prompts(), [0] * 8, 10), 0.0) == engine(tiny).generate(ask(prompts(), [0] * 8, 10), 0.0)


def vllm_of(version: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(LLM=None, SamplingParams=None, __version__=version)


@pytest.mark.parametrize(("module", "changes", "message"), [
    (None, {}, r"vllm cannot be imported \(.*\); install requirements/gpu.txt"),
    (vllm_of("0.31.0"), {}, "needs vllm 0.32.0, the version that is tested, not 0.31.0; install"),
    (vllm_of(rollout_vllm.VLLM_VERSION), {}, "this vllm runs on cuda, and device=cpu; install the build for it"),
    (None, {"tensor_parallel": 2}, "rollout.tensor_parallel=2 must divide 1, the number of processes")])
def test_vllm_that_is_missing_or_does_not_fit_is_an_error_with_the_remedy(module, changes, message, tiny, monkeypatch):
    platform = types.SimpleNamespace(current_platform=types.SimpleNamespace(device_type="cuda"))
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    refuses(message, VLLMEngine, spec(tiny, **changes))
