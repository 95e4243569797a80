"""Run by test_vllm_train.py under torchrun: a policy sharded by FSDP2 into one engine per rank, or one over both.

    torchrun --nproc_per_node 2 tests/vllm_ranks.py MODEL OTHER_MODEL TENSOR_PARALLEL
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from conftest import PRECISION, ask, make_groups
from test_rollout import spec, trainer_logp

from infra import dist
from model import load_model
from rollout_vllm import VLLMEngine


def main() -> None:
    device = dist.init(PRECISION.device)
    born, other, ranks = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    engine = VLLMEngine(spec(born, dtype=PRECISION.dtype, max_len=256, device=device, tensor_parallel=ranks,
                             sleeps=ranks == 1))
    policy, plain = (load_model(other, PRECISION.dtype, device) for _ in range(2))
    dist.shard(policy, policy.layers, device, PRECISION.dtype, offload=False)
    gaps, tokens = [], []
    for _ in range(2):  # again after the sharded weights have changed
        engine.sleep()
        engine.sync(policy)
        # Each rank has its own prompts and its own number of them.
        prompts = [g.prompt.ids for g in make_groups([[1]] * 3, [150, 4, 9], seed=dist.rank())]
        prompts = prompts[dist.rank():]
        samples = engine.generate(ask(prompts, [10 * dist.rank() + i for i in range(len(prompts))], 12), 0.7)
        gaps += [torch.tensor(s.logp) - trainer_logp(plain, p, s, 0.7) for p, s in zip(prompts, samples, strict=True)]
        tokens += [list(s.ids) for s in samples]
        with torch.no_grad():
            for p, q in zip(policy.parameters(), plain.parameters(), strict=True):
                p.mul_(0.9)
                q.mul_(0.9)
    found = dist.gather([{"agrees": PRECISION.agrees(torch.cat(gaps)), "tokens": tokens}])
    assert dist.sum_over_ranks({"one": 1.0})["one"] == dist.world_size()  # the trainer's group still works
    if dist.rank() == 0:
        print(json.dumps(found))
    dist.close()


if __name__ == "__main__":
    main()
