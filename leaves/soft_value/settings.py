"""Settings of soft values: advantage.kind=soft_value."""


from settings.kinds import Comparison
from settings.loader import Count, Positive, kind


@kind("soft_value")
class SoftValue(Comparison):
    """A*-PO (arXiv:2505.20686): the reward less V*, the soft value of its prompt under the initial policy."""
    compares, fills_slots = False, True
    beta: Positive = 0.5           # weight of the KL term in the problem that V* solves
    samples: Count = 8             # of the initial policy per training prompt, before the first step
    residual: Positive | None = None  # beta of its squared loss; 1e-3 in the paper

    @property
    def needs_reference(self) -> bool:
        return self.residual is not None


CHOICES = {"advantage=soft_value": SoftValue}
HOOKS = ("parts", "begin")
REQUIRES = {
    "advantage.kind=soft_value": [
        "labels.kind=gold: V* is estimated from the answers of the data",
        "windows.max_age=null: V* is estimated in one rollout of all prompts",
    ],
    "advantage.residual": [
        "loss.trust.kind=none: only then is its gradient the squared loss's",
        "loss.normalize=sum: only then is its gradient the squared loss's",
        "prune.tokens.kind=none: its log-ratio is over all tokens",
    ],
}
