"""What do a prompt's completions of the last epoch save, as drafts of its next ones?

    python experiments/speculation.py

GRPO trains the testbed (docs/experiments.md). From the second epoch on, every step's completions are sampled
twice, in turns: with drafts (rollout.drafts) and without. Their tokens are compared: they are to be the same.

drafted   share of the sampled tokens that needed no decoding step
by ratio  the share if a draft's token stayed with probability min(1, p / q), q of the policy that drew it, as
          in speculative decoding (arXiv:2211.17192), in the mean over its draws. That is a bound, not a
          method: q is known of the drawn tokens only, and the policy has been trained on the drafts, so the
          law would be no policy's.
seconds   CPU time of the step's sampling without drafts and with them
"""

import sys
from collections.abc import Callable
from functools import partial
from statistics import mean
from time import process_time

import torch
from kept_runs import RECIPE, parser, print_json, show
from step import prepare

import config
import train
from advantage import advantage
from collect import Sampler, Selection, choose
from learner import Learner
from leaves.drafts.join import DraftDecoding, DraftHistory
from metrics import Clock
from pack import Minibatch
from records import Group, PromptDraw, Rolled
from rollout import Decoding
from update import update


def accepted_by_ratio(learner: Learner, drafts: list[Group]) -> float:
    """Count the tokens of drafts that would be accepted, and one more each, in the mean over their draws."""
    total, ones_NG = 0.0, torch.ones(len(drafts), len(drafts[0].samples), dtype=torch.float64)
    for row in learner.rows(Minibatch(drafts, ones_NG.bool(), ones_NG, ones_NG, ones_NG)):
        with torch.no_grad():
            logp_C = learner.log_probs(learner.policy, row)
        gap_C = (logp_C.double() - row.sampled_logp_C).clamp(max=0)
        for i in range(len(row.members)):
            total += 1 + float(gap_C[row.segment_C == i].cumsum(0).exp().sum())
    return total


def sample_twice(sampler: Sampler, draws: list[PromptDraw], with_drafts: Callable, drafts_first: bool,
                 ) -> tuple[list[Group], dict]:
    """Sample a step without and with drafts; return its groups, and what they cost."""
    seconds, found = {}, {}
    for name in ("with", "without") if drafts_first else ("without", "with"):
        sampler.engine.decoding = with_drafts if name == "with" else Decoding
        start = process_time()
        found[name] = [s for group in sampler.rollout(draws) for s in group.samples]
        seconds[f"seconds {name}"] = process_time() - start
    same = [a.ids == b.ids for a, b in zip(found["with"], found["without"], strict=True)]
    tokens = sum(s.length for s in found["with"])
    samples = iter(found["without"])
    G = sampler.sampling.group_size
    groups = [Group(draw.prompt, tuple(next(samples) for _ in range(G))) for draw in draws]
    drafted = sum(s.drafted for s in found["with"]) / tokens
    return groups, {"same": sum(same), "of": len(same), "drafted": drafted, "tokens": tokens} | seconds


def run(steps: int, slots: int) -> list[dict]:
    """Train, and measure every step in which all prompts have drafts."""
    cfg = config.load(RECIPE, [f"steps={steps}", f"rollout.slots={slots}", "data.eval=null"])
    learner, sampler, plain = prepare(cfg, train.load_task(cfg))
    history = DraftHistory(plain)
    with_drafts = partial(DraftDecoding, history.drafts)
    newest: dict[str, Group] = {}
    lines = []
    for step in range(steps):
        sampler.engine.sync(learner.policy)
        draws = history.draw(cfg.rollout.prompts_per_step)
        groups, measured = sample_twice(sampler, draws, with_drafts, drafts_first=step % 2 == 0)
        if all(draw.prompt.ids in history.drafts for draw in draws):
            by_ratio = accepted_by_ratio(learner, [newest[draw.prompt.id] for draw in draws])
            measured["by ratio"] = min(1.0, by_ratio / measured["tokens"])
            lines.append({"epoch": 1 + draws[-1].epoch} | measured)
        newest |= {group.prompt.id: group for group in groups}
        rewards = sampler.score(groups)
        rolled = Rolled() + Rolled(draws, groups, rewards, advantage(rewards, cfg.advantage))
        history.record(rolled)
        update(learner, choose(rolled, Selection.of(cfg), seed=step), step, Clock())
        print(f"step {step + 1} of {steps}", file=sys.stderr, flush=True)
    return lines


def by_epoch(lines: list[dict]) -> list[dict]:
    """Add up the steps of each epoch."""
    rows = []
    for epoch in sorted({line["epoch"] for line in lines}):
        steps = [line for line in lines if line["epoch"] == epoch]
        without, used = (sum(line[f"seconds {name}"] for line in steps) for name in ("without", "with"))
        pairs = [line["seconds with"] / line["seconds without"] for line in steps]
        rows.append({
            "epoch": str(epoch), "steps": len(steps),
            "same": f"{sum(line['same'] for line in steps)} of {sum(line['of'] for line in steps)}",
            "drafted": mean(line["drafted"] for line in steps),
            "by ratio": mean(line["by ratio"] for line in steps),
            "seconds without": without, "with": used, "over without": pairs})
    return rows


def main() -> None:
    parser(__doc__).parse_args()
    rows = by_epoch(run(steps=135, slots=128))
    show("completions of the last epoch as drafts", rows)
    print_json("speculation", epochs=rows)


if __name__ == "__main__":
    main()
