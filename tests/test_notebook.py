"""examples/winnow.ipynb runs from its first cell to its last, and prints what the stored one shows."""

import re

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

PATH = ROOT / "examples" / "winnow.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    """What its cells wrote to stdout."""
    return "".join(output["text"] for cell in notebook.cells for output in cell.get("outputs", ())
                   if output.output_type == "stream" and output.name == "stdout")


def pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))


def numbers(text: str, label: str) -> list[float]:
    return [float(number) for number in re.search(rf"^{label} +\[(.*)]$", text, re.MULTILINE)[1].split(",")]


def test_the_stored_notebook_has_run_and_names_no_machine():
    stored = nbformat.read(PATH, 4)
    assert pictures(stored) == 2 and all(cell.execution_count for cell in stored.cells if cell.cell_type == "code")
    assert not re.search(r"/(home|root|tmp|work|Users)/", PATH.read_text())


@pytest.mark.slow
def test_every_cell_runs_and_prunes_as_the_page_says():
    notebook = nbformat.read(PATH, 4)
    stored = printed(notebook)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    text = printed(notebook)
    assert pictures(notebook) == 2

    advantages = [abs(float(found)) for found in re.findall(r"^reward \d  advantage +(-?[\d.]+)", text, re.MULTILINE)]
    kept = numbers(text, "CPPO")
    assert len(advantages) == len(kept) == 8 and sorted(kept) == [0] * 5 + [1] * 3
    smallest = min(adv for adv, weight in zip(advantages, kept, strict=True) if weight)
    assert smallest >= max(adv for adv, weight in zip(advantages, kept, strict=True) if not weight)
    assert set(numbers(text, "unbiased")) <= {0, 1, 3.33}
    assert all(abs(mean - 1) < 0.2 for mean in numbers(text, "mean weights"))  # 2,000 draws: 6 deviations
    assert float(re.search(r"gradient norm ([\d.]+)$", text, re.MULTILINE)[1]) > 0
    before, after = (float(x) for x in re.findall(r"([\d.]+)%", text.splitlines()[-1]))
    assert after > before + 20
    for label in ("CPPO", "unbiased", "mean weights"):  # the stored page shows what it is made of
        assert len(numbers(stored, label)) == 8
