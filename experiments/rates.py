"""Choose a learning rate for every arm, by runs of other seeds on the validation split.

The best of a grid is that of the largest area over steps (measures.py), its mean over the seeds. Where it is
an end of the grid, the next rate by a factor of 2 is run as well, up to twice.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean

from measures import area_and_end, curve
from stored import ROOT, Run, keep, records
from testbed import table
from tqdm import tqdm

sys.path.append(str(ROOT / "toy"))

import hard  # noqa: E402

VALIDATION = "runs/hard_validation.jsonl"  # made anew by `write_validation`, always the same
FACTOR, EXTENSIONS = 2, 2
Areas = dict[str, list[float]]  # learning rate -> the area of each run
Grids = dict[str, tuple[str, ...]]  # arm -> its learning rates
RunOf = Callable[[str, str, int], Run]  # (arm, rate, seed) -> its run on the test problems


def write_validation() -> None:
    """Write 600 problems that are none of training, test, or (above level 1) pre-training."""
    train, test = hard.splits()
    seen = {numbers for line, numbers in hard.pretraining() if line["level"] > 1}
    lines = hard.distinct(600, seed=4, taboo=seen | train.keys() | test.keys())
    rows = [{"id": f"hard/validation/{i}", **line} for i, line in enumerate(lines.values())]
    path = ROOT / VALIDATION
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def validated(results: Path) -> dict[str, Areas]:
    """Read the areas over steps of the runs that are kept, {arm: {rate: [seed]}}."""
    areas: dict[str, Areas] = {}
    for record in records(results):
        about = record.about
        if about["split"] == "validation":
            area, _ = area_and_end(curve(record), "steps", about["settings"]["steps"])
            areas.setdefault(about["arm"], {}).setdefault(about["rate"], []).append(area)
    return areas


def best_rate(areas: Areas, rates: int, seeds: int) -> str | None:
    """Choose a rate, once so many have all of their seeds; None before."""
    whole = {rate: mean(of) for rate, of in areas.items() if len(of) == seeds}
    return max(whole, key=whole.get) if len(whole) >= rates else None


def is_inside(rate: str, areas: Areas) -> bool:
    return min(map(float, areas)) < float(rate) < max(map(float, areas))


def spelled(rate: float) -> str:
    """Write a rate as people do, and as the names of files have it: 2.5e-5."""
    digits, power = f"{rate:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def beyond(rate: str, areas: Areas) -> str:
    """Name the rate next to the best, an end of what was tried, outside."""
    factor = FACTOR if float(rate) == max(map(float, areas)) else 1 / FACTOR
    return spelled(float(rate) * factor)


def best_rates(results: Path, grids: Grids, seeds: tuple[int, ...]) -> dict[str, str | None]:
    """Name the rate that the validation split has chosen for each arm; None where runs are missing."""
    areas = validated(results)
    return {arm: best_rate(areas.get(arm, {}), len(grid), len(seeds)) for arm, grid in grids.items()}


def tune(run_of: RunOf, grids: Grids, seeds: tuple[int, ...], results: Path, bar: tqdm) -> dict[str, str]:
    """Run every arm at each rate of its grid, and beyond where that is asked for; return the best rates."""
    def validate(arm: str, rate: str, seed: int) -> None:
        keep(replace(run_of(arm, rate, seed), data=VALIDATION), results, bar)

    write_validation()
    for seed in seeds:
        for arm, grid in grids.items():
            for rate in grid:
                validate(arm, rate, seed)
    for arm, grid in grids.items():
        for _ in range(EXTENSIONS):
            areas = validated(results)[arm]
            best = best_rate(areas, len(grid), len(seeds))
            if not is_inside(best, areas):
                for seed in seeds:
                    validate(arm, beyond(best, areas), seed)
    return best_rates(results, grids, seeds)


def rate_table(areas: dict[str, Areas], best: dict[str, str | None]) -> list[str]:
    """Tabulate the areas on the validation split, and mark the best of each arm."""
    rows = []
    for arm, rate in best.items():
        cells = [f"{tried}: {mean(of):.2f}{' *' if tried == rate else ''}"
                 for tried, of in sorted(areas.get(arm, {}).items(), key=lambda item: float(item[0]))]
        where = "not known yet"
        if rate is not None:
            where = "inside" if is_inside(rate, areas[arm]) else "an end of what was tried"
        rows.append([arm, ", ".join(cells), where])
    return table(["method", "learning rate: area on the validation split", "the best is"], rows)
