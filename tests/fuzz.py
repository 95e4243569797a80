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
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch._dynamo  # noqa: F401  a second that every fork would spend
import yaml
from conftest import ROOT, TOY, write_tiny
from safetensors import safe_open
from tqdm import tqdm

import config
import eval
import report
import reward
import train
from infra import dist
from infra.files import decode
from infra.signals import exit_status
from settings.loader import encodable

SECONDS, CLOCK, BYTES = 10, 60, 1 << 30  # of computing, by the clock, and of memory beside what is imported
VALUES = [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**18, 10**400, 0.5, -0.5, 1e308, math.inf, -math.inf,
          math.nan, "", "a", "none", "auto", "1e400", "0x10", "1:30", "x" * 5000, "\ud800", "\u2028", "é", "../x", "/",
          ".", "\0", [], {}, [[]], [None], {"a": 1}, ["a", 1], "DEEP", "DIGITS"]
TEXTS = {'"DEEP"': "[" * 100_000 + "]" * 100_000, '"DIGITS"': "9" * 5001}  # which no writer would write
PIECES = [b"\0", b"\xff", b"\n", b"\xef\xbb\xbf", b"{", b'"', b"\xed\xa0\x80"]
YAML = ["base: .", "steps: &a [*a]", "steps: !!python/object/apply:os.system ['true']", "steps: 1e3", "<<: *x", "? [a]",
        "--- ", "steps: &a [" + "[1]," * 9 + "]\nseed: [" + "*a," * 9 + "]", "steps: 2001-01-01", "a: " + "[" * 5000]


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
            return deepcopy(rng.choice(VALUES))
        (owner, key), (other, other_key) = rng.choice(spots), rng.choice(spots)
        value, how = owner[key], rng.randrange(8)
        if how < 3:
            owner[key] = deepcopy(rng.choice(VALUES))  # else a value of the table could come to hold itself
        elif how == 3 and isinstance(owner, dict):
            owner[rng.choice([f"{key}x", str(key)[:-1], str(key).upper(), ""])] = owner.pop(key)
        elif how == 4:
            del owner[key]
        elif how == 5:
            owner[key] = deepcopy(other[other_key])
        elif how == 6 and isinstance(value, int | float) and abs(value) < 1e300:
            owner[key] = rng.choice([value + 1, -value, value * 1000, str(value), float(value)])
        else:
            owner[key] = rng.choice([[value], {"a": value}, str(value), [value] * 1000])
    return tree


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice([1, 2, 16, 1000]))
    before, piece, after = content[:start], content[start:end], content[end:]
    return rng.choice([before, b"", before + after, before + rng.randbytes(len(piece)) + after,
                       before + rng.choice(PIECES) + piece + after, before + piece * 3 + after, content + content,
                       content.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + content,
                       content.decode(errors="replace").encode("utf-16"), content + b"\0" * 100])


def mutated_json(content: bytes, rng: random.Random) -> bytes:
    text = json.dumps(mutated_tree(json.loads(content), rng))
    for name, wild in TEXTS.items():
        text = text.replace(name, wild)
    return text.encode()


def mutated_lines(content: bytes, rng: random.Random) -> bytes:
    """Of JSON lines: one is changed, removed, repeated or torn."""
    lines = content.splitlines()
    at, how = rng.randrange(len(lines)), rng.randrange(8)
    new = [lines[at][:rng.randrange(len(lines[at]))]]
    if how < 5:
        new = [mutated_json(lines[at], rng)]
    elif how < 7:
        new = [lines[at]] * 2 * (how - 5)
    return b"\n".join([*lines[:at], *new, *lines[at + 1:], b""])


def mutated_yaml(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return yaml.safe_dump(mutated_tree(yaml.safe_load(content), rng)).encode()
    lines = content.decode().splitlines()
    at = rng.randrange(len(lines))
    old = lines[at]
    lines[at] = rng.choice([f"\t{old}", f"  {old}", f"{old}\n{old}", f"{old} {{", *YAML])
    return "\n".join(lines).encode()


def mutated_weights(content: bytes, rng: random.Random) -> bytes:
    """Of safetensors: its header as JSON, with its true length or another."""
    size, = struct.unpack("<Q", content[:8])
    header = mutated_json(content[8:8 + size], rng)
    stated = rng.choice([len(header)] * 6 + [0, len(header) + 1, 2**40, 2**63])
    return struct.pack("<Q", stated) + header + content[8 + size:]


BY_SUFFIX = {".json": mutated_json, ".jsonl": mutated_lines, ".yaml": mutated_yaml, ".safetensors": mutated_weights}


def mutate_file(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    by_structure = BY_SUFFIX.get(path.suffix) if rng.random() < 0.75 and content.strip() else None
    path.write_bytes((by_structure or mutated_bytes)(content, rng))


def mutate_folder(folder: Path, rng: random.Random) -> None:
    """Change a folder: the content of one of its files, or which there are."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, other, how = rng.choice(files), rng.choice(files), rng.randrange(12)
    if how > 4 or how == 2 and path == other:
        mutate_file(path, rng)
    elif how == 2:
        shutil.copyfile(other, path)
    elif how == 3:
        path.rename(path.with_name(rng.choice([".DS_Store", "a.tmp", "step_000009", "x.unfinished"])))
    elif how == 4:
        (path.parent / rng.choice([".DS_Store", ".nfs0001", "step_000009", "x.unfinished"])).write_bytes(b"x")
    else:
        path.unlink()
        if how == 1:
            rng.choice([path.mkdir, lambda: path.symlink_to(rng.choice([path.name, "nowhere", "/"]))])()


def run(program: Callable[[], int], *arguments: object) -> int:
    sys.argv = ["program", *map(str, arguments)]
    return program()


def use_config(path: Path, rng: random.Random) -> int:
    def load() -> None:
        cfg = config.load(path)
        path.with_name("again.yaml").write_text(config.dump(cfg))
        assert config.load(path.with_name("again.yaml")) == cfg, "a config is not what it is written down as"
    return exit_status(load)


def use_rows(path: Path, rng: random.Random) -> int:
    def load() -> None:
        few = path.parent / "few.jsonl"
        task = train.load_task(config.load("grpo_toy.yaml", [f"data.train={path}", f"data.eval={few}"]))
        rows = [json.loads(line) for line in decode(path.read_bytes(), path).split("\n") if line.strip()]
        assert [p.question for p in task.problems] == [encodable(row["question"]) for row in rows], "other rows"
    return exit_status(load)


def use_run(path: Path, rng: random.Random) -> int:
    status = run(train.main, "--config", path.parent / "run.yaml", "--resume", "--set", f"out={path}")
    same = status or (path / "hf" / "model.safetensors").read_bytes() == (path.parent / "expected").read_bytes()
    assert same, "it went on to other weights"
    return status


# name -> share of the mutants in percent, what is copied and changed, how it is changed, and the program that reads it
TARGETS = {
    "config": (52, "configs", mutate_file, use_config),
    "rows": (17, "rows.jsonl", mutate_file, use_rows),
    "model": (15, "tiny", mutate_folder, lambda path, rng: run(
        eval.main, "--model", path, "--data", path.parent / "few.jsonl", "--set", "eval.max_new_tokens=4")),
    "checkpoint": (2, "run", lambda path, rng: mutate_folder(path / "checkpoints", rng), use_run),
    "logs": (2, "run",  # one of the files beside the checkpoints
             lambda path, rng: mutate_file(rng.choice(sorted(p for p in path.glob("*.*") if p.is_file())), rng),
             lambda path, rng: use_run(path, rng) if rng.random() < 0.3 else run(report.main, path)),
    "result": (8, "result.json", mutate_file, lambda path, rng: run(
        eval.main, "--model", path.parent / "tiny", "--data", path.parent / "few.jsonl", "--out", path,
        "--set", "eval.max_new_tokens=4")),
    "cases": (4, "cases.jsonl", mutate_file, lambda path, rng: run(reward.main, "--cases", path))}


def head(source: Path, path: Path, count: int) -> None:
    path.write_text("".join(source.read_text().splitlines(keepends=True)[:count]))


def prepare(folder: Path) -> None:
    """Make what is to be mutated: a model, a run that has stopped after two of three steps, a result, cases."""
    model = folder / "tiny"
    forked(lambda: dist.init("cpu") and write_tiny(model) and 0, folder / "made")
    with safe_open(model / "model.safetensors", "pt") as weights:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    head(TOY.parent / "test.jsonl", folder / "few.jsonl", 4)
    head(TOY.parent / "train.jsonl", folder / "rows.jsonl", 12)
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

    made, said, _ = forked(make, folder / "made")
    assert made == 0, said
    whole = folder / "run"
    shutil.copyfile(whole / "hf" / "model.safetensors", folder / "expected")
    for gone in (whole / "hf", whole / "checkpoints" / "step_000003"):
        shutil.rmtree(gone)
    (whole / "checkpoints" / "latest").write_text("step_000002")
    (whole / "state.json").write_text('{"state": "stopped"}\n')


def forked(work: Callable[[], int], said: Path) -> tuple[int, str, int]:
    """Do work in a fork, within limits; returns its status (below 0: a signal), what it said, and its memory."""
    before, pid = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, os.fork()
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
    return os.waitstatus_to_exitcode(status), text, max(0, usage.ru_maxrss - before) * 1024


def wrong(status: int, said: str, used: int) -> str:
    """Say what is wrong with how a program ended; "" if nothing is."""
    errors = [line for line in re.split(r"[\n\r]", said) if line.startswith("error: ")]
    if "Traceback" in said or status not in (0, 2):
        return f"status {status}"
    if status == 2 and (len(errors) != 1 or len(errors[0]) > 2000):
        return f"{len(errors)} lines of error, {max(map(len, errors), default=0)} characters"
    return f"{used / 2**20:.0f} MiB" if used > BYTES else ""


def try_mutant(number: int, seed: int, names: list[str], folder: Path) -> tuple[str, int, bool]:
    """Make a mutant and run its program; returns its target, the status and whether it ended as it should."""
    rng = random.Random(f"{seed}/{number}")
    name, = rng.choices(names, [TARGETS[name][0] for name in names])
    _, source, mutate, use = TARGETS[name]
    source = folder / source if source != "configs" else rng.choice(sorted((ROOT / "configs").glob("*.yaml")))
    place, said_in = folder / f"mutant_{number}{source.suffix}", folder / f"said_{number}"
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, place)
    mutate(place, rng)
    status, said, used = forked(lambda: use(place, rng), said_in)
    if remark := wrong(status, said, used):
        shown = "\n".join(line[:300] for line in said.strip().splitlines()[-4:])
        tqdm.write(f"--- {name} {number}: {remark}; {source.name} -> {place}\n{shown}")
    else:
        said_in.unlink()
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    return name, status, not remark


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first mutant")
    parser.add_argument("--only", choices=TARGETS, help="one target")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder, ended = Path(tempfile.mkdtemp(prefix="fuzz_")), Counter()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    prepare(folder)
    gc.freeze()  # what is there stays shared with the forks
    names = [args.only] if args.only else list(TARGETS)
    for number in tqdm(range(args.first, args.first + args.mutants), "fuzz", unit="mutant"):
        name, status, fine = try_mutant(number, args.seed, names, folder)
        ended[name, status] += fine
    print(f"{'target':<12}{'used':>8}{'refused':>8}")
    for name in names:
        print(f"{name:<12}{ended[name, 0]:>8}{ended[name, 2]:>8}")
    failed = args.mutants - ended.total()
    print(f"{failed} of {args.mutants} mutants ended otherwise" + (f", kept in {folder}" if failed else ""))
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
