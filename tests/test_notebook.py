"""docs/notebook.md is followed to the letter: its code runs from another folder and shows what the page says."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "notebook.md").read_text()
ROW = re.compile(r"reward (\d)  advantage +(-?[\d.]+)  weight ([\d.]+)  ['\"].+['\"]")


def rows(text: str) -> list[tuple[float, ...]]:
    """Reward, advantage and weight of every completion shown."""
    return [tuple(map(float, found.groups())) for found in map(ROW.fullmatch, text.splitlines()) if found]


@pytest.mark.slow
def test_the_page_runs_and_prints_what_it_shows(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    assert code.count('"/path/to/winnow"') == 1
    code = code.replace("/path/to/winnow", str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, shown = rows(done.stdout), rows(PAGE)
    assert len(printed) == len(shown) == 16
    largest, unbiased = printed[:8], printed[8:]
    assert [row[:2] for row in largest] == [row[:2] for row in unbiased]  # one rollout, two pruners
    kept = [abs(adv) for _, adv, weight in largest if weight]
    assert len(kept) == 3 and min(kept) >= max(abs(adv) for _, adv, weight in largest if not weight)
    assert {weight for *_, weight in unbiased} <= {0.0, 1.0, 3.33}
    assert len({adv for _, adv, _ in largest}) > 1
    assert float(re.search(r"gradient norm ([\d.]+)$", done.stdout)[1]) > 0
    assert not list(tmp_path.iterdir())  # looking writes nothing
