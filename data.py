"""Load problems, and render them as prompts.

A data line is {"question", "answer"} with optional "id", "solution", "level" and "subject", or other names
for them (data.columns); a question may be a list of messages, and the assistant's last one is the solution.
A solution in the place of the answer is taken apart as a completion is: its last box, or the text behind
"####" or "the answer is".
"""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from infra.named_sets import NAMED_SETS, find_files, read_named
from infra.rows import Columns, columns_of, find_cell, messages_of, missing_column, spelled, with_letters
from infra.terminal import to_stderr
from infra.tokenizer import Tokenizer
from infra.trial import SECONDS, try_first
from records import Problem, Prompt, frozen
from settings.loader import SHORT, ConfigError, encodable
from verify.extract import extract, last_boxed

# Marks of rows that nobody should train on, and why.
DOUBTFUL_ROWS = {
    "overlaps_eval": "are problems of an evaluation set",
    "all_boxed": "have a solution that boxes several answers",
}
CELLS = ("question", "answer", "solution", "id", "level", "subject")  # as data.columns names them
SAMPLE = 32          # prompts that a tokenizer is tried on
LONGEST_ANSWER = 40  # words of a final answer; a longer one is a solution
NO_ANSWER = "; without answers give weight to reward.boxed, format, overlong or custom alone"


def load_problems(names: str, folder: str | None = None, training: bool = False,
                  columns: Columns | None = None, answers: bool = True) -> list[Problem]:
    """Load files, folders or patterns of them, named sets (infra/named_sets.py) and hub names
    "user/set:config:split", separated by commas.

    `folder` (data.dir) holds the files of named sets; without it they come from the hub. `columns` is
    data.columns, which named sets ignore; with `answers` every row must have one. `training` leaves out rows
    that are marked as doubtful (DOUBTFUL_ROWS), and counts rows that repeat. Stderr has their numbers, and a
    named set's unexpected size. Of several files ids begin with the file's number. Raises ConfigError with
    file and line for a malformed row, and for ids that repeat.
    """
    files = [(name, path) for name in map(str.strip, names.split(","))
             for path in find_files(name, folder) or [None]]
    problems = {}
    for number, (name, path) in enumerate(files):
        before = f"{number}/" * (len(files) > 1)
        for problem in load_file(name, path, training, columns or {}, answers):
            own_id = before + problem.id
            if own_id in problems:
                raise ConfigError(
                    f"{names}: id {own_id!r} occurs twice; ids must differ, or be left out of every line")
            problems[own_id] = replace(problem, id=own_id)
    rows = {(problem.question, str(problem.messages), problem.answer) for problem in problems.values()}
    repeated, differing = len(problems) - len(rows), len(rows) - len({row[:2] for row in rows})
    if training and repeated + differing:
        to_stderr(f"{names}: of {len(problems)} rows {repeated} repeat another one, and {differing} have "
                  "another answer to the same question; all are trained on")
    return list(problems.values())


def load_file(name: str, path: Path | None, training: bool, columns: Columns, answers: bool) -> list[Problem]:
    """Load one of a set's files, or a set without files."""
    size = None
    if name in NAMED_SETS:
        columns, size = {}, NAMED_SETS[name][0]
    if path:
        from infra.files import print_doubts, read_rows  # sets of the hub have none

        rows = try_first(path, lambda: list(read_rows(path)), seconds=SECONDS + path.stat().st_size / 1e6)
        print_doubts(path, rows)
    rows = [(place, with_letters(row)) for place, row in (rows if path else read_named(name))]
    columns = columns_of(name, [row for _, row in rows], columns)
    if path is None and answers:  # two of MATH's box none, and a user cannot mend them
        rows = leave_out(rows, lambda row: boxes_none(row[1], columns), f"{name}: ", "rows box no answer and")
    stem = encodable((path or Path(name)).stem)
    rows = [(row, place, f"{stem}/{i}") for i, (place, row) in enumerate(rows)]
    if size not in (None, len(rows)):
        to_stderr(f"{name} holds {len(rows)} problems here, not {size}")
    for mark, why in DOUBTFUL_ROWS.items() if training else ():
        rows = leave_out(rows, lambda row, mark=mark: row[0].get(mark), f"{name}: ", f"problems {why} and")
    if not rows:
        raise ConfigError(f"{path or name} holds no problems")
    return [to_problem(*row, columns, answers) for row in rows]


def leave_out(items: list, is_out: Callable[[Any], Any], source: str, why: str) -> list:
    """Return the items that are not out, and print the number of the others."""
    kept = [item for item in items if not is_out(item)]
    if len(kept) < len(items):
        to_stderr(f"{source}{len(items) - len(kept)} of {len(items)} {why} are left out")
    return kept


def boxes_none(row: dict, columns: Columns) -> bool:
    """Tell whether a row of the hub has a solution without a box in place of an answer."""
    unanswered = "solution" in row and find_cell(row, "answer", columns) is None
    return unanswered and not last_boxed(row["solution"] or "")


def to_problem(row: dict, place: str, default_id: str, columns: Columns, needs_answer: bool) -> Problem:
    """Read a row in our columns, in the columns named by `columns`, in GSM8K's (answer = solution) or MATH's
    (problem, solution with a box)."""
    question, answer, solution, *others = (find_cell(row, key, columns) for key in CELLS)
    own_id, level, subject = (None if cell is None else str(cell) for cell in others)
    messages, reply = messages_of(question, place)
    if messages:
        question = messages[-1]["content"]
        if isinstance(row.get("system"), str) and messages[0]["role"] != "system":  # as ShareGPT has it
            messages = ({"role": "system", "content": row["system"]}, *messages)
    if isinstance(solution, list):
        solution = "\n".join(map(str, solution))
    answer, solution = spelled(answer), solution or reply
    marked = extract(answer) if isinstance(answer, str) else None
    if marked is not None or (isinstance(answer, str) and "####" in answer):  # a whole solution
        answer, solution = (marked or "").strip(), answer
    elif answer is None and isinstance(solution, str) and columns.get("answer", "answer"):
        answer = extract(solution)
    if answer is None and not needs_answer:
        answer = ""
    if needs_answer and isinstance(answer, str) and len(answer.split()) > LONGEST_ANSWER:
        raise ConfigError(f"{place}: the answer is a text of {len(answer.split())} words and marks none of "
                          "them as its final answer; write that alone, or in \\boxed{}, or behind ####")
    for key, value in (("question", question), ("answer", answer), ("solution", solution)):
        if value is None:
            advice = NO_ANSWER if key == "answer" else ""
            raise ConfigError(f"{place}: {missing_column(row, key, columns)}{advice}")
        may_be_empty = key == "solution" or (key == "answer" and not needs_answer)
        if not isinstance(value, str) or not (value.strip() or may_be_empty):
            column = f" (column {columns.get(key)!r})" if key in columns else ""
            without = ", or go without: data.columns={answer: null}" * (key == "answer" and not needs_answer)
            raise ConfigError(
                f"{place}: {key!r}{column} must be a non-empty text, not {SHORT.repr(value)}; mend or remove "
                f"the line{without}")
    return Problem(default_id if own_id is None else own_id, question, answer, solution,
                   level and level.removeprefix("Level "), subject, row, messages)


def drop_overlap(problems: list[Problem], evaluated: list[Problem]) -> list[Problem]:
    """Leave out problems of an evaluation set, and print their number.

    Two are the same if the user's last messages ask the same, or if one stands in the other, beside an
    instruction for instance.
    """
    from infra.spelling import runs_of  # for those who evaluate

    runs = [runs_of(problem.question) for problem in evaluated]
    within, wholes = set().union(*runs), {whole for whole, *_ in runs}

    def is_out(problem):
        own = runs_of(problem.question)
        return own[0] in within or not wholes.isdisjoint(own)

    kept = leave_out(problems, is_out, "", "training problems are evaluated on and")
    if not kept:
        raise ConfigError(
            "data.train holds no problem that data.eval does not hold too; set one of them to another")
    return kept


def to_prompts(
    problems: list[Problem],
    tokenizer: Tokenizer,
    system: str | None,
    max_tokens: int,
    drop_longer: bool = False
) -> list[Prompt]:
    """Render and tokenize problems. A prompt longer than `max_tokens` is an error or left out, never cut.

    Raises ConfigError for a prompt without tokens too.
    """
    sample = problems[::max(1, len(problems) // SAMPLE)]
    try_first(f"a prompt by the tokenizer of {tokenizer.folder}", lambda: tokenizer.require_whole(
        [render_problem(p, tokenizer, system) for p in sample]))
    ids = tokenizer.encode([render_problem(p, tokenizer, system) for p in problems])
    prompts = [Prompt(p.id, x, p.answer, p.row) for p, x in zip(problems, ids, strict=True)]
    empty = [prompt.id for prompt in prompts if not prompt.ids]
    if empty:
        raise ConfigError(
            f"prompt {empty[0]} has no tokens ({len(empty)} of {len(ids)} prompts do): the chat template "
            "renders no text for it; set data.chat_template, data.template or data.prompt")
    longer = [prompt for prompt in prompts if len(prompt.ids) > max_tokens]
    if longer and not (drop_longer and len(longer) < len(prompts)):
        longest = max(longer, key=lambda prompt: len(prompt.ids))
        raise ConfigError(
            f"prompt {longest.id} has {len(longest.ids)} tokens, more than data.max_prompt_tokens="
            f"{max_tokens} ({len(longer)} of {len(ids)} prompts do); raise the setting, remove the "
            "problems, or leave them out by data.drop_longer=true (training)")
    return leave_out(prompts, lambda prompt: len(prompt.ids) > max_tokens, "",
                     f"prompts have more than data.max_prompt_tokens={max_tokens} and")


def render_problem(problem: Problem, tokenizer: Tokenizer, system: str | None) -> str:
    try:
        return tokenizer.render(problem.messages or problem.question, system)
    except ConfigError as error:
        raise ConfigError(f"prompt {problem.id}: {error}") from error


@frozen
class Task:
    """The problems to train on and the sets to evaluate on, rendered for one model."""

    source: Path                # the model's folder
    tokenizer: Tokenizer
    problems: Sequence[Problem] = ()  # to train on, stored (infra/stored.py)
    prompts: Sequence[Prompt] = ()    # the same, rendered
    sets: Sequence = ()         # eval.EvalSet of each evaluation set
    graded: bool = True         # every problem to train on has an answer, so accuracy is measured
    inputs: dict[str, str] = field(default_factory=dict)  # hashes of all of these (infra/checkpoint.py)
