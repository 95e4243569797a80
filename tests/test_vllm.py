"""Engine truth for the real vLLM: its CUDA build in bfloat16 where there is a device, else its CPU build in float32.

After a sync everything is that of our own forward of the new weights, and where vLLM would keep something old it shows.
One engine per process: `make test-vllm` (CPU) and `make test-gpu` run this file once per model.
"""

import copy
import os
import zlib

import pytest
import torch
import vllm_async
from conftest import PRECISION, ask, make_groups, unshared, write_tiny
from test_rollout import spec, trainer_logp

import data
from infra import dist
from model import Decoder, empty_model, load_model, sdpa_padded
from records import Sample
from rollout_vllm import VLLMEngine

pytestmark = pytest.mark.vllm

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
MODELS = {
    "qwen2": {},
    "qwen2-untied": {"tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_parameters": LLAMA3},
    "gemma3": {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 32,
               "layer_types": ["sliding_attention", "full_attention"], "std": 0.04},  # larger ones repeat one token
    "olmo3": {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "sliding_window": 32,
              "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32},
    "smollm3": {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0],
                "pad_token_id": 0}}
SIZE = {"std": 0.15, "hidden_size": 128, "head_dim": 32}  # vLLM's CPU attention has no narrower heads
MAX_LEN = 256
# On CUDA so much that it shows in the device's free memory; on the CPU what the engine counts by itself.
CACHE_GIB = 0.25 if PRECISION.device == "cuda" else None


def states() -> tuple:
    """What an engine in the trainer's process must leave alone."""
    return dict(os.environ), torch.get_num_threads(), torch.set_num_threads


@pytest.fixture(scope="session")
def device(process_group):
    dist.close()  # the suite's group is gloo alone
    return dist.init(PRECISION.device)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, request):
    return write_tiny(tmp_path_factory.mktemp("model"), **SIZE | MODELS[request.config.getoption("--vllm-model")])


@pytest.fixture(scope="session")
def queued_steps(request, device) -> list[int]:
    """The length of CUDA's queue of steps at each step, if that scheduler is asked for in the CPU build."""
    asked = PRECISION.exact and request.config.getoption("--vllm-async")
    return vllm_async.switch_on() if asked else []


@pytest.fixture(scope="session")
def started(folder, device, queued_steps, request):
    """The engine, and the states before and after it started."""
    empty_model(folder, torch.float32)  # torch itself sets a variable when it first meets the meta device
    before = states()
    tokenizer = data.Tokenizer(folder, stop=["stop"])  # only then vLLM loads the tokenizer
    engine = VLLMEngine(spec(folder, 6, PRECISION.dtype, tokenizer.eos_ids, MAX_LEN, device, cache_gib=CACHE_GIB,
                             stops=tokenizer.stops, sleeps=not request.config.getoption("--vllm-awake")))
    assert engine.stops == ["stop"]
    engine.stops = []
    return engine, before, states()


@pytest.fixture
def engine(started):
    return started[0]


@pytest.fixture
def policy(folder, device, tmp_path, request):
    """New weights for every test."""
    changes = MODELS[request.config.getoption("--vllm-model")]
    seed = zlib.crc32(request.node.name.encode())
    return load_model(write_tiny(tmp_path / "policy", seed=seed, **SIZE | changes), PRECISION.dtype, device)


def prompts(lengths=(7, 3, 1, 200, 7, 5, 2, 140)) -> list[tuple[int, ...]]:
    """Two are longer than a block of the prefix cache (128 tokens on the CPU)."""
    return [g.prompt.ids for g in make_groups([[1]] * len(lengths), list(lengths))]


def gaps(policy: Decoder, asked: list[tuple], samples: list[Sample], temperature: float = 1.0) -> torch.Tensor:
    """Engine's log-prob less that of our packed forward, of every token sampled."""
    return torch.cat([torch.tensor(s.logp) - trainer_logp(policy, p, s, temperature)
                      for p, s in zip(asked, samples, strict=True)])


def is_in_step(engine: VLLMEngine, policy: Decoder, temperature: float = 1.0) -> bool:
    """Whether what it samples for all prompts has the log-probs of our forward."""
    samples = engine.generate(ask(prompts(), list(range(8)), 20), temperature)
    return PRECISION.agrees(gaps(policy, prompts(), samples, temperature))


def full_logits(policy: Decoder, ids: tuple[int, ...]) -> torch.Tensor:
    """[T, V], after each token, by a forward of all of them."""
    ids_T = torch.tensor(ids, device=policy.embed_tokens.weight.device)
    segments = unshared([len(ids_T)], ids_T.device)
    with torch.no_grad():
        return policy.logits(policy.hidden(ids_T, torch.arange(len(ids_T), device=ids_T.device),
                                           sdpa_padded(segments))).cpu()


def assert_greedy(policy: Decoder, completions: list[tuple[int, ...]]) -> None:
    """Every token has the largest logit of a full forward of what stands before it, up to rounding."""
    below_C = []
    for prompt, ids in zip(prompts(), completions, strict=True):
        logits_CV = full_logits(policy, (*prompt, *ids))[len(prompt) - 1:-1]
        below_C.append(logits_CV.max(dim=-1).values - logits_CV[range(len(ids)), ids])
    assert PRECISION.agrees(torch.cat(below_C))


def assert_same(samples: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> None:
    """In bfloat16 another batch is another rounding, and now and then another token: most of the first are the same."""
    if PRECISION.exact:
        assert samples == others
    else:
        assert sum(a[0] == b[0] for a, b in zip(samples, others, strict=True)) >= 0.75 * len(samples)


def test_without_weights_it_refuses_to_sample(started):
    started[0].sleep()
    with pytest.raises(RuntimeError, match="no weights; sync"):
        started[0].generate(ask(prompts(), [0] * 8, 5), 1.0)


def test_the_trainers_process_is_left_as_it_was(started):
    _, before, after = started
    assert before == after and dist.world_size() == 1 and dist.gather([1]) == [1]


def test_the_scheduler_is_that_of_docs_running(engine, policy, queued_steps, request):
    """On CUDA steps are scheduled ahead. One stays in the queue after the last sample; syncs and sleep meet it."""
    core = engine.llm.llm_engine.engine_core.engine_core
    ahead = PRECISION.device == "cuda" or request.config.getoption("--vllm-async")
    assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling == ahead
    assert (core.batch_queue is not None) == ahead
    for turn in range(4):
        with torch.no_grad():
            policy.norm.weight *= 0.9
        if turn % 2:
            engine.sleep()
        engine.sync(policy)
        assert is_in_step(engine, policy)
        assert not queued_steps or len(core.batch_queue) == 1
    assert len(queued_steps) > 40 or not (ahead and PRECISION.exact)


def test_after_a_sync_it_is_our_forward_of_the_new_weights(engine, policy):
    for change in (1.0, 0.9):  # a second sync over the first
        with torch.no_grad():
            for p in policy.parameters():
                p *= change
        engine.sync(policy)
        assert_greedy(policy, [s.ids for s in engine.generate(ask(prompts(), [0] * 8, 20), 0.0)])
        for temperature in (1.0, 0.7):
            assert is_in_step(engine, policy, temperature)


def test_a_prefix_of_the_old_weights_would_be_seen(engine, policy, monkeypatch):
    engine.sync(policy)
    assert is_in_step(engine, policy)
    with torch.no_grad():
        policy.layers[0].self_attn.v_proj.weight *= -1
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
        engine.sync(policy)
    assert not is_in_step(engine, policy)
    engine.sync(policy)
    assert is_in_step(engine, policy)


def test_every_single_tensor_arrives(engine, policy):
    """The head too, tied or not."""
    for name, p in policy.named_parameters():
        with torch.no_grad():
            p *= 0.5
        if name in ("embed_tokens.weight", "lm_head.weight"):
            assert not is_in_step(engine, policy), name
        engine.sync(policy)
        assert is_in_step(engine, policy), name


def test_a_wrong_tensor_never_reaches_it(engine, policy):
    engine.sync(policy)
    before = copy.deepcopy(policy)
    whole = policy.norm.weight
    policy.norm.weight = torch.nn.Parameter(torch.ones(7))
    with pytest.raises(ValueError, match=r"model.norm.weight: \(128,\) there and \(7,\) here, in the policy"):
        engine.sync(policy)
    del policy.norm.weight
    with pytest.raises(ValueError, match=r"model.norm.weight: \(128,\) there and nothing here, in the policy"):
        engine.sync(policy)
    policy.norm.weight, policy.norm.other = whole, torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"model.norm.other: nothing there and \(3,\) here, in the policy"):
        engine.sync(policy)
    assert is_in_step(engine, before)


@pytest.mark.skipif(PRECISION.device == "cpu", reason="only on CUDA does an engine that sleeps give up its memory")
def test_sleep_gives_the_memory_of_the_cache_back(engine, policy, device):
    for _ in range(2 * engine.sleeps):
        engine.sync(policy)
        awake, _ = torch.cuda.mem_get_info(device)
        engine.sleep()
        asleep, _ = torch.cuda.mem_get_info(device)
        assert asleep - awake > 0.9 * CACHE_GIB * 2**30


def test_a_sample_depends_on_its_seed_alone(engine, policy):
    engine.sync(policy)
    seeds = [dist.seed_for(0, i) for i in range(8)]
    whole = [s.ids for s in engine.generate(ask(prompts(), seeds, 20), 1.0)]
    assert_same([s.ids for s in engine.generate(ask(prompts()[::-1], seeds[::-1], 20), 1.0)[::-1]], whole)
    assert_same([s.ids for i in range(8) for s in engine.generate(ask([prompts()[i]], [seeds[i]], 20), 1.0)], whole)
    same = engine.generate(ask([prompts()[0]] * 16, [dist.seed_for(1, i) for i in range(16)], 20), 1.0)
    assert len({tuple(s.ids) for s in same}) == 16


def test_samples_end_with_each_of_our_eos_ids_and_with_no_other(engine, policy, monkeypatch):
    engine.sync(policy)
    ends = frozenset(range(3, 60))
    monkeypatch.setattr(engine, "eos_ids", ends)
    samples = engine.generate(ask(prompts() * 4, list(range(32)), 15), 1.0)
    assert {s.finished for s in samples} == {True, False}
    assert len({s.ids[-1] for s in samples if s.finished}) > 3
    for sample in samples:
        assert sample.finished == (sample.ids[-1] in ends)
        assert not ends & set(sample.ids[:-1])
        assert sample.finished or len(sample.ids) == 15


def test_samples_end_with_the_token_that_completes_a_stop_text(engine, policy, folder, monkeypatch):
    """The beginning of the sample that there is without, up to where a text is whole, which lies in two tokens."""
    engine.sync(policy)
    tokenizer, asked, seeds = data.Tokenizer(folder), prompts() * 4, list(range(32))
    whole = engine.generate(ask(asked, seeds, 30), 1.0)
    pairs = [[tokenizer.decode([i]) for i in s.ids[n:n + 2]] for s in whole for n in range(0, s.length - 2, 3)]
    texts = sorted({left[-2:] + right[:2] for left, right in pairs if left.isalpha() and right.isalpha()})[::4]
    monkeypatch.setattr(engine, "stops", texts)
    stopped = engine.generate(ask(asked, seeds, 30), 1.0)
    assert sum(s.finished for s in stopped) > 2 + sum(s.finished for s in whole)
    assert PRECISION.agrees(gaps(policy, asked, stopped))
    stops = data.Tokenizer(folder, stop=texts).stops
    for long, short in zip(whole, stopped, strict=True):
        ended = stops.reached([list(short.ids)])[0]
        assert not stops.reached([list(short.ids[:-1])])[0]
        assert short.finished == (ended or short.ids[-1] in engine.eos_ids)
        assert short.ids == long.ids[:short.length] or not PRECISION.exact
        assert short.finished or short.length == 30


def test_greedy_and_top_p_follow_their_definition(engine, policy):
    """Tokens stay within the nucleus, and log-probs are renormalised over it; no rounding moves its edge."""
    engine.sync(policy)
    prob_V = full_logits(policy, prompts()[0])[-1].double().softmax(dim=-1)
    sorted_V, place_V = prob_V.sort(descending=True)
    kept = 3 + int((sorted_V[2:40] / sorted_V[3:41]).argmax())
    top_p = float(sorted_V[:kept].sum() - sorted_V[kept - 1] / 2)
    samples = engine.generate(ask([prompts()[0]] * 32, list(range(32)), 1), 1.0, top_p=top_p)
    ids = [s.ids[0] for s in samples]
    assert set(ids) <= set(place_V[:kept].tolist())
    assert PRECISION.agrees(torch.tensor([s.logp[0] for s in samples]) - (prob_V[ids] / sorted_V[:kept].sum()).log())


def test_completions_go_on_under_the_weights_of_now_each_up_to_a_limit_of_its_own(engine, policy, folder, device):
    """What a window left, some of it longer than a cached block, is read again with the new weights."""
    engine.sync(load_model(folder, PRECISION.dtype, device))
    limits = [5, 1, 20, 30, 9, 2, 12, 40]
    begun = engine.generate(ask(prompts(), list(range(8)), limits), 1.0)
    assert all(s.length == limit or s.finished for s, limit in zip(begun, limits, strict=True))
    so_far = [(*p, *s.ids) for p, s in zip(prompts(), begun, strict=True)]
    engine.sync(policy)
    rest = engine.generate(ask(so_far, list(range(8, 16)), limits[::-1]), 1.0)
    assert PRECISION.agrees(gaps(policy, so_far, rest))


def test_turns_behind_replies_have_our_log_probs_and_read_little_again(engine, policy, folder, monkeypatch):
    """Of a turn's prompt, whole blocks of the turn before come from the cache of prefixes (128 tokens on the CPU)."""
    from leaves.environment.join import EnvironmentEngine
    from leaves.environment.test_environment import Inline
    engine.sync(policy)
    tokenizer, asked = data.Tokenizer(folder), prompts([60, 90, 120, 90])
    whole = engine.generate(ask(asked, [1, 2, 3, 4], 12), 1.0)
    texts = sorted({tokenizer.decode([token]) for sample in whole for token in sample.ids[4:6]} - {""})
    monkeypatch.setattr(engine, "stops", texts)
    read, generate = [], engine.llm.generate

    def noting(*given, **named):
        outputs = generate(*given, **named)
        read.append([(len(output.prompt_token_ids), output.num_cached_tokens) for output in outputs])
        return outputs

    monkeypatch.setattr(engine.llm, "generate", noting)
    speaker = Inline(lambda text, row: " 1 2 3 4 5 6 7 8 9 " * 2, turns=5, max_context=MAX_LEN)
    talking = EnvironmentEngine(engine, tokenizer, speaker, lock_step=False)
    samples = talking.generate(ask(asked, [1, 2, 3, 4], 100), 1.0)
    assert sum(len(sample.replies) for sample in samples) >= 6
    gap = torch.cat([torch.tensor(s.logp.tolist())[s.scored] - trainer_logp(policy, p, s, 1.0)
                     for p, s in zip(asked, samples, strict=True)])
    assert PRECISION.agrees(gap)
    later = [pair for turn in read[1:] for pair in turn]
    print("context and tokens computed, turn by turn:", [
        (sum(length for length, _ in turn), sum(length - cached for length, cached in turn)) for turn in read])
    assert all(cached >= length // 128 * 128 - 128 for length, cached in later) and any(cached for _, cached in later)
