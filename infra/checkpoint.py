"""Save checkpoints in the background by torch.distributed.checkpoint, and load them on any number of ranks.

    checkpoints/step_000123/policy/     weights and moments, each rank's part in its own file; and critic/
    checkpoints/step_000123/extra.pt    state that no rank owns: step, config, history of prompts, and the
                                        length and sha256 of each log of the run at that step
    checkpoints/step_000123/files.json  every file above with its size and its digest
    checkpoints/latest                  name of the newest

A checkpoint is written as step_000123.unfinished and renamed when all ranks are done, then `latest` is
replaced, then old ones are removed: if anything dies in between, the checkpoint before is whole and in its
place.
"""

import io
import os
import re
import shutil
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from infra import dist
from infra.digests import (
    LIST,
    Files,
    differences,
    find_changed,
    format_list,
    hash_file,
    hash_files,
    list_files,
    read_list,
    sha256,
    writing_rank,
)
from infra.lines import flush, remove, replace
from infra.runfolder import Resume, versions
from infra.stopping import Stopped
from infra.terminal import to_stderr
from infra.weights import compare_shapes
from records import Metrics, Prompt
from settings.loader import SHORT, ConfigError
from settings.paths import REPOSITORY, user_path

Optimizers = Sequence[torch.optim.Optimizer]
Role = tuple[nn.Module, Optimizers]  # without an optimizer: the weights alone
Keep = int | Literal["all"]  # checkpoint.keep
STEP = re.compile(r"step_\d{6,}")


class Checkpoints:
    """The checkpoints of one run. Every rank calls every method."""

    def __init__(self, folder: Path, keep: Keep, roles: dict[str, Role], device: torch.device,
                 seal: Callable[[], dict] = dict):
        self.folder, self.keep, self.roles = folder, keep, roles
        self.seal = seal  # flushes the logs, and returns what extra.pt has of them (RunLog.seal)
        self.groups = {name: torch.distributed.new_group(backend="gloo") for name in roles}
        cuda = device.type == "cuda"
        # One stager for all saves, so that its buffers in the host's memory are made once.
        self.stager = DefaultStager(StagingOptions(use_pinned_memory=cuda, use_shared_memory=False,
                                                   use_async_staging=True, use_non_blocking_copy=cuda))
        self.worker = ThreadPoolExecutor(1)
        self.saves: list[dcp.AsyncSaveResponse] = []  # of the newest step, by role
        self.written: Future | None = None
        self.unsaved: tuple[int, dict] | None = None  # the newest step done, until it is saved
        self.seconds = 0.0  # that training has waited for saves since `metrics` was last called

    def reach(self, step: int, extra: dict) -> None:
        """Note that a step is done, and its extra.pt. `save` writes it, at the latest at a stop."""
        self.unsaved = (step, extra)

    def save(self) -> None:
        """Begin to save the step reached. The weights must not change before `wait_for_copies`; the copies
        are written meanwhile."""
        with self.standing_still():
            self.wait()
            (step, extra), self.unsaved = self.unsaved, None
            fresh, extra_file = self.folder / f"step_{step:06d}.unfinished", io.BytesIO()
            if dist.is_first():  # which writes it
                torch.save({"step": step} | self.seal() | extra, extra_file)
            self.saves = []
            for name, role in self.roles.items():
                # Without copies ahead the writer does not touch the GPU, which the trainer is using.
                writer = dcp.FileSystemWriter(fresh / name, per_thread_copy_ahead=0)
                self.saves.append(dcp.async_save(
                    tensors(*role), storage_writer=writer, process_group=self.groups[name],
                    async_checkpointer_type=AsyncCheckpointerType.THREAD, async_stager=self.stager))
            self.written = self.worker.submit(self.finish, fresh, extra_file.getvalue())

    def finish(self, fresh: Path, extra: bytes) -> None:
        """Wait for all ranks' files; then rank 0 publishes the checkpoint."""
        try:
            for save in self.saves:
                save.upload_completion.result()
            if dist.is_first():
                (fresh / "extra.pt").write_bytes(extra)
            written = list_files(fresh, dist.rank()).items()
            listed = dist.gather([*written], next(iter(self.groups.values())))  # which the saves have left
            if dist.is_first():
                publish(fresh, self.keep, dict(listed))
        except (dcp.CheckpointException, OSError) as error:
            failures = getattr(error, "failures", {})
            reason = next(iter(failures.values()))[0] if failures else error
            if dist.is_lost(reason):
                raise reason from error
            free = f"{shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB"  # torch may hide the cause
            raise ConfigError(f"{fresh} could not be written, with {free} free there: {reason}; make room; "
                              f"{how_to_go_on(self.folder.parent)}") from error

    def wait_for_copies(self) -> None:
        """Wait until the weights may change. Raises ConfigError if an earlier save has failed."""
        with self.standing_still():
            for save in self.saves:
                save.staging_completion.result()
            if self.written and self.written.done():
                self.wait()

    def wait(self) -> None:
        """Wait until the newest save is on disk. Raises ConfigError if it could not be written."""
        if self.written:
            written, self.written = self.written, None
            written.result()

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Finish a save that is under way before the run ends, except at a second signal. If a stop ends the
        run, save first."""
        try:
            yield
        except Stopped:
            if self.unsaved:
                self.save()
            self.wait()
            raise
        except Exception:
            with suppress(Exception):
                self.wait()
            raise
        self.wait()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds += perf_counter() - start

    def metrics(self) -> Metrics:
        seconds, self.seconds = self.seconds, 0.0
        return {"time/checkpoint": seconds}

    def load(self, path: Path) -> None:
        """Restore a checkpoint that `find` has found. Raises ConfigError if it is another model's."""
        for name, role in self.roles.items():
            load_tensors(path / name, tensors(*role))


def save_plainly(records: Any, path: Path) -> None:
    """Save a dataclass as dicts, lists and tensors, which torch.load reads without running code."""
    def plain_fields(pairs):
        return {name: value.tolist() if isinstance(value, array) else value for name, value in pairs}

    torch.save(asdict(records, dict_factory=plain_fields), path)


def find_newest(resume: Resume, folder: Path) -> tuple[Path | None, dict]:
    """Find the checkpoint to resume from and its extra.pt; None and step 0 to begin."""
    newest = None if resume == "never" else find(folder)
    if resume == "always" and newest is None:
        raise ConfigError(f"--resume: {folder} has no whole checkpoint, so no step of this run is left; "
                          "--resume auto begins it again and clears its logs (checkpoint.every saves)")
    return newest or (None, {"step": 0, "config": {}})


def find(folder: Path) -> tuple[Path, dict] | None:
    """Find the newest whole checkpoint and read its extra.pt; None if there is none.

    The newest is the one that `latest` names, or one before it if that is not whole, or else any other: every
    rank reads its part of each that is tried. Collective. Raises ConfigError if none is whole: such a run
    must not silently begin anew.
    """
    latest = folder / "latest"
    if os.path.lexists(latest) and not latest.is_file():
        raise ConfigError(f"{latest} is of another kind, or a link to nothing; bring it back, or remove it")
    if dist.is_first():
        for leftover in folder.glob("*.unfinished"):
            remove(leftover)
    wrong = []
    for path in dist.on_first(newest_checkpoints, folder):
        if not (damage := find_damage(path)):
            return path, torch.load(path / "extra.pt", weights_only=True)
        wrong.append(damage)
        if dist.is_first():
            to_stderr(f"{path} is not whole: {damage}")
    if wrong:
        raise ConfigError(f"{folder} has checkpoints, but none is whole (of the newest {wrong[0]}); restore "
                          "that file, or begin another run with --set out=...")
    return None


def tensors(model: nn.Module, optimizers: Optimizers = ()) -> dict[str, dict[str, Tensor]]:
    """Return weights and each kind of moment by names that do not depend on the ranks: the role's own
    tensors, not copies.

    Frozen weights of a model that trains, as under an adapter, are no part of a checkpoint. A model that is
    frozen as a whole, an average of weights say, is saved whole. Raises ValueError for one without weights.
    """
    named = dict(model.named_parameters())
    saved = {name: p for name, p in named.items() if p.requires_grad} or named
    if not saved:
        raise ValueError(f"a checkpoint cannot hold a {type(model).__name__}, which has no weights")
    by_kind = {"weights": {name: p.detach() for name, p in saved.items()}}
    for name, p in saved.items():
        for optimizer in optimizers:
            for kind, t in optimizer.state.get(p, {}).items():
                by_kind.setdefault(kind, {})[name] = t
    return by_kind


def publish(fresh: Path, keep: Keep, files: Files) -> None:
    """Rename a complete checkpoint, point `latest` at it, and remove all but the newest `keep` up to it."""
    folder, name = fresh.parent, fresh.stem
    for role in fresh.iterdir():
        parts = len(list(role.glob("*.distcp")))
        if role.is_dir() and parts < dist.world_size():
            raise OSError(f"{role} has files of {parts} of {dist.world_size()} ranks; all machines must "
                          "share `out`")
    flush(fresh / "extra.pt")
    replace(fresh / LIST, format_list(files))
    # Left by a run that died before it replaced `latest`, or that has gone back to an earlier step.
    remove(folder / name)
    fresh.rename(folder / name)
    replace(folder / "latest", name)
    if keep != "all":
        so_far = [path for path in step_folders(folder) if step_of(path) <= step_of(fresh)]
        for old in so_far[:-keep]:
            with suppress(OSError):  # the next save tries the rest again
                remove(old)


def step_folders(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, the oldest first."""
    return sorted((path for path in folder.glob("step_*") if STEP.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def how_to_go_on(run: Path) -> str:
    """Say how a run goes on that has ended before its time."""
    if newest := newest_checkpoints(run / "checkpoints")[:1]:
        return f"--resume auto goes on from the newest checkpoint, {newest[0].name}"
    return "--resume auto begins it again, since no checkpoint is there"


def newest_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoint that `latest` names and those before it, and then all others, the newest first.
    Say so if it names another one than the newest."""
    pointer, steps = folder / "latest", step_folders(folder)[::-1]
    named = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    last = step_of(folder / named) if STEP.fullmatch(named) else sys.maxsize
    tried = sorted(steps, key=lambda path: step_of(path) > last)
    if steps and named not in ("", steps[0].name):
        to_stderr(f"{pointer} names {SHORT.repr(named)}, and the newest that is there is {steps[0].name}: "
                  f"{tried[0].name} is taken; write the name of another one there to go on from it")
    return tried


def require_whole(step: Path) -> None:
    """Raise ConfigError if a file of a checkpoint is missing or cut off, or extra.pt is damaged."""
    refuse(step, find_changed(step, ["extra.pt"]))


def refuse(step: Path, damage: str) -> None:
    if damage:
        raise ConfigError(f"{step} is not a whole checkpoint: {damage}; restore that file, or take another"
                          f"{'' if is_checkpoint(step) else ': one is RUN/checkpoints/step_000123'}")


def is_checkpoint(path: Path) -> bool:
    return (path / "policy").is_dir()


def read_extra(path: str | Path) -> dict:
    """Read the extra.pt of a checkpoint; {} for any other path. Raises ConfigError."""
    step = user_path(path)
    if is_checkpoint(step):
        require_whole(step)
        return torch.load(step / "extra.pt", weights_only=True)
    if (step / "config.json").is_file():  # a model, wherever it lies
        return {}
    for steps in (step / "checkpoints", step, step.parent):
        if steps.name == "checkpoints" and steps.is_dir():
            models = (*step_folders(steps), *filter(Path.is_dir, [steps.parent / "hf"]))
            raise ConfigError(f"{path} is neither a model nor a checkpoint; of that run there are: "
                              f"{', '.join(map(str, models)) or 'none'}")
    return {}


def original_model(path: str | Path) -> str:
    """Return model.path of the run that made a checkpoint; any other path as it is. Raises ConfigError."""
    saved = read_extra(path)
    return saved["config"]["model.path"] if saved else path


@torch.no_grad()
def load_policy_into(path: str, model: nn.Module) -> nn.Module:
    """Fill a model, which keeps its dtype, with the policy of a checkpoint; for any other path leave it.
    Collective. Raises ConfigError."""
    step = user_path(path)
    if is_checkpoint(step):
        refuse(step, find_damage(step, "policy/"))
        load_tensors(step / "policy", tensors(model))
    return model


def load_tensors(path: Path, state: dict[str, dict[str, Tensor]]) -> None:
    """Load into these tensors, which keep their dtypes, each rank its shards. Raises ConfigError if the
    stored ones differ in name or shape."""
    here = {f"{kind}.{name}": t for kind, by_name in state.items() for name, t in by_name.items()}
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    stored = {name: torch.empty(t.size, device="meta") for name, t in metadata.items()
              if name in here or name.startswith("weights.")}
    if wrong := compare_shapes(stored.items(), here.items()):
        raise ConfigError(f"{path} is of another model: {wrong}; resume with the model that wrote it")
    dcp.load(state, checkpoint_id=path)


def find_damage(step: Path, part: str = "") -> str:
    """Name a damaged file of a checkpoint, among the names that begin with `part`; "" if all are whole.

    Collective. Each rank reads the files that it wrote itself, if there are as many ranks as there were then.
    """
    mine = [name for name in read_list(step)
            if name.startswith(part) and writing_rank(name) % dist.world_size() == dist.rank()]
    return next(filter(None, dist.gather([find_changed(step, mine)])), "")


# ---- hashes, and the inputs of a run

METHOD = "a method's file"  # an input of a run by a method of one file (docs/fork.md)


def inputs_of(model: Path, prompts: list[Prompt], sets: dict[str, list[Prompt]]) -> dict[str, str]:
    """Describe, by setting, the files and prompts that the steps of a run depend on."""
    named = {"data.train": prompts} | {f"data.eval ({name})": asked for name, asked in sets.items()}
    texts = sorted(path for path in model.iterdir() if path.suffix in (".json", ".jinja") and path.is_file())
    inputs = {"model.path": f"json and jinja files of sha256 {hash_files(texts)[:16]}"}
    for setting, asked in named.items():
        digest = sha256([(prompt.id, prompt.ids, prompt.answer, prompt.row) for prompt in asked])
        inputs[setting] = f"{len(asked)} prompts of sha256 {digest[:16]}"
    return inputs


def describe_code() -> dict[str, str]:
    """Identify the files of our own code, and the libraries that compute."""
    inits = (*REPOSITORY.glob("*/__init__.py"), *REPOSITORY.glob("leaves/*/__init__.py"))
    files = sorted(path for folder in (REPOSITORY, *(init.parent for init in inits))
                   for path in folder.glob("*.py") if not path.name.startswith("test_"))
    return {f"code of {path.relative_to(REPOSITORY)}": hash_file(path) for path in files} | {
        f"version of {name}": version for name, version in versions().items()}


def require_same_ranks(made_of: dict[str, object]) -> None:
    """Raise ConfigError on every rank if what a run is made of is not the same on all of them. Collective."""
    first, *others = dist.gather([made_of])
    for rank, other in enumerate(others, 1):
        if differing := list(differences(first, other)):
            raise ConfigError(f"the ranks differ, from 0 to {rank}: {SHORT.repr(differing)}; start all of "
                              "them with the same settings, files, code and libraries")


def require_same_inputs(step: Path, began: dict[str, str], here: dict[str, str]) -> None:
    """Raise ConfigError if a checkpoint was trained on other weights, data or tokenizers than these; name
    code and libraries that have changed."""
    changed = [setting for setting in here if began.get(setting) != here[setting]]
    renewed = [setting for setting in changed if setting.startswith(("code of ", "version of "))]
    if renewed and dist.is_first():
        to_stderr(f"{step} was made with another {SHORT.repr(renewed)}")
    for setting in changed:
        if setting not in renewed:
            raise ConfigError(f"{step} was trained with {began.get(setting, 'nothing')} at {setting}, and "
                              f"here it is {here[setting]}; bring the former back, or begin "
                              "another run with --set out=...")
