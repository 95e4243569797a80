"""Train low-rank adapters beside frozen linear layers: LoRA (arXiv:2106.09685), by `model.lora`.

A layer computes x W' + alpha / rank x A' B' (' transposes). W is frozen, in model.dtype; A and B are trained
as all weights are without adapters: in float32, with moments, spread over the ranks.

- A starts as torch starts a linear layer (Kaiming-uniform, a = sqrt 5) and B at 0, as in the paper's release
  and in PEFT. A is a function of the run's seed and the layer's name.
- The best learning rate is about 10 times the rate for full weights, and with alpha / rank hardly depends on
  the rank; rank 1 is enough for reinforcement learning, and all layers are better than attention's alone
  (Schulman et al., "LoRA Without Regret", Thinking Machines, 2025; alpha = 32 is theirs too).
- An engine and an export get W + alpha / rank B A, tensor by tensor, made in float32 and rounded once.
- The reference of a KL is the initial policy, as without adapters: the base, computed by the same layers with
  their adapters off. An adapter read from model.lora.path is a part of the initial policy, so a frozen copy
  of it (not of the base) is kept.

Dimension key:  T tokens of a row,  I inputs and O outputs of a layer,  R rank.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from infra import dist
from infra.checkpoint import load_policy_into, read_extra, require_same_inputs
from infra.export import replace_folder
from infra.lines import write_json
from infra.weights import compare_shapes, load_weights, read_tensors, require_own_files
from leaves.lora.settings import Lora
from model import Decoder, empty_model, hf_name
from policy import Weights, hash_weights
from records import frozen
from settings.loader import ConfigError, read_json
from settings.paths import find_path

PREFIX = "base_model.model."  # of every name in a PEFT file
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings of PEFT that change an adapter's result, and the values that do not.
PLAIN_PEFT = read_json(Path(__file__).with_name("plain_peft.json"))
# They leave the base as it is, too; others, such as PiSSA's, change it.
OTHER_INITS = (False, "gaussian", "orthogonal")


class Adapted(nn.Linear):
    """A frozen linear layer with an adapter beside it. Its own weight and bias keep their names."""

    def __init__(self, linear: nn.Linear, settings: Lora, wide: torch.dtype):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta",
                         dtype=linear.weight.dtype)
        self.requires_grad_(False)
        self.scale = settings.alpha / settings.rank
        self.adapter = "lora"  # which `forward` adds; "initial", if there is one, for the initial policy
        sizes = {"A": (settings.rank, self.in_features), "B": (self.out_features, settings.rank)}
        for name in ("lora", "initial") if settings.path else ("lora",):
            for factor, size in sizes.items():
                empty = torch.empty(size, device="meta", dtype=wide)
                setattr(self, f"{name}_{factor}", nn.Parameter(empty, requires_grad=name == "lora"))

    def forward(self, x_TI: Tensor) -> Tensor:
        base_TO = super().forward(x_TI)
        A_RI = getattr(self, f"{self.adapter}_A", None)
        if A_RI is None:
            return base_TO
        B_OR = getattr(self, f"{self.adapter}_B")
        return torch.addmm(base_TO, F.linear(x_TI, A_RI), B_OR.T, alpha=self.scale)

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight with the adapter in it, and the bias. Collective: each rank makes its own rows."""
        A_RI = dist.gather_full(self.lora_A)
        B_OR = dist.local_shard(self.lora_B)
        mine_OI = dist.local_shard(self.weight).to(A_RI.dtype)
        merged_OI = torch.addmm(mine_OI, B_OR, A_RI, alpha=self.scale)
        yield "weight", dist.shard_like(self.weight, merged_OI)
        if self.bias is not None:
            yield "bias", self.bias


@frozen
class Adapters(Weights):
    """Adapters beside the layers of all models of a run, on frozen weights."""

    cfg: Any

    def adapt(self, model: Decoder, dtype: torch.dtype) -> None:
        adapt(model, self.cfg.model.lora, dtype)

    def fill(self, model: Decoder, source: Path) -> None:
        """Load the weights of a folder, and give adapters their first values. Raises ConfigError as
        `read_adapter`."""
        own = self.cfg.model.lora
        stored = read_adapter(model, own) if own.path else {}
        load_weights(model, source)
        initialise(model, stored, self.cfg.seed)

    def initial(self, policy: Decoder) -> Callable:
        """Return the initial policy, which has no weights of its own; call it as the policy."""
        layers = find_adapters(policy).values()

        def initially(*given: object) -> Tensor:
            try:
                for layer in layers:
                    layer.adapter = "initial"
                return policy(*given)
            finally:
                for layer in layers:
                    layer.adapter = "lora"

        return initially

    def identify(self, source: Path) -> dict[str, str]:
        path = self.cfg.model.lora.path
        own = {"model.lora.path": hash_weights([Path(path) / WEIGHTS])} if path else {}
        return Weights.identify(self, source) | own

    def policy(self, path: str, folder: Path, dtype: torch.dtype) -> Decoder:
        """Load a policy in at least float32 on its run's base: it is rounded after it has been merged."""
        own, trained_in = self.cfg.model.lora, getattr(torch, self.cfg.model.dtype)
        require_same_inputs(path, read_extra(path)["inputs"], Weights.identify(self, folder))
        model = empty_model(folder, trained_in)
        adapt(model, Lora(own.rank, own.alpha), trained_in)
        load_weights(model.to_empty(device="cpu"), folder)
        return load_policy_into(path, model.to(torch.promote_types(dtype, torch.float32)))

    def export(self, model: Decoder, source: Path, folder: Path, texts: dict[str, str]) -> None:
        """Write the weights with the adapters merged into them and, beside them, the adapters alone."""
        Weights.export(self, model, source, folder, texts)
        own = self.cfg.model
        export_adapter(model, own.lora, own.path, folder.with_name(f"{folder.name}_adapter"))


def weights(cfg: Any, plain: Weights) -> Weights:
    """Give the models of a run adapters."""
    return Adapters(cfg) if cfg.model.lora.rank else plain


def find_adapters(model: nn.Module) -> dict[str, Adapted]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapted)}


def adapt(model: Decoder, settings: Lora, dtype: torch.dtype) -> None:
    """Freeze an empty decoder, in `dtype`, and put adapters of at least float32 beside its layers. Raises
    ConfigError for a rank above the smaller side of one of them."""
    model.to(dtype).requires_grad_(False)
    wide = torch.promote_types(dtype, torch.float32)
    for block in model.layers:
        for name, layer in [*block.named_modules()]:
            if isinstance(layer, nn.Linear):
                most = min(layer.weight.shape)
                if settings.rank > most:
                    raise ConfigError(f"model.lora.rank={settings.rank} must be at most {most}, the smaller "
                                      f"side of {name}; lower it")
                block.set_submodule(name, Adapted(layer, settings, wide))


@torch.no_grad()
def initialise(model: Decoder, stored: dict[str, Tensor], seed: int) -> None:
    """Give adapters their first values, `stored` or drawn, the same on any number of ranks."""
    for name, layer in find_adapters(model).items():
        generator = torch.Generator().manual_seed(dist.seed_for(seed, name, "lora"))
        bound = layer.in_features ** -0.5
        drawn_A = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=generator)
        for factor, drawn in (("A", drawn_A), ("B", torch.zeros(layer.lora_B.shape))):
            value = stored.get(stored_name(name, factor), drawn)
            for kind in ("lora", "initial"):
                matrix = getattr(layer, f"{kind}_{factor}", None)
                if matrix is not None:
                    matrix.copy_(dist.sharded_like(value, matrix))


# ---- on disk

def stored_name(layer: str, factor: str) -> str:
    return f"{PREFIX}{hf_name(layer)}.lora_{factor}.weight"


def read_adapter(model: Decoder, settings: Lora) -> dict[str, Tensor]:
    """Read the adapter at model.lora.path. Raises ConfigError if it differs from the settings."""
    folder = Path(settings.path)
    named = f"model.lora.path={settings.path}"
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{named} must be a folder with {CONFIG} and {WEIGHTS}; it has no {name}")
    require_own_files(folder)
    require_own_files(folder, weights=True)
    said = read_json(folder / CONFIG)
    if said.get("init_lora_weights") in OTHER_INITS:
        said["init_lora_weights"] = True
    for key, plain in PLAIN_PEFT.items():
        if said.get(key, plain) not in (plain, None):
            raise ConfigError(
                f"{named}: its {key}={said[key]!r} must be {plain!r}, as nothing else is computed here; "
                "merge that adapter into the base, and take the result as model.path")
    for setting, key in (("rank", "r"), ("alpha", "lora_alpha")):
        asked = getattr(settings, setting)
        if asked != said.get(key):
            raise ConfigError(
                f"model.lora.{setting}={asked} must be {said.get(key)}, which the adapter at {named} has; "
                "set it so")
    stored = read_tensors([folder / WEIGHTS])
    if wrong := compare_shapes(stored.items(), named_factors(model)):
        raise ConfigError(
            f"{named} does not fit model.path, with every linear layer of its blocks, at {wrong}; take the "
            "base that it was trained on, or merge it into that, and take the result as model.path")
    return stored


def named_factors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the factors that are trained, by their names in a file."""
    for name, layer in find_adapters(model).items():
        for factor in "AB":
            yield stored_name(name, factor), getattr(layer, f"lora_{factor}")


def export_adapter(model: Decoder, settings: Lora, base: str, folder: Path) -> None:
    """Write the adapter of a model as PEFT does, for PeftModel.from_pretrained. Collective; rank 0 writes."""
    tensors = {}
    for name, factor in named_factors(model):
        tensor = dist.gather_full(factor.detach())
        if dist.is_first():
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    if not tensors:
        return
    path = find_path(base)
    said = PLAIN_PEFT | {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": list(dict.fromkeys(name.rpartition(".")[2] for name in find_adapters(model))),
        "task_type": "CAUSAL_LM",
        # A path that peft finds from any folder, or a name on the hub.
        "base_model_name_or_path": str(path.resolve()) if path.is_dir() else base,
    }
    with replace_folder(folder) as fresh:
        write_json(fresh / CONFIG, said)
        # Not save_file, which lets only the owner read it.
        (fresh / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
