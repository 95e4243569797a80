"""A plugin for pytest: tests that ask for a leaf which has fallen off (tests/fall_off.py) are skipped.

A test asks for a leaf by importing it, by a config of it, or by a setting or kind of it, which its error then names. If
code outside of tests imports the leaf, the test fails as ever: nothing that is left may need it.
"""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GONE = json.loads(os.environ["GONE"])  # {"leaves": [...], "names": of their settings, kinds and configs}
WORDS = "|".join(map(re.escape, GONE["names"]))
REFUSED = re.compile(rf"unknown (?:key|section) '(?:[\w.]*\.)?(?:{WORDS})'|\bkind={WORDS}\b|config '?(?:{WORDS})")


def asks_for(error: BaseException) -> str:
    """Name the leaf that an error says is missing; "" for any other error."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[1:2] in [[x] for x in GONE["leaves"]]:
        frames = []
        trace = error.__traceback__
        while trace:
            frames.append(Path(trace.tb_frame.f_code.co_filename))
            trace = trace.tb_next
        ours = [path.relative_to(ROOT) for path in frames if ROOT in path.parents]
        by_test = ours and (ours[-1].parts[0] in ("tests", "bench", "experiments") or ours[-1].name.startswith("test_"))
        return error.name if by_test else ""
    found = REFUSED.search(str(error))
    return found[0] if found else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and (what := asks_for(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"{what} has fallen off")
    return report
