"""The leaves: parts that a run or a command may choose and that nothing else needs.

A leaf is a folder and its line in LEAVES. Its `settings.py`, which imports no torch, has

    CHOICES     what chooses it -> the type of that section or setting
    HOOKS       the functions of its join.py that the core calls
    ONLY_WITH, REQUIRES, rules    as in settings/rules.py, if it has such
    PATHS       its settings that are files, if it has such

A hook is a function of the config and a thing, which it returns, changed:

    read        nested dicts of config files, in place of the config too, before they become one
    tokenizer   the Tokenizer, before prompts are rendered
    task        data.Task, before models are loaded
    weights     policy.Weights, by which models come by their weights
    inputs      hashes of what a run begins with, by their settings: a resumed run has the same
    spec        records.EngineSpec of a training run
    engine      the rollout engine and the tokenizer, in training and in evaluation
    parts       train.Parts, before a checkpoint is loaded
    begin       the same, before the first step: the engine has the policy
    head        a dict that identifies an evaluation's result
    decide      infra.choices.Choice, before models are loaded
    before_run  infra.checks.Ready, before the first step of a fresh run
    watch       infra.runfolder.RunLog, on the rank that writes the run folder
"""

from dataclasses import MISSING
from importlib import import_module
from types import ModuleType
from typing import Any

# leaf -> what chooses it in a config: "section=kind", or a section or a setting of its own; [] for every run.
# They take hold in this order: of the engine, the learner, the history, the sampler.
LEAVES = {
    "environment": ["environment"],                                        # replies within completions
    "preferences": ["advantage=preference", "advantage=group_preference"],  # DPO, RPO, MADPO, DGPO
    "soft_value": ["advantage=soft_value"],                                # A*-PO
    "critic": ["advantage=gae", "critic"],                                 # PPO, VAPO
    "distill": ["advantage=distill", "teacher"],                           # a teacher's log-probs
    "lora": ["model.lora"],                                                # adapters beside frozen weights
    "depo": ["prune.prompts=depo"],                                        # prompts by estimated difficulty
    "drafts": ["rollout.drafts"],                                          # completions of the last epoch
    "votes": ["labels=votes"],                                             # OptPO: no labels
    "windows": ["windows"],                                                # T-PPO; groups that go on or wait
    "fit": [],         # choices by counted memory; --fit
    "preflight": [],   # checks before a run; --check
    "page": [],        # the summary of a run, reports, --show
    "trackers": ["log.to", "log.project"],                                 # Weights & Biases
    # a system prompt that stands in a file of a release
    "released": ["data.system_prompt.file", "data.system_prompt.field"],
    "own_rewards": [],  # reward.custom_file: functions of the user's own, which reward.py imports
}


def file_of(leaf: str, name: str) -> ModuleType:
    """Import a file of a leaf."""
    return import_module(f"leaves.{leaf}.{name}")


def settings_of(leaf: str) -> ModuleType:
    return file_of(leaf, "settings")


def look_up(settings: Any, place: str) -> Any:
    """Return the value of a dotted name in a config or in nested dicts that become one, or MISSING."""
    for name in place.split("."):
        within = isinstance(settings, dict)
        settings = settings.get(name, MISSING) if within else getattr(settings, name, MISSING)
    return settings


def chosen(settings: Any) -> list[str]:
    """List the leaves that a config names, in the order of the table."""
    def is_named(choice: str) -> bool:
        place, _, kind = choice.partition("=")
        return look_up(settings, f"{place}.kind") == kind if kind else look_up(settings, place) is not MISSING
    return [leaf for leaf, choices in LEAVES.items() if not choices or any(map(is_named, choices))]


def stated(cfg: Any, name: str) -> list[Any]:
    """List what the settings of the chosen leaves have under a name; not all have ONLY_WITH, rules, PATHS."""
    return [getattr(module, name) for module in map(settings_of, chosen(cfg)) if hasattr(module, name)]


def through(hook: str, cfg: Any, thing: Any) -> Any:
    """Pass a thing through the hooks of this name that the chosen leaves have, in the table's order."""
    for leaf in chosen(cfg):
        if hook in settings_of(leaf).HOOKS:
            thing = getattr(file_of(leaf, "join"), hook)(cfg, thing)
    return thing
