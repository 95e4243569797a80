"""A plugin for pytest: tests that ask for a leaf which has fallen off (tests/fall_off.py) are skipped.

A test asks for a leaf by importing it, by a config or file of it, or by a setting or kind of it, which its error then
names, or settings/leaves.py imports. If other code outside of tests imports the leaf, the test fails as ever: none may
need it.
"""

import json
import os
import re
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GONE = json.loads(os.environ["GONE"])  # leaves, names of their settings and kinds, and their configs and files
NAMES, FILES = ("|".join(map(re.escape, GONE[key])) or "(?!)" for key in ("names", "files"))
REFUSED = re.compile(rf"(?:unknown key |^ *)'(?:\w+\.)*(?:{NAMES})(?:\.\w+)*'|={{'(?:{NAMES})':|\bkind='?(?:{NAMES})\b"
                     rf"|config '(?:{FILES})\b|^(?:python )?(?:{FILES})(?: .*)?\n *assert", re.MULTILINE)


def asks_for(error: BaseException) -> str:
    """Name the leaf that an error says is missing; "" for any other error."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[1:2] in [[x] for x in GONE["leaves"]]:
        files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
        *_, importer = (path for path in files if ROOT in path.parents)
        within = importer.relative_to(ROOT).parts[0] in ("tests", "bench", "experiments", "settings")
        return error.name if within or importer.name.startswith("test_") else ""
    found = REFUSED.search(str(error))
    return found[0] if found else ""


def skip(report, call, path: Path):
    if report.failed and (what := asks_for(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"{what} has fallen off")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return skip((yield), call, item.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    return skip(report, report.call, collector.path)
