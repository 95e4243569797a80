"""Training runs that a bench is made of: each is made once, so that a bench goes on where it was interrupted."""

import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import config

ROOT = Path(__file__).parent.parent


def run(out: Path, name: str, *settings: str) -> Path:
    """Train, unless a whole run of the same settings is there; one that was cut off starts anew, it takes a minute."""
    settings = (*settings, f"out={out}")
    stored = out / "config.yaml"
    same = stored.is_file() and config.load(stored) == config.load(name, settings)
    if not same or not (out / "finished").is_file():
        shutil.rmtree(out, ignore_errors=True)
        sets = [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run([sys.executable, "train.py", "--config", name, *sets], cwd=ROOT, capture_output=True,
                              text=True)
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(settings)} failed:\n{done.stderr}")
        (out / "finished").touch()
    return out
