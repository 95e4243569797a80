"""The calculator that a model calls: examples/calculator.py."""

import runpy

import pytest
from conftest import ROOT

TOOL, = runpy.run_path(str(ROOT / "examples" / "calculator.py"))["tools"]()


@pytest.mark.parametrize(("text", "value"), [
    ("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("1,234 / 2", "617"), ("-7 - -2", "-5"), ("2 ** 9", "512"),
    ("0.1 + 0.2", "0.3"), ("10 / 4", "2.5"), ("1e3 * 3", "3000")])
def test_arithmetic_is_computed(text, value):
    assert TOOL(text) == value


@pytest.mark.parametrize("text", [
    "__import__('os')", "x + 1", "2 ** 99", "9 ** 9 ** 9", "1e15 * 1e15", "True + 1", "'a' * 9", "[1]", "1; 2",
    "1 if 1 else 2", "(9 ** 9) ** 9", "2 ** -1", "abs(1)", "1 < 2", "1 / 0", "9" * 5000, "(" * 5000, ""])
def test_anything_else_is_an_error_at_once(text):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError)):
        TOOL(text)
