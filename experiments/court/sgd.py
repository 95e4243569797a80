"""Plain SGD, under which noise shrinks no step, as it does by Adam's second moment (experiments/law.py)."""

import torch
from torch import nn

from settings.kinds import AdamW
from settings.loader import kind


@kind("sgd")
class Sgd(AdamW):
    """Stochastic gradient descent without momentum."""


def sgd(model: nn.Module, trained: list[nn.Parameter], settings: Sgd) -> tuple[torch.optim.SGD]:
    return (torch.optim.SGD(trained, settings.lr),)


OPTIMIZERS = {Sgd: sgd}
