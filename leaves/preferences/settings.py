"""Settings of preferences: advantage.kind=preference and group_preference."""


from settings.kinds import Comparison
from settings.loader import AboveOne, BelowOne, Positive, PositiveOrZero, kind


class OfPairs(Comparison):
    needs_reference = by_model = True


@kind("preference")
class Preference(OfPairs):
    """Pairs of a group by reward: DPO (arXiv:2305.18290), RPO (2405.16436), MADPO (2510.05342)."""
    beta: Positive = 0.1           # how far the margin counts: the weight of the KL that is implied
    likelihood: PositiveOrZero = 0.0  # eta; beta * eta weighs -log pi of the chosen (RPO)
    gap: Positive | None = None    # pairs with this difference of rewards weigh 1 (MADPO); null: all do
    c_max: AboveOne = 2.0  # of the weight of pairs below `gap`
    c_min: BelowOne = 0.5  # ... and above
    steepness: Positive = 1.0      # of the way from one to the other


@kind("group_preference")
class GroupPreference(OfPairs):
    """DGPO (arXiv:2510.08425) for language models: a group weighs less once the policy tells it apart."""
    beta: Positive = 0.1           # how far the log-ratios count


CHOICES = {"advantage=preference": Preference, "advantage=group_preference": GroupPreference}
HOOKS = ("parts",)
ONLY_WITH = {"advantage.gap": ["advantage.c_max", "advantage.c_min", "advantage.steepness"]}
REQUIRES = {
    "advantage.kind=preference or group_preference": [
        "loss.trust.kind=none: only then is its gradient the preference loss's",
        "loss.normalize=sum: only then is its gradient the preference loss's",
        "prune.completions.kind=none: no weight makes up for half of a pair",
        "prune.tokens.kind=none: its log-ratio is over all tokens",
        "loss.tis_cap=null: it is not a mean over the engine's samples",
        "loss.mask_ratio=null: it is not a mean over the engine's samples",
    ],
}
