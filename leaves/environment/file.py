"""Call the user's own environment (environment.file), in workers that may be ended."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from infra.tokenizer import Tokenizer
from infra.user_files import UserFile, read_file
from leaves.environment.settings import Environment
from leaves.environment.worker import Reply, Turn, list_schemas, make_reply, reply_to, run_silently
from records import Problem, frozen
from settings.loader import ConfigError
from verify.workers import OverLimit

CHARACTERS = 200  # of one token at most, so that a reply with more for each token of the context cannot fit


@frozen
class EnvironmentFile(UserFile):
    """A file with reply(), tools, or a class."""

    settings: Environment = Environment()
    tools: tuple[dict, ...] = ()  # as chat templates take them; empty with reply()
    format: str = "plain"         # of their calls

    def fitted(self, tokenizer: Tokenizer) -> "EnvironmentFile":
        """Choose the format of calls by the chat template. Raises ConfigError without a place for tools."""
        form, template = self.settings.format, tokenizer.source if tokenizer.template else ""
        takes_tools = "tools" in template
        if form == "auto":
            form = "plain" if not takes_tools else "qwen" if "<tool_call>" in template else "llama"
        if self.tools and form != "plain" and not takes_tools:
            raise ConfigError(
                f"environment.format={form}: the chat template of {tokenizer.folder} has no place for tools; "
                "set it to plain and describe them in data.system_prompt, or set data.chat_template")
        return replace(self, format=form)

    def ask(self, prompt: str, turns: Sequence[str], row: dict) -> Future:
        """Ask for the reply to the last turn; the policy's are by turns with the environment's."""
        turn = Turn(prompt, turns, row, self.format, CHARACTERS * self.settings.max_context)
        return self.call(run_silently, partial(reply_to, turn=turn), row)

    def wait(self, call: Future, row_id: str) -> Reply:
        """Wait for a reply; a call that has to be ended is a failure, which is said once for each reason.

        Raises ConfigError for an error in the file.
        """
        try:
            return self.checked(call.result(), f" (row {row_id})")
        except OverLimit as error:
            goes_on = "the model reads that" if self.tools else "its completion ends there"
            how = self.report_once(error, row_id, f"{goes_on}, as of all that end so (environment/failures)")
            if not self.tools:
                return Reply(None, failures=1)
            return make_reply([("", f"error: the call {how}", True)], self.format)

    def try_rows(self, *sets: Sequence[Problem]) -> None:
        """Ask for a reply to an empty text, for the first and the last row of each set.

        Raises ConfigError if a call fails.
        """
        for problems in sets:
            for problem in (problems[0], problems[-1]):
                self.first_value(self.ask(problem.question, [""], problem.row), f" (row {problem.id})")


def open_environment(settings: Environment) -> EnvironmentFile | None:
    """Read the file of an environment and list its tools; None without a file. Raises ConfigError."""
    if settings.file is None:
        return None
    own = EnvironmentFile("environment.file", read_file(settings.file, "environment.file"), settings.seconds,
                          settings.gib, settings=settings)
    return replace(own, tools=tuple(own.first_value(own.call(run_silently, list_schemas, {}))))
