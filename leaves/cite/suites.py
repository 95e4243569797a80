"""Evaluate by a suite: frozen sets, prompts and sampling, with lines to cite (eval.py --suite)."""

import argparse
import json
from hashlib import sha256

from infra.figures import Results, score_text
from leaves.cite.compare import comparison_table
from settings.loader import ConfigError

# Settings that a suite leaves open, of the machine.
MACHINE = ("rollout.engine=", "rollout.slots=", "rollout.tensor_parallel=", "rollout.cache_gib=",
           "model.dtype=", "model.attention=", "device=", "data.dir=")


def config_of(args: argparse.Namespace) -> str:
    """Name the config of a suite. Raises ConfigError for what would change its prompts or sampling."""
    changed = [text for text in args.set if not text.startswith(MACHINE)]
    if args.data or args.config or changed:
        raise ConfigError(f"--suite {args.suite} is frozen: leave out --data and --config, and --set only "
                          f"{', '.join(MACHINE)}")
    return f"eval/suite_{args.suite}.yaml"


def suite_lines(suite: str, results: Results) -> list[str]:
    """Write a line to cite for each set and model, and from two models on the differences to the first."""
    lines = [f"{name} {score_text(r, 'accuracy')} avg@{r['n']}, suite {suite} "
             f"{suite_hash(result['head'], name)}, model {model} {result['head']['model']['files'][:12]}"
             for model, result in results.items() for name, r in result["results"].items()]
    return [*lines, comparison_table(list(results.items()))] if len(results) > 1 else lines


def suite_hash(head: dict, name: str) -> str:
    """Identify how a set was evaluated, apart from the model: its problems, sampling, prompt and verifier."""
    keys = ("sampling", "system_prompt", "stop", "verifier")
    said = [head["sets"][name]["data"], *(head[key] for key in keys)]
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]
