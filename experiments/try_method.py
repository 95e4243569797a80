"""Train a config with a method that one file brings, without a change to the product.

    python experiments/try_method.py abort --set steps=20          # a method of experiments/court/
    python experiments/try_method.py my_method.py --config grpo_toy.yaml --set "advantage={kind: mine}"

The file defines at least one of these names (docs/fork.md has a whole one):

    ADVANTAGES   {dataclass of a kind of `advantage`: function of the rewards and these settings -> [N, G]}
    COMPLETIONS  {dataclass of a kind of `prune.completions`: function of prune.Candidates and these
                 settings -> records.Pruned}
    PROMPTS      {dataclass of a kind of `prune.prompts`: function of prune.Memory and these settings -> [K]}
    TRUST        {dataclass of a kind of `loss.trust`: function of records.LogProbs and these settings -> [C]}
    OPTIMIZERS   {dataclass of a kind of `optim`: function of the model, its weights and these settings}
    weigh(rows, logp, entropy, loss) -> [C] of each row    in place of loss.weigh; entropies with ENTROPY=True
    wrap(cfg, history, sampler) -> history, sampler    to replace one or both, as a leaf may

A kind's dataclass is one as in settings/kinds.py, with a name that no other kind has, and the config must
choose it. `weigh` needs loss.old_logp=recompute, the default. Without --config the config is the yaml file
beside the method's. All other options are train.py's, such as --resume, --check and --show. eval.py --config
and replay.py know a kind once the product has it.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from torch import Tensor

COURT = Path(__file__).parent / "court"
sys.path.insert(0, str(Path(__file__).parent.parent))

import config  # noqa: E402
import learner  # noqa: E402
import loss  # noqa: E402
import train  # noqa: E402
import update  # noqa: E402
from advantage import ESTIMATORS  # noqa: E402
from infra.checkpoint import METHOD  # noqa: E402
from infra.digests import hash_file  # noqa: E402
from infra.terminal import new_parser  # noqa: E402
from model import WITH_ENTROPY, Decoder  # noqa: E402
from prune import COMPLETIONS, PROMPTS, checked  # noqa: E402
from settings import leaves, loader  # noqa: E402
from settings.kinds import Comparison, Draw  # noqa: E402

# A name that a file may define: the section that its kinds are for, the setting, and the table of functions.
KINDS = {"ADVANTAGES": (config.Config, "advantage", ESTIMATORS),
         "COMPLETIONS": (config.Prune, "prune.completions", COMPLETIONS),
         "PROMPTS": (config.Prune, "prune.prompts", PROMPTS),
         "TRUST": (config.Loss, "loss.trust", loss.TRUST),
         "OPTIMIZERS": (config.Config, "optim", learner.OPTIMIZERS)}
WITH_WEIGH = [("old_logp", "recompute", "reads the log-probs of the policy before the update"),
              ("tis_cap", None, "is in its place"), ("mask_ratio", None, "is in its place")]
BASES = {"advantage": Comparison, "prune.prompts": Draw}


def find_method(name: str) -> Path:
    """Find a method's file: a path, or the name of one in court/. Raises ConfigError."""
    path = Path(name) if name.endswith(".py") else COURT / f"{name}.py"
    if not path.is_file():
        known = sorted(file.stem for file in COURT.glob("*.yaml"))
        raise config.ConfigError(f"method {name} not found: give a Python file, or one of {', '.join(known)}")
    return path


def load(path: Path) -> ModuleType:
    """Import a file by its path, once; it may import its neighbours. Raises ConfigError."""
    name = "method_" + re.sub(r"\W", "_", str(path.resolve()))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.append(str(path.resolve().parent))
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            said = f"{path} raised {type(error).__name__}: {error}".partition("\n")[0]
            raise config.ConfigError(said) from error
    return sys.modules[name]


def plug_in_kinds(method: ModuleType) -> None:
    """Add a method's kinds to the config and to the tables of functions. Raises ConfigError."""
    if not any(getattr(method, name, None) for name in (*KINDS, "weigh", "wrap")):
        raise config.ConfigError(f"{method.__file__} defines none of {', '.join(KINDS)}, weigh, wrap: "
                                 "docs/fork.md has a whole file")
    for name, (section, setting, table) in KINDS.items():
        functions = getattr(method, name, {})
        if not isinstance(functions, dict):
            raise config.ConfigError(f"{name} of {method.__file__} must be a dict: dataclass -> function")
        add_kinds(section, setting, functions, table)
    loader.hints.cache_clear()
    loader.extended.cache_clear()


def plug_in(method: ModuleType) -> None:
    """Add all that a method brings, and count its file among the inputs of a run. Raises ConfigError."""
    plug_in_kinds(method)
    if hasattr(method, "weigh"):
        update.weigh = checked_weigh(method)
        loss.has_token_weights = learner.has_token_weights = lambda settings: True
    if getattr(method, "ENTROPY", False):
        learner.load_sharded = with_entropies(learner.load_sharded)
    leaves.through = with_method(method, leaves.through)


def checked_weigh(method: ModuleType) -> Callable[..., list[Tensor]]:
    """Cut factors off the graph. Raises ConfigError for other shapes than those of log-probs, and for nan."""
    def weigh(rows: list, logp: list[Tensor], entropy: list, loss: config.Loss) -> list[Tensor]:
        reads = getattr(method, "ENTROPY", False)
        factors = [*method.weigh(rows, logp, [H_C.detach() if reads else None for H_C in entropy], loss)]
        wanted = [[*logp_C.shape] for logp_C in logp]
        got = [[*x.shape] if isinstance(x, Tensor) and x.isfinite().all() else str(x)[:60] for x in factors]
        if got != wanted:
            raise config.ConfigError(
                f"{Path(method.__file__).name}: weigh returned {got}, and must return finite {wanted}")
        return [factor_C.detach().to(logp_C) for factor_C, logp_C in zip(factors, logp, strict=True)]

    return weigh


def with_method(method: ModuleType, through: Callable) -> Callable:
    """Let a method replace history and sampler after all leaves have; a run goes on with its file alone."""
    def passed(hook: str, cfg: config.Config, thing: Any) -> Any:
        thing = through(hook, cfg, thing)
        if hook == "inputs":
            return thing | {METHOD: hash_file(Path(method.__file__))}
        if hook == "parts" and hasattr(method, "wrap"):
            history, sampler = method.wrap(cfg, thing.history, thing.sampler)
            thing = replace(thing, history=history, sampler=sampler)
        return thing

    return passed


def with_entropies(load: Callable[..., Decoder]) -> Callable[..., Decoder]:
    """Let a model compute the entropy of every token."""
    def loaded(*given: Any) -> Decoder:
        model = load(*given)
        model.elementwise = WITH_ENTROPY
        return model

    return loaded


def add_kinds(section: type, setting: str, functions: dict[type, Any], table: dict[str, Any]) -> None:
    """Widen the type of a section's field by these kinds, and list their functions by their names."""
    field = setting.rpartition(".")[2]
    union = get_type_hints(section)[field]
    for kind, function in functions.items():
        if not isinstance(kind, type):
            raise config.ConfigError(f"{setting}: a method's table has dataclasses for keys, not {kind!r}")
        name = name_of(kind)
        function = checked(function) if table is COMPLETIONS else function
        if table.get(name, function) is not function:
            raise config.ConfigError(f"{setting}.kind={name} is there already: give yours another name")
        if not issubclass(kind, BASES.get(setting, object)):
            raise config.ConfigError(f"{kind.__name__} must be a settings.kinds.{BASES[setting].__name__}")
        union |= kind
        table[name] = function
    section.__annotations__[field] = union


def name_of(kind: type) -> str:
    names = [*loader.choices(kind)] if getattr(kind, "__dataclass_fields__", None) else []
    if not names:
        raise config.ConfigError(f'{kind.__name__} has no name: mark it as @kind("mine")')
    return names[0]


def check_chosen(method: ModuleType, cfg: config.Config) -> None:
    """Raise ConfigError if the config has none of the method's kinds, or does not call its `weigh`."""
    for key, wanted, why in WITH_WEIGH if hasattr(method, "weigh") else ():
        if (value := getattr(cfg.loss, key)) != wanted:
            raise config.ConfigError(
                f"loss.{key}={value} must be {wanted or 'null'}: weigh of {method.__file__} {why}")
    brought = {kind: setting for name, (_, setting, _) in KINDS.items() for kind in getattr(method, name, {})}
    if brought and not any(isinstance(attrgetter(setting)(cfg), kind) for kind, setting in brought.items()):
        kind, setting = next(iter(brought.items()))
        has = attrgetter(setting)(cfg).kind
        raise config.ConfigError(f"{setting}.kind={has} is not of {method.__file__}: give --set "
                                 f'"{setting}={{kind: {name_of(kind)}}}", or the same in the config')


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("method", help="a Python file, or the name of one in experiments/court/")
    parser.add_argument("--config", nargs="+", help="yaml files, or names of some in configs/")
    parser.add_argument("--set", action="append", default=[], help="change one setting")
    args, others = parser.parse_known_args()
    try:
        path = find_method(args.method)
        beside = path.with_suffix(".yaml")
        if not args.config and not beside.is_file():
            raise config.ConfigError(f"{path} has no {beside.name} beside it: write one, or give --config")
        plug_in(load(path))
        chosen = args.config or [str(beside)]
        check_chosen(load(path), config.load(chosen, args.set))
    except config.ConfigError as error:
        parser.error(str(error))
    changes = [word for text in args.set for word in ("--set", text)]
    sys.argv = [f"{sys.argv[0]} {args.method}", "--config", *chosen, *changes, *others]
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
