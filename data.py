"""Problems in, prompts out: data files, the model's tokenizer and chat template.

A data line is {"question", "answer"} with optional "id", "solution", "level" and "subject". GSM8K's and
MATH's own columns are understood too: an answer behind "####" in the solution, or in its last \\boxed{}.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from config import ConfigError
from infra.rows import read_hub, read_jsonl, read_parquet
from records import Problem, Prompt
from settings import read_json
from verify.extract import last_boxed

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
    # 674 on the hub
    "olympiad": (675, "olympiadbench.jsonl", "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
}
# Marks of rows that nobody should train on, and why.
DOUBTS = {"overlaps_eval": "are problems of an evaluation set",
          "all_boxed": "have a solution that boxes several answers"}
CHOICES = (f"give a .jsonl or .parquet file, one of {', '.join(SETS)}, "
           "or a hub name such as openai/gsm8k:main:train")


def load_problems(name: str, folder: str | None = None, training: bool = False) -> list[Problem]:
    """Load a .jsonl or .parquet file, a named set (SETS), or a hub name "user/set:config:split".

    `folder` (data.dir) is where the files of named sets lie; without it they come from the hub. For
    `training` rows with a mark of DOUBTS are left out, and counted on stderr, as is a named set that is not
    whole. Raises ConfigError with file and line for a malformed row, and for ids that repeat.
    """
    path = Path(folder, SETS[name][1]) if folder and name in SETS else Path(name)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ConfigError(f"data file {path} not found; {CHOICES}")
        rows = read_jsonl(path) if path.suffix == ".jsonl" else read_parquet(path)
    elif name in SETS:
        rows = with_an_answer(read_hub(*SETS[name][2:]), name)
    elif name.count(":") == 2 and "/" in name:
        rows = with_an_answer(read_hub(*name.split(":")), name)
    else:
        raise ConfigError(f"data set {name!r} is not known; {CHOICES}")
    rows = [(f"{path.stem}/{i}", place, row) for i, (place, row) in enumerate(rows)]
    if name in SETS and len(rows) != SETS[name][0]:
        print(f"{name} holds {len(rows)} problems here, not {SETS[name][0]}", file=sys.stderr)
    for mark, why in DOUBTS.items() if training else ():
        unmarked = [row for row in rows if not (isinstance(row[2], dict) and row[2].get(mark))]
        if len(unmarked) < len(rows):
            dropped = f"{len(rows) - len(unmarked)} of {len(rows)}"
            print(f"{name}: {dropped} problems {why} and are left out", file=sys.stderr)
        rows = unmarked
    problems = [to_problem(row, place, default_id) for default_id, place, row in rows]
    if not problems:
        raise ConfigError(f"{name} holds no problems")
    ids: set[str] = set()
    for problem in problems:
        if problem.id in ids:
            raise ConfigError(f"{name}: id {problem.id!r} occurs twice; "
                              "ids must differ, or be left out of every line")
        ids.add(problem.id)
    return problems


def with_an_answer(rows: Iterable[tuple[str, dict]], name: str) -> list[tuple[str, dict]]:
    """Leave out rows of the hub that box no answer, two of MATH's, which a user cannot mend; count them."""
    rows = list(rows)
    usable = [(place, row) for place, row in rows
              if {"answer", "final_answer"} & row.keys() or last_boxed(row["solution"])]
    if len(usable) < len(rows):
        print(f"{name}: {len(rows) - len(usable)} of {len(rows)} rows box no answer and are left out",
              file=sys.stderr)
    return usable


def to_problem(row: object, place: str, default_id: str) -> Problem:
    """Read a row in our columns, GSM8K's (answer = solution) or MATH's (problem, solution with a box)."""
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a line must be an object with 'question' and 'answer', not "
                          f"{type(row).__name__}")
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
            raise ConfigError(f"{place}: {key!r} must be a non-empty text, not {value!r}; "
                              "mend or remove the line")
    own_id = row.get("id")
    level, subject = (None if value is None else str(value).removeprefix("Level ") for value in (
        row.get("level"), row.get("subject", row.get("type"))))
    return Problem(default_id if own_id is None else str(own_id), question, answer, solution, level, subject)


def without_overlap(problems: list[Problem], evaluated: list[Problem]) -> list[Problem]:
    """Leave out problems whose question is evaluated on, ignoring spaces and case, and print how many."""
    def spelling(problem: Problem) -> str:
        return "".join(problem.question.lower().split())

    evaluated_spellings = set(map(spelling, evaluated))
    kept = [p for p in problems if spelling(p) not in evaluated_spellings]
    if len(kept) < len(problems):
        print(f"{len(problems) - len(kept)} of {len(problems)} training problems are evaluated on, "
              "and left out", file=sys.stderr)
    if not kept:
        raise ConfigError("data.train holds no problem that data.eval does not hold too; "
                          "set one of them to another")
    return kept


class Tokenizer:
    """The tokenizer, chat template and end-of-sequence ids of a Hugging Face model folder."""

    def __init__(self, folder: Path):
        path = require_file(folder / "tokenizer.json", "the tokenizer")
        try:
            self.rust = RustTokenizer.from_str(path.read_text())
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer: {error}; download it again") from None
        require_file(folder / "tokenizer_config.json", "the chat template")
        settings = read_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        source = template.read_text() if template.is_file() else settings.get("chat_template")
        if not isinstance(source, str):
            raise ConfigError(f"{folder} has a tokenizer without a chat template; add chat_template.jinja or "
                              "a 'chat_template' in tokenizer_config.json (base models have none: use an "
                              "instruct model)")
        try:
            self.source, self.template = source, chat_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template is not valid: {error}") from None
        tokens = {key: value["content"] if isinstance(value, dict) else value
                  for key, value in settings.items() if key.endswith("_token")}
        self.special = {key: value for key, value in tokens.items() if isinstance(value, str)}
        self.eos_ids = eos_ids(folder, self.rust.token_to_id(self.special.get("eos_token", "")))

    def render(self, question: str, system: str | None) -> str:
        """Render the conversation up to and including the generation prompt. Raises ConfigError."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.conversation([*messages, {"role": "user", "content": question}], generate=True)

    def conversation(self, messages: list[dict[str, str]], generate: bool) -> str:
        """Render messages; to `generate` an answer, its opening is added behind them."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=generate, **self.special)
        except jinja2.TemplateError as error:
            raise ConfigError("the chat template "
                              f"fails: {error}; does it accept data.system_prompt?") from error

    def closing_token(self) -> int | None:
        """Return the first special token that the template writes behind an answer, None without one."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
        text = self.conversation(messages, generate=False)
        tail, = self.encode([text.rpartition("ANSWER")[2]])
        return next((i for i in tail if not self.decode([i])), None)

    def encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Tokenize texts without adding special tokens: the template has written them already."""
        return [tuple(e.ids) for e in self.rust.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Decode tokens, by default without special ones, the EOS among them."""
        return self.rust.decode(list(ids), skip_special_tokens=not special)


def require_file(path: Path, what: str) -> Path:
    if not path.is_file():
        raise ConfigError(f"{path} not found; the model folder must hold {what}")
    return path


def eos_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Collect every id that ends a completion, from all files: one that is missed does not end any."""
    ids: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        eos = read_json(path).get("eos_token_id") if path.is_file() else None
        ids.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
    if not ids:
        raise ConfigError(f"{folder} names no EOS: set eos_token_id in generation_config.json")
    return frozenset(ids)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Build the jinja dialect that chat templates are written in (transformers, chat_template_utils).

    strftime_now is left out on purpose: with it Llama 3's prompts change from day to day, and a run resumed
    tomorrow is another run; without it the template falls back on its own fixed date.
    """

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(x: object, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = to_json  # jinja's own escapes <, > and & for HTML
    env.globals["raise_exception"] = refuse
    return env


def to_prompts(problems: list[Problem], tokenizer: Tokenizer, system: str | None, max_tokens: int,
               drop_longer: bool = False) -> list[Prompt]:
    """Render and tokenize problems. A prompt longer than `max_tokens` is an error or left out, never cut."""
    ids = tokenizer.encode([tokenizer.render(p.question, system) for p in problems])
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    too_long = sum(len(x) > max_tokens for x in ids)
    if too_long and (too_long == len(ids) or not drop_longer):
        raise ConfigError(f"prompt {problems[longest].id} has {len(ids[longest])} tokens, more than "
                          f"data.max_prompt_tokens={max_tokens} ({too_long} of {len(ids)} prompts do); raise "
                          "the setting (eval.py: --max-prompt-tokens), remove the problems, or leave them "
                          "out by data.drop_longer=true (training)")
    if too_long:
        print(f"{too_long} of {len(ids)} prompts have more than data.max_prompt_tokens={max_tokens} "
              "and are left out", file=sys.stderr)
    return [Prompt(p.id, x, p.answer) for p, x in zip(problems, ids, strict=True) if len(x) <= max_tokens]


@dataclass(frozen=True, slots=True)
class Task:
    """The problems to train on and the sets to evaluate on, rendered for one model."""

    source: Path                # the model's folder
    tokenizer: Tokenizer
    problems: list[Problem]     # to train on
    prompts: list[Prompt]       # the same, rendered; fewer where data.drop_longer left some out
    sets: list                  # eval.Set of each evaluation set
