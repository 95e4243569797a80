"""Sum up a run from the lines of its metrics.jsonl: accuracy before and after, and seconds by phase."""

import sys
from pathlib import Path

from infra.runfolder import read


def summary(folder: Path) -> str:
    """Tabulate accuracy before and after with 95% intervals, and seconds by phase; name the next commands."""
    lines = read(folder / "metrics.jsonl")
    evals = [line for line in lines if is_evaluation(line)]
    first, last = evals[0], evals[-1]
    after = f"after {last['step']} steps"
    table = [f"{'held-out accuracy':<18} {'before':>22} {after:>24} {'tokens':>16}"]
    for name in sorted({key.split("/")[1] for key in last if key.startswith("eval/")}):
        cells = [accuracy_cell(line, name) for line in (first, last)]
        lengths = f"{first[f'eval/{name}/length']:.1f} -> {last[f'eval/{name}/length']:.1f}"
        table.append(f"{name:<18} {cells[0]:>22} {cells[1]:>24} {lengths:>16}")
    seconds = phase_seconds(lines)
    phases = "  ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return "\n".join([*table, "", f"seconds  {phases}", f"run folder  {folder}",
                      f"next  {python} eval.py --config {folder}/config.yaml --model {folder}/hf",
                      f"      {python} report.py {folder}"])


def is_evaluation(line: dict) -> bool:
    """Tell a metrics line of an evaluation from one of a step."""
    return any(key.startswith("eval/") for key in line)


def accuracy_cell(line: dict, name: str) -> str:
    accuracy, low, high = (line[f"eval/{name}/{key}"] for key in ("accuracy", "low", "high"))
    return f"{accuracy:.1%} [{low:.1%}, {high:.1%}]"


def phase_seconds(lines: list[dict]) -> dict[str, float]:
    """Add up the seconds of each phase over the lines of a metrics log, in the order of the phases there."""
    seconds: dict[str, float] = {}
    for line in lines:
        for key in line:
            if key.startswith("time/"):
                phase = key.removeprefix("time/")
                seconds[phase] = seconds.get(phase, 0.0) + line[key]
    return seconds
