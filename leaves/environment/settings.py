"""Settings of an environment: the section `environment`."""

from collections.abc import Iterator
from typing import Any, Literal

from settings.loader import Count, Positive, frozen
from settings.rules import Rule


@frozen
class Environment:
    """Replies within completions: tools, a game, a simulated user."""
    file: str | None = None        # a Python file with reply(text, row), tools or a class; null: no replies
    turns: Count = 8               # of the policy in a completion at most
    max_context: Count | None = None  # tokens of a prompt and its completion, with replies
    # how tools are called. qwen: <tool_call>; llama: a turn of JSON; plain: the same, the result as text;
    # auto: as the chat template has it, or plain if it has no place for tools
    format: Literal["auto", "qwen", "llama", "plain"] = "auto"
    seconds: Positive = 3.0        # of computing, and of waiting, for a reply
    gib: Positive = 2.0            # memory for a reply


CHOICES = {"environment": Environment}
HOOKS = ("tokenizer", "task", "engine", "parts", "head")
ONLY_WITH = {"environment.file": ["environment.turns", "environment.max_context", "environment.format",
                                  "environment.seconds", "environment.gib"]}
PATHS = ("environment.file",)


def rules(cfg: Any) -> Iterator[Rule]:
    """Yield the rules that no table states."""
    least = cfg.data.max_prompt_tokens + max(cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)
    yield ("environment.max_context",
           cfg.environment.file is None or (cfg.environment.max_context or 0) >= least,
           f"at least {least} with environment.file: data.max_prompt_tokens, and rollout.max_new_tokens "
           "or eval.max_new_tokens, beside the tokens of replies")
