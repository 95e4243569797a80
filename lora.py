"""Train low-rank adapters beside frozen linear layers: LoRA (arXiv:2106.09685), by `model.lora`.

A layer computes x W' + alpha / rank x A' B' (' transposes). W is frozen, in the dtype that is computed in;
A and B are trained as all weights are without adapters: in float32, with moments, spread over the ranks.

- A starts as torch starts a linear layer (Kaiming-uniform, a = sqrt 5) and B at 0, as in the paper's release
  and in PEFT. A is a function of the run's seed and the layer's name.
- The best learning rate is about 10 times that of full weights, and with alpha / rank hardly depends on the
  rank; rank 1 is enough for reinforcement learning, and all layers are better than attention's alone
  (Schulman et al., "LoRA Without Regret", Thinking Machines, 2025; alpha = 32 is theirs too).
- An engine and an export get W + alpha / rank B A, tensor by tensor, made in float32 and rounded once.
- The reference of a KL is the initial policy, as without adapters: the base, by the same layers with their
  adapters off. One that was read from model.lora.path is a part of the initial policy, so a frozen copy of it
  (not of the base) is kept.

Dimension key:  T tokens of a row,  I inputs and O outputs of a layer,  R rank.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from config import Config, ConfigError, Lora
from infra import dist
from infra.checkpoint import beside_tensors, hash_files, require_same_inputs, with_policy
from infra.weights import (
    differing,
    export,
    hf_name,
    load_weights,
    named_weights,
    read_tensors,
    replaced,
    weight_files,
)
from model import Decoder, empty_model, load_model
from settings.loader import read_json

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
# model.lora.targets -> layers of a block
TARGETS = {"all": ATTENTION + MLP, "attention": ATTENTION, "mlp": MLP}
PREFIX = "base_model.model."  # of every name in a PEFT file
LEAVE_THE_BASE = (True, False, None, "gaussian", "orthogonal")  # first values; others, as PiSSA's, change it
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What a PEFT folder may say of an adapter that computes something else.
PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
         "lora_bias": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
         "alora_invocation_tokens": None, "layer_replication": None}


class Adapted(nn.Linear):
    """A frozen linear layer with an adapter beside it. Its own weight and bias keep their names."""

    def __init__(self, linear: nn.Linear, settings: Lora, wide: torch.dtype):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None,
                         device="meta", dtype=linear.weight.dtype)
        self.requires_grad_(False)
        self.settings, self.scale = settings, settings.alpha / settings.rank
        self.adapter = "lora"  # the one that `forward` adds; "initial", or none, for the initial policy
        for name in ("lora", "initial") if settings.path else ("lora",):
            for factor, size in (("A", (settings.rank, self.in_features)),
                                 ("B", (self.out_features, settings.rank))):
                empty = torch.empty(size, device="meta", dtype=wide)
                setattr(self, f"{name}_{factor}", nn.Parameter(empty, requires_grad=name == "lora"))

    def forward(self, x_TI: Tensor) -> Tensor:
        base_TO = F.linear(x_TI, self.weight, self.bias)
        if not hasattr(self, f"{self.adapter}_A"):
            return base_TO
        A_RI, B_OR = (getattr(self, f"{self.adapter}_{factor}") for factor in "AB")
        return torch.addmm(base_TO, F.linear(x_TI, A_RI), B_OR.T, alpha=self.scale)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight with the adapter in it, and the bias. Collective: each rank makes its own rows."""
        A_RI, B_OR = dist.full(self.lora_A), dist.local(self.lora_B)
        mine_OI = dist.local(self.weight).to(A_RI.dtype)
        yield "weight", dist.laid_out_as(self.weight, torch.addmm(mine_OI, B_OR, A_RI, alpha=self.scale))
        if self.bias is not None:
            yield "bias", self.bias


def adapted(model: nn.Module) -> dict[str, Adapted]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapted)}


def adapt(model: Decoder, settings: Lora, dtype: torch.dtype) -> None:
    """Freeze an empty decoder, in `dtype`, and put adapters of at least float32 beside its layers; without a
    rank there is nothing to do."""
    if settings.rank is None:
        return
    model.to(dtype).requires_grad_(False)
    for block in model.layers:
        for name in TARGETS[settings.targets]:
            layer = Adapted(block.get_submodule(name), settings, torch.promote_types(dtype, torch.float32))
            block.set_submodule(name, layer)


def fill(model: Decoder, cfg: Config, source: Path) -> None:
    """Load the weights of a folder, and give adapters their first values. Raises ConfigError as `read`."""
    stored = read(model, cfg.model.lora) if cfg.model.lora.path else {}
    load_weights(model, source)
    initialise(model, stored, cfg.seed)


@torch.no_grad()
def initialise(model: Decoder, stored: dict[str, Tensor], seed: int) -> None:
    """Give adapters their first values, those that are `stored` or drawn, the same on any number of ranks."""
    for name, layer in adapted(model).items():
        generator = torch.Generator().manual_seed(dist.seed_for(seed, name, "lora"))
        bound = layer.in_features ** -0.5
        drawn = {"A": torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator),
                 "B": torch.zeros(layer.lora_B.shape)}
        for factor, value in drawn.items():
            value = stored.get(stored_name(name, factor), value)
            for p in (getattr(layer, f"{kind}_{factor}", None) for kind in ("lora", "initial")):
                if p is not None:
                    p.copy_(dist.sharded_like(value, p))


class Initial:
    """The initial policy, for a KL, without weights of its own: it is called as the policy is."""

    def __init__(self, policy: Decoder):
        self.policy, self.layers = policy, list(adapted(policy).values())

    def __call__(self, *given: object) -> Tensor:
        try:
            for layer in self.layers:
                layer.adapter = "initial"
            return self.policy(*given)
        finally:
            for layer in self.layers:
                layer.adapter = "lora"


# ---- on disk

def stored_name(layer: str, factor: str) -> str:
    return f"{PREFIX}{hf_name(layer)}.lora_{factor}.weight"


def read(model: Decoder, settings: Lora) -> dict[str, Tensor]:
    """Read the adapter at model.lora.path. Raises ConfigError where it is not what the settings say."""
    folder, named = Path(settings.path), f"model.lora.path={settings.path}"
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{named} must be a folder with {CONFIG} and {WEIGHTS}; it has no {name}")
    said = read_json(folder / CONFIG)
    for key, plain in PLAIN.items():
        if said.get(key, plain) not in (plain, None):
            raise ConfigError(f"{named}: its {key}={said[key]!r} must be {plain!r}, for nothing else is "
                              "computed here; merge that adapter into the base, and take the result as "
                              "model.path")
    if said.get("init_lora_weights", True) not in LEAVE_THE_BASE:
        raise ConfigError(f"{named}: its init_lora_weights={said['init_lora_weights']!r} changes the base; "
                          "convert it to plain LoRA (path_initial_model_for_weight_conversion of PEFT's "
                          "save_pretrained), or merge it and take the result as model.path")
    for setting, key in (("rank", "r"), ("alpha", "lora_alpha")):
        if getattr(settings, setting) != said.get(key):
            raise ConfigError(f"model.lora.{setting}={getattr(settings, setting)} must be {said.get(key)}, "
                              f"which the adapter at {named} has; set it so")
    stored = read_tensors([folder / WEIGHTS])
    expected = {stored_name(name, factor): tuple(getattr(layer, f"lora_{factor}").shape)
                for name, layer in adapted(model).items() for factor in "AB"}
    shapes = {name: tuple(t.shape) for name, t in stored.items()}
    if wrong := differing(expected, shapes):
        key = wrong[0]
        raise ConfigError(f"{named} does not fit model.path and model.lora.targets={settings.targets} at "
                          f"{len(wrong)} tensors, e.g. {key}: {shapes.get(key, 'missing')} there and "
                          f"{expected.get(key, 'missing')} here; take the base and the layers that it was "
                          "trained on")
    return stored


def export_both(model: Decoder, source: Path, cfg: Config, template: str | None) -> None:
    """Write what a run has trained: hf/, with the `template` of a user's, and with an adapter hf_adapter/.
    Collective."""
    export(model, source, Path(cfg.out) / "hf", template)
    export_adapter(model, cfg.model.path, Path(cfg.out) / "hf_adapter")


def export_adapter(model: Decoder, base: str, folder: Path) -> None:
    """Write the adapter of a model that has one as PEFT does, for PeftModel.from_pretrained. Collective; rank
    0 writes."""
    tensors = {}
    for name, layer in adapted(model).items():
        for factor in "AB":
            tensor = dist.full(getattr(layer, f"lora_{factor}").detach())
            if dist.rank() == 0:
                tensors[stored_name(name, factor)] = tensor.to("cpu", copy=True).contiguous()
    if tensors:
        settings = layer.settings
        targets = [name.rpartition(".")[2] for name in TARGETS[settings.targets]]
        said = PLAIN | {"r": settings.rank, "lora_alpha": settings.alpha, "target_modules": targets,
                        "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "inference_mode": True,
                        "base_model_name_or_path": base}
        with replaced(folder) as fresh:
            (fresh / CONFIG).write_text(json.dumps(said, indent=1) + "\n")
            save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
            shutil.copymode(fresh / CONFIG, fresh / WEIGHTS)  # the library keeps it from all but its owner


# ---- the weights that a run begins with, or that an adapter belongs to

def hash_of(files: list[Path]) -> str:
    """Identify weights by their files, which rank 0 reads. Collective. No hash is kept on disk, where it
    could outlive what it is of."""
    return "weights of sha256 " + "".join(dist.gather([hash_files(files)[:16]] if dist.rank() == 0 else []))


def base_of(settings: Lora, source: Path) -> dict[str, str]:
    """Identify the weights that a run begins with, those of the model and those of an adapter."""
    began = {"model.lora.path": hash_of([Path(settings.path) / WEIGHTS])} if settings.path else {}
    return {"model.path (weights)": hash_of(weight_files(source))} | began


def load_policy(path: str, folder: Path, dtype: torch.dtype) -> Decoder:
    """Load a model's folder on the CPU, with the policy of `path` where that is a checkpoint. Collective. One
    with an adapter is at least float32, of a base as its run had it: it is rounded when it has been merged.
    Raises ConfigError."""
    saved = beside_tensors(path)
    if not saved or saved["config"]["model.lora.rank"] is None:
        return with_policy(path, load_model(folder, dtype, torch.device("cpu")))
    flat = saved["config"]
    settings = Lora(*(flat[f"model.lora.{name}"] for name in ("rank", "alpha", "targets")))
    require_same_inputs(path, saved["inputs"], base_of(settings, folder))
    model = empty_model(folder, torch.promote_types(dtype, torch.float32))
    adapt(model, settings, model.norm.weight.dtype)
    load_weights(model.to_empty(device="cpu"), folder)
    for _, p in named_weights(model):
        p.copy_(p.to(getattr(torch, flat["model.dtype"])))
    return with_policy(path, model)
