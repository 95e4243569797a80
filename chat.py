"""Talk to a model, or to what a run has trained, in a terminal.

    python chat.py runs/NAME                 # as the run evaluates its policy, with its environment
    python chat.py DIR_or_name               # a Hugging Face folder, a checkpoint or a hub name
    python chat.py DIR --set eval.temperature=0.6 --set data.system_prompt="Be brief."

A line is a question. /problem asks the next problem of data.eval and shows its gold answer, /new begins
another conversation, /quit ends, and Ctrl-C ends an answer. An environment's replies stand in ⟦ ⟧.
"""

from infra import commands

if __name__ == "__main__":  # before the imports that take seconds
    commands.of_chat(__doc__)

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import config
from config import Config, ConfigError
from data import Tokenizer
from eval import load_sets
from infra import dist
from infra.checkpoint import original_model, step_folders
from infra.device import engine_spec, find_device, fit_engine
from infra.runfolder import state_of
from infra.signals import exit_status
from infra.tokenizer import as_messages
from infra.weights import find_model, read_shape
from policy import load_policy
from records import Problem, Prompt, Request, Sample
from rollout import start_engine
from settings import leaves
from settings.paths import user_path

PIECE = 8        # tokens that are sampled before they are shown
CONTEXT = 4096   # tokens of a conversation at most, if the model takes so many
COMMANDS = "/problem asks one of data.eval, /new begins another conversation, /quit ends"


class Conversation:
    """Questions, and a model's answers to them."""

    def __init__(self, cfg: Config):
        """Load the model of a config. Raises ConfigError."""
        self.cfg = cfg
        device = dist.init(find_device(cfg.device))
        folder = find_model(original_model(cfg.model.path))
        self.tokenizer = leaves.through("tokenizer", cfg, Tokenizer(folder, cfg.data, cfg.rollout.stop or ()))
        self.longest = min(read_shape(folder).max_positions, cfg.own_longest or CONTEXT)
        spec = replace(engine_spec(cfg, device, self.tokenizer, self.longest), slots=1)
        kind, spec = fit_engine(cfg.rollout.engine, spec)
        self.engine, _ = leaves.through("engine", cfg, (start_engine(kind, spec), self.tokenizer))
        self.engine.sync(load_policy(cfg.model.path, spec.folder, spec.dtype))
        self.problems: Iterator[Problem] | None = None  # of data.eval, once /problem asks for one
        self.asked = 0
        self.begin()

    def begin(self) -> None:
        """Begin another conversation."""
        self.messages: list[dict] = []
        self.row: dict = {}

    def say(self, line: str) -> Iterator[str]:
        """Yield the answer to a line, piece by piece, or do what the command in it says."""
        if line == "/new":
            self.begin()
            yield "a new conversation\n"
        elif line == "/problem":
            self.begin()
            self.problems = self.problems or held_out(self.cfg, self.tokenizer)
            problem = next(self.problems)
            self.row = problem.row
            self.messages = as_messages(problem.messages or problem.question, None)
            yield f"{problem.question}\n\n"
            yield from self.answer()
            if problem.answer:
                yield f"\n\nThe gold answer is {problem.answer}."
        elif line.startswith("/"):
            raise ConfigError(f"{line}: no such command; {COMMANDS}")
        else:
            self.messages.append({"role": "user", "content": line})
            yield from self.answer()

    def answer(self) -> Iterator[str]:
        """Yield the answer to the newest message. Raises ConfigError if the conversation is too long.

        With stop texts it comes as a whole: one of them may lie across two pieces.
        """
        sampling, tokenizer = self.cfg.eval, self.tokenizer
        known = self.messages if tokenizer.template else self.messages[-1:]
        ids, = tokenizer.encode([tokenizer.render(known, self.cfg.data.system_prompt)])
        limit = min(self.longest - len(ids), sampling.max_new_tokens)
        if limit < 1:
            raise ConfigError(f"the conversation has {len(ids)} of {self.longest} tokens; begin "
                              "another, /new")
        self.asked += 1
        said = {"role": "assistant", "content": ""}
        self.messages.append(said)
        whole = Request(Prompt("chat", ids, "", self.row), 0, limit)
        sample = None
        while sample is None or not sample.is_whole(limit):
            made = sample.own if sample else 0
            count = limit - made if tokenizer.stops else min(PIECE, limit - made)
            seed = dist.seed_for(self.cfg.seed, self.asked, made, "chat")
            asked = replace(whole, seed=seed, limit=count, so_far=sample)
            piece, = self.engine.generate([asked], sampling.temperature, sampling.top_p)
            sample = sample.joined(piece) if sample else piece
            shown = self.text(sample)
            yield shown.removeprefix(said["content"])
            said["content"] = shown
        if not sample.finished:
            yield f" [cut off after {sample.own} tokens]"

    def text(self, sample: Sample) -> str:
        """Write an answer, without a character that has tokens still to come."""
        parts, before = [], ""
        for number, (_, end) in enumerate(sample.turns):
            text = self.tokenizer.read(sample.ids[:end])
            new = text.removeprefix(before)
            parts.append(f"⟦{new}⟧" if number % 2 else new)
            before = text
        return "".join(parts).rstrip("\ufffd")


def held_out(cfg: Config, tokenizer: Tokenizer) -> Iterator[Problem]:
    """Load the problems of data.eval, which come again and again. Raises ConfigError if there are none."""
    if cfg.data.eval is None:
        raise ConfigError("/problem: data.eval names no set; --set data.eval=...")
    sets = load_sets(cfg.data, tokenizer, cfg.reward)
    return itertools.cycle(problem for one in sets for problem in one.problems)


def open_config(target: str, names: list[str] | None, overrides: list[str]) -> Config:
    """Read the config of a run folder, or the default one for a model. Raises ConfigError."""
    run = user_path(target)
    if (run / "config.yaml").is_file():
        names, target = names or [str(run / "config.yaml")], str(newest_policy(run))
    cfg = config.load(names or "eval/default.yaml", overrides)
    return config.with_value(cfg, "model.path", target)


def newest_policy(run: Path) -> Path:
    """Find the export of a run that has finished, or its newest checkpoint. Raises ConfigError."""
    exported, saved = run / "hf", step_folders(run / "checkpoints")
    if exported.is_dir() and (state_of(run)["state"] == "finished" or not saved):
        return exported
    if not saved:
        raise ConfigError(f"{run} has neither an export nor a checkpoint yet (checkpoint.every)")
    return saved[-1]


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
            for piece in conversation.say(line) if line else ():
                print(piece, end="", flush=True)
        except ConfigError as error:
            print(f"error: {error}", end="")
        except KeyboardInterrupt:
            print(" [ended]", end="")
        print()


def main() -> int:
    return exit_status(partial(run_command, commands.of_chat(__doc__)), lambda: "ask again")


def run_command(args: argparse.Namespace) -> None:
    talk(Conversation(open_config(args.target, args.config, args.set)))


if __name__ == "__main__":
    sys.exit(main())
