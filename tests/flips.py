"""Is a damaged byte of a run ever taken for the run's own?

    python tests/flips.py [--checkpoint 1600] [--log 500] [--export 500] [--latest 400] [--seed 0]

One small run is made. Then one bit of one of its files is flipped, or one time in four its end is cut off, so many
times for the files of the newest checkpoint, for each log, for the files of the export and for `latest`. Each time the
run is resumed up to its first step, as train.py --resume does it, or the export is loaded as eval.py loads it. That
must end in an error, in the same state as without the damage, or, if it is said, in the state of the checkpoint before.
"""

import argparse
import hashlib
import io
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from survive import finish
from torch import Tensor
from tqdm import tqdm

import config
from config import ConfigError
from infra import checkpoint, dist, weights
from infra.runfolder import LOGS, RunLog
from infra.tokenizer import Tokenizer
from learner import make_optimizers
from model import empty_model, load_model

CPU = torch.device("cpu")


def digest(tensors: dict[str, Tensor], *others: object) -> str:
    """Hash named tensors and other values."""
    hashed = hashlib.sha256(repr(others).encode())
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode())
        hashed.update(tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def resumed(run: Path) -> str:
    """Resume a run up to its first step; returns a hash of its state."""
    path, extra = checkpoint.find_newest("always", run / "checkpoints")
    RunLog(run).require_logs(extra["step"], extra["logs"])
    model = empty_model(Path(extra["config"]["model.path"]), torch.float32).to_empty(device=CPU)
    roles = {"policy": (model, make_optimizers(model, config.load(run / "config.yaml").optim))}
    checkpoint.Checkpoints(run / "checkpoints", 2, roles, CPU).load(path)
    by_kind = checkpoint.tensors(*roles["policy"])
    return digest({f"{kind} {name}": t for kind, named in by_kind.items() for name, t in named.items()}, extra)


def loaded(folder: Path) -> str:
    """Load an export; returns a hash of the weights and the tokenizer."""
    source = weights.find_model(str(folder))
    tokenizer = Tokenizer(source)
    model = load_model(source, torch.float32, CPU)
    return digest(model.state_dict(), tokenizer.rust.to_str(), tokenizer.source, sorted(tokenizer.eos_ids))


def spoil(title: str, paths: list[Path], count: int, use: Callable[[], str], older: str | None,
          rng: random.Random) -> Counter:
    """Damage one of the files so many times; returns how often which outcome came."""
    done, whole = Counter(), use()
    for i in tqdm(range(count), title, unit="damage"):
        path, said = paths[i % len(paths)], io.StringIO()
        content = path.read_bytes()
        place = rng.randrange(len(content))
        flipped = bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1:]
        path.write_bytes(content[:place] + flipped * (rng.random() < 0.75))
        try:
            with redirect_stderr(said):
                state = use()
        except ConfigError:
            outcome = "refused"
        else:
            outcome = f"IN SILENCE: {path.name}"
            if state == whole:
                outcome = "the same"
            elif state == older and said.getvalue():
                outcome = "the one before, said"
        done[outcome] += 1
        path.write_bytes(content)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=int, default=1600, help="damages of files of the newest checkpoint")
    parser.add_argument("--log", type=int, default=500, help="of each log")
    parser.add_argument("--export", type=int, default=500, help="of files of the export")
    parser.add_argument("--latest", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dist.init("cpu")
    rng, wrong = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        finish(run, 1, 3, [])
        before, newest = checkpoint.step_folders(run / "checkpoints")
        latest = run / "checkpoints" / "latest"
        latest.write_text(before.name)
        older = resumed(run)
        latest.write_text(newest.name)
        logs = [*(run / name for name in LOGS), *sorted(run.glob("eval_*.jsonl"))]
        parts = {
            "checkpoint": (sorted(filter(Path.is_file, newest.rglob("*"))), args.checkpoint, lambda: resumed(run)),
            **{path.name: ([path], args.log, lambda: resumed(run)) for path in logs},
            "export": (sorted(filter(Path.is_file, (run / "hf").iterdir())), args.export, lambda: loaded(run / "hf")),
            "latest": ([latest], args.latest, lambda: resumed(run)),
        }
        for title, (paths, count, use) in parts.items():
            done = spoil(title, paths, count, use, older, rng)
            wrong += sum(times for outcome, times in done.items() if "SILENCE" in outcome)
            came = ", ".join(f"{times} {outcome}" for outcome, times in done.most_common())
            print(f"{title}, {done.total()} times: {came}", flush=True)
    print(f"taken in silence: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
