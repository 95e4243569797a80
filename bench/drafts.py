"""How many steps does vLLM need with drafts, and what does a draft cost to verify? Counted on its CPU build.

    .venv-vllm/bin/python bench/drafts.py [--arms grpo,cppo,pps] [--epochs 4]

Each arm trains on the testbed twice, with drafts (leaves/drafts) and without; completions are the same. CPU
seconds are those of this process in rollouts, with drafts over without. A cell has the median of an epoch's
three rollouts, the least and the largest.
"""

import tempfile
from dataclasses import dataclass, field
from time import process_time
from typing import Any

from common import count, listed, parser, print_json, show

import config
import train
from leaves.drafts.proposals import Steps
from rollout_vllm import VLLMEngine
from settings.leaves import through

ARMS = {"grpo": [], "cppo": ["prune.completions={kind: topk, keep: 2}", "loss.denominator=kept"],
        "pps": ["prune.completions={kind: pps, error: 0.1, by_cost: true}"]}
PROMPTS = 48  # an epoch is three steps of 16


@dataclass
class Counted:
    """vLLM in training, with the steps, tokens and CPU seconds of each rollout."""

    engine: VLLMEngine
    steps: int = 0
    rollouts: list[dict] = field(default_factory=list)

    def __post_init__(self):
        core = self.engine.llm.llm_engine.engine_core.engine_core
        step = core.step_fn

        def counted() -> Any:
            self.steps += 1
            return step()

        core.step_fn = counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, *given: Any, **named: Any) -> list:
        self.steps, saved, start = 0, Steps.saved, process_time()
        samples = self.engine.generate(*given, **named)
        self.rollouts.append({"steps": self.steps, "tokens": sum(s.length for s in samples),
                              "ids": [[*s.ids] for s in samples],
                              "saved": Steps.saved - saved, "seconds": process_time() - start})
        return samples


def rollouts_of(arm: str, drafts: bool, epochs: int) -> list[dict]:
    """Train, and count each rollout."""
    made = []

    def passed(hook: str, cfg: config.Config, thing: Any) -> Any:
        if hook == "engine":
            made.append(Counted(thing[0]))
            thing = made[0], thing[1]
        return through(hook, cfg, thing)

    with tempfile.TemporaryDirectory() as out:
        sets = [f"out={out}/run", f"rollout.drafts={str(drafts).lower()}", "rollout.engine=vllm",
                "model.dtype=float32", "data.eval=null", f"data.limit={PROMPTS}", f"steps={3 * epochs}"]
        train.leaves.through = passed
        train.train(config.load("grpo_hard.yaml", [*ARMS[arm], *sets]))
    return made[0].rollouts[-3 * epochs:]  # those before are of the checks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--arms", type=listed([*ARMS]), default=[*ARMS])
    options.add_argument("--epochs", type=count, default=4)
    args, rows = options.parse_args(), []
    for arm in args.arms:
        with_drafts, plain = (rollouts_of(arm, drafts, args.epochs) for drafts in (True, False))
        for epoch in range(args.epochs):
            pairs = list(zip(with_drafts, plain, strict=True))[3 * epoch:3 * epoch + 3]
            assert all(one["ids"] == other["ids"] for one, other in pairs)
            rows.append({"arm": arm, "epoch": epoch + 1,
                         "steps without": [other["steps"] for _, other in pairs],
                         "with": [one["steps"] for one, _ in pairs],
                         "tokens without a step": [one["saved"] / one["tokens"] for one, _ in pairs],
                         "CPU s": [one["seconds"] / other["seconds"] for one, other in pairs]})
    show("engine steps of a rollout", rows)
    print_json("drafts", rows=rows)


if __name__ == "__main__":
    main()
