"""The fixtures of tests/conftest.py, for tests that lie beside a leaf."""

from conftest import command, process_group, tiny, unchecked, unflushed, untried

__all__ = ["command", "process_group", "tiny", "unchecked", "unflushed", "untried"]
