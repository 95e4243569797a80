"""Evaluate by a suite: frozen sets, prompts and sampling, with lines to cite (eval.py --suite)."""

import argparse
import json
from hashlib import sha256

from infra import dist
from infra.figures import Results
from leaves.cite.compare import accuracy_gaps
from settings.loader import ConfigError
from verify.paired import detectable, holm, paired_interval, sign_flip

# Settings that a suite leaves open, of the machine.
MACHINE = ("rollout.engine=", "rollout.slots=", "rollout.tensor_parallel=", "rollout.cache_gib=",
           "model.dtype=", "model.products=", "model.attention=", "device=", "data.dir=")


def config_of(args: argparse.Namespace) -> str:
    """Name the config of a suite. Raises ConfigError for what would change its prompts or sampling."""
    changed = [text for text in args.set if not text.startswith(MACHINE)]
    if args.data or args.config or changed:
        raise ConfigError(f"--suite {args.suite} is frozen: leave out --data and --config, and --set only "
                          f"{', '.join(MACHINE)}")
    return f"eval/suite_{args.suite}.yaml"


def say_detectable(counts: dict[str, int], n: int) -> None:
    """Say before sampling which difference of two models each set, of so many problems, can show."""
    for name, count in counts.items():
        dist.say(f"{name}: {count} problems x {n} answers show a difference of two models from about "
                 f"{100 * detectable(count, n):.0f} points on")


def suite_lines(suite: str, results: Results) -> list[str]:
    """Write what a paper needs of one suite's results {model: result}: a line to cite for each set and model,
    a row of LaTeX for each model, and from two models on a table of differences to the first."""
    lines = []
    for model, result in results.items():
        cells = []
        for name, r in result["results"].items():
            bounds = f"[{r['low']:.1%}, {r['high']:.1%}]"
            lines.append(f"{name} {r['accuracy']:.1%} {bounds} avg@{r['n']}, suite {suite} "
                         f"{suite_hash(result['head'], name)}, model {model} "
                         f"{result['head']['model']['files'][:12]}")
            cells.append(f"{100 * r['accuracy']:.1f}")
        latex = model.replace("_", r"\_")
        lines.append(f"{latex} & {' & '.join(cells)} \\\\")
    return [*lines, *ranking(results)] if len(results) > 1 else lines


def suite_hash(head: dict, name: str) -> str:
    """Identify how a set was evaluated, apart from the model: its problems, sampling, prompt and verifier."""
    keys = ("sampling", "system_prompt", "stop", "verifier")
    said = [head["sets"][name]["data"], *(head[key] for key in keys)]
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


def ranking(results: Results) -> list[str]:
    """Tabulate each model's accuracy less the first one's on the same problems, with p-values of flipped
    signs that are corrected for all rows (Holm)."""
    first, *others = results
    rows, p_values = [], []
    for name, a in results[first]["results"].items():
        for other in others:
            difference_N = accuracy_gaps(a, results[other]["results"][name])
            low, high = paired_interval(difference_N)
            p_values.append(sign_flip(difference_N))
            bounds = f"[{low:+.1%}, {high:+.1%}]"
            rows.append(f"{name:<16} {other} less {first}: {difference_N.mean():+.1%} {bounds}")
    return [f"{row}, p = {p:.3g}" for row, p in zip(rows, holm(p_values), strict=True)]
