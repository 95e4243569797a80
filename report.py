"""Run folders -> one page to watch and compare runs by: report.html, which needs no network and no server.

    python report.py RUN_DIR... [--out DIR] [--seconds PHASE=SECONDS,...]

Runs that differ in `seed`, `out`, `log` and `checkpoint` only are one row. Methods differ in cost, so scores
are compared at equal numbers of steps, of generated tokens, of trained tokens and of seconds (without
evaluation): at the budget that every finished run reached. Runs that are under way are drawn and named, and
left out of the tables. report.md has the tables for a pull request. Of one run it says how much pruning would
pay, at its own seconds or for another machine: --seconds rollout=8,update=0.6.
"""

from infra import viewers

if __name__ == "__main__":  # before the imports that take seconds
    viewers.of_report(__doc__)

import argparse
import base64
import hashlib
import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

import jinja2
from markupsafe import Markup

from config import ConfigError
from infra.figures import align
from infra.lines import read_metrics, replace
from infra.signals import exit_status
from leaves.page.advice import advice
from leaves.page.charts import draw_sections
from leaves.page.runs import LoggedRun, choose_completions, group_runs, read_run
from leaves.page.summary import score_cell, scores_of
from leaves.page.tables import make_tables
from settings.loader import SHORT
from settings.paths import matching

PARTS = Path(__file__).parent / "leaves" / "page"
TEXTS = 3_500_000    # bytes of a page for completions, of all its runs together


def write_report(folders: list[Path], out: Path) -> Path:
    """Write report.html and report.md into `out`, and return the page's path. Raises ConfigError."""
    runs = [read_run(folder) for folder in folders]
    groups = group_runs(runs)
    tables, remarks = make_tables(groups), [remark for run in runs for remark in remarks_on(run)]
    if out.is_file():
        raise ConfigError(f"--out {out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    script = (PARTS / "script.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest())
    shown = json.dumps([choose_completions(run, TEXTS // len(runs)) for run in runs])
    data = json.loads(shown, parse_constant=lambda name: None)  # without NaN, which is no JSON
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(PARTS), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {}  # the components of a reward stay in their order
    page = environment.get_template("page.html").render(
        title=runs[0].folder.resolve().name if len(runs) == 1 else f"{len(runs)} runs",
        runs=runs, groups=groups, progress=describe_progress, sections=draw_sections(groups),
        tables=tables, remarks=remarks, data=data, written=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        script=Markup(script), script_hash=f"sha256-{digest.decode()}")
    numbers = [f"## {title}\n\n```\n" + "\n".join(align(rows)) + "\n```" for title, rows in tables.items()]
    for name, text in {"report.md": "\n\n".join([*remarks, *numbers, ""]), "report.html": page}.items():
        replace(out / name, text.encode(errors="backslashreplace").decode())  # it may hold half a character
    return out / "report.html"


def remarks_on(run: LoggedRun) -> list[str]:
    """Say why a run is left out of the tables, and which steps its log lacks."""
    said = [] if run.finished else [f"{run.folder} is left out of the tables: {run.state['state']} after "
                                    f"{run.steps_done} of {run.settings['steps']} steps."]
    logged = {line["step"] for line in run.steps}
    if missing := sorted({*range(1, run.steps_done + 1)} - logged):
        said.append(f"{run.folder}/metrics.jsonl lacks the steps {SHORT.repr(missing)}: its costs are too "
                    "low.")
    return said


def describe_progress(run: LoggedRun) -> list[str]:
    """Write the time left and the held-out scores."""
    said, total = [], run.settings["steps"]
    if run.state["state"] == "running" and run.steps_done:
        spent = sum(line.get("time/step", 0) + line.get("time/eval", 0) for line in run.lines)
        left = round(spent / run.steps_done * (total - run.steps_done))
        said.append(f"about {timedelta(seconds=left)} left" if run.steps_done < total else "saving")
    for line in run.evals[-1:]:
        said += [f"{score} {score_cell(line, score)} at step {line['step']}" for score in scores_of([line])]
    return said


def main() -> int:
    args = viewers.of_report(__doc__)
    return exit_status(lambda: make_report(args), lambda: "the page stays as it was written last")


def make_report(args: argparse.Namespace) -> None:
    """Run the command line."""
    paths = [path for text in args.runs for path in matching(text, "RUN_DIR")]
    # runs/* names the last page and other files too. A path that is not there is an error.
    runs = [path for path in paths if (path / "config.yaml").is_file() or not path.exists()] or paths
    for path in paths:
        if path not in runs:
            print(f"{path} is left out: it has no config.yaml, so it is no run folder", file=sys.stderr)
    path = write_report(runs, args.out or (runs[0] if len(runs) == 1 else Path("runs/report")))
    for run in runs if len(runs) == 1 or args.seconds else ():
        print(run)
        for line in advice(read_metrics(run / "metrics.jsonl"), args.seconds):
            print(line)
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB; tables: {path.with_suffix('.md')})")


if __name__ == "__main__":
    sys.exit(main())
