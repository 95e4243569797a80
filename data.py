"""Problems in, prompts out.

A data line is {"question", "answer"} with optional "id", "solution", "level" and "subject", or other names
for them (data.columns); a question may be a list of messages. GSM8K's and MATH's own columns are understood:
an answer behind "####" in the solution, or in its last \\boxed{}.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from config import ConfigError
from infra.rows import NAMED_SETS, READERS, columns_of, file_of, find_cell, messages_of, no_column, read_hub
from infra.tokenizer import Tokenizer
from records import Problem, Prompt
from settings.loader import SHORT
from verify.extract import last_boxed

# Marks of rows that nobody should train on, and why.
DOUBTS = {"overlaps_eval": "are problems of an evaluation set",
          "all_boxed": "have a solution that boxes several answers"}
NO_ANSWER = "; without answers give weight to reward.boxed, format, overlong or custom alone"


def load_problems(name: str, folder: str | None = None, training: bool = False,
                  columns: dict[str, str | None] | None = None, answers: bool = True) -> list[Problem]:
    """Load a file of READERS, a named set (NAMED_SETS), or a hub name "user/set:config:split".

    `folder` (data.dir) is where the files of named sets lie; without it they come from the hub. `columns` is
    data.columns, which named sets do without; with `answers` every row must have one. For `training` rows
    with a mark of DOUBTS are left out, and counted on stderr, as is a named set that is not whole. Raises
    ConfigError with file and line for a malformed row, and for ids that repeat.
    """
    columns = columns if columns and name not in NAMED_SETS else {}
    path = file_of(name, folder)
    rows = list(READERS[path.suffix](path) if path else read_hub(name))
    columns = columns_of(name, [row for _, row in rows], columns)
    if path is None and answers:
        rows = with_an_answer(rows, name, columns)
    stem = (path or Path(name)).stem
    rows = [(f"{stem}/{i}", place, row) for i, (place, row) in enumerate(rows)]
    if name in NAMED_SETS and len(rows) != NAMED_SETS[name][0]:
        print(f"{name} holds {len(rows)} problems here, not {NAMED_SETS[name][0]}", file=sys.stderr)
    for mark, why in DOUBTS.items() if training else ():
        unmarked = [row for row in rows if not (isinstance(row[2], dict) and row[2].get(mark))]
        if len(unmarked) < len(rows):
            dropped = f"{len(rows) - len(unmarked)} of {len(rows)}"
            print(f"{name}: {dropped} problems {why} and are left out", file=sys.stderr)
        rows = unmarked
    problems = [to_problem(row, place, default_id, columns, answers) for default_id, place, row in rows]
    if not problems:
        raise ConfigError(f"{name} holds no problems")
    ids: set[str] = set()
    for problem in problems:
        if problem.id in ids:
            raise ConfigError(f"{name}: id {problem.id!r} occurs twice; "
                              "ids must differ, or be left out of every line")
        ids.add(problem.id)
    return problems


def with_an_answer(rows: list[tuple[str, dict]], name: str, columns: dict) -> list[tuple[str, dict]]:
    """Leave out rows of the hub that box no answer, two of MATH's, which a user cannot mend; count them."""
    usable = [(place, row) for place, row in rows
              if find_cell(row, "answer", columns) is not None or "solution" not in row
              or last_boxed(row["solution"] or "")]
    if len(usable) < len(rows):
        print(f"{name}: {len(rows) - len(usable)} of {len(rows)} rows box no answer and are left out",
              file=sys.stderr)
    return usable


def to_problem(row: object, place: str, default_id: str, columns: dict[str, str | None],
               needs_answer: bool) -> Problem:
    """Read a row in our columns, in those that `columns` names, GSM8K's (answer = solution) or MATH's
    (problem, solution with a box)."""
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a line must be an object with 'question' and 'answer', not "
                          f"{type(row).__name__}")
    question, answer = find_cell(row, "question", columns), find_cell(row, "answer", columns)
    messages, solution = messages_of(question, place), find_cell(row, "solution", columns) or ""
    if messages:
        question = messages[-1]["content"]
    if isinstance(answer, list):  # OlympiadBench's several answers, and solutions
        answer = ", ".join(map(str, answer))
    if isinstance(solution, list):
        solution = "\n".join(map(str, solution))
    if isinstance(answer, str) and "####" in answer:
        solution, answer = answer, answer.rpartition("####")[2].strip()
    elif answer is None and isinstance(solution, str) and columns.get("answer", "answer"):
        answer = last_boxed(solution)
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if answer is None and not needs_answer:
        answer = ""
    for key, value in (("question", question), ("answer", answer), ("solution", solution)):
        if value is None:
            raise ConfigError(f"{place}: {no_column(row, key, columns)}{NO_ANSWER * (key == 'answer')}")
        may_be_empty = key == "solution" or (key == "answer" and not needs_answer)
        if not isinstance(value, str) or not (value.strip() or may_be_empty):
            without = "" if needs_answer else ", or go without: data.columns={answer: null}"
            column = f" (column {columns.get(key)!r})" * (key in columns)
            raise ConfigError(f"{place}: {key!r}{column} must be a non-empty text, not {SHORT.repr(value)}; "
                              f"mend or remove the line{without}")
    own_id, level, subject = (find_cell(row, key, columns) for key in ("id", "level", "subject"))
    level, subject = (None if x is None else str(x).removeprefix("Level ") for x in (level, subject))
    name = default_id if own_id is None else str(own_id)
    return Problem(name, question, answer, solution, level, subject, row, messages)


def without_overlap(problems: list[Problem], evaluated: list[Problem]) -> list[Problem]:
    """Leave out problems whose question, or whose messages, are evaluated on, ignoring spaces and case, and
    print how many."""
    def spelling(problem: Problem) -> str:
        texts = [message["content"] for message in problem.messages] or [problem.question]
        return "".join("".join(texts).lower().split())

    evaluated_spellings = set(map(spelling, evaluated))
    kept = [p for p in problems if spelling(p) not in evaluated_spellings]
    if len(kept) < len(problems):
        print(f"{len(problems) - len(kept)} of {len(problems)} training problems are evaluated on, "
              "and left out", file=sys.stderr)
    if not kept:
        raise ConfigError("data.train holds no problem that data.eval does not hold too; "
                          "set one of them to another")
    return kept


def to_prompts(problems: list[Problem], tokenizer: Tokenizer, system: str | None, max_tokens: int,
               drop_longer: bool = False) -> list[Prompt]:
    """Render and tokenize problems. A prompt longer than `max_tokens` is an error or left out, never cut."""
    ids = tokenizer.encode([rendered(p, tokenizer, system) for p in problems])
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    too_long = sum(len(x) > max_tokens for x in ids)
    if too_long and (too_long == len(ids) or not drop_longer):
        raise ConfigError(f"prompt {problems[longest].id} has {len(ids[longest])} tokens, more than "
                          f"data.max_prompt_tokens={max_tokens} ({too_long} of {len(ids)} prompts do); raise "
                          "the setting, remove the problems, or leave them out by data.drop_longer=true "
                          "(training)")
    if too_long:
        print(f"{too_long} of {len(ids)} prompts have more than data.max_prompt_tokens={max_tokens} "
              "and are left out", file=sys.stderr)
    return [Prompt(p.id, x, p.answer, p.row) for p, x in zip(problems, ids, strict=True)
            if len(x) <= max_tokens]


def rendered(problem: Problem, tokenizer: Tokenizer, system: str | None) -> str:
    try:
        return tokenizer.render(problem.messages or problem.question, system)
    except ConfigError as error:
        raise ConfigError(f"prompt {problem.id}: {error}") from error


@dataclass(frozen=True, slots=True)
class Task:
    """The problems to train on and the sets to evaluate on, rendered for one model."""

    source: Path                # the model's folder
    tokenizer: Tokenizer
    problems: list[Problem]     # to train on
    prompts: list[Prompt]       # the same, rendered; fewer where data.drop_longer left some out
    sets: list                  # eval.Set of each evaluation set
    graded: bool = True         # every problem to train on has an answer, so accuracy is measured
    inputs: dict[str, str] = field(default_factory=dict)  # hashes of all this (infra/checkpoint.py)
