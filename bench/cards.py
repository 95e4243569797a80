"""What fits on which GPUs? The table of docs/running.md: what `auto` takes, and a predicted step.

    python bench/cards.py [--write]

Nothing is measured and nothing is loaded: bytes are counted and seconds predicted as `train.py --fit` does.
`--write` puts the table into docs/running.md.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from shapes import CARDS, shape_of

import config
from preflight import fit
from preflight.memory import Machine

PAGE = Path(__file__).parent.parent / "docs" / "running.md"
MODELS = ("0.5B", "1.5B", "3B", "7B")
RANK = 32
# A step of 64 x 16 completions of which all are trained on, without a KL.
SETTINGS = ["rollout.prompts_per_step=64", "loss.kl=0", "update.epochs=1", "rollout.slots=1024"]
HEAD = """\
| model | GB | 1 GPU: row | slots | recomputed | step s | 8 GPUs: row | slots | recomputed | step s |
|---|---|---|---|---|---|---|---|---|---|
"""


def cells(model: str, rank: int | None, gigabytes: int, gpus: int) -> list[str]:
    """Return what is chosen for a model on so many GPUs; dashes where it does not fit."""
    card, shape = fit.CARDS[CARDS[gigabytes]], shape_of(model)
    adapter = [f"model.lora.rank={rank}"] if rank else []
    cfg = config.load("grpo_gsm8k.yaml", [*SETTINGS, *adapter])
    found = fit.try_on(cfg, shape, Machine(torch.device("cuda"), card.gib * fit.GIB, gpus))
    if not found.fits:
        return ["-"] * 4
    seconds, _ = fit.step_seconds(found.cfg, shape, card, gpus)
    return [f"{found.cfg.pack.capacity:,}", f"{found.cfg.rollout.slots}", found.cfg.model.checkpoint_blocks,
            f"{sum(seconds.values()):.0f}"]


def table() -> str:
    lines = [[f"{model}{f', LoRA rank {rank}' if rank else ''}", str(gigabytes),
              *cells(model, rank, gigabytes, 1), *cells(model, rank, gigabytes, 8)]
             for model in MODELS for rank in (None, RANK) for gigabytes in CARDS]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(page: str) -> str:
    """Put the table in the place of the one that is on the page."""
    pattern = re.escape(HEAD) + r"(\|.*\|\n)*"
    assert len(re.findall(pattern, page)) == 1, "docs/running.md has no such table"
    return re.sub(pattern, lambda match: table(), page)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/running.md")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
