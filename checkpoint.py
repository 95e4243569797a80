"""Save and resume: the policy, the optimizer, the memory of prompts and the step. Everything else is a function of the
config and the step.
"""

import os
import shutil
from pathlib import Path

import torch
from torch import nn

import dist
from config import ConfigError
from data import PromptHistory


def save(folder: Path, step: int, policy: nn.Module, optimizer: torch.optim.Optimizer, history: PromptHistory,
         keep: int) -> None:
    """Write step_000123 whole, then point `latest` at it, then remove all but the newest `keep`.

    Both renames are atomic, so a run that dies here leaves the checkpoint before it in place.
    """
    if dist.rank() == 0:
        name = f"step_{step:06d}"
        fresh = folder / f"{name}.unfinished"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        state = {"step": step, "policy": policy.state_dict(), "optimizer": optimizer.state_dict(),
                 "history": history.state()}
        torch.save(state, fresh / "state.pt")
        # Left by a run that died between the two renames, so `latest` does not point at it.
        shutil.rmtree(folder / name, ignore_errors=True)
        fresh.rename(folder / name)
        (folder / "latest.unfinished").write_text(name)
        os.replace(folder / "latest.unfinished", folder / "latest")
        for old in sorted(folder.glob("step_*[0-9]"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, history: PromptHistory) -> int:
    """Restore what `latest` points at and return its step. Raises ConfigError when there is none."""
    pointer = folder / "latest"
    if not pointer.is_file():
        raise ConfigError(f"--resume: {pointer} not found, so no step of this run was saved; start it without --resume "
                          "under another `out`, and set checkpoint.every to save on the way")
    path = folder / pointer.read_text() / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        history.restore(state["history"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise ConfigError(f"--resume: {path} does not fit this run: {str(error).splitlines()[0]}; resume with the "
                          "model and the version that wrote it") from error
    return state["step"]
