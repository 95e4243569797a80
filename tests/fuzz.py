"""Does anything that people hand over, damaged or made up, end in a traceback, a hang, or a wrong run?

    python tests/fuzz.py [--mutants 2000] [--seed 0] [--only model] [--first 0]

Mutants of configs, data rows, model folders, checkpoints, logs, results and verifier's cases go through the programs
that read them, each in a fork of this process, where all is imported. A program must end with status 0, or with status
2 and one line of error, within SECONDS and BYTES. Where it ends with 0, what it used is checked: a config is what it is
written down as, rows are those of the file, and a run that goes on has the weights of the one that was left alone.
A failure names its number: --first NUMBER --mutants 1 does it again, and leaves the mutant in its folder.
"""

import argparse
import gc
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch._dynamo  # noqa: F401  a second that every fork would spend
import yaml
from conftest import TOY, write_tiny
from tqdm import tqdm

import config
import eval
import report
import reward
import train
from infra import dist
from infra.signals import exit_status

SECONDS, CLOCK, BYTES = 10, 60, 1 << 30  # of computing, by the clock, and of memory beside what is imported
ROOT = Path(__file__).parent.parent
VALUES = [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**18, 10**400, 0.5, -0.5, 1e308, math.inf, -math.inf,
          math.nan, "", "a", "none", "auto", "1e400", "0x10", "1:30", "x" * 5000, "\ud800", "\u2028", "é", "../x", "/",
          ".", "\0", [], {}, [[]], [None], {"a": 1}, ["a", 1], "DEEP", "DIGITS"]
TEXTS = {'"DEEP"': "[" * 100_000 + "]" * 100_000, '"DIGITS"': "9" * 5001}  # which no writer would write
PIECES = [b"\0", b"\xff", b"\n", b"\xef\xbb\xbf", b"{", b'"', b"\xed\xa0\x80"]
YAML = ["base: .", "steps: &a [*a]", "steps: !!python/object/apply:os.system ['true']", "steps: 1e3", "<<: *x", "? [a]",
        "--- ", "steps: &a [" + "[1]," * 9 + "]\nseed: [" + "*a," * 9 + "]", "steps: 2001-01-01", "a: " + "[" * 5000]


# ---- mutations

def places(tree: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a tree of lists and dicts."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [place for key in keys for place in [(tree, key), *places(tree[key])]]


def mutated_tree(tree: Any, rng: random.Random) -> Any:
    """Change one thing in a tree, now and then several."""
    tree = deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        spots = places(tree)
        if not spots or rng.random() < 0.02:
            return rng.choice(VALUES)
        (owner, key), (other, other_key) = rng.choice(spots), rng.choice(spots)
        value, how = owner[key], rng.randrange(8)
        if how < 3:
            owner[key] = rng.choice(VALUES)
        elif how == 3 and isinstance(owner, dict):
            owner[rng.choice([f"{key}x", str(key)[:-1], str(key).upper(), ""])] = owner.pop(key)
        elif how == 4:
            del owner[key]
        elif how == 5:
            owner[key] = deepcopy(other[other_key])
        elif how == 6 and isinstance(value, int | float) and abs(value) < 1e300:
            owner[key] = rng.choice([value + 1, value - 1, -value, value * 1000, str(value), float(value)])
        else:
            owner[key] = rng.choice([[value], {"a": value}, str(value), [value] * 1000])
    return tree


def json_text(tree: Any) -> str:
    text = json.dumps(tree)
    for name, wild in TEXTS.items():
        text = text.replace(name, wild)
    return text


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice([1, 2, 16, 1000]))
    return rng.choice([
        lambda: content[:start], lambda: b"", lambda: content[:start] + content[end:],
        lambda: content[:start] + rng.randbytes(end - start) + content[end:],
        lambda: content[:start] + rng.choice(PIECES) + content[start:],
        lambda: content[:start] + content[start:end] * 3 + content[end:], lambda: content + content,
        lambda: content.replace(b"\n", b"\r\n"), lambda: b"\xef\xbb\xbf" + content,
        lambda: content.decode(errors="replace").encode("utf-16"), lambda: content + b"\0" * 100])()


def mutated_json(content: bytes, rng: random.Random) -> bytes:
    return json_text(mutated_tree(json.loads(content), rng)).encode()


def mutated_lines(content: bytes, rng: random.Random) -> bytes:
    """Of JSON lines: one is changed, or their order."""
    lines = content.decode().splitlines()
    at, how = rng.randrange(len(lines)), rng.randrange(8)
    if how < 5:
        lines[at] = json_text(mutated_tree(json.loads(lines[at]), rng))
    elif how == 5:
        del lines[at]
    elif how == 6:
        lines.insert(rng.randrange(len(lines)), lines[at])
    else:
        lines[at] = lines[at][:rng.randrange(len(lines[at]))]
    return "\n".join([*lines, ""]).encode()


def mutated_yaml(content: bytes, rng: random.Random) -> bytes:
    tree = yaml.safe_load(content)
    if rng.random() < 0.7:
        return yaml.safe_dump(mutated_tree(tree, rng)).encode()
    lines = content.decode().splitlines()
    at = rng.randrange(len(lines))
    old = lines[at]
    lines[at] = rng.choice([f"\t{old}", f"  {old}", f"{old}\n{old}", f"{old} {{", *YAML])
    return "\n".join(lines).encode()


def mutated_weights(content: bytes, rng: random.Random) -> bytes:
    """Of safetensors: its header as JSON, with its true length or another."""
    size, = struct.unpack("<Q", content[:8])
    header = json_text(mutated_tree(json.loads(content[8:8 + size]), rng)).encode()
    stated = rng.choice([len(header)] * 6 + [0, len(header) + 1, 2**40, 2**63])
    return struct.pack("<Q", stated) + header + content[8 + size:]


def mutate_folder(folder: Path, rng: random.Random) -> str:
    """Change a folder: what is in one of its files, or which there are. Returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, other, how = rng.choice(files), rng.choice(files), rng.randrange(12)
    if how == 0:
        path.unlink()
    elif how == 1:
        path.unlink()
        path.mkdir()
    elif how == 2 and path != other:
        shutil.copyfile(other, path)
    elif how == 3:
        path.rename(path.with_name(rng.choice([".DS_Store", "a.tmp", "step_000009", "x.unfinished"])))
    elif how == 4:
        (path.parent / rng.choice([".DS_Store", ".nfs0001", "step_000009", "x.unfinished", "é"])).write_bytes(b"x")
    elif how == 5:
        path.unlink()
        path.symlink_to(rng.choice([path.name, "nowhere", "/"]))
    else:
        mutate_file(path, rng)
    return f"{how} {path.relative_to(folder)} {other.relative_to(folder) if how == 2 else ''}"


BY_SUFFIX = {".json": mutated_json, ".jsonl": mutated_lines, ".yaml": mutated_yaml, ".safetensors": mutated_weights}


def mutate_file(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    by_structure = BY_SUFFIX.get(path.suffix) if rng.random() < 0.75 and content.strip() else None
    path.write_bytes((by_structure or mutated_bytes)(content, rng))


# ---- targets

def run(program: Callable[[], int], *arguments: object) -> int:
    sys.argv = ["program", *map(str, arguments)]
    return program()


@dataclass
class Target:
    """What is mutated: `seeds` are copied to `place`, `mutate` changes the copy, `use` runs the program on it."""

    seeds: list[Path]
    mutate: Callable[[Path, random.Random], object]
    use: Callable[[Path, random.Random], int]
    share: int              # of the mutants, in percent
    ended: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


def use_config(path: Path, rng: random.Random) -> int:
    def load() -> None:
        cfg = config.load(path)
        path.with_name("again.yaml").write_text(config.dump(cfg))
        assert config.load(path.with_name("again.yaml")) == cfg, "a config is not what it is written down as"
    return exit_status(load)


def use_rows(path: Path, rng: random.Random) -> int:
    def load() -> None:
        few = path.parent / "few.jsonl"
        task = train.load(config.load("grpo_toy.yaml", [f"data.train={path}", f"data.eval={few}"]))
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        assert [p.question for p in task.problems] == [row["question"] for row in rows], "other rows than the file has"
    return exit_status(load)


def use_model(path: Path, rng: random.Random) -> int:
    return run(eval.main, "--model", path, "--data", path.parent / "few.jsonl", "--set", "eval.max_new_tokens=4")


def use_run(path: Path, rng: random.Random) -> int:
    status = run(train.main, "--config", path.parent / "run.yaml", "--resume", "--set", f"out={path}")
    same = status or (path / "hf" / "model.safetensors").read_bytes() == (path.parent / "expected").read_bytes()
    assert same, "it went on to other weights"
    return status


def use_logs(path: Path, rng: random.Random) -> int:
    return use_run(path, rng) if rng.random() < 0.3 else run(report.main, path)


def use_result(path: Path, rng: random.Random) -> int:
    arguments = rng.choice([["--rescore", path], ["--compare", path, path.parent / "result.json"]])
    return run(eval.main, *arguments)


def use_cases(path: Path, rng: random.Random) -> int:
    return run(reward.main, "--cases", path)


def mutate_logs(path: Path, rng: random.Random) -> None:
    """Whatever lies beside the checkpoints."""
    mutate_file(rng.choice(sorted(p for p in path.iterdir() if p.is_file() and p.suffix)), rng)


def prepare(folder: Path) -> dict[str, Target]:
    """Make what is to be mutated: a model, a run that has stopped after two of three steps, a result, cases."""
    model = folder / "tiny"
    forked(lambda: dist.init("cpu") and write_tiny(model) and 0, folder / "made")
    sharded = shutil.copytree(model, folder / "sharded")
    (sharded / "model.safetensors").rename(sharded / "a.safetensors")
    names = json.loads((sharded / "a.safetensors").read_bytes()[8:][:struct.unpack(
        "<Q", (sharded / "a.safetensors").read_bytes()[:8])[0]])
    index = {"metadata": {}, "weight_map": {name: "a.safetensors" for name in names if name != "__metadata__"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    few = (TOY.parent / "test.jsonl").read_text().splitlines()[:4]
    (folder / "few.jsonl").write_text("\n".join(few) + "\n")
    (folder / "rows.jsonl").write_text("\n".join((TOY.parent / "train.jsonl").read_text().splitlines()[:12]) + "\n")
    cfg = config.load("dppo_toy.yaml", [
        f"model.path={model}", f"out={folder / 'run'}", f"data.eval={folder / 'few.jsonl'}", "steps=3", "eval.every=1",
        "checkpoint.every=1", "checkpoint.keep=all", "rollout.max_new_tokens=8", "eval.max_new_tokens=4",
        "rollout.group_size=4", "rollout.prompts_per_step=2", "data.limit=8"])
    (folder / "run.yaml").write_text(config.dump(cfg))
    cases = [{"gold": "4", "completion": rf"\boxed{{{x}}}", "correct": x == 4, "category": f"c{x}"} for x in (4, 5)]
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))

    def make() -> int:
        evaluate = ["--model", model, "--data", folder / "few.jsonl", "--set", "eval.max_new_tokens=4"]
        return (run(train.main, "--config", folder / "run.yaml") or
                run(eval.main, *evaluate, "--out", folder / "result.json"))

    made, said, *_ = forked(make, folder / "made")
    assert made == 0, said
    whole = folder / "run"
    shutil.copyfile(whole / "hf" / "model.safetensors", folder / "expected")
    for gone in (whole / "hf", whole / "checkpoints" / "step_000003"):
        shutil.rmtree(gone)
    (whole / "checkpoints" / "latest").write_text("step_000002")
    (whole / "state.json").write_text('{"state": "stopped"}\n')
    return {
        "config": Target(sorted((ROOT / "configs").glob("*.yaml")), mutate_file, use_config, 52),
        "rows": Target([folder / "rows.jsonl"], mutate_file, use_rows, 17),
        "model": Target([model, sharded], mutate_folder, use_model, 15),
        "checkpoint": Target([whole], lambda path, rng: mutate_folder(path / "checkpoints", rng), use_run, 2),
        "logs": Target([whole], mutate_logs, use_logs, 2),
        "result": Target([folder / "result.json"], mutate_file, use_result, 8),
        "cases": Target([folder / "cases.jsonl"], mutate_file, use_cases, 4)}


# ---- mutants

def forked(work: Callable[[], int], said: Path) -> tuple[int, str, float, int]:
    """Do work in a fork, within limits; returns its status, negative for a signal, what it said, the seconds that it
    took, and the bytes of memory beside those that were there."""
    before, start, pid = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, monotonic(), os.fork()
    if pid == 0:
        status = 1
        try:
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            tqdm._instances.clear()  # the bar is the parent's
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + 4 * BYTES  # threads reserve more than they use
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            signal.alarm(CLOCK)
            status = work()
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status, usage = os.wait4(pid, 0)
    text = said.read_text(errors="replace") if said.exists() else ""
    return os.waitstatus_to_exitcode(status), text, monotonic() - start, max(0, usage.ru_maxrss - before) * 1024


def wrong(status: int, said: str, used: int) -> str:
    """Say what is wrong with how a program ended; nothing where nothing is."""
    errors = [line for line in re.split(r"[\n\r]", said) if line.startswith("error: ")]
    if "Traceback" in said or status not in (0, 2):
        return f"status {status}"
    if status == 2 and (len(errors) != 1 or len(errors[0]) > 2000):
        return f"{len(errors)} lines of error, {max(map(len, errors), default=0)} characters"
    return f"{used / 2**20:.0f} MiB" if used > BYTES else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    parser.add_argument("--only", help="one target")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder, failed = Path(tempfile.mkdtemp(prefix="fuzz_")), 0
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    targets = prepare(folder)
    if args.only:
        targets = {args.only: targets[args.only]}
    gc.freeze()  # what is there stays shared with the forks
    for number in tqdm(range(args.first, args.first + args.mutants), "fuzz", unit="mutant"):
        rng = random.Random(f"{args.seed}/{number}")
        name, = rng.choices(list(targets), [target.share for target in targets.values()])
        target, place = targets[name], folder / f"mutant_{number}"
        seed = rng.choice(target.seeds)
        place = place.with_suffix(seed.suffix)
        (shutil.copytree if seed.is_dir() else shutil.copyfile)(seed, place)
        done = target.mutate(place, rng)
        said_in = folder / f"said_{number}"  # of its own: a tracker of a fork before may still write
        status, said, seconds, used = forked(lambda t=target, p=place, r=rng: t.use(p, r), said_in)
        target.ended[status] = target.ended.get(status, 0) + 1
        target.seconds.append(seconds)
        target.bytes.append(used)
        if remark := wrong(status, said, used):
            failed += 1
            tqdm.write(f"--- {name} {number}: {remark}; {seed.name} {done or ''} -> {place}\n" + "\n".join(
                line[:300] for line in said.strip().splitlines()[-4:]))
        else:
            said_in.unlink()
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    print(f"{'target':<12}{'mutants':>8}{'used':>8}{'refused':>8}{'mean s':>8}{'longest s':>11}{'most MiB':>10}")
    for name, target in targets.items():
        if target.seconds:
            print(f"{name:<12}{len(target.seconds):>8}{target.ended.get(0, 0):>8}{target.ended.get(2, 0):>8}"
                  f"{mean(target.seconds):>8.2f}{max(target.seconds):>11.1f}{max(target.bytes) / 2**20:>10.0f}")
    print(f"{failed} of {args.mutants} mutants ended otherwise" + (f", kept in {folder}" if failed else ""))
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
