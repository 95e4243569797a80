"""Talk to a model, or to what a run has trained, in a terminal.

    python chat.py runs/NAME                 # as the run evaluates its policy, with its environment
    python chat.py DIR_or_name               # a Hugging Face folder, a checkpoint or a hub name
    python chat.py DIR --set eval.temperature=0.6 --set data.system_prompt="Be brief."

A line is a question. /problem asks the next problem of data.eval and shows its gold answer, /new begins
another conversation, /quit ends, and Ctrl-C ends an answer. The texts of an environment are part of it.
"""

from infra import viewers

if __name__ == "__main__":  # before the imports that take seconds
    viewers.of_chat(__doc__)

import sys
from dataclasses import replace
from functools import cached_property
from itertools import cycle

import config
from config import Config, ConfigError
from eval import find_loader, load_sets
from infra import dist, terminal
from infra.checkpoint import newest_checkpoints
from infra.device import engine_spec, find_device, fit_engine
from infra.signals import exit_status
from infra.tokenizer import as_messages
from infra.weights import read_shape
from records import Prompt, Request
from rollout import start_engine
from settings import leaves
from settings.paths import user_path

CONTEXT = 4096  # tokens of a conversation at most, if the model takes so many
COMMANDS = "/problem asks one of data.eval, /new begins another conversation, /quit ends"


class Conversation:
    """Questions, and a model's answers to them."""

    def __init__(self, cfg: Config):
        """Load the model of a config. Raises ConfigError."""
        self.cfg = cfg
        device = dist.init(find_device(cfg.device))
        self.tokenizer, load_policy = find_loader(cfg)
        self.longest = min(read_shape(self.tokenizer.folder).max_positions, cfg.own_longest or CONTEXT)
        spec = replace(engine_spec(cfg, device, self.tokenizer, self.longest), slots=1)
        kind, spec = fit_engine(cfg.rollout.engine, spec)
        self.engine, _ = leaves.through("engine", cfg, (start_engine(kind, spec), self.tokenizer))
        self.engine.sync(load_policy(spec.folder, spec.dtype))
        self.messages, self.row = [], {}

    @cached_property
    def problems(self) -> cycle:
        """Read the problems of data.eval."""
        return cycle([problem for held_out in load_sets(self.cfg, self.tokenizer)
                      for problem in held_out.problems])

    def say(self, line: str) -> str:
        """Answer a line, or do what the command in it says."""
        if line == "/new":
            self.messages, self.row = [], {}
            return "a new conversation\n"
        if line == "/problem":
            if self.cfg.data.eval is None:
                raise ConfigError("/problem: data.eval names no set; --set data.eval=...")
            problem = next(self.problems)
            self.messages, self.row = [], problem.row
            text = self.answer(as_messages(problem.messages or problem.question, None))
            return f"{problem.question}\n\n{text}\n\nThe gold answer is {problem.answer or 'not known'}."
        if line.startswith("/"):
            raise ConfigError(f"{line}: no such command; {COMMANDS}")
        return self.answer([{"role": "user", "content": line}])

    def answer(self, asked: list[dict]) -> str:
        """Answer messages. Raises ConfigError if the conversation is too long."""
        cfg, tokenizer = self.cfg, self.tokenizer
        known = [*self.messages, *asked] if tokenizer.template else asked
        ids, = tokenizer.encode([tokenizer.render(known, cfg.data.system_prompt)])
        limit = min(self.longest - len(ids), cfg.eval.max_new_tokens)
        if limit < 1:
            raise ConfigError(f"the conversation has {len(ids)} of {self.longest} tokens; begin "
                              "another, /new")
        seed = dist.seed_for(cfg.seed, len(self.messages), "chat")
        request = Request(Prompt("chat", ids, "", self.row), seed, limit)
        sample, = self.engine.generate([request], cfg.eval.temperature, cfg.eval.top_p, "tokens")
        text = content = "".join(tokenizer.read(sample))
        if len(sample.turns) > 1:  # the next prompt repeats the marks between turns
            ids = sample.ids[:-1] if sample.ids[-1] in tokenizer.ends else sample.ids
            content = tokenizer.opened + tokenizer.decode(ids, special=True)
        self.messages += [*asked, {"role": "assistant", "content": content}]
        return text if sample.finished else f"{text} [cut off after {sample.own} tokens]"


def open_config(target: str, names: list[str] | None, overrides: list[str]) -> Config:
    """Read the config of a run folder, with its newest policy, or the default one for a model. Raises
    ConfigError."""
    terminal.name_unread(overrides)
    run = user_path(target)
    if (run / "config.yaml").is_file():
        policies = [run / "hf", *newest_checkpoints(run / "checkpoints")[:1]]
        if not policies[-1].is_dir():
            raise ConfigError(f"{run} has neither an export nor a checkpoint yet (checkpoint.every)")
        names, target = names or run / "config.yaml", str(policies[-1])
    return config.load(names or "eval/default.yaml", [f"model.path={target}", *overrides])


def talk(conversation: Conversation) -> None:
    """Talk in the terminal."""
    print(COMMANDS)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        try:
            print(conversation.say(line) if line else "")
        except ConfigError as error:
            print(f"error: {error}")
        except KeyboardInterrupt:
            print(" [ended]")


def main() -> int:
    args = viewers.of_chat(__doc__)
    return exit_status(lambda: talk(Conversation(open_config(args.target, args.config, args.set))))


if __name__ == "__main__":
    sys.exit(main())
