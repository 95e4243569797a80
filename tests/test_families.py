"""Every row of the table of families against transformers: settings, logits, gradients, decoding, adapters, exports."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from compare_logits import compare
from conftest import ask, attend_alone, load, make_groups, nudge, others_slow, refuses, toy_config, write_tiny
from test_invariance import assert_same, change, gradient, on_ranks
from test_rollout import spec, trainer_logp

from infra.device import parameters
from infra.export import export
from infra.families import FAMILIES
from infra.weights import read_shape
from model import Decoder
from rollout import TorchEngine

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "pad_token_id": 0,
         "bos_token_id": None, "eos_token_id": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WIDE = {"head_dim": 16}
CASES = {  # settings of config.json, in the layout of published folders; all that is left out has the family's default
    "qwen3-bias": {"model_type": "qwen3", **WIDE, "attention_bias": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "num_key_value_heads": 4},
    "mistral": {"sliding_window": None, "attention_dropout": 0.0, "tie_word_embeddings": False},
    "mistral-window": {"model_type": "mistral", "sliding_window": 6, "tie_word_embeddings": True, **WIDE},
    "smollm3": {"attention_bias": False, "max_window_layers": 28, "mlp_bias": False, "pretraining_tp": 2,
                "rope_scaling": None, "rope_theta": 5e6, "sliding_window": None, "use_sliding_window": False},
    "smollm3-window": {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 5,
                       "no_rope_layer_interval": 2, "tie_word_embeddings": False, "attention_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "qwen3": {**WIDE, "use_sliding_window": True, "sliding_window": 4, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 6, "rope_scaling": {**YARN, "attention_factor": 1.2}},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2, "head_dim": 16, "query_pre_attn_scalar": 24,
                    "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3-all": {"model_type": "gemma3_text", "sliding_window": 9, "num_hidden_layers": 7, "head_dim": 8,
                   "tie_word_embeddings": False, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                   "cache_implementation": "hybrid", "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": None},
    "glm4": {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5},
    "ministral3": {"head_dim": 16, "rope_parameters": {
        **YARN, "rope_theta": 1e6, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.1}},
    "llama3": {"model_type": "llama", "rms_norm_eps": 0.5, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}},
    "llama-yarn": {"model_type": "llama", "rope_scaling": {**YARN, "type": "yarn", "beta_fast": 8}},
    "qwen2-yarn": {"model_type": "qwen2", "rope_scaling": {**YARN, "beta_slow": 0.5}}}
NAMES = others_slow(CASES, "mistral-window", "smollm3-window", "olmo3", "gemma3_text", "glm4", "ministral3", "llama3")


def write_case(path: Path, name: str) -> Path:
    """A folder of random weights, as transformers writes them, with config.json as it was given."""
    settings = {"model_type": name, **SMALL, **CASES[name]}
    (path / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    for key, p in model.named_parameters():  # biases and norms must matter
        torch.nn.init.normal_(p, mean=float("norm" in key and "gemma" not in name), std=0.2)
    model.save_pretrained(path, max_shard_size="50KB" if name.startswith("gemma") else "5GB")
    assert (path / "model.safetensors.index.json").exists() == name.startswith("gemma")
    (path / "new.json").write_text((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return cache(lambda name: write_case(tmp_path_factory.mktemp(name), name))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_of_a_row_with_shared_prompts_are_those_of_transformers(name, folders, tmp_path):
    logits, gradients, largest = compare(folders(name))
    assert logits < 1e-8 and gradients < 1e-8 and largest > 1e-2
    logits, _, _ = compare(folders(name), torch.float32)
    assert logits < 1e-5
    # Settings that transformers writes and published ones are one shape.
    (tmp_path / "config.json").write_text((folders(name) / "new.json").read_text())
    shape = read_shape(folders(name))
    assert replace(read_shape(tmp_path), tied=shape.tied) == replace(shape, dtype=torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_embedded_engine_samples_has_the_log_probs_of_a_full_pass(name, folders):
    """Prompts and completions are longer than the windows; slots are refilled while others are in a sample."""
    model = load(folders(name), torch.float64)
    engine = TorchEngine(load(folders(name), torch.float64), spec(folders(name), slots=4, dtype=torch.float64))
    prompts = [(5, 9, 31, 8, 77, 60, 12, 9, 14), (5,), (44, 3, 8)]
    asked = [prompts[i] for i in (0, 0, 1, 2, 0, 2)]
    samples = engine.generate(ask(asked, list(range(6)), 18), 1.0)
    assert max(sample.length for sample in samples) > 10
    for prompt, sample in zip(asked, samples, strict=True):
        gap_C = torch.tensor(sample.logp, dtype=torch.float64) - trainer_logp(model, prompt, sample, 1.0)
        assert gap_C.abs().max() < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_an_export_with_adapters_in_it_is_read_by_transformers(name, folders, tmp_path):
    """It is rounded to float32 once. Memory is counted for as many weights, norms and biases apart, and adapters."""
    from leaves.lora import join as lora
    from leaves.lora.settings import Lora
    shape = read_shape(folders(name))
    with torch.device("meta"):
        ours = Decoder(shape)
    assert parameters(ours.shape) == sum(p.numel() for p in ours.parameters() if p.dim() > 1)
    settings = Lora(rank=2)
    lora.adapt(ours, settings, torch.float64)
    trained = sum(p.numel() for p in ours.parameters() if p.requires_grad)
    ours.to_empty(device="cpu")
    lora.load_weights(ours, folders(name))
    lora.initialise(ours, {}, 0)
    nudge(ours, 0.1)
    export(ours, folders(name), tmp_path / "out")
    logits, gradients, _ = compare(tmp_path / "out")
    assert logits < 1e-8 and gradients < 1e-8
    ids_T = torch.arange(3, 40)
    base, merged, adapted = (model.hidden(ids_T, torch.arange(37), attend_alone) for model in (
        load(folders(name), torch.float64), load(tmp_path / "out", torch.float64), ours))
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-4)
    assert (merged - base).abs().max() > 0.1
    assert pytest.importorskip("leaves.fit.counts").trained(ours.shape, settings) == trained


@pytest.mark.parametrize("name", others_slow(["gemma3_text", "glm4"], "gemma3_text"))
def test_two_ranks_have_the_gradient_of_one_and_so_have_recomputed_blocks(name, tmp_path):
    windows = {"sliding_window": 6, "sliding_window_pattern": 2} if name == "gemma3_text" else {}
    folder = write_tiny(tmp_path / "model", model_type=name, head_dim=8, **windows)
    cfg = toy_config(tmp_path / "run", f"model.path={folder}", "pack.capacity=160", "prune.completions.keep=3",
                     "rollout.group_size=4", "rollout.max_new_tokens=30")
    groups = make_groups([[12, 20, 5, 3], [9, 30, 2, 7], [28, 30, 27, 29], [25, 24, 8, 8]], [11, 8, 9, 9])
    adv_NG = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    alone = gradient(cfg, groups, adv_NG)
    for other in on_ranks(2, tmp_path, gradient, cfg, groups, adv_NG):
        assert_same(alone, other, rtol=1e-10)
    for how in ("selective", "all"):
        again = gradient(change(cfg, f"model.checkpoint_blocks={how}"), groups, adv_NG)
        assert_same(alone, again, rtol=1e-10)


@pytest.mark.parametrize(("model_type", "change", "message"), [
    ("qwen3_moe", {}, "model_type='qwen3_moe' is not supported; use one of llama, .*An architecture of yours"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, "unknown key 'rope_parameters.rope_theta'"),
    ("llama", {"sliding_window": 8}, "sliding_window=8 is not supported for model_type=llama"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
    ("mistral", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported"),
    ("mistral", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
    ("mistral", {"rope_scaling": {**YARN, "truncate": False}}, "unknown key 'truncate'"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers or layer_types has fewer than 4 entries"),
    ("glm4", {"partial_rotary_factor": 0.3}, "partial_rotary_factor=0.3 is not supported"),
    ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
    ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_type='dynamic' is not supported"),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu' must be one of silu, gelu_pytorch_tanh"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types\[1\]='chunked_attention' must"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has fewer than 4 entries"),
    ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config={.*} is not supported for model_type=qwen2"),
    ("qwen2", {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    ("qwen2", {"torch_dtype": "auto"}, "torch_dtype='auto' must be one of float32, bfloat16, float16")])
def test_a_setting_that_is_not_computed_is_named(model_type, change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SMALL, "head_dim": 8, **change}))
    refuses(f"config.json: .*{message}", read_shape, tmp_path)


def test_every_family_has_a_case():
    assert {settings.get("model_type", name) for name, settings in CASES.items()} >= FAMILIES.keys()
