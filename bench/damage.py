"""What do four ways to save training make of a damaged checkpoint?

    .venv-peers/bin/python bench/damage.py [--ways winnow,dcp,trl,nanochat] [--count 100] [--seed 0]

Each way saves two states of the toy model with AdamW, of the steps 1 and 2. Then, `--count` times for each
kind of damage, a copy of them is damaged and loaded as a run that resumes loads it, in a process of its own:

    flipped  one bit of one file of the newest checkpoint
    cut      one of its files ends early
    removed  one of its files is gone
    killed   only step 1 was saved, and kill -9 ends the save of step 2 at a random moment

    winnow    infra/checkpoint.py, as train.py --resume
    dcp       torch.distributed.checkpoint alone: of the folders with a .metadata the one of the highest step
    trl       TRL's GRPOTrainer, .train(resume_from_checkpoint=True), which has made the steps too
    nanochat  as its checkpoint_manager.py: torch.save of the model, JSON, torch.save of the optimizer; the
              highest model_*.pt is loaded

What came of a load: `refused` by an error; the state of step 2 (`newest`: nothing reads what is damaged, or
the save had ended); that of step 1 (`older`); or `another`, which is of neither step, as with the weights of
one and new moments. The last two count as `silent` if nothing is printed that the whole folder's load does
not print.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # before torch and transformers are imported, which read them
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed.checkpoint as dcp
from common import ROOT, listed, parser, print_json, show
from torch import Tensor
from tqdm import tqdm

from infra import checkpoint, dist
from model import empty_model

TOY = ROOT / "toy" / "model"
KINDS = ("flipped", "cut", "removed", "killed")
SECONDS = 120  # of a process, which is ended then
Mark = Callable[[], object]  # is called when a save begins, and when it has ended


# ---- the four ways

def made(step: int) -> checkpoint.Role:
    """Make a model and its optimizer with the weights and moments of a step, which its number seeds."""
    torch.manual_seed(step)
    model = empty_model(TOY, torch.float32).to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
        p.data.normal_()
    optimizer.step()
    return model, [optimizer]


def digest(tensors: dict[str, Tensor], *others: object) -> str:
    """Hash named tensors and other values."""
    hashed = hashlib.sha256(repr(others).encode())
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def flat(by_kind: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{kind} {name}": t for kind, named in by_kind.items() for name, t in named.items()}


class Winnow:
    def checkpoints(self, folder: Path, step: int) -> checkpoint.Checkpoints:
        return checkpoint.Checkpoints(folder, 2, {"policy": made(step)}, dist.init("cpu"))

    def save(self, folder: Path, step: int, mark: Mark) -> None:
        saving = self.checkpoints(folder, step)
        mark()
        saving.reach(step, {"config": {}, "history": [step]})
        saving.save()
        saving.wait()
        mark()

    def load(self, folder: Path) -> str:
        loading = self.checkpoints(folder, 0)
        path, extra = checkpoint.find_newest("always", folder)
        loading.load(path)
        return digest(flat(checkpoint.tensors(*loading.roles["policy"])), extra)


class Dcp:
    def save(self, folder: Path, step: int, mark: Mark) -> None:
        state = checkpoint.tensors(*made(step)) | {"step": torch.tensor(step)}
        mark()
        dcp.save(state, checkpoint_id=folder / f"step-{step}")
        mark()

    def load(self, folder: Path) -> str:
        state = checkpoint.tensors(*made(0)) | {"step": torch.tensor(0)}
        newest = max(path.parent for path in folder.glob("*/.metadata"))
        dcp.load(state, checkpoint_id=newest)
        return digest(flat(state | {"step": {"": state["step"]}}))


class Nanochat:
    def save(self, folder: Path, step: int, mark: Mark) -> None:
        model, (optimizer,) = made(step)
        mark()
        torch.save(model.state_dict(), folder / f"model_{step:06d}.pt")
        (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step}, indent=2))
        torch.save(optimizer.state_dict(), folder / f"optim_{step:06d}_rank0.pt")
        mark()

    def load(self, folder: Path) -> str:
        model, (optimizer,) = made(0)
        name = max(path.stem for path in folder.glob("model_*.pt")).removeprefix("model_")
        model.load_state_dict(torch.load(folder / f"model_{name}.pt"))
        optimizer.load_state_dict(torch.load(folder / f"optim_{name}_rank0.pt"))
        step = json.loads((folder / f"meta_{name}.json").read_text())["step"]
        return digest(flat(checkpoint.tensors(model, [optimizer])), step)


class Loaded(Exception):
    """A run that has resumed stands before its first step."""


class Trl:
    """Its libraries are imported once, in the process that all others are forks of."""

    def __init__(self):
        import trl
        from transformers.utils.logging import disable_progress_bar

        self.trl = trl
        disable_progress_bar()  # which prints another speed every time

    def trainer(self, folder: Path, steps: int, callback: type) -> object:
        from datasets import Dataset

        settings = self.trl.GRPOConfig(
            output_dir=str(folder), max_steps=steps, save_steps=1, num_generations=2, use_cpu=True,
            bf16=False, per_device_train_batch_size=2, max_completion_length=4, logging_strategy="no",
            report_to=[], disable_tqdm=True, gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"})
        return self.trl.GRPOTrainer(str(TOY), lambda completions, **_: [0.0, 1.0], settings,
                                    Dataset.from_list([{"prompt": "1+1"}] * 8), callbacks=[callback()])

    def save(self, folder: Path, step: int, mark: Mark) -> None:
        from transformers import TrainerCallback

        class Marks(TrainerCallback):
            def on_step_end(self, args, state, control, **_) -> None:
                mark()

            def on_save(self, args, state, control, **_) -> None:
                mark()

        self.trainer(folder, step, Marks).train(resume_from_checkpoint=step > 1)

    def load(self, folder: Path) -> str:
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_begin(self, args, state, control, model, optimizer, lr_scheduler, **_) -> None:
                moments = {f"{i} {name}": t for i, own in optimizer.state_dict()["state"].items()
                           for name, t in own.items()}
                raise Loaded(digest(model.state_dict() | moments | {"random": torch.get_rng_state()},
                                    lr_scheduler.state_dict(), state.global_step))

        try:
            self.trainer(folder, 10, Stop).train(resume_from_checkpoint=True)
        except Loaded as loaded:
            return str(loaded)


WAYS = {"winnow": Winnow, "dcp": Dcp, "trl": Trl, "nanochat": Nanochat}


# ---- processes

@dataclass(frozen=True, slots=True)
class Ended:
    value: str | None  # None: an error, or a signal
    said: set[str]     # lines
    marks: list[float]


def in_fork(work: Callable[[Mark], str | None], die_after: float | None = None) -> Ended:
    """Call a function in a fork of this process; kill it so many seconds after its first mark."""
    with tempfile.TemporaryFile("w+") as said, tempfile.NamedTemporaryFile("r") as result:
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(readable)
            signal.alarm(SECONDS)
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            call(work, lambda: os.write(writable, b"."), Path(result.name))
        os.close(writable)
        marks = []
        while os.read(readable, 1):
            marks.append(time.perf_counter())
            if die_after is not None and len(marks) == 1:
                time.sleep(die_after)
                os.kill(child, signal.SIGKILL)
        os.close(readable)
        os.waitpid(child, 0)
        said.seek(0)
        return Ended(result.read() or None, set(said.read().splitlines()), marks)


def call(work: Callable[[Mark], str | None], mark: Mark, result: Path) -> None:
    """Call a function in a child process, write down what it returns, and end."""
    try:
        result.write_text(work(mark) or "saved")
    except BaseException as error:  # whatever a way raises, it refuses
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(0)


# ---- damage

def damage(path: Path, kind: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    if kind == "removed":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[:place])
    else:
        content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


def files_of_newest(older: Path, both: Path) -> list[Path]:
    """List the files, relative, that the save of step 2 has written."""
    found = []
    for path in sorted(both.rglob("*")):
        before = older / path.relative_to(both)
        if path.is_file() and path.stat().st_size and not (
                before.is_file() and before.read_bytes() == path.read_bytes()):
            found.append(path.relative_to(both))
    return found


def outcome(loaded: Ended, newest: Ended, older: Ended) -> str:
    if loaded.value is None:
        return "refused"
    if loaded.value == newest.value:
        return "newest"
    what = "older" if loaded.value == older.value else "another"
    return what if loaded.said - newest.said else f"{what}, silent"


def try_way(name: str, count: int, seed: int, temporary: Path) -> list[dict]:
    """Damage one way's checkpoints; returns a row for each kind of damage."""
    way, rng = WAYS[name](), random.Random(seed)
    older, both, tried = (temporary / f"{name}_{kind}" for kind in ("older", "both", "tried"))

    def save(folder: Path, step: int, die_after: float | None = None) -> Ended:
        return in_fork(lambda mark: way.save(folder, step, mark), die_after)

    def load(folder: Path) -> Ended:
        return in_fork(lambda mark: way.load(folder))

    older.mkdir()
    assert save(older, 1).value
    shutil.copytree(older, both)
    saved = save(both, 2)
    first, newest = load(older), load(both)
    assert newest.value and first.value and newest.value != first.value, newest.said | first.said
    again = load(both)
    assert again == newest, again.said ^ newest.said or "it loads otherwise"
    begin, end = saved.marks
    files, rows = files_of_newest(older, both), []
    for kind in KINDS:
        done = Counter()
        for _ in tqdm(range(count), f"{name}, {kind}"):
            shutil.rmtree(tried, ignore_errors=True)
            if kind == "killed":
                shutil.copytree(older, tried)
                save(tried, 2, rng.uniform(0, end - begin))
            else:
                shutil.copytree(both, tried)
                damage(tried / rng.choice(files), kind, rng)
            done[outcome(load(tried), newest, first)] += 1
        rows.append({"damage": kind, "way": name} | done)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ways", type=listed(list(WAYS)), default=list(WAYS), help=",".join(WAYS))
    options.add_argument("--count", type=int, default=100, help="of each kind of damage")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = [row for name in args.ways for row in try_way(name, args.count, args.seed, Path(temporary))]
    outcomes = ("refused", "newest", "older", "older, silent", "another", "another, silent")
    rows = [{"damage": row["damage"], "way": row["way"]} | {name: row.get(name, 0) for name in outcomes}
            for kind in KINDS for row in rows if row["damage"] == kind]
    print_json("damage", results=show(f"{args.count} times each", rows))


if __name__ == "__main__":
    main()
