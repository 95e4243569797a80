"""Run folders -> one page to watch and compare runs by: report.html, which needs no network and no server.

    python report.py RUN_DIR... [--out DIR] [--level PERCENT] [--watch [SECONDS]]
    python report.py RUN_DIR --card | --push-to-hub USER/NAME    # its model card, here or on the hub

Runs that differ in `seed`, `out`, `log` and `checkpoint` only are one row. Methods differ in cost, so scores
are compared at equal numbers of steps, of generated tokens, of trained tokens and of seconds (without
evaluation): at the budget that every finished run reached and at half of it. Another table has the cost to
reach a score: --level, or nine tenths of the way from the start to the best row's end. Runs that have not
finished are drawn and named, and left out of the tables. report.md has the tables for a pull request.
"""

from infra import commands

if __name__ == "__main__":  # before the imports that take seconds
    commands.of_report(__doc__)

import argparse
import base64
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from time import sleep
from typing import Any

import jinja2
from markupsafe import Markup

from config import ConfigError
from infra import runfolder
from infra.checkpoint import replayable_steps
from infra.lines import blame_file, replace
from infra.signals import exit_status
from leaves.page.card import markdown_table, push, write_card
from leaves.page.charts import COLOURS, draw_curves, score_charts
from leaves.page.compare import ReportTable, make_tables
from leaves.page.pruning import pruning_charts
from leaves.page.runs import Groups, LoggedRun, group_runs, read_run
from leaves.page.summary import Score, score_cell, scores_of
from leaves.page.texts import choose_answers, choose_completions, shorten_texts
from settings.loader import SHORT
from settings.paths import matching

PARTS = Path(__file__).parent / "leaves" / "page"
TEXTS = 3_500_000    # bytes of a page for completions and held-out answers, of all its runs together


@dataclass(frozen=True, slots=True)
class Comparison:
    """The content of report.html and report.md."""

    runs: list[LoggedRun]
    groups: Groups
    scores: list[Score]  # of the evaluation sets: accuracy or reward
    tables: list[ReportTable]
    remarks: list[str]   # on runs that the tables leave out, and on steps that a log lacks


def write_report(folders: list[Path], out: Path, level: float | None = None, refresh: int = 0) -> Path:
    """Write report.html and report.md into `out`, and return the page's path.

    The page reads itself anew every `refresh` seconds, unless it is 0. Raises ConfigError.
    """
    runs = [read_run(folder) for folder in folders]
    groups = group_runs(runs)
    scores = scores_of([line for run in runs for line in run.evals])
    if level is not None and not 0 < level <= 100 and (not scores or any(score.percent for score in scores)):
        raise ConfigError(f"--level {level:g} must be above 0 and at most 100, a percentage")
    remarks = [f"{run.folder} is left out of the tables: {run.state['state']} after {run.steps_done} of "
               f"{run.total} steps." for run in runs if not run.finished]
    for run in runs:
        if missing := runfolder.missing_steps(run.lines, run.steps_done):
            remarks.append(f"{run.folder}/metrics.jsonl lacks the steps {SHORT.repr(missing)}: its costs are "
                           "too low.")
    comparison = Comparison(runs, groups, scores, make_tables(groups, scores, level), remarks)
    if out.is_file():
        raise ConfigError(f"--out {out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    pages = {"report.md": write_markdown(comparison), "report.html": fill_page(comparison, refresh)}
    for name, page in pages.items():
        replace(out / name, page.encode(errors="backslashreplace").decode())  # it may hold half a character
    return out / "report.html"


def fill_page(comparison: Comparison, refresh: int) -> str:
    """Fill page.html."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(PARTS), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    runs, groups = comparison.runs, comparison.groups
    drawn, undrawn = draw_curves(groups)
    shown = {
        "title": runs[0].folder.resolve().name if len(runs) == 1 else f"{len(runs)} runs",
        "legend": [(label, i % len(COLOURS), i // len(COLOURS) % 3) for i, label in enumerate(groups)],
        "scores": {f"Held-out {s.kind}: {s.name}": score_charts(groups, s) for s in comparison.scores},
        "curves": drawn, "undrawn": undrawn,
        "runs": [describe_run(run) for run in runs], "data": page_texts(runs),
        "written": datetime.now().strftime("%Y-%m-%d %H:%M:%S"), "refresh": refresh,
    }
    return environment.get_template("page.html").render(comparison=comparison, **shown, **read_parts())


def read_parts() -> dict[str, Any]:
    """Read style and script, and hash the script: the page lets no other script run."""
    script = (PARTS / "script.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": Markup(script), "script_hash": f"sha256-{digest}",
            "style": Markup((PARTS / "style.css").read_text())}


def page_texts(runs: list[LoggedRun]) -> Markup:
    """Write the data of script.js as JSON; no text in it can end the <script> or begin a comment."""
    most = TEXTS // len(runs) // 2
    shown = []
    for run in runs:
        with blame_file(run.folder / "samples.jsonl"):
            samples = choose_completions(run.samples, most)
        shown.append({"folder": str(run.folder), "replayable": replayable_steps(run.folder, run.steps_done),
                      "samples": samples, "held_out": choose_answers(run.folder, most)})
    # Without NaN, which is no JSON.
    finite = json.loads(json.dumps({"runs": shown}), parse_constant=lambda name: None)
    return Markup(json.dumps(finite, ensure_ascii=False).replace("<", "\\u003c"))


def describe_run(run: LoggedRun) -> dict[str, Any]:
    """Collect the values that page.html shows of a run."""
    numbers, charts = pruning_charts(run)
    return {"name": str(run.folder), "state": run.state["state"], "error": run.state.get("error"),
            "steps_done": run.steps_done, "total": run.total,
            "facts": describe_progress(run), "newest": newest_completions(run),
            "pruning": numbers, "pruning_charts": charts, "config": (run.folder / "config.yaml").read_text()}


def describe_progress(run: LoggedRun) -> list[str]:
    """Write the time left, the newest reward and the held-out scores."""
    said = []
    if run.state["state"] == "running" and run.steps_done:
        spent = sum(line.get("time/step", 0) + line.get("time/eval", 0) for line in run.lines)
        left = timedelta(seconds=round(spent / run.steps_done * (run.total - run.steps_done)))
        said.append(f"about {left} left" if run.steps_done < run.total else "saving")
    if rewards := run.series("reward/mean")[1][-1:].tolist():
        said.append(f"reward {rewards[0]:.3f}")
    for line in run.evals[-1:]:
        said += [f"{score.name} {score_cell(line, score)} at step {line['step']}"
                 for score in scores_of([line])]
    return said


def newest_completions(run: LoggedRun) -> dict[str, Any] | None:
    """Take the first completions of the newest group in samples.jsonl."""
    if not run.samples:
        return None
    line = run.samples[-1]
    with blame_file(run.folder / "samples.jsonl"):
        shown = [shorten_texts(completion, 1000) | {"right": completion["components"].get("accuracy")}
                 for completion in line["completions"][:3]]
    return {"step": line["step"], "gold": line["gold"], "completions": shown}


def write_markdown(comparison: Comparison) -> str:
    """Write the tables as markdown, for a pull request."""
    page = ["# Runs", *map(escape_cell, comparison.remarks)]
    for table in comparison.tables:
        cells = [[escape_cell(text) for text in row] for row in (table.head, *table.rows)]
        lines = markdown_table(cells[0], cells[1:]) if table.rows else ""
        page += [f"## {escape_cell(table.title)}", *filter(None, (table.note, lines))]
    return "\n\n".join(page) + "\n"


def escape_cell(text: str) -> str:
    """Write a text so that markdown shows it as it is, in a table too."""
    escaped = re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", text)
    return " ".join(escaped.replace("&", "&amp;").replace("<", "&lt;").split())


def watch(folders: list[Path], out: Path, level: float | None, seconds: int) -> Path:
    """Write the page anew every so many seconds until none of the runs is running any more."""
    try:
        while any(runfolder.state_of(folder)["state"] == "running" for folder in folders):
            path = write_report(folders, out, level, refresh=seconds)
            print(f"{datetime.now():%H:%M:%S}  {path}", file=sys.stderr)
            sleep(seconds)
    except KeyboardInterrupt:
        write_report(folders, out, level)  # a page that does not wait for another
        raise
    return write_report(folders, out, level)


def main() -> int:
    args = commands.of_report(__doc__)
    return exit_status(lambda: make_report(args), lambda: "the page stays as it was written last")


def make_report(args: argparse.Namespace) -> None:
    """Run the command line."""
    paths = [path for text in args.runs for path in matching(text, "RUN_DIR")]
    if args.card or args.push_to_hub:
        if len(paths) > 1:
            raise ConfigError("--card and --push-to-hub describe one run; name one RUN_DIR")
        print(push(paths[0], args.push_to_hub) if args.push_to_hub else write_card(paths[0]))
        return
    # runs/* names the last page and other files too. A path that is not there is an error.
    runs = [path for path in paths if (path / "config.yaml").is_file() or not path.exists()] or paths
    for path in paths:
        if path not in runs:
            print(f"{path} is left out: it has no config.yaml, so it is no run folder", file=sys.stderr)
    out = args.out or (runs[0] if len(runs) == 1 else Path("runs/report"))
    path = write_report(runs, out, args.level) if args.watch is None else watch(
        runs, out, args.level, args.watch)
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB; tables: {path.with_suffix('.md')})")


if __name__ == "__main__":
    sys.exit(main())
