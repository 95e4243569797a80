"""model.products: what is rounded and what is not, in both passes; engine and trainer alike; where it is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import TOY, ask, attend_alone, load, nudge, others_slow, steps_of, toy_config, weights
from test_rollout import spec

import train
from config import ConfigError
from infra import device as hardware
from model import Projection, RoundedProduct
from rollout import TorchEngine

pytestmark = pytest.mark.skipif(not any(torch.cpu.get_capabilities().get(name) for name in hardware.PRODUCTS),
                                reason=f"this CPU has none of {', '.join(hardware.PRODUCTS)}")
CPU = torch.device("cpu")
IDS = torch.arange(3, 43)


def draw(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def test_operands_are_rounded_once_and_sums_are_not():
    """Against products in float64 of the rounded operands: only the result is rounded, by 2^-9 of itself."""
    x, weight, grad = draw((300, 200), (70, 200), (300, 70))
    out = RoundedProduct.apply(x, weight)
    found = [out, *torch.autograd.grad(out, (x, weight), grad)]
    x, weight, grad = (t.detach().bfloat16().double() for t in (x, weight, grad))
    for mine, exact in zip(found, (x @ weight.T, grad @ weight, grad.T @ x), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bias_is_added_unrounded_and_a_frozen_weight_has_no_gradient(frozen):
    """And without the setting it is a linear layer."""
    x, bias = draw((5, 8), (1, 6))
    layer = Projection(8, 6)
    layer.bias.data.copy_(bias[0].detach())
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    layer.rounds = True
    layer.weight.requires_grad_(not frozen)
    out = layer(x)
    out.sum().backward()
    without = out.detach() - bias.detach()
    torch.testing.assert_close(without, RoundedProduct.apply(x, layer.weight).detach())
    assert (layer.weight.grad is None) == frozen and torch.equal(layer.bias.grad, torch.full((6,), 5.0))


def hidden(model) -> torch.Tensor:
    return model.hidden(IDS, torch.arange(len(IDS)), attend_alone)


def test_the_whole_model_is_near_and_an_engines_held_weights_are_the_trainers_bit_for_bit():
    plain, trained, held = load(TOY), load(TOY), load(TOY)
    trained.round_products()
    held.round_products(held=True)
    assert {layer.weight.dtype for layer in held.layers.modules() if isinstance(layer, Projection)} == {torch.bfloat16}
    assert held.embed_tokens.weight.dtype == held.norm.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(hidden(trained), hidden(held))
    outs = [hidden(model) for model in (plain, trained)]
    gap = (outs[1] - outs[0]).norm() / outs[0].norm()
    assert 1e-4 < gap < 2e-2
    grads = []
    for model, out in zip((plain, trained), outs, strict=True):
        out.pow(2).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double())
    assert F.cosine_similarity(*grads, dim=0) > 0.999 and not torch.equal(*grads)


def test_an_engine_follows_its_policy_and_keeps_its_weights_rounded():
    policy = load(TOY)
    engine = TorchEngine(load(TOY), replace(spec(TOY, 4, torch.float32), rounds=True))
    requests = ask([tuple(IDS[:9].tolist())] * 4, [0, 1, 2, 3], 8)
    samples = []
    for _ in range(2):
        engine.sync(policy)
        samples.append(engine.generate(requests, 1.0))
        engine.sleep()
        nudge(policy, 0.3)
    assert [s.logp for s in samples[0]] != [s.logp for s in samples[1]]
    engine.sync(policy)
    layer = engine.model.layers[0].mlp.down_proj
    assert torch.equal(layer.weight, policy.layers[0].mlp.down_proj.weight.bfloat16())


@pytest.mark.parametrize("settings", others_slow([
    (), ("model.lora.rank=4",), ("model.checkpoint_blocks=selective",), ("model.checkpoint_blocks=all", "loss.kl=0.1")],
    ("model.lora.rank=4",)))
def test_a_run_learns_by_it_and_goes_on_as_the_same_run(settings, tmp_path):
    cfg = toy_config(tmp_path / "run", "model.dtype=auto", "model.products=bfloat16", "checkpoint.every=1", "steps=3",
                     *settings)
    whole = weights(train.train(cfg))
    assert all(line["train/grad_norm"] > 0 and line["mismatch/logp_abs_mean"] < 0.01
               for line in steps_of(tmp_path / "run"))
    cut = replace(cfg, out=str(tmp_path / "cut"), steps=3)
    train.train(replace(cut, steps=1))
    resumed = weights(train.train(cut, resume="always"))
    assert all(torch.equal(resumed[name], p) for name, p in whole.items())
    with pytest.raises(ConfigError, match="model.products"):
        train.train(replace(cut, steps=4, model=replace(cut.model, products=None)), resume="always")


@pytest.mark.parametrize("settings, message", [
    (["model.dtype=bfloat16"], "model.dtype=bfloat16 must be auto or float32 with model.products"),
    (["model.dtype=float64"], "model.dtype=float64 must be auto or float32 with model.products"),
    (["model.dtype=auto", "rollout.engine=vllm"], "rollout.engine=vllm must be auto or torch .* loss.tis_cap"),
    (["model.products=float16"], "model.products"),
])
def test_settings_that_do_not_go_with_it(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        toy_config(tmp_path / "run", "model.products=bfloat16", *settings)


def test_a_device_that_multiplies_halves_no_faster_is_refused(tmp_path, monkeypatch):
    cfg = toy_config(tmp_path / "run", "model.dtype=auto", "model.products=bfloat16")
    with pytest.raises(ConfigError, match="model.products=bfloat16 .*cuda.*model.dtype=bfloat16"):
        hardware.rounds_products(cfg.model, torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(ConfigError, match="avx512_bf16, amx_bf16"):
        train.train(cfg)
    assert not hardware.rounds_products(replace(cfg.model, products=None), CPU)
