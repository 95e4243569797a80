"""The fixtures of tests/conftest.py, for tests that lie beside a leaf."""

from conftest import command, hasty, process_group, refused, tiny, unchecked
