"""Where does a step's time go, what does pruning save, and what does it cost that every rank holds all of it?

    python bench/step.py [--completions 8192]

One rollout of the toy (16 prompts x 16 completions), then updates on it at keep = 16, 8, 4, 2, 1 of 16.
The machine's speed drifts, so each update is timed beside an unpruned one and the ratio of the two is what
counts: median of five pairs. `tokens` went through the policy, prompts included.

Then updates on 16 x 16 random completions of 64 tokens behind prompts of 40, 200 and 800: median of three,
and microseconds per completion token that is kept, with what its prompt costs.

Then 4 ranks of this machine, each of which has sampled a quarter of so many completions of 4,096 tokens, give
them to one another as training does: seconds of the slowest rank, and how far the resident memory of the
fullest rises above what it was before, with its own quarter. A token of a record takes 12 bytes: 4 of its id
and 8 of its log-prob. The default takes some 6 GiB on the machine.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from resident import forget_peak, peak, resident

import config
import train
from advantage import advantage
from collect import Sampler, Selection, choose, gather_samples
from history import PromptHistory
from infra import dist
from learner import Learner
from metrics import Clock
from preflight import memory
from records import Group, Prompt, Rewards, Rolled, Sample, Turn
from update import update

PAIRS = 5
PROMPTS, COMPLETION, REPEATS = (40, 200, 800), 64, 3
RANKS, TOKENS, ROUNDS, TOKEN_BYTES = 4, 4096, 3, 12


def pruning() -> dict:
    """Time the phases of a step of the toy, and its update by what is kept."""
    cfg = config.load("cppo_toy.yaml")
    task = train.load(cfg)
    learner, engine = train.set_up(memory.decide(cfg, task.source), task)
    engine.sync(learner.policy)
    sampler = Sampler(engine, task.tokenizer, cfg.rollout, cfg.reward, cfg.seed)
    history = PromptHistory(task.prompts, cfg.prune.prompts, cfg.seed, middle=0.5)
    turns = history.draw(cfg.rollout.prompts_per_step)
    sampler.rollout(turns)  # warm up
    clock = Clock()
    with clock.phase("rollout"):
        groups = sampler.rollout(turns)
    with clock.phase("reward"):
        rewards = sampler.score(groups)
    with clock.phase("sync"):
        engine.sync(learner.policy)
    rolled = Rolled() + Rolled(turns, groups, rewards, advantage(rewards, cfg.advantage))
    updated(learner, rolled, cfg, cfg.rollout.group_size)  # warm up
    print("seconds of the phases that pruning does not change: "
          + "  ".join(f"{name} {s:.3f}" for name, s in clock.seconds.items()))
    print(f"{'keep':>4} {'tokens':>8} {'share':>7} {'rows':>5} {'density':>8} {'pack s':>8} {'update s':>9} "
          f"{'of unpruned':>12} {'min - max':>15}")
    results = [beside_unpruned(learner, rolled, cfg, keep) for keep in (16, 8, 4, 2, 1)]
    print(f"\n{'prompt':>6} {'keep':>4} {'tokens':>8} {'rows':>5} {'update s':>9} {'us a kept token':>16}")
    by_prompt = [behind_prompt(learner, cfg, prompt, keep) for prompt in PROMPTS for keep in (16, 4, 2, 1)]
    return {"phases": clock.seconds, "pairs": PAIRS, "results": results, "by_prompt": by_prompt}


def behind_prompt(learner: Learner, cfg: config.Config, prompt: int, keep: int) -> dict:
    """Time updates on `keep` completions of each of 16 prompts of this length, of random tokens."""
    generator = torch.Generator().manual_seed(prompt)
    G, vocabulary = cfg.rollout.group_size, learner.policy.shape.vocab_size
    groups = []
    for n in range(cfg.rollout.prompts_per_step):
        ids = torch.randint(vocabulary, (prompt + G * COMPLETION,), generator=generator).tolist()
        samples = [Sample(ids[start:start + COMPLETION], [-6.0] * COMPLETION, False)
                   for start in range(prompt, len(ids), COMPLETION)]
        groups.append(Group(Prompt(str(n), tuple(ids[:prompt]), ""), tuple(samples)))
    reward_NG = torch.rand(len(groups), G, dtype=torch.float64, generator=generator)
    rewards = Rewards({"accuracy": reward_NG}, {"accuracy": 1.0}, torch.ones_like(reward_NG))
    turns = [Turn(group.prompt, 0) for group in groups]
    rolled = Rolled() + Rolled(turns, groups, rewards, advantage(rewards, cfg.advantage))
    measured = [updated(learner, rolled, cfg, keep) for _ in range(REPEATS + 1)][1:]
    seconds = median(step["time/update"] for step in measured)
    row = {"prompt": prompt, "keep": keep, "tokens": measured[0]["pack/tokens"],
           "rows": measured[0]["pack/rows"], "update": seconds,
           "microseconds": 1e6 * seconds / measured[0]["train/tokens"]}
    print(f"{prompt:>6} {keep:>4} {row['tokens']:>8,} {row['rows']:>5} {seconds:>9.3f} "
          f"{row['microseconds']:>16.1f}", flush=True)
    return row


def beside_unpruned(learner: Learner, rolled: Rolled, cfg: config.Config, keep: int) -> dict:
    """Time updates on `keep` completions of each group, each after one on all of them."""
    pairs = [(updated(learner, rolled, cfg, cfg.rollout.group_size), updated(learner, rolled, cfg, keep))
             for _ in range(PAIRS)]
    unpruned, pruned = pairs[0]
    ratios = sorted(b["time/update"] / a["time/update"] for a, b in pairs)
    row = {
        "keep": keep,
        "tokens": pruned["pack/tokens"],
        "share": pruned["pack/tokens"] / unpruned["pack/tokens"],
        "rows": pruned["pack/rows"],
        "density": pruned["pack/density"],
        "pack": median(b["time/pack"] for _, b in pairs),
        "update": median(b["time/update"] for _, b in pairs),
        "ratio": median(ratios), "ratio_min": ratios[0], "ratio_max": ratios[-1],
    }
    print(f"{keep:>4} {row['tokens']:>8,} {row['share']:>7.3f} {row['rows']:>5} {row['density']:>8.2f} "
          f"{row['pack']:>8.4f} {row['update']:>9.3f} {row['ratio']:>12.3f} "
          f"{row['ratio_min']:>7.3f} - {row['ratio_max']:.3f}", flush=True)
    return row


def updated(learner: Learner, rolled: Rolled, cfg: config.Config, keep: int) -> dict[str, float]:
    """Update on `keep` completions of each group; returns the update's metrics and its seconds by phase."""
    completions = replace(cfg.prune.completions, keep=keep)
    selection = Selection.of(replace(cfg, prune=replace(cfg.prune, completions=completions)))
    clock = Clock()
    measured = update(learner, choose(rolled, selection, seed=0), 0, clock)
    return measured | clock.metrics()


def travelling(completions: int) -> dict:
    """Measure, in processes of its own, how completions get to all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(travel, args=(folder, completions), nprocs=RANKS)
        travelled = json.loads((Path(folder) / "travelled.json").read_text())
    tokens, seconds, risen = completions * TOKENS, travelled["seconds"], max(travelled["risen"])
    print(f"\n{completions:,} completions of {TOKENS:,} tokens on {RANKS} ranks, {ROUNDS} rounds\n"
          f"{'of each rank':<38} {'MiB':>8} {'bytes a token':>14}")
    for name, size in (("records of the whole step", tokens * TOKEN_BYTES),
                       ("resident at the peak, above before", risen)):
        print(f"{name:<38} {size / 2**20:>8,.0f} {size / tokens:>14.1f}")
    print(f"seconds until every rank has them: "
          f"{median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f})")
    return {"completions": completions, "tokens": TOKENS, "ranks": RANKS} | travelled


def travel(rank: int, folder: str, completions: int) -> None:
    """Gather the completions of all ranks on this one, a few times."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    own_samples = sampled(rank, len(range(rank, completions, RANKS)))
    gather_samples(own_samples[:1])  # connections and code that the first call loads
    before = resident()
    seconds, risen = [], []
    for _ in range(ROUNDS):
        forget_peak()
        dist.barrier()
        start = perf_counter()
        step = gather_samples(own_samples)
        seconds.append(dist.max_over_ranks(perf_counter() - start))
        risen.append(dist.max_over_ranks(peak() - before))
        assert len(step) == completions
        del step
    if rank == 0:
        measured = {"seconds": seconds, "risen": risen}
        (Path(folder) / "travelled.json").write_text(json.dumps(measured))
    dist.close()


def sampled(seed: int, count: int) -> list[Sample]:
    """Draw completions of TOKENS tokens each at random."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        ids_T = torch.randint(150_000, (TOKENS,), generator=generator)
        logp_T = torch.rand(TOKENS, generator=generator, dtype=torch.float64).log()
        samples.append(Sample(ids_T.tolist(), logp_T.tolist(), True))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=8192, metavar="N",
                        help="completions that travel (default: 8192)")
    args = parser.parse_args()
    pruned = pruning()
    dist.close()
    print(json.dumps({"bench": "step"} | pruned | {"travel": travelling(args.completions)}))


if __name__ == "__main__":
    main()
