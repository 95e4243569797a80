"""Share what the benches need: the path to the code, options, tables, and processes of their own."""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, which has files with names of ours

from infra.terminal import count, new_parser as parser  # noqa: E402, F401, I001


def listed(known: list[str]) -> Callable[[str], list[str]]:
    """Make a reader of an option that gives some of these names, separated by commas."""
    def read_names(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(known)}")
        return names

    return read_names


def cell(value: object) -> str:
    """Write a figure; a list of measurements as their median and range."""
    if isinstance(value, list):
        return f"{cell(median(value))} ({cell(min(value))} - {cell(max(value))})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    if isinstance(value, int | float):
        return f"{value:,.0f}"
    return str(value or "")


def table(rows: list[dict], left_out: tuple[str, ...] = ()) -> str:
    """Write rows as a table of markdown, with the columns that any of them has a value in."""
    filled = dict.fromkeys(key for row in rows for key, value in row.items() if value not in ("", None))
    columns = [key for key in filled if key not in left_out]
    lines = [columns, ["---"] * len(columns),
             *([cell(row.get(key)).replace("|", "\\|") for key in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(title: str, rows: list[dict]) -> list[dict]:
    """Print a table under its title, and return its rows."""
    print(f"\n{title}\n\n{table(rows)}", end="", flush=True)
    return rows


def print_json(bench: str, **results: object) -> None:
    """Print the last line of a bench, which is for programs."""
    print(json.dumps({"bench": bench} | results))


def timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def in_own_process(function: Callable, *given: object) -> Any:
    """Call a function in a process of its own, which has nothing loaded yet; returns what it returns."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *given).result()
