"""Run folders -> one page to watch and compare runs by: report.html, which needs no network and no server.

    python report.py RUN_DIR... [--out DIR] [--level PERCENT] [--watch [SECONDS]]

Runs whose configs differ in nothing but `seed` and `out` are one row. Methods cost differently, so each is
read off at the same number of steps, of generated tokens, of trained tokens and of seconds (evaluation
apart): all and half of what the finished run that spent least has spent; and by what it had spent when it
came to an accuracy: --level, or nine tenths of the way from the start to the best row's end. Runs that have
not finished are drawn and named, and left out of the tables. report.md has the tables for a pull request.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path
from time import sleep
from typing import Any

import jinja2
from markupsafe import Markup

from config import ConfigError
from infra import runfolder
from infra.signals import exit_status
from page.charts import COLOURS, accuracy_charts, curves
from page.compare import Table, tables
from page.pruning import pruning_charts
from page.runs import Groups, LoggedRun, group_runs, read_run
from page.summary import accuracy_cell
from page.texts import completions, held_out, shortened

PARTS = Path(__file__).parent / "page"
TEXTS = 3_500_000    # bytes of a page for completions and held-out answers, of all its runs together


def write_report(folders: list[Path], out: Path, level: float | None = None, refresh: int = 0) -> Path:
    """Write report.html and report.md into `out`, and return the page's path.

    The page reads itself anew every `refresh` seconds, where these are not 0. Raises ConfigError.
    """
    runs = [read_run(folder) for folder in folders]
    groups = group_runs(runs)
    names = list(dict.fromkeys(key.split("/")[1] for run in runs for line in run.evals for key in line
                               if key.startswith("eval/")))
    compared = tables(groups, names, level)
    remarks = [f"{run.folder} is left out of the tables: {run.state['state']} after {run.last} of "
               f"{run.total} steps." for run in runs if not run.finished]
    out.mkdir(parents=True, exist_ok=True)
    write(out / "report.md", markdown(compared, remarks))
    write(out / "report.html", html(runs, groups, names, compared, remarks, refresh))
    return out / "report.html"


def write(path: Path, text: str) -> None:
    """Write a file at once: a browser never reads half a page."""
    fresh = path.with_name(f"{path.name}.unfinished")
    fresh.write_text(text, encoding="utf-8", errors="backslashreplace")  # of half a character, in a text
    fresh.replace(path)


def html(runs: list[LoggedRun], groups: Groups, names: list[str], compared: list[Table], remarks: list[str],
         refresh: int) -> str:
    """Fill page.html."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(PARTS), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    script = (PARTS / "script.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    drawn, undrawn = curves(groups)
    most = TEXTS // len(runs) // 2
    data = {"runs": [{"samples": completions(run.folder, most), "held_out": held_out(run.folder, most)}
                     for run in runs]}
    legend = [(label, i % len(COLOURS), i // len(COLOURS) % 3) for i, label in enumerate(groups)]
    return environment.get_template("page.html").render(
        title=runs[0].folder.resolve().name if len(runs) == 1 else f"{len(runs)} runs", refresh=refresh,
        written=datetime.now().strftime("%Y-%m-%d %H:%M:%S"), runs=[described(run) for run in runs],
        legend=legend, accuracy={name: accuracy_charts(groups, name) for name in names}, curves=drawn,
        undrawn=undrawn, tables=compared, remarks=remarks, data=inside_script(data), script=Markup(script),
        script_hash=f"sha256-{digest}", style=Markup((PARTS / "style.css").read_text()))


def inside_script(data: Any) -> Markup:
    """Write json that no text in it can end the <script> of, or begin a comment in."""
    return Markup(json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))


def described(run: LoggedRun) -> dict[str, Any]:
    """Say what page.html shows of a run."""
    numbers, charts = pruning_charts(run)
    return {"name": str(run.folder), "state": run.state["state"], "error": run.state.get("error"),
            "last": run.last, "total": run.total, "facts": facts(run), "newest": newest(run),
            "pruning": numbers, "pruning_charts": charts, "config": (run.folder / "config.yaml").read_text()}


def facts(run: LoggedRun) -> list[str]:
    """Say how a run does: time left, reward, held-out accuracy."""
    said = []
    if run.state["state"] == "running" and run.last:
        spent = sum(line.get("time/step", 0) + line.get("time/eval", 0) for line in run.lines)
        left = timedelta(seconds=round(spent / run.last * (run.total - run.last)))
        said.append(f"about {left} left" if run.last < run.total else "saving")
    if rewards := run.series("reward/mean")[1][-1:].tolist():
        said.append(f"reward {rewards[0]:.3f}")
    for line in run.evals[-1:]:
        sets = [key.split("/")[1] for key in line if key.endswith("/accuracy")]
        said += [f"{name} {accuracy_cell(line, name)} at step {line['step']}" for name in sets]
    return said


def newest(run: LoggedRun) -> dict[str, Any] | None:
    """Take the first completions of the newest group in samples.jsonl."""
    lines = runfolder.read(run.folder / "samples.jsonl")
    if not lines:
        return None
    shown = [shortened(completion, 1000) | {"right": completion["components"]["accuracy"] == 1}
             for completion in lines[-1]["completions"][:3]]
    return {"step": lines[-1]["step"], "gold": lines[-1]["gold"], "completions": shown}


def markdown(compared: list[Table], remarks: list[str]) -> str:
    """Write the tables as markdown, for a pull request."""
    page = ["# Runs compared", *map(cell, remarks)]
    for table in compared:
        rows = [table.head, ["---"] * len(table.head), *([cell(text) for text in row] for row in table.rows)]
        rows[0] = list(map(cell, table.head))
        lines = "\n".join("| " + " | ".join(row) + " |" for row in rows) if table.rows else ""
        page += [f"## {cell(table.title)}", *filter(None, (table.note, lines))]
    return "\n\n".join(page) + "\n"


def cell(text: str) -> str:
    """Write a text so that markdown shows it as it is, in a table too."""
    escaped = re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", text)
    return " ".join(escaped.replace("&", "&amp;").replace("<", "&lt;").split())


def watch(folders: list[Path], out: Path, level: float | None, seconds: int) -> Path:
    """Write the page anew every so many seconds until none of the runs is running any more."""
    while any(runfolder.state_of(folder)["state"] == "running" for folder in folders):
        path = write_report(folders, out, level, refresh=seconds)
        print(f"{datetime.now():%H:%M:%S}  {path}", file=sys.stderr)
        sleep(seconds)
    return write_report(folders, out, level)


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="a folder; the run's own for one run, else runs/report")
    parser.add_argument("--level", type=float, metavar="PERCENT", help="the accuracy to be reached")
    parser.add_argument("--watch", type=int, nargs="?", const=10, metavar="SECONDS",
                        help="go on while a run does: write the page again every so many seconds")
    args = parser.parse_args()
    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path("runs/report"))
    return exit_status(lambda: command(args, out), "the page stays as it was written last")


def command(args: argparse.Namespace, out: Path) -> None:
    """Do what the command line asks for."""
    if args.level is not None and not 0 < args.level <= 100:
        raise ConfigError(f"--level {args.level:g} must be above 0 and at most 100, a percentage")
    if args.watch is not None and args.watch < 1:
        raise ConfigError(f"--watch {args.watch} must be at least 1, a number of seconds")
    path = write_report(args.runs, out, args.level) if args.watch is None else watch(
        args.runs, out, args.level, args.watch)
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB; tables: {path.with_suffix('.md')})")


if __name__ == "__main__":
    sys.exit(main())
