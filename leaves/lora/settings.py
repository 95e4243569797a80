"""Settings of adapters: the section `model.lora`."""

from settings.loader import Count, Positive, frozen


@frozen
class Lora:
    """LoRA (arXiv:2106.09685): train low-rank adapters beside all linear layers of the blocks, frozen."""
    rank: Count | None = None      # of an adapter; null: there is none, and all weights are trained
    alpha: Positive = 32.0         # adapters count alpha / rank, so that the best rate hardly depends on rank
    path: str | None = None        # a folder in PEFT's format with the initial adapter; null: one that adds 0


CHOICES = {"model.lora": Lora}
HOOKS = ("weights",)
ONLY_WITH = {"model.lora.rank": ["model.lora.alpha", "model.lora.path"]}
PATHS = ("model.lora.path",)
