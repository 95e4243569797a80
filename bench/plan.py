"""What would a step of published configs take on 8 H100s, and what would change it? A model of its seconds.

    python bench/plan.py [--drafts 1.1] [--shares 0.03=0.74,0.1=0.6,0.3=0.45]

No GPU is asked: peaks are the maker's, and how much of them is reached, how long completions are, and vLLM's
own time for a token step are assumed (CASES, and the constants below).

rollout  Each GPU has an engine, or `tensor_parallel` of them share one. Its completions decode in lock-step:
         a token step reads weights and keys, writes logits and draws from them, and adds TOKEN_STEP. With
         drafts it computes AT_ONCE tokens more for each completion, and takes as many steps over --drafts: on
         the testbed from 1.04 to 1.34 (bench/drafts.py), since a batch waits for its slowest completion.
update   6 FLOP for a weight and a trained token, and half as many for prompts; a teacher's pass has a third.
pruning  PPS by an error trains on --shares of the tokens with a gradient, those of the long sums
         (bench/prune.py); progress goes with (1 + error) to a power between -1 and -1/2
         (leaves/page/advice.py).
"""

from dataclasses import dataclass

import numpy as np
from common import parser, print_json, show
from shapes import MEMORY, PEAKS

import config
from infra.device import parameters
from infra.families import Shape
from infra.viewers import pairs
from leaves.drafts.proposals import AT_ONCE
from leaves.fit.counts import find_shape

GPUS, SAMPLED = 8, 40            # GPUs, and steps that are averaged
PEAK, BANDWIDTH = PEAKS["H100"]
DECODING, TRAINING = 0.6, 0.5    # shares of the peak of products that are reached
TOKEN_STEP, ALL_REDUCE = 2.5e-3, 18e-6  # s of vLLM's own in each token step, and of each all-reduce
SYNC, PUBLISHED_SYNC = 0.25, 3.5  # s


@dataclass(frozen=True)
class Case:
    """How many tokens prompts and completions of a config are assumed to have."""

    prompt: int
    mean: float      # of completions: lognormal, but for those that run into the limit
    sigma: float
    runaway: float   # the share of these

    def lengths(self, sampling: config.Rollout, rng: np.random.Generator) -> np.ndarray:
        """Draw the tokens of a step's completions."""
        count, limit = sampling.prompts_per_step * sampling.group_size, sampling.max_new_tokens
        length_K = rng.lognormal(np.log(self.mean) - self.sigma ** 2 / 2, self.sigma, count)
        return np.where(rng.random(count) < self.runaway, limit, length_K.clip(1, limit))


GSM8K, MATH = Case(250, 190, 0.45, 0.01), Case(350, 380, 0.6, 0.02)
CASES = {"cppo_gsm8k": GSM8K, "pps_gsm8k": GSM8K, "grpo_math": MATH, "cppo_math": MATH, "opd_math": MATH}
WAYS = [(sharing, drafted) for sharing in (1, 4) for drafted in (False, True)]


def decode_seconds(shape: Shape, prompt: int, length_K: np.ndarray, sharing: int, drafts: float) -> float:
    """Compute the seconds of one engine on `sharing` GPUs; drafts 0: none."""
    seconds, before, size = 0.0, 0.0, parameters(shape)
    at_once = AT_ONCE + 1 if drafts else 1
    keys = 4 * shape.layers * shape.kv_heads * shape.head_dim * (prompt + length_K.mean() / 2)
    for busy, end in zip(range(len(length_K), 0, -1), np.sort(length_K), strict=True):
        moved = 2 * size + busy * (keys + 16 * at_once * shape.vocab_size)
        work = max(moved / (MEMORY * BANDWIDTH), 2 * size * busy * at_once / (DECODING * PEAK)) / sharing
        waiting = TOKEN_STEP + 2 * shape.layers * ALL_REDUCE * (sharing > 1)
        seconds += (end - before) / (drafts or 1) * (work + waiting)
        before = end
    return seconds


def predict(name: str, sharing: int = 0, drafts: float = 0.0) -> tuple[dict[str, float], float]:
    """Predict the seconds of the phases of a config's step, with an update on all tokens, and of its longest
    completion alone, which no order of requests can save; sharing 0 is the config's own."""
    cfg, case, rng = config.load(f"{name}.yaml"), CASES[name], np.random.default_rng(0)
    shape, spent, alone, tokens = find_shape(cfg.model.path), [], [], []
    sharing = sharing or cfg.rollout.tensor_parallel
    for _ in range(SAMPLED):
        length_K = case.lengths(cfg.rollout, rng)
        tokens.append(length_K.sum())
        engines = np.array_split(length_K, min(GPUS // sharing, len(length_K)))
        spent.append(max(decode_seconds(shape, case.prompt, part, sharing, drafts) for part in engines))
        alone.append(decode_seconds(shape, case.prompt, length_K.max(keepdims=True), sharing, drafts))
    pass_seconds = 3 * np.mean(tokens) / (GPUS * TRAINING * PEAK)  # a weight's, in 2 FLOP
    teacher = getattr(getattr(cfg, "teacher", None), "path", None)
    seconds = {"rollout": float(np.mean(spent)),
               "teacher": pass_seconds * parameters(find_shape(teacher)) if teacher else 0.0,
               "update": 3 * cfg.update.epochs * pass_seconds * parameters(shape), "sync": SYNC}
    return seconds, float(np.mean(alone))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--drafts", type=float, default=1.1, metavar="TIMES")
    options.add_argument("--shares", type=pairs, default="0.03=0.74,0.1=0.6,0.3=0.45",
                         metavar="ERROR=SHARE,...")
    args = options.parse_args()
    if not (args.drafts > 0 and all(float(e) > 0 and 0 < share <= 1 for e, share in args.shares.items())):
        options.error("--drafts and errors must be above 0, and shares in (0, 1]")
    ways, pruned = [], []
    for name in CASES:
        whole, _ = predict(name)
        step, update = sum(whole.values()), whole["update"] + whole["teacher"]
        pruned.append({"config": name, "step, all kept": step, "update's and teacher's share": update / step})
        for error, share in args.shares.items():
            faster, error_1 = step / (step - (1 - share) * update), 1 + float(error)
            gains = [faster / error_1, faster / error_1 ** 0.5]
            pruned[-1][f"error {error}"] = "{:.2f} to {:.2f}".format(*gains)
        cfg = config.load(f"{name}.yaml")
        kept = getattr(cfg.prune.completions, "keep", None)
        for sharing, drafted in WAYS:
            took, alone = predict(name, sharing, args.drafts * drafted)
            took["update"] *= (kept or cfg.rollout.group_size) / cfg.rollout.group_size
            ways.append({"config": name, "tensor_parallel": sharing, "drafts": drafted, **took,
                         "step": sum(took.values()), "longest alone": alone,
                         f"step, sync {PUBLISHED_SYNC} s": sum(took.values()) - SYNC + PUBLISHED_SYNC})
    show(f"seconds of a step on {GPUS} H100s, predicted", ways)
    show("progress per second by pruning, over that of keeping all", pruned)
    print_json("plan", ways=ways, pruned=pruned)


if __name__ == "__main__":
    main()
