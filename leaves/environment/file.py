"""Call the user's own environment (environment.file), in workers that may be ended."""

from collections.abc import Sequence
from dataclasses import replace

from infra.tokenizer import Tokenizer
from infra.user_files import UserFile, read_file
from leaves.environment.settings import Environment
from leaves.environment.worker import Reply, Turn, call_environment, list_schemas, make_reply
from records import Problem, frozen
from settings.loader import ConfigError
from verify.workers import WORKERS, Call, Limits, OverLimit

CHARACTERS = 200  # of one token at most, so that a reply with more for each token of the context cannot fit


@frozen
class EnvironmentFile(UserFile):
    """A file with reply() or tools()."""

    settings: Environment
    tools: tuple[dict, ...] = ()  # as chat templates take them; empty with reply()
    format: str = "plain"         # of their calls

    def fitted(self, tokenizer: Tokenizer) -> "EnvironmentFile":
        """Choose the format of calls by the chat template. Raises ConfigError without a place for tools."""
        form, template = self.settings.format, "" if tokenizer.template is None else tokenizer.source
        takes_tools = "tools" in template
        if form == "auto" and takes_tools:
            form = "qwen" if "<tool_call>" in template else "llama"
        elif form == "auto":
            form = "plain"
        if self.tools and form != "plain" and not takes_tools:
            raise ConfigError(
                f"environment.format={form}: the chat template of {tokenizer.folder} has no place for tools; "
                "set it to plain and describe them in data.system_prompt, or set data.chat_template")
        return replace(self, format=form)

    def ask(self, text: str, newest: str, row: dict) -> Call:
        """Ask for the reply to a turn: the text so far, and the newest turn in it."""
        turn = Turn(text, newest, row, self.format, CHARACTERS * self.settings.max_context)
        return self.call(call_environment, turn)

    def wait(self, call: Call, row_id: str) -> Reply:
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
            message = {"role": "tool", "name": "", "content": f"error: the call {how}"}
            return make_reply([message], self.format, 1)

    def try_rows(self, *sets: Sequence[Problem]) -> None:
        """Ask for a reply to an empty text, for the first and the last row of each set.

        Raises ConfigError if a call fails.
        """
        for problems in sets:
            for problem in (problems[0], problems[-1]):
                self.first_value(self.ask("", "", problem.row), f" (row {problem.id})")


def open_environment(settings: Environment) -> EnvironmentFile | None:
    """Read the file of an environment and list its tools; None without a file. Raises ConfigError."""
    if settings.file is None:
        return None
    limits = Limits("environment", int(settings.gib * 2**30), WORKERS, settings.seconds,
                    ("environment.seconds", "environment.gib"))
    own = EnvironmentFile("environment.file", read_file(settings.file, "environment.file"), limits, settings)
    return replace(own, tools=tuple(own.first_value(own.call(list_schemas))))
