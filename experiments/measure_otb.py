"""Is the optimal token baseline at 4 completions as good as the mean at 32 (arXiv:2602.07078)?

    python experiments/measure_otb.py

GRPO trains the testbed for 20 steps and for 120. Then the gradient of every token's log-prob is computed for
the 16 completions of each of 16 prompts with right and wrong ones, from the rows of the training step (folded
to a sketch that keeps inner products up to a hundredth of the norms). The error of a baseline in groups of 4
or of 8 is averaged over random subsets, with the mean gradient from the other completions, given the prompts.

As released, the own completion is part of its baseline, which makes the gradient smaller. A smaller gradient
has a smaller error whenever noise is large, and Adam does not see its size. So that gradient is first scaled
up, by one factor for all prompts, until its mean is as long as the leave-one-out mean, along that. `length`
is one over the factor. Intervals are 95%, by a jackknife over the prompts.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from kept_runs import ROOT, quantile
from torch import Tensor

sys.path.append(str(ROOT / "bench"))

from common import parser, print_json, show  # noqa: E402
from court.otb import energy, padded, token_advantage  # noqa: E402
from measure_court import POINTS, G, pair_moments, trained, variance  # noqa: E402

from advantage import leave_one_out  # noqa: E402
from infra import dist  # noqa: E402
from learner import Learner  # noqa: E402
from model import Decoder, load_model  # noqa: E402
from prune import keep_all  # noqa: E402
from records import Batch, Group  # noqa: E402
from update import minibatch  # noqa: E402

PROMPTS = 16
SUBSETS = 80  # of a prompt's completions, for each group size
SKETCH = 2**16  # numbers that the gradient of a token is folded to
BASELINES = ("mean", "OTB, as released", "OTB, leave-one-out")


def token_gradients(learner: Learner, whole: Decoder, group: Group, i: int) -> Tensor:
    """Compute the gradient of each token's log-prob, folded with random signs, [L, SKETCH]; `whole` is the
    policy as one unsharded model: its graph can be passed many times."""
    single = Group(group.prompt, (group.samples[i],))
    one_11 = torch.ones(1, 1, dtype=torch.float64)
    pruned = keep_all(one_11)
    batch = Batch([], [single], one_11, one_11 > 0, one_11, pruned, [0], 1, seed=0)
    (row,) = learner.rows(minibatch(learner, batch, [0]))
    weights, folded = list(whole.parameters()), []
    size = sum(p.numel() for p in weights)
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(2, (size,), generator=generator) * 2.0 - 1
    for logp in learner.log_probs(whole, row):
        parts = torch.autograd.grad(logp, weights, retain_graph=True)
        gradient = torch.zeros(-(-size // SKETCH) * SKETCH)
        gradient[:size] = sign * torch.cat([part.flatten() for part in parts])
        folded.append(gradient.view(-1, SKETCH).sum(dim=0))
    return torch.stack(folded)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The T tokens of a prompt's 2 G completions, laid end to end."""

    product: Tensor  # between their gradients, [T, T]
    of_T: Tensor  # which completion each is of
    energy_GL: Tensor
    reward_G: Tensor

    def spread(self, adv_GL: Tensor, members: Tensor) -> Tensor:
        """Lay the advantages of some completions' tokens over all tokens, 0 at the others, [T]."""
        adv_T = torch.zeros(len(self.of_T), dtype=torch.float64)
        for adv_L, i in zip(adv_GL, members.tolist(), strict=True):
            own_T = self.of_T == i
            adv_T[own_T] = adv_L[: int(own_T.sum())]
        return adv_T

    def weights(self, baseline: str, members: Tensor) -> Tensor:
        """Compute the weight of each token in the gradient of some completions, [T]."""
        reward_G, energy_GL = self.reward_G[members], self.energy_GL[members]
        if baseline == "mean":
            adv_GL = leave_one_out(reward_G[None])[0][:, None].expand_as(energy_GL)
        else:
            adv_GL = token_advantage(reward_G, energy_GL, own="released" in baseline)
        return self.spread(adv_GL, members) / len(members)


def measure(tokens: Tokens, n: int) -> dict[str, tuple[float, float]]:
    """Average |gradient|^2 and its product with the mean gradient of all other completions, over subsets."""
    generator = torch.Generator().manual_seed(n)
    sums = {baseline: np.zeros(2) for baseline in BASELINES}
    for _ in range(SUBSETS):
        order = torch.randperm(2 * G, generator=generator)
        target_T = tokens.product @ tokens.weights("mean", order[n:])
        for baseline, total in sums.items():
            weight_T = tokens.weights(baseline, order[:n])
            square = weight_T @ tokens.product @ weight_T
            total += square.item(), (weight_T @ target_T).item()
    return {baseline: tuple(total / SUBSETS) for baseline, total in sums.items()}


def look(learner: Learner, whole: Decoder, group: Group, reward_G: Tensor) -> dict:
    """Measure a prompt under each loss.normalize."""
    logp_GL, length_G = padded([torch.tensor(sample.logp, dtype=torch.float64) for sample in group.samples])
    gradients = [token_gradients(learner, whole, group, i) for i in range(2 * G)]
    gradient = torch.cat(gradients)
    product = (gradient @ gradient.T).double()
    of_T = torch.arange(2 * G).repeat_interleave(length_G)
    one_GT = torch.nn.functional.one_hot(of_T).T.double()
    shares = {"sequence": 1 / length_G[of_T].double(), "sum": torch.ones(len(of_T))}
    seen = {}
    for normalize, share_T in shares.items():
        scaled = share_T.double()[:, None] * product * share_T
        tokens = Tokens(scaled, of_T, energy(logp_GL, length_G), reward_G.double())
        whole_GG = (one_GT @ scaled @ one_GT.T).numpy()
        moments = pair_moments(whole_GG, tokens.reward_G.numpy())
        seen[normalize] = {"moments": moments} | {n: measure(tokens, n) for n in (4, G)}
    return seen


def figures(prompts: list[dict], normalize: str, n: int, baseline: str) -> dict:
    """Compare the error of a baseline in groups of n with the mean's in groups of n, and of 32."""
    rows = []
    for prompt in prompts:
        of = prompt[normalize]
        anchor = [variance(of["moments"], size) for size in (n, 32)]
        rows.append([*of[n][baseline], *of[n]["mean"], *anchor])
    rows = np.array(rows)
    total, shrinks = rows.sum(axis=0), "released" in baseline
    result = {"length": total[1] / total[3]}
    for place, name in enumerate(("same", "at 32")):
        middle = over_the_mean(total, place, shrinks)
        without = np.array([over_the_mean(total - row, place, shrinks) for row in rows])
        error = math.sqrt((len(rows) - 1) * without.var())
        half = quantile(0.05, len(rows) - 1) * error
        result |= {name: middle, f"{name} low": middle - half}
        result[f"{name} high"] = middle + half
    return {name: round(float(value), 4) for name, value in result.items()}


def over_the_mean(total: np.ndarray, place: int, shrinks: bool) -> float:
    """Compute the error over the mean's variance, of a gradient that `shrinks` once it is scaled up. It is
    the mean's own variance and the difference of both squared distances, so noise in the target cancels."""
    square, inner, mean_square, mean_inner, *anchor = total
    scale = mean_inner / inner if shrinks else 1.0
    further = scale**2 * square - mean_square - 2 * (scale * inner - mean_inner)
    return (anchor[0] + further) / anchor[place]


def main() -> None:
    parser(__doc__).parse_args()
    dist.init("cpu")
    results = []
    for when, steps in POINTS.items():
        with tempfile.TemporaryDirectory() as folder:
            learner, sampler, history, count = trained(steps, Path(folder) / "run")
            source = Path(folder) / "run" / "hf"
            whole = load_model(source, torch.float32, torch.device("cpu"))
        prompts = []
        while len(prompts) < PROMPTS:
            groups = sampler.rollout(history.draw(count))
            rewards = sampler.score(groups).total_NG
            for group, reward_G in zip(groups, rewards, strict=True):
                if reward_G.std() > 0 and len(prompts) < PROMPTS:
                    prompts.append(look(learner, whole, group, reward_G))
                    print(f"prompt {len(prompts)} of {PROMPTS}", file=sys.stderr)
        rows = []
        for normalize in ("sequence", "sum"):
            for n in (4, G):
                for baseline in BASELINES:
                    row = figures(prompts, normalize, n, baseline)
                    about = {"normalize": normalize, "n": n, "baseline": baseline}
                    results.append({"when": when} | about | row)
                    cells = {"length": f"{row['length']:.2f}"}
                    for name in ("same", "at 32"):
                        low, high = row[f"{name} low"], row[f"{name} high"]
                        cells[name] = f"{row[name]:.2f} [{low:.2f}, {high:.2f}]"
                    rows.append(about | cells)
        show(
            f"{when}: after {steps} steps, {PROMPTS} prompts; error over the mean's",
            rows,
        )
    print_json("otb", results=results)
    dist.close()


if __name__ == "__main__":
    main()
