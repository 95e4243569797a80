"""Problems in, prompts out: data files, the model's tokenizer and chat template, the order of prompts and its memory.

A data line is {"question", "answer"} with optional "id", "solution", "level" and "subject". GSM8K's and MATH's own
columns are understood too: an answer behind "####" in the solution, or in its last \\boxed{}.
"""

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import jinja2
import numpy as np
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from config import ConfigError, Prompts, read_json
from dist import seed_for
from extract import last_boxed
from prune import PROMPTS, REFILLING, Memory, adapt
from reward import unreadable
from sample import Problem, Prompt, Sample, Turn

# name -> (problems, file in data.dir, hub data set, its configuration, split)
SETS = {
    "gsm8k_train": (7473, "gsm8k_train.jsonl", "openai/gsm8k", "main", "train"),
    "gsm8k": (1319, "gsm8k_test.jsonl", "openai/gsm8k", "main", "test"),
    "math_train": (7500, "math_train.jsonl", "DigitalLearningGmbH/MATH-lighteval", "default", "train"),
    "math500": (500, "math500.jsonl", "HuggingFaceH4/MATH-500", "default", "test"),
    "aime24": (30, "aime24.jsonl", "HuggingFaceH4/aime_2024", "default", "train"),
    "aime25": (30, "aime25.jsonl", "math-ai/aime25", "default", "test"),
    "amc23": (40, "amc23.jsonl", "math-ai/amc23", "default", "test"),
    "minerva": (272, "minerva_math.jsonl", "math-ai/minervamath", "default", "test"),
    "olympiad": (675, "olympiadbench.jsonl", "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),  # hub: 674
}
# Marks of rows that nobody should train on, and why.
DOUBTS = {"overlaps_eval": "are problems of an evaluation set",
          "all_boxed": "have a solution that boxes several answers"}
CHOICES = (f"give a .jsonl or .parquet file, one of {', '.join(SETS)}, "
           "or a hub name such as openai/gsm8k:main:train")


def load_problems(name: str, folder: str | None = None, training: bool = False) -> list[Problem]:
    """All problems of a .jsonl or .parquet file, of a named set (SETS), or of a hub name "user/set:config:split".

    `folder` (data.dir) is where the files of named sets lie; without it they come from the hub. For `training` rows
    with a mark of DOUBTS are left out, and counted on stderr, as is a named set that is not whole.
    Raises ConfigError with file and line for a malformed row, and for ids that repeat.
    """
    path = Path(folder, SETS[name][1]) if folder and name in SETS else Path(name)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ConfigError(f"data file {path} not found; {CHOICES}")
        rows = read_jsonl(path) if path.suffix == ".jsonl" else read_parquet(path)
    elif name in SETS:
        rows = read_hub(*SETS[name][2:])
    elif name.count(":") == 2 and "/" in name:
        rows = read_hub(*name.split(":"))
    else:
        raise ConfigError(f"data set {name!r} is not known; {CHOICES}")
    rows = [(f"{path.stem}/{i}", place, row) for i, (place, row) in enumerate(rows)]
    if name in SETS and len(rows) != SETS[name][0]:
        print(f"{name} holds {len(rows)} problems here, not {SETS[name][0]}", file=sys.stderr)
    for mark, why in DOUBTS.items() if training else ():
        left = [row for row in rows if not (isinstance(row[2], dict) and row[2].get(mark))]
        if len(left) < len(rows):
            print(f"{name}: {len(rows) - len(left)} of {len(rows)} problems {why} and are left out", file=sys.stderr)
        rows = left
    problems = [to_problem(row, place, default_id) for default_id, place, row in rows]
    if not problems:
        raise ConfigError(f"{name} holds no problems")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise ConfigError(f"{name}: id {problem.id!r} occurs twice; ids must differ, or be left out of every line")
        seen.add(problem.id)
    return problems


def read_jsonl(path: Path) -> Iterable[tuple[str, dict]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); convert it") from None
    # Not splitlines(): it also cuts at U+2028 and the like, which stand inside real questions.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number}: not valid JSON ({error}); each line must be one object") from None
            yield f"{path}:{number}", row


def read_parquet(path: Path) -> Iterable[tuple[str, dict]]:
    import pyarrow.parquet  # slow to import, and most runs read jsonl

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a parquet file: {error}") from None
    yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows))


def read_hub(name: str, config: str, split: str) -> Iterable[tuple[str, dict]]:
    import datasets  # slow to import, and needed for names only

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"hub data set {name} ({config}, {split}) could not be loaded: {str(error).splitlines()[0]}. "
                          "Set data.dir to a folder with the files, or give a path.") from error
    usable = [(f"{name}: row {i}", row) for i, row in enumerate(rows)
              if {"answer", "final_answer"} & row.keys() or last_boxed(row["solution"])]
    if len(usable) < len(rows):  # two of MATH's training rows box nothing, and nobody can mend a hub's rows
        print(f"{name}: {len(rows) - len(usable)} of {len(rows)} rows box no answer and are left out", file=sys.stderr)
    return usable


def to_problem(row: object, place: str, default_id: str) -> Problem:
    """One row in our columns, GSM8K's (question, answer = solution) or MATH's (problem, solution with a box)."""
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a line must be an object with 'question' and 'answer', not {type(row).__name__}")
    question = row.get("question", row.get("problem"))
    answer, solution = row.get("answer", row.get("final_answer")), row.get("solution") or ""
    if isinstance(answer, list):  # OlympiadBench's several answers, and solutions
        answer = ", ".join(map(str, answer))
    if isinstance(solution, list):
        solution = "\n".join(map(str, solution))
    if isinstance(answer, str) and "####" in answer:
        solution, answer = answer, answer.rpartition("####")[2].strip()
    elif answer is None and isinstance(solution, str):
        answer = last_boxed(solution)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    for key, value in (("question", question), ("answer", answer), ("solution", solution)):
        if not isinstance(value, str) or not (value.strip() or key == "solution"):
            raise ConfigError(f"{place}: {key!r} must be a non-empty text, not {value!r}; mend or remove the line")
    own_id = row.get("id")
    level, subject = (None if value is None else str(value).removeprefix("Level ") for value in (
        row.get("level"), row.get("subject", row.get("type"))))
    return Problem(default_id if own_id is None else str(own_id), question, answer, solution, level, subject)


def without_overlap(problems: list[Problem], evaluated: list[Problem]) -> list[Problem]:
    """Those whose question is not one that is evaluated on, spaces and case aside; how many are is said on stderr."""
    def same(problem: Problem) -> str:
        return "".join(problem.question.lower().split())

    known = set(map(same, evaluated))
    left = [p for p in problems if same(p) not in known]
    if len(left) < len(problems):
        print(f"{len(problems) - len(left)} of {len(problems)} training problems are evaluated on, and left out",
              file=sys.stderr)
    if not left:
        raise ConfigError("data.train holds no problem that data.eval does not hold too; set one of them to another")
    return left


def name_unreadable(name: str, problems: list[Problem]) -> None:
    """Say which gold answers cannot be read: only their very spelling is ever rewarded."""
    unread = unreadable(p.answer for p in problems)
    ids = [p.id for p in problems if p.answer in unread]
    if ids:
        print(f"{name}: {len(ids)} of {len(problems)} gold answers cannot be read, and only the same spelling counts "
              f"as right: {', '.join(ids[:10])}{' ...' if len(ids) > 10 else ''}", file=sys.stderr)


class Tokenizer:
    """The tokenizer, chat template and end-of-sequence ids of a Hugging Face model folder."""

    def __init__(self, folder: Path):
        path = require(folder / "tokenizer.json", "the tokenizer")
        try:
            self.rust = RustTokenizer.from_str(path.read_text())
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}; download it again") from None
        require(folder / "tokenizer_config.json", "the chat template")
        settings = read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        source = template.read_text() if template.is_file() else settings.get("chat_template")
        if not isinstance(source, str):
            raise ConfigError(f"{folder} has a tokenizer without a chat template; add chat_template.jinja or a "
                              "'chat_template' in tokenizer_config.json (base models have none: use an instruct model)")
        try:
            self.source, self.template = source, chat_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template is not valid: {error}") from None
        tokens = {key: value["content"] if isinstance(value, dict) else value
                  for key, value in settings.items() if key.endswith("_token")}
        self.special = {key: value for key, value in tokens.items() if isinstance(value, str)}
        self.eos_ids = eos_ids(folder, self.rust.token_to_id(self.special.get("eos_token", "")))

    def render(self, question: str, system: str | None) -> str:
        """The conversation up to and including the generation prompt. Raises ConfigError when the template refuses."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.conversation([*messages, {"role": "user", "content": question}], generate=True)

    def conversation(self, messages: list[dict[str, str]], generate: bool) -> str:
        """Messages as the template writes them, with the opening of an answer behind them to `generate` one."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=generate, **self.special)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template fails: {error}; does it accept data.system_prompt?") from error

    def closing_token(self) -> int | None:
        """The first special token that the template writes behind an assistant's answer; None where it writes none."""
        text = self.conversation([{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}], False)
        tail, = self.encode([text.rpartition("ANSWER")[2]])
        return next((i for i in tail if not self.decode([i])), None)

    def encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Token ids without added special tokens: the template has written them already."""
        return [tuple(e.ids) for e in self.rust.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a completion; special tokens, the EOS among them, are left out."""
        return self.rust.decode(list(ids), skip_special_tokens=True)


def require(path: Path, what: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path} not found; the model folder must hold {what}")
    return path


def eos_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Every id that ends a completion. Models have several, listed in different files; one missed never stops."""
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        eos = read_json(path).get("eos_token_id") if path.is_file() else None
        found.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
    if not found:
        raise ConfigError(f"{folder} names no EOS: set eos_token_id in generation_config.json")
    return frozenset(found)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """The jinja dialect that chat templates are written in (transformers, chat_template_utils).

    One thing is left out on purpose: strftime_now. With it Llama 3's prompts change from day to day, and a run resumed
    tomorrow is another run; without it the template falls back on its own fixed date.
    """

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(x: object, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = to_json  # jinja's own escapes <, > and & for HTML
    env.globals["raise_exception"] = refuse
    return env


def to_prompts(problems: list[Problem], tokenizer: Tokenizer, system: str | None, max_tokens: int,
               drop_longer: bool = False) -> list[Prompt]:
    """Render and tokenize. A prompt of more than `max_tokens` is never cut: it raises ConfigError, or is left out where
    that is asked for."""
    ids = tokenizer.encode([tokenizer.render(p.question, system) for p in problems])
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    over = sum(len(x) > max_tokens for x in ids)
    if over and (over == len(ids) or not drop_longer):
        raise ConfigError(f"prompt {problems[longest].id} has {len(ids[longest])} tokens, more than "
                          f"data.max_prompt_tokens={max_tokens} ({over} of {len(ids)} prompts do); "
                          "raise the setting (of eval.py: --max-prompt-tokens), remove the problems, or leave those of "
                          "training out by data.drop_longer")
    if over:
        print(f"{over} of {len(ids)} prompts have more than data.max_prompt_tokens={max_tokens} and are left out",
              file=sys.stderr)
    return [Prompt(p.id, x, p.answer) for p, x in zip(problems, ids, strict=True) if len(x) <= max_tokens]


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` prompts in one epoch: a permutation, a pure function of (seed, epoch)."""
    return np.random.Generator(np.random.Philox(seed_for(seed, epoch, "order"))).permutation(count)


def sample_seed(seed: int, epoch: int, prompt_id: str, g: int) -> int:
    """Of the g-th completion of a prompt in an epoch, whichever rank and step sample it."""
    return seed_for(seed, epoch, prompt_id, g, "rollout")


def coming(prompts: list[Prompt], seed: int, place: int, count: int) -> list[tuple[int, Prompt]]:
    """The `count` prompts that come up from `place` in the endless row of epochs, each with its epoch."""
    places = [divmod(i, len(prompts)) for i in range(place, place + count)]
    orders = {epoch: order(len(prompts), seed, epoch) for epoch in {epoch for epoch, _ in places}}
    return [(epoch, prompts[orders[epoch][i]]) for epoch, i in places]


@dataclass(frozen=True, slots=True)
class Visit:
    """What is remembered of a prompt: its newest rollout, from all of its completions."""

    epoch: int
    rewards: tuple[float, ...]  # or accuracies, as rollout.differ_in says
    size: float       # mean |A|
    easy: int         # newest rollouts in a row whose rewards were all equal and high
    hard: int         # ... all equal and low
    times: int = 1    # rolled out so far
    skipped: int = 0  # turns at which it was skipped since


def easy_and_hard(reward_NG: torch.Tensor, middle: float) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [N] each: groups whose rewards are all equal, and above `middle`; all equal, and not above."""
    flat_N, high_N = (reward_NG == reward_NG[:, :1]).all(dim=1), reward_NG[:, 0] > middle
    return flat_N & high_N, flat_N & ~high_N


class PromptHistory:
    """The one state that drawing prompts has: where the row of epochs stands, what earlier rollouts showed, and with
    rollout.window what they left unfinished.

    The same on every rank, and independent of their number: it is kept from records that all ranks hold.
    """

    def __init__(self, explore: float):
        self.place = 0
        self.visits: dict[str, Visit] = {}
        self.explore = (explore, explore)  # prune.adapt
        self.values: dict[str, float] = {}  # V* (advantage.kind=soft_value)
        self.pool: list[tuple[Turn, Sample]] = []  # completions that go on in the next step

    def draw(self, prompts: list[Prompt], pruning: Prompts, seed: int, count: int) -> list[Turn]:
        """The turns of the next `count` prompts, kept or skipped; with a kind that refills (REFILLING) of as many as it
        takes until `count` are kept.

        Whether a prompt is kept is a function of the seed, the epoch and its id, and of the turns before this call.
        """
        turns: list[Turn] = []
        missing = count
        while missing:
            block = coming(prompts, seed, self.place, missing)
            self.place += missing
            prob_K = PROMPTS[pruning.kind](self.remembered([prompt.id for _, prompt in block]), pruning)
            for (epoch, prompt), prob in zip(block, prob_K.tolist(), strict=True):
                if seed_for(seed, epoch, prompt.id, "prompt") < prob * 2**63:
                    turns.append(Turn(prompt, epoch, prob, 1.0 if pruning.kind in REFILLING else 1 / prob))
                else:
                    turns.append(Turn(prompt, epoch, prob, weight=0.0))
                    visit = self.visits[prompt.id]
                    self.visits[prompt.id] = replace(visit, skipped=visit.skipped + 1)
            missing = count - sum(turn.kept for turn in turns) if pruning.kind in REFILLING else 0
        return turns

    def remembered(self, ids: list[str]) -> Memory:
        visits = [self.visits.get(i) for i in ids]
        sizes = [visit.size for visit in self.visits.values()]

        def column(name: str, unseen: float) -> torch.Tensor:
            return torch.tensor([unseen if v is None else getattr(v, name) for v in visits], dtype=torch.float64)

        return Memory(column("size", math.nan), column("skipped", 0), column("easy", 0), column("hard", 0),
                      math.fsum(sizes) / len(sizes) if sizes else math.nan, self.explore)

    def record(self, turns: list[Turn], reward_NG: torch.Tensor, adv_NG: torch.Tensor, middle: float) -> None:
        """Remember the rollout of these turns. Equal rewards above `middle` are easy, equal ones below it hard."""
        easy_N, hard_N = easy_and_hard(reward_NG, middle)
        rows = zip(turns, reward_NG.tolist(), adv_NG.abs().mean(dim=1).tolist(), easy_N.tolist(), hard_N.tolist(),
                   strict=True)
        for turn, rewards, size, is_easy, is_hard in rows:
            old = self.visits.get(turn.prompt.id)
            easy, hard, times = (old.easy, old.hard, old.times) if old else (0, 0, 0)
            self.visits[turn.prompt.id] = Visit(turn.epoch, tuple(rewards), size, easy + 1 if is_easy else 0,
                                                hard + 1 if is_hard else 0, times + 1)

    def adapt(self, reward_NG: torch.Tensor, middle: float, target: float) -> None:
        """GRESO's p (`adapt`) after a step with these rewards."""
        easy, hard = (x_N.double().mean().item() for x_N in easy_and_hard(reward_NG, middle))
        self.explore = adapt(self.explore, easy, hard, target)

    def state(self) -> dict:
        """For a checkpoint: plain values only."""
        return {"place": self.place, "explore": self.explore, "values": self.values,
                "visits": {prompt_id: astuple(visit) for prompt_id, visit in self.visits.items()},
                "pool": [(turn.epoch, turn.prompt.id, turn.copy,
                          *(torch.from_numpy(np.array(x)) for x in (sample.ids, sample.logp)))
                         for turn, sample in self.pool]}

    def restore(self, state: dict, prompts: list[Prompt]) -> None:
        self.place, self.explore, self.values = state["place"], state["explore"], state["values"]
        self.visits = {prompt_id: Visit(*values) for prompt_id, values in state["visits"].items()}
        by_id = {prompt.id: prompt for prompt in prompts}
        self.pool = [(Turn(by_id[prompt_id], epoch, copy=copy),
                      Sample(ids.tolist(), logp.tolist(), finished=False, pending=True))
                     for epoch, prompt_id, copy, ids, logp in state["pool"]]
