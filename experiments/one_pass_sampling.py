"""Is drawing a token faster in one pass over the logits: exponentials in float32, sums in float64?

    python experiments/one_pass_sampling.py [--slots 64] [--rounds 9]

The engine's own (`rollout.sample_tokens`) takes log-probs in float32, and their exponentials and sums in
float64. Both draw from the same random logits with the same numbers, in turns. Printed are CPU milliseconds
of a step, the least and the median, and how many tokens are the same.
"""

import argparse
from statistics import median
from time import process_time

import torch
from kept_runs import table
from torch import Tensor

from rollout import sample_tokens


def in_one_pass(logits_SV: Tensor, uniform_S: Tensor) -> tuple[Tensor, Tensor]:
    most_S1 = logits_SV.amax(dim=-1, keepdim=True)
    cumulative_SV = (logits_SV - most_S1).exp_().cumsum(dim=-1, dtype=torch.float64)
    total_S1 = cumulative_SV[:, -1:]
    token_S1 = torch.searchsorted(cumulative_SV, uniform_S[:, None] * total_S1, right=True)
    token_S1.clamp_(max=logits_SV.shape[1] - 1)
    logp_S1 = (logits_SV.gather(1, token_S1) - most_S1).double() - total_S1.log()
    return token_S1[:, 0], logp_S1[:, 0]


def compare(slots: int, vocabulary: int, rounds: int) -> list[str]:
    ways = {"two passes": lambda logits, uniform: sample_tokens(logits, uniform, 1.0, 1.0),
            "one pass": in_one_pass}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    same = 0
    for i in range(rounds):
        draw = torch.Generator().manual_seed(i)
        logits_SV = 4 * torch.randn(slots, vocabulary, generator=draw)
        uniform_S = torch.rand(slots, dtype=torch.float64, generator=draw)
        tokens = {}
        for name in ways if i % 2 else reversed(ways):
            start = process_time()
            tokens[name] = ways[name](logits_SV, uniform_S)[0]
            seconds[name].append(1e3 * (process_time() - start))
        same += int((tokens["one pass"] == tokens["two passes"]).sum())
    cells = [f"{min(x):.1f}, {median(x):.1f}" for x in seconds.values()]
    return [f"{vocabulary:,}", *cells, f"{same} of {slots * rounds}"]


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocabularies", default="477,49152,151936")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare(args.slots, int(size), args.rounds) for size in args.vocabularies.split(",")]
    head = ["tokens known", "two passes, ms", "one pass, ms", "same tokens"]
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
