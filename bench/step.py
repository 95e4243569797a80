"""Where does a step's time go, and what does pruning save?

    python bench/step.py

One rollout of the toy (16 prompts x 16 completions), then updates on it at keep = 16, 8, 4, 2, 1 of 16. The machine's
speed drifts, so each update is timed beside an unpruned one and the ratio of the two is what counts: median of five
pairs. `tokens` went through the policy, prompts included.

Then how 512 completions of 4,096 tokens travel between 4 ranks, all to all or a quarter of them to each: median of
three rounds, each of the slowest rank's seconds, and the bytes that a rank gets.
"""

import json
import os
import pickle
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import collect
import config
import data
import dist
import exchange
import metrics
import train
import update
from advantage import group_norm
from prune import COMPLETIONS, Offer
from sample import Batch, Group, Prompt, Sample, lengths

PAIRS = 5
RANKS, COUNT, TOKENS, ROUNDS = 4, 512, 4096, 3


def main() -> None:
    cfg = config.load("cppo_toy.yaml")
    source = Path(cfg.model.path)
    tokenizer = data.Tokenizer(source)
    prompts = data.to_prompts(data.load_problems(cfg.data.train), tokenizer, None, cfg.data.max_prompt_tokens)
    learner, engine = train.set_up(cfg, source, tokenizer)
    engine.sync(learner.policy)
    turns = data.PromptHistory(0.5).draw(prompts, cfg.prune.prompts, cfg.seed, cfg.rollout.prompts_per_step)
    collect.rollout(engine, tokenizer, turns, cfg, metrics.Clock(), None)  # warm up
    shared = metrics.Clock()
    groups, parts = collect.rollout(engine, tokenizer, turns, cfg, shared, None)
    with shared.phase("sync"):
        engine.sync(learner.policy)
    adv_NG = group_norm(parts["accuracy"], cfg.advantage.correction, cfg.advantage.eps)

    def updated(keep: int) -> dict[str, float]:
        settings = replace(cfg.prune.completions, keep=keep)
        clock = metrics.Clock()
        offer = Offer(adv_NG, lengths(groups, cfg.rollout.group_size), cfg.loss.per, cfg.loss.kl == 0, seed=0)
        pruned = COMPLETIONS[settings.kind](offer, settings)
        batch = Batch([], groups, adv_NG, adv_NG > 0, adv_NG, pruned, list(range(len(groups))), len(groups), seed=0)
        measured = update.update(learner, batch, 0, clock)
        return measured | clock.metrics()

    updated(cfg.rollout.group_size)  # warm up
    results = []
    print("seconds of the phases that pruning does not change: "
          + "  ".join(f"{name} {s:.3f}" for name, s in shared.seconds.items()))
    print(f"{'keep':>4} {'tokens':>8} {'share':>7} {'rows':>5} {'density':>8} {'pack s':>8} {'update s':>9} "
          f"{'of unpruned':>12} {'min - max':>15}")
    for keep in (16, 8, 4, 2, 1):
        pairs = [(updated(cfg.rollout.group_size), updated(keep)) for _ in range(PAIRS)]
        whole, pruned = pairs[0]
        ratios = sorted(b["time/update"] / a["time/update"] for a, b in pairs)
        row = {"keep": keep, "tokens": pruned["pack/tokens"], "share": pruned["pack/tokens"] / whole["pack/tokens"],
               "rows": pruned["pack/rows"], "density": pruned["pack/density"],
               "pack": median(b["time/pack"] for _, b in pairs), "update": median(b["time/update"] for _, b in pairs),
               "ratio": median(ratios), "ratio_min": ratios[0], "ratio_max": ratios[-1]}
        results.append(row)
        print(f"{keep:>4} {row['tokens']:>8,} {row['share']:>7.3f} {row['rows']:>5} {row['density']:>8.2f} "
              f"{row['pack']:>8.4f} {row['update']:>9.3f} {row['ratio']:>12.3f} "
              f"{row['ratio_min']:>7.3f} - {row['ratio_max']:.3f}")
    dist.close()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(travel, args=(folder,), nprocs=RANKS)
        travelled = json.loads((Path(folder) / "travelled.json").read_text())
    print(f"\n{'completions travel':<36} {'seconds':>8} {'min - max':>15} {'MiB':>6}")
    for how, (seconds, size) in travelled.items():
        print(f"{how:<36} {median(seconds):>8.2f} {min(seconds):>7.2f} - {max(seconds):.2f} {size / 2**20:>6.1f}")
    print(json.dumps({"bench": "step", "phases": shared.seconds, "pairs": PAIRS, "results": results,
                      "travel": travelled}))


def travel(rank: int, folder: str) -> None:
    """Time on one of the ranks how completions get to where they are wanted."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    generator = torch.Generator().manual_seed(rank)
    drawn = [(torch.randint(150_000, (TOKENS,), generator=generator).tolist(),
              torch.rand(TOKENS, generator=generator, dtype=torch.float64).log().tolist())
             for _ in range(COUNT // RANKS)]
    mine = [Sample(ids, logp, True) for ids, logp in drawn]
    # Every rank trains on each fourth completion, so three quarters of them have to travel.
    hands = [[(n, 0) for n in range(rank, COUNT, RANKS)] for rank in range(RANKS)]

    def where_needed() -> None:
        whole, owners = exchange.gather(mine, limit=0)
        exchange.fetch([Group(Prompt("", (0,), ""), (s,), (owner,)) for s, owner in zip(whole, owners, strict=True)],
                       hands)

    flat = COUNT * TOKENS * 12  # an id of 4 bytes and a log-prob of 8
    ways = {"all to all, pickled lists (before)": (lambda: dist.gather(drawn), len(pickle.dumps(drawn)) * RANKS),
            "all to all, flat arrays": (lambda: exchange.gather(mine, limit=COUNT * TOKENS), flat),
            "to the rank that trains on them": (where_needed, flat // RANKS)}
    found: dict[str, tuple[list[float], int]] = {how: ([], size) for how, (_, size) in ways.items()}
    for _ in range(ROUNDS):
        for how, (send, _) in ways.items():
            dist.barrier()
            begun = perf_counter()
            send()
            found[how][0].append(dist.max_over_ranks(perf_counter() - begun))
    if rank == 0:
        (Path(folder) / "travelled.json").write_text(json.dumps(found))
    dist.close()


if __name__ == "__main__":
    main()
