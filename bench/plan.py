"""Say what every published config plans on GPUs of 80 and 141 GB: slots, sleep, rows, and GiB of each part.

    python bench/plan.py [--configs cppo_gsm8k.yaml,...]

Bytes are those that `auto` goes by and `train.py --fit` prints; nothing is loaded or measured. A part is the
most that it takes in any phase of a step, and the peak is of the fullest phase. The exit status is 1 if a
config that fits plans more than LIMIT of a card.
"""

import sys

from common import listed, parser, print_json, show
from torch import device

import config
from infra.device import Machine
from leaves.fit import fit

LIMIT = 0.95
MACHINES = [("1 x H100", 1), ("8 x H100", 8), ("1 x H200", 1), ("16 x H100", 16), ("32 x H100", 32)]
PARTS = {
    "trainer": ("weights", "moments", "reference", "critic and its moments"),
    "update": ("gradients", "embedding and head, as computed with", "activations of a row",
               "log-prob head, or a block at work"),
    "engine": ("engine's weights",),
    "KV cache": ("KV cache",),
    "sampling": ("what tokens are drawn from", "activations of prompts"),
    "graphs, NCCL": ("CUDA graphs, and NCCL",),
}
PUBLISHED = sorted(path.name for folder in config.CONFIGS for path in folder.glob("*.yaml")
                   if not path.name.endswith(("toy.yaml", "_hard.yaml")))


def planned(name: str, where: str, gpus: int) -> dict | None:
    """Return what a config plans on so many cards; None if its engines do not divide them."""
    cfg = config.load(name)
    if gpus % cfg.rollout.tensor_parallel:
        return None
    gib = fit.CARDS[where.split()[-1]]
    tried = fit.try_on(cfg, fit.find_shape(cfg.model.path), Machine(device("cuda"), gib * fit.GIB, gpus))
    chosen = tried.cfg
    row = {"config": name.removesuffix(".yaml"), "on": where, "fits": tried.fits,
           "slots": chosen.rollout.slots, "sleep": chosen.rollout.sleep, "rows": chosen.pack.capacity,
           "recomputed": chosen.model.checkpoint_blocks}
    for label, names in PARTS.items():
        of_phases = [sum(parts.get(part, 0) for part in names) for parts in tried.phases.values()]
        row[label] = max(of_phases) / fit.GIB
    return row | {"peak": tried.peak / fit.GIB, "of card": tried.peak / fit.GIB / gib}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--configs", type=listed(PUBLISHED), default=PUBLISHED,
                         help="(default: all published)")
    rows = []
    for name in options.parse_args().configs:
        for where, gpus in MACHINES:
            row = planned(name, where, gpus)
            fitting = [known for known in rows if row and known["config"] == row["config"] and known["fits"]]
            if row and (gpus <= 8 or not fitting):  # more than 8 only for a config that fits on no fewer
                rows.append(row)
    show("What published configs plan, GiB on each GPU", rows)
    over = [row for row in rows if row["fits"] and row["of card"] > LIMIT]
    fitting = sum(row["fits"] for row in rows)
    print(f"\n{len(over)} of {fitting} that fit plan more than {LIMIT:.0%} of a card")
    print_json("plan", rows=rows)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
