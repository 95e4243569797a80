"""Find out on one GPU, within ten minutes and without a network, what no CPU can tell.

    python bench/gpu.py [--shapes 0.5B,1.5B] [--parts updates,step] [--out results.jsonl]

Are the kernels right? How fast are updates, rollouts and whole steps of models of these shapes, with random
weights, and does leaves/fit count right what they take? PARTS lists what is likeliest to fail first, and
gpu_parts.py does them; what needs vLLM where that is installed.

Each part is a process with a limit of its own, so one that crashes, hangs or runs out of memory ends alone.
Results go into --out as they come, a JSON line each. At the end stand tables for RESULTS.md, and what was
skipped or failed and why. Without a GPU the same runs in sizes for a CPU, which shows only that it works.
"""

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

from common import ROOT, listed, parser, print_json, table

from infra.lines import append, read_log


@dataclass(frozen=True, slots=True)
class Part:
    title: str
    seconds: int           # after which it is stopped, for each shape; vLLM compiles for minutes at first
    passed: str            # what it means that it passed
    otherwise: str         # what to do where it failed
    by_shape: bool = True
    needs: str = ""        # a package without which it is skipped
    ranks: int = 1         # each on a GPU of its own
    shapes: tuple[str, ...] = ()  # on a GPU, unless others are asked for


SECONDS = 575  # of all parts together; what is left then is not reached
CPU_FACTOR = 5  # there all limits are longer
CHECK = "`train.py --check` on the toy in bfloat16"
NO_VLLM = "set rollout.engine=torch, and send what VLLM_LOGGING_LEVEL=INFO prints"
ALONE = "set rollout.tensor_parallel=1"
# What is likeliest to fail, and decides most, comes first.
PARTS = {
    "machine": Part("", 60, "torch computes on the device", "mend the driver; or device=cpu", by_shape=False),
    "kernels": Part("Kernels on a row in bfloat16, forward and backward: error relative to float32", 40,
                    "attention and log-probs are right", "set model.attention=sdpa"),
    "vllm_check": Part(f"{CHECK}, vLLM", 240, "vLLM starts beside the trainer, takes its weights and agrees",
                       NO_VLLM, by_shape=False, needs="vllm"),
    "vllm_rollout": Part("vLLM's sleep and sync, and milliseconds a token by sequences", 240,
                         "its table has the seconds of a sync",
                         f"set rollout.sleep=never, or {NO_VLLM}", needs="vllm", shapes=("1.5B", "7B")),
    "check": Part(f"{CHECK}, embedded engine", 60, "a run without vLLM is right",
                  "set device=cpu, which shows whether it is the GPU", by_shape=False),
    "tests": Part("`pytest -m gpu`", 150, "a step, offload, a checkpoint and an export are right",
                  "do what its first failure names", by_shape=False, needs="pytest"),
    "vllm_step": Part("A whole step, seconds by phase, vLLM; MFU is that of the update", 240,
                      "its table has the seconds of a step", "set rollout.sleep=always, or fewer slots",
                      needs="vllm", shapes=("1.5B",)),
    "vllm_ranks": Part(f"{CHECK}, vLLM on 2 ranks", 240, "ranks with an engine each agree", NO_VLLM,
                       by_shape=False, needs="vllm", ranks=2),
    "vllm_tensor_parallel": Part(f"{CHECK}, one engine of vLLM's over 2 ranks", 240,
                                 "ranks that hold one engine together agree", ALONE, by_shape=False,
                                 needs="vllm", ranks=2),
    "updates": Part("Updates on groups of 16 completions, AdamW included; GiB counted are --fit's", 130,
                    "its table has what updates take", "lower pack.capacity"),
    "step": Part("A whole step, seconds by phase, embedded engine; MFU is that of the update", 90,
                 "its table has the seconds of a step", "lower pack.capacity"),
    "rollout": Part("Tokens sampled by the embedded engine, and its sync after a sleep", 50,
                    "its table has the tokens a second", "lower rollout.slots"),
}
REASONS = ("skipped", "failed")


# ---- the parts as processes

def attempt(name: str, shape: str, out: Path, seconds: float, gpus: int | None = None) -> dict[str, str]:
    """Do a part within so many seconds; returns why it was skipped or failed, if it was. `gpus` is None on a
    CPU."""
    part = PARTS[name]
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return {"skipped": f"{part.needs} is not installed"}
    if gpus is not None and part.ranks > gpus:
        return {"skipped": f"it needs {part.ranks} GPUs"}
    if seconds < 5:
        return {"skipped": f"no time was left; --parts {name} has it to itself"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(part.ranks)]
    launcher = [sys.executable, *(torchrun if part.ranks > 1 else [])]
    reason = supervise([*launcher, __file__, "--part", name, "--shapes", shape, "--out", str(out)], seconds)
    return {"failed": reason} if reason else {}


def supervise(command: list[str], seconds: float) -> str:
    """Run a command in a process group of its own for at most so long; returns why it failed, or ""."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()  # torchrun ends its processes, which are in groups of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:  # its own processes go with it, however it ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        said = errors.read().strip()
    if said:
        print(said, file=sys.stderr, flush=True)
    if code is None:
        return f"stopped after {seconds:.0f} s"
    ended = f"exit code {code}" if code > 0 else f"signal {-code}"
    return f"{ended}: {said.rpartition(chr(10))[2]}" if code else ""


# ---- the section for RESULTS.md

def verdicts(rows: list[dict], asked: list[str]) -> str:
    """Say of each part whether it passed, failed or was not reached, what that means and what to set."""
    lines = []
    for name in asked:
        ended = [row for row in rows if row["part"] == name]
        state, means = "passed", PARTS[name].passed
        if any("failed" in row for row in ended):
            state, means = "FAILED", PARTS[name].otherwise
        elif not any(row.keys() - {"part", "shape", "way", *REASONS} for row in ended):
            state, means = "not reached", next((row["skipped"] for row in ended), "")
        lines.append({"part": name, "": state, "means": means})
    return table(lines)


def closing(rows: list[dict], given: list[str], asked: list[str]) -> str:
    """Write a section for RESULTS.md: command, commit and machine, what each part says, its table, and what
    is in none of them."""
    machine = rows[0]
    command = shlex.join(["python", "bench/gpu.py", *given])
    lines = [f"### What bench/gpu.py measured on {machine['device']}\n",
             f"Command: `{command}`  ",
             f"Commit: {machine['commit']}. Date: {date.today()}. Machine: {machine['device']}, "
             f"{machine['details']}.\n"]
    if not machine["cuda"]:
        lines.append("NO CUDA DEVICE: all sizes are cut, and these figures say nothing about a GPU.\n")
    lines.append(verdicts(rows, asked))
    for name, part in PARTS.items():
        of_part = [row for row in rows if row["part"] == name and len(row.keys() - REASONS) > 3]
        if of_part and part.title:
            lines.append(f"{part.title}:\n\n{table(of_part, left_out=('part', *REASONS))}")
    for reason in REASONS:
        named = []
        for row in rows:
            if reason in row:
                place = " ".join(filter(None, map(row.get, ("part", "shape", "way"))))
                named.append(f"{place}: {row[reason]}")
        lines.append("\n- ".join([f"{reason.capitalize()}:\n", *(named or ["nothing"])]) + "\n")
    return "\n".join(lines)


# ---- the command

def main() -> int:
    options = parser(__doc__)
    options.add_argument("--shapes", help="of bench/shapes.py (default: 0.5B,1.5B; on the CPU 1M)")
    options.add_argument("--parts", type=listed(list(PARTS)), default=list(PARTS), help=",".join(PARTS))
    options.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu" / "results.jsonl",
                         help="gets a line for each result (default: runs/gpu/results.jsonl)")
    options.add_argument("--part", help=argparse.SUPPRESS)  # do this one, for one shape, in this process
    args = options.parse_args()
    if args.part is None:
        return bench(args)
    import gpu_parts

    gpu_parts.run(args.part, args.shapes, args.out)
    return 0


def bench(args: argparse.Namespace) -> int:
    """Do the parts asked for, and print the tables; returns the exit status, 1 where anything failed."""
    start, out = perf_counter(), args.out.resolve()
    if out.suffix != ".jsonl":
        sys.exit(f"error: --out {args.out} must end with .jsonl: lines are added to it")
    out.parent.mkdir(parents=True, exist_ok=True)
    before = len(read_log(out))
    ended = attempt("machine", "", out, PARTS["machine"].seconds * CPU_FACTOR)
    if ended:
        print(f"error: {ended['failed']}", file=sys.stderr)
        return 1
    machine = read_log(out)[before]
    cuda, gpus = machine["cuda"], machine.get("gpus", 1) if machine["cuda"] else None
    shapes = (args.shapes or ("0.5B,1.5B" if cuda else "1M")).split(",")
    factor = 1 if cuda else CPU_FACTOR
    # A folder of their own: nothing is left of a part that is stopped, and nothing was compiled before.
    with tempfile.TemporaryDirectory() as temporary, patch.dict(os.environ, TMPDIR=temporary):
        for name, part in PARTS.items():
            if name not in args.parts or name == "machine":
                continue
            of_part = part.shapes if part.shapes and cuda and not args.shapes else shapes
            for shape in of_part if part.by_shape else [""]:
                left = SECONDS * factor - (perf_counter() - start)
                print(f"\n{name} {shape}", flush=True)
                ended = attempt(name, shape, out, min(left, part.seconds * factor), gpus)
                if ended:
                    append(out, {"part": name, "shape": shape} | ended)
                    print(*ended.items(), flush=True)
    rows = read_log(out)[before:]
    print(f"\n{closing(rows, sys.argv[1:], args.parts)}\n"
          f"{perf_counter() - start:.0f} s; all lines are in {out}")
    print_json("gpu", results=rows)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
