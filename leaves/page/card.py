"""A model card, written from a run's folder."""

import json
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

import config
from config import ConfigError, dump
from infra.lines import blame_file
from leaves.page.runs import read_run
from leaves.page.summary import score_cell, scores_of
from settings.paths import find_path

CARD = """---
{head}
---
# {name}

`{cfg.model.path}` after {cfg.steps} steps of reinforcement learning, by Winnow at commit `{ran_on[commit]}`.

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

Accuracy or mean reward with its 95% interval, before and after, as the run evaluated it (`eval`).

{scores}

## Method

The completions took {generated:,} tokens, those with a gradient {trained:,}. {ran_on[ranks]} x
{ran_on[device]}; {libraries}.

<details><summary>Every setting of the run</summary>

```yaml
{settings}```

</details>

## Licence

{licence}.
"""


def write_card(run: Path) -> Path:
    """Write the card of a finished run beside its export. Raises ConfigError."""
    logged = read_run(run)
    if not logged.finished or not (run / "hf").is_dir():
        raise ConfigError(f"the run {run} ({logged.state['state']}) has no model for a card (hf/); let it "
                          "finish first")
    cfg, evals = config.load(run / "config.yaml"), logged.evals or [{}]
    scores = [f"- {score}: {score_cell(evals[0], score)}, then {score_cell(evals[-1], score)}"
              for score in scores_of(evals)]
    base, licence = cfg.model.path, licence_of(cfg.model.path)
    head = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation",
        tags=["winnow", "reinforcement-learning"], license=licence,
        base_model=None if find_path(base).is_dir() else base,
        datasets=[name for name in cfg.data.train.split(",") if not find_path(name).exists()] or None)
    with blame_file(run / "env.json"):
        ran_on = json.loads((run / "env.json").read_text())
        text = CARD.format(
            head=head.to_yaml(),
            name=run.resolve().name,
            cfg=cfg,
            scores="\n".join(scores),
            generated=sum(line.get("rollout/tokens", 0) for line in logged.lines),
            trained=sum(line.get("train/tokens", 0) for line in logged.lines),
            ran_on=ran_on,
            libraries=", ".join(f"{name} {version}" for name, version in ran_on["libraries"].items()),
            settings=dump(cfg),
            licence=f"{licence}, that of the base model" if licence else
            f"`{base}` states no licence where the run found it: look for it before you pass this model on")
    path = run / "hf" / "README.md"
    if path.exists() and path.read_text() != text:
        raise ConfigError(f"{path} has been edited, or is another's; move it away to have it written again")
    path.write_text(text)
    return path


def licence_of(base: str) -> str | None:
    """Return the licence that a model's own card names, if it has one that can be read."""
    path = find_path(base)
    try:
        return ModelCard.load(path / "README.md" if path.is_dir() else base).data.license
    except Exception:  # there is no card, none that can be read, or no network
        return None
