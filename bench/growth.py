"""What grows faster than what it is about? Costs of the host by the size of data, history, rows and groups.

    python bench/growth.py [--parts data,history,rows,groups] [--most 1000000]

data       Rows of a data file -> what loading them takes a row: CPU microseconds, and memory at its peak and
           after it, on the rank that loads. Other ranks of its node map the same file. Each size has its own
           process.
history    Prompts -> a draw of 16 of them that begins an epoch, a later one, and `record` of them; what a
           checkpoint holds a prompt, once all have been rolled out.
rows       Rows of a step -> to deal them to 8 and to 64 ranks; completions of a step, as many as rows ->
           to pack them.
groups     Slots of the embedded engine -> to lay out their queries, in groups of 16 and of 256; groups of so
           many completions -> to choose 4 of each, of 16,384 in all.

Figures are CPU time, the least of three; `data` is loaded once.
"""

import io
import json
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import torch
from common import ROOT, in_own_process, listed, parser, print_json, show

import config
import rollout
import train
from advantage import advantage
from collect import Selection, choose
from history import PromptHistory, epoch_order
from infra import dist
from model import load_model
from pack import Minibatch, deal_rows, pack
from records import Group, Prompt, PromptDraw, Rewards, Rolled, Sample
from settings.kinds import ProportionalPrompts

DRAWN, TOTAL = 16, 16_384
MICRO, KIB = 1e6, 1024


def cpu(work: Callable[[], object], times: int = 3) -> float:
    """Measure the least CPU seconds of some calls."""
    seconds = []
    for _ in range(times):
        start = process_time()
        work()
        seconds.append(process_time() - start)
    return min(seconds)


def up_to(most: int, first: int) -> list[int]:
    """List the powers of ten from `first` to `most`."""
    sizes = []
    while first <= most:
        sizes.append(first)
        first *= 10
    return sizes


def memory_of_process() -> int:
    """Read the bytes that this process has in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * KIB
    raise OSError("/proc/self/status has no VmRSS")


def load_rows(rows: int) -> dict:
    """Load made-up problems: those of the toy, with a number before each."""
    lines = [json.loads(line) for line in (ROOT / "toy" / "train.jsonl").open()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as file:
            for i in range(rows):
                line = lines[i % len(lines)]
                numbered = {"question": f"{i} {line['question']}", "answer": line["answer"]}
                file.write(json.dumps(numbered) + "\n")
        cfg = config.load("cppo_toy.yaml", [f"data.train={path}", "data.max_prompt_tokens=200"])
        before = memory_of_process()
        task = []
        seconds = cpu(lambda: task.append(train.load_task(cfg)), times=1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        after = memory_of_process()
        picked = cpu(lambda: [task[0].prompts[i * 7919 % rows] for i in range(1000)])
    return {"rows": rows, "CPU s": seconds, "us a row": seconds * MICRO / rows,
            "peak KiB a row": (peak - before) / KIB / rows, "after KiB a row": (after - before) / KIB / rows,
            "us to read one": picked * MICRO / 1000}


def remember(prompts: int) -> dict:
    """Draw from a history in which every prompt has a record."""
    made = [Prompt(str(i), (1, 2, 3), "4") for i in range(prompts)]
    history = PromptHistory(made, ProportionalPrompts(share=0.5), 0, middle=0.5)
    reward_NG = torch.tensor([[0.0, 1.0]] * DRAWN, dtype=torch.float64)
    rewards = Rewards({"accuracy": reward_NG}, {"accuracy": 1.0}, torch.ones(DRAWN, 2, dtype=torch.int64))
    for name, value in (("size", 0.5), ("flat", 0)):
        history.records[name] = value
    history.known, history.total = prompts, history.total + prompts // 2
    draws = [PromptDraw(made[i], 0, number=i) for i in range(DRAWN)]
    rolled = Rolled(draws, [], rewards, reward_NG - 0.5)

    def begin() -> None:
        epoch_order.cache_clear()
        history.draw(DRAWN)

    first, later = cpu(begin), cpu(partial(history.draw, DRAWN))
    recorded = cpu(partial(history.record, rolled))
    file = io.BytesIO()
    state = cpu(history.state)
    torch.save(history.state(), file)
    return {"prompts": prompts, "first draw ms": first * 1e3, "draw ms": later * 1e3,
            "record ms": recorded * 1e3, "state ms": state * 1e3, "bytes a prompt": file.tell() / prompts}


def deal(rows: int) -> dict:
    """Deal and pack as many rows, and as many completions."""
    draw = np.random.default_rng(0)
    costs = draw.random(rows).tolist()
    groups = []
    for n in range(max(1, rows // 16)):
        lengths = draw.integers(1, 40, 16).tolist()
        samples = [Sample([5] * length, [-1.0] * length, True) for length in lengths]
        groups.append(Group(Prompt(str(n), (1,) * 20, ""), tuple(samples)))
    ones_NG = torch.ones(len(groups), 16, dtype=torch.float64)
    minibatch = Minibatch(groups, ones_NG.bool(), ones_NG, ones_NG, ones_NG)
    packed = partial(pack, minibatch, config.Pack(capacity=2048))
    return {"rows": rows} | {
        f"deal to {ranks}, us a row": cpu(partial(deal_rows, costs, ranks)) * MICRO / rows
        for ranks in (8, 64)
    } | {f"pack for {ranks}, us each": cpu(partial(packed, ranks), 1) * MICRO / rows for ranks in (1, 64)}


def lay_out(slots: int) -> dict:
    """Lay the queries of slots out, and choose among groups."""
    model = load_model(ROOT / "toy" / "model", torch.float32, torch.device("cpu"))
    row = {"slots": slots}
    for G in (16, 256):
        prompts = {(1, 2, n): () for n in range(-(-slots // G))}
        cache = rollout.Cache(model, "sdpa", slots, prompts, 1)
        row_S = [i // G for i in range(slots)]
        cache.admit(row_S)
        row[f"in groups of {G}, us a slot"] = cpu(
            lambda cache=cache, row_S=row_S: cache.arrange(torch.tensor(row_S))) * MICRO / slots
    return row


def choose_of(G: int) -> dict:
    """Choose 4 completions of every group, 16,384 candidates in all."""
    N = TOTAL // G
    sample = Sample([5] * 20, [-1.0] * 20, True)
    groups = [Group(Prompt(str(n), (1,), ""), (sample,) * G) for n in range(N)]
    draws = [PromptDraw(group.prompt, 0, number=n) for n, group in enumerate(groups)]
    reward_NG = torch.rand(N, G, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards = Rewards({"accuracy": reward_NG}, {"accuracy": 1.0}, torch.full((N, G), 20))
    cells = {}
    for kind in ("topk", "pps"):
        cfg = config.load("cppo_toy.yaml" if kind == "topk" else "pps_toy.yaml", ["prune.completions.keep=4"])
        rolled = Rolled() + Rolled(draws, groups, rewards, advantage(rewards, cfg.advantage))
        cells[f"{kind}, us each"] = cpu(partial(choose, rolled, Selection.of(cfg), 0)) * MICRO / TOTAL
    return {"completions a group": G} | cells


def main() -> None:
    options = parser(__doc__)
    parts = ["data", "history", "rows", "groups"]
    options.add_argument("--parts", type=listed(parts), default=parts, help=",".join(parts))
    options.add_argument("--most", type=int, default=1_000_000, help="rows of data, and prompts")
    args = options.parse_args()
    dist.init("cpu")
    few = min(args.most, 100_000)
    measure = {
        "data": lambda: [in_own_process(load_rows, rows) for rows in up_to(args.most, min(few, 10_000))],
        "history": lambda: [remember(prompts) for prompts in up_to(args.most, min(few, 1000))],
        "rows": lambda: [deal(rows) for rows in up_to(few, min(few, 1000))],
        "groups": lambda: [lay_out(slots) for slots in (64, 256, 1024, 4096)] + [
            choose_of(G) for G in (16, 64, 256)],
    }
    results = {part: show(part, measure[part]()) for part in args.parts}
    dist.close()
    print_json("growth", **results)


if __name__ == "__main__":
    main()
