"""Is a fork's suite green? Apply both recipes of README to a copy of the repository, and run `make test`'s tests there.

    python tests/fork.py [arguments of pytest]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from test_recipes import RECIPES, copy_repository, run

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repository(Path(folder) / "fork")
        for recipe in RECIPES:
            run(copy, "git", "apply", "-", stdin=recipe)
        suite = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *sys.argv[1:]]
        sys.exit(subprocess.run(suite, cwd=copy, check=False).returncode)
