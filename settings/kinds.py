"""The settings that come in kinds: labels, advantages, pruning, trust regions, optimizers.

A section of one of these unions is a dataclass by its `kind`; config.py has all other sections. Leaves add
kinds of their own (settings/leaves.py). The loop asks a kind for properties of its class, not for its name.
"""

from typing import Annotated, Literal

from settings.loader import (
    AboveOne,
    BelowOne,
    Chance,
    Count,
    CountOrZero,
    Positive,
    PositiveOrZero,
    Share,
    ZeroToOne,
    kind,
)

KeepCount = Annotated[
    int, "at least 1 and at most rollout.group_size; to train on all set prune.completions.kind=none"]
DropProb = Annotated[float, "in [0, 1): no weight makes up for a certain drop"]


@kind("gold")
class Gold:
    """Score by the answers of the data."""
    reads_answers = True
    chunk = 0                # completions of a prompt that are sampled at once, beside rollout.group_size


Labels = Gold


class Comparison:
    """An advantage that is a function of a group's rewards; kinds of leaves may say otherwise."""
    compares = True          # completions of one prompt with each other
    needs_reference = False  # the loss reads the initial policy
    by_model = False         # it depends on a model too, so that 0 is not known before the update
    fills_slots = False      # it samples with all decoding slots before the first step


@kind("group_norm")
class GroupNorm(Comparison):
    """GRPO (arXiv:2402.03300): the reward less its group's mean, over the group's standard deviation."""
    correction: Literal[0, 1] = 1  # of the standard deviation: 1 in the released codes, 0 in the papers
    eps: Positive = 1e-4           # added to the deviation; verl has 1e-6


@kind("centred")
class Centred(Comparison):
    """Dr. GRPO (arXiv:2503.20783): the reward less its group's mean."""


@kind("leave_one_out")
class LeaveOneOut(Comparison):
    """RLOO (arXiv:2402.14740): the reward less the mean of the others in its group."""


@kind("shrinkage")
class Shrinkage(Comparison):
    """The reward less a mean of the others, shrunk towards the other prompts' (arXiv:2511.03710)."""


@kind("decoupled")
class Decoupled(Comparison):
    """GDPO (arXiv:2601.05242): components standardised one by one, then their weighted sum."""
    correction: Literal[0, 1] = 1  # of both standard deviations, as with group_norm
    eps: Positive = 1e-4           # added to the deviation


Advantage = GroupNorm | Centred | LeaveOneOut | Shrinkage | Decoupled


@kind("none")
class KeepAll:
    """Train on every completion."""


@kind("topk")
class TopK:
    """CPPO (arXiv:2503.22342): train on the completions of the largest |advantage|. Biased."""
    keep: KeepCount                     # per group, of rollout.group_size
    scope: Literal["group", "batch"] = "group"  # batch: keep x groups of the whole step


@kind("bottom")
class Bottom:
    """Dynamic Pruning as listed (arXiv:2603.04135): drop completions of small |advantage|. Biased."""
    drop_prob: DropProb            # share of each group


@kind("bernoulli")
class Bernoulli:
    """Dynamic Pruning as proved (arXiv:2603.04135): drop small |A| at random, weigh up the kept. Unbiased."""
    drop_prob: DropProb | None = None  # of a completion with an |advantage| below its group's mean
    # in its place: the largest drop_prob with a predicted squared error of the step's gradient, over its
    # squared norm, of at most this
    error: Positive | None = None


@kind("pps")
class Pps:
    """Draw a given number with probability in proportion to size, and weigh by its inverse. Unbiased."""
    keep: KeepCount | None = None       # per group, of rollout.group_size
    # in its place: the fewest with a predicted squared error of the step's gradient, over its squared norm,
    # of at most this
    error: Positive | None = None
    # batch: keep x groups of the whole step; an error is always of the whole step
    scope: Literal["group", "batch"] = "group"
    # adv: |advantage|. The others guess the norm of a completion's gradient: surprise by the engine's
    # log-probs; nats by them if a teacher's advantages are still to come; length by the number of tokens
    size: Literal["adv", "surprise", "nats", "length"] = "surprise"
    by_cost: bool = False          # size over sqrt(length), for a budget of tokens instead of completions


@kind("pods")
class Pods:
    """PODS (arXiv:2504.13818): train on the completions with the largest reward variance. Biased."""
    keep: KeepCount                     # per group, of rollout.group_size
    compare: Literal["kept", "all"] = "kept"  # advantages among those kept, as released, or among all


@kind("variance")
class VarianceShare:
    """RAGEN-2 (arXiv:2604.06268): train on the groups that hold most of the reward variance. Biased."""
    share: Share = 0.9  # of the sum of the groups' variances
    slack: PositiveOrZero = 0.01   # taken off the share: a step of hardly any variance is left out


Completions = KeepAll | TopK | Bottom | Bernoulli | Pps | Pods | VarianceShare


class Draw:
    """A way to draw prompts; a kind may say otherwise."""
    refills = False  # others are drawn in place of the prompts that it skips


@kind("none")
class AllPrompts(Draw):
    """Roll out every prompt."""


@kind("bernoulli")
class BernoulliPrompts(Draw):
    """Dynamic Pruning as proved (arXiv:2603.04135): skip small |A| at random, weigh up the kept. Unbiased."""
    drop_prob: DropProb | None = None  # of a prompt with a mean |advantage| below the average prompt's
    error: Positive | None = None  # in its place: as likely as this predicted error allows


@kind("rank")
class LowestRank(Draw):
    """Dynamic Pruning as listed (arXiv:2603.04135): skip prompts of small mean |advantage|. Biased."""
    drop_prob: DropProb            # share of a step
    # times in a row that a prompt may be skipped
    max_skips: Annotated[int, "at least 1: a prompt that is never rolled out is never measured again"]


@kind("greso")
class Greso(Draw):
    """GRESO (arXiv:2506.02177): roll out with probability max(p^z, 0.01) after z flat groups. Biased."""
    refills = True
    explore: Annotated[float, "in [0.05, 0.95], as GRESO bounds it"] = 0.5  # p at first
    target: Chance = 0.25  # share of flat groups that p is steered to


@kind("pps")
class ProportionalPrompts(Draw):
    """Roll out with probability in proportion to the mean |advantage| of the newest group. Unbiased."""
    # of the prompts rolled out before, how many are expected to be again
    share: Share | None = None
    error: Positive | None = None  # in its place: the fewest with this predicted error
    floor: Share = 0.1  # least size of a prompt, over their mean


Prompts = AllPrompts | BernoulliPrompts | LowestRank | Greso | ProportionalPrompts


@kind("none")
class WholeCompletions:
    """Train on every token of the survivors."""


@kind("prefix")
class Prefix:
    """NAT (arXiv:2603.06619): train on the tokens before a random cut, weighed up. Unbiased."""
    # chance that nothing is cut off, above 0; no token weighs more than one over it
    whole: Share = 0.5
    least: Count = 1               # tokens that no cut takes


Tokens = WholeCompletions | Prefix


@kind("clip")
class Clip:
    """PPO (arXiv:1707.06347), GRPO, DAPO: the ratio, or no gradient if the clip has stopped it."""
    low: ZeroToOne = 0.2           # the ratio counts from 1 - low
    high: PositiveOrZero = 0.2     # ... up to 1 + high; above low: DAPO's clip-higher
    dual: float | None = None      # upper bound on the ratio of a negative advantage; verl has 10


@kind("clip_sequence")
class ClipSequence:
    """GSPO (arXiv:2507.18071): clip by the geometric mean of a completion's token ratios."""
    low: ZeroToOne = 0.2           # the mean ratio counts from 1 - low
    high: PositiveOrZero = 0.2     # ... up to 1 + high
    dual: float | None = None      # upper bound on the ratio of a negative advantage


@kind("clamp")
class Clamp:
    """CISPO (arXiv:2506.13585): the ratio is clamped and every token keeps its gradient."""
    low: ZeroToOne = 0.2           # the ratio is at least 1 - low
    high: PositiveOrZero = 0.2     # ... and at most 1 + high


@kind("total_variation")
class TotalVariation:
    """Divergence PPO (arXiv:2602.04879), IPO of prime-rl: bound how far a token's probability moves."""
    divergence: Positive           # the bound, on a difference of probabilities; 0.15 in the paper
    sides: Literal["advantage", "both"] = "advantage"  # stop moves along the advantage, or all moves (IPO)
    cap: AboveOne = 20.0  # upper bound on the ratio


@kind("binary_kl")
class BinaryKl:
    """Divergence PPO (arXiv:2602.04879) by the KL of a token against all others."""
    divergence: Positive           # the bound, in nats; 0.05 in the paper
    cap: AboveOne = 20.0  # upper bound on the ratio


@kind("none")
class NoBound:
    """REINFORCE, A*-PO: the gradient of -A log pi, however far the policy has moved."""


Trust = Clip | ClipSequence | Clamp | TotalVariation | BinaryKl | NoBound


@kind("adamw")
class AdamW:
    """AdamW (arXiv:1711.05101) on all weights that are trained."""
    lr: Positive                   # learning rate
    schedule: Literal["constant", "cosine"] = "constant"  # after the warm-up; cosine: down to 0 at the end
    warmup_steps: CountOrZero = 0  # steps of a rising rate, from 0
    beta1: BelowOne = 0.9          # decay of the mean of gradients
    beta2: BelowOne = 0.999        # decay of the mean of their squares
    weight_decay: PositiveOrZero = 0.0  # of every parameter, as verl: norms, biases and embeddings too
    clip_norm: Positive = 1.0      # on the norm of the whole gradient, over all ranks
    offload: bool = False          # CUDA: weights, gradients and moments stay and step in the host's memory


Optim = AdamW
