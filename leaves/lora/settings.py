"""Settings of adapters: the section `model.lora`."""

from typing import Literal

from settings.loader import Count, Positive, frozen


@frozen
class Lora:
    """LoRA (arXiv:2106.09685): train low-rank adapters beside frozen linear layers."""
    rank: Count | None = None      # of an adapter; null: there is none, and all weights are trained
    alpha: Positive = 32.0         # adapters count alpha / rank, so that the best rate hardly depends on rank
    targets: Literal["all", "attention", "mlp"] = "all"  # layers of each block: q, k, v, o; gate, up, down
    path: str | None = None        # a folder in PEFT's format with the initial adapter; null: one that adds 0


CHOICES = {"model.lora": Lora}
HOOKS = ("weights",)
ONLY_WITH = {"model.lora.rank": ["model.lora.alpha", "model.lora.targets", "model.lora.path"]}
PATHS = ("model.lora.path",)
