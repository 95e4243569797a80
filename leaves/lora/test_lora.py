"""LoRA against peft on the same weights, in float64; its files in peft and transformers; what is refused."""

import json
import shutil
from pathlib import Path

import conftest
import peft
import pytest
import torch
import transformers
from conftest import TOY, attend_alone, load, make_groups, nudge, refuses, toy_config, weights
from safetensors.torch import load_file, save_file
from test_families import write_case
from test_objectives import learner_on

import learner
import train
from infra import checkpoint, dist
from infra.weights import load_weights
from leaves.lora import join as lora
from leaves.lora.settings import Lora
from model import Decoder, empty_model
from pack import Minibatch
from policy import weights_of
from settings.loader import ConfigError

SEGMENTS = torch.randint(96, (3, 40), generator=torch.Generator().manual_seed(1)).tolist()
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def ours_on(folder: Path, settings: Lora) -> Decoder:
    """Whole, in float64, with an adapter whose B is not 0."""
    model = empty_model(folder, torch.float64)
    lora.adapt(model, settings, torch.float64)
    load_weights(model.to_empty(device="cpu"), folder)
    lora.initialise(model, {}, seed=0)
    with torch.no_grad():
        for i, layer in enumerate(lora.find_adapters(model).values()):
            layer.lora_B.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
    return model


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """Of all segments, by ours or by theirs."""
    if isinstance(model, Decoder):
        hidden = [model.hidden(torch.tensor(s), torch.arange(len(s)), attend_alone) for s in SEGMENTS]
        return model.logits(torch.cat(hidden))
    return torch.cat([model(torch.tensor([s])).logits[0] for s in SEGMENTS])


@pytest.mark.slow
@pytest.mark.parametrize("kind", conftest.others_slow(["qwen2", "qwen3-bias", "llama3", "llama-bias"], "qwen2", "llama-bias"))
def test_logits_and_gradients_of_an_exported_adapter_are_pefts(kind, tmp_path):
    folder, settings = write_case(tmp_path, kind), Lora(rank=3, alpha=5.0)
    with conftest.Doubled():
        ours = ours_on(folder, settings)
        assert [name.rpartition(".")[2] for name in lora.find_adapters(ours)] == 4 * ALL
        lora.export_adapter(ours, settings, "base", tmp_path / "adapter")
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
        expected_CV = logits_of(theirs)
        ours_CV = logits_of(ours)
        torch.testing.assert_close(ours_CV, expected_CV, rtol=0, atol=1e-10)
        weigh_CV = torch.randn(expected_CV.shape, generator=torch.Generator().manual_seed(0)).double()
        (expected_CV * weigh_CV).sum().backward()
        (ours_CV * weigh_CV).sum().backward()
    grads = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, layer in lora.find_adapters(ours).items():
        for factor in "AB":
            grad = grads.pop(lora.stored_name(name, factor))
            size = float(grad.abs().max())
            torch.testing.assert_close(getattr(layer, f"lora_{factor}").grad, grad, rtol=0, atol=1e-10 * size)
            assert size > 1e-6
    assert not grads and all(p.grad is None for name, p in ours.named_parameters() if "lora" not in name)


IDS = torch.tensor([5, 40, 7, 300, 12, 9, 44])


def log_probs(model) -> torch.Tensor:
    """Of every token of IDS but the first, by ours or by theirs."""
    with torch.no_grad():
        if not isinstance(model, peft.PeftModel):
            return model(IDS, torch.arange(len(IDS)), attend_alone, torch.arange(len(IDS) - 1), IDS[1:], 1.0)
        return model(IDS[None]).logits[0, :-1].log_softmax(-1).gather(1, IDS[1:, None])[:, 0]


def written_by_peft(base: Path, folder: Path, **changes):
    """A random adapter on a base, in float64."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ALL, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**settings | changes))
    theirs.save_pretrained(folder)
    return theirs


def gone_on_from(base: Path, adapter: Path, *changes: str):
    return toy_config(adapter.parent / "run", f"model.path={base}",
                      f"model.lora={{rank: 3, alpha: 6, path: {adapter}}}", *changes)


def test_an_adapter_of_pefts_is_gone_on_from_and_the_kl_is_to_the_policy_with_it(tiny, tmp_path):
    with conftest.Doubled():
        expected_C = log_probs(written_by_peft(tiny, tmp_path / "adapter"))
        made = learner_on(tiny, gone_on_from(tiny, tmp_path / "adapter", "loss.kl=0.1"))
        before_C = log_probs(made.policy)
        torch.testing.assert_close(before_C, expected_C, rtol=0, atol=1e-10)
        assert torch.equal(log_probs(made.reference), before_C)
        nudge(made.policy, 0.05)
        assert torch.equal(log_probs(made.reference), before_C)
        assert (log_probs(made.policy) - before_C).abs().max() > 1e-3
    assert not torch.allclose(before_C, log_probs(load(tiny, torch.float64)), atol=1e-3)
    exported = tmp_path / "again"
    lora.export_adapter(made.policy, Lora(3, 6.0), "base", exported)
    kept = load_file(exported / "adapter_model.safetensors")
    assert kept.keys() == load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()


def test_without_an_initial_adapter_the_reference_is_the_base_and_no_second_copy(tiny, tmp_path):
    made = learner_on(tiny, toy_config(tmp_path / "run", f"model.path={tiny}", "loss.kl=0.1", "model.lora.rank=2"))
    nudge(made.policy, 0.05)
    separate = log_probs(load(tiny, torch.float64))
    assert torch.equal(log_probs(made.reference), separate)
    assert (log_probs(made.policy) - separate).abs().max() > 1e-3
    with pytest.raises(TypeError):  # and the policy is itself again, however that pass ends
        made.reference()
    assert (log_probs(made.policy) - separate).abs().max() > 1e-3


@pytest.mark.slow
def test_a_run_exports_its_policy_and_so_does_its_checkpoint_also_in_halves_on_a_base_of_float32(tmp_path):
    run = tmp_path / "run"
    policy = train.train(toy_config(run, "steps=1", "model.dtype=bfloat16", "model.lora.rank=2", "optim.lr=1e-2",
                                    "rollout.max_new_tokens=16", "data.eval=null"))
    assert json.loads((run / "hf_adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(TOY)
    exported, base = weights(load(run / "hf")), weights(load(TOY))
    for name, p in policy.named_hf_tensors():
        name = name.removeprefix("model.")
        assert torch.equal(exported[name], dist.gather_full(p).float()), name
        assert torch.equal(exported[name], base[name].bfloat16().float()) != name.endswith("proj.weight")
    learner.export_checkpoint(run / "checkpoints" / "step_000001", tmp_path / "hf")
    for name in ("hf/model.safetensors", "hf_adapter/adapter_config.json", "hf_adapter/adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()


def test_first_values_are_those_of_a_linear_layer_by_seed_and_name(tiny, tmp_path):
    def drawn(seed: int, *more: str) -> dict[str, torch.Tensor]:
        cfg = toy_config(tmp_path / "run", f"seed={seed}", f"model.path={tiny}", "model.lora.rank=8", *more)
        return {name: p for name, p in weights(learner_on(tiny, cfg).policy).items() if "lora" in name}

    one, again, other = drawn(1), drawn(1, "model.dtype=float32"), drawn(2)
    assert all(torch.equal(p, again[name].double()) for name, p in one.items())
    factors = [p for name, p in one.items() if name.endswith("lora_A")]
    assert len(factors) == len({float(p[0, 0]) for p in factors}) == 14
    for name, p in one.items():
        if name.endswith("lora_B"):
            assert not p.any()
            continue
        bound = p.shape[1] ** -0.5
        assert 0.97 * bound < p.abs().max() <= bound and p.std() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert not torch.equal(p, other[name])


def test_what_is_trained_is_float32_and_small_and_all_else_frozen_in_halves(tiny, tmp_path):
    """The policy's adapters, and those of a critic with its whole head; saved are they and their moments alone."""
    made = learner_on(tiny, toy_config(tmp_path / "run", f"model.path={tiny}", "model.dtype=bfloat16",
                                       "model.lora.rank=2", name="ppo_gsm8k.yaml toy.yaml"))
    named = {f"layers.{i}.{'mlp' if name in ALL[4:] else 'self_attn'}.{name}.lora_{factor}"
             for i in range(2) for name in ALL for factor in "AB"}
    heads = {"value.weight", "value.bias"}
    for (model, optimizers), expected in zip([(made.policy, made.optimizers), *made.roles.values()], (
            named, heads | {f"backbone.{name}" for name in named}), strict=True):
        trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
        assert trained == dict.fromkeys(expected, torch.float32)
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
        saved = checkpoint.tensors(model, optimizers)
        assert {kind: tensors.keys() for kind, tensors in saved.items()} == dict.fromkeys(
            ("weights", "step", "exp_avg", "exp_avg_sq"), expected)
        assert len(optimizers[0].param_groups[0]["params"]) == len(expected)
    ones = torch.ones(1, 2, dtype=torch.float64)
    row, = made.rows(Minibatch(make_groups([[3, 4]], [5]), ones.bool(), ones, ones, ones))
    assert row.adv_C.dtype == torch.float32  # not rounded to the base's


def test_an_engine_gets_what_is_rounded_once(tiny, tmp_path):
    """In halves: the sum of weight and adapter in float32, and then the nearest half."""
    made = learner_on(tiny, toy_config(tmp_path / "run", f"model.path={tiny}", "model.dtype=bfloat16",
                                       "model.lora.rank=2"))
    nudge(made.policy, 0.05)
    got = {name: dist.gather_full(p, None, torch.bfloat16) for name, p in made.policy.named_hf_tensors()}
    for name, layer in lora.find_adapters(made.policy).items():
        W, A, B = (dist.gather_full(p.detach()).float() for p in (layer.weight, layer.lora_A, layer.lora_B))
        assert torch.equal(got[f"model.{name}.weight"], torch.addmm(W, B, A, alpha=16).bfloat16())
        assert not torch.equal(got[f"model.{name}.weight"], W.bfloat16())


def short(out: Path, base: Path, *changes: str):
    return toy_config(out, f"model.path={base}", "checkpoint.every=1", "model.lora.rank=2", "rollout.max_new_tokens=8",
                      "eval.max_new_tokens=8", *changes)


def test_an_adapter_goes_on_on_its_own_base_and_from_its_own_first_one_alone(tiny, tmp_path):
    """A KL is taken to the first one; nothing takes a base that was changed under its name."""
    base, run, moved = shutil.copytree(tiny, tmp_path / "tiny0"), tmp_path / "run", tmp_path / "moved"
    written_by_peft(tiny, tmp_path / "adapter", r=2, lora_alpha=32)
    settings = [f"model.lora.path={tmp_path / 'adapter'}", "loss.kl=0.1"]
    train.train(short(run, base, "steps=1", *settings))
    (tmp_path / "adapter").rename(moved)
    settings[0] = f"model.lora.path={moved}"
    train.train(short(run, base, "steps=2", *settings), resume="always")
    file, step = moved / "adapter_model.safetensors", run / "checkpoints" / "step_000002"
    first = load_file(file)
    save_file({name: 2 * t for name, t in first.items()}, file)
    with pytest.raises(ConfigError, match=r"was trained with weights of sha256 \w* at model.lora.path, and here"):
        train.train(short(run, base, "steps=3", *settings), resume="always")
    weights_of(step).policy(step, base, torch.float32)
    save_file(first, file)
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"model.norm.weight": 2 * tensors["model.norm.weight"]}, base / "model.safetensors")
    said = rf"{step} was trained with weights of sha256 \w{{16}} at model.path .weights., and here it is"
    refuses(said, train.train, short(run, base, "steps=3", *settings), resume="always")
    refuses(said, weights_of(step).policy, step, base, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("written", "asked", "message"), [
    ({"r": 4}, [], "model.lora.rank=3 must be 4, which the adapter at model.lora.path=.* has; set it so"),
    ({}, ["model.lora.alpha=7"], "model.lora.alpha=7.0 must be 6, which the adapter"),
    ({"use_dora": True}, [], "its use_dora=True must be False, as nothing else is computed here; merge that adapter"),
    ({"use_rslora": True}, [], "its use_rslora=True must be False"),
    ({"bias": "all"}, [], "its bias='all' must be 'none'"),
    ({"rank_pattern": {"q_proj": 2}}, [], "its rank_pattern={'q_proj': 2} must be {}"),
    ({"target_modules": ALL[:4]}, [],
     r"does not fit model.path, with every linear layer of its blocks, at 12 tensors, e.g. .*down_proj.lora_A.weight: "
     r"nothing there and \(3, 48\) here; take the base that it was trained on, or merge it into that")])
def test_an_adapter_that_is_not_what_the_settings_say_is_refused(written, asked, message, tiny, tmp_path):
    written_by_peft(tiny, tmp_path / "adapter", **written)
    refuses(message, learner_on, tiny, gone_on_from(tiny, tmp_path / "adapter", *asked))


def test_a_rank_above_the_smaller_side_of_a_layer_is_refused_before_there_is_memory_for_it(tiny):
    lora.adapt(empty_model(tiny, torch.float32), Lora(16), torch.float32)
    with pytest.raises(ConfigError, match="model.lora.rank=17 must be at most 16, the smaller side of "):
        lora.adapt(empty_model(tiny, torch.float32), Lora(17), torch.float32)


MODEL, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@pytest.mark.parametrize(("name", "change", "message"), [
    (MODEL, lambda old: old[:100], rf"{MODEL} cannot be read \(.*\); download or write it again"),
    (SETTINGS, lambda old: old.replace(b'"init_lora_weights": false', b'"init_lora_weights": "pissa"'),
     "its init_lora_weights='pissa' must be True, as nothing else is computed here; merge that adapter"),
    (MODEL, None, f"a folder with {SETTINGS} and {MODEL}; it has no {MODEL}"),
    (SETTINGS, None, f"a folder with {SETTINGS} and {MODEL}; it has no {SETTINGS}")])
def test_an_adapter_with_a_damaged_or_missing_file_is_refused(name, change, message, tiny, tmp_path, monkeypatch):
    written_by_peft(tiny, tmp_path / "adapter")
    file = tmp_path / "adapter" / name
    if change:
        file.write_bytes(change(file.read_bytes()))
    else:
        file.unlink()
        monkeypatch.setattr(lora, "load_weights", None)  # said before the base is read
    refuses(message, learner_on, tiny, gone_on_from(tiny, tmp_path / "adapter"))
