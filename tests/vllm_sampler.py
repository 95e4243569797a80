"""Run by test_vllm_arguments.py with TRITON_INTERPRET=1: the sampler that vLLM has on CUDA, which its CPU build lacks.

It shows the kernel's arithmetic: its draws over many of our seeds, and its log-probs. Not what a GPU makes of it.
"""

import json

import torch
from vllm_configuration import stand_in_for_gpus, stand_in_for_the_driver

from infra.dist import seed_for

V, DRAWS, SHOWN, LIKELY = 1024, 1000, 50, 30


def main() -> None:
    stand_in_for_the_driver()
    stand_in_for_gpus()
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    torch.manual_seed(0)
    logits_1V = torch.randn(1, V) * 3
    prob_V = logits_1V.softmax(-1)[0].double()
    seeds = torch.tensor([seed_for(0, 0, "p", "rollout", n) for n in range(DRAWS)])

    def draw(count: int, place: int) -> torch.Tensor:
        """Draw one token for each of the first seeds, as the token at this place of a sequence."""
        given = logits_1V.expand(count, V).contiguous(), torch.arange(count), torch.ones(count), seeds[:count]
        return gumbel_sample(*given, torch.full((count,), place), apply_temperature=False, is_drafting=False)

    token_N = draw(DRAWS, 7)
    likely = prob_V.topk(LIKELY).indices
    seen = torch.stack([(token_N == token).sum() for token in likely]).double()
    expected = prob_V[likely] * DRAWS
    others, others_expected = DRAWS - seen.sum(), DRAWS - expected.sum()
    chi_squared = ((seen - expected) ** 2 / expected).sum() + (others - others_expected) ** 2 / others_expected
    equal = sum(int((draw(SHOWN, place) == token_N[:SHOWN]).sum()) for place in (8, 9, 10))
    scores = compute_topk_scores(logits_1V.expand(SHOWN, V).contiguous(), 0, token_N[:SHOWN])
    exact = logits_1V.log_softmax(-1)[0][token_N[:SHOWN]]
    print(json.dumps({
        "chi_squared": float(chi_squared),
        "draws": token_N[:SHOWN].tolist(),
        "again": draw(SHOWN, 7).tolist(),
        "equal": equal,
        "equal_by_chance": float(3 * SHOWN * (prob_V ** 2).sum()),
        "logp_shape": list(scores.logprobs.shape),
        "largest_logp_error": float((scores.logprobs[:, 0] - exact).abs().max()),
    }))


if __name__ == "__main__":
    main()
