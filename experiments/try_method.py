"""Train a config with a method that one file brings, without a change to the product.

    python experiments/try_method.py abort --set steps=20          # a method of experiments/court/
    python experiments/try_method.py my_method.py --config grpo_toy.yaml --set "advantage={kind: mine}"

The file may define any of these names:

    ADVANTAGES   {dataclass of a kind of `advantage`: function of the rewards and these settings -> [N, G]}
    COMPLETIONS  {dataclass of a kind of `prune.completions`: function of prune.Candidates and these
                 settings -> records.Pruned}
    TRUST        {dataclass of a kind of `loss.trust`: function of records.LogProbs and these settings -> [C]}
    weigh(rows, logp, entropy, loss) -> [C] of each row    in place of loss.weigh; entropies with ENTROPY=True
    wrap(cfg, history, sampler) -> history, sampler    to replace one or both, as methods/samplers.py does

A kind's dataclass looks like the ones in settings/kinds.py. Without --config the config is the yaml file
beside the method's. All other options are train.py's, such as --set, --resume, --check and --show.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

COURT = Path(__file__).parent / "court"
sys.path.insert(0, str(Path(__file__).parent.parent))

import config  # noqa: E402
import learner  # noqa: E402
import loss  # noqa: E402
import train  # noqa: E402
import update  # noqa: E402
from advantage import ESTIMATORS  # noqa: E402
from methods import samplers  # noqa: E402
from model import WITH_ENTROPY, Decoder  # noqa: E402
from prune import COMPLETIONS  # noqa: E402
from settings import loader  # noqa: E402


def find_method(name: str) -> Path:
    """Find a method's file: a path, or the name of one in court/. Raises ConfigError."""
    path = Path(name) if name.endswith(".py") else COURT / f"{name}.py"
    if not path.is_file():
        known = sorted(file.stem for file in COURT.glob("*.yaml"))
        raise config.ConfigError(f"method {name} not found: give a Python file, or one of {', '.join(known)}")
    return path


def load(path: Path) -> ModuleType:
    """Import a file by its path, once."""
    name = f"method_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def plug_in(method: ModuleType) -> None:
    """Add a method's kinds to the config and to the tables of functions, and let it wrap the sampler."""
    add_kinds(config.Config, "advantage", getattr(method, "ADVANTAGES", {}), ESTIMATORS)
    add_kinds(config.Prune, "completions", getattr(method, "COMPLETIONS", {}), COMPLETIONS)
    add_kinds(config.Loss, "trust", getattr(method, "TRUST", {}), loss.TRUST)
    loader.hints.cache_clear()
    if hasattr(method, "weigh"):
        update.weigh = method.weigh
        loss.has_token_weights = learner.has_token_weights = lambda settings: True
    if getattr(method, "ENTROPY", False):
        learner.load_sharded = with_entropies(learner.load_sharded)
    wrap, choose = getattr(method, "wrap", None), samplers.choose_sampler
    if wrap:
        samplers.choose_sampler = lambda cfg, *given: wrap(cfg, *choose(cfg, *given))


def with_entropies(load: Callable[..., Decoder]) -> Callable[..., Decoder]:
    """Let a model compute the entropy of every token."""
    def loaded(*given: Any) -> Decoder:
        model = load(*given)
        model.elementwise = WITH_ENTROPY
        return model

    return loaded


def add_kinds(section: type, field: str, functions: dict[type, Any], table: dict[str, Any]) -> None:
    """Widen the type of a section's field by these kinds, and list their functions by their names."""
    union = get_type_hints(section)[field]
    for kind, function in functions.items():
        union |= kind
        table[fields(kind)[0].default] = function
    section.__annotations__[field] = union


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("method", help="a Python file, or the name of one in experiments/court/")
    parser.add_argument("--config", help="a yaml file, or the name of one in configs/")
    args, others = parser.parse_known_args()
    try:
        path = find_method(args.method)
    except config.ConfigError as error:
        parser.error(str(error))
    plug_in(load(path))
    chosen = args.config or str(path.with_suffix(".yaml"))
    sys.argv = ["train.py", "--config", chosen, *others]
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
