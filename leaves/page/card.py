"""A model card, written from a run's folder, and the way of its model to the Hugging Face hub."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import HfApi, ModelCard

import config
from config import ConfigError, dump, flatten
from infra.lines import blame_file, is_evaluation, read_log
from infra.runfolder import state_of
from leaves.page.summary import score_cell, scores_of
from settings.paths import find_path

CARD = """---
{head}---
# {name}

{base} after {steps} steps of reinforcement learning, by Winnow at commit `{commit}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # of this file, or the model's name on the hub
llm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
asked = [{{"role": "user", "content": "..."}}]
prompt = tokenizer.apply_chat_template(
    asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(tokenizer.decode(llm.generate(**prompt, max_new_tokens=256)[0]))
```

## Figures

{figures}

## Method

{method}

The completions took {generated:,} tokens, those with a gradient {trained:,}. {machine}; {libraries}.

<details><summary>Every setting of the run</summary>

```yaml
{settings}```

</details>

## Licence

{licence}.
"""
FIGURES = "Accuracy or mean reward with its 95% interval, before and after, as the run evaluated it (`eval`)."
SHOWN = ("advantage.kind", "prune.prompts.kind", "prune.completions.kind", "prune.completions.keep",
         "loss.trust.kind", "loss.denominator", "optim.lr", "rollout.prompts_per_step", "rollout.group_size",
         "rollout.max_new_tokens", "model.lora.rank", "reward.custom_file", "environment.file", "data.train",
         "data.eval", "seed")


def write_card(run: Path) -> Path:
    """Write the card of a finished run beside its export. Raises ConfigError."""
    state = state_of(run)["state"]
    if state != "finished" or not (run / "hf").is_dir():
        raise ConfigError(f"the run {run} ({state}) has no model for a card (hf/); let it finish first")
    cfg, lines = config.load(run / "config.yaml"), read_log(run / "metrics.jsonl")
    evals = [line for line in lines if is_evaluation(line)] or [{}]
    scores = [(score.name, *(score_cell(evals[n], score) for n in (0, -1))) for score in scores_of(evals)]
    settings, base = flatten(cfg), cfg.model.path
    local, licence = find_path(base).is_dir(), licence_of(base)
    head = {
        "license": licence,
        "base_model": None if local else base,
        "datasets": None if find_path(cfg.data.train).exists() else [cfg.data.train],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["winnow", "reinforcement-learning"]}
    with blame_file(run / "env.json"):
        ran_on = json.loads((run / "env.json").read_text())
        text = CARD.format(
            head=yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False),
            name=run.resolve().name,
            base=f"`{base}`" if local else f"[{base}](https://huggingface.co/{base})",
            steps=cfg.steps,
            figures=f"{FIGURES}\n\n{markdown_table(('set', 'before', 'after'), scores)}" if scores else
            "The run evaluated on no set.",
            method=markdown_table(("setting", "value"), [("reward", str(cfg.reward.weights)), *(
                (key, str(settings[key])) for key in SHOWN if settings.get(key) is not None)]),
            generated=sum(line.get("rollout/tokens", 0) for line in lines),
            trained=sum(line.get("train/tokens", 0) for line in lines),
            commit=ran_on["commit"],
            machine=f"{ran_on['ranks']} x {ran_on['device']}",
            libraries=", ".join(f"{name} {version}" for name, version in ran_on["libraries"].items()),
            settings=dump(cfg),
            licence=f"{licence}, that of the base model" if licence else
            f"`{base}` states no licence where the run found it: look for it before you pass this model on")
    path = run / "hf" / "README.md"
    if path.exists() and path.read_text() != text:
        raise ConfigError(f"{path} has been edited, or is another's; move it away to have it written again")
    path.write_text(text)
    return path


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def licence_of(base: str) -> str | None:
    """Return the licence that a model's own card names, if it has one that can be read."""
    path = find_path(base)
    try:
        return ModelCard.load(path / "README.md" if path.is_dir() else base).data.license
    except Exception:  # there is no card, none that can be read, or no network
        return None


def push(run: Path, name: str) -> str:
    """Upload a run's export and its card to the hub, as a private model there; returns its address."""
    card = run / "hf" / "README.md"
    if not card.exists():  # one that was edited goes as it is
        write_card(run)
    try:
        made = HfApi().create_repo(name, exist_ok=True, private=True)
        HfApi().upload_folder(repo_id=name, folder_path=card.parent, commit_message=f"Winnow {run.name}")
    except Exception as error:  # of the hub and of the network, whose packages raise errors of many kinds
        raise ConfigError(f"--push-to-hub {name}: {str(error).splitlines()[0]}; log in by `hf auth login`, "
                          f"with a token that may write there. The card is in {card}") from error
    return str(made)
