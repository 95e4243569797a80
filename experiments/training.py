"""Make the training runs of an experiment, each once: an interrupted experiment goes on where it stopped."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import config  # noqa: E402


def train_once(out: Path, name: str, *settings: str) -> Path:
    """Train, unless a finished run of the same settings is there. One that was cut off starts anew."""
    settings = (*settings, f"out={out}")
    stored = out / "config.yaml"
    unchanged = stored.is_file() and config.load(stored) == config.load(name, settings)
    if unchanged and (out / "finished").is_file():
        return out
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "train.py", "--config", name]
    for setting in settings:
        command += ["--set", setting]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{name} {' '.join(settings)} failed:\n{process.stderr}")
    (out / "finished").touch()
    return out
