"""The gradient of adapters is that of the whole weights by the chain rule."""

import pytest
import torch
from conftest import TOY, gradients, load, nudge, toy_config
from test_invariance import PAPERS, Gradient, add_papers_gradient, assert_same, gradient, learner_on, rolled

import config
import model as decoder
from infra import dist
from leaves.lora import join as lora

__all__ = ["rolled"]


def moved_adapter(cfg: config.Config, plain: decoder.Decoder) -> dict[str, lora.Adapted]:
    """The layers of a LoRA policy that has moved, and in `plain` what an engine would get of it."""
    policy = learner_on(TOY, cfg).policy
    nudge(policy, 0.02)
    tensors = policy.named_hf_tensors()
    pairs = zip(tensors, plain.state_dict(), strict=True)
    plain.load_state_dict({name: dist.gather_full(p) for (_, p), name in pairs})
    return lora.find_adapters(policy)


def by_chain_rule(layers: dict[str, lora.Adapted], grad: Gradient) -> Gradient:
    """The gradient of the factors of W + alpha / rank B A from that of the whole, and none of what is frozen."""
    of_factors = {name: torch.zeros_like(g) for name, g in grad.items()}
    for name, layer in layers.items():
        A, B = dist.gather_full(layer.lora_A.detach()), dist.gather_full(layer.lora_B.detach())
        of_factors[f"{name}.lora_A"] = 16 * B.T @ grad[f"{name}.weight"]
        of_factors[f"{name}.lora_B"] = 16 * grad[f"{name}.weight"] @ A.T
    return of_factors


@pytest.mark.slow
def test_the_gradient_is_that_of_the_papers_objective(tmp_path, rolled):
    """The KL is to a copy of the initial policy here, and to none in training."""
    cfg = toy_config(tmp_path / "run", "prune.completions.keep=8", "model.lora.rank=2", *PAPERS)
    policy = load(TOY, torch.float64)
    layers = moved_adapter(cfg, policy)
    add_papers_gradient(policy, *rolled, keep=8)
    _, ours = gradient(cfg, *rolled)
    expected = by_chain_rule(layers, gradients(policy))
    assert expected.keys() == ours.keys()
    assert_same((0.0, expected), (0.0, ours), rtol=1e-10)
