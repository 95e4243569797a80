"""Is a fork's suite green? Apply the recipes of docs/fork.md to a copy, and run tests there: all those of `make test`,
or the files that are named (`make test-fork`).

    python tests/fork.py [arguments of pytest]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from test_recipes import RECIPES, can_apply, copy_repository, run  # noqa: E402

if __name__ == "__main__":
    if not all(map(can_apply, RECIPES)):
        print("skipped: this fork has changed the lines that the recipes change")
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repository(Path(folder) / "fork")
        for recipe in RECIPES:
            run(copy, "git", "apply", "-", stdin=recipe)
        run(copy, "git", "init", "-q")  # some tests ask git which files there are
        run(copy, "git", "add", "-A")
        suite = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", *sys.argv[1:]]
        sys.exit(subprocess.run(suite, cwd=copy, check=False).returncode)
